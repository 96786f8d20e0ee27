//! Does the statistics keep its promises? Simulated experiments whose truth is known,
//! looked at after every pair of blocks.
//!
//! Requests are drawn one by one and a block's figure is their 99th percentile, so that
//! its noise is what a tail's noise is. The noise between blocks comes in several kinds,
//! chosen to break methods that assume too much: heavy tails, memory from block to block,
//! drift, bursts, hardly any requests.

pub mod accidents;
pub mod beside;
pub mod models;
pub mod pooled;
pub mod traps;

use crate::betting::Betting;
use crate::design::{Arm, Assignment};
use crate::interval;
use fastrand::Rng;
use serde::Serialize;

/// A false-positive rate counts as too high when a correct method would show it with less
/// than this chance.
const TOO_UNLIKELY: f64 = 1e-3;

/// How the machine behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Noise {
    /// Log-normal request times, blocks alike.
    Lognormal,
    /// Pareto request times of infinite variance (index 1.5).
    HeavyTail,
    /// Log-normal, with a level that remembers: AR(1), 0.95 from block to block.
    Autocorrelated,
    /// Noise as in the variant above, with a trend (tripling over the experiment) and a wave.
    Drift,
    /// Two states, five times apart, that last for some ten blocks each.
    Bursts,
    /// A dozen Pareto requests a block: the 99th percentile is the largest.
    Sparse,
}

impl Noise {
    pub const ALL: [Noise; 6] = [
        Noise::Lognormal,
        Noise::HeavyTail,
        Noise::Autocorrelated,
        Noise::Drift,
        Noise::Bursts,
        Noise::Sparse,
    ];
}

/// How many experiments are simulated, and how large they are.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Experiments of each kind without an effect.
    pub experiments: u32,
    /// Experiments of each kind with each effect.
    pub experiments_with_effect: u32,
    /// Pairs of blocks of an experiment: 150 are 10 minutes of 2 s blocks.
    pub pairs: u32,
    /// Requests of a block, on average.
    pub requests: u32,
    pub alpha: f64,
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            experiments: 1_000,
            experiments_with_effect: 300,
            pairs: 150,
            requests: 120,
            alpha: 0.05,
            seed: 1,
        }
    }
}

/// How often "no difference" was rejected although there was none.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FalsePositives {
    pub noise: Noise,
    pub experiments: u32,
    /// Experiments in which it was rejected after any pair.
    pub rejected: u32,
    pub rate: f64,
    /// A correct method rejects more often with a chance below 0.001.
    pub rejected_max: u32,
    /// Share in which the mean effect's (asymptotic) interval ever left out 1, from 10 pairs on.
    pub mean_interval_missed_rate: f64,
    /// What a t test after every pair does at the same level: why it is not used.
    pub t_test_rate: f64,
}

/// How often an effect was found.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Power {
    pub noise: Noise,
    /// B's times over A's.
    pub ratio: f64,
    pub experiments: u32,
    /// Share decided for the right side.
    pub found: f64,
    /// Share decided for the wrong side.
    pub wrong: f64,
    /// Half of those found were found within so many blocks.
    pub blocks_median: Option<u32>,
    /// Share of experiments in which the interval held the truth all the time.
    pub coverage: f64,
    /// Share in which the mean effect's interval did.
    pub mean_coverage: f64,
    /// Median width of the interval at the end, as a ratio of its ends less 1.
    pub width_median: Option<f64>,
}

/// How often the test errs, and what effects it finds.
#[derive(Clone, Debug, Serialize)]
pub struct Validity {
    pub alpha: f64,
    /// Blocks of an experiment.
    pub blocks: u32,
    /// Requests of a block, on average (but for `sparse`: 12).
    pub requests: u32,
    pub seed: u64,
    /// Rates of false alarms in experiments without an effect.
    pub false_positives: Vec<FalsePositives>,
    pub power: Vec<Power>,
}

impl Validity {
    /// What contradicts the promises: a rejection rate above the level beyond chance, or a
    /// coverage below.
    pub fn failures(&self) -> Vec<String> {
        let mut all = Vec::new();
        for f in &self.false_positives {
            if f.rejected > f.rejected_max {
                all.push(format!(
                    "{:?}: {} of {} experiments without an effect were rejected, at most {} may be",
                    f.noise, f.rejected, f.experiments, f.rejected_max
                ));
            }
        }
        for p in &self.power {
            let missed = ((1.0 - p.coverage) * f64::from(p.experiments)).round() as u32;
            let most = binomial_max(p.experiments, self.alpha);
            if missed > most {
                all.push(format!(
                    "{:?}, ratio {}: the interval missed the truth in {missed} of {} experiments, at most {most} may",
                    p.noise, p.ratio, p.experiments
                ));
            }
        }
        all
    }
}

