use crate::capture;
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::ffi::{In, Out, exports, exports_per_thread};
use crate::graph::{Graph, Node};
use crate::registry::handle_of;
use crate::stream::{NullStream, resolve, resolve_any};
use crate::sync::lock;
use std::cell::RefCell;
use std::sync::Arc;

const NONE: u32 = 0;
const ACTIVE: u32 = 1;
const INVALIDATED: u32 = 2;

thread_local! {
    /// What `dependencies_out` points to until the thread asks again.
    static DEPENDENCIES: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

struct Info<'a> {
    status: &'a Out<u32>,
    id: Option<&'a Out<u64>>,
    graph: Option<&'a Out<usize>>,
    dependencies: Option<&'a Out<*const usize>>,
    count: Option<&'a Out<usize>>,
}

fn info(stream: usize, null: NullStream, out: &Info<'_>) -> CuResult {
    let stream = resolve_any(stream, null)?;
    let Some(fork) = capture::fork_of(&stream) else { return out.status.set(NONE) };
    let valid = fork.session.is_valid();
    out.status.set(if valid { ACTIVE } else { INVALIDATED })?;
    if !valid {
        return Ok(());
    }
    if let Some(id) = out.id {
        id.set_if(fork.session.id);
    }
    if let Some(graph) = out.graph {
        graph.set_if(driver()?.graphs.insert(&fork.session.graph));
    }
    let handles: Vec<usize> = fork.after.iter().map(handle_of).collect();
    if let Some(count) = out.count {
        count.set_if(handles.len());
    }
    if let Some(dependencies) = out.dependencies {
        let kept = DEPENDENCIES.try_with(|kept| {
            *kept.borrow_mut() = handles;
            kept.borrow().as_ptr()
        });
        dependencies.set_if(kept.unwrap_or(std::ptr::null()));
    }
    Ok(())
}

/// The nodes behind `count` handles.
pub(super) fn nodes(graph: &Graph, handles: &In<usize>, count: usize) -> CuResult<Vec<Arc<Node>>> {
    let node = |handle| graph.node(handle).ok_or(CuError::INVALID_VALUE);
    handles.to_vec(count)?.into_iter().map(node).collect()
}

fn update(
    stream: usize,
    null: NullStream,
    handles: &In<usize>,
    count: usize,
    flags: u32,
) -> CuResult {
    let stream = resolve(stream, null)?;
    let mut capture = lock(&stream.capture);
    let fork = capture.as_mut().ok_or(CuError::ILLEGAL_STATE)?;
    let nodes = nodes(&fork.session.graph, handles, count)?;
    match flags {
        0 => fork.after.extend(nodes),
        1 => fork.after = nodes,
        _ => return Err(CuError::INVALID_VALUE),
    }
    Ok(())
}

fn begin_to_graph(
    stream: usize,
    null: NullStream,
    graph: usize,
    after: &In<usize>,
    count: usize,
    mode: u32,
) -> CuResult {
    let stream = resolve(stream, null)?;
    let graph = driver()?.graphs.get(graph)?;
    let after = nodes(&graph, after, count)?;
    let _launching = stream.context.launching();
    capture::begin(&stream, mode, graph, after)
}

exports! {
    fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) {
        mode.set(capture::exchange_mode(mode.get()?)?)
    }
}

exports_per_thread! {
    fn cuStreamBeginCapture_v2 / cuStreamBeginCapture_v2_ptsz |null| (stream: usize, mode: u32) {
        let stream = resolve(stream, null)?;
        let _launching = stream.context.launching();
        capture::begin(&stream, mode, Arc::default(), Vec::new())
    }

    fn cuStreamBeginCaptureToGraph / cuStreamBeginCaptureToGraph_ptsz |null| (
        stream: usize, graph: usize, after: In<usize>, _edges: *const u8, count: usize, mode: u32
    ) {
        begin_to_graph(stream, null, graph, &after, count, mode)
    }

    fn cuStreamEndCapture / cuStreamEndCapture_ptsz |null| (stream: usize, graph: Out<usize>) {
        let stream = resolve(stream, null)?;
        graph.set_if(0);
        let captured = capture::end(&stream)?;
        graph.set(driver()?.graphs.insert(&captured))
    }

    fn cuStreamIsCapturing / cuStreamIsCapturing_ptsz |null| (stream: usize, status: Out<u32>) {
        let out = Info { status: &status, id: None, graph: None, dependencies: None, count: None };
        info(stream, null, &out)
    }

    fn cuStreamGetCaptureInfo / cuStreamGetCaptureInfo_ptsz |null| (
        stream: usize, status: Out<u32>, id: Out<u64>
    ) {
        let (graph, dependencies, count) = (None, None, None);
        info(stream, null, &Info { status: &status, id: Some(&id), graph, dependencies, count })
    }

    fn cuStreamGetCaptureInfo_v2 / cuStreamGetCaptureInfo_v2_ptsz |null| (
        stream: usize, status: Out<u32>, id: Out<u64>, graph: Out<usize>,
        dependencies: Out<*const usize>, count: Out<usize>
    ) {
        let (graph, dependencies, count) = (Some(&graph), Some(&dependencies), Some(&count));
        info(stream, null, &Info { status: &status, id: Some(&id), graph, dependencies, count })
    }

    fn cuStreamGetCaptureInfo_v3 / cuStreamGetCaptureInfo_v3_ptsz |null| (
        stream: usize, status: Out<u32>, id: Out<u64>, graph: Out<usize>,
        dependencies: Out<*const usize>, edges: Out<*const u8>, count: Out<usize>
    ) {
        edges.set_if(std::ptr::null());
        let (graph, dependencies, count) = (Some(&graph), Some(&dependencies), Some(&count));
        info(stream, null, &Info { status: &status, id: Some(&id), graph, dependencies, count })
    }

    fn cuStreamUpdateCaptureDependencies / cuStreamUpdateCaptureDependencies_ptsz |null| (
        stream: usize, nodes: In<usize>, count: usize, flags: u32
    ) {
        update(stream, null, &nodes, count, flags)
    }

    fn cuStreamUpdateCaptureDependencies_v2 / cuStreamUpdateCaptureDependencies_v2_ptsz |null| (
        stream: usize, nodes: In<usize>, _edges: *const u8, count: usize, flags: u32
    ) {
        update(stream, null, &nodes, count, flags)
    }
}
