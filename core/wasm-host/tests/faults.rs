//! Whatever a policy does, the call ends with a fault of the right kind, the next
//! call goes to a new instance, and in the end the policy is disabled.

mod common;

use common::{Bench, chaos, chaos_with, client, kernel, limits};
use std::time::{Duration, Instant};
use tally_engine::policy::{Class, Command, Decision, Event, FaultKind, Policy};
use tally_wasm_host::{Limits, LoadError};

/// Each misbehaviour, what it counts as, and what its message says.
const FAULTS: [(u32, FaultKind, &str); 12] = [
    (kernel::UNREACHABLE, FaultKind::Trap, "unreachable"),
    (kernel::LOOP, FaultKind::Overrun, "used more than 200000 units of fuel"),
    (kernel::HOARD, FaultKind::Memory, "and may have 16777216"),
    (kernel::PANIC, FaultKind::Trap, "out of ideas"),
    (kernel::DIVE, FaultKind::Trap, "out of bounds"),
    (kernel::UNWRAP, FaultKind::Trap, "`Option::unwrap()` on a `None`"),
    (kernel::WILD, FaultKind::Trap, "out of bounds"),
    (kernel::LOG_FOREVER, FaultKind::Overrun, "passed more than 262144 bytes"),
    (kernel::LOG_LONG, FaultKind::Overrun, "passed more than 262144 bytes to and from the core"),
    (kernel::CLIENTS_FOREVER, FaultKind::Overrun, ""),
    (kernel::SLICED_0, FaultKind::Nonsense, "sliced(0)"),
    (kernel::SM_LIMITED_0, FaultKind::Nonsense, "sm-limited(0)"),
];

#[test]
fn every_fault_has_its_kind_and_its_message() {
    for (kernel, kind, message) in FAULTS {
        // Filling 16 MiB takes more fuel than a call has.
        let decide_fuel = if kernel == kernel::HOARD { 1 << 32 } else { 200_000 };
        let limits = Limits { decide_fuel, ..limits() };
        let mut bench = Bench::new(chaos_with(limits, "").unwrap());
        let fault = bench.decide(kernel).unwrap_err();
        assert_eq!(fault.kind, kind, "kernel {kernel}: {}", fault.message);
        assert!(fault.message.contains(message), "kernel {kernel}: {}", fault.message);
        // It goes on, anew.
        assert_eq!(bench.decide(kernel::GOOD), Ok(Decision::Run(0)));
        assert_eq!(bench.policy.status().faults.total(), 1);
    }
}

#[test]
fn traps_tell_where() {
    let fault = Bench::new(chaos()).decide(kernel::DIVE).unwrap_err();
    assert!(fault.message.contains("chaos::dive"), "{}", fault.message);
    let fault = Bench::new(chaos()).decide(kernel::PANIC).unwrap_err();
    assert!(fault.message.contains("chaos/src/lib.rs"), "{}", fault.message);
}

#[test]
fn events_fail_like_decisions() {
    for (kernel, kind, _) in FAULTS.into_iter().take(2) {
        let mut bench = Bench::new(chaos());
        assert_eq!(bench.tell(Event::Timer(kernel.into())).unwrap_err().kind, kind);
    }
}

#[test]
fn a_text_that_is_too_long_is_an_overrun() {
    let limits = Limits { decide_fuel: 1 << 32, ..limits() };
    let mut bench = Bench::new(chaos_with(limits, "").unwrap());
    let fault = bench.decide(kernel::LONG_LINE).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Overrun, "{}", fault.message);
    assert!(fault.message.contains("more than 65536 bytes"), "{}", fault.message);
}

#[test]
fn data_is_bounded_where_fuel_is_not() {
    // As fuel alone would allow: 5 000 lines of 16 000 bytes.
    let limits = Limits { decide_fuel: 1 << 32, ..limits() };
    for kernel in [kernel::LOG_LONG, kernel::LOG_FOREVER, kernel::CLIENTS_FOREVER] {
        let mut bench = Bench::new(chaos_with(limits.clone(), "").unwrap());
        let fault = bench.decide(kernel).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Overrun, "{}", fault.message);
        assert!(fault.message.contains("passed more than 262144 bytes"), "{}", fault.message);
        // A call is counted by itself.
        for _ in 0..10_000 {
            assert_eq!(bench.decide(kernel::LOG), Ok(Decision::Run(0)));
        }
    }
}

