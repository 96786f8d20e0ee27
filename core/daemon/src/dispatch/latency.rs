//! How long answers take, as histograms that cost a few nanoseconds a sample.

use hdrhistogram::Histogram;
use tally_admin::Quantiles;

/// Longest time told apart; longer ones count as this.
const LONGEST_NS: u64 = 60_000_000_000;
/// Figures kept of a sample: 1 % steps.
const SIGNIFICANT_DIGITS: u8 = 2;

pub struct Latency(Histogram<u64>);

impl Latency {
    /// An empty one; allocates all it will ever need.
    pub fn new() -> Self {
        // The bounds are constants that the library accepts.
        Latency(
            Histogram::new_with_bounds(1, LONGEST_NS, SIGNIFICANT_DIGITS)
                .expect("constant bounds are valid"),
        )
    }

    /// Adds a sample; one beyond the histogram's range counts as its maximum.
    pub fn record(&mut self, ns: u64) {
        self.0.saturating_record(ns);
    }

    pub fn quantiles(&self) -> Quantiles {
        let us = |ns: u64| ns as f64 / 1_000.0;
        Quantiles {
            count: self.0.len(),
            p50_us: us(self.0.value_at_quantile(0.5)),
            p99_us: us(self.0.value_at_quantile(0.99)),
            p999_us: us(self.0.value_at_quantile(0.999)),
            max_us: us(self.0.max()),
        }
    }
}

impl Default for Latency {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_samples() {
        let mut latency = Latency::new();
        for ns in 1..=1_000u64 {
            latency.record(ns * 1_000);
        }
        let q = latency.quantiles();
        assert_eq!(q.count, 1_000);
        assert!((495.0..=505.0).contains(&q.p50_us), "{q:?}");
        assert!((985.0..=1_000.0).contains(&q.p99_us), "{q:?}");
        latency.record(u64::MAX);
        assert_eq!(latency.quantiles().count, 1_001);
    }
}
