//! When a stream waits for its launches on some of the SMs ([`sm_limit`](crate::sm_limit)).
//!
//! Such a launch runs in a stream of the shim's, which waits for the program's stream before it; behind it the
//! program's stream waits for that one: it *joins*. Both cost the GPU some microseconds. The join can be put off:
//! further launches of the same stream on the same SMs follow one another in the shim's stream. Whatever else puts work
//! into a stream, or asks or waits for one, joins first ([`all`]). To the program that is as if each launch had joined
//! at once.
//!
//! Must be called where no launch on some of the SMs is being made ([`Host::alone`](crate::host::Host::alone) sees to
//! that): one that came between a join's two calls would be lost to it.

use crate::cuda::{NOT_READY, Ptr, STREAM_LEGACY, STREAM_PER_THREAD, SUCCESS, driver};
use crate::host::host;
use crate::lock::Lock;
use crate::sm_limit;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::time::Duration;
use tally_ipc::layout::STREAM_SLOTS;
use tally_ipc::wait;

/// The last launches of a slot's stream, which that does not wait for yet.
struct Open {
    /// The shim's stream that they are in; 0: there are none.
    limited: AtomicUsize,
    /// The program's stream, an explicit handle.
    stream: AtomicUsize,
    context: AtomicUsize,
    /// It waits for the legacy stream, and that for it.
    is_blocking: AtomicBool,
    launches: AtomicU64,
    /// Held by the thread that has the stream wait.
    joining: Lock,
}

/// How long a thread waits for another one's join: the driver may keep that waiting, or a signal handler be within it.
const JOIN_MAX: Duration = Duration::from_secs(1);

/// Pause between two questions whether a stream's launches have ended.
const NAP: Duration = Duration::from_micros(50);

static OPEN: [Open; STREAM_SLOTS] = [const {
    Open {
        limited: AtomicUsize::new(0),
        stream: AtomicUsize::new(0),
        context: AtomicUsize::new(0),
        is_blocking: AtomicBool::new(false),
        launches: AtomicU64::new(0),
        joining: Lock::new(),
    }
}; STREAM_SLOTS];
/// Slots with such launches: bits.
static SLOTS: AtomicU64 = AtomicU64::new(0);

/// Whether any stream is to join.
#[inline(always)]
pub fn are_open() -> bool {
    SLOTS.load(Relaxed) != 0
}

/// The stream that a slot's latest work is in: one of the shim's, or `stream`, which is the program's.
pub fn latest(slot: usize, stream: usize) -> usize {
    match OPEN[slot & 63].limited.load(SeqCst) {
        0 => stream,
        limited => limited,
    }
}

/// Streams of the shim's in a context that the program's do not wait for yet.
pub fn limited_streams(context: usize) -> impl Iterator<Item = usize> {
    let of_context = move |open: &&Open| open.context.load(SeqCst) == context;
    OPEN.iter().filter(of_context).map(|open| open.limited.load(SeqCst)).filter(|s| *s != 0)
}

/// A launch of a slot's stream goes into this stream of the shim's.
pub(crate) fn open(slot: usize, limited: usize, (stream, context): (usize, usize), blocking: bool) {
    let open = &OPEN[slot & 63];
    open.stream.store(stream, SeqCst);
    open.context.store(context, SeqCst);
    open.is_blocking.store(blocking, SeqCst);
    open.launches.fetch_add(1, SeqCst);
    open.limited.store(limited, SeqCst);
    SLOTS.fetch_or(bit(slot), SeqCst);
}

fn bit(slot: usize) -> u64 {
    1 << (slot & 63)
}

/// All streams join.
pub fn all() {
    let mut left = SLOTS.load(SeqCst);
    while left != 0 {
        one(left.trailing_zeros() as usize);
        left &= left - 1;
    }
}

/// Those join that a launch of a slot's blocking stream comes behind: of the legacy stream all blocking ones of its
/// context, of another one the legacy stream. False: the driver refused that.
pub(crate) fn before(slot: usize, stream: usize, context: usize) -> bool {
    let is_before = |at: &usize| {
        let open = &OPEN[*at];
        let of_legacy = open.stream.load(SeqCst) == STREAM_LEGACY;
        *at != slot
            && open.context.load(SeqCst) == context
            && open.is_blocking.load(SeqCst)
            && (stream == STREAM_LEGACY || of_legacy)
    };
    let slots = SLOTS.load(SeqCst);
    (0..STREAM_SLOTS).filter(is_before).all(|at| slots & bit(at) == 0 || try_one(at))
}

/// A slot's stream joins, if it has to. Where the driver refuses that, it has no more events, say, the launches end
/// before what comes behind them is asked for.
fn one(slot: usize) {
    let open = &OPEN[slot & 63];
    // Its handle means another stream in another thread.
    let is_others = || open.stream.load(SeqCst) == STREAM_PER_THREAD && latest(slot, 0) != 0;
    while (is_others() || attempt(slot) == Some(false)) && !host().is_exiting() {
        let (launches, limited) = (open.launches.load(SeqCst), open.limited.load(SeqCst));
        let Some(query) = driver().stream_query.filter(|_| limited != 0) else { return };
        // SAFETY: a stream of ours.
        let ask = || driver().relaxed(|| unsafe { query(limited as Ptr) });
        let Some(result) = within(open.context.load(SeqCst), ask) else { return };
        match result {
            NOT_READY => wait::nap(NAP),
            SUCCESS if open.launches.load(SeqCst) == launches => return close(slot),
            SUCCESS => {}
            // In a context in error every call fails.
            _ => return,
        }
    }
}