#[test]
fn cpu_time_is_bounded_where_fuel_is_not_and_each_overrun_is_a_fault() {
    let limits = Limits { decide_fuel: u64::MAX, ..Limits::default() };
    let mut bench = Bench::new(chaos_with(limits, "").unwrap());
    for recent_faults in 1..=3 {
        let started = Instant::now();
        let fault = bench.decide(kernel::LOOP).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Overrun);
        assert!(fault.message.contains("more than 2 ms of CPU time"), "{}", fault.message);
        assert!(started.elapsed() >= Duration::from_millis(2));
        assert_eq!(bench.policy.status().recent_faults, recent_faults);
    }
    assert!(bench.policy.is_disabled());
}

/// Each call is within its limits, all of them together are not: the rest waits for the next pass, and what cannot wait
/// is refused in the end.
#[test]
fn calls_that_take_long_together_have_no_time_left_in_this_pass() {
    // 20 ms of a policy in a pass are less than one tick of these limits.
    let limits = Limits { decide_fuel: u64::MAX, call_cpu_ms_max: 10_000, ..limits() };
    let mut bench = Bench::new(chaos_with(limits, "").unwrap());
    // Who has no passes, as the simulator, waits for none.
    (0..400).for_each(|_| assert_eq!(bench.decide(kernel::THINK), Ok(Decision::Run(0))));
    assert!(!bench.policy.is_over_time());
    bench.policy.begin_pass();
    let until_over = |bench: &mut Bench| {
        (0..100_000).any(|_| bench.decide(kernel::THINK).is_err() || bench.policy.is_over_time())
            && bench.policy.is_over_time()
    };
    for _ in 0..2 {
        assert!(until_over(&mut bench));
        bench.policy.begin_pass();
        assert!(!bench.policy.is_over_time(), "each pass has its own time");
    }
    let fault = (0..100_000).find_map(|_| bench.decide(kernel::THINK).err()).unwrap();
    assert_eq!(fault.kind, FaultKind::Overrun);
    assert!(
        fault.message.contains("in one pass of the core took more than 500 ms"),
        "{}",
        fault.message
    );
    bench.policy.begin_pass();
    assert_eq!(bench.decide(kernel::GOOD), Ok(Decision::Run(0)));
}

/// A new instance is told of all clients before anybody is served.
#[test]
fn a_new_instance_is_not_told_of_clients_for_ever() {
    let limits = Limits { decide_fuel: u64::MAX, call_cpu_ms_max: 10_000, ..limits() };
    let mut bench = Bench::new(chaos_with(limits, "joined 60000000").unwrap());
    (0..100).for_each(|id| bench.join(id, Class::BestEffort).unwrap());
    bench.decide(kernel::UNREACHABLE).unwrap_err();
    let fault = bench.decide(kernel::GOOD).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Overrun, "{}", fault.message);
    assert!(fault.message.contains("took more than 500 ms"), "{}", fault.message);
    // With few of them it is.
    (3..100).for_each(|id| drop(bench.context.world.clients.remove(&id)));
    bench.policy.begin_pass();
    assert_eq!(bench.decide(kernel::GOOD), Ok(Decision::Run(0)));
}

/// Waits for the first lines of the log, as a thread does that is not scheduled: the call's clock is first read after
/// the first. Not for all 64, for waking up takes CPU time.
#[derive(Default)]
struct Waiting(std::sync::atomic::AtomicU32);

const WAITS: u32 = 3;
const WAIT: Duration = Duration::from_millis(70);

