//! Which forms of which kernels are considered.

use crate::tests::forms_of;
use crate::tests::{OFFERS, any_launch};
use proptest::prelude::*;
use tally_forms::Settings;
use tally_forms::candidates::{Candidate, candidates};
use tally_sdk::testing::launch;
use tally_sdk::{Decision, FormsOffered, Launch, LaunchState};

fn kernel(blocks: u64, us: u64) -> Launch {
    Launch { offered: OFFERS, grid_blocks: blocks, predicted_ns: us * 1_000, ..launch() }
}

fn of(launch: &Launch) -> Vec<Candidate> {
    candidates(launch, &forms_of("")).to_vec()
}

fn choices(launch: &Launch) -> Vec<Decision> {
    of(launch).iter().map(|c| c.form).collect()
}

fn slices(launch: &Launch) -> Vec<u32> {
    let slice = |c| if let Decision::Sliced(blocks) = c { Some(blocks) } else { None };
    choices(launch).into_iter().filter_map(slice).collect()
}

#[test]
fn all_forms_in_their_order() {
    // 8 blocks of 256 threads an SM: waves of 1 056 blocks, 2 us each; 12 of them
    // are the largest step within 31.6 us less the gate.
    let [whole, preemptible, large, small, limited] = of(&kernel(262_144, 500))[..] else {
        panic!("{:?}", of(&kernel(262_144, 500)))
    };
    assert_eq!((whole.form, whole.turnaround_ns), (Decision::Run(0), 500_000));
    assert_eq!(preemptible.form, Decision::Preemptible);
    assert_eq!((large.form, large.parts), (Decision::Sliced(12 * 1_056), 21));
    assert_eq!((small.form, small.parts), (Decision::Sliced(8 * 1_056), 32));
    assert!(small.turnaround_ns < large.turnaround_ns && large.turnaround_ns <= 31_600);
    assert!(small.time_ns > large.time_ns);
    assert_eq!((limited.form, limited.turnaround_ns), (Decision::SmLimited(64), 500_000));
}

#[test]
fn a_form_that_is_not_on_offer_is_no_candidate() {
    for offer in [FormsOffered::SLICED, FormsOffered::PREEMPTIBLE, FormsOffered::SM_LIMITED] {
        let launch = Launch { offered: offer, ..kernel(262_144, 500) };
        let all = of(&launch);
        assert!(all.len() > 1 && all.iter().all(|c| launch.offers(c.form.form().0)), "{all:?}");
    }
    assert_eq!(choices(&Launch { offered: FormsOffered::empty(), ..kernel(9_999, 500) }).len(), 1);
}

#[test]
fn a_kernel_of_no_more_blocks_than_sms_has_no_boundaries() {
    assert_eq!(choices(&kernel(132, 3_000)), [Decision::Run(0), Decision::SmLimited(64)]);
    assert!(slices(&kernel(133, 3_000)).contains(&132));
    assert!(!kernel(132, 1).has_boundaries() && kernel(133, 1).has_boundaries());
}

#[test]
fn where_no_slice_keeps_the_bound_the_smallest_that_fill_the_gpu() {
    // 132 blocks take 225 us.
    assert_eq!(slices(&kernel(6_400, 10_900)), [528, 264, 132]);
    // Where an SM holds only two of them, no slice is more than a wave.
    let large_blocks = Launch { shared_bytes: 100_000, ..kernel(6_400, 10_900) };
    assert_eq!(slices(&large_blocks), [264, 132]);
    let large_blocks = Launch { block_threads: 1_024, ..kernel(6_400, 10_900) };
    assert_eq!(slices(&large_blocks), [264, 132]);
}

#[test]
fn less_than_a_wave_if_a_whole_one_takes_too_long() {
    // A wave of 1 056 blocks takes 40 us.
    assert_eq!(slices(&kernel(10_560, 400)), [4 * 132, 3 * 132]);
}

#[test]
fn clusters_are_not_divided() {
    let clustered = Launch { state: LaunchState::CLUSTERED, ..kernel(6_400, 10_900) };
    let sizes = slices(&clustered);
    assert_eq!(sizes, [528, 256, 128]);
    assert!(sizes.iter().all(|size| size % 16 == 0));
}

#[test]
fn sizes_stay_when_a_time_wavers() {
    let mut sizes = Vec::new();
    for percent in 97..=103 {
        sizes.extend(slices(&Launch { predicted_ns: 5_000 * percent, ..kernel(262_144, 0) }));
    }
    sizes.sort_unstable();
    sizes.dedup();
    assert!(sizes.len() <= 3, "{sizes:?}");
}

#[test]
fn an_sm_limit_leaves_at_least_the_reserve_and_limits_something() {
    let limit = |text, launch: &Launch| {
        let all = candidates(launch, &forms_of(text));
        all.iter().find_map(|c| if let Decision::SmLimited(n) = c.form { Some(n) } else { None })
    };
    let long = kernel(132, 3_000);
    assert_eq!(limit("", &long), Some(64));
    assert_eq!(limit("reserve_sms = 16", &long), Some(112));
    assert_eq!(limit("reserve_sms = 12", &long), Some(120));
    assert_eq!(limit("reserve_sms = 0", &long), None);
    assert_eq!(limit("reserve_sms = 125", &long), None);
    assert_eq!(limit("reserve_sms = 1000", &long), None);
    assert_eq!(limit("", &kernel(64, 2_800)), None, "64 blocks leave 68 SMs by themselves");
    let together = Launch { state: LaunchState::COOPERATIVE, ..long };
    assert_eq!(choices(&together), [Decision::Run(0)]);
}

#[test]
fn an_unknown_number_of_sms_is_a_guess_not_a_division_by_0() {
    assert_eq!(slices(&Launch { sm_count: 0, ..kernel(6_400, 10_900) }), [512, 256, 128]);
}

proptest! {
    #[test]
    fn every_candidate_is_offered_and_makes_sense(launch in any_launch(), bound in 0..100_000_u64) {
        let settings = Settings { turnaround_ns_max: bound, ..forms_of("") };
        let all = candidates(&launch, &settings);
        prop_assert!(!all.is_empty() && all.len() <= 6);
        prop_assert_eq!(all[0].form, Decision::Run(0));
        for (index, candidate) in all.iter().enumerate() {
            prop_assert!(launch.offers(candidate.form.form().0));
            prop_assert!(all[..index].iter().all(|other| other.form != candidate.form));
            prop_assert!(candidate.time_ns >= launch.predicted_ns);
            if let Decision::Sliced(blocks) = candidate.form {
                prop_assert!(u64::from(blocks) < launch.grid_blocks);
                prop_assert_eq!(candidate.parts, launch.grid_blocks.div_ceil(blocks.into()));
            }
        }
    }
}
