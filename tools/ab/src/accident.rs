//! How likely a B as good as A breaches a guard by accident: told when the test begins, from requests before it, and
//! from its first pair on, from A's requests in it, too. What was known before a breach counts: after it, all is clear.

use crate::design::{Arm, Plan};
use crate::experiment::Experiment;
use crate::guard::{Guard, RELATIVE_ALPHA, Traffic};
use crate::metric::Metric;
use crate::overall::Part;
use crate::sample::Unit;
use crate::tail::Pool;
use serde::{Deserialize, Deserializer, Serialize};

/// Requests before the test without which nothing is said.
const BEFORE_MIN: u64 = 100;
/// By how much requests of the same policy may be slower at times.
const SLOWER_AT_TIMES: f64 = 1.2;
/// A guard whose chance of an accidental breach is above this is told.
const ACCIDENT_TOLD: f64 = 0.05;
/// A guard's limit below so many times A's own figure is near: A may breach it at times that were not seen.
const NEAR: f64 = 5.0;

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
    pub per_s: f64,
    /// Requests a second that took longer than each of [`limits_ns`].
    pub over_per_s: Vec<f64>,
}

impl Before {
    /// For how long they were seen, s.
    fn seconds(&self) -> f64 {
        if self.per_s > 0.0 { self.requests as f64 / self.per_s } else { 0.0 }
    }

    /// Share of them over such a limit, if enough are known.
    fn over(&self, at: usize) -> Option<f64> {
        let over_per_s = self.over_per_s.get(at).filter(|_| self.requests >= BEFORE_MIN)?;
        Some(over_per_s / self.per_s.max(1e-9))
    }
}

/// A limit for requests that are all slower at times, ns.
fn slower(ns: u64) -> u64 {
    (ns as f64 / SLOWER_AT_TIMES) as u64
}

/// The greatest time of A's to which a limit is near, ns.
fn near(ns: u64) -> u64 {
    (ns as f64 / NEAR) as u64
}

/// For a guard on the requests' percentile with a time: share and time.
fn of_requests(guard: &Guard) -> Option<(f64, u64)> {
    let (_, share, ns) = guard.quantile().filter(|(unit, ..)| *unit == Unit::Request)?;
    Some((share, ns))
}

/// The times that requests before the test are to be counted against, ns: two for each guard.
pub fn limits_ns(plan: &Plan) -> Vec<u64> {
    let limits = plan.guards.iter().map(|guard| of_requests(guard).map(|(_, ns)| ns));
    limits.flat_map(|ns| [slower, near].map(|to| ns.map_or(u64::MAX, to))).collect()
}

/// What is known when the test begins.
pub(crate) fn guards_before(plan: &Plan, before: &Before) -> Vec<GuardReport> {
    let of_guard = |(at, guard): (usize, &Guard)| {
        let chance = |(share, _)| {
            let traffic = traffic(plan, before.per_s, before.over(2 * at)?);
            let is_near = before.over(2 * at + 1)? > 1.0 - share;
            let unseen = if is_near { unseen(plan, before.seconds()) } else { 0.0 };
            Some(traffic.accident_of(share).max(unseen))
        };
        let accident = match guard.is_relative() {
            true => Some(RELATIVE_ALPHA),
            false => of_requests(guard).and_then(chance),
        };
        GuardReport { guard: guard.to_string(), accident }
    };
    plan.guards.iter().enumerate().map(of_guard).collect()
}

/// So many requests a second, this share of them over a limit.
fn traffic(plan: &Plan, rate: f64, over: f64) -> Traffic {
    let window_s = plan.guard_window_ns as f64 / 1e9;
    Traffic { rate, over, window_s, watched_s: watched_s(plan) }
}

/// How long B is looked at, s.
fn watched_s(plan: &Plan) -> f64 {
    plan.time_ns_max as f64 / 2e9
}

/// What a breach that was not seen in so much time may still be: one that comes as often as three times in it is missed
/// in 5 % of tests.
fn unseen(plan: &Plan, seen_s: f64) -> f64 {
    1.0 - (-3.0 * watched_s(plan) / seen_s.max(1e-9)).exp()
}

/// How likely a B whose requests are A's, or those before the test, breaches each guard on a time.
pub(crate) fn guards(experiment: &Experiment) -> Vec<GuardReport> {
    let (plan, before) = (experiment.plan(), experiment.before());
    let of_a = || experiment.blocks().iter().filter(|block| block.arm == Arm::A);
    let seconds: f64 = of_a().map(|block| block.measured_s).sum();
    let pool = |metric: Metric| {
        let parts = experiment.parts(metric);
        Pool::of(parts.iter().filter_map(|(a, _)| match a {
            Part::Requests(tail) => Some(tail),
            Part::Sums(..) => None,
        }))
    };
    let is_of = |unit| plan.guards.iter().any(|g| g.quantile().is_some_and(|(of, ..)| of == unit));
    let pools = [(Unit::Request, Metric::HpP99), (Unit::Token, Metric::TokenP99)]
        .map(|(unit, metric)| if is_of(unit) { pool(metric) } else { Pool::default() });
    let chance = |(unit, share, ns): (Unit, f64, u64)| {
        // What tokens did before the test is not known.
        let before_s = if unit == Unit::Request { before.seconds() } else { 0.0 };
        let pool = &pools[unit.index()];
        let of_a_ns = pool.quantile_ns(share)?;
        let (requests, over) = (pool.requests() as f64, pool.over(slower(ns)) as f64);
        let independent =
            traffic(plan, requests / seconds.max(1e-9), over / requests).accident_of(share);
        let is_near = of_a_ns > near(ns) as f64;
        let unseen = if is_near { unseen(plan, seconds + before_s) } else { 0.0 };
        Some(independent.max(unseen))
    };
    let of_guard = |(at, mut report): (usize, GuardReport)| {
        let guard = &plan.guards[at];
        if !guard.is_relative() {
            let seen = experiment.shadow().accident(at, watched_s(plan));
            let of_a = guard.quantile().and_then(chance);
            report.accident = [report.accident, seen, of_a].into_iter().flatten().reduce(f64::max);
        }
        report
    };
    guards_before(plan, before).into_iter().enumerate().map(of_guard).collect()
}
