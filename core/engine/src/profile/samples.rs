//! The latest times of one kind of launch, and what they say.

use tally_contract::limits::RECENT_SAMPLES;

/// A ring of the latest [`RECENT_SAMPLES`] times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Samples {
    ring: [u64; RECENT_SAMPLES],
    pushed: u64,
}

impl Samples {
    pub fn push(&mut self, ns: u64) {
        self.ring[(self.pushed % RECENT_SAMPLES as u64) as usize] = ns;
        self.pushed += 1;
    }

    /// A ring that holds the same time `count` times, if there is room.
    pub fn repeated(ns: u64, count: u64) -> Self {
        let mut samples = Samples::default();
        (0..count.min(RECENT_SAMPLES as u64)).for_each(|_| samples.push(ns));
        samples
    }

    /// A full ring with these figures, if any has them.
    pub fn telling(p50_ns: u64, p99_ns: u64, latest_ns: u64) -> Self {
        let mut samples = Samples::repeated(p50_ns, RECENT_SAMPLES as u64 - 2);
        samples.push(p99_ns);
        samples.push(latest_ns);
        samples
    }

    /// How many were pushed so far.
    pub fn pushed(&self) -> u64 {
        self.pushed
    }

    fn len(&self) -> usize {
        self.pushed.min(RECENT_SAMPLES as u64) as usize
    }

    /// The latest one; 0 if there is none.
    pub fn latest_ns(&self) -> u64 {
        let last = self.pushed.wrapping_sub(1) % RECENT_SAMPLES as u64;
        self.ring[last as usize]
    }

    /// Median of the latest `most`, the lower one of two; 0 if there is none.
    pub fn median_of_ns(&self, most: usize) -> u64 {
        let n = self.len().min(most);
        let mut latest = [0; RECENT_SAMPLES];
        for (back, sample) in latest[..n].iter_mut().enumerate() {
            let at = (self.pushed - 1 - back as u64) % RECENT_SAMPLES as u64;
            *sample = self.ring[at as usize];
        }
        latest[..n].sort_unstable();
        latest[n.saturating_sub(1) / 2]
    }

    /// Median of the ring; the lower one of two, 0 if it is empty.
    pub fn p50_ns(&self) -> u64 {
        self.median_of_ns(RECENT_SAMPLES)
    }

    /// The shortest; 0 if there is none.
    pub fn least_ns(&self) -> u64 {
        self.ring[..self.len()].iter().copied().min().unwrap_or(0)
    }

    /// 99th percentile of all (nearest rank): of so few, the largest.
    pub fn p99_ns(&self) -> u64 {
        self.ring[..self.len()].iter().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_of_the_latest_samples_only() {
        let mut samples = Samples::default();
        let figures = |s: &Samples| (s.p50_ns(), s.p99_ns(), s.latest_ns());
        assert_eq!(figures(&samples), (0, 0, 0));
        samples.push(9);
        assert_eq!(figures(&samples), (9, 9, 9));
        samples.push(4);
        assert_eq!(figures(&samples), (4, 9, 4), "the lower one of two");
        for ns in 100..100 + RECENT_SAMPLES as u64 {
            samples.push(ns);
        }
        assert_eq!(figures(&samples), (115, 131, 131));
        assert_eq!(samples.median_of_ns(9), 127);
        let same = Samples::telling(115, 131, 120);
        assert_eq!(figures(&same), (115, 131, 120));
        assert_eq!(figures(&Samples::repeated(7, 2)), (7, 7, 7));
        assert_eq!(Samples::repeated(7, 1_000), Samples::repeated(7, 32));
    }
}
