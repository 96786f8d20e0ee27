//! Graphs on some of the SMs: copies of a graph whose kernels are bound to a green context.
//!
//! A kernel that is captured in a stream of a green context runs on the SMs of that, in whatever stream its graph is
//! launched. So from the kept copy of a graph another one is made in which kernels are captured anew, node by node,
//! with the same parameters, attributes and dependencies. Its exec is launched in the program's stream in place of the
//! program's, with one event behind it.
//!
//! Captured anew is each kernel with more blocks than the smallest green context has SMs, and each of them must be one
//! that may be limited ([`sm_limit::allows`]); of those whose code was not read the core must have had one limited
//! before ([`sm_limit::was_decided`]), as it may know that they do not end. A graph with one that may not is never
//! limited, nor one with kernels in child graphs.
//!
//! A graph is offered once there is a copy for each green context. They are made before a launch that finds nothing
//! running in the context, one each ([`offers`]), and go before the green contexts do ([`give_up`]).

use super::build::{Graph, GraphCopy, Parts, Step, Survey, check, edges_of};
use super::home::{self, is_full};
use super::reason::Reason;
use super::solo::{self, Value, attribute};
use super::{Event, Record, TABLE, order};
use crate::cuda::{
    CuResult, LAUNCH_ATTRIBUTE_CLUSTER, LAUNCH_ATTRIBUTE_COOPERATIVE, LAUNCH_ATTRIBUTE_PRIORITY,
    LaunchConfig, Ptr, SUCCESS, driver,
};
use crate::host::{self, host, log};
use crate::launch::{KernelArguments, PlannedLaunch, StreamState, blocks_of};
use crate::prepare::Limitable;
use crate::{kernels, limited, occupancy, occupied_sms, prepare, sm_limit};
use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::{Duration, Instant};
// Other threads wait while kernels are captured.
use tally_contract::limits::{BACKLOG_MAX, GRAPH_LIMITED_KERNELS_MAX as NODES_MAX};

/// Launches from one vain attempt to make a copy to the next.
const RETRY_LAUNCHES: u32 = 64;
const CAPTURE_RELAXED: i32 = 2;
/// Longer than a launch is in the driver, unless that has no room for it.
const LAUNCH_MAX: Duration = Duration::from_secs(1);

/// Launches of copies that are in the driver, or about to be.
static LAUNCHING: AtomicU32 = AtomicU32::new(0);
static IS_SHORT_OF_MEMORY: AtomicBool = AtomicBool::new(false);

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
    /// Reads a kernel node of a kept graph, just instantiated, in the current context. `None`: it was never launched by
    /// itself, and is not known.
    pub fn of(handle: Ptr) -> Option<Self> {
        let params = solo::read(handle)?;
        let launch = solo::arguments(&params);
        let kernel = host().kernel_of(launch.function as usize)?;
        // Its module lives now, and later it may not.
        prepare::look_at_new(kernel as usize, launch.function);
        Some(Node {
            handle: handle as usize,
            function: launch.function as usize,
            kernel,
            blocks: blocks_of(launch.grid),
            resident: occupancy::resident_on_all(&launch),
            is_fixed: solo::is_lost(|which| attribute(handle, which)),
        })
    }

    fn may_be_limited(&self) -> bool {
        let limitable = prepare::limitable_as_known(self.kernel as usize);
        let is_known_to_end = limitable == Limitable::Any || sm_limit::was_decided(self.kernel);
        let allows = |resident| sm_limit::allows(limitable, self.blocks, resident);
        let is_there = || host().kernel_of(self.function) == Some(self.kernel);
        !self.is_fixed && is_known_to_end && self.resident.is_some_and(allows) && is_there()
    }
}

/// The nodes that are captured anew, for green contexts of `least` SMs and more.
fn large(copy: &GraphCopy, least: u32) -> impl Iterator<Item = &Node> {
    copy.kernels.iter().filter(move |node| node.blocks > u64::from(least))
}

/// Whether a graph may be limited, as far as is known now.
fn may_be_limited(copy: &GraphCopy, least: u32) -> bool {
    let count = large(copy, least).count();
    copy.kernel_nodes as usize == copy.kernels.len()
        && (1..=NODES_MAX).contains(&count)
        && large(copy, least).all(Node::may_be_limited)
}

