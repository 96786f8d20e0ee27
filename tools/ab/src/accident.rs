//! How likely a B as good as A breaches a guard by accident: told when the test begins, from requests before it, and from
//! its first pair on, from A's requests in it.

use crate::design::{Arm, Plan};
use crate::experiment::{Experiment, Reason};
use crate::guard::{Guard, RELATIVE_ALPHA, Traffic};
use crate::metric::Metric;
use crate::overall::Part;
use crate::tail::Pool;
use serde::{Deserialize, Deserializer, Serialize};

/// Requests before the test without which nothing is said.
const BEFORE_MIN: u64 = 100;
/// By how much requests of the same policy may be slower at times.
const SLOWER_AT_TIMES: f64 = 1.2;
/// A guard whose chance of an accidental breach is above this is told.
const ACCIDENT_TOLD: f64 = 0.05;
/// A guard's limit below so many times A's own figure is near: A may breach it at times that were not seen.
const NEAR: f64 = 10.0;
/// Requests beyond a percentile from which it is known well enough for that.
const BEYOND_MIN: f64 = 10.0;

/// A guard, and how likely a policy as good as A breaches it by accident.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GuardReport {
    pub guard: String,
    /// In the whole test, at most; `null` if it is not known.
    #[serde(deserialize_with = "required")]
    pub accident: Option<f64>,
}

/// `null` is read; a missing field is an error.
fn required<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    Option::deserialize(from)
}

impl GuardReport {
    /// What people are to be told, if an accident is likely.
    pub fn warning(&self) -> Option<String> {
        let chance = self.accident.filter(|chance| *chance > ACCIDENT_TOLD)?;
        Some(format!(
            "guard {}: a B as good as A breaches it by accident in up to {:.0} % of such tests",
            self.guard,
            chance * 100.0
        ))
    }
}

/// High-priority requests of some minutes before the test.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Before {
    pub requests: u64,
    /// Requests a second.
    pub per_s: f64,
    /// Requests a second that took longer than each of [`limits_ns`].
    pub over_per_s: Vec<f64>,
}

/// A limit for requests that are all slower at times, ns.
fn slower(ns: u64) -> u64 {
    (ns as f64 / SLOWER_AT_TIMES) as u64
}

/// For each guard: the time that requests before the test are to be counted against, ns.
pub fn limits_ns(plan: &Plan) -> Vec<u64> {
    plan.guards
        .iter()
        .map(|guard| guard.quantile().map_or(u64::MAX, |(_, ns)| slower(ns)))
        .collect()
}

/// What is known when the test begins.
pub(crate) fn guards_before(plan: &Plan, before: &Before) -> Vec<GuardReport> {
    let of_guard = |(at, guard): (usize, &Guard)| {
        let over_per_s = before.over_per_s.get(at).filter(|_| before.requests >= BEFORE_MIN);
        let known = guard.quantile().zip(over_per_s);
        let accident = match guard.is_relative() {
            true => Some(RELATIVE_ALPHA),
            false => known.map(|((share, _), over)| independent(plan, share, before.per_s, *over)),
        };
        GuardReport { guard: guard.to_string(), accident }
    };
    plan.guards.iter().enumerate().map(of_guard).collect()
}

/// Chance of a breach if requests come independently, so many a second, of which so many are over the limit.
fn independent(plan: &Plan, share: f64, per_s: f64, over_per_s: f64) -> f64 {
    let traffic = Traffic {
        rate: per_s,
        over: over_per_s / per_s.max(1e-9),
        window_s: plan.guard_window_ns as f64 / 1e9,
        watched_s: plan.time_ns_max as f64 / 2e9,
    };
    traffic.accident_of(share)
}

/// How likely a B whose requests are A's breaches each guard on a time.
pub(crate) fn guards(experiment: &Experiment) -> Vec<GuardReport> {
    let plan = experiment.plan();
    let of_a = || experiment.blocks().iter().filter(|block| block.arm == Arm::A);
    let seconds: f64 = of_a().map(|block| block.measured_s).sum();
    let parts = experiment.parts(Metric::HpP99);
    let pool = Pool::of(parts.iter().filter_map(|(a, _)| match a {
        Part::Requests(tail) => Some(tail),
        Part::Sums(..) => None,
    }));
    let watched_s = plan.time_ns_max as f64 / 2e9;
    let independent = |(share, ns): (f64, u64)| {
        let (requests, over) = (pool.requests(), pool.over(slower(ns)));
        let per_s = |requests: u64| requests as f64 / seconds.max(1e-9);
        (requests > 0).then(|| independent(plan, share, per_s(requests), per_s(over)))
    };
    let is_breached = experiment.ended().is_some_and(|ended| ended.reason == Reason::Guard);
    // A breach that A would have as often as once in a third of the time that it was seen is missed in 5 % of tests.
    let unseen = |(share, ns): (f64, u64)| {
        let of_a_ns = pool.quantile_ns(share);
        let is_rough = pool.requests() as f64 * (1.0 - share) < BEYOND_MIN;
        let is_near = is_rough || of_a_ns.is_none_or(|of_a_ns| (ns as f64) < NEAR * of_a_ns);
        (is_breached && is_near).then(|| 1.0 - (-3.0 * watched_s / seconds.max(1e-9)).exp())
    };
    let of_guard = |(at, guard): (usize, &Guard)| {
        let unseen = guard.quantile().and_then(unseen);
        let seen = experiment.shadow().accident(at, watched_s);
        let independent = guard.quantile().and_then(independent);
        let accident = match guard.is_relative() {
            true => Some(RELATIVE_ALPHA),
            false => seen.into_iter().chain(independent).chain(unseen).reduce(f64::max),
        };
        GuardReport { guard: guard.to_string(), accident }
    };
    plan.guards.iter().enumerate().map(of_guard).collect()
}
