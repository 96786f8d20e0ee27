//! The report: everything that was planned, seen and concluded, as data.
//!
//! The JSON schema is version 1; fields are only added within it.

use crate::accident;
pub use crate::accident::GuardReport;
use crate::beside;
pub use crate::beside::{Beside, Rate};
use crate::cost;
use crate::design::{Arm, Plan};
use crate::experiment::{Ended, Experiment, SAMPLE_RATIO_ALPHA};
use crate::interval::{self, Bounds};
use crate::metric::Basis;
use crate::overall::Overall;
use crate::sample::Unit;
use crate::verdict::{PAIRS_MIN, Verdict, conclude};
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
    /// High-priority requests that began in it.
    pub requests: u64,
    /// Requests that had not ended when the pair did; they count as their age then.
    pub open: u64,
    /// Requests whose time includes what they waited inside the program.
    #[serde(default)]
    pub queue_known: u64,
    /// Requests of clients that have an objective of their own, and those of them that kept it.
    #[serde(default)]
    pub requests_judged: u64,
    #[serde(default)]
    pub requests_within: u64,
    /// Median time of the requests, ns.
    pub hp_p50_ns: Option<u64>,
    /// 99th percentile of the requests' times, ns.
    pub hp_p99_ns: Option<u64>,
    /// Tokens that began in it.
    #[serde(default)]
    pub tokens: u64,
    /// Tokens that had not ended when the pair did; they count as their age then.
    #[serde(default)]
    pub tokens_open: u64,
    /// Tokens of clients that have an objective for them, and those of them that kept it.
    #[serde(default)]
    pub tokens_judged: u64,
    #[serde(default)]
    pub tokens_within: u64,
    /// 99th percentile of the tokens' times, ns.
    #[serde(default)]
    pub token_p99_ns: Option<u64>,
    /// Best-effort launches that ended.
    pub be_launches: u64,
    /// Their work, in GPU time that they take undisturbed, ns.
    pub be_work_ns: u64,
    /// Time that best-effort launches waited for an answer, summed over launches, ns.
    #[serde(default)]
    pub be_waited_ns: u64,
    /// Times that best-effort clients were asked to yield.
    #[serde(default)]
    pub preemptions: u64,
    /// Jain's index of the work, by weight, of best-effort clients that had work all the time, or that only B keeps
    /// from having it; `null` for fewer than two.
    #[serde(default)]
    pub be_fairness: Option<f64>,
}

impl Block {
    /// The units of this kind.
    pub(crate) fn count(&self, unit: Unit) -> u64 {
        match unit {
            Unit::Request => self.requests,
            Unit::Token => self.tokens,
        }
    }
}

/// A policy that takes part.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ArmSource {
    pub name: String,
    /// SHA-256 of its file.
    pub digest: String,
    pub file: String,
    /// File of the policy's configuration, if it has one.
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
    /// The worst of the blocks' figures.
    pub value_worst: Option<f64>,
    /// Blocks whose figure is worse than twice the median of A's.
    pub blocks_slow: usize,
    /// Best-effort work a second, GPU ms.
    pub be_gpu_ms_per_s: f64,
}

/// What the sequential test says, block by block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// A difference, in B's favour.
    BBetter,
    /// A difference, in A's favour.
    BWorse,
    /// "No difference" is not rejected; that does not show that there is none.
    Undecided,
}

/// Both arms over all of their blocks: for `hp_p99` and `token_p99` the percentile of all requests or tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OverallReport {
    /// Which percentile the number of requests allows, as a share; `null` for other metrics.
    pub quantile: Option<f64>,
    pub a: f64,
    pub b: f64,
    /// Bounds by bootstrap of pairs: approximate.
    #[serde(flatten)]
    pub effect: Effect,
    /// Share of the samples drawn anew in which B's figure is the higher one.
    pub b_higher: f64,
}

