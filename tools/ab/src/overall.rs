//! An arm's figure over all of its requests, and how sure the ratio of both arms' is.
//!
//! The sequential test looks at one figure of each block, so it says what holds in most
//! blocks. A few very slow ones escape it. The figure here is that of *all* requests. Its
//! interval is a bootstrap of whole pairs, drawn in runs of neighbours so that bursts which
//! last some pairs stay together (Künsch, Ann. Statist. 17(3), 1989). It is approximate, and
//! knows nothing of what no block has shown yet.

use crate::design::Arm;
use crate::interval::Bounds;
use crate::tail::{STEP_LN, Tail, ns_of};
use fastrand::Rng;

/// Bootstrap samples, drawn with replacement.
const RESAMPLES: usize = 300;
/// How much farther from the figure than the percentiles of the samples drawn anew a bound is:
/// these hold the truth too rarely where neighbours resemble each other for long.
const WIDER: f64 = 1.15;
/// Length of a run: the number of pairs to the power of this.
const RUN_POWER: f64 = 1.0 / 3.0;
/// Requests beyond a percentile without which it says nothing.
const BEYOND_MIN: f64 = 10.0;

/// One block's part of its arm's figure.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// A block's requests, for a percentile.
    Requests(Tail),
    /// Numerator and denominator of a ratio of sums: work and seconds, or requests within the objective and
    /// all.
    Sums(f64, f64),
}

/// Both arms taken together over all blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Overall {
    /// For a percentile: which one the number of requests allows, at most the 99th.
    pub quantile: Option<f64>,
    pub a: f64,
    pub b: f64,
    /// Logarithm of `b` over `a`.
    pub ln_ratio: f64,
    pub bounds: Bounds,
    /// Share of the samples drawn anew in which B's figure is the higher one.
    pub higher: f64,
}

/// One arm's parts, so that its figure over blocks that are drawn several times, or not at all, is
/// found fast.
enum Blocks {
    Requests {
        share: f64,
        requests: Vec<u64>,
        /// Step, block and number, the longest first.
        longest: Vec<(u16, u32, u32)>,
    },
    Sums(Vec<(f64, f64)>),
}

impl Blocks {
    fn new<'a>(parts: impl Iterator<Item = &'a Part>, quantile: Option<f64>) -> Self {
        let Some(share) = quantile else {
            let sums = parts.map(|part| match part {
                Part::Sums(a, b) => (*a, *b),
                Part::Requests(_) => (0.0, 0.0),
            });
            return Blocks::Sums(sums.collect());
        };
        let (mut requests, mut longest) = (Vec::new(), Vec::new());
        for (at, part) in parts.enumerate() {
            let Part::Requests(tail) = part else { continue };
            requests.push(tail.requests());
            longest.extend(tail.steps().map(|(step, count)| (step, at as u32, count)));
        }
        longest.sort_unstable_by(|a, b| b.cmp(a));
        Blocks::Requests { share, requests, longest }
    }

    /// With each block as often as `times` says.
    fn figure(&self, times: &[u32]) -> Option<f64> {
        match self {
            Blocks::Requests { share, requests, longest } => {
                let all = requests.iter().zip(times).map(|(n, times)| n * u64::from(*times));
                let all: u64 = all.sum();
                if all == 0 {
                    return None;
                }
                let above = all - (share * all as f64).ceil().max(1.0) as u64;
                let mut seen = 0;
                longest.iter().find_map(|(step, block, count)| {
                    seen += u64::from(*count) * u64::from(times[*block as usize]);
                    (seen > above).then(|| ns_of(*step))
                })
            }
            Blocks::Sums(sums) => {
                let mut sum = (0.0, 0.0);
                for ((a, b), times) in sums.iter().zip(times) {
                    sum = (sum.0 + a * f64::from(*times), sum.1 + b * f64::from(*times));
                }
                (sum.0 > 0.0 && sum.1 > 0.0).then(|| sum.0 / sum.1)
            }
        }
    }
}

/// Which percentile so many requests allow; `None` if hardly any.
pub fn quantile_for(requests: u64) -> Option<f64> {
    (requests >= 2 * BEYOND_MIN as u64).then(|| (1.0 - BEYOND_MIN / requests as f64).min(0.99))
}

