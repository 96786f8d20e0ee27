//! Clients that have a floor. What it gives them is tested in `tally-fairness`.

use crate::tests::{join, policy, yields};
use crate::{Priority, Reason};
use tally_sdk::testing::{
    Call, calls, client_state, launch, reloaded, set_clients, set_sharing_mode,
};
use tally_sdk::{
    Answer, ClientId, ClientState, Decision, FormsOffered, HOLD_UNTIL_CHANGE, Launch, LaunchState,
    Membership, Policy, PriorityClass, SharingMode, Timer,
};

const MS: u64 = 1_000_000;
const WEB: ClientId = 1;
const BATCH: ClientId = 2;
const OTHER: ClientId = 3;

fn beside_web(mode: SharingMode) -> Priority {
    set_sharing_mode(mode);
    let mut policy = policy("");
    join(&mut policy, WEB, PriorityClass::High);
    join(&mut policy, BATCH, PriorityClass::BestEffort);
    calls();
    policy
}

/// What BATCH was charged, with a floor of a fifth.
fn charged(charged_ns: u64) {
    let state = ClientState {
        min_share_permille: 200,
        charged_ns,
        waiting_since_ns: 0,
        backlogged_since_ns: 0,
        ..client_state(BATCH, PriorityClass::BestEffort)
    };
    set_clients(vec![state, client_state(OTHER, PriorityClass::BestEffort)]);
}

fn busy(now_ns: u64) -> Launch {
    let state = LaunchState::HIGH_ACTIVE | LaunchState::MIN_SHARE;
    Launch { now_ns, client: BATCH, state, high_clients: 1, high_idle_ns: 0, ..launch() }
}

fn is_because(answer: Answer, reason: Reason) -> bool {
    answer.reason == u8::from(reason)
}

#[test]
fn a_client_below_its_floor_is_let_in_while_high_priority_is_busy() {
    for mode in [SharingMode::Concurrent, SharingMode::TimeSliced] {
        let mut policy = beside_web(mode);
        charged(0);
        let held = policy.decide(&busy(0));
        // A fifth of 10 ms makes a burst.
        assert_eq!(held, Decision::Hold(10 * MS + 1), "not until high priority idles");
        assert!(is_because(held, Reason::HighActive));
        let let_in = policy.decide(&busy(10 * MS));
        assert_eq!(let_in, Decision::Run(0));
        assert!(is_because(let_in, Reason::Floor));
        charged(3 * MS);
        assert!(matches!(policy.decide(&busy(11 * MS)).decision, Decision::Hold(_)));
        // One without a floor waits as ever.
        let other = Launch { client: OTHER, state: LaunchState::HIGH_ACTIVE, ..busy(500 * MS) };
        assert_eq!(policy.decide(&other), Decision::Hold(HOLD_UNTIL_CHANGE));
        policy.left(0, BATCH);
        let name = "launches_for_min_share".to_owned();
        assert!(calls().contains(&Call::CounterAdd { name, delta: 1 }));
    }
}

#[test]
fn weights_do_not_hold_it_either() {
    for mode in [SharingMode::Concurrent, SharingMode::TimeSliced] {
        let mut policy = beside_web(mode);
        join(&mut policy, OTHER, PriorityClass::BestEffort);
        policy.left(0, WEB);
        let alone =
            |now_ns, client, state| Launch { now_ns, client, state, predicted_ns: MS, ..launch() };
        let with_charged = |batch_ns: u64, backlogged_since_ns| {
            let state = |id| ClientState {
                waiting_since_ns: 0,
                ..client_state(id, PriorityClass::BestEffort)
            };
            let batch = ClientState {
                min_share_permille: 200,
                charged_ns: batch_ns,
                backlogged_since_ns,
                ..state(BATCH)
            };
            set_clients(vec![batch, state(OTHER)]);
        };
        // It has used up its credit, without a floor.
        with_charged(0, 0);
        let plain = LaunchState::empty();
        assert_eq!(policy.decide(&alone(1, BATCH, plain)), Decision::Run(0));
        with_charged(21 * MS, 21 * MS);
        let held = policy.decide(&alone(21 * MS, BATCH, plain));
        assert!(is_because(held, Reason::NotItsTurn), "{mode:?}");
        let held = policy.decide(&alone(21 * MS, BATCH, LaunchState::MIN_SHARE));
        assert!(is_because(held, Reason::NotItsTurn), "{mode:?}");
        let due = policy.decide(&alone(31 * MS, BATCH, LaunchState::MIN_SHARE));
        assert!(due == Decision::Run(0) && is_because(due, Reason::Floor), "{mode:?}");
    }
}

#[test]
fn what_it_has_under_way_does_not_yield_while_it_is_due() {
    let mut policy = beside_web(SharingMode::Concurrent);
    charged(0);
    let long = Launch {
        state: LaunchState::MIN_SHARE,
        high_idle_ns: MS,
        predicted_ns: 50 * MS,
        grid_blocks: 5_000,
        offered: FormsOffered::SLICED | FormsOffered::PREEMPTIBLE,
        ..busy(0)
    };
    // It may wait for this launch, and launch nothing else meanwhile.
    assert!(!matches!(policy.decide(&long).decision, Decision::Hold(_)));
    let timer = Call::SetTimer { delay_ns: 10 * MS + 1, token: 0 };
    assert!(calls().contains(&timer));
    policy.fired(10 * MS + 1, 0);
    let window = |ms| Call::SetWindow { client: BATCH, window_ns: ms * MS };
    assert_eq!(calls(), [window(2), yields(BATCH, false)]);
    // Another policy of the same code goes on so.
    let mut next: Priority = reloaded(&policy, "").unwrap();
    calls();
    join(&mut next, WEB, PriorityClass::High);
    join(&mut next, BATCH, PriorityClass::BestEffort);
    assert!(!calls().iter().any(|call| matches!(call, Call::SetAutoYield { enabled: true, .. })));
    charged(50 * MS);
    for policy in [&mut policy, &mut next] {
        let busy = Launch { predicted_ns: 50 * MS, ..busy(11 * MS) };
        assert!(matches!(policy.decide(&busy).decision, Decision::Hold(_)));
        assert_eq!(calls(), [window(1), yields(BATCH, true)]);
    }
}
