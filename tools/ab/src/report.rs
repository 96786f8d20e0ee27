//! The report: everything that was planned, seen and concluded, as data.
//!
//! The JSON schema is version 1; fields are only added within it.

use crate::design::{Arm, Plan};
use crate::experiment::{Ended, Experiment, Reason, SAMPLE_RATIO_ALPHA};
use crate::interval::{self, Bounds};
use crate::metric::Metric;
use serde::{Deserialize, Serialize};

/// Version of the schema.
pub const SCHEMA: u32 = 1;
/// Points of the effect's history.
const HISTORY_MAX: usize = 150;
/// An e-value beyond it is told as this.
const E_MAX: f64 = 1e12;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Block {
    pub arm: Arm,
    /// When its measured part began, from the start, s.
    pub began_s: f64,
    /// How long it was measured, s.
    pub measured_s: f64,
    /// The metric: ns, GPU ns a second or a share; `null` if it says nothing.
    pub value: Option<f64>,
    /// High-priority requests that began and ended in it.
    pub requests: u64,
    /// Requests under way at its start; not counted.
    pub straddled: u64,
    /// Of `requests`, those of which only number and sum are known.
    pub merged: u64,
    /// Median time of the requests, ns.
    pub hp_p50_ns: Option<u64>,
    /// 99th percentile, ns.
    pub hp_p99_ns: Option<u64>,
    /// Best-effort launches that ended.
    pub be_launches: u64,
    /// Their work, in GPU time that they take undisturbed, ns.
    pub be_work_ns: u64,
}

/// A policy that takes part.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ArmSource {
    pub name: String,
    /// SHA-256 of its file.
    pub digest: String,
    pub file: String,
    /// Its configuration's file, if any.
    pub config: Option<String>,
    /// Whether what it learns is carried from block to block.
    pub keeps_state: bool,
}

/// One arm's blocks taken together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmSummary {
    #[serde(flatten)]
    pub source: ArmSource,
    pub blocks: usize,
    /// Blocks that say nothing.
    pub blocks_empty: usize,
    pub requests: u64,
    /// Median of the blocks' figures.
    pub value_median: Option<f64>,
    /// Best-effort work a second, GPU ms.
    pub be_gpu_ms_per_s: f64,
}

/// What the test says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// A difference, in B's favour.
    BBetter,
    /// A difference, in A's favour.
    BWorse,
    /// "No difference" is not rejected; that does not show that there is none.
    Undecided,
}

/// What became of a finished test, for scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Decided for B.
    BBetter,
    /// Decided for A.
    BWorse,
    /// It ended without a decision.
    Undecided,
    /// A guard withdrew B.
    Guard,
    /// It says nothing about the policies: one failed, there was no traffic, it was cut short by
    /// the core, or the arms did not serve the same load.
    Invalid,
}

/// An effect with its bounds: B's figure over A's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    pub ratio: f64,
    /// Not less than; `null`: no bound yet.
    pub low: Option<f64>,
    /// Not more than.
    pub high: Option<f64>,
}

impl Effect {
    pub(crate) fn new(ln: f64, bounds: Bounds) -> Self {
        Effect { ratio: ln.exp(), low: bounds.low.map(f64::exp), high: bounds.high.map(f64::exp) }
    }
}

/// The effect as known after some pairs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Pairs that said something so far.
    pub pairs: usize,
    #[serde(flatten)]
    pub effect: Effect,
}

/// Loads that differ by more than this are told to people, shown to be no chance or not.
const LOAD_FACTOR_MAX: f64 = 1.25;

/// Whether both arms served as many requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleRatio {
    /// Requests a second under A.
    pub a_per_s: f64,
    /// Requests a second under B.
    pub b_per_s: f64,
    /// Evidence against "as many": the largest e-value so far.
    pub e_value: f64,
    /// Beyond 1 / 0.001: the arms were not given, or did not serve, the same load.
    pub mismatch: bool,
}

