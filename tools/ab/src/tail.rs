//! Lengths of requests, in steps of half a percent: what is kept of each block, so that an
//! arm's overall percentiles are those of all its requests.

use crate::sample::Kept;

/// Steps for each doubling.
const STEPS: f64 = 128.0;
/// Length of a step on the scale of natural logarithms.
pub(crate) const STEP_LN: f64 = std::f64::consts::LN_2 / STEPS;

/// A histogram of times with logarithmic steps; empty steps take no room.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tail {
    /// Step and count, in rising order of the steps.
    bins: Vec<(u16, u32)>,
    /// By their clients' own objectives.
    pub kept: Kept,
}

fn step(ns: u64) -> u16 {
    // 2^64 is step 8192.
    ((ns.max(1) as f64).log2() * STEPS) as u16
}

pub(crate) fn ns_of(step: u16) -> f64 {
    ((f64::from(step) + 0.5) / STEPS).exp2()
}

impl Tail {
    /// Adds `count` requests that took `ns` each.
    pub fn add(&mut self, ns: u64, count: u64) {
        self.add_step(step(ns), u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// Adds a request, judged by its client's own objective, if it has one.
    pub fn add_one(&mut self, ns: u64, limit_ns: Option<u64>) {
        self.add(ns, 1);
        self.kept.judge(limit_ns, ns, 1);
    }

    fn add_step(&mut self, step: u16, count: u32) {
        match self.bins.binary_search_by_key(&step, |bin| bin.0) {
            Ok(at) => self.bins[at].1 = self.bins[at].1.saturating_add(count),
            Err(at) => self.bins.insert(at, (step, count)),
        }
    }

    /// Adds the requests of another histogram.
    pub fn extend(&mut self, other: &Tail) {
        other.bins.iter().for_each(|(step, count)| self.add_step(*step, *count));
        self.kept.extend(other.kept);
    }

    /// Steps and how many requests each has, rising.
    pub(crate) fn steps(&self) -> impl Iterator<Item = (u16, u32)> + '_ {
        self.bins.iter().copied()
    }

    pub fn requests(&self) -> u64 {
        self.bins.iter().map(|bin| u64::from(bin.1)).sum()
    }

    /// Requests in steps above that of this length.
    pub fn over(&self, ns: u64) -> u64 {
        let step = step(ns);
        self.bins.iter().filter(|bin| bin.0 > step).map(|bin| u64::from(bin.1)).sum()
    }
}

/// Many tails summed: fast to fill and to empty.
#[derive(Clone, Debug)]
pub struct Pool {
    counts: Vec<u64>,
    requests: u64,
    /// Steps beyond which nothing is counted.
    low: usize,
    high: usize,
}

impl Default for Pool {
    fn default() -> Self {
        let counts = vec![0; 64 * STEPS as usize + 1];
        Pool { low: counts.len() - 1, high: 0, counts, requests: 0 }
    }
}

impl Pool {
    pub fn of<'a>(tails: impl IntoIterator<Item = &'a Tail>) -> Self {
        let mut pool = Pool::default();
        tails.into_iter().for_each(|tail| pool.add(tail));
        pool
    }

    pub fn clear(&mut self) {
        if self.low <= self.high {
            self.counts[self.low..=self.high].fill(0);
        }
        (self.low, self.high, self.requests) = (self.counts.len() - 1, 0, 0);
    }

    pub fn add(&mut self, tail: &Tail) {
        if let (Some(first), Some(last)) = (tail.bins.first(), tail.bins.last()) {
            self.low = self.low.min(usize::from(first.0));
            self.high = self.high.max(usize::from(last.0));
        }
        for (step, count) in &tail.bins {
            self.counts[usize::from(*step)] += u64::from(*count);
            self.requests += u64::from(*count);
        }
    }

    pub fn requests(&self) -> u64 {
        self.requests
    }

    /// This share took at most so long, ns. `None` without requests.
    pub fn quantile_ns(&self, share: f64) -> Option<f64> {
        // From above: a tail's quantile is near the end.
        let rank = (share * self.requests as f64).ceil().max(1.0) as u64;
        let above = self.requests.saturating_sub(rank);
        let mut seen = 0;
        (self.low..=self.high).rev().find_map(|step| {
            seen += self.counts[step];
            (seen > above).then(|| ns_of(step as u16))
        })
    }

    /// Requests in steps above that of this length.
    pub fn over(&self, ns: u64) -> u64 {
        self.counts[usize::from(step(ns)) + 1..].iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Half a percent from the sorted sample's nearest rank.
        #[test]
        fn quantiles_are_those_of_the_sample(
            mut all in proptest::collection::vec(1_000..100_000_000_000u64, 1..300),
            share in 0.01..1.0f64, cut in 0..300usize,
        ) {
            let mut tails = [Tail::default(), Tail::default()];
            all.iter().enumerate().for_each(|(i, ns)| tails[usize::from(i < cut)].add(*ns, 1));
            let pool = Pool::of(&tails);
            all.sort_unstable();
            let rank = (share * all.len() as f64).ceil() as usize;
            let (ns, exact) = (pool.quantile_ns(share).unwrap(), all[rank.max(1) - 1] as f64);
            prop_assert!((ns / exact - 1.0).abs() < 0.006, "{} {}", ns, exact);
            prop_assert_eq!(pool.requests(), all.len() as u64);
            let over = all.iter().filter(|ns| **ns as f64 > exact * 1.006).count() as u64;
            prop_assert!(pool.over(exact as u64) >= over);
            prop_assert_eq!(pool.over(exact as u64), tails[0].over(exact as u64) + tails[1].over(exact as u64));
        }
    }

    #[test]
    fn any_length_has_a_step() {
        let mut tail = Tail::default();
        for ns in [0, 1, u64::MAX] {
            tail.add(ns, u64::MAX);
        }
        assert_eq!(Pool::default().quantile_ns(0.5), None);
        assert!(Pool::of([&tail]).quantile_ns(1.0).unwrap() > 1e19);
        assert_eq!(tail.over(5), u64::from(u32::MAX));
    }
}
