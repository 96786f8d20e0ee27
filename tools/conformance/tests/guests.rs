//! The suite on components: the policies that ship pass, and `chaos` fails each check
//! for what it did, by name.

use std::path::PathBuf;
use tally_conformance::{Capabilities, Options, Outcome, Report, Wasm, check_loaded};
use tally_wasm_host::{Compiler, Limits};

/// A guest built by `cargo xtask policies`. Never skips.
fn guest(folder: &str, name: &str) -> PathBuf {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let target = target.parent().expect("the target folder");
    let file = target.join("release").join(folder).join(name).with_extension("wasm");
    assert!(file.is_file(), "{} is missing: run `cargo xtask policies` first", file.display());
    file
}

fn report(folder: &str, name: &str, config: &str) -> Report {
    report_with(&Limits::default(), Capabilities::default(), folder, name, config)
}

fn report_with(
    limits: &Limits,
    granted: Capabilities,
    folder: &str,
    name: &str,
    config: &str,
) -> Report {
    let subject =
        Wasm::open(Compiler::in_process(), &guest(folder, name), config, limits, granted).unwrap();
    check_loaded(&subject, &Options { streams: 24, ..Options::default() })
}

/// With every capability: what it misbehaves in is not that it lacks one.
fn chaos(config: &str) -> Report {
    report_with(&Limits::default(), Capabilities::all(), "test-policies", "chaos", config)
}

#[track_caller]
fn passes(report: &Report) {
    assert!(report.passed(), "{report:#?}");
    assert_eq!(report.names(Outcome::Warn), [""; 0], "{report:#?}");
    assert!(report.checks.len() >= 8, "{report:#?}");
    assert!(report.decide_fuel.max > 0 && report.memory_bytes > 0, "{report:#?}");
}

/// It fails these, and nothing else but what these keep from being looked at.
#[track_caller]
fn fails(report: &Report, names: &[&str]) {
    assert_eq!(report.names(Outcome::Fail), names, "{report:#?}");
    assert!(!report.passed());
    let advised = report.checks.iter().filter(|c| c.outcome == Outcome::Fail);
    assert!(advised.clone().all(|c| !c.advice.is_empty() && !c.detail.is_empty()));
}

#[test]
fn fifo_passes() {
    passes(&report("policies", "fifo", ""));
}

#[test]
fn tally_priority_passes() {
    passes(&report("policies", "tally-priority", ""));
}

#[test]
fn slo_herald_passes() {
    passes(&report("policies", "slo-herald", ""));
}

#[test]
fn detshares_policies_pass() {
    for name in ["throughput", "tpot-first"] {
        passes(&report("policies", name, ""));
    }
}

fn judged(name: &str, fair: bool, objectives: bool) -> Report {
    let (limits, granted) = (Limits::default(), Capabilities::default());
    let file = guest("policies", name);
    let subject = Wasm::open(Compiler::in_process(), &file, "", &limits, granted).unwrap();
    let options = Options { streams: 4, steady_calls: 500, fair, objectives, ..Options::default() };
    check_loaded(&subject, &options)
}

fn fair(name: &str) -> Report {
    judged(name, true, false)
}

#[test]
fn policies_that_know_of_objectives_keep_them_and_one_that_does_not_fails_if_asked_to() {
    for name in ["tally-priority", "slo-herald"] {
        let report = judged(name, false, true);
        passes(&report);
        let check = report.checks.iter().find(|c| c.name == "objectives").unwrap();
        assert_eq!(check.outcome, Outcome::Pass, "{check:?}");
    }
    fails(&judged("fifo", false, true), &["objectives"]);
}

#[test]
fn policies_that_know_of_weights_are_fair_by_them() {
    for name in ["tally-priority", "slo-herald", "throughput", "tpot-first"] {
        let report = fair(name);
        passes(&report);
        let check = report.checks.iter().find(|c| c.name == "fair-by-weight").unwrap();
        assert_eq!(check.outcome, Outcome::Pass, "{check:?}");
    }
}

#[test]
fn one_that_does_not_is_told_so_and_fails_only_if_asked_to() {
    assert_eq!(
        report("policies", "fifo", "").names(Outcome::Info),
        ["fair-by-weight", "objectives"]
    );
    fails(&fair("fifo"), &["fair-by-weight"]);
}

