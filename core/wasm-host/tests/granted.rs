//! What a policy has not been granted it cannot import, and so neither see nor do.

mod common;

use common::{Bench, bare_host, client, guest, kernel, launch, limits};
use tally_engine::policy::{Class, Command, Decision, FaultKind, Launch};
use tally_engine::profile::KernelKey;
use tally_wasm_host::{Capabilities, Capability, LoadError, WasmPolicy};

fn load(granted: Capabilities, name: &str, config: &str) -> Result<WasmPolicy, LoadError> {
    bare_host(limits()).granting(granted).load_file(&guest("test-policies", name), config)
}

fn nosy(config: &str) -> Bench {
    Bench::new(load(Capabilities::all(), "nosy", config).unwrap())
}

/// What `nosy` does on which kernel.
const UNGATE: u32 = 1;
const NAMES: u32 = 2;

#[test]
fn what_is_imported_and_not_granted_refuses_the_load_and_is_named() {
    let error = load(Capabilities::NONE, "nosy", "").err().unwrap();
    assert!(matches!(error, LoadError::NotGranted { .. }), "{error}");
    let message = error.to_string();
    for part in [
        "nosy.wasm: needs the capabilities `identity`, `kernel-identity`, `high-priority`",
        "capabilities = [\"identity\", \"kernel-identity\", \"high-priority\"]",
        "`[policy]`",
    ] {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
    for missing in Capability::ALL {
        let granted = Capabilities::all().without(missing.into());
        let message = load(granted, "nosy", "").err().unwrap().to_string();
        assert!(message.contains(&format!("needs the capability `{missing}`,")), "{message}");
    }
    let status = load(Capabilities::all(), "nosy", "").unwrap().status();
    assert_eq!(status.needs, status.granted);
    assert_eq!(status.needs.len(), 3);
}

/// With the defaults, `tally-core --policy tally-priority.wasm` must do.
#[test]
fn the_shipped_policies_need_nothing_granted() {
    let host = bare_host(limits());
    for (name, subscriptions) in
        [("fifo", &["membership"][..]), ("tally-priority", &["membership", "timer", "clients"])]
    {
        let status = host.load_file(&guest("policies", name), "").unwrap().status();
        assert_eq!(status.needs, [""; 0], "{name}");
        assert_eq!(status.granted, [""; 0], "{name}");
        assert_eq!(status.subscriptions, subscriptions, "{name}");
    }
}

#[test]
fn names_are_seen_by_who_was_granted_them() {
    let mut bench = nosy("");
    assert_eq!(bench.decide(NAMES), Ok(Decision::Hold(0)), "nobody is there");
    let key = KernelKey { name: "gemm".into(), image: 5, grid: [6, 1, 1], block: [32, 1, 1] };
    bench.context.world.profiles.intern(&key).unwrap();
    let mut info = client(1, Class::BestEffort);
    info.labels.push(("slo".into(), "5ms".into()));
    bench.context.world.clients.insert(1, info.into());
    let seen = "client-1".len() + 100 + 1_000 * "gemm".len() + 5;
    assert_eq!(bench.decide(NAMES), Ok(Decision::Hold(seen as u64)));
}

#[test]
fn who_has_a_say_over_high_priority_gates_clients_and_decides_their_launches() {
    let mut bench = nosy("ungate");
    let gated = Command::SetUngated { client: 3, ungated: false };
    assert_eq!(bench.commands(), [gated], "in `init`");
    bench.decide(UNGATE).unwrap();
    assert_eq!(bench.commands(), [gated]);
    for (kernel, decision) in [
        (3, Decision::Hold(1)),
        (4, Decision::Sliced(7)),
        (5, Decision::SmLimited(8)),
        (6, Decision::Preemptible),
    ] {
        let high = Launch { class: Class::High, ..launch(kernel) };
        assert_eq!(bench.ask(&high), Ok(decision));
    }
}

#[test]
fn high_priority_launches_run_whatever_anybody_else_answers() {
    let high = |kernel| Launch { class: Class::High, ..launch(kernel) };
    let changes = [kernel::HOLD_MAX, kernel::SLICED_7, kernel::SM_LIMITED_8, kernel::PREEMPTIBLE];
    for change in changes {
        // Granted or not: it does not import it.
        for granted in [Capabilities::NONE, Capabilities::all()] {
            let mut bench = Bench::new(load(granted, "chaos", "").unwrap());
            assert_eq!(bench.ask(&high(kernel::GOOD)), Ok(Decision::Run(0)));
            let fault = bench.ask(&high(change)).unwrap_err();
            assert_eq!(fault.kind, FaultKind::Nonsense);
            assert!(fault.message.contains("high-priority"), "{}", fault.message);
            // Of best effort it is an answer like any other.
            assert!(bench.decide(change).is_ok());
        }
    }
}
