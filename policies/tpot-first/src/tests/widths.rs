//! Select: when the others get more SMs and when fewer.

use super::*;

#[test]
fn so_many_good_steps_and_no_fewer_make_the_width_wider() {
    let mut b = Bench::new("");
    for _ in 0..199 {
        assert_eq!(b.step_beside(OWN), Decision::SmLimited(32));
    }
    assert_eq!(b.width(), 32, "199 good steps");
    b.step_beside(OWN);
    assert_eq!(b.width(), 40, "200 good steps");
    let mut b = Bench::new("good_steps = 3");
    b.steps_beside(3, OWN);
    assert_eq!(b.width(), 40);
}

#[test]
fn steps_without_others_say_nothing_of_the_width() {
    let mut b = Bench::new("");
    b.steps(1_000, OWN);
    b.steps(1, 2 * TPOT);
    assert_eq!(b.width(), 32);
}

#[test]
fn steps_beyond_the_target_share_are_not_good() {
    let mut b = Bench::new("");
    b.steps_beside(199, OWN);
    b.step_beside(9 * MS + 10 * US);
    assert_eq!(b.width(), 32);
    b.step_beside(9 * MS);
    assert_eq!(b.width(), 40);
}

#[test]
fn one_late_step_makes_the_width_narrower_at_once() {
    let mut b = Bench::new("start_sms = 96");
    b.step_beside(TPOT);
    assert_eq!(b.width(), 96, "it kept its objective");
    for narrower in [72, 56, 48, 40, 32, 24, 16, 8, 0] {
        b.step_beside(TPOT + 1);
        if narrower == 0 {
            break;
        }
        assert_eq!(b.width(), narrower);
    }
    assert_eq!(b.width(), 0);
}

#[test]
fn a_95th_percentile_over_the_target_share_makes_it_narrower_by_one_step() {
    let mut b = Bench::new("");
    let over_ns = 9 * MS + 500 * US;
    for n in 0..60 {
        b.step_beside(if n % 20 == 19 { over_ns } else { OWN });
    }
    b.step_beside(over_ns);
    b.step_beside(over_ns);
    assert_eq!(b.width(), 32, "5 of 62 are over, as may be by chance");
    b.step_beside(over_ns);
    assert_eq!(b.width(), 24);
    assert_eq!(b.policy.services[0].widths.p95(), None, "each width has steps of its own");
}

#[test]
fn a_width_that_failed_is_tried_again_after_ever_more_steps() {
    let mut b = Bench::new("good_steps = 10");
    let mut until_wider = Vec::new();
    for _ in 0..3 {
        let before = b.width();
        let steps = (1..1_000).find(|_| {
            b.step_beside(OWN);
            b.width() > before
        });
        until_wider.push(steps.unwrap());
        b.step_beside(TPOT + 1);
        assert_eq!(b.width(), 32);
    }
    assert_eq!(until_wider, [10, 20, 40]);
}

#[test]
fn a_step_that_began_before_the_width_changed_is_not_of_it() {
    let mut b = Bench::new("");
    b.begin();
    b.decide(&b.limitable(MS));
    let began_ns = b.now_ns;
    b.end(TPOT + 1);
    assert_eq!(b.width(), 24);
    b.policy.began(b.now_ns, SERVICE, began_ns + 1, began_ns + 1 + TPOT);
    b.decide(&b.limitable(MS));
    b.policy.ended(b.now_ns, SERVICE, 1, 2 * TPOT);
    assert_eq!(b.width(), 24, "it had the same launches beside it");
}

#[test]
fn other_neighbours_begin_anew() {
    let mut b = Bench::new("good_steps = 10");
    b.steps_beside(30, OWN);
    assert_eq!(b.width(), 56);
    b.policy.joined(b.now_ns, &client(7, PriorityClass::BestEffort));
    assert_eq!(b.width(), 32, "one more begins at the first width");
    b.steps_beside(9, OWN);
    b.policy.left(b.now_ns, 7);
    b.step_beside(OWN);
    assert_eq!(b.width(), 32, "good steps beside another do not count");
    b.steps_beside(9, OWN);
    assert_eq!(b.width(), 40);
    // One fewer: no reason for less.
    b.policy.joined(b.now_ns, &client(7, PriorityClass::BestEffort));
    b.steps_beside(10, OWN);
    b.policy.left(b.now_ns, 7);
    assert_eq!(b.width(), 40);
}

#[test]
fn at_the_least_width_the_others_wait_and_come_back_after_good_steps() {
    let mut b = Bench::new("start_sms = 0\ngood_steps = 10\ntarget_percent = 50");
    for _ in 0..9 {
        assert_eq!(b.step_beside(OWN), HELD);
    }
    assert_eq!(b.width(), 0);
    b.step_beside(OWN);
    assert_eq!(b.step_beside(OWN), Decision::SmLimited(8));
}

