//! How many kernels instantiated graphs have.

use crate::handles::Handles;
use tally_contract::limits::GRAPHS_KEPT_MAX;
use tally_preempt::cuda::{NODE_GRAPH, NODE_KERNEL, Ptr, SUCCESS, driver};
use tally_preempt::lock::Lock;

/// Child graphs within child graphs followed this deep.
const DEPTH_MAX: usize = 16;

/// Instantiated graph to its kernel nodes + 1.
static GRAPHS: Handles<GRAPHS_KEPT_MAX> = Handles::new();

static GRAPHS_LOCK: Lock = Lock::new();

/// `graph` was instantiated as `exec`.
pub fn instantiated(exec: Ptr, graph: Ptr) {
    let nodes = count_kernels(graph, 0);
    let _held = GRAPHS_LOCK.lock();
    GRAPHS.insert(exec as usize, u64::from(nodes) + 1);
}

/// An exec is about to be destroyed.
pub fn forget(exec: Ptr) {
    if GRAPHS.get(exec as usize).is_some() {
        let _held = GRAPHS_LOCK.lock();
        GRAPHS.remove(exec as usize);
    }
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

/// Only in a forked child.
pub fn reset() {
    GRAPHS_LOCK.reset();
}
