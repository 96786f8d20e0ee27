//! Several services, alone and beside best effort.

mod erratic;

use erratic::{Erratic, kernels};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tally_engine::BuiltInRule;
use tally_engine::policy::*;
use tally_simulator::report::High;
use tally_simulator::trace::{Kernel, Pace};
use tally_simulator::{
    Arrivals, Model, Report, Service, Setup, SharingMode, Tenant, Trace, Transformable, simulate,
    simulate_several,
};

const BOTH: [SharingMode; 2] = [SharingMode::Timeslice, SharingMode::Mps];

fn built_in() -> Option<Box<dyn Policy + Send>> {
    Some(Box::new(BuiltInRule { idle_ns: 100_000 }))
}

fn setup(sharing: SharingMode) -> Setup {
    Setup { sharing, seconds: 0.5, overrun_seconds: 60.0, ..Setup::default() }
}

fn tenant(trace: &Trace) -> Tenant<'_> {
    Tenant { trace, weight: 1, min_share_permille: 0 }
}

fn json(report: &Report) -> String {
    serde_json::to_string(report).unwrap()
}

/// A matrix product of 200 us on so many of 132 SMs.
fn product(name: &str, blocks: u32) -> Trace {
    let kernel = Kernel {
        name: "gemm".into(),
        grid: [blocks, 1, 1],
        block: [1_024, 1, 1],
        regs: 32,
        smem: 120 << 10,
        start_ns: 0,
        dur_ns: 200_000,
        gap_ns: 0,
        pace: Pace::AfterLaunch(0),
        launch: 0,
    };
    Trace { name: name.into(), kernels: vec![kernel], period_ns: 200_000, ..Trace::default() }
}

#[test]
fn one_service_is_reported_as_the_only_one_and_several_in_a_list() {
    let high = Trace::open("resnet50_infer_b1").unwrap();
    let low = Trace::open("resnet50_train_b64").unwrap();
    let load = Arrivals::Poisson { load: 0.3 };
    let service = Service::new(&high, &load);
    for sharing in BOTH {
        let run = |services: &[Service<'_>]| {
            simulate_several(&setup(sharing), services, &[tenant(&low)], built_in())
        };
        let one = run(&[service]);
        assert_eq!(json(&one), json(&simulate(&setup(sharing), &service, Some(&low), built_in())));
        assert_eq!(one.each_service().len(), 1);
        assert!(json(&one).contains("high_priority") && !json(&one).contains("services"));

        let two = run(&[service, service]);
        assert_eq!(json(&two), json(&run(&[service, service])), "the same bytes each time");
        assert!(!json(&two).contains("high_priority") && json(&two).contains("services"));
        let [first, second] = two.each_service() else { panic!("{two:?}") };
        let only = &one.high_priority;
        // What arrives at the first does not depend on the others; the second has random numbers of its own.
        assert_eq!(first.arrived, only.arrived);
        assert_eq!(first.solo_queued_p99_ms, only.solo_queued_p99_ms);
        assert_ne!(second.solo_queued_p99_ms, only.solo_queued_p99_ms);
        assert_eq!((first.solo_ms, second.solo_ms), (only.solo_ms, only.solo_ms));
        // Its tail where they take turns, all of it where they run side by side.
        let times_ms = |h: &High| match sharing {
            SharingMode::Timeslice => h.service_p99_ms,
            SharingMode::Mps => h.service_p50_ms,
        };
        assert!(times_ms(first) > times_ms(only), "{first:?} {only:?}");
    }
}

