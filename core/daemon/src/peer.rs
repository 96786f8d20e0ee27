//! Which process is at the other end of a socket, and whether it is one of this system or of a container on it.
//!
//! The user number alone does not tell an administrator: root of a container without a user namespace is user 0, too.
//! So for what a user may do, a process in another PID or user namespace than the core's is a stranger whoever it is.
//! Mount namespaces are not compared: services of the init system have their own, the core among them.

use crate::quota::User;
use crate::subordinate::{self, Table};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::io::Read;
use tally_ipc::namespace;

/// Ticks of process start times a second; fixed in the kernel's interface.
const TICKS: u64 = 100;
/// Namespaces within each other; the kernel has no more.
const NAMESPACES_MAX: usize = 33;
/// Longest file of `/proc` read: `status` lists the groups of a process, of which there may be 65 536.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a process counts as being in a container, whatever its user number is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Foreign {
    /// It is in another PID namespace than the core.
    #[error("its PID namespace is not the core's (it is in a container)")]
    PidNamespace,
    /// It is in another user namespace, where user ids mean other users.
    #[error("its user namespace is not the core's (it is in a container)")]
    UserNamespace,
    /// Its namespaces cannot be seen.
    #[error(
        "the core cannot see its namespaces (it has ended, or the core lacks the rights: ask as the core's user)"
    )]
    Unknown,
}

#[derive(Debug)]
pub struct Peer {
    pub uid: u32,
    /// Its process; 0 if that is not visible from here.
    pub pid: u32,
    /// Why it is not one of this system.
    pub foreign: Option<Foreign>,
    /// The container that it is in then.
    container: User,
    /// The process itself; `None` if it has ended.
    pidfd: Option<OwnedFd>,
}

impl Peer {
    /// The process at the other end of a connection that was just accepted.
    ///
    /// # Errors
    /// The error of the system call that failed.
    pub fn of(socket: BorrowedFd<'_>) -> rustix::io::Result<Self> {
        let accepted = clock_gettime(ClockId::Boottime);
        let (pid, uid) = tally_ipc::peer::credentials(socket)?;
        let pidfd = match tally_ipc::pidfd::of_peer(socket) {
            Ok(fd) => Some(fd),
            Err(Errno::NOPROTOOPT | Errno::INVAL) => {
                Pid::from_raw(pid).and_then(|pid| by_number(socket, pid, accepted))
            }
            Err(_) => None,
        };
        let foreign = foreign(pid, uid, pidfd.as_ref());
        let container = match (foreign, &pidfd) {
            (Some(_), Some(pidfd)) => container(pid, pidfd),
            _ => None,
        };
        let container = container.unwrap_or(User::Containers);
        Ok(Peer { uid, pid: pid.max(0) as u32, foreign, container, pidfd })
    }

    /// Who answers for what it does: for a subordinate user, its owner.
    pub fn user(&self) -> User {
        self.user_by(subordinate::table())
    }

    fn user_by(&self, table: &Table) -> User {
        match (self.foreign, self.container) {
            (None, _) => User::Uid(table.owner(self.uid)),
            (Some(_), User::ContainersOf(uid)) => User::ContainersOf(table.owner(uid)),
            (Some(_), container) => container,
        }
    }

    /// The process, to be told of its end. `None` if it has ended already.
    pub fn take_pidfd(&mut self) -> Option<OwnedFd> {
        self.pidfd.take()
    }
}

/// Before Linux 6.5: open the process by its number, which by now may mean another one. That one would have started
/// after the connection was accepted, or have another user; or the connection, whose process is gone, has an end.
fn by_number(socket: BorrowedFd<'_>, pid: Pid, accepted: Timespec) -> Option<OwnedFd> {
    let fd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    let proc = directory(pid.as_raw_nonzero().get())?;
    let started = start_ticks(&file(&proc, "stat")?)?;
    let accepted_ticks =
        accepted.tv_sec as u64 * TICKS + accepted.tv_nsec as u64 / (1_000_000_000 / TICKS);
    (started <= accepted_ticks && !has_ended(&fd) && !has_hung_up(socket)).then_some(fd)
}

fn start_ticks(stat: &str) -> Option<u64> {
    // The name, in parentheses, may contain anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

fn is_ready(fd: BorrowedFd<'_>, what: PollFlags) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut fds = [PollFd::from_borrowed_fd(fd, what)];
    poll(&mut fds, Some(&at_once)).is_err() || fds[0].revents().intersects(what)
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    is_ready(pidfd.as_fd(), PollFlags::IN)
}

fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    is_ready(socket, PollFlags::HUP | PollFlags::RDHUP)
}

fn directory(pid: i32) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, format!("/proc/{pid}"), flags, Mode::empty()).ok()
}