/// The largest count that is not too unlikely for `n` trials of chance `p`.
pub fn binomial_max(n: u32, p: f64) -> u32 {
    // P(X = k), from k = 0 upwards.
    let mut ln_pmf = f64::from(n) * (-p).ln_1p();
    let mut at_most = 0.0;
    for k in 0..=n {
        at_most += ln_pmf.exp();
        if 1.0 - at_most < TOO_UNLIKELY {
            return k;
        }
        ln_pmf += (f64::from(n - k) / f64::from(k + 1)).ln() + (p / (1.0 - p)).ln();
    }
    n
}

fn normal(random: &mut Rng) -> f64 {
    let radius = (-2.0 * (1.0 - random.f64()).ln()).sqrt();
    radius * (std::f64::consts::TAU * random.f64()).cos()
}

/// Exponential, with a mean of 1.
fn exponential(random: &mut Rng) -> f64 {
    -(1.0 - random.f64()).ln()
}

/// The machine, block by block.
struct Machine {
    noise: Noise,
    random: Rng,
    block: u32,
    blocks: u32,
    requests: u32,
    level: f64,
    slow: bool,
    times: Vec<f64>,
}

impl Machine {
    fn new(noise: Noise, settings: &Settings, seed: u64) -> Self {
        let requests = if noise == Noise::Sparse { 12 } else { settings.requests };
        Machine {
            noise,
            random: Rng::with_seed(seed),
            block: 0,
            blocks: 2 * settings.pairs,
            requests,
            level: 0.0,
            slow: false,
            times: Vec::new(),
        }
    }

    /// The logarithm of the next block's level.
    fn next_level(&mut self) -> f64 {
        let memory = |level: f64, random: &mut Rng| 0.95 * level + 0.1 * normal(random);
        let share = f64::from(self.block) / f64::from(self.blocks);
        self.block += 1;
        match self.noise {
            Noise::Lognormal | Noise::HeavyTail | Noise::Sparse => 0.0,
            Noise::Autocorrelated => {
                self.level = memory(self.level, &mut self.random);
                self.level
            }
            Noise::Drift => {
                self.level = memory(self.level, &mut self.random);
                self.level + 3f64.ln() * share + 0.5 * (share * 40.0).sin()
            }
            Noise::Bursts => {
                self.slow ^= self.random.f64() < 0.1;
                if self.slow { 5f64.ln() } else { 0.0 }
            }
        }
    }

    /// The logarithm of the next block's 99th percentile, without any effect.
    fn next_block(&mut self) -> f64 {
        let level = self.next_level();
        let heavy = matches!(self.noise, Noise::HeavyTail | Noise::Sparse);
        self.times.clear();
        for _ in 0..self.requests {
            let time = if heavy {
                -(1.0 - self.random.f64()).ln() / 1.5
            } else {
                0.4 * normal(&mut self.random)
            };
            self.times.push(time);
        }
        let rank = (self.times.len() as f64 * 0.99).ceil() as usize - 1;
        let (_, p99, _) = self.times.select_nth_unstable_by(rank, f64::total_cmp);
        level + *p99
    }
}

/// One experiment's differences, with an effect of `ln_ratio`.
fn differences(noise: Noise, settings: &Settings, ln_ratio: f64, seed: u64) -> Vec<f64> {
    let mut machine = Machine::new(noise, settings, seed);
    let mut assignment = Assignment::new(!seed);
    (0..settings.pairs)
        .map(|_| {
            let mut difference = 0.0;
            for _ in 0..2 {
                let block = machine.next_block();
                match assignment.next_arm() {
                    Arm::A => difference -= block,
                    Arm::B => difference += block + ln_ratio,
                }
            }
            difference
        })
        .collect()
}

fn seed_of(settings: &Settings, noise: Noise, effect: usize, experiment: u32) -> u64 {
    let mut random = Rng::with_seed(
        settings.seed
            ^ ((noise as u64) << 56)
            ^ ((effect as u64) << 48)
            ^ u64::from(experiment) << 8,
    );
    random.u64(..)
}

/// Whether a t test at level `alpha`, done after every pair, ever rejects.
fn t_test_ever(differences: &[f64], alpha: f64) -> bool {
    // The normal quantile for two sides; at the usual levels t is hardly wider from 20 pairs on.
    let z = if alpha <= 0.01 { 2.576 } else { 1.96 };
    let (mut n, mut mean, mut m2) = (0.0, 0.0, 0.0);
    differences.iter().any(|d| {
        n += 1.0;
        let delta = d - mean;
        mean += delta / n;
        m2 += delta * (d - mean);
        n >= 20.0 && mean.abs() > z * (m2 / (n - 1.0) / n).sqrt()
    })
}

/// Whether the mean effect's interval ever leaves out the truth, from 10 pairs on.
fn mean_ever_missed(differences: &[f64], truth: f64, alpha: f64) -> bool {
    (10..=differences.len()).any(|n| {
        let (_, bounds) = interval::asymptotic(&differences[..n], alpha);
        bounds.low.is_some_and(|low| low > truth) || bounds.high.is_some_and(|high| high < truth)
    })
}

