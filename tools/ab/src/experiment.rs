//! The state machine of an experiment: time and samples come in, what to do comes out.
//!
//! ```text
//! Between --Switch(arm)--> switched --> Washout --Take(cut)--> Measuring --Take(cut)--> Between
//!                                          \____________Take, every TICK____________/
//! Between (after a pair, with less exposure) --Switch(A)--> Resting --Take(cut)--> Between
//! any --(decided, out of time, guard, fault, no traffic, stop)--> Ended
//! ```
//!
//! A `Take` with `cut` begins a new stretch: requests under way are told from those that begin
//! in it, and belong where they began ([`crate::ledger`]). Takes in between only look, so that a
//! guard's breach is seen within a tick.

mod block;
mod judge;

use crate::accident::{self, Before, GuardReport};
use crate::betting::Betting;
use crate::design::{Arm, Assignment, Plan, PlanError};
use crate::fairness::{BestEffort, Hidden};
use crate::guard::{Beyond, Heard, Relative, Shadow, Window};
use crate::interval;
use crate::ledger::Ledger;
use crate::load::Adjuster;
use crate::pace::Pace;
use crate::report::Block;
use crate::sample::{Carried, Sample, Unit};
use judge::Served;
pub use judge::{Judgement, OVERALL_MARGIN, is_more_than_chance};
pub(crate) use judge::{shift, slow_by};
use serde::{Deserialize, Serialize};

/// How often it is looked at what happens.
pub const TICK_NS: u64 = 50_000_000;
/// Level of the sample-ratio check: an alarm must be worth it.
pub const SAMPLE_RATIO_ALPHA: f64 = 0.001;
/// Pairs in a row that say nothing, after which there is no traffic.
const EMPTY_PAIRS_MAX: u32 = 10;
/// Pairs beyond which a decision for B is looked for at each fifth pair only.
const PAIRS_EACH: usize = 60;
const PAIRS_APART: usize = 5;

/// What the caller is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Put a fresh instance of this arm's active policy, begin a new sample, and
    /// call [`Experiment::switched`] or [`Experiment::failed`].
    Switch(Arm),
    /// At `at_ns` take the sample and pass it to [`Experiment::took`].
    Take {
        at_ns: u64,
        /// Whether a new stretch begins.
        cut: bool,
    },
    /// The experiment is over: put A active.
    End,
}

/// Why an experiment ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The test rejected "no difference".
    Decided,
    /// The experiment took as long as its plan allows.
    MaxTime,
    /// A difference of 10 % would take much longer than there was time.
    Futile,
    /// B did not keep a guard's limit.
    Guard,
    /// A policy lost a turn or could not be started.
    PolicyFailed,
    /// One arm served requests, and the other hardly any; `arm` is the other.
    NotServed,
    /// Pairs of blocks say nothing: hardly any request, or no best-effort work.
    NoTraffic,
    /// An operator stopped it.
    Stopped,
    /// The core is going down.
    CoreStopping,
    /// The core died: what is reported was known shortly before.
    Interrupted,
    /// A defect of the core: its log says more.
    Internal,
}

/// How and when an experiment ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    pub reason: Reason,
    /// The arm active then.
    pub arm: Option<Arm>,
    pub message: String,
    /// When, from the start, ns.
    pub after_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Between,
    Washout {
        until_ns: u64,
    },
    Measuring {
        until_ns: u64,
    },
    /// A serves and nothing counts.
    Resting {
        until_ns: u64,
    },
}

