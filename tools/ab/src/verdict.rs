//! What an operator is to do after a test.

use crate::cost;
use crate::design::Arm;
use crate::experiment::{Experiment, Judgement, OVERALL_MARGIN, Reason};
use crate::metric::Metric;
use crate::overall::Overall;
use serde::{Deserialize, Serialize};

/// Pairs that find an effect of `ln_ratio` in 80 % of tests, times (`ln_ratio` / sd)^2: from
/// simulations of queues at 50 and 500 requests a second.
const PAIRS_80: f64 = 19.0;
/// The effect that a forecast is about.
const FORECAST_RATIO: f64 = 1.1;
/// Pairs without which nothing is forecast, and no interval is given.
pub const PAIRS_MIN: usize = 10;
/// If B's overall figure is the worse one in so many of the samples drawn anew, it is not promoted.
const WORSE_MAX: f64 = 0.2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// B is better, in the sequential test and over all requests.
    PromoteB,
    /// B is worse, or not shown to be as good in all blocks, or failed.
    KeepA,
    /// B breached a guard.
    Withdrawn,
    /// Neither is shown to be better; more time may show it.
    Undecided,
    /// The test says nothing about the policies.
    Invalid,
}

impl Verdict {
    pub fn as_str(self) -> &'static str {
        match self {
            Verdict::PromoteB => "promote B",
            Verdict::KeepA => "keep A",
            Verdict::Withdrawn => "withdrawn",
            Verdict::Undecided => "undecided",
            Verdict::Invalid => "invalid",
        }
    }
}

/// A verdict with its reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Conclusion {
    pub verdict: Verdict,
    pub why: String,
    /// If it is undecided: how much longer it would have to run, s, as far as that is known.
    pub needs_s: Option<f64>,
}

/// A ratio in words: `12.3 % lower`.
pub fn ratio_in_words(ratio: f64) -> String {
    let percent = (ratio - 1.0).abs() * 100.0;
    format!("{percent:.1} % {}", if ratio < 1.0 { "lower" } else { "higher" })
}

/// What the figure over all requests is called: `the p99 of all requests`.
pub fn overall_name(metric: Metric, overall: &Overall) -> String {
    match (metric.unit(), overall.quantile) {
        (Some(unit), Some(share)) => {
            format!("the {} of all {}", quantile_name(share), unit.plural())
        }
        _ => format!("{metric} over all blocks"),
    }
}

/// Name of a percentile, such as `p99` or `p99.3`.
pub fn quantile_name(share: f64) -> String {
    let text = format!("{:.1}", share * 100.0);
    format!("p{}", text.trim_end_matches(".0"))
}

/// How many pairs a difference of 10 % needs in 80 % of tests; `None` from too few.
fn pairs_needed(differences: &[f64]) -> Option<f64> {
    if differences.len() < PAIRS_MIN {
        return None;
    }
    let median = |mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let centre = median(differences.to_vec());
    let spread = median(differences.iter().map(|d| (d - centre).abs()).collect());
    // Of a normal distribution; what is farther out is bounded by the test.
    let sd = 1.4826 * spread;
    Some(PAIRS_80 * (sd / FORECAST_RATIO.ln()).powi(2))
}

/// How long so many more pairs take, s.
fn pairs_take_s(experiment: &Experiment, more: f64) -> f64 {
    let pairs = experiment.differences().len() as f64;
    let pair_s = 2.0 * experiment.block_ns() as f64 / 1e9;
    // At the rate at which pairs say something.
    let said = pairs / (pairs + f64::from(experiment.pairs_empty()));
    (more.max(0.0) * pair_s / said).min(1e9)
}

/// How much longer until the sequential test most likely finds a difference of 10 %, s.
pub(crate) fn difference_needs_s(experiment: &Experiment) -> Option<f64> {
    let pairs = experiment.differences().len() as f64;
    let wanted = pairs_needed(experiment.differences())?;
    Some(pairs_take_s(experiment, wanted - pairs))
}

/// How much longer until a difference of 10 % would most likely be found and B could be promoted,
/// s; if B is better in most blocks, until the figure over all requests is as sure as it must be.
fn needs_s(experiment: &Experiment, overall: Option<&Overall>) -> Option<f64> {
    let plan = experiment.plan();
    let pairs = experiment.differences().len() as f64;
    let least = experiment.blocks_min_better().max(plan.blocks_min as usize) as f64 / 2.0;
    if experiment.judgement() != Judgement::BetterInMost {
        let needed = pairs_needed(experiment.differences())?.max(least);
        return Some(pairs_take_s(experiment, needed - pairs));
    }
    if pairs < PAIRS_MIN as f64 {
        return None;
    }
    // The distance of a bound falls with the square root of the number of pairs.
    let until = |overall: &Overall, sign: f64, allowed: f64| {
        let worst = if sign > 0.0 { overall.bounds.high } else { overall.bounds.low };
        let distance = (worst? - overall.ln_ratio).abs();
        let allowed = allowed.ln() - sign * overall.ln_ratio;
        (allowed > 0.0).then(|| pairs * (distance / allowed).powi(2))
    };
    let sign = if plan.metric.lower_is_better() { 1.0 } else { -1.0 };
    let overall = overall.filter(|o| sign * o.ln_ratio <= 0.0)?;
    let mut needed = least.max(until(overall, sign, 1.0 + OVERALL_MARGIN.max(plan.margin))?);
    if let Some(allowed) = cost::allowed_of(plan, experiment.blocks()) {
        needed = needed.max(until(&cost::tail(experiment)?, 1.0, allowed)?);
    }
    Some(pairs_take_s(experiment, needed - pairs))
}

