//! Reports of the same comparison on several GPUs, taken together.
//!
//! The pairs of all tests make one sequence, their first pairs first. Each pair was ordered by a
//! coin of its own, and whether a test goes on to a next pair depends on what came before in the
//! sequence only, so the bet of [`crate::betting`] on the whole sequence is as fair as on one
//! test, and as powerful as one test of that many pairs.

use crate::betting::Betting;
use crate::experiment::{OVERALL_MARGIN, is_more_than_chance};
use crate::interval::{Bounds, confidence, estimate};
use crate::metric::Metric;
use crate::report::{Effect, Report};
use crate::verdict::{PAIRS_MIN, Verdict};
use serde::{Deserialize, Serialize};

/// Reports that can be combined at once.
pub const REPORTS_MAX: usize = 256;

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

/// The ratios over all blocks of each test, weighted by how sure they are; `None` if a test has
/// none. A test's ratio is the middle of its bounds: percentiles of short tests jump from one
/// request to the next, and samples drawn anew even that out. Standard errors from short tests are themselves unsure, and low where a burst left A's and
/// B's requests alike, so half of each weight is that of the usual error: weighting by the errors
/// alone draws the mean towards 1. Bounds hold at about 95 %.
fn overall(reports: &[Report]) -> Option<(f64, Bounds)> {
    let mut each = Vec::with_capacity(reports.len());
    for report in reports {
        let effect = report.overall?.effect;
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
    let usual = variances[variances.len() / 2];
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
    let between = squared(&|ln, _| (ln - mean).powi(2)) * each.len() as f64 / freedom;
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
    let mut betting = Betting::new();
    all.iter().for_each(|d| betting.push(*d));
    let enough = all.len() >= PAIRS_MIN;
    let bounds = if enough { confidence(&all, alpha) } else { Bounds::default() };
    let (effect, overall) = (Effect::new(estimate(&all), bounds), overall(reports));
    let (verdict, why) = conclude(reports, all.len(), &betting, alpha, overall);
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
    })
}

/// Whether B has more slow blocks than chance explains, as for one test.
fn is_rarely_slow(reports: &[Report]) -> bool {
    let sum = |of: fn(&Report) -> usize| reports.iter().map(of).sum();
    is_more_than_chance([sum(|report| report.a.blocks_slow), sum(|report| report.b.blocks_slow)])
}

fn conclude(
    reports: &[Report],
    pairs: usize,
    betting: &Betting,
    alpha: f64,
    overall: Option<(f64, Bounds)>,
) -> (Verdict, String) {
    let plan = &reports[0].plan;
    let metric = plan.metric;
    if let Some(at) = reports.iter().position(|r| r.verdict == Verdict::Withdrawn) {
        return (Verdict::Withdrawn, format!("report {}: {}", at + 1, reports[at].why));
    }
    let sign = if metric.lower_is_better() { 1.0 } else { -1.0 };
    let needed = if metric == Metric::BeThroughput { 0 } else { plan.blocks_min_better as usize };
    match (betting.rejects(alpha), betting.is_higher() != metric.lower_is_better()) {
        (false, _) => (Verdict::Undecided, format!("no difference on {metric} is shown")),
        (true, false) => (Verdict::KeepA, format!("B is worse on {metric}, block by block")),
        (true, true) if 2 * pairs < needed => {
            let why = format!(
                "B is better in most blocks; {needed} blocks are needed, not {}",
                2 * pairs
            );
            (Verdict::Undecided, why)
        }
        (true, true) if is_rarely_slow(reports) => {
            let why = "B is better in most blocks, but more of its blocks than of A's were slow";
            (Verdict::Undecided, why.into())
        }
        (true, true) => match overall {
            Some((ln, bounds)) => {
                let worst = if sign > 0.0 { bounds.high } else { bounds.low };
                // That B is not much worse is asked to one side only.
                let surely = |worst: f64| ln + ONE_SIDED * (worst - ln);
                let well = worst.is_some_and(|w| sign * surely(w) < OVERALL_MARGIN.ln_1p());
                let why = format!("B is better on {metric}, block by block");
                let best = if sign > 0.0 { bounds.low } else { bounds.high };
                if best.is_some_and(|best| sign * best > 0.0) {
                    (Verdict::KeepA, format!("{why}, but worse over all requests"))
                } else if sign * ln <= 0.0 && well {
                    (Verdict::PromoteB, format!("{why} and over all requests"))
                } else {
                    (Verdict::Undecided, format!("{why}; not sure enough over all requests"))
                }
            }
            None => {
                (Verdict::Undecided, "a report has too few requests for an overall figure".into())
            }
        },
    }
}

#[cfg(test)]
#[path = "combine_tests.rs"]
mod tests;
