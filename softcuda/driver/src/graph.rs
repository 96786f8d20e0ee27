//! Graphs: work with dependencies, and the instantiated form that runs.

use crate::context::Context;
use crate::driver::driver;
use crate::engine::in_background;
use crate::error::{CuError, CuResult};
use crate::op::{Op, Worker};
use crate::registry::handle_of;
use crate::stream::Place;
use crate::sync::{Progress, lock};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};

pub(crate) struct Node {
    pub(crate) op: Mutex<Op>,
    pub(crate) after: Mutex<Vec<Arc<Node>>>,
    /// The node it was cloned from. Holding on to it keeps its address, and so
    /// its handle, from being another node's.
    origin: Option<Weak<Node>>,
}

impl Node {
    pub(crate) fn kind(&self) -> u32 {
        match &*lock(&self.op) {
            Op::Kernel(_) => 0,
            Op::Copy(_) => 1,
            Op::Fill(_) => 2,
            Op::Host { .. } | Op::Callback { .. } => 3,
            Op::Graph(_) | Op::Child(_) => 4,
            Op::Nop | Op::Record(_) | Op::Wait(_) => 5,
            Op::WaitEvent(_) => 6,
            Op::RecordEvent(_) => 7,
            Op::Free(_) => 11,
            Op::WriteValue { .. } | Op::WaitValue { .. } => 12,
        }
    }

    /// Takes back the handle of the child graph that goes with the node.
    fn withdraw_child(&self) {
        let child = match &*lock(&self.op) {
            Op::Child(child) => child.clone(),
            _ => return,
        };
        if let Ok(driver) = driver() {
            let _ = driver.graphs.remove(handle_of(&child));
        }
        child.withdraw_children();
    }
}

#[derive(Default)]
pub(crate) struct Graph {
    nodes: Mutex<Vec<Arc<Node>>>,
    /// Device memory that its allocation nodes stand for: address and the
    /// allocation's number, so that no later one is taken for it.
    pub(crate) memory: Mutex<Vec<(u64, u64)>>,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let Ok(driver) = driver() else { return };
        for (address, id) in lock(&self.memory).drain(..) {
            if driver.memory.find(address).is_some_and(|r| r.base == address && r.id == id) {
                let _ = driver.memory.release(&driver.arbiter, address);
            }
        }
    }
}

impl Graph {
    /// Adds a node that runs after `after`.
    ///
    /// # Errors
    /// `INVALID_VALUE` if one of those is not in this graph.
    pub(crate) fn add(&self, op: Op, after: Vec<Arc<Node>>) -> CuResult<Arc<Node>> {
        self.add_twin(op, after, None)
    }

    fn add_twin(
        &self,
        op: Op,
        after: Vec<Arc<Node>>,
        origin: Option<Weak<Node>>,
    ) -> CuResult<Arc<Node>> {
        let mut nodes = lock(&self.nodes);
        if !after.iter().all(|a| nodes.iter().any(|n| Arc::ptr_eq(n, a))) {
            return Err(CuError::INVALID_VALUE);
        }
        let node = Arc::new(Node { op: Mutex::new(op), after: Mutex::new(after), origin });
        nodes.push(node.clone());
        Ok(node)
    }

    /// The node behind a handle.
    pub(crate) fn node(&self, handle: usize) -> Option<Arc<Node>> {
        lock(&self.nodes).iter().find(|n| handle_of(n) == handle).cloned()
    }

    pub(crate) fn nodes(&self) -> Vec<Arc<Node>> {
        lock(&self.nodes).clone()
    }

    /// `(from, to)` for every dependency.
    pub(crate) fn edges(&self) -> Vec<(usize, usize)> {
        let nodes = self.nodes();
        let edges = nodes.iter().flat_map(|to| {
            let after = lock(&to.after).clone();
            after.into_iter().map(|from| (handle_of(&from), handle_of(to))).collect::<Vec<_>>()
        });
        edges.collect()
    }

    /// Takes back the handles of the child graphs in it, before it goes. What
    /// was instantiated still runs.
    pub(crate) fn withdraw_children(&self) {
        self.nodes().iter().for_each(|node| node.withdraw_child());
    }

    /// Takes a node out, with its edges.
    pub(crate) fn remove(&self, node: &Arc<Node>) {
        node.withdraw_child();
        let mut nodes = lock(&self.nodes);
        nodes.retain(|n| !Arc::ptr_eq(n, node));
        for other in nodes.iter() {
            lock(&other.after).retain(|n| !Arc::ptr_eq(n, node));
        }
    }

