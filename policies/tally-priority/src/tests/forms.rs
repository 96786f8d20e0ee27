//! The form of a launch: what is never answered, whatever comes, and how often the
//! core is asked for a profile.

use crate::tests::{OFFERS, any_launch, beside_high, policy};
use proptest::prelude::*;
use tally_sdk::testing::{Call, calls, kernel, launch, set_kernels};
use tally_sdk::{
    Decision, Form, FormProfile, FormsOffered, KernelProfile, Launch, LaunchState, Policy,
    Transformation, TransformedForms,
};

const IDLE_GAP_NS: u64 = 1_000_000;
const PREPARABLE: FormsOffered = FormsOffered::PREPARABLE;

fn long(offered: FormsOffered) -> Launch {
    Launch { offered, grid_blocks: 6_400, predicted_ns: 10_900_000, ..beside_high(IDLE_GAP_NS) }
}

fn known(profile: KernelProfile) {
    set_kernels(vec![(launch().kernel, KernelProfile { count: 9, ..profile })]);
}

#[test]
fn within_the_bound_whole_without_a_thought() {
    let mut policy = policy("");
    for predicted_ns in [0, 1, 31_600] {
        let launch = Launch { predicted_ns, ..long(OFFERS | PREPARABLE) };
        assert_eq!(policy.decide(&launch), Decision::Run(0));
    }
    assert_eq!(policy.forms.known(), 0);
}

#[test]
fn a_transformation_is_asked_for_once_in_a_while_if_the_kernel_is_worth_it() {
    let mut policy = policy("");
    known(kernel(6_400));
    let asks = |policy: &mut crate::Priority, launch: &Launch, times| {
        (0..times).filter(|_| policy.decide(launch) == Decision::Preemptible).count()
    };
    assert_eq!(asks(&mut policy, &long(PREPARABLE), 256), 1);
    assert_eq!(asks(&mut policy, &long(PREPARABLE), 256), 1);
    // Not for short ones, nor for those that have no boundary to stop at.
    let short = Launch { kernel: 2, predicted_ns: 30_000, ..long(PREPARABLE) };
    assert_eq!(asks(&mut policy, &short, 300), 0);
    let one_wave = Launch { kernel: 3, grid_blocks: 132, ..long(PREPARABLE) };
    assert_eq!(asks(&mut policy, &one_wave, 300), 0);
    let together = Launch { kernel: 4, state: LaunchState::COOPERATIVE, ..long(PREPARABLE) };
    assert_eq!(asks(&mut policy, &together, 300), 0);
}

/// Two replicas of one training, or one that was started again: each process transforms kernels of its own.
#[test]
fn a_transformation_is_asked_for_at_once_for_each_client() {
    let mut policy = policy("");
    known(kernel(6_400));
    let mut asks = |client| {
        let launch = Launch { client, ..long(PREPARABLE) };
        (0..100).filter(|_| policy.decide(&launch) == Decision::Preemptible).count()
    };
    assert_eq!([asks(1), asks(1), asks(2), asks(2)], [1, 0, 1, 0]);
    // Taking turns: one whose request was lost does not wait for the other.
    assert_eq!([asks(1), asks(3)], [1, 1]);
}

#[test]
fn while_it_is_made_the_kernel_is_not_counted_as_hopeless() {
    let mut policy = policy("");
    known(KernelProfile { transformation: Transformation::Preparing, ..kernel(6_400) });
    for _ in 0..10 {
        policy.decide(&long(PREPARABLE));
    }
    let hopeless = |calls: &[Call]| {
        calls
            .iter()
            .any(|c| matches!(c, Call::GaugeSet { name, value: 1 } if name == "long_whole_kernels"))
    };
    assert!(!hopeless(&calls()));
    known(KernelProfile {
        transformation: Transformation::WholeOnly("spins".into()),
        ..kernel(6_400)
    });
    assert_eq!(policy.decide(&long(FormsOffered::empty())), Decision::Run(0));
    let calls = calls();
    assert!(hopeless(&calls));
    let log = calls
        .iter()
        .find_map(|c| if let Call::Log { message, .. } = c { Some(message) } else { None });
    assert_eq!(log.unwrap(), "kernel 1 runs whole for 10900 us (6400 blocks): spins");
}

#[test]
fn a_kernel_without_an_id_runs_whole() {
    let anonymous = Launch { kernel: u32::MAX, ..long(OFFERS | PREPARABLE) };
    assert_eq!(policy("").decide(&anonymous), Decision::Run(0));
}

