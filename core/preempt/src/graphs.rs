//! CUDA graphs of a best-effort client, kept so that a long one can be launched in parts.
//!
//! | read | for |
//! | --- | --- |
//! | [`partition`] | where a graph is divided |
//! | [`build`] | the driver calls: copies, parts |
//! | [`solo`] | kernels that are launched by themselves, transformed |
//! | [`limit`] | copies on some of the SMs |
//! | [`order`] | launches of one exec on several streams |
//!
//! When a graph is instantiated a copy of it is kept, because programs destroy theirs. The first
//! [`chain`] of an exec makes sub-graphs from it, each its own exec, and takes out kernels that can be divided;
//! launching them one after the other on one stream does what launching the whole does. What cannot be shown to be so
//! is launched whole, for a [`Reason`].
//!
//! Must never report an error to the program, touch its graph or exec, or hold the table's lock
//! during a driver call. High-priority clients and programs without the shim's environment never
//! get further than one load.

pub mod build;
pub mod home;
pub mod limit;
pub mod order;
mod partition;
pub mod reason;
pub mod solo;

use crate::cuda::{INSTANTIATE_DEVICE_LAUNCH, OUT_OF_MEMORY, Ptr, driver};
use crate::host::{self, log};
use crate::kernels;
use crate::lock::{Lock, Locked};
use build::{Event, GraphCopy, Parts, Step};
use home::Home;
use order::Last;
use reason::{GraphState, Reason};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use tally_contract::limits::{
    GRAPH_NODES_KEPT_MAX as NODES_KEPT_MAX, GRAPHS_KEPT_MAX as EXECS_KEPT_MAX,
};

/// Sub-graphs and kernels that together are one graph: cheap to copy; its execs exist as long as one copy does.
#[derive(Clone, Debug)]
pub struct Chain(Arc<Parts>);

impl Chain {
    /// The parts of the chain, to be launched in this order on one stream.
    pub fn steps(&self) -> &[Step] {
        &self.0.steps
    }
}

/// A chain, and what it was made for.
#[derive(Debug)]
struct Made {
    /// The size of parts.
    size: u32,
    /// Nodes whose kernels are launched by themselves.
    solo: Vec<usize>,
    /// [`kernels::changes`] when those were looked for.
    changes: u32,
    parts: Arc<Parts>,
}

/// What is remembered of an exec.
#[derive(Debug)]
struct Record {
    copy: Result<Arc<GraphCopy>, Reason>,
    /// The last chain made.
    chain: Option<Made>,
    /// The last size of parts that was refused, and [`kernels::changes`] then: not looked at again at every launch.
    refused: Option<(u32, u32, Reason)>,
    /// A thread is making a chain.
    being_made: bool,
    limits: limit::Limits,
    /// Held while it is being launched, also in the driver: see [`order`].
    launching: Arc<Lock>,
    /// Stream that the exec was launched on last.
    last: Last,
    /// Behind the last launch in parts. Outlives `copy`: a later launch may have to wait for it.
    event: Option<Arc<Event>>,
}

#[derive(Debug)]
struct Table {
    records: BTreeMap<usize, Record>,
    /// Nodes in all copies.
    nodes: usize,
}

impl Table {
    const NEW: Table = Table { records: BTreeMap::new(), nodes: 0 };

    /// Returns what is not needed, to be dropped without the lock.
    fn insert(&mut self, exec: usize, copy: Result<Arc<GraphCopy>, Reason>) -> impl Sized + use<> {
        let old = self.remove(exec);
        if self.records.len() >= EXECS_KEPT_MAX {
            return (old, copy.ok());
        }
        let (copy, over) = match copy {
            Ok(k) if self.nodes + k.nodes > NODES_KEPT_MAX => (Err(Reason::TooManyCopies), Some(k)),
            copy => (copy, None),
        };
        let record = Record {
            copy,
            chain: None,
            refused: None,
            being_made: false,
            limits: limit::Limits::default(),
            launching: Arc::new(Lock::new()),
            last: Last::Never,
            event: None,
        };
        self.nodes += record.nodes();
        self.records.insert(exec, record);
        COUNT.store(self.records.len(), SeqCst);
        (old, over)
    }

