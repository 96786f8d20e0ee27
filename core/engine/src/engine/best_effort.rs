//! What best-effort clients got and met, all of them together, since the start.

use super::Engine;
use crate::policy::Policy;

/// Best-effort work that ended, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkDone {
    pub launches: u64,
    /// The GPU time that they take undisturbed, as predicted when they were granted (as
    /// measured, where nothing was known): a launch counts the same however it was run
    /// and whoever was beside it.
    pub ns: u64,
}

#[derive(Debug, Default)]
pub(super) struct Totals {
    pub work_done: WorkDone,
    pub waits: Waits,
    /// Times that a client was asked to yield.
    pub yields: u64,
}

impl<P: Policy> Engine<P> {
    /// Best-effort work that ended, since the start.
    pub fn work_done(&self) -> WorkDone {
        self.best_effort.work_done
    }

    /// Time that best-effort launches have waited for an answer since the start, summed over launches, ns; of
    /// those that still wait, until now.
    pub fn waited_ns(&self, now_ns: u64) -> u64 {
        self.best_effort.waits.total_ns(now_ns)
    }

    /// How often best-effort clients were asked to yield, since the start.
    pub fn yields(&self) -> u64 {
        self.best_effort.yields
    }
}

/// Launches that wait, and the time that they have waited: adding and ending one takes no look at the others.
#[derive(Debug, Default)]
pub(super) struct Waits {
    waiting: u64,
    /// As of `noted_ns`.
    total_ns: u64,
    noted_ns: u64,
}

impl Waits {
    /// One more waits from now on.
    pub fn begin(&mut self, now_ns: u64) {
        self.note(now_ns);
        self.waiting += 1;
    }

    /// So many wait no longer.
    pub fn end(&mut self, now_ns: u64, launches: u64) {
        self.note(now_ns);
        self.waiting = self.waiting.saturating_sub(launches);
    }

    /// What all have waited until now, ns.
    pub fn total_ns(&self, now_ns: u64) -> u64 {
        let since_ns = now_ns.saturating_sub(self.noted_ns);
        self.total_ns.saturating_add(self.waiting.saturating_mul(since_ns))
    }

    fn note(&mut self, now_ns: u64) {
        (self.total_ns, self.noted_ns) = (self.total_ns(now_ns), now_ns.max(self.noted_ns));
    }
}