#[test]
fn graphs_are_divided_by_their_nodes_or_have_the_parts_made() {
    let mut policy = policy("");
    let graph = |offered| Launch {
        state: LaunchState::GRAPH,
        offered,
        grid_blocks: 280,
        predicted_ns: 2_800_000,
        ..beside_high(IDLE_GAP_NS)
    };
    assert_eq!(policy.decide(&graph(FormsOffered::SLICED)), Decision::Sliced(24));
    assert_eq!(policy.decide(&graph(OFFERS)), Decision::Sliced(24));
    assert_eq!(policy.decide(&graph(FormsOffered::PREEMPTIBLE)), Decision::Run(0));
    assert_eq!(policy.decide(&graph(PREPARABLE)), Decision::Sliced(24));
    assert_eq!(policy.decide(&graph(PREPARABLE)), Decision::Run(0), "asked for already");
    // One shorter than a part is whole, though over the bound of a kernel.
    let short = Launch { predicted_ns: 200_000, ..graph(FormsOffered::SLICED) };
    assert_eq!(policy.decide(&short), Decision::Run(0));
}

#[test]
fn counts_are_handed_over_in_batches_and_after_a_while() {
    let mut policy = policy("");
    let at = |now_ns| Launch { now_ns, ..beside_high(IDLE_GAP_NS) };
    policy.decide(&at(1_000_000_000));
    assert_eq!(calls(), [Call::CounterAdd { name: "launches_whole".into(), delta: 1 }]);
    for n in 0..255 {
        policy.decide(&at(1_000_000_000 + n));
    }
    assert_eq!(calls(), []);
    policy.decide(&at(1_000_000_256));
    assert_eq!(calls(), [Call::CounterAdd { name: "launches_whole".into(), delta: 256 }]);
    policy.decide(&at(1_100_000_256));
    assert_eq!(calls(), [Call::CounterAdd { name: "launches_whole".into(), delta: 1 }]);
}

fn any_profile() -> impl Strategy<Value = KernelProfile> {
    let form = (0..4_u8, any::<u32>(), any::<u64>(), any::<u64>(), any::<u64>());
    let form = form.prop_map(|(form, argument, count, mean_ns, turnaround_ns)| {
        // Half of them are of candidates.
        let argument = if argument % 2 == 0 { argument % 7 * 132 } else { argument };
        let form = [Form::Whole, Form::Sliced, Form::Preemptible, Form::SmLimited][form as usize];
        FormProfile {
            form,
            argument,
            count,
            mean_ns,
            p50_ns: mean_ns / 2,
            p99_ns: mean_ns,
            latest_ns: 0,
            turnaround_ns,
        }
    });
    let transformation = prop_oneof![
        Just(Transformation::Unknown),
        Just(Transformation::Preparable),
        Just(Transformation::Preparing),
        any::<u8>()
            .prop_map(|bits| Transformation::Ready(TransformedForms::from_bits_truncate(bits))),
        Just(Transformation::WholeOnly("spins".into())),
    ];
    (prop::collection::vec(form, 0..16), any::<u64>(), any::<u64>(), transformation).prop_map(
        |(forms, count, mean_ns, transformation)| KernelProfile {
            forms,
            count,
            mean_ns,
            transformation,
            ..kernel(64)
        },
    )
}

proptest! {
    #[test]
    fn only_what_is_offered_or_can_be_made_and_never_of_size_0(
        steps in prop::collection::vec((any_launch(), any_profile()), 1..60),
        sm_count in 0..300_u32,
    ) {
        let mut policy = policy("explore_permille = 1000\nidle_gap_us = 0");
        for (launch, profile) in steps {
            let launch = Launch { kernel: launch.kernel % 3, sm_count, ..launch };
            set_kernels(vec![(launch.kernel, profile)]);
            let offers = |form| launch.offered.contains(form);
            let prepares = offers(PREPARABLE);
            let is_beside_high = launch.high_clients > 0 && !launch.is_high();
            match policy.decide(&launch).decision {
                Decision::Run(_) | Decision::Hold(_) | Decision::HoldUntilCompletion(_) => {}
                Decision::Sliced(blocks) => {
                    prop_assert!(is_beside_high && blocks > 0 && u64::from(blocks) < launch.grid_blocks);
                    let graph = prepares && launch.is_graph();
                    prop_assert!(offers(FormsOffered::SLICED) || graph);
                }
                Decision::Preemptible => {
                    prop_assert!(is_beside_high && (prepares || offers(FormsOffered::PREEMPTIBLE)));
                    prop_assert!(launch.grid_blocks > u64::from(sm_count));
                    prop_assert!(!launch.state.contains(LaunchState::COOPERATIVE));
                }
                Decision::SmLimited(sms) => {
                    prop_assert!(is_beside_high && offers(FormsOffered::SM_LIMITED));
                    prop_assert!(sms > 0 && sms % 8 == 0);
                    prop_assert!(sm_count == 0 || sms <= sm_count - 16);
                }
            }
        }
    }
}
