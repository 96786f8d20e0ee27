//! The connection to the core, held by two threads whose descriptors are their own.
//!
//! A program closes descriptors that are not its own, opens others under their numbers, and counts on the lowest free
//! number: nothing of the shim's is in its table. Where the system does not allow threads a table of their own (Linux
//! before 5.9, some sandboxes) they share the program's, and what they hold is above [`FD_FLOOR`].
//!
//! One thread connects and watches the connection, the other wakes the core when it is asked to. Neither calls the
//! driver, or waits for the loader: the program may wait for the first while a library's constructors run.

use crate::attach::{Connection, Settings};
use crate::attendant::{self, News};
use crate::lock::Locked;
use crate::sandbox::Filters;
use crate::{log, state, threads};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::thread::futex;
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32};
use std::time::{Duration, Instant};
use tally_ipc::{ClientRegion, map};

/// In the program's table, descriptors are moved above this one: programs that close or reuse the low numbers
/// (shells, daemons) do not meet ours.
pub const FD_FLOOR: i32 = 600;
/// Between two attempts to find the core again.
pub const RETRY: Duration = Duration::from_millis(250);
/// Between two looks whether somebody still wants the connection, until the attendant has it, and whether the program
/// has closed descriptors that are in its table.
const CHECK: Duration = Duration::from_secs(1);
/// Longest wait for the thread's first answer: more than its own waits.
const FIRST_MAX: Duration = Duration::from_secs(5);
/// Descriptors that the threads need at most at once.
const OWN_DESCRIPTORS: u64 = 16;

/// So often the core was to be woken.
static RINGS: AtomicU32 = AtomicU32::new(0);
/// What wakes it.
static DOORBELL: Locked<Option<OwnedFd>> = Locked::new(None);
/// What came of the first attempt, and whether it has ended.
static FIRST: Locked<Option<First>> = Locked::new(None);
static HAS_TRIED: AtomicU32 = AtomicU32::new(0);
static IS_GIVEN_UP: AtomicBool = AtomicBool::new(false);
/// Descriptors in the program's table: a forked child must close them, for else the core would not learn of the
/// parent's end. The region, socket and probe.
static SHARED: [AtomicI32; 3] = [const { AtomicI32::new(-1) }; 3];

thread_local! {
    /// This thread's descriptors are not the program's.
    static IS_APART: Cell<bool> = const { Cell::new(false) };
}

/// This process's region, and the core's answer if there was one.
pub type First = Result<(&'static ClientRegion, Option<Connection>), String>;

/// What is held of a connection: silent, its end is the core's; and what asks what is still running.
struct Held {
    socket: OwnedFd,
    probe: OwnedFd,
}

/// Give the calling thread, one of the shim's own, a table of its own, and those that it starts. False: it cannot be,
/// and nothing has changed.
pub fn leave_table() -> bool {
    const CLOSE_RANGE_UNSHARE: libc::c_uint = 1 << 1;
    // SAFETY: closes all descriptors in a table that only this thread has.
    let result =
        unsafe { libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, CLOSE_RANGE_UNSHARE) };
    IS_APART.set(result == 0);
    result == 0
}

/// Whether the calling thread has left the program's table.
pub fn is_apart() -> bool {
    IS_APART.get()
}

/// Move a descriptor out of the program's way.
pub fn raise(fd: OwnedFd) -> OwnedFd {
    if is_apart() {
        return fd;
    }
    // Stays where it is if the process may not have so many.
    rustix::io::fcntl_dupfd_cloexec(&fd, FD_FLOOR).unwrap_or(fd)
}

/// Wake the core.
#[cold]
pub fn ring() {
    RINGS.fetch_add(1, SeqCst);
    let _ = futex::wake(&RINGS, futex::Flags::PRIVATE, 1);
}

/// Make the region, and register with the core.
///
/// # Errors
/// Why this process cannot be governed.
pub fn start(settings: Settings) -> First {
    IS_GIVEN_UP.store(false, SeqCst);
    HAS_TRIED.store(0, SeqCst);
    threads::spawn("tally-link", move || run(&settings))
        .map_err(|error| format!("helper thread: {error}"))?;
    let start = Instant::now();
    while HAS_TRIED.load(SeqCst) == 0 && start.elapsed() < FIRST_MAX {
        let most = futex::Timespec { tv_sec: 1, tv_nsec: 0 };
        let _ = futex::wait(&HAS_TRIED, futex::Flags::PRIVATE, 0, Some(&most));
    }
    let first = FIRST.with(Option::take);
    first.unwrap_or_else(|| {
        give_up();
        Err("its helper thread does not start".into())
    })
}

/// Nobody wants the connection.
pub fn give_up() {
    IS_GIVEN_UP.store(true, SeqCst);
}

/// See [`give_up`].
pub fn is_given_up() -> bool {
    IS_GIVEN_UP.load(SeqCst)
}

