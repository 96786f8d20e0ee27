//! Rewritten images on disk, for the next start of a program: `$XDG_CACHE_HOME/tally/forms`, else
//! `~/.cache/tally/forms`, one file an image and form, named by its [`Key`].
//!
//! Nothing of closed libraries is ever written, whatever the switch says. What is read is taken
//! only as it was written (a digest), by this user, in a folder that nobody else may write to;
//! anything else, and any failure, means that the form is made again. Files are opened by threads with descriptors of
//! their own. On the worker's thread only.

use crate::host::{self, host, log};
use crate::vendor::is_vendor;
use rustix::fd::OwnedFd;
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_NOW};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime};
use tally_rewriter::disk_cache::{self as format, Key};
use tally_rewriter::{KernelForm, Rewritten, TransformRefusal, image};

/// Forms of smaller images are made about as fast as they are found.
const IMAGE_BYTES_MIN: usize = 32 << 10;
/// Larger files are not read.
const FILE_BYTES_MAX: u64 = 1 << 30;
const ENDING: &str = ".form";
const UNFINISHED: &str = ".new-";
/// What was not finished by then was left by a program that died.
const UNFINISHED_FOR: Duration = Duration::from_secs(3600);

/// The most bytes that may lie there; 0: nothing is read or written.
static BYTES_MAX: AtomicU64 = AtomicU64::new(0);

/// A core took this client on.
pub fn configure(mib_max: u32) {
    BYTES_MAX.store(u64::from(mib_max) << 20, Relaxed);
}

/// [`image::rewrite`] of all kernels, or what is left of an earlier one. `library` holds or
/// loaded the image, if that is known.
///
/// # Errors
/// Why nothing of the image can be transformed.
pub fn rewrite(
    bytes: &[u8],
    arch: u32,
    form: KernelForm,
    library: Option<&str>,
) -> Result<Rewritten, TransformRefusal> {
    let bytes_max = BYTES_MAX.load(Relaxed);
    let is_kept = bytes_max != 0 && bytes.len() >= IMAGE_BYTES_MIN && !is_vendor("", library);
    if is_kept {
        rewrite_in(place, bytes_max, bytes, arch, form)
    } else {
        image::rewrite(bytes, arch, form, None)
    }
}

/// The folder, and the one below which it must be: what is the user's to make is not made.
type CacheFolder = (PathBuf, PathBuf);

/// What an earlier run has left.
enum Left {
    /// Files cannot be looked at, and why, if that is worth telling.
    Unknown(Option<String>),
    Nothing,
    File(Vec<u8>),
}

fn rewrite_in(
    place: impl FnOnce() -> Option<CacheFolder> + Send + 'static,
    bytes_max: u64,
    bytes: &[u8],
    arch: u32,
    form: KernelForm,
) -> Result<Rewritten, TransformRefusal> {
    let key = Key::new(bytes, arch, form);
    let name = format!("{key}{ENDING}");
    let looked_for = name.clone();
    let looked = host::run_apart(move || {
        let Some((below, path)) = place() else { return (None, Left::Unknown(None)) };
        let left = match open_folder(&below, &path) {
            Err(error) => Left::Unknown(Some(format!("{}: {error}", path.display()))),
            Ok(folder) => read(&folder, &looked_for).map_or(Left::Nothing, Left::File),
        };
        (Some((below, path)), left)
    });
    let (place, left) = looked.unwrap_or((None, Left::Unknown(None)));
    if let Left::File(file) = &left
        && let Some(found) = format::from_bytes(&key, file)
    {
        return Ok(found);
    }
    if let Left::Unknown(Some(error)) = &left {
        log!("transformed forms are not kept in {error}");
    }
    let rewritten = image::rewrite(bytes, arch, form, None)?;
    let names = rewritten.kernels.iter().map(|k| &k.name);
    let names = names.chain(rewritten.refused.iter().map(|(name, _)| name));
    let is_own = names.into_iter().all(|name| !is_vendor(name, None));
    if let (Some((below, path)), Left::Nothing | Left::File(_), true) = (place, left, is_own) {
        let file = format::to_bytes(&key, &rewritten);
        if file.len() as u64 <= bytes_max && !host().have_filters_changed() {
            let written = host::run_apart(move || {
                let folder = open_folder(&below, &path)?;
                write(&folder, &name, &file).and_then(|()| make_room(&folder, bytes_max))
            });
            if let Some(Err(error)) = written {
                log!("a transformed form is not kept for later: {error}");
            }
        }
    }
    Ok(rewritten)
}

