//! What it costs a client's streams that a launch goes to some of the SMs, as its shim says.

use super::super::Engine;
use super::DispatchClient;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use tally_ipc::layout::{LIMIT_COST_SLOTS, LimitCosts};

/// A longer time counts as this one, ns.
const LONGEST_NS: u64 = 1_000_000_000;
/// The median is of so many: a policy is to know what launches cost now.
const MEDIAN_OF: usize = 15;

/// The latest times that were measured, in order of length; at most so many.
fn latest_ns(costs: &LimitCosts, most: usize) -> Vec<u64> {
    let slots = LIMIT_COST_SLOTS as u64;
    let count = costs.count.load(Acquire);
    let slot = |back: u64| (count.wrapping_sub(1 + back) % slots) as usize;
    let kept = count.min(slots).min(most as u64);
    let latest = (0..kept).map(|back| costs.latest_ns[slot(back)].load(Relaxed).min(LONGEST_NS));
    let mut latest: Vec<u64> = latest.collect();
    latest.sort_unstable();
    latest
}

/// Median of the latest, ns; 0: none was measured.
pub fn median_ns(costs: &LimitCosts) -> u64 {
    let latest = latest_ns(costs, MEDIAN_OF);
    latest.get(latest.len() / 2).copied().unwrap_or(0)
}

/// 99th percentile of the latest, ns; 0: none was measured.
pub fn p99_ns(costs: &LimitCosts) -> u64 {
    let latest = latest_ns(costs, LIMIT_COST_SLOTS);
    let rank = (latest.len() * 99).div_ceil(100);
    rank.checked_sub(1).map_or(0, |at| latest[at])
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

    #[test]
    fn the_median_is_of_the_latest_and_the_99th_percentile_of_all_that_are_kept() {
        let at: [u64; LIMIT_COST_SLOTS] = std::array::from_fn(|slot| 1_000 + slot as u64);
        let slots = LIMIT_COST_SLOTS as u64;
        assert_eq!(p99_ns(&costs(0, at)), 0);
        assert_eq!(p99_ns(&costs(1, at)), 1_000);
        assert_eq!(p99_ns(&costs(100, at)), 1_098, "one of a hundred is longer");
        assert_eq!(median_ns(&costs(100, at)), 1_092);
        assert_eq!(p99_ns(&costs(slots, at)), 1_252);
        // The ring has wrapped: the latest is in the first slot.
        assert_eq!(median_ns(&costs(slots + 1, at)), 1_000 + slots - 8);
        assert_eq!(p99_ns(&costs(slots + 1, at)), 1_252);
    }
}