fn run(settings: &Settings) {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let is_apart = limit.is_none_or(|limit| limit >= OWN_DESCRIPTORS) && leave_table();
    log::open();
    let made = match (is_apart, crate::attach::descriptors_missing()) {
        (false, Some(missing)) => Err(missing),
        _ => map::create_client().map_err(|error| error.to_string()),
    };
    let (region, client) = match made {
        Ok((region, client)) => (raise(region), client.leak()),
        Err(error) => return answer(Err(error)),
    };
    let Ok(inode) = rustix::fs::fstat(&region) else {
        return answer(Err("the region's descriptor is not one".into()));
    };
    let inode = (inode.st_dev, inode.st_ino);
    note(0, &region);
    let filters = Filters::open();
    if let Err(error) = threads::spawn_plain(ring_when_asked) {
        return answer(Err(format!("helper thread: {error}")));
    }
    let mut held = None;
    let connect = |held: &mut Option<Held>| {
        settings.connect(&region, client).map(|(connection, socket, probe, doorbell)| {
            note(1, &socket);
            note(2, &probe);
            DOORBELL.with(|all| *all = Some(doorbell));
            *held = Some(Held { socket, probe });
            connection
        })
    };
    let first = connect(&mut held).inspect_err(|error| log!("no core yet: {error}")).ok();
    answer(Ok((client, first)));
    while !is_given_up() {
        if let Some(connection) = &held {
            if watch(connection) {
                forget(held.take());
                attendant::tell(News::Ended);
            }
            continue;
        }
        threads::nap(RETRY);
        let stat = rustix::fs::fstat(&region);
        if !stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == inode) {
            // In the program's table, which closed it: no core can be shown it again, and holding launches would
            // hold them for ever.
            log!("the region's descriptor was closed by the program: not governed any more");
            std::mem::forget(region);
            return state::set_fail_hold(false);
        }
        if filters.as_ref().is_some_and(Filters::have_changed) {
            // A filter may forbid to connect, and end the process.
            log!(
                "not governed any more: the program has installed a seccomp filter, and the core is gone"
            );
            return state::set_fail_hold(false);
        }
        match connect(&mut held) {
            Ok(connection) => attendant::tell(News::Connected(Box::new(connection))),
            Err(error) => log!("no core: {error}"),
        }
    }
}

fn answer(first: First) {
    FIRST.with(|all| *all = Some(first));
    HAS_TRIED.store(1, SeqCst);
    let _ = futex::wake(&HAS_TRIED, futex::Flags::PRIVATE, 1);
}

/// Wait for something to do. True: the connection has ended.
fn watch(held: &Held) -> bool {
    let mut fds =
        [PollFd::new(&held.socket, PollFlags::IN), PollFd::new(&held.probe, PollFlags::IN)];
    let check = rustix::fs::Timespec { tv_sec: CHECK.as_secs() as i64, tv_nsec: 0 };
    let is_settled = is_apart() && attendant::is_there();
    if rustix::event::poll(&mut fds, (!is_settled).then_some(&check)).is_err() {
        threads::nap(RETRY);
        return false;
    }
    let [socket, probe] = fds.each_ref().map(PollFd::revents);
    if probe.contains(PollFlags::IN) {
        drain(&held.probe);
        attendant::probed();
    }
    // The core closes its end of the probe when it lets go, and when it dies.
    (socket | probe).contains(PollFlags::NVAL)
        || probe.contains(PollFlags::HUP)
        || (!socket.is_empty() && has_ended(&held.socket))
}

/// The socket says something: its end, or bytes that mean nothing.
fn has_ended(socket: &OwnedFd) -> bool {
    let mut bytes = [0; 256];
    match rustix::net::recv(socket, &mut bytes[..], rustix::net::RecvFlags::DONTWAIT) {
        Ok((_, n)) => n == 0,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => false,
        Err(_) => true,
    }
}

fn forget(held: Option<Held>) {
    // Numbers first: a fork in between must not close a stranger's descriptor.
    SHARED[1..].iter().for_each(|number| number.store(-1, Release));
    let doorbell = DOORBELL.with(Option::take);
    let all = held.into_iter().flat_map(|held| [held.socket, held.probe]).chain(doorbell);
    for fd in all {
        // Closed by the program already, whose table it is? Then the number is not ours to close.
        if !is_apart() && rustix::io::fcntl_getfd(&fd).is_err() {
            std::mem::forget(fd);
        }
    }
}

fn note(which: usize, fd: &OwnedFd) {
    if !is_apart() {
        SHARED[which].store(fd.as_raw_fd(), Release);
    }
}

extern "C" fn ring_when_asked(_: *mut c_void) -> *mut c_void {
    // SAFETY: a name with a NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"tally-ring".as_ptr()) };
    let mut seen = 0;
    loop {
        let rings = RINGS.load(SeqCst);
        if rings == seen {
            let _ = futex::wait(&RINGS, futex::Flags::PRIVATE, seen, None);
            continue;
        }
        seen = rings;
        DOORBELL.with(|doorbell| {
            if let Some(doorbell) = doorbell {
                // An eventfd only refuses when it is rung 2^64 times over.
                let _ = rustix::io::write(doorbell, &1_u64.to_ne_bytes());
            }
        });
    }
}

fn drain(readable: &OwnedFd) {
    // It does not block; how often it was written does not matter.
    let _ = rustix::io::read(readable, &mut [0_u8; 4096]);
}

/// Only in a forked child: the threads are not there, and descriptors only where they were in the program's table.
pub fn reset() {
    for number in &SHARED {
        let number = number.swap(-1, SeqCst);
        if number >= 0 {
            // SAFETY: the parent's, of which this process has a copy of its own.
            unsafe { rustix::io::close(number) };
        }
    }
    DOORBELL.reset(None);
    FIRST.reset(None);
    RINGS.store(0, Relaxed);
}