#[derive(Clone, Debug)]
pub struct Experiment {
    plan: Plan,
    assignment: Assignment,
    arm: Arm,
    phase: Phase,
    pace: Pace,
    /// How long A is to serve before the next pair, ns.
    rest_ns: u64,
    started_ns: u64,
    looked_ns: u64,
    /// Turns that policies had lost before it began.
    faults: u64,
    measured: Sample,
    /// Empty ones, which need not be allocated anew.
    spare: Vec<Sample>,
    /// Of each [`Unit`], those that began in this block's washout and ended after it.
    late: [Vec<Carried>; 2],
    /// Best-effort clients when this block's measured part began.
    best_effort: Vec<BestEffort>,
    hidden: Hidden,
    /// The first block of the pair, and how many of each [`Unit`] began and ended in it.
    first: Option<(Arm, Sample, [u64; 2])>,
    /// Of each [`Unit`], those that began and ended in a block of each arm.
    served_under: [[u64; 2]; 2],
    /// One ledger for each [`Unit`].
    ledgers: [Ledger; 2],
    /// Of each [`Unit`], those that ended after a cut and are not known.
    lost: [u64; 2],
    blocks: Vec<Block>,
    adjuster: Adjuster,
    /// What load does not explain of them.
    differences: Vec<f64>,
    pairs_empty: u32,
    empty_in_a_row: u32,
    betting: Betting,
    /// The same with the margin taken out: what decides.
    decision: Betting,
    judgement: Judgement,
    /// Of each [`Unit`]; only those of [`Experiment::compared`] are looked at.
    served: [Served; 2],
    sample_ratios: [Betting; 2],
    window: Window,
    /// Guards relative to A.
    relative: Vec<Relative>,
    /// What the guards would have said of A.
    shadow: Shadow,
    /// Requests before the first block.
    before: Before,
    /// How likely an accidental breach is, as far as is known.
    accidents: Vec<GuardReport>,
    ended: Option<Ended>,
}

impl Experiment {
    /// Begin.
    ///
    /// # Errors
    /// If the plan makes no sense.
    pub fn new(plan: Plan, now_ns: u64) -> Result<Self, PlanError> {
        plan.check()?;
        let mut assignment = Assignment::new(plan.seed);
        let arm = assignment.next_arm();
        Ok(Experiment {
            window: Window::new(plan.guards.clone(), plan.slo_ns, plan.guard_window_ns),
            relative: Relative::all(&plan.guards),
            shadow: Shadow::new(&plan.guards, plan.slo_ns, plan.guard_window_ns),
            ledgers: Unit::ALL
                .map(|unit| Ledger::new(plan.slo_ns.filter(|_| unit == Unit::Request))),
            pace: Pace::new(&plan),
            accidents: accident::guards_before(&plan, &Before::default()),
            before: Before::default(),
            rest_ns: 0,
            adjuster: Adjuster::default(),
            late: Default::default(),
            lost: [0; 2],
            best_effort: Vec::new(),
            hidden: Hidden::default(),
            decision: Betting::new(),
            judgement: Judgement::Open,
            served: Default::default(),
            served_under: Default::default(),
            plan,
            assignment,
            arm,
            phase: Phase::Between,
            started_ns: now_ns,
            looked_ns: now_ns,
            faults: 0,
            measured: Sample::new(),
            spare: Vec::new(),
            first: None,
            blocks: Vec::new(),
            differences: Vec::new(),
            pairs_empty: 0,
            empty_in_a_row: 0,
            betting: Betting::new(),
            sample_ratios: [Betting::new(), Betting::new()],
            ended: None,
        })
    }

    pub fn next_action(&self) -> Action {
        if self.ended.is_some() {
            return Action::End;
        }
        let Some(until_ns) = self.cut_at_ns() else { return Action::Switch(self.arm()) };
        let tick_ns = self.looked_ns.saturating_add(TICK_NS);
        // No tick right before a cut.
        let cut = tick_ns.saturating_add(TICK_NS / 2) >= until_ns;
        Action::Take { at_ns: if cut { until_ns } else { tick_ns }, cut }
    }

    /// When the present stretch ends; `None` between two.
    pub fn cut_at_ns(&self) -> Option<u64> {
        match self.phase {
            Phase::Between => None,
            Phase::Washout { until_ns }
            | Phase::Measuring { until_ns }
            | Phase::Resting { until_ns } => Some(until_ns),
        }
    }

