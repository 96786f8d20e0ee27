//! What is to be compared and how: the plan, and the randomised order of blocks.

use crate::guard::Guard;
use crate::metric::Metric;
use crate::units::time;
use serde::{Deserialize, Serialize};

/// Blocks of one experiment: bounds the report and the work of its statistics.
pub const BLOCKS_MAX: u64 = 4_000;
pub const BLOCK_NS_MIN: u64 = 20_000_000;
pub const GUARDS_MAX: usize = 8;

/// One of the two policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Arm {
    /// What serves now, and serves again when the experiment ends.
    A,
    /// The policy that is tried.
    B,
}

impl Arm {
    /// Where its part is in arrays of both.
    pub fn index(self) -> usize {
        usize::from(self == Arm::B)
    }

    pub fn other(self) -> Arm {
        match self {
            Arm::A => Arm::B,
            Arm::B => Arm::A,
        }
    }
}

impl std::fmt::Display for Arm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Arm::A => "A",
            Arm::B => "B",
        })
    }
}

/// The experiment as asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    pub metric: Metric,
    /// Greatest length of a block, its washout included.
    pub block_ns: u64,
    /// Blocks get as short as this where requests suffice; see [`crate::pace`].
    pub block_ns_min: u64,
    /// The part at the start of a block of the greatest length that does not count. Shorter blocks
    /// have as large a part.
    pub washout_ns: u64,
    /// The experiment ends before it takes longer than this.
    pub time_ns_max: u64,
    /// A request within this time attains the service-level objective; without it, within its client's own objective,
    /// and requests of clients without one do not count.
    #[serde(default)]
    pub slo_ns: Option<u64>,
    /// Level of the test, and of the interval: they are wrong at most this often.
    pub alpha: f64,
    /// No decision before so many blocks.
    pub blocks_min: u32,
    /// No decision for B on a metric of requests before so many blocks: a state that makes 5 % of
    /// its blocks slow would else be missed.
    #[serde(default = "blocks_min_better")]
    pub blocks_min_better: u32,
    /// B may be worse by this share and is preferred all the same.
    #[serde(default)]
    pub margin: f64,
    /// What the arms know when a block begins.
    #[serde(default)]
    pub state: State,
    /// B's share of the time at first. It doubles each 20 pairs until it is a half.
    #[serde(default = "half")]
    pub exposure: f64,
    /// If the verdict is *promote B*, B stays active.
    #[serde(default)]
    pub promote: bool,
    /// Seed of the order of blocks.
    pub seed: u64,
    /// Go on to the end although it is decided: narrows the interval.
    #[serde(default)]
    pub to_end: bool,
    /// Limits that B must keep.
    #[serde(default)]
    pub guards: Vec<Guard>,
    /// Guards look at the last so much time under B.
    pub guard_window_ns: u64,
}

/// If 5 % of B's blocks are slow, 240 of B show at most 3 slow ones with a chance of 0.2 %.
fn blocks_min_better() -> u32 {
    480
}

fn half() -> f64 {
    0.5
}

/// What the arms know when a block begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Every block of both arms begins with what the active policy knew when the test began: what
    /// is compared is the policies.
    #[default]
    Frozen,
    /// Each arm goes on with what it knew at the end of its last block: what is compared is the
    /// policies *and* what each happens to learn.
    Carry,
}

impl std::str::FromStr for State {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "frozen" => Ok(State::Frozen),
            "carry" => Ok(State::Carry),
            _ => Err(format!("{text:?} is not a state: expected frozen or carry")),
        }
    }
}

/// What each arm is offered at the start of its blocks.
#[derive(Clone, Debug)]
pub struct Knowledge<T> {
    state: State,
    /// What the active policy knew when the test began.
    frozen: Option<T>,
    own: [Option<T>; 2],
}

impl<T: Clone> Knowledge<T> {
    pub fn new(state: State, known: Option<T>) -> Self {
        Knowledge { state, frozen: known, own: [None, None] }
    }

    /// The state to offer to the next block of this arm.
    pub fn offered(&self, arm: Arm) -> Option<T> {
        match self.state {
            State::Frozen => self.frozen.clone(),
            State::Carry => self.latest(arm),
        }
    }

    /// What an arm knew last: for after the test.
    pub fn latest(&self, arm: Arm) -> Option<T> {
        self.own[arm.index()].clone().or_else(|| self.frozen.clone())
    }

