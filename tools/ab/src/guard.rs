//! Guards: limits that B must keep, looked at over the last stretch of its time.
//!
//! A guard is `METRIC<LIMIT` or `METRIC>LIMIT`, in the direction that protects:
//!
//! | metric | means | breached when, in the window |
//! | --- | --- | --- |
//! | `hp_p50<8ms`, `hp_p99<8ms`, `hp_p999<8ms` | high-priority requests' times | more than 50 %, 1 %, 0.1 % of the requests, and at least two, took longer; each one still under way counts as soon as it is too old; one that lasts as long as the window or the measured part of a block is enough by itself |
//! | `hp_p99<1.2*A` (also `hp_p50`, `hp_p999`) | the same, relative to A's percentile so far | more took longer than A's own tail makes likely in one of 20 tests |
//! | `slo_attainment>95%` | share of requests within the objective | it is less, of at least 20 requests |
//! | `be_throughput>20%`, `>200ms/s` | best-effort work, GPU time a second | it is less, once the window is full |
//!
//! A guard protects users; it is no test: it has no level, and a breach proves nothing but
//! that the limit was not kept.

use crate::sample::Sample;
use crate::tail::{Pool, Tail};
use crate::units::{parse_ns, time};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Requests without which a share says nothing.
const SHARE_REQUESTS_MIN: u64 = 20;
/// One slow request is an accident.
const SLOW_REQUESTS_MIN: u64 = 2;
/// Most bytes of a guard's text.
const BYTES_MAX: usize = 64;

/// What a guard looks at.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Limit {
    /// This share of the requests must take at most `ns`.
    Quantile { share: f64, ns: u64 },
    /// This share must take at most so many times as long as under A.
    TimesA { share: f64, times: f64 },
    /// At least this share within the objective.
    Slo(f64),
    /// At least so many ns of work a second.
    Work(f64),
}

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Guard {
    text: String,
    limit: Limit,
}

/// What is wrong with a guard, with what was expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("guard {guard:?}: {why}")]
pub struct GuardError {
    guard: String,
    why: String,
}

impl Guard {
    /// For a guard on a percentile with a time: the share that must take at most so long.
    pub fn quantile(&self) -> Option<(f64, u64)> {
        match self.limit {
            Limit::Quantile { share, ns } => Some((share, ns)),
            _ => None,
        }
    }

    /// Whether it needs the plan's objective.
    pub fn needs_objective(&self) -> bool {
        matches!(self.limit, Limit::Slo(_))
    }
}

fn percent(text: &str) -> Result<f64, String> {
    let expected = || format!("{text:?} is not a share: expected 0% to 100%");
    let number = text.strip_suffix('%').ok_or_else(expected)?.trim();
    let value: f64 = number.parse().map_err(|_| expected())?;
    if (0.0..=100.0).contains(&value) { Ok(value / 100.0) } else { Err(expected()) }
}

fn limit(metric: &str, sign: char, value: &str) -> Result<Limit, String> {
    let wants = |wanted: char| {
        if sign == wanted {
            return Ok(());
        }
        Err(format!("{metric} is guarded with {wanted}, as in {metric}{wanted}{value}"))
    };
    let quantile = |share: f64| {
        wants('<')?;
        if let Some(times) = value.strip_suffix("*A") {
            let times: f64 = times.trim().parse().unwrap_or(f64::NAN);
            return match (1.0..=1_000.0).contains(&times) {
                true => Ok(Limit::TimesA { share, times }),
                false => Err(format!("{value:?}: expected 1*A to 1000*A, as in 1.2*A")),
            };
        }
        match parse_ns(value)? {
            0 => Err("a limit of 0 cannot be kept".to_owned()),
            ns => Ok(Limit::Quantile { share, ns }),
        }
    };
    match metric {
        "hp_p50" => quantile(0.5),
        "hp_p99" => quantile(0.99),
        "hp_p999" => quantile(0.999),
        "slo_attainment" => {
            wants('>')?;
            percent(value).map(Limit::Slo)
        }
        "be_throughput" => {
            wants('>')?;
            match value.strip_suffix("/s") {
                Some(a_second) => Ok(Limit::Work(parse_ns(a_second)? as f64)),
                None => percent(value)
                    .map(|share| Limit::Work(share * 1e9))
                    .map_err(|why| format!("{why}, or a time a second as in 200ms/s")),
            }
        }
        _ => Err(format!(
            "{metric:?} is not a metric: expected hp_p50, hp_p99, hp_p999, slo_attainment or \
             be_throughput"
        )),
    }
}

impl std::str::FromStr for Guard {
    type Err = GuardError;

