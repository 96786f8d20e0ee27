//! Turns among best-effort clients.

use crate::Priority;
use crate::tests::{join, policy};
use proptest::prelude::*;
use std::collections::BTreeMap;
use tally_sdk::testing::{Call, calls, launch, set_sharing_mode};
use tally_sdk::{
    Answer, ClientId, Decision, Launch, Membership, Policy, PriorityClass, SharingMode,
};

const TURN_NS: u64 = 20_000_000;
const KERNEL_NS: u64 = 200_000;
/// The longest launch that the property test makes.
const LAUNCH_NS_MAX: u64 = 50_000_000;

fn sharing(clients: &[ClientId]) -> Priority {
    set_sharing_mode(SharingMode::TimeSliced);
    let mut policy = policy("");
    for &id in clients {
        join(&mut policy, id, PriorityClass::BestEffort);
    }
    policy
}

fn by(client: ClientId, now_ns: u64) -> Launch {
    Launch { client, now_ns, predicted_ns: KERNEL_NS, ..launch() }
}

fn held_ns(answer: &Answer) -> Option<u64> {
    if let Decision::Hold(ns) = answer.decision { Some(ns) } else { None }
}

/// Clients that launch as soon as they may, on a GPU that takes as long as was predicted and holds
/// so much of each: (client, start) of every launch.
fn run(policy: &mut Priority, clients: &[ClientId], until_ns: u64) -> Vec<(ClientId, u64)> {
    let mut next: BTreeMap<(u64, ClientId), ()> = clients.iter().map(|&c| ((0, c), ())).collect();
    let (mut busy_until, mut all) = (BTreeMap::<ClientId, u64>::new(), Vec::new());
    let mut gpu_ns = 0;
    while let Some(((now_ns, client), ())) = next.pop_first() {
        if now_ns > until_ns {
            break;
        }
        let again_ns = match policy.decide(&by(client, now_ns)).decision {
            Decision::Hold(ns) => now_ns + ns,
            _ => {
                all.push((client, now_ns));
                gpu_ns = gpu_ns.max(now_ns) + KERNEL_NS;
                busy_until.insert(client, gpu_ns);
                // The window holds the next one.
                now_ns.max(gpu_ns.saturating_sub(TURN_NS / 4)) + 1_000
            }
        };
        next.insert((again_ns, client), ());
    }
    all
}

#[test]
fn two_that_always_have_work_change_rarely_and_share_evenly() {
    let mut policy = sharing(&[1, 2]);
    let all = run(&mut policy, &[1, 2], 1_000_000_000);
    let changes = all.windows(2).filter(|pair| pair[0].0 != pair[1].0).count();
    assert!((40..=55).contains(&changes), "{changes} changes in a second");
    let of_first = all.iter().filter(|(client, _)| *client == 1).count();
    assert!(
        of_first.abs_diff(all.len() - of_first) < all.len() / 10,
        "{of_first} of {}",
        all.len()
    );
    let busy = all.len() as u64 * KERNEL_NS;
    assert!(busy > 950_000_000, "the GPU is busy for {busy} ns of a second");
}

#[test]
fn who_has_nothing_to_launch_loses_its_turn() {
    let mut policy = sharing(&[1, 2]);
    assert_eq!(policy.decide(&by(1, 0)), Decision::Run(0));
    let mut now_ns = 1_000;
    while let Some(ns) = held_ns(&policy.decide(&by(2, now_ns))) {
        now_ns += ns;
    }
    assert!(now_ns <= KERNEL_NS + 1_100_000, "waited until {now_ns}");
    // And has to wait itself now.
    assert!(held_ns(&policy.decide(&by(1, now_ns + 1))).is_some());
}

