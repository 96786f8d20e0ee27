//! Several recorded trainings share the simulated GPU under the policies that know of weights.

use tally_simulator::report::Fairness;
use tally_simulator::{
    Arrivals, Report, Service, Setup, SharingMode, Tenant, Trace, simulate_several,
};

/// Trainings that the GPU limits, and not their own part: each can use all of the GPU's time.
const PAIRS: [[&str; 2]; 2] = [
    ["resnet50_train_b128", "resnet50_train_b128"],
    ["resnet50_train_b64", "whisper_small_train_b16"],
];
const POLICIES: [&str; 4] = ["tally-priority", "slo-herald", "throughput", "tpot-first"];

fn run(
    policy: &str,
    config: &str,
    sharing: SharingMode,
    high: Option<&Trace>,
    programs: &[(&Trace, u32)],
) -> Report {
    let tenants: Vec<Tenant<'_>> = programs
        .iter()
        .map(|&(trace, weight)| Tenant { trace, weight, min_share_permille: 0 })
        .collect();
    let setup = Setup { sharing, seconds: 2.0, ..Setup::default() };
    let policy = tally_native_policy::by_name(policy, config).unwrap();
    let load = Arrivals::Poisson { load: 0.3 };
    let services: Vec<Service<'_>> =
        high.map(|high| Service::new(high, &load)).into_iter().collect();
    simulate_several(&setup, &services, &tenants, Some(policy))
}

fn pairs() -> impl Iterator<Item = [Trace; 2]> {
    PAIRS.into_iter().map(|pair| pair.map(|name| Trace::open(name).unwrap()))
}

fn sum(report: &Report) -> f64 {
    report.best_effort.as_ref().unwrap().share
}

fn fairness(report: &Report) -> &Fairness {
    report.fairness.as_ref().unwrap()
}

/// Charged time of the first over that of the second.
fn charged(report: &Report) -> f64 {
    let clients = &fairness(report).clients;
    clients[0].charged_ms / clients[1].charged_ms
}

#[test]
fn where_contexts_take_turns_time_goes_by_weight_and_none_is_lost() {
    for [first, second] in pairs() {
        for policy in POLICIES {
            let with = |weight| {
                let programs = [(&first, weight), (&second, 1)];
                run(policy, "", SharingMode::Timeslice, None, &programs)
            };
            let (even, heavy) = (with(1), with(3));
            assert!((0.9..1.1).contains(&charged(&even)), "{:?}", even.fairness);
            assert!((2.7..3.3).contains(&charged(&heavy)), "{:?}", heavy.fairness);
            assert!(fairness(&heavy).jain > 0.98, "{:?}", heavy.fairness);
            assert!(sum(&heavy) > 0.98 * sum(&even), "{} {}", sum(&heavy), sum(&even));
            assert!(sum(&even) > 0.95, "{}", sum(&even));
        }
    }
}

#[test]
fn side_by_side_time_goes_by_weight_and_equals_lose_little() {
    for [first, second] in pairs() {
        for policy in POLICIES {
            let with = |weight, config| {
                let programs = [(&first, weight), (&second, 1)];
                run(policy, config, SharingMode::Mps, None, &programs)
            };
            let (even, heavy) = (with(1, ""), with(3, ""));
            assert!((0.9..1.1).contains(&charged(&even)), "{:?}", even.fairness);
            assert!((2.6..3.4).contains(&charged(&heavy)), "{:?}", heavy.fairness);
            assert!(fairness(&heavy).jain > 0.97, "{:?}", heavy.fairness);
            if policy == "tally-priority" {
                let free = with(1, "turn_us = 0");
                assert!(sum(&even) > 0.95 * sum(&free), "{} {}", sum(&even), sum(&free));
            }
        }
    }
}

#[test]
fn beside_an_inference_what_is_left_goes_by_weight() {
    let high = Trace::open("bert_large_infer_b1_s128").unwrap();
    let [first, second] = pairs().next().unwrap();
    for policy in POLICIES {
        for sharing in [SharingMode::Timeslice, SharingMode::Mps] {
            let report = run(policy, "", sharing, Some(&high), &[(&first, 3), (&second, 1)]);
            assert!((2.4..3.6).contains(&charged(&report)), "{sharing:?}: {:?}", report.fairness);
        }
    }
}

#[test]
fn one_alone_costs_the_policy_no_more_calls_than_before() {
    let [first, _] = pairs().next().unwrap();
    for policy in POLICIES {
        for sharing in [SharingMode::Timeslice, SharingMode::Mps] {
            let report = run(policy, "", sharing, None, &[(&first, 3)]);
            let decisions = report.decisions.unwrap();
            assert_eq!((decisions.asked, decisions.held), (1, 0), "{sharing:?}: a lease for all");
            assert!(report.fairness.is_none());
        }
    }
}

/// What a training had of the time in which it had work, beside an inference that is busy nearly always.
fn had_beside_a_busy_inference(policy: &str, sharing: SharingMode, min_share_permille: u32) -> f64 {
    let high = Trace::open("bert_large_infer_b1_s128").unwrap();
    let low = Trace::open("resnet50_train_b64").unwrap();
    let setup = Setup { sharing, seconds: 4.0, overrun_seconds: 0.5, ..Setup::default() };
    let tenants = [Tenant { trace: &low, weight: 1, min_share_permille }];
    let policy = tally_native_policy::by_name(policy, "").unwrap();
    let load = Arrivals::Poisson { load: 0.97 };
    let report = simulate_several(&setup, &[Service::new(&high, &load)], &tenants, Some(policy));
    report.floors.first().map_or_else(|| sum(&report), |floor| floor.had)
}

/// Where contexts take turns, the hardware's time slices decide what a launch gets that was let in.
#[test]
fn a_floor_is_kept_beside_an_inference_that_hardly_idles() {
    // `throughput` holds nobody for an inference.
    for policy in POLICIES.into_iter().filter(|policy| *policy != "throughput") {
        let without = had_beside_a_busy_inference(policy, SharingMode::Mps, 0);
        let had = had_beside_a_busy_inference(policy, SharingMode::Mps, 300);
        assert!(without < 0.2, "{policy}: {without}");
        // Of four seconds; in the first it still has had more before.
        assert!((0.25..0.35).contains(&had), "{policy}: {had}");
    }
}
