//! The state machine of an experiment: time and samples come in, what to do comes out.
//!
//! ```text
//! Between --Switch(arm)--> switched --> Washout --Take(cut)--> Measuring --Take(cut)--> Between
//!                                          \____________Take, every TICK____________/
//! any --(decided, out of time, guard, fault, no traffic, stop)--> Ended
//! ```
//!
//! A `Take` with `cut` begins a new stretch: requests under way belong to neither side.
//! Takes in between only look, so that a guard's breach is seen within a tick.

use crate::betting::Betting;
use crate::design::{Arm, Assignment, Plan, PlanError};
use crate::guard::Window;
use crate::interval;
use crate::report::Block;
use crate::sample::Sample;
use serde::{Deserialize, Serialize};

/// How often it is looked at what happens.
pub const TICK_NS: u64 = 50_000_000;
/// Level of the sample-ratio check: an alarm must be worth it.
pub const SAMPLE_RATIO_ALPHA: f64 = 0.001;
/// Pairs in a row that say nothing, after which there is no traffic.
const EMPTY_PAIRS_MAX: u32 = 10;

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
    /// It is over: put A active.
    End,
}

/// Why an experiment ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The test rejected "no difference".
    Decided,
    /// Out of time.
    MaxTime,
    /// B did not keep a guard's limit.
    Guard,
    /// A policy lost a turn or could not be started.
    PolicyFailed,
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

