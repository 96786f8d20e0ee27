//! Graphs on some of the SMs: copies of a graph whose kernels are bound to a green context.
//!
//! A kernel that is captured in a stream of a green context runs on the SMs of that, in whatever stream its graph is
//! launched. So from the kept copy of a graph another one is made in which kernels that may be limited are captured anew,
//! node by node, with the same parameters, attributes and dependencies. Its exec is launched in the program's stream in
//! place of the program's: that costs no event, and nothing a kernel.
//!
//! A kernel is captured anew by the rule for launches ([`sm_limit::allows`]); the others of the graph keep all SMs. If one
//! of those has more blocks than the whole GPU holds at once, or if the graph has kernels in child graphs, the graph is
//! never limited.
//!
//! Copies are made by a launch that finds nothing running in the context, as parts are ([`Making::IfIdle`]). They go
//! before the green contexts do ([`give_up`]).

use super::build::{Graph, GraphCopy, Parts, Step, Survey, check, edges_of};
use super::home::{self, is_full};
use super::reason::Reason;
use super::solo::{self, Value, attribute};
use super::{Event, Making, Record, TABLE, order};
use crate::cuda::{
    LAUNCH_ATTRIBUTE_CLUSTER, LAUNCH_ATTRIBUTE_COOPERATIVE, LAUNCH_ATTRIBUTE_PRIORITY,
    LaunchConfig, Ptr, SUCCESS, driver,
};
use crate::host::{self, host, log};
use crate::launch::{KernelArguments, PlannedLaunch};
use crate::{CuResult, kernels, prepare, sm_limit, transformed};
use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::Arc;

/// Copies of one graph, for as many numbers of SMs.
const TWINS_MAX: usize = 4;
/// Launches from one vain attempt to make a copy to the next.
const RETRY_LAUNCHES: u32 = 64;
const CAPTURE_RELAXED: i32 = 2;

/// A kernel node of a kept graph.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// Its handle in the kept graph.
    handle: usize,
    function: usize,
    /// Index into the kernel table.
    kernel: u32,
    blocks: u64,
    /// Blocks of it that the whole GPU holds at once. `None`: the driver does not tell.
    resident: Option<u64>,
    /// It has attributes that a launch cannot have.
    is_fixed: bool,
}

impl Node {
    /// Reads a kernel node of a kept graph, just instantiated, in the current context.
    pub fn of(handle: Ptr) -> Option<Self> {
        let params = solo::read(handle)?;
        let launch = solo::arguments(&params);
        let kernel = host().index_of(launch.function as usize)?;
        // Its module lives now, and later it may not.
        prepare::look_at_new(kernel as usize, launch.function);
        Some(Node {
            handle: handle as usize,
            function: launch.function as usize,
            kernel,
            blocks: launch.grid.iter().fold(1, |all, n| all.saturating_mul(u64::from(*n))),
            resident: transformed::resident_on_all(&launch),
            is_fixed: solo::is_lost(|which| attribute(handle, which)),
        })
    }

    fn may_be_limited(&self) -> bool {
        let limitable = prepare::limitable_as_known(self.kernel as usize);
        let is_there = || host().kernel_of(self.function) == Some(self.kernel);
        let allows = |resident| sm_limit::allows(limitable, self.blocks, resident);
        !self.is_fixed && self.resident.is_some_and(allows) && is_there()
    }

    fn is_large(&self) -> bool {
        self.resident.is_none_or(|resident| self.blocks > resident)
    }
}

/// The nodes that are captured anew. `None`: the graph is not limited.
fn chosen(copy: &GraphCopy) -> Option<Arc<[usize]>> {
    if copy.kernel_nodes as usize != copy.kernels.len() {
        return None;
    }
    let mut chosen = Vec::new();
    for node in &copy.kernels {
        if node.may_be_limited() {
            chosen.push(node.handle);
        } else if node.is_large() {
            return None;
        }
    }
    (!chosen.is_empty()).then(|| chosen.into())
}

/// A copy on some of the SMs.
#[derive(Debug)]
struct Twin {
    sms: u32,
    nodes: Arc<[usize]>,
    parts: Arc<Parts>,
}

impl Twin {
    /// Whether each of its kernels that is limited may be, still.
    fn serves(&self, nodes: &[usize]) -> bool {
        Arc::as_ptr(&self.nodes).addr() == nodes.as_ptr().addr()
            || self.nodes.iter().all(|node| nodes.contains(node))
    }
}

