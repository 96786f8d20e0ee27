//! Whose the core at a socket is, before anything that it says is believed: it gets to hold launches, and says where
//! MPS listens.

use rustix::fd::BorrowedFd;
use rustix::net::sockopt::socket_peercred;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Further users that a core may belong to, numbers with commas between: such as that of a core outside of the user
/// namespace of a container, which is seen as 65534.
pub const ENV_CORE_UIDS: &str = "TALLY_CORE_UIDS";

/// Why the core at a socket is not believed.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// A system call failed.
    #[error("{path}: {source}")]
    Os {
        /// What was looked at.
        path: PathBuf,
        source: std::io::Error,
    },
    /// Another user, who is not trusted, serves the socket.
    #[error(
        "{path}: who answers there is user {uid}, neither root nor this user; set {ENV_CORE_UIDS}={uid} to trust it"
    )]
    User { path: PathBuf, uid: u32 },
    /// Somebody else can put another socket there.
    #[error(
        "{folder}, the socket's folder, belongs to user {uid}, neither root nor this user; set {ENV_CORE_UIDS}={uid} to trust it"
    )]
    FolderUser { folder: PathBuf, uid: u32 },
    #[error(
        "{folder}, the socket's folder, can be written by others (mode {mode:o}): chmod go-w it"
    )]
    FolderMode { folder: PathBuf, mode: u32 },
}

/// Whether a core may belong to a user.
fn is_trusted(uid: u32, own: u32, further: &str) -> bool {
    uid == 0 || uid == own || further.split(',').any(|one| one.trim().parse() == Ok(uid))
}

/// See that the core at `path`, to which `socket` is connected, is root's or this user's, and that nobody else could
/// put another one there.
///
/// # Errors
/// Whose it is, and what to do.
pub fn check(path: &Path, socket: BorrowedFd<'_>) -> Result<(), PeerError> {
    let own = rustix::process::getuid().as_raw();
    let further = std::env::var(ENV_CORE_UIDS).unwrap_or_default();
    let os = |path: &Path, source| PeerError::Os { path: path.into(), source };
    let uid = socket_peercred(socket).map_err(|e| os(path, e.into()))?.uid.as_raw();
    if !is_trusted(uid, own, &further) {
        return Err(PeerError::User { path: path.into(), uid });
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let found = std::fs::metadata(folder).map_err(|e| os(folder, e))?;
    if !is_trusted(found.uid(), own, &further) {
        return Err(PeerError::FolderUser { folder: folder.into(), uid: found.uid() });
    }
    // In a sticky one, as /tmp, nobody can replace another's.
    let mode = found.mode() & 0o7777;
    if mode & 0o022 != 0 && mode & 0o1000 == 0 {
        return Err(PeerError::FolderMode { folder: folder.into(), mode });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn roots_ones_own_and_named_users_are_trusted() {
        assert!(is_trusted(0, 1000, "") && is_trusted(1000, 1000, ""));
        assert!(!is_trusted(1001, 1000, "") && !is_trusted(65534, 1000, "6553,655341"));
        assert!(is_trusted(65534, 1000, "7, 65534"));
    }

    #[test]
    fn a_core_of_another_user_is_not_believed_wherever_it_listens() {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
        assert!(
            rustix::process::geteuid().is_root(),
            "this test needs root to act as another user"
        );
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        // Who answers is who listens.
        let other = rustix::process::Uid::from_raw(4_321);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                rustix::thread::set_thread_res_uid(other, other, other).unwrap();
                listen(&listener, 1).unwrap();
            });
        });
        let error = check(&path, UnixStream::connect(&path).unwrap().as_fd()).unwrap_err();
        assert!(matches!(error, PeerError::User { uid: 4_321, .. }), "{error}");
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = UnixListener::bind(&path).unwrap();
        let socket = UnixStream::connect(&path).unwrap();
        let set = |mode| {
            std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(mode)).unwrap();
            check(&path, socket.as_fd())
        };
        assert!(set(0o700).is_ok() && set(0o755).is_ok() && set(0o1777).is_ok());
        for mode in [0o777, 0o720, 0o702] {
            let error = set(mode).unwrap_err().to_string();
            assert!(error.contains(&format!("mode {mode:o}")), "{error}");
        }
    }
}
