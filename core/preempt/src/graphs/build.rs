//! The driver's side of dividing graphs: looking at one, copying it, and making the parts.
//!
//! Whatever fails, everything made so far is destroyed and the reason is returned; nothing here
//! touches the program's own graph or exec, and nothing is called once its context is gone (see
//! [`Home`]). Callers hold no lock: an instantiation may take milliseconds, and wait for all that
//! runs in the context.

use super::home::{Home, is_full, made, retire};
use super::limit;
use super::partition;
use super::reason::Reason;
use super::solo::{self, Solo, attribute};
use crate::cuda::{
    CuResult, EVENT_DISABLE_TIMING, INSTANTIATE_DEVICE_LAUNCH, INSTANTIATE_UPLOAD,
    LAUNCH_ATTRIBUTE_CLUSTER, LAUNCH_ATTRIBUTE_COOPERATIVE, LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE,
    LAUNCH_ATTRIBUTE_PRIORITY, NODE_ALLOC, NODE_CONDITIONAL, NODE_COPY, NODE_EMPTY, NODE_FILL,
    NODE_FREE, NODE_GRAPH, NODE_HOST, NODE_KERNEL, NODE_MEMORY_OPERATION, NODE_RECORD_EVENT,
    NODE_SEMAPHORE_SIGNAL, NODE_SEMAPHORE_WAIT, NODE_WAIT_EVENT, Ptr, SUCCESS, driver,
};
use crate::jobs::{Job, Task};
use crate::kernels::Ready;
use crate::settings::rewrites;
use crate::{sm_limit, worker};
use std::collections::{HashMap, HashSet, VecDeque};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::Arc;
use tally_contract::limits::{GRAPH_NODES_MAX as NODES_MAX, GRAPH_PARTS_MAX as PARTS_MAX};

/// Child graphs within child graphs followed this deep.
const DEPTH_MAX: usize = 16;

/// Attributes of kernel nodes that a copy must have as well.
const KEPT_ATTRIBUTES: [i32; 3] =
    [LAUNCH_ATTRIBUTE_COOPERATIVE, LAUNCH_ATTRIBUTE_CLUSTER, LAUNCH_ATTRIBUTE_PRIORITY];

/// A graph of ours.
#[derive(Debug)]
pub(super) struct Graph(Ptr);

// SAFETY: a handle; whoever has it is its only user.
unsafe impl Send for Graph {}

// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    pub(super) fn handle(&self) -> Ptr {
        self.0
    }

    pub(super) fn copy(of: Ptr) -> Result<Self, Reason> {
        let f = driver().graph_clone.ok_or(Reason::Missing("cuGraphClone"))?;
        let mut copy = null_mut();
        // SAFETY: a live graph; a valid out-pointer.
        match unsafe { f(&mut copy, of) } {
            SUCCESS => Ok(Graph(copy)),
            error => Err(Reason::CloneRefused(error)),
        }
    }

    /// The copies of the nodes of the graph that this one was copied from.
    pub(super) fn find(&self, nodes: &[Ptr]) -> Result<Vec<Ptr>, Reason> {
        let f = driver().node_in_clone.ok_or(Reason::Missing("cuGraphNodeFindInClone"))?;
        let find = |node: &Ptr| {
            let mut copy = null_mut();
            // SAFETY: a node of the original; a valid out-pointer.
            check("cuGraphNodeFindInClone", unsafe { f(&mut copy, *node, self.0) }).map(|()| copy)
        };
        nodes.iter().map(find).collect()
    }

    /// One exec of the whole, which stands for a graph that was copied.
    pub(super) fn instantiate(self, of: &GraphCopy) -> Result<Parts, Reason> {
        let pieces = ManuallyDrop::new(VecDeque::from([Piece::Graph(self)]));
        Pieces { home: of.home.clone(), flags: of.flags, pieces }.instantiate()
    }
}

/// Its context must be current.
impl Drop for Graph {
    fn drop(&mut self) {
        if let Some(f) = driver().graph_destroy {
            // SAFETY: ours, and not used again.
            unsafe { f(self.0) };
        }
    }
}

