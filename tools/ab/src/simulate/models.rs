//! Whole services whose noise an experiment has to live with: queues, bursts, ties, load that
//! beats with the blocks, back-pressure, and policies that learn. Each runs through the
//! [`Experiment`] as the core runs it.

use super::{binomial_max, exponential, normal};
use crate::accident::{self, Before};
use crate::design::{Arm, Knowledge, Plan, State};
use crate::experiment::{Action, Experiment};
use crate::fairness::BestEffort;
use crate::guard::Guard;
use crate::interval::{self, Bounds};
use crate::metric::Metric;
use crate::report::{ArmSource, GuardReport, Report};
use crate::sample::{Sample, Unit};
use crate::verdict::{Verdict, conclude};
use fastrand::Rng;
use serde::Serialize;

/// The objective of requests.
pub(super) const SLO_NS: u64 = 15_000_000;
/// The objective of tokens, of which each request has [`TOKENS`].
const TPOT_NS: u64 = SLO_NS / 10;
const TOKENS: u64 = 4;
/// What may be told wrongly: false positives, and intervals that miss the truth.
const REJECTED_MAX: f64 = 0.055;
const COVERAGE_MIN: f64 = 0.94;
/// Tests of a row of which the figure over all requests is looked at: it takes most of the time. All of them where it
/// covers the truth in fewer of these than it should, which may be chance.
const WHOLE: u32 = 300;

/// How the service behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Model {
    /// Bursts of some 30 s in a shared queue that carries over from block to block.
    BurstsInAQueue,
    /// Pareto service times of index 1.2 in a queue.
    ParetoInAQueue,
    /// Six requests a second of whole milliseconds: ties, and many blocks that say nothing.
    SparseTies,
    /// A load whose period is a pair of blocks.
    PeriodOfAPair,
    Diurnal,
    /// Four clients that wait for each answer: they ask less when it is slow.
    ClosedLoop,
    /// A queue at half load, 40 or 80 requests a second for a minute or a third of one.
    LoadStates,
    /// Policies that begin cold and learn alike.
    ColdStart,
    /// What a policy happens to learn in its first block stays with it.
    LuckStays,
    /// What each arm knows wanders from block to block.
    KnowledgeWanders,
}

impl Model {
    pub const ALL: [Model; 10] = [
        Model::BurstsInAQueue,
        Model::ParetoInAQueue,
        Model::SparseTies,
        Model::PeriodOfAPair,
        Model::Diurnal,
        Model::ClosedLoop,
        Model::LoadStates,
        Model::ColdStart,
        Model::LuckStays,
        Model::KnowledgeWanders,
    ];

    fn learns(self) -> bool {
        matches!(self, Model::ColdStart | Model::LuckStays | Model::KnowledgeWanders)
    }
}

/// Requests of a service in order of arrival: when, and how long, s. The first `before_s` are before the test, which
/// begins at 0.
fn requests(
    model: Model,
    block_s: f64,
    (before_s, test_s): (f64, f64),
    random: &mut Rng,
) -> Vec<(f64, f64)> {
    let mut all = requests_of(model, block_s, (before_s, test_s), random);
    all.iter_mut().for_each(|request| request.0 -= before_s);
    all
}

