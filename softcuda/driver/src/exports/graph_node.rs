//! `cuGraph*Node*`: what a node does, asked and changed, in a graph and in an
//! instantiated one.

use super::copy::Memcpy3d;
use super::graph::{exec, graph, node};
use super::graph_params::{FillParams, HostParams, KernelParams, KernelParams2, Params};
use crate::config::PRIORITY_RANGE;
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::ffi::{In, Out, exports};
use crate::graph::{Exec, Step};
use crate::launch::{Launch, is_hint};
use crate::op::Op;
use crate::registry::handle_of;
use crate::sync::lock;
use std::mem::discriminant;
use std::sync::Arc;

/// Writes the parameters of a node.
///
/// # Errors
/// `INVALID_VALUE` if it is of another type.
fn get<T: Params>(handle: usize, out: &Out<T>) -> CuResult {
    let (_, node) = node(handle)?;
    let params = T::of(&lock(&node.op)).ok_or(CuError::INVALID_VALUE)?;
    out.set(params)
}

/// Replaces what a node does, within its type.
fn set(handle: usize, op: Op) -> CuResult {
    let (_, node) = node(handle)?;
    let mut own = lock(&node.op);
    if discriminant(&*own) != discriminant(&op) {
        return Err(CuError::INVALID_VALUE);
    }
    let op = keep_place(&own, op);
    let old = std::mem::replace(&mut *own, op);
    drop(own);
    drop(old);
    Ok(())
}

/// A kernel's node keeps the context, and so the SMs, that it was made with.
fn keep_place(old: &Op, new: Op) -> Op {
    match (old, new) {
        (Op::Kernel(old), Op::Kernel(new)) => {
            let mut launch = new.twin();
            launch.green.clone_from(&old.green);
            Op::Kernel(Arc::new(launch))
        }
        (_, new) => new,
    }
}

/// Changes one node of an instantiated graph; launches made before keep what
/// they were made with.
fn change<R>(
    exec_handle: usize,
    node: usize,
    body: impl FnOnce(&mut Step) -> CuResult<R>,
) -> CuResult<R> {
    let exec = exec(exec_handle)?;
    let mut plan = lock(&exec.plan);
    let mut changed = (**plan).clone();
    let step = changed.steps.iter_mut().find(|s| s.node == node).ok_or(CuError::INVALID_VALUE)?;
    let answer = body(step)?;
    *plan = Arc::new(changed);
    Ok(answer)
}

/// Replaces what one node of an instantiated graph does, within its type.
fn replace(exec_handle: usize, node: usize, op: Op) -> CuResult {
    change(exec_handle, node, |step| {
        if discriminant(&step.op) != discriminant(&op) {
            return Err(CuError::INVALID_VALUE);
        }
        step.op = keep_place(&step.op, op);
        Ok(())
    })
}