    fn remove(&mut self, exec: usize) -> Option<Record> {
        let old = self.records.remove(&exec)?;
        self.nodes -= old.nodes();
        COUNT.store(self.records.len(), SeqCst);
        Some(old)
    }

    /// Launch it whole from now on. Returns what is not needed any more, to be dropped without
    /// the lock.
    fn spoil(&mut self, exec: usize, reason: Reason) -> Option<impl Sized + use<>> {
        let record = self.records.get_mut(&exec)?;
        self.nodes -= record.nodes();
        let limits = std::mem::take(&mut record.limits);
        Some((std::mem::replace(&mut record.copy, Err(reason)), record.chain.take(), limits))
    }
}

impl Record {
    /// The chain that serves while another one cannot be had.
    fn last_chain(&self, reason: Reason) -> Result<Chain, Reason> {
        self.chain.as_ref().map(|made| Chain(made.parts.clone())).ok_or(reason)
    }

    fn nodes(&self) -> usize {
        self.copy.as_ref().map_or(0, |k| k.nodes)
    }
}

/// Whether anything is kept at all; if not, launches need not ask further.
#[inline]
pub fn has_copies() -> bool {
    COUNT.load(SeqCst) != 0
}

static TABLE: Locked<Table> = Locked::new(Table::NEW);
/// Records in the table: clients without any never take its lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// The program has graphs retain objects.
static HAS_OBJECTS: AtomicBool = AtomicBool::new(false);

/// The program gives graphs objects that live as long as a copy of them does: none is kept from now on.
pub fn keep_no_more() {
    HAS_OBJECTS.store(true, SeqCst);
}

/// The program has graphs that kernels may launch. One that a kernel launches as a tail runs once the whole graph of
/// that kernel is over, and not once its part is: no graph is divided from now on.
static HAS_DEVICE_LAUNCHES: AtomicBool = AtomicBool::new(false);

/// With what `exec` was instantiated; nothing where the driver does not say.
fn flags(exec: Ptr) -> Result<u64, Reason> {
    let mut flags = 0;
    if let Some(f) = driver().exec_flags {
        // SAFETY: a live exec; a valid out-pointer.
        build::check("cuGraphExecGetFlags", unsafe { f(exec, &mut flags) })?;
    }
    Ok(flags)
}

/// A program, of whatever class, has just instantiated a graph as `exec`.
pub fn note_flags(exec: Ptr) {
    if flags(exec).is_ok_and(|flags| flags & INSTANTIATE_DEVICE_LAUNCH != 0) {
        HAS_DEVICE_LAUNCHES.store(true, SeqCst);
    }
}

/// A program, which is a best-effort client, has just instantiated `graph` as `exec`: keep a copy.
pub fn instantiated(exec: Ptr, graph: Ptr) {
    let copy = match HAS_OBJECTS.load(SeqCst) {
        false => GraphCopy::new(exec, graph).map(Arc::new),
        true => Err(Reason::UserObjects),
    };
    if let Some(reason) = copy.as_ref().map_or_else(|reason| Some(*reason), |copy| copy.undivided) {
        log!("graph {exec:?}: not launched in parts: {reason}");
    }
    // Dropped here, without the lock.
    let _old = TABLE.with(|table| table.insert(exec as usize, copy));
}

/// A program changes `exec` (before the driver does): it is launched whole from now on.
pub fn changed(exec: Ptr) {
    if !has_copies() {
        return;
    }
    let _old = TABLE.with(|table| table.spoil(exec as usize, Reason::Changed));
}

/// A program destroys `exec` (before the driver does, which may then use the handle again).
pub fn destroyed(exec: Ptr) {
    if !has_copies() {
        return;
    }
    let _old = TABLE.with(|table| table.remove(exec as usize));
}

/// A context is gone, and with it what was made in it, which is `homes`: the driver hears nothing of that any more.
/// (What the driver keeps of copied graphs outside of the context is lost.)
pub fn forget(homes: &[Arc<Home>]) {
    homes.iter().for_each(|home| home.leave());
    home::drop_gone();
    if !has_copies() {
        return;
    }
    let _old = TABLE.with(|table| {
        let is_gone = |r: &Record| {
            r.copy.as_ref().is_ok_and(|k| k.home.is_gone())
                || r.event.as_ref().is_some_and(|e| e.home().is_gone())
        };
        let gone: Vec<usize> =
            table.records.iter().filter(|(_, r)| is_gone(r)).map(|(exec, _)| *exec).collect();
        let old: Vec<Record> = gone.into_iter().filter_map(|exec| table.remove(exec)).collect();
        for record in &old {
            if let Ok(copy) = &record.copy {
                copy.home.leave();
            }
            if let Some(event) = &record.event {
                event.home().leave();
            }
        }
        old
    });
}

