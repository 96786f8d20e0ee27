//! The rules, one by one, and for any launch there can be.

mod candidates;
mod device;
mod floors;
mod forms;
mod graphs;
mod learning;
mod saving;
mod turns;

use crate::Priority;
use crate::settings::Settings;
use proptest::prelude::*;
use std::collections::BTreeMap;
use tally_sdk::testing::{Call, calls, client, launch, set_sharing_mode};
use tally_sdk::{
    Decision, FormsOffered, HOLD_UNTIL_CHANGE, Launch, LaunchState, Membership, Policy,
    PriorityClass, SharingMode, WINDOW_OPEN,
};

const IDLE_GAP_NS: u64 = 100_000;
const WINDOW_NS: u64 = 1_000_000;
/// Of one among several best-effort clients: a quarter of a turn.
const SHARED_WINDOW_NS: u64 = 5_000_000;

fn policy(config: &str) -> Priority {
    let policy = Priority::init(config).unwrap();
    calls();
    policy
}

/// The forms' part of a configuration, where kernels run at once.
fn forms_of(config: &str) -> tally_forms::Settings {
    Settings::read(config, SharingMode::Concurrent).unwrap().0.forms
}

fn beside_high(high_idle_ns: u64) -> Launch {
    Launch { high_clients: 1, high_idle_ns, ..launch() }
}

/// Every form is on offer.
const OFFERS: FormsOffered =
    FormsOffered::SLICED.union(FormsOffered::PREEMPTIBLE).union(FormsOffered::SM_LIMITED);

fn yields(client: u32, enabled: bool) -> Call {
    Call::SetAutoYield { client, enabled, idle_ns: if enabled { IDLE_GAP_NS } else { 0 } }
}

fn join(policy: &mut Priority, id: u32, class: PriorityClass) {
    policy.joined(0, &client(id, class));
}

#[test]
fn high_priority_never_waits() {
    let busy =
        Launch { state: LaunchState::HIGH_PRIORITY | LaunchState::HIGH_ACTIVE, ..beside_high(0) };
    assert_eq!(policy("").decide(&busy), Decision::Run(0));
}

#[test]
fn best_effort_waits_while_high_priority_is_busy() {
    let busy = Launch { state: LaunchState::HIGH_ACTIVE, ..beside_high(0) };
    assert_eq!(policy("").decide(&busy), Decision::Hold(HOLD_UNTIL_CHANGE));
}

#[test]
fn best_effort_waits_for_exactly_the_rest_of_the_idle_gap() {
    let mut policy = policy("");
    assert_eq!(policy.decide(&beside_high(0)), Decision::Hold(IDLE_GAP_NS));
    assert_eq!(policy.decide(&beside_high(30_000)), Decision::Hold(70_000));
    assert_eq!(policy.decide(&beside_high(IDLE_GAP_NS - 1)), Decision::Hold(1));
    assert_eq!(policy.decide(&beside_high(IDLE_GAP_NS)), Decision::Run(0));
    // There never was any high-priority activity.
    assert_eq!(policy.decide(&beside_high(u64::MAX)), Decision::Run(0));
}

#[test]
fn alone_it_gets_a_lease() {
    assert_eq!(policy("").decide(&launch()), Decision::Run(1_000_000));
    assert_eq!(policy("lease_launches = 3").decide(&launch()), Decision::Run(3));
}

#[test]
fn leases_and_open_windows_end_when_high_priority_joins_and_come_back() {
    let mut policy = policy("");
    let window = |client, window_ns| Call::SetWindow { client, window_ns };
    join(&mut policy, 1, PriorityClass::BestEffort);
    assert_eq!(calls(), [window(1, WINDOW_OPEN)]);
    join(&mut policy, 2, PriorityClass::High);
    assert_eq!(calls(), [window(1, WINDOW_NS), Call::RevokeLease(1), yields(1, true)]);
    join(&mut policy, 3, PriorityClass::BestEffort);
    assert_eq!(calls(), [window(3, WINDOW_NS), yields(3, true)]);
    // A second one changes nothing, and neither does its leaving.
    join(&mut policy, 4, PriorityClass::High);
    policy.left(0, 4);
    assert_eq!(calls(), []);
    policy.left(0, 1);
    policy.left(0, 2);
    assert_eq!(calls(), [window(3, WINDOW_OPEN), yields(3, false)]);
}

