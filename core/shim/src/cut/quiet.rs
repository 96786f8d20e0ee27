//! Calls in which the driver waits for all that runs, and keeps launches waiting meanwhile.
//!
//! `cuMemFree`, loading a module, the first launch of a kernel (where kernels are loaded when they are
//! first needed) and some more wait until everything in their context has ended, and hold the
//! driver's locks as they do. A cut launch that is [stuck](super::progress) ends only with the help of another
//! launch, which would wait for such a call, which waits for the stuck one: nothing would ever end.
//! Which calls do so was measured (`tests/gpu`, `waits`).
//!
//! So these calls wait here, before they reach the driver, until no cut launch is under way, and none is made
//! until they return. It costs them nothing: what they wait for is what the driver would wait for.

use super::watch;
use crate::cu::{CuResult, Ptr, SUCCESS, driver};
use crate::{attendant, log, names, slots};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize};
use std::time::{Duration, Instant};

/// Calls that want quiet.
static WANTED: AtomicUsize = AtomicUsize::new(0);
/// Launches being issued, which are not under way yet.
static MAKING: AtomicUsize = AtomicUsize::new(0);
/// How long the worker waits for what is under way.
const WORKER_PATIENCE: Duration = Duration::from_millis(100);
/// The same of a call of the program's. Longer than anything takes that is not held by high priority or by
/// the program itself; so late it goes on as it would without us.
const CALL_PATIENCE: Duration = Duration::from_secs(10);
/// Between two looks.
const NAP: Duration = Duration::from_micros(50);

/// While it lives, no kernel is launched cut.
#[derive(Debug)]
pub struct Quiet(());

impl Quiet {
    /// `None`: something was still under way after so long.
    fn within(patience: Duration, is_busy: impl Fn() -> bool) -> Option<Self> {
        let quiet = Self::want();
        let start = Instant::now();
        while MAKING.load(SeqCst) != 0 || is_busy() {
            if start.elapsed() > patience {
                return None;
            }
            // The program's exit opens the gate for good: it need not wait for that.
            if attendant::is_exiting() {
                break;
            }
            std::thread::sleep(NAP);
        }
        Some(quiet)
    }

    fn want() -> Self {
        WANTED.fetch_add(1, SeqCst);
        Quiet(())
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        WANTED.fetch_sub(1, SeqCst);
    }
}

/// Have no cut launch under way: the worker is to load a module, and can as well do so later. `None` if it takes
/// too long.
pub fn of_worker() -> Option<Quiet> {
    Quiet::within(WORKER_PATIENCE, watch::is_open)
}

/// Before a call of the program's in which the driver waits and keeps launches waiting: have nothing under way that could
/// need help. The calling thread holds none of our locks. `None`: nothing is ever cut here.
pub fn of_call() -> Option<Quiet> {
    beside(None)
}

/// The same, apart from what is under way in one slot, whose lock may be held.
fn beside(slot: Option<usize>) -> Option<Quiet> {
    if !super::is_enabled() {
        return None;
    }
    let others = !slot.map_or(0, slots::bit);
    let quiet = Quiet::within(CALL_PATIENCE, || watch::may_need_help() & others != 0);
    if quiet.is_none() {
        log!(
            "a cut launch has been under way for {CALL_PATIENCE:?}: a call waits no longer for it"
        );
    }
    Some(quiet.unwrap_or_else(Quiet::want))
}

/// A kernel may have to be loaded with the next launch, whichever that is of.
static LOADING: AtomicBool = AtomicBool::new(false);

/// A kernel was looked up.
pub fn looked_up() {
    LOADING.store(true, Relaxed);
}

/// Before a launch (of `function`, if it is of one) into a slot, for which the driver may have to load a kernel: the first of
/// that function, or of any since one was looked up or `cuFuncLoad` was called. `None`: for this one it need not.
pub fn of_launch(function: Option<Ptr>, slot: Option<usize>) -> Option<Quiet> {
    let may_load = function.is_some_and(names::is_new)
        || (LOADING.load(Relaxed) && LOADING.swap(false, Relaxed));
    if may_load { of_first_launch(slot) } else { None }
}

/// Before the first launch of some function. The driver does not wait for what is in the same stream.
pub fn of_first_launch(slot: Option<usize>) -> Option<Quiet> {
    if is_lazy() { beside(slot) } else { None }
}

/// Whether kernels are loaded when they are first launched, not with their module.
fn is_lazy() -> bool {
    static LAZY: AtomicU8 = AtomicU8::new(UNKNOWN);
    const UNKNOWN: u8 = 2;
    /// `CU_MODULE_EAGER_LOADING`
    const EAGER: i32 = 1;
    let known = LAZY.load(Relaxed);
    if known != UNKNOWN {
        return known == 1;
    }
    let mut mode = 0;
    // SAFETY: a valid out-pointer.
    let asked = driver().loading_mode.map(|f| unsafe { f(&mut mode) });
    // A driver that cannot tell is older than loading one by one.
    let is_lazy = asked == Some(SUCCESS) && mode != EAGER;
    LAZY.store(u8::from(is_lazy), Relaxed);
    is_lazy
}

/// `cuFuncLoad`: returns at once, but the next launch waits for the load.
///
/// # Safety
/// As the driver's.
pub unsafe fn func_load(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    per_thread: bool,
    function: Ptr,
) -> CuResult {
    looked_up();
    // SAFETY: the caller's argument.
    unsafe { around_one(real, per_thread, function) }
}

/// While it lives, a cut launch is being made.
#[derive(Debug)]
pub struct Making(());

impl Making {
    /// From now on. `None`: somebody wants quiet, apart from the one whose own it is.
    pub fn begin(own: Option<&Quiet>) -> Option<Self> {
        MAKING.fetch_add(1, SeqCst);
        let making = Making(());
        // One of the two sees the other.
        (WANTED.load(SeqCst) == usize::from(own.is_some())).then_some(making)
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        MAKING.fetch_sub(1, SeqCst);
    }
}

/// A call of one argument in which the driver waits so.
///
/// # Safety
/// As the driver's.
pub unsafe fn around_one<T>(
    real: unsafe extern "C" fn(T) -> CuResult,
    _per_thread: bool,
    argument: T,
) -> CuResult {
    let _quiet = of_call();
    // SAFETY: the caller's argument.
    unsafe { real(argument) }
}

/// The same of two.
///
/// # Safety
/// As the driver's.
pub unsafe fn around_two<T, U>(
    real: unsafe extern "C" fn(T, U) -> CuResult,
    _per_thread: bool,
    first: T,
    second: U,
) -> CuResult {
    let _quiet = of_call();
    // SAFETY: the caller's arguments.
    unsafe { real(first, second) }
}

/// Only in a forked child.
pub fn reset() {
    WANTED.store(0, SeqCst);
    MAKING.store(0, SeqCst);
}
