//! Reports of the same comparison on several GPUs, taken together.
//!
//! Each test was ordered by its own coin, so given everything but the coins their wealths
//! are independent, each with a mean of at most 1 when it stops: so is their product (Vovk
//! and Wang, *E-values*, Ann. Statist. 49(3), 2021). Markov's inequality bounds it. Unlike
//! within one test nothing is said of how large it was earlier: this is looked at once.

use crate::betting::Betting;
use crate::design::Arm;
use crate::interval::{estimate, not_rejected};
use crate::metric::Metric;
use crate::report::{Effect, Report, Verdict};
use serde::{Deserialize, Serialize};

/// Reports at once.
pub const REPORTS_MAX: usize = 256;

/// What several reports say together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Combined {
    /// What was compared.
    pub metric: Metric,
    pub a: String,
    pub b: String,
    pub reports: usize,
    /// Pairs of blocks in all of them.
    pub pairs: usize,
    /// Level: the strictest of theirs.
    pub alpha: f64,
    /// What they say.
    pub verdict: Verdict,
    /// Product of the e-values that the tests ended with.
    pub e_value: f64,
    /// The effect, if it is one ratio on all GPUs.
    pub effect: Effect,
}

/// Why reports cannot be taken together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CombineError {
    /// Nothing to combine.
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
    /// The same order twice: the same report, or the same seed.
    #[error("reports {0} and {1} have the same seed: their order was not drawn independently")]
    Seed(usize, usize),
}

/// The logarithmic differences, as the test had them.
fn differences(report: &Report) -> Vec<f64> {
    let pairs = report.blocks.chunks_exact(2).filter(|p| p[0].arm != p[1].arm);
    pairs
        .filter(|p| {
            report.plan.metric != Metric::BeThroughput || p[0].be_launches + p[1].be_launches > 0
        })
        .filter_map(|p| {
            let (a, b) = if p[0].arm == Arm::A { (&p[0], &p[1]) } else { (&p[1], &p[0]) };
            let difference = b.value?.ln() - a.value?.ln();
            difference.is_finite().then_some(difference)
        })
        .collect()
}

fn ln_e(differences: &[f64], shift: f64) -> f64 {
    let mut betting = Betting::new();
    differences.iter().for_each(|d| betting.push(d - shift));
    betting.ln_e()
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
    let each: Vec<Vec<f64>> = reports.iter().map(differences).collect();
    let all: Vec<f64> = each.iter().flatten().copied().collect();
    let alpha = reports.iter().map(|r| r.plan.alpha).fold(f64::INFINITY, f64::min);
    let product = |shift: f64| each.iter().map(|d| ln_e(d, shift)).sum::<f64>();
    let bounds = not_rejected(&all, |shift| product(shift) >= -alpha.ln());
    let effect = Effect::new(estimate(&all), bounds);
    let ln_e = product(0.0);
    let better = (effect.ratio < 1.0) == first.plan.metric.lower_is_better();
    Ok(Combined {
        metric: first.plan.metric,
        a: first.a.source.name.clone(),
        b: first.b.source.name.clone(),
        reports: reports.len(),
        pairs: all.len(),
        alpha,
        verdict: match (ln_e >= -alpha.ln(), better) {
            (false, _) => Verdict::Undecided,
            (true, true) => Verdict::BBetter,
            (true, false) => Verdict::BWorse,
        },
        e_value: ln_e.exp().min(1e12),
        effect,
    })
}

#[cfg(test)]
#[path = "combine_tests.rs"]
mod tests;
