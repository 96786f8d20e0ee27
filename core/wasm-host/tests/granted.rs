//! What a policy has not been granted it does not see, and cannot do.

mod common;

use common::{Bench, bare_host, client, guest, kernel, launch, limits};
use tally_engine::policy::{Class, Decision, Fault, FaultKind, Launch, Policy};
use tally_engine::profile::KernelKey;
use tally_wasm_host::{Capabilities, Capability, LoadError, WasmPolicy};

fn load(granted: Capabilities, config: &str) -> Result<WasmPolicy, LoadError> {
    let host = bare_host(limits()).granting(granted);
    host.load_file(&guest("test-policies", "chaos"), config)
}

fn chaos(granted: Capabilities) -> Bench {
    Bench::new(load(granted, "").unwrap())
}

fn names_function_and_capability(fault: &Fault) {
    for part in ["`set-standing-grant`", "`high-priority`", "[policy]", "capabilities = "] {
        assert!(fault.message.contains(part), "{part:?} is not in: {}", fault.message);
    }
}

#[test]
fn a_host_grants_nothing_unasked() {
    let host = bare_host(limits());
    let policy = host.load_file(&guest("test-policies", "chaos"), "").unwrap();
    let status = policy.status();
    assert_eq!(status.granted, [""; 0]);
    assert_eq!(status.needs, ["high-priority"]);
}

/// With the defaults, `tally-core --policy tally-priority.wasm` must do.
#[test]
fn the_shipped_policies_need_nothing_granted() {
    let host = bare_host(limits());
    for name in ["fifo", "tally-priority"] {
        let status = host.load_file(&guest("policies", name), "").unwrap().status();
        assert_eq!(status.needs, [""; 0], "{name}");
    }
}

#[test]
fn names_are_seen_only_if_granted() {
    let (measured, names) = (10_000 + 600_000, ("client-1".len() as u64, "gemm".len() as u64));
    for (granted, seen) in [
        (Capabilities::NONE, 0),
        (Capability::ClientIdentity.into(), names.0 + 100),
        (Capability::KernelIdentity.into(), names.1 * 1_000),
        (Capability::HighPriority.into(), 0),
        (Capabilities::all(), names.0 + 100 + names.1 * 1_000),
    ] {
        let mut bench = chaos(granted);
        let key = KernelKey { name: "gemm".into(), image: 5, grid: [6, 1, 1], block: [32, 1, 1] };
        let id = bench.context.world.profiles.intern(&key).unwrap();
        bench.context.world.profiles.record(id, 1_234);
        let mut info = client(1, Class::BestEffort);
        info.labels.push(("slo".into(), "5ms".into()));
        bench.context.world.clients.insert(1, info);
        let answer = bench.decide(kernel::DESCRIBED);
        assert_eq!(answer, Ok(Decision::Hold(measured + seen)), "{granted:?}");
    }
}

#[test]
fn a_call_that_is_not_granted_is_a_fault_that_names_both() {
    let mut bench = chaos(Capability::ClientIdentity.into());
    let fault = bench.decide(kernel::COMMANDS).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Denied);
    names_function_and_capability(&fault);
    let asked = bench.commands();
    assert!(!asked.iter().any(|c| format!("{c:?}").contains("Grant")), "{asked:?}");
    let status = bench.policy.status();
    assert_eq!((status.faults.denied, status.faults.total()), (1, 1));
    assert_eq!(status.last_fault.map(|last| last.kind), Some("denied"));
    // It goes on with a new instance, until it has had its three.
    assert_eq!(bench.decide(kernel::GOOD), Ok(Decision::Run(0)));
    for _ in 0..2 {
        assert_eq!(bench.decide(kernel::COMMANDS).unwrap_err().kind, FaultKind::Denied);
    }
    assert_eq!(bench.decide(kernel::GOOD).unwrap_err().kind, FaultKind::Disabled);
}

#[test]
fn a_call_that_is_not_granted_refuses_the_load_if_init_makes_it() {
    let error = load(Capabilities::NONE, "ask").err().unwrap();
    let LoadError::InitFailed { file, fault } = error else { panic!("{error}") };
    assert!(file.ends_with("chaos.wasm"));
    assert_eq!(fault.kind, FaultKind::Denied);
    names_function_and_capability(&fault);
    assert!(load(Capability::HighPriority.into(), "ask").is_ok());
}

#[test]
fn high_priority_launches_run_unless_a_say_over_them_was_granted() {
    let high = |kernel| Launch { class: Class::High, ..launch(kernel) };
    let changes = [kernel::HOLD_MAX, kernel::SLICE_7, kernel::PARTITION_8, kernel::PREEMPTIBLE];
    for change in changes {
        let mut bench = chaos(Capabilities::NONE);
        assert_eq!(
            bench.policy.decide(&high(kernel::GOOD), &mut bench.context),
            Ok(Decision::Run(0))
        );
        let fault = bench.policy.decide(&high(change), &mut bench.context).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Nonsense);
        assert!(fault.message.contains("high-priority"), "{}", fault.message);
        // Of best effort it is an answer like any other.
        assert!(bench.decide(change).is_ok());
        let mut bench = chaos(Capability::HighPriority.into());
        assert!(bench.policy.decide(&high(change), &mut bench.context).is_ok());
    }
}
