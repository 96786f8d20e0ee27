//! Calls in which the driver waits for all that runs, and keeps launches waiting meanwhile.
//!
//! `cuMemFree`, loading a module and some more wait until everything in their context has ended, and hold the
//! driver's locks as they do. A cut launch that is [stuck](super::progress) ends only with the help of another
//! launch, which would wait for such a call, which waits for the stuck one: nothing would ever end.
//! Which calls do so was measured (`tests/gpu`, `waits`).
//!
//! So these calls wait here, before they reach the driver, until nothing is under way that could need help, and until they
//! return launches go whole. Mostly they wait no longer for that, for the driver waits for the same.
//!
//! Known gap, for kernels whose waits their code does not show (others are not cut there, see
//! [`making`](super::making)): where kernels are loaded one by one, the launch after a kernel was looked up loads it, even if it is of another kernel
//! and in another stream; and on the GPU that launch, and those behind it, wait for all that runs. If help is that
//! launch, it does not come. To have the program's launches wait here for that was tried: the longer the load is put
//! off, the likelier is help the launch that has to do it.

use super::{gate, watch};
use crate::cu::CuResult;
use crate::{attendant, log};
use std::ffi::c_int;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
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
    fn within(patience: Duration, is_busy: fn() -> bool) -> Option<Self> {
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
    // A core that does not cut may have followed one that did.
    if !super::is_enabled() && !watch::is_open() {
        return None;
    }
    let quiet = Quiet::within(CALL_PATIENCE, watch::may_need_help);
    if quiet.is_none() {
        log!(
            "a cut launch has been under way for {CALL_PATIENCE:?}: a call waits no longer for it"
        );
    }
    Some(quiet.unwrap_or_else(Quiet::want))
}

/// Before a context is destroyed, if launches are cut in it.
pub fn of_end(context: usize) -> Option<Quiet> {
    if context != 0 && context == gate::context() { of_call() } else { None }
}

/// While it lives, a cut launch is being made.
#[derive(Debug)]
pub struct Making(());

impl Making {
    /// From now on. `None`: somebody wants quiet.
    pub fn begin() -> Option<Self> {
        MAKING.fetch_add(1, SeqCst);
        let making = Making(());
        // One of the two sees the other.
        (WANTED.load(SeqCst) == 0).then_some(making)
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        MAKING.fetch_sub(1, SeqCst);
    }
}

/// `cuMemFree`, `cuMemFreeHost`, `cuMemHostUnregister`.
///
/// # Safety
/// As the driver's.
pub unsafe fn gives_back<T: Default + PartialEq>(
    real: unsafe extern "C" fn(T) -> CuResult,
    _per_thread: bool,
    memory: T,
) -> CuResult {
    // Programs give back nothing, too.
    let _quiet = if memory == T::default() { None } else { of_call() };
    // SAFETY: the caller's argument.
    unsafe { real(memory) }
}

/// `cuCtxSetLimit`.
///
/// # Safety
/// As the driver's.
pub unsafe fn set_limit(
    real: unsafe extern "C" fn(c_int, usize) -> CuResult,
    _per_thread: bool,
    limit: c_int,
    value: usize,
) -> CuResult {
    /// `CU_LIMIT_STACK_SIZE`: the stacks move.
    const STACK: c_int = 0;
    let _quiet = if limit == STACK { of_call() } else { None };
    // SAFETY: the caller's arguments.
    unsafe { real(limit, value) }
}

/// Only in a forked child.
pub fn reset() {
    WANTED.store(0, SeqCst);
    MAKING.store(0, SeqCst);
}
