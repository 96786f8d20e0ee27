//! The choice, made from launch to launch on a simulated device.

use crate::tests::OFFERS;
use crate::tests::device::{Device, Truth};
use proptest::prelude::*;
use tally_sdk::testing::{Call, calls};
use tally_sdk::{Decision, FormsOffered};

/// A large matrix product: 6 400 blocks of 225 us, one an SM at a time.
const GEMM: Truth = Truth {
    offered: OFFERS,
    blocks: 6_400,
    whole_ns: 10_900_000,
    preemptible_permille: 9,
    yielding_ns: 50_000,
    gate_ns: 30_000,
    sm_limited_permille: 180,
};
/// A kernel of very many short blocks.
const ELEMENTWISE: Truth = Truth {
    blocks: 262_144,
    whole_ns: 500_000,
    preemptible_permille: 180,
    yielding_ns: 580_000,
    gate_ns: 4_000,
    ..GEMM
};
const ATTENTION: Truth = Truth { blocks: 132, whole_ns: 300_000, ..GEMM };
const NORM: Truth = Truth { blocks: 64, whole_ns: 2_800_000, ..GEMM };
const SHORT: Truth = Truth { blocks: 2_000, whole_ns: 20_000, gate_ns: 4_000, ..GEMM };
const FORTY: Truth = Truth { whole_ns: 40_000, ..SHORT };

fn run(device: &mut Device, launches: usize) {
    let count = device.truths.len();
    (0..launches).for_each(|n| {
        device.launch(n % count);
    });
}

/// Sum of a counter in what the policy asked for; the gauges as they stand.
fn metric(calls: &[Call], metric: &str) -> i64 {
    let of = |call: &Call| match call {
        Call::CounterAdd { name, delta } if name == metric => Some(*delta as i64),
        _ => None,
    };
    let set = |call: &Call| match call {
        Call::GaugeSet { name, value } if name == metric => Some(*value),
        _ => None,
    };
    calls.iter().rev().find_map(set).unwrap_or_else(|| calls.iter().filter_map(of).sum())
}

#[test]
fn the_kernels_of_a_training_get_the_forms_that_suit_them() {
    let mut device = Device::new(vec![GEMM, ELEMENTWISE, ATTENTION, NORM, SHORT, FORTY], "");
    device.disturbed_every = 4;
    run(&mut device, 20_000);
    assert_eq!(device.settled(0), Decision::Preemptible);
    assert_eq!(device.settled(1), Decision::Sliced(12 * 1_056));
    assert_eq!(device.settled(2), Decision::Run(0));
    assert_eq!(device.settled(3), Decision::Run(0));
    assert_eq!(device.settled(4), Decision::Run(0));
    assert_eq!(device.settled(5), Decision::Sliced(1_056));
    for (at, truth) in device.truths.iter().enumerate() {
        assert_eq!(device.settled(at), truth.best(&device.settings), "{truth:?}");
    }
    device.policy.forms.hand_over();
    let calls = calls();
    assert_eq!(metric(&calls, "long_whole_kernels"), 2);
    assert_eq!(metric(&calls, "kernels_known"), 5);
    let forms = ["whole", "preemptible", "sliced", "sm_limited"];
    let all: i64 = forms.iter().map(|form| metric(&calls, &format!("launches_{form}"))).sum();
    assert_eq!(all, 20_000);
    let named =
        |call: &&Call| matches!(call, Call::Log { message, .. } if message.contains("runs whole"));
    assert_eq!(calls.iter().filter(named).count(), 2);
}

#[test]
fn a_long_kernel_that_cannot_be_transformed_is_sm_limited() {
    let long = Truth { offered: FormsOffered::SM_LIMITED, ..GEMM };
    // One that takes more than three times as long on fewer SMs: not at that price.
    let wave = Truth { blocks: 132, sm_limited_permille: 2_300, ..long };
    let mut device = Device::new(vec![long, wave, Truth { whole_ns: 600_000, ..long }], "");
    run(&mut device, 5_000);
    assert_eq!(device.settled(0), Decision::SmLimited(64));
    assert_eq!(device.settled(1), Decision::Run(0));
    assert_eq!(device.settled(2), Decision::Run(0), "no longer than what an SM limit counts as");
    device.policy.forms.hand_over();
    assert_eq!(metric(&calls(), "long_whole_kernels"), 2);
}

#[test]
fn a_new_kernel_runs_whole_until_its_time_is_believed_then_preemptible() {
    let mut device = Device::new(vec![GEMM], "");
    device.loading_ns = 30_000_000;
    let first: Vec<Decision> = (0..20).map(|_| device.launch(0)).collect();
    // Three are under way before the first is measured; then two samples are needed.
    let whole = first.iter().take_while(|c| **c == Decision::Run(0)).count();
    assert_eq!(whole, 5, "{first:?}");
    assert!(!first[whole..].contains(&Decision::Run(0)), "{first:?}");
    assert_eq!(device.settled(0), Decision::Preemptible);
}

