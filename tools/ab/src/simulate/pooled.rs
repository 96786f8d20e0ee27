//! Tests of one length on several GPUs, whose reports are combined.

use super::models::{self, Model, Times, right_verdict};
use crate::combine::{Combined, combine};
use crate::design::Plan;
use crate::metric::Metric;
use crate::report::{ArmSource, Report};
use crate::verdict::Verdict;
use serde::Serialize;

/// Lengths of tests, s.
const POOLED_S: [u64; 8] = [15, 20, 30, 45, 60, 90, 120, 180];

/// One test on each of so many GPUs.
fn once(
    model: Model,
    gpus: usize,
    seconds: u64,
    metric: Metric,
    ratio: f64,
    seed: u64,
) -> Option<Combined> {
    let arms = ["a", "b"].map(|name| ArmSource { digest: name.into(), ..ArmSource::default() });
    let reports: Vec<Report> = (0..gpus as u64)
        .map(|gpu| {
            let seed = seed.wrapping_add(gpu).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let time_ns_max = seconds * 1_000_000_000;
            let plan = Plan { seed, time_ns_max, to_end: true, ..models::plan_of(model, metric) };
            Report::new(&models::test(model, plan, ratio), &arms, 0, false)
        })
        .collect();
    combine(&reports).ok()
}

/// The shortest length at which half, and 80 %, of combined tests give the right verdict.
pub fn times(gpus: usize, metric: Metric, ratio: f64, tests: usize, seed: u64) -> Times {
    let right = right_verdict(metric, ratio);
    let (mut median_min, mut of_80_percent_min, mut wrong) = (None, None, 0);
    for seconds in POOLED_S {
        let verdicts: Vec<Verdict> = (0..tests)
            .filter_map(|number| {
                let seed = seed.wrapping_add((number * gpus) as u64);
                let all = once(Model::LoadStates, gpus, seconds, metric, ratio, seed);
                all.map(|all| all.verdict)
            })
            .collect();
        let found = verdicts.iter().filter(|verdict| **verdict == right).count();
        let decided = verdicts.iter().filter(|verdict| **verdict != Verdict::Undecided).count();
        wrong = wrong.max(decided - found);
        let minutes = seconds as f64 / 60.0;
        median_min = median_min.or((2 * found >= tests).then_some(minutes));
        of_80_percent_min = (5 * found >= 4 * tests).then_some(minutes);
        if of_80_percent_min.is_some() {
            break;
        }
    }
    let wrong = wrong as f64 / tests as f64;
    Times { gpus, metric, ratio, tests, median_min, of_80_percent_min, wrong }
}

/// What many combined tests of a minute told, of `hp_p99`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PooledRow {
    pub model: Model,
    pub gpus: usize,
    pub tests: u32,
    /// Share with any verdict but *undecided*, without a difference.
    pub decided: f64,
    /// Share whose interval holds the truth at the end: a ratio of 1.2.
    pub coverage: f64,
    /// The same of the figure over all requests.
    pub overall_coverage: f64,
}

impl PooledRow {
    /// What it breaks, if anything.
    pub fn failure(&self) -> Option<String> {
        let wrong = self.decided > models::rejected_max(self.tests)
            || self.coverage < models::coverage_min(self.tests)
            || self.overall_coverage < models::coverage_min(self.tests);
        wrong.then(|| format!("{self:?}"))
    }
}

/// Try a model so many times.
pub fn row(model: Model, gpus: usize, tests: u32, seed: u64) -> PooledRow {
    let (mut decided, mut covered, mut overall) = (0, 0, 0);
    let holds = |low: Option<f64>, high: Option<f64>| {
        low.is_none_or(|low| low <= 1.2) && high.is_none_or(|high| high >= 1.2)
    };
    for number in 0..u64::from(tests) {
        let seed = seed.wrapping_add(number * gpus as u64);
        let same = once(model, gpus, 60, Metric::HpP99, 1.0, seed);
        decided += u32::from(same.is_some_and(|all| all.verdict != Verdict::Undecided));
        if let Some(shifted) = once(model, gpus, 60, Metric::HpP99, 1.2, seed) {
            covered += u32::from(holds(shifted.effect.low, shifted.effect.high));
            let effect = shifted.overall;
            overall += u32::from(effect.is_some_and(|effect| holds(effect.low, effect.high)));
        }
    }
    let share = |count: u32| f64::from(count) / f64::from(tests.max(1));
    PooledRow {
        model,
        gpus,
        tests,
        decided: share(decided),
        coverage: share(covered),
        overall_coverage: share(overall),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests take as long as under A, and short tests alone say little of that.
    #[test]
    fn more_work_is_not_kept_out_by_the_noise_of_requests() {
        let times = times(8, Metric::BeThroughput, 1.1, 12, 5);
        assert!(times.median_min.is_some_and(|minutes| minutes <= 3.0), "{times:?}");
        assert!(times.wrong <= 0.1, "{times:?}");
    }

    /// The short form of `cargo xtask test ab`.
    #[test]
    fn eight_gpus_find_10_percent_in_a_minute_and_nothing_where_nothing_is() {
        let row = row(Model::LoadStates, 8, 12, 5);
        assert!(row.decided <= 0.2 && row.coverage >= 0.8, "{row:?}");
        let times = times(8, Metric::HpP99, 1.1, 10, 5);
        assert!(times.median_min.is_some_and(|minutes| minutes <= 1.0), "{times:?}");
    }
}