/// What is known of an exec's launches on some of the SMs.
#[derive(Debug, Default)]
pub(super) struct Limits {
    /// What [`chosen`] gave, and [`kernels::changes`] then.
    chosen: Option<(u32, Option<Arc<[usize]>>)>,
    /// The last one was used last.
    twins: Vec<Twin>,
    /// Launches until a copy is made, after a vain attempt.
    wait: u32,
    never: bool,
}

impl Limits {
    /// The place of the copy for `sms` SMs: one of fewer if there is none, else the smallest.
    fn find(&self, nodes: &[usize], sms: u32) -> Option<usize> {
        let all = || self.twins.iter().enumerate().filter(|(_, twin)| twin.serves(nodes));
        let fewer = all().filter(|(_, twin)| twin.sms <= sms).max_by_key(|(_, twin)| twin.sms);
        fewer.or_else(|| all().min_by_key(|(_, twin)| twin.sms)).map(|(at, _)| at)
    }

    /// Whether a copy for `sms` SMs is to be made.
    fn is_due(&mut self, nodes: &[usize], sms: u32) -> bool {
        let is_it = |twin: &Twin| twin.sms == sms && *twin.nodes == *nodes;
        !self.twins.iter().any(is_it) && !self.waits()
    }

    /// Counts a launch.
    fn waits(&mut self) -> bool {
        let waits = self.wait > 0;
        self.wait = self.wait.saturating_sub(1);
        waits
    }
}

/// The kept copy of an exec that may be limited in `context`, and the nodes.
fn known(exec: usize, context: usize) -> Option<(Arc<GraphCopy>, Arc<[usize]>)> {
    let changes = kernels::changes();
    let (copy, chosen_then) = TABLE.with(|table| {
        let record = table.records.get(&exec)?;
        let copy = record.copy.as_ref().ok().filter(|copy| copy.home.context() == context)?;
        let known = record.limits.chosen.as_ref().filter(|(then, _)| *then == changes);
        (!record.limits.never).then(|| (copy.clone(), known.map(|(_, nodes)| nodes.clone())))
    })?;
    let nodes = chosen_then.unwrap_or_else(|| {
        let nodes = chosen(&copy);
        TABLE.with(|table| {
            let limits = &mut table.records.get_mut(&exec)?.limits;
            // The same nodes are the same list: so they are compared at once.
            let before = limits.chosen.take().and_then(|(_, nodes)| nodes);
            let nodes = before.filter(|before| nodes.as_ref() == Some(before)).or(nodes);
            limits.chosen = Some((changes, nodes.clone()));
            nodes
        })
    })?;
    Some((copy, nodes))
}

/// Whether a graph can be launched on some of the SMs, in a context that has green ones.
pub fn offers(exec: Ptr, context: usize) -> bool {
    let Some((_, nodes)) = known(exec as usize, context) else { return false };
    TABLE.with(|table| {
        let limits = table.records.get_mut(&(exec as usize)).map(|record| &mut record.limits);
        limits.is_some_and(|limits| limits.find(&nodes, u32::MAX).is_some() || !limits.waits())
    })
}

/// Launch a graph on at most `sms` SMs. `None`: nothing was issued.
pub fn launch(planned: &PlannedLaunch<'_>, exec: Ptr, sms: u32) -> Option<CuResult> {
    let key = exec as usize;
    let (copy, nodes) = known(key, planned.context)?;
    let sms = sm_limit::green_sms(sms)?;
    let is_due = TABLE.with(|table| Some(table.records.get_mut(&key)?.limits.is_due(&nodes, sms)));
    if is_due? {
        make(key, &copy, &nodes, sms);
    }
    let graph_launch = driver().graph_launch?;
    // Not while the green contexts go.
    host::alone(|| {
        let parts = TABLE.with(|table| {
            let limits = &mut table.records.get_mut(&key)?.limits;
            let twin = limits.find(&nodes, sms).map(|at| limits.twins.remove(at))?;
            let parts = twin.parts.clone();
            limits.twins.push(twin);
            Some(parts)
        })?;
        let [Step::Graph(twin)] = &*parts.steps else { return None };
        let launching = order::begin(exec, planned.stream, true);
        if !launching.may_be_in_parts {
            return None;
        }
        // SAFETY: an exec that `parts` keeps alive, the program's stream.
        if unsafe { graph_launch(*twin as Ptr, planned.stream as Ptr) } != SUCCESS {
            return None;
        }
        launching.end(true);
        sm_limit::note_graph(planned.slot, planned.number, key);
        Some(SUCCESS)
    })
}

