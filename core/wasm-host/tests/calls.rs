//! What passes between the engine and a policy arrives as it was sent.

mod common;

use common::{Bench, COMMANDS, chaos, chaos_with, client, guest, kernel, launch, limits, policy};
use sha2::{Digest, Sha256};
use tally_contract::limits::COMMANDS_MAX;
use tally_engine::policy::{
    Answer, Class, ClientView, Command, Completion, Context, Decision, Event, Form,
    HOLD_UNTIL_CHANGE, Objective, Policy, ServiceView, SharingMode, Subscriptions, TokensView,
    UnitProfile, Usage, launch_state,
};
use tally_engine::profile::{Demand, KernelKey};
use tally_wasm_host::{FaultCounts, Limits};

#[test]
fn every_decision_arrives() {
    let mut bench = Bench::new(chaos());
    assert_eq!(bench.decide(kernel::GOOD), Ok(Decision::Run(0)));
    assert_eq!(bench.decide(kernel::SLICED_7), Ok(Decision::Sliced(7)));
    assert_eq!(bench.decide(kernel::SM_LIMITED_8), Ok(Decision::SmLimited(8)));
    assert_eq!(bench.decide(kernel::PREEMPTIBLE), Ok(Decision::Preemptible));
    assert_eq!(bench.decide(kernel::COMMANDS), Ok(Decision::Run(9)));
    assert_eq!(bench.decide(kernel::HOLD_UNTIL_COMPLETION_9), Ok(Decision::HoldUntilCompletion(9)));
}

#[test]
fn reasons_arrive_with_their_texts_and_are_counted() {
    let mut bench = Bench::new(chaos_with(limits(), "reasons").unwrap());
    let answer = bench.policy.decide(&launch(kernel::REASON_9), &mut bench.context).unwrap();
    assert_eq!(answer, Answer { decision: Decision::Hold(5), reason: 9 });
    bench.decide(kernel::REASON_9).unwrap();
    bench.decide(kernel::GOOD).unwrap();
    let reasons = bench.policy.status().reasons;
    let of = |reason: &tally_wasm_host::ReasonStatus| {
        (reason.reason, reason.text.clone(), reason.decisions)
    };
    assert_eq!(reasons.iter().map(of).collect::<Vec<_>>(), [(9, "because it can".into(), 2)]);
}

#[test]
fn every_field_of_a_launch_arrives() {
    let mut asked = launch(kernel::ECHO);
    for bit in 0..5 {
        asked.state = 1 << bit;
        asked.offered = 1 << (bit % 4);
        asked.now_ns = 1 << (40 + bit);
        (asked.client, asked.grid_blocks, asked.block_threads) = (2, 3 << 33, 4);
        (asked.shared_bytes, asked.predicted_ns, asked.waited_ns) = (5, 6, 7);
        (asked.in_flight_ns, asked.high_idle_ns, asked.high_clients) = (8, u64::MAX - 9, 10);
        (asked.waiting_clients, asked.stream, asked.sm_count) = (11, 12, 13);
        let fields = [
            asked.now_ns,
            asked.client.into(),
            asked.kernel.into(),
            u64::from(asked.class == Class::High) | u64::from(asked.state) << 1,
            asked.offered.into(),
            asked.grid_blocks,
            asked.block_threads.into(),
            asked.shared_bytes.into(),
            asked.predicted_ns,
            asked.waited_ns,
            asked.in_flight_ns,
            asked.high_idle_ns,
            asked.high_clients.into(),
            asked.waiting_clients.into(),
            asked.stream.into(),
            asked.sm_count.into(),
        ];
        let echo = fields.iter().fold(0_u64, |all, &f| all.wrapping_mul(31).wrapping_add(f));
        let mut bench = Bench::new(chaos());
        let answer = bench.ask(&asked);
        assert_eq!(answer, Ok(Decision::Hold(echo % 1_000_000_000)));
    }
}

#[test]
fn how_the_gpu_is_shared_arrives() {
    let mut bench = Bench::new(chaos());
    assert_eq!(bench.decide(kernel::SHARING), Ok(Decision::Hold(1)));
    bench.context.world.sharing = SharingMode::TimeSliced;
    assert_eq!(bench.decide(kernel::SHARING), Ok(Decision::Hold(2)));
}

