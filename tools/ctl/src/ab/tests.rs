use super::*;

#[test]
fn a_metric_that_nothing_feeds_is_said_at_the_start() {
    let client = |class, service: Option<Service>| ClientStatus {
        identity: tally_admin::Identity { class, ..Default::default() },
        service,
        ..ClientStatus::default()
    };
    let service = |objective, tpot| Some(Service { objective, tpot, ..Service::default() });
    let objective = Some(tally_admin::Objective { slo_ms: 1.0, percentile: 99.0 });
    let tpot = Some(tally_admin::Tpot {
        tpot_ms: 1.0,
        tokens_within: 0,
        tokens_late: 0,
        attainment_percent: None,
    });
    let plain = [client(Class::High, service(None, None))];
    let says = |metric, clients: &[ClientStatus]| lack(metric, clients).is_some();
    assert!(!says(Metric::HpP99, &plain) && says(Metric::HpP99, &[]));
    assert!(says(Metric::BeThroughput, &plain));
    assert!(!says(Metric::BeThroughput, &[client(Class::BestEffort, None)]));
    for metric in [Metric::SloAttainment, Metric::TpotAttainment, Metric::TokenP99] {
        assert!(says(metric, &plain), "{metric}");
    }
    let with_objective = [client(Class::High, service(objective, None))];
    assert!(!says(Metric::SloAttainment, &with_objective));
    let with_tpot = [client(Class::High, service(None, tpot))];
    assert!(!says(Metric::TpotAttainment, &with_tpot) && !says(Metric::TokenP99, &with_tpot));
}
use crate::cli::{Cli, Command};
use clap::Parser;
use tally_ab::report::GuardReport;

/// A test under way.
pub(crate) fn running() -> AbStatus {
    AbStatus {
        running: true,
        metric: Metric::HpP99,
        a: "a".into(),
        b: "b".into(),
        arm: None,
        in_washout: false,
        blocks: 4,
        pairs: 2,
        elapsed_s: 4.5,
        time_s_max: 600.0,
        ratio: 1.5,
        e_value: 2.0,
        e_value_needed: 20.0,
        ended: None,
        message: String::new(),
        verdict: Verdict::Undecided,
        why: "no difference on hp_p99 is shown".into(),
        guards: Vec::new(),
    }
}