#[test]
fn a_file_that_is_no_policy_fails_to_load() {
    let subject = Wasm::of_bytes(
        Compiler::in_process(),
        "x.wasm",
        b"hello",
        "",
        &Limits::default(),
        Capabilities::default(),
    );
    let subject = subject.unwrap();
    let report = check_loaded(&subject, &Options::default());
    fails(&report, &["loads"]);
    assert_eq!(report.checks.len(), 1);
    assert!(report.checks[0].detail.contains("x.wasm"), "{report:#?}");
}

#[test]
fn a_refused_configuration_is_a_failure_to_load() {
    let report = chaos("refuse");
    fails(&report, &["loads"]);
    assert!(report.checks[0].detail.contains("no, thank you"), "{report:#?}");
}

#[test]
fn traps_panics_and_wild_accesses_fail_no_trap() {
    for how in [1, 4, 5, 6, 7] {
        fails(&chaos(&format!("always {how}")), &["no-trap"]);
    }
}

#[test]
fn endless_work_fails_fuel() {
    for how in [2, 8] {
        fails(&chaos(&format!("always {how}")), &["fuel"]);
    }
}

#[test]
fn much_work_warns() {
    let report = chaos("always 42");
    assert!(report.passed(), "{report:#?}");
    assert_eq!(report.names(Outcome::Warn), ["fuel"], "{report:#?}");
}

#[test]
fn hoarding_fails_memory() {
    // It writes to what it hoards, for which the usual fuel ends first.
    let limits = Limits { decide_fuel: 1_000_000_000, memory_bytes: 4 << 20, ..Limits::default() };
    let granted = Capabilities::default();
    fails(&report_with(&limits, granted, "test-policies", "chaos", "always 3"), &["memory"]);
}

#[test]
fn a_slow_leak_fails_memory() {
    let report = chaos("always 40");
    fails(&report, &["memory"]);
    let memory = report.checks.iter().find(|c| c.name == "memory").unwrap();
    assert!(memory.detail.contains("KiB after each") || memory.detail.contains("wanted"));
}

#[test]
fn nonsense_fails_sane_answers() {
    for how in [11, 12] {
        fails(&chaos(&format!("always {how}")), &["sane-answers"]);
    }
    // Two thousand timers in one call.
    fails(&chaos("always 43"), &["sane-answers"]);
}

#[test]
fn odd_answers_warn() {
    // Slices for launches that cannot be sliced; a client that is not there.
    for how in [13, 41] {
        let report = chaos(&format!("always {how}"));
        assert!(report.passed(), "{report:#?}");
        assert_eq!(report.names(Outcome::Warn), ["sane-answers"], "{report:#?}");
    }
}

#[test]
fn holding_for_ever_fails_no_starvation_and_warns_of_high_priority() {
    let (limits, granted) = (Limits::default(), Capabilities::all());
    let report = report_with(&limits, granted, "test-policies", "nosy", "hold");
    fails(&report, &["no-starvation"]);
    assert_eq!(report.names(Outcome::Warn), ["high-priority"]);
}

#[test]
fn what_was_not_granted_fails_to_load() {
    let report = report("test-policies", "nosy", "");
    fails(&report, &["loads"]);
    assert!(report.checks[0].detail.contains("`high-priority`"), "{report:#?}");
}

#[test]
fn without_a_say_over_high_priority_it_is_not_asked() {
    let report = report("test-policies", "chaos", "always 10");
    fails(&report, &["no-starvation"]);
    assert_eq!(report.names(Outcome::Warn), [""; 0]);
}

#[test]
fn every_misbehaviour_at_once_is_told_apart() {
    // By kernel id and timer token: whatever the streams happen to launch.
    let report = chaos("");
    let failed = report.names(Outcome::Fail);
    for name in ["no-trap", "fuel", "sane-answers"] {
        assert!(failed.contains(&name), "{name}: {report:#?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_report() {
    let one = serde_json::to_string(&report("policies", "tally-priority", "")).unwrap();
    let other = serde_json::to_string(&report("policies", "tally-priority", "")).unwrap();
    assert_eq!(one, other);
}