#[test]
fn commands_arrive_in_order_after_those_already_there() {
    let mut bench = Bench::new(chaos());
    bench.context.commands.push(Command::RevokeLease(77));
    bench.decide(kernel::COMMANDS).unwrap();
    let commands = bench.commands();
    assert_eq!(commands[0], Command::RevokeLease(77));
    assert_eq!(commands[1..], COMMANDS);
    bench.decide(kernel::TIMERS).unwrap();
    assert_eq!(bench.commands().len(), COMMANDS_MAX);
    assert_eq!(bench.context.commands.dropped, 2_000 - COMMANDS_MAX as u64);
}

#[test]
fn what_init_asked_for_is_handed_over_once() {
    let mut context = Context::default();
    let mut policy = chaos_with(limits(), "ask").unwrap();
    policy.start(&mut context);
    assert!(context.commands.drain().eq(COMMANDS));
    policy.start(&mut context);
    assert!(context.commands.is_empty());
    // By the first call, if nobody said start.
    let mut policy = chaos_with(limits(), "ask").unwrap();
    policy.decide(&launch(kernel::GOOD), &mut context).unwrap();
    policy.decide(&launch(kernel::GOOD), &mut context).unwrap();
    assert!(context.commands.drain().eq(COMMANDS));
}

#[test]
fn no_client_is_known_during_init() {
    assert!(chaos_with(limits(), "clients").is_ok());
}

#[test]
fn events_arrive() {
    let mut bench = Bench::new(chaos());
    bench.join(4, Class::High).unwrap();
    bench.join(2, Class::BestEffort).unwrap();
    bench.tell(Event::Left(4)).unwrap();
    bench.policy.on_event(100, &Event::HighStarted, &mut bench.context).unwrap();
    bench.policy.on_event(1_000, &Event::HighEnded, &mut bench.context).unwrap();
    bench.tell(Event::Timer(0)).unwrap();
    for form in [Form::Whole, Form::Sliced, Form::Preemptible, Form::SmLimited] {
        let done = Completion {
            client: 2,
            kernel: 1,
            form,
            argument: 0,
            predicted_ns: 3,
            measured_ns: Some(1_000_000),
            charged_ns: 10_000_000,
        };
        bench.tell(Event::Completed(done)).unwrap();
    }
    assert_eq!(bench.decide(kernel::JOINED), Ok(Decision::Hold(42)));
    assert_eq!(bench.decide(kernel::DONE), Ok(Decision::Hold(4 * 101_000_000 + 6 + 1 + 10_100)));
    assert_eq!(bench.policy.status().events, 10);
}

#[test]
fn the_world_can_be_read() {
    let mut bench = Bench::new(chaos());
    let key = KernelKey { name: "gemm".into(), image: 5, grid: [6, 1, 1], block: [32, 1, 1] };
    let id = bench.context.world.profiles.intern(&key).unwrap();
    assert_eq!(id, 0);
    for ns in [3_000, 1_000, 2_000] {
        bench.context.world.profiles.record(id, ns);
    }
    bench.context.world.profiles.set_sm_count(2);
    bench.context.world.profiles.set_demand(id, Demand { blocks_per_sm: 4, registers: 5 });
    assert_eq!(bench.decide(kernel::MEAN_NS), Ok(Decision::Hold(2_000)));
    let mut heavy = client(2, Class::BestEffort);
    heavy.labels.push(("weight".into(), "7".into()));
    bench.context.world.clients.insert(2, heavy.into());
    let mut view = ClientView::from(client(1, Class::High));
    view.usage = Usage {
        waiting_since_ns: 4,
        in_flight: 3,
        in_flight_ns: 1_000,
        measured_ns: 7_000_000,
        charged_ns: 9_000_000,
        min_share_permille: 125,
        backlogged_ns: 2_000_000,
        backlogged_since_ns: 700,
        limit_cost_ns: 11_000,
    };
    bench.context.world.clients.insert(1, view);
    let profile = 30_000 + 600_000 + 2_000 + 3_000 + 2_000;
    let profile = profile + 40_000_000 + 500_000_000 + 750_000_000_000;
    let described = 1 + 100 + 7 + 200 + profile;
    assert_eq!(bench.decide(kernel::DESCRIBED), Ok(Decision::Hold(described)));
    let used = 7_000_000 + 90_000_000 + 100_000 + 3 + 4 + 125_000 + 4_000_000 + 2_100 + 77_000;
    assert_eq!(bench.decide(kernel::USED), Ok(Decision::Hold(used)));
}