#[test]
fn the_whole_gpu_is_the_widest() {
    let mut b = Bench::new("good_steps = 1\nstart_sms = 120");
    for width in [128, 132, 132] {
        b.step_beside(OWN);
        assert_eq!(b.width(), width);
    }
    assert!(b.policy.is_free());
}

#[test]
fn the_part_of_the_slack_grows_with_what_waits_for_it_and_falls_with_late_steps() {
    let mut b = Bench::new("good_steps = 10");
    let step = |b: &mut Bench, took_ns: u64| {
        b.begin();
        // Half of the slack of 4 ms is 2 ms, and each part is half a millisecond.
        let longest_ns =
            (1..10).rev().map(|n| n * MS / 2).find(|ns| b.decide(&b.asked(*ns)) == RUNS);
        b.end(took_ns);
        longest_ns.unwrap_or(0) / (MS / 2)
    };
    let parts: Vec<u64> = (0..60).map(|_| step(&mut b, OWN)).collect();
    let grown: Vec<u64> = (0..60).map(|n| (4 + n / 10).min(8)).collect();
    assert_eq!(parts, grown);
    assert_eq!(step(&mut b, TPOT + 1), 8);
    assert_eq!(step(&mut b, TPOT + 1), 6);
    assert_eq!(step(&mut b, OWN), 5);
    assert_eq!(b.width(), 32, "of which they say nothing");
}

#[test]
fn widths_are_those_of_the_partitions() {
    let mut b = Bench::of_widths("good_steps = 1", &[32, 64, 112]);
    let mut widths = Vec::new();
    for _ in 0..5 {
        widths.push(b.width());
        b.step_beside(OWN);
    }
    assert_eq!(widths, [32, 64, 112, 132, 132], "and all SMs");
    for width in [112, 64, 32, 0] {
        b.step_beside(TPOT + 1);
        assert_eq!(b.width(), width);
    }
    // What was saved on another GPU begins at the next narrower one.
    b.policy.services[0].widths.go_on_at(100);
    assert_eq!(b.width(), 64);
    b.policy.services[0].widths.go_on_at(8);
    assert_eq!(b.width(), 32, "the least");
}

/// A step in which slack is known, and launches of which so many ran on its width.
fn after_limited(count: u32) -> Bench {
    let mut b = Bench::new("");
    b.begin();
    for _ in 0..count {
        assert_eq!(b.decide(&b.limitable(70 * US)), Decision::SmLimited(32));
    }
    b
}

fn widths_set() -> Vec<u32> {
    let width = |call: &Call| match call {
        Call::SetWidth { client: TRAINING, sms } => Some(*sms),
        _ => None,
    };
    calls().iter().filter_map(width).collect()
}

#[test]
fn a_client_whose_launches_all_run_on_the_width_has_it() {
    let mut b = after_limited(63);
    assert_eq!(b.decide(&b.limitable(10 * US)), RUNS, "short: whole");
    assert_eq!(widths_set(), []);
    let limitable = b.limitable(70 * US);
    assert_eq!(b.policy.decide(&limitable).decision, RUNS, "on its width");
    assert_eq!(widths_set(), [32]);
    let short = b.limitable(10 * US);
    assert_eq!(reason(&mut b, &short), Reason::Width.into(), "too, now");
    let unmeasured = b.limitable(UNKNOWN);
    assert_eq!(b.policy.decide(&unmeasured).decision, Decision::SmLimited(32));
    // Between two steps all SMs are free.
    b.end(OWN);
    assert_eq!(b.decide(&b.limitable(70 * US)), RUNS);
    assert_eq!(widths_set(), [0]);
}

#[test]
fn a_launch_that_cannot_be_limited_ends_the_width() {
    let mut b = after_limited(64);
    assert_eq!(widths_set(), [32]);
    assert_eq!(b.decide(&b.asked(70 * US)), RUNS, "within the slack");
    assert_eq!(widths_set(), [0]);
    let mut b = after_limited(64);
    calls();
    b.policy.joined(b.now_ns, &client(OTHER, PriorityClass::BestEffort));
    assert_eq!(widths_set(), [0], "shared by weight");
}

#[test]
fn a_kernel_whose_code_was_not_read_runs_whole_and_is_read() {
    let mut b = Bench::new("");
    let unread = |b: &Bench, state| {
        let asked = b.asked(70 * US);
        Launch { offered: FormsOffered::PREPARABLE, state: asked.state | state, ..asked }
    };
    let kernel = unread(&b, LaunchState::empty());
    assert_eq!(b.decide(&kernel), Decision::SmLimited(8), "between steps");
    let graph = unread(&b, LaunchState::GRAPH);
    assert_eq!(b.decide(&graph), RUNS, "its kernels are not known");
    b.begin();
    let kernel = unread(&b, LaunchState::empty());
    assert_eq!(b.decide(&kernel), Decision::SmLimited(8), "within the slack");
    let mut b = Bench::of_widths("", &[]);
    let kernel = unread(&b, LaunchState::empty());
    assert_eq!(b.decide(&kernel), RUNS, "there are no widths");
}
