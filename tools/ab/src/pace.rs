//! How long blocks are, and how much of the time B gets.
//!
//! Blocks get shorter where that many requests suffice: the two blocks of a pair then lie closer
//! together, so that load which comes and goes differs less between them. The length of a pair's
//! blocks depends on earlier pairs alone, so the test stays exact.

use crate::design::BLOCKS_MAX;
use crate::design::Plan;
use crate::metric::Metric;
use crate::sample::{Sample, Unit};
use std::collections::VecDeque;

/// Requests, or best-effort launches, that a block should have.
const REQUESTS_WANTED: f64 = 12.0;
/// A block lasts at least so many times as long as the median request.
const MEDIANS_MIN: f64 = 10.0;
/// A block lasts at least so many times as long as a guard allows requests to take.
const LIMITS_MIN: u64 = 2;
/// Pairs before the first change.
const PAIRS_FIRST: usize = 5;
/// Pairs that are looked at.
const PAIRS_LOOKED: usize = 20;
/// Pairs after which B's share of the time doubles.
const PAIRS_STEP: u32 = 20;

#[derive(Clone, Copy, Debug)]
struct Pair {
    /// Twice what the arm with fewer of them had.
    count: f64,
    measured_s: f64,
    /// The longer median of both arms, s.
    median_s: f64,
}

#[derive(Clone, Debug)]
pub struct Pace {
    /// Bounds of a block's length.
    least_ns: u64,
    most_ns: u64,
    /// The part of a block that is washout.
    washout: f64,
    block_ns: u64,
    recent: VecDeque<Pair>,
    /// B's share of the time at first.
    exposure: f64,
    pairs: u32,
}

impl Pace {
    pub fn new(plan: &Plan) -> Self {
        let limits = plan.guards.iter().filter_map(|guard| guard.quantile());
        let limit_ns = limits.map(|(.., ns)| ns.saturating_mul(LIMITS_MIN)).max().unwrap_or(0);
        let most_ns = plan.block_ns;
        let least_ns = plan.block_ns_min.max(limit_ns).max(plan.time_ns_max / BLOCKS_MAX);
        Pace {
            least_ns: least_ns.min(most_ns),
            most_ns,
            washout: plan.washout_ns as f64 / plan.block_ns.max(1) as f64,
            block_ns: most_ns,
            recent: VecDeque::new(),
            exposure: plan.exposure,
            pairs: 0,
        }
    }

    /// Length of the next pair's blocks, their washout included.
    pub fn block_ns(&self) -> u64 {
        self.block_ns
    }

    pub fn washout_ns(&self) -> u64 {
        (self.block_ns as f64 * self.washout) as u64
    }

    /// The part of a block that counts.
    pub fn measured_ns(&self) -> u64 {
        self.block_ns - self.washout_ns()
    }

    /// How long A serves between this pair and the next, so that B has its share of the time.
    pub fn rest_ns(&self) -> u64 {
        let doublings = (self.pairs / PAIRS_STEP).min(30);
        let share = (self.exposure * f64::from(1_u32 << doublings)).min(0.5);
        (self.block_ns as f64 * (1.0 / share - 2.0)) as u64
    }

