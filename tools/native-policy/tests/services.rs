//! Policies beside two services in the simulator.

use tally_engine::policy::Objective;
use tally_simulator::{
    Arrivals, Report, Service, Setup, SharingMode, Tenant, Trace, simulate_several,
};

/// A service's trace, its objective in ms, and its load.
type Program = (&'static str, Option<u64>, f64);

fn beside_gpt2(policy: &str, programs: [Program; 2]) -> Report {
    let traces = programs.map(|(name, ..)| Trace::open(name).unwrap());
    let loads = programs.map(|(.., load)| Arrivals::Poisson { load });
    let service = |at: usize| {
        let slo_ns = programs[at].1.map(|ms| ms * 1_000_000);
        let slo = slo_ns.map(|slo_ns| Objective { slo_ns, percentile: 99.0 });
        Service { slo, ..Service::new(&traces[at], &loads[at]) }
    };
    let low = Trace::open("gpt2_12l_train_b8_s1024").unwrap();
    let tenants = [Tenant { trace: &low, weight: 1, min_share_permille: 0 }];
    let sharing = SharingMode::Mps;
    let setup = Setup { sharing, seconds: 10.0, overrun_seconds: 60.0, ..Setup::default() };
    let policy = tally_native_policy::by_name(policy, "").unwrap();
    simulate_several(&setup, &[service(0), service(1)], &tenants, Some(policy))
}

fn share(report: &Report) -> f64 {
    report.best_effort.as_ref().unwrap().share
}

/// What a service can bear alone is not what it can bear while the other one works, too.
#[test]
fn slo_herald_keeps_the_objectives_of_two_services_and_gives_what_both_leave() {
    for programs in [
        [("bert_base_infer_b1_s128", Some(6), 0.2), ("resnet50_infer_b1", Some(6), 0.2)],
        [("bert_base_infer_b1_s128", Some(8), 0.15), ("bert_large_infer_b1_s128", Some(10), 0.2)],
    ] {
        let kept = |report: &Report| {
            let within = report.services.iter().map(|service| service.within.unwrap());
            within.fold(1.0, f64::min)
        };
        let [herald, strict, free] =
            ["slo-herald", "tally-priority", "throughput"].map(|name| beside_gpt2(name, programs));
        assert!(kept(&herald) >= 0.99, "{:?}", herald.services);
        assert!(share(&herald) > 1.1 * share(&strict), "{} {}", share(&herald), share(&strict));
        assert!(kept(&free) < 0.95, "the training would be late for both: {:?}", free.services);
    }
}

/// A service without an objective is served strictly, whatever the other one can spare.
#[test]
fn slo_herald_serves_a_service_without_an_objective_strictly_beside_one_that_has_one() {
    let programs =
        [("bert_base_infer_b1_s128", Some(6), 0.2), ("bert_large_infer_b1_s128", None, 0.2)];
    let [herald, strict] = ["slo-herald", "tally-priority"].map(|name| beside_gpt2(name, programs));
    assert!(herald.services[0].within.unwrap() >= 0.99, "{:?}", herald.services);
    let p99_ms = |report: &Report| report.services[1].service_p99_ms;
    assert!(herald.services[1].within.is_none());
    assert!(p99_ms(&herald) < 1.05 * p99_ms(&strict), "{} {}", p99_ms(&herald), p99_ms(&strict));
}