/// A copy on some of the SMs.
#[derive(Debug)]
struct Twin {
    sms: u32,
    parts: Arc<Parts>,
}

/// What is known of a graph's kernels.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// SMs of the smallest green context, and [`kernels::changes`], then.
    when: (u32, u32),
    may_be_limited: bool,
    /// Blocks of the largest kernel that may wait for the host ([`occupied_sms`]).
    unread_blocks: u64,
    /// The same of those that are on all SMs in a copy, too.
    unbound_blocks: u64,
}

impl Known {
    fn of(copy: &GraphCopy, when: (u32, u32)) -> Self {
        let (least, _) = when;
        let largest = |nodes: &mut dyn Iterator<Item = &Node>| {
            let counted =
                |n: &Node| occupied_sms::counted(n.kernel as usize, n.blocks, || n.resident);
            nodes.map(counted).max().unwrap_or(0)
        };
        let unbound = |node: &&Node| node.blocks <= u64::from(least);
        let unbound_blocks = largest(&mut copy.kernels.iter().filter(unbound));
        let unread_blocks = largest(&mut large(copy, least)).max(unbound_blocks);
        let may_be_limited = may_be_limited(copy, least);
        Known { when, may_be_limited, unread_blocks, unbound_blocks }
    }
}

/// What is known of an exec's launches on some of the SMs.
#[derive(Debug, Default)]
pub(super) struct Limits {
    known: Option<Known>,
    /// At most one for each green context.
    twins: Vec<Twin>,
    /// Launches until a copy is made, after a vain attempt.
    wait: u32,
    never: bool,
}

impl Limits {
    pub(super) fn has_copies(&self) -> bool {
        !self.twins.is_empty()
    }

    fn has(&self, sms: u32) -> bool {
        self.twins.iter().any(|twin| twin.sms == sms)
    }

    /// Counts a launch. Whether it is one that makes no copy.
    fn waits(&mut self) -> bool {
        let waits = self.wait > 0;
        self.wait = self.wait.saturating_sub(1);
        waits
    }
}

/// The kept copy of an exec, and whether it is never limited.
fn known(exec: usize) -> Option<(Arc<GraphCopy>, Known, bool)> {
    let when = (sm_limit::green_sms(0).unwrap_or(0), kernels::changes());
    let (copy, known, never) = TABLE.with(|table| {
        let Record { copy, limits, .. } = table.records.get(&exec)?;
        let known = limits.known.filter(|known| known.when == when);
        Some((copy.as_ref().ok()?.clone(), known, limits.never))
    })?;
    let known = known.unwrap_or_else(|| {
        let known = Known::of(&copy, when);
        with_limits(exec, &copy, |limits| limits.known = Some(known));
        known
    });
    Some((copy, known, never))
}

/// The same of one that may be limited in `context`.
fn limitable(exec: usize, context: usize) -> Option<(Arc<GraphCopy>, Known)> {
    let (copy, known, never) = known(exec)?;
    let may = known.may_be_limited && !never && copy.home.context() == context;
    may.then_some((copy, known))
}

/// Of the exec, if this is its copy still.
fn with_limits<T>(
    exec: usize,
    copy: &Arc<GraphCopy>,
    work: impl FnOnce(&mut Limits) -> T,
) -> Option<T> {
    TABLE.with(|table| {
        let record = table.records.get_mut(&exec)?;
        let is_its = record.copy.as_ref().is_ok_and(|its| Arc::ptr_eq(its, copy));
        is_its.then(|| work(&mut record.limits))
    })
}

/// What a launch finds of a graph's copies.
enum Next {
    /// There is one for each green context.
    Ready,
    /// One for so many SMs is missing.
    Make(u32),
    /// One is missing, and the last attempt was vain and not long ago.
    Wait,
}

