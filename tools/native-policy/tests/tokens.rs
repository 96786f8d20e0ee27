//! DetShare's two policies in the simulator: `tpot-first` keeps an objective for tokens that `throughput` does not
//! know.

use tally_simulator::{
    Arrivals, Report, Service, Setup, SharingMode, Tenant, Trace, simulate, simulate_several,
};

/// What a token takes alone, ms.
const TOKEN_MS: f64 = 4.86;
const TRAININGS: [&str; 3] =
    ["gpt2_12l_train_b8_s1024", "resnet50_train_b128", "whisper_small_train_b16"];

/// A service that is one CUDA graph a request, each of them a token, beside a training.
fn beside(
    (policy, config): (&str, &str),
    sharing: SharingMode,
    high: &str,
    low: &str,
    tpot_ms: f64,
    arrivals: &Arrivals,
) -> Report {
    let (high, low) = (Trace::open(high).unwrap(), Trace::open(low).unwrap());
    let tpot_ns = Some((tpot_ms * 1e6) as u64);
    let setup = Setup { sharing, seconds: 16.0, overrun_seconds: 60.0, ..Setup::default() };
    let service = Service { tpot_ns, ..Service::new(&high, arrivals) };
    let policy_of = tally_native_policy::by_name(policy, config).unwrap();
    let report = simulate(&setup, &service, Some(&low), Some(policy_of));
    let (late, share) = figures(&report);
    let p99_ms = report.high_priority.service_p99_ms;
    println!(
        "{sharing:?}, {} beside {}, {tpot_ms:.2} ms a token, {policy}: {:.1} % late, p99 {p99_ms:.2} ms, training {share:.3} of its \
         speed alone",
        report.high_priority.trace,
        low.name,
        late * 100.0
    );
    report
}

/// Share of late tokens, and the training's speed over its speed alone.
fn figures(report: &Report) -> (f64, f64) {
    let late = 1.0 - report.high_priority.within.unwrap();
    (late, report.best_effort.as_ref().unwrap().share)
}

/// More tokens than fit the time: the decoder never pauses.
fn without_a_pause() -> Arrivals {
    Arrivals::At(vec![0; 3_200])
}

#[test]
fn tpot_first_keeps_the_objective_of_a_decoder_without_a_pause_where_throughput_does_not() {
    let decoder = "llama7b_decode_b1";
    for low in TRAININGS {
        let mut before = 0.0;
        for factor in [1.5, 2.0] {
            let of = |policy| {
                let (sharing, all) = (SharingMode::Mps, without_a_pause());
                figures(&beside((policy, ""), sharing, decoder, low, factor * TOKEN_MS, &all))
            };
            let (late, share) = of("tpot-first");
            let (late_of_all, share_of_all) = of("throughput");
            assert!(late < 0.01, "{low}, {factor}: {late}");
            assert!(factor > 1.5 || late_of_all > 0.4, "{low}, {factor}: {late_of_all}");
            assert!(
                share_of_all > share && share > before,
                "{low}, {factor}: {share}, {before} at less"
            );
            before = share;
        }
    }
}

/// Its steps come at random times: best effort has all SMs between two of them.
#[test]
fn between_steps_tpot_first_gives_best_effort_what_tally_priority_does_or_more() {
    let arrivals = Arrivals::Poisson { load: 0.4 };
    for low in &TRAININGS[1..] {
        let of = |policy| {
            let sharing = SharingMode::Mps;
            let high = "llama7b_decode_b1";
            figures(&beside((policy, ""), sharing, high, low, 1.5 * TOKEN_MS, &arrivals))
        };
        let ((late, share), (late_of_all, _)) = (of("tpot-first"), of("throughput"));
        assert!(late < 0.01 && late_of_all > 0.5, "{low}: {late}, {late_of_all} of throughput");
        let (_, priority) = of("tally-priority");
        assert!(share > 0.95 * priority, "{low}: {share}, {priority} under tally-priority");
    }
}

/// Kernels that a step could not bear, and that nothing shortens, run on all SMs while the service has no requests: few
/// steps begin beside them.
#[test]
fn in_long_pauses_best_effort_runs_whole() {
    let period_ns = 6_500_000;
    let request = |n: u64| (0..100).map(move |token| (200 * n + token) * period_ns);
    let arrivals = Arrivals::At((0..12).flat_map(request).collect());
    let of = |config| {
        let (high, low, sharing) = ("llama7b_decode_b1", TRAININGS[0], SharingMode::Mps);
        let policy = ("tpot-first", config);
        figures(&beside(policy, sharing, high, low, 1.5 * TOKEN_MS, &arrivals))
    };
    let ((late, share), (_, never)) = (of(""), of("whole_late_percent_max = 0"));
    assert!(late < 0.025, "{late}");
    assert!(share > 1.1 * never, "{share}, {never} if they do not");
}

/// There is no width, and the GPU itself interrupts kernels: holding back has nothing to add.
#[test]
fn where_contexts_take_turns_both_keep_the_objective() {
    for arrivals in [without_a_pause(), Arrivals::Poisson { load: 0.4 }] {
        let of = |policy| {
            let sharing = SharingMode::Timeslice;
            let (high, low) = ("llama7b_decode_b1", TRAININGS[1]);
            figures(&beside((policy, ""), sharing, high, low, 1.25 * TOKEN_MS, &arrivals))
        };
        let ((late, share), (late_of_all, most)) = (of("tpot-first"), of("throughput"));
        assert!(late < 0.01 && late_of_all < 0.01, "{late}, {late_of_all} of throughput");
        assert!(share > 0.95 * most, "{share}, {most} of throughput");
    }
}

/// Two trainings that leave room, and two that do not.
#[test]
fn throughput_has_trainings_share_the_gpu_at_a_gain() {
    let pairs = [
        ["resnet50_train_b128", "resnet50_train_b128"],
        ["gpt2_12l_train_b8_s1024", "bert_base_train_b32_s128"],
    ];
    for pair in pairs {
        let traces = pair.map(|name| Trace::open(name).unwrap());
        let tenant = |trace| Tenant { trace, weight: 1, min_share_permille: 0 };
        let tenants = traces.each_ref().map(tenant);
        let setup = Setup { sharing: SharingMode::Mps, seconds: 2.0, ..Setup::default() };
        let policy = tally_native_policy::by_name("throughput", "").unwrap();
        let report = simulate_several(&setup, &[], &tenants, Some(policy));
        let (sum, fairness) = (report.best_effort.unwrap().share, report.fairness.unwrap());
        println!("{pair:?}: sum of rates {sum:.2}, Jain's index {:.2}", fairness.jain);
        assert!(sum > 1.15, "{sum}");
        assert!(fairness.jain > 0.95, "{fairness:?}");
    }
}