/// What is known about an exec. Takes a lock: for launches that are asked for only.
pub fn state(exec: Ptr) -> GraphState {
    let may_divide = !HAS_DEVICE_LAUNCHES.load(SeqCst);
    TABLE.with(|table| match table.records.get(&(exec as usize)) {
        None => GraphState::Unknown,
        Some(Record { copy: Ok(copy), .. }) => match copy.undivided {
            Some(reason) => GraphState::Whole(reason),
            None if may_divide => GraphState::Transformable { kernel_nodes: copy.kernel_nodes },
            None => GraphState::Whole(Reason::DeviceLaunch),
        },
        Some(Record { copy: Err(reason), .. }) => GraphState::Whole(*reason),
    })
}

/// When a chain is made. An instantiation may wait for all that runs in the context, and keep launches waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Making {
    /// By a launch, which vouches for all that is in the graph, if nothing runs at this moment.
    IfIdle,
    /// At once: by a thread that has seen to that.
    AtOnce,
}

impl Making {
    /// Runs what may wait for what runs, or does not: [`Reason::Busy`].
    fn run<T>(self, home: &Home, work: impl FnOnce() -> Result<T, Reason>) -> Result<T, Reason> {
        let at_ease = || match self {
            Making::IfIdle => host::alone_and_idle(home.context(), work),
            Making::AtOnce => Some(work()),
        };
        home.within(at_ease).ok_or(Reason::NoContext)?.ok_or(Reason::Busy)?
    }
}

/// Whether an exec is kept and `context` is the one that it was instantiated in. In another one its parts could not be
/// kept in order: events are of one context.
pub fn is_at_home(exec: Ptr, context: usize) -> bool {
    let is_home =
        |record: &Record| record.copy.as_ref().is_ok_and(|copy| copy.home.context() == context);
    TABLE.with(|table| table.records.get(&(exec as usize)).is_some_and(is_home))
}

/// The steps of an exec: sub-graphs of at most about `kernels_per_part` kernels each (see
/// [`partition`]), and kernels by themselves ([`solo`]). Made once nothing runs, and kept until another size is asked
/// for or other kernels can be divided; until that is made, the last chain serves. A chain in use stays valid.
///
/// # Errors
/// Why it is to be launched whole, this time at least.
pub fn chain(exec: Ptr, kernels_per_part: u32, making: Making) -> Result<Chain, Reason> {
    if HAS_DEVICE_LAUNCHES.load(SeqCst) {
        return Err(Reason::DeviceLaunch);
    }
    let (key, changes) = (exec as usize, kernels::changes());
    let known = TABLE.with(|table| {
        let record = table.records.get(&key).ok_or(Reason::NoCopy)?;
        let copy = record.copy.as_ref().map_err(|reason| *reason)?;
        if let Some((size, then, reason)) = record.refused
            && (size, then) == (kernels_per_part, changes)
        {
            return match reason.is_of_this_size() {
                true => Err(reason),
                false => record.last_chain(reason).map(Err),
            };
        }
        let is_it = |made: &&Made| made.size == kernels_per_part && made.changes == changes;
        Ok(match record.chain.as_ref().filter(is_it) {
            Some(made) => Err(Chain(made.parts.clone())),
            None => Ok(copy.clone()),
        })
    });
    let copy = match known? {
        Ok(copy) => copy,
        Err(chain) => return Ok(chain),
    };
    if let Some(reason) = copy.undivided {
        return Err(reason);
    }
    // Without the lock: these look at every kernel and every node.
    let ready = kernels::ready(copy.home.context());
    let solo = copy.solo(&ready);
    let waits = copy.waits();
    let found = TABLE.with(|table| {
        let record = table.records.get_mut(&key).ok_or(Reason::NoCopy)?;
        let mine = record.copy.as_ref().map_err(|reason| *reason)?;
        if !Arc::ptr_eq(mine, &copy) {
            return Err(Reason::NoCopy);
        }
        if waits {
            return Ok(Err(None));
        }
        if let Some(made) = &mut record.chain
            && made.size == kernels_per_part
            && made.solo == solo
        {
            made.changes = changes;
            return Ok(Err(Some(Chain(made.parts.clone()))));
        }
        if solo.is_empty()
            && let Err(reason) = copy.could_be_divided(kernels_per_part)
        {
            if reason == Reason::TooManyExecs {
                // Other graphs' parts may go at any time.
                return record.last_chain(reason).map(|chain| Err(Some(chain)));
            }
            record.refused = Some((kernels_per_part, changes, reason));
            return Err(reason);
        }
        if std::mem::replace(&mut record.being_made, true) {
            return record.last_chain(Reason::BeingMade).map(|chain| Err(Some(chain)));
        }
        Ok(Ok(record.event.clone()))
    });
    let event = match found? {
        Ok(event) => event,
        Err(Some(chain)) => return Ok(chain),
        Err(None) => {
            let _old = TABLE.with(|table| table.spoil(key, Reason::Waits));
            return Err(Reason::Waits);
        }
    };
    let make = || {
        // Dividing takes a while, and would be for nothing.
        making.run(&copy.home, || Ok(()))?;
        let event = event.map_or_else(|| Event::new(&copy.home).map(Arc::new), Ok)?;
        let pieces = copy.divide(kernels_per_part, &ready, &solo)?;
        let parts = making.run(&copy.home, || pieces.instantiate())?;
        Ok((Made { size: kernels_per_part, solo, changes, parts: Arc::new(parts) }, event))
    };
    let made = make();
    let (chain, _old) =
        TABLE.with(|table| keep(table, key, &copy, (kernels_per_part, changes), made));
    chain
}