/// How it ended.
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
    Washout { until_ns: u64 },
    Measuring { until_ns: u64 },
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Experiment {
    plan: Plan,
    assignment: Assignment,
    arm: Arm,
    phase: Phase,
    started_ns: u64,
    looked_ns: u64,
    /// Turns that policies had lost before it began.
    faults: u64,
    measured: Sample,
    /// The first block of the pair.
    first: Option<(Arm, Sample)>,
    blocks: Vec<Block>,
    differences: Vec<f64>,
    pairs_empty: u32,
    empty_in_a_row: u32,
    betting: Betting,
    sample_ratio: Betting,
    window: Window,
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
            plan,
            assignment,
            arm,
            phase: Phase::Between,
            started_ns: now_ns,
            looked_ns: now_ns,
            faults: 0,
            measured: Sample::new(),
            first: None,
            blocks: Vec::new(),
            differences: Vec::new(),
            pairs_empty: 0,
            empty_in_a_row: 0,
            betting: Betting::new(),
            sample_ratio: Betting::new(),
            ended: None,
        })
    }

    /// What to do next.
    pub fn next_action(&self) -> Action {
        if self.ended.is_some() {
            return Action::End;
        }
        let until_ns = match self.phase {
            Phase::Between => return Action::Switch(self.arm),
            Phase::Washout { until_ns } | Phase::Measuring { until_ns } => until_ns,
        };
        let tick_ns = self.looked_ns.saturating_add(TICK_NS);
        // No tick right before a cut.
        let cut = tick_ns.saturating_add(TICK_NS / 2) >= until_ns;
        Action::Take { at_ns: if cut { until_ns } else { tick_ns }, cut }
    }

    /// Before the first block: turns that policies lost earlier are not the arms'.
    pub fn faults_before(&mut self, faults: u64) {
        self.faults = faults;
    }

    /// The arm asked for is active. `sample` is what was recorded since the last cut; it
    /// belongs to nobody.
    pub fn switched(&mut self, now_ns: u64, sample: &Sample) {
        if self.ended.is_some() || self.phase != Phase::Between {
            return;
        }
        self.looked_ns = now_ns;
        if sample.faults > self.faults {
            let message = format!("a policy lost a turn while arm {} took over", self.arm);
            return self.end(now_ns, Reason::PolicyFailed, message);
        }
        self.measured.clear();
        self.phase = if self.plan.washout_ns > 0 {
            Phase::Washout { until_ns: now_ns + self.plan.washout_ns }
        } else {
            Phase::Measuring { until_ns: now_ns + self.plan.block_ns }
        };
    }

    /// The arm asked for could not be put active.
    pub fn failed(&mut self, now_ns: u64, message: String) {
        self.end(now_ns, Reason::PolicyFailed, message);
    }

    /// What was recorded since the last take. `cut` as [`Action::Take`] said.
    pub fn took(&mut self, now_ns: u64, cut: bool, sample: &Sample) {
        if self.ended.is_some() || self.phase == Phase::Between {
            return;
        }
        self.looked_ns = now_ns;
        if sample.faults > self.faults {
            let message = format!("the policy of arm {} lost a turn", self.arm);
            return self.end(now_ns, Reason::PolicyFailed, message);
        }
        if self.arm == Arm::B
            && let Some(breach) = self.window.add(sample)
        {
            return self.end(now_ns, Reason::Guard, breach);
        }
        match self.phase {
            Phase::Washout { .. } if cut => {
                let rest_ns = self.plan.block_ns - self.plan.washout_ns;
                self.phase = Phase::Measuring { until_ns: now_ns + rest_ns };
            }
            Phase::Measuring { .. } => {
                self.measured.extend(sample);
                if cut {
                    self.end_block(now_ns);
                }
            }
            Phase::Washout { .. } | Phase::Between => {}
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

    fn end(&mut self, now_ns: u64, reason: Reason, message: String) {
        if self.ended.is_none() {
            let arm = (self.phase != Phase::Between).then_some(self.arm);
            let after_ns = now_ns.saturating_sub(self.started_ns);
            self.ended = Some(Ended { reason, arm, message, after_ns });
        }
    }

    fn end_block(&mut self, now_ns: u64) {
        let sample = std::mem::take(&mut self.measured);
        self.blocks.push(Block {
            arm: self.arm,
            began_s: sample.from_ns.saturating_sub(self.started_ns) as f64 / 1e9,
            measured_s: sample.span_ns() as f64 / 1e9,
            value: self.plan.metric.value(&sample, self.plan.slo_ns),
            requests: sample.requests(),
            straddled: sample.straddled,
            merged: sample.merged,
            hp_p50_ns: sample.quantile_ns(0.5),
            hp_p99_ns: sample.quantile_ns(0.99),
            be_launches: sample.launches,
            be_work_ns: sample.work_ns,
        });
        self.phase = Phase::Between;
        match self.first.take() {
            None => self.first = Some((self.arm, sample)),
            Some((first_arm, first)) => {
                let (a, b) = if first_arm == Arm::A { (first, sample) } else { (sample, first) };
                self.end_pair(now_ns, &a, &b);
            }
        }
        self.arm = self.assignment.next_arm();
    }

    fn end_pair(&mut self, now_ns: u64, a: &Sample, b: &Sample) {
        let (metric, slo_ns) = (self.plan.metric, self.plan.slo_ns);
        let ln = |s: &Sample| metric.value(s, slo_ns).map(f64::ln);
        let says = metric.pair_says_something(a, b);
        let difference = ln(a).zip(ln(b)).map(|(a, b)| b - a).filter(|_| says);
        let requests = |s: &Sample| (s.requests() as f64 + 1.0) / (s.span_ns() as f64).max(1.0);
        self.sample_ratio.push(requests(b).ln() - requests(a).ln());
        match difference {
            Some(difference) => {
                self.empty_in_a_row = 0;
                self.differences.push(difference);
                self.betting.push(difference);
            }
            None => {
                self.pairs_empty += 1;
                self.empty_in_a_row += 1;
            }
        }
        let blocks = self.blocks.len();
        let elapsed_ns = now_ns.saturating_sub(self.started_ns);
        if self.is_decided() && !self.plan.to_end {
            let message = format!("after {blocks} blocks");
            self.end(now_ns, Reason::Decided, message);
        } else if self.empty_in_a_row >= EMPTY_PAIRS_MAX {
            let message = format!(
                "{EMPTY_PAIRS_MAX} pairs of blocks in a row say nothing of {metric}: too few \
                 high-priority requests, or no best-effort work"
            );
            self.end(now_ns, Reason::NoTraffic, message);
        } else if elapsed_ns.saturating_add(2 * self.plan.block_ns) > self.plan.time_ns_max {
            let message = format!("{blocks} blocks; another pair would take too long");
            self.end(now_ns, Reason::MaxTime, message);
        }
    }

    /// Whether "no difference" is rejected, with enough blocks behind it.
    pub fn is_decided(&self) -> bool {
        self.betting.rejects(self.plan.alpha)
            && 2 * self.differences.len() >= self.plan.blocks_min as usize
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The arm active, or to be put active next.
    pub fn arm(&self) -> Arm {
        self.arm
    }

    /// Whether the block's washout is under way.
    pub fn in_washout(&self) -> bool {
        matches!(self.phase, Phase::Washout { .. })
    }

    /// How it ended, if it has.
    pub fn ended(&self) -> Option<&Ended> {
        self.ended.as_ref()
    }

    /// When it began.
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

    /// The evidence that the arms served different numbers of requests.
    pub fn sample_ratio(&self) -> &Betting {
        &self.sample_ratio
    }

    /// The estimated effect: B's figure over A's.
    pub fn ratio(&self) -> f64 {
        interval::estimate(&self.differences).exp()
    }
}

#[cfg(test)]
#[path = "experiment_tests.rs"]
mod tests;
