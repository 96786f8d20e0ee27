//! Bodies of the entry points that create, retain and destroy contexts.
//!
//! What the shim made in a context goes with it, and no thread of the shim's uses it meanwhile. None of
//! its locks is held over the driver's call, which may wait for what runs in the context.
//!
//! The primary context ends with the program's last reference. Green contexts, which the shim makes for
//! launches on some of the SMs, hold references of their own: they are given up before that.

use crate::cu::{CuResult, Ptr, SUCCESS, driver};
use crate::forms::guarded::Guarded;
use crate::slots;
use crate::{completion, forms, graphs, linger, names, poller, state, streams};
use std::collections::BTreeMap;
use std::ffi::c_int;

/// The program's references to primary contexts, by device.
static RETAINED: Guarded<BTreeMap<c_int, u64>> = Guarded::new(BTreeMap::new());

/// Destroy a context by calling the driver; `destroy` says whether it did.
fn destroying(context: usize, destroy: impl FnOnce() -> bool) {
    let closed = slots::close_context(context);
    let events = completion::take_context(context);
    linger::forget_context(context);
    // What the shim has under way in it ends or is given up; from now on none of its threads uses it.
    let was_transformed = forms::close_context(context);
    poller::wait_out();
    let made = streams::take_context(context);
    let is_gone = destroy();
    if is_gone {
        graphs::forget_context(context);
    }
    forms::closed(context, was_transformed, is_gone);
    if !is_gone {
        completion::put_back(events);
        slots::reopen(&closed);
        streams::put_back(made);
        return;
    }
    if let Some(client) = state::client() {
        completion::forget_context(client, &events);
    }
    slots::drop_context(context);
    names::forget_context(context);
}

/// `cuCtxDestroy`.
///
/// # Safety
/// As the driver's.
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
/// As the driver's.
pub unsafe fn primary_retain(
    real: unsafe extern "C" fn(*mut Ptr, c_int) -> CuResult,
    _per_thread: bool,
    ctx: *mut Ptr,
    device: c_int,
) -> CuResult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(ctx, device) };
    if result == SUCCESS {
        RETAINED.with(|all| *all.entry(device).or_default() += 1);
    }
    result
}

/// `cuDevicePrimaryCtxReset`.
///
/// # Safety
/// As the driver's.
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
    match primary_context(device) {
        context if context != 0 && state::client().is_some() => {
            forms::sm_limit::give_up(context);
            destroying(context, call);
        }
        _ => {
            call();
        }
    }
    result
}

/// `cuDevicePrimaryCtxRelease`: the last one destroys it.
///
/// # Safety
/// As the driver's.
pub unsafe fn primary_release(
    real: unsafe extern "C" fn(c_int) -> CuResult,
    _per_thread: bool,
    device: c_int,
) -> CuResult {
    // SAFETY: the caller's arguments.
    let real = || unsafe { real(device) };
    let left = RETAINED.with(|all| all.get(&device).copied().unwrap_or(0));
    let context = if left <= 1 && state::client().is_some() { primary_context(device) } else { 0 };
    let mut result = SUCCESS;
    if context == 0 {
        result = real();
    } else {
        // Else the references of the shim's green contexts would keep it.
        forms::sm_limit::give_up(context);
        destroying(context, || {
            result = real();
            result == SUCCESS && !is_active(device)
        });
    }
    if result == SUCCESS {
        RETAINED.with(|all| {
            if let Some(count) = all.get_mut(&device) {
                *count = count.saturating_sub(1);
            }
        });
    }
    result
}

/// Only in a forked child.
pub fn reset() {
    RETAINED.reset(BTreeMap::new());
}
