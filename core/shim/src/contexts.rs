//! Bodies of the entry points that create, retain and destroy contexts.
//!
//! What the shim made in a context goes with it, and no thread of the shim's uses it meanwhile. Of
//! its locks those alone that count references are held over the driver's call, which may wait for what runs in the
//! context.
//!
//! References are counted by one thread at a time: two that give up the last two at once would each take the other's
//! for the last, and one that is taken just after the last was given up would look as if the context had stayed. A
//! thread waits for its turn as long as for the driver, but no longer than some seconds.
//!
//! What is known of a context is taken away before the driver is called, and put back if the context is not
//! destroyed after all: as soon as it is gone, another thread may have a new one with the same handle.
//!
//! The primary context ends with the last reference of the program's: one for each `cuDevicePrimaryCtxRetain`, and one
//! for each green context. Green contexts that the shim makes, for launches on some of the SMs, hold references
//! of their own: they are given up before that.

use crate::greens::{GREENS, Green};
use crate::slots;
use crate::{
    asking, capture, completion, linger, names, quiesce, slot_life, state, streams, unit_profile,
};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use tally_preempt::cuda::{CuResult, Ptr, SUCCESS, driver};
use tally_preempt::graphs::{self, home};
use tally_preempt::lock::Locked;
use tally_preempt::{attach_turn, forget_context, primary_turn};

/// The program's references to primary contexts, by device.
static RETAINED: Locked<BTreeMap<c_int, u64>> = Locked::new(BTreeMap::new());

/// References to contexts made by `cuCtxAttach`, beside the one that each begins with.
static ATTACHED: Locked<BTreeMap<usize, u64>> = Locked::new(BTreeMap::new());

/// A turn to take or give up references, where it matters who gives up the last one.
fn turn<T>(of: impl FnOnce() -> Option<T>) -> Option<T> {
    state::client().and_then(|_| of())
}

/// Destroy a context by calling the driver; `destroy` says whether it did.
fn destroying(context: usize, destroy: impl FnOnce() -> bool) -> bool {
    quiesce::join();
    let closed = slots::close_context(context);
    let events = completion::take_context(context);
    unit_profile::drop_open_in(context);
    linger::forget_context(context);
    // What the shim has under way in it ends or is given up; from now on none of its threads uses it.
    let was_transformed = tally_preempt::close_context(context);
    asking::wait_out();
    unit_profile::forget_context(context);
    let made = streams::take_context(context);
    let modules = names::take_context(context);
    let homes = home::homes_of(context);
    let attached = ATTACHED.with(|all| all.remove(&context));
    let is_gone = capture::destroying(&made.handles(), destroy);
    if is_gone {
        graphs::forget(&homes);
    }
    tally_preempt::closed(context, was_transformed, is_gone);
    if !is_gone {
        completion::put_back(events);
        slots::reopen(&closed);
        streams::put_back(made);
        names::put_back(modules);
        if let Some(attached) = attached {
            ATTACHED.with(|all| all.insert(context, attached));
        }
        return false;
    }
    if let Some(client) = state::client() {
        completion::forget_context(client, &events);
    }
    slot_life::drop_context(context);
    names::forget_context(modules);
    true
}

/// `cuCtxDestroy`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn destroy(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    _per_thread: bool,
    ctx: Ptr,
) -> CuResult {
    let mut result = SUCCESS;
    let mut call = || {
        // SAFETY: the caller's arguments.
        result = unsafe { real(ctx) };
        result == SUCCESS
    };
    if state::client().is_none() || ctx.is_null() {
        call();
    } else {
        destroying(ctx as usize, call);
    }
    result
}

/// `cuCtxAttach`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn attach(
    real: unsafe extern "C" fn(*mut Ptr, c_uint) -> CuResult,
    _per_thread: bool,
    ctx: *mut Ptr,
    flags: c_uint,
) -> CuResult {
    let _turn = turn(attach_turn);
    // SAFETY: the caller's arguments.
    let result = unsafe { real(ctx, flags) };
    if result == SUCCESS && !ctx.is_null() {
        // SAFETY: the driver has just written it.
        let context = unsafe { *ctx } as usize;
        ATTACHED.with(|all| *all.entry(context).or_default() += 1);
    }
    result
}

