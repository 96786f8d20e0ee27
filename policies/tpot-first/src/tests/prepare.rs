//! Prepare: launches that can yield give the SMs back before a step.

use super::super::prepare::{GAP, PREPARE, RELEASE, SLACK, VAIN};
use super::*;

const TURNAROUND: u64 = 200 * US;
/// From one beginning of a step to the next.
const PERIOD: u64 = OWN + MS;

fn graph(b: &Bench, predicted_ns: u64) -> Launch {
    let launch = b.asked(predicted_ns);
    let state = launch.state | LaunchState::GRAPH;
    Launch { state, offered: FormsOffered::SLICED, grid_blocks: 100, ..launch }
}

fn timer(delay_ns: u64, token: u64) -> Call {
    Call::SetTimer { delay_ns, token }
}

fn yields(yielded: bool) -> Call {
    Call::SetYield { client: TRAINING, yielded }
}

/// Even steps were seen, and the last one is over.
fn with_rhythm(config: &str) -> Bench {
    let mut b = Bench::new(config);
    b.steps(10, OWN);
    b.now_ns -= MS;
    calls();
    b
}

#[test]
fn a_long_launch_yields_one_turnaround_before_the_next_step() {
    let mut b = with_rhythm("");
    let next_ns = b.now_ns + MS;
    let decision = b.decide(&graph(&b, 50 * MS));
    assert!(matches!(decision, Decision::Sliced(_)), "{decision:?}");
    let told = calls();
    assert!(told.contains(&timer(MS - TURNAROUND, PREPARE)), "{told:?}");
    b.policy.fired(next_ns - TURNAROUND, PREPARE);
    let told = calls();
    assert!(told.contains(&yields(true)), "{told:?}");
    // It stays so while the step is open.
    b.now_ns = next_ns;
    b.begin();
    assert!(!calls().contains(&yields(false)));
    b.end(OWN);
    let told = calls();
    assert!(told.contains(&yields(false)), "{told:?}");
    // And again before the one after it.
    assert!(told.contains(&timer(MS - TURNAROUND, PREPARE)), "{told:?}");
}

#[test]
fn a_graph_that_can_be_limited_runs_beside_a_step() {
    let mut b = Bench::new("");
    b.steps(10, OWN);
    b.begin();
    let launch = b.limitable(3 * MS);
    let graph = Launch { state: launch.state | LaunchState::GRAPH, grid_blocks: 3, ..launch };
    assert_eq!(b.decide(&graph), Decision::SmLimited(32));
}

/// The core has measured how soon launches that were decided so yield.
fn set_turnaround(decision: Decision, turnaround_ns: u64) {
    let (form, argument) = decision.form();
    let form = tally_sdk::FormProfile {
        form,
        argument,
        count: 1,
        mean_ns: 0,
        p50_ns: 0,
        p99_ns: 0,
        latest_ns: 0,
        turnaround_ns,
    };
    let profile = tally_sdk::KernelProfile { forms: vec![form], ..testing::kernel(1) };
    testing::set_kernels(vec![(1, profile)]);
}

/// A launch yields before a step, and its program reports this turnaround.
fn reports(b: &mut Bench, turnaround_ns: u64) {
    b.decide(&graph(b, 50 * MS));
    set_turnaround(b.policy.yielding.unwrap().1, turnaround_ns);
    b.policy.set_yield(b.now_ns, true);
    b.policy.set_yield(b.now_ns, false);
}

#[test]
fn a_reported_turnaround_is_believed_up_to_half_of_the_objective() {
    for reported_ns in [100 * MS, u64::MAX / 2 + 1, u64::MAX] {
        let mut b = with_rhythm("");
        reports(&mut b, reported_ns);
        assert_eq!(b.policy.turnaround_ns, TPOT / 2, "{reported_ns}");
        // Others get on again after a few true reports.
        (0..30).for_each(|_| reports(&mut b, 100 * US));
        assert!(b.policy.turnaround_ns < 200 * US, "{}", b.policy.turnaround_ns);
    }
    let mut b = with_rhythm("turnaround_us = 20000");
    reports(&mut b, u64::MAX);
    assert_eq!(b.policy.turnaround_ns, 20 * MS, "as configured");
    let mut b = with_rhythm("");
    b.policy.left(b.now_ns, SERVICE);
    b.policy.yielding = Some((1, Decision::Sliced(1)));
    reports(&mut b, u64::MAX);
    assert_eq!(b.policy.turnaround_ns, 100 * MS, "without an objective");
}

#[test]
fn a_turnaround_that_is_too_long_to_double_lets_nothing_yield_in_a_step() {
    let mut b = Bench::new("");
    b.now_ns += 100 * MS;
    b.begin();
    b.policy.turnaround_ns = u64::MAX / 2 + 1;
    let launch = graph(&b, 50 * MS);
    assert_eq!(b.decide(&launch), HELD);
}

