//! Several best-effort clients. What each gets of the GPU is tested in `tally-fairness`.

use crate::Priority;
use crate::tests::{SHARED_WINDOW_NS, WINDOW_NS, join, policy};
use std::collections::BTreeMap;
use tally_sdk::testing::{
    Call, calls, client, client_state, launch, set_clients, set_sharing_mode,
};
use tally_sdk::{
    Client, ClientId, ClientState, Decision, Launch, LaunchState, Membership, NEVER, Policy,
    PriorityClass, SharingMode,
};

const TURN_NS: u64 = 20_000_000;

fn sharing(mode: SharingMode, clients: &[ClientId]) -> Priority {
    set_sharing_mode(mode);
    let mut policy = policy("");
    for &id in clients {
        join(&mut policy, id, PriorityClass::BestEffort);
    }
    policy
}

fn by(client: ClientId, now_ns: u64) -> Launch {
    Launch { client, now_ns, predicted_ns: 200_000, ..launch() }
}

/// All of them have launches waiting, and were charged so much.
fn charged(all: &[(ClientId, u64)]) {
    let state = |&(id, charged_ns): &(ClientId, u64)| ClientState {
        charged_ns,
        waiting_since_ns: 0,
        ..client_state(id, PriorityClass::BestEffort)
    };
    set_clients(all.iter().map(state).collect());
}

fn is_hold(decision: Decision) -> bool {
    matches!(decision, Decision::Hold(_) | Decision::HoldUntilCompletion(_))
}

fn is_held(policy: &mut Priority, client: ClientId, now_ns: u64) -> bool {
    is_hold(policy.decide(&by(client, now_ns)).decision)
}

#[test]
fn one_alone_gets_its_lease_back() {
    for mode in [SharingMode::TimeSliced, SharingMode::Concurrent] {
        let mut policy = sharing(mode, &[1]);
        assert!(matches!(policy.decide(&by(1, 0)).decision, Decision::Run(1..)));
        join(&mut policy, 2, PriorityClass::BestEffort);
        let asked = calls();
        assert!(asked.contains(&Call::RevokeLease(1)), "{asked:?}");
        let window = |client, window_ns| Call::SetWindow { client, window_ns };
        assert!(asked.contains(&window(1, SHARED_WINDOW_NS)), "{asked:?}");
        charged(&[(1, 0), (2, 0)]);
        let Decision::Run(lease) = policy.decide(&by(1, 1)).decision else {
            panic!("nobody waits")
        };
        match mode {
            SharingMode::TimeSliced => assert_eq!(lease, 0),
            SharingMode::Concurrent => assert!((8..=32).contains(&lease), "{lease}"),
        }
        policy.left(0, 1);
        assert!(calls().contains(&window(2, u64::MAX)));
        assert!(matches!(policy.decide(&by(2, 2)).decision, Decision::Run(1_000..)));
    }
}

#[test]
fn what_several_may_launch_unasked_ends_with_a_high_priority_client() {
    let mut policy = sharing(SharingMode::Concurrent, &[1, 2]);
    charged(&[(1, 0), (2, 0)]);
    assert!(matches!(policy.decide(&by(1, 1)).decision, Decision::Run(1..)));
    calls();
    join(&mut policy, 3, PriorityClass::High);
    let asked = calls();
    assert!(asked.contains(&Call::RevokeLease(1)), "{asked:?}");
    // Somebody of another weight waits: each launch is asked about.
    let mut policy = sharing(SharingMode::Concurrent, &[1]);
    policy.joined(0, &Client { weight: 3, ..client(2, PriorityClass::BestEffort) });
    charged(&[(1, 0), (2, 0)]);
    policy.decide(&by(1, 1));
    policy.decide(&by(2, 2));
    charged(&[(1, 2 * TURN_NS), (2, 0)]);
    assert!(is_held(&mut policy, 1, TURN_NS));
    assert_eq!(policy.decide(&by(2, TURN_NS + 1)).decision, Decision::Run(0));
}

