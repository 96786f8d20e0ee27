use super::capture::nodes;
use super::copy::Memcpy3d;
use super::graph_params::{FillParams, HostParams, KernelParams, KernelParams2, Params};
use crate::context::current;
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::ffi::{In, Out, exports, exports_per_thread};
use crate::graph::{Exec, Graph, Node};
use crate::op::Op;
use crate::registry::handle_of;
use crate::stream::resolve;
use crate::sync::lock;
use std::ffi::c_char;
use std::sync::Arc;

pub(super) fn graph(handle: usize) -> CuResult<Arc<Graph>> {
    driver()?.graphs.get(handle)
}

pub(super) fn exec(handle: usize) -> CuResult<Arc<Exec>> {
    driver()?.execs.get(handle)
}

/// A node and the graph that it is in.
pub(super) fn node(handle: usize) -> CuResult<(Arc<Graph>, Arc<Node>)> {
    let found = driver()?.graphs.find_map(|g| Some((g.clone(), g.node(handle)?)));
    found.ok_or(CuError::INVALID_VALUE)
}

fn add(out: &Out<usize>, into: usize, after: &In<usize>, count: usize, op: Op) -> CuResult {
    let graph = graph(into)?;
    out.check()?;
    let after = nodes(&graph, after, count)?;
    out.set(handle_of(&graph.add(op, after)?))
}

/// Fills an array whose size is asked for first: with a null array only the
/// count is written, otherwise as many as fit, and zeros behind them.
fn list(out: &Out<usize>, count: &Out<usize>, handles: &[usize]) -> CuResult {
    if out.is_null() {
        return count.set(handles.len());
    }
    let room = count.get()?;
    let padded = handles.iter().copied().chain(std::iter::repeat(0));
    out.set_slice(padded, room);
    count.set(handles.len().min(room))
}

fn list_edges(
    graph_handle: usize,
    from: &Out<usize>,
    to: &Out<usize>,
    count: &Out<usize>,
) -> CuResult {
    let edges = graph(graph_handle)?.edges();
    if from.is_null() || to.is_null() {
        return count.set(edges.len());
    }
    let room = count.get()?;
    from.set_slice(edges.iter().map(|e| e.0), room);
    to.set_slice(edges.iter().map(|e| e.1), room);
    count.set(edges.len().min(room))
}

fn connect(graph_handle: usize, from: &In<usize>, to: &In<usize>, count: usize) -> CuResult {
    let graph = graph(graph_handle)?;
    let (from, to) = (nodes(&graph, from, count)?, nodes(&graph, to, count)?);
    for (from, to) in from.into_iter().zip(to) {
        let mut after = lock(&to.after);
        if Arc::ptr_eq(&from, &to) || after.iter().any(|n| Arc::ptr_eq(n, &from)) {
            return Err(CuError::INVALID_VALUE);
        }
        after.push(from);
    }
    Ok(())
}

fn disconnect(graph_handle: usize, from: &In<usize>, to: &In<usize>, count: usize) -> CuResult {
    let graph = graph(graph_handle)?;
    let (from, to) = (nodes(&graph, from, count)?, nodes(&graph, to, count)?);
    for (from, to) in from.iter().zip(&to) {
        lock(&to.after).retain(|n| !Arc::ptr_eq(n, from));
    }
    Ok(())
}

fn before(handle: usize) -> CuResult<Vec<usize>> {
    let (_, node) = node(handle)?;
    let after = lock(&node.after);
    Ok(after.iter().map(handle_of).collect())
}

fn behind(handle: usize) -> CuResult<Vec<usize>> {
    let (graph, _) = node(handle)?;
    Ok(graph.edges().into_iter().filter(|e| e.0 == handle).map(|e| e.1).collect())
}

fn instantiate(out: &Out<usize>, handle: usize, flags: u64) -> CuResult {
    let graph = graph(handle)?;
    out.check()?;
    current()?;
    out.set(driver()?.execs.insert(&Arc::new(Exec::new(&graph, flags)?)))
}

const TOPOLOGY_CHANGED: u32 = 2;

/// Takes over what the nodes of a graph of the same shape do.
fn update(exec_handle: usize, graph_handle: usize) -> CuResult<bool> {
    let (exec, graph) = (exec(exec_handle)?, graph(graph_handle)?);
    let mut new = graph.instantiate()?;
    let mut plan = lock(&exec.plan);
    if !plan.has_shape_of(&new) {
        return Ok(false);
    }
    // Nodes are still named as in the graph that was instantiated.
    for (new, old) in new.steps.iter_mut().zip(&plan.steps) {
        (new.node, new.enabled) = (old.node, old.enabled);
    }
    *plan = Arc::new(new);
    Ok(true)
}

