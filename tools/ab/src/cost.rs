//! What more best-effort work may cost requests.
//!
//! If best-effort work decides, the sequential test says nothing of requests. So a B that does more of it is promoted
//! only if its requests take about as long as A's: in most blocks, in slow blocks, and over all requests. A guard with
//! a limit of its own on the tail says instead what users accept.

use crate::beside;
use crate::design::Plan;
use crate::experiment::{Experiment, OVERALL_MARGIN, is_more_than_chance, slow_by};
use crate::guard::Guard;
use crate::metric::Metric;
use crate::overall::Overall;
use crate::report::Block;
use crate::verdict::{PAIRS_MIN, overall_name, ratio_in_words};

/// What to do about a B that is kept out.
const ADVICE: &str = "a guard such as hp_p99<50ms says what it may cost";

/// B's times over A's at most; `None` if the metric, or a guard, says what requests may take.
pub(crate) fn allowed(plan: &Plan) -> Option<f64> {
    if plan.metric != Metric::BeThroughput || plan.guards.iter().any(Guard::is_on_tail) {
        return None;
    }
    let relative = plan.guards.iter().filter_map(Guard::times_a_of_tail);
    Some(relative.fold(1.0 + OVERALL_MARGIN.max(plan.margin), f64::max))
}

/// Whether blocks show what B costs: requests were served, and no guard allows what they may take.
pub(crate) fn matters(experiment: &Experiment) -> bool {
    allowed_of(experiment.plan(), experiment.blocks()).is_some()
}

/// The same as [`allowed`], and `None` without requests and tokens.
pub(crate) fn allowed_of(plan: &Plan, blocks: &[Block]) -> Option<f64> {
    allowed(plan).filter(|_| blocks.iter().any(|block| block.requests > 0 || block.tokens > 0))
}

/// The percentile of all requests, if it matters.
pub(crate) fn tail(experiment: &Experiment) -> Option<Overall> {
    matters(experiment).then(|| experiment.overall_of(Metric::HpP99)).flatten()
}

/// How many blocks of each arm had a p99 of more than twice the median of A's.
pub(crate) fn slow_blocks(blocks: &[Block]) -> [usize; 2] {
    slow_by(blocks, |block| block.hp_p99_ns.map(|ns| ns as f64), true)
}

/// Whether requests are shown to be as fast as they must be.
pub(crate) fn is_low(experiment: &Experiment) -> bool {
    let Some(allowed) = allowed_of(experiment.plan(), experiment.blocks()) else {
        return true;
    };
    if is_more_than_chance(slow_blocks(experiment.blocks())) {
        return false;
    }
    tail(experiment).and_then(|tail| tail.bounds.high).is_some_and(|high| high < allowed.ln())
}

/// If requests take surely longer than allowed in most blocks: why B is kept out.
pub(crate) fn in_most_blocks(experiment: &Experiment) -> Option<String> {
    let allowed = allowed(experiment.plan())?;
    let (name, ratio) = beside::slower(experiment, allowed)?;
    let words = ratio_in_words(ratio);
    Some(format!("B does more best-effort work, but its {name} is {words}: {ADVICE}"))
}

/// If all requests, or some blocks, are slower at the end of a test: why B is kept out.
pub(crate) fn in_the_end(experiment: &Experiment) -> Option<String> {
    let allowed = allowed_of(experiment.plan(), experiment.blocks())?;
    if experiment.differences().len() < PAIRS_MIN {
        return None;
    }
    // Surely slower, and most likely by more than is allowed.
    if let Some(tail) = tail(experiment)
        && tail.ln_ratio > allowed.ln()
        && tail.bounds.low.is_some_and(|low| low > 0.0)
    {
        let name = overall_name(Metric::HpP99, &tail);
        let words = ratio_in_words(tail.ln_ratio.exp());
        return Some(format!("B does more best-effort work, but {name} is {words}: {ADVICE}"));
    }
    let [a, b] = slow_blocks(experiment.blocks());
    // Three standard deviations of the difference, if slow blocks come independently.
    (b as f64 - a as f64 > 3.0 * ((a + b) as f64).sqrt()).then(|| {
        format!(
            "B does more best-effort work, but {b} of its blocks and {a} of A's had requests more than twice as slow as \
             usual: {ADVICE}"
        )
    })
}