#[test]
fn a_measured_turnaround_takes_the_place_of_the_first_one() {
    let mut b = with_rhythm("turnaround_us = 100");
    let decision = b.decide(&graph(&b, 50 * MS));
    let turnaround_ns = 300 * US;
    set_turnaround(decision, turnaround_ns);
    b.policy.fired(b.now_ns + 900 * US, PREPARE);
    b.now_ns += MS;
    b.begin();
    calls();
    b.end(OWN);
    let told = calls();
    assert!(told.contains(&timer(MS - turnaround_ns, PREPARE)), "{told:?}");
}

#[test]
fn a_step_that_does_not_come_costs_little_once() {
    let mut b = with_rhythm("");
    b.decide(&graph(&b, 50 * MS));
    let at_ns = b.now_ns + MS - TURNAROUND;
    calls();
    b.policy.fired(at_ns, PREPARE);
    let told = calls();
    assert!(told.contains(&timer(TURNAROUND + MS, VAIN)), "{told:?}");
    b.policy.fired(at_ns + TURNAROUND + MS, VAIN);
    assert!(calls().contains(&yields(false)));
    // Until they come evenly again nothing is predicted.
    assert_eq!(b.policy.services[0].rhythm.next_ns(), None);
}

#[test]
fn what_ends_before_the_next_step_is_left_alone() {
    let mut b = with_rhythm("");
    let short = graph(&b, 900 * US);
    assert_eq!(b.policy.decide(&short).reason, Reason::Between.into());
    assert!(!calls().iter().any(|call| matches!(call, Call::SetTimer { token: PREPARE, .. })));
}

#[test]
fn what_cannot_yield_and_would_run_into_the_next_step_waits_or_is_limited() {
    let mut b = with_rhythm("");
    assert_eq!(b.decide(&b.limitable(3 * MS)), Decision::SmLimited(32));
    let held = b.policy.decide(&b.asked(3 * MS));
    assert_eq!((held.decision, held.reason), (Decision::Hold(2 * MS), Reason::NextStep.into()));
    assert_eq!(b.decide(&b.asked(900 * US)), RUNS);
    // It did not come.
    b.now_ns += 2 * MS;
    assert_eq!(b.decide(&b.asked(3 * MS)), RUNS);
}

#[test]
fn uneven_steps_are_not_predicted() {
    let mut b = Bench::new("");
    for n in 0..20 {
        b.begin();
        b.end(OWN);
        b.now_ns += n % 3 * PERIOD;
    }
    assert_eq!(b.decide(&b.asked(3 * MS)), RUNS);
    b.decide(&graph(&b, 50 * MS));
    assert!(!calls().iter().any(|call| matches!(call, Call::SetTimer { token: PREPARE, .. })));
}

#[test]
fn a_long_launch_uses_the_slack_of_a_step_and_then_yields() {
    let mut b = Bench::new("");
    b.now_ns += 100 * MS;
    b.begin();
    let slack_ns = 2 * MS;
    let decision = b.decide(&graph(&b, 50 * MS));
    assert!(matches!(decision, Decision::Sliced(_)), "{decision:?}");
    let told = calls();
    assert!(told.contains(&timer(slack_ns - TURNAROUND, SLACK)), "{told:?}");
    assert_eq!(b.decide(&b.asked(100 * US)), HELD, "nothing is left");
    b.policy.fired(b.now_ns + slack_ns - TURNAROUND, SLACK);
    assert!(calls().contains(&yields(true)));
    b.end(OWN);
    assert!(calls().contains(&yields(false)));
}

#[test]
fn a_step_without_slack_takes_the_sms_back_at_once() {
    let mut b = Bench::new("target_percent = 50");
    b.now_ns += 100 * MS;
    b.decide(&graph(&b, 50 * MS));
    calls();
    b.begin();
    assert!(calls().contains(&yields(true)));
}

#[test]
fn nothing_stays_yielded_for_a_step_that_pauses_or_never_ends() {
    let mut b = Bench::new("target_percent = 50");
    b.now_ns += 100 * MS;
    b.decide(&graph(&b, 5_000 * MS));
    calls();
    b.begin();
    let told = calls();
    assert!(told.contains(&timer(2 * MS, GAP)) && told.contains(&timer(1_000 * MS, RELEASE)));
    b.policy.high_started(b.now_ns);
    b.policy.fired(b.now_ns + 2 * MS, GAP);
    assert_eq!(calls(), [], "there is work");
    b.policy.high_ended(b.now_ns + 3 * MS);
    b.policy.fired(b.now_ns + 5 * MS, GAP);
    assert!(calls().contains(&yields(false)));
    b.policy.high_started(b.now_ns + 6 * MS);
    assert!(calls().contains(&yields(true)));
    b.policy.fired(b.now_ns + 1_006 * MS, RELEASE);
    assert!(calls().contains(&yields(false)), "it never ends");
}

#[test]
fn a_service_that_leaves_in_a_step_leaves_nobody_yielded() {
    let mut b = Bench::new("target_percent = 50");
    b.now_ns += 100 * MS;
    b.decide(&graph(&b, 50 * MS));
    b.begin();
    assert!(calls().contains(&yields(true)));
    b.policy.left(b.now_ns, SERVICE);
    assert!(calls().contains(&yields(false)));
}