#[test]
fn one_alone_has_no_turns_and_gets_its_lease_back() {
    let mut policy = sharing(&[1]);
    assert!(matches!(policy.decide(&by(1, 0)).decision, Decision::Run(1..)));
    join(&mut policy, 2, PriorityClass::BestEffort);
    let asked = calls();
    assert!(asked.contains(&Call::RevokeLease(1)), "{asked:?}");
    assert!(asked.contains(&Call::SetWindow { client: 1, window_ns: TURN_NS / 4 }), "{asked:?}");
    assert_eq!(policy.decide(&by(1, 0)), Decision::Run(0));
    assert!(held_ns(&policy.decide(&by(2, 1))).is_some());
    policy.left(0, 1);
    assert!(calls().contains(&Call::SetWindow { client: 2, window_ns: u64::MAX }));
    assert!(matches!(policy.decide(&by(2, 2)).decision, Decision::Run(1..)));
}

#[test]
fn side_by_side_where_kernels_run_at_once() {
    set_sharing_mode(SharingMode::Concurrent);
    let mut policy = policy("");
    join(&mut policy, 1, PriorityClass::BestEffort);
    join(&mut policy, 2, PriorityClass::BestEffort);
    for client in [1, 2, 1] {
        assert!(matches!(policy.decide(&by(client, 0)).decision, Decision::Run(1..)));
    }
}

#[test]
fn a_turn_outlasts_high_priority_work() {
    let mut policy = sharing(&[1, 2]);
    join(&mut policy, 3, PriorityClass::High);
    let beside = |client, now_ns, high_idle_ns| Launch {
        high_clients: 1,
        high_idle_ns,
        ..by(client, now_ns)
    };
    assert_eq!(policy.decide(&beside(1, 1_000_000, u64::MAX)), Decision::Run(0));
    assert!(held_ns(&policy.decide(&beside(2, 1_100_000, u64::MAX))).is_some());
    // Busy until 20 ms: client 1 could not ask, and most of its kernel has not run.
    assert!(held_ns(&policy.decide(&beside(2, 20_000_000, 0))).is_some());
    assert_eq!(policy.decide(&beside(1, 20_001_000, 1_000)), Decision::Run(0));
}

#[test]
fn a_launch_longer_than_the_window_keeps_its_turn_while_it_runs() {
    let mut policy = sharing(&[1, 2]);
    let long = Launch { predicted_ns: 100_000_000, ..by(1, 0) };
    assert_eq!(policy.decide(&long), Decision::Run(0));
    let mut now_ns = 1_000;
    while let Some(ns) = held_ns(&policy.decide(&by(2, now_ns))) {
        now_ns += ns;
    }
    assert!((100_000_000..102_000_000).contains(&now_ns), "started at {now_ns}");
}

proptest! {
    /// Whoever asks as it is told to is granted in time, whatever the others do: those that stop
    /// asking, or launch without end.
    #[test]
    fn nobody_waits_for_ever(
        others in prop::collection::vec((2..6_u32, 0..3_000_000_u64, 0..LAUNCH_NS_MAX), 1..400),
    ) {
        let mut policy = sharing(&[1, 2, 3, 4, 5]);
        let (mut now_ns, mut mine_ns, mut since_ns) = (0_u64, 0_u64, 0_u64);
        for (client, pause_ns, predicted_ns) in others {
            now_ns += pause_ns;
            while mine_ns <= now_ns {
                match held_ns(&policy.decide(&by(1, mine_ns))) {
                    Some(ns) => mine_ns += ns,
                    None => {
                        mine_ns += 1_000;
                        since_ns = mine_ns;
                    }
                }
                // The four others' turns: each starts behind what is under way, at most one launch,
                // takes at most twice its GPU time, and the client asks again each 0.5 ms.
                let most_ns = 4 * (LAUNCH_NS_MAX + 2 * TURN_NS + 1_000_000);
                prop_assert!(mine_ns - since_ns < most_ns, "since {since_ns}, at {mine_ns}");
            }
            policy.decide(&Launch { predicted_ns, ..by(client, now_ns) });
        }
    }
}
