//! Guards: limits that B must keep, looked at over the last stretch of its time.
//!
//! A guard is `METRIC<LIMIT` or `METRIC>LIMIT`, in the direction that protects:
//!
//! | metric | means | breached when, in the window |
//! | --- | --- | --- |
//! | `hp_p50<8ms`, `hp_p99<8ms`, `hp_p999<8ms` | high-priority requests' times | more than 50 %, 1 %, 0.1 % of the requests, and at least two, took longer; each one still under way counts as soon as it is too old; one that lasts as long as the window or the measured part of a block is enough by itself |
//! | `token_p99<50ms` | tokens' times | likewise |
//! | `hp_p99<1.2*A` (also `hp_p50`, `hp_p999`, `token_p99`) | the same, relative to A's | pairs of blocks show that B's is higher: see [`Relative`] |
//! | `slo_attainment>95%`, `tpot_attainment>95%` | share of requests, or tokens, within the objective | it is less, of at least 20 |
//! | `be_throughput>20%`, `>200ms/s` | best-effort work, GPU time a second | it is less, once the window is full |
//! | `be_fairness>0.9` | Jain's index of best-effort clients' work: see [`crate::fairness`] | it is less in blocks of B that together are as long as the window |
//!
//! A guard with a limit of its own protects users; it is no test: it has no level, and a breach proves nothing but that
//! the limit was not kept. One relative to A is a test. A guard that saw nothing to judge has not been kept: no B is
//! promoted with it.

use crate::betting::Betting;
use crate::fairness::{Blocks, Share};
use crate::ledger::Had;
use crate::sample::{Sample, Unit};
pub use crate::traffic::Traffic;
use crate::units::{parse_ns, time};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Requests, or tokens, without which a share says nothing.
const SHARE_REQUESTS_MIN: u64 = 20;
/// One slow request is an accident.
pub(crate) const SLOW_REQUESTS_MIN: u64 = 2;
/// Percentiles from this one on are of the tail.
const TAIL_SHARE: f64 = 0.99;
/// Most bytes of a guard's text.
const BYTES_MAX: usize = 64;

