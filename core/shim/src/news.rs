//! What the [`helper`](crate::helper) thread is told, and by whom.

use crate::connection::Connection;
use rustix::thread::futex;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;
use tally_ipc::wait;
use tally_preempt::lock::Locked;

/// Between two looks whether it has heard the last news.
const HEARD: Duration = Duration::from_millis(1);

/// What it was told; 0: nothing.
static TOLD: AtomicU32 = AtomicU32::new(0);
/// There is something in [`LATEST`].
pub const NEWS: u32 = 1;
/// The core asks what is still running.
pub const PROBED: u32 = 2;
/// There is a new channel group.
pub const NUDGED: u32 = 4;
/// The latest news of the connection that the helper thread has not taken.
static LATEST: Locked<Option<News>> = Locked::new(None);
/// The helper thread was started and takes news.
static IS_HEARD: AtomicBool = AtomicBool::new(false);

/// What the connection's thread tells.
#[derive(Debug)]
pub enum News {
    /// The core is gone, or has let this client go.
    Ended,
    /// There is a connection now.
    Connected(Box<Connection>),
}

/// Tell it something: bits of [`NEWS`], [`PROBED`], [`NUDGED`].
pub fn notice(what: u32) {
    TOLD.fetch_or(what, SeqCst);
    let _ = futex::wake(&TOLD, futex::Flags::PRIVATE, 1);
}

/// Tell it of the connection, and wait until it has heard, or until nobody wants to know.
pub fn tell(news: News, is_given_up: impl Fn() -> bool) {
    LATEST.with(|latest| *latest = Some(news));
    notice(NEWS);
    while LATEST.with(|latest| latest.is_some()) && !is_given_up() {
        wait::nap(HEARD);
    }
}

/// What it was told of the connection.
pub fn take_latest() -> Option<News> {
    LATEST.with(Option::take)
}

/// Wait until it is told something, at most so long. What it was told.
pub fn sleep(left: Option<Duration>) -> u32 {
    let told = TOLD.swap(0, SeqCst);
    if told != 0 || left.is_some_and(|left| left.is_zero()) {
        return told;
    }
    let left = left.map(|left| futex::Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: i64::from(left.subsec_nanos()),
    });
    let _ = futex::wait(&TOLD, futex::Flags::PRIVATE, 0, left.as_ref());
    TOLD.swap(0, SeqCst)
}

/// The thread has been started.
pub fn begin() {
    IS_HEARD.store(true, SeqCst);
}

/// Whether there is anybody to tell.
pub fn is_heard() -> bool {
    IS_HEARD.load(SeqCst)
}

/// Only in a forked child: the thread is not there.
pub fn reset() {
    TOLD.store(0, SeqCst);
    LATEST.reset(None);
    IS_HEARD.store(false, SeqCst);
}
