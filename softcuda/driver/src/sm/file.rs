//! Opens the device file, or makes it: whole in a temporary file first, then
//! linked into place, so that nobody ever maps a half-made one.

use super::layout::{Device, MAGIC, SMS_MAX, VERSION};
use super::lock;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Relaxed, Release};

/// What the device should be if this process is the one that makes it.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// SMs, `None` for the default.
    pub sms: Option<u32>,
    /// Device memory, `None` for the default.
    pub memory_bytes: Option<u64>,
}

/// Why a process could not get on the device.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The file could not be made, opened or mapped.
    #[error("device file {path}: {what}: {source}")]
    Io { path: PathBuf, what: &'static str, source: io::Error },
    /// The file is not a device of this version.
    #[error("device file {path} is not usable ({why}); remove it, or set TALLY_SOFTCUDA_DEVICE")]
    Foreign {
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// No row for another process.
    #[error("device file {path}: all {limit} process rows are taken")]
    Full {
        path: PathBuf,
        /// How many rows there are.
        limit: usize,
    },
}

const TRIES_MAX: u32 = 100;

/// Maps the device at `path`, making it first if it is not there.
pub(super) fn open(path: &Path, wish: Wish) -> Result<&'static Device, AttachError> {
    let fail = |what| move |source| AttachError::Io { path: path.to_owned(), what, source };
    for _ in 0..TRIES_MAX {
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path);
        match opened {
            Ok(file) => return map_checked(&file, path),
            Err(e) if e.kind() == io::ErrorKind::NotFound => create(path, wish)?,
            Err(e) => return Err(fail("open")(e)),
        }
    }
    Err(fail("open")(io::Error::other("it keeps vanishing")))
}

/// Makes the file under `path` unless somebody else was faster.
fn create(path: &Path, wish: Wish) -> Result<(), AttachError> {
    let fail = |what| move |source| AttachError::Io { path: path.to_owned(), what, source };
    let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (file, temporary) = unnamed_file(dir).map_err(fail("make a temporary file beside"))?;
    file.set_len(size_of::<Device>() as u64).map_err(fail("size"))?;
    let device = map(&file).map_err(fail("map"))?;
    lock::init(&device.mutex.0).map_err(fail("make the lock of"))?;
    reset(device, wish);
    device.next_ticket.store(1, Relaxed);
    device.bytes.store(size_of::<Device>() as u32, Relaxed);
    device.version.store(VERSION, Relaxed);
    device.magic.store(MAGIC, Release);
    // SAFETY: `device` came from `map` just now, with this length, and is not
    // used after this.
    unsafe { libc::munmap(std::ptr::from_ref(device) as *mut _, size_of::<Device>()) };
    match link(&file, temporary.as_deref(), path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(fail("link")(e)),
        _ => Ok(()),
    }
}

/// A file without a name, so that nothing is left behind if its maker is
/// killed; with a temporary one where the file system knows no other way.
fn unnamed_file(dir: &Path) -> io::Result<(File, Option<PathBuf>)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    let unnamed = options.clone().custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC).open(dir);
    match unnamed {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            let name = dir.join(format!(".tally-softcuda.{}", std::process::id()));
            let file = options.create(true).custom_flags(libc::O_CLOEXEC).open(&name)?;
            Ok((file, Some(name)))
        }
        other => Ok((other?, None)),
    }
}

/// Gives `file` the name `path`, unless there is such a file.
fn link(file: &File, temporary: Option<&Path>, path: &Path) -> io::Result<()> {
    if let Some(temporary) = temporary {
        let linked = std::fs::hard_link(temporary, path);
        std::fs::remove_file(temporary)?;
        return linked;
    }
    let from = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let to = CString::new(path.as_os_str().as_encoded_bytes())?;
    // SAFETY: both paths are valid C strings for the duration of the call.
    let rc = unsafe {
        let here = libc::AT_FDCWD;
        libc::linkat(here, from.as_ptr(), here, to.as_ptr(), libc::AT_SYMLINK_FOLLOW)
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Gives the device its size. Called for a new file, and under the lock for an
/// old one that no living process uses.
pub(super) fn reset(device: &Device, wish: Wish) {
    let cpus = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let sms = wish.sms.unwrap_or(cpus).clamp(1, SMS_MAX as u32);
    device.sms.store(sms, Relaxed);
    let memory = wish.memory_bytes.unwrap_or(crate::config::MEMORY_BYTES_DEFAULT);
    device.memory_bytes.store(memory, Relaxed);
    device.first_waiting.iter().for_each(|first| first.0.store(u64::MAX, Relaxed));
}

fn map(file: &File) -> io::Result<&'static Device> {
    let len = size_of::<Device>();
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new shared mapping of a file that is long enough (the caller
    // checked or set its length); it aliases no Rust object.
    let at = unsafe {
        libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping is page aligned, `len` long, never unmapped while in
    // use, and every bit pattern is a valid `Device`.
    Ok(unsafe { &*at.cast::<Device>() })
}

fn map_checked(file: &File, path: &Path) -> Result<&'static Device, AttachError> {
    let fail = |what| move |source| AttachError::Io { path: path.to_owned(), what, source };
    let foreign = |why: String| AttachError::Foreign { path: path.to_owned(), why };
    let meta = file.metadata().map_err(fail("stat"))?;
    // SAFETY: geteuid has no preconditions and cannot fail.
    let uid = unsafe { libc::geteuid() };
    if !meta.is_file() || meta.uid() != uid {
        return Err(foreign(format!("it belongs to user {}, not {uid}", meta.uid())));
    }
    let expected = size_of::<Device>() as u64;
    if meta.len() != expected {
        return Err(foreign(format!("it has {} bytes instead of {expected}", meta.len())));
    }
    let device = map(file).map_err(fail("map"))?;
    let (magic, version) = (device.magic.load(Relaxed), device.version.load(Relaxed));
    let (bytes, sms) = (device.bytes.load(Relaxed), device.sms.load(Relaxed));
    if magic != MAGIC || version != VERSION || u64::from(bytes) != expected {
        return Err(foreign(format!("magic {magic:#x}, version {version}, {bytes} bytes")));
    }
    if sms == 0 || sms as usize > SMS_MAX {
        return Err(foreign(format!("{sms} SMs")));
    }
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_way_of_making_it_gives_the_name_once() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("device");
        for named in [false, true] {
            let _ = std::fs::remove_file(&path);
            let (mut file, mut temporary) = unnamed_file(dir.path()).unwrap();
            if named {
                let name = dir.path().join("temporary");
                file = File::create(&name).unwrap();
                temporary = Some(name);
            }
            link(&file, temporary.as_deref(), &path).unwrap();
            let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().collect();
            assert_eq!(names.len(), 1);
            assert_eq!(names[0].path(), path);
        }
        let (file, temporary) = unnamed_file(dir.path()).unwrap();
        let again = link(&file, temporary.as_deref(), &path).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
    }
}
