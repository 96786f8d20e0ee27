//! What is compared: one figure of each block, on a scale where effects are ratios.

use crate::sample::{Sample, Unit};
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
    /// 99th percentile of the tokens' times; lower is better.
    #[serde(rename = "token_p99")]
    TokenP99,
    /// Share of the tokens within their clients' objectives; higher is better.
    TpotAttainment,
}

/// What a metric is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Basis {
    /// How long these take.
    Tail(Unit),
    /// How many of these keep their objective.
    Attainment(Unit),
    /// GPU time of best-effort launches that ended.
    Work,
}

impl Metric {
    pub const ALL: [Metric; 5] = [
        Metric::HpP99,
        Metric::BeThroughput,
        Metric::SloAttainment,
        Metric::TokenP99,
        Metric::TpotAttainment,
    ];

    /// Name of the metric on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Metric::HpP99 => "hp_p99",
            Metric::BeThroughput => "be_throughput",
            Metric::SloAttainment => "slo_attainment",
            Metric::TokenP99 => "token_p99",
            Metric::TpotAttainment => "tpot_attainment",
        }
    }

    pub(crate) fn basis(self) -> Basis {
        match self {
            Metric::HpP99 => Basis::Tail(Unit::Request),
            Metric::TokenP99 => Basis::Tail(Unit::Token),
            Metric::SloAttainment => Basis::Attainment(Unit::Request),
            Metric::TpotAttainment => Basis::Attainment(Unit::Token),
            Metric::BeThroughput => Basis::Work,
        }
    }

    /// The units that it is a figure of; `None`: of none.
    pub fn unit(self) -> Option<Unit> {
        match self.basis() {
            Basis::Tail(unit) | Basis::Attainment(unit) => Some(unit),
            Basis::Work => None,
        }
    }

    /// Whether it is a share of units that keep their objective.
    pub fn is_attainment(self) -> bool {
        matches!(self.basis(), Basis::Attainment(_))
    }

    /// Whether less of it is better.
    pub fn lower_is_better(self) -> bool {
        matches!(self.basis(), Basis::Tail(_))
    }

    /// A block's figure: ns, GPU ns for each s, or a share. `None` if the block says nothing. `slo_ns`: the objective
    /// of all requests; without it each is judged by its client's own.
    pub fn value(self, sample: &Sample, slo_ns: Option<u64>) -> Option<f64> {
        match self.basis() {
            Basis::Tail(unit) if sample.of(unit).count() < REQUESTS_MIN => None,
            Basis::Tail(unit) => sample.of(unit).quantile_ns(0.99).map(|ns| ns as f64),
            Basis::Attainment(unit) => {
                let kept = sample.of(unit).kept(slo_ns.filter(|_| unit == Unit::Request));
                // Half a unit each way: a share of 0 has a logarithm, too.
                (kept.judged >= REQUESTS_MIN)
                    .then(|| (kept.within as f64 + 0.5) / (kept.judged as f64 + 1.0))
            }
            Basis::Work => {
                let seconds = sample.span_ns() as f64 / 1e9;
                (seconds > 0.0).then(|| (sample.work_ns as f64 + WORK_FLOOR_NS) / seconds)
            }
        }
    }

    /// What blocks lack that say nothing of it.
    pub fn missing(self, slo_ns: Option<u64>) -> &'static str {
        match self {
            Metric::HpP99 => "too few high-priority requests",
            Metric::BeThroughput => "no best-effort work",
            Metric::SloAttainment if slo_ns.is_some() => "too few high-priority requests",
            Metric::SloAttainment => {
                "no request of a client with an objective; give --slo TIME, or the clients objectives with `tallyctl \
                 client set`"
            }
            Metric::TokenP99 => {
                "no token of a high-priority client that marks tokens, or that has an objective for them"
            }
            Metric::TpotAttainment => {
                "no token of a client with an objective for tokens; `tallyctl client set` gives it one"
            }
        }
    }

    /// Whether a pair of blocks compares anything: best effort that did nothing under
    /// either policy was not there.
    pub fn pair_says_something(self, first: &Sample, second: &Sample) -> bool {
        self != Metric::BeThroughput || first.launches + second.launches > 0
    }

    /// Formats a figure for people, with its unit.
    pub fn show(self, value: f64) -> String {
        match self.basis() {
            Basis::Tail(_) => time(value),
            Basis::Work => format!("{:.1} GPU ms/s", value / 1e6),
            Basis::Attainment(_) => format!("{:.2} %", value * 100.0),
        }
    }

    /// What its axis is labelled with, and what a value is divided by for it.
    pub fn axis(self) -> (&'static str, f64) {
        match self {
            Metric::HpP99 => ("high-priority p99, ms", 1e6),
            Metric::BeThroughput => ("best-effort work, GPU ms/s", 1e6),
            Metric::SloAttainment => ("requests within the objective, %", 0.01),
            Metric::TokenP99 => ("p99 of tokens, ms", 1e6),
            Metric::TpotAttainment => ("tokens within the objective, %", 0.01),
        }
    }
}

impl std::str::FromStr for Metric {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Metric::ALL.into_iter().find(|m| m.as_str() == text).ok_or_else(|| {
            format!(
                "{text:?} is not a metric: expected hp_p99, be_throughput, slo_attainment, token_p99 or tpot_attainment"
            )
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
    fn tokens_are_not_requests_and_objectives_are_their_clients_own() {
        let mut block = sample(50, 1_000_000);
        for metric in [Metric::TokenP99, Metric::TpotAttainment] {
            assert_eq!(metric.value(&block, Some(5)), None, "requests are no tokens");
        }
        block.of_mut(Unit::Token).add(40_000_000, 7, None);
        let p99 = Metric::TokenP99.value(&block, None).unwrap();
        assert!((p99 / 40e6 - 1.0).abs() < 0.01, "{p99}");
        assert_eq!(Metric::TpotAttainment.value(&block, Some(5)), None, "without an objective");
        block.of_mut(Unit::Token).add(40_000_000, 1, Some(40_000_000));
        block.of_mut(Unit::Token).add(40_000_000, 2, Some(39_000_000));
        let share = Metric::TpotAttainment.value(&block, Some(5)).unwrap();
        assert!((share - 1.5 / 4.0).abs() < 1e-9, "{share}");
        // Requests without an objective count only if one is given.
        assert_eq!(Metric::SloAttainment.value(&block, None), None);
        block.of_mut(Unit::Request).add(3_000_000, 9, Some(2_000_000));
        let [own, given] = [None, Some(2_000_000)]
            .map(|slo_ns| Metric::SloAttainment.value(&block, slo_ns).unwrap());
        assert!((own - 0.05).abs() < 1e-9 && (given - 50.5 / 60.0).abs() < 1e-9, "{own} {given}");
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
