//! How often a B that is the same as A breaches a guard, and whether that was said before.

use super::models::{self, Model};
use crate::design::Plan;
use crate::experiment::{Experiment, Reason};
use crate::metric::Metric;
use serde::Serialize;

/// Most that may be breached without being told.
const ACCIDENTS_MAX: f64 = 0.05;
/// An absolute guard is this much above the true p99.
const ABOVE: f64 = 1.2;
/// How long the core saw requests before the test, s: five to ten minutes.
const BEFORE_S: f64 = 450.0;

/// Tests of one guard on one service.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Accidents {
    pub model: Model,
    /// As on the command line; the limit of an absolute one is of each test.
    pub guard: String,
    pub tests: u32,
    /// Share of the tests in which the guard was breached.
    pub breached: f64,
    /// Share that was breached though nothing said before that it would be.
    pub untold: f64,
    /// Share in which it was said before the first block.
    pub told_at_start: f64,
    /// Mean of the chances that were stated last, before a breach if there was one.
    pub stated: f64,
}

impl Accidents {
    /// What it breaks, if anything: too many accidents of which nobody is told.
    pub fn failure(&self) -> Option<String> {
        (self.untold > ACCIDENTS_MAX).then(|| {
            format!("{self:?}: expected at most {ACCIDENTS_MAX} breached without being told")
        })
    }
}

/// Whether people have been told of the guard.
fn is_told(experiment: &Experiment) -> bool {
    experiment.accidents().iter().any(|guard| guard.warning().is_some())
}

/// Ten minutes of a B that is the same as A, under a guard; `None`: under one that is 1.2 times
/// what the p99 of all requests was in the same test without.
pub fn accidents(model: Model, guard: Option<&str>, tests: u32, seed: u64) -> Accidents {
    let (mut breached, mut untold, mut at_start, mut stated) = (0, 0, 0, 0.0);
    for number in 0..u64::from(tests) {
        let seed = seed.wrapping_add(number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let plan = Plan { seed, to_end: true, ..models::plan_of(model, Metric::HpP99) };
        let p99_ns = || {
            let overall = models::test(model, plan.clone(), 1.0).overall();
            overall.map_or(1e9, |overall| overall.a)
        };
        let absolute = || format!("hp_p99<{}us", (ABOVE * p99_ns() / 1e3) as u64);
        let text = guard.map_or_else(absolute, str::to_owned);
        let guards = text.parse().into_iter().collect();
        let plan = Plan { guards, ..plan };
        let (experiment, first) = models::test_after(model, plan, (1.0, 1.0), BEFORE_S);
        at_start += u32::from(first.iter().any(|guard| guard.warning().is_some()));
        stated += experiment.accidents().first().and_then(|guard| guard.accident).unwrap_or(0.0);
        if experiment.ended().is_some_and(|ended| ended.reason == Reason::Guard) {
            breached += 1;
            // What was known before: a breach adds nothing to it.
            untold += u32::from(!is_told(&experiment));
        }
    }
    let share = |count: u32| f64::from(count) / f64::from(tests.max(1));
    Accidents {
        model,
        guard: guard.unwrap_or("hp_p99<1.2 times its true value").into(),
        tests,
        breached: share(breached),
        untold: share(untold),
        told_at_start: share(at_start),
        stated: stated / f64::from(tests.max(1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The short form of `cargo xtask test ab`.
    #[test]
    fn a_guard_relative_to_a_is_not_breached_by_bursts() {
        for model in [Model::BurstsInAQueue, Model::ParetoInAQueue] {
            let row = accidents(model, Some("hp_p99<1.2*A"), 10, 3);
            assert!(row.breached <= 0.1, "{row:?}");
        }
    }

    #[test]
    fn an_absolute_guard_that_will_be_breached_is_told_before() {
        for model in [Model::ColdStart, Model::BurstsInAQueue, Model::LoadStates] {
            let row = accidents(model, None, 10, 3);
            assert!(row.breached >= 0.8 && row.untold <= 0.1 && row.stated > 0.5, "{row:?}");
            assert!(row.told_at_start >= 0.9, "{row:?}");
        }
        // Of times without a variance, a longer one than all before may come at any time.
        let row = accidents(Model::ParetoInAQueue, None, 60, 3);
        assert!(row.breached > 0.4 && row.untold <= 0.1 && row.failure().is_none(), "{row:?}");
    }

    /// Nulls of the guards on tokens and on fairness.
    #[test]
    fn guards_on_tokens_and_fairness_are_not_breached_by_chance() {
        for guard in ["token_p99<1.2*A", "be_fairness>0.9"] {
            for model in [Model::BurstsInAQueue, Model::ParetoInAQueue] {
                let row = accidents(model, Some(guard), 10, 3);
                assert!(row.breached <= 0.1 && row.failure().is_none(), "{row:?}");
            }
        }
    }

    #[test]
    fn a_breach_that_was_not_told_before_would_be_seen() {
        let row = accidents(Model::ColdStart, None, 1, 3);
        let why = Accidents { untold: 0.06, ..row }.failure().unwrap_or_default();
        assert!(why.contains("ColdStart"), "{why}");
    }
}