fn undecided(experiment: &Experiment, overall: Option<&Overall>) -> Conclusion {
    let needs_s = needs_s(experiment, overall);
    let metric = experiment.plan().metric;
    let most_blocks = experiment.judgement() == Judgement::BetterInMost;
    let found = if most_blocks && cost::matters(experiment) {
        "B does more best-effort work; that its requests are not slower is not shown yet".to_owned()
    } else if most_blocks {
        "B is better in most blocks; that it is not worse in some is not shown yet".to_owned()
    } else {
        format!("no difference on {metric} is shown")
    };
    let why = match needs_s {
        None if experiment.differences().len() >= PAIRS_MIN => found,
        None => format!("{found}; {PAIRS_MIN} pairs of blocks are needed for a forecast"),
        Some(s) if s >= 1.0 => {
            let minutes = (s / 60.0 * 10.0).ceil() / 10.0;
            if most_blocks {
                format!("{found} and needs {minutes} more minutes")
            } else {
                format!("needs {minutes} more minutes to show a difference of 10 %; so far {found}")
            }
        }
        Some(_) if most_blocks => found,
        Some(_) => format!(
            "{found}; a difference of 10 % would most likely have been: more time tells smaller ones"
        ),
    };
    Conclusion { verdict: Verdict::Undecided, why, needs_s }
}

/// What the test says to do, now or after its end.
pub fn conclude(experiment: &Experiment, overall: Option<&Overall>) -> Conclusion {
    let (plan, ended) = (experiment.plan(), experiment.ended());
    let say = |verdict, why: String| Conclusion { verdict, why, needs_s: None };
    let message = ended.map_or("", |ended| &ended.message).to_owned();
    let arm = ended.and_then(|ended| ended.arm);
    match ended.map(|ended| ended.reason) {
        Some(Reason::Guard) => return say(Verdict::Withdrawn, format!("guard {message}")),
        Some(Reason::NotServed) if arm == Some(Arm::A) => {
            // What B was compared with is no service, and so few pairs say nothing of B's own tail.
            let why = format!("{message}: find out why A does not serve, and test again");
            return say(Verdict::Invalid, why);
        }
        Some(Reason::NotServed) => return say(Verdict::KeepA, message),
        Some(Reason::PolicyFailed) if arm == Some(Arm::B) => return say(Verdict::KeepA, message),
        Some(
            Reason::PolicyFailed
            | Reason::NoTraffic
            | Reason::CoreStopping
            | Reason::Interrupted
            | Reason::Internal,
        ) => return say(Verdict::Invalid, message),
        None | Some(Reason::Decided | Reason::MaxTime | Reason::Futile | Reason::Stopped) => {}
    }
    let metric = plan.metric;
    let whole = |overall: &Overall| {
        format!("{} is {}", overall_name(metric, overall), ratio_in_words(overall.ln_ratio.exp()))
    };
    match experiment.judgement() {
        Judgement::TooSlow => {
            return say(Verdict::KeepA, cost::in_most_blocks(experiment).unwrap_or_default());
        }
        Judgement::Better => {
            let why = overall.map_or_else(String::new, whole);
            return say(Verdict::PromoteB, why);
        }
        Judgement::Worse => {
            if let Some((unit, _)) = experiment.other_load().find(|(_, b_is_less)| !b_is_less) {
                let why = format!("B is worse, but it served more {} than A", unit.plural());
                return say(Verdict::Invalid, why);
            }
            return say(Verdict::KeepA, format!("B is worse on {metric}, block by block"));
        }
        Judgement::BetterInMost if ended.is_some() => {
            if let Some(why) = cost::in_the_end(experiment) {
                return say(Verdict::KeepA, why);
            }
        }
        Judgement::BetterInMost | Judgement::Open => {}
    }
    if let Some(overall) = overall.filter(|_| ended.is_some()) {
        let sign = if metric.lower_is_better() { 1.0 } else { -1.0 };
        let surely = if sign > 0.0 { overall.bounds.low } else { overall.bounds.high };
        if surely.is_some_and(|bound| sign * bound > OVERALL_MARGIN.max(plan.margin).ln_1p())
            && experiment.differences().len() >= PAIRS_MIN
        {
            return say(Verdict::KeepA, format!("{}, whatever most blocks say", whole(overall)));
        }
        let seen = 2 * experiment.differences().len() >= plan.blocks_min_better as usize;
        if experiment.judgement() == Judgement::BetterInMost && seen {
            if let Some((unit, _)) = experiment.other_load().find(|(_, b_is_less)| *b_is_less) {
                let why = format!(
                    "B served fewer {} than A: its figures are those of another load",
                    unit.plural()
                );
                return say(Verdict::Invalid, why);
            }
            let worse = if sign > 0.0 { overall.higher } else { 1.0 - overall.higher };
            if sign * overall.ln_ratio > plan.margin.ln_1p() || worse >= WORSE_MAX {
                let why = format!(
                    "B is better in most blocks, but {}, and worse than A's with a chance of {:.0} %",
                    whole(overall),
                    worse * 100.0
                );
                return say(Verdict::KeepA, why);
            }
        }
    }
    // Without what a guard needs it protects nobody.
    if ended.is_some()
        && experiment.judgement() == Judgement::BetterInMost
        && let Some(unjudged) = experiment.unjudged().into_iter().next()
    {
        return say(Verdict::Invalid, unjudged);
    }
    undecided(experiment, overall)
}
