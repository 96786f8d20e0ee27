//! The contexts that driver objects of ours live in, and execs that wait to be destroyed.

use super::reason::Reason;
use crate::cuda::{Ptr, driver};
use crate::lock::Locked;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Weak};
use tally_contract::limits::GRAPH_EXECS_MAX as EXECS_MAX;

/// Execs that exist now as parts of chains, of all graphs.
static EXECS: AtomicUsize = AtomicUsize::new(0);

/// Only in a forked child.
pub fn reset() {
    EXECS.store(0, SeqCst);
    RETIRED.reset(Vec::new());
    HOMES.reset(Vec::new());
}

/// All homes that still have driver objects in them.
static HOMES: Locked<Vec<Weak<Home>>> = Locked::new(Vec::new());

/// What the shim has made in a context so far. Not of a later context with the same handle.
pub fn homes_of(context: usize) -> Vec<Arc<Home>> {
    let homes = HOMES.with(|all| all.iter().filter_map(Weak::upgrade).collect::<Vec<_>>());
    homes.into_iter().filter(|home| home.context == context).collect()
}

/// The context that driver objects live in, for as long as it does.
#[derive(Debug)]
pub struct Home {
    context: usize,
    gone: AtomicBool,
}

impl Home {
    /// A home in the context of the calling thread.
    pub(crate) fn current() -> Result<Arc<Self>, Reason> {
        match driver().current_context() {
            0 => Err(Reason::NoContext),
            context => Ok(Self::new(context)),
        }
    }

    /// A new home in this context, which [`homes_of`] will find.
    pub fn new(context: usize) -> Arc<Self> {
        let home = Arc::new(Home { context, gone: AtomicBool::new(false) });
        HOMES.with(|all| {
            // Those that nothing is in any more go when there are twice as many.
            if all.len() == all.capacity() {
                all.retain(|home| home.strong_count() > 0);
            }
            all.push(Arc::downgrade(&home));
        });
        home
    }

    pub fn context(&self) -> usize {
        self.context
    }

    /// Whether it was destroyed.
    pub fn is_gone(&self) -> bool {
        self.gone.load(SeqCst)
    }

    /// It was destroyed: its objects are left alone from now on.
    pub fn leave(&self) {
        self.gone.store(true, SeqCst);
    }

    /// Run driver calls in it, without disturbing any capture of the process.
    pub(crate) fn within<T>(&self, calls: impl FnOnce() -> T) -> Option<T> {
        if self.gone.load(SeqCst) { None } else { driver().within(self.context, calls) }
    }
}

/// What is not launched any more, and is to be destroyed.
static RETIRED: Locked<Vec<(Arc<Home>, Vec<usize>)>> = Locked::new(Vec::new());

/// Counts an exec that was made.
pub(crate) fn made() {
    EXECS.fetch_add(1, Relaxed);
}

/// Whether there would be too many with so many more.
pub(crate) fn is_full(more: usize) -> bool {
    EXECS.load(Relaxed) + more > EXECS_MAX
}

/// Execs are not launched any more. False: they are to be destroyed by [`sweep`].
pub(crate) fn retire(home: &Arc<Home>, execs: Vec<usize>) -> bool {
    if execs.is_empty() {
        return true;
    }
    if home.is_gone() {
        destroy(home, &execs);
        return true;
    }
    RETIRED.with(|all| all.push((home.clone(), execs)));
    false
}

fn destroy(home: &Home, execs: &[usize]) {
    EXECS.fetch_sub(execs.len(), Relaxed);
    home.within(|| {
        let Some(f) = driver().exec_destroy else { return };
        for exec in execs {
            // SAFETY: ours, and not used again.
            unsafe { f(*exec as Ptr) };
        }
    });
}

/// Whether there is anything for [`sweep`], and the context lives.
pub fn is_any_retired(context: usize) -> bool {
    let is_here = |home: &Home| home.context == context && !home.gone.load(SeqCst);
    RETIRED.with(|all| all.iter().any(|(home, _)| is_here(home)))
}

/// Forget what was not launched any more in contexts that are gone.
pub fn drop_gone() {
    let gone =
        RETIRED.with(|all| all.extract_if(.., |(home, _)| home.is_gone()).collect::<Vec<_>>());
    for (home, execs) in gone {
        destroy(&home, &execs);
    }
}

/// Destroy what is not launched any more. By a thread that may wait for all that runs in the context.
pub fn sweep(context: usize) {
    sweep_where(|home| home.context == context || home.gone.load(SeqCst));
}

/// The same in all contexts.
pub fn sweep_all() {
    sweep_where(|_| true);
}

fn sweep_where(is_chosen: impl Fn(&Home) -> bool) {
    let chosen =
        RETIRED.with(|all| all.extract_if(.., |(home, _)| is_chosen(home)).collect::<Vec<_>>());
    for (home, execs) in chosen {
        destroy(&home, &execs);
    }
}
