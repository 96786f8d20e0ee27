//! What it costs a client's streams that a launch goes to some of the SMs, as its shim says.

use super::super::Engine;
use super::DispatchClient;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use tally_ipc::layout::{LIMIT_COST_SLOTS, LimitCosts};

/// A longer time counts as this one, ns.
const LONGEST_NS: u64 = 1_000_000_000;

/// Median of the latest, ns; 0: none was measured.
pub fn median_ns(costs: &LimitCosts) -> u64 {
    let count = costs.count.load(Acquire).min(LIMIT_COST_SLOTS as u64) as usize;
    let mut latest_ns = [0; LIMIT_COST_SLOTS];
    for (ns, word) in latest_ns.iter_mut().zip(&costs.latest_ns[..count]) {
        *ns = word.load(Relaxed).min(LONGEST_NS);
    }
    let latest_ns = &mut latest_ns[..count];
    latest_ns.sort_unstable();
    latest_ns.get(count / 2).copied().unwrap_or(0)
}

impl DispatchClient {
    pub(super) fn poll_limit_costs(&mut self, engine: &mut Engine) {
        let costs = &self.link.region.limit_costs;
        self.limit_costs_seen = costs.count.load(Acquire);
        engine.limit_cost_measured(self.link.info.id, median_ns(costs));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    fn costs(count: u64, latest_ns: [u64; LIMIT_COST_SLOTS]) -> LimitCosts {
        LimitCosts { count: AtomicU64::new(count), latest_ns: latest_ns.map(AtomicU64::new) }
    }

    #[test]
    fn the_median_is_of_what_was_measured() {
        let mut latest_ns = [0; LIMIT_COST_SLOTS];
        assert_eq!(median_ns(&costs(0, latest_ns)), 0);
        latest_ns[..3].copy_from_slice(&[9_000, 5_000, 7_000]);
        assert_eq!(median_ns(&costs(1, latest_ns)), 9_000);
        assert_eq!(median_ns(&costs(3, latest_ns)), 7_000);
        assert_eq!(median_ns(&costs(u64::MAX, [u64::MAX; LIMIT_COST_SLOTS])), LONGEST_NS);
    }
}
