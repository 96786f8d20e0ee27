//! When nothing but the shim puts work into streams: to load code, and to make a launch of several pieces.
//!
//! **A launch in parts** is one piece of work to the program: work that other threads enqueue, into its stream or into
//! one that waits for it (as the legacy stream does for blocking ones), must come before or behind all parts. So while
//! a thread issues the parts ([`alone`]), calls that enqueue work wait ([`while_open`]), for as long as a few launches
//! take. If another thread stays in such a call, the launch goes whole.
//!
//! **Graphs of the shim's** are instantiated while a context is idle, too: some instantiations wait for what runs, and
//! keep launches waiting (litmus programs hung there on an H200). Only a launch does it, if nothing runs at that
//! moment.
//!
//! **Loading code.**
//! The driver loads code only once everything in the context has ended, streams that wait for a word
//! included, and keeps every launch waiting until then (measured: `bench/gpu`, `waits`). What runs may
//! wait for one of these launches; so loaded at any moment, code of the shim's could stop a program for
//! good.
//!
//! So the shim loads only while the context is idle and nothing can be enqueued: new launches, and calls that can
//! make a stream wait, wait themselves ([`while_open`]). If the context is not idle soon, they go on and the load is
//! retried later.
//!
//! **Calls that block launches** ([`blocks_launches`]). Some driver calls block all launches until the GPU is idle. A
//! rescue ([`may_need_help`]) is itself a launch, so such a call waits until no launch can need a rescue. Until it
//! returns, the shim issues no launch in parts and no rescue. Calls that allocate, or make streams, events or graphs,
//! do not block launches and are passed through.

use crate::slots::{self, LIVE};
use crate::{asking, capture, records, state, streams};
use rustix::thread::futex;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};
use tally_ipc::wait::{self, now_ns};
use tally_preempt::cuda::{CuResult, Ptr, STREAM_LEGACY, STREAM_PER_THREAD, SUCCESS, driver};
use tally_preempt::lock::Lock;
use tally_preempt::{joins, may_need_help};

/// Longer than the driver takes to load code into an idle context.
const LOAD_MAX: Duration = Duration::from_secs(5);
/// Launches wait in vain for code to be loaded for at most one part in so many of the time.
const PATIENT_SHARE: u64 = 20;
/// From when on launches may wait for loads again.
static PATIENT_AGAIN_NS: AtomicU64 = AtomicU64::new(0);
/// Pause between two looks at other threads.
const NAP: Duration = Duration::from_micros(50);

/// Why calls must wait before they enter the driver, as bits.
static CLOSED: AtomicU32 = AtomicU32::new(0);
/// The shim is loading code, or about to: bit 0.
const LOADS: usize = 0;
/// A thread makes a launch in parts, or is about to: bit 1.
const ISSUES: usize = 1;
/// Streams are to join: launches take the slow path. No call waits for it.
const JOINS: usize = 2;
/// Calls under way that put work into streams.
static ENTERED: AtomicU32 = AtomicU32::new(0);
/// Calls of [`ENTERED`] that wait for [`ISSUER`], and are not in the driver.
static WAITING: AtomicU32 = AtomicU32::new(0);
/// Threads that wait until they may enter the driver.
static SLEEPING: AtomicU32 = AtomicU32::new(0);
/// Threads that are in a call in which launches wait, or about to be: no launch is made in parts.
static WAITS: AtomicU32 = AtomicU32::new(0);
/// Threads of [`WAITS`] that are in the driver.
static WAITS_THERE: AtomicU32 = AtomicU32::new(0);
/// Launches being made to help one that is stuck.
static HELPS: AtomicU32 = AtomicU32::new(0);
/// How long a call in which launches wait is held back for launches that may need help.
const HELP_WAIT_MAX: Duration = Duration::from_secs(5);
/// A call was held back for so long in vain: no other is, until no launch may need help.
static HELP_IS_LATE: AtomicBool = AtomicBool::new(false);
/// Held by the thread that loads code.
static LOADER: Lock = Lock::new();
/// Held by who makes a launch in parts.
static ISSUER: Lock = Lock::new();
/// Calls waited for [`LOAD_MAX`]: a thread was lost in the driver, or that is slow. Nothing closes any more.
static IS_LOST: AtomicBool = AtomicBool::new(false);
/// How long a launch in parts waits for other threads to leave the driver before it goes whole, ns. One behind another
/// that has waited in vain waits for half as long.
const ALONE_WAIT_NS: [u64; 2] = [15_625, 2_000_000];
static ALONE_WAIT: AtomicU64 = AtomicU64::new(ALONE_WAIT_NS[1]);

