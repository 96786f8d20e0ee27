//! The program's exit: no more driver calls, for the driver is about to be torn down.

use crate::{asking, state};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

static IS_WATCHED: AtomicBool = AtomicBool::new(false);

/// Have the shim hear of it. After the driver has registered its own handler, so that ours runs before.
pub fn watch() {
    if !IS_WATCHED.swap(true, SeqCst) {
        before_others();
    }
}

/// See to it that our handler runs before what the driver has registered since: libraries
/// of its own that it loads late (its compiler) end with handlers of theirs, and a thread
/// of ours that were still in one of them would stay there for good.
pub fn before_others() {
    // SAFETY: a function without state, which may run more than once.
    unsafe { libc::atexit(at_exit) };
}

extern "C" fn at_exit() {
    state::begin_exit();
    tally_preempt::program_exits();
    asking::wait_out();
}