fn false_positives(noise: Noise, settings: &Settings) -> FalsePositives {
    let n = settings.experiments;
    let (mut rejected, mut t_tests, mut missed) = (0, 0, 0);
    for experiment in 0..n {
        let seed = seed_of(settings, noise, 0, experiment);
        let differences = differences(noise, settings, 0.0, seed);
        rejected += u32::from(interval::rejects(&differences, 0.0, settings.alpha));
        t_tests += u32::from(t_test_ever(&differences, settings.alpha));
        missed += u32::from(mean_ever_missed(&differences, 0.0, settings.alpha));
    }
    let rate = |count: u32| f64::from(count) / f64::from(n.max(1));
    FalsePositives {
        noise,
        experiments: n,
        rejected,
        rate: rate(rejected),
        rejected_max: binomial_max(n, settings.alpha),
        mean_interval_missed_rate: rate(missed),
        t_test_rate: rate(t_tests),
    }
}

fn median<T: Copy + PartialOrd>(mut values: Vec<T>) -> Option<T> {
    values.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
    values.get(values.len() / 2).copied()
}

fn power(noise: Noise, settings: &Settings, effect: usize, ratio: f64) -> Power {
    let n = settings.experiments_with_effect;
    let truth = ratio.ln();
    let (mut found, mut wrong, mut covered, mut mean_covered) = (Vec::new(), 0, 0, 0);
    let mut widths = Vec::new();
    for experiment in 0..n {
        let seed = seed_of(settings, noise, effect + 1, experiment);
        let differences = differences(noise, settings, truth, seed);
        let mut betting = Betting::new();
        let decided = differences.iter().position(|d| {
            betting.push(*d);
            betting.rejects(settings.alpha)
        });
        if let Some(at) = decided {
            let estimate = interval::estimate(&differences[..=at]);
            if (estimate > 0.0) == (truth > 0.0) {
                found.push(2 * (at as u32 + 1));
            } else {
                wrong += 1;
            }
        }
        covered += u32::from(!interval::rejects(&differences, truth, settings.alpha));
        mean_covered += u32::from(!mean_ever_missed(&differences, truth, settings.alpha));
        let bounds = interval::confidence(&differences, settings.alpha);
        widths.extend(bounds.low.zip(bounds.high).map(|(low, high)| (high - low).exp_m1()));
    }
    let rate = |count: u32| f64::from(count) / f64::from(n.max(1));
    Power {
        noise,
        ratio,
        experiments: n,
        found: rate(found.len() as u32),
        wrong: rate(wrong),
        blocks_median: median(found),
        coverage: rate(covered),
        mean_coverage: rate(mean_covered),
        width_median: median(widths),
    }
}

/// Simulate. Takes some milliseconds an experiment.
pub fn validate(settings: &Settings, noises: &[Noise], ratios: &[f64]) -> Validity {
    let false_positives = noises.iter().map(|noise| false_positives(*noise, settings)).collect();
    let mut powers = Vec::new();
    for noise in noises {
        for (effect, ratio) in ratios.iter().enumerate() {
            powers.push(power(*noise, settings, effect, *ratio));
        }
    }
    Validity {
        alpha: settings.alpha,
        blocks: 2 * settings.pairs,
        requests: settings.requests,
        seed: settings.seed,
        false_positives,
        power: powers,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binomial_bound_is_the_textbooks() {
        // R: qbinom(0.999, c(1000, 200, 10), 0.05) = 73, 21, 4
        assert_eq!([1000, 200, 10].map(|n| binomial_max(n, 0.05)), [73, 21, 4]);
        assert_eq!(binomial_max(0, 0.05), 0);
    }

    /// The short form of `cargo xtask test ab`: level and coverage under all kinds of noise,
    /// and that a method that breaks the level would be noticed.
    #[test]
    fn the_level_is_kept_with_peeking_after_every_pair() {
        let settings = Settings {
            experiments: 200,
            experiments_with_effect: 60,
            pairs: 80,
            requests: 60,
            ..Settings::default()
        };
        let validity = validate(&settings, &Noise::ALL, &[1.2]);
        assert_eq!(validity.failures(), Vec::<String>::new());
        assert_eq!(validity.false_positives.len(), Noise::ALL.len());
        for f in &validity.false_positives {
            let bound = f64::from(f.rejected_max) / f64::from(f.experiments);
            assert!(f.t_test_rate > bound, "a peeking t test would pass, too: {f:?}");
        }
        let plain = validity.power.iter().find(|p| p.noise == Noise::Lognormal).unwrap();
        assert!(plain.found > 0.9 && plain.wrong == 0.0, "{plain:?}");
    }

    #[test]
    fn failures_are_found() {
        let settings =
            Settings { experiments: 10, experiments_with_effect: 10, ..Default::default() };
        let mut validity = validate(&settings, &[Noise::Lognormal], &[1.2]);
        assert!(validity.failures().is_empty());
        validity.false_positives[0].rejected = 5;
        validity.power[0].coverage = 0.5;
        assert_eq!(validity.failures().len(), 2);
    }
}
