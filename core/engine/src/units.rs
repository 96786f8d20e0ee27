//! A high-priority client's latest units of work, or tokens.

use crate::policy::{ServiceView, TokensView};
use tally_contract::limits::RECENT_UNITS;

/// Times of the latest [`RECENT_UNITS`] units, so that their quantiles cost a look-up.
#[derive(Debug, Default)]
pub(crate) struct RecentUnits {
    /// In the order in which they ended; a ring once it is full.
    took_ns: Vec<u64>,
    next: usize,
    /// The same, shortest first.
    sorted_ns: Vec<u64>,
}

impl RecentUnits {
    pub fn new() -> Self {
        let times = || Vec::with_capacity(RECENT_UNITS);
        RecentUnits { took_ns: times(), next: 0, sorted_ns: times() }
    }

    pub fn clear(&mut self) {
        self.took_ns.clear();
        self.sorted_ns.clear();
        self.next = 0;
    }

    /// Note so many units that took so long each.
    pub fn add(&mut self, units: u32, took_ns: u64) {
        for _ in 0..(units as usize).min(RECENT_UNITS) {
            if self.took_ns.len() < RECENT_UNITS {
                self.took_ns.push(took_ns);
            } else {
                let old_ns = std::mem::replace(&mut self.took_ns[self.next], took_ns);
                self.next = (self.next + 1) % RECENT_UNITS;
                let at = self.sorted_ns.partition_point(|ns| *ns < old_ns);
                self.sorted_ns.remove(at);
            }
            let at = self.sorted_ns.partition_point(|ns| *ns < took_ns);
            self.sorted_ns.insert(at, took_ns);
        }
    }

    /// The nearest-rank quantile, ns; 0 if there are none.
    fn quantile_ns(&self, share: f64) -> u64 {
        let rank = (share * self.sorted_ns.len() as f64).ceil() as usize;
        self.sorted_ns.get(rank.max(1) - 1).copied().unwrap_or(0)
    }

    fn within(&self, limit_ns: u64) -> u32 {
        self.sorted_ns.partition_point(|ns| *ns <= limit_ns) as u32
    }

    /// Write the figures of the latest units into a view.
    pub fn show(&self, view: &mut ServiceView) {
        view.recent = self.sorted_ns.len() as u32;
        view.recent_within = view.objective.map_or(0, |objective| self.within(objective.slo_ns));
        view.p50_ns = self.quantile_ns(0.5);
        view.p99_ns = self.quantile_ns(0.99);
    }

    /// The same, of tokens.
    pub fn show_tokens(&self, view: &mut TokensView) {
        view.recent = self.sorted_ns.len() as u32;
        view.recent_within = self.within(view.tpot_ns);
        view.p50_ns = self.quantile_ns(0.5);
        view.p99_ns = self.quantile_ns(0.99);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Objective;

    #[test]
    fn quantiles_are_those_of_the_latest() {
        let mut recent = RecentUnits::new();
        let objective = Objective { slo_ns: 1_100, percentile: 99.0 };
        let mut view = ServiceView::new(Some(objective));
        recent.show(&mut view);
        assert_eq!((view.recent, view.p50_ns, view.p99_ns), (0, 0, 0));
        // Of 1 to 1200 the last 256 are left; 101 of them take more than 1 100 us.
        (1..=1_200).rev().chain(1..=1_200).for_each(|ns| recent.add(1, ns));
        recent.show(&mut view);
        assert_eq!((view.recent, view.recent_within), (256, 156));
        assert_eq!((view.p50_ns, view.p99_ns), (1_200 - 128, 1_200 - 2));
        recent.add(u32::MAX, 7);
        recent.show(&mut view);
        assert_eq!((view.recent, view.p50_ns, view.p99_ns), (256, 7, 7));
        recent.clear();
        recent.add(3, 5);
        recent.show(&mut view);
        assert_eq!((view.recent, view.recent_within, view.p99_ns), (3, 3, 5));
    }
}
