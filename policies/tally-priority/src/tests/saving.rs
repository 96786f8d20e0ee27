//! What was learnt outlives a reload, and nothing that is offered instead does harm.

use crate::saved::{FORMAT, VERSION};
use crate::tests::{any_launch, policy};
use crate::{Priority, tests::device::Truth};
use proptest::prelude::*;
use tally_sdk::testing::{Call, calls, kernel, reloaded, set_kernels};
use tally_sdk::{
    Decision, Form, FormProfile, KernelProfile, Policy, SAVED_BYTES_MAX, Saved, Stateful,
};

const TRUTH: Truth = Truth {
    flags: crate::tests::OFFERS,
    blocks: 4_096,
    whole_ns: 2_000_000,
    preemptible_permille: 20,
    giving_way_ns: 5_000,
    gate_ns: 3_000,
    partition_permille: 900,
};

/// A policy that has measured kernels 1 to `kernels` in two forms.
fn learned(kernels: u32) -> Priority {
    let mut policy = policy("");
    let form = FormProfile {
        form: Form::Preemptible,
        argument: 0,
        count: 40,
        mean_ns: 2_040_000,
        turnaround_ns: 20_000,
    };
    let profile = KernelProfile {
        count: 50,
        mean_ns: 2_000_000,
        p99_ns: 2_000_000,
        forms: vec![form],
        ..kernel(4_096)
    };
    for id in 1..=kernels {
        set_kernels(vec![(id, profile.clone())]);
        for _ in 0..40 {
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
    // Nothing is learnt anew: whatever the kernel is now said to take.
    set_kernels(Vec::new());
    let mut cut = 0;
    for id in (1..=20).rev() {
        for _ in 0..8 {
            let launch = TRUTH.launch(id, 2_000_000);
            let decision = new.decide(&launch);
            assert_eq!(decision, old.decide(&launch), "kernel {id}");
            cut += u32::from(decision == Decision::Preemptible);
        }
    }
    assert!(cut > 80, "{cut} of 160 launches were cut");
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
    let launch = TRUTH.launch(3, 2_000_000);
    let decisions =
        |policy: &mut Priority| (0..10).map(|_| policy.decide(&launch)).collect::<Vec<_>>();
    let mut same: Priority = reloaded(&old, "").unwrap();
    assert!(decisions(&mut same).contains(&Decision::Preemptible));
    let mut other: Priority =
        reloaded(&old, "slowdown_percent_max = 0\nexplore_permille = 0").unwrap();
    assert_eq!(decisions(&mut other), [Decision::Run(0); 10], "nothing slower is allowed");
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
    let new: Priority = reloaded(&old, "").unwrap();
    assert_eq!(new.forms.known(), old.forms.known());
}

#[test]
fn what_is_refused_changes_nothing() {
    let whole = learned(5).snapshot();
    for cut in 1..whole.data.len() {
        let mut policy = policy("");
        if policy.restore(&saved(whole.data[..cut].into())).is_err() {
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
