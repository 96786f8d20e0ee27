//! The connection to the core, held by two threads with [descriptors of their own](crate::apart).
//!
//! One thread connects and watches the connection, the other wakes the core when it is asked to. Neither calls the
//! driver, or waits for the loader: the program may wait for the first while a library's constructors run.

use crate::activity::Change;
use crate::connection::{Connection, Settings};
use crate::news::{self, News};
use crate::sandbox::Filters;
use crate::{apart, log, state, threads};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;
use rustix::thread::futex;
use std::ffi::c_void;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::{Duration, Instant};
use tally_ipc::layout::notify;
use tally_ipc::{ClientRegion, map, wait};
use tally_preempt::lock::Locked;

/// Between two attempts to find the core again.
pub const RETRY: Duration = Duration::from_millis(250);
/// How often the link thread looks whether the connection is still wanted, until the helper thread has taken it over.
const CHECK: Duration = Duration::from_secs(1);
/// Longest wait of the program for the link thread's first attempt to register; longer than the attempt's own waits.
const FIRST_MAX: Duration = Duration::from_secs(5);
/// Descriptors that the threads need at most at once.
const OWN_DESCRIPTORS: u64 = 16;

/// Longest wait for an answer about filters.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// Requests to the second thread so far: to wake the core or to look for filters.
static ASKED: AtomicU32 = AtomicU32::new(0);
/// Requests to wake the core so far.
static RINGS: AtomicU32 = AtomicU32::new(0);
/// Requests to look for filters so far, and the request that was answered last.
static LOOKS: AtomicU32 = AtomicU32::new(0);
static LOOKED: AtomicU32 = AtomicU32::new(0);
/// The process has seccomp filters that it did not start with; they cannot be removed.
static IS_FILTERED: AtomicBool = AtomicBool::new(false);
/// The seccomp filters of the process when the link was started.
static FILTERS: Locked<Option<Filters>> = Locked::new(None);
/// The core's doorbell; `None` while there is no connection.
static DOORBELL: Locked<Option<OwnedFd>> = Locked::new(None);
/// The result of the first attempt to register, and whether it has ended.
static FIRST: Locked<Option<First>> = Locked::new(None);
static HAS_TRIED: AtomicU32 = AtomicU32::new(0);
static IS_GIVEN_UP: AtomicBool = AtomicBool::new(false);
static WHY: Locked<String> = Locked::new(String::new());
/// This process's region, and the core's answer if there was one.
pub type First = Result<(&'static ClientRegion, Option<Connection>), String>;

/// Have the link's thread wake the core.
#[cold]
pub fn wake_core() {
    RINGS.fetch_add(1, SeqCst);
    ask();
}

/// Tell the core that the client became busy or idle, if it asked to hear.
#[inline]
pub fn report_change(change: Change) {
    if change != Change::None
        && let Some(registration) = state::registration()
        && registration.core.notify.load(SeqCst) & notify::ACTIVITY != 0
    {
        wake_core();
    }
}

fn ask() {
    ASKED.fetch_add(1, SeqCst);
    let _ = futex::wake(&ASKED, futex::Flags::PRIVATE, 1);
}

/// Whether the program has installed a seccomp filter since it began to use CUDA: see [`Filters`]. True, too, if there
/// is no answer in time.
pub fn have_filters_changed() -> bool {
    if FILTERS.with(|filters| filters.is_none()) {
        return false;
    }
    let look = LOOKS.fetch_add(1, SeqCst) + 1;
    ask();
    let start = Instant::now();
    loop {
        let looked = LOOKED.load(SeqCst);
        // At this or a later one's asking.
        if looked.wrapping_sub(look) as i32 >= 0 {
            return IS_FILTERED.load(SeqCst);
        }
        let Some(left) = LOOK_MAX.checked_sub(start.elapsed()) else { return true };
        let left =
            futex::Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let _ = futex::wait(&LOOKED, futex::Flags::PRIVATE, looked, Some(&left));
    }
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
        let why = "its helper thread does not start".to_owned();
        give_up(&why);
        Err(why)
    })
}

/// Give the connection up, and say why.
pub fn give_up(why: &String) {
    WHY.with(|all| all.clone_from(why));
    IS_GIVEN_UP.store(true, SeqCst);
}

pub fn is_given_up() -> bool {
    IS_GIVEN_UP.load(SeqCst)
}