#[test]
fn beside_high_priority_work_clients_that_launch_have_one_window_together() {
    let windows = |mode, clients: u32, launch: u32| {
        let mut policy = sharing(mode, &(1..=clients).collect::<Vec<_>>());
        join(&mut policy, clients + 1, PriorityClass::High);
        let mut windows = BTreeMap::new();
        for ms in 1..2_000 {
            let now_ns = 1_000_000 * ms;
            let waiting_since_ns = |id| if id <= launch { now_ns } else { NEVER };
            let state = |id| ClientState {
                waiting_since_ns: waiting_since_ns(id),
                ..client_state(id, PriorityClass::BestEffort)
            };
            set_clients((1..=clients).map(state).collect());
            for id in 1..=launch {
                policy.decide(&Launch { high_clients: 1, ..by(id, now_ns) });
            }
        }
        for call in calls() {
            if let Call::SetWindow { client, window_ns } = call {
                windows.insert(client, window_ns);
            }
        }
        windows.into_values().collect::<Vec<_>>()
    };
    let concurrent = |clients, launch| windows(SharingMode::Concurrent, clients, launch);
    assert_eq!(concurrent(2, 2), [WINDOW_NS / 2; 2]);
    assert_eq!(concurrent(4, 4), [WINDOW_NS / 4; 4]);
    assert_eq!(concurrent(4, 1), [WINDOW_NS; 4], "the others idle");
    assert_eq!(concurrent(16, 16), [100_000; 16], "shorter ones would have the GPU wait for them");
    // Hardware interrupts what is under way.
    assert!(windows(SharingMode::TimeSliced, 4, 4).iter().all(|ns| *ns > WINDOW_NS));
}

#[test]
fn where_contexts_take_turns_one_launches_until_its_turn_is_used_up() {
    let mut policy = sharing(SharingMode::TimeSliced, &[1, 2]);
    charged(&[(1, 0), (2, 0)]);
    assert!(!is_held(&mut policy, 1, 0) && is_held(&mut policy, 2, 1));
    charged(&[(1, TURN_NS - 1), (2, 0)]);
    assert!(!is_held(&mut policy, 1, TURN_NS) && is_held(&mut policy, 2, TURN_NS));
    charged(&[(1, TURN_NS), (2, 0)]);
    assert!(is_held(&mut policy, 1, TURN_NS + 1) && !is_held(&mut policy, 2, TURN_NS + 2));
}

#[test]
fn side_by_side_who_has_had_its_share_waits_for_who_lost_time() {
    let mut policy = sharing(SharingMode::Concurrent, &[1]);
    let heavy = Client { weight: 3, ..client(2, PriorityClass::BestEffort) };
    policy.joined(0, &heavy);
    charged(&[(1, 0), (2, 0)]);
    // Of a round of 40 ms a quarter is for the lighter one.
    assert!(!is_held(&mut policy, 1, 1) && !is_held(&mut policy, 2, 2));
    charged(&[(1, 9_000_000), (2, 9_000_000)]);
    assert!(!is_held(&mut policy, 1, 18_000_000));
    charged(&[(1, 10_000_000), (2, 10_000_000)]);
    assert!(is_held(&mut policy, 1, 20_000_000) && !is_held(&mut policy, 2, 20_000_000));
    charged(&[(1, 10_000_000), (2, 30_000_000)]);
    assert!(!is_held(&mut policy, 1, 40_000_000));
}

#[test]
fn a_turn_outlasts_high_priority_work() {
    let mut policy = sharing(SharingMode::TimeSliced, &[1, 2]);
    join(&mut policy, 3, PriorityClass::High);
    charged(&[(1, 0), (2, 0)]);
    let beside = |client, now_ns, high_idle_ns| Launch {
        high_clients: 1,
        high_idle_ns,
        ..by(client, now_ns)
    };
    assert_eq!(policy.decide(&beside(1, 1_000_000, u64::MAX)), Decision::Run(0));
    let busy = Launch { state: LaunchState::HIGH_ACTIVE, ..beside(1, 2_000_000, 0) };
    assert!(is_hold(policy.decide(&busy).decision));
    // For a second high priority was busy.
    assert!(is_hold(policy.decide(&beside(2, 1_001_000_000, 1_000)).decision));
    assert_eq!(policy.decide(&beside(1, 1_001_001_000, 2_000)), Decision::Run(0));
}

#[test]
fn with_a_turn_of_nothing_nobody_waits_for_another() {
    set_sharing_mode(SharingMode::Concurrent);
    let mut policy = policy("turn_us = 0");
    join(&mut policy, 1, PriorityClass::BestEffort);
    join(&mut policy, 2, PriorityClass::BestEffort);
    for client in [1, 2, 1] {
        assert!(matches!(policy.decide(&by(client, 0)).decision, Decision::Run(1..)));
    }
}
