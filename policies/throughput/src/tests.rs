use super::*;
use tally_sdk::testing::{self, Call, calls, client, client_state, launch, set_clients};
use tally_sdk::{ClientState, HOLD_UNTIL_CHANGE, LaunchState, PriorityClass, SharingMode};

const MS: u64 = 1_000_000;
const SERVICE: ClientId = 1;
const FIRST: ClientId = 2;
const SECOND: ClientId = 3;

/// A policy with a service and two trainings.
fn with_two() -> Throughput {
    let mut policy = Throughput::init("").unwrap();
    policy.joined(1, &client(SERVICE, PriorityClass::High));
    policy.joined(1, &client(FIRST, PriorityClass::BestEffort));
    policy.joined(1, &client(SECOND, PriorityClass::BestEffort));
    calls();
    policy
}

/// What both were charged; they have a launch on the GPU and one that waits.
fn charged(first_ns: u64, second_ns: u64) {
    let state = |id, charged_ns| ClientState {
        charged_ns,
        in_flight: 1,
        waiting_since_ns: 0,
        ..client_state(id, PriorityClass::BestEffort)
    };
    set_clients(vec![state(FIRST, first_ns), state(SECOND, second_ns)]);
}

/// A launch of a client that fills so many percent of 132 SMs.
fn asked(client: ClientId, percent: u64, now_ns: u64) -> Launch {
    let grid_blocks = 132 * 8 * percent / 100;
    let state = LaunchState::HIGH_ACTIVE;
    Launch { client, grid_blocks, now_ns, state, high_clients: 1, ..launch() }
}

fn is_held(answer: &Answer) -> bool {
    matches!(answer.decision, Decision::Hold(_) | Decision::HoldUntilCompletion(_))
}

#[test]
fn one_client_is_never_held_and_leases_make_it_cheap() {
    let mut policy = Throughput::init("").unwrap();
    policy.joined(1, &client(SERVICE, PriorityClass::High));
    policy.joined(1, &client(FIRST, PriorityClass::BestEffort));
    let window = |client, window_ns| Call::SetWindow { client, window_ns };
    assert!(calls().contains(&window(FIRST, WINDOW_OPEN)));
    // High-priority work is active, and is not waited for.
    assert_eq!(policy.decide(&asked(FIRST, 500, 1)), Decision::Run(1_000_000));
    policy.joined(2, &client(SECOND, PriorityClass::BestEffort));
    let shared = [window(FIRST, 5 * MS), Call::RevokeLease(FIRST), window(SECOND, 5 * MS)];
    assert_eq!(calls(), shared);
    policy.left(3, FIRST);
    assert_eq!(policy.decide(&asked(SECOND, 500, 1)), Decision::Run(1_000_000));
}

#[test]
fn high_priority_is_let_through() {
    let high = Launch { state: LaunchState::HIGH_PRIORITY, ..launch() };
    assert_eq!(with_two().decide(&high), Decision::Run(0));
}

#[test]
fn nobody_is_held_while_the_gpu_has_room() {
    let mut policy = with_two();
    charged(0, 0);
    // What a client fills is known once it has launched.
    for client in [FIRST, SECOND] {
        policy.decide(&asked(client, 45, 1));
    }
    for at in 0..200 {
        // The first has had everything.
        charged(at * 10 * MS, 0);
        for client in [FIRST, SECOND] {
            let answer = policy.decide(&asked(client, 45, (at + 1) * 10 * MS));
            assert_eq!((answer.decision, answer.reason), (Decision::Run(0), Reason::Fits.into()));
        }
    }
}

#[test]
fn without_room_clients_go_by_weight() {
    let mut policy = with_two();
    charged(0, 0);
    assert!(!is_held(&policy.decide(&asked(FIRST, 60, 1))));
    assert!(!is_held(&policy.decide(&asked(SECOND, 60, 1))));
    charged(20 * MS, 0);
    assert!(is_held(&policy.decide(&asked(FIRST, 60, 20 * MS))), "it has had its 20 ms");
    assert!(!is_held(&policy.decide(&asked(SECOND, 60, 20 * MS + 1))));
}

#[test]
fn a_wide_launch_takes_the_room_of_the_narrow_ones_after_it_for_a_while() {
    let mut policy = with_two();
    charged(0, 0);
    policy.decide(&asked(FIRST, 100, 1));
    let fits = |policy: &mut Throughput| {
        policy.decide(&asked(SECOND, 30, 1)).reason == u8::from(Reason::Fits)
    };
    assert!(!fits(&mut policy));
    policy.decide(&asked(FIRST, 10, 1));
    assert!(!fits(&mut policy), "the wide one may still be on the GPU");
    for _ in 0..2 {
        policy.decide(&asked(FIRST, 10, 1));
    }
    assert!(fits(&mut policy));
}