fn run(settings: &Settings) {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    if limit.is_some_and(|limit| limit < OWN_DESCRIPTORS) {
        let limit = limit.unwrap_or_default();
        return refuse(
            settings,
            &format!(
                "the limit on open files (RLIMIT_NOFILE, `ulimit -n`) of {limit} is below {OWN_DESCRIPTORS}"
            ),
        );
    }
    if !apart::leave_table() {
        let why = "the system does not give threads descriptors of their own: allow close_range(2) or unshare(2)";
        return refuse(settings, why);
    }
    log::open();
    let (region, client) = match map::create_client() {
        Ok((region, client)) => (region, client.leak()),
        Err(error) => return refuse(settings, &error.to_string()),
    };
    FILTERS.with(|filters| *filters = Filters::open());
    if let Err(error) = threads::spawn_plain(serve).and_then(|()| apart::serve()) {
        return refuse(settings, &format!("helper thread: {error}"));
    }
    // The socket carries no more messages. When it ends, the core is gone.
    let mut held = None;
    let connect = |held: &mut Option<OwnedFd>| {
        settings.connect(&region, client).map(|(connection, socket, doorbell)| {
            DOORBELL.with(|all| *all = Some(doorbell));
            *held = Some(socket);
            connection
        })
    };
    let first = connect(&mut held).inspect_err(|error| log!("no core yet: {error}")).ok();
    answer(Ok((client, first)));
    while !is_given_up() {
        if let Some(socket) = &held {
            if watch(socket) {
                held = None;
                DOORBELL.with(Option::take);
                news::tell(News::Ended, is_given_up);
            }
            continue;
        }
        wait::nap(RETRY);
        if look_for_filters() {
            // A filter may forbid to connect, and end the process.
            log!(
                "not governed any more: the program has installed a seccomp filter, and the core is gone"
            );
            return state::set_fail_hold(false);
        }
        match connect(&mut held) {
            Ok(connection) => news::tell(News::Connected(Box::new(connection)), is_given_up),
            Err(error) => log!("no core: {error}"),
        }
    }
    drop(held);
    settings.tell_core(&WHY.with(std::mem::take));
}

/// This process is not governed.
fn refuse(settings: &Settings, why: &str) {
    settings.tell_core(why);
    answer(Err(why.into()));
}

fn answer(first: First) {
    FIRST.with(|all| *all = Some(first));
    HAS_TRIED.store(1, SeqCst);
    let _ = futex::wake(&HAS_TRIED, futex::Flags::PRIVATE, 1);
}

/// Wait for the connection to end. `false`: it has not ended yet; call again.
fn watch(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let check = rustix::fs::Timespec { tv_sec: CHECK.as_secs() as i64, tv_nsec: 0 };
    if rustix::event::poll(&mut fds, (!news::is_heard()).then_some(&check)).is_err() {
        wait::nap(RETRY);
        return false;
    }
    !fds[0].revents().is_empty() && has_ended(socket)
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

extern "C" fn serve(_: *mut c_void) -> *mut c_void {
    // SAFETY: a name with a NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"tally-ring".as_ptr()) };
    let mut rung = 0;
    loop {
        let asked = ASKED.load(SeqCst);
        let (rings, looks) = (RINGS.load(SeqCst), LOOKS.load(SeqCst));
        if rings != rung {
            rung = rings;
            DOORBELL.with(|doorbell| {
                if let Some(doorbell) = doorbell {
                    // An eventfd only refuses when it is rung 2^64 times over.
                    let _ = rustix::io::write(doorbell, &1_u64.to_ne_bytes());
                }
            });
        }
        if looks != LOOKED.load(SeqCst) {
            look_for_filters();
            LOOKED.store(looks, SeqCst);
            let _ = futex::wake(&LOOKED, futex::Flags::PRIVATE, i32::MAX as u32);
        }
        let _ = futex::wait(&ASKED, futex::Flags::PRIVATE, asked, None);
    }
}

fn look_for_filters() -> bool {
    let have_changed = FILTERS.with(|filters| filters.as_ref().is_some_and(Filters::have_changed));
    IS_FILTERED.fetch_or(have_changed, SeqCst) || have_changed
}

/// Only in a forked child: neither the threads nor their descriptors are there.
pub fn reset() {
    DOORBELL.reset(None);
    FIRST.reset(None);
    WHY.reset(String::new());
    FILTERS.reset(None);
    IS_FILTERED.store(false, SeqCst);
    for word in [&ASKED, &RINGS, &LOOKS, &LOOKED] {
        word.store(0, SeqCst);
    }
}
