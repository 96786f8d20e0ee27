//! The rules, one by one, and for any launch there can be.

mod candidates;
mod device;
mod forms;
mod learning;
mod saving;
mod turns;

use crate::{Priority, WINDOW_NS_NONE};
use proptest::prelude::*;
use std::collections::BTreeMap;
use tally_sdk::testing::{Call, calls, client, launch, set_residency};
use tally_sdk::{
    Decision, Event, HOLD_NS_MAX, Launch, LaunchFlags, Policy, PriorityClass, Sharing,
};

const QUIET_NS: u64 = 100_000;
const WINDOW_NS: u64 = 1_000_000;

fn policy(config: &str) -> Priority {
    let policy = Priority::init(config).unwrap();
    calls();
    policy
}

fn beside_high(high_quiet_ns: u64) -> Launch {
    Launch { high_clients: 1, high_quiet_ns, ..launch() }
}

/// Every form is on offer.
const OFFERS: LaunchFlags =
    LaunchFlags::CAN_SLICE.union(LaunchFlags::CAN_PREEMPT).union(LaunchFlags::CAN_PARTITION);

fn gives_way(client: u32, enabled: bool) -> Call {
    Call::SetAutoYield { client, enabled, quiet_ns: if enabled { QUIET_NS } else { 0 } }
}

fn join(policy: &mut Priority, id: u32, class: PriorityClass) {
    policy.on_event(0, &Event::ClientJoined(client(id, class)));
}

#[test]
fn high_priority_never_waits() {
    let busy =
        Launch { class: PriorityClass::High, flags: LaunchFlags::HIGH_BUSY, ..beside_high(0) };
    assert_eq!(policy("").decide(&busy), Decision::Run(0));
}

#[test]
fn best_effort_waits_while_high_priority_is_busy() {
    let busy = Launch { flags: LaunchFlags::HIGH_BUSY, ..beside_high(0) };
    assert_eq!(policy("").decide(&busy), Decision::Hold(HOLD_NS_MAX));
}

#[test]
fn best_effort_waits_for_exactly_the_rest_of_the_quiet_time() {
    let mut policy = policy("");
    assert_eq!(policy.decide(&beside_high(0)), Decision::Hold(QUIET_NS));
    assert_eq!(policy.decide(&beside_high(30_000)), Decision::Hold(70_000));
    assert_eq!(policy.decide(&beside_high(QUIET_NS - 1)), Decision::Hold(1));
    assert_eq!(policy.decide(&beside_high(QUIET_NS)), Decision::Run(0));
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
    assert_eq!(calls(), [window(1, WINDOW_NS_NONE)]);
    join(&mut policy, 2, PriorityClass::High);
    assert_eq!(calls(), [window(1, WINDOW_NS), Call::RevokeLease(1), gives_way(1, true)]);
    join(&mut policy, 3, PriorityClass::BestEffort);
    assert_eq!(calls(), [window(3, WINDOW_NS), gives_way(3, true)]);
    // A second one changes nothing, and neither does its leaving.
    join(&mut policy, 4, PriorityClass::High);
    policy.on_event(0, &Event::ClientLeft(4));
    assert_eq!(calls(), []);
    policy.on_event(0, &Event::ClientLeft(1));
    policy.on_event(0, &Event::ClientLeft(2));
    assert_eq!(calls(), [window(3, WINDOW_NS_NONE), gives_way(3, false)]);
}

#[test]
fn without_cutting_nobody_is_asked_to_give_way() {
    let mut policy = policy("cut = false");
    join(&mut policy, 1, PriorityClass::BestEffort);
    join(&mut policy, 2, PriorityClass::High);
    policy.on_event(0, &Event::ClientLeft(2));
    assert!(!calls().iter().any(|call| matches!(call, Call::SetAutoYield { .. })));
    let long = Launch { predicted_ns: 10_000_000, flags: OFFERS, ..beside_high(QUIET_NS) };
    assert_eq!(policy.decide(&long), Decision::Run(0));
}

#[test]
fn where_contexts_take_turns_nothing_is_held_for_long_or_cut() {
    set_residency(Sharing::TimeSliced);
    for (config, quiet_ns, window_ns) in
        [("", 0, 20_000_000), ("quiet_us = 100\nwindow_us = 5", QUIET_NS, 5_000)]
    {
        let mut policy = policy(config);
        join(&mut policy, 2, PriorityClass::High);
        join(&mut policy, 1, PriorityClass::BestEffort);
        let asked = calls();
        assert!(asked.contains(&Call::SetWindow { client: 1, window_ns }), "{asked:?}");
        assert!(!asked.iter().any(|call| matches!(call, Call::SetAutoYield { .. })), "{asked:?}");
        let busy = Launch { flags: LaunchFlags::HIGH_BUSY, ..beside_high(0) };
        assert_eq!(policy.decide(&busy), Decision::Hold(HOLD_NS_MAX));
        let long = Launch { predicted_ns: 10_000_000, flags: OFFERS, ..beside_high(quiet_ns) };
        assert_eq!(policy.decide(&long), Decision::Run(0));
    }
    let mut policy = policy("cut = true");
    join(&mut policy, 2, PriorityClass::High);
    join(&mut policy, 1, PriorityClass::BestEffort);
    assert!(calls().contains(&Call::SetAutoYield { client: 1, enabled: true, quiet_ns: 0 }));
}

