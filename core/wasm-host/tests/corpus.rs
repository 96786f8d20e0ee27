//! Components built against an older contract load and decide unchanged, as the
//! contract promises. `tests/policies/corpus` keeps one of each; they are never built
//! again.

mod common;

use common::{Bench, host, kernel, launch, limits};
use std::path::PathBuf;
use tally_engine::policy::{Class, Decision, FaultKind, Policy};
use tally_wasm_host::{Compiled, Restored, Saved};

fn old(name: &str) -> Compiled {
    let folder =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/policies/corpus/0.1.0");
    let file = folder.join(name).with_extension("wasm");
    let bytes = std::fs::read(&file).unwrap();
    let says = |version: &str| {
        let name = format!("tally:policy/scheduler@{version}");
        bytes.windows(name.len()).any(|at| at == name.as_bytes())
    };
    assert!(says("0.1.0") && !says("0.1.1"), "{} is of another contract", file.display());
    host(limits()).compile_file(&file).unwrap()
}

#[test]
fn fifo_of_0_1_0_runs_everything() {
    let mut bench = Bench::new(old("fifo").start("", None).unwrap());
    assert!(matches!(bench.decide(1), Ok(Decision::Run(_))));
}

#[test]
fn tally_priority_of_0_1_0_holds_and_runs() {
    let mut bench = Bench::new(old("tally-priority").start("quiet_us = 50", None).unwrap());
    bench.join(1, Class::BestEffort).unwrap();
    bench.join(2, Class::High).unwrap();
    assert!(!bench.commands().is_empty(), "it sets windows");
    let mut asked = launch(1);
    (asked.high_clients, asked.high_quiet_ns) = (1, 20_000);
    assert_eq!(bench.policy.decide(&asked, &mut bench.context), Ok(Decision::Hold(30_000)));
    asked.high_quiet_ns = 50_000;
    assert_eq!(bench.policy.decide(&asked, &mut bench.context), Ok(Decision::Run(0)));
}

#[test]
fn chaos_of_0_1_0_is_contained() {
    let mut bench = Bench::new(old("chaos").start("", None).unwrap());
    assert_eq!(bench.decide(kernel::LOOP).unwrap_err().kind, FaultKind::Overrun);
    let fault = bench.decide(kernel::DIVE).unwrap_err();
    assert!(fault.kind == FaultKind::Trap && fault.message.contains("chaos::dive"), "{fault}");
    assert_eq!(bench.decide(kernel::GOOD), Ok(Decision::Run(0)));
}

#[test]
fn a_policy_of_0_1_0_keeps_no_state_and_is_none_the_worse() {
    let chaos = old("chaos");
    assert!(!chaos.keeps_state());
    let saved = Saved { format: "chaos".into(), version: 1, data: vec![0; 8] };
    let mut policy = chaos.start("", Some(&saved)).unwrap();
    assert_eq!(*policy.restored(), Restored::NoInterface);
    assert!(policy.snapshot().is_none());
}