pub(super) fn check(call: &'static str, result: CuResult) -> Result<(), Reason> {
    if result == SUCCESS { Ok(()) } else { Err(Reason::Driver(call, result)) }
}

/// What a graph consists of.
#[derive(Debug)]
pub(super) struct Survey {
    pub(super) nodes: Vec<Ptr>,
    /// Kernels of each node: more than one for a child graph.
    kernels: Vec<u32>,
    /// From, to, and `CUgraphEdgeData`: zero for a plain "after its end".
    pub(super) edges: Vec<(usize, usize, u64)>,
    /// What its kernels' nodes launch, those of child graphs included.
    functions: HashSet<usize>,
}

impl Survey {
    /// Reads a graph that is launched in `context`.
    pub(super) fn of(graph: Ptr, context: usize) -> Result<Self, Reason> {
        let nodes = nodes_of(graph)?;
        let mut functions = HashSet::new();
        let kernels = nodes.iter().map(|n| kernels_of(*n, 0, context, &mut functions));
        let kernels = kernels.collect::<Result<Vec<_>, Reason>>()?;
        let index: HashMap<_, _> = nodes.iter().enumerate().map(|(i, n)| (*n, i)).collect();
        let edges = edges_of(graph)?.into_iter().map(|(from, to, data)| {
            let at = |n| index.get(&n).copied().ok_or(Reason::NoOrder);
            Ok((at(from)?, at(to)?, data))
        });
        let edges = edges.collect::<Result<_, Reason>>()?;
        Ok(Survey { nodes, kernels, edges, functions })
    }

    /// Why it is never divided, whatever its kernels are.
    fn undivided(&self) -> Option<Reason> {
        if self.edges.iter().any(|(.., data)| *data != 0) {
            return Some(Reason::ProgrammaticEdges);
        }
        let with_kernels = self.kernels.iter().filter(|kernels| **kernels > 0).count();
        (with_kernels < 2).then_some(Reason::OneKernel)
    }
}

fn nodes_of(graph: Ptr) -> Result<Vec<Ptr>, Reason> {
    let f = driver().graph_nodes.ok_or(Reason::Missing("cuGraphGetNodes"))?;
    let mut count = 0;
    // SAFETY: a live graph; with no array the driver only counts.
    check("cuGraphGetNodes", unsafe { f(graph, null_mut(), &mut count) })?;
    if count > NODES_MAX {
        return Err(Reason::TooManyNodes(count));
    }
    let mut nodes = vec![null_mut(); count];
    if count > 0 {
        // SAFETY: an array of `count`.
        check("cuGraphGetNodes", unsafe { f(graph, nodes.as_mut_ptr(), &mut count) })?;
        nodes.truncate(count);
    }
    Ok(nodes)
}

/// Dependencies, with their data.
pub(super) fn edges_of(graph: Ptr) -> Result<Vec<(Ptr, Ptr, u64)>, Reason> {
    let d = driver();
    let get = |from: *mut Ptr, to: *mut Ptr, data: *mut u64, count: &mut usize| {
        if let Some(f) = d.graph_edges_data {
            // SAFETY: a live graph; arrays of `count`, or none, where the driver only counts.
            check("cuGraphGetEdges_v2", unsafe { f(graph, from, to, data, count) })
        } else if let Some(f) = d.graph_edges {
            // A driver without that has no such edges either.
            // SAFETY: as above.
            check("cuGraphGetEdges", unsafe { f(graph, from, to, count) })
        } else {
            Err(Reason::Missing("cuGraphGetEdges"))
        }
    };
    let mut count = 0;
    get(null_mut(), null_mut(), null_mut(), &mut count)?;
    if count == 0 {
        return Ok(Vec::new());
    }
    if count > NODES_MAX * 8 {
        return Err(Reason::TooManyNodes(count));
    }
    let (mut from, mut to) = (vec![null_mut(); count], vec![null_mut(); count]);
    // `CUgraphEdgeData` is eight bytes: ports, type, and padding that is zero.
    let mut data = vec![0_u64; count];
    get(from.as_mut_ptr(), to.as_mut_ptr(), data.as_mut_ptr(), &mut count)?;
    let edges = from.into_iter().zip(to).zip(data).take(count);
    Ok(edges.map(|((from, to), data)| (from, to, data)).collect())
}