fn launch_of(handle: usize) -> CuResult<Arc<Launch>> {
    match &*lock(&node(handle)?.1.op) {
        Op::Kernel(launch) => Ok(launch.clone()),
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// `CU_LAUNCH_ATTRIBUTE_*` that a kernel node keeps.
const COOPERATIVE: u32 = 2;
const CLUSTER: u32 = 4;
const PRIORITY: u32 = 8;

exports! {
    fn cuGraphNodeFindInClone(out: Out<usize>, original: usize, clone: usize) {
        let twin = graph(clone)?.twin_of(original).ok_or(CuError::INVALID_VALUE)?;
        out.set(handle_of(&twin))
    }

    fn cuGraphKernelNodeGetParams(handle: usize, params: Out<KernelParams>) {
        get(handle, &params)
    }

    fn cuGraphKernelNodeGetParams_v2(handle: usize, params: Out<KernelParams2>) {
        get(handle, &params)
    }

    fn cuGraphKernelNodeSetParams(handle: usize, params: In<KernelParams>) {
        set(handle, params.get()?.op()?)
    }

    fn cuGraphKernelNodeSetParams_v2(handle: usize, params: In<KernelParams2>) {
        set(handle, params.get()?.op()?)
    }

    fn cuGraphKernelNodeGetAttribute(handle: usize, attribute: u32, value: Out<[u32; 16]>) {
        let launch = launch_of(handle)?;
        let mut words = [0; 16];
        match attribute {
            COOPERATIVE => words[0] = u32::from(launch.cooperative),
            PRIORITY => words[0] = launch.priority.unwrap_or(0) as u32,
            CLUSTER => {}
            hint if is_hint(hint) => words = launch.hints.get(&hint).copied().unwrap_or(words),
            _ => return Err(CuError::INVALID_VALUE),
        }
        value.set(words)
    }

    fn cuGraphKernelNodeSetAttribute(handle: usize, attribute: u32, value: In<[u32; 16]>) {
        let mut launch = launch_of(handle)?.twin();
        let words = value.get()?;
        match attribute {
            COOPERATIVE if words[0] != 0 => launch.make_cooperative()?,
            COOPERATIVE => launch.cooperative = false,
            PRIORITY => {
                let priority = (words[0] as i32).clamp(PRIORITY_RANGE.1, PRIORITY_RANGE.0);
                launch.priority = Some(priority);
            }
            // A cluster of one block is what every block is anyway.
            CLUSTER if words[..3].iter().any(|&d| d > 1) => {
                return Err(CuError::INVALID_CLUSTER_SIZE);
            }
            CLUSTER => {}
            hint if is_hint(hint) => drop(launch.hints.insert(hint, words)),
            _ => return Err(CuError::INVALID_VALUE),
        }
        set(handle, Op::Kernel(Arc::new(launch)))
    }

    fn cuGraphKernelNodeCopyAttributes(to: usize, from: usize) {
        let (from, mut launch) = (launch_of(from)?, launch_of(to)?.twin());
        (launch.cooperative, launch.priority) = (from.cooperative, from.priority);
        launch.hints.clone_from(&from.hints);
        set(to, Op::Kernel(Arc::new(launch)))
    }

    fn cuGraphMemcpyNodeGetParams(handle: usize, params: Out<Memcpy3d>) {
        get(handle, &params)
    }

    fn cuGraphMemcpyNodeSetParams(handle: usize, params: In<Memcpy3d>) {
        set(handle, params.get()?.op()?)
    }

    fn cuGraphMemsetNodeGetParams(handle: usize, params: Out<FillParams>) {
        get(handle, &params)
    }

    fn cuGraphMemsetNodeSetParams(handle: usize, params: In<FillParams>) {
        set(handle, params.get()?.op()?)
    }

    fn cuGraphHostNodeGetParams(handle: usize, params: Out<HostParams>) {
        get(handle, &params)
    }

    fn cuGraphHostNodeSetParams(handle: usize, params: In<HostParams>) {
        set(handle, params.get()?.op()?)
    }

    fn cuGraphChildGraphNodeGetGraph(handle: usize, out: Out<usize>) {
        let (_, node) = node(handle)?;
        let Op::Child(child) = &*lock(&node.op) else { return Err(CuError::INVALID_VALUE) };
        out.check()?;
        // The node's own: it goes when the node goes.
        out.set(driver()?.graphs.insert(child))
    }

    fn cuGraphEventRecordNodeGetEvent(handle: usize, event: Out<usize>) {
        match &*lock(&node(handle)?.1.op) {
            Op::RecordEvent(found) => event.set(handle_of(found)),
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    fn cuGraphEventRecordNodeSetEvent(handle: usize, event: usize) {
        set(handle, Op::RecordEvent(driver()?.events.get(event)?))
    }

    fn cuGraphEventWaitNodeGetEvent(handle: usize, event: Out<usize>) {
        match &*lock(&node(handle)?.1.op) {
            Op::WaitEvent(found) => event.set(handle_of(found)),
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    fn cuGraphEventWaitNodeSetEvent(handle: usize, event: usize) {
        set(handle, Op::WaitEvent(driver()?.events.get(event)?))
    }

    fn cuGraphExecKernelNodeSetParams(handle: usize, node: usize, params: In<KernelParams>) {
        replace(handle, node, params.get()?.op()?)
    }

    fn cuGraphExecKernelNodeSetParams_v2(handle: usize, node: usize, params: In<KernelParams2>) {
        replace(handle, node, params.get()?.op()?)
    }

    fn cuGraphExecMemcpyNodeSetParams(
        handle: usize, node: usize, params: In<Memcpy3d>, _context: usize,
    ) {
        replace(handle, node, params.get()?.op()?)
    }

    fn cuGraphExecMemsetNodeSetParams(
        handle: usize, node: usize, params: In<FillParams>, _context: usize,
    ) {
        replace(handle, node, params.get()?.op()?)
    }

    fn cuGraphExecHostNodeSetParams(handle: usize, node: usize, params: In<HostParams>) {
        replace(handle, node, params.get()?.op()?)
    }

    fn cuGraphExecChildGraphNodeSetParams(handle: usize, node: usize, child: usize) {
        let child = Arc::new(Exec::new(&graph(child)?, 0)?);
        replace(handle, node, Op::Graph(child))
    }

    fn cuGraphExecEventRecordNodeSetEvent(handle: usize, node: usize, event: usize) {
        replace(handle, node, Op::RecordEvent(driver()?.events.get(event)?))
    }

    fn cuGraphExecEventWaitNodeSetEvent(handle: usize, node: usize, event: usize) {
        replace(handle, node, Op::WaitEvent(driver()?.events.get(event)?))
    }

    fn cuGraphNodeGetEnabled(handle: usize, node: usize, enabled: Out<u32>) {
        let on = change(handle, node, |step| Ok(step.enabled))?;
        enabled.set(u32::from(on))
    }

    fn cuGraphNodeSetEnabled(handle: usize, node: usize, enabled: u32) {
        change(handle, node, |step| {
            // Others cannot be told to do nothing.
            if !matches!(step.op, Op::Kernel(_) | Op::Copy(_) | Op::Fill(_)) {
                return Err(CuError::INVALID_VALUE);
            }
            step.enabled = enabled != 0;
            Ok(())
        })
    }
}
