//! What the finished pairs say, and whether both arms serve.

use super::{Experiment, SAMPLE_RATIO_ALPHA};
use crate::cost;
use crate::design::{Arm, Plan};
use crate::guard::{Guard, Relative};
use crate::metric::{Basis, Metric};
use crate::overall::{Overall, Part, overall};
use crate::report::Block;
use crate::sample::Unit;
use crate::tail::Tail;

/// Level at which an arm is said not to serve units of a kind.
const SERVED_ALPHA: f64 = 0.005;
/// An arm that served less than this part of the other's units did not serve, in this pair.
const SERVED_PART: u64 = 4;
/// Pairs in which neither arm served so many say nothing of that.
const SERVED_MIN: u64 = 10;
/// The upper bound of B's overall figure must not be worse than A's by more than this, or the
/// margin.
pub const OVERALL_MARGIN: f64 = 0.2;
/// Standard deviations by which B's slow blocks must exceed A's to be more than chance.
const SLOW_BLOCKS_SD: f64 = 1.5;
/// Pairs without which nothing is futile.
const FUTILE_PAIRS_MIN: usize = 40;
/// It is futile to need so many times the time that is left.
const FUTILE_FACTOR: f64 = 3.0;
/// Evidence of 2 hints at a difference.
const FUTILE_LN_E_MAX: f64 = 0.69;

/// Whether more blocks of B than of A were slow, by more than chance makes likely: a slow state that has been seen in
/// few blocks yet does not show in the figure over all requests.
pub fn is_more_than_chance([a, b]: [usize; 2]) -> bool {
    let (a, b) = (a as f64, b as f64);
    b > a + SLOW_BLOCKS_SD * a.sqrt()
}

/// The largest difference that is not "worse", on the logarithmic scale.
pub(crate) fn shift(plan: &Plan) -> f64 {
    let ln = plan.margin.ln_1p();
    if plan.metric.lower_is_better() { ln } else { -ln }
}

/// Each arm's blocks in which this figure is worse than twice the median of A's.
pub(crate) fn slow_by(
    blocks: &[Block],
    figure: impl Fn(&Block) -> Option<f64>,
    lower_is_better: bool,
) -> [usize; 2] {
    let values = |arm| {
        let blocks = blocks.iter().filter(move |block| block.arm == arm);
        blocks.filter_map(&figure)
    };
    let mut of_a: Vec<f64> = values(Arm::A).collect();
    of_a.sort_by(f64::total_cmp);
    let Some(median) = of_a.get(of_a.len() / 2).copied() else { return [0; 2] };
    let is_slow = |value: &f64| match lower_is_better {
        true => *value > 2.0 * median,
        false => *value < median / 2.0,
    };
    [Arm::A, Arm::B].map(|arm| values(arm).filter(is_slow).count())
}

/// What the finished pairs say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// B is better in the sequential test and not worse over all requests.
    Better,
    /// B is worse in the sequential test.
    Worse,
    /// B does more best-effort work, and its requests take surely longer than that may cost.
    TooSlow,
    /// B is better in the sequential test, and that is not enough yet.
    BetterInMost,
    /// The pairs show no difference so far.
    Open,
}

/// The bet on which arm does not serve units of a kind. Under the null it is a fair coin whose block
/// the one without any was.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Served {
    /// Logarithms of the wealth of those who bet on A and on B not serving.
    ln: [f64; 2],
}

impl Served {
    /// A pair's numbers of units that ended.
    pub(super) fn push(&mut self, a: u64, b: u64) {
        if a.max(b) < SERVED_MIN || a.min(b) * SERVED_PART > a.max(b) {
            return;
        }
        let failed = if a < b { Arm::A } else { Arm::B };
        self.ln[failed.index()] += 1.95_f64.ln();
        self.ln[failed.other().index()] += 0.05_f64.ln();
    }

    pub(super) fn failed(&self) -> Option<Arm> {
        let enough = |arm: &Arm| self.ln[arm.index()] >= (2.0 / SERVED_ALPHA).ln();
        [Arm::A, Arm::B].into_iter().find(enough)
    }
}

impl Experiment {
    pub(super) fn judge(&self) -> Judgement {
        let pairs = self.differences.len();
        let Some(is_higher) = self.decision.rejected_for_more(self.plan.alpha) else {
            return Judgement::Open;
        };
        if 2 * pairs < self.plan.blocks_min as usize {
            return Judgement::Open;
        }
        if is_higher == self.plan.metric.lower_is_better() {
            return Judgement::Worse;
        }
        if cost::in_most_blocks(self).is_some() {
            return Judgement::TooSlow;
        }
        if 2 * pairs < self.blocks_min_better() {
            return Judgement::BetterInMost;
        }
        // B's lower times under a load that it did not serve say little.
        let lost = self.other_load().any(|(_, b_is_less)| b_is_less);
        match self.overall() {
            Some(overall)
                if self.unjudged().is_empty()
                    && !lost
                    && !is_more_than_chance(self.slow_blocks())
                    && self.is_overall_well(&overall)
                    && cost::is_low(self) =>
            {
                Judgement::Better
            }
            _ => Judgement::BetterInMost,
        }
    }