/// A node's kernels, or why a graph with it is never divided.
fn kernels_of(
    node: Ptr,
    depth: usize,
    context: usize,
    functions: &mut HashSet<usize>,
) -> Result<u32, Reason> {
    let d = driver();
    let f = d.node_type.ok_or(Reason::Missing("cuGraphNodeGetType"))?;
    let mut kind = -1;
    // SAFETY: a node of a live graph; a valid out-pointer.
    check("cuGraphNodeGetType", unsafe { f(node, &mut kind) })?;
    match kind {
        NODE_KERNEL => match attribute(node, LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE) {
            Some(value) if value[0] as u32 != 0 => Err(Reason::DeviceUpdatable),
            _ => {
                functions.insert(solo::function_of(node, context)?);
                Ok(1)
            }
        },
        NODE_COPY | NODE_FILL | NODE_HOST | NODE_EMPTY => Ok(0),
        NODE_GRAPH => {
            let f = d.child_graph.ok_or(Reason::ChildGraph)?;
            let mut child = null_mut();
            // SAFETY: a child graph node; a valid out-pointer.
            if depth >= DEPTH_MAX || unsafe { f(node, &mut child) } != SUCCESS {
                return Err(Reason::ChildGraph);
            }
            let kernels = nodes_of(child)?;
            kernels.into_iter().map(|n| kernels_of(n, depth + 1, context, functions)).sum()
        }
        NODE_WAIT_EVENT | NODE_RECORD_EVENT => Err(Reason::Events),
        NODE_SEMAPHORE_SIGNAL | NODE_SEMAPHORE_WAIT => Err(Reason::Semaphores),
        NODE_ALLOC | NODE_FREE => Err(Reason::Memory),
        NODE_MEMORY_OPERATION => Err(Reason::MemoryOperations),
        NODE_CONDITIONAL => Err(Reason::Conditional),
        other => Err(Reason::OtherNode(other)),
    }
}

fn check_attributes(nodes: &[Ptr], copies: &[Ptr], kernels: &[u32]) -> Result<(), Reason> {
    for ((node, copy), kernels) in nodes.iter().zip(copies).zip(kernels) {
        // More than one, or another kind of node: attributes are not the node's.
        if *kernels == 1
            && KEPT_ATTRIBUTES.iter().any(|a| attribute(*node, *a) != attribute(*copy, *a))
        {
            return Err(Reason::AttributesLost);
        }
    }
    Ok(())
}

/// Whether so many parts may be made, of which `solo` are kernels by themselves.
fn allowed(parts: usize, solo: usize) -> Result<(), Reason> {
    match parts {
        0 | 1 => Err(Reason::OnePart),
        n if n > PARTS_MAX => Err(Reason::TooManyParts(n)),
        n if is_full(n - solo) => Err(Reason::TooManyExecs),
        _ => Ok(()),
    }
}

/// A copy of a graph as it was instantiated.
#[derive(Debug)]
pub struct GraphCopy {
    /// The context that its driver objects live in.
    pub home: Arc<Home>,
    /// Kernel nodes, those in child graphs included.
    pub kernel_nodes: u32,
    pub nodes: usize,
    /// Why it is never launched in parts, but may be limited to some of the SMs.
    pub undivided: Option<Reason>,
    flags: u64,
    /// Nodes whose kernels could be launched by themselves.
    solo: Vec<solo::Node>,
    /// Its kernel nodes outside of child graphs.
    pub(super) kernels: Vec<limit::Node>,
    /// What its kernels' nodes launch.
    functions: HashSet<usize>,
    /// Destroyed unless its context was.
    graph: ManuallyDrop<Graph>,
}

