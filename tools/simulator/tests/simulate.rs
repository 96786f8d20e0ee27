//! The simulation: the same each time, nothing lost or doubled, and sane where the
//! answer is known.

mod erratic;

use erratic::{Erratic, kernels};
use proptest::prelude::*;
use tally_engine::BuiltInRule;
use tally_engine::policy::*;
use tally_simulator::trace::{Alone, Kernel, LAUNCH_LATENCY_NS, Pace};
use tally_simulator::{
    Arrivals, Model, Report, Service, Setup, SharingMode, Trace, Transformable, builtin_traces, gpu,
};

/// A service whose requests are CUDA graphs, beside a training.
fn simulate(
    setup: &Setup,
    high: &Trace,
    low: Option<&Trace>,
    arrivals: &Arrivals,
    policy: Option<Box<dyn Policy + Send>>,
) -> Report {
    simulate_as(true, setup, high, low, arrivals, policy)
}

/// The same; it launches each kernel by itself unless `graph`.
fn simulate_as(
    graph: bool,
    setup: &Setup,
    high: &Trace,
    low: Option<&Trace>,
    arrivals: &Arrivals,
    policy: Option<Box<dyn Policy + Send>>,
) -> Report {
    let service = Service { graph, ..Service::new(high, arrivals) };
    tally_simulator::simulate(setup, &service, low, policy)
}

const BOTH: [SharingMode; 2] = [SharingMode::Timeslice, SharingMode::Mps];

fn built_in() -> Option<Box<dyn Policy + Send>> {
    Some(Box::new(BuiltInRule { idle_ns: 100_000 }))
}

fn setup(sharing: SharingMode) -> Setup {
    Setup { sharing, seconds: 0.5, overrun_seconds: 60.0, ..Setup::default() }
}

fn pair() -> (Trace, Trace) {
    (Trace::open("resnet50_infer_b1").unwrap(), Trace::open("resnet50_train_b128").unwrap())
}