    /// Before the first block: turns that policies lost earlier are not the arms'.
    pub fn faults_before(&mut self, faults: u64) {
        self.faults = faults;
    }

    /// Before the first block: what requests did until now says how likely guards are breached by accident.
    pub fn requests_before(&mut self, before: Before) {
        self.accidents = accident::guards_before(&self.plan, &before);
        self.before = before;
    }

    pub(crate) fn before(&self) -> &Before {
        &self.before
    }

    /// A policy was replaced by the arm asked for; until then policies had lost so many turns. Those lost since the
    /// last look are of the policy that was replaced.
    pub fn replaced(&mut self, now_ns: u64, faults: u64) {
        if self.ended.is_some() || faults <= self.faults {
            return;
        }
        let replaced = self.ledgers[0].arm();
        let who = match replaced {
            Some(arm) => format!("the policy of arm {arm}"),
            None => "the policy that was active before the first block".into(),
        };
        self.end(now_ns, Reason::PolicyFailed, format!("{who} lost a turn before it was replaced"));
        self.blame(replaced);
    }

    /// The arm asked for is active, after [`Experiment::replaced`]. `sample` is what was recorded since the last cut;
    /// of that only requests that began before count.
    pub fn switched(&mut self, now_ns: u64, sample: &Sample) {
        if self.ended.is_some() || self.phase != Phase::Between {
            return;
        }
        self.looked_ns = now_ns;
        if sample.faults > self.faults {
            let message =
                format!("the policy of arm {} lost a turn while it took over", self.arm());
            self.end(now_ns, Reason::PolicyFailed, message);
            return self.blame(Some(self.arm()));
        }
        self.look(now_ns, sample);
        if self.rest_ns > 0 {
            return self.rest(now_ns);
        }
        let (block_ns, washout_ns) = (self.pace.block_ns(), self.pace.washout_ns());
        for ledger in &mut self.ledgers {
            ledger.switch(self.arm, now_ns, washout_ns);
        }
        self.window.block_is(block_ns - washout_ns);
        self.measured.clear();
        self.late.iter_mut().for_each(Vec::clear);
        self.best_effort.clone_from(&sample.best_effort);
        self.phase = if washout_ns > 0 {
            Phase::Washout { until_ns: now_ns + washout_ns }
        } else {
            Phase::Measuring { until_ns: now_ns + block_ns }
        };
    }

    /// A serves between two pairs.
    fn rest(&mut self, now_ns: u64) {
        self.ledgers.iter_mut().for_each(|ledger| ledger.rest(now_ns));
        let until_ns = now_ns + std::mem::take(&mut self.rest_ns);
        self.phase = Phase::Resting { until_ns };
    }

    /// The arm asked for could not be put active, because of this arm; `None`: of neither.
    pub fn failed(&mut self, now_ns: u64, arm: Option<Arm>, message: String) {
        self.end(now_ns, Reason::PolicyFailed, message);
        self.blame(arm);
    }

    /// What was recorded since the last take. `cut` as [`Action::Take`] said.
    pub fn took(&mut self, now_ns: u64, cut: bool, sample: &Sample) {
        if self.ended.is_some() || self.phase == Phase::Between {
            return;
        }
        self.looked_ns = now_ns;
        if sample.faults > self.faults {
            let message = format!("the policy of arm {} lost a turn", self.arm());
            return self.end(now_ns, Reason::PolicyFailed, message);
        }
        self.look(now_ns, sample);
        let beyond = Unit::ALL.map(|unit| {
            let (ledger, carried) = (&self.ledgers[unit.index()], &sample.of(unit).carried);
            Beyond { carried: ledger.ended_of_b(carried), open: ledger.open_of_b() }
        });
        let b = (self.arm() == Arm::B).then_some(sample);
        if b.is_none() {
            self.shadow.add(sample);
        }
        if let Some(breach) = self.window.add(Heard { sample: b, beyond }) {
            return self.end(now_ns, Reason::Guard, breach);
        }
        match self.phase {
            Phase::Washout { .. } if cut => {
                self.phase = Phase::Measuring { until_ns: now_ns + self.pace.measured_ns() };
                self.best_effort.clone_from(&sample.best_effort);
            }
            Phase::Measuring { .. } => {
                self.measured.extend(sample);
                if cut {
                    self.end_block(now_ns);
                }
            }
            Phase::Resting { .. } if cut => self.phase = Phase::Between,
            Phase::Washout { .. } | Phase::Resting { .. } | Phase::Between => {}
        }
    }

