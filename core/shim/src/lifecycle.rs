//! Bodies of the entry points around initialisation, streams and graphs; for contexts see
//! [`contexts`](crate::contexts).
//!
//! A stream's slot is taken away before the driver destroys it: right after, another thread may be
//! given the same handle.

use crate::cu::{CuResult, NODE_GRAPH, NODE_KERNEL, Ptr, SUCCESS, driver};
use crate::handles::Handles;
use crate::lock::Lock;
use crate::{attach, capture, completion, graphs, poller, quiesce, resolve, slots, state, streams};
use std::ffi::{c_char, c_int, c_uint};
use std::sync::atomic::Ordering::SeqCst;

/// Graphs whose kernels are remembered.
const GRAPHS_MAX: usize = 4096;
/// Child graphs within child graphs followed this deep.
const DEPTH_MAX: usize = 16;

/// Instantiated graph to its kernel nodes + 1.
static GRAPHS: Handles<GRAPHS_MAX> = Handles::new();
static GRAPHS_LOCK: Lock = Lock::new();

/// `cuInit`: meet the core first, because MPS reads its environment there.
///
/// # Safety
/// As the driver's.
pub unsafe fn init(
    real: unsafe extern "C" fn(c_uint) -> CuResult,
    _per_thread: bool,
    flags: c_uint,
) -> CuResult {
    resolve::settle();
    attach::before_init();
    // SAFETY: the caller's arguments.
    let result = unsafe { real(flags) };
    attach::restore_environment();
    if result == SUCCESS {
        attach::after_init();
    }
    result
}

/// `cuGetProcAddress`, before CUDA 12.
///
/// # Safety
/// As the driver's.
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
    if result == SUCCESS {
        // SAFETY: the driver took them.
        unsafe { resolve::replace_found(symbol, pfn, version, flags) };
    }
    result
}

/// `cuGetProcAddress_v2`.
///
/// # Safety
/// As the driver's.
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
    if result == SUCCESS {
        // SAFETY: the driver took them.
        unsafe { resolve::replace_found(symbol, pfn, version, flags) };
    }
    result
}

/// `cuStreamDestroy`: returns at once; the stream's work goes on.
///
/// # Safety
/// As the driver's.
pub unsafe fn stream_destroy(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    per_thread: bool,
    stream: Ptr,
) -> CuResult {
    let Some(client) = state::client() else {
        // SAFETY: the caller's arguments.
        return unsafe { real(stream) };
    };
    let slot = slots::find(slots::key(stream, per_thread));
    if let Some(i) = slot {
        slots::mark_last(client, i, stream as usize);
        slots::detach(i);
    }
    let known = streams::take_stream(stream as usize);
    poller::wait_out();
    graphs::order::stream_destroyed();
    // SAFETY: the caller's arguments.
    let result = unsafe { real(stream) };
    match slot {
        Some(i) if result != SUCCESS => slots::reattach(i),
        // Nothing to wait for: the slot is free at once.
        Some(i)
            if (client.activity.busy_streams.load(SeqCst) | completion::tracked())
                & slots::bit(i)
                == 0 =>
        {
            slots::release(i);
        }
        Some(_) => poller::probe(),
        None => {}
    }
    if result == SUCCESS {
        capture::forget_destroyed(stream as usize);
    } else {
        streams::put_back(known);
    }
    result
}

/// `cuStreamBeginCapture` and `_v2`.
///
/// # Safety
/// As the driver's.
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
/// As the driver's.
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

fn capture_begins(stream: Ptr, per_thread: bool, real: impl FnOnce() -> CuResult) -> CuResult {
    if state::mode() == state::MODE_OFF {
        return real();
    }
    capture::begin(slots::explicit(stream, per_thread), real)
}

/// `cuStreamEndCapture`.
///
/// # Safety
/// As the driver's.
pub unsafe fn end_capture(
    real: unsafe extern "C" fn(Ptr, *mut Ptr) -> CuResult,
    per_thread: bool,
    stream: Ptr,
    graph: *mut Ptr,
) -> CuResult {
    // SAFETY: the caller's arguments.
    let real = || unsafe { real(stream, graph) };
    if state::mode() == state::MODE_OFF {
        return real();
    }
    capture::end(slots::explicit(stream, per_thread), real)
}

/// `cuGraphInstantiate` and its kin: all take the graph second.
///
/// # Safety
/// As the driver's.
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
    if result == SUCCESS && !exec.is_null() && state::client().is_some() {
        // SAFETY: the driver has just written it.
        let exec = unsafe { *exec };
        let nodes = count_kernels(graph, 0);
        {
            let _held = GRAPHS_LOCK.lock();
            GRAPHS.insert(exec as usize, u64::from(nodes) + 1);
        }
        graphs::instantiated(exec, graph);
    }
    result
}

fn count_kernels(graph: Ptr, depth: usize) -> u32 {
    let d = driver();
    let (Some(nodes_of), Some(type_of)) = (d.graph_nodes, d.node_type) else { return 0 };
    let mut count = 0;
    // SAFETY: a live graph; with no array the driver only counts.
    if unsafe { nodes_of(graph, std::ptr::null_mut(), &mut count) } != SUCCESS || count == 0 {
        return 0;
    }
    let mut nodes = vec![std::ptr::null_mut(); count];
    // SAFETY: an array of `count`.
    if unsafe { nodes_of(graph, nodes.as_mut_ptr(), &mut count) } != SUCCESS {
        return 0;
    }
    let mut kernels = 0_u32;
    for node in nodes.into_iter().take(count) {
        let mut kind = -1;
        // SAFETY: a node of a live graph; a valid out-pointer.
        if unsafe { type_of(node, &mut kind) } != SUCCESS {
            continue;
        }
        kernels = kernels.saturating_add(match kind {
            NODE_KERNEL => 1,
            NODE_GRAPH if depth < DEPTH_MAX => {
                let mut child: Ptr = std::ptr::null_mut();
                // SAFETY: a child graph node; a valid out-pointer.
                let found = d.child_graph.map(|f| unsafe { f(node, &mut child) });
                if found == Some(SUCCESS) { count_kernels(child, depth + 1) } else { 0 }
            }
            _ => 0,
        });
    }
    kernels
}

/// Kernel nodes of an instantiated graph; 0 if unknown.
#[inline]
pub fn kernel_nodes(exec: Ptr) -> u32 {
    GRAPHS.get(exec as usize).map_or(0, |n| (n - 1) as u32)
}

/// `cuGraphExecDestroy`.
///
/// # Safety
/// As the driver's.
pub unsafe fn graph_exec_destroy(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    _per_thread: bool,
    exec: Ptr,
) -> CuResult {
    // First: afterwards another thread may get the same handle.
    if GRAPHS.get(exec as usize).is_some() {
        let _held = GRAPHS_LOCK.lock();
        GRAPHS.remove(exec as usize);
    }
    graphs::destroyed(exec);
    // SAFETY: the caller's arguments.
    quiesce::entered(|| unsafe { real(exec) })
}

/// Only in a forked child.
pub fn reset() {
    GRAPHS_LOCK.reset();
}