    /// What an arm knew at the end of its block.
    pub fn saved(&mut self, arm: Arm, known: T) {
        self.own[arm.index()] = Some(known);
    }
}

/// Why a plan makes no sense.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Too short to switch and measure.
    #[error("a block of {}: expected at least {}", time(*.0 as f64), time(BLOCK_NS_MIN as f64))]
    Block(u64),
    /// Nothing is left to measure.
    #[error("a washout of {} in a block of {}: expected at most three quarters of the block", time(*.0 as f64), time(*.1 as f64))]
    Washout(u64, u64),
    /// The time allows less than one pair of blocks.
    #[error("{} in all: expected at least two blocks ({})", time(*.0 as f64), time(*.1 as f64))]
    Short(u64, u64),
    #[error("{0} blocks: expected at most {BLOCKS_MAX}; use longer blocks or less time")]
    Blocks(u64),
    #[error("alpha is {0}: expected 0.0001 to 0.5")]
    Alpha(f64),
    /// An objective of no time.
    #[error("the objective is 0: expected a time above it")]
    Objective,
    #[error("{0} guards: expected at most {GUARDS_MAX}")]
    Guards(usize),
    /// A window in which nothing can be seen.
    #[error("a guard window of {}: expected {} to 1 h", time(*.0 as f64), time(BLOCK_NS_MIN as f64))]
    GuardWindow(u64),
    /// Requests that are stuck under B only would never fill it.
    #[error("a guard window of {} and blocks measured for {}: expected a window that a block can fill; use longer blocks", time(*.0 as f64), time(*.1 as f64))]
    GuardWindowBlock(u64, u64),
    #[error("a margin of {0}: expected 0 to 0.5")]
    Margin(f64),
    #[error("an exposure of {:.1} %: expected 1 % to 50 %", .0 * 100.0)]
    Exposure(f64),
    /// The least length of a block is above the greatest, or too short.
    #[error("a shortest block of {}: expected {} to {}, the length of a block", time(*.0 as f64), time(BLOCK_NS_MIN as f64), time(*.1 as f64))]
    BlockMin(u64, u64),
}

impl Plan {
    /// A plan with everything at its default but the metric.
    pub fn of(metric: Metric) -> Self {
        Plan {
            metric,
            block_ns: 1_000_000_000,
            block_ns_min: 250_000_000,
            washout_ns: 100_000_000,
            time_ns_max: 600_000_000_000,
            slo_ns: None,
            alpha: 0.05,
            blocks_min: 20,
            blocks_min_better: blocks_min_better(),
            margin: 0.0,
            state: State::Frozen,
            exposure: half(),
            promote: false,
            seed: 1,
            to_end: false,
            guards: Vec::new(),
            guard_window_ns: 900_000_000,
        }
    }

    /// Check what the types cannot.
    ///
    /// # Errors
    /// The first thing that makes no sense.
    pub fn check(&self) -> Result<(), PlanError> {
        if self.block_ns < BLOCK_NS_MIN {
            return Err(PlanError::Block(self.block_ns));
        }
        if !(BLOCK_NS_MIN..=self.block_ns).contains(&self.block_ns_min) {
            return Err(PlanError::BlockMin(self.block_ns_min, self.block_ns));
        }
        if self.washout_ns > self.block_ns / 4 * 3 {
            return Err(PlanError::Washout(self.washout_ns, self.block_ns));
        }
        let two = self.block_ns.saturating_mul(2);
        if self.time_ns_max < two {
            return Err(PlanError::Short(self.time_ns_max, two));
        }
        let blocks = self.time_ns_max / self.block_ns;
        if blocks > BLOCKS_MAX {
            return Err(PlanError::Blocks(blocks));
        }
        if !(0.0001..=0.5).contains(&self.alpha) {
            return Err(PlanError::Alpha(self.alpha));
        }
        if self.slo_ns == Some(0) {
            return Err(PlanError::Objective);
        }
        if self.guards.len() > GUARDS_MAX {
            return Err(PlanError::Guards(self.guards.len()));
        }
        if !(BLOCK_NS_MIN..=3_600_000_000_000).contains(&self.guard_window_ns) {
            return Err(PlanError::GuardWindow(self.guard_window_ns));
        }
        let measured_ns = self.block_ns - self.washout_ns;
        if !self.guards.is_empty() && self.guard_window_ns > measured_ns {
            return Err(PlanError::GuardWindowBlock(self.guard_window_ns, measured_ns));
        }
        if !(0.0..=0.5).contains(&self.margin) {
            return Err(PlanError::Margin(self.margin));
        }
        if !(0.01..=0.5).contains(&self.exposure) {
            return Err(PlanError::Exposure(self.exposure));
        }
        Ok(())
    }
}