fn file(directory: &OwnedFd, name: &str) -> Option<String> {
    let fd = rustix::fs::openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .ok()?;
    let mut text = Vec::new();
    std::fs::File::from(fd).take(FILE_BYTES_MAX).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

fn foreign(pid: i32, uid: u32, pidfd: Option<&OwnedFd>) -> Option<Foreign> {
    if pid <= 0 {
        return Some(Foreign::PidNamespace);
    }
    let (Some(pidfd), Some(directory)) = (pidfd, directory(pid)) else {
        return Some(Foreign::Unknown);
    };
    let link = |name: &str| rustix::fs::readlinkat(&directory, name, Vec::new()).ok();
    let own = |name: &str| rustix::fs::readlink(format!("/proc/self/{name}"), Vec::new()).ok();
    let (users, pids) = (link("ns/user"), link("ns/pid"));
    let is_near = match (&pids, own("ns/pid")) {
        (Some(its), Some(own)) => Some(*its == own),
        // A core that is not root does not see that of others. The kernel takes milliseconds to write down the status
        // of a process with many groups, so it is read only then.
        _ => is_in_one_pid_namespace(&file(&directory, "status").unwrap_or_default()),
    };
    // While it lives its number is its own, and so is the directory.
    if has_ended(pidfd) {
        return Some(Foreign::Unknown);
    }
    match is_near {
        Some(true) => {}
        Some(false) => return Some(Foreign::PidNamespace),
        None => return Some(Foreign::Unknown),
    }
    match (users, own("ns/user")) {
        (Some(its), Some(own)) if its == own => None,
        (Some(_), Some(_)) => Some(Foreign::UserNamespace),
        // A core that is not root does not see that of others: their numbers are as the kernel translates them.
        _ if uid != 0 => None,
        _ => Some(Foreign::Unknown),
    }
}

/// Of a process's status: whether it has a number in one PID namespace only, from this one inwards.
fn is_in_one_pid_namespace(status: &str) -> Option<bool> {
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    Some(numbers.split_whitespace().count() == 1)
}

fn inode(namespace: &OwnedFd) -> Option<u64> {
    Some(rustix::fs::fstat(namespace).ok()?.st_ino)
}

/// Of a namespace and those that it is in, the outermost one that is not the core's own, which is `own`.
fn outermost(mut namespace: OwnedFd, own: u64) -> Option<OwnedFd> {
    if inode(&namespace)? == own {
        return None;
    }
    for _ in 0..NAMESPACES_MAX {
        let parent = namespace::parent(namespace.as_fd()).ok()?;
        if inode(&parent)? == own {
            return Some(namespace);
        }
        namespace = parent;
    }
    None
}

/// The container that a process is in, such that it and those that it starts cannot be in another one without rights
/// outside of it. `None` if the core may not see it.
fn container(pid: i32, pidfd: &OwnedFd) -> Option<User> {
    let directory = directory(pid)?;
    let open = |at: BorrowedFd<'_>, name: &str| {
        rustix::fs::openat(at, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
    };
    let pids = open(directory.as_fd(), "ns/pid")?;
    let users = open(directory.as_fd(), "ns/user")?;
    if has_ended(pidfd) {
        return None;
    }
    let own = |name| inode(&open(CWD, name)?);
    let own_users = own("/proc/self/ns/user")?;
    // Made with rights of root's: another one could not be made from within it.
    if let Some(pids) = outermost(pids, own("/proc/self/ns/pid")?)
        && inode(&namespace::user_namespace(pids.as_fd()).ok()?)? == own_users
    {
        return inode(&pids).map(User::Container);
    }
    // Everybody may make user namespaces, and PID namespaces in them.
    let users = outermost(users, own_users)?;
    match namespace::owner(users.as_fd()).ok()? {
        0 => inode(&users).map(User::Container),
        uid => Some(User::ContainersOf(uid)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_process_of_this_system_is_not_foreign() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut peer = Peer::of(here.as_fd()).unwrap();
        assert_eq!((peer.pid, peer.foreign), (std::process::id(), None));
        assert!(!has_ended(&peer.take_pidfd().unwrap()));
        drop(there);
        assert!(has_hung_up(here.as_fd()));
    }

    #[test]
    fn a_status_tells_the_pid_namespaces_however_many_groups_it_lists() {
        let own = std::fs::read_to_string("/proc/self/status").unwrap();
        assert_eq!(is_in_one_pid_namespace(&own), Some(true));
        let groups = "4294967294 ".repeat(65_536);
        let of = |numbers: &str| format!("Name:\tx\nGroups:\t{groups}\nNSpid:\t{numbers}\n");
        assert!((of("12 1").len() as u64) < FILE_BYTES_MAX);
        assert_eq!(is_in_one_pid_namespace(&of("12")), Some(true));
        assert_eq!(is_in_one_pid_namespace(&of("12 1")), Some(false));
        assert_eq!(is_in_one_pid_namespace(&groups), None);
    }

    #[test]
    fn quotas_count_subordinate_users_as_their_owner() {
        use crate::quota::{Pool, QuotaExceeded, QuotaPlace};
        let table = Table::parse("u:100000:65536\n", "u:x:1000:1000::/:/bin/sh\n");
        let peer = |uid, foreign, container| Peer { uid, pid: 1, foreign, container, pidfd: None };
        let here = |uid| peer(uid, None, User::Containers).user_by(&table);
        let pool = Pool::new(100, 0);
        let take = |uid| QuotaPlace::take(&pool, here(uid), 4, false);
        let held = [1_000, 100_000, 120_000, 165_535].map(take);
        assert!(held.iter().all(Result::is_ok));
        assert_eq!(take(100_001).unwrap_err(), QuotaExceeded::User(4));
        assert!(take(165_536).is_ok() && take(1_001).is_ok());
        let within =
            |container| peer(100_007, Some(Foreign::UserNamespace), container).user_by(&table);
        assert_eq!(within(User::ContainersOf(100_007)), User::ContainersOf(1_000));
        assert_eq!(within(User::Container(7)), User::Container(7));
    }

    /// Takes the steps before the first `/`, and those of each branch behind it in a process of its own, which
    /// connects.
    const CONNECTS: &str = r#"
import ctypes,os,socket,sys
libc=ctypes.CDLL(None,use_errno=True)
def check(result): assert result==0, os.strerror(ctypes.get_errno())
def in_child(work):
    pid=os.fork()
    if pid==0:
        try: work()
        except BaseException as error: print(error,file=sys.stderr); os._exit(1)
        os._exit(0)
    if os.waitpid(pid,0)[1]: os._exit(1)
def take(steps,then):
    if not steps: return then()
    if steps[0]=='uid':
        os.setgroups([]); os.setresuid(4321,4321,4321); check(libc.prctl(4,1,0,0,0))
    elif steps[0]=='user':
        uid=os.getuid(); check(libc.unshare(0x10000000))
        if uid:
            for name,text in [('setgroups','deny'),('uid_map',f'0 {uid} 1'),('gid_map','0 0 1')]:
                open('/proc/self/'+name,'w').write(text)
    else:
        check(libc.unshare(0x20000000)); return in_child(lambda: take(steps[1:],then))
    take(steps[1:],then)
def connect():
    s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)
first,*branches=[part.split() for part in ' '.join(sys.argv[2:]).split('/')]
def all_():
    for branch in branches: in_child(lambda: take(branch,connect))
take(first,all_)
"#;

    /// Who answers for each process that connects.
    fn users_of(steps: &str) -> Vec<User> {
        assert!(rustix::process::geteuid().is_root(), "this test needs root to make containers");
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        let mut command = std::process::Command::new("python3");
        command.args(["-c", CONNECTS]).arg(&path).args(steps.split_whitespace());
        let mut running = command.spawn().unwrap();
        let mut users = Vec::new();
        let ended = loop {
            match listener.accept() {
                Ok((socket, _)) => users.push(Peer::of(socket.as_fd()).unwrap().user()),
                Err(_) => std::thread::sleep(std::time::Duration::from_millis(1)),
            }
            if let Some(ended) = running.try_wait().unwrap() {
                break ended;
            }
        };
        assert!(ended.success(), "{steps}: {users:?}");
        users
    }

    #[test]
    fn a_container_is_one_whatever_its_root_makes_of_itself() {
        let users = users_of("pid / / pid / user / user pid / uid / uid user pid");
        assert!(matches!(users[0], User::Container(_)), "{users:?}");
        assert_eq!(users, [users[0]; 6]);
    }

    #[test]
    fn containers_of_a_user_without_rights_are_one_together() {
        let users = users_of("uid / / user / user pid / user user / user pid pid");
        let of = User::ContainersOf(4321);
        assert_eq!(users, [User::Uid(4321), of, of, of, of]);
        let users = users_of("/ user / user pid");
        assert!(users.iter().all(|user| matches!(user, User::Container(_))), "root's: {users:?}");
    }

    #[test]
    fn a_number_that_may_mean_another_process_is_not_believed() {
        let (here, there) = UnixStream::pair().unwrap();
        let own = rustix::process::getpid();
        let now = clock_gettime(ClockId::Boottime);
        assert!(by_number(here.as_fd(), own, now).is_some());
        // Accepted before this process started.
        let early = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert!(by_number(here.as_fd(), own, early).is_none());
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        let number = Pid::from_child(&ended);
        ended.wait().unwrap();
        assert!(by_number(here.as_fd(), number, now).is_none());
        drop(there);
        assert!(by_number(here.as_fd(), own, now).is_none(), "its connection is gone");
    }
}
