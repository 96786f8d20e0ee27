//! What a client needs: its objective, as its labels say it.

use std::fmt;

/// Label with the longest time that a request may take, as in `slo=20ms`.
pub const SLO: &str = "slo";
/// Label with the share of requests, %, that must keep it, as in `slo-percentile=99.9`.
pub const SLO_PERCENTILE: &str = "slo-percentile";
/// Label with the longest time that a token may take, as in `tpot=8ms`.
pub const TPOT: &str = "tpot";
/// What `slo-percentile` is if it is not said, %.
pub const SLO_PERCENTILE_DEFAULT: f64 = 99.0;
/// Shortest and longest time of a request that may be asked for, ns: 10 us and 10 min.
pub const SLO_NS: [u64; 2] = [10_000, 600_000_000_000];
/// Smallest and largest share of requests that may be asked for, %.
pub const SLO_PERCENTILES: [f64; 2] = [50.0, 99.99];

const TIME: &str = "a time from 10us to 600s with its unit, such as 20ms";

/// What a client needs of the requests that it serves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objective {
    /// Longest time of a request, ns.
    pub slo_ns: u64,
    /// Share of requests, %, that must keep it.
    pub percentile: f64,
}

/// Why a text says no objective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongObjective {
    /// Label that is wrong.
    pub key: &'static str,
    pub value: String,
    pub expected: &'static str,
}

impl fmt::Display for WrongObjective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={:?}: expected {}", self.key, self.value, self.expected)
    }
}

impl std::error::Error for WrongObjective {}

impl Objective {
    /// An objective of a time, ns, and a share of requests, %.
    ///
    /// # Errors
    /// The number that is out of range.
    pub fn new(slo_ns: f64, percentile: f64) -> Result<Self, WrongObjective> {
        Ok(Objective {
            slo_ns: in_range(SLO, slo_ns)?,
            percentile: slo_percentile(&percentile.to_string())?,
        })
    }

    /// What labels say; `None` without the label [`SLO`].
    ///
    /// # Errors
    /// The first label that says something else than an objective.
    pub fn of_labels<'a>(
        labels: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Option<Self>, WrongObjective> {
        let (mut slo, mut percentile) = (None, None);
        for (key, value) in labels {
            match key {
                SLO => slo = Some(slo_ns(value)?),
                SLO_PERCENTILE => percentile = Some(slo_percentile(value)?),
                _ => {}
            }
        }
        let percentile = percentile.unwrap_or(SLO_PERCENTILE_DEFAULT);
        Ok(slo.map(|slo_ns| Objective { slo_ns, percentile }))
    }
}

/// The longest time that a token may take, ns, as labels say it; `None` without the label [`TPOT`].
///
/// # Errors
/// If the label says something else than a time, or one that is out of range.
pub fn tpot_of_labels<'a>(
    labels: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<Option<u64>, WrongObjective> {
    let mut labels = labels.into_iter().filter(|(key, _)| *key == TPOT);
    labels.try_fold(None, |_, (_, value)| time_ns(TPOT, value).map(Some))
}

/// A time such as `20ms`, `1.5s` or `800us`, ns.
///
/// # Errors
/// If it is none, or out of range.
pub fn slo_ns(text: &str) -> Result<u64, WrongObjective> {
    time_ns(SLO, text)
}

/// A time in ns as one that a token may take.
///
/// # Errors
/// If it is out of range.
pub fn tpot_ns(ns: f64) -> Result<u64, WrongObjective> {
    in_range(TPOT, ns)
}

fn time_ns(key: &'static str, text: &str) -> Result<u64, WrongObjective> {
    let wrong = || WrongObjective { key, value: text.to_owned(), expected: TIME };
    let units = [("us", 1e3), ("ms", 1e6), ("s", 1e9)];
    let (number, ns) = units
        .iter()
        .find_map(|(unit, ns)| Some((text.strip_suffix(unit)?, ns)))
        .ok_or_else(wrong)?;
    let ns = number.parse::<f64>().map_err(|_| wrong())? * ns;
    in_range(key, ns).map_err(|_| wrong())
}

fn in_range(key: &'static str, ns: f64) -> Result<u64, WrongObjective> {
    // Not a number is in no range.
    let is_in_range = ns >= SLO_NS[0] as f64 && ns <= SLO_NS[1] as f64;
    let wrong = || WrongObjective { key, value: format!("{ns} ns"), expected: TIME };
    is_in_range.then(|| ns.round() as u64).ok_or_else(wrong)
}

/// A share of requests, %.
///
/// # Errors
/// If it is none, or out of range.
pub fn slo_percentile(text: &str) -> Result<f64, WrongObjective> {
    let expected = "a share of requests from 50 to 99.99 percent, such as 99";
    let wrong = || WrongObjective { key: SLO_PERCENTILE, value: text.to_owned(), expected };
    let share = text.parse::<f64>().map_err(|_| wrong())?;
    let [least, most] = SLO_PERCENTILES;
    if (least..=most).contains(&share) { Ok(share) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_say_an_objective() {
        let of =
            |labels: &[(&'static str, &'static str)]| Objective::of_labels(labels.iter().copied());
        assert_eq!(of(&[("team", "a"), ("slo-percentile", "95")]), Ok(None));
        let objective = Objective { slo_ns: 1_500_000, percentile: 99.0 };
        assert_eq!(of(&[("slo", "1.5ms")]), Ok(Some(objective)));
        let objective = Objective { slo_ns: 800_000, percentile: 99.9 };
        assert_eq!(of(&[("slo-percentile", "99.9"), ("slo", "800us")]), Ok(Some(objective)));
    }

    #[test]
    fn a_label_says_how_long_a_token_may_take() {
        let of = |labels: &[(&'static str, &'static str)]| tpot_of_labels(labels.iter().copied());
        assert_eq!(of(&[("slo", "1s")]), Ok(None));
        assert_eq!(of(&[("slo", "1s"), ("tpot", "7.5ms")]), Ok(Some(7_500_000)));
        assert_eq!(of(&[("tpot", "soon")]).unwrap_err().key, TPOT);
        assert!(tpot_ns(1.0).is_err() && tpot_ns(8e6) == Ok(8_000_000));
    }

    #[test]
    fn what_is_no_objective_is_named() {
        for text in ["", "20", "ms", "-1ms", "NaNms", "infs", "1us", "601s", "20 min"] {
            let why = slo_ns(text).unwrap_err().to_string();
            assert_eq!(
                why,
                format!(
                    "slo={text:?}: expected a time from 10us to 600s with its unit, such as 20ms"
                )
            );
        }
        for text in ["", "49.9", "100", "NaN", "99%"] {
            assert_eq!(slo_percentile(text).unwrap_err().key, SLO_PERCENTILE, "{text}");
        }
        assert_eq!((slo_ns("10us"), slo_ns("600s")), (Ok(SLO_NS[0]), Ok(SLO_NS[1])));
    }
}