    fn from_str(text: &str) -> Result<Self, GuardError> {
        let shown: String = text.chars().take(BYTES_MAX).collect();
        let error = |why: String| GuardError { guard: shown.clone(), why };
        if text.len() > BYTES_MAX {
            return Err(error(format!("longer than {BYTES_MAX} bytes")));
        }
        let form = "expected METRIC<LIMIT or METRIC>LIMIT, as in hp_p99<8ms";
        let at = text.find(['<', '>']).ok_or_else(|| error(form.into()))?;
        let (metric, rest) = text.split_at(at);
        let (sign, value) = rest.split_at(1);
        let (metric, value) = (metric.trim(), value.trim());
        let sign = if sign == "<" { '<' } else { '>' };
        if value.is_empty() || value.starts_with('=') {
            return Err(error(form.into()));
        }
        let limit = limit(metric, sign, value).map_err(error)?;
        Ok(Guard { text: format!("{metric}{sign}{value}"), limit })
    }
}

impl TryFrom<String> for Guard {
    type Error = GuardError;
    fn try_from(text: String) -> Result<Self, GuardError> {
        text.parse()
    }
}

impl From<Guard> for String {
    fn from(guard: Guard) -> String {
        guard.text
    }
}

impl std::fmt::Display for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// Chance of one accidental breach of a relative guard in a whole test.
const ACCIDENT_MAX: f64 = 0.05;
/// A's requests beyond the percentile without which a relative guard waits.
const REFERENCE_OVER_MIN: f64 = 3.0;

/// Chance that a Poisson variable of this mean is at least `k`.
fn poisson_at_least(mean: f64, k: u64) -> f64 {
    let (mut term, mut below) = ((-mean).exp(), 0.0);
    for i in 0..k {
        below += term;
        term *= mean / (i + 1) as f64;
    }
    (1.0 - below).clamp(0.0, 1.0)
}

/// What is known of the traffic that a guard looks at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traffic {
    /// High-priority requests a second.
    pub rate: f64,
    /// Share of them over the limit.
    pub over: f64,
    /// The guard's window, s.
    pub window_s: f64,
    /// How long B is looked at, s.
    pub watched_s: f64,
}

impl Traffic {
    /// Chance that `least` or more requests over the limit ever meet in a window, if requests
    /// come independently: each one over the limit may complete such a group.
    fn accident(&self, least: u64) -> f64 {
        let chances = self.rate * self.over * self.watched_s;
        let each = poisson_at_least(self.rate * self.over * self.window_s, least.saturating_sub(1));
        -(-chances * each).exp_m1()
    }

    /// Chance that a policy whose requests are like these breaches a guard on this share.
    pub fn accident_of(&self, share: f64) -> f64 {
        let allowed = ((1.0 - share) * self.rate * self.window_s).floor() as u64;
        self.accident((allowed + 1).max(SLOW_REQUESTS_MIN))
    }
}

/// What a relative guard compares with: A's requests so far.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Reference {
    ns: u64,
    /// Number of requests over the limit in the window that are a breach.
    least: u64,
}

/// What guards need of a stretch of time.
#[derive(Clone, Debug, Default)]
struct Piece {
    span_ns: u64,
    requests: u64,
    within_slo: u64,
    work_ns: u64,
    /// Requests over each guard's time.
    over: Vec<u64>,
}

impl Piece {
    fn add(&mut self, other: &Piece, times: impl Fn(u64, u64) -> u64) {
        self.span_ns = times(self.span_ns, other.span_ns);
        self.requests = times(self.requests, other.requests);
        self.within_slo = times(self.within_slo, other.within_slo);
        self.work_ns = times(self.work_ns, other.work_ns);
        self.over.resize(other.over.len(), 0);
        for (sum, over) in self.over.iter_mut().zip(&other.over) {
            *sum = times(*sum, *over);
        }
    }
}

/// What was heard of B since the last time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heard<'a> {
    /// What was measured, if B serves.
    pub sample: Option<&'a Sample>,
    /// B's part of requests that ended after a cut, ns.
    pub carried: &'a [u64],
    /// B's part of every request under way, ns.
    pub open: &'a [u64],
}

/// The last stretch of B's time.
#[derive(Clone, Debug)]
pub struct Window {
    guards: Vec<Guard>,
    slo_ns: Option<u64>,
    length_ns: u64,
    /// A request under way for so long is a breach by itself: what a block of B can show.
    stuck_ns: u64,
    references: Vec<Option<Reference>>,
    pieces: VecDeque<Piece>,
    sum: Piece,
}

impl Window {
    /// A window of this length, ns, in which nothing has been seen.
    pub fn new(guards: Vec<Guard>, slo_ns: Option<u64>, length_ns: u64) -> Self {
        let (pieces, sum, references) =
            (VecDeque::new(), Piece::default(), vec![None; guards.len()]);
        Window { guards, slo_ns, length_ns, stuck_ns: length_ns, references, pieces, sum }
    }

    /// A block begins that is measured for so long.
    pub fn block_is(&mut self, measured_ns: u64) {
        self.stuck_ns = self.length_ns.min(measured_ns);
    }

    /// Whether any guard needs [`Window::refer`].
    pub fn is_relative(&self) -> bool {
        self.guards.iter().any(|guard| matches!(guard.limit, Limit::TimesA { .. }))
    }

