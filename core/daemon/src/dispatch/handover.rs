//! What policies cost the dispatch thread when they come, go and fail. Measured there,
//! for it is there that launches wait: by the wall clock, so that a thread which is not
//! scheduled counts as well.

use super::latency::Latency;
use tally_admin::SwapPauseUs;

/// The pauses of the reloads so far: in each, the longer of its two steps (the old
/// policy writes down what it knows; the new one takes over, is told of every client and
/// has decided what waited), between which decisions go on.
pub struct SwapPause {
    pauses: Latency,
    snapshots: Latency,
    swaps: Latency,
    snapshot_ns: u64,
    last_ns: u64,
}

impl SwapPause {
    pub fn new() -> Self {
        SwapPause {
            pauses: Latency::new(),
            snapshots: Latency::new(),
            swaps: Latency::new(),
            snapshot_ns: 0,
            last_ns: 0,
        }
    }

    /// The first step took so long.
    pub fn snapshot(&mut self, ns: u64) {
        self.snapshot_ns = ns;
        self.snapshots.record(ns);
    }

    /// The second step took so long, and a policy has changed.
    pub fn swap(&mut self, ns: u64) {
        self.last_ns = ns.max(std::mem::take(&mut self.snapshot_ns));
        self.swaps.record(ns);
        self.pauses.record(self.last_ns);
    }

    pub fn us(&self) -> SwapPauseUs {
        let q = self.pauses.quantiles();
        SwapPauseUs {
            count: q.count,
            last: self.last_ns as f64 / 1_000.0,
            p50: q.p50_us,
            p99: q.p99_us,
            max: q.max_us,
            save_p99: self.snapshots.quantiles().p99_us,
            take_over_p99: self.swaps.quantiles().p99_us,
        }
    }
}

impl Default for SwapPause {
    fn default() -> Self {
        Self::new()
    }
}

/// Calls that failed, and those after them, which start a new instance: from when the
/// core looked at the launch (or what else it was) until the call was over. An upper
/// bound on what the fault itself took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCost {
    pub calls: u64,
    /// Time of the longest of them, ns.
    pub ns_max: u64,
}

impl FaultCost {
    pub fn add(&mut self, ns: u64) {
        self.calls += 1;
        self.ns_max = self.ns_max.max(ns);
    }

    pub fn and(self, other: Self) -> Self {
        FaultCost { calls: self.calls + other.calls, ns_max: self.ns_max.max(other.ns_max) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reload_pauses_for_the_longer_of_its_steps() {
        let mut pause = SwapPause::new();
        pause.snapshot(40_000);
        pause.swap(10_000);
        assert_eq!((pause.us().last, pause.us().count), (40.0, 1));
        pause.swap(20_000);
        assert_eq!((pause.us().last, pause.us().count), (20.0, 2), "a snapshot counts once");
        assert!((39.0..42.0).contains(&pause.us().max));
    }

    #[test]
    fn costs_add_up() {
        let mut cost = FaultCost::default();
        cost.add(5);
        cost.add(3);
        let both = cost.and(FaultCost { calls: 1, ns_max: 9 });
        assert_eq!(both, FaultCost { calls: 3, ns_max: 9 });
    }
}