/// The order of blocks: pairs of one of each, the first by a fair coin. What rises or
/// falls over time then weighs on both arms alike, and within a pair the coin is all
/// that decides which block was whose: that is what the test relies on.
#[derive(Clone, Debug)]
pub struct Assignment {
    random: fastrand::Rng,
    second: Option<Arm>,
}

impl Assignment {
    /// From a seed; the same seed gives the same order.
    pub fn new(seed: u64) -> Self {
        Assignment { random: fastrand::Rng::with_seed(seed), second: None }
    }

    /// Arm of the next block.
    pub fn next_arm(&mut self) -> Arm {
        if let Some(second) = self.second.take() {
            return second;
        }
        let first = if self.random.bool() { Arm::A } else { Arm::B };
        self.second = Some(first.other());
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_pair_has_one_block_of_each_and_a_seed_is_an_order(seed: u64) {
            let order = |seed| {
                let mut assignment = Assignment::new(seed);
                (0..400).map(|_| assignment.next_arm()).collect::<Vec<_>>()
            };
            let arms = order(seed);
            prop_assert!(arms.chunks(2).all(|pair| pair[0] != pair[1]));
            prop_assert_eq!(&arms, &order(seed));
            // 200 fair coins: 30 or fewer of a side is a chance of less than 1e-24.
            let first = arms.chunks(2).filter(|pair| pair[0] == Arm::A).count();
            prop_assert!((31..170).contains(&first), "A is first in {first} of 200 pairs");
        }
    }

    #[test]
    fn frozen_arms_begin_alike_and_carried_ones_go_on() {
        for (state, offered) in [(State::Frozen, [Some(1); 2]), (State::Carry, [Some(2), Some(1)])]
        {
            let mut knowledge = Knowledge::new(state, Some(1));
            knowledge.saved(Arm::A, 2);
            assert_eq!([Arm::A, Arm::B].map(|arm| knowledge.offered(arm)), offered);
            assert_eq!(knowledge.latest(Arm::A), Some(2), "what A knows is not lost");
            assert_eq!(knowledge.latest(Arm::B), Some(1));
        }
    }

    #[test]
    fn plans_that_make_no_sense_are_refused_by_name() {
        let good = Plan::of(Metric::HpP99);
        good.check().unwrap();
        let bad = |change: fn(&mut Plan)| {
            let mut plan = Plan::of(Metric::HpP99);
            change(&mut plan);
            plan.check().unwrap_err().to_string()
        };
        for (message, word) in [
            (bad(|p| p.block_ns = 1), "at least 20 ms"),
            (bad(|p| p.washout_ns = p.block_ns), "washout"),
            (bad(|p| p.time_ns_max = p.block_ns), "two blocks"),
            (bad(|p| p.time_ns_max = u64::MAX), "at most 4000"),
            (bad(|p| p.alpha = 0.0), "alpha is 0"),
            (bad(|p| p.alpha = f64::NAN), "alpha is NaN"),
            (bad(|p| p.slo_ns = Some(0)), "objective"),
            (bad(|p| p.guard_window_ns = 0), "guard window"),
            (bad(|p| p.margin = f64::NAN), "margin"),
            (bad(|p| p.exposure = 0.9), "exposure of 90.0 %"),
            (bad(|p| p.block_ns_min = 2 * p.block_ns), "shortest block of 2 s"),
            (
                bad(|p| {
                    p.guards = vec!["hp_p99<8ms".parse().unwrap()];
                    p.guard_window_ns = p.block_ns;
                }),
                "a block can fill",
            ),
            (bad(|p| p.guards = vec!["hp_p99<8ms".parse().unwrap(); 9]), "at most 8"),
        ] {
            assert!(message.contains(word), "{message}");
        }
    }

    /// Without `--slo` each unit is judged by its client's own objective.
    #[test]
    fn attainment_needs_no_objective_of_the_plan() {
        for metric in [Metric::SloAttainment, Metric::TpotAttainment] {
            let guards = ["slo_attainment>90%", "tpot_attainment>90%", "be_fairness>0.9"];
            let guards = guards.map(|guard| guard.parse().unwrap()).into();
            Plan { guards, ..Plan::of(metric) }.check().unwrap();
        }
    }
}
