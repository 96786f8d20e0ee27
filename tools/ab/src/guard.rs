//! Guards: limits that B must keep, looked at over the last stretch of its time.
//!
//! A guard is `METRIC<LIMIT` or `METRIC>LIMIT`, in the direction that protects:
//!
//! | metric | means | breached when, in the window |
//! | --- | --- | --- |
//! | `hp_p50<8ms`, `hp_p99<8ms`, `hp_p999<8ms` | high-priority requests' times | more than 50 %, 1 %, 0.1 % of the requests, and at least two, took longer; one still under way counts as soon as it is too old; one that lasts as long as the window is enough by itself |
//! | `slo_attainment>95%` | share of requests within the objective | it is less, of at least 20 requests |
//! | `be_throughput>20%`, `>200ms/s` | best-effort work, GPU time a second | it is less, once the window is full |
//!
//! A guard protects users; it is no test: it has no level, and a breach proves nothing but
//! that the limit was not kept.

use crate::sample::Sample;
use crate::units::{parse_ns, time};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Requests without which a share says nothing.
const SHARE_REQUESTS_MIN: u64 = 20;
/// One slow request is an accident.
const SLOW_REQUESTS_MIN: u64 = 2;
/// Longest guard read.
const BYTES_MAX: usize = 64;

/// What a guard looks at.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Limit {
    /// Of the requests, this share must take at most so long.
    Quantile { share: f64, ns: u64 },
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

/// The last stretch of B's time.
#[derive(Clone, Debug)]
pub struct Window {
    guards: Vec<Guard>,
    slo_ns: Option<u64>,
    length_ns: u64,
    pieces: VecDeque<Piece>,
    sum: Piece,
}

impl Window {
    /// An empty one.
    pub fn new(guards: Vec<Guard>, slo_ns: Option<u64>, length_ns: u64) -> Self {
        Window { guards, slo_ns, length_ns, pieces: VecDeque::new(), sum: Piece::default() }
    }