#[test]
fn side_by_side_services_on_half_of_the_gpu_do_not_disturb_each_other() {
    let at_once = Arrivals::At((0..50).map(|n| n * 1_000_000).collect());
    let serve = |sharing, blocks| {
        let (first, second) = (product("first", blocks), product("second", blocks));
        let services = [Service::new(&first, &at_once), Service::new(&second, &at_once)];
        simulate_several(&setup(sharing), &services, &[], None)
    };
    let most_over_solo = |report: &Report| {
        let all = report.each_service().iter();
        all.map(|service| service.service_p99_over_solo).fold(0.0, f64::max)
    };
    let halves = serve(SharingMode::Mps, 66);
    assert!((most_over_solo(&halves) - 1.0).abs() < 1e-6, "{halves:?}");
    // Kernels on all SMs run one after the other, and processes take turns whatever they need.
    for report in [serve(SharingMode::Mps, 132), serve(SharingMode::Timeslice, 66)] {
        assert!(most_over_solo(&report) > 1.9, "{report:?}");
        assert!(report.each_service().iter().all(|s| (s.arrived, s.served) == (50, 50)));
    }
}

#[test]
fn services_have_their_own_objectives_arrivals_and_launches() {
    let (bert, resnet) = ["bert_base_infer_b1_s128", "resnet50_infer_b1"]
        .map(|name| Trace::open(name).unwrap())
        .into();
    let low = Trace::open("resnet50_train_b64").unwrap();
    let (load, none) = (Arrivals::Poisson { load: 0.2 }, Arrivals::At(Vec::new()));
    let few = Arrivals::At(vec![0, 1_000_000, 400_000_000]);
    let slo = Some(Objective { slo_ns: 5_000_000, percentile: 99.0 });
    let services = [
        Service { slo, ..Service::new(&bert, &load) },
        Service { graph: false, ..Service::new(&resnet, &few) },
        Service { tpot_ns: Some(7_000_000), ..Service::new(&bert, &few) },
        Service { slo, ..Service::new(&resnet, &none) },
    ];
    let report = simulate_several(&setup(SharingMode::Mps), &services, &[tenant(&low)], built_in());
    let figures = |s: &High| (s.trace.clone(), s.slo_ms, s.tpot_ms, s.within.is_some());
    let found: Vec<_> = report.services.iter().map(figures).collect();
    let (bert, resnet) = (bert.name, resnet.name);
    assert_eq!(
        found,
        [
            (bert.clone(), Some(5.0), None, true),
            (resnet.clone(), None, None, false),
            (bert, None, Some(7.0), true),
            // Nothing arrived, so nothing was kept or missed.
            (resnet, Some(5.0), None, false),
        ]
    );
    let arrived: Vec<u64> = report.services.iter().map(|s| s.arrived).collect();
    assert!(arrived[0] > 20 && arrived[1..] == [3, 3, 0], "{arrived:?}");
    // Kernel by kernel a request takes its program's own time, too.
    assert!(report.services[1].solo_ms > 1.5 * report.services[3].solo_ms, "{report:?}");
}

/// Of each client: its class, objectives, units begun and units ended.
type Heard = BTreeMap<u32, (Option<Class>, Option<Objective>, Option<u64>, u64, u64)>;

/// Runs everything, and notes what it hears.
struct Listening(Arc<Mutex<Heard>>);

impl Policy for Listening {
    fn decide(&mut self, _: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        Ok(Decision::Run(0).into())
    }

    fn subscriptions(&self) -> Subscriptions {
        Subscriptions::ALL
    }

    fn on_event(&mut self, _: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        let mut all = self.0.lock().unwrap();
        for (id, view) in &context.world.clients {
            let heard = all.entry(*id).or_default();
            heard.0 = Some(view.info.class);
            heard.1 = view.service.and_then(|service| service.objective);
            heard.2 = view.service.and_then(|service| service.tokens).map(|t| t.tpot_ns);
        }
        match event {
            Event::UnitBegan { client, .. } => all.entry(*client).or_default().3 += 1,
            Event::UnitsEnded { client, units, .. } => {
                all.entry(*client).or_default().4 += u64::from(*units);
            }
            _ => {}
        }
        Ok(())
    }
}