/// The same, where the test begins at `before_s`.
fn requests_of(
    model: Model,
    block_s: f64,
    (before_s, test_s): (f64, f64),
    random: &mut Rng,
) -> Vec<(f64, f64)> {
    let end_s = before_s + test_s;
    let service = |random: &mut Rng, mean_s: f64| mean_s * (0.4 * normal(random) - 0.08).exp();
    let poisson = |random: &mut Rng, rate: f64| {
        let (mut at, mut all) = (0.0, Vec::new());
        while at < end_s {
            at += exponential(random) / rate;
            all.push(at);
        }
        all
    };
    let fifo = |arrivals: Vec<(f64, f64)>| {
        let mut free = 0.0_f64;
        let through = |(at, service): (f64, f64)| {
            free = free.max(at) + service;
            (at, free - at)
        };
        arrivals.into_iter().map(through).collect()
    };
    // Requests a second and mean duration of each state, s.
    let two_states = |states: [(f64, f64); 2], mean_s, random: &mut Rng| {
        let (mut at, mut until, mut state, mut all) = (0.0, 0.0, 0, Vec::new());
        while at < end_s {
            if at >= until {
                state = 1 - state;
                until = at + exponential(random) * states[state].1;
            }
            at += exponential(random) / states[state].0;
            all.push((at, service(random, mean_s)));
        }
        all
    };
    match model {
        Model::BurstsInAQueue => fifo(two_states([(30.0, 40.0), (105.0, 20.0)], 0.008, random)),
        Model::LoadStates => fifo(two_states([(40.0, 60.0), (80.0, 20.0)], 0.01, random)),
        Model::ParetoInAQueue => {
            let arrivals = poisson(random, 50.0);
            fifo(
                arrivals
                    .into_iter()
                    .map(|at| (at, 0.002 * (1.0 - random.f64()).powf(-1.0 / 1.2)))
                    .collect(),
            )
        }
        Model::SparseTies => {
            let arrivals = poisson(random, 6.0);
            let whole_ms =
                |random: &mut Rng| (4.0 * (0.3 * normal(random)).exp()).round().max(1.0) / 1e3;
            arrivals.into_iter().map(|at| (at, whole_ms(random))).collect()
        }
        Model::PeriodOfAPair => {
            let period = 2.0 * block_s;
            let slow = |at: f64| if (at + 0.35 * block_s) % period < block_s { 3.0 } else { 1.0 };
            poisson(random, 50.0)
                .into_iter()
                .map(|at| (at, slow(at) * service(random, 0.005)))
                .collect()
        }
        Model::Diurnal => {
            let level = |at: f64| {
                (1.2 * (std::f64::consts::TAU * (at - before_s) / test_s + 1.0).sin()).exp()
            };
            poisson(random, 50.0)
                .into_iter()
                .map(|at| (at, level(at) * service(random, 0.005)))
                .collect()
        }
        Model::ClosedLoop => {
            let mut next: Vec<f64> = (0..4).map(|_| 0.05 * exponential(random)).collect();
            let (mut free, mut drift, mut block, mut all) = (0.0_f64, 0.0, 0.0, Vec::new());
            loop {
                let who = (0..4).min_by(|a, b| next[*a].total_cmp(&next[*b])).unwrap_or(0);
                let at = next[who];
                if at >= end_s {
                    return all;
                }
                if at >= block {
                    block += block_s;
                    drift += 0.05 * normal(random);
                }
                free = free.max(at) + service(random, 0.01) * f64::min(3.0, f64::exp(drift));
                all.push((at, free - at));
                next[who] = free + 0.05 * exponential(random);
            }
        }
        Model::ColdStart | Model::LuckStays | Model::KnowledgeWanders => {
            poisson(random, 50.0).into_iter().map(|at| (at, service(random, 0.005))).collect()
        }
    }
}

/// A policy's knowledge, as the logarithm of what it costs; what a block makes of it.
fn learn(model: Model, known: Option<f64>, random: &mut Rng) -> f64 {
    match (model, known) {
        (Model::ColdStart, known) => known.unwrap_or(0.5) * 0.95,
        (Model::LuckStays, Some(known)) => known,
        (Model::LuckStays, None) => 0.05 * normal(random),
        (Model::KnowledgeWanders, known) => 0.98 * known.unwrap_or(0.0) + 0.05 * normal(random),
        _ => 0.0,
    }
}

/// A test of a policy that multiplies all times, all work, or the share of requests within the
/// objective by `ratio`.
pub fn test(model: Model, plan: Plan, ratio: f64) -> Experiment {
    test_with_waits(model, plan, ratio, 1.0)
}

