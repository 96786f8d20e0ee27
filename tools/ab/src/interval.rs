//! The effect and its bounds, all on the logarithmic scale: a ratio is `exp` of them.
//!
//! Two intervals are given, for two questions:
//!
//! - [`confidence`]: if B multiplies every block's outcome by one ratio `r`, then with `r`
//!   taken out B makes no difference; the ratios that the exact test of [`crate::betting`]
//!   has never rejected contain `r`, at all times at once, with a chance of at least
//!   1 - alpha, whatever the noise. (Inverting a randomisation test, as Hodges and Lehmann,
//!   Ann. Math. Stat. 34(2), 1963, do with ranks.)
//! - [`asymptotic`]: the mean of the pairs' differences, whether or not the ratio is the same
//!   throughout, by the confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas
//!   (Time-uniform central limit theory and asymptotic confidence sequences, Ann. Statist.
//!   52(6), 2024, theorem 2.2). It holds for many pairs, of finite variance and not too
//!   correlated; heavy tails make it wide.

use crate::betting::Betting;

/// Ratios tried on each side before halving.
const STEPS: u32 = 40;
/// Halvings between two of them.
const HALVINGS: u32 = 24;
/// The asymptotic sequence is tightest near so many pairs.
const PAIRS_BEST: f64 = 50.0;

/// An interval; `None` is no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bounds {
    pub low: Option<f64>,
    pub high: Option<f64>,
}

/// Whether the test ever rejected an effect of `shift`.
pub fn rejects(differences: &[f64], shift: f64, alpha: f64) -> bool {
    let mut betting = Betting::new();
    for d in differences {
        betting.push(d - shift);
        if betting.rejects(alpha) {
            return true;
        }
    }
    false
}

/// Hodges' and Lehmann's estimate of the effect: with it taken out, the signed ranks of
/// what is left sum to 0. 0 without any pair.
pub fn estimate(differences: &[f64]) -> f64 {
    let mut low = differences.iter().copied().fold(f64::INFINITY, f64::min);
    let mut high = differences.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if differences.is_empty() {
        return 0.0;
    }
    let mut left: Vec<f64> = Vec::with_capacity(differences.len());
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        left.clear();
        left.extend(differences.iter().map(|d| d - middle));
        left.sort_unstable_by(|a, b| a.abs().total_cmp(&b.abs()));
        let signed_ranks: f64 = left
            .iter()
            .enumerate()
            .map(|(rank, d)| (rank + 1) as f64 * if *d == 0.0 { 0.0 } else { d.signum() })
            .sum();
        if signed_ranks > 0.0 {
            low = middle;
        } else {
            high = middle;
        }
    }
    f64::midpoint(low, high)
}

/// The smallest interval that holds all effects that were never rejected.
pub fn confidence(differences: &[f64], alpha: f64) -> Bounds {
    not_rejected(differences, |shift| rejects(differences, shift, alpha))
}

/// The smallest interval that holds all effects that `rejects` does not, searched around
/// these differences.
pub(crate) fn not_rejected(differences: &[f64], rejects: impl Fn(f64) -> bool) -> Bounds {
    let centre = estimate(differences);
    let far = differences.iter().map(|d| (d - centre).abs()).fold(1e-9, f64::max) * 1.5;
    let side = |sign: f64| {
        let at = |distance: f64| centre + sign * distance;
        let rejected = |distance: f64| rejects(at(distance));
        if !rejected(far) {
            return None;
        }
        let step = |k: u32| far * (1.0 - f64::from(k) / f64::from(STEPS)).powi(2);
        // From outside, because what is not rejected may have holes.
        let inside = (1..=STEPS).find(|k| !rejected(step(*k)));
        let Some(k) = inside else { return Some(centre) };
        let (mut accepted, mut outside) = (step(k), step(k - 1));
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(accepted, outside);
            if rejected(middle) {
                outside = middle;
            } else {
                accepted = middle;
            }
        }
        Some(at(outside))
    };
    Bounds { low: side(-1.0), high: side(1.0) }
}

