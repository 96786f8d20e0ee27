use super::*;
use tally_admin::{Class, Identity, Report, Why};

fn shown(status: &Status, paint: Paint) -> String {
    let mut out = Vec::new();
    whole(&mut out, status, paint).unwrap();
    String::from_utf8(out).unwrap()
}

fn named(id: u32, name: &str) -> Identity {
    Identity { id, name: name.into(), class: Class::BestEffort, ..Identity::default() }
}

#[test]
fn a_core_without_clients_is_shown() {
    let shown = shown(&Status::default(), Paint(false));
    assert!(shown.contains("no clients") && shown.contains("none yet"), "{shown}");
    assert!(shown.contains("the built-in rule serves") && !shown.contains('\x1b'), "{shown}");
}

#[test]
fn waiting_clients_say_why_and_kernels_of_one_name_are_told_apart() {
    let client = |id: u32, why: Option<(WaitReason, Option<f64>)>| ClientStatus {
        identity: named(id, &format!("c{id}")),
        why: why.map(|(reason, for_ms)| Why { reason, for_ms }),
        ..ClientStatus::default()
    };
    let kernel = |image: &str, contended: bool| KernelStatus {
        name: "E_32_32_4".into(),
        image: image.into(),
        contended,
        mean_us: 5.0,
        ..KernelStatus::default()
    };
    let status = Status {
        clients: vec![
            client(1, Some((WaitReason::HighPriority, Some(12.25)))),
            client(2, Some((WaitReason::Policy, Some(1.0)))),
            client(3, Some((WaitReason::Window, None))),
            client(4, Some((WaitReason::Yielding, None))),
            client(5, Some((WaitReason::Decision, None))),
            client(6, None),
        ],
        kernels: vec![kernel("00c0ffee", false), kernel("deadbeef", true)],
        ..Status::default()
    };
    let shown = shown(&status, Paint(false));
    for (name, end) in [
        ("c1", "high priority busy (asked again in 12.2 ms)"),
        ("c2", "held by the policy (asked again in 1.0 ms)"),
        ("c3", "window full"),
        ("c4", "yielding"),
        ("c5", "no decision yet"),
        ("c6", "no"),
    ] {
        let line = shown.lines().find(|line| line.contains(name)).unwrap();
        assert!(line.ends_with(end), "{line:?} does not end with {end:?}");
    }
    let kernels: Vec<_> = shown.lines().filter(|line| line.contains("E_32_32_4")).collect();
    assert!(kernels[0].contains(" 5.0") && kernels[0].contains("00c0ffee"), "{kernels:?}");
    assert!(kernels[1].contains("<= 5.0") && kernels[1].contains("deadbeef"), "{kernels:?}");
}

#[test]
fn reasons_why_kernels_stay_whole_follow_their_table() {
    let kernel = |transformed: &str| KernelStatus {
        transformed: transformed.into(),
        ..KernelStatus::default()
    };
    let [a, b] = ["whole only: blocks wait: for each other", "whole only: the image is gone"];
    let kernels = vec![kernel(a), kernel("ready"), kernel(b), kernel(a)];
    let shown = shown(&Status { kernels, ..Status::default() }, Paint(false));
    let end: Vec<_> = shown.lines().rev().take(2).collect();
    assert_eq!(end, [format!("{b} (1 kernel)"), format!("{a} (2 kernels)")]);
}

#[test]
fn programs_that_are_not_governed_are_shown() {
    let program = |pid, name: &str, reason: &str, running| UngovernedStatus {
        pid,
        name: name.into(),
        reason: reason.into(),
        running,
        ..UngovernedStatus::default()
    };
    let ungoverned =
        vec![program(9, "train", "because", true), program(8, "old", "likewise", false)];
    let shown = shown(&Status { ungoverned, ..Status::default() }, Paint(false));
    for line in ["process 9, train: because", "process 8, old (ended): likewise"] {
        assert!(shown.contains(line), "{line:?} not in {shown}");
    }
}

#[test]
fn clients_and_reasons_are_shown() {
    let client = ClientStatus {
        identity: named(3, "train"),
        not_governed_reason: "because".into(),
        report: Report {
            time_slice: MechanismState::Failed,
            time_slice_error: 27,
            mps: MpsUse::NotAClient,
            ..Report::default()
        },
        ..ClientStatus::default()
    };
    let shown = shown(&Status { clients: vec![client], ..Status::default() }, Paint(true));
    let words = ["train", "3: not governed: because", "status 27", "3: not an MPS", "\x1b[31m"];
    for word in words {
        assert!(shown.contains(word), "{word:?} not in {shown}");
    }
}

#[test]
fn a_policy_that_failed_says_how() {
    use tally_admin::{Disabled, FaultCounts, Faults, LastDisabled, LoadFailure, SwapPauseUs};
    let failed = FaultCounts { trap: 2, ..FaultCounts::default() };
    let how = Disabled {
        kind: "trap".into(),
        message: "unreachable\n  at chaos".into(),
        ..Disabled::default()
    };
    let failure = LoadFailure { message: "no file".into(), ..LoadFailure::default() };
    let policy = PolicyReport {
        faults: Faults { failed, disabled: 1 },
        last_fault: Some("Trap".into()),
        last_disabled: Some(LastDisabled { generation: 4, how }),
        last_load_error: Some(failure),
        swap_pause_us: SwapPauseUs { count: 1, max: 90.0, ..SwapPauseUs::default() },
        disabled: true,
        ..PolicyReport::default()
    };
    let shown = shown(&Status { policy, ..Status::default() }, Paint(false));
    for line in [
        "faults of all policies: 2 trap, 1 calls not made to a disabled one; last: Trap",
        "start (state: not-offered); pause 0 us, at most 90 us",
        "generation 4 was disabled: trap: unreachable\n",
        "disabled: the built-in rule serves",
        "last load failed: no file",
    ] {
        assert!(shown.contains(line), "{line:?} not in {shown}");
    }
}

#[test]
fn charged_and_measured_time_have_columns_of_their_own() {
    let client = ClientStatus {
        identity: named(3, "train"),
        charged_ms: 70.0,
        charged_percent: 12.5,
        measured_ms: 61.0,
        launches_measured: 5,
        ..ClientStatus::default()
    };
    let untimed = ClientStatus { launches_measured: 0, ..client.clone() };
    let clients = vec![client, untimed];
    let shown = shown(&Status { clients, ..Status::default() }, Paint(false));
    assert!(shown.contains("CHARGED ms  CHARGED %  MEASURED ms"), "{shown}");
    let lines: Vec<&str> = shown.lines().filter(|line| line.contains("train")).collect();
    let has = |line: &str, word| line.split_whitespace().any(|cell| cell == word);
    assert!(has(lines[0], "70") && has(lines[0], "12.5") && has(lines[0], "61"), "{shown}");
    assert!(has(lines[1], "70") && !has(lines[1], "61"), "{shown}");
}