/// The same with what best-effort launches wait, and how often they are preempted, times `waits` under B.
pub(super) fn test_with_waits(model: Model, plan: Plan, ratio: f64, waits: f64) -> Experiment {
    test_after(model, plan, (ratio, waits), 0.0).0
}

/// The same after so much time in which the core saw requests, s; and what it said of guards when the test began.
pub(super) fn test_after(
    model: Model,
    plan: Plan,
    (ratio, waits): (f64, f64),
    before_s: f64,
) -> (Experiment, Vec<GuardReport>) {
    // Not those of the rest, which stays as it is without.
    let mut random_waits = Rng::with_seed(plan.seed.rotate_left(32));
    let mut random = Rng::with_seed(!plan.seed);
    let block_s = plan.block_ns as f64 / 1e9;
    let test_s = plan.time_ns_max as f64 / 1e9;
    let all = requests(model, block_s, (before_s, test_s), &mut random);
    let limits_ns = accident::limits_ns(&plan);
    let (mut at, mut now_ns, metric) = (0, 0_u64, plan.metric);
    let ticks = !plan.guards.is_empty();
    let units = plan.guards.iter().map(Guard::unit).chain([metric.unit()]);
    let has_tokens = units.into_iter().any(|unit| unit == Some(Unit::Token));
    let mut random_more = Rng::with_seed(plan.seed.rotate_left(16));
    let mut clients =
        [1, 2].map(|client| BestEffort { client, weight: 1, work_ns: 0, backlog_ns: 0 });
    let mut knowledge: Knowledge<f64> = Knowledge::new(plan.state, None);
    let mut experiment = match Experiment::new(plan, now_ns) {
        Ok(experiment) => experiment,
        Err(why) => unreachable!("the plans here make sense: {why}"),
    };
    if before_s > 0.0 {
        // What the active policy knows is what blocks begin with.
        let factor = learn(model, None, &mut random_waits).exp();
        at = all.partition_point(|request| request.0 < 0.0);
        let lengths = all[..at].iter().map(|(_, s)| s * factor);
        experiment.requests_before(before(lengths, before_s, &limits_ns));
    }
    let first = experiment.accidents().to_vec();
    let (mut arm, mut level, mut late, mut sample) = (Arm::A, 0.0, 0.0, Sample::new());
    let mut preempted = 0.0_f64;
    loop {
        let (end_ns, measuring, cut) = match experiment.next_action() {
            Action::End => return (experiment, first),
            Action::Switch(next) => {
                if model.learns() {
                    arm = next;
                    level = learn(model, knowledge.offered(arm), &mut random);
                    knowledge.saved(arm, level);
                }
                arm = next;
                sample.clear();
                experiment.switched(now_ns, &sample);
                continue;
            }
            Action::Take { at_ns, cut } if ticks => (at_ns, !experiment.in_washout(), cut),
            // A whole phase at once: only guards depend on the ticks.
            Action::Take { at_ns, .. } => {
                (experiment.cut_at_ns().unwrap_or(at_ns), !experiment.in_washout(), true)
            }
        };
        sample.clear();
        (sample.from_ns, sample.to_ns) = (now_ns, end_ns);
        let is_longer = arm == Arm::B && metric.lower_is_better();
        let factor = level.exp() * if is_longer { ratio } else { 1.0 };
        let mut busy_s = 0.0;
        while let Some((arrival, s)) = all.get(at).filter(|r| r.0 * 1e9 < end_ns as f64) {
            debug_assert!(*arrival >= 0.0);
            let mut ns = (s * factor * 1e9) as u64;
            let is_later = arm == Arm::B && metric.is_attainment();
            // Evenly, so that the share of each block is multiplied.
            let mut delay = |ns: u64, limit_ns: u64| {
                late += if is_later && ns <= limit_ns { 1.0 - ratio } else { 0.0 };
                if late < 1.0 {
                    return ns;
                }
                late -= 1.0;
                limit_ns + limit_ns / 10
            };
            if has_tokens {
                for _ in 0..TOKENS {
                    let token_ns = ns as f64 / 10.0 * (0.3 * normal(&mut random_more)).exp();
                    let token_ns = delay(token_ns as u64, TPOT_NS);
                    sample.of_mut(Unit::Token).add(token_ns, 1, Some(TPOT_NS));
                }
            } else {
                ns = delay(ns, SLO_NS);
            }
            sample.of_mut(Unit::Request).add(ns, 1, Some(SLO_NS));
            busy_s += s;
            at += 1;
        }
        // What the clients share evenly but for chance: launches end in one block or the next.
        for client in &mut clients {
            let noise = (0.1 * normal(&mut random_more)).exp();
            client.work_ns += (0.3 * sample.span_ns() as f64 * noise) as u64;
            client.backlog_ns = end_ns;
            sample.best_effort(*client);
        }
        if measuring {
            let span_s = sample.span_ns() as f64 / 1e9;
            let idle = (1.0 - 0.3 * busy_s / span_s).max(0.01)
                * (0.03 * normal(&mut random) / span_s.sqrt()).exp();
            let more = if arm == Arm::B && metric == Metric::BeThroughput { ratio } else { 1.0 };
            sample.work_ns = (span_s * 1e9 * idle * level.exp() * more) as u64;
            // Of 10 ms each.
            sample.launches = 1 + sample.work_ns / 10_000_000;
            // Launches wait while requests run, and every other request preempts one.
            let times = if arm == Arm::B { waits } else { 1.0 };
            let noise = (0.3 * normal(&mut random_waits)).exp();
            sample.be_waited_ns = (busy_s * 1e9 * level.exp() * noise * times) as u64;
            preempted += times * sample.requests() as f64 * random_waits.f64();
            sample.preemptions = preempted as u64;
            preempted -= preempted.floor();
        }
        now_ns = end_ns;
        experiment.took(now_ns, cut, &sample);
    }
}