impl GraphCopy {
    /// Copy the graph that `exec` was just made from.
    ///
    /// # Errors
    /// Why it is never launched in parts.
    pub fn new(exec: Ptr, graph: Ptr) -> Result<Self, Reason> {
        let home = Home::current()?;
        home.clone().within(|| Self::copy(home, exec, graph)).unwrap_or(Err(Reason::NoContext))
    }

    fn copy(home: Arc<Home>, exec: Ptr, graph: Ptr) -> Result<Self, Reason> {
        let flags = super::flags(exec)?;
        if flags & INSTANTIATE_DEVICE_LAUNCH != 0 {
            return Err(Reason::DeviceLaunch);
        }
        let survey = Survey::of(graph, home.context())?;
        let copy = Graph::copy(graph)?;
        let copies = copy.find(&survey.nodes)?;
        check_attributes(&survey.nodes, &copies, &survey.kernels)?;
        // A child graph of one kernel is none: it has no parameters to read.
        let single = copies.iter().zip(&survey.kernels).filter(|(_, kernels)| **kernels == 1);
        let single = single.map(|(node, _)| *node);
        let context = home.context();
        let limited = single.clone().filter(|_| sm_limit::may_serve(context));
        let kernels: Vec<_> = limited.filter_map(limit::Node::of).collect();
        let rewritten = single.filter(|_| rewrites());
        let solo = rewritten.filter_map(|node| solo::Node::of(node, context)).collect();
        let kernel_nodes = survey.kernels.iter().fold(0_u32, |sum, k| sum.saturating_add(*k));
        let (flags, nodes) = (flags & !INSTANTIATE_UPLOAD, survey.nodes.len());
        let undivided = survey.undivided();
        if let Some(reason) = undivided.filter(|_| kernels.is_empty()) {
            return Err(reason);
        }
        let (functions, graph) = (survey.functions, ManuallyDrop::new(copy));
        Ok(GraphCopy {
            home,
            kernel_nodes,
            nodes,
            undivided,
            flags,
            solo,
            kernels,
            functions,
            graph,
        })
    }

    pub(super) fn graph(&self) -> Ptr {
        self.graph.0
    }

    /// What can be said of a size of parts without looking at the graph.
    ///
    /// # Errors
    /// Why it is launched whole.
    pub fn could_be_divided(&self, kernels_per_part: u32) -> Result<(), Reason> {
        let parts = self.kernel_nodes.div_ceil(kernels_per_part.max(1)) as usize;
        allowed(parts, 0)
    }

    /// Whether it has become known that one of its kernels waits.
    pub fn waits(&self) -> bool {
        self.functions.iter().any(|function| solo::waits(*function))
    }

    /// Nodes whose kernels are to be launched by themselves, of those that can be divided now.
    pub fn solo(&self, ready: &Ready) -> Vec<usize> {
        solo::wanted(&self.solo, ready)
    }

    /// Divide it; the kernels of the nodes `solo` go by themselves.
    ///
    /// # Errors
    /// Why it is launched whole.
    pub fn divide(
        &self,
        kernels_per_part: u32,
        ready: &Ready,
        solo: &[usize],
    ) -> Result<Pieces, Reason> {
        let split = || self.split(kernels_per_part, ready, solo);
        let pieces = self.home.within(split).unwrap_or(Err(Reason::NoContext))?;
        Ok(Pieces { home: self.home.clone(), flags: self.flags, pieces: ManuallyDrop::new(pieces) })
    }