/// The same. False: the driver refuses it.
pub(crate) fn try_one(slot: usize) -> bool {
    attempt(slot) == Some(true)
}

/// Whether a slot's stream has joined. `None`: it is of a context that is not there.
fn attempt(slot: usize) -> Option<bool> {
    let open = &OPEN[slot & 63];
    if open.limited.load(SeqCst) == 0 {
        return Some(true);
    }
    // One at a time: the second one's wait could come behind what the first one's thread launches next.
    let _held = open.joining.lock_within(JOIN_MAX);
    let launches = open.launches.load(SeqCst);
    let limited = open.limited.load(SeqCst);
    if limited == 0 {
        return Some(true);
    }
    let stream = open.stream.load(SeqCst);
    let wait = || sm_limit::wait_behind(stream, limited);
    // The handle of the legacy stream means that of the current context, and with none current the driver may refuse.
    let context = open.context.load(SeqCst);
    let result = within(context, wait);
    let is_joined = result == Some(SUCCESS);
    // Not before: another thread must not go on until the stream waits. And not if a signal handler came here within a
    // launch, which this is not behind.
    if is_joined && open.launches.load(SeqCst) == launches {
        close(slot);
    }
    result.map(|_| is_joined)
}

/// In a context, unless it is not there.
fn within<T>(context: usize, work: impl FnOnce() -> T) -> Option<T> {
    match driver().current_context() == context {
        true => Some(work()),
        false => driver().within(context, work),
    }
}

fn close(slot: usize) {
    OPEN[slot & 63].limited.store(0, SeqCst);
    SLOTS.fetch_and(!bit(slot), SeqCst);
}

/// A context's streams of the shim's are gone.
pub(crate) fn forget(context: usize) {
    let is_there = |slot: &usize| OPEN[*slot].context.load(SeqCst) == context;
    (0..STREAM_SLOTS).filter(is_there).for_each(close);
}

/// Only in a forked child.
pub(crate) fn reset() {
    OPEN.iter().for_each(|open| open.joining.reset());
    (0..STREAM_SLOTS).for_each(close);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{CuResult, find_by};
    use std::ffi::{CStr, c_uint, c_void};
    use std::ptr::NonNull;
    use std::sync::atomic::AtomicU32;
    use std::thread;

    static WAITS: AtomicU32 = AtomicU32::new(0);
    static GOES_ON: AtomicBool = AtomicBool::new(false);

    extern "C" fn record(_: Ptr, _: Ptr) -> CuResult {
        SUCCESS
    }

    /// How often a stream is asked until its launches have ended.
    static QUESTIONS: AtomicU32 = AtomicU32::new(0);
    /// A stream that waits for nothing.
    const REFUSED: usize = 9;
    const OUT_OF_MEMORY: CuResult = 2;

    extern "C" fn query(_: Ptr) -> CuResult {
        if QUESTIONS.fetch_add(1, SeqCst) < 3 { NOT_READY } else { SUCCESS }
    }

    extern "C" fn wait(stream: Ptr, _: Ptr, _: c_uint) -> CuResult {
        if stream as usize == REFUSED {
            return OUT_OF_MEMORY;
        }
        WAITS.fetch_add(1, SeqCst);
        while !GOES_ON.load(SeqCst) {
            thread::yield_now();
        }
        SUCCESS
    }

    fn find(name: &CStr) -> Option<NonNull<c_void>> {
        match name.to_bytes() {
            b"cuEventRecord" => NonNull::new(record as *mut c_void),
            b"cuStreamQuery" => NonNull::new(query as *mut c_void),
            b"cuStreamWaitEvent" => NonNull::new(wait as *mut c_void),
            _ => None,
        }
    }

    /// The second one's wait would come behind what the first one's thread launches then.
    #[test]
    fn of_two_threads_that_have_a_stream_join_one_does_and_the_other_waits_for_it() {
        find_by(find);
        sm_limit::add_event(1);
        open(3, 77, (5, 0), false);
        let has_joined = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| one(3));
            while WAITS.load(SeqCst) == 0 {
                thread::yield_now();
            }
            scope.spawn(|| {
                one(3);
                has_joined.store(true, SeqCst);
            });
            thread::sleep(Duration::from_millis(20));
            assert!(!has_joined.load(SeqCst), "the stream does not wait yet");
            GOES_ON.store(true, SeqCst);
        });
        assert_eq!((WAITS.load(SeqCst), are_open()), (1, false));

        open(4, 78, (REFUSED, 0), false);
        assert!(!try_one(4) && are_open());
        // The driver refuses it, and the launches end.
        one(4);
        assert_eq!((QUESTIONS.load(SeqCst), are_open()), (4, false));
    }
}