#[test]
fn without_forms_nobody_is_asked_to_yield() {
    let mut policy = policy("forms = false");
    join(&mut policy, 1, PriorityClass::BestEffort);
    join(&mut policy, 2, PriorityClass::High);
    policy.left(0, 2);
    assert!(!calls().iter().any(|call| matches!(call, Call::SetAutoYield { .. })));
    let long = Launch { predicted_ns: 10_000_000, offered: OFFERS, ..beside_high(IDLE_GAP_NS) };
    assert_eq!(policy.decide(&long), Decision::Run(0));
}

#[test]
fn where_contexts_take_turns_nothing_is_held_for_long_or_transformed() {
    set_sharing_mode(SharingMode::TimeSliced);
    for (config, idle_ns, window_ns) in
        [("", 0, 20_000_000), ("idle_gap_us = 100\nwindow_us = 5", IDLE_GAP_NS, 5_000)]
    {
        let mut policy = policy(config);
        join(&mut policy, 2, PriorityClass::High);
        join(&mut policy, 1, PriorityClass::BestEffort);
        let asked = calls();
        assert!(asked.contains(&Call::SetWindow { client: 1, window_ns }), "{asked:?}");
        assert!(!asked.iter().any(|call| matches!(call, Call::SetAutoYield { .. })), "{asked:?}");
        let busy = Launch { state: LaunchState::HIGH_ACTIVE, ..beside_high(0) };
        assert_eq!(policy.decide(&busy), Decision::Hold(HOLD_UNTIL_CHANGE));
        let long = Launch { predicted_ns: 10_000_000, offered: OFFERS, ..beside_high(idle_ns) };
        assert_eq!(policy.decide(&long), Decision::Run(0));
    }
    let mut policy = policy("forms = true");
    join(&mut policy, 2, PriorityClass::High);
    join(&mut policy, 1, PriorityClass::BestEffort);
    assert!(calls().contains(&Call::SetAutoYield { client: 1, enabled: true, idle_ns: 0 }));
}

#[test]
fn constants_are_configuration() {
    let mut policy = policy("idle_gap_us = 10\nwindow_us = 50");
    assert_eq!(policy.decide(&beside_high(4_000)), Decision::Hold(6_000));
    join(&mut policy, 2, PriorityClass::High);
    join(&mut policy, 1, PriorityClass::BestEffort);
    let idle_ns = 10_000;
    assert_eq!(
        calls(),
        [
            Call::SetWindow { client: 1, window_ns: 50_000 },
            Call::SetAutoYield { client: 1, enabled: true, idle_ns }
        ]
    );
    for (text, complaint) in [
        ("idle_gap_us = soon", "`idle_gap_us = soon`: expected a whole number from 0 to 1000000"),
        ("window_us = 0", "`window_us = 0`: expected a whole number from 1 to"),
        ("forms = 1", "`forms = 1`: expected true or false"),
        ("turn_us = -1", "`turn_us = -1`: expected a whole number from 0 to 10000000"),
        ("samples = 0", "`samples = 0`: expected a whole number from 1 to 60"),
        ("explore_permille = 1001", "expected a whole number from 0 to 1000"),
        ("turnaround_ns_max = 31.6", "`turnaround_ns_max = 31.6`: expected a whole number"),
        ("review_launches = 3", "expected a whole number from 16 to"),
        (
            "idle_gap_ms = 1",
            "unknown key `idle_gap_ms`; known keys: idle_gap_us, window_us, turn_us, lease",
        ),
    ] {
        let error = Priority::init(text).err().unwrap();
        assert!(error.contains(complaint), "{error}");
    }
}

