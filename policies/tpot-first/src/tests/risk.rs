//! Between steps: launches that a step could not bear.

use super::*;

/// A CUDA graph, which could run in parts.
fn long(b: &Bench, predicted_ns: u64) -> Launch {
    let launch = b.asked(predicted_ns);
    let state = launch.state | LaunchState::GRAPH;
    Launch { state, offered: FormsOffered::SLICED, ..launch }
}

/// A long launch that starts after a pause, and a step that begins meanwhile and takes so long.
fn step_beside_long(b: &mut Bench, took_ns: u64) -> Decision {
    b.now_ns += 3 * TPOT;
    let decision = b.decide(&long(b, TPOT));
    b.begin();
    b.end(took_ns);
    decision
}

#[test]
fn between_steps_a_long_launch_runs_whole_while_few_steps_are_delayed() {
    let mut b = Bench::new("");
    (0..22).for_each(|_| b.uneven_steps());
    b.now_ns += TPOT;
    assert_ne!(b.decide(&long(&b, 2 * TPOT + 1)), RUNS, "too many steps would be late for it");
    let width = b.width();
    // Late, or beyond the target.
    for took_ns in [TPOT + 1, 9_100 * US, TPOT + 1, 9_100 * US] {
        assert_eq!(step_beside_long(&mut b, took_ns), RUNS);
    }
    assert_eq!(b.width(), width, "that tells nothing of widths");
    b.now_ns += 3 * TPOT;
    assert_ne!(b.decide(&long(&b, TPOT)), RUNS, "4 of 200");
    b.now_ns += 3 * TPOT;
    assert_eq!(b.decide(&long(&b, 2 * MS)), RUNS, "a step can bear it");
    b.steps(197, OWN);
    assert_eq!(step_beside_long(&mut b, OWN), RUNS, "3 of 200");
}

#[test]
fn what_takes_two_objectives_counts_what_is_under_way() {
    let mut b = Bench::new("");
    b.now_ns += TPOT;
    assert_eq!(b.decide(&long(&b, TPOT)), RUNS);
    assert_eq!(b.decide(&long(&b, TPOT)), RUNS);
    let other = Launch { client: OTHER, ..long(&b, 3 * MS) };
    assert_ne!(b.decide(&other), RUNS);
}

#[test]
fn no_risk_is_taken_of_a_service_that_is_not_known_yet_nor_while_a_step_pauses() {
    let mut b = Bench::unknown("");
    assert_ne!(b.decide(&long(&b, TPOT)), RUNS);
    let mut b = Bench::new("");
    b.now_ns += TPOT;
    assert_eq!(b.decide(&long(&b, TPOT)), RUNS);
    let mut b = Bench::new("");
    b.begin();
    let paused = Launch { state: LaunchState::GRAPH, high_idle_ns: 3 * MS, ..long(&b, TPOT) };
    assert_ne!(b.decide(&paused), RUNS);
    // Of few steps one is much.
    let mut b = Bench::new("");
    assert_eq!(step_beside_long(&mut b, TPOT + 1), RUNS);
    assert_ne!(step_beside_long(&mut b, OWN), RUNS);
}

#[test]
fn what_another_service_cannot_bear_does_not_keep_this_one_from_learning() {
    let mut b = Bench::new("");
    b.policy.joined(1, &client(OTHER, PriorityClass::High));
    let width = b.width();
    // Short, between steps; the other one has no objective.
    b.now_ns += TPOT;
    assert_eq!(b.decide(&b.limitable(MS)), RUNS);
    b.begin();
    b.end(TPOT + 1);
    assert!(b.width() < width, "{}", b.width());
}

#[test]
fn a_good_step_beside_what_it_could_not_bear_counts_for_its_width() {
    let mut b = Bench::new("good_steps = 5");
    for n in 0..10 {
        b.now_ns += (1 + n % 3) * TPOT;
        assert_eq!(b.decide(&long(&b, TPOT)), RUNS);
        b.begin();
        b.end(OWN);
    }
    assert!(b.width() > 32, "{}", b.width());
}