/// False: nothing opened within [`LOAD_MAX`].
#[cold]
fn wait_until_open_now() -> bool {
    // What the shim itself calls passes, and so does what comes out of a signal handler.
    if state::is_inside() {
        return true;
    }
    SLEEPING.fetch_add(1, SeqCst);
    let start = Instant::now();
    let is_open = loop {
        let closed = CLOSED.load(SeqCst);
        if closed == 0 || start.elapsed() >= LOAD_MAX {
            break closed == 0;
        }
        let nap = futex::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        let _ = futex::wait(&CLOSED, futex::Flags::PRIVATE, closed, Some(&nap));
    };
    SLEEPING.fetch_sub(1, SeqCst);
    is_open
}

/// Before a call that waits for streams: what another thread is making in parts is all in its stream then.
#[inline]
pub fn wait_until_open() {
    if CLOSED.load(SeqCst) & (1 << ISSUES) != 0 {
        wait_until_open_now();
    }
}

fn close(reason: usize) {
    capture::close_fast_path(reason, true);
    CLOSED.fetch_or(1 << reason, SeqCst);
}

/// The thread that closed is gone: no call waits any more.
#[cold]
fn give_up() {
    if !IS_LOST.swap(true, SeqCst) {
        crate::log!("calls waited for {LOAD_MAX:?}: launches go whole from now on");
        open(LOADS);
        open(ISSUES);
    }
}

fn open(reason: usize) {
    capture::close_fast_path(reason, false);
    CLOSED.fetch_and(!(1 << reason), SeqCst);
    if SLEEPING.load(SeqCst) != 0 {
        let _ = futex::wake(&CLOSED, futex::Flags::PRIVATE, i32::MAX as u32);
    }
}

/// Run `issue`, which puts several things into a stream, while no other thread puts anything into any. By a thread
/// within [`while_open`] and a launch that was counted. `None`: other threads are in the driver, and nothing was done.
pub fn alone<T>(issue: impl FnOnce() -> Option<T>) -> Option<T> {
    let wait_ns = ALONE_WAIT.load(Relaxed);
    let mut was_alone = false;
    let issue = || {
        was_alone = true;
        issue()
    };
    let result = alone_within(1, [LOAD_MAX, Duration::from_nanos(wait_ns)], issue);
    let next_ns = if was_alone { ALONE_WAIT_NS[1] } else { (wait_ns / 2).max(ALONE_WAIT_NS[0]) };
    ALONE_WAIT.store(next_ns, Relaxed);
    result
}

/// The same by a thread that is neither within [`while_open`] nor in a launch. It waits for others for at most
/// `wait_max`.
pub fn alone_outside<T>(wait_max: Duration, issue: impl FnOnce() -> Option<T>) -> Option<T> {
    if state::is_inside() {
        return None;
    }
    // A signal handler within must not wait for this frame.
    state::inside(|| alone_within(0, [wait_max; 2], issue))
}

/// By a thread that is counted so many times among those that put work into streams; waits so long for its turn, and
/// for others to leave.
fn alone_within<T>(
    counted: u32,
    [turn_max, leave_max]: [Duration; 2],
    issue: impl FnOnce() -> Option<T>,
) -> Option<T> {
    // Whoever was lost may hold the lock.
    if IS_LOST.load(SeqCst) {
        return None;
    }
    WAITING.fetch_add(counted, SeqCst);
    let held = ISSUER.lock_within(turn_max);
    WAITING.fetch_sub(counted, SeqCst);
    let _held = held.filter(|_| !IS_LOST.load(SeqCst))?;
    close(ISSUES);
    let start = Instant::now();
    let result = loop {
        // Whoever comes to wait later sees what is being issued.
        if WAITS.load(SeqCst) != 0 {
            break None;
        }
        if is_alone(counted) {
            let result = issue();
            // Before the fast path opens: it does not join.
            if joins::are_open() {
                capture::close_fast_path(JOINS, true);
            }
            break result;
        }
        if start.elapsed() >= leave_max {
            break None;
        }
        std::hint::spin_loop();
    };
    open(ISSUES);
    result
}

/// Only the calling thread, counted so many times, is in the driver to put something into a stream. Nobody comes in any
/// more, and who waits for [`ISSUER`] goes on waiting.
fn is_alone(counted: u32) -> bool {
    let mine = WAITING.load(SeqCst) + counted;
    let inside = |slot: &slots::Slot| slot.word.snapshot().inside();
    ENTERED.load(SeqCst) == mine && slots::SLOTS.iter().map(inside).sum::<u32>() == mine
}