impl SampleRatio {
    /// The larger load over the smaller one, if they are far apart; infinite if one arm had none.
    pub fn far_apart(&self) -> Option<f64> {
        let (low, high) = (self.a_per_s.min(self.b_per_s), self.a_per_s.max(self.b_per_s));
        (high > low * LOAD_FACTOR_MAX).then(|| high / low)
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub schema: u32,
    /// What was asked for.
    pub plan: Plan,
    pub a: ArmSummary,
    pub b: ArmSummary,
    /// How it ended; `null` while it runs.
    pub ended: Option<Ended>,
    /// Since it began, s.
    pub elapsed_s: f64,
    /// From its end until A was put active again, ns; `null` while it runs, or if A was
    /// active then.
    #[serde(default)]
    pub a_back_after_ns: Option<u64>,
    /// What the test says.
    pub verdict: Verdict,
    /// The largest e-value so far; beyond 1 / alpha "no difference" is rejected.
    pub e_value: f64,
    /// How it was decided, and from where.
    pub test: String,
    /// The effect; bounds exact if B's effect is one ratio in all blocks.
    pub effect: Effect,
    /// The mean effect; bounds for many pairs.
    pub mean_effect: Effect,
    /// Pairs that said something.
    pub pairs: usize,
    /// Pairs that said nothing.
    pub pairs_empty: u32,
    /// The check of the numbers of requests.
    pub sample_ratio: SampleRatio,
    /// What to keep in mind.
    pub caveats: Vec<String>,
    /// All finished blocks, in order.
    pub blocks: Vec<Block>,
    /// The effect over time; at most 150 points.
    pub history: Vec<Point>,
}

/// Where a report's statistics come from, for the report itself.
const TEST: &str = "betting on the signs of pair differences: exactly valid under the randomised \
    order, at any time of looking (Fisher's sharp null; Ville's inequality). The effect's \
    interval inverts it: exact if the ratio is the same in all blocks. The mean effect's is \
    asymptotic (Waudby-Smith et al., Ann. Statist. 2024)";

impl Report {
    /// Of an experiment, finished or not. With `history` this takes a while (up to a second
    /// for thousands of blocks).
    pub fn new(
        experiment: &Experiment,
        arms: &[ArmSource; 2],
        now_ns: u64,
        history: bool,
    ) -> Report {
        let plan = experiment.plan().clone();
        let differences = experiment.differences();
        let (mean, mean_bounds) = interval::asymptotic(differences, plan.alpha);
        let effect = exact(differences, plan.alpha);
        let better = (effect.ratio < 1.0) == plan.metric.lower_is_better();
        let verdict = match (experiment.is_decided(), better) {
            (false, _) => Verdict::Undecided,
            (true, true) => Verdict::BBetter,
            (true, false) => Verdict::BWorse,
        };
        let elapsed_ns = match experiment.ended() {
            Some(ended) => ended.after_ns,
            None => now_ns.saturating_sub(experiment.started_ns()),
        };
        let per_s = |arm| {
            let blocks = || experiment.blocks().iter().filter(move |b| b.arm == arm);
            let seconds: f64 = blocks().map(|b| b.measured_s).sum();
            blocks().map(|b| b.requests).sum::<u64>() as f64 / seconds.max(1e-9)
        };
        let mut report = Report {
            schema: SCHEMA,
            a: summary(experiment, Arm::A, &arms[0]),
            b: summary(experiment, Arm::B, &arms[1]),
            ended: experiment.ended().cloned(),
            elapsed_s: elapsed_ns as f64 / 1e9,
            a_back_after_ns: None,
            verdict,
            e_value: experiment.betting().ln_e_max().exp().min(E_MAX),
            test: TEST.into(),
            effect,
            mean_effect: Effect::new(mean, mean_bounds),
            pairs: differences.len(),
            pairs_empty: experiment.pairs_empty(),
            sample_ratio: SampleRatio {
                a_per_s: per_s(Arm::A),
                b_per_s: per_s(Arm::B),
                e_value: experiment.sample_ratio().ln_e_max().exp().min(E_MAX),
                mismatch: experiment.sample_ratio().rejects(SAMPLE_RATIO_ALPHA),
            },
            caveats: Vec::new(),
            blocks: experiment.blocks().to_vec(),
            history: if history { effects(differences, plan.alpha) } else { Vec::new() },
            plan,
        };
        report.caveats = report.think_twice();
        report
    }