/// Whether a launch of a graph can be on some of the SMs, in its stream's context, which has green ones. A copy that is
/// missing is made, if nothing runs now: by a thread that is not in a launch yet.
pub fn offers(exec: Ptr, stream: &StreamState) -> bool {
    let key = exec as usize;
    // What is bound may take a hardware queue of its own.
    if stream.backlog > BACKLOG_MAX || !host().has_queues_for(stream.context, 1) {
        return false;
    }
    let Some((copy, _)) = limitable(key, stream.context) else { return false };
    let all = sm_limit::all_green_sms();
    let next = with_limits(key, &copy, |limits| match all.iter().find(|sms| !limits.has(**sms)) {
        None => Next::Ready,
        Some(_) if limits.waits() => Next::Wait,
        Some(sms) => Next::Make(*sms),
    });
    match next {
        Some(Next::Ready) => !occupied_sms::may_be_all(stream.slot, sm_limit::largest()),
        Some(Next::Make(sms)) => make(key, &copy, sms) && Some(&sms) == all.last(),
        Some(Next::Wait) | None => false,
    }
}

/// Blocks of a graph's largest kernel that may wait for the host while others are to run beside it ([`occupied_sms`]).
pub(crate) fn unread_blocks(exec: Ptr) -> u64 {
    let are_known = |copy: &GraphCopy| copy.kernel_nodes as usize == copy.kernels.len();
    known(exec as usize)
        .filter(|(copy, ..)| are_known(copy))
        .map_or(u64::MAX, |(_, known, _)| known.unread_blocks)
}

/// Launch a graph on at most `sms` SMs. `None`: nothing was issued.
pub fn launch(planned: &PlannedLaunch<'_>, exec: Ptr, sms: u32) -> Option<CuResult> {
    let (copy, known) = limitable(exec as usize, planned.context)?;
    LAUNCHING.fetch_add(1, SeqCst);
    let result = sm_limit::has_green(planned.context)
        .then(|| launch_copy(planned, exec, (&copy, known), sm_limit::green_sms(sms)?))
        .flatten();
    LAUNCHING.fetch_sub(1, SeqCst);
    result
}

/// While the green contexts stay.
fn launch_copy(
    planned: &PlannedLaunch<'_>,
    exec: Ptr,
    (copy, known): (&Arc<GraphCopy>, Known),
    sms: u32,
) -> Option<CuResult> {
    let key = exec as usize;
    let graph_launch = driver().graph_launch?;
    let parts = with_limits(key, copy, |limits| {
        let twin = limits.twins.iter().find(|twin| twin.sms == sms)?;
        Some(twin.parts.clone())
    })??;
    let [Step::Graph(twin)] = &*parts.steps else { return None };
    let launching = order::begin(exec, planned.stream, true);
    if !launching.may_be_in_parts || occupied_sms::may_be_all(planned.slot, sms) {
        return None;
    }
    occupied_sms::note(planned.slot, planned.number, known.unbound_blocks);
    // SAFETY: an exec that `parts` keeps alive, the program's stream.
    let result = unsafe { graph_launch(*twin as Ptr, planned.stream as Ptr) };
    if result != SUCCESS {
        log!("graph {exec:?} is not limited to {sms} SMs any more: CUDA error {result}");
        // Dropped without the lock.
        let _old = with_limits(key, copy, |limits| {
            limits.never = true;
            std::mem::take(&mut limits.twins)
        });
        return None;
    }
    launching.end(true);
    limited::note_graph(planned.slot, planned.number, key);
    Some(SUCCESS)
}