#[test]
fn a_slow_first_launch_in_a_form_does_not_count_against_it() {
    let mut device = Device::new(vec![GEMM, ELEMENTWISE, FORTY], "");
    (device.loading_ns, device.disturbed_every) = (50_000_000, 5);
    run(&mut device, 30_000);
    for (at, truth) in device.truths.iter().enumerate() {
        assert_eq!(device.settled(at), truth.best(&device.settings), "{truth:?}");
    }
}

#[test]
fn a_kernel_that_is_always_disturbed_is_preemptible_all_the_same() {
    let mut device = Device::new(vec![GEMM], "");
    device.disturbed_every = 1;
    run(&mut device, 500);
    assert_eq!(device.settled(0), Decision::Preemptible);
}

#[test]
fn a_form_that_came_about_is_used_from_the_next_launch_on() {
    let unmade = Truth { offered: FormsOffered::empty(), ..GEMM };
    let mut device = Device::new(vec![unmade], "explore_permille = 0");
    run(&mut device, 300);
    assert_eq!(device.settled(0), Decision::Run(0));
    device.truths[0].offered = OFFERS;
    assert_eq!(device.launch(0), Decision::Preemptible);
    // And one that was taken back is not asked for.
    device.truths[0].offered = FormsOffered::empty();
    assert_eq!(device.launch(0), Decision::Run(0));
}

#[test]
fn a_kernel_whose_form_became_slow_is_reviewed() {
    let mut device = Device::new(vec![GEMM], "review_launches = 50");
    run(&mut device, 1_000);
    assert_eq!(device.settled(0), Decision::Preemptible);
    device.truths[0].preemptible_permille = 900;
    run(&mut device, 3_000);
    let settled = device.settled(0);
    assert!(matches!(settled, Decision::Sliced(_)), "{settled:?}");
    assert_eq!(settled, device.truths[0].best(&device.settings));
}

#[test]
fn a_kernel_that_became_shorter_is_seen_although_it_only_runs_preemptible() {
    let mut device = Device::new(vec![GEMM], "review_launches = 50");
    run(&mut device, 1_000);
    device.truths[0].whole_ns = 20_000;
    run(&mut device, 6_000);
    assert_eq!(device.settled(0), Decision::Run(0));
}

#[test]
fn nothing_is_tried_without_a_share_and_the_estimates_serve() {
    let mut device = Device::new(vec![GEMM, ELEMENTWISE], "explore_permille = 0");
    run(&mut device, 2_000);
    device.policy.forms.hand_over();
    assert_eq!(metric(&calls(), "launches_explored"), 0);
    assert_eq!(device.settled(0), Decision::Preemptible);
    assert!(matches!(device.settled(1), Decision::Sliced(_)));
}

fn any_truth() -> impl Strategy<Value = Truth> {
    let size = (10..300_000_u64, 5_000..20_000_000_u64, 0..4_u8);
    let costs = (0..1_500_u64, 0..400_000_u64, 0..30_000_u64, 0..1_000_u64);
    (size, costs).prop_map(|((blocks, whole_ns, without), costs)| {
        let (preemptible_permille, yielding_ns, gate_ns, sm_limited_permille) = costs;
        let mut offered = OFFERS;
        match without {
            0 => offered.remove(FormsOffered::SLICED),
            1 => offered.remove(FormsOffered::PREEMPTIBLE),
            2 => offered.remove(FormsOffered::SM_LIMITED),
            _ => {}
        }
        Truth {
            offered,
            blocks,
            whole_ns,
            preemptible_permille,
            yielding_ns,
            gate_ns,
            sm_limited_permille,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_population_gets_what_knowing_everything_would_choose(
        truths in prop::collection::vec(any_truth(), 1..6),
        disturbed_every in 2..6_u64,
        loading_ns in 0..10_000_000_u64,
    ) {
        let mut device = Device::new(truths, "review_launches = 64");
        (device.disturbed_every, device.loading_ns) = (disturbed_every, loading_ns);
        run(&mut device, 16_000);
        for (at, truth) in device.truths.iter().enumerate() {
            let settled = device.settled(at);
            let costs = truth.costs(&device.settings);
            prop_assert!(truth.is_best(settled, &device.settings), "{settled:?}: {truth:?} {costs:?}");
        }
        device.policy.forms.hand_over();
        let explored = metric(&calls(), "launches_explored");
        prop_assert!(explored * 1_000 <= 50 * 16_000, "{explored}");
    }

    #[test]
    fn the_same_launches_get_the_same_forms(
        truths in prop::collection::vec(any_truth(), 1..6),
        disturbed_every in 0..6_u64,
    ) {
        let ran = || {
            let mut device = Device::new(truths.clone(), "");
            device.disturbed_every = disturbed_every;
            run(&mut device, 1_000);
            device.ran
        };
        prop_assert!(ran() == ran());
    }
}
