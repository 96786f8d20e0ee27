//! Kernels of a graph that are launched by themselves, in a transformed form.
//!
//! Other clients' work can run between two parts of a chain, but not within a kernel node, however long it is.
//! So a kernel that has a transformed form is taken out of its part and launched by itself between two parts. A
//! kernel has a transformed form if the policy asked for one when the kernel was launched outside of a graph,
//! as programs do before they record one. It must also have at least half of the blocks that it had then.
//!
//! A node's attributes are its own: those that its kernel can be launched with by itself go with it ([`hints`]), and a
//! node with others stays in its part ([`stays`]). What a node does not say, its launch has from the stream.

use super::reason::Reason;
use crate::cuda::{
    FUNC_MAX_DYNAMIC_SHARED, KernelNodeParams, LAUNCH_ATTRIBUTE_ACCESS_WINDOW,
    LAUNCH_ATTRIBUTE_CARVEOUT, LAUNCH_ATTRIBUTE_CLUSTER, LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING,
    LAUNCH_ATTRIBUTE_COOPERATIVE, LAUNCH_ATTRIBUTE_MEMORY_DOMAIN,
    LAUNCH_ATTRIBUTE_MEMORY_DOMAIN_MAP, LAUNCH_ATTRIBUTE_NVLINK_SCHEDULING,
    LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER, LAUNCH_ATTRIBUTE_PRIORITY, LaunchAttribute, Ptr, SUCCESS,
    driver, is_default_domain_map,
};
use crate::form::{self, Way};
use crate::host::host;
use crate::issue;
use crate::kernels::{self, KERNELS, Ready};
use crate::launch::KernelArguments;
use crate::transformed;
use std::cmp::Reverse;
use std::sync::atomic::Ordering::Acquire;
use tally_contract::limits::GRAPH_SOLO_MAX as SOLO_MAX;
use tally_ipc::layout::transform_state;
use tally_rewriter::{TransformRefusal, names as kernel_names};

/// A kernel node of a kept graph.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// Its handle in the kept graph.
    pub handle: usize,
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
}

/// A kernel to be launched by itself.
#[derive(Debug)]
pub struct Solo {
    pub kernel: u32,
    pub way: Way,
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    /// Attributes of its node that are only hints.
    attributes: Vec<LaunchAttribute>,
    /// The parameters, as they lie in memory.
    parameters: Vec<u8>,
}

/// A node's parameters, which are the graph's.
pub(super) fn read(node: Ptr) -> Option<KernelNodeParams> {
    let mut params = KernelNodeParams::default();
    // SAFETY: a kernel node of a graph of ours; a valid out-pointer.
    let result = driver().kernel_params.map(|f| unsafe { f(node, &mut params) });
    (result == Some(SUCCESS)).then_some(params)
}

/// A kernel node's attribute, where the driver has it.
pub(crate) fn attribute(node: Ptr, which: i32) -> Option<[u64; 8]> {
    let mut value = [0; 8];
    // SAFETY: a kernel node; `CUlaunchAttributeValue` is a union of 64 bytes.
    let result = driver().kernel_attribute.map(|f| unsafe { f(node, which, &mut value) });
    (result == Some(SUCCESS)).then_some(value)
}

/// What a kernel node launches; or what speaks against launching a graph with it in parts: it waits for other kernels,
/// or for other GPUs, or belongs to another context than the graph is launched in.
pub(crate) fn function_of(node: Ptr, context: usize) -> Result<usize, Reason> {
    let params = read(node).ok_or(Reason::Missing("cuGraphKernelNodeGetParams"))?;
    if !params.context.is_null() && params.context as usize != context {
        return Err(Reason::SeveralContexts);
    }
    let function = launched(&params) as usize;
    let name = driver().name_of(function).and_then(|name| name.to_str().ok());
    if name.is_some_and(|name| kernel_names::waits_by_name(name).is_some()) || waits(function) {
        return Err(Reason::Waits);
    }
    Ok(function)
}

