//! What a policy knows goes from one instance to the next, or not, and never stands in
//! the way of the next.

mod common;

use common::{Bench, chaos_with, client, guest, host, kernel, launch, limits, policy};
use std::time::Instant;
use tally_contract::limits::{SAVED_BYTES_MAX, SAVED_FORMAT_BYTES_MAX};
use tally_engine::policy::{Class, Command, Decision, Event, FaultKind, Policy};
use tally_wasm_host::{Compiled, Limits, Restored, Saved, WasmPolicy};

fn compiled() -> Compiled {
    host(limits()).compile_file(&guest("test-policies", "chaos")).unwrap()
}

fn saved(decides: u64) -> Saved {
    Saved { format: "chaos".into(), version: 1, data: decides.to_le_bytes().into() }
}

fn snapshot(policy: &mut WasmPolicy) -> Saved {
    policy.snapshot().expect("it keeps state").unwrap()
}

#[test]
fn the_next_instance_goes_on_where_the_last_one_was() {
    let compiled = compiled();
    assert!(compiled.keeps_state());
    let mut old = Bench::new(compiled.start("", None).unwrap());
    assert_eq!(*old.policy.restored(), Restored::NotOffered);
    for _ in 0..5 {
        old.decide(kernel::GOOD).unwrap();
    }
    let saved = snapshot(&mut old.policy);
    assert_eq!((saved.format.as_str(), saved.version, saved.data.len()), ("chaos", 1, 8));
    // It serves on while the next one starts.
    assert_eq!(old.decide(kernel::DECIDES), Ok(Decision::Hold(6)));
    let mut new = Bench::new(compiled.start("", Some(&saved)).unwrap());
    assert_eq!(new.policy.status().restored, Restored::Accepted);
    assert_eq!(new.decide(kernel::DECIDES), Ok(Decision::Hold(6)));
}

#[test]
fn what_is_asked_for_meanwhile_reaches_the_core_only_from_the_new_one() {
    let mut old = Bench::new(compiled().start("", None).unwrap());
    let saved = snapshot(&mut old.policy);
    old.decide(kernel::GOOD).unwrap();
    assert_eq!(old.commands(), [], "a policy on its way out sets no timers");
    let mut new = Bench::new(compiled().start("", Some(&saved)).unwrap());
    assert_eq!(new.commands(), [Command::SetTimer { delay_ns: 1_000, token: 43 }]);
}

#[test]
fn a_state_that_is_refused_does_not_stop_the_load() {
    let foreign = Saved { format: "fifo".into(), ..saved(9) };
    let mut bench = Bench::new(compiled().start("", Some(&foreign)).unwrap());
    let Restored::Refused(why) = bench.policy.restored().clone() else { panic!("not refused") };
    assert!(why.contains("\"fifo\"") && why.contains("\"chaos\""), "{why}");
    assert_eq!(bench.decide(kernel::DECIDES), Ok(Decision::Hold(1)));
    let short = Saved { data: vec![1], ..saved(9) };
    let refused = compiled().start("", Some(&short)).unwrap();
    assert_eq!(*refused.restored(), Restored::Refused("expected 8 bytes".into()));
}

#[test]
fn a_restore_that_fails_is_started_anew_without() {
    for (how, kind) in [("restore-1", "Trap"), ("restore-2", "Overrun"), ("restore-4", "Trap")] {
        let mut bench = Bench::new(compiled().start(how, Some(&saved(9))).unwrap());
        let Restored::Failed(why) = bench.policy.restored().clone() else { panic!("{how}") };
        assert!(why.starts_with(kind), "{why}");
        assert_eq!(bench.decide(kernel::DECIDES), Ok(Decision::Hold(1)), "a new instance");
        assert_eq!(bench.policy.status().faults.total(), 0, "it never was active");
    }
    let generous = Limits { init_fuel: 1 << 40, ..limits() };
    let hoard = host(generous).compile_file(&guest("test-policies", "chaos")).unwrap();
    let hoard = hoard.start("restore-3", Some(&saved(9))).unwrap();
    assert!(matches!(hoard.restored(), Restored::Failed(why) if why.starts_with("Memory")));
}