/// Mean, and its asymptotic confidence sequence after these pairs; no bounds for
/// fewer than two.
pub fn asymptotic(differences: &[f64], alpha: f64) -> (f64, Bounds) {
    let n = differences.len() as f64;
    if differences.len() < 2 {
        return (differences.first().copied().unwrap_or(0.0), Bounds::default());
    }
    let mean = differences.iter().sum::<f64>() / n;
    let variance = differences.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let two_sided = -2.0 * alpha.ln();
    let rho2 = (two_sided + (two_sided + 1.0).ln()) / PAIRS_BEST;
    let width = (variance * 2.0 * (n * rho2 + 1.0) / (n * n * rho2)
        * ((n * rho2 + 1.0).sqrt() / alpha).ln())
    .sqrt();
    (mean, Bounds { low: Some(mean - width), high: Some(mean + width) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_estimate_is_the_median_of_the_walsh_averages() {
        let differences = [0.3, -0.1, 0.7, 0.2, 5.0];
        let mut walsh: Vec<f64> = (0..5)
            .flat_map(|i| (i..5).map(move |j| (differences[i] + differences[j]) / 2.0))
            .collect();
        walsh.sort_by(f64::total_cmp);
        assert!((estimate(&differences) - walsh[7]).abs() < 0.05, "{walsh:?}");
        assert_eq!(estimate(&[]), 0.0);
    }

    #[test]
    fn few_pairs_bound_nothing_and_more_bound_more() {
        let noisy = |n: usize| -> Vec<f64> {
            (0..n).map(|i| 0.1 + 0.05 * ((i * 7) % 11) as f64 / 5.0 - 0.05).collect()
        };
        assert_eq!(confidence(&noisy(5), 0.05), Bounds::default());
        let width = |n| {
            let Bounds { low: Some(low), high: Some(high) } = confidence(&noisy(n), 0.05) else {
                panic!("no bounds after {n} pairs")
            };
            assert!(low < 0.1 && 0.1 < high, "{low} {high}");
            high - low
        };
        assert!(width(80) < width(20));
    }

    proptest! {
        /// What the interval leaves out, the test rejects; its inside holds the estimate.
        #[test]
        fn the_interval_is_the_tests(
            differences in proptest::collection::vec(-2.0..2.0f64, 10..60), beyond in 0.01..1.0f64,
        ) {
            let bounds = confidence(&differences, 0.05);
            let centre = estimate(&differences);
            if let Some(high) = bounds.high {
                prop_assert!(high >= centre);
                prop_assert!(rejects(&differences, high + 1e-9, 0.05));
            }
            if let Some(low) = bounds.low {
                prop_assert!(low <= centre);
                let moved: Vec<_> = differences.iter().map(|d| d + beyond).collect();
                let Bounds { low: Some(again), .. } = confidence(&moved, 0.05) else {
                    panic!("no bound any more")
                };
                prop_assert!((again - low - beyond).abs() < 1e-4, "{again} {low} {beyond}");
            }
        }
    }

    #[test]
    fn the_asymptotic_interval_is_the_formulas() {
        // sigma = 1, n = 50: computed by hand from the formula.
        let differences: Vec<f64> = (0..50)
            .map(|i| if i % 2 == 0 { 1.0 } else { -1.0 } * (49.0f64 / 50.0).sqrt())
            .collect();
        let (mean, bounds) = asymptotic(&differences, 0.05);
        assert!(mean.abs() < 1e-12);
        let two: f64 = -2.0 * 0.05f64.ln();
        let nrho2 = two + (two + 1.0).ln();
        let expected =
            (2.0 * (nrho2 + 1.0) / (50.0 * nrho2) * ((nrho2 + 1.0).sqrt() / 0.05).ln()).sqrt();
        assert!((bounds.high.unwrap() - expected).abs() < 1e-9);
        assert_eq!(asymptotic(&[1.0], 0.05), (1.0, Bounds::default()));
    }
}
