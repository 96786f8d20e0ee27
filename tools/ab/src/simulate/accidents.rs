//! How often a B that is the same as A breaches a guard, and whether the report says so.

use super::models::{self, Model};
use crate::design::Plan;
use crate::experiment::Reason;
use crate::metric::Metric;
use crate::report::{ArmSource, Report};
use serde::Serialize;

/// Most that may be breached without being told.
const ACCIDENTS_MAX: f64 = 0.05;
/// An absolute guard is this much above the true p99.
const ABOVE: f64 = 1.2;

/// Tests of one guard on one service.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Accidents {
    pub model: Model,
    /// As on the command line; the limit of an absolute one is of each test.
    pub guard: String,
    pub tests: u32,
    /// Share that was breached.
    pub breached: f64,
    /// Share that was breached though the report does not say that it would be.
    pub untold: f64,
    /// Mean of the chances that reports state.
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

/// Ten minutes of a B that is the same as A, under a guard; `None`: under one that is 1.2 times
/// what the p99 of all requests was in the same test without.
pub fn accidents(model: Model, guard: Option<&str>, tests: u32, seed: u64) -> Accidents {
    let arms = ["a", "b"].map(|name| ArmSource { digest: name.into(), ..ArmSource::default() });
    let (mut breached, mut untold, mut stated) = (0, 0, 0.0);
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
        let report =
            Report::new(&models::test(model, Plan { guards, ..plan }, 1.0), &arms, 0, false);
        let accident = report.guards.first().and_then(|guard| guard.accident);
        stated += accident.unwrap_or(0.0);
        if report.ended.as_ref().is_some_and(|ended| ended.reason == Reason::Guard) {
            breached += 1;
            untold += u32::from(!report.caveats.iter().any(|note| note.contains("by accident")));
        }
    }
    let share = |count: u32| f64::from(count) / f64::from(tests.max(1));
    Accidents {
        model,
        guard: guard.unwrap_or("hp_p99<1.2 times its true value").into(),
        tests,
        breached: share(breached),
        untold: share(untold),
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
    fn an_absolute_guard_that_will_be_breached_says_so() {
        for model in [Model::ColdStart, Model::BurstsInAQueue] {
            let row = accidents(model, None, 10, 3);
            assert!(row.breached >= 0.8 && row.untold <= 0.1 && row.stated > 0.5, "{row:?}");
        }
    }
}