#[test]
fn what_was_used_while_there_was_room_is_not_owed() {
    let mut policy = with_two();
    charged(0, 0);
    for client in [FIRST, SECOND] {
        policy.decide(&asked(client, 45, 1));
    }
    for at in 1..100 {
        // The second one's launches are short.
        charged(at * 10 * MS, at);
        let answer = policy.decide(&asked(FIRST, 45, at * 10 * MS));
        assert_eq!(answer.reason, Reason::Fits.into());
    }
    // Of 990 ms it owes a round of 20 ms.
    assert!(!is_held(&policy.decide(&asked(SECOND, 100, 991 * MS))));
    assert!(is_held(&policy.decide(&asked(FIRST, 100, 992 * MS))));
    charged(990 * MS, 45 * MS);
    assert!(!is_held(&policy.decide(&asked(FIRST, 100, 1_040 * MS))));
}

#[test]
fn where_contexts_take_turns_there_is_no_room_beside_another() {
    testing::set_sharing_mode(SharingMode::TimeSliced);
    let mut policy = with_two();
    let idle = client_state(SECOND, PriorityClass::BestEffort);
    let first = client_state(FIRST, PriorityClass::BestEffort);
    set_clients(vec![first, idle]);
    assert!(!is_held(&policy.decide(&asked(FIRST, 10, 1))));
    set_clients(vec![ClientState { in_flight: 1, ..first }, idle]);
    assert!(is_held(&policy.decide(&asked(SECOND, 10, 2))));
}

#[test]
fn a_client_below_its_floor_is_not_held() {
    let mut policy = with_two();
    let state = |id, charged_ns| ClientState {
        charged_ns,
        min_share_permille: if id == FIRST { 900 } else { 0 },
        backlogged_since_ns: 0,
        waiting_since_ns: 0,
        in_flight: 1,
        ..client_state(id, PriorityClass::BestEffort)
    };
    let all = |first_ns, second_ns| {
        set_clients(vec![state(FIRST, first_ns), state(SECOND, second_ns)]);
    };
    let asked = |now_ns| {
        let launch = asked(FIRST, 100, now_ns);
        Launch { state: launch.state | LaunchState::MIN_SHARE, ..launch }
    };
    all(0, 0);
    policy.decide(&asked(1));
    all(20 * MS, 0);
    assert!(is_held(&policy.decide(&asked(20 * MS))));
    all(20 * MS, 20 * MS);
    let answer = policy.decide(&asked(40 * MS));
    assert_eq!((answer.decision, answer.reason), (Decision::Run(0), Reason::Floor.into()));
}

#[test]
fn without_turns_nobody_ever_waits() {
    let mut policy = Throughput::init("turn_us = 0\nlease_launches = 7").unwrap();
    policy.joined(1, &client(FIRST, PriorityClass::BestEffort));
    policy.joined(1, &client(SECOND, PriorityClass::BestEffort));
    charged(1_000 * MS, 0);
    assert_eq!(policy.decide(&asked(FIRST, 100, 20 * MS)), Decision::Run(7));
}

#[test]
fn who_owes_time_owes_it_after_a_reload() {
    let mut policy = with_two();
    charged(0, 0);
    policy.decide(&asked(FIRST, 60, 1));
    charged(20 * MS, 0);
    policy.decide(&asked(FIRST, 60, 20 * MS));
    let mut new: Throughput = testing::reloaded(&policy, "").unwrap();
    new.joined(1, &client(FIRST, PriorityClass::BestEffort));
    new.joined(1, &client(SECOND, PriorityClass::BestEffort));
    assert!(is_held(&new.decide(&asked(FIRST, 60, 20 * MS + 1))));
    let mut saved = policy.snapshot();
    saved.format = "tally-forms".into();
    assert!(new.restore(&saved).is_err_and(|why| why.contains("tally-forms")));
}

#[test]
fn a_wrong_configuration_is_refused() {
    for (text, why) in [("turn_us = -1", "turn_us"), ("window_us = 3", "window_us")] {
        let error = Throughput::init(text).err().unwrap();
        assert!(error.contains(why), "{error}");
    }
    assert!(
        !is_held(&Decision::Run(0).into()) && is_held(&Decision::Hold(HOLD_UNTIL_CHANGE).into())
    );
}