/// `cuCtxDetach`: the last one destroys the context.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn detach(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    per_thread: bool,
    ctx: Ptr,
) -> CuResult {
    let _turn = turn(attach_turn);
    let others = ATTACHED.with(|all| all.get(&(ctx as usize)).copied());
    if others.is_none() {
        // SAFETY: the caller's arguments.
        return unsafe { destroy(real, per_thread, ctx) };
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { real(ctx) };
    if result == SUCCESS {
        ATTACHED.with(|all| match all.get_mut(&(ctx as usize)) {
            Some(left) if *left > 1 => *left -= 1,
            _ => drop(all.remove(&(ctx as usize))),
        });
    }
    result
}

/// The device's primary context, 0 if it is not active.
fn primary_context(device: c_int) -> usize {
    let d = driver();
    let (Some(retain), Some(release)) = (d.primary_retain, d.primary_release) else { return 0 };
    if !is_active(device) {
        return 0;
    }
    let mut ctx = std::ptr::null_mut();
    // SAFETY: a valid out-pointer; retained and released in turn.
    unsafe {
        if retain(&mut ctx, device) != SUCCESS {
            return 0;
        }
        release(device);
    }
    ctx as usize
}

fn is_active(device: c_int) -> bool {
    let (mut flags, mut active) = (0, 0);
    driver().primary_state.is_some_and(|f| {
        // SAFETY: valid out-pointers.
        unsafe { f(device, &mut flags, &mut active) == SUCCESS }
    }) && active != 0
}

/// `cuDevicePrimaryCtxRetain`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn primary_retain(
    real: unsafe extern "C" fn(*mut Ptr, c_int) -> CuResult,
    _per_thread: bool,
    ctx: *mut Ptr,
    device: c_int,
) -> CuResult {
    let _turn = turn(|| primary_turn(device));
    // SAFETY: the caller's arguments.
    let result = unsafe { real(ctx, device) };
    if result == SUCCESS {
        retained(device);
        if !ctx.is_null() {
            // SAFETY: the driver has just written it.
            forget_context(unsafe { *ctx } as usize);
        }
    }
    result
}

/// The program has taken a reference to a primary context.
fn retained(device: c_int) {
    RETAINED.with(|all| *all.entry(device).or_default() += 1);
}

/// The program has given up a reference to a primary context.
fn released(device: c_int) {
    RETAINED.with(|all| {
        if let Some(count) = all.get_mut(&device) {
            *count = count.saturating_sub(1);
        }
    });
}

/// The primary context, if the program is about to give up its last reference; 0 otherwise.
fn ending_primary(device: c_int) -> usize {
    let left = RETAINED.with(|all| all.get(&device).copied().unwrap_or(0));
    if left <= 1 && state::client().is_some() { primary_context(device) } else { 0 }
}

/// Destroy the shim's green contexts. No launch goes into one meanwhile, and no thread of the shim's asks for its
/// streams.
fn give_up_green(context: usize) {
    // Graphs of the shim's go with them, which may wait for what runs.
    quiesce::waiting(|| {
        tally_preempt::give_up_green(context, asking::wait_out);
        SUCCESS
    });
}

/// Give up a reference to a primary context by calling the driver; `release` says whether it did. Of the last one
/// `context` is the primary context, else 0.
fn releasing(device: c_int, context: usize, release: impl FnOnce() -> bool) {
    let is_done = if context == 0 {
        release()
    } else {
        // Else the references of the shim's green contexts would keep it.
        give_up_green(context);
        let mut is_done = false;
        destroying(context, || {
            is_done = release();
            is_done && !is_active(device)
        });
        is_done
    };
    if is_done {
        released(device);
    }
}

/// `cuDevicePrimaryCtxReset`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn primary_reset(
    real: unsafe extern "C" fn(c_int) -> CuResult,
    _per_thread: bool,
    device: c_int,
) -> CuResult {
    let mut result = SUCCESS;
    let mut call = || {
        // SAFETY: the caller's arguments.
        result = unsafe { real(device) };
        result == SUCCESS
    };
    let _turn = turn(|| primary_turn(device));
    match primary_context(device) {
        context if context != 0 && state::client().is_some() => {
            give_up_green(context);
            let greens = GREENS.with(|all| {
                let on_it = all.values().filter(|green| green.device == device);
                on_it.map(|green| green.context).filter(|of| *of != 0).collect::<Vec<_>>()
            });
            // What is in its green contexts goes, too.
            destroying(context, || destroying_all(&greens, &mut call));
        }
        _ => {
            call();
        }
    }
    result
}

/// [`destroying`], several at once.
fn destroying_all(contexts: &[usize], destroy: &mut dyn FnMut() -> bool) -> bool {
    match contexts.split_first() {
        Some((first, others)) => destroying(*first, || destroying_all(others, destroy)),
        None => destroy(),
    }
}

/// `cuDevicePrimaryCtxRelease`: the last one destroys it.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn primary_release(
    real: unsafe extern "C" fn(c_int) -> CuResult,
    _per_thread: bool,
    device: c_int,
) -> CuResult {
    let mut result = SUCCESS;
    let _turn = turn(|| primary_turn(device));
    releasing(device, ending_primary(device), || {
        // SAFETY: the caller's arguments.
        result = unsafe { real(device) };
        result == SUCCESS
    });
    result
}

