//! The socket's place: one core at a time, nobody else's folder.
//!
//! A lock file says who serves: the kernel releases the lock however the core
//! ends, so a socket without a lock is a dead core's and is replaced. It is in
//! the admin socket's folder: no container gets that, so none can hold up the
//! next core.

use crate::config::socket_folder;
use crate::error::CoreError;
use crate::links;
use rustix::fd::AsFd;
use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a core that finds a place taken waits for the other to write down its process.
const NAMED_MAX: Duration = Duration::from_millis(300);
/// Longest name of a lock file, without `.lock`; file systems take 255 bytes.
const LOCK_NAME_BYTES_MAX: usize = 240;

/// The right to serve at a path. Kept until the process ends.
#[derive(Debug)]
pub struct Claim {
    path: PathBuf,
    mode: u32,
    /// The socket in whose folder the lock file is, and its permissions.
    beside: (PathBuf, u32),
    lock_path: PathBuf,
    lock: File,
    /// The socket file that was made: its device and inode.
    bound: Cell<Option<Id>>,
}

/// Device and inode of a file.
type Id = (u64, u64);

fn id(about: &Metadata) -> Id {
    (about.dev(), about.ino())
}

/// The live process that a lock file names. A core writes it down as soon as it has the lock; what is there
/// before may be a dead one's.
fn holder(lock: &mut File) -> Option<u32> {
    let end = Instant::now() + NAMED_MAX;
    loop {
        let mut text = String::new();
        let _ = lock.rewind().and_then(|()| lock.read_to_string(&mut text));
        let pid = text.trim().parse().ok().and_then(rustix::process::Pid::from_raw);
        // Another user's process may not be signalled, but is there.
        let lives = |pid| match rustix::process::test_kill_process(pid) {
            Ok(()) => true,
            Err(error) => error == rustix::io::Errno::PERM,
        };
        match pid.filter(|pid| lives(*pid)) {
            Some(pid) => return Some(pid.as_raw_nonzero().get().unsigned_abs()),
            None if Instant::now() >= end => return None,
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn wrong(path: &Path, message: impl Into<String>) -> CoreError {
    CoreError::Socket { path: path.into(), message: message.into() }
}

impl Claim {
    /// Claim `path`: make its folder if need be, for those whom `mode` lets open the socket to
    /// enter; lock, and take a dead core's socket away. The lock file is beside the socket.
    ///
    /// # Errors
    /// If a live core has it or the place cannot be used.
    pub fn take(path: &Path, mode: u32) -> Result<Claim, CoreError> {
        Claim::take_locked_beside(path, mode, path, mode)
    }

    /// Likewise, with the lock file in the folder of another socket, `other`, whose permissions are `other_mode`.
    ///
    /// # Errors
    /// Likewise.
    pub fn take_locked_beside(
        path: &Path,
        mode: u32,
        other: &Path,
        other_mode: u32,
    ) -> Result<Claim, CoreError> {
        // The kernel's limit for the address of a Unix socket.
        if path.as_os_str().len() > 107 {
            return Err(wrong(path, "the path is longer than 107 bytes: choose a shorter one"));
        }
        make_folder(path, mode)?;
        make_folder(other, other_mode)?;
        let lock_path = lock_path(path, other);
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(&lock_path)
            .map_err(|e| wrong(path, format!("lock file {}: {e}", lock_path.display())))?;
        if lock.try_lock().is_err() {
            let is_gone = std::fs::symlink_metadata(path).is_err();
            return Err(CoreError::InUse { path: path.into(), pid: holder(&mut lock), is_gone });
        }
        let _ = lock.set_len(0);
        let _ = lock.rewind();
        let _ = writeln!(lock, "{}", std::process::id());
        clear(path)?;
        let beside = (other.into(), other_mode);
        Ok(Claim { path: path.into(), mode, beside, lock_path, lock, bound: Cell::new(None) })
    }

    /// Whether the socket file is still the one that was made.
    pub fn is_in_place(&self) -> bool {
        let there = std::fs::symlink_metadata(&self.path).ok();
        self.bound.get().is_none() || there.map(|about| id(&about)) == self.bound.get()
    }

    /// Make a socket file anew that somebody took away: a cleaner of temporary files, say.
    ///
    /// # Errors
    /// If another core serves there meanwhile, or the place cannot be used.
    pub fn listen_again(&mut self) -> Result<UnixListener, CoreError> {
        let own = self.lock.metadata().ok().map(|about| id(&about));
        let there = std::fs::symlink_metadata(&self.lock_path).ok();
        if own.is_none() || there.map(|about| id(&about)) != own {
            // The lock file went as well: whoever comes next would lock another.
            let (other, other_mode) = &self.beside;
            let again = Claim::take_locked_beside(&self.path, self.mode, other, *other_mode)?;
            self.bound.set(None);
            *self = again;
        } else {
            make_folder(&self.path, self.mode)?;
            clear(&self.path)?;
        }
        self.listen(self.mode)
    }

    /// Listen, with these permissions from the first moment on.
    ///
    /// # Errors
    /// The error of the system call that failed.
    pub fn listen(&self, mode: u32) -> Result<UnixListener, CoreError> {
        let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
        let bound = UnixListener::bind(&self.path);
        rustix::process::umask(before);
        let listener = bound.map_err(|e| wrong(&self.path, e.to_string()))?;
        // Before others may connect. Fails before Linux 6.16, where each connection may hold descriptors.
        let _ = tally_ipc::rights::allow(listener.as_fd(), false);
        std::fs::set_permissions(&self.path, std::fs::Permissions::from_mode(mode))
            .and_then(|()| listener.set_nonblocking(true))
            .map_err(|e| wrong(&self.path, e.to_string()))?;
        self.bound.set(std::fs::symlink_metadata(&self.path).ok().map(|about| id(&about)));
        Ok(listener)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // The lock file stays: removing it would let two cores lock two files
        // of one name. Nor is another core's socket removed.
        if self.is_in_place() && self.bound.get().is_some() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The lock file of the socket `path` in the folder of the socket `other`: named by the whole path, unless that is
/// its own folder.
fn lock_path(path: &Path, other: &Path) -> PathBuf {
    if path == other {
        return path.with_added_extension("lock");
    }
    let real =
        std::fs::canonicalize(socket_folder(path)).unwrap_or_else(|_| socket_folder(path).into());
    let real = real.join(path.file_name().unwrap_or_default());
    let bytes = real.as_os_str().as_bytes().iter();
    let name: Vec<u8> = bytes.map(|byte| if *byte == b'/' { b'%' } else { *byte }).collect();
    let end = &name[name.len().saturating_sub(LOCK_NAME_BYTES_MAX)..];
    socket_folder(other).join(OsStr::from_bytes(end)).with_added_extension("lock")
}

/// Whether anybody listens there. Does not wait for whoever does.
fn answers(path: &Path) -> bool {
    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connected = SocketAddrUnix::new(path).and_then(|address| {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &address)
    });
    // Its backlog is full.
    matches!(connected, Ok(()) | Err(rustix::io::Errno::AGAIN))
}

/// Take a dead core's socket away.
fn clear(path: &Path) -> Result<(), CoreError> {
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(wrong(path, e.to_string())),
        Ok(m) if !m.file_type().is_socket() => {
            Err(wrong(path, "there is something else than a socket: remove it"))
        }
        // Served without our lock: not a core of this kind, but alive.
        Ok(_) if answers(path) => {
            Err(CoreError::InUse { path: path.into(), pid: None, is_gone: false })
        }
        Ok(_) => std::fs::remove_file(path).map_err(|e| wrong(path, e.to_string())),
    }
}

fn make_folder(path: &Path, mode: u32) -> Result<(), CoreError> {
    let enter = |bits: u32, enter: u32| if mode & bits == 0 { 0 } else { enter };
    let mode = 0o700 | enter(0o060, 0o010) | enter(0o006, 0o001);
    let folder = socket_folder(path);
    if let Some(above) = folder.parent().filter(|_| !folder.exists()) {
        // The folders of both sockets are below it, and each says who may enter.
        make_all(above, 0o711).map_err(|e| wrong(path, format!("{}: {e}", above.display())))?;
    }
    folder_of_ours(folder, mode).map_err(|why| wrong(path, format!("its folder {why}")))?;
    let has = std::fs::metadata(folder).map_or(mode, |about| about.mode());
    let lacks: Vec<_> = [(0o010, "g+x"), (0o001, "o+x")]
        .into_iter()
        .filter_map(|(bit, change)| (mode & bit & !has != 0).then_some(change))
        .collect();
    if !lacks.is_empty() {
        tracing::warn!(
            socket = %path.display(),
            "its `mode` lets others connect, but they may not enter its folder: chmod {} {}",
            lacks.join(","), folder.display()
        );
    }
    Ok(())
}

/// Make a folder, and those above it that are missing, with these permissions whatever the umask is.
fn make_all(folder: &Path, mode: u32) -> std::io::Result<()> {
    if folder.as_os_str().is_empty() || folder.is_dir() {
        return Ok(());
    }
    if let Some(above) = folder.parent() {
        make_all(above, mode)?;
    }
    match std::fs::DirBuilder::new().mode(mode).create(folder) {
        Ok(()) => std::fs::set_permissions(folder, std::fs::Permissions::from_mode(mode)),
        // Another core was faster.
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && folder.is_dir() => Ok(()),
        Err(e) => Err(e),
    }
}

/// Make a folder that nobody else can write to, or see that an existing one is so: in
/// somebody else's, anybody could swap our files for theirs.
///
/// # Errors
/// What is wrong with it and what to do.
pub(crate) fn private_folder(folder: &Path) -> Result<(), String> {
    folder_of_ours(folder, 0o700)
}

fn folder_of_ours(folder: &Path, mode: u32) -> Result<(), String> {
    if let Some(other) = links::owners(folder).first() {
        return Err(format!("lies behind a link of user {other}: choose another place"));
    }
    match std::fs::metadata(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            make_all(folder, mode).map_err(|e| format!("cannot be made: {e}"))
        }
        Err(e) => Err(format!("cannot be used: {e}")),
        Ok(m) if !m.is_dir() => Err("is a file".into()),
        Ok(m) => {
            let own = rustix::process::geteuid().as_raw();
            let sticky = m.mode() & 0o1000 != 0;
            if m.uid() != own && m.uid() != 0 {
                return Err(format!(
                    "belongs to user {}: remove it or choose another place",
                    m.uid()
                ));
            }
            if m.mode() & 0o022 != 0 && !sticky {
                return Err("can be written by others: chmod go-w it".into());
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn one_core_at_a_time_and_a_dead_cores_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/core.sock");
        let claim = Claim::take(&path, 0o600).unwrap();
        let listener = claim.listen(0o600).unwrap();
        assert_eq!(std::fs::metadata(dir.path().join("a/b")).unwrap().mode() & 0o777, 0o700);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let error = Claim::take(&path, 0o600).unwrap_err();
        assert!(
            matches!(error, CoreError::InUse { pid: Some(p), .. } if p == std::process::id()),
            "{error}"
        );
        drop((listener, claim));
        assert!(!path.exists());
        // A core killed by SIGKILL leaves its socket.
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let claim = Claim::take(&path, 0o600).unwrap();
        claim.listen(0o660).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o660);
    }

    #[test]
    fn a_socket_file_that_was_taken_away_is_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/core.sock");
        let mut claim = Claim::take(&path, 0o600).unwrap();
        let _first = claim.listen(0o600).unwrap();
        assert!(claim.is_in_place());
        std::fs::remove_file(&path).unwrap();
        assert!(!claim.is_in_place());
        let error = Claim::take(&path, 0o600).unwrap_err().to_string();
        assert!(error.contains("its socket file is gone") && error.contains("kill"), "{error}");
        let _second = claim.listen_again().unwrap();
        assert!(claim.is_in_place() && UnixStream::connect(&path).is_ok());
        // The whole folder, lock file and all.
        std::fs::remove_dir_all(dir.path().join("a")).unwrap();
        let _third = claim.listen_again().unwrap();
        assert!(matches!(Claim::take(&path, 0o600), Err(CoreError::InUse { .. })));
        // Another core was quicker: it is left alone, also at the end.
        std::fs::remove_dir_all(dir.path().join("a")).unwrap();
        let other = Claim::take(&path, 0o600).unwrap();
        let _fourth = other.listen(0o600).unwrap();
        assert!(!claim.is_in_place());
        assert!(matches!(claim.listen_again(), Err(CoreError::InUse { .. })));
        drop(claim);
        assert!(other.is_in_place());
    }

    #[test]
    fn the_clients_lock_file_is_not_in_the_folder_that_containers_get() {
        let dir = tempfile::tempdir().unwrap();
        let (clients, admin) = (dir.path().join("clients/s"), dir.path().join("admin/s"));
        let take = || Claim::take_locked_beside(&clients, 0o666, &admin, 0o600);
        let mut claim = take().unwrap();
        let _first = claim.listen(0o666).unwrap();
        let names =
            || std::fs::read_dir(socket_folder(&clients)).unwrap().map(|e| e.unwrap().file_name());
        assert_eq!(names().collect::<Vec<_>>(), ["s"]);
        assert_eq!(std::fs::metadata(socket_folder(&admin)).unwrap().mode() & 0o777, 0o700);
        let _admin = Claim::take(&admin, 0o600).unwrap();
        let is_taken = || matches!(take(), Err(CoreError::InUse { pid: Some(_), .. }));
        assert!(is_taken());
        std::fs::remove_dir_all(socket_folder(&clients)).unwrap();
        let _second = claim.listen_again().unwrap();
        assert!(claim.is_in_place() && is_taken());
        drop(claim);
        // What a container leaves there stops no core.
        std::os::unix::fs::symlink("/nonexistent/s", clients.with_added_extension("lock")).unwrap();
        take().unwrap();
        let long = dir.path().join("a".repeat(200)).join("b".repeat(200)).join("s");
        assert!(lock_path(&long, &admin).file_name().unwrap().len() <= 255);
    }

    #[test]
    fn a_dead_process_is_not_named_as_the_one_that_serves() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("core.sock");
        let _claim = Claim::take(&path, 0o600).unwrap();
        let mut dead = std::process::Command::new("true").spawn().unwrap();
        dead.wait().unwrap();
        // As if the winner had not written its own yet.
        std::fs::write(lock_path(&path, &path), format!("{}\n", dead.id())).unwrap();
        let error = Claim::take(&path, 0o600).unwrap_err();
        assert!(matches!(error, CoreError::InUse { pid: None, .. }), "{error}");
        assert!(error.to_string().contains("which process that is is not known"), "{error}");
        // It writes while the loser looks.
        let (to, own) = (lock_path(&path, &path), std::process::id());
        let writing = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            std::fs::write(to, format!("{own}\n")).unwrap();
        });
        let error = Claim::take(&path, 0o600).unwrap_err();
        writing.join().unwrap();
        assert!(matches!(error, CoreError::InUse { pid: Some(pid), .. } if pid == own), "{error}");
    }

    #[test]
    fn who_may_open_the_socket_may_enter_the_folder_that_is_made() {
        let dir = tempfile::tempdir().unwrap();
        // As the systemd unit has it. Of this process, which runs this test alone.
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
        for (mode, folder) in [(0o600, 0o700), (0o660, 0o710), (0o666, 0o711)] {
            let path = dir.path().join(format!("{mode:o}/clients/s"));
            let _claim = Claim::take(&path, mode).unwrap();
            let mode_of = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
            let made = path.parent().unwrap();
            assert_eq!(mode_of(made), folder, "{mode:o}");
            assert_eq!(mode_of(made.parent().unwrap()), 0o711, "{mode:o}");
        }
    }

    #[test]
    fn what_is_not_a_dead_cores_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("core.sock");
        std::fs::write(&path, "precious").unwrap();
        assert!(Claim::take(&path, 0o600).unwrap_err().to_string().contains("remove it"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_file(&path).unwrap();
        let _foreign = UnixListener::bind(&path).unwrap();
        assert!(matches!(Claim::take(&path, 0o600), Err(CoreError::InUse { pid: None, .. })));
        let shared = dir.path().join("shared");
        std::fs::create_dir(&shared).unwrap();
        std::fs::set_permissions(&shared, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Claim::take(&shared.join("s"), 0o600).unwrap_err().to_string().contains("chmod"));
        let long = dir.path().join("x".repeat(120));
        assert!(Claim::take(&long, 0o600).unwrap_err().to_string().contains("107"));
    }
}
