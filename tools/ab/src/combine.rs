//! Reports of the same comparison on several GPUs, taken together.
//!
//! The pairs of all tests make one sequence, their first pairs first. Each pair was ordered by a
//! coin of its own, and whether a test goes on to a next pair depends on what came before in the
//! sequence only, so the bet of [`crate::betting`] on the whole sequence is as fair as on one
//! test, and as powerful as one test of that many pairs.

use crate::betting::Betting;
use crate::cost;
use crate::experiment::{OVERALL_MARGIN, Reason, is_more_than_chance, shift};
use crate::interval::{Bounds, confidence, estimate};
use crate::metric::Metric;
use crate::report::{Effect, INFLATED, OverallReport, Report, SampleRatio};
use crate::verdict::{PAIRS_MIN, Verdict};
use serde::{Deserialize, Serialize};

/// Reports that can be combined at once.
pub const REPORTS_MAX: usize = 256;

/// Ends of a test that keep A wherever it was.
const KEEP: [Reason; 2] = [Reason::NotServed, Reason::PolicyFailed];
/// The distance of a bound that holds at 95 % to one side, over that of one of two.
const ONE_SIDED: f64 = 1.645 / 1.96;

/// What several reports say together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Combined {
    pub metric: Metric,
    pub a: String,
    pub b: String,
    pub reports: usize,
    /// Pairs of blocks in all of them.
    pub pairs: usize,
    /// Level: the strictest of theirs.
    pub alpha: f64,
    /// What the reports together advise.
    pub verdict: Verdict,
    pub why: String,
    /// The largest e-value of the pooled pairs.
    pub e_value: f64,
    /// Both arms over all of their blocks; bounds approximate.
    pub overall: Option<Effect>,
    /// The effect, if it is one ratio on all GPUs.
    pub effect: Effect,
    /// What to keep in mind.
    pub caveats: Vec<String>,
}

/// Why reports cannot be taken together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CombineError {
    #[error("{0} reports: expected 2 to {REPORTS_MAX}")]
    Number(usize),
    #[error(
        "report {0} is of another {1} than the first: only the same comparison can be taken together"
    )]
    Differs(usize, &'static str),
    #[error(
        "report {0} is of a test that was still running: combine reports of tests that have ended"
    )]
    Running(usize),
    /// Two tests had the same order of blocks: the same report twice, or the same seed.
    #[error("reports {0} and {1} have the same seed: their order was not drawn independently")]
    Seed(usize, usize),
}

/// All pairs, the first of each test first.
fn pooled(each: &[Vec<f64>]) -> Vec<f64> {
    let longest = each.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest).flat_map(|at| each.iter().filter_map(move |d| d.get(at).copied())).collect()
}

/// The ratios over all blocks of each test, weighted by how sure they are; `None` without any, or if a test has
/// none. A test's ratio is the middle of its bounds: percentiles of short tests jump from one
/// request to the next, and samples drawn anew even that out. Standard errors from short tests are themselves unsure,
/// and low where a burst left A's and B's requests alike, so half of each weight is that of the usual error: weighting
/// by the errors alone draws the mean towards 1. Bounds hold at about 95 %.
fn overall(reports: impl Iterator<Item = Option<OverallReport>>) -> Option<(f64, Bounds)> {
    let mut each = Vec::new();
    for report in reports {
        let effect = report?.effect;
        // Both bounds are 1.96 standard errors away, more or less.
        let (low, high) = (effect.low?.ln(), effect.high?.ln());
        let (se, ln) = (((high - low) / 3.92).max(1e-3), f64::midpoint(low, high));
        if !(se.is_finite() && ln.is_finite()) {
            return None;
        }
        each.push((ln, se * se));
    }
    let mut variances: Vec<f64> = each.iter().map(|(_, variance)| *variance).collect();
    variances.sort_by(f64::total_cmp);
    let usual = *variances.get(variances.len() / 2)?;
    let weight = |variance: f64| 1.0 / (variance + usual);
    let weights: f64 = each.iter().map(|(_, variance)| weight(*variance)).sum();
    let mean = each.iter().map(|(ln, v)| weight(*v) * ln).sum::<f64>() / weights;
    let squared = |of: &dyn Fn(f64, f64) -> f64| {
        let sum: f64 = each.iter().map(|(ln, v)| weight(*v).powi(2) * of(*ln, *v)).sum();
        sum / weights.powi(2)
    };
    let within = squared(&|_, variance| variance);
    // How far apart the tests are says it whatever a test's blocks have in common.
    let freedom = (each.len() - 1) as f64;
    let between = squared(&|ln, _| (ln - mean).powi(2)) * each.len() as f64 / freedom.max(1.0);
    // Student's quantile for 95 % over the normal one, from four degrees on to 1 %; fewer tests say
    // too little of their spread.
    let student = 1.0 + 1.19 / freedom.max(4.0) + 2.0 / freedom.max(4.0).powi(2);
    let width = 1.96 * student * within.max(between).sqrt();
    Some((mean, Bounds { low: Some(mean - width), high: Some(mean + width) }))
}