/// What the core tells of requests that took so long, s, in so much time before a test.
fn before(lengths: impl Iterator<Item = f64>, before_s: f64, limits_ns: &[u64]) -> Before {
    let mut before = Before { over_per_s: vec![0.0; limits_ns.len()], ..Before::default() };
    for length_s in lengths {
        before.requests += 1;
        for (over, limit_ns) in before.over_per_s.iter_mut().zip(limits_ns) {
            *over += if length_s * 1e9 > *limit_ns as f64 { 1.0 / before_s } else { 0.0 };
        }
    }
    before.per_s = before.requests as f64 / before_s;
    before
}

/// What many tests of one model told.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    pub model: Model,
    pub metric: Metric,
    pub state: State,
    pub experiments: u32,
    /// Share in which "no difference" was ever rejected, without any.
    pub rejected: f64,
    /// Tests of which the figure over all requests was looked at.
    pub experiments_whole: u32,
    /// Share of those that ended as *promote B* or *keep A*, without a difference.
    pub decided: f64,
    /// Share whose interval held the truth all the time: a ratio of 1.2, for attainment 0.8.
    pub coverage: f64,
    /// The same of the figure over all requests, at the end.
    pub overall_coverage: f64,
    /// Share of pairs that said nothing.
    pub pairs_empty: f64,
}

/// Most that may be rejected of so many tests. Few are given the benefit of chance.
pub(super) fn rejected_max(tests: u32) -> f64 {
    let chance = f64::from(binomial_max(tests, 0.05)) / f64::from(tests.max(1));
    if tests >= 1_000 { REJECTED_MAX } else { chance.max(REJECTED_MAX) }
}

/// Least coverage in so many tests.
pub(super) fn coverage_min(tests: u32) -> f64 {
    let chance = f64::from(binomial_max(tests, 0.05)) / f64::from(tests.max(1));
    if tests >= 1_000 { COVERAGE_MIN } else { COVERAGE_MIN.min(1.0 - chance) }
}