    fn split(
        &self,
        kernels_per_part: u32,
        ready: &Ready,
        solo: &[usize],
    ) -> Result<VecDeque<Piece>, Reason> {
        let Survey { nodes, kernels, edges, .. } = Survey::of(self.graph.0, self.home.context())?;
        let edges: Vec<(usize, usize)> =
            edges.into_iter().map(|(from, to, _)| (from, to)).collect();
        let solo = self.solo.iter().filter(|node| solo.contains(&node.handle));
        let solo = solo.filter_map(|node| Some((node.handle, Solo::of(node, ready)?)));
        let mut solo: HashMap<usize, Solo> = solo.collect();
        let alone = |node: usize| solo.contains_key(&(nodes[node] as usize));
        let divided = partition::divide(&kernels, alone, &edges, kernels_per_part)
            .map_err(|partition::NotAnOrder| Reason::NoOrder)?;
        let order: Vec<Ptr> = divided.order.iter().map(|n| nodes[*n]).collect();
        // Beside others in a piece, a kernel cannot be launched by itself.
        let single = divided.pieces.iter().filter(|piece| piece.len() == 1);
        let single: HashSet<usize> = single.map(|piece| order[piece.start] as usize).collect();
        solo.retain(|node, _| single.contains(node));
        allowed(divided.pieces.len(), solo.len())?;
        let kernels: Vec<u32> = divided.order.iter().map(|n| kernels[*n]).collect();
        let work = Graph::copy(self.graph.0)?;
        let mine = work.find(&order)?;
        let mut pieces = VecDeque::new();
        let mut source = Source { order: &order, kernels: &kernels, solo: &mut solo };
        source.halve(work, &mine, &divided.pieces, &mut pieces)?;
        Ok(pieces)
    }
}

impl Drop for GraphCopy {
    fn drop(&mut self) {
        let GraphCopy { home, graph, .. } = self;
        // SAFETY: at most once, and nothing looks at it again.
        home.within(|| unsafe { ManuallyDrop::drop(graph) });
    }
}

/// A step of a chain.
#[derive(Debug)]
pub enum Step {
    /// A part: its exec (`CUgraphExec`).
    Graph(usize),
    /// A kernel by itself.
    Kernel(Solo),
}

impl Step {
    fn exec(&self) -> Option<usize> {
        match self {
            Step::Graph(exec) => Some(*exec),
            Step::Kernel(_) => None,
        }
    }
}

/// A part before it is instantiated.
#[derive(Debug)]
enum Piece {
    Graph(Graph),
    Kernel(Solo),
}

/// All pieces of a graph, in order.
#[derive(Debug)]
pub struct Pieces {
    home: Arc<Home>,
    flags: u64,
    /// Destroyed unless its context was.
    pieces: ManuallyDrop<VecDeque<Piece>>,
}

impl Pieces {
    /// Instantiate them: that may wait for all that runs in the context, and keep launches waiting.
    ///
    /// # Errors
    /// Why the graph is launched whole.
    pub fn instantiate(mut self) -> Result<Parts, Reason> {
        let mut parts = Parts { home: self.home.clone(), steps: Vec::new() };
        let call = "cuGraphInstantiateWithFlags";
        let f = driver().graph_instantiate.ok_or(Reason::Missing(call))?;
        let home = self.home.clone();
        let all = || {
            // A part that the driver refuses for want of memory only when it is launched cannot be taken back.
            sm_limit::has_spare_memory().then_some(()).ok_or(Reason::Busy)?;
            while let Some(piece) = self.pieces.pop_front() {
                match piece {
                    Piece::Kernel(solo) => parts.steps.push(Step::Kernel(solo)),
                    Piece::Graph(graph) => {
                        let mut exec = null_mut();
                        // SAFETY: a graph of ours; a valid out-pointer.
                        check(call, unsafe { f(&mut exec, graph.0, self.flags) })?;
                        made();
                        parts.steps.push(Step::Graph(exec as usize));
                    }
                }
            }
            Ok(())
        };
        home.within(all).unwrap_or(Err(Reason::NoContext))?;
        Ok(parts)
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        let Pieces { home, pieces, .. } = self;
        // SAFETY: at most once, and nothing looks at them again.
        home.within(|| unsafe { ManuallyDrop::drop(pieces) });
    }
}

/// What parts are made of.
struct Source<'a> {
    /// The kept graph's nodes, in order.
    order: &'a [Ptr],
    kernels: &'a [u32],
    /// By node, each of which is a piece.
    solo: &'a mut HashMap<usize, Solo>,
}