/// Take them together.
///
/// # Errors
/// If they are not of the same comparison, or not independent.
pub fn combine(reports: &[Report]) -> Result<Combined, CombineError> {
    if !(2..=REPORTS_MAX).contains(&reports.len()) {
        return Err(CombineError::Number(reports.len()));
    }
    let first = &reports[0];
    for (at, report) in reports.iter().enumerate() {
        let number = at + 1;
        let same = [
            (report.plan.metric == first.plan.metric, "metric"),
            (report.plan.slo_ns == first.plan.slo_ns, "objective"),
            (report.plan.margin.total_cmp(&first.plan.margin).is_eq(), "margin"),
            (report.a.source.digest == first.a.source.digest, "policy A"),
            (report.b.source.digest == first.b.source.digest, "policy B"),
        ];
        if let Some((_, what)) = same.into_iter().find(|(same, _)| !same) {
            return Err(CombineError::Differs(number, what));
        }
        if report.ended.is_none() {
            return Err(CombineError::Running(number));
        }
        let before = &reports[..at];
        if let Some(other) = before.iter().position(|r| r.plan.seed == report.plan.seed) {
            return Err(CombineError::Seed(other + 1, number));
        }
    }
    let finite =
        |report: &Report| report.differences.iter().copied().filter(|d| d.is_finite()).collect();
    let each: Vec<Vec<f64>> = reports.iter().map(finite).collect();
    let all = pooled(&each);
    let alpha = reports.iter().map(|r| r.plan.alpha).fold(f64::INFINITY, f64::min);
    let (mut betting, mut decision) = (Betting::new(), Betting::new());
    for difference in &all {
        betting.push(*difference);
        decision.push(difference - shift(&first.plan));
    }
    let enough = all.len() >= PAIRS_MIN;
    let bounds = if enough { confidence(&all, alpha) } else { Bounds::default() };
    let effect = Effect::new(estimate(&all), bounds);
    let overall = overall(reports.iter().map(|report| report.overall));
    let (verdict, why) = match failed(reports) {
        Some((verdict, at)) => (verdict, format!("report {}: {}", at + 1, reports[at].why)),
        None => conclude(reports, all.len(), &decision, alpha, overall),
    };
    let is_inflated = reports.iter().any(|report| report.decided_early);
    Ok(Combined {
        metric: first.plan.metric,
        a: first.a.source.name.clone(),
        b: first.b.source.name.clone(),
        reports: reports.len(),
        pairs: all.len(),
        alpha,
        verdict,
        why,
        e_value: betting.ln_e_max().exp().min(1e12),
        overall: overall.map(|(ln, bounds)| Effect::new(ln, bounds)),
        effect,
        caveats: is_inflated.then(|| INFLATED.to_owned()).into_iter().collect(),
    })
}

/// The verdict, and the report that it is of, if one test ended in a way that no other can make good.
fn failed(reports: &[Report]) -> Option<(Verdict, usize)> {
    let find = |verdict: Verdict, reasons: &[Reason]| {
        let is_so = |report: &Report| {
            let reason = report.ended.as_ref().map(|ended| ended.reason);
            report.verdict == verdict
                && (reasons.is_empty() || reason.is_some_and(|reason| reasons.contains(&reason)))
        };
        reports.iter().position(is_so).map(|at| (verdict, at))
    };
    find(Verdict::Withdrawn, &[])
        .or_else(|| find(Verdict::KeepA, &KEEP))
        .or_else(|| find(Verdict::Invalid, &[]))
}

