//! Questions that threads of the shim's ask the driver: whether a stream or an event has ended.
//!
//! Asking never waits. The objects asked about must be alive: a thread that destroys a stream or a context, or
//! begins a capture, first removes them from what the asking threads use, and then waits until those threads
//! have left the driver ([`wait_out`]), which takes about a microsecond.

use crate::state;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// Longer than the driver takes to answer a question.
const OUT_MAX: Duration = Duration::from_secs(1);

/// Threads of the shim's that are in the driver with a question, or about to be.
static ASKING: AtomicU32 = AtomicU32::new(0);

/// Let whoever asks leave the driver, after what they went by was taken away. Bounded: there they wait for
/// nothing.
pub fn wait_out() {
    let start = Instant::now();
    while ASKING.load(SeqCst) != 0 && start.elapsed() < OUT_MAX {
        std::thread::yield_now();
    }
}

/// Ask the driver something that it answers at once, by a thread of the shim's, if what is asked about is
/// still there.
pub fn ask<T>(is_there: impl Fn() -> bool, question: impl FnOnce() -> T) -> Option<T> {
    ASKING.fetch_add(1, SeqCst);
    let answer = (!state::is_exiting() && is_there()).then(question);
    ASKING.fetch_sub(1, SeqCst);
    answer
}

/// Only in a forked child: the threads are not there.
pub fn reset() {
    ASKING.store(0, SeqCst);
}