/// Whether it is known of a kernel that it waits, besides by its name.
///
/// [`BlocksMayWait`](TransformRefusal::BlocksMayWait) is not enough: a kernel in a part runs all of its blocks, and
/// whatever else it could wait for in its graph is done before the part or is in it.
pub(crate) fn waits(function: usize) -> bool {
    const KNOWN: [TransformRefusal; 5] = [
        TransformRefusal::GridSync,
        TransformRefusal::BlocksWaitByName,
        TransformRefusal::Communication,
        TransformRefusal::BlocksWaited,
        TransformRefusal::StuckLimited,
    ];
    let kernel = host().kernel_of(function).and_then(|index| KERNELS.get(index as usize));
    let (state, detail) =
        transform_state::unpack(kernel.map_or(0, |kernel| kernel.state.load(Acquire)));
    state == transform_state::WHOLE_ONLY && KNOWN.iter().any(|why| why.code() == detail)
}

/// What is launched, a function or a kernel that belongs to no context.
fn launched(params: &KernelNodeParams) -> Ptr {
    if params.function.is_null() { params.kernel } else { params.function }
}

pub(super) fn arguments(params: &KernelNodeParams) -> KernelArguments {
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

pub(super) type Value = [u64; 8];
/// What an attribute's value is looked at for.
type Test = fn(&Value) -> bool;

/// Whether a node's kernel always stays in its part, by its attributes: it would run in another way by itself, or it is
/// not known how to launch it with them.
fn stays(attribute: impl Fn(i32) -> Option<Value>) -> bool {
    let has = |which, is: Test| attribute(which).is_some_and(|value| is(&value));
    has(LAUNCH_ATTRIBUTE_CLUSTER, is_cluster)
        || has(LAUNCH_ATTRIBUTE_PRIORITY, |v| v[0] as u32 != 0)
        || is_lost(attribute)
}

fn is_cluster(value: &Value) -> bool {
    // Three words, in the first twelve bytes.
    [value[0] as u32, (value[0] >> 32) as u32, value[1] as u32].iter().any(|n| *n > 1)
}

/// Whether a node has attributes that no launch of its kernel would give it.
pub(super) fn is_lost(attribute: impl Fn(i32) -> Option<Value>) -> bool {
    let has = |which, is: Test| attribute(which).is_some_and(|value| is(&value));
    attribute(LAUNCH_ATTRIBUTE_COOPERATIVE).is_none_or(|v| v[0] as u32 != 0)
        || has(LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER, is_cluster)
        || has(LAUNCH_ATTRIBUTE_MEMORY_DOMAIN, |v| v[0] as u32 != 0)
        || has(LAUNCH_ATTRIBUTE_MEMORY_DOMAIN_MAP, |v| !is_default_domain_map(v[0]))
        || has(LAUNCH_ATTRIBUTE_NVLINK_SCHEDULING, |v| v[0] as u32 != 0)
}

/// What a node's kernel is launched with by itself: those of its attributes that say something. A
/// carve-out of 0 % does not: it cannot be told from one that was never set.
fn hints(attribute: impl Fn(i32) -> Option<Value>) -> Vec<LaunchAttribute> {
    // A window is an address and a size, then how to treat what is in it.
    let says_something: [(i32, Test); 3] = [
        (LAUNCH_ATTRIBUTE_ACCESS_WINDOW, |v| v[1] != 0),
        (LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING, |v| v[0] as u32 != 0),
        (LAUNCH_ATTRIBUTE_CARVEOUT, |v| v[0] as i32 > 0),
    ];
    those_of(attribute, &says_something)
}

/// What a node's kernel is captured with: all of its attributes that say something, if none [is lost](is_lost).
pub(super) fn attributes_of(attribute: impl Fn(i32) -> Option<Value>) -> Vec<LaunchAttribute> {
    let mut all = those_of(
        &attribute,
        &[
            (LAUNCH_ATTRIBUTE_CLUSTER, is_cluster),
            (LAUNCH_ATTRIBUTE_PRIORITY, |v| v[0] as u32 != 0),
        ],
    );
    all.extend(hints(attribute));
    all
}

fn those_of(
    attribute: impl Fn(i32) -> Option<Value>,
    says_something: &[(i32, Test)],
) -> Vec<LaunchAttribute> {
    let found = says_something.iter().filter_map(|(which, says)| {
        let value = attribute(*which).filter(says)?;
        let words = std::array::from_fn(|i| (value[i / 2] >> (32 * (i % 2))) as u32);
        Some(LaunchAttribute::new(*which, words))
    });
    found.collect()
}

impl Solo {
    /// A launch of its function may have as much shared memory as the node: the program may have lowered that since.
    pub fn may_have_its_memory(&self) -> bool {
        self.shared_bytes == 0
            || transformed::attribute(self.function, FUNC_MAX_DYNAMIC_SHARED)
                .is_none_or(|most| i64::from(self.shared_bytes) <= i64::from(most))
    }
}

impl Node {
    /// Reads a kernel node of a copied graph in `context`. `None`: its kernel always stays in the graph.
    pub fn of(handle: Ptr, context: usize) -> Option<Self> {
        let params = read(handle)?;
        // A graph may have kernels of several devices.
        if !params.context.is_null() && params.context as usize != context {
            return None;
        }
        if stays(|which| attribute(handle, which)) {
            return None;
        }
        Some(Node {
            handle: handle as usize,
            function: launched(&params) as usize,
            grid: params.grid,
            block: params.block,
            shared_bytes: params.shared_bytes,
        })
    }

    fn way(&self, ready: &Ready) -> Option<(u32, Way, u32)> {
        let (kernel, transformed) = *ready.get(&self.function)?;
        let launch = KernelArguments {
            function: self.function as Ptr,
            grid: self.grid,
            block: self.block,
            shared_bytes: self.shared_bytes,
            attributes: std::ptr::null(),
            attribute_count: 0,
            params: std::ptr::null_mut(),
            extra: std::ptr::null_mut(),
        };
        let (way, us) = form::way(kernel, transformed, &launch)?;
        Some((kernel as u32, way, us))
    }
}

/// The nodes whose kernels are to be launched by themselves now.
pub fn wanted(nodes: &[Node], ready: &Ready) -> Vec<usize> {
    if ready.is_empty() {
        return Vec::new();
    }
    let longest = nodes.iter().filter_map(|node| Some((node.way(ready)?.2, node.handle)));
    let mut found: Vec<(u32, usize)> = longest.collect();
    // Of equal ones the first stay first.
    found.sort_by_key(|(us, _)| Reverse(*us));
    found.truncate(SOLO_MAX);
    found.into_iter().map(|(_, handle)| handle).collect()
}

impl Solo {
    /// What it takes to launch this node's kernel, which is one of [`wanted`].
    pub fn of(node: &Node, ready: &Ready) -> Option<Self> {
        let params = read(node.handle as Ptr)?;
        let (kernel, way, _) = node.way(ready)?;
        let transformed = kernels::transformed(kernel as usize)?;
        let parameters = issue::original_parameters(&arguments(&params), transformed)?;
        Some(Solo {
            kernel,
            way,
            function: node.function,
            grid: params.grid,
            block: params.block,
            shared_bytes: params.shared_bytes,
            attributes: hints(|which| attribute(node.handle as Ptr, which)),
            parameters,
        })
    }

    /// Whether it is launched with attributes.
    pub fn has_hints(&self) -> bool {
        !self.attributes.is_empty()
    }

    /// Call `launch` with its arguments.
    pub fn with<T>(&self, launch: impl FnOnce(&KernelArguments) -> T) -> T {
        self.with_attributes(&self.attributes, launch)
    }

    /// The same without what is only a hint.
    pub fn without_hints<T>(&self, launch: impl FnOnce(&KernelArguments) -> T) -> T {
        self.with_attributes(&[], launch)
    }

    fn with_attributes<T>(
        &self,
        attributes: &[LaunchAttribute],
        launch: impl FnOnce(&KernelArguments) -> T,
    ) -> T {
        issue::with_buffer(&self.parameters, |extra| {
            launch(&KernelArguments {
                function: self.function as Ptr,
                grid: self.grid,
                block: self.block,
                shared_bytes: self.shared_bytes,
                attributes: attributes.as_ptr(),
                attribute_count: attributes.len() as u32,
                params: std::ptr::null_mut(),
                extra,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The attributes of a node: these, and the others as a driver gives them that were never set.
    fn node(set: &[(i32, Value)]) -> impl Fn(i32) -> Option<Value> {
        move |which| match set.iter().find(|(id, _)| *id == which) {
            Some((_, value)) => Some(*value),
            None => match which {
                LAUNCH_ATTRIBUTE_MEMORY_DOMAIN_MAP => Some([0x100, 0, 0, 0, 0, 0, 0, 0]),
                LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER | LAUNCH_ATTRIBUTE_NVLINK_SCHEDULING => None,
                _ => Some([0; 8]),
            },
        }
    }

    fn value(first: u64, second: u64) -> Value {
        [first, second, 0, 0, 0, 0, 0, 0]
    }

    #[test]
    fn hints_go_with_a_kernel_and_what_is_default_does_not() {
        assert!(!stays(node(&[])));
        assert!(hints(node(&[])).is_empty());
        // Bytes 0x1000 to 0x1800, a hit ratio of 1, persisting, streaming.
        let window = [0x1000, 0x800, 0x2_3f80_0000, 1, 0, 0, 0, 0];
        let set = [
            (LAUNCH_ATTRIBUTE_ACCESS_WINDOW, window),
            (LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING, value(2, 0)),
            (LAUNCH_ATTRIBUTE_CARVEOUT, value(50, 0)),
        ];
        assert!(!stays(node(&set)));
        let found: Vec<_> = hints(node(&set)).iter().map(|a| (a.id, a.value)).collect();
        let words = |first: &[u32]| std::array::from_fn(|i| first.get(i).copied().unwrap_or(0));
        let want = [
            (LAUNCH_ATTRIBUTE_ACCESS_WINDOW, words(&[0x1000, 0, 0x800, 0, 0x3f80_0000, 2, 1])),
            (LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING, words(&[2])),
            (LAUNCH_ATTRIBUTE_CARVEOUT, words(&[50])),
        ];
        assert_eq!(found, want);
        // No window; the driver's own choice.
        let default = [
            (LAUNCH_ATTRIBUTE_ACCESS_WINDOW, value(0x1000, 0)),
            (LAUNCH_ATTRIBUTE_CARVEOUT, value(u64::from(u32::MAX), 0)),
        ];
        assert!(hints(node(&default)).is_empty());
    }

    #[test]
    fn what_a_launch_cannot_have_keeps_a_kernel_in_its_part() {
        for (which, value) in [
            (LAUNCH_ATTRIBUTE_COOPERATIVE, value(1, 0)),
            (LAUNCH_ATTRIBUTE_CLUSTER, value(1 << 32 | 1, 2)),
            (LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER, value(2 << 32 | 1, 1)),
            (LAUNCH_ATTRIBUTE_PRIORITY, value(u64::from((-3_i32) as u32), 0)),
            (LAUNCH_ATTRIBUTE_MEMORY_DOMAIN, value(1, 0)),
            (LAUNCH_ATTRIBUTE_MEMORY_DOMAIN_MAP, value(0x102, 0)),
            (LAUNCH_ATTRIBUTE_MEMORY_DOMAIN_MAP, value(0x200, 0)),
            (LAUNCH_ATTRIBUTE_NVLINK_SCHEDULING, value(1, 0)),
        ] {
            assert!(stays(node(&[(which, value)])), "{which}");
        }
        assert!(!stays(node(&[(LAUNCH_ATTRIBUTE_CLUSTER, value(1 << 32 | 1, 1))])));
        assert!(stays(|_| None), "of a driver that does not tell");
    }

    #[test]
    fn a_launch_by_itself_has_them_and_can_do_without() {
        let solo = Solo {
            kernel: 0,
            way: Way::Preemptible(0),
            function: 1,
            grid: [2, 1, 1],
            block: [32, 1, 1],
            shared_bytes: 0,
            attributes: hints(node(&[(LAUNCH_ATTRIBUTE_CARVEOUT, value(50, 0))])),
            parameters: Vec::new(),
        };
        let of =
            |a: &KernelArguments| -> Vec<i32> { a.attributes().iter().map(|a| a.id).collect() };
        assert_eq!(solo.with(of), [LAUNCH_ATTRIBUTE_CARVEOUT]);
        assert!(solo.without_hints(of).is_empty());
    }
}