/// What more best-effort work costs requests on all GPUs; `None` if that is as little as it must be.
fn cost(reports: &[Report]) -> Option<(Verdict, &'static str)> {
    let matter = || {
        reports
            .iter()
            .filter_map(|report| Some((report, cost::allowed_of(&report.plan, &report.blocks)?)))
    };
    let allowed = matter().map(|(_, allowed)| allowed).reduce(f64::min)?.ln();
    let slow = matter().map(|(report, _)| cost::slow_blocks(&report.blocks));
    let slow = slow.fold([0; 2], |sum, slow| [sum[0] + slow[0], sum[1] + slow[1]]);
    let Some((ln, bounds)) = overall(matter().map(|(report, _)| report.tail)) else {
        return Some((Verdict::Undecided, "but has too few requests to show what that costs them"));
    };
    if ln > allowed && bounds.low.is_some_and(|low| low > 0.0) {
        return Some((Verdict::KeepA, "but all requests take longer than that may cost"));
    }
    let high = bounds.high.map(|high| ln + ONE_SIDED * (high - ln));
    let is_low = high.is_some_and(|high| high < allowed) && !is_more_than_chance(slow);
    (!is_low).then_some((Verdict::Undecided, "but that its requests are not slower is not shown"))
}

/// Whether B has more slow blocks than chance explains, as for one test.
fn is_rarely_slow(reports: &[Report]) -> bool {
    let sum = |of: fn(&Report) -> usize| reports.iter().map(of).sum();
    is_more_than_chance([sum(|report| report.a.blocks_slow), sum(|report| report.b.blocks_slow)])
}

/// Blocks that are needed in all before B is preferred.
fn blocks_needed(reports: &[Report]) -> usize {
    let of_requests = |report: &&Report| {
        report.plan.metric != Metric::BeThroughput
            || cost::allowed_of(&report.plan, &report.blocks).is_some()
    };
    let needed = reports.iter().filter(of_requests).map(|report| report.plan.blocks_min_better);
    needed.max().unwrap_or(0) as usize
}

fn conclude(
    reports: &[Report],
    pairs: usize,
    decision: &Betting,
    alpha: f64,
    overall: Option<(f64, Bounds)>,
) -> (Verdict, String) {
    let plan = &reports[0].plan;
    let (metric, margin) = (plan.metric, plan.margin.ln_1p());
    let Some(is_higher) = decision.rejected_for_more(alpha) else {
        return (Verdict::Undecided, format!("no difference on {metric} is shown"));
    };
    if is_higher == metric.lower_is_better() {
        return (Verdict::KeepA, format!("B is worse on {metric}, block by block"));
    }
    // What more work costs requests is looked at over all reports: a short test alone says little of that.
    let is_kept =
        |report: &Report| report.verdict == Verdict::KeepA && metric != Metric::BeThroughput;
    if let Some(at) = reports.iter().position(is_kept) {
        return (Verdict::KeepA, format!("report {}: {}", at + 1, reports[at].why));
    }
    let undecided =
        |why: String| (Verdict::Undecided, format!("B is better in most blocks; {why}"));
    let (seen, needed) = (2 * pairs, blocks_needed(reports));
    if seen < needed {
        return undecided(format!("{needed} blocks are needed, not {seen}"));
    }
    if is_rarely_slow(reports) {
        return undecided("but more of its blocks than of A's were slow".into());
    }
    let Some((ln, bounds)) = overall else {
        return undecided("a report has too few requests for an overall figure".into());
    };
    for (at, report) in reports.iter().enumerate() {
        let lost = |load: &SampleRatio| load.mismatch && load.b_per_s < load.a_per_s;
        if let Some((unit, _)) = report.ratios().find(|(_, load)| lost(load)) {
            let units = unit.plural();
            let why = format!(
                "report {}: B served fewer {units} than A: its figures are those of another load",
                at + 1
            );
            return (Verdict::Invalid, why);
        }
    }
    let sign = if metric.lower_is_better() { 1.0 } else { -1.0 };
    let (worst, best) = match sign > 0.0 {
        true => (bounds.high, bounds.low),
        false => (bounds.low, bounds.high),
    };
    // That B is not much worse is asked to one side only.
    let surely = |worst: f64| ln + ONE_SIDED * (worst - ln);
    let most = OVERALL_MARGIN.ln_1p().max(margin);
    let well = worst.is_some_and(|worst| sign * surely(worst) < most);
    let why = format!("B is better on {metric}, block by block");
    if best.is_some_and(|best| sign * best > margin) {
        return (Verdict::KeepA, format!("{why}, but worse over all requests"));
    }
    if sign * ln > margin || !well {
        return (Verdict::Undecided, format!("{why}; not sure enough over all requests"));
    }
    match cost(reports) {
        Some((verdict, but)) => (verdict, format!("{why}, {but}")),
        None => (Verdict::PromoteB, format!("{why} and over all requests")),
    }
}

#[cfg(test)]
#[path = "combine_tests.rs"]
mod tests;