/// `cuGreenCtxCreate`: it holds a reference to the primary context.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn green_create(
    real: unsafe extern "C" fn(*mut Ptr, Ptr, c_int, c_uint) -> CuResult,
    _per_thread: bool,
    green: *mut Ptr,
    description: Ptr,
    device: c_int,
    flags: c_uint,
) -> CuResult {
    let _turn = turn(|| primary_turn(device));
    // SAFETY: the caller's arguments.
    let result = unsafe { real(green, description, device, flags) };
    if result == SUCCESS && !green.is_null() {
        retained(device);
        // SAFETY: the driver has just written it.
        let green = unsafe { *green } as usize;
        GREENS.with(|all| all.insert(green, Green { device, context: 0 }));
    }
    result
}

/// `cuCtxFromGreenCtx`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn from_green(
    real: unsafe extern "C" fn(*mut Ptr, Ptr) -> CuResult,
    _per_thread: bool,
    ctx: *mut Ptr,
    green: Ptr,
) -> CuResult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(ctx, green) };
    if result == SUCCESS && !ctx.is_null() {
        // SAFETY: the driver has just written it.
        let context = unsafe { *ctx } as usize;
        GREENS.with(|all| {
            if let Some(known) = all.get_mut(&(green as usize)) {
                known.context = context;
            }
        });
    }
    result
}

/// `cuGreenCtxDestroy`. Its streams stay until they are destroyed; what is in them goes on, but nothing more can be
/// put into them, nor may they be asked for.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn green_destroy(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    _per_thread: bool,
    green: Ptr,
) -> CuResult {
    let mut result = SUCCESS;
    let mut call = || {
        // SAFETY: the caller's arguments.
        result = unsafe { real(green) };
        result == SUCCESS
    };
    // First: afterwards another thread may get the same handle.
    let Some(known) = GREENS.with(|all| all.remove(&(green as usize))) else {
        call();
        return result;
    };
    let mut end = || match state::client() {
        Some(client) => {
            let streams = streams::take_green(green as usize);
            let detached = slot_life::detach_green(client, green as usize);
            asking::wait_out();
            let is_gone = call();
            if !is_gone {
                streams::put_back(streams);
                slots::reattach_all(detached);
            }
            is_gone
        }
        None => call(),
    };
    let _turn = turn(|| primary_turn(known.device));
    let primary = ending_primary(known.device);
    releasing(known.device, primary, || match known.context {
        context if context != 0 && state::client().is_some() => destroying(context, end),
        _ => end(),
    });
    if result != SUCCESS {
        GREENS.with(|all| all.insert(green as usize, known));
    }
    result
}

/// Only in a forked child.
pub fn reset() {
    RETAINED.reset(BTreeMap::new());
    ATTACHED.reset(BTreeMap::new());
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_preempt::graphs::home::Home;

    /// As soon as the driver has destroyed a context, another thread may have made one of the same handle, while the
    /// first is still on its way back.
    #[test]
    fn what_is_made_in_a_new_context_of_the_same_handle_stays() {
        const CONTEXT: usize = 0xc0de_0010;
        const OLD: usize = 0xc0de_0020;
        const NEW: usize = 0xc0de_0030;
        let make = |handle| {
            streams::create_for_a_test(handle, CONTEXT);
            names::load_for_a_test(handle, CONTEXT);
            Home::new(CONTEXT)
        };
        let old = make(OLD);
        let mut new = None;
        let is_gone = destroying(CONTEXT, || {
            new = Some(make(NEW));
            ATTACHED.with(|all| all.insert(CONTEXT, 1));
            true
        });
        let new = new.unwrap();
        assert!(is_gone && old.is_gone() && !new.is_gone());
        for (handle, is_there) in [(OLD, false), (NEW, true)] {
            assert_eq!(streams::exists(handle), is_there);
            assert_eq!(names::is_loaded(handle), is_there);
        }
        assert_eq!(ATTACHED.with(|all| all.remove(&CONTEXT)), Some(1));
    }

    #[test]
    fn what_is_in_a_context_that_the_driver_does_not_destroy_stays() {
        const CONTEXT: usize = 0xc0de_0040;
        const HANDLE: usize = 0xc0de_0050;
        streams::create_for_a_test(HANDLE, CONTEXT);
        names::load_for_a_test(HANDLE, CONTEXT);
        let home = Home::new(CONTEXT);
        ATTACHED.with(|all| all.insert(CONTEXT, 2));
        let is_gone = destroying(CONTEXT, || {
            assert!(!streams::exists(HANDLE) && !names::is_loaded(HANDLE));
            false
        });
        assert!(!is_gone && !home.is_gone());
        assert!(streams::exists(HANDLE) && names::is_loaded(HANDLE));
        assert_eq!(ATTACHED.with(|all| all.remove(&CONTEXT)), Some(2));
    }
}
