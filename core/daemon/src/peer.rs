//! Which process is at the other end of a socket, and whether it is one of this system or of a container on it.
//!
//! The user number alone does not tell an administrator: root of a container without a user namespace is user 0, too.
//! So for what a user may do, a process in another PID or user namespace than the core's is a stranger whoever it is.
//! Mount namespaces are not compared: services of the init system have their own, the core among them.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::io::Read;

/// Ticks of process start times a second; fixed in the kernel's interface.
const TICKS: u64 = 100;
/// Longest file of `/proc` read.
const FILE_BYTES_MAX: u64 = 16 << 10;

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

/// A process that connected.
#[derive(Debug)]
pub struct Peer {
    pub uid: u32,
    /// Its process; 0 if that is not visible from here.
    pub pid: u32,
    /// Why it is not one of this system.
    pub foreign: Option<Foreign>,
    /// The process itself; `None` if it has ended.
    pidfd: Option<OwnedFd>,
}

impl Peer {
    /// The process at the other end of a connection that was just accepted.
    ///
    /// # Errors
    /// The system call's.
    pub fn of(socket: BorrowedFd<'_>) -> rustix::io::Result<Self> {
        let accepted = clock_gettime(ClockId::Boottime);
        let credentials = socket_peercred(socket)?;
        let pid = credentials.pid.as_raw_nonzero().get();
        let pidfd = match tally_ipc::pidfd::of_peer(socket) {
            Ok(fd) => Some(fd),
            Err(Errno::NOPROTOOPT | Errno::INVAL) => by_number(socket, credentials.pid, accepted),
            Err(_) => None,
        };
        let foreign = foreign(pid, credentials.uid.as_raw(), pidfd.as_ref());
        Ok(Peer { uid: credentials.uid.as_raw(), pid: pid.max(0) as u32, foreign, pidfd })
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
    let status = file(&directory, "status").unwrap_or_default();
    let namespace = rustix::fs::readlinkat(&directory, "ns/user", Vec::new()).map_err(drop);
    // While it lives its number is its own, and so is the directory.
    if has_ended(pidfd) {
        return Some(Foreign::Unknown);
    }
    // Its number in each PID namespace from this one inwards.
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    match numbers.map(|numbers| numbers.split_whitespace().count()) {
        Some(1) => {}
        Some(_) => return Some(Foreign::PidNamespace),
        None => return Some(Foreign::Unknown),
    }
    let own = rustix::fs::readlink("/proc/self/ns/user", Vec::new()).map_err(drop);
    match (namespace, own) {
        (Ok(its), Ok(own)) if its == own => None,
        (Ok(_), Ok(_)) => Some(Foreign::UserNamespace),
        // A core that is not root does not see that of others: their numbers are as the kernel translates them.
        _ if uid != 0 => None,
        _ => Some(Foreign::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

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