    /// End it from outside.
    pub fn stop(&mut self, now_ns: u64, reason: Reason, message: &str) {
        self.end(now_ns, reason, message.to_owned());
    }

    /// Add to how it ended what the caller knows of it.
    pub fn explain(&mut self, more: &str) {
        if let Some(ended) = &mut self.ended {
            ended.message = format!("{}: {more}", ended.message);
        }
    }

    /// Notes the arm that caused the end.
    pub(crate) fn blame(&mut self, arm: Option<Arm>) {
        if let Some(ended) = &mut self.ended {
            ended.arm = arm;
        }
    }

    fn end(&mut self, now_ns: u64, reason: Reason, message: String) {
        if self.ended.is_none() {
            let arm = (self.phase != Phase::Between).then_some(self.arm());
            let after_ns = now_ns.saturating_sub(self.started_ns);
            self.ended = Some(Ended { reason, arm, message, after_ns });
        }
    }

    fn end_pair(&mut self, now_ns: u64, a: &Sample, b: &Sample) {
        let (metric, slo_ns) = (self.plan.metric, self.plan.slo_ns);
        let ln = |s: &Sample| metric.value(s, slo_ns).map(f64::ln);
        let says = metric.pair_says_something(a, b);
        let difference = ln(a).zip(ln(b)).map(|(a, b)| b - a).filter(|_| says);
        let loads = Unit::ALL.map(|unit| {
            let rate = |s: &Sample| {
                let count = s.of(unit).count() as f64;
                (count + 1.0) / (s.span_ns() as f64).max(1.0)
            };
            rate(b).ln() - rate(a).ln()
        });
        for (ratio, load) in self.sample_ratios.iter_mut().zip(loads) {
            ratio.push(load);
        }
        // Tokens are what policies trade for their times: only the number of requests is taken out.
        let load = loads[Unit::Request.index()];
        // Each of them, so that none misses a pair.
        let breaches = self.relative.iter_mut().filter_map(|guard| guard.push(a, b));
        let breach = breaches.fold(None, |first: Option<String>, next| first.or(Some(next)));
        self.pace.ended(a, b, metric);
        self.rest_ns = self.pace.rest_ns();
        match difference {
            Some(difference) => {
                let difference = self.adjuster.push(difference, load);
                self.empty_in_a_row = 0;
                self.differences.push(difference);
                self.betting.push(difference);
                self.decision.push(difference - shift(&self.plan));
            }
            None => {
                self.pairs_empty += 1;
                self.empty_in_a_row += 1;
            }
        }
        let pairs = self.differences.len();
        if pairs <= PAIRS_EACH || pairs.is_multiple_of(PAIRS_APART) {
            self.judgement = self.judge();
        }
        let blocks = self.blocks.len();
        if blocks <= 2 * PAIRS_EACH || blocks.is_multiple_of(2 * PAIRS_APART) {
            self.accidents = accident::guards(self);
        }
        let elapsed_ns = now_ns.saturating_sub(self.started_ns);
        let failed =
            self.compared().find_map(|unit| Some((unit, self.served[unit.index()].failed()?)));
        if let Some((unit, arm)) = failed {
            let served = |arm: Arm| self.served_under[unit.index()][arm.index()];
            let message = format!(
                "{arm} served {} {} while {} served {}",
                served(arm),
                unit.plural(),
                arm.other(),
                served(arm.other())
            );
            self.end(now_ns, Reason::NotServed, message);
            self.blame(Some(arm));
        } else if let Some(breach) = breach {
            self.end(now_ns, Reason::Guard, breach);
            self.blame(Some(Arm::B));
        } else if self.is_decided() && !self.plan.to_end {
            let message = format!("after {blocks} blocks");
            self.end(now_ns, Reason::Decided, message);
        } else if self.empty_in_a_row >= EMPTY_PAIRS_MAX {
            let message = format!(
                "{EMPTY_PAIRS_MAX} pairs of blocks in a row say nothing of {metric}: {}",
                metric.missing(slo_ns)
            );
            self.end(now_ns, Reason::NoTraffic, message);
        } else if self.is_futile(elapsed_ns) {
            let message =
                format!("after {blocks} blocks; a difference of 10 % would take too long");
            self.end(now_ns, Reason::Futile, message);
        } else if elapsed_ns + self.rest_ns + 2 * self.pace.block_ns() > self.plan.time_ns_max {
            let message = format!("{blocks} blocks; another pair would take too long");
            self.end(now_ns, Reason::MaxTime, message);
        }
    }