/// Put what was made into the table, if it still belongs there. Returns what is to be dropped
/// without the lock as well.
fn keep(
    table: &mut Table,
    exec: usize,
    copy: &Arc<GraphCopy>,
    (size, changes): (u32, u32),
    made: Result<(Made, Arc<Event>), Reason>,
) -> (Result<Chain, Reason>, Option<impl Sized + use<>>) {
    let mine = |r: &&mut Record| r.copy.as_ref().is_ok_and(|k| Arc::ptr_eq(k, copy));
    let Some(record) = table.records.get_mut(&exec).filter(mine) else {
        // Changed or destroyed meanwhile.
        return (Err(Reason::NoCopy), Some((made.ok(), None, None)));
    };
    record.being_made = false;
    match made {
        // Later again.
        Err(reason) if reason.will_pass() => (record.last_chain(reason), None),
        Err(reason @ Reason::Driver(_, OUT_OF_MEMORY)) => {
            record.refused = Some((size, changes, reason));
            (record.last_chain(reason), None)
        }
        Ok((made, event)) => {
            record.event = Some(event);
            let parts = made.parts.clone();
            let old = record.chain.replace(made);
            (Ok(Chain(parts)), Some((None, old, None)))
        }
        Err(reason) if reason.is_of_this_size() => {
            if let Some(made) = record.chain.as_mut().filter(|made| made.size == size) {
                // As good as before: kernels that cannot be divided any more go by themselves as they are.
                made.changes = changes;
                return (Ok(Chain(made.parts.clone())), None);
            }
            record.refused = Some((size, changes, reason));
            (Err(reason), None)
        }
        Err(reason) => {
            let old = table.spoil(exec, reason);
            (Err(reason), Some((None, None, old)))
        }
    }
}

/// Only in a forked child, which has no driver objects any more.
pub fn reset() {
    TABLE.reset(Table::NEW);
    COUNT.store(0, SeqCst);
    HAS_OBJECTS.store(false, SeqCst);
    HAS_DEVICE_LAUNCHES.store(false, SeqCst);
    home::reset();
    limit::reset();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphs_of_programs_that_wait_for_what_they_retain_are_not_copied() {
        let exec = 0x1000 as Ptr;
        keep_no_more();
        instantiated(exec, std::ptr::null_mut());
        assert_eq!(state(exec), GraphState::Whole(Reason::UserObjects));
        destroyed(exec);
        assert_eq!(state(exec), GraphState::Unknown);
        reset();
    }
}
