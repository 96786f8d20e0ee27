//! Which streams the program is capturing.
//!
//! A launch into a capturing stream is recorded, not run: nothing of ours may be
//! done to that stream, and no launch into it may wait. The guard also keeps apart
//! from captures what the shim puts into streams beside the program's own launches
//! ([`linger`](crate::linger)); it is held over no call of the driver that may wait.

use crate::{asking, quiesce, state};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicUsize};
use tally_preempt::cuda::{CAPTURE_STATUS_NONE, CuResult, Ptr, STREAM_PER_THREAD, SUCCESS, driver};
use tally_preempt::lock::Lock;

/// Held while a capture begins or ends, and while the shim puts work of its own into a stream.
pub static GUARD: Lock = Lock::new();
/// Captures under way, and `NESTING`.
static FAST_PATH_BLOCKERS: AtomicU32 = AtomicU32::new(0);
/// Another interposer stands between us and the driver: launches take the slow
/// path, which tells a launch within a launch.
const NESTING: u32 = 1 << 31;
/// Why launches take the slow path: the shim loads code or a thread makes a launch in parts, for which they
/// wait; or streams are to wait for launches on some of the SMs.
const CLOSED: [u32; 3] = [1 << 30, 1 << 29, 1 << 28];
/// Captures remembered by stream; more than these are never believed to end.
const CAPTURES_MAX: usize = 64;
/// Streams under capture; written under the guard.
static STREAMS: [AtomicUsize; CAPTURES_MAX] = [const { AtomicUsize::new(0) }; CAPTURES_MAX];

/// Whether any stream of the process is capturing.
pub fn is_active() -> bool {
    FAST_PATH_BLOCKERS.load(SeqCst) & !(NESTING | CLOSED[0] | CLOSED[1] | CLOSED[2]) != 0
}

/// Whether launches may take the fast path.
#[inline(always)]
pub fn allows_fast_path() -> bool {
    FAST_PATH_BLOCKERS.load(SeqCst) == 0
}

/// Another interposer stands before the driver: no fast path from now on.
pub fn set_nesting() {
    FAST_PATH_BLOCKERS.fetch_or(NESTING, SeqCst);
}

/// Close the fast path for one of the reasons, or open it again.
pub fn close_fast_path(reason: usize, is_closed: bool) {
    let bit = CLOSED[reason % CLOSED.len()];
    if is_closed {
        FAST_PATH_BLOCKERS.fetch_or(bit, SeqCst);
    } else {
        FAST_PATH_BLOCKERS.fetch_and(!bit, SeqCst);
    }
}

/// Whether this stream (an explicit handle) is.
pub fn is_capturing(stream: usize) -> bool {
    let mut status = CAPTURE_STATUS_NONE;
    let Some(f) = driver().stream_is_capturing else { return false };
    // SAFETY: the stream that the program uses now; a valid out-pointer.
    let result = unsafe { f(stream as Ptr, &mut status) };
    result == SUCCESS && status != CAPTURE_STATUS_NONE
}

/// What tells a stream (an explicit handle) from all others of the process.
pub fn identity(stream: usize) -> usize {
    if stream == STREAM_PER_THREAD {
        // Every thread has its own; no handle has the top bit.
        state::thread_token() as usize | 1 << 63
    } else {
        stream
    }
}

/// Begin a capture of `stream` by calling the driver, which may keep the calling thread waiting.
pub fn begin(stream: usize, real: impl FnOnce() -> CuResult) -> CuResult {
    {
        let _guard = GUARD.lock();
        // First: from now on no thread of the shim's asks for a stream, nor puts anything into one.
        FAST_PATH_BLOCKERS.fetch_add(1, SeqCst);
    }
    asking::wait_out();
    // A launch on some of the SMs that comes later joins at once.
    quiesce::join();
    let result = real();
    if result == SUCCESS {
        let _guard = GUARD.lock();
        remember(stream);
    } else {
        FAST_PATH_BLOCKERS.fetch_sub(1, SeqCst);
    }
    result
}

/// End one by calling the driver. It may fail and still end it, or not.
pub fn end(stream: usize, real: impl FnOnce() -> CuResult) -> CuResult {
    let result = real();
    if result == SUCCESS || !is_capturing(stream) {
        let _guard = GUARD.lock();
        forget(stream);
    }
    result
}

/// Destroy streams by calling the driver, by themselves or with their context; whether it did, `destroy` says. They are
/// not capturing any more then. Once the driver has freed them, their handles may be another thread's new streams,
/// which capture already.
pub fn destroying(streams: &[usize], destroy: impl FnOnce() -> bool) -> bool {
    let mut captured = Vec::new();
    if is_active() {
        let _guard = GUARD.lock();
        captured.extend(streams.iter().copied().filter(|stream| take(*stream)));
    }
    let is_gone = destroy();
    if is_gone {
        FAST_PATH_BLOCKERS.fetch_sub(captured.len() as u32, SeqCst);
    } else if !captured.is_empty() {
        let _guard = GUARD.lock();
        captured.into_iter().for_each(remember);
    }
    is_gone
}

/// The caller holds the guard.
fn remember(stream: usize) {
    if let Some(free) = STREAMS.iter().find(|s| s.load(Relaxed) == 0) {
        free.store(identity(stream), Relaxed);
    }
}

/// Forget a stream's capture, though not yet that there is one. Whether there was. The caller holds the guard.
fn take(stream: usize) -> bool {
    let identity = identity(stream);
    let mine = STREAMS.iter().find(|s| s.load(Relaxed) == identity);
    mine.inspect(|s| s.store(0, Relaxed)).is_some()
}

/// A stream is not capturing any more, if it was. The caller holds the guard.
fn forget(stream: usize) {
    if take(stream) {
        FAST_PATH_BLOCKERS.fetch_sub(1, SeqCst);
    }
}

/// Only in a forked child.
pub fn reset() {
    GUARD.reset();
    FAST_PATH_BLOCKERS.fetch_and(NESTING, SeqCst);
    for stream in &STREAMS {
        stream.store(0, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: usize = 0x5000;

    #[test]
    fn a_capture_in_a_new_stream_of_the_same_handle_stays_known() {
        let capture_again = || {
            // Another thread's stream, as soon as the driver has freed the first one.
            std::thread::spawn(|| assert_eq!(begin(STREAM, || SUCCESS), SUCCESS)).join().unwrap();
            true
        };
        assert!(destroying(&[STREAM], capture_again));
        assert!(is_active() && !allows_fast_path());
        assert!(destroying(&[STREAM], capture_again), "one that captured");
        assert!(is_active() && !allows_fast_path());
        assert!(!destroying(&[STREAM], || false));
        assert!(is_active(), "it is still there");
        // With its context, in which another one captures, and a third does not.
        assert_eq!(begin(STREAM + 1, || SUCCESS), SUCCESS);
        assert!(destroying(&[STREAM, STREAM + 1, STREAM + 2], || true));
        assert!(!is_active() && allows_fast_path());
    }
}