/// Make a copy on so many SMs, if nothing runs now.
fn make(exec: usize, copy: &Arc<GraphCopy>, nodes: &Arc<[usize]>, sms: u32) {
    let event = TABLE.with(|table| table.records.get(&exec)?.event.clone());
    let made = || -> Result<(Arc<Event>, Parts), Reason> {
        let event = event.map_or_else(|| Event::new(&copy.home).map(Arc::new), Ok)?;
        let parts = Making::IfIdle.run(&copy.home, || {
            let bound = |stream| bound(copy, nodes, stream);
            sm_limit::within_green(sms, bound).unwrap_or(Err(Reason::NoContext))
        })?;
        Ok((event, parts))
    };
    let made = made();
    if let Err(reason) = &made
        && !reason.will_pass()
    {
        log!("graph {exec:#x} is not limited to {sms} SMs: {reason}");
    }
    let is_its = |record: &&mut Record| record.copy.as_ref().is_ok_and(|c| Arc::ptr_eq(c, copy));
    let _old = TABLE.with(|table| {
        let Some(record) = table.records.get_mut(&exec).filter(is_its) else {
            // Changed or destroyed meanwhile.
            return (made.ok(), None);
        };
        match made {
            Ok((event, parts)) => {
                record.event.get_or_insert(event);
                let twins = &mut record.limits.twins;
                let old = twins.iter().position(|twin| twin.sms == sms);
                let old = old.or_else(|| (twins.len() >= TWINS_MAX).then_some(0));
                let old = old.map(|at| twins.remove(at));
                twins.push(Twin { sms, nodes: nodes.clone(), parts: Arc::new(parts) });
                (None, old)
            }
            Err(reason) => {
                record.limits.wait = RETRY_LAUNCHES;
                // What the driver refuses once it would refuse again.
                record.limits.never = !reason.will_pass() && !reason.is_of_memory();
                (None, None)
            }
        }
    });
}

/// An exec of a copy in which the kernels of `nodes` are bound to where `stream` is. The context is current.
fn bound(copy: &GraphCopy, nodes: &[usize], stream: Ptr) -> Result<Parts, Reason> {
    if is_full(1) {
        return Err(Reason::TooManyExecs);
    }
    let Survey { nodes: all, edges, .. } = Survey::of(copy.graph(), copy.home.context())?;
    let work = Graph::copy(copy.graph())?;
    let mut mine = work.find(&all)?;
    let place: HashMap<usize, usize> =
        all.iter().enumerate().map(|(at, node)| (*node as usize, at)).collect();
    let (mut before, mut behind) = (vec![Vec::new(); all.len()], vec![Vec::new(); all.len()]);
    for (from, to, data) in &edges {
        before[*to].push((*from, *data));
        behind[*from].push((*to, *data));
    }
    for node in nodes {
        let at = *place.get(node).ok_or(Reason::NoOrder)?;
        let of = |places: &[(usize, u64)]| -> (Vec<Ptr>, Vec<u64>) {
            places.iter().map(|(at, data)| (mine[*at], *data)).unzip()
        };
        let (after, next) = (of(&before[at]), of(&behind[at]));
        mine[at] = work.capture_anew(mine[at], all[at], stream, &after, &next)?;
    }
    // All dependencies are there, as they were: those of programmatic launches, too.
    let at: HashMap<usize, usize> =
        mine.iter().enumerate().map(|(at, node)| (*node as usize, at)).collect();
    let at = |node: Ptr| at.get(&(node as usize)).copied();
    let made = edges_of(work.handle())?;
    let made = made.into_iter().map(|(from, to, data)| Some((at(from)?, at(to)?, data)));
    let mut made: Vec<_> = made.collect::<Option<_>>().ok_or(Reason::NoOrder)?;
    made.sort_unstable();
    let mut edges = edges;
    edges.sort_unstable();
    if made != edges {
        return Err(Reason::AttributesLost);
    }
    work.instantiate(copy)
}

/// Nodes, and the data of the edges from or to them.
type Ends = (Vec<Ptr>, Vec<u64>);

