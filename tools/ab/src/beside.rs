//! Figures that are measured beside the one that decides. Their intervals hold all at once: each has the test's level
//! divided by the number of figures (Bonferroni).
//!
//! An interval that leaves out "no difference" needs more than its own approximation: the exact test of
//! [`crate::betting`] must reject "no difference" at that level, too. So no figure is said to differ more often than
//! the level allows, whatever the noise.

use crate::betting::Betting;
use crate::design::Arm;
use crate::experiment::Experiment;
use crate::interval::{self, Bounds};
use crate::metric::{Metric, REQUESTS_MIN};
use crate::overall::{Part, overall};
use crate::report::{Block, Effect, exact};
use crate::verdict::PAIRS_MIN;
use serde::{Deserialize, Serialize};

/// A ratio that was measured beside the one that decides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Beside {
    /// `hp_p50`, `hp_p99`, `token_p99`, `be_throughput`, `requests`, `slo_attainment` or `tpot_attainment`.
    pub name: String,
    /// Of the blocks' figures; attainments: of all requests or tokens. Bounds at a level divided by the number of
    /// figures, those of [`Rate`] included: all of them hold at once.
    #[serde(flatten)]
    pub effect: Effect,
    pub pairs: usize,
}

/// Something that best-effort clients met so much of each second, and that may be 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// `be_waited` (time that launches waited for an answer, summed over launches, ns a second), `preemptions` (times
    /// that clients were asked to yield, a second) or `be_fairness` (Jain's index, of pairs in which both blocks have
    /// one).
    pub name: String,
    /// Mean over A's blocks.
    pub a: f64,
    /// Mean over B's blocks.
    pub b: f64,
    /// `b` less `a`.
    pub difference: f64,
    /// Lower bound of the mean difference; `null`: no bound yet. All bounds hold at once, as those of [`Beside`] do.
    pub low: Option<f64>,
    pub high: Option<f64>,
    pub pairs: usize,
}

type Figure = fn(&Block) -> Option<f64>;

const RATIOS: [(&str, Figure); 5] = [
    ("hp_p50", |b| b.hp_p50_ns.filter(|_| b.value.is_some()).map(|ns| ns as f64)),
    ("hp_p99", |b| b.hp_p99_ns.filter(|_| b.requests >= REQUESTS_MIN).map(|ns| ns as f64)),
    ("be_throughput", |b| (b.be_work_ns > 0).then(|| b.be_work_ns as f64 / b.measured_s)),
    ("requests", |b| (b.requests > 0).then(|| b.requests as f64 / b.measured_s)),
    ("token_p99", |b| b.token_p99_ns.filter(|_| b.tokens >= REQUESTS_MIN).map(|ns| ns as f64)),
];

const RATES: [(&str, Figure); 3] = [
    ("be_waited", |b| Some(b.be_waited_ns as f64 / b.measured_s.max(1e-9))),
    ("preemptions", |b| Some(b.preemptions as f64 / b.measured_s.max(1e-9))),
    ("be_fairness", |b| b.be_fairness),
];

/// Figures that only some programs have: of these no block has one without them.
const OF_SOME: [&str; 2] = ["token_p99", "be_fairness"];

/// Figures that all programs have: [`slower`] looks at some of them.
const DECIDING: usize = RATIOS.len() + RATES.len() - OF_SOME.len();

/// Whether there is anything that this figure is of.
fn is_there(experiment: &Experiment, (name, figure): &(&str, Figure)) -> bool {
    !OF_SOME.contains(name) || experiment.blocks().iter().any(|block| figure(block).is_some())
}

/// Attainments that are known: of requests with an objective, and of tokens with one.
fn attainments(experiment: &Experiment) -> impl Iterator<Item = Metric> {
    let any = |judged: fn(&Block) -> u64| experiment.blocks().iter().any(|block| judged(block) > 0);
    let of_requests = experiment.plan().slo_ns.is_some() || any(|block| block.requests_judged);
    let of_tokens = any(|block| block.tokens_judged);
    let each = [(Metric::SloAttainment, of_requests), (Metric::TpotAttainment, of_tokens)];
    each.into_iter().filter_map(|(metric, is_known)| is_known.then_some(metric))
}

/// Level of each figure. How many there are does not depend on how they turn out.
fn alpha(experiment: &Experiment) -> f64 {
    let figures = RATIOS.iter().chain(&RATES).filter(|figure| is_there(experiment, figure)).count();
    experiment.plan().alpha / (figures + attainments(experiment).count()) as f64
}

/// Finished pairs as (A, B).
fn pairs(experiment: &Experiment) -> impl Iterator<Item = (&Block, &Block)> {
    experiment.blocks().chunks_exact(2).map(|pair| match pair[0].arm {
        Arm::A => (&pair[0], &pair[1]),
        Arm::B => (&pair[1], &pair[0]),
    })
}

