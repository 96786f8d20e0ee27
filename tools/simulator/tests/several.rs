//! Several best-effort programs, with and without an inference.

use tally_engine::policy::{Answer, Context, Decision, Fault, Launch, Policy};
use tally_simulator::trace::{Kernel, Pace};
use tally_simulator::{
    Arrivals, Report, Service, Setup, SharingMode, Tenant, Trace, simulate, simulate_several,
};

struct Free;

impl Policy for Free {
    fn decide(&mut self, _: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        Ok(Decision::Run(0).into())
    }
}

/// Whatever the second program launches is held.
struct FirstOnly;

impl Policy for FirstOnly {
    fn decide(&mut self, launch: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        let decision =
            if launch.client == 1 { Decision::Hold(10_000_000) } else { Decision::Run(0) };
        Ok(decision.into())
    }
}

/// Matrix products of 200 us on half of the SMs, or on all, after a pause of the program's own.
fn program(name: &str, blocks: u32, pause_ns: u64) -> Trace {
    let kernel = Kernel {
        name: "gemm".into(),
        grid: [blocks, 1, 1],
        block: [1_024, 1, 1],
        regs: 32,
        smem: 120 << 10,
        start_ns: 0,
        dur_ns: 200_000,
        gap_ns: 0,
        pace: if pause_ns > 0 { Pace::AfterEnd(pause_ns) } else { Pace::AfterLaunch(5_000) },
        launch: 0,
    };
    let period_ns = 200_000 + pause_ns;
    Trace { name: name.into(), kernels: vec![kernel], period_ns, ..Trace::default() }
}

fn run(
    sharing: SharingMode,
    policy: Option<Box<dyn Policy + Send>>,
    programs: &[(&Trace, u32)],
) -> Report {
    let tenants: Vec<Tenant<'_>> = programs
        .iter()
        .map(|&(trace, weight)| Tenant { trace, weight, min_share_permille: 0 })
        .collect();
    let setup = Setup { sharing, seconds: 1.0, warm_up_seconds: Some(0.1), ..Setup::default() };
    simulate_several(&setup, &[], &tenants, policy)
}

fn free() -> Option<Box<dyn Policy + Send>> {
    Some(Box::new(Free))
}

#[test]
fn half_of_the_gpu_each_is_all_that_both_want() {
    let half = program("half", 66, 0);
    let report = run(SharingMode::Mps, free(), &[(&half, 1), (&half, 1)]);
    let fairness = report.fairness.unwrap();
    assert!(fairness.clients.iter().all(|c| c.share > 0.95), "{fairness:?}");
    assert!(fairness.jain > 0.999, "{fairness:?}");
    let all = program("all", 132, 0);
    let report = run(SharingMode::Mps, free(), &[(&all, 1), (&all, 1), (&all, 1)]);
    let best_effort = report.best_effort.unwrap();
    assert!((0.9..1.05).contains(&best_effort.share), "{best_effort:?}");
    assert_eq!(best_effort.trace, "all + all + all");
}

#[test]
fn without_a_policy_the_hardware_gives_each_context_its_slices() {
    let all = program("all", 132, 0);
    let report = run(SharingMode::Timeslice, None, &[(&all, 5), (&all, 1), (&all, 1)]);
    let fairness = report.fairness.unwrap();
    for client in &fairness.clients {
        assert!((client.gpu_share - 1.0 / 3.0).abs() < 0.02, "{fairness:?}");
        assert_eq!(client.charged_ms, 0.0);
    }
    // By weight the first should have five of seven parts.
    assert!((fairness.clients[0].fair_share - 5.0 / 7.0).abs() < 1e-9, "{fairness:?}");
    assert!(fairness.jain < 0.8, "{fairness:?}");
    assert!(report.context_changes > 300, "{}", report.context_changes);
    assert!(report.unscheduled && report.high_priority.is_nobody());
}

#[test]
fn who_gets_nothing_is_seen_in_the_index() {
    let all = program("all", 132, 0);
    for sharing in [SharingMode::Timeslice, SharingMode::Mps] {
        let report = run(sharing, Some(Box::new(FirstOnly)), &[(&all, 1), (&all, 1)]);
        let fairness = report.fairness.unwrap();
        assert!((fairness.jain - 0.5).abs() < 0.01, "{fairness:?}");
        assert!(fairness.clients[0].gpu_share > 0.99, "{fairness:?}");
        let charged: Vec<f64> = fairness.clients.iter().map(|c| c.charged_ms).collect();
        assert!(charged[0] > 900.0 && charged[1] < 10.0, "{charged:?}");
    }
}

#[test]
fn a_program_that_cannot_use_its_share_is_not_treated_unfairly() {
    let (busy, idle) = (program("busy", 132, 0), program("idle", 132, 1_800_000));
    let report = run(SharingMode::Mps, free(), &[(&busy, 1), (&idle, 9)]);
    let fairness = report.fairness.unwrap();
    let idle = &fairness.clients[1];
    assert!((idle.weight_share - 0.9).abs() < 1e-9 && idle.fair_share < 0.15, "{idle:?}");
    assert!(fairness.jain > 0.98, "{fairness:?}");
}

#[test]
fn one_program_is_reported_as_ever_and_the_same_bytes_come_each_time() {
    let high = Trace::open("resnet50_infer_b1").unwrap();
    let low = Trace::open("resnet50_train_b64").unwrap();
    let setup = Setup { seconds: 0.3, ..Setup::default() };
    let load = Arrivals::Poisson { load: 0.5 };
    let json = |report: &Report| serde_json::to_string(report).unwrap();
    let service = Service::new(&high, &load);
    let one = json(&simulate(&setup, &service, Some(&low), free()));
    let tenants = [Tenant { trace: &low, weight: 7, min_share_permille: 0 }];
    let same = json(&simulate_several(&setup, &[service], &tenants, free()));
    assert_eq!(one, same);
    assert!(!one.contains("fairness"), "{one}");
    let both = [
        Tenant { trace: &low, weight: 7, min_share_permille: 0 },
        Tenant { trace: &low, weight: 1, min_share_permille: 0 },
    ];
    let several = || json(&simulate_several(&setup, &[service], &both, free()));
    assert_eq!(several(), several());
}