#[test]
fn services_can_be_read_and_units_arrive() {
    let mut bench = Bench::new(chaos());
    assert_eq!(bench.decide(kernel::SERVED), Ok(Decision::Hold(0)), "no such client");
    assert_eq!(bench.decide(kernel::UNITS), Ok(Decision::Hold(i64::MAX as u64)), "no unit is open");
    let mut view = ClientView::from(client(1, Class::High));
    view.service = Some(ServiceView {
        objective: Some(Objective { slo_ns: 3, percentile: 95.0 }),
        open_since_ns: 4,
        open_is_token: false,
        units: 5,
        units_within: 6,
        recent: 7,
        recent_within: 8,
        p50_ns: 9,
        p99_ns: 2,
        tokens: None,
        profile: None,
    });
    bench.context.world.clients.insert(1, view.clone());
    assert_eq!(bench.decide(kernel::SERVED), Ok(Decision::Hold(298_765_047_953)));
    let tokens = TokensView {
        tpot_ns: 7,
        count: 6,
        within: 5,
        recent: 4,
        recent_within: 3,
        p50_ns: 2,
        p99_ns: 1,
    };
    view.service.as_mut().unwrap().tokens = Some(tokens);
    bench.context.world.clients.insert(1, view.clone());
    assert_eq!(bench.decide(kernel::SERVED), Ok(Decision::Hold(1_234_567_298_765_047_953)));

    let profile = UnitProfile {
        units: 1,
        launches: 2,
        gpu_busy_ns: 3,
        gaps: 4,
        gaps_ns: 5,
        gap_median_ns: 6,
        gap_longest_ns: 7,
        sms_max: 8,
        sms_mean: 9,
    };
    view.service = Some(ServiceView { profile: Some(profile), ..ServiceView::new(None) });
    bench.context.world.clients.insert(1, view.clone());
    assert_eq!(bench.decide(kernel::PROFILED), Ok(Decision::Hold(987_654_321)));
    view.service.as_mut().unwrap().profile = None;
    bench.context.world.clients.insert(1, view.clone());
    assert_eq!(bench.decide(kernel::PROFILED), Ok(Decision::Hold(0)));

    let now_ns = launch(kernel::UNITS).now_ns;
    let service = view.service.as_mut().unwrap();
    service.objective = Some(Objective { slo_ns: 1_000, percentile: 95.0 });
    (service.open_since_ns, service.p50_ns) = (now_ns - 100, 400);
    bench.context.world.clients.insert(1, view);
    // It takes 400 of its 1 000 ns.
    assert_eq!(bench.decide(kernel::UNITS), Ok(Decision::Hold(600)));
    bench.tell(Event::UnitBegan { client: 1, since_ns: 20, deadline_ns: 300 }).unwrap();
    bench.tell(Event::UnitsEnded { client: 1, units: 2, took_ns: 4_000 }).unwrap();
    assert_eq!(bench.decide(kernel::UNITS), Ok(Decision::Hold(600 + 321 + 8_000)));
}

#[test]
fn what_a_component_exports_and_imports_says_what_it_is_told() {
    assert_eq!(chaos().subscriptions(), Subscriptions::ALL);
    // It reads what clients used.
    let expected = Subscriptions::MEMBERSHIP.and(Subscriptions::USAGE).and(Subscriptions::TIMER);
    assert_eq!(policy("tally-priority", "").subscriptions(), expected);
    let mut fifo = Bench::new(policy("fifo", ""));
    let before = fifo.policy.status().events;
    fifo.tell(Event::Timer(2)).unwrap();
    fifo.tell(Event::HighStarted).unwrap();
    assert_eq!(fifo.policy.status().events, before, "not subscribed to");
}

#[test]
fn metrics_are_shown_bounded_and_outlive_the_instance() {
    let mut bench = Bench::new(chaos());
    bench.decide(kernel::METRICS).unwrap();
    assert!(bench.decide(kernel::PANIC).is_err());
    assert_eq!(bench.policy.status().counters["turns"], 3, "shown while there is no instance");
    bench.decide(kernel::METRICS).unwrap();
    let status = bench.policy.status();
    assert_eq!(status.counters["turns"], 6);
    assert_eq!(status.gauges["level"], -5);
    assert_eq!(status.counters.len() + status.gauges.len(), Limits::default().metrics_max);
}