    /// Something was measured under B. The guard that is breached, if one is, and how.
    pub fn add(&mut self, sample: &Sample) -> Option<String> {
        if self.guards.is_empty() {
            return None;
        }
        let requests = sample.requests();
        let over = |guard: &Guard| match guard.limit {
            Limit::Quantile { ns, .. } => sample.over(ns),
            Limit::Slo(_) | Limit::Work(_) => 0,
        };
        let piece = Piece {
            span_ns: sample.span_ns(),
            requests,
            within_slo: requests - self.slo_ns.map_or(0, |ns| sample.over(ns)).min(requests),
            work_ns: sample.work_ns,
            over: self.guards.iter().map(over).collect(),
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
        (0..self.guards.len()).find_map(|at| self.breach(at, sample.open_ns_max))
    }

    fn breach(&self, at: usize, open_ns: u64) -> Option<String> {
        let (guard, sum) = (&self.guards[at], &self.sum);
        match guard.limit {
            Limit::Quantile { share, ns } => {
                if open_ns >= self.length_ns.max(ns) {
                    return Some(format!(
                        "{guard}: a request has been under way for {}",
                        time(open_ns as f64)
                    ));
                }
                let open = u64::from(open_ns > ns);
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
                let share = sum.within_slo as f64 / sum.requests.max(1) as f64;
                (sum.requests >= SHARE_REQUESTS_MIN && share < least).then(|| {
                    format!(
                        "{guard}: {:.1} % of the last {} requests under B were within the objective",
                        share * 100.0,
                        sum.requests
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn guard(text: &str) -> Guard {
        text.parse().unwrap()
    }

    fn window(text: &str) -> Window {
        Window::new(vec![guard(text)], Some(5_000_000), 1_000_000_000)
    }

    fn sample(fast: u64, slow: u64) -> Sample {
        let mut sample = Sample::new();
        sample.to_ns = 100_000_000;
        (0..fast).for_each(|_| sample.request(1_000_000));
        (0..slow).for_each(|_| sample.request(50_000_000));
        sample
    }

    #[test]
    fn guards_are_read_and_written_back() {
        for text in [
            "hp_p99<8ms",
            "hp_p50<900us",
            "hp_p999<1s",
            "slo_attainment>99.5%",
            "be_throughput>20%",
            "be_throughput>200ms/s",
        ] {
            assert_eq!(guard(text).to_string(), text);
            let json = serde_json::to_string(&guard(text)).unwrap();
            assert_eq!(serde_json::from_str::<Guard>(&json).unwrap(), guard(text));
        }
        assert_eq!(guard(" hp_p99 < 8ms ").to_string(), "hp_p99<8ms");
        assert_eq!(guard("be_throughput>20%").limit, guard("be_throughput>200ms/s").limit);
    }

    #[test]
    fn what_is_wrong_with_a_guard_is_said() {
        for (text, word) in [
            ("hp_p99", "METRIC<LIMIT"),
            ("", "METRIC<LIMIT"),
            ("hp_p99<=8ms", "METRIC<LIMIT"),
            ("hp_p99<", "METRIC<LIMIT"),
            ("hp_p95<8ms", "hp_p999"),
            ("hp_p99>8ms", "hp_p99<8ms"),
            ("hp_p99<8", "ns, us, ms"),
            ("hp_p99<0ms", "cannot be kept"),
            ("slo_attainment>95", "0% to 100%"),
            ("slo_attainment>120%", "0% to 100%"),
            ("slo_attainment<95%", "slo_attainment>95%"),
            ("be_throughput>fast", "200ms/s"),
        ] {
            let error = text.parse::<Guard>().unwrap_err().to_string();
            assert!(error.contains(word) && error.contains(&format!("{text:?}")), "{error}");
        }
        assert!("<".repeat(1_000).parse::<Guard>().is_err());
        assert!(serde_json::from_str::<Guard>("\"x<1\"").is_err());
    }

    proptest! {
        #[test]
        fn no_text_breaks_the_reader(text in ".{0,80}") {
            if let Ok(guard) = text.parse::<Guard>() {
                prop_assert_eq!(guard.to_string().parse::<Guard>().unwrap(), guard);
            }
        }
    }

    #[test]
    fn one_slow_request_is_an_accident_and_two_are_a_breach() {
        let mut window = window("hp_p99<8ms");
        assert_eq!(window.add(&sample(50, 1)), None);
        let breach = window.add(&sample(50, 1)).unwrap();
        assert!(breach.contains("2 of the last 102"), "{breach}");
    }

    #[test]
    fn the_share_allowed_grows_with_the_requests() {
        let mut window = window("hp_p99<8ms");
        assert_eq!(window.add(&sample(497, 3)), None, "less than 1 %");
        assert!(window.add(&sample(10, 3)).is_some());
    }

    #[test]
    fn what_is_older_than_the_window_is_forgotten() {
        let mut window = window("hp_p99<8ms");
        assert_eq!(window.add(&sample(5, 1)), None);
        for _ in 0..10 {
            assert_eq!(window.add(&sample(5, 0)), None);
        }
        assert_eq!(window.add(&sample(5, 1)), None);
        assert!(window.pieces.len() <= 11);
    }

    #[test]
    fn a_request_that_does_not_end_is_a_breach() {
        let mut window = window("hp_p99<8ms");
        let mut stuck = sample(0, 0);
        stuck.open_ns_max = 900_000_000;
        assert_eq!(window.add(&stuck), None);
        stuck.open_ns_max = 1_000_000_000;
        assert!(window.add(&stuck).unwrap().contains("under way for 1 s"));
    }

    #[test]
    fn shares_and_work_are_judged_when_there_is_enough() {
        let mut slo = window("slo_attainment>95%");
        assert_eq!(slo.add(&sample(0, 19)), None);
        assert!(slo.add(&sample(1, 0)).unwrap().contains("5.0 % of the last 20"));
        let mut work = window("be_throughput>20%");
        for _ in 0..9 {
            assert_eq!(work.add(&sample(0, 0)), None, "the window is not full");
        }
        assert!(work.add(&sample(0, 0)).unwrap().contains("0.0 GPU ms/s"));
        let mut work = window("be_throughput>20%");
        let mut busy = sample(0, 0);
        busy.work_ns = 30_000_000;
        assert!((0..30).all(|_| work.add(&busy).is_none()));
    }
}
