//! What was measured outlives a reload, and nothing that is offered instead does harm.

use crate::tests::{any_launch, policy};
use crate::{Priority, tests::device::Truth};
use proptest::prelude::*;
use tally_forms::KEPT_MAX;
use tally_forms::{FORMAT, VERSION};
use tally_sdk::testing::{Call, calls, kernel, reloaded, set_kernels};
use tally_sdk::{
    Decision, Form, FormProfile, KernelProfile, Policy, SAVED_BYTES_MAX, Saved, Stateful,
};

const TRUTH: Truth = Truth {
    offered: crate::tests::OFFERS,
    blocks: 4_096,
    whole_ns: 2_000_000,
    preemptible_permille: 20,
    yielding_ns: 5_000,
    gate_ns: 3_000,
    sm_limited_permille: 900,
};

/// Launches of each kernel.
const LAUNCHES: u64 = 60;

const PREEMPTIBLE: FormProfile = FormProfile {
    form: Form::Preemptible,
    argument: 0,
    count: 40,
    mean_ns: 2_040_000,
    p50_ns: 2_040_000,
    p99_ns: 2_040_000,
    latest_ns: 2_040_000,
    turnaround_ns: 20_000,
};

/// What the core knows after so many launches in that form.
fn profile(count: u64) -> KernelProfile {
    KernelProfile {
        count: 50,
        mean_ns: 2_000_000,
        p50_ns: 2_000_000,
        p99_ns: 2_000_000,
        latest_ns: 2_000_000,
        forms: vec![FormProfile { count, ..PREEMPTIBLE }],
        ..kernel(4_096)
    }
}

/// A policy that has measured kernels 1 to `kernels` in two forms.
fn learned(kernels: u32) -> Priority {
    let mut policy = policy("");
    for id in 1..=kernels {
        for count in 1..=LAUNCHES {
            set_kernels(vec![(id, profile(count))]);
            policy.decide(&TRUTH.launch(id, 2_000_000));
        }
    }
    policy
}

fn saved(data: Vec<u8>) -> Saved {
    Saved { format: FORMAT.into(), version: VERSION, data }
}

#[test]
fn a_reloaded_policy_decides_as_the_old_one_would_have() {
    let mut old = learned(20);
    let mut new: Priority = reloaded(&old, "").unwrap();
    assert_eq!(new.forms.known(), 20);
    set_kernels((1..=20).map(|id| (id, profile(LAUNCHES))).collect());
    let mut preemptible = 0;
    for id in (1..=20).rev() {
        for _ in 0..8 {
            let launch = TRUTH.launch(id, 2_000_000);
            let decision = new.decide(&launch);
            assert_eq!(decision, old.decide(&launch), "kernel {id}");
            preemptible += u32::from(decision != Decision::Run(0));
        }
    }
    assert!(preemptible > 80, "{preemptible} of 160 launches");
    assert_eq!(new.snapshot(), old.snapshot());
}

#[test]
fn the_gauge_says_how_much_was_kept() {
    let old = learned(3);
    calls();
    let _new: Priority = reloaded(&old, "").unwrap();
    let known = Call::GaugeSet { name: "kernels_known".into(), value: 3 };
    assert!(calls().contains(&known));
}

#[test]
fn under_other_settings_every_kernel_is_looked_at_again() {
    let old = learned(3);
    // Since then its preemptible form has become slow, which only a look shows.
    let slow = FormProfile { count: 400, p50_ns: 20_000_000, ..PREEMPTIBLE };
    set_kernels(vec![(3, KernelProfile { forms: vec![slow], ..profile(400) })]);
    let launch = TRUTH.launch(3, 2_000_000);
    let mut same: Priority = reloaded(&old, "explore_permille = 50").unwrap();
    assert_eq!(same.decide(&launch), Decision::Preemptible, "it is not time to look");
    let mut other: Priority = reloaded(&old, "explore_permille = 0").unwrap();
    assert_ne!(other.decide(&launch), Decision::Preemptible);
}

#[test]
fn a_full_table_fits_and_the_latest_stay() {
    let mut old = policy("");
    set_kernels(Vec::new());
    for id in 0..6_000_u32 {
        old.decide(&TRUTH.launch(id, 2_000_000));
    }
    let saved = old.snapshot();
    assert!(saved.data.len() <= SAVED_BYTES_MAX, "{}", saved.data.len());
    assert_eq!(old.forms.known(), 4_096);
    let new: Priority = reloaded(&old, "").unwrap();
    assert_eq!(new.forms.known(), KEPT_MAX);
    // And they stay in the order of their use.
    let again: Priority = reloaded(&new, "").unwrap();
    assert_eq!(again.snapshot(), new.snapshot());
}

#[test]
fn what_is_refused_changes_nothing() {
    let whole = learned(5).snapshot();
    for end in 1..whole.data.len() {
        let mut policy = policy("");
        if policy.restore(&saved(whole.data[..end].into())).is_err() {
            assert_eq!(policy.forms.known(), 0);
        }
    }
    let mut policy = policy("");
    let error = policy.restore(&saved(whole.data[..whole.data.len() - 1].into())).unwrap_err();
    assert!(error.contains("the end"), "{error}");
}

proptest! {
    #[test]
    fn any_bytes_are_survived_and_so_is_what_follows(
        data in prop::collection::vec(any::<u8>(), 0..400),
        launches in prop::collection::vec(any_launch(), 0..20),
    ) {
        let mut policy = policy("");
        let _ = policy.restore(&saved(data));
        launches.iter().for_each(|launch| { policy.decide(launch); });
        let _: Priority = reloaded(&policy, "").unwrap();
    }

    #[test]
    fn a_damaged_state_is_survived_and_so_is_what_follows(
        at in any::<prop::sample::Index>(), bit in 0..8, flips in 1..4_usize,
        launches in prop::collection::vec(any_launch(), 0..20),
    ) {
        let mut data = learned(4).snapshot().data;
        for flip in 0..flips {
            let at = (at.index(data.len()) + flip * 7) % data.len();
            data[at] ^= 1_u8 << bit;
        }
        let mut policy = policy("");
        let _ = policy.restore(&saved(data));
        for id in 0..6 {
            policy.decide(&TRUTH.launch(id, 2_000_000));
        }
        launches.iter().for_each(|launch| { policy.decide(launch); });
        policy.snapshot();
    }
}