/// Run a launch, or another call that puts work into a stream, or one in which the driver waits for what runs. Streams
/// with launches on some of the SMs join before.
pub fn while_open(call: impl FnOnce() -> CuResult) -> CuResult {
    while_open_unjoined(|| {
        join_now();
        call()
    })
}

/// Streams with launches on some of the SMs join. Within [`while_open_unjoined`].
#[inline]
pub fn join_now() {
    if joins::are_open() {
        joins::all();
        capture::close_fast_path(JOINS, joins::are_open());
    }
}

/// Before a call that asks or waits for a stream: those with launches on some of the SMs join.
#[inline]
pub fn join() {
    if joins::are_open() {
        while_open(|| SUCCESS);
    }
}

/// The same as [`while_open`] for a launch on some of the SMs.
pub fn while_open_unjoined(call: impl FnOnce() -> CuResult) -> CuResult {
    if state::client().is_none() {
        return call();
    }
    loop {
        ENTERED.fetch_add(1, SeqCst);
        // One of the two sees the other.
        if CLOSED.load(SeqCst) == 0 || state::is_inside() {
            break;
        }
        ENTERED.fetch_sub(1, SeqCst);
        if !wait_until_open_now() {
            give_up();
        }
    }
    records::enqueue();
    let result = call();
    ENTERED.fetch_sub(1, SeqCst);
    result
}

/// Run a call in which the driver may wait for all that runs and keep launches waiting meanwhile.
pub fn waiting(call: impl FnOnce() -> CuResult) -> CuResult {
    // The shim's own calls, and a signal handler's, do not wait for the frame below.
    if state::client().is_none() || state::is_inside() {
        return call();
    }
    WAITS.fetch_add(1, SeqCst);
    let start = Instant::now();
    loop {
        let is_needed = may_need_help();
        if !is_needed {
            HELP_IS_LATE.store(false, SeqCst);
        } else if start.elapsed() >= HELP_WAIT_MAX {
            HELP_IS_LATE.store(true, SeqCst);
        }
        let is_held =
            CLOSED.load(SeqCst) & (1 << ISSUES) != 0 || (is_needed && !HELP_IS_LATE.load(SeqCst));
        if !is_held || start.elapsed() >= HELP_WAIT_MAX || state::is_exiting() {
            break;
        }
        wait::nap(NAP);
    }
    let result = while_open(|| {
        loop {
            WAITS_THERE.fetch_add(1, SeqCst);
            // One of the two sees the other.
            if HELPS.load(SeqCst) == 0 {
                break;
            }
            WAITS_THERE.fetch_sub(1, SeqCst);
            wait::nap(NAP);
        }
        let result = call();
        WAITS_THERE.fetch_sub(1, SeqCst);
        result
    });
    WAITS.fetch_sub(1, SeqCst);
    result
}

/// Whether a launch may be made to help another one now; then [`help_ends`] must follow.
pub fn help_begins() -> bool {
    HELPS.fetch_add(1, SeqCst);
    let may = WAITS_THERE.load(SeqCst) == 0;
    if !may {
        help_ends();
    }
    may
}

/// To be called once the launch is made.
pub fn help_ends() {
    HELPS.fetch_sub(1, SeqCst);
}

/// Load code in a context, which lives: run `load` while nothing runs there. `None`: within
/// `patience` it did not become idle, and nothing was done.
pub fn load<T>(context: usize, patience: Duration, load: impl FnOnce() -> T) -> Option<T> {
    let start = Instant::now();
    // Meanwhile a look is enough: launches need not wait for longer than that.
    let patience = if now_ns() < PATIENT_AGAIN_NS.load(SeqCst) { Duration::ZERO } else { patience };
    // What a capture forbids to ask is not idle.
    let is_over = || start.elapsed() >= patience || capture::is_active();
    let result = load_when(|| is_empty(context) && is_idle(context), is_over, load);
    if result.is_none() {
        let waited_ns = start.elapsed().as_nanos() as u64;
        PATIENT_AGAIN_NS.fetch_max(now_ns() + PATIENT_SHARE * waited_ns, SeqCst);
    }
    result
}