/// Bounds that leave out 0 only if the exact test rejects it.
fn unless_shown(bounds: Bounds, differences: &[f64], alpha: f64) -> Bounds {
    if interval::rejects(differences, 0.0, alpha) {
        return bounds;
    }
    Bounds { low: bounds.low.map(|low| low.min(0.0)), high: bounds.high.map(|high| high.max(0.0)) }
}

/// All ratios but the one that decides.
pub(crate) fn all(experiment: &Experiment) -> Vec<Beside> {
    let mut all = of_blocks(experiment);
    let chosen = experiment.plan().metric;
    let others = attainments(experiment).filter(|metric| *metric != chosen);
    all.extend(others.filter_map(|metric| attainment(experiment, metric)));
    all
}

/// Logarithms of B's figure over A's, of each pair that has both.
fn differences(experiment: &Experiment, figure: Figure) -> Vec<f64> {
    let difference = |(a, b): (&Block, &Block)| {
        let ln = figure(b)?.ln() - figure(a)?.ln();
        ln.is_finite().then_some(ln)
    };
    pairs(experiment).filter_map(difference).collect()
}

/// A figure of how long requests take that is surely more than so many times A's, and how many times it is.
pub(crate) fn slower(experiment: &Experiment, times: f64) -> Option<(&'static str, f64)> {
    let is_latency = |name: &str| name.starts_with("hp_") || name == "token_p99";
    let latencies = RATIOS.into_iter().filter(|(name, _)| is_latency(name));
    // What decides does not depend on which other figures there are to report.
    let plan = experiment.plan();
    let alpha = plan.alpha / (DECIDING + 1 + usize::from(plan.slo_ns.is_some())) as f64;
    let mut slower = latencies.filter_map(|(name, figure)| {
        let differences = differences(experiment, figure);
        // Much cheaper than an interval.
        let mut betting = Betting::new();
        differences.iter().for_each(|difference| betting.push(difference - times.ln()));
        let is_sure = betting.rejected_for_more(alpha) == Some(true);
        (is_sure && differences.len() >= PAIRS_MIN)
            .then(|| (name, interval::estimate(&differences).exp()))
    });
    slower.next()
}

/// Those of the blocks' figures.
fn of_blocks(experiment: &Experiment) -> Vec<Beside> {
    let chosen = experiment.plan().metric.as_str();
    let alpha = alpha(experiment);
    let is_other = |figure: &(&str, Figure)| figure.0 != chosen && is_there(experiment, figure);
    let others = RATIOS.into_iter().filter(is_other);
    others
        .map(|(name, figure)| {
            let differences = differences(experiment, figure);
            let effect = exact(&differences, alpha);
            Beside { name: name.into(), effect, pairs: differences.len() }
        })
        .collect()
}

/// The share of all requests, or tokens, within the objective; a block's share of few is no multiple of A's share.
fn attainment(experiment: &Experiment, metric: Metric) -> Option<Beside> {
    let plan = experiment.plan();
    let (parts, alpha) = (experiment.parts(metric), alpha(experiment));
    // Half a request each way, as the metric has it.
    let ln = |part: &Part| match part {
        Part::Sums(within, requests) if *requests > 0.0 => {
            Some(((within + 0.5) / (requests + 1.0)).ln())
        }
        _ => None,
    };
    let differences: Vec<f64> = parts.iter().filter_map(|(a, b)| Some(ln(b)? - ln(a)?)).collect();
    let overall = overall(&parts, alpha, plan.seed)?;
    let bounds = match differences.len() < PAIRS_MIN {
        true => Bounds::default(),
        false => unless_shown(overall.bounds, &differences, alpha),
    };
    let (name, effect) = (metric.as_str().into(), Effect::new(overall.ln_ratio, bounds));
    Some(Beside { name, effect, pairs: differences.len() })
}

/// What best-effort clients met. The bounds are those of the mean difference ([`interval::asymptotic`]): a block
/// without any has no ratio.
pub(crate) fn rates(experiment: &Experiment) -> Vec<Rate> {
    let alpha = alpha(experiment);
    let there = RATES.into_iter().filter(|figure| is_there(experiment, figure));
    let all = there.map(|(name, rate)| {
        let both = |(a, b): (&Block, &Block)| rate(a).zip(rate(b));
        let each: Vec<(f64, f64)> = pairs(experiment).filter_map(both).collect();
        let mean = |of: fn(&(f64, f64)) -> f64| {
            each.iter().map(of).sum::<f64>() / each.len().max(1) as f64
        };
        let (a, b) = (mean(|pair| pair.0), mean(|pair| pair.1));
        let differences: Vec<f64> = each.iter().map(|(a, b)| b - a).collect();
        let bounds = match differences.len() < PAIRS_MIN {
            true => Bounds::default(),
            false => unless_shown(interval::asymptotic(&differences, alpha).1, &differences, alpha),
        };
        let Bounds { low, high } = bounds;
        Rate { name: name.into(), a, b, difference: b - a, low, high, pairs: each.len() }
    });
    all.collect()
}