#[test]
fn a_snapshot_that_fails_is_a_fault_like_any_other() {
    for (how, kind) in [
        ("snapshot-1", FaultKind::Trap),
        ("snapshot-2", FaultKind::Overrun),
        ("snapshot-4", FaultKind::Trap),
        ("snapshot-9", FaultKind::Overrun),
        ("snapshot-101", FaultKind::Overrun),
        ("snapshot-102", FaultKind::Overrun),
        ("snapshot-104", FaultKind::Overrun),
    ] {
        let mut bench = Bench::new(chaos_with(limits(), how).unwrap());
        bench.join(4, Class::High).unwrap();
        let fault = bench.policy.snapshot().unwrap().unwrap_err();
        assert_eq!(fault.kind, kind, "{how}: {}", fault.message);
        assert_eq!(bench.policy.status().faults.total(), 1);
        assert!(bench.policy.snapshot().is_none(), "there is no instance to ask");
        assert_eq!(bench.decide(kernel::JOINED), Ok(Decision::Hold(4)), "{how}: a new one");
    }
}

#[test]
fn an_onlooker_costs_a_policy_no_fault_and_at_most_one_instance() {
    for how in ["snapshot-1", "snapshot-2", "snapshot-101"] {
        let mut bench = Bench::new(chaos_with(limits(), how).unwrap());
        bench.join(4, Class::High).unwrap();
        for _ in 0..20 {
            assert_eq!(bench.policy.observe(), None, "{how}");
            assert_eq!(bench.decide(kernel::JOINED), Ok(Decision::Hold(4)), "{how}");
        }
        let status = bench.policy.status();
        assert_eq!(
            (status.faults.total(), status.recent_faults, status.respawns),
            (1, 0, 1),
            "{how}"
        );
        assert!(status.last_fault.is_some());
        // Whoever replaces it may ask.
        bench.policy.snapshot().unwrap().unwrap_err();
        assert_eq!(bench.policy.status().recent_faults, 1, "{how}");
    }
    let mut fine = Bench::new(chaos_with(limits(), "").unwrap());
    assert_eq!(fine.policy.observe(), Some(saved(0)));
}

#[test]
fn what_an_onlooker_sees_keeps_no_fault_from_being_forgotten() {
    let limits = Limits { faults_max: 3, faults_forgotten_after_s: 600, ..limits() };
    let mut bench = Bench::new(chaos_with(limits, "snapshot-1").unwrap());
    let decide_at = |bench: &mut Bench, s: u64, kernel| {
        let mut asked = launch(kernel);
        asked.now_ns = s * 1_000_000_000;
        bench.policy.decide(&asked, &mut bench.context)
    };
    decide_at(&mut bench, 1, kernel::UNREACHABLE).unwrap_err();
    decide_at(&mut bench, 1, kernel::UNREACHABLE).unwrap_err();
    decide_at(&mut bench, 599, kernel::GOOD).unwrap();
    assert_eq!(bench.policy.observe(), None);
    decide_at(&mut bench, 700, kernel::UNREACHABLE).unwrap_err();
    assert_eq!(bench.policy.status().recent_faults, 1);
    decide_at(&mut bench, 700, kernel::GOOD).unwrap();
}

#[test]
fn the_bound_on_what_is_kept_is_exact_and_of_the_snapshot_only() {
    let mut full = chaos_with(limits(), "snapshot-100").unwrap();
    assert_eq!(snapshot(&mut full).data.len(), SAVED_BYTES_MAX);
    let mut over = chaos_with(limits(), "snapshot-101").unwrap();
    let fault = over.snapshot().unwrap().unwrap_err();
    assert!(fault.message.contains("may give 262144"), "{}", fault.message);
    let mut named = chaos_with(limits(), "snapshot-103").unwrap();
    assert_eq!(snapshot(&mut named).format.len(), SAVED_FORMAT_BYTES_MAX);
    let mut over = chaos_with(limits(), "snapshot-104").unwrap();
    let fault = over.snapshot().unwrap().unwrap_err();
    assert!(fault.message.contains("a format of 257 bytes"), "{}", fault.message);
    // What a call may pass to the core is as before.
    let mut bench = Bench::new(full);
    let fault = bench.decide(kernel::LONG_LINE).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Overrun, "{}", fault.message);
}

#[test]
fn a_policy_without_state_is_offered_one_in_vain() {
    let fifo = host(limits()).compile_file(&guest("policies", "fifo")).unwrap();
    assert!(!fifo.keeps_state());
    let mut policy = fifo.start("", Some(&saved(1))).unwrap();
    assert_eq!(*policy.restored(), Restored::NoInterface);
    assert!(policy.snapshot().is_none());
}