/// Kernels of few ids, so that they come again; all else can be anything.
fn any_launch() -> impl Strategy<Value = Launch> {
    let moments = (any::<u64>(), any::<u64>(), any::<u64>(), 0..300_000u64, any::<bool>());
    let few = prop_oneof![any::<u64>(), 0..100_000u64];
    let shape = (any::<u32>(), few, any::<u32>(), any::<(u8, u8)>(), any::<bool>(), 0..3u32);
    let kernel = (any::<u32>(), any::<u32>(), 0..300u32, any::<bool>());
    (moments, shape, kernel).prop_map(
        |((now_ns, predicted_ns, waited_ns, idle, never), shape, kernel)| {
            let (client, grid_blocks, block_threads, flags, high, high_clients) = shape;
            let (kernel, shared_bytes, sm_count, short) = kernel;
            let mut state = LaunchState::from_bits_truncate(flags.0);
            state.set(LaunchState::HIGH_PRIORITY, high);
            let offered = FormsOffered::from_bits_truncate(flags.1);
            let busy = state.contains(LaunchState::HIGH_ACTIVE);
            Launch {
                now_ns,
                client,
                kernel,
                state,
                offered,
                grid_blocks,
                block_threads,
                shared_bytes,
                predicted_ns: if short { predicted_ns % 20_000_000 } else { predicted_ns },
                waited_ns,
                high_idle_ns: if busy {
                    0
                } else if never {
                    u64::MAX
                } else {
                    idle
                },
                high_clients,
                sm_count,
                ..launch()
            }
        },
    )
}

proptest! {
    #[test]
    fn best_effort_starts_only_while_high_priority_is_idle(launch in any_launch()) {
        let decision = policy("").decide(&launch).decision;
        let is_idle = !launch.high_active() && launch.high_idle_ns >= IDLE_GAP_NS;
        if let Decision::Hold(_) = decision {
            prop_assert!(!launch.is_high() && launch.high_clients > 0 && !is_idle);
        } else {
            prop_assert!(launch.is_high() || launch.high_clients == 0 || is_idle);
        }
    }

    #[test]
    fn a_hold_ends_when_the_idle_gap_does(launch in any_launch()) {
        if let Decision::Hold(ns) = policy("").decide(&launch).decision {
            prop_assert!(ns > 0);
            if !launch.high_active() {
                let later = Launch { high_idle_ns: launch.high_idle_ns + ns, ..launch };
                prop_assert!(!matches!(policy("").decide(&later).decision, Decision::Hold(_)));
            }
        }
    }

    #[test]
    fn a_lease_only_alone_and_forms_only_beside_high_priority(launch in any_launch()) {
        let alone = launch.high_clients == 0 || launch.is_high();
        match policy("").decide(&launch).decision {
            Decision::Run(0) | Decision::Hold(_) => {}
            Decision::Run(_) => prop_assert!(launch.high_clients == 0 && !launch.is_high()),
            other => prop_assert!(!alone, "{other:?}"),
        }
    }

    #[test]
    fn whatever_comes_and_goes_windows_follow(steps in prop::collection::vec((0..6u32, any::<bool>()), 0..40)) {
        let mut policy = policy("");
        let (mut connected, mut windows) = (Vec::<u32>::new(), BTreeMap::new());
        let mut yielding = BTreeMap::new();
        for (id, joins) in steps {
            // Even ids are high-priority clients.
            let class = if id % 2 == 0 { PriorityClass::High } else { PriorityClass::BestEffort };
            match connected.iter().position(|&known| known == id) {
                None if joins => {
                    connected.push(id);
                    join(&mut policy, id, class);
                }
                Some(at) if !joins => {
                    connected.remove(at);
                    windows.remove(&id);
                    yielding.remove(&id);
                    policy.left(0, id);
                }
                _ => continue,
            }
            for call in calls() {
                match call {
                    Call::SetWindow { client, window_ns } => {
                        windows.insert(client, window_ns);
                    }
                    Call::SetAutoYield { client, enabled, .. } => {
                        yielding.insert(client, enabled);
                    }
                    _ => {}
                }
            }
            let protected = connected.iter().any(|id| id % 2 == 0);
            let is_shared = connected.iter().filter(|id| *id % 2 == 1).count() > 1;
            let expected = match (protected, is_shared) {
                (true, _) => WINDOW_NS,
                (false, true) => SHARED_WINDOW_NS,
                (false, false) => WINDOW_OPEN,
            };
            for id in connected.iter().filter(|id| *id % 2 == 1) {
                prop_assert_eq!(windows.get(id), Some(&expected));
                let yields = yielding.get(id).copied().unwrap_or(false);
                prop_assert_eq!(yields, protected);
            }
        }
    }

    #[test]
    fn no_configuration_panics(text in "\\PC{0,60}|([a-z_]{1,9} ?= ?[0-9a-z\"#]{0,9}\n){0,4}") {
        let _ = Priority::init(&text);
    }
}