/// Both arms' overall figures; pairs as (A, B). `None` if they do not allow any.
pub fn overall(pairs: &[(Part, Part)], alpha: f64, seed: u64) -> Option<Overall> {
    let all = |arm: Arm| pairs.iter().map(move |(a, b)| if arm == Arm::A { a } else { b });
    let requests = |arm| {
        let tails = all(arm).filter_map(|part| match part {
            Part::Requests(tail) => Some(tail.requests()),
            Part::Sums(..) => None,
        });
        tails.sum::<u64>()
    };
    let quantile = match pairs.first()? {
        (Part::Requests(_), _) => Some(quantile_for(requests(Arm::A).min(requests(Arm::B)))?),
        _ => None,
    };
    let arms = [Arm::A, Arm::B].map(|arm| Blocks::new(all(arm), quantile));
    let figures = |times: &[u32]| Some((arms[0].figure(times)?, arms[1].figure(times)?));
    let mut times = vec![1; pairs.len()];
    let (a, b) = figures(&times)?;
    let ln_ratio = (b / a).ln();
    let mut random = Rng::with_seed(seed);
    let run = (pairs.len() as f64).powf(RUN_POWER).ceil() as usize;
    let mut drawn: Vec<f64> = (0..RESAMPLES)
        .filter_map(|_| {
            times.fill(0);
            let mut left = pairs.len();
            while left > 0 {
                let first = random.usize(..pairs.len());
                let length = run.min(left);
                // A run that reaches beyond the last pair goes on with the first.
                let end = (first + length).min(pairs.len());
                times[first..end].iter_mut().for_each(|times| *times += 1);
                times[..first + length - end].iter_mut().for_each(|times| *times += 1);
                left -= length;
            }
            let (a, b) = figures(&times)?;
            Some((b / a).ln())
        })
        .collect();
    drawn.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let rank = (share * drawn.len() as f64).round() as usize;
        drawn.get(rank.min(drawn.len().saturating_sub(1))).copied()
    };
    // Figures of requests are known to half a step each.
    let step = if quantile.is_some() { STEP_LN } else { 0.0 };
    let bound = |share: f64, sign: f64| {
        at(share).map(|ln| ln_ratio + WIDER * (ln - ln_ratio) + sign * step)
    };
    let bounds = Bounds { low: bound(alpha / 2.0, -1.0), high: bound(1.0 - alpha / 2.0, 1.0) };
    let higher = drawn.iter().filter(|ln| **ln > 0.0).count() as f64 / drawn.len().max(1) as f64;
    Some(Overall { quantile, a, b, ln_ratio, bounds, higher })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(random: &mut Rng, count: usize, factor: f64) -> Part {
        let mut tail = Tail::default();
        for _ in 0..count {
            tail.add((factor * 5e6 * (-(1.0 - random.f64()).ln())) as u64, 1);
        }
        Part::Requests(tail)
    }

    fn pairs(seed: u64, count: usize, ratio: impl Fn(usize) -> f64) -> Vec<(Part, Part)> {
        let mut random = Rng::with_seed(seed);
        (0..count)
            .map(|at| (block(&mut random, 95, 1.0), block(&mut random, 95, ratio(at))))
            .collect()
    }

    #[test]
    fn the_figure_is_that_of_all_requests() {
        let even = overall(&pairs(1, 150, |_| 1.2), 0.05, 1).unwrap();
        assert_eq!(even.quantile, Some(0.99));
        // ln 100 means.
        assert!((even.a / 5e6 / 100f64.ln() - 1.0).abs() < 0.05, "{even:?}");
        let (low, high) = (even.bounds.low.unwrap().exp(), even.bounds.high.unwrap().exp());
        assert!(low < 1.2 && 1.2 < high && high - low < 0.25, "{low} {high}");
        assert!(even.higher > 0.9);
        // Faster in most blocks, and five times as slow in each 20th.
        let few = overall(&pairs(1, 150, |at| if at % 20 == 7 { 5.0 } else { 0.8 }), 0.05, 1);
        assert!(few.unwrap().ln_ratio.exp() > 1.8, "{few:?}");
    }

    #[test]
    fn the_percentile_is_the_one_that_the_requests_allow() {
        assert_eq!(overall(&pairs(1, 0, |_| 1.0), 0.05, 1), None);
        assert_eq!((quantile_for(19), quantile_for(100)), (None, Some(0.9)));
        assert_eq!((quantile_for(1_000), quantile_for(1_000_000)), (Some(0.99), Some(0.99)));
        let few = overall(&pairs(1, 2, |_| 1.0), 0.05, 1).unwrap();
        assert!((few.quantile.unwrap() - (1.0 - 10.0 / 190.0)).abs() < 1e-9, "{few:?}");
    }

    #[test]
    fn sums_are_one_ratio() {
        let work = vec![(Part::Sums(1.0, 2.0), Part::Sums(3.0, 2.0)); 12];
        let overall = overall(&work, 0.05, 1).unwrap();
        assert_eq!((overall.a, overall.b, overall.quantile), (0.5, 1.5, None));
        assert!((overall.bounds.low.unwrap() - 3f64.ln()).abs() < 1e-9, "{overall:?}");
        let idle = vec![(Part::Sums(0.0, 2.0), Part::Sums(3.0, 2.0)); 12];
        assert_eq!(super::overall(&idle, 0.05, 1), None);
    }
}