#[test]
fn compiling_the_same_bytes_again_is_a_look_up() {
    let (host, file) = (host(limits()), guest("policies", "tally-priority"));
    let first = host.compile_file(&file).unwrap();
    let started = Instant::now();
    let again = host.compile_bytes("again", &std::fs::read(&file).unwrap()).unwrap();
    let again_took = started.elapsed();
    assert_eq!((first.digest(), again.name()), (again.digest(), "again"));
    assert!(first.compile_ms() > again.compile_ms(), "{again_took:?}");
    // The file may go: what was compiled stays.
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy.wasm");
    std::fs::copy(&file, &copy).unwrap();
    let copied = host.compile_file(&copy).unwrap();
    std::fs::remove_file(&copy).unwrap();
    assert!(copied.start("idle_gap_us = 5", None).is_ok());
    assert!(copied.start("quiet_ms = 5", None).err().unwrap().to_string().contains("copy.wasm"));
}

#[test]
fn imports_are_the_interfaces_that_a_policy_calls() {
    let host = host(limits());
    let imports = |name| host.compile_file(&guest("policies", name)).unwrap().imports();
    let priority = imports("tally-priority");
    let expected =
        ["clients", "control", "kernels", "log", "metrics", "reasons", "sharing", "timers"];
    assert_eq!(priority.iter().map(String::as_str).collect::<Vec<_>>(), expected);
}

#[test]
fn tally_priority_keeps_its_table() {
    let mut old = Bench::new(policy("tally-priority", ""));
    for id in 0..6_000 {
        let mut asked = launch(id);
        (asked.predicted_ns, asked.high_clients) = (2_000_000, 1);
        asked.offered = tally_engine::policy::forms_offered::PREEMPTIBLE;
        old.policy.decide(&asked, &mut old.context).unwrap();
    }
    let known = |policy: &WasmPolicy| policy.status().gauges["kernels_known"];
    assert_eq!(known(&old.policy), 4_096);
    let started = Instant::now();
    let saved = snapshot(&mut old.policy);
    println!("a full table: {} bytes in {:?}", saved.data.len(), started.elapsed());
    assert_eq!(saved.format, "tally-forms");
    let compiled = host(limits()).compile_file(&guest("policies", "tally-priority")).unwrap();
    let new = compiled.start("", Some(&saved)).unwrap();
    assert_eq!(*new.restored(), Restored::Accepted);
    assert_eq!(known(&new), 1_024, "those launched last");
    let damaged = Saved { data: saved.data[..saved.data.len() - 1].into(), ..saved };
    let fresh = compiled.start("", Some(&damaged)).unwrap();
    assert!(matches!(fresh.restored(), Restored::Refused(why) if why.contains("the end")));
}

#[test]
fn faults_are_forgotten_after_a_while() {
    let limits = Limits { faults_max: 2, faults_forgotten_after_s: 10, ..limits() };
    let mut bench = Bench::new(chaos_with(limits, "").unwrap());
    let mut fault_at = |s: u64| {
        let mut asked = launch(kernel::UNREACHABLE);
        asked.now_ns = s * 1_000_000_000;
        let kind = bench.policy.decide(&asked, &mut bench.context).unwrap_err().kind;
        (kind, bench.policy.status().recent_faults)
    };
    assert_eq!(fault_at(100), (FaultKind::Trap, 1));
    assert_eq!(fault_at(110), (FaultKind::Trap, 1));
    assert_eq!(fault_at(119), (FaultKind::Trap, 2));
    assert_eq!(fault_at(200).0, FaultKind::Disabled, "what is off stays off");
    assert_eq!(bench.policy.status().faults.trap, 3);
}

#[test]
fn what_the_engine_finds_fault_with_counts_too() {
    let limits = Limits { faults_max: 1, ..limits() };
    let mut bench = Bench::new(chaos_with(limits, "").unwrap());
    let fault = tally_engine::policy::Fault { kind: FaultKind::Stall, message: "held".into() };
    bench.policy.count_fault(7, &fault);
    let status = bench.policy.status();
    assert_eq!((status.faults.stall, status.disabled), (1, true));
    assert_eq!(status.last_fault.unwrap().kind, "stall");
    assert_eq!(bench.decide(kernel::GOOD).unwrap_err().kind, FaultKind::Disabled);
    let told = bench.tell(Event::Joined(client(1, Class::High)));
    assert_eq!(told.unwrap_err().kind, FaultKind::Disabled);
}