#[test]
fn the_same_inputs_give_the_same_bytes() {
    let (high, low) = pair();
    for sharing in BOTH {
        let run = |seed| {
            let setup = Setup { seed, ..setup(sharing) };
            let load = Arrivals::Poisson { load: 0.5 };
            let policy: Box<dyn Policy + Send> = Box::new(Erratic::new(7, 2));
            let report = simulate(&setup, &high, Some(&low), &load, Some(policy));
            serde_json::to_string(&report).unwrap()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }
}

#[test]
fn alone_a_program_takes_what_was_recorded() {
    let (high, low) = pair();
    let at_once = Arrivals::At(vec![0]);
    let costs_ms = (LAUNCH_LATENCY_NS + gpu::SEEN_NS) as f64 / 1e6;
    for sharing in BOTH {
        let solo_ms = |trace: &Trace, graph| {
            let report = simulate_as(graph, &setup(sharing), trace, None, &at_once, None);
            assert_eq!(report.high_priority.served, 1);
            (report.high_priority.solo_ms, report.high_priority.service_p50_ms)
        };
        // Not timed: as its kernels were recorded.
        let untimed = Trace::open("bert_base_train_b32_s384").unwrap();
        for (trace, graph) in [(&untimed, false), (&untimed, true), (&high, true)] {
            let trace = if graph { trace.as_graph() } else { trace.clone() };
            let expected = trace.span_ns() as f64 / 1e6 + costs_ms;
            let (solo, _) = solo_ms(&trace, graph);
            assert!((solo / expected - 1.0).abs() < 1e-6, "{graph}: {solo} {expected}");
        }
        for name in builtin_traces() {
            let trace = Trace::open(name).unwrap();
            let Some(plain) = trace.alone[0] else { continue };
            let (solo, served) = solo_ms(&trace, trace.is_graph());
            assert!((solo * 1e6 / plain.ns as f64 - 1.0).abs() < 2e-3, "{name}: {solo} {plain:?}");
            if trace.is_graph() {
                let here = trace.timed_in(sharing).period_ns as f64 / 1e6;
                assert!((served / here - 1.0).abs() < 2e-3, "{name}: {served} {here}");
            }
        }
        // An inference of nothing to speak of leaves the training alone.
        let model = Model { hosts_permille: 0, ..Model::default() };
        let setup = Setup { seconds: 2.0, model, ..setup(sharing) };
        let tiny = Trace {
            kernels: vec![Kernel { dur_ns: 1, ..high.kernels[0].clone() }],
            alone: [None; 2],
            ..high.clone()
        };
        for trace in [&low, &Trace::open("bert_base_train_b32_s384").unwrap()] {
            let report = simulate(&setup, &tiny, Some(trace), &at_once, None);
            let share = report.best_effort.unwrap().share;
            assert!((0.97..=1.001).contains(&share), "{}: {share}", trace.name);
        }
    }
}

#[test]
fn an_own_part_has_the_median_and_the_99th_percentile_that_it_has_alone() {
    let (mut eager, _) = pair();
    let alone = eager.alone[0].unwrap();
    for p99_over_median in [1.4, 8.0] {
        let p99_ns = (alone.ns as f64 * p99_over_median) as u64;
        eager.alone[0] = Some(Alone { p99_ns, ..alone });
        let setup = Setup { seconds: 40.0, ..setup(SharingMode::Timeslice) };
        let load = Arrivals::Poisson { load: 0.1 };
        let r = simulate_as(false, &setup, &eager, None, &load, None);
        let high = &r.high_priority;
        assert!(high.served > 500 && high.unserved == 0, "{high:?}");
        assert!((high.service_p50_over_solo - 1.0).abs() < 0.05, "{high:?}");
        assert!((high.solo_p99_ms / high.solo_ms / p99_over_median - 1.0).abs() < 0.01, "{high:?}");
        assert!((high.service_p99_over_solo - 1.0).abs() < 0.2, "{high:?}");
    }
}

#[test]
fn the_built_in_rule_never_makes_high_priority_slower() {
    for (high, low) in [
        pair(),
        (
            Trace::open("bert_large_infer_b1_s128").unwrap(),
            Trace::open("gpt2_12l_train_b8_s1024").unwrap(),
        ),
    ] {
        for sharing in BOTH {
            for load in [0.1, 0.5] {
                let load = Arrivals::Poisson { load };
                let run = |policy| simulate(&setup(sharing), &high, Some(&low), &load, policy);
                let (with, without) = (run(built_in()), run(None));
                let (a, b) = (&with.high_priority, &without.high_priority);
                assert!(a.service_p50_ms <= b.service_p50_ms, "{sharing:?}: {a:?} {b:?}");
                assert!(a.service_p99_ms <= b.service_p99_ms, "{sharing:?}: {a:?} {b:?}");
                assert!(a.service_p50_over_solo >= 0.999);
                for report in [with, without] {
                    conserved(&report);
                    let share = report.best_effort.unwrap().share;
                    assert!((0.0..=1.0).contains(&share), "{share}");
                }
            }
        }
    }
}

#[test]
fn a_training_warms_up_as_long_as_asked_and_five_iterations_otherwise() {
    let (high, low) = pair();
    // Unscheduled, so that an iteration takes the training the same time each time.
    let model = Model { hosts_permille: 0, ..Model::default() };
    let iterations = |warm_up_seconds| {
        let setup = Setup { warm_up_seconds, model, ..setup(SharingMode::Timeslice) };
        let report = simulate(&setup, &high, Some(&low), &Arrivals::At(vec![]), None);
        let training = report.best_effort.unwrap();
        // What was done before the window is not in the share.
        assert!((0.97..=1.001).contains(&training.share), "{training:?}");
        training.iterations as i64
    };
    let iteration_s = low.timed_in(SharingMode::Timeslice).period_ns as f64 / 1e9;
    let none = iterations(Some(0.0));
    for (warm_up_seconds, expected) in [(None, 5), (Some(40.0 * iteration_s), 40)] {
        let more = iterations(warm_up_seconds) - none;
        assert!((more - expected).abs() <= 1, "{warm_up_seconds:?}: {more}");
    }
}

#[test]
fn a_kernel_that_yields_is_waited_for_less() {
    struct Preempting(bool);
    impl Policy for Preempting {
        fn decide(&mut self, l: &Launch, _: &mut Context) -> Result<Answer, Fault> {
            if l.state & launch_state::HIGH_ACTIVE != 0 {
                return Ok(Decision::Hold(1_000_000).into());
            }
            Ok(if self.0 { Decision::Preemptible } else { Decision::Run(0) }.into())
        }
        fn subscriptions(&self) -> Subscriptions {
            Subscriptions::ALL
        }
        fn on_event(&mut self, _: u64, _: &Event, context: &mut Context) -> Result<(), Fault> {
            let idle_ns = 100_000;
            context.commands.push(Command::SetAutoYield { client: 1, enabled: true, idle_ns });
            Ok(())
        }
    }
    let (high, _) = pair();
    let low = Trace::open("gpt2_12l_train_b8_s1024").unwrap();
    let setup = Setup { transformable: Transformable::All, ..setup(SharingMode::Mps) };
    let run = |on| {
        let load = Arrivals::Poisson { load: 0.3 };
        simulate(&setup, &high, Some(&low), &load, Some(Box::new(Preempting(on))))
    };
    let (whole, preemptible) = (run(false), run(true));
    assert!(preemptible.decisions.unwrap().launches_yielded > 0);
    let (a, b) = (preemptible.high_priority.service_p99_ms, whole.high_priority.service_p99_ms);
    assert!(a * 2.0 < b, "{a} {b}");
}

#[test]
fn a_request_soon_after_another_finds_the_gpu_still_its_own_if_it_lingers() {
    let (high, low) = pair();
    // Twenty pairs of requests; each second one comes 30 us after the first is done.
    let graph = high.as_graph();
    let alone =
        simulate(&setup(SharingMode::Timeslice), &graph, None, &Arrivals::At(vec![0]), None);
    let solo_ns = (alone.high_priority.solo_ms * 1e6) as u64;
    let changed_ns = 500_000;
    let at = (0..20).flat_map(|i| [i * 20_000_000, i * 20_000_000 + solo_ns + changed_ns]);
    let at = Arrivals::At(at.collect());
    let run = |linger_ns| {
        let model = Model { linger_ns, ..Model::default() };
        let setup = Setup { model, ..setup(SharingMode::Timeslice) };
        simulate(&setup, &graph, Some(&low), &at, built_in())
    };
    let (without, with) = (run(0), run(1_000_000));
    for report in [&without, &with] {
        conserved(report);
        assert_eq!(report.high_priority.served, 40);
    }
    // There and back for each pair instead of for each request.
    assert!(with.context_changes * 3 < without.context_changes * 2, "{with:?} {without:?}");
    assert!(with.high_priority.service_p50_over_solo < 1.01, "{with:?}");
    assert!(without.high_priority.service_p50_over_solo > 1.1, "{without:?}");
    // Without a core nothing lingers.
    let unscheduled = |linger_ns| {
        let model = Model { linger_ns, ..Model::default() };
        let setup = Setup { model, ..setup(SharingMode::Timeslice) };
        simulate(&setup, &graph, Some(&low), &at, None).context_changes
    };
    assert_eq!(unscheduled(0), unscheduled(1_000_000));
}

#[test]
fn a_program_that_waits_for_each_step_is_not_ahead_at_the_next() {
    let kernel = |pace, launch| Kernel {
        name: "k".into(),
        grid: [132, 1, 1],
        block: [1_024, 1, 1],
        regs: 32,
        smem: 0,
        start_ns: u64::from(launch) * 100_000,
        dur_ns: 100_000,
        gap_ns: 0,
        pace,
        launch,
    };
    let trace = |first| {
        let kernels = vec![kernel(first, 0), kernel(Pace::AfterLaunch(5_000), 1)];
        Trace { name: "step".into(), kernels, period_ns: 300_000, ..Trace::default() }
    };
    let tiny =
        Trace { kernels: vec![kernel(Pace::AfterLaunch(0), 0)], ..trace(Pace::AfterLaunch(0)) };
    let model = Model { hosts_permille: 0, ..Model::default() };
    let setup = Setup { seconds: 1.0, model, ..setup(SharingMode::Timeslice) };
    let steps = |first| {
        let low = trace(first);
        let report = simulate(&setup, &tiny, Some(&low), &Arrivals::At(vec![0]), None);
        report.best_effort.unwrap().iterations
    };
    // 200 us of kernels each; with the wait also 96 us of its own and 4 us of launching.
    let (ahead, waiting) = (steps(Pace::AfterLaunch(5_000)), steps(Pace::AfterEnd(96_000)));
    assert!((4_900..=5_010).contains(&ahead), "{ahead}");
    assert!((3_290..=3_340).contains(&waiting), "{waiting}");
}

/// Every arrival is served once and every launch made is done once or under way.
fn conserved(r: &Report) {
    let h = &r.high_priority;
    assert_eq!(h.arrived, h.served + h.unserved);
    let b = r.best_effort.as_ref().unwrap();
    assert_eq!(b.launched, b.done + b.in_flight);
    if let Some(d) = &r.decisions {
        let decided = d.whole + d.leased + d.sliced + d.preemptible + d.sm_limited + d.degraded;
        // Ungated launches are not decided; at most one is held at the end.
        assert!(decided <= b.launched, "{d:?} {b:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_or_doubled(
        high in kernels(),
        low in kernels(),
        seed in any::<u64>(),
        mps in any::<bool>(),
        graph in any::<bool>(),
        scheduled in any::<bool>(),
        load in 0.05f64..0.9,
        linger_ns in 0u64..200_000,
        warm_up_ms in prop::option::of(0u32..20),
    ) {
        let sharing = if mps { SharingMode::Mps } else { SharingMode::Timeslice };
        let (seconds, overrun_seconds) = (0.01, 100.0);
        let model = Model { linger_ns, ..Model::default() };
        let transformable = Transformable::All;
        let warm_up_seconds = warm_up_ms.map(|ms| f64::from(ms) / 1e3);
        let setup = Setup {
            sharing, transformable, seconds, overrun_seconds, warm_up_seconds, seed, model, ..Setup::default()
        };
        let policy: Option<Box<dyn Policy + Send>> = scheduled.then(|| Box::new(Erratic::new(seed, 2)) as _);
        let load = Arrivals::Poisson { load };
        let report = simulate_as(graph, &setup, &high, Some(&low), &load, policy);
        conserved(&report);
        let h = &report.high_priority;
        prop_assert_eq!((h.unserved, h.served), (0, h.arrived));
        let b = report.best_effort.as_ref().unwrap();
        let launches_each = if graph { 1 } else { high.kernels.len() as u64 };
        prop_assert_eq!(report.launches, h.served * launches_each + b.done);
        prop_assert_eq!(report.kernels, h.served * high.kernels.len() as u64 + b.done);
        // A request that follows another at once is spared a pause before its first kernel.
        prop_assert!(h.arrived == 0 || h.service_p50_over_solo >= 0.5, "{:?}", h);
    }
}

/// A wave of blocks takes as long on half of the SMs as on all, but there are twice as many.
#[test]
fn under_mps_a_training_may_find_fewer_sms() {
    let (high, low) = pair();
    let share = |sharing, best_effort_percent| {
        let model = Model { best_effort_percent, hosts_permille: 0, ..Model::default() };
        let setup = Setup { model, ..setup(sharing) };
        let graph = high.as_graph();
        simulate(&setup, &graph, Some(&low), &Arrivals::At(vec![0]), None)
            .best_effort
            .unwrap()
            .share
    };
    let [all, half, one] = [100, 50, 1].map(|percent| share(SharingMode::Mps, percent));
    assert!(all > 0.9 && half < 0.95 * all && half > 0.4 * all, "{all} {half}");
    assert!(one < 0.1 * half, "{one}");
    let [all, half] = [100, 50].map(|percent| share(SharingMode::Timeslice, percent));
    assert_eq!(all, half);
}
