//! The test: a bet on the sign of each pair's difference.
//!
//! If the two policies make no difference, what a pair of blocks measures does not depend
//! on which policy had which block: the difference (B less A) has the size that the two
//! moments give it, and its sign is the coin that ordered the pair, whatever the noise:
//! heavy-tailed, correlated from block to block, drifting. (Fisher's sharp null
//! hypothesis, under the randomisation that was in fact carried out; The Design of
//! Experiments, 1935.) A player who stakes a part of what he owns on each sign, by
//! sizes and signs seen so far and the size, not the sign, of this one, plays a fair game:
//! his wealth is a nonnegative martingale that starts at 1. By Ville's inequality (1939)
//! it ever reaches 1/alpha with a chance of at most alpha. So one may look after every
//! pair, and stop when one likes (Shafer, JRSS A 184(2), 2021; Ramdas, Ruf, Larsson and
//! Koolen, arXiv:2009.03167; for tests of symmetry Vovk and Wang, arXiv:2009.02824).
//!
//! What is staked is `0.95 tanh(theta x)`, where `x` is the difference in units of the
//! recent differences' median size: for normal noise and the right `theta` this is the
//! likelihood ratio given the size. The `theta`s are mixed, which keeps the martingale.

use std::collections::VecDeque;

/// What is bet on, in either direction.
const THETAS: [f64; 6] = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2];
/// Besides, one bets on the greatest sizes only: a few blocks that are very slow tell little of the
/// middle.
const GREATEST_STAKE: f64 = 0.8;
/// Sizes of so many times the usual one are great: of normal noise 0.005 % are.
const GREATEST_FROM: f64 = 6.0;
/// Number of players that bet in one direction.
const PLAYERS: usize = THETAS.len() + 1;
/// Never more than this part is staked: one wrong sign must not ruin.
const STAKE_MAX: f64 = 0.95;
/// Differences beyond so many times the usual size count as this.
const SIZE_MAX: f64 = 3.0;
/// What is usual is the median of so many recent sizes, the present one included.
const SIZES: usize = 64;

/// The evidence against "no difference", pair by pair.
#[derive(Clone, Debug)]
pub struct Betting {
    /// Logarithms of what the players own: those who bet on B being more, on B being less.
    more: [f64; PLAYERS],
    less: [f64; PLAYERS],
    recent: Recent,
    ln_e: f64,
    /// The most that it was while those who bet on less, and on more, owned more than the others.
    ln_e_max: [f64; 2],
}

impl Betting {
    pub fn new() -> Self {
        Betting {
            more: [0.0; PLAYERS],
            less: [0.0; PLAYERS],
            recent: Recent::default(),
            ln_e: 0.0,
            ln_e_max: [0.0; 2],
        }
    }

    /// A pair's difference. One that is not finite is no evidence.
    pub fn push(&mut self, difference: f64) {
        if !difference.is_finite() {
            return;
        }
        let usual = self.recent.push(difference.abs());
        // Infinite if nothing ever differed before.
        let size = if difference == 0.0 { 0.0 } else { difference / usual };
        let x = size.clamp(-SIZE_MAX, SIZE_MAX);
        let greatest = if size.abs() < GREATEST_FROM { 0.0 } else { GREATEST_STAKE.copysign(size) };
        let stakes =
            THETAS.map(|theta| STAKE_MAX * (theta * x).tanh()).into_iter().chain([greatest]);
        for ((stake, more), less) in stakes.zip(&mut self.more).zip(&mut self.less) {
            *more += stake.ln_1p();
            *less += (-stake).ln_1p();
        }
        let (more, less) = (ln_mean(&self.more), ln_mean(&self.less));
        self.ln_e = more.max(less) + ((-(more - less).abs()).exp() / 2.0 + 0.5).ln();
        let most = &mut self.ln_e_max[usize::from(more > less)];
        *most = most.max(self.ln_e);
    }

    /// Logarithm of the wealth now (an e-value).
    pub fn ln_e(&self) -> f64 {
        self.ln_e
    }

    /// Whether those who bet on B being more own more than the others.
    pub fn is_higher(&self) -> bool {
        ln_mean(&self.more) > ln_mean(&self.less)
    }

    /// Logarithm of the most that it ever was.
    pub fn ln_e_max(&self) -> f64 {
        self.ln_e_max[0].max(self.ln_e_max[1])
    }

    /// Whether "no difference" is rejected at this level.
    pub fn rejects(&self, alpha: f64) -> bool {
        self.ln_e_max() >= -alpha.ln()
    }

    /// Whether B is more, if "no difference" is rejected at this level: the side for which it was. If it was for both,
    /// one after the other, the one that owns more now.
    pub fn rejected_for_more(&self, alpha: f64) -> Option<bool> {
        match self.ln_e_max.map(|ln| ln >= -alpha.ln()) {
            [false, false] => None,
            [true, true] => Some(self.is_higher()),
            [_, more] => Some(more),
        }
    }
}