    /// What the finished pairs say.
    pub fn judgement(&self) -> Judgement {
        self.judgement
    }

    /// Whether nothing more is to be found out.
    pub fn is_decided(&self) -> bool {
        matches!(self.judgement, Judgement::Better | Judgement::Worse | Judgement::TooSlow)
    }

    /// The evidence against "as good as the margin allows": what decides.
    pub fn decision(&self) -> &Betting {
        &self.decision
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What the guards would have said of A.
    pub fn shadow(&self) -> &Shadow {
        &self.shadow
    }

    /// How likely a B as good as A breaches each guard by accident: from requests before the test and, once the first
    /// pair has ended, A's.
    pub fn accidents(&self) -> &[GuardReport] {
        &self.accidents
    }

    /// The arm active, or to be put active next.
    pub fn arm(&self) -> Arm {
        let rests = self.rest_ns > 0 || matches!(self.phase, Phase::Resting { .. });
        if rests { Arm::A } else { self.arm }
    }

    /// Length of the present pair's blocks, ns.
    pub fn block_ns(&self) -> u64 {
        self.pace.block_ns()
    }

    /// Whether the block's washout is under way.
    pub fn in_washout(&self) -> bool {
        matches!(self.phase, Phase::Washout { .. })
    }

    /// How it ended, if it has.
    pub fn ended(&self) -> Option<&Ended> {
        self.ended.as_ref()
    }

    /// The `now_ns` at which it began.
    pub fn started_ns(&self) -> u64 {
        self.started_ns
    }

    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Logarithmic differences (B less A) of the pairs that say something.
    pub fn differences(&self) -> &[f64] {
        &self.differences
    }

    /// Pairs that say nothing.
    pub fn pairs_empty(&self) -> u32 {
        self.pairs_empty
    }

    pub fn betting(&self) -> &Betting {
        &self.betting
    }

    /// The evidence that the arms served different numbers of these.
    pub fn sample_ratio(&self, unit: Unit) -> &Betting {
        &self.sample_ratios[unit.index()]
    }

    /// Units that were not counted, because a client had too many under way at a cut.
    pub(crate) fn lost(&self) -> impl Iterator<Item = (Unit, u64)> + '_ {
        let lost = Unit::ALL.map(|unit| (unit, self.lost[unit.index()]));
        lost.into_iter().filter(|(_, lost)| *lost > 0)
    }

    /// The estimated effect: B's figure over A's.
    pub fn ratio(&self) -> f64 {
        interval::estimate(&self.differences).exp()
    }
}

#[cfg(test)]
#[path = "experiment_tests.rs"]
mod tests;