/// Keep launches out until nothing runs, as `is_idle` says, and run `load` then; or until `is_over`.
fn load_when<T>(
    mut is_idle: impl FnMut() -> bool,
    mut is_over: impl FnMut() -> bool,
    load: impl FnOnce() -> T,
) -> Option<T> {
    let _held = LOADER.lock();
    if IS_LOST.load(SeqCst) {
        return None;
    }
    close(LOADS);
    let result = loop {
        if state::is_exiting() {
            break None;
        }
        if is_idle() {
            break Some(load());
        }
        if is_over() {
            break None;
        }
        wait::nap(NAP);
    };
    open(LOADS);
    result
}

/// Nothing is being put into the context at the moment.
fn is_empty(context: usize) -> bool {
    let is_there = |slot: &slots::Slot| slot.context.load(Relaxed) == context;
    ENTERED.load(SeqCst) == 0
        && !capture::is_active()
        && slots::in_use().all(|(_, slot)| !is_there(slot) || slot.word.snapshot().is_settled())
}

/// All of the context's streams have nothing to do. Asked for the legacy stream, the driver answers for all
/// blocking ones, of whichever thread.
pub fn is_idle(context: usize) -> bool {
    let (Some(query), Some(non_blocking)) = (driver().stream_query, streams::non_blocking(context))
    else {
        return false;
    };
    let ask = |stream: usize, is_there: &dyn Fn() -> bool| {
        // A capture is lost if somebody asks for the stream, or for the legacy one.
        asking::ask(
            || !capture::is_active() && is_there(),
            || {
                // SAFETY: the stream lives while `is_there`; the context is the calling thread's.
                unsafe { query(stream as Ptr) == SUCCESS }
            },
        )
    };
    // A stream that has not joined yet is idle although its launches may not have ended.
    let have_ended = |limited| ask(limited, &|| joins::are_open()) != Some(false);
    if ask(STREAM_LEGACY, &|| true) != Some(true)
        || !joins::limited_streams(context).all(have_ended)
    {
        return false;
    }
    let created = non_blocking.into_iter().all(|stream| {
        // One that is gone had its work waited for, or it shows in its slot.
        ask(stream, &|| streams::exists(stream)).unwrap_or(true)
    });
    // Streams that were not seen to be made.
    created
        && slots::in_use().all(|(index, slot)| {
            let stream = slot.stream.load(Relaxed);
            let is_default = stream <= STREAM_PER_THREAD;
            if is_default && slot.green.load(Relaxed) != 0 {
                // A green context's: it may be of this context, and cannot be asked for here.
                return false;
            }
            let is_mine = slot.context.load(Relaxed) == context;
            if !is_mine || is_default {
                return !is_mine || index != slots::OVERFLOW;
            }
            // The slot may be another stream's meanwhile.
            let is_there = || slot.phase.load(SeqCst) == LIVE && slot.stream.load(SeqCst) == stream;
            ask(stream, &is_there).unwrap_or_else(|| !is_there())
        })
}