fn args(more: &[&str]) -> Result<StartArgs, clap::Error> {
    let first = ["tallyctl", "ab", "start", "a.wasm", "b.wasm"];
    match Cli::try_parse_from(first.iter().chain(more))?.command {
        Command::Ab { command: AbCommand::Start(args) } => Ok(*args),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_command_line_becomes_a_plan() {
    let plan = args(&[
        "--metric",
        "hp_p99",
        "--block",
        "500ms",
        "--washout",
        "50ms",
        "--max-time",
        "3m",
        "--guard",
        "hp_p99<8ms",
        "--guard",
        "be_throughput>20%",
        "--seed",
        "7",
        "--alpha",
        "0.01",
    ])
    .unwrap()
    .plan()
    .unwrap();
    assert_eq!((plan.block_ns, plan.washout_ns), (500_000_000, 50_000_000));
    assert_eq!((plan.guard_window_ns, plan.state), (450_000_000, State::Frozen));
    assert_eq!((plan.time_ns_max, plan.seed), (180_000_000_000, 7));
    assert_eq!((plan.guards.len(), plan.alpha, plan.to_end), (2, 0.01, false));
}

#[test]
fn blocks_shrink_unless_their_length_is_given() {
    let lengths = |more: &[&str]| {
        let plan = args(&[&["--metric", "hp_p99"], more].concat()).unwrap().plan().unwrap();
        (plan.block_ns / 1_000_000, plan.block_ns_min / 1_000_000)
    };
    assert_eq!(lengths(&[]), (1_000, 250));
    assert_eq!(lengths(&["--block", "2s"]), (2_000, 2_000));
    assert_eq!(lengths(&["--block", "2s", "--min-block", "500ms"]), (2_000, 500));
    let plan = args(&["--metric", "hp_p99", "--exposure", "5%", "--promote"]).unwrap().plan();
    let plan = plan.unwrap();
    assert_eq!((plan.exposure, plan.promote), (0.05, true));
    let error = args(&["--metric", "hp_p99", "--exposure", "0.05"]).unwrap_err().to_string();
    assert!(error.contains("1% to 50%"), "{error}");
}

#[test]
fn a_hook_is_told_what_happens_and_may_fail() {
    let dir = tempfile::tempdir().unwrap();
    let said = dir.path().join("said");
    let command = format!("echo $TALLY_AB_EVENT >{}", said.display());
    run_hook(&command, "begin", None).unwrap();
    assert_eq!(std::fs::read_to_string(said).unwrap(), "begin\n");
    let error = run_hook("exit 3", "begin", None).unwrap_err().to_string();
    assert!(error.contains("exit 3") && error.contains("begin"), "{error}");
}

#[test]
fn a_guard_that_is_breached_by_accident_is_told_once_when_that_is_known() {
    let (mut out, mut told, mut status) = (Vec::new(), Vec::new(), running());
    for accident in [None, Some(0.01), Some(0.4), Some(0.6)] {
        status.guards = vec![GuardReport { guard: "hp_p99<8ms".into(), accident }];
        warn_of_guards(&mut out, &status, &mut told).unwrap();
    }
    let said = String::from_utf8(out).unwrap();
    let expected = "note: guard hp_p99<8ms: a B as good as A breaches it by accident in up to 40 % of such tests\n";
    assert_eq!(said, expected);
    let shown = |accident| {
        let guards = vec![GuardReport { guard: "hp_p99<8ms".into(), accident }];
        let mut out = Vec::new();
        write_status(&mut out, Some(&AbStatus { guards, ..running() })).unwrap();
        String::from_utf8(out).unwrap()
    };
    assert!(shown(None).ends_with("breaches it: not known yet\n"), "{}", shown(None));
    assert!(shown(Some(0.4)).ends_with("breaches it: 40 % at most\n"), "{}", shown(Some(0.4)));
}

#[test]
fn a_need_not_be_named_and_its_options_need_it() {
    let start = |words: &[&str]| {
        let all = ["tallyctl", "ab", "start", "--metric", "hp_p99"];
        match Cli::try_parse_from(all.iter().chain(words)).unwrap().command {
            Command::Ab { command: AbCommand::Start(args) } => *args,
            other => panic!("{other:?}"),
        }
    };
    let (b, both) = (start(&["b.wasm"]), start(&["a.wasm", "b.wasm", "--replace-active"]));
    assert_eq!(b.arms().unwrap(), (None, Path::new("b.wasm")));
    assert_eq!(both.arms().unwrap(), (Some(Path::new("a.wasm")), Path::new("b.wasm")));
    for option in [&["--replace-active"][..], &["--config-a", "x"]] {
        let error = start(&[&["b.wasm"], option].concat()).arms().unwrap_err().to_string();
        assert!(error.contains(option[0]) && error.contains("name A"), "{error}");
    }
}

#[test]
fn files_that_are_no_reports_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("notes.json");
    std::fs::write(&file, "{}").unwrap();
    for (path, word) in [(file, "tallyctl ab report --json"), (dir.path().join("none"), "none")] {
        let error = read_file(&path).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains(&*path.to_string_lossy()), "{error}");
    }
}

#[test]
fn reports_are_regular_files_and_read_up_to_their_largest_size() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
    for path in [Path::new("/dev/zero"), &fifo, dir.path()] {
        let error = read_file(path).unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
        assert!(error.contains(&*path.to_string_lossy()), "{error}");
    }
    let large = dir.path().join("large.json");
    let file = std::fs::File::create(&large).unwrap();
    for (more, word) in [(0, "expected value"), (1, "has more than 16777216 bytes")] {
        file.set_len(REPORT_BYTES_MAX + more).unwrap();
        let error = read_file(&large).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

/// A report may come from anybody.
#[test]
fn texts_of_reports_are_printable() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.json");
    std::fs::write(&file, r#"{"schema": "\u001b]0;x\u0007\u009b1m\nforged"}"#).unwrap();
    let error = read_file(&file).unwrap_err().to_string();
    assert!(error.contains("?]0;x??1m?forged"), "{error}");
    let mut report = serde_json::to_value(plot::tests::report(1.0, 2)).unwrap();
    report["a"]["name"] = "\u{1b}[31mA\u{202e}".into();
    std::fs::write(&file, report.to_string()).unwrap();
    assert_eq!(read_file(&file).unwrap().a.source.name, "?[31mA?");
}

#[test]
fn what_makes_no_sense_is_refused_before_the_core_is_asked() {
    let refused = |more: &[&str], words: &str| {
        let error = args(more).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refused(&[], "--metric");
    refused(&["--metric", "p99"], "hp_p99, be_throughput");
    refused(&["--metric", "hp_p99", "--guard", "hp_p99>8ms"], "hp_p99<8ms");
    refused(&["--metric", "hp_p99", "--block", "2"], "ns, us, ms");
    let refused = |more: &[&str], words: &str| {
        let error = args(more).unwrap().plan().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refused(&["--metric", "slo_attainment", "--slo", "0s"], "objective is 0");
    let guard = ["--metric", "hp_p99", "--guard", "hp_p99<1.2*A", "--guard-window", "1s"];
    refused(&guard, "a block can fill");
}