    /// Whether B's overall figure is not worse, by the margin, and surely not much worse.
    fn is_overall_well(&self, overall: &Overall) -> bool {
        let (margin, most) = (self.plan.margin, self.plan.margin.max(OVERALL_MARGIN));
        if self.plan.metric.lower_is_better() {
            overall.ln_ratio <= margin.ln_1p()
                && overall.bounds.high.is_some_and(|high| high < most.ln_1p())
        } else {
            overall.ln_ratio >= -margin.ln_1p()
                && overall.bounds.low.is_some_and(|low| low > -most.ln_1p())
        }
    }

    /// Blocks without which B is not preferred.
    pub(crate) fn blocks_min_better(&self) -> usize {
        let of_requests = self.plan.metric != Metric::BeThroughput || cost::matters(self);
        if of_requests { self.plan.blocks_min_better as usize } else { 0 }
    }

    /// Each arm's blocks whose figure is worse than twice the median of A's.
    pub fn slow_blocks(&self) -> [usize; 2] {
        slow_by(&self.blocks, |block| block.value, self.plan.metric.lower_is_better())
    }

    /// Whether it is not worth going on: a difference of 10 % would take much longer than there is
    /// time, and nothing hints at a larger one.
    pub(super) fn is_futile(&self, elapsed_ns: u64) -> bool {
        let pairs = self.differences.len();
        if self.plan.to_end || pairs < FUTILE_PAIRS_MIN || !pairs.is_multiple_of(10) {
            return false;
        }
        let left_s = self.plan.time_ns_max.saturating_sub(elapsed_ns) as f64 / 1e9;
        let needs_s = crate::verdict::difference_needs_s(self).unwrap_or(0.0);
        let hints = self.decision.ln_e() > FUTILE_LN_E_MAX;
        self.judgement == Judgement::Open && !hints && needs_s > FUTILE_FACTOR * left_s
    }

    /// Guards that have had nothing to judge so far, and what was missing.
    pub fn unjudged(&self) -> Vec<String> {
        self.window.unjudged().chain(self.relative.iter().filter_map(Relative::unjudged)).collect()
    }

    /// Units that both arms must serve as many of: requests, and tokens if something is judged by them.
    pub(crate) fn compared(&self) -> impl Iterator<Item = Unit> + use<> {
        let guards = self.plan.guards.iter().map(Guard::unit);
        let has_tokens =
            guards.chain([self.plan.metric.unit()]).any(|unit| unit == Some(Unit::Token));
        Unit::ALL.into_iter().filter(move |unit| *unit == Unit::Request || has_tokens)
    }

    /// Units of which the arms surely served different numbers, and whether B served fewer. How many tokens a busy
    /// service makes follows from how long each takes: they must differ by more than a figure may.
    pub(crate) fn other_load(&self) -> impl Iterator<Item = (Unit, bool)> + '_ {
        let differs = |unit: &Unit| self.sample_ratio(*unit).rejects(SAMPLE_RATIO_ALPHA);
        self.compared().filter(differs).filter_map(|unit| {
            let [a, b] = [Arm::A, Arm::B].map(|arm| self.per_s(unit, arm));
            let most = 1.0 + self.plan.margin.max(OVERALL_MARGIN);
            let is_other = unit == Unit::Request || a.max(b) > most * a.min(b);
            is_other.then_some((unit, b < a))
        })
    }

    /// Units a second that an arm served.
    pub(crate) fn per_s(&self, unit: Unit, arm: Arm) -> f64 {
        let blocks = || self.blocks.iter().filter(move |b| b.arm == arm);
        let seconds: f64 = blocks().map(|b| b.measured_s).sum();
        blocks().map(|b| b.count(unit)).sum::<u64>() as f64 / seconds.max(1e-9)
    }

    /// Both arms' figures over all of their finished pairs.
    pub fn overall(&self) -> Option<Overall> {
        self.overall_of(self.plan.metric)
    }

    /// The same of another metric.
    pub(crate) fn overall_of(&self, metric: Metric) -> Option<Overall> {
        overall(&self.parts(metric), self.plan.alpha, self.plan.seed)
    }

    /// Each finished pair's parts, A's first. B's requests include what it took over from A.
    pub fn parts(&self, metric: Metric) -> Vec<(Part, Part)> {
        let unit = metric.unit().unwrap_or(Unit::Request);
        let part = |block: &Block, (arm, own, inherited): (Arm, Tail, Tail)| {
            let mut tail = own;
            if arm == Arm::B {
                tail.extend(&inherited);
            }
            match metric.basis() {
                Basis::Tail(_) => Part::Requests(tail),
                Basis::Work => Part::Sums(block.be_work_ns as f64, block.measured_s),
                Basis::Attainment(_) => {
                    Part::Sums(tail.kept.within as f64, tail.kept.judged as f64)
                }
            }
        };
        let mut parts = self
            .blocks
            .iter()
            .zip(self.ledgers[unit.index()].tails())
            .map(|(b, t)| (b.arm, part(b, t)));
        let mut pairs = Vec::with_capacity(self.blocks.len() / 2);
        while let (Some((arm, first)), Some((_, second))) = (parts.next(), parts.next()) {
            pairs.push(if arm == Arm::A { (first, second) } else { (second, first) });
        }
        pairs
    }
}
