//! Kernels of a graph that are launched by themselves, in a cut form.
//!
//! Between two parts of a chain others get in; within a kernel node they do not, however long it is.
//! So a kernel that has a cut form is taken out of its part, and goes between two parts as a
//! launch of its own would. Which have one is what the policy wished for when the kernel was launched
//! outside of a graph, as programs do before they record one: those, in grids of at least half of the
//! blocks that they had then.

use super::build::attribute;
use crate::cu::{
    KernelNodeParams, LAUNCH_ATTRIBUTE_CLUSTER, LAUNCH_ATTRIBUTE_COOPERATIVE,
    LAUNCH_ATTRIBUTE_PRIORITY, Ptr, SUCCESS, driver,
};
use crate::cut::form::{self, Way};
use crate::cut::kernels::{self, Ready};
use crate::launch::KernelArguments;
use std::cmp::Reverse;

/// Kernels of one chain that are launched by themselves, at most: the longest.
pub const OWN_MAX: usize = 16;

/// A kernel node of a kept graph.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// Its handle there.
    pub handle: usize,
    function: usize,
    grid: [u32; 3],
}

/// A kernel to be launched by itself.
#[derive(Debug)]
pub struct Own {
    /// Its index.
    pub kernel: u32,
    /// How.
    pub way: Way,
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    /// The parameters, as they lie in memory.
    parameters: Vec<u8>,
}

/// A node's parameters, which are the graph's.
fn read(node: Ptr) -> Option<KernelNodeParams> {
    let mut params = KernelNodeParams::default();
    // SAFETY: a kernel node of a graph of ours; a valid out-pointer.
    let result = driver().kernel_params.map(|f| unsafe { f(node, &mut params) });
    (result == Some(SUCCESS)).then_some(params)
}

/// What is launched, a function or a kernel that belongs to no context.
fn launched(params: &KernelNodeParams) -> Ptr {
    if params.function.is_null() { params.kernel } else { params.function }
}

fn arguments(params: &KernelNodeParams) -> KernelArguments {
    KernelArguments {
        function: launched(params),
        grid: params.grid,
        block: params.block,
        shared_bytes: params.shared_bytes,
        attributes: std::ptr::null(),
        attribute_count: 0,
        params: params.params,
        extra: params.extra,
    }
}

impl Node {
    /// Of a graph of ours, in `context`. `None`: its kernel always stays in the graph.
    pub fn of(handle: Ptr, context: usize) -> Option<Self> {
        let params = read(handle)?;
        // A graph may have kernels of several devices.
        if !params.context.is_null() && params.context as usize != context {
            return None;
        }
        let all_at_once = attribute(handle, LAUNCH_ATTRIBUTE_COOPERATIVE).is_none_or(|v| v[0] != 0);
        // Three words, in the first twelve bytes.
        let in_clusters = attribute(handle, LAUNCH_ATTRIBUTE_CLUSTER).is_some_and(|v| {
            [v[0] as u32, (v[0] >> 32) as u32, v[1] as u32].iter().any(|n| *n > 1)
        });
        let has_priority =
            attribute(handle, LAUNCH_ATTRIBUTE_PRIORITY).is_some_and(|v| v[0] as i32 != 0);
        if all_at_once || in_clusters || has_priority {
            return None;
        }
        Some(Node {
            handle: handle as usize,
            function: launched(&params) as usize,
            grid: params.grid,
        })
    }

    fn way(&self, ready: &Ready) -> Option<(u32, Way, u32)> {
        let (kernel, cut) = *ready.get(&self.function)?;
        let (way, us) = form::way(kernel, cut, self.grid)?;
        Some((kernel as u32, way, us))
    }
}

/// Those of `nodes` that are to be launched by themselves now.
pub fn wanted(nodes: &[Node], ready: &Ready) -> Vec<usize> {
    if ready.is_empty() {
        return Vec::new();
    }
    let longest = nodes.iter().filter_map(|node| Some((node.way(ready)?.2, node.handle)));
    let mut found: Vec<(u32, usize)> = longest.collect();
    // Of equal ones the first stay first.
    found.sort_by_key(|(us, _)| Reverse(*us));
    found.truncate(OWN_MAX);
    found.into_iter().map(|(_, handle)| handle).collect()
}

impl Own {
    /// What it takes to launch this node's kernel, which is one of [`wanted`].
    pub fn of(node: &Node, ready: &Ready) -> Option<Self> {
        let params = read(node.handle as Ptr)?;
        let (kernel, way, _) = node.way(ready)?;
        let cut = kernels::cut(kernel as usize)?;
        let parameters = form::original_parameters(&arguments(&params), cut)?;
        Some(Own {
            kernel,
            way,
            function: node.function,
            grid: params.grid,
            block: params.block,
            shared_bytes: params.shared_bytes,
            parameters,
        })
    }

    /// Call `launch` with its arguments.
    pub fn with<T>(&self, launch: impl FnOnce(&KernelArguments) -> T) -> T {
        form::with_buffer(&self.parameters, |extra| {
            launch(&KernelArguments {
                function: self.function as Ptr,
                grid: self.grid,
                block: self.block,
                shared_bytes: self.shared_bytes,
                attributes: std::ptr::null(),
                attribute_count: 0,
                params: std::ptr::null_mut(),
                extra,
            })
        })
    }
}
