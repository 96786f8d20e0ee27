//! `cuStream*`: making, asking, waiting, and host functions.

use crate::capture;
use crate::config::PRIORITY_RANGE;
use crate::context::{current, current_green, needs_context_if_strict};
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::event::Last;
use crate::ffi::{Out, exports, exports_per_thread};
use crate::op::{HostFn, Op, StreamCallback, UserData};
use crate::registry::handle_of;
use crate::stream::{NON_BLOCKING, NullStream, Stream, StreamKind, resolve, resolve_any};
use crate::sync::lock;
use std::ffi::c_void;

/// A priority brought into the range that there is.
pub(super) fn clamped(priority: i32) -> i32 {
    priority.clamp(PRIORITY_RANGE.1, PRIORITY_RANGE.0)
}

fn create(out: &Out<usize>, flags: u32, priority: i32) -> CuResult {
    let context = current()?;
    out.check()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let (kind, priority) = (StreamKind::Created, clamped(priority));
    let _launching = context.launching();
    let stream = match current_green() {
        Some(green) => green.stream(kind, flags, priority)?,
        None => {
            let stream = Stream::new(&context, kind, flags, priority, None)?;
            context.add_stream(stream.clone());
            stream
        }
    };
    out.set(driver()?.streams.insert(&stream))
}

/// Submits work that runs on the host.
fn submit_host(
    stream: usize,
    null: NullStream,
    function: Option<HostFn>,
    data: *mut c_void,
) -> CuResult {
    let stream = resolve(stream, null)?;
    let function = function.ok_or(CuError::INVALID_VALUE)?;
    stream.submit(Op::Host { function, data: UserData(data) })
}

exports! {
    fn cuStreamCreate(stream: Out<usize>, flags: u32) {
        create(&stream, flags, 0)
    }

    fn cuStreamCreateWithPriority(stream: Out<usize>, flags: u32, priority: i32) {
        create(&stream, flags, priority)
    }

    fn cuStreamDestroy_v2(stream: usize) {
        let driver = driver()?;
        if stream <= 2 {
            return Err(CuError::INVALID_HANDLE);
        }
        let found = driver.streams.get(stream)?;
        let _launching = found.context.launching();
        driver.streams.remove(stream)?;
        found.context.end_stream(&found);
        Ok(())
    }
}

exports_per_thread! {
    fn cuStreamSynchronize / cuStreamSynchronize_ptsz |null| (stream: usize) {
        let stream = resolve(stream, null)?;
        capture::forbid_on(&stream)?;
        capture::forbid()?;
        stream.synchronize();
        stream.context.check()
    }

    fn cuStreamQuery / cuStreamQuery_ptsz |null| (stream: usize) {
        let stream = resolve(stream, null)?;
        capture::forbid_on(&stream)?;
        capture::forbid()?;
        if !stream.is_ready() {
            return Err(CuError::NOT_READY);
        }
        stream.context.check()
    }

    fn cuStreamWaitEvent / cuStreamWaitEvent_ptsz |null| (stream: usize, event: usize, flags: u32) {
        needs_context_if_strict()?;
        let stream = resolve(stream, null)?;
        let event = driver()?.events.get(event)?;
        // CU_EVENT_WAIT_EXTERNAL makes a node of it.
        if flags > 1 {
            return Err(CuError::INVALID_VALUE);
        }
        if flags == 1 && capture::is_capturing(&stream) {
            return stream.submit(Op::WaitEvent(event));
        }
        let last = lock(&event.last).clone();
        match last {
            Last::Never => Ok(()),
            Last::Recorded(_) if capture::is_capturing(&stream) => {
                Err(CuError::STREAM_CAPTURE_ISOLATION)
            }
            Last::Recorded(record) => stream.submit(Op::Wait(record)),
            Last::Captured(fork) => capture::join(&stream, &fork),
        }
    }

    fn cuStreamGetCtx / cuStreamGetCtx_ptsz |null| (stream: usize, context: Out<usize>) {
        context.set(handle_of(&resolve_any(stream, null)?.context))
    }

    fn cuStreamGetCtx_v2 / cuStreamGetCtx_v2_ptsz |null| (
        stream: usize, context: Out<usize>, green: Out<usize>
    ) {
        let stream = resolve_any(stream, null)?;
        green.set_if(stream.green.as_ref().map_or(0, handle_of));
        context.set(handle_of(&stream.context))
    }

    fn cuStreamGetFlags / cuStreamGetFlags_ptsz |null| (stream: usize, flags: Out<u32>) {
        flags.set(resolve_any(stream, null)?.flags)
    }

    fn cuStreamGetPriority / cuStreamGetPriority_ptsz |null| (stream: usize, priority: Out<i32>) {
        priority.set(resolve_any(stream, null)?.priority)
    }

    fn cuStreamGetId / cuStreamGetId_ptsz |null| (stream: usize, id: Out<u64>) {
        id.set(resolve_any(stream, null)?.id)
    }

    fn cuStreamGetDevice / cuStreamGetDevice_ptsz |null| (stream: usize, device: Out<i32>) {
        resolve_any(stream, null)?;
        device.set(0)
    }

    fn cuStreamCopyAttributes / cuStreamCopyAttributes_ptsz |null| (to: usize, from: usize) {
        resolve(to, null)?;
        resolve(from, null).map(drop)
    }

    fn cuStreamGetAttribute / cuStreamGetAttribute_ptsz |null| (
        stream: usize, attribute: u32, value: Out<[u8; 64]>
    ) {
        let stream = resolve(stream, null)?;
        let mut bytes = [0; 64];
        match attribute {
            // Priority; the others have nothing to say here.
            8 => bytes[..4].copy_from_slice(&stream.priority.to_ne_bytes()),
            1 | 3 | 9 | 10 => {}
            _ => return Err(CuError::INVALID_VALUE),
        }
        value.set(bytes)
    }

    fn cuStreamSetAttribute / cuStreamSetAttribute_ptsz |null| (
        stream: usize, attribute: u32, _value: *const c_void
    ) {
        resolve(stream, null)?;
        // Hints: access window, synchronisation policy, domains.
        if matches!(attribute, 1 | 3 | 9 | 10) { Ok(()) } else { Err(CuError::INVALID_VALUE) }
    }

    fn cuStreamAddCallback / cuStreamAddCallback_ptsz |null| (
        stream: usize, callback: Option<StreamCallback>, data: *mut c_void, flags: u32
    ) {
        let handle = stream;
        let stream = resolve(stream, null)?;
        let function = callback.ok_or(CuError::INVALID_VALUE)?;
        if flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        capture::forbid_on(&stream)?;
        stream.submit(Op::Callback { function, stream: handle, data: UserData(data) })
    }

    fn cuLaunchHostFunc / cuLaunchHostFunc_ptsz |null| (
        stream: usize, function: Option<HostFn>, data: *mut c_void
    ) {
        submit_host(stream, null, function, data)
    }

    fn cuLaunchHostFunc_v2 / cuLaunchHostFunc_v2_ptsz |null| (
        stream: usize, function: Option<HostFn>, data: *mut c_void, _sync_mode: u32
    ) {
        submit_host(stream, null, function, data)
    }
}