#[test]
fn constants_are_configuration() {
    let mut policy = policy("quiet_us = 10\nwindow_us = 50");
    assert_eq!(policy.decide(&beside_high(4_000)), Decision::Hold(6_000));
    join(&mut policy, 2, PriorityClass::High);
    join(&mut policy, 1, PriorityClass::BestEffort);
    let quiet_ns = 10_000;
    assert_eq!(
        calls(),
        [
            Call::SetWindow { client: 1, window_ns: 50_000 },
            Call::SetAutoYield { client: 1, enabled: true, quiet_ns }
        ]
    );
    for (text, complaint) in [
        ("quiet_us = soon", "`quiet_us = soon`: expected a whole number from 0 to 1000000"),
        ("window_us = 0", "`window_us = 0`: expected a whole number from 1 to"),
        ("cut = 1", "`cut = 1`: expected true or false"),
        ("turn_us = -1", "`turn_us = -1`: expected a whole number from 0 to 10000000"),
        ("samples = 0", "`samples = 0`: expected a whole number from 1 to 60"),
        ("explore_permille = 1001", "expected a whole number from 0 to 1000"),
        ("turnaround_ns_max = 31.6", "`turnaround_ns_max = 31.6`: expected a whole number"),
        ("review_launches = 3", "expected a whole number from 16 to"),
        (
            "quiet_ms = 1",
            "unknown key `quiet_ms`; known keys: quiet_us, window_us, cut, turn_us, lease",
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
    let shape = (any::<u32>(), few, any::<u32>(), any::<u16>(), any::<bool>(), 0..3u32);
    let kernel = (any::<u32>(), any::<u32>(), 0..300u32, any::<bool>());
    (moments, shape, kernel).prop_map(
        |((now_ns, predicted_ns, waited_ns, quiet, never), shape, kernel)| {
            let (client, grid_blocks, block_threads, flags, high, high_clients) = shape;
            let (kernel, shared_bytes, sm_count, short) = kernel;
            let flags = LaunchFlags::from_bits_truncate(flags);
            let busy = flags.contains(LaunchFlags::HIGH_BUSY);
            Launch {
                now_ns,
                client,
                class: if high { PriorityClass::High } else { PriorityClass::BestEffort },
                kernel,
                flags,
                grid_blocks,
                block_threads,
                shared_bytes,
                predicted_ns: if short { predicted_ns % 20_000_000 } else { predicted_ns },
                waited_ns,
                high_quiet_ns: if busy {
                    0
                } else if never {
                    u64::MAX
                } else {
                    quiet
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
    fn best_effort_starts_only_in_silence(launch in any_launch()) {
        let decision = policy("").decide(&launch);
        let silent = !launch.high_busy() && launch.high_quiet_ns >= QUIET_NS;
        if let Decision::Hold(_) = decision {
            prop_assert!(!launch.is_high() && launch.high_clients > 0 && !silent);
        } else {
            prop_assert!(launch.is_high() || launch.high_clients == 0 || silent);
        }
    }

    #[test]
    fn a_hold_ends_when_the_quiet_time_does(launch in any_launch()) {
        if let Decision::Hold(ns) = policy("").decide(&launch) {
            prop_assert!(ns > 0 && ns <= HOLD_NS_MAX);
            if !launch.high_busy() {
                let later = Launch { high_quiet_ns: launch.high_quiet_ns + ns, ..launch };
                prop_assert!(!matches!(policy("").decide(&later), Decision::Hold(_)));
            }
        }
    }

    #[test]
    fn a_lease_only_alone_and_cut_only_beside_high_priority(launch in any_launch()) {
        let alone = launch.high_clients == 0 || launch.is_high();
        match policy("").decide(&launch) {
            Decision::Run(0) | Decision::Hold(_) => {}
            Decision::Run(_) => prop_assert!(launch.high_clients == 0 && !launch.is_high()),
            other => prop_assert!(!alone, "{other:?}"),
        }
    }

    #[test]
    fn whatever_comes_and_goes_windows_follow(steps in prop::collection::vec((0..6u32, any::<bool>()), 0..40)) {
        let mut policy = policy("");
        let (mut connected, mut windows) = (Vec::<u32>::new(), BTreeMap::new());
        let mut giving_way = BTreeMap::new();
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
                    giving_way.remove(&id);
                    policy.on_event(0, &Event::ClientLeft(id));
                }
                _ => continue,
            }
            for call in calls() {
                match call {
                    Call::SetWindow { client, window_ns } => {
                        windows.insert(client, window_ns);
                    }
                    Call::SetAutoYield { client, enabled, .. } => {
                        giving_way.insert(client, enabled);
                    }
                    _ => {}
                }
            }
            let protected = connected.iter().any(|id| id % 2 == 0);
            let expected = if protected { WINDOW_NS } else { WINDOW_NS_NONE };
            for id in connected.iter().filter(|id| *id % 2 == 1) {
                prop_assert_eq!(windows.get(id), Some(&expected));
                let gives_way = giving_way.get(id).copied().unwrap_or(false);
                prop_assert_eq!(gives_way, protected);
            }
        }
    }

    #[test]
    fn no_configuration_panics(text in "\\PC{0,60}|([a-z_]{1,9} ?= ?[0-9a-z\"#]{0,9}\n){0,4}") {
        let _ = Priority::init(&text);
    }
}
