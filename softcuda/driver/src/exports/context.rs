use crate::capture;
use crate::config::{DRIVER_VERSION, PRIORITY_RANGE};
use crate::context::{Context, Current, current, current_any, current_entry, with_stack};
use crate::device::check;
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::ffi::{Out, exports};
use crate::registry::{gone, handle_of};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

const STACK_SIZE: u32 = 0;

fn create(out: &Out<usize>, flags: u32, device: i32) -> CuResult {
    let driver = driver()?;
    check(device)?;
    out.check()?;
    Context::check_flags(flags)?;
    let context = Context::new(driver.new_id(), false, flags);
    driver.contexts.insert(&context);
    with_stack(|stack| stack.push(Current { context: context.clone(), green: None }))?;
    out.set(handle_of(&context))
}

/// The context behind a handle, or the current one for null.
pub(super) fn find(handle: usize) -> CuResult<Current> {
    if handle == 0 {
        return current_entry();
    }
    Current::find(driver()?, handle)
}

/// Ends a context, which is taken off the calling thread's stack if it is on top.
fn destroy(found: &Arc<Context>) -> CuResult {
    let driver = driver()?;
    let _ = driver.contexts.remove(handle_of(found));
    found.tear_down(driver);
    with_stack(|stack| {
        if stack.last().is_some_and(|top| Arc::ptr_eq(&top.context, found)) {
            stack.pop();
        }
    })
}

fn synchronize(current: &Current) -> CuResult {
    capture::forbid()?;
    current.context.check()?;
    match &current.green {
        Some(green) => green.synchronize(),
        None => current.context.synchronize(),
    }
}

exports! {
    fn cuCtxCreate_v2(context: Out<usize>, flags: u32, device: i32) {
        create(&context, flags, device)
    }

    fn cuCtxCreate_v3(
        context: Out<usize>,
        _affinity: *mut c_void,
        affinities: i32,
        flags: u32,
        device: i32,
    ) {
        if affinities != 0 {
            return Err(CuError::NOT_SUPPORTED);
        }
        create(&context, flags, device)
    }

    fn cuCtxCreate_v4(context: Out<usize>, parameters: *mut c_void, flags: u32, device: i32) {
        if !parameters.is_null() {
            return Err(CuError::NOT_SUPPORTED);
        }
        create(&context, flags, device)
    }

    fn cuCtxDestroy_v2(context: usize) {
        let driver = driver()?;
        let found = driver
            .contexts
            .find(context)
            .ok_or_else(|| gone::<Context>(context, CuError::INVALID_CONTEXT))?;
        if found.primary {
            return Err(CuError::INVALID_CONTEXT);
        }
        destroy(&found)
    }

    fn cuCtxAttach(context: Out<usize>, flags: u32) {
        let current = current()?;
        context.check()?;
        if flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        if current.primary {
            return Err(CuError::INVALID_CONTEXT);
        }
        current.attach();
        context.set(handle_of(&current))
    }

    fn cuCtxDetach(context: usize) {
        let current = current_any()?;
        if current.primary || handle_of(&current) != context {
            return Err(CuError::INVALID_CONTEXT);
        }
        if current.detach() { destroy(&current) } else { Ok(()) }
    }

    fn cuCtxPushCurrent_v2(context: usize) {
        let context = Current::find(driver()?, context)?;
        with_stack(|stack| stack.push(context))
    }

    fn cuCtxPopCurrent_v2(context: Out<usize>) {
        driver()?;
        let popped = with_stack(Vec::pop)?.ok_or(CuError::INVALID_CONTEXT)?;
        context.set_if(popped.handle());
        Ok(())
    }

    fn cuCtxSetCurrent(context: usize) {
        let driver = driver()?;
        if context == 0 {
            return with_stack(|stack| drop(stack.pop()));
        }
        let context = Current::find(driver, context)?;
        with_stack(|stack| {
            stack.pop();
            stack.push(context);
        })
    }

    fn cuCtxGetCurrent(context: Out<usize>) {
        driver()?;
        context.set(current_entry().map_or(0, |current| current.handle()))
    }

    fn cuCtxGetDevice(device: Out<i32>) {
        current_any()?;
        device.set(0)
    }

    fn cuCtxGetDevice_v2(device: Out<i32>, context: usize) {
        find(context)?;
        device.set(0)
    }

    fn cuCtxGetFlags(flags: Out<u32>) {
        flags.set(current_any()?.flags.load(SeqCst))
    }

    fn cuCtxSetFlags(flags: u32) {
        current_any()?.set_flags(flags)
    }

    fn cuCtxGetId(context: usize, id: Out<u64>) {
        let Current { context, green } = find(context)?;
        id.set(green.map_or(context.id, |green| green.id))
    }

    fn cuCtxSynchronize() {
        current()?;
        synchronize(&current_entry()?)
    }

    fn cuCtxSynchronize_v2(context: usize) {
        synchronize(&find(context)?)
    }

    fn cuCtxSetLimit(limit: u32, value: usize) {
        let context = current()?;
        // A larger stack is made when nothing runs.
        let _alone = if limit == STACK_SIZE { Some(context.synchronize_alone()?) } else { None };
        context.set_limit(limit, value as u64)
    }

    fn cuCtxGetLimit(value: Out<usize>, limit: u32) {
        value.set(current()?.limit(limit)? as usize)
    }

    fn cuCtxGetCacheConfig(config: Out<u32>) {
        config.set(current()?.cache_config.load(SeqCst))
    }

    fn cuCtxSetCacheConfig(config: u32) {
        if config > 3 {
            return Err(CuError::INVALID_VALUE);
        }
        current()?.cache_config.store(config, SeqCst);
        Ok(())
    }

    fn cuCtxGetSharedMemConfig(config: Out<u32>) {
        config.set(current()?.shared_config.load(SeqCst))
    }

    fn cuCtxSetSharedMemConfig(config: u32) {
        if config > 2 {
            return Err(CuError::INVALID_VALUE);
        }
        current()?.shared_config.store(config, SeqCst);
        Ok(())
    }

    fn cuCtxGetApiVersion(context: usize, version: Out<u32>) {
        find(context)?;
        version.set(DRIVER_VERSION as u32)
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        current()?;
        least.set_if(PRIORITY_RANGE.0);
        greatest.set_if(PRIORITY_RANGE.1);
        Ok(())
    }

    fn cuCtxResetPersistingL2Cache() {
        current()?;
        Ok(())
    }

    fn cuCtxEnablePeerAccess(_peer: usize, _flags: u32) {
        current()?;
        Err(CuError::PEER_ACCESS_UNSUPPORTED)
    }
}
