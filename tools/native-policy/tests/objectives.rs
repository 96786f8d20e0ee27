//! `slo-herald` in the simulator.

use tally_engine::policy::Objective;
use tally_simulator::{Arrivals, Service, Setup, SharingMode, Trace, simulate};

fn setup(seconds: f64) -> Setup {
    Setup { sharing: SharingMode::Mps, seconds, overrun_seconds: 60.0, ..Setup::default() }
}

fn pair() -> (Trace, Trace) {
    (
        Trace::open("bert_base_infer_b1_s128").unwrap(),
        Trace::open("gpt2_12l_train_b8_s1024").unwrap(),
    )
}

/// It spends what an objective leaves, and keeps the objective.
#[test]
fn slo_herald_gives_more_to_best_effort_the_more_an_objective_leaves() {
    let (high, low) = pair();
    let share_of = |policy: &str, slo_ns: u64| {
        let slo = Some(Objective { slo_ns, percentile: 99.0 });
        let policy = tally_native_policy::by_name(policy, "").unwrap();
        let arrivals = Arrivals::Poisson { load: 0.4 };
        let service = Service { slo, ..Service::new(&high, &arrivals) };
        let report = simulate(&setup(8.0), &service, Some(&low), Some(policy));
        (report.high_priority, report.best_effort.unwrap().share)
    };
    let (strict, priority_share) = share_of("tally-priority", 1_000_000);
    let p99_ns = strict.service_p99_ms * 1e6;
    let mut before = 0.0;
    for factor in [1.5, 3.0] {
        let (high, share) = share_of("slo-herald", (factor * p99_ns) as u64);
        let within = high.within.unwrap();
        assert!(within >= 0.99, "{factor}: {within} {high:?}");
        assert!(share > before, "{factor}: {share}, {before} at less");
        before = share;
    }
    assert!(before > priority_share * 1.2, "{before}, {priority_share} with strict priority");
    // Without an objective it has nothing to give.
    let policy = tally_native_policy::by_name("slo-herald", "").unwrap();
    let arrivals = Arrivals::Poisson { load: 0.4 };
    let report = simulate(&setup(2.0), &Service::new(&high, &arrivals), Some(&low), Some(policy));
    assert!(report.high_priority.service_p99_ms < 1.2 * strict.service_p99_ms);
}

/// A decoder that is always busy keeps the objective of its tokens, and best effort gets what that leaves.
#[test]
fn slo_herald_shares_the_gpu_with_a_decoder_without_a_pause() {
    let (high, low) = (Trace::open("llama7b_decode_b1").unwrap(), pair().1);
    let (tpot_ms, percentile) = (2.0 * 4.86, 99.0);
    let share_of = |policy: &str, slo_ms: Option<f64>, tpot_ms: Option<f64>| {
        let slo = slo_ms.map(|ms| Objective { slo_ns: (ms * 1e6) as u64, percentile });
        let tpot_ns = tpot_ms.map(|ms| (ms * 1e6) as u64);
        let policy = tally_native_policy::by_name(policy, "").unwrap();
        let arrivals = Arrivals::At(vec![0; 1_500]);
        let service = Service { slo, tpot_ns, ..Service::new(&high, &arrivals) };
        let report = simulate(&setup(7.0), &service, Some(&low), Some(policy));
        (report.high_priority.within, report.best_effort.unwrap().share)
    };
    let (_, strict) = share_of("tally-priority", None, None);
    let (within, share) = share_of("slo-herald", None, Some(tpot_ms));
    assert!(within.unwrap() >= 0.99, "{within:?}");
    assert!(share > 0.15 && share > 5.0 * strict, "{share}, {strict} with strict priority");
    // As an objective of requests it is not for services that are busy all of the time.
    let (_, as_requests) = share_of("slo-herald", Some(tpot_ms), None);
    assert!(share > 2.0 * as_requests, "{share}, {as_requests} of requests");
}

/// Requests come twice as often from one moment to the next.
#[test]
fn slo_herald_keeps_the_objective_of_a_service_whose_load_doubles() {
    let (high, low) = (Trace::open("bert_large_infer_b1_s128").unwrap(), pair().1);
    let (solo_ms, doubles_s, seconds) = (2.317, 8.0, 16.0);
    let slo_ns = (2.0 * solo_ms * 1e6) as u64;
    let mut random = fastrand::Rng::with_seed(7);
    let (mut at_s, mut arrivals) = (0.0, Vec::new());
    while at_s < seconds {
        let load = if at_s < doubles_s { 0.35 } else { 0.7 };
        at_s -= (1.0 - random.f64()).ln() * solo_ms / 1e3 / load;
        arrivals.push((at_s * 1e9) as u64);
    }
    let kept = |seconds: f64| {
        let arrivals: Vec<u64> =
            arrivals.iter().copied().filter(|ns| *ns < (seconds * 1e9) as u64).collect();
        let slo = Some(Objective { slo_ns, percentile: 99.0 });
        let policy = tally_native_policy::by_name("slo-herald", "").unwrap();
        let served = arrivals.len() as f64;
        let arrivals = Arrivals::At(arrivals);
        let service = Service { slo, ..Service::new(&high, &arrivals) };
        let report = simulate(&setup(seconds), &service, Some(&low), Some(policy));
        (served, served * report.high_priority.within.unwrap(), report.best_effort.unwrap().share)
    };
    let (before, after) = (kept(doubles_s), kept(seconds));
    assert!(before.2 > 0.4, "it gives {} before", before.2);
    let (served, kept) = (after.0 - before.0, after.1 - before.1);
    assert!(kept >= 0.99 * served, "{kept} of {served} after it doubled");
}