/// Make a copy on so many SMs, if nothing runs now. Whether it was made.
fn make(exec: usize, copy: &Arc<GraphCopy>, sms: u32) -> bool {
    if copy.home.within(sm_limit::has_spare_memory) == Some(false) {
        if !IS_SHORT_OF_MEMORY.swap(true, SeqCst) {
            log!("graphs are not limited to some of the SMs: less than 5 % of the memory is free");
        }
        with_limits(exec, copy, |limits| limits.wait = RETRY_LAUNCHES);
        return false;
    }
    let event = TABLE.with(|table| table.records.get(&exec)?.event.clone());
    let context = copy.home.context();
    // In the table before anybody may launch again, or the green contexts go.
    let made = host::alone_and_idle_outside(context, || {
        if !sm_limit::has_green(context) {
            return Err(Reason::Busy);
        }
        let event = event.map_or_else(|| Event::new(&copy.home).map(Arc::new), Ok)?;
        let capture = |stream| bound(copy, sms, stream);
        let in_green = || sm_limit::within_green(sms, capture).unwrap_or(Err(Reason::Busy));
        let parts = Arc::new(copy.home.within(in_green).ok_or(Reason::NoContext)??);
        let (kept_event, kept_parts) = (event.clone(), parts.clone());
        let is_kept = TABLE.with(|table| {
            let record = table.records.get_mut(&exec)?;
            let is_its = record.copy.as_ref().is_ok_and(|its| Arc::ptr_eq(its, copy));
            let is_wanted = is_its && !record.limits.never && !record.limits.has(sms);
            is_wanted.then(|| {
                record.event.get_or_insert(kept_event);
                record.limits.twins.push(Twin { sms, parts: kept_parts });
            })
        });
        // Whatever is not kept is dropped here, without the lock.
        drop((event, parts));
        is_kept.ok_or(Reason::Busy)
    });
    let Err(reason) = made.unwrap_or(Err(Reason::Busy)) else { return true };
    // What the driver refuses once it would refuse again.
    let is_final = !reason.will_pass() && !reason.is_of_memory();
    if is_final {
        log!("graph {exec:#x} is not limited to {sms} SMs: {reason}");
    }
    with_limits(exec, copy, |limits| {
        limits.wait = RETRY_LAUNCHES;
        limits.never |= is_final;
    });
    false
}

/// An exec of a copy in which kernels are bound to where `stream` is, a green context of `sms` SMs. The context is
/// current.
fn bound(copy: &GraphCopy, sms: u32, stream: Ptr) -> Result<Parts, Reason> {
    if is_full(1) {
        return Err(Reason::TooManyExecs);
    }
    let least = sm_limit::green_sms(0).unwrap_or(sms);
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
    for node in large(copy, least) {
        let at = *place.get(&node.handle).ok_or(Reason::NoOrder)?;
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
        // SAFETY: a stream and a graph of ours, nodes of that; valid out-pointers; the parameters are those of a node
        // that lives, or its copies.
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

/// The green contexts of a context go, and no launch finds them any more: first what is bound to them. False: a launch
/// did not leave the driver, and they must stay.
pub(crate) fn give_up(context: usize) -> bool {
    let start = Instant::now();
    while LAUNCHING.load(SeqCst) != 0 {
        if start.elapsed() >= LAUNCH_MAX {
            return false;
        }
        std::thread::yield_now();
    }
    let twins: Vec<Twin> = TABLE.with(|table| {
        let is_here =
            |record: &&mut Record| record.copy.as_ref().is_ok_and(|c| c.home.context() == context);
        let records = table.records.values_mut().filter(is_here);
        records.flat_map(|record| std::mem::take(&mut record.limits.twins)).collect()
    });
    drop(twins);
    // Also those that were given up before.
    if home::is_any_retired(context) {
        home::sweep(context);
    }
    true
}

/// A launch of an exec on some of the SMs did not end. Which of its kernels did not is not known: those that nobody
/// read are not limited any more in this run.
pub(crate) fn refuse(exec: usize) {
    log!("graph {exec:#x} did not end on some of the SMs: it is whole from now on");
    // The green contexts stay until what is dropped here is known to be.
    LAUNCHING.fetch_add(1, SeqCst);
    let old = TABLE.with(|table| {
        let record = table.records.get_mut(&exec)?;
        record.limits.never = true;
        Some((record.copy.clone().ok(), std::mem::take(&mut record.limits.twins)))
    });
    if let Some((Some(copy), _)) = &old {
        let unread = copy.kernels.iter().map(|node| node.kernel as usize);
        let unread = unread.filter(|k| prepare::limitable_as_known(*k) == Limitable::Larger);
        unread.for_each(kernels::refuse_sm_limit);
    }
    drop(old);
    LAUNCHING.fetch_sub(1, SeqCst);
}

/// Only in a forked child.
pub(super) fn reset() {
    LAUNCHING.store(0, SeqCst);
}