    /// The node that was made from the one behind `original` when this graph
    /// was cloned.
    pub(crate) fn twin_of(&self, original: usize) -> Option<Arc<Node>> {
        let is_twin = |node: &&Arc<Node>| {
            node.origin.as_ref().is_some_and(|o| o.as_ptr() as usize == original)
        };
        lock(&self.nodes).iter().find(is_twin).cloned()
    }

    /// The same graph with nodes of its own, child graphs included. What the
    /// nodes do is kept by value: changing one graph leaves the other alone.
    ///
    /// # Errors
    /// As with the driver, `NOT_SUPPORTED` for a graph that allocates or frees
    /// memory; `INVALID_VALUE` if the dependencies go round in a circle.
    pub(crate) fn duplicate(&self) -> CuResult<Self> {
        let nodes = self.nodes();
        let frees = |node: &Arc<Node>| matches!(*lock(&node.op), Op::Free(_));
        if !lock(&self.memory).is_empty() || nodes.iter().any(frees) {
            return Err(CuError::NOT_SUPPORTED);
        }
        let copy = Self::default();
        let mut twin: HashMap<usize, Arc<Node>> = HashMap::new();
        for node in self.ordered()? {
            let after = lock(&node.after).iter().map(|a| twin[&handle_of(a)].clone()).collect();
            let op = match &*lock(&node.op) {
                Op::Child(child) => Op::Child(Arc::new(child.duplicate()?)),
                other => other.clone(),
            };
            let made = copy.add_twin(op, after, Some(Arc::downgrade(&node)))?;
            twin.insert(handle_of(&node), made);
        }
        // Listed as in the original.
        *lock(&copy.nodes) = nodes.iter().map(|node| twin[&handle_of(node)].clone()).collect();
        Ok(copy)
    }

    /// All nodes, each after those it depends on.
    ///
    /// # Errors
    /// `INVALID_VALUE` if the dependencies go round in a circle.
    fn ordered(&self) -> CuResult<Vec<Arc<Node>>> {
        let mut left = self.nodes();
        let mut placed: HashSet<usize> = HashSet::new();
        let mut ordered = Vec::with_capacity(left.len());
        while !left.is_empty() {
            let before = ordered.len();
            left.retain(|node| {
                let ready = lock(&node.after).iter().all(|a| placed.contains(&handle_of(a)));
                if ready {
                    placed.insert(handle_of(node));
                    ordered.push(node.clone());
                }
                !ready
            });
            if ordered.len() == before {
                return Err(CuError::INVALID_VALUE);
            }
        }
        Ok(ordered)
    }

    /// Freezes the graph into something that can be launched.
    ///
    /// # Errors
    /// `INVALID_VALUE` if the dependencies go round in a circle.
    pub(crate) fn instantiate(&self) -> CuResult<Plan> {
        let ordered = self.ordered()?;
        let number: HashMap<usize, usize> =
            ordered.iter().enumerate().map(|(i, n)| (handle_of(n), i)).collect();
        let mut steps: Vec<Step> = Vec::with_capacity(ordered.len());
        let mut lanes = 0;
        let mut ends: Vec<usize> = Vec::new();
        for (i, node) in ordered.iter().enumerate() {
            let after: Vec<usize> =
                lock(&node.after).iter().map(|a| number[&handle_of(a)]).collect();
            // Continue the lane of a step that nothing else continues.
            let lane = after.iter().map(|&a| steps[a].lane).find(|&l| after.contains(&ends[l]));
            let lane = lane.unwrap_or_else(|| {
                lanes += 1;
                ends.push(i);
                lanes - 1
            });
            ends[lane] = i;
            let op = match &*lock(&node.op) {
                Op::Child(child) => Op::Graph(Arc::new(Exec::new(child, 0)?)),
                other => other.clone(),
            };
            steps.push(Step { op, after, lane, node: handle_of(node), enabled: true });
        }
        Ok(Plan { steps, lanes })
    }
}

/// One node of a [`Plan`].
#[derive(Clone)]
pub(crate) struct Step {
    pub(crate) op: Op,
    /// Steps that must end first; all come before this one.
    after: Vec<usize>,
    /// Steps of a lane run one after the other on one thread.
    lane: usize,
    /// Handle of the node it was made from.
    pub(crate) node: usize,
    /// `cuGraphNodeSetEnabled`: a disabled one counts as done at once.
    pub(crate) enabled: bool,
}

