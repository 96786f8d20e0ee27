//! Axes: from values to pixels, and where the ticks are.

use crate::text::clean;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use std::ops::Range;

/// Smallest value of a logarithmic axis.
const LOG_MIN: f64 = 1e-12;
const LOG_MAX: f64 = 1e12;
/// So that sums and differences of two values stay finite.
const LINEAR_MAX: f64 = 1e300;

#[derive(Clone, Debug, PartialEq)]
pub enum Scale {
    Linear,
    Log,
    /// One name at each whole number from 0 on.
    Names(Vec<String>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    pub(crate) label: String,
    pub(crate) scale: Scale,
    low: f64,
    high: f64,
}

impl Axis {
    /// From `low` to `high`; what is not a range becomes one.
    pub fn linear(label: &str, (low, high): (f64, f64)) -> Self {
        Axis::new(label, Scale::Linear, low, high)
    }

    pub fn log(label: &str, (low, high): (f64, f64)) -> Self {
        Axis::new(label, Scale::Log, low, high)
    }

    pub fn names<S: AsRef<str>>(label: &str, names: &[S]) -> Self {
        let names: Vec<String> = names.iter().map(|name| clean(name.as_ref())).collect();
        let high = names.len() as f64 - 0.5;
        Axis::new(label, Scale::Names(names), -0.5, high)
    }

    fn new(label: &str, scale: Scale, low: f64, high: f64) -> Self {
        let (least, most) = match scale {
            Scale::Log => (LOG_MIN, LOG_MAX),
            _ => (-LINEAR_MAX, LINEAR_MAX),
        };
        let inside = |value: f64, or: f64| if value.is_nan() { or } else { value };
        let low = inside(low, 0.0).clamp(least, most);
        let mut high = inside(high, low).clamp(least, most);
        if high <= low {
            high = low + low.abs().max(1.0);
        }
        Axis { label: clean(label), scale, low, high }
    }

    /// Where a value is: 0 at the low end, 1 at the high end, nothing beyond.
    fn share(&self, value: f64) -> f64 {
        let at = |v: f64| if self.scale == Scale::Log { v.max(LOG_MIN).ln() } else { v };
        let (low, high) = (at(self.low), at(self.high));
        let share = (at(value) - low) / (high - low);
        if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) }
    }

    /// Round values within the axis, at most `most` unless they are names.
    pub(crate) fn ticks(&self, most: usize) -> Vec<f64> {
        match &self.scale {
            Scale::Names(names) => (0..names.len()).map(|n| n as f64).collect(),
            Scale::Linear => linear_ticks(self.low, self.high, most),
            Scale::Log => {
                let within = |steps: &[f64]| -> Vec<f64> {
                    let all = (-12..=12).flat_map(|e| steps.iter().map(move |m| m * 10f64.powi(e)));
                    all.filter(|t| *t >= self.low * 0.999 && *t <= self.high * 1.001).collect()
                };
                let fine: [&[f64]; 3] = [&[1.0, 1.5, 2.0, 3.0, 5.0, 7.0], &[1.0, 2.0, 5.0], &[1.0]];
                let found = fine.map(within);
                let fits = found.iter().find(|ticks| (2..=most).contains(&ticks.len()));
                match fits {
                    Some(ticks) => ticks.clone(),
                    None if found[2].len() > most => {
                        found[2].iter().step_by(found[2].len().div_ceil(most)).copied().collect()
                    }
                    None => linear_ticks(self.low, self.high, most),
                }
            }
        }
    }

    pub(crate) fn tick_label(&self, value: f64) -> String {
        match &self.scale {
            Scale::Names(names) => names.get(value.round() as usize).cloned().unwrap_or_default(),
            _ => number(value),
        }
    }
}

/// At the smallest round step that leaves at most `most` of them.
fn linear_ticks(low: f64, high: f64, most: usize) -> Vec<f64> {
    let power = 10f64.powf(((high - low) / most.max(2) as f64).log10().floor());
    // Adding 0 makes 0 of -0.
    let at = |step: f64| -> Vec<f64> {
        let first = (low / step - 1e-9).ceil();
        let ticks = (0..=most).map(|n| (first + n as f64) * step + 0.0);
        ticks.take_while(|t| *t <= high + step * 1e-6).collect()
    };
    let steps = [1.0, 2.0, 5.0, 10.0, 20.0].map(|m| m * power);
    let fits = steps.into_iter().filter(|s| s.is_normal()).map(at).find(|t| t.len() <= most);
    fits.unwrap_or_else(|| vec![low, high])
}

/// With as many digits as a tick needs.
fn number(value: f64) -> String {
    let text = match value.abs() {
        0.0 => return "0".into(),
        v if !(1e-4..1e7).contains(&v) => return format!("{value:.0e}"),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    };
    if !text.contains('.') {
        return text;
    }
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The least and the greatest of those values that are finite; `or` if there are none.
pub fn range(values: impl IntoIterator<Item = f64>, or: (f64, f64)) -> (f64, f64) {
    let (low, high) = values
        .into_iter()
        .filter(|v| v.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high { or } else { (low, high) }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        from + (self.share(*value) * f64::from(to - from)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        self.ticks(hint.bold_points())
    }

    fn range(&self) -> Range<f64> {
        self.low..self.high
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        self.tick_label(*value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<String> {
        axis.ticks(6).into_iter().map(|t| axis.tick_label(t)).collect()
    }

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(labels(&Axis::linear("", (0.0, 1.05))), ["0", "0.2", "0.4", "0.6", "0.8", "1"]);
        assert_eq!(labels(&Axis::log("", (0.9, 45.0))), ["1", "2", "5", "10", "20"]);
        assert_eq!(labels(&Axis::log("", (1.0, 4000.0))), ["1", "10", "100", "1000"]);
        assert_eq!(labels(&Axis::log("", (101.0, 104.0))), ["101", "102", "103", "104"]);
        assert_eq!(labels(&Axis::names("", &["a", "b"])), ["a", "b"]);
        assert!(labels(&Axis::log("", (1e-12, 1e12))).len() <= 6);
    }

    #[test]
    fn ends_of_an_axis_are_its_pixels_and_nothing_lies_beyond() {
        let axis = Axis::log("", (1.0, 100.0));
        let all = [1.0, 10.0, 100.0, 1e9, -3.0, f64::NAN, f64::INFINITY];
        assert_eq!(all.map(|v| axis.map(&v, (0, 200))), [0, 100, 200, 200, 0, 0, 200]);
        let down = Axis::linear("", (0.0, 1.0));
        assert_eq!([0.0, 0.25, 1.0].map(|v| down.map(&v, (400, 0))), [400, 300, 0]);
    }

    #[test]
    fn what_is_no_range_becomes_one() {
        for (low, high) in [(1.0, 1.0), (5.0, 2.0), (f64::NAN, 3.0), (0.0, f64::INFINITY)] {
            for axis in [Axis::linear("", (low, high)), Axis::log("", (low, high))] {
                assert!(axis.low < axis.high && axis.high.is_finite(), "{axis:?}");
                assert!(axis.ticks(6).iter().all(|t| t.is_finite()), "{axis:?}");
            }
        }
    }
}