impl Row {
    /// What it breaks, if anything.
    pub fn failure(&self) -> Option<String> {
        let whole = self.experiments_whole;
        let of_blocks = !self.metric.is_attainment();
        let covered = if of_blocks { self.experiments } else { whole };
        let (most, least) = (rejected_max(self.experiments), coverage_min(covered));
        let wrong = self.rejected > most
            || self.decided > rejected_max(whole)
            || self.coverage < least
            || self.overall_coverage < coverage_min(whole);
        wrong.then(|| {
            format!("{self:?}: expected at most {most} rejected, coverage at least {least}")
        })
    }
}

/// What a model is tested with.
pub(super) fn plan_of(model: Model, metric: Metric) -> Plan {
    // At 6 requests a second a block needs 2 s for ten of them.
    let block_ns = if model == Model::SparseTies { 2_000_000_000 } else { 1_000_000_000 };
    let plan = Plan::of(metric);
    // Blocks that get shorter would leave the period.
    let block_ns_min = if model == Model::PeriodOfAPair { block_ns } else { plan.block_ns_min };
    let slo_ns = (metric == Metric::SloAttainment).then_some(SLO_NS);
    Plan { block_ns, block_ns_min, slo_ns, ..plan }
}

/// Try a model so many times, from this seed on.
pub fn row(model: Model, metric: Metric, state: State, experiments: u32, seed: u64) -> Row {
    let (mut rejected, mut decided, mut covered, mut overall) = (0, 0, 0, 0);
    let (mut empty, mut pairs) = (0, 0);
    let mut experiments_whole = experiments.min(WHOLE);
    for number in 0..u64::from(experiments) {
        let seed = seed.wrapping_add(number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let plan = Plan { seed, state, to_end: true, ..plan_of(model, metric) };
        let same = test(model, plan.clone(), 1.0);
        rejected += u32::from(same.betting().rejects(plan.alpha));
        let is_short = f64::from(overall) < COVERAGE_MIN * f64::from(WHOLE);
        if number == u64::from(WHOLE) && is_short && state == State::Frozen {
            experiments_whole = experiments;
        }
        let whole = number < u64::from(experiments_whole);
        if whole {
            let verdict = conclude(&same, same.overall().as_ref()).verdict;
            decided += u32::from(matches!(verdict, Verdict::PromoteB | Verdict::KeepA));
        }
        empty += same.pairs_empty() as usize;
        pairs += same.differences().len();
        // Multiplying all of B's figures shifts its differences.
        let ratio = if metric.is_attainment() { 0.8_f64 } else { 1.2 };
        let shifted = test(model, plan.clone(), ratio);
        covered += u32::from(!interval::rejects(shifted.differences(), ratio.ln(), plan.alpha));
        if !whole {
            continue;
        }
        let holds = |bounds: Bounds| {
            bounds.low.is_none_or(|low| low <= ratio.ln())
                && bounds.high.is_none_or(|high| high >= ratio.ln())
        };
        overall += u32::from(shifted.overall().is_some_and(|overall| holds(overall.bounds)));
    }
    let share = |count: u32| f64::from(count) / f64::from(experiments.max(1));
    let of_whole = |count: u32| f64::from(count) / f64::from(experiments_whole.max(1));
    Row {
        model,
        metric,
        state,
        experiments,
        experiments_whole,
        rejected: share(rejected),
        decided: of_whole(decided),
        // What a report shows of attainment is of all requests.
        coverage: if metric.is_attainment() { of_whole(overall) } else { share(covered) },
        overall_coverage: of_whole(overall),
        pairs_empty: empty as f64 / (empty + pairs).max(1) as f64,
    }
}

/// How long a difference takes to be found, min.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Times {
    pub gpus: usize,
    pub metric: Metric,
    /// B's figure over A's.
    pub ratio: f64,
    pub tests: usize,
    /// Half, and 80 %, of the tests had ended by then with the right verdict; `null`: not in 20
    /// minutes.
    pub median_min: Option<f64>,
    pub of_80_percent_min: Option<f64>,
    /// Share that ended with the wrong one.
    pub wrong: f64,
}

/// The longest test that is waited for.
const TIMES_NS: u64 = 1_200_000_000_000;

