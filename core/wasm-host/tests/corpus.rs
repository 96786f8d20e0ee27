//! Components built against an earlier state of the contract load and decide unchanged, as the
//! contract promises. `tests/policies/corpus` keeps one of each; they are never built
//! again.

mod common;

use common::{Bench, host, kernel, launch, limits};
use std::path::PathBuf;
use tally_engine::policy::{Class, Decision, FaultKind};
use tally_wasm_host::{Compiled, Restored, Saved};

fn released(name: &str) -> Compiled {
    let folder =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/policies/corpus/0.1.0");
    let file = folder.join(name).with_extension("wasm");
    let bytes = std::fs::read(&file).unwrap();
    let scheduler = b"tally:policy/scheduler@0.1.0";
    let says = bytes.windows(scheduler.len()).any(|at| at == scheduler);
    assert!(says, "{} is of another contract", file.display());
    host(limits()).compile_file(&file).unwrap()
}

#[test]
fn fifo_of_0_1_0_runs_everything() {
    let mut bench = Bench::new(released("fifo").start("", None).unwrap());
    assert!(matches!(bench.decide(1), Ok(Decision::Run(_))));
}

#[test]
fn tally_priority_of_0_1_0_holds_and_runs() {
    let config = "idle_gap_us = 50";
    let mut bench = Bench::new(released("tally-priority").start(config, None).unwrap());
    bench.join(1, Class::BestEffort).unwrap();
    bench.join(2, Class::High).unwrap();
    assert!(!bench.commands().is_empty(), "it sets windows");
    let mut asked = launch(1);
    (asked.high_clients, asked.high_idle_ns) = (1, 20_000);
    assert_eq!(bench.ask(&asked), Ok(Decision::Hold(30_000)));
    asked.high_idle_ns = 50_000;
    assert_eq!(bench.ask(&asked), Ok(Decision::Run(0)));
}

#[test]
fn chaos_of_0_1_0_is_contained_and_keeps_its_state() {
    let chaos = released("chaos");
    let saved = Saved { format: "chaos".into(), version: 1, data: 7_u64.to_le_bytes().into() };
    let policy = chaos.start("", Some(&saved)).unwrap();
    assert_eq!(*policy.restored(), Restored::Accepted);
    let mut bench = Bench::new(policy);
    assert_eq!(bench.decide(kernel::DECIDES), Ok(Decision::Hold(8)));
    assert_eq!(bench.decide(kernel::LOOP).unwrap_err().kind, FaultKind::Overrun);
    let fault = bench.decide(kernel::DIVE).unwrap_err();
    assert!(fault.kind == FaultKind::Trap && fault.message.contains("chaos::dive"), "{fault}");
    assert_eq!(bench.decide(kernel::GOOD), Ok(Decision::Run(0)));
}
