//! The socket's place: one core at a time, nobody else's folder.
//!
//! A lock file beside the socket says who serves: the kernel releases the lock
//! however the core ends, so a socket without a lock is a dead core's and is
//! replaced.

use crate::error::CoreError;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// The right to serve at a path. Kept until the process ends.
#[derive(Debug)]
pub struct Claim {
    path: PathBuf,
    _lock: File,
}

fn wrong(path: &Path, message: impl Into<String>) -> CoreError {
    CoreError::Socket { path: path.into(), message: message.into() }
}

/// The folder of a socket.
pub fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}

impl Claim {
    /// Claim `path`: make its folder if need be, for those whom `mode` lets open the socket to
    /// enter; lock, and take a dead core's socket away.
    ///
    /// # Errors
    /// If a live core has it or the place cannot be used.
    pub fn take(path: &Path, mode: u32) -> Result<Claim, CoreError> {
        // The kernel's limit for the address of a Unix socket.
        if path.as_os_str().len() > 107 {
            return Err(wrong(path, "the path is longer than 107 bytes: choose a shorter one"));
        }
        make_folder(path, mode)?;
        let lock_path = path.with_added_extension("lock");
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
            let mut text = String::new();
            let _ = lock.read_to_string(&mut text);
            return Err(CoreError::InUse { path: path.into(), pid: text.trim().parse().ok() });
        }
        match std::fs::symlink_metadata(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(wrong(path, e.to_string())),
            Ok(m) if !m.file_type().is_socket() => {
                return Err(wrong(path, "there is something else than a socket: remove it"));
            }
            // Served without our lock: not a core of this kind, but alive.
            Ok(_) if UnixStream::connect(path).is_ok() => {
                return Err(CoreError::InUse { path: path.into(), pid: None });
            }
            Ok(_) => std::fs::remove_file(path).map_err(|e| wrong(path, e.to_string()))?,
        }
        let _ = lock.set_len(0);
        let _ = lock.rewind();
        let _ = writeln!(lock, "{}", std::process::id());
        Ok(Claim { path: path.into(), _lock: lock })
    }

    /// Listen, with these permissions from the first moment on.
    ///
    /// # Errors
    /// The system call's.
    pub fn listen(&self, mode: u32) -> Result<UnixListener, CoreError> {
        let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
        let bound = UnixListener::bind(&self.path);
        rustix::process::umask(before);
        let listener = bound.map_err(|e| wrong(&self.path, e.to_string()))?;
        std::fs::set_permissions(&self.path, std::fs::Permissions::from_mode(mode))
            .and_then(|()| listener.set_nonblocking(true))
            .map_err(|e| wrong(&self.path, e.to_string()))?;
        Ok(listener)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // The lock file stays: removing it would let two cores lock two files
        // of one name.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn make_folder(path: &Path, mode: u32) -> Result<(), CoreError> {
    let enter = |bits: u32, enter: u32| if mode & bits == 0 { 0 } else { enter };
    let mode = 0o700 | enter(0o060, 0o010) | enter(0o006, 0o001);
    let folder = folder(path);
    if let Some(above) = folder.parent().filter(|_| !folder.exists()) {
        // The folders of both sockets are below it, and each says who may enter.
        let mut builder = std::fs::DirBuilder::new();
        builder
            .recursive(true)
            .mode(0o711)
            .create(above)
            .map_err(|e| wrong(path, format!("{}: {e}", above.display())))?;
    }
    folder_of_ours(folder, mode).map_err(|why| wrong(path, format!("its folder {why}")))
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
    match std::fs::metadata(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => std::fs::DirBuilder::new()
            .recursive(true)
            .mode(mode)
            .create(folder)
            .map_err(|e| format!("cannot be made: {e}")),
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
    fn who_may_open_the_socket_may_enter_the_folder_that_is_made() {
        let dir = tempfile::tempdir().unwrap();
        for (mode, folder) in [(0o600, 0o700), (0o660, 0o710), (0o666, 0o711)] {
            let path = dir.path().join(format!("{mode:o}/s"));
            let _claim = Claim::take(&path, mode).unwrap();
            let made = std::fs::metadata(path.parent().unwrap()).unwrap();
            assert_eq!(made.mode() & 0o777 & !folder, 0, "{mode:o}");
            assert_eq!(made.mode() & 0o700, 0o700);
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