exports! {
    fn cuGraphCreate(out: Out<usize>, flags: u32) {
        let driver = driver()?;
        if flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        out.check()?;
        out.set(driver.graphs.insert(&Arc::default()))
    }

    fn cuGraphDestroy(handle: usize) {
        driver()?.graphs.remove(handle)?.withdraw_children();
        Ok(())
    }

    fn cuGraphClone(out: Out<usize>, handle: usize) {
        let copy = graph(handle)?.duplicate()?;
        out.check()?;
        out.set(driver()?.graphs.insert(&Arc::new(copy)))
    }

    fn cuGraphAddKernelNode(
        out: Out<usize>, into: usize, after: In<usize>, count: usize, params: In<KernelParams>,
    ) {
        add(&out, into, &after, count, params.get()?.op()?)
    }

    fn cuGraphAddKernelNode_v2(
        out: Out<usize>, into: usize, after: In<usize>, count: usize, params: In<KernelParams2>,
    ) {
        add(&out, into, &after, count, params.get()?.op()?)
    }

    fn cuGraphAddMemcpyNode(
        out: Out<usize>, into: usize, after: In<usize>, count: usize, params: In<Memcpy3d>,
        _context: usize,
    ) {
        add(&out, into, &after, count, params.get()?.op()?)
    }

    fn cuGraphAddMemsetNode(
        out: Out<usize>, into: usize, after: In<usize>, count: usize, params: In<FillParams>,
        _context: usize,
    ) {
        add(&out, into, &after, count, params.get()?.op()?)
    }

    fn cuGraphAddHostNode(
        out: Out<usize>, into: usize, after: In<usize>, count: usize, params: In<HostParams>,
    ) {
        add(&out, into, &after, count, params.get()?.op()?)
    }

    fn cuGraphAddEmptyNode(out: Out<usize>, into: usize, after: In<usize>, count: usize) {
        add(&out, into, &after, count, Op::Nop)
    }

    fn cuGraphAddEventRecordNode(
        out: Out<usize>, into: usize, after: In<usize>, count: usize, event: usize,
    ) {
        let event = driver()?.events.get(event)?;
        add(&out, into, &after, count, Op::RecordEvent(event))
    }

    fn cuGraphAddEventWaitNode(
        out: Out<usize>, into: usize, after: In<usize>, count: usize, event: usize,
    ) {
        let event = driver()?.events.get(event)?;
        add(&out, into, &after, count, Op::WaitEvent(event))
    }

    fn cuGraphAddChildGraphNode(
        out: Out<usize>, into: usize, after: In<usize>, count: usize, child: usize,
    ) {
        // The node gets a copy: what is done to `child` later does not matter.
        let child = Arc::new(graph(child)?.duplicate()?);
        add(&out, into, &after, count, Op::Child(child))
    }

    fn cuGraphDestroyNode(handle: usize) {
        let (graph, node) = node(handle)?;
        graph.remove(&node);
        Ok(())
    }

    fn cuGraphAddDependencies(handle: usize, from: In<usize>, to: In<usize>, count: usize) {
        connect(handle, &from, &to, count)
    }

    fn cuGraphAddDependencies_v2(
        handle: usize, from: In<usize>, to: In<usize>, _edges: *const u8, count: usize,
    ) {
        connect(handle, &from, &to, count)
    }

    fn cuGraphRemoveDependencies(handle: usize, from: In<usize>, to: In<usize>, count: usize) {
        disconnect(handle, &from, &to, count)
    }

    fn cuGraphRemoveDependencies_v2(
        handle: usize, from: In<usize>, to: In<usize>, _edges: *const u8, count: usize,
    ) {
        disconnect(handle, &from, &to, count)
    }

    fn cuGraphGetNodes(handle: usize, out: Out<usize>, count: Out<usize>) {
        let handles: Vec<usize> = graph(handle)?.nodes().iter().map(handle_of).collect();
        list(&out, &count, &handles)
    }

    fn cuGraphGetRootNodes(handle: usize, out: Out<usize>, count: Out<usize>) {
        let nodes = graph(handle)?.nodes();
        let roots = nodes.iter().filter(|n| lock(&n.after).is_empty());
        list(&out, &count, &roots.map(handle_of).collect::<Vec<_>>())
    }

    fn cuGraphGetEdges(handle: usize, from: Out<usize>, to: Out<usize>, count: Out<usize>) {
        list_edges(handle, &from, &to, &count)
    }

    fn cuGraphGetEdges_v2(
        handle: usize, from: Out<usize>, to: Out<usize>, edges: Out<u64>, count: Out<usize>,
    ) {
        list_edges(handle, &from, &to, &count)?;
        edges.set_slice(std::iter::repeat(0), if edges.is_null() { 0 } else { count.get()? });
        Ok(())
    }

    fn cuGraphNodeGetType(handle: usize, kind: Out<u32>) {
        kind.set(node(handle)?.1.kind())
    }

    fn cuGraphNodeGetDependencies(handle: usize, out: Out<usize>, count: Out<usize>) {
        list(&out, &count, &before(handle)?)
    }

    fn cuGraphNodeGetDependencies_v2(
        handle: usize, out: Out<usize>, edges: Out<u64>, count: Out<usize>,
    ) {
        list(&out, &count, &before(handle)?)?;
        edges.set_slice(std::iter::repeat(0), if edges.is_null() { 0 } else { count.get()? });
        Ok(())
    }

    fn cuGraphNodeGetDependentNodes(handle: usize, out: Out<usize>, count: Out<usize>) {
        list(&out, &count, &behind(handle)?)
    }

    fn cuGraphNodeGetDependentNodes_v2(
        handle: usize, out: Out<usize>, edges: Out<u64>, count: Out<usize>,
    ) {
        list(&out, &count, &behind(handle)?)?;
        edges.set_slice(std::iter::repeat(0), if edges.is_null() { 0 } else { count.get()? });
        Ok(())
    }

    fn cuGraphInstantiate_v2(
        out: Out<usize>, handle: usize, error: Out<usize>, log: Out<c_char>, bytes: usize,
    ) {
        error.set_if(0);
        if !log.is_null() && bytes > 0 {
            log.set_text("", bytes)?;
        }
        instantiate(&out, handle, 0)
    }

    fn cuGraphInstantiateWithFlags(out: Out<usize>, handle: usize, flags: u64) {
        instantiate(&out, handle, flags)
    }

    fn cuGraphInstantiateWithParams(out: Out<usize>, handle: usize, params: Out<[u64; 4]>) {
        // Flags and upload stream in; error node and result out.
        let [flags, upload, ..] = params.get()?;
        instantiate(&out, handle, flags)?;
        params.set([flags, upload, 0, 0])
    }

    fn cuGraphExecDestroy(handle: usize) {
        let exec = driver()?.execs.remove(handle)?;
        // A GPU's driver waits for all that runs, at times.
        if let Ok(context) = current() {
            let _alone = context.synchronize_alone();
        }
        drop(exec);
        Ok(())
    }

    fn cuGraphExecGetFlags(handle: usize, flags: Out<u64>) {
        flags.set(exec(handle)?.flags)
    }

    fn cuGraphExecUpdate_v2(handle: usize, from: usize, info: Out<[u64; 3]>) {
        let same = update(handle, from)?;
        info.set_if([if same { 0 } else { u64::from(TOPOLOGY_CHANGED) }, 0, 0]);
        if same { Ok(()) } else { Err(CuError::GRAPH_EXEC_UPDATE_FAILURE) }
    }

    fn cuGraphExecUpdate(handle: usize, from: usize, error: Out<usize>, result: Out<u32>) {
        let same = update(handle, from)?;
        error.set_if(0);
        result.set_if(if same { 0 } else { TOPOLOGY_CHANGED });
        if same { Ok(()) } else { Err(CuError::GRAPH_EXEC_UPDATE_FAILURE) }
    }

    fn cuDeviceGraphMemTrim(device: i32) {
        driver()?;
        crate::device::check(device)
    }
}

exports_per_thread! {
    fn cuGraphLaunch / cuGraphLaunch_ptsz |null| (handle: usize, stream: usize) {
        let stream = resolve(stream, null)?;
        if crate::config::is_faulty_graph_launch() {
            return Err(CuError::LAUNCH_FAILED);
        }
        stream.submit(Op::Graph(exec(handle)?.snapshot()))
    }

    fn cuGraphUpload / cuGraphUpload_ptsz |null| (handle: usize, stream: usize) {
        resolve(stream, null)?;
        exec(handle).map(drop)
    }
}
