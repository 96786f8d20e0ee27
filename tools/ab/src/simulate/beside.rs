//! How often a figure beside the one that decides is said to differ though it does not, and whether its interval holds
//! the truth.

use super::models::{self, Model, coverage_min, rejected_max};
use crate::beside;
use crate::design::Arm;
use crate::design::Plan;
use crate::experiment::Experiment;
use crate::metric::Metric;
use crate::report::Block;
use serde::Serialize;

/// B's waits and preemptions over A's, in tests with a difference.
const TIMES: f64 = 1.3;

/// Tests of one service.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Besides {
    pub model: Model,
    pub tests: u32,
    /// Share in which any of the figures was said to differ, without a difference.
    pub rejected: f64,
    /// Share in which what best-effort launches waited, or their preemptions, were.
    pub rates_rejected: f64,
    /// Share in which the intervals of both held the truth: 1.3 times as much under B.
    pub coverage: f64,
    /// Share in which both were found to differ.
    pub found: f64,
}

impl Besides {
    /// What it breaks, if anything.
    pub fn failure(&self) -> Option<String> {
        let (most, least) = (rejected_max(self.tests), coverage_min(self.tests));
        let wrong = self.rejected > most || self.coverage < least;
        wrong.then(|| {
            format!("{self:?}: expected at most {most} rejected, coverage at least {least}")
        })
    }
}

fn leaves_out(low: Option<f64>, high: Option<f64>, truth: f64) -> bool {
    low.is_some_and(|low| low > truth) || high.is_some_and(|high| high < truth)
}

/// What B adds on average to a rate that it multiplies.
fn truth(experiment: &Experiment, rate: fn(&Block) -> u64) -> f64 {
    let without = |block: &Block| {
        let times = if block.arm == Arm::B { TIMES } else { 1.0 };
        rate(block) as f64 / block.measured_s / times
    };
    let blocks = experiment.blocks();
    (TIMES - 1.0) * blocks.iter().map(without).sum::<f64>() / blocks.len().max(1) as f64
}

/// Try a model so many times, from this seed on.
pub fn row(model: Model, tests: u32, seed: u64) -> Besides {
    let (mut rejected, mut rates_rejected, mut covered, mut found) = (0, 0, 0, 0);
    for number in 0..u64::from(tests) {
        let seed = seed.wrapping_add(number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let slo_ns = Some(models::SLO_NS);
        let plan = Plan { seed, to_end: true, slo_ns, ..models::plan_of(model, Metric::HpP99) };
        let same = models::test(model, plan.clone(), 1.0);
        let rates = beside::rates(&same);
        let any_rate = rates.iter().any(|rate| leaves_out(rate.low, rate.high, 0.0));
        let any_ratio =
            beside::all(&same).iter().any(|b| leaves_out(b.effect.low, b.effect.high, 1.0));
        rates_rejected += u32::from(any_rate);
        rejected += u32::from(any_rate || any_ratio);
        let shifted = models::test_with_waits(model, plan, 1.0, TIMES);
        let truths = [truth(&shifted, |b| b.be_waited_ns), truth(&shifted, |b| b.preemptions)];
        let rates = beside::rates(&shifted);
        let misses = |at: usize| leaves_out(rates[at].low, rates[at].high, truths[at]);
        covered += u32::from(!misses(0) && !misses(1));
        // Not fairness, which is the same.
        found += u32::from(rates[..2].iter().all(|rate| leaves_out(rate.low, rate.high, 0.0)));
    }
    let share = |count: u32| f64::from(count) / f64::from(tests.max(1));
    Besides {
        model,
        tests,
        rejected: share(rejected),
        rates_rejected: share(rates_rejected),
        coverage: share(covered),
        found: share(found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The short form of `cargo xtask test ab`.
    #[test]
    fn waits_and_preemptions_are_not_said_to_differ_unless_they_do() {
        for model in [Model::LoadStates, Model::BurstsInAQueue, Model::ParetoInAQueue] {
            let row = row(model, 20, 7);
            assert_eq!(row.failure(), None);
            // Of Pareto's times of that index the variance is infinite: its mean is found late.
            assert!(row.found > 0.3 || model == Model::ParetoInAQueue, "{row:?}");
        }
    }

    #[test]
    fn too_many_that_are_said_to_differ_would_be_seen() {
        let row = row(Model::LoadStates, 4, 7);
        for wrong in [Besides { rejected: 1.0, ..row }, Besides { coverage: 0.2, ..row }] {
            assert!(wrong.failure().is_some_and(|why| why.contains("LoadStates")), "{wrong:?}");
        }
    }
}