    /// A pair has ended. A block must have units of the metric's kind, or launches.
    pub fn ended(&mut self, a: &Sample, b: &Sample, metric: Metric) {
        self.pairs += 1;
        let count = |sample: &Sample| match metric.unit() {
            Some(unit) => sample.of(unit).count(),
            None => sample.launches,
        };
        let unit = metric.unit().unwrap_or(Unit::Request);
        let median = |sample: &Sample| sample.of(unit).quantile_ns(0.5);
        let median_ns = median(a).max(median(b)).unwrap_or(0);
        if self.recent.len() == PAIRS_LOOKED {
            self.recent.pop_front();
        }
        self.recent.push_back(Pair {
            count: 2.0 * count(a).min(count(b)) as f64,
            measured_s: (a.span_ns() + b.span_ns()) as f64 / 1e9,
            median_s: median_ns as f64 / 1e9,
        });
        if self.recent.len() < PAIRS_FIRST {
            return;
        }
        let sum = |part: fn(&Pair) -> f64| self.recent.iter().map(part).sum::<f64>();
        let per_s = sum(|pair| pair.count) / sum(|pair| pair.measured_s).max(1e-9);
        let median_s = sum(|pair| pair.median_s) / self.recent.len() as f64;
        let wanted_s = (REQUESTS_WANTED / per_s / (1.0 - self.washout)).max(MEDIANS_MIN * median_s);
        // Infinite without requests.
        let wanted_ns = (wanted_s * 1e9).min(self.most_ns as f64) as u64;
        self.block_ns = wanted_ns.clamp(self.least_ns, self.most_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(seconds: f64, requests: u64, ns: u64) -> Sample {
        let mut sample = Sample::new();
        sample.to_ns = (seconds * 1e9) as u64;
        (0..requests).for_each(|_| sample.request(ns));
        sample
    }

    fn after(plan: &Plan, pairs: usize, a: u64, b: u64, ns: u64) -> Pace {
        let mut pace = Pace::new(plan);
        for _ in 0..pairs {
            let seconds = pace.measured_ns() as f64 / 1e9;
            let of = |a_second: u64| sample(seconds, (a_second as f64 * seconds) as u64, ns);
            pace.ended(&of(a), &of(b), plan.metric);
        }
        pace
    }

    #[test]
    fn blocks_are_as_short_as_requests_allow() {
        let plan = Plan::of(Metric::HpP99);
        let block_ms = |pace: Pace| pace.block_ns() / 1_000_000;
        assert_eq!(block_ms(after(&plan, PAIRS_FIRST - 1, 500, 500, 1_000_000)), 1_000);
        assert_eq!(block_ms(after(&plan, 30, 500, 500, 1_000_000)), 250);
        let few = block_ms(after(&plan, 30, 20, 20, 1_000_000));
        assert!((600..800).contains(&few), "{few}");
        assert_eq!(block_ms(after(&plan, 30, 500, 0, 1_000_000)), 1_000, "B serves none");
        assert_eq!(block_ms(after(&plan, 30, 500, 500, 50_000_000)), 500, "long requests");
        let guards = vec!["hp_p99<300ms".parse().unwrap()];
        let guarded = Plan { guards, ..plan.clone() };
        assert_eq!(block_ms(after(&guarded, 30, 500, 500, 1_000_000)), 600);
        let fixed = Plan { block_ns_min: plan.block_ns, ..plan };
        assert_eq!(block_ms(after(&fixed, 30, 500, 500, 1_000_000)), 1_000);
    }

    #[test]
    fn a_washout_is_the_same_part_of_each_block() {
        let pace = after(&Plan::of(Metric::HpP99), 30, 500, 500, 1_000_000);
        assert_eq!((pace.washout_ns(), pace.measured_ns()), (25_000_000, 225_000_000));
    }

    #[test]
    fn exposure_doubles_until_it_is_half() {
        let plan = Plan { exposure: 0.05, ..Plan::of(Metric::HpP99) };
        let share = |pairs| {
            let pace = after(&plan, pairs, 5, 5, 1_000);
            pace.block_ns() as f64 / (2 * pace.block_ns() + pace.rest_ns()) as f64
        };
        for (pairs, wanted) in [(0, 0.05), (19, 0.05), (20, 0.1), (40, 0.2), (60, 0.4), (80, 0.5)] {
            assert!((share(pairs) - wanted).abs() < 1e-6, "{pairs}: {}", share(pairs));
        }
        assert_eq!(after(&Plan::of(Metric::HpP99), 3, 5, 5, 1_000).rest_ns(), 0);
    }
}