    /// What A did so far: its blocks, how long each was measured, and for how long B will be looked
    /// at.
    pub fn refer(&mut self, blocks: &[Tail], block_s: f64, watched_s: f64) {
        let pool = Pool::of(blocks);
        let (requests, window_s) = (pool.requests() as f64, self.length_ns as f64 / 1e9);
        for (guard, reference) in self.guards.iter().zip(&mut self.references) {
            let Limit::TimesA { share, times } = guard.limit else { continue };
            if requests * (1.0 - share) < REFERENCE_OVER_MIN {
                continue;
            }
            let Some(quantile_ns) = pool.quantile_ns(share) else { continue };
            let ns = (quantile_ns * times) as u64;
            let traffic = Traffic {
                rate: requests / (blocks.len() as f64 * block_s).max(1e-9),
                over: (pool.over(ns) + 1) as f64 / (requests + 1.0),
                window_s,
                watched_s,
            };
            let likely = (SLOW_REQUESTS_MIN..).find(|k| traffic.accident(*k) <= ACCIDENT_MAX);
            // Slow requests of A may come in groups, too.
            let worst = blocks.iter().map(|block| block.over(ns)).max().unwrap_or(0) as f64;
            let worst = worst * (window_s / block_s).max(1.0);
            let grouped = (worst + 3.0 * worst.sqrt()) as u64 + 1;
            let least = likely.unwrap_or(u64::MAX).max(grouped);
            *reference = Some(Reference { ns, least });
        }
    }

    /// The time that a guard holds requests to, ns; `None` if it does not, or not yet.
    fn limit_ns(&self, at: usize) -> Option<u64> {
        match self.guards[at].limit {
            Limit::Quantile { ns, .. } => Some(ns),
            Limit::TimesA { .. } => self.references[at].map(|reference| reference.ns),
            Limit::Slo(_) | Limit::Work(_) => None,
        }
    }

    /// Something was heard of B. The guard that is breached, if one is, and how.
    pub fn add(&mut self, heard: Heard<'_>) -> Option<String> {
        if self.guards.is_empty() {
            return None;
        }
        let of_sample = |read: &dyn Fn(&Sample) -> u64| heard.sample.map_or(0, read);
        let longer = |ns: u64| heard.carried.iter().filter(|part| **part > ns).count() as u64;
        let over = |ns: u64| of_sample(&|sample| sample.over(ns)) + longer(ns);
        let requests = of_sample(&Sample::requests) + heard.carried.len() as u64;
        let piece = Piece {
            span_ns: of_sample(&Sample::span_ns),
            requests,
            within_slo: requests - self.slo_ns.map_or(0, over).min(requests),
            work_ns: of_sample(&|sample| sample.work_ns),
            over: (0..self.guards.len()).map(|at| self.limit_ns(at).map_or(0, over)).collect(),
        };
        self.sum.add(&piece, u64::saturating_add);
        self.pieces.push_back(piece);
        while let Some(oldest) = self.pieces.front()
            && self.sum.span_ns - oldest.span_ns.min(self.sum.span_ns) >= self.length_ns
        {
            let oldest = oldest.clone();
            self.sum.add(&oldest, u64::saturating_sub);
            self.pieces.pop_front();
        }
        (0..self.guards.len()).find_map(|at| self.breach(at, heard.open))
    }

    fn breach(&self, at: usize, open: &[u64]) -> Option<String> {
        let (guard, sum) = (&self.guards[at], &self.sum);
        let too_old = |ns: u64| open.iter().filter(|age| **age > ns).count() as u64;
        match guard.limit {
            Limit::Quantile { share, .. } | Limit::TimesA { share, .. } => {
                let ns = self.limit_ns(at)?;
                let oldest_ns = open.iter().copied().max().unwrap_or(0);
                if oldest_ns >= self.stuck_ns.max(ns) {
                    return Some(format!(
                        "{guard}: a request has been under way for {}",
                        time(oldest_ns as f64)
                    ));
                }
                let open = too_old(ns);
                let (over, requests) = (sum.over[at] + open, sum.requests + open);
                let allowed = (1.0 - share) * requests as f64;
                let least = self.references[at].map_or(SLOW_REQUESTS_MIN, |r| r.least);
                (over >= least && over as f64 > allowed).then(|| {
                    format!(
                        "{guard}: {over} of the last {requests} requests under B took longer than {}",
                        time(ns as f64)
                    )
                })
            }
            Limit::Slo(least) => {
                let open = self.slo_ns.map_or(0, too_old);
                let requests = sum.requests + open;
                let share = sum.within_slo as f64 / requests.max(1) as f64;
                (requests >= SHARE_REQUESTS_MIN && share < least).then(|| {
                    format!(
                        "{guard}: {:.1} % of the last {requests} requests under B were within the objective",
                        share * 100.0,
                    )
                })
            }
            Limit::Work(least) => {
                let a_second = sum.work_ns as f64 * 1e9 / sum.span_ns.max(1) as f64;
                (sum.span_ns >= self.length_ns && a_second < least).then(|| {
                    format!(
                        "{guard}: best effort did {:.1} GPU ms/s of work in the last {} under B",
                        a_second / 1e6,
                        time(sum.span_ns as f64)
                    )
                })
            }
        }
    }
}

#[cfg(test)]
#[path = "guard_tests.rs"]
mod tests;
