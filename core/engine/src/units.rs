//! A high-priority client's latest units of work, or tokens.

use crate::policy::{ServiceView, TokensView};
use tally_contract::limits::RECENT_UNITS;

/// Units that are put in their sorted places one by one; with more, sorting anew costs less.
const SORTED_SINGLY_MAX: usize = 8;

/// Times of the latest [`RECENT_UNITS`] units, so that their quantiles cost a look-up.
#[derive(Debug, Default)]
pub(crate) struct RecentUnits {
    /// In the order in which they ended; a ring once it is full.
    took_ns: Vec<u64>,
    next: usize,
    /// The same times as `took_ns`, shortest first.
    sorted_ns: Vec<u64>,
    /// Which of `took_ns` kept the objective, and how many did.
    kept: Vec<bool>,
    within: u32,
}

impl RecentUnits {
    pub fn new() -> Self {
        let times = || Vec::with_capacity(RECENT_UNITS);
        let kept = Vec::with_capacity(RECENT_UNITS);
        RecentUnits { took_ns: times(), next: 0, sorted_ns: times(), kept, within: 0 }
    }

    pub fn clear(&mut self) {
        self.took_ns.clear();
        self.sorted_ns.clear();
        self.kept.clear();
        (self.next, self.within) = (0, 0);
    }

    /// Note so many units that took so long each, and whether that kept the objective. Costs no more than one sort of
    /// [`RECENT_UNITS`], however many.
    pub fn add(&mut self, units: u32, took_ns: u64, is_kept: bool) {
        let units = (units as usize).min(RECENT_UNITS);
        let is_sorted_once = units > SORTED_SINGLY_MAX;
        for _ in 0..units {
            let old_ns = self.note(took_ns, is_kept);
            if !is_sorted_once {
                if let Some(old_ns) = old_ns {
                    let at = self.sorted_ns.partition_point(|ns| *ns < old_ns);
                    self.sorted_ns.remove(at);
                }
                let at = self.sorted_ns.partition_point(|ns| *ns < took_ns);
                self.sorted_ns.insert(at, took_ns);
            }
        }
        if is_sorted_once {
            self.sorted_ns.clone_from(&self.took_ns);
            self.sorted_ns.sort_unstable();
        }
    }

    /// The time whose place it took.
    fn note(&mut self, took_ns: u64, is_kept: bool) -> Option<u64> {
        self.within += u32::from(is_kept);
        if self.took_ns.len() < RECENT_UNITS {
            self.took_ns.push(took_ns);
            self.kept.push(is_kept);
            return None;
        }
        let was_kept = std::mem::replace(&mut self.kept[self.next], is_kept);
        self.within -= u32::from(was_kept);
        let old_ns = std::mem::replace(&mut self.took_ns[self.next], took_ns);
        self.next = (self.next + 1) % RECENT_UNITS;
        Some(old_ns)
    }

    /// The nearest-rank quantile, ns; 0 if there are none.
    fn quantile_ns(&self, share: f64) -> u64 {
        let rank = (share * self.sorted_ns.len() as f64).ceil() as usize;
        self.sorted_ns.get(rank.max(1) - 1).copied().unwrap_or(0)
    }

    /// Write the figures of the latest units into a view.
    pub fn show(&self, view: &mut ServiceView) {
        view.recent = self.sorted_ns.len() as u32;
        view.recent_within = self.within;
        view.p50_ns = self.quantile_ns(0.5);
        view.p99_ns = self.quantile_ns(0.99);
    }

    /// Write the figures of the latest tokens into a view.
    pub fn show_tokens(&self, view: &mut TokensView) {
        view.recent = self.sorted_ns.len() as u32;
        view.recent_within = self.within;
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
        (1..=1_200).rev().chain(1..=1_200).for_each(|ns| recent.add(1, ns, ns <= 1_100));
        recent.show(&mut view);
        assert_eq!((view.recent, view.recent_within), (256, 156));
        assert_eq!((view.p50_ns, view.p99_ns), (1_200 - 128, 1_200 - 2));
        recent.add(u32::MAX, 7, true);
        recent.show(&mut view);
        assert_eq!((view.recent, view.p50_ns, view.p99_ns), (256, 7, 7));
        recent.clear();
        recent.add(3, 5, true);
        recent.show(&mut view);
        assert_eq!((view.recent, view.recent_within, view.p99_ns), (3, 3, 5));
    }

    #[test]
    fn many_units_at_once_count_as_one_after_another() {
        let (mut at_once, mut singly) = (RecentUnits::new(), RecentUnits::new());
        let most = RECENT_UNITS as u32;
        for (n, units) in
            [3, 0, 9, 200, 8, 255, 7, most, 1, 65_535, 100, 50].into_iter().enumerate()
        {
            let took_ns = n as u64 * 37 % 11;
            let is_kept = n % 2 == 0;
            at_once.add(units, took_ns, is_kept);
            (0..units).for_each(|_| singly.add(1, took_ns, is_kept));
            assert_eq!(at_once.within, singly.within, "after {units}");
            assert_eq!(at_once.sorted_ns, singly.sorted_ns, "after {units}");
            let in_order = |recent: &RecentUnits| {
                let (newer, older) = recent.took_ns.split_at(recent.next);
                [older, newer].concat()
            };
            assert_eq!(in_order(&at_once), in_order(&singly), "after {units}");
        }
    }
}
