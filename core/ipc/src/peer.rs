//! Whose the core at a socket is, before anything that it says is believed: it gets to hold launches, and says where
//! MPS listens.

use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Further users that a core may belong to, numbers with commas between: such as that of a core outside of the user
/// namespace of a container, which is seen as 65534. Cores of these users may also run in containers.
pub const ENV_CORE_UIDS: &str = "TALLY_CORE_UIDS";

/// Longest file of `/proc` read.
const FILE_BYTES_MAX: u64 = 16 << 10;

/// Why the core at a socket is not believed.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    #[error("{path}: {source}")]
    Os { path: PathBuf, source: std::io::Error },
    /// Another user, who is not trusted, serves the socket.
    #[error(
        "{path}: who answers there is user {uid}, neither root nor this user; set {ENV_CORE_UIDS}={uid} to trust it"
    )]
    User { path: PathBuf, uid: u32 },
    /// A container that can write to the socket's folder could have put its own socket there.
    #[error(
        "{path}: process {pid}, which answers there, runs in a container (a PID namespace below this program's); set {ENV_CORE_UIDS}={uid} to trust it"
    )]
    Container { path: PathBuf, pid: i32, uid: u32 },
    /// Its PID namespace is not known.
    #[error(
        "{path}: cannot see whether process {pid}, which answers there, runs in a container (it has ended, or /proc cannot be read); set {ENV_CORE_UIDS}={uid} to trust it"
    )]
    Unseen { path: PathBuf, pid: i32, uid: u32 },
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

fn is_named(uid: u32, further: &str) -> bool {
    further.split(',').any(|one| one.trim().parse() == Ok(uid))
}

/// Number and user of the process at the other end of a Unix socket; the number is 0 if it is not visible from here.
/// rustix's `socket_peercred` has no valid value for that.
///
/// # Errors
/// The error of the system call that failed.
pub fn credentials(socket: BorrowedFd<'_>) -> rustix::io::Result<(i32, u32)> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    let (fd, into) = (socket.as_raw_fd(), (&raw mut found).cast());
    // SAFETY: `into` has room for the `bytes` bytes that the kernel is told of.
    let done =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, into, &raw mut bytes) };
    if done != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    Ok((found.pid, found.uid))
}

/// Whether a core may belong to a user.
fn is_trusted(uid: u32, own: u32, further: &str) -> bool {
    uid == 0 || uid == own || is_named(uid, further)
}

/// How many PID namespaces a process is in, from that of the mounted `/proc` inwards. `text` is its `status`, or the
/// `fdinfo` of its pidfd. `None` if the process has ended or is not visible there.
fn namespaces(text: &str) -> Option<usize> {
    let mut numbers = text.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_whitespace();
    let first: i32 = numbers.next()?.parse().ok()?;
    (first > 0).then(|| 1 + numbers.count())
}

fn namespaces_in(file: &str) -> Option<usize> {
    let mut text = Vec::new();
    std::fs::File::open(file).ok()?.take(FILE_BYTES_MAX).read_to_end(&mut text).ok()?;
    namespaces(&String::from_utf8_lossy(&text))
}

/// Likewise of the process that answers at a socket.
fn namespaces_of_peer(socket: BorrowedFd<'_>, pid: Pid) -> Option<usize> {
    let pidfd = match crate::pidfd::of_peer(socket) {
        // Before Linux 6.5.
        Err(Errno::NOPROTOOPT) => pidfd_open(pid, PidfdFlags::empty()),
        pidfd => pidfd,
    };
    match pidfd {
        // Its number may mean another process by now.
        Err(Errno::SRCH | Errno::INVAL) => None,
        // Also where `hidepid` hides the processes of other users.
        Ok(fd) => namespaces_in(&format!("/proc/thread-self/fdinfo/{}", fd.as_raw_fd()))
            .or_else(|| namespaces_of_number(pid)),
        Err(_) => namespaces_of_number(pid),
    }
}

fn namespaces_of_number(pid: Pid) -> Option<usize> {
    namespaces_in(&format!("/proc/{}/status", pid.as_raw_nonzero()))
}

/// See that the core at `path`, to which `socket` is connected, is root's or this user's and in no container that this
/// program is not in, and that nobody else could put another one there.
///
/// # Errors
/// Whose it is, and what to do.
pub fn check(path: &Path, socket: BorrowedFd<'_>) -> Result<(), PeerError> {
    check_with(path, socket, &std::env::var(ENV_CORE_UIDS).unwrap_or_default())
}

fn check_with(path: &Path, socket: BorrowedFd<'_>, further: &str) -> Result<(), PeerError> {
    let own = rustix::process::getuid().as_raw();
    let os = |path: &Path, source| PeerError::Os { path: path.into(), source };
    let (pid, uid) = credentials(socket).map_err(|e| os(path, e.into()))?;
    if !is_trusted(uid, own, further) {
        return Err(PeerError::User { path: path.into(), uid });
    }
    // A process in an outer namespace is seen as 0: a core outside of this program's container.
    if let Some(peer) = Pid::from_raw(pid)
        && !is_named(uid, further)
    {
        let Some(its) = namespaces_of_peer(socket, peer) else {
            return Err(PeerError::Unseen { path: path.into(), pid, uid });
        };
        // More than one if `/proc` is that of an outer namespace.
        if its > namespaces_in("/proc/self/status").unwrap_or(1) {
            return Err(PeerError::Container { path: path.into(), pid, uid });
        }
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let found = std::fs::metadata(folder).map_err(|e| os(folder, e))?;
    if !is_trusted(found.uid(), own, further) {
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
    fn pid_namespaces_are_counted_from_the_readers_inwards() {
        assert_eq!(namespaces("Pid:\t7\nNSpid:\t7\nNSpgid:\t7\t1\n"), Some(1));
        assert_eq!(namespaces("Name:\tx\nNSpid:\t4711\t32\t1\n"), Some(3));
        for ended_or_unknown in
            ["", "Pid:\t7\n", "NSpid:\n", "NSpid:\t-1\n", "NSpid:\t0\n", "NSpid:\tx"]
        {
            assert_eq!(namespaces(ended_or_unknown), None, "{ended_or_unknown}");
        }
        assert!(namespaces_in("/proc/self/status").is_some());
        let own = pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
        let file = format!("/proc/thread-self/fdinfo/{}", own.as_raw_fd());
        assert_eq!(namespaces_in(&file), namespaces_in("/proc/self/status"));
    }

    #[test]
    fn a_core_in_a_container_is_not_believed_outside_of_it_unless_its_user_is_named() {
        assert!(rustix::process::geteuid().is_root(), "this test needs root to make a container");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let script = "import socket,sys\ns=socket.socket(socket.AF_UNIX)\ns.bind(sys.argv[1])\ns.listen()\n\
                      print('up',flush=True)\nsys.stdin.read()";
        let mut container = std::process::Command::new("unshare")
            .args(["--pid", "--fork", "python3", "-c", script])
            .arg(&path)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut up = [0; 3];
        container.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
        let socket = UnixStream::connect(&path).unwrap();
        let error = check_with(&path, socket.as_fd(), "4321").unwrap_err();
        assert!(matches!(error, PeerError::Container { uid: 0, .. }), "{error}");
        check_with(&path, socket.as_fd(), "4321,0").unwrap();
        // It ends: its number says nothing any more.
        drop(container.stdin.take());
        container.wait().unwrap();
        let error = check_with(&path, socket.as_fd(), "").unwrap_err();
        assert!(matches!(error, PeerError::Unseen { .. }), "{error}");
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
