//! What is known of contexts: which are being destroyed, and whether a context has room for streams of the shim's.

use crate::cuda::{Ptr, SUCCESS, driver};
use crate::host::host;
use crate::lock::{Held, Lock, Locked};
use crate::places;
use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

/// Streams that the shim adds in any case: of the flag, and of rescues.
const OWN_STREAMS: u32 = 2;

/// The primary context that has SM-limited streams, or may soon have; 0: none.
pub(crate) static SM_LIMITED: AtomicUsize = AtomicUsize::new(0);

/// Contexts that are being destroyed.
static CLOSING: Locked<Vec<usize>> = Locked::new(Vec::new());

/// Whether a context is being destroyed: nothing of the shim's uses it any more.
pub(crate) fn is_closing(context: usize) -> bool {
    CLOSING.with(|all| all.contains(&context))
}

/// A context is about to be destroyed.
pub(crate) fn begin_closing(context: usize) {
    CLOSING.with(|all| all.push(context));
}

/// The attempt to destroy the context is over, whether it was destroyed or not.
pub(crate) fn end_closing(context: usize) {
    // One of them: by now another thread may be destroying a later context with this handle.
    CLOSING.with(|all| {
        if let Some(at) = all.iter().position(|of| *of == context) {
            all.swap_remove(at);
        }
    });
}

/// Contexts that were asked about, and whether each is its device's primary one.
static PRIMARY: Locked<Vec<(usize, bool)>> = Locked::new(Vec::new());
/// Most contexts that [`PRIMARY`] remembers.
const PRIMARY_MAX: usize = 64;

/// Turns of those that take or give up references to the primary context of a device: who gives up the last one looks
/// whether the context is gone, which another thread may make anew.
static TURNS: [Lock; 16] = [const { Lock::new() }; 16];
/// Likewise of those that attach to contexts and detach.
static ATTACHES: Lock = Lock::new();
/// Nobody waits longer for its turn: a last release waits for what runs, which may wait for the program.
const TURN_MAX: Duration = Duration::from_secs(5);

fn turn_of(device: c_int) -> &'static Lock {
    &TURNS[device.unsigned_abs() as usize % TURNS.len()]
}

thread_local! {
    static HAS_TURN: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread takes or gives up a reference to a context until this is dropped.
#[derive(Debug)]
pub struct Turn(#[allow(dead_code, reason = "held until it is dropped")] Held<'static>);

impl Drop for Turn {
    fn drop(&mut self) {
        HAS_TURN.set(false);
    }
}

/// To take or give up a reference to the device's primary context. `None`: nobody waits any longer, or the thread has a
/// turn, for the driver calls a tool's function within.
pub fn primary_turn(device: c_int) -> Option<Turn> {
    turn(turn_of(device))
}

/// Likewise to attach to a context, or to detach.
pub fn attach_turn() -> Option<Turn> {
    turn(&ATTACHES)
}

fn turn(of: &'static Lock) -> Option<Turn> {
    if HAS_TURN.get() {
        return None;
    }
    let held = of.lock_within(TURN_MAX)?;
    HAS_TURN.set(true);
    Some(Turn(held))
}

/// Whether a context is its device's primary one. False also if it is not current to the calling thread, or its device
/// is not known just now. The driver has green contexts of that
/// one only, and keeps it for as long as there are any.
pub(crate) fn is_primary(context: usize) -> bool {
    let find = |all: &mut Vec<(usize, bool)>| all.iter().find(|(of, _)| *of == context).copied();
    if let Some((_, is_primary)) = PRIMARY.with(find) {
        return is_primary;
    }
    if driver().current_context() != context {
        return false;
    }
    let Some(primary) = primary_of_current() else { return false };
    let is_primary = primary == context;
    PRIMARY.with(|all| {
        if all.len() == PRIMARY_MAX {
            all.clear();
        }
        all.push((context, is_primary));
    });
    is_primary
}

/// The primary context of the current context's device; 0: it is not active. `None`: not known just now.
fn primary_of_current() -> Option<usize> {
    let d = driver();
    let (device_of, state) = (d.ctx_device?, d.primary_state?);
    let (retain, release) = (d.primary_retain?, d.primary_release?);
    let (mut device, mut flags, mut active) = (0, 0, 0);
    let mut context: Ptr = std::ptr::null_mut();
    // SAFETY: a valid out-pointer.
    if unsafe { device_of(&mut device) } != SUCCESS {
        return None;
    }
    // A reference of ours would hide the program's last release. Who releases may wait for this thread.
    let _turn = turn_of(device).try_lock()?;
    // SAFETY: valid out-pointers; retained and released in turn.
    unsafe {
        if state(device, &mut flags, &mut active) != SUCCESS {
            return None;
        }
        if active != 0 {
            if retain(&mut context, device) != SUCCESS {
                return None;
            }
            release(device);
        }
    }
    Some(context as usize)
}

/// A context is gone, or new: it may have the handle of another one.
pub fn forget(context: usize) {
    PRIMARY.with(|all| all.retain(|(of, _)| *of != context));
}

/// Whether what the shim adds to a launch finds hardware queues of its own: its own streams, and where launches are
/// limited to some of the SMs one for each of the program's, and for each further number of SMs that such a one has
/// launches on.
pub(crate) fn has_queues(context: usize) -> bool {
    has_queues_for(context, 0)
}

/// The same, and so many more.
pub(crate) fn has_queues_for(context: usize, more: u32) -> bool {
    let is_limited = SM_LIMITED.load(Acquire) != 0;
    let narrow = if is_limited { host().streams_used() + places::beyond_first() } else { 0 };
    host().has_queues_for(context, OWN_STREAMS + narrow + more)
}

/// Only in a forked child.
pub(crate) fn reset() {
    CLOSING.reset(Vec::new());
    PRIMARY.reset(Vec::new());
    TURNS.iter().chain([&ATTACHES]).for_each(Lock::reset);
    HAS_TURN.set(false);
    SM_LIMITED.store(0, std::sync::atomic::Ordering::SeqCst);
    places::forget();
}