impl Source<'_> {
    /// Make parts out of `work`, which has exactly the nodes of `pieces`, known there as `mine`:
    /// by halves, because taking all other nodes out of one copy for each part would be
    /// quadratic.
    fn halve(
        &mut self,
        work: Graph,
        mine: &[Ptr],
        pieces: &[Range<usize>],
        made: &mut VecDeque<Piece>,
    ) -> Result<(), Reason> {
        let [first, .., last] = pieces else {
            return match pieces {
                [piece] => self.finish(work, mine, piece.clone(), made),
                _ => Ok(()),
            };
        };
        debug_assert_eq!(mine.len(), last.end - first.start);
        let (left, right) = pieces.split_at(pieces.len() / 2);
        let (mine_left, mine_right) = mine.split_at(right[0].start - first.start);
        let other = Graph::copy(work.0)?;
        let others = other.find(mine)?;
        let (other_left, other_right) = others.split_at(mine_left.len());
        take_out(other_left)?;
        take_out(mine_right)?;
        self.halve(work, mine_left, left, made)?;
        self.halve(other, other_right, right, made)
    }

    /// Keep a part, or have its only kernel launched by itself.
    fn finish(
        &mut self,
        graph: Graph,
        nodes: &[Ptr],
        piece: Range<usize>,
        made: &mut VecDeque<Piece>,
    ) -> Result<(), Reason> {
        if let Some(solo) = self.solo.remove(&(self.order[piece.start] as usize)) {
            made.push_back(Piece::Kernel(solo));
            return Ok(());
        }
        check_attributes(&self.order[piece.clone()], nodes, &self.kernels[piece])?;
        made.push_back(Piece::Graph(graph));
        Ok(())
    }
}

fn take_out(nodes: &[Ptr]) -> Result<(), Reason> {
    let f = driver().node_destroy.ok_or(Reason::Missing("cuGraphDestroyNode"))?;
    // SAFETY: nodes of a graph of ours.
    nodes.iter().try_for_each(|node| check("cuGraphDestroyNode", unsafe { f(*node) }))
}

/// Execs of ours. When it is dropped they are destroyed, but not before nothing runs: destroying one may wait for all
/// that does (litmus programs hung there on an H200; `bench/gpu`, `waits` saw none wait), and the thread that drops it
/// need not be one that could wait.
#[derive(Debug)]
pub struct Parts {
    home: Arc<Home>,
    /// Steps in the order in which they are launched.
    pub steps: Vec<Step>,
}

impl Drop for Parts {
    fn drop(&mut self) {
        let execs = self.steps.iter().filter_map(Step::exec).collect();
        if !retire(&self.home, execs) {
            // Behind all other jobs.
            let job = Job { us: 0, ..Job::of_context(Task::Sweep, self.home.context()) };
            worker::hire_once(job);
        }
    }
}

/// An event of ours, recorded behind launches in parts.
#[derive(Debug)]
pub struct Event {
    home: Arc<Home>,
    handle: usize,
}

impl Event {
    /// A new one.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(home: &Arc<Home>) -> Result<Self, Reason> {
        let call = "cuEventCreate";
        let f = driver().event_create.ok_or(Reason::Missing(call))?;
        let mut event = null_mut();
        // SAFETY: a valid out-pointer.
        let result = home.within(|| unsafe { f(&mut event, EVENT_DISABLE_TIMING) });
        check(call, result.ok_or(Reason::NoContext)?)?;
        Ok(Event { home: home.clone(), handle: event as usize })
    }

    /// The context that the event lives in.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// Record it in the stream of a launch under way; says whether that worked.
    pub fn record(&self, stream: usize) -> bool {
        // SAFETY: the launch's stream, and an event of ours.
        driver()
            .event_record
            .is_some_and(|f| unsafe { f(self.handle as Ptr, stream as Ptr) } == SUCCESS)
    }

    /// Have the stream of a launch under way wait for it; says whether that worked.
    pub fn hold(&self, stream: usize) -> bool {
        let f = driver().stream_wait_event;
        // SAFETY: the launch's stream, and an event of ours.
        f.is_some_and(|f| unsafe { f(stream as Ptr, self.handle as Ptr, 0) } == SUCCESS)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.home.within(|| {
            // SAFETY: ours, and not used again.
            driver().event_destroy.map(|f| unsafe { f(self.handle as Ptr) });
        });
    }
}
