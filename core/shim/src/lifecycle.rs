//! Bodies of the entry points around initialisation, streams and graphs; for contexts see
//! [`contexts`](crate::contexts).
//!
//! A stream's slot is taken away before the driver destroys it: right after, another thread may be
//! given the same handle.

use crate::{
    asking, attach, capture, completion, enter, events, exec_nodes, poller, quiesce, resolve,
    slot_life, slots, state, streams, tools, units,
};
use std::ffi::{c_char, c_int, c_uint};
use std::sync::atomic::Ordering::SeqCst;
use tally_preempt::cuda::{CuResult, Ptr, SUCCESS};
use tally_preempt::graphs::{self, order};

/// `cuInit`: meet the core first, because MPS reads its environment there.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn init(
    real: unsafe extern "C" fn(c_uint) -> CuResult,
    _per_thread: bool,
    flags: c_uint,
) -> CuResult {
    resolve::settle();
    attach::before_init();
    // SAFETY: the caller's arguments.
    let result = unsafe { real(flags) };
    enter::restore_environment();
    if result == SUCCESS {
        attach::after_init();
    }
    result
}

/// `cuGetProcAddress`, before CUDA 12.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn get_proc_address(
    real: unsafe extern "C" fn(*const c_char, *mut Ptr, c_int, u64) -> CuResult,
    _per_thread: bool,
    symbol: *const c_char,
    pfn: *mut Ptr,
    version: c_int,
    flags: u64,
) -> CuResult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(symbol, pfn, version, flags) };
    // SAFETY: the driver took them.
    if result == SUCCESS && unsafe { resolve::replace_found(symbol, pfn, version, flags) } {
        // It may wait for streams.
        quiesce::join();
        // The report tells why from now on.
        tools::whole_because();
    }
    result
}

/// `cuGetProcAddress_v2`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn get_proc_address_v2(
    real: unsafe extern "C" fn(*const c_char, *mut Ptr, c_int, u64, *mut c_int) -> CuResult,
    _per_thread: bool,
    symbol: *const c_char,
    pfn: *mut Ptr,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> CuResult {
    // SAFETY: the caller's arguments; the status is the driver's to write.
    let result = unsafe { real(symbol, pfn, version, flags, status) };
    // SAFETY: the driver took them.
    if result == SUCCESS && unsafe { resolve::replace_found(symbol, pfn, version, flags) } {
        // It may wait for streams.
        quiesce::join();
        // The report tells why from now on.
        tools::whole_because();
    }
    result
}

/// `cuStreamDestroy`: returns at once; the stream's work goes on.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn stream_destroy(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    per_thread: bool,
    stream: Ptr,
) -> CuResult {
    let Some(client) = state::client() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(stream) };
    };
    quiesce::join();
    let slot = slots::find(slots::key(stream, per_thread));
    if let Some(i) = slot {
        slot_life::mark_last(client, i, stream as usize);
        slots::detach(i);
    }
    let known = streams::take_stream(stream as usize);
    asking::wait_out();
    order::stream_destroyed();
    // Before: then its handle may be another stream's.
    events::forget_stream(stream as usize);
    let mut result = SUCCESS;
    capture::destroying(&[stream as usize], || {
        // SAFETY: the caller's arguments.
        result = unsafe { real(stream) };
        result == SUCCESS
    });
    match slot {
        Some(i) if result != SUCCESS => slots::reattach(i),
        // Nothing to wait for: the slot is free at once.
        Some(i)
            if (client.activity.busy_streams.load(SeqCst) | completion::tracked())
                & slots::bit(i)
                == 0 =>
        {
            units::forget(client, i);
            slots::release(i);
        }
        Some(_) => poller::probe(),
        None => {}
    }
    if result != SUCCESS {
        streams::put_back(known);
    }
    result
}

/// `cuStreamBeginCapture` and `_v2`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn begin_capture(
    real: unsafe extern "C" fn(Ptr, c_int) -> CuResult,
    per_thread: bool,
    stream: Ptr,
    mode: c_int,
) -> CuResult {
    // SAFETY: the caller's arguments.
    capture_begins(stream, per_thread, || unsafe { real(stream, mode) })
}

