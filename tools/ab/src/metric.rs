//! What is compared: one figure of each block, on a scale where effects are ratios.

use crate::sample::Sample;
use crate::units::time;
use serde::{Deserialize, Serialize};

/// A block with fewer requests says nothing. Few are no harm: a block that a stall leaves with one
/// long request must count.
pub const REQUESTS_MIN: u64 = 1;
/// Added to a block's work, ns: a block without any has a logarithm, too.
const WORK_FLOOR_NS: f64 = 1_000.0;

/// What an A/B test compares the two policies by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// 99th percentile of the high-priority requests' times; lower is better.
    #[serde(rename = "hp_p99")]
    HpP99,
    /// Best-effort work that ended, in GPU time that it takes undisturbed, for each
    /// second; higher is better.
    BeThroughput,
    /// Share of the high-priority requests within the objective; higher is better.
    SloAttainment,
}

impl Metric {
    pub const ALL: [Metric; 3] = [Metric::HpP99, Metric::BeThroughput, Metric::SloAttainment];

    /// Name of the metric on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Metric::HpP99 => "hp_p99",
            Metric::BeThroughput => "be_throughput",
            Metric::SloAttainment => "slo_attainment",
        }
    }

    /// Whether less of it is better.
    pub fn lower_is_better(self) -> bool {
        self == Metric::HpP99
    }

    /// A block's figure: ns, GPU ns for each s, or a share. `None` if the block says nothing.
    pub fn value(self, sample: &Sample, slo_ns: Option<u64>) -> Option<f64> {
        let requests = sample.requests();
        match self {
            Metric::HpP99 if requests < REQUESTS_MIN => None,
            Metric::HpP99 => sample.quantile_ns(0.99).map(|ns| ns as f64),
            Metric::SloAttainment if requests < REQUESTS_MIN => None,
            Metric::SloAttainment => {
                let within = requests - sample.over(slo_ns?).min(requests);
                // Half a request each way: a share of 0 has a logarithm, too.
                Some((within as f64 + 0.5) / (requests as f64 + 1.0))
            }
            Metric::BeThroughput => {
                let seconds = sample.span_ns() as f64 / 1e9;
                (seconds > 0.0).then(|| (sample.work_ns as f64 + WORK_FLOOR_NS) / seconds)
            }
        }
    }

    /// Whether a pair of blocks compares anything: best effort that did nothing under
    /// either policy was not there.
    pub fn pair_says_something(self, first: &Sample, second: &Sample) -> bool {
        self != Metric::BeThroughput || first.launches + second.launches > 0
    }

    /// A figure for people.
    pub fn show(self, value: f64) -> String {
        match self {
            Metric::HpP99 => time(value),
            Metric::BeThroughput => format!("{:.1} GPU ms/s", value / 1e6),
            Metric::SloAttainment => format!("{:.2} %", value * 100.0),
        }
    }

    /// What its axis is labelled with, and what a value is divided by for it.
    pub fn axis(self) -> (&'static str, f64) {
        match self {
            Metric::HpP99 => ("high-priority p99, ms", 1e6),
            Metric::BeThroughput => ("best-effort work, GPU ms/s", 1e6),
            Metric::SloAttainment => ("requests within the objective, %", 0.01),
        }
    }
}

impl std::str::FromStr for Metric {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Metric::ALL.into_iter().find(|m| m.as_str() == text).ok_or_else(|| {
            format!("{text:?} is not a metric: expected hp_p99, be_throughput or slo_attainment")
        })
    }
}

impl std::fmt::Display for Metric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(requests: u64, ns: u64) -> Sample {
        let mut sample = Sample::new();
        sample.to_ns = 2_000_000_000;
        (0..requests).for_each(|_| sample.request(ns));
        sample
    }

    #[test]
    fn each_metric_is_one_figure_of_a_block() {
        let mut block = sample(99, 1_000_000);
        block.request(9_000_000);
        (block.work_ns, block.launches) = (500_000_000, 10);
        let p99 = Metric::HpP99.value(&block, None).unwrap();
        assert!((p99 / 1e6 - 1.0).abs() < 0.01, "{p99}");
        let share = Metric::SloAttainment.value(&block, Some(2_000_000)).unwrap();
        assert!((share - 99.5 / 101.0).abs() < 1e-9, "{share}");
        let work = Metric::BeThroughput.value(&block, None).unwrap();
        assert!((work / 250e6 - 1.0).abs() < 1e-3, "{work}");
    }

    #[test]
    fn a_block_without_traffic_says_nothing() {
        let few = sample(REQUESTS_MIN - 1, 1_000);
        assert_eq!(Metric::HpP99.value(&few, None), None);
        assert_eq!(Metric::SloAttainment.value(&few, Some(5)), None);
        assert!(!Metric::BeThroughput.pair_says_something(&few, &few));
        let mut held = few.clone();
        held.launches = 1;
        assert!(Metric::BeThroughput.pair_says_something(&few, &held));
    }

    #[test]
    fn names_are_read_back() {
        for metric in Metric::ALL {
            assert_eq!(metric.as_str().parse(), Ok(metric));
            assert_eq!(serde_json::to_value(metric).unwrap(), metric.as_str());
        }
        assert!("p99".parse::<Metric>().unwrap_err().contains("hp_p99"));
    }
}