    /// What became of it.
    pub fn outcome(&self) -> Outcome {
        match self.ended.as_ref().map(|ended| ended.reason) {
            Some(Reason::Guard) => Outcome::Guard,
            Some(
                Reason::PolicyFailed
                | Reason::NoTraffic
                | Reason::CoreStopping
                | Reason::Interrupted
                | Reason::Internal,
            ) => Outcome::Invalid,
            None | Some(Reason::Decided | Reason::MaxTime | Reason::Stopped) => {
                match self.verdict {
                    Verdict::Undecided => Outcome::Undecided,
                    _ if self.sample_ratio.mismatch => Outcome::Invalid,
                    Verdict::BBetter => Outcome::BBetter,
                    Verdict::BWorse => Outcome::BWorse,
                }
            }
        }
    }

    /// B's effect in words: `12.3 % lower`.
    pub fn effect_in_words(ratio: f64) -> String {
        let percent = (ratio - 1.0).abs() * 100.0;
        format!("{percent:.1} % {}", if ratio < 1.0 { "lower" } else { "higher" })
    }

    fn think_twice(&self) -> Vec<String> {
        let mut all = Vec::new();
        let requests: u64 = self.blocks.iter().map(|b| b.requests).sum();
        let merged: u64 = self.blocks.iter().map(|b| b.merged).sum();
        let straddled: u64 = self.blocks.iter().map(|b| b.straddled).sum();
        if self.sample_ratio.mismatch {
            all.push(
                "the arms did not serve the same load: a program that waits for answers before \
                 it asks again asks more often when answers are quick; its tail is then that of \
                 another load"
                    .into(),
            );
        } else if self.sample_ratio.far_apart().is_some() {
            all.push(
                "the arms served loads that are far apart, though chance is not ruled out: figures \
                 under different loads do not compare the policies"
                    .into(),
            );
        }
        if merged * 100 > requests {
            all.push(format!(
                "{merged} of {requests} requests came too quickly one after the other to be told \
                 apart; their mean was taken for each"
            ));
        }
        if straddled * 10 > requests && self.plan.metric != Metric::BeThroughput {
            all.push(format!(
                "{straddled} requests were under way when a block began or ended and count \
                 nowhere, beside {requests} that count: use longer blocks, or long requests are \
                 left out"
            ));
        }
        if self.pairs_empty > 0 {
            let pairs = self.pairs_empty;
            all.push(format!("{pairs} pairs of blocks said nothing and were left out"));
        }
        if self.verdict != Verdict::Undecided
            && let (low, high) = (self.effect.low.unwrap_or(0.0), self.effect.high)
            && low < 1.0
            && high.is_none_or(|high| high > 1.0)
        {
            all.push(
                "there is a difference, but no one ratio describes it: the interval holds 1".into(),
            );
        }
        if self.a.source.digest == self.b.source.digest
            && self.a.source.config == self.b.source.config
        {
            all.push(
                "both arms are the same policy with the same configuration (an A/A test)".into(),
            );
        }
        all
    }
}

fn exact(differences: &[f64], alpha: f64) -> Effect {
    Effect::new(interval::estimate(differences), interval::confidence(differences, alpha))
}

fn effects(differences: &[f64], alpha: f64) -> Vec<Point> {
    let step = differences.len().div_ceil(HISTORY_MAX).max(1);
    let mut ends: Vec<usize> = (step..=differences.len()).step_by(step).collect();
    if ends.last().is_some_and(|&last| last != differences.len()) {
        ends.push(differences.len());
    }
    let point = |pairs: usize| Point { pairs, effect: exact(&differences[..pairs], alpha) };
    ends.into_iter().map(point).collect()
}

fn summary(experiment: &Experiment, arm: Arm, source: &ArmSource) -> ArmSummary {
    let blocks = || experiment.blocks().iter().filter(move |b| b.arm == arm);
    let mut values: Vec<f64> = blocks().filter_map(|b| b.value).collect();
    values.sort_by(f64::total_cmp);
    let seconds: f64 = blocks().map(|b| b.measured_s).sum();
    let work_ns: u64 = blocks().map(|b| b.be_work_ns).sum();
    ArmSummary {
        source: source.clone(),
        blocks: blocks().count(),
        blocks_empty: blocks().filter(|b| b.value.is_none()).count(),
        requests: blocks().map(|b| b.requests).sum(),
        value_median: values.get(values.len() / 2).copied(),
        be_gpu_ms_per_s: work_ns as f64 / 1e6 / seconds.max(1e-9),
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