/// The folder, by the environment that the program was started with: another thread may change the present one
/// while it is read.
fn place() -> Option<CacheFolder> {
    let started_with = std::fs::read("/proc/self/environ").ok()?;
    let absolute = |name: &str| {
        let value = started_with
            .split(|b| *b == 0)
            .find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
        value.map(|v| PathBuf::from(OsStr::from_bytes(v))).filter(|p| p.is_absolute())
    };
    let (below, cache) = match absolute("XDG_CACHE_HOME") {
        Some(cache) => (cache.parent()?.to_owned(), cache),
        None => {
            let home = absolute("HOME")?;
            let cache = home.join(".cache");
            (home, cache)
        }
    };
    Some((below, cache.join("tally").join("forms")))
}

/// The folder, made if it is not there but that it is to lie `below` is.
///
/// # Errors
/// The system's, or others may write to it.
fn open_folder(below: &Path, path: &Path) -> io::Result<OwnedFd> {
    if !below.is_dir() {
        return Err(io::Error::other(format!("{} is not there", below.display())));
    }
    let mut builder = std::fs::DirBuilder::new();
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(path)?;
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = fs::open(path, flags, Mode::empty())?;
    let stat = fs::fstat(&folder)?;
    if stat.st_uid != rustix::process::geteuid().as_raw() || stat.st_mode & 0o022 != 0 {
        return Err(io::Error::other("it must be this user's, and nobody else's to write to"));
    }
    Ok(folder)
}

/// Marks it as used last now.
fn read(folder: &OwnedFd, name: &str) -> Option<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = fs::openat(folder, name, flags, Mode::empty()).ok()?;
    let stat = fs::fstat(&file).ok()?;
    let is_ours = stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o022 == 0;
    let is_plain = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let length = u64::try_from(stat.st_size).ok().filter(|n| *n <= FILE_BYTES_MAX)?;
    let mut bytes = Vec::new();
    (is_ours && is_plain).then_some(())?;
    File::from(file).take(length).read_to_end(&mut bytes).ok()?;
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let now = Timestamps { last_access: now, last_modification: now };
    let _ = fs::utimensat(folder, name, &now, AtFlags::SYMLINK_NOFOLLOW);
    Some(bytes)
}

/// Whole or not at all, whoever else writes the same.
fn write(folder: &OwnedFd, name: &str, bytes: &[u8]) -> io::Result<()> {
    let unfinished = format!("{UNFINISHED}{}-{name}", std::process::id());
    let flags =
        OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = fs::openat(folder, &*unfinished, flags, Mode::RUSR | Mode::WUSR)?;
    let written = File::from(file)
        .write_all(bytes)
        .and_then(|()| Ok(fs::renameat(folder, &*unfinished, folder, name)?));
    if written.is_err() {
        let _ = fs::unlinkat(folder, &*unfinished, AtFlags::empty());
    }
    written
}