#[test]
fn the_policy_hears_of_the_units_and_objectives_of_each_service() {
    let (first, second) = (product("first", 66), product("second", 132));
    let low = product("low", 132);
    let loads = [0.1, 0.2].map(|load| Arrivals::Poisson { load });
    let slo = Some(Objective { slo_ns: 3_000_000, percentile: 95.0 });
    let services = [
        Service { slo, ..Service::new(&first, &loads[0]) },
        Service { tpot_ns: Some(2_000_000), ..Service::new(&second, &loads[1]) },
    ];
    for sharing in BOTH {
        let heard = Arc::new(Mutex::new(Heard::new()));
        let policy = Box::new(Listening(heard.clone()));
        let report = simulate_several(&setup(sharing), &services, &[tenant(&low)], Some(policy));
        let heard = heard.lock().unwrap();
        let served: Vec<u64> = report.services.iter().map(|service| service.served).collect();
        assert!(served.iter().all(|&served| served > 50) && served[0] != served[1], "{served:?}");
        let high = Some(Class::High);
        let expected = [
            (0, (high, slo, None, served[0], served[0])),
            (1, (high, None, Some(2_000_000), served[1], served[1])),
            (2, (Some(Class::BestEffort), None, None, 0, 0)),
        ];
        assert_eq!(*heard, BTreeMap::from(expected), "{sharing:?}");
    }
}

#[test]
fn services_linger_only_while_there_is_best_effort() {
    let (first, second) = (product("first", 132), product("second", 132));
    let low = product("low", 132);
    let load = Arrivals::Poisson { load: 0.3 };
    let services = [Service::new(&first, &load), Service::new(&second, &load)];
    let run = |linger_ns, tenants: &[Tenant<'_>]| {
        let model = Model { linger_ns, ..Model::default() };
        let setup = Setup { model, ..setup(SharingMode::Timeslice) };
        json(&simulate_several(&setup, &services, tenants, built_in()))
    };
    assert_eq!(run(0, &[]), run(1_000_000, &[]));
    assert_ne!(run(0, &[tenant(&low)]), run(1_000_000, &[tenant(&low)]));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn each_arrival_of_each_service_is_served_once(
        highs in prop::collection::vec((kernels(), any::<bool>(), 0.05f64..0.5), 0..4),
        lows in prop::collection::vec(kernels(), 0..3),
        seed in any::<u64>(),
        mps in any::<bool>(),
        scheduled in any::<bool>(),
        linger_ns in 0u64..200_000,
    ) {
        let sharing = if mps { SharingMode::Mps } else { SharingMode::Timeslice };
        let setup = Setup {
            sharing,
            transformable: Transformable::All,
            seconds: 0.01,
            overrun_seconds: 100.0,
            seed,
            model: Model { linger_ns, ..Model::default() },
            ..Setup::default()
        };
        let loads: Vec<Arrivals> =
            highs.iter().map(|(_, _, load)| Arrivals::Poisson { load: *load }).collect();
        let services: Vec<Service<'_>> = highs
            .iter()
            .zip(&loads)
            .map(|((trace, graph, _), load)| Service { graph: *graph, ..Service::new(trace, load) })
            .collect();
        let tenants: Vec<Tenant<'_>> = lows.iter().map(tenant).collect();
        let clients = (highs.len() + lows.len()) as u32;
        let policy = || -> Option<Box<dyn Policy + Send>> {
            scheduled.then(|| Box::new(Erratic::new(seed, clients)) as _)
        };
        let report = simulate_several(&setup, &services, &tenants, policy());
        prop_assert_eq!(report.each_service().len(), highs.len());
        let (mut launches, mut kernels) = (0, 0);
        for (service, (trace, graph, _)) in report.each_service().iter().zip(&highs) {
            prop_assert_eq!((service.unserved, service.served), (0, service.arrived));
            let each = trace.kernels.len() as u64;
            launches += service.served * if *graph { 1 } else { each };
            kernels += service.served * each;
        }
        let done = report.best_effort.as_ref().map_or(0, |low| low.done);
        if let Some(low) = &report.best_effort {
            prop_assert_eq!(low.launched, low.done + low.in_flight);
        }
        prop_assert_eq!((report.launches, report.kernels), (launches + done, kernels + done));
        let again = simulate_several(&setup, &services, &tenants, policy());
        prop_assert_eq!(json(&report), json(&again));
    }
}