/// What a guard looks at.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Limit {
    /// This share of the units must take at most `ns`.
    Quantile { unit: Unit, share: f64, ns: u64 },
    /// This share must take at most so many times as long as under A.
    TimesA { unit: Unit, share: f64, times: f64 },
    /// At least this share within the objective.
    Attained { unit: Unit, least: f64 },
    /// At least so many ns of work a second.
    Work(f64),
    /// Jain's index is at least this.
    Fair(f64),
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
    /// For a guard on a percentile with a time: of what, the share that must take at most so long, and how long, ns.
    pub fn quantile(&self) -> Option<(Unit, f64, u64)> {
        match self.limit {
            Limit::Quantile { unit, share, ns } => Some((unit, share, ns)),
            _ => None,
        }
    }

    /// Whether it is relative to A.
    pub fn is_relative(&self) -> bool {
        matches!(self.limit, Limit::TimesA { .. })
    }

    /// The units that it looks at; `None`: best-effort work.
    pub fn unit(&self) -> Option<Unit> {
        match self.limit {
            Limit::Quantile { unit, .. }
            | Limit::TimesA { unit, .. }
            | Limit::Attained { unit, .. } => Some(unit),
            Limit::Work(_) | Limit::Fair(_) => None,
        }
    }

    /// Whether it says how long all but a few requests may take, whatever A's take.
    pub fn is_on_tail(&self) -> bool {
        match self.limit {
            Limit::Quantile { unit, share, .. } => unit == Unit::Request && share >= TAIL_SHARE,
            Limit::Attained { unit, .. } => unit == Unit::Request,
            Limit::TimesA { .. } | Limit::Work(_) | Limit::Fair(_) => false,
        }
    }

    /// For a guard on the requests' tail that is relative to A: so many times A's time.
    pub fn times_a_of_tail(&self) -> Option<f64> {
        match self.limit {
            Limit::TimesA { unit: Unit::Request, share, times } if share >= TAIL_SHARE => {
                Some(times)
            }
            _ => None,
        }
    }

    /// What it needs to judge, and what B's time may have lacked.
    fn missing(&self) -> String {
        match self.limit {
            Limit::Quantile { unit, .. } | Limit::TimesA { unit, .. } => {
                format!("B served no {}", unit.plural())
            }
            Limit::Attained { unit, .. } => format!(
                "fewer than {SHARE_REQUESTS_MIN} {} with an objective ended in its window",
                unit.plural()
            ),
            Limit::Work(_) => "B did not serve as long as its window".into(),
            Limit::Fair(_) => {
                "fewer than two best-effort clients had work for whole blocks, or none of them was served".into()
            }
        }
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
    let quantile = |unit: Unit, share: f64| {
        wants('<')?;
        if let Some(times) = value.strip_suffix("*A") {
            let times: f64 = times.trim().parse().unwrap_or(f64::NAN);
            return match (1.0..=1_000.0).contains(&times) {
                true => Ok(Limit::TimesA { unit, share, times }),
                false => Err(format!("{value:?}: expected 1*A to 1000*A, as in 1.2*A")),
            };
        }
        match parse_ns(value)? {
            0 => Err("a limit of 0 cannot be kept".to_owned()),
            ns => Ok(Limit::Quantile { unit, share, ns }),
        }
    };
    let attained = |unit: Unit| {
        wants('>')?;
        percent(value).map(|least| Limit::Attained { unit, least })
    };
    match metric {
        "hp_p50" => quantile(Unit::Request, 0.5),
        "hp_p99" => quantile(Unit::Request, 0.99),
        "hp_p999" => quantile(Unit::Request, 0.999),
        "token_p99" => quantile(Unit::Token, 0.99),
        "slo_attainment" => attained(Unit::Request),
        "tpot_attainment" => attained(Unit::Token),
        "be_fairness" => {
            wants('>')?;
            let index = value.parse().ok().filter(|index| *index > 0.0 && *index < 1.0);
            index
                .map(Limit::Fair)
                .ok_or_else(|| format!("{value:?}: expected an index between 0 and 1, as in 0.9"))
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
            "{metric:?} is not a metric: expected hp_p50, hp_p99, hp_p999, token_p99, slo_attainment, \
             tpot_attainment, be_throughput or be_fairness"
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
    unit: Unit,
    share: f64,
    times: f64,
    betting: Betting,
    /// Pairs, and logarithms of B's figure over A's summed over them.
    /// Pairs of blocks that ended, and those of them that both had units.
    pairs_seen: u32,
    pairs: u32,
    sum: f64,
}

impl Relative {
    /// Those of these guards that are.
    pub fn all(guards: &[Guard]) -> Vec<Relative> {
        let relative = guards.iter().filter_map(|guard| {
            let Limit::TimesA { unit, share, times } = guard.limit else { return None };
            let (guard, betting) = (guard.clone(), Betting::new());
            Some(Relative { guard, unit, share, times, betting, pairs_seen: 0, pairs: 0, sum: 0.0 })
        });
        relative.collect()
    }

    /// A pair's blocks. How it is breached, if it is.
    pub fn push(&mut self, a: &Sample, b: &Sample) -> Option<String> {
        let of = |sample: &Sample| {
            sample.of(self.unit).quantile_ns(self.share).map(|ns| (ns as f64).ln())
        };
        self.pairs_seen += 1;
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

    /// If fewer than half of the pairs had anything to judge: what was missing.
    pub fn unjudged(&self) -> Option<String> {
        (self.pairs == 0 || 2 * self.pairs < self.pairs_seen).then(|| unjudged(&self.guard))
    }
}

fn unjudged(guard: &Guard) -> String {
    format!("guard {guard} has judged nothing, or too little: {}", guard.missing())
}

/// What guards need of a stretch of time.
#[derive(Clone, Debug, Default)]
struct Piece {
    span_ns: u64,
    work_ns: u64,
    /// For each guard: units that it judges, and those that took too long.
    units: Vec<(u64, u64)>,
}

impl Piece {
    fn add(&mut self, other: &Piece, times: impl Fn(u64, u64) -> u64) {
        self.span_ns = times(self.span_ns, other.span_ns);
        self.work_ns = times(self.work_ns, other.work_ns);
        self.units.resize(other.units.len(), (0, 0));
        for (sum, units) in self.units.iter_mut().zip(&other.units) {
            *sum = (times(sum.0, units.0), times(sum.1, units.1));
        }
    }
}

/// Units of one kind, beside those of a sample.
#[derive(Clone, Debug, Default)]
pub struct Beyond {
    /// B's part of those that ended after a cut.
    pub carried: Vec<Had>,
    /// B's part of every one under way.
    pub open: Vec<Had>,
}

/// What was heard of B since the last time.
#[derive(Clone, Debug, Default)]
pub struct Heard<'a> {
    /// What was measured, if B serves.
    pub sample: Option<&'a Sample>,
    /// For each [`Unit`].
    pub beyond: [Beyond; 2],
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
    /// Which guards have had anything to judge.
    judged: Vec<bool>,
    blocks: Blocks,
}

impl Window {
    /// A window of this length, ns, in which nothing has been seen.
    pub fn new(guards: Vec<Guard>, slo_ns: Option<u64>, length_ns: u64) -> Self {
        let (pieces, sum, blocks) = (VecDeque::new(), Piece::default(), Blocks::default());
        let judged = vec![false; guards.len()];
        Window { guards, slo_ns, length_ns, stuck_ns: length_ns, pieces, sum, judged, blocks }
    }

    /// A block begins that is measured for so long.
    pub fn block_is(&mut self, measured_ns: u64) {
        self.stuck_ns = self.length_ns.min(measured_ns);
    }

    /// Forget what was seen; the guards stay.
    fn clear(&mut self) {
        self.pieces.clear();
        (self.sum, self.blocks) = (Piece::default(), Blocks::default());
    }

    /// Guards that have had nothing to judge so far, and what was missing.
    pub fn unjudged(&self) -> impl Iterator<Item = String> + '_ {
        let each = self.guards.iter().zip(&self.judged);
        // Those relative to A are not a window's.
        each.filter(|(guard, judged)| !**judged && !guard.is_relative())
            .map(|(guard, _)| unjudged(guard))
    }

    /// A block has ended in which best-effort clients did so much. The guard that is breached, if one is, and how.
    pub fn block_ended(&mut self, shares: &[Share], span_ns: u64) -> Option<String> {
        if !self.guards.iter().any(|guard| matches!(guard.limit, Limit::Fair(_))) {
            return None;
        }
        let index = self.blocks.push(shares, span_ns, self.length_ns)?;
        let mut breach = None;
        for (guard, judged) in self.guards.iter().zip(&mut self.judged) {
            let Limit::Fair(least) = guard.limit else { continue };
            *judged = true;
            if index < least && breach.is_none() {
                breach = Some(format!(
                    "{guard}: the index of the best-effort clients that had work, or would have under A, was {index:.3} under B"
                ));
            }
        }
        breach
    }

    /// By the plan's objective, or else the client's own.
    fn limit_of(&self, unit: Unit, had: &Had) -> Option<u64> {
        self.slo_ns.filter(|_| unit == Unit::Request).or(had.limit_ns)
    }

    /// Units that a guard judges, and those of them that took too long.
    fn units(&self, guard: &Guard, heard: &Heard<'_>) -> (u64, u64) {
        match guard.limit {
            Limit::Quantile { unit, ns, .. } => {
                let carried = &heard.beyond[unit.index()].carried;
                let (all, over) =
                    heard.sample.map_or((0, 0), |s| (s.of(unit).count(), s.of(unit).over(ns)));
                let longer = carried.iter().filter(|had| had.ns > ns).count() as u64;
                (all + carried.len() as u64, over + longer)
            }
            Limit::Attained { unit, .. } => {
                let slo_ns = self.slo_ns.filter(|_| unit == Unit::Request);
                let mut kept = heard.sample.map(|s| s.of(unit).kept(slo_ns)).unwrap_or_default();
                for had in &heard.beyond[unit.index()].carried {
                    let limit_ns = self.limit_of(unit, had);
                    match had.is_whole {
                        true => kept.judge(limit_ns, had.ns, 1),
                        false => kept.judge_part(limit_ns, had.ns),
                    }
                }
                (kept.judged, kept.judged - kept.within)
            }
            Limit::TimesA { .. } | Limit::Work(_) | Limit::Fair(_) => (0, 0),
        }
    }

    /// Something was heard of B. The guard that is breached, if one is, and how.
    pub fn add(&mut self, heard: Heard<'_>) -> Option<String> {
        if self.guards.is_empty() {
            return None;
        }
        let piece = Piece {
            span_ns: heard.sample.map_or(0, Sample::span_ns),
            work_ns: heard.sample.map_or(0, |sample| sample.work_ns),
            units: self.guards.iter().map(|guard| self.units(guard, &heard)).collect(),
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
        let mut breach = None;
        // Each of them, so that it is known of each whether it judged.
        for at in 0..self.guards.len() {
            let (judged, breached) = self.breach(at, &heard.beyond);
            self.judged[at] |= judged;
            breach = breach.or(breached);
        }
        breach
    }

    /// Whether a guard has anything to judge, and how it is breached, if it is.
    fn breach(&self, at: usize, beyond: &[Beyond; 2]) -> (bool, Option<String>) {
        let (guard, sum) = (&self.guards[at], &self.sum);
        let (units, over) = sum.units[at];
        let open = |unit: Unit| beyond[unit.index()].open.iter();
        match guard.limit {
            // Not a window's: see `Relative` and `Window::block_ended`.
            Limit::TimesA { .. } | Limit::Fair(_) => (false, None),
            Limit::Quantile { unit, share, ns } => {
                let oldest_ns = open(unit).map(|had| had.ns).max().unwrap_or(0);
                if oldest_ns >= self.stuck_ns.max(ns) {
                    let one = match unit {
                        Unit::Request => "request",
                        Unit::Token => "token",
                    };
                    let oldest = time(oldest_ns as f64);
                    let why = format!("{guard}: a {one} has been under way for {oldest}");
                    return (true, Some(why));
                }
                let too_old = open(unit).filter(|had| had.ns > ns).count() as u64;
                let (over, units) = (over + too_old, units + too_old);
                let allowed = (1.0 - share) * units as f64;
                let breach = (over >= SLOW_REQUESTS_MIN && over as f64 > allowed).then(|| {
                    format!(
                        "{guard}: {over} of the last {units} {} under B took longer than {}",
                        unit.plural(),
                        time(ns as f64)
                    )
                });
                (units >= SLOW_REQUESTS_MIN, breach)
            }
            Limit::Attained { unit, least } => {
                let is_too_old =
                    |had: &&Had| self.limit_of(unit, had).is_some_and(|limit_ns| had.ns > limit_ns);
                let too_old = open(unit).filter(is_too_old).count() as u64;
                let (over, units) = (over + too_old, units + too_old);
                let share = (units - over.min(units)) as f64 / units.max(1) as f64;
                let enough = units >= SHARE_REQUESTS_MIN;
                let breach = (enough && share < least).then(|| {
                    format!(
                        "{guard}: {:.1} % of the last {units} {} under B were within the objective",
                        share * 100.0,
                        unit.plural()
                    )
                });
                (enough, breach)
            }
            Limit::Work(least) => {
                let a_second = sum.work_ns as f64 * 1e9 / sum.span_ns.max(1) as f64;
                let enough = sum.span_ns >= self.length_ns;
                let breach = (enough && a_second < least).then(|| {
                    format!(
                        "{guard}: best effort did {:.1} GPU ms/s of work in the last {} under B",
                        a_second / 1e6,
                        time(sum.span_ns as f64)
                    )
                });
                (enough, breach)
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

    /// A block of A has ended.
    pub fn block_ended(&mut self, shares: &[Share], span_ns: u64) {
        for (window, breaches) in &mut self.each {
            *breaches += u32::from(window.block_ended(shares, span_ns).is_some());
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