/// A graph in the order in which it runs.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) steps: Vec<Step>,
    lanes: usize,
}

impl Plan {
    /// Whether `other` differs only in what its nodes do.
    pub(crate) fn has_shape_of(&self, other: &Self) -> bool {
        let shape = |plan: &Self| -> Vec<_> {
            let kind = |op: &Op| std::mem::discriminant(op);
            plan.steps.iter().map(|s| (kind(&s.op), s.after.clone())).collect()
        };
        shape(self) == shape(other)
    }
}

pub(crate) struct Exec {
    pub(crate) plan: Mutex<Arc<Plan>>,
    pub(crate) flags: u64,
    /// Its last launch: the next one, on whatever stream, starts when that one has ended.
    pub(crate) last: Arc<Mutex<Option<Place>>>,
    /// Graphs whose memory it uses.
    _graph: Arc<Graph>,
}

/// One launch of a graph.
struct Launched {
    plan: Arc<Plan>,
    done: Vec<Progress>,
    lanes_done: Progress,
    abandoned: AtomicBool,
}

impl Exec {
    pub(crate) fn new(graph: &Arc<Graph>, flags: u64) -> CuResult<Self> {
        let plan = Mutex::new(Arc::new(graph.instantiate()?));
        Ok(Self { plan, flags, last: Arc::default(), _graph: graph.clone() })
    }

    /// A launch of it as it is now: later updates do not change it.
    pub(crate) fn snapshot(self: &Arc<Self>) -> Arc<Self> {
        let plan = Mutex::new(lock(&self.plan).clone());
        let (last, _graph) = (self.last.clone(), self._graph.clone());
        Arc::new(Self { plan, flags: self.flags, last, _graph })
    }

    /// Runs all steps: the first lane here, each further one on a thread of
    /// its own.
    pub(crate) fn run(&self, worker: &mut Worker, context: &Arc<Context>, priority: i32) {
        let plan = lock(&self.plan).clone();
        let done = plan.steps.iter().map(|_| Progress::default()).collect();
        let (lanes_done, abandoned) = (Progress::default(), AtomicBool::new(false));
        let launched = Arc::new(Launched { plan, done, lanes_done, abandoned });
        let lanes = launched.plan.lanes;
        for lane in 1..lanes {
            let (own, context) = (launched.clone(), context.clone());
            let started =
                in_background(move |worker| own.run_lane(lane, worker, &context, priority));
            if !started {
                launched.abandoned.store(true, SeqCst);
            }
        }
        if launched.abandoned.load(SeqCst) {
            context.fail(CuError::OUT_OF_MEMORY);
        }
        if lanes > 0 {
            launched.run_lane(0, worker, context, priority);
        }
        if !launched.abandoned.load(SeqCst) {
            launched.lanes_done.wait_for(lanes as u64);
        }
    }
}

impl Launched {
    fn run_lane(&self, lane: usize, worker: &mut Worker, context: &Arc<Context>, priority: i32) {
        for (i, step) in self.plan.steps.iter().enumerate().filter(|(_, s)| s.lane == lane) {
            for &before in &step.after {
                if !self.abandoned.load(SeqCst) {
                    self.done[before].wait_for(1);
                }
            }
            if step.enabled {
                worker.run(&step.op, context, priority);
            }
            self.done[i].advance(1);
        }
        self.lanes_done.add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_share_a_lane_and_forks_do_not() {
        let graph = Graph::default();
        let a = graph.add(Op::Nop, vec![]).unwrap();
        let b = graph.add(Op::Nop, vec![a.clone()]).unwrap();
        let c = graph.add(Op::Nop, vec![a.clone()]).unwrap();
        let d = graph.add(Op::Nop, vec![b.clone(), c.clone()]).unwrap();
        let plan = graph.instantiate().unwrap();
        assert_eq!(plan.steps.iter().map(|s| s.lane).collect::<Vec<_>>(), [0, 0, 1, 0]);
        assert_eq!(graph.edges().len(), 4);
        let twin = graph.duplicate().unwrap();
        assert!(twin.twin_of(handle_of(&b)).is_some_and(|t| lock(&t.after).len() == 1));
        assert!(graph.twin_of(handle_of(&b)).is_none());
        assert!(graph.duplicate().unwrap().instantiate().unwrap().has_shape_of(&plan));
        graph.remove(&b);
        assert_eq!(graph.edges().len(), 2);
        lock(&a.after).push(d);
        assert!(graph.instantiate().is_err());
    }
}