#[test]
fn log_lines_are_bounded_and_counted() {
    let mut bench = Bench::new(chaos());
    bench.decide(kernel::LOG).unwrap();
    assert_eq!(bench.policy.status().log_dropped, 100 - 64);
    let mut later = launch(kernel::LOG);
    later.now_ns += 1_000_000_000;
    bench.ask(&later).unwrap();
    assert_eq!(bench.policy.status().log_dropped, 2 * (100 - 64));
}

#[test]
fn the_status_says_which_file_it_is() {
    let file = guest("policies", "fifo");
    let fifo = policy("fifo", "");
    let digest = Sha256::digest(std::fs::read(&file).unwrap());
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!((fifo.name(), fifo.digest()), ("fifo", &*digest));
    let status = fifo.status();
    assert_eq!(status.path, Some(file));
    assert!(status.load_ms > 0.0);
    assert_eq!((status.digest, status.faults), (digest, FaultCounts::default()));
}

#[test]
fn fifo_runs_everything() {
    let mut bench = Bench::new(policy("fifo", ""));
    for state in [0, launch_state::HIGH_ACTIVE, u32::MAX] {
        let launch = tally_engine::policy::Launch { state, offered: u32::MAX, ..launch(1) };
        assert_eq!(bench.ask(&launch), Ok(Decision::Run(0)));
    }
    assert_eq!(bench.policy.status().counters["decided"], 3);
}

#[test]
fn tally_priority_keeps_its_rule_as_a_component() {
    let mut bench = Bench::new(policy("tally-priority", "idle_gap_us = 50\nwindow_us = 7"));
    bench.join(1, Class::BestEffort).unwrap();
    assert_eq!(bench.decide(0), Ok(Decision::Run(1_000_000)));
    bench.commands();
    bench.join(2, Class::High).unwrap();
    assert_eq!(
        bench.commands(),
        [
            Command::SetWindow { client: 1, window_ns: 7_000 },
            Command::RevokeLease(1),
            Command::SetAutoYield { client: 1, enabled: true, idle_ns: 50_000 },
        ]
    );
    let mut beside = launch(0);
    (beside.high_clients, beside.high_idle_ns) = (1, 20_000);
    let answer = bench.ask(&beside);
    assert_eq!(answer, Ok(Decision::Hold(30_000)));
    (beside.state, beside.high_idle_ns) = (launch_state::HIGH_ACTIVE, 0);
    let answer = bench.ask(&beside);
    assert_eq!(answer, Ok(Decision::Hold(HOLD_UNTIL_CHANGE)));
}

/// The same inputs, the same decisions, commands and figures, faults included.
#[test]
fn the_same_inputs_give_the_same_decisions() {
    let run = |name: &str, folder: &str| {
        let limits = Limits { faults_max: 1_000, ..limits() };
        let loaded = common::host(limits).load_file(&guest(folder, name), "").unwrap();
        let mut bench = Bench::new(loaded);
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        let mut transcript = String::new();
        for step in 0..2_000_u64 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let bits = |from: u32, count: u32| (random >> from) as u32 & ((1 << count) - 1);
            let line = match bits(0, 3) {
                0 => format!("{:?}", bench.join(bits(8, 3), Class::High)),
                1 => format!("{:?}", bench.join(bits(8, 3), Class::BestEffort)),
                2 => {
                    bench.context.world.clients.remove(&bits(8, 3));
                    format!("{:?}", bench.tell(Event::Left(bits(8, 3))))
                }
                _ => {
                    let mut launch = launch(bits(8, 5));
                    launch.now_ns = step * 1_000;
                    launch.state = bits(16, 5);
                    launch.offered = bits(21, 4);
                    launch.high_clients = bits(24, 1);
                    launch.high_idle_ns = bits(30, 18).into();
                    format!("{:?}", bench.ask(&launch))
                }
            };
            transcript += &format!("{line} {:?}\n", bench.commands());
        }
        let mut status = bench.policy.status();
        status.load_ms = 0.0;
        (transcript, status)
    };
    for (name, folder) in [("tally-priority", "policies"), ("chaos", "test-policies")] {
        let first = run(name, folder);
        assert!(first.1.decides > 100);
        assert!(first == run(name, folder), "{name} differs from run to run");
    }
}
