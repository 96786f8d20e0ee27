//! Guards: limits that B must keep, looked at over the last stretch of its time.
//!
//! A guard is `METRIC<LIMIT` or `METRIC>LIMIT`, in the direction that protects:
//!
//! | metric | means | breached when, in the window |
//! | --- | --- | --- |
//! | `hp_p50<8ms`, `hp_p99<8ms`, `hp_p999<8ms` | high-priority requests' times | more than 50 %, 1 %, 0.1 % of the requests, and at least two, took longer; each one still under way counts as soon as it is too old; one that lasts as long as the window or the measured part of a block is enough by itself |
//! | `hp_p99<1.2*A` (also `hp_p50`, `hp_p999`) | the same, relative to A's | pairs of blocks show that B's is higher: see [`Relative`] |
//! | `slo_attainment>95%` | share of requests within the objective | it is less, of at least 20 requests |
//! | `be_throughput>20%`, `>200ms/s` | best-effort work, GPU time a second | it is less, once the window is full |
//!
//! A guard with a limit of its own protects users; it is no test: it has no level, and a breach
//! proves nothing but that the limit was not kept. One relative to A is a test.

use crate::betting::Betting;
use crate::sample::Sample;
use crate::units::{parse_ns, time};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Requests without which a share says nothing.
const SHARE_REQUESTS_MIN: u64 = 20;
/// One slow request is an accident.
const SLOW_REQUESTS_MIN: u64 = 2;
/// Percentiles from this one on are of the tail.
const TAIL_SHARE: f64 = 0.99;
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

    /// For a guard relative to A: the share, and so many times A's time.
    fn times_a(&self) -> Option<(f64, f64)> {
        match self.limit {
            Limit::TimesA { share, times } => Some((share, times)),
            _ => None,
        }
    }

    /// Whether it is relative to A.
    pub fn is_relative(&self) -> bool {
        self.times_a().is_some()
    }

    /// Whether it says how long all but a few requests may take, whatever A's take.
    pub fn is_on_tail(&self) -> bool {
        match self.limit {
            Limit::Quantile { share, .. } => share >= TAIL_SHARE,
            Limit::Slo(_) => true,
            Limit::TimesA { .. } | Limit::Work(_) => false,
        }
    }

    /// For a guard on the tail that is relative to A: so many times A's time.
    pub fn times_a_of_tail(&self) -> Option<f64> {
        self.times_a().filter(|(share, _)| *share >= TAIL_SHARE).map(|(_, times)| times)
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

/// Level of a relative guard: the chance of an accidental breach in a whole test.
pub const RELATIVE_ALPHA: f64 = 0.05;

/// A guard relative to A. Load that comes in bursts makes either arm's requests slow, so what B's
/// do in a window says nothing of B; that the block which had the slow ones was B's is a coin's
/// chance. So pairs of blocks are bet on as in the test itself ([`crate::betting`]), with the
/// factor taken out: a B whose figures are A's, or up to so many times, breaches at most at the
/// level, whatever the noise. At least eight pairs must agree.
#[derive(Clone, Debug)]
pub struct Relative {
    guard: Guard,
    share: f64,
    times: f64,
    betting: Betting,
    /// Pairs, and logarithms of B's figure over A's summed over them.
    pairs: u32,
    sum: f64,
}

impl Relative {
    /// Those of these guards that are.
    pub fn all(guards: &[Guard]) -> Vec<Relative> {
        let relative = guards.iter().filter_map(|guard| {
            let (share, times) = guard.times_a()?;
            let (guard, betting) = (guard.clone(), Betting::new());
            Some(Relative { guard, share, times, betting, pairs: 0, sum: 0.0 })
        });
        relative.collect()
    }

    /// A pair's blocks. How it is breached, if it is.
    pub fn push(&mut self, a: &Sample, b: &Sample) -> Option<String> {
        let of = |sample: &Sample| sample.quantile_ns(self.share).map(|ns| (ns as f64).ln());
        let difference = of(b)? - of(a)?;
        self.pairs += 1;
        self.sum += difference;
        self.betting.push(difference - self.times.ln());
        (self.betting.rejects(RELATIVE_ALPHA) && self.betting.is_higher()).then(|| {
            format!(
                "{}: in {} pairs of blocks it was {:.2} times A's on average",
                self.guard,
                self.pairs,
                (self.sum / f64::from(self.pairs)).exp()
            )
        })
    }
}

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
    pieces: VecDeque<Piece>,
    sum: Piece,
}

impl Window {
    /// A window of this length, ns, in which nothing has been seen.
    pub fn new(guards: Vec<Guard>, slo_ns: Option<u64>, length_ns: u64) -> Self {
        let (pieces, sum) = (VecDeque::new(), Piece::default());
        Window { guards, slo_ns, length_ns, stuck_ns: length_ns, pieces, sum }
    }

    /// A block begins that is measured for so long.
    pub fn block_is(&mut self, measured_ns: u64) {
        self.stuck_ns = self.length_ns.min(measured_ns);
    }

    /// Forget what was seen; the guards stay.
    fn clear(&mut self) {
        self.pieces.clear();
        self.sum = Piece::default();
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
            over: self
                .guards
                .iter()
                .map(|guard| guard.quantile().map_or(0, |(_, ns)| over(ns)))
                .collect(),
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
            // Not a window's: see `Relative`.
            Limit::TimesA { .. } => None,
            Limit::Quantile { share, ns } => {
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
                (over >= SLOW_REQUESTS_MIN && over as f64 > allowed).then(|| {
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

/// How often A itself would have breached each guard: what B may be blamed for that is not B's.
#[derive(Clone, Debug)]
pub struct Shadow {
    each: Vec<(Window, u32)>,
    observed_ns: u64,
}

impl Shadow {
    pub fn new(guards: &[Guard], slo_ns: Option<u64>, length_ns: u64) -> Self {
        let window = |guard: &Guard| (Window::new(vec![guard.clone()], slo_ns, length_ns), 0);
        Shadow { each: guards.iter().map(window).collect(), observed_ns: 0 }
    }

    /// What was measured of A. A breach counts, and the window begins again.
    pub fn add(&mut self, sample: &Sample) {
        self.observed_ns += sample.span_ns();
        for (window, breaches) in &mut self.each {
            if window.add(Heard { sample: Some(sample), ..Heard::default() }).is_some() {
                *breaches += 1;
                window.clear();
            }
        }
    }

    /// Chance that a B like A breaches this guard in so much time; `None` if A never did.
    pub fn accident(&self, at: usize, watched_s: f64) -> Option<f64> {
        let (breaches, observed_s) = (self.each.get(at)?.1, self.observed_ns as f64 / 1e9);
        let expected = f64::from(breaches) / observed_s.max(1e-9) * watched_s;
        (breaches > 0).then(|| -(-expected).exp_m1())
    }
}

#[cfg(test)]
#[path = "guard_tests.rs"]
mod tests;
