//! An arm's figure over all of its requests, and how sure the ratio of both arms' is.
//!
//! The sequential test looks at one figure of each block, so it says what holds in most
//! blocks. A few very slow ones escape it. The figure here is that of *all* requests. Its
//! interval is a bootstrap of whole pairs, drawn in runs of neighbours so that bursts which
//! last some pairs stay together (Künsch, Ann. Statist. 17(3), 1989). It is approximate, and
//! knows nothing of what no block has shown yet.

use crate::design::Arm;
use crate::interval::Bounds;
use crate::tail::{Pool, Tail};
use fastrand::Rng;

/// Bootstrap samples, drawn with replacement.
const RESAMPLES: usize = 300;
/// Requests beyond the percentile, times this, are told apart in samples drawn anew.
const LEAST_BEYOND: f64 = 5.0;
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

impl Part {
    fn upper(&self, ns: u64) -> Part {
        match self {
            Part::Requests(tail) => Part::Requests(tail.upper(ns)),
            Part::Sums(..) => self.clone(),
        }
    }
}

/// The lesser of both arms' percentiles of this share, ns.
fn least_ns(pairs: &[(Part, Part)], share: f64) -> Option<u64> {
    let mut pools = [Pool::default(), Pool::default()];
    for (a, b) in pairs {
        for (pool, part) in pools.iter_mut().zip([a, b]) {
            if let Part::Requests(tail) = part {
                pool.add(tail);
            }
        }
    }
    let of = |pool: &Pool| pool.quantile_ns(share.max(0.0)).map(|ns| ns as u64);
    Some(of(&pools[0])?.min(of(&pools[1])?))
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

/// What is summed over the blocks drawn.
enum Sum {
    Pool(Box<Pool>, f64),
    Sums(f64, f64),
}

impl Sum {
    fn clear(&mut self) {
        match self {
            Sum::Pool(pool, _) => pool.clear(),
            Sum::Sums(a, b) => (*a, *b) = (0.0, 0.0),
        }
    }

    fn add(&mut self, part: &Part) {
        match (self, part) {
            (Sum::Pool(pool, _), Part::Requests(tail)) => pool.add(tail),
            (Sum::Sums(a, b), Part::Sums(c, d)) => (*a, *b) = (*a + c, *b + d),
            _ => {}
        }
    }

    fn figure(&self) -> Option<f64> {
        match self {
            Sum::Pool(pool, share) => pool.quantile_ns(*share),
            Sum::Sums(a, b) => (*a > 0.0 && *b > 0.0).then(|| a / b),
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
    let empty = || match quantile {
        Some(share) => Sum::Pool(Box::default(), share),
        None => Sum::Sums(0.0, 0.0),
    };
    let mut sums = [empty(), empty()];
    let mut of = |pairs: &[(Part, Part)], order: &mut dyn Iterator<Item = usize>| {
        sums.iter_mut().for_each(Sum::clear);
        for at in order {
            sums[0].add(&pairs[at].0);
            sums[1].add(&pairs[at].1);
        }
        Some((sums[0].figure()?, sums[1].figure()?))
    };
    let (a, b) = of(pairs, &mut (0..pairs.len()))?;
    let ln_ratio = (b / a).ln();
    // Most requests are far below the percentile, whichever pairs are drawn.
    let least_ns = quantile.and_then(|share| least_ns(pairs, 1.0 - LEAST_BEYOND * (1.0 - share)));
    let upper: Vec<(Part, Part)> = match least_ns {
        Some(ns) => pairs.iter().map(|(a, b)| (a.upper(ns), b.upper(ns))).collect(),
        None => pairs.to_vec(),
    };
    let mut random = Rng::with_seed(seed);
    let run = (pairs.len() as f64).cbrt().ceil() as usize;
    let mut order = Vec::with_capacity(pairs.len() + run);
    let mut drawn: Vec<f64> = (0..RESAMPLES)
        .filter_map(|_| {
            order.clear();
            while order.len() < pairs.len() {
                let first = random.usize(..pairs.len());
                order.extend((first..first + run).map(|at| at % pairs.len()));
            }
            order.truncate(pairs.len());
            let (a, b) = of(&upper, &mut order.iter().copied())?;
            Some((b / a).ln())
        })
        .collect();
    drawn.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let rank = (share * drawn.len() as f64).round() as usize;
        drawn.get(rank.min(drawn.len().saturating_sub(1))).copied()
    };
    let bounds = Bounds { low: at(alpha / 2.0), high: at(1.0 - alpha / 2.0) };
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