/// `cuStreamBeginCaptureToGraph`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
#[allow(clippy::too_many_arguments)]
pub unsafe fn begin_capture_to_graph(
    real: unsafe extern "C" fn(Ptr, Ptr, Ptr, Ptr, usize, c_int) -> CuResult,
    per_thread: bool,
    stream: Ptr,
    graph: Ptr,
    dependencies: Ptr,
    data: Ptr,
    count: usize,
    mode: c_int,
) -> CuResult {
    capture_begins(stream, per_thread, || {
        // SAFETY: the caller's arguments.
        unsafe { real(stream, graph, dependencies, data, count, mode) }
    })
}

/// Other calls that begin a capture: all take the stream first.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn begin_capture_otherwise(
    real: unsafe extern "C" fn(Ptr, usize, usize, usize, usize) -> CuResult,
    per_thread: bool,
    stream: Ptr,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
) -> CuResult {
    // SAFETY: the caller's arguments, those it did not pass being passed on unread.
    capture_begins(stream, per_thread, || unsafe { real(stream, a, b, c, d) })
}

fn capture_begins(stream: Ptr, per_thread: bool, real: impl FnOnce() -> CuResult) -> CuResult {
    if state::mode() == state::MODE_OFF {
        return real();
    }
    capture::begin(slots::explicit(stream, per_thread), real)
}

/// `cuStreamEndCapture`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn end_capture(
    real: unsafe extern "C" fn(Ptr, *mut Ptr) -> CuResult,
    per_thread: bool,
    stream: Ptr,
    graph: *mut Ptr,
) -> CuResult {
    // SAFETY: the caller's arguments.
    capture_ends(stream, per_thread, || unsafe { real(stream, graph) })
}

/// `cuStreamEndCaptureToCig`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn end_capture_otherwise(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    per_thread: bool,
    stream: Ptr,
) -> CuResult {
    // SAFETY: the caller's arguments.
    capture_ends(stream, per_thread, || unsafe { real(stream) })
}

fn capture_ends(stream: Ptr, per_thread: bool, real: impl FnOnce() -> CuResult) -> CuResult {
    if state::mode() == state::MODE_OFF {
        return real();
    }
    capture::end(slots::explicit(stream, per_thread), real)
}

/// `cuGraphInstantiate` and its kin: all take the graph second.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn graph_instantiate(
    real: unsafe extern "C" fn(*mut Ptr, Ptr, usize, usize, usize) -> CuResult,
    _per_thread: bool,
    exec: *mut Ptr,
    graph: Ptr,
    a: usize,
    b: usize,
    c: usize,
) -> CuResult {
    // SAFETY: the caller's arguments, those it did not pass being passed on unread.
    let result = unsafe { real(exec, graph, a, b, c) };
    if result != SUCCESS || exec.is_null() || state::mode() == state::MODE_OFF {
        return result;
    }
    // SAFETY: the driver has just written it.
    let exec = unsafe { *exec };
    // Also before there is a core: it may be launched beside those that come later.
    graphs::note_flags(exec);
    if state::client().is_some() {
        exec_nodes::instantiated(exec, graph);
        // By class, not by what grant there is now: programs make their graphs when they start, and that may be
        // while nothing else runs.
        if state::is_best_effort() {
            graphs::instantiated(exec, graph);
        }
    }
    result
}

/// `cuGraphRetainUserObject`: the object lives as long as any copy of the graph, and the program may wait for its end.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn graph_retains(
    real: unsafe extern "C" fn(Ptr, usize, usize, usize) -> CuResult,
    _per_thread: bool,
    graph: Ptr,
    a: usize,
    b: usize,
    c: usize,
) -> CuResult {
    graphs::keep_no_more();
    // SAFETY: the caller's arguments.
    unsafe { real(graph, a, b, c) }
}

/// `cuGraphExecDestroy`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn graph_exec_destroy(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    _per_thread: bool,
    exec: Ptr,
) -> CuResult {
    // First: afterwards another thread may get the same handle.
    exec_nodes::forget(exec);
    graphs::destroyed(exec);
    // SAFETY: the caller's arguments.
    quiesce::while_open(|| unsafe { real(exec) })
}

/// `cuGraphExecUpdate` and everything else that changes an exec: all take it first, and no more
/// than three arguments after it, which are passed on unread.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn exec_changes(
    real: unsafe extern "C" fn(Ptr, usize, usize, usize) -> CuResult,
    _per_thread: bool,
    exec: Ptr,
    a: usize,
    b: usize,
    c: usize,
) -> CuResult {
    // First, and also if the driver then refuses: nothing says that it left all as it was.
    graphs::changed(exec);
    // SAFETY: the caller's arguments.
    unsafe { real(exec, a, b, c) }
}