fn ln_mean(players: &[f64; PLAYERS]) -> f64 {
    let most = players.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = players.iter().map(|ln| (ln - most).exp()).sum();
    most + (sum / PLAYERS as f64).ln()
}

impl Default for Betting {
    fn default() -> Self {
        Self::new()
    }
}

/// The median of the recent sizes.
#[derive(Clone, Debug, Default)]
struct Recent {
    order: VecDeque<f64>,
    sorted: Vec<f64>,
}

impl Recent {
    fn push(&mut self, size: f64) -> f64 {
        if self.order.len() == SIZES
            && let Some(oldest) = self.order.pop_front()
        {
            let at = self.sorted.partition_point(|s| *s < oldest);
            self.sorted.remove(at);
        }
        self.order.push_back(size);
        let at = self.sorted.partition_point(|s| *s < size);
        self.sorted.insert(at, size);
        self.sorted[(self.sorted.len() - 1) / 2]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn e(differences: &[f64]) -> f64 {
        let mut betting = Betting::new();
        differences.iter().for_each(|d| betting.push(*d));
        betting.ln_e().exp()
    }

    proptest! {
        /// The fair game, exactly: over all signs of given sizes the mean wealth is 1.
        #[test]
        fn the_mean_over_all_signs_is_one(
            sizes in proptest::collection::vec(prop_oneof![Just(0.0), 1e-9..1e9f64], 0..9),
        ) {
            let all = 1u32 << sizes.len();
            let sum: f64 = (0..all)
                .map(|signs| {
                    let signed = |(i, s): (usize, &f64)| if signs >> i & 1 == 1 { *s } else { -s };
                    e(&sizes.iter().enumerate().map(signed).collect::<Vec<_>>())
                })
                .sum();
            prop_assert!((sum / f64::from(all) - 1.0).abs() < 1e-9, "{}", sum / f64::from(all));
        }

        /// Neither the unit of the outcome nor which arm is called B matters.
        #[test]
        fn scale_and_direction_do_not_matter(
            differences in proptest::collection::vec(-5.0..5.0f64, 1..80), scale in 0.001..1e3f64,
        ) {
            let changed: Vec<_> = differences.iter().map(|d| -d * scale).collect();
            let (a, b) = (e(&differences), e(&changed));
            prop_assert!((a / b - 1.0).abs() < 1e-6, "{a} {b}");
        }
    }

    #[test]
    fn wild_values_are_survived() {
        let mut betting = Betting::new();
        for d in [0.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e-300, -1e300] {
            betting.push(d);
            assert!(betting.ln_e().is_finite());
        }
    }

    #[test]
    fn eight_like_pairs_that_agree_are_the_least_that_rejects_at_5_percent() {
        let mut betting = Betting::new();
        for _ in 0..7 {
            betting.push(1.0);
            assert!(!betting.rejects(0.05));
        }
        betting.push(1.0);
        assert!(betting.rejects(0.05));
        // Once is enough: what comes later does not take it back.
        (0..50).for_each(|_| betting.push(-1.0));
        assert!(betting.rejects(0.05) && !betting.rejects(1e-9));
    }

    #[test]
    fn a_side_that_merely_owns_more_again_is_not_the_one_that_rejected() {
        let mut betting = Betting::new();
        (0..8).for_each(|_| betting.push(1.0));
        assert_eq!(betting.rejected_for_more(0.05), Some(true));
        while betting.is_higher() {
            betting.push(-1.0);
        }
        assert!(betting.ln_e() < 0.0);
        assert_eq!(betting.rejected_for_more(0.05), Some(true));
        while betting.ln_e() < 20_f64.ln() {
            betting.push(-1.0);
        }
        assert_eq!(betting.rejected_for_more(0.05), Some(false), "now it has evidence of its own");
    }

    /// Stalls in a tenth of B's blocks, and noise either way in the others.
    #[test]
    fn a_few_great_differences_to_one_side_are_found() {
        let mut betting = Betting::new();
        for at in 0..200 {
            let noise = if at % 2 == 0 { -0.3 } else { 0.3 } * (1.0 + f64::from(at % 7) / 10.0);
            betting.push(if at % 10 == 5 { 3.0 } else { noise });
        }
        assert!(betting.rejects(0.05) && betting.is_higher());
    }

    #[test]
    fn the_median_is_that_of_the_latest() {
        let mut recent = Recent::default();
        assert_eq!(recent.push(5.0), 5.0);
        assert_eq!(recent.push(1.0), 1.0);
        assert_eq!(recent.push(3.0), 3.0);
        for _ in 0..SIZES {
            recent.push(9.0);
        }
        assert_eq!(recent.push(9.0), 9.0);
        assert_eq!(recent.sorted, vec![9.0; SIZES]);
    }
}