impl Graph {
    /// Replace `node`, the copy of `original`, by a launch of its kernel in `stream`.
    fn capture_anew(
        &self,
        node: Ptr,
        original: Ptr,
        stream: Ptr,
        after: &Ends,
        (next, data): &Ends,
    ) -> Result<Ptr, Reason> {
        let d = driver();
        let depend = d.graph_depend.ok_or(Reason::Missing("cuGraphAddDependencies_v2"))?;
        let destroy = d.node_destroy.ok_or(Reason::Missing("cuGraphDestroyNode"))?;
        let params = solo::read(original).ok_or(Reason::Missing("cuGraphKernelNodeGetParams"))?;
        let hints = solo::attributes_of(|which| attribute(original, which));
        let launch = KernelArguments {
            attributes: hints.as_ptr(),
            attribute_count: hints.len() as u32,
            ..solo::arguments(&params)
        };
        let made = self.capture(&launch, stream, after)?;
        let kept = |which| Some(same(which, attribute(original, which)?, attribute(made, which)?));
        let all =
            [LAUNCH_ATTRIBUTE_COOPERATIVE, LAUNCH_ATTRIBUTE_CLUSTER, LAUNCH_ATTRIBUTE_PRIORITY];
        if !all.into_iter().all(|which| kept(which).unwrap_or(false)) {
            return Err(Reason::AttributesLost);
        }
        let from = vec![made; next.len()];
        if !next.is_empty() {
            // SAFETY: nodes of a graph of ours, in arrays of this length.
            let result = unsafe {
                depend(self.handle(), from.as_ptr(), next.as_ptr(), data.as_ptr(), next.len())
            };
            check("cuGraphAddDependencies_v2", result)?;
        }
        // SAFETY: a node of a graph of ours.
        check("cuGraphDestroyNode", unsafe { destroy(node) })?;
        Ok(made)
    }

    /// Capture a launch in `stream`, behind these nodes.
    fn capture(
        &self,
        launch: &KernelArguments,
        stream: Ptr,
        (after, data): &Ends,
    ) -> Result<Ptr, Reason> {
        let d = driver();
        let begin = d.capture_into.ok_or(Reason::Missing("cuStreamBeginCaptureToGraph"))?;
        let end = d.capture_end.ok_or(Reason::Missing("cuStreamEndCapture"))?;
        let info = d.capture_info.ok_or(Reason::Missing("cuStreamGetCaptureInfo_v3"))?;
        let launch_ex = d.launch_ex.ok_or(Reason::Missing("cuLaunchKernelEx"))?;
        let config = LaunchConfig {
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            stream,
            attributes: launch.attributes,
            attribute_count: launch.attribute_count,
        };
        // SAFETY: a stream and a graph of ours, nodes of that; valid out-pointers; the parameters are those of a node that
        // lives, or its copies.
        unsafe {
            let (from, edges, count) = (after.as_ptr(), data.as_ptr(), after.len());
            let begun = begin(stream, self.handle(), from, edges, count, CAPTURE_RELAXED);
            check("cuStreamBeginCaptureToGraph", begun)?;
            let launched = launch_ex(&config, launch.function, launch.params, launch.extra);
            let (mut status, mut count, mut graph) = (0, 0, null_mut());
            let (mut nodes, mut made) = (std::ptr::null(), None);
            let (id, edges) = (null_mut(), null_mut());
            let told = info(stream, &mut status, id, null_mut(), &mut nodes, edges, &mut count);
            if launched == SUCCESS && told == SUCCESS && count == 1 && !nodes.is_null() {
                made = Some(*nodes);
            }
            // In any case: the stream goes.
            let ended = end(stream, &mut graph);
            check("cuLaunchKernelEx", launched)?;
            check("cuStreamGetCaptureInfo_v3", told)?;
            check("cuStreamEndCapture", ended)?;
            made.ok_or(Reason::NoOrder)
        }
    }
}

/// Whether two values of an attribute say the same.
fn same(which: i32, a: Value, b: Value) -> bool {
    let cluster = |v: Value| [v[0] as u32, (v[0] >> 32) as u32, v[1] as u32].map(|n| n.max(1));
    match which {
        LAUNCH_ATTRIBUTE_CLUSTER => cluster(a) == cluster(b),
        _ => a[0] as u32 == b[0] as u32,
    }
}

/// The green contexts of a context go: first what is bound to them. By a thread that no other one launches beside.
pub(crate) fn give_up(context: usize) {
    let twins: Vec<Twin> = TABLE.with(|table| {
        let is_here =
            |record: &&mut Record| record.copy.as_ref().is_ok_and(|c| c.home.context() == context);
        let records = table.records.values_mut().filter(is_here);
        records.flat_map(|record| std::mem::take(&mut record.limits.twins)).collect()
    });
    if !twins.is_empty() {
        drop(twins);
        home::sweep(context);
    }
}

/// A launch of an exec on some of the SMs did not end.
pub(crate) fn refuse(exec: usize) {
    let _old = TABLE.with(|table| {
        let limits = &mut table.records.get_mut(&exec)?.limits;
        limits.never = true;
        Some(std::mem::take(&mut limits.twins))
    });
}