/// An effect with its bounds: B's figure over A's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    pub ratio: f64,
    /// Lower bound; `null`: no bound yet.
    pub low: Option<f64>,
    /// Upper bound; `null`: no bound yet.
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

/// Whether both arms served as many units of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleRatio {
    /// Units a second under A.
    pub a_per_s: f64,
    /// Units a second under B.
    pub b_per_s: f64,
    /// Evidence against "as many": the largest e-value so far.
    pub e_value: f64,
    /// Beyond 1 / 0.001: the arms were not given, or did not serve, the same load.
    pub mismatch: bool,
}

impl SampleRatio {
    fn new(experiment: &Experiment, unit: Unit) -> Self {
        let betting = experiment.sample_ratio(unit);
        SampleRatio {
            a_per_s: experiment.per_s(unit, Arm::A),
            b_per_s: experiment.per_s(unit, Arm::B),
            e_value: betting.ln_e_max().exp().min(E_MAX),
            mismatch: betting.rejects(SAMPLE_RATIO_ALPHA),
        }
    }

    /// The larger load over the smaller one, if they are far apart; infinite if one arm had none.
    pub fn far_apart(&self) -> Option<f64> {
        let (low, high) = (self.a_per_s.min(self.b_per_s), self.a_per_s.max(self.b_per_s));
        (high > low * LOAD_FACTOR_MAX).then(|| high / low)
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub schema: u32,
    pub plan: Plan,
    pub a: ArmSummary,
    pub b: ArmSummary,
    /// How it ended; `null` while it runs.
    pub ended: Option<Ended>,
    /// Time since the test began, s.
    pub elapsed_s: f64,
    /// From its end until A was put active again, ns; `null` while it runs, or if A was
    /// active then.
    #[serde(default)]
    pub a_back_after_ns: Option<u64>,
    /// What the test advises, by what is known so far.
    pub verdict: Verdict,
    pub why: String,
    /// If it is undecided: how much longer it needs, s, as far as that is known.
    pub needs_s: Option<f64>,
    /// What the sequential test says.
    pub finding: Finding,
    /// Both arms over all blocks.
    pub overall: Option<OverallReport>,
    /// For `be_throughput`: the percentile of all requests, unless a guard says what they may take.
    #[serde(default)]
    pub tail: Option<OverallReport>,
    /// For `hp_p99` and `token_p99`: which percentile a block's figure is, from its number of requests or tokens.
    pub block_quantile: Option<f64>,
    /// The largest e-value so far; beyond 1 / alpha "no difference" is rejected.
    pub e_value: f64,
    /// How it was decided, and from where.
    pub test: String,
    /// The effect; bounds exact if B's effect is one ratio in all blocks. Of an attainment that of all requests or
    /// tokens.
    pub effect: Effect,
    /// The mean effect; bounds for many pairs.
    pub mean_effect: Effect,
    /// Pairs that said something.
    pub pairs: usize,
    /// Pairs that said nothing.
    pub pairs_empty: u32,
    /// The check of the numbers of requests.
    pub sample_ratio: SampleRatio,
    /// That of tokens, if the metric or a guard is of them.
    #[serde(default)]
    pub token_ratio: Option<SampleRatio>,
    /// B over A by further figures, on which the test does not decide.
    pub beside: Vec<Beside>,
    /// Figures that may be 0, on which the test does not decide either.
    #[serde(default)]
    pub rates: Vec<Rate>,
    /// What is known of the guards.
    pub guards: Vec<GuardReport>,
    /// It ended when it was decided: its estimate is too large on average.
    pub decided_early: bool,
    /// What to keep in mind.
    pub caveats: Vec<String>,
    /// All finished blocks, in order.
    pub blocks: Vec<Block>,
    /// What the test bets on: of each pair that said something the logarithm of B's figure over
    /// A's, less what the difference of their loads explains.
    pub differences: Vec<f64>,
    /// B stayed active after the test.
    #[serde(default)]
    pub promoted: bool,
    /// The effect over time; at most 150 points.
    pub history: Vec<Point>,
}

/// What is said of an estimate at an early end.
pub(crate) const INFLATED: &str = "the effect was measured until it was clear, so its estimate is too large on average; \
    the interval is not";

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
        let enough = differences.len() >= PAIRS_MIN;
        let mean_bounds = if enough { mean_bounds } else { Bounds::default() };
        let finding = match experiment.betting().rejected_for_more(plan.alpha) {
            Some(more) if more == plan.metric.lower_is_better() => Finding::BWorse,
            Some(_) => Finding::BBetter,
            None => Finding::Undecided,
        };
        let overall = experiment.overall();
        // A block's share of few requests is no multiple of A's share: only that of all requests has an interval.
        let is_of_blocks = !plan.metric.is_attainment();
        let mean_bounds = if is_of_blocks { mean_bounds } else { Bounds::default() };
        let effect = match &overall {
            Some(overall) if !is_of_blocks => Effect::new(overall.ln_ratio, overall.bounds),
            None if !is_of_blocks => Effect::new(mean, Bounds::default()),
            _ => exact(differences, plan.alpha),
        };
        let history = history && is_of_blocks;
        let conclusion = conclude(experiment, overall.as_ref());
        let elapsed_ns = match experiment.ended() {
            Some(ended) => ended.after_ns,
            None => now_ns.saturating_sub(experiment.started_ns()),
        };
        let is_of_tokens = experiment.compared().any(|unit| unit == Unit::Token);
        let mut report = Report {
            schema: SCHEMA,
            a: summary(experiment, Arm::A, &arms[0]),
            b: summary(experiment, Arm::B, &arms[1]),
            ended: experiment.ended().cloned(),
            elapsed_s: elapsed_ns as f64 / 1e9,
            a_back_after_ns: None,
            verdict: conclusion.verdict,
            why: conclusion.why,
            needs_s: conclusion.needs_s,
            finding,
            overall: overall.as_ref().map(OverallReport::new),
            tail: cost::tail(experiment).as_ref().map(OverallReport::new),
            block_quantile: block_quantile(experiment),
            beside: beside::all(experiment),
            rates: beside::rates(experiment),
            guards: accident::guards(experiment),
            e_value: experiment.betting().ln_e_max().exp().min(E_MAX),
            test: TEST.into(),
            effect,
            mean_effect: Effect::new(mean, mean_bounds),
            pairs: differences.len(),
            pairs_empty: experiment.pairs_empty(),
            sample_ratio: SampleRatio::new(experiment, Unit::Request),
            token_ratio: is_of_tokens.then(|| SampleRatio::new(experiment, Unit::Token)),
            decided_early: experiment.is_decided() && !plan.to_end,
            caveats: Vec::new(),
            blocks: experiment.blocks().to_vec(),
            differences: differences.to_vec(),
            promoted: false,
            history: if history { effects(differences, plan.alpha) } else { Vec::new() },
            plan,
        };
        report.caveats = report.think_twice(experiment.unjudged());
        report.caveats.extend(experiment.lost().map(|(unit, lost)| {
            let units = unit.plural();
            format!("{lost} {units} were not counted: a client had too many under way at a switch")
        }));
        report
    }

    /// Checks of the numbers of requests and of tokens.
    pub(crate) fn ratios(&self) -> impl Iterator<Item = (Unit, &SampleRatio)> {
        let tokens = self.token_ratio.iter().map(|ratio| (Unit::Token, ratio));
        std::iter::once((Unit::Request, &self.sample_ratio)).chain(tokens)
    }

    fn think_twice(&self, unjudged: Vec<String>) -> Vec<String> {
        let mut all = unjudged;
        let requests: u64 = self.blocks.iter().map(|b| b.requests).sum();
        let queue_known: u64 = self.blocks.iter().map(|b| b.queue_known).sum();
        let ratios = || self.ratios().map(|(_, ratio)| ratio);
        if ratios().any(|ratio| ratio.mismatch) {
            all.push(
                "the arms did not serve the same load: a program that waits for answers before \
                 it asks again asks more often when answers are quick; its tail is then that of \
                 another load"
                    .into(),
            );
        } else if ratios().any(|ratio| ratio.far_apart().is_some()) {
            all.push(
                "the arms served loads that are far apart, though chance is not ruled out: figures \
                 under different loads do not compare the policies"
                    .into(),
            );
        }
        if queue_known < requests && self.plan.metric.unit() == Some(Unit::Request) {
            all.push(
                "what requests waited inside the program before their first launch is not known: \
                 a service that queues may be slowed more than these figures say"
                    .into(),
            );
        }
        if self.decided_early {
            all.push(INFLATED.into());
        }
        all.extend(self.guards.iter().filter_map(GuardReport::warning));
        let (slow_a, slow_b) = (self.a.blocks_slow, self.b.blocks_slow);
        if slow_b > 2 * slow_a + 2 {
            all.push(format!(
                "{slow_b} of {} blocks of B were more than twice as bad as A's median, and \
                 {slow_a} of A",
                self.b.blocks
            ));
        }
        if self.pairs_empty > 0 {
            let pairs = self.pairs_empty;
            all.push(format!("{pairs} pairs of blocks said nothing and were left out"));
        }
        if self.finding != Finding::Undecided
            && self.pairs >= PAIRS_MIN
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

/// No bounds from fewer than ten pairs: they would say more than is known.
pub(crate) fn exact(differences: &[f64], alpha: f64) -> Effect {
    let bounds = match differences.len() < PAIRS_MIN {
        true => Bounds::default(),
        false => interval::confidence(differences, alpha),
    };
    Effect::new(interval::estimate(differences), bounds)
}

impl OverallReport {
    fn new(overall: &Overall) -> Self {
        OverallReport {
            quantile: overall.quantile,
            a: overall.a,
            b: overall.b,
            effect: Effect::new(overall.ln_ratio, overall.bounds),
            b_higher: overall.higher,
        }
    }
}

/// Which percentile of its requests a block's figure is: that of rank 99 % of `n` is on the
/// median the one of this share.
fn block_quantile(experiment: &Experiment) -> Option<f64> {
    let Basis::Tail(unit) = experiment.plan().metric.basis() else { return None };
    let said = experiment.blocks().iter().filter(|block| block.value.is_some());
    let mut requests: Vec<u64> = said.map(|block| block.count(unit)).collect();
    requests.sort_unstable();
    let n = *requests.get(requests.len() / 2)? as f64;
    Some((((0.99 * n).ceil()) - 1.0 / 3.0) / (n + 1.0 / 3.0))
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
    let blocks = |arm| experiment.blocks().iter().filter(move |b| b.arm == arm);
    let values = |arm| {
        let mut values: Vec<f64> = blocks(arm).filter_map(|b| b.value).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let median = |values: &[f64]| values.get(values.len() / 2).copied();
    let own = values(arm);
    let lower_is_better = experiment.plan().metric.lower_is_better();
    let seconds: f64 = blocks(arm).map(|b| b.measured_s).sum();
    let work_ns: u64 = blocks(arm).map(|b| b.be_work_ns).sum();
    ArmSummary {
        source: source.clone(),
        blocks: blocks(arm).count(),
        blocks_empty: blocks(arm).filter(|b| b.value.is_none()).count(),
        requests: blocks(arm).map(|b| b.requests).sum(),
        value_median: median(&own),
        value_worst: if lower_is_better { own.last() } else { own.first() }.copied(),
        blocks_slow: experiment.slow_blocks()[arm.index()],
        be_gpu_ms_per_s: work_ns as f64 / 1e6 / seconds.max(1e-9),
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