impl tracing::Subscriber for Waiting {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "policy"
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        if self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < WAITS {
            std::thread::sleep(WAIT);
        }
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_call_whose_thread_is_not_running_is_not_interrupted() {
    let mut bench = Bench::new(chaos_with(Limits::default(), "").unwrap());
    let started = Instant::now();
    let waiting = Waiting::default();
    let answer = tracing::subscriber::with_default(waiting, || bench.decide(kernel::LOG));
    assert_eq!(answer, Ok(Decision::Run(0)));
    assert!(started.elapsed() >= WAITS * WAIT);
    let status = bench.policy.status();
    assert_eq!((status.faults.total(), status.recent_faults), (0, 0));
}

#[test]
fn a_hold_until_something_changes_is_no_fault_and_the_engines_to_bound() {
    let mut bench = Bench::new(chaos());
    assert_eq!(bench.decide(kernel::HOLD_MAX), Ok(Decision::Hold(u64::MAX)));
    assert_eq!(bench.policy.status().faults.total(), 0);
}

#[test]
fn nonsense_costs_the_turn_but_not_the_instance() {
    let mut bench = Bench::new(chaos());
    assert!(bench.decide(kernel::SLICED_0).is_err());
    assert_eq!(bench.decide(kernel::DECIDES), Ok(Decision::Hold(2)));
    assert_eq!(bench.policy.status().respawns, 0);
}

#[test]
fn a_trapped_instance_is_never_called_again() {
    let mut bench = Bench::new(chaos());
    assert_eq!(bench.decide(kernel::DECIDES), Ok(Decision::Hold(1)));
    assert_eq!(bench.decide(kernel::DECIDES), Ok(Decision::Hold(2)));
    assert!(bench.decide(kernel::PANIC).is_err());
    assert_eq!(bench.decide(kernel::DECIDES), Ok(Decision::Hold(1)));
    let status = bench.policy.status();
    assert_eq!((status.respawns, status.decides, status.disabled), (1, 3, false));
    let last = status.last_fault.unwrap();
    assert_eq!((last.kind, last.at_ns), ("trap", 5_000_000_000));
}

#[test]
fn a_new_instance_is_told_of_the_clients_and_finds_the_core_as_new() {
    let mut bench = Bench::new(chaos());
    bench.join(3, Class::High).unwrap();
    bench.join(1, Class::BestEffort).unwrap();
    assert_eq!(bench.decide(kernel::JOINED), Ok(Decision::Hold(31)));
    assert!(bench.decide(kernel::UNREACHABLE).is_err());
    assert_eq!(bench.commands(), []);
    assert_eq!(bench.decide(kernel::JOINED), Ok(Decision::Hold(13)));
    assert_eq!(bench.commands(), [Command::Reset]);
}

#[test]
fn a_new_instance_is_told_of_high_priority_activity_and_open_units() {
    let mut bench = Bench::new(chaos());
    bench.join(1, Class::High).unwrap();
    bench.tell(Event::UnitBegan { client: 1, since_ns: 4, deadline_ns: 50 }).unwrap();
    let units = bench.decide(kernel::UNITS).unwrap();
    assert!(bench.decide(kernel::UNREACHABLE).is_err());
    assert_eq!(bench.decide(kernel::UNITS), Ok(units));
    assert_eq!(bench.decide(kernel::DONE), Ok(Decision::Hold(0)));
    bench.tell(Event::HighStarted).unwrap();
    bench.tell(Event::UnitsEnded { client: 1, units: 0, took_ns: 0 }).unwrap();
    assert!(bench.decide(kernel::UNREACHABLE).is_err());
    assert_ne!(bench.decide(kernel::UNITS), Ok(units));
    assert_ne!(bench.decide(kernel::DONE), Ok(Decision::Hold(0)));
}

#[test]
fn nothing_that_a_failed_call_asked_for_is_done() {
    let mut bench = Bench::new(chaos());
    bench.context.commands.push(Command::RevokeLease(99));
    assert!(bench.decide(kernel::COMMANDS_AND_TRAP).is_err());
    assert_eq!(bench.commands(), [Command::RevokeLease(99)]);
}

#[test]
fn a_client_that_joins_at_a_respawn_is_told_of_once() {
    let mut bench = Bench::new(chaos());
    bench.join(1, Class::BestEffort).unwrap();
    assert!(bench.decide(kernel::UNREACHABLE).is_err());
    bench.join(2, Class::BestEffort).unwrap();
    assert_eq!(bench.decide(kernel::JOINED), Ok(Decision::Hold(12)));
}

/// The engine tells a policy that takes over of each client in turn, whether a call fails or not.
#[test]
fn a_client_of_whom_a_new_instance_was_told_is_not_told_of_again() {
    let mut bench = Bench::new(chaos());
    for id in [1, 2, 3] {
        bench.context.world.clients.insert(id, client(id, Class::BestEffort).into());
    }
    bench.tell(Event::Joined(client(1, Class::BestEffort))).unwrap();
    assert!(bench.decide(kernel::UNREACHABLE).is_err());
    bench.tell(Event::Joined(client(2, Class::BestEffort))).unwrap();
    bench.tell(Event::Joined(client(3, Class::BestEffort))).unwrap();
    assert_eq!(bench.decide(kernel::JOINED), Ok(Decision::Hold(132)));
    bench.tell(Event::Left(3)).unwrap();
    bench.tell(Event::Joined(client(3, Class::BestEffort))).unwrap();
    assert_eq!(bench.decide(kernel::JOINED), Ok(Decision::Hold(1323)), "one that comes is");
}

#[test]
fn a_new_instance_asks_for_the_same_in_init() {
    let mut bench = Bench::new(chaos_with(limits(), "ask").unwrap());
    assert_eq!(bench.commands(), common::COMMANDS);
    assert!(bench.decide(kernel::UNREACHABLE).is_err());
    assert!(bench.decide(kernel::GOOD).is_ok());
    let commands = bench.commands();
    assert_eq!((commands[0], &commands[1..]), (Command::Reset, &common::COMMANDS[..]));
}

#[test]
fn after_too_many_faults_it_is_off() {
    let limits = Limits { faults_max: 2, ..limits() };
    for how in [kernel::UNREACHABLE, kernel::SLICED_0] {
        let mut bench = Bench::new(chaos_with(limits.clone(), "").unwrap());
        for _ in 0..2 {
            assert_ne!(bench.decide(how).unwrap_err().kind, FaultKind::Disabled);
        }
        for _ in 0..3 {
            assert_eq!(bench.decide(kernel::GOOD).unwrap_err().kind, FaultKind::Disabled);
        }
        let told = bench.tell(Event::Joined(client(1, Class::High)));
        assert_eq!(told.unwrap_err().kind, FaultKind::Disabled);
        let status = bench.policy.status();
        assert!(status.disabled);
        assert_eq!(status.faults.total(), 2);
    }
}

#[test]
fn the_context_comes_back_whole_from_every_fault() {
    for (kernel, _, _) in FAULTS {
        let mut bench = Bench::new(chaos());
        bench.join(7, Class::High).unwrap();
        let world: *const _ = &*bench.context.world;
        bench.context.commands.push(Command::RevokeLease(99));
        let _ = bench.decide(kernel);
        assert!(std::ptr::eq(world, &*bench.context.world));
        assert_eq!(bench.context.world.clients.len(), 1);
        assert_eq!(bench.commands(), [Command::RevokeLease(99)]);
    }
}

#[test]
fn init_may_fail_in_every_way_and_refuses_the_load() {
    for (how, message) in [
        ("1", "Trap"),
        ("2", "Overrun: used more than 50000000 units"),
        ("4", "out of ideas"),
        ("7", "out of bounds"),
        ("9", "Overrun: passed more than 65536 bytes"),
    ] {
        let error = chaos_with(limits(), how).err().unwrap();
        assert!(matches!(error, LoadError::InitFailed { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("chaos.wasm") && text.contains(message), "{text}");
    }
    let generous = Limits { init_fuel: 1 << 40, ..limits() };
    let error = chaos_with(generous, "3").err().unwrap().to_string();
    assert!(error.contains("Memory: wanted"), "{error}");
    let error = chaos_with(limits(), "refuse").err().unwrap().to_string();
    assert!(error.contains("chaos.wasm: refuses its configuration: no, thank you"), "{error}");
}

#[test]
fn a_thoughtful_init_is_allowed_again_at_a_respawn() {
    let mut bench = Bench::new(chaos_with(limits(), "think").unwrap());
    assert!(bench.decide(kernel::PANIC).is_err());
    assert_eq!(bench.decide(kernel::GOOD), Ok(Decision::Run(0)));
}

#[test]
fn the_other_policies_are_not_touched() {
    let host = common::host(limits());
    let file = common::guest("test-policies", "chaos");
    let mut bad = Bench::new(host.load_file(&file, "").unwrap());
    let mut good = Bench::new(host.load_file(&file, "").unwrap());
    for turn in 1..50 {
        let _ = bad.decide(kernel::PANIC);
        assert_eq!(good.decide(kernel::DECIDES), Ok(Decision::Hold(turn)));
    }
    drop(host);
    // The host may go before its policies; time stays bounded.
    assert!(good.policy.decide(&common::launch(kernel::LOOP), &mut good.context).is_err());
}