/// Tests of a queue at half load, 50 requests a second, on one GPU.
pub fn times(metric: Metric, ratio: f64, tests: usize, seed: u64) -> Times {
    let arms = ["a", "b"].map(|name| ArmSource { digest: name.into(), ..ArmSource::default() });
    let right = right_verdict(metric, ratio);
    let (mut took, mut wrong) = (Vec::new(), 0);
    for number in 0..tests as u64 {
        let seed = seed.wrapping_add(number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let plan = Plan { seed, time_ns_max: TIMES_NS, ..Plan::of(metric) };
        let report = Report::new(&test(Model::LoadStates, plan, ratio), &arms, 0, false);
        if report.verdict == right {
            took.push(report.elapsed_s / 60.0);
        } else if report.verdict != Verdict::Undecided {
            wrong += 1;
        }
    }
    Times { gpus: 1, wrong: f64::from(wrong) / tests as f64, ..when(metric, ratio, tests, took) }
}

fn when(metric: Metric, ratio: f64, tests: usize, mut took: Vec<f64>) -> Times {
    took.sort_by(f64::total_cmp);
    let by = |share: f64| took.get(((share * tests as f64).ceil() as usize).max(1) - 1).copied();
    let (median_min, of_80_percent_min) = (by(0.5), by(0.8));
    Times { gpus: 1, metric, ratio, tests, median_min, of_80_percent_min, wrong: 0.0 }
}

/// What a test of such a difference is to end with.
pub(super) fn right_verdict(metric: Metric, ratio: f64) -> Verdict {
    match (ratio < 1.0) == metric.lower_is_better() {
        true => Verdict::PromoteB,
        false => Verdict::KeepA,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The short form of `cargo xtask test ab`.
    #[test]
    fn the_level_is_kept_whatever_the_service_does() {
        for model in [Model::ParetoInAQueue, Model::PeriodOfAPair, Model::KnowledgeWanders] {
            let row = row(model, Metric::HpP99, State::Frozen, 20, 7);
            assert_eq!(row.failure(), None);
        }
    }

    /// Nulls of tokens, and of objectives that are the clients' own.
    #[test]
    fn the_level_is_kept_for_tokens() {
        for metric in [Metric::TokenP99, Metric::TpotAttainment] {
            for model in [Model::BurstsInAQueue, Model::ClosedLoop, Model::KnowledgeWanders] {
                let row = row(model, metric, State::Frozen, 20, 7);
                assert_eq!(row.failure(), None);
                assert!(row.pairs_empty < 0.05, "{row:?}");
            }
        }
    }

    /// Where all clients have the same objective it does not matter who says it.
    #[test]
    fn clients_own_objectives_say_what_a_given_one_says() {
        for ratio in [1.0, 0.8] {
            let given = plan_of(Model::LoadStates, Metric::SloAttainment);
            let given = Plan { to_end: true, ..given };
            let own = Plan { slo_ns: None, ..given.clone() };
            let [given, own] = [given, own].map(|plan| test(Model::LoadStates, plan, ratio));
            let count = |e: &Experiment| e.blocks().iter().map(|b| b.requests_within).sum::<u64>();
            assert_eq!(count(&given), count(&own));
            let [given, own] = [given, own].map(|e| (e.differences().len(), e.overall().unwrap()));
            assert_eq!(given.0, own.0);
            // Tails are kept to half a percent.
            assert!((given.1.a - own.1.a).abs() < 0.01, "{given:?} {own:?}");
            assert!((given.1.ln_ratio - own.1.ln_ratio).abs() < 0.01, "{given:?} {own:?}");
        }
    }

    /// That what frozen state prevents would be seen.
    #[test]
    fn knowledge_of_its_own_makes_arms_differ() {
        let row = row(Model::KnowledgeWanders, Metric::HpP99, State::Carry, 12, 7);
        assert!(row.rejected > 0.4 && row.failure().is_some(), "{row:?}");
    }
}