/// Drop those that were not used for longest, until the rest is within the bound.
fn make_room(folder: &OwnedFd, bytes_max: u64) -> io::Result<()> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut all = Vec::new();
    for entry in fs::Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let text = name.to_string_lossy();
        let Ok(stat) = fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        let used = Duration::from_secs(u64::try_from(stat.st_mtime).unwrap_or(0));
        if text.starts_with(UNFINISHED) && now.saturating_sub(used) > UNFINISHED_FOR {
            let _ = fs::unlinkat(folder, name, AtFlags::empty());
        } else if text.ends_with(ENDING) && !text.starts_with('.') {
            let bytes = u64::try_from(stat.st_size).unwrap_or(0);
            all.push(((stat.st_mtime, stat.st_mtime_nsec), bytes, name.to_owned()));
        }
    }
    all.sort();
    let mut bytes: u64 = all.iter().map(|(_, bytes, _)| bytes).sum();
    for (_, of_one, name) in all {
        if bytes <= bytes_max {
            break;
        }
        fs::unlinkat(folder, name.as_c_str(), AtFlags::empty())?;
        bytes -= of_one;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake;
    use std::os::unix::fs::PermissionsExt;

    fn folder_at(path: &Path) -> OwnedFd {
        let below = path.ancestors().find(|folder| folder.is_dir()).expect("the root is there");
        open_folder(below, path).expect("a folder of our own")
    }

    fn names(path: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(path).unwrap();
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_written_is_read_and_nobody_elses() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tally").join("forms");
        let folder = folder_at(&path);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(read(&folder, "a.form"), None);
        write(&folder, "a.form", b"one").unwrap();
        write(&folder, "a.form", b"two").unwrap();
        assert_eq!(read(&folder, "a.form").as_deref(), Some(&b"two"[..]));
        assert_eq!(names(&path), ["a.form"], "nothing unfinished is left");
        let set = |path: &Path, mode| {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        };
        set(&path.join("a.form"), 0o622);
        assert_eq!(read(&folder, "a.form"), None, "others may have written it");
        std::os::unix::fs::symlink("a.form", path.join("b.form")).unwrap();
        assert_eq!(read(&folder, "b.form"), None, "a link");
        rustix::fs::mknodat(&folder, "c.form", FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(read(&folder, "c.form"), None, "and nobody waits for a pipe's other end");
        set(&path, 0o777);
        assert!(open_folder(dir.path(), &path).is_err(), "others may write to the folder");
    }

    #[test]
    fn a_home_that_is_not_there_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("nobody");
        assert!(open_folder(&home, &home.join(".cache/tally/forms")).is_err());
        assert!(!home.exists());
    }

    #[test]
    fn images_with_a_kernel_of_closed_libraries_are_not_kept() {
        const PTX: &str = "
            .version 7.0\n.target sm_75\n.address_size 64\n
            .visible .entry mine(.param .u64 p) { .reg .b32 %r<2>; mov.u32 %r1, %ctaid.x; ret; }\n
            .visible .entry NAME(.param .u64 p) { .reg .b32 %r<2>; mov.u32 %r1, %ctaid.x; ret; }\n";
        fake::start();
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().parent().unwrap().to_owned();
        let place = (below, dir.path().to_owned());
        let transformed = |name: &str| {
            let ptx = PTX.replace("NAME", name);
            let place = place.clone();
            let made =
                rewrite_in(|| Some(place), 1 << 20, ptx.as_bytes(), 75, KernelForm::ByClaims);
            let made = made.unwrap();
            assert_eq!(made.kernels.len(), 2, "{:?}", made.refused);
            made
        };
        transformed("cublas_something");
        assert_eq!(names(dir.path()), Vec::<String>::new());
        let made = transformed("something");
        assert_eq!(names(dir.path()).len(), 1);
        assert_eq!(transformed("something"), made, "found is what was made");
    }

    #[test]
    fn those_not_used_for_longest_make_room() {
        let dir = tempfile::tempdir().unwrap();
        let folder = folder_at(dir.path());
        let age = |name: &str, s: i64| {
            let then = Timespec { tv_sec: 1_000_000 + s, tv_nsec: 0 };
            let then = Timestamps { last_access: then, last_modification: then };
            fs::utimensat(&folder, name, &then, AtFlags::empty()).unwrap();
        };
        for (i, name) in
            ["a.form", "b.form", "c.form", "not ours", ".new-1-a.form"].iter().enumerate()
        {
            write(&folder, name, &[0; 100]).unwrap();
            age(name, i as i64);
        }
        age("a.form", 100);
        make_room(&folder, 250).unwrap();
        assert_eq!(names(dir.path()), ["a.form", "c.form", "not ours"]);
        make_room(&folder, 0).unwrap();
        assert_eq!(names(dir.path()), ["not ours"]);
    }
}