/// Copies, fills, waits and whatever else puts work into a stream: calls of at most six arguments, which are
/// passed on unread.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
#[allow(clippy::too_many_arguments)]
pub unsafe fn enqueues(
    real: unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> CuResult,
    per_thread: bool,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> CuResult {
    streams::put(per_thread, &[a, b, c, d, e, f]);
    // SAFETY: the caller's arguments.
    while_open(|| unsafe { real(a, b, c, d, e, f) })
}

/// Calls that block launches until the GPU is idle, but for loads of code: [`waiting`].
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
#[allow(clippy::too_many_arguments)]
pub unsafe fn blocks_launches(
    real: unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> CuResult,
    _per_thread: bool,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> CuResult {
    // SAFETY: the caller's arguments.
    waiting(|| unsafe { real(a, b, c, d, e, f) })
}

/// The same as [`enqueues`], of at most nine arguments.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
#[allow(clippy::too_many_arguments)]
pub unsafe fn enqueues_batch(
    real: unsafe extern "C" fn(
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
        usize,
    ) -> CuResult,
    per_thread: bool,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
    g: usize,
    h: usize,
    i: usize,
) -> CuResult {
    records::enqueue_batch();
    streams::put(per_thread, &[a, b, c, d, e, f, g, h, i]);
    // SAFETY: the caller's arguments.
    while_open(|| unsafe { real(a, b, c, d, e, f, g, h, i) })
}

/// `cuLaunchHostFunc`: the function may wait for anything.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn host_func(
    real: unsafe extern "C" fn(usize, usize, usize, usize) -> CuResult,
    per_thread: bool,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
) -> CuResult {
    streams::put(per_thread, &[a]);
    state::count(|counters| &counters.host_func);
    // SAFETY: the caller's arguments.
    while_open(|| unsafe { real(a, b, c, d) })
}

/// Only in a forked child.
pub fn reset() {
    LOADER.reset();
    ISSUER.reset();
    for word in [&CLOSED, &ENTERED, &WAITING, &SLEEPING, &WAITS, &WAITS_THERE, &HELPS] {
        word.store(0, SeqCst);
    }
    IS_LOST.store(false, SeqCst);
    HELP_IS_LATE.store(false, SeqCst);
    records::reset();
    ALONE_WAIT.store(ALONE_WAIT_NS[1], SeqCst);
    PATIENT_AGAIN_NS.store(0, SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::Mutex;
    use tally_preempt::host::LOAD_PATIENCE as PATIENCE;

    /// They change what the whole process has.
    static ONE: Mutex<()> = Mutex::new(());

    #[test]
    fn nobody_waits_for_a_lock_that_a_lost_thread_holds() {
        let _alone = ONE.lock().unwrap();
        std::mem::forget(ISSUER.lock());
        close(ISSUES);
        give_up();
        let start = Instant::now();
        assert_eq!(alone(|| Some(())), None);
        assert_eq!(alone_outside(LOAD_MAX, || Some(())), None);
        let waited = start.elapsed();
        reset();
        assert!(waited < LOAD_MAX / 2, "{waited:?}");
    }

    #[test]
    fn launches_wait_for_a_load_until_it_is_put_off() {
        let _alone = ONE.lock().unwrap();
        let looks = Cell::new(0_u32);
        let load = |idle_at: u32, looks_max: u32| {
            looks.set(0);
            let is_idle = || {
                assert_eq!(CLOSED.load(SeqCst), 1 << LOADS, "they wait");
                looks.set(looks.get() + 1);
                looks.get() >= idle_at
            };
            let loaded = load_when(is_idle, || looks.get() >= looks_max, || CLOSED.load(SeqCst));
            assert_eq!(CLOSED.load(SeqCst), 0, "they go on");
            (loaded, looks.get())
        };
        assert_eq!(load(3, 10), (Some(1 << LOADS), 3), "nothing comes in while code is loaded");
        assert_eq!(load(11, 10), (None, 10), "the context was never idle: nothing was loaded");
        assert_eq!(load(2, 1), (None, 1));
        // By the clock, and a context that no driver knows is never idle.
        assert_eq!(PATIENCE, Duration::from_millis(20));
        let start = Instant::now();
        assert_eq!(super::load(0xdead_0010, PATIENCE, || ()), None);
        let waited = start.elapsed();
        assert!(waited >= PATIENCE && CLOSED.load(SeqCst) == 0);
        // Once they have waited in vain they do not again for twenty times as long, whoever asks.
        let again_ns = PATIENT_AGAIN_NS.load(SeqCst);
        assert!(again_ns >= now_ns() + 20 * PATIENCE.as_nanos() as u64 - waited.as_nanos() as u64);
        PATIENT_AGAIN_NS.store(u64::MAX, SeqCst);
        assert_eq!(super::load(0xdead_0010, Duration::from_secs(3_600), || ()), None, "at once");
        PATIENT_AGAIN_NS.store(0, SeqCst);
    }

    /// Each launch would cost as much as the first, for as long as a thread is in a copy that waits.
    #[test]
    fn a_launch_in_parts_waits_for_less_once_one_has_waited_in_vain() {
        let _alone = ONE.lock().unwrap();
        // As if another thread was in the driver.
        ENTERED.fetch_add(2, SeqCst);
        for times in 1..20 {
            let (start, wait_ns) = (Instant::now(), ALONE_WAIT.load(SeqCst));
            assert_eq!(alone(|| Some(())), None);
            assert!(start.elapsed() >= Duration::from_nanos(wait_ns));
            assert_eq!(ALONE_WAIT.load(SeqCst), (ALONE_WAIT_NS[1] >> times).max(ALONE_WAIT_NS[0]));
        }
        // It has left, and this one is in a launch.
        ENTERED.fetch_sub(1, SeqCst);
        slots::SLOTS[0].word.begin();
        assert_eq!(alone(|| Some(())), Some(()));
        assert_eq!(ALONE_WAIT.load(SeqCst), ALONE_WAIT_NS[1]);
        slots::SLOTS[0].word.end();
        ENTERED.fetch_sub(1, SeqCst);
    }
}
