//! `tallyctl` as a process: exit codes, messages, and becoming the program.
//! What it says to a living core is tested where the core is, and by the
//! end-to-end tests.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};
use tally_admin::{Answer, LogStatus, Status};
use tally_ipc::wire;

fn tallyctl(socket: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tallyctl"))
        .arg("--socket")
        .arg(socket)
        .args(args)
        .env_remove("LD_PRELOAD")
        .output()
        .unwrap()
}

/// The beginning of a shared library for this machine: enough for `tallyctl run`, not for the loader.
fn library_head() -> Vec<u8> {
    let mut head = std::fs::read(env!("CARGO_BIN_EXE_tallyctl")).unwrap();
    head.truncate(64);
    head[16..18].copy_from_slice(&3_u16.to_le_bytes());
    head
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn without_a_core_it_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("clients/none.sock");
    for args in [&["status"][..], &["policy", "show"], &["profiles", "clear"], &["stop"]] {
        let output = tallyctl(&socket, args);
        assert_eq!(output.status.code(), Some(69), "{args:?}: {}", said(&output));
        assert!(said(&output).contains("none.sock") && said(&output).contains("tally-core"));
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn run_becomes_the_program() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, library) = (dir.path().join("s"), dir.path().join("preload.so"));
    std::fs::write(&library, "").unwrap();
    let run = |more: &[&str], command: &[&str]| {
        let library = library.to_str().unwrap();
        let mut args = vec!["run", "--no-check", "--preload", library];
        args.extend(more);
        args.push("--");
        args.extend(command);
        tallyctl(&socket, &args)
    };
    let script = "echo $TALLY_NAME $TALLY_PRIORITY $TALLY_SOCKET $LD_PRELOAD; exit 7";
    let output = run(&["--name", "n", "--priority", "high"], &["sh", "-c", script]);
    assert_eq!(output.status.code(), Some(7));
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(shown.trim(), format!("n high {} {}", socket.display(), library.display()));
    let output = run(&[], &["sh", "-c", "kill -9 $$"]);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(9));
    let output = run(&[], &["/nonexistent/program"]);
    assert_eq!(output.status.code(), Some(127), "{}", said(&output));
    let output = run(&[], &[dir.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(126), "{}", said(&output));
    let output = run(&["--label", "nonsense"], &["true"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("KEY=VALUE"));
}

/// A core that takes connections and never answers, and none at all.
#[test]
fn without_a_core_the_program_starts_within_a_second() {
    let dir = tempfile::tempdir().unwrap();
    let silent = dir.path().join("silent");
    let _listener = UnixListener::bind(&silent).unwrap();
    let library = dir.path().join("preload.so");
    std::fs::write(&library, library_head()).unwrap();
    std::fs::write(dir.path().join("libtally_shim.so"), library_head()).unwrap();
    for socket in [silent, dir.path().join("none")] {
        let began = std::time::Instant::now();
        let output = tallyctl(
            &socket,
            &["run", "--preload", library.to_str().unwrap(), "--", "sh", "-c", "echo out; exit 5"],
        );
        let took = began.elapsed();
        assert_eq!(output.status.code(), Some(5));
        assert_eq!(output.stdout, b"out\n");
        assert!(said(&output).contains("no core answers at"), "{}", said(&output));
        assert!(took.as_millis() < 1_000, "{took:?}");
    }
}

/// Programs start whatever becomes of admin requests: here nobody takes any.
#[test]
fn run_asks_at_the_clients_socket_alone() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("any");
    let listener = UnixListener::bind(&socket).unwrap();
    let library = dir.path().join("preload.so");
    for file in [&library, &dir.path().join("libtally_shim.so")] {
        std::fs::write(file, library_head()).unwrap();
    }
    let core = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let (asked, fds) = wire::receive(stream.as_fd()).unwrap();
        wire::send(stream.as_fd(), &[wire::PING], &[]).unwrap();
        (asked, fds.len())
    });
    let preload = library.to_str().unwrap();
    let output = tallyctl(&socket, &["run", "--preload", preload, "--", "sh", "-c", "exit 5"]);
    assert_eq!(core.join().unwrap(), (vec![wire::PING], 0));
    assert_eq!(output.status.code(), Some(5));
    assert!(!said(&output).contains("tallyctl"), "it says nothing: {}", said(&output));
    // What needs the other socket says how to name it.
    let output = tallyctl(&socket, &["status"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("--admin-socket"), "{}", said(&output));
}

/// Runs in the shell that `sh -c script` is, with `tallyctl` as $0; SIGXFSZ is ignored, so that a file that
/// grows beyond its limit is an error, as a full disk is.
fn with_small_files(script: &str) -> Output {
    let script = format!("trap '' XFSZ; {script}");
    Command::new("sh").args(["-c", &script, env!("CARGO_BIN_EXE_tallyctl")]).output().unwrap()
}

#[test]
fn a_full_disk_leaves_no_half_key_and_fails() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("release");
    let keygen = format!("\"$0\" policy keygen --out {}", key.display());
    let output = with_small_files(&format!("ulimit -f 0; exec {keygen}"));
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("release"), "{}", said(&output));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is in the way");
    assert!(with_small_files(&keygen).status.success());
}

/// What a core answers, as a line.
fn answer(ok: &impl serde::Serialize) -> String {
    format!("{}\n", serde_json::to_string(&Answer::Ok(ok)).unwrap())
}

#[test]
fn an_answer_that_lacks_a_field_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("admin")).unwrap();
    let mut older = serde_json::to_value(Status::default()).unwrap();
    older["policy"].as_object_mut().unwrap().remove("signed_by");
    fake_core(&dir.path().join("admin/s"), answer(&older));
    let socket = dir.path().join("clients/s");
    for args in [&["status"][..], &["metrics"]] {
        let output = tallyctl(&socket, args);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains("missing field `signed_by`"), "{}", said(&output));
    }
    // For programs it is passed on as it came.
    let output = tallyctl(&socket, &["status", "--json"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap(), older);
}

#[test]
fn metrics_that_cannot_be_written_fail_and_leave_no_part() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("admin")).unwrap();
    fake_core(&dir.path().join("admin/s"), answer(&Status::default()));
    let (socket, out) = (dir.path().join("clients/s"), dir.path().join("out"));
    std::fs::create_dir(&out).unwrap();
    let metrics =
        format!("\"$0\" --socket {} metrics --out {}/tally.prom", socket.display(), out.display());
    let output = with_small_files(&format!("ulimit -f 0; exec {metrics}"));
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("--out cannot be written to"), "{}", said(&output));
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 0);
    assert!(with_small_files(&metrics).status.success());
    assert!(std::fs::read_to_string(out.join("tally.prom")).unwrap().contains("uptime"));
}

#[test]
fn a_log_that_is_not_complete_is_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("admin")).unwrap();
    let status = LogStatus {
        file: Some("/x.tallylog".into()),
        records: 246,
        ended: Some("its time is over".into()),
        failed: Some("writing failed: No space left on device".into()),
        ..LogStatus::default()
    };
    fake_core(&dir.path().join("admin/s"), answer(&status));
    for args in [&["log", "record", "--for", "1s"][..], &["log", "stop"]] {
        let output = tallyctl(&dir.path().join("clients/s"), args);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(
            said(&output).contains("not complete: writing failed: No space"),
            "{}",
            said(&output)
        );
    }
}

/// Exit codes of `ab start --wait`, one for each verdict.
#[test]
fn the_verdict_of_an_ab_test_is_an_exit_code() {
    use tally_ab::{Experiment, Metric, Plan, Report, Verdict};
    let plan = Plan::of(Metric::HpP99);
    let report = Report::new(&Experiment::new(plan, 0).unwrap(), &Default::default(), 1, false);
    let dir = tempfile::tempdir().unwrap();
    let policy = dir.path().join("b.wasm");
    std::fs::write(&policy, "b").unwrap();
    std::fs::create_dir(dir.path().join("admin")).unwrap();
    for (i, (verdict, code)) in [
        (Verdict::PromoteB, 0),
        (Verdict::KeepA, 3),
        (Verdict::Undecided, 4),
        (Verdict::Withdrawn, 5),
        (Verdict::Invalid, 6),
    ]
    .into_iter()
    .enumerate()
    {
        let report = serde_json::to_value(Report { verdict, ..report.clone() }).unwrap();
        let status = |running: bool| {
            serde_json::json!({
                "running": running, "metric": "hp_p99", "a": "x", "b": "y", "arm": null,
                "in_washout": false, "blocks": 0, "pairs": 0, "elapsed_s": 0.0, "time_s_max": 1.0,
                "ratio": 1.0, "e_value": 1.0, "e_value_needed": 20.0, "ended": null, "message": "",
                "verdict": "undecided", "why": "",
                "guards": [{"guard": "hp_p99<8ms", "accident": 0.4}]
            })
        };
        let listener = UnixListener::bind(dir.path().join(format!("admin/{i}"))).unwrap();
        let core = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut asked = BufReader::new(&stream).lines();
            let clients = serde_json::to_value(tally_admin::Status::default()).unwrap();
            for answer in [status(true), clients, status(false), report] {
                asked.next().unwrap().unwrap();
                writeln!(&stream, "{}", serde_json::json!({"ok": answer})).unwrap();
            }
        });
        let args = ["ab", "start", policy.to_str().unwrap(), "--metric", "hp_p99", "--wait"];
        let output = tallyctl(&dir.path().join(format!("clients/{i}")), &args);
        core.join().unwrap();
        assert_eq!(output.status.code(), Some(code), "{verdict:?}: {}", said(&output));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains("x (A) against y (B)") && said.contains(verdict.as_str()), "{said}");
        assert!(said.contains("note: hp_p99 says nothing while there is no"), "{said}");
        // Once, when the test begins.
        assert_eq!(said.matches("by accident in up to 40 %").count(), 1, "{said}");
    }
}

/// So do those of `ab combine`, which needs no core.
#[test]
fn the_verdict_of_combined_reports_is_an_exit_code() {
    use tally_ab::report::ArmSource;
    use tally_ab::{Experiment, Metric, Plan, Reason, Report, Verdict};
    let dir = tempfile::tempdir().unwrap();
    let file = |seed: u64, verdict: Verdict, reason: Reason| {
        let mut experiment = Experiment::new(Plan { seed, ..Plan::of(Metric::HpP99) }, 0).unwrap();
        experiment.stop(1, reason, "");
        let arms = ["a", "b"].map(|name| ArmSource { digest: name.into(), ..Default::default() });
        let report = Report { verdict, ..Report::new(&experiment, &arms, 1, false) };
        let path = dir.path().join(format!("{seed}.json"));
        std::fs::write(&path, serde_json::to_string(&report).unwrap()).unwrap();
        path.to_string_lossy().into_owned()
    };
    let good = file(1, Verdict::Undecided, Reason::MaxTime);
    for (seed, verdict, reason, code) in [
        (2, Verdict::Undecided, Reason::MaxTime, 4),
        (3, Verdict::KeepA, Reason::NotServed, 3),
        (4, Verdict::Withdrawn, Reason::Guard, 5),
        (5, Verdict::Invalid, Reason::NoTraffic, 6),
    ] {
        let other = file(seed, verdict, reason);
        let output = tallyctl(&dir.path().join("none"), &["ab", "combine", &good, &other]);
        assert_eq!(output.status.code(), Some(code), "{verdict:?}: {}", said(&output));
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(printed.starts_with(verdict.as_str()), "{printed}");
    }
}

#[test]
fn status_watch_goes_on_while_the_core_is_started_anew() {
    let dir = tempfile::tempdir().unwrap();
    let admin = dir.path().join("admin");
    std::fs::create_dir(&admin).unwrap();
    let socket = admin.join("s");
    let serve_once = |listener: UnixListener, version: &'static str| {
        let (stream, _) = listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        let mut status = Status::default();
        status.core.version = version.into();
        (&stream).write_all(answer(&status).as_bytes()).unwrap();
    };
    let listener = UnixListener::bind(&socket).unwrap();
    let mut watch = Command::new(env!("CARGO_BIN_EXE_tallyctl"))
        .arg("--socket")
        .arg(dir.path().join("clients/s"))
        .args(["status", "--watch"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines().map(Result::unwrap);
    serve_once(listener, "first");
    assert!(lines.any(|line| line.contains("first")));
    std::fs::remove_file(&socket).unwrap();
    assert!(lines.any(|line| line.contains("no core answers at")));
    serve_once(UnixListener::bind(&socket).unwrap(), "second");
    assert!(lines.any(|line| line.contains("second")));
    watch.kill().unwrap();
    watch.wait().unwrap();
}

/// Whoever may not open the socket is not told to start a core.
#[test]
fn a_socket_that_may_not_be_opened_is_not_a_core_that_does_not_answer() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    for folder in ["admin", "clients"] {
        std::fs::create_dir(dir.path().join(folder)).unwrap();
    }
    let (admin, clients) = (dir.path().join("admin/s"), dir.path().join("clients/s"));
    let _listeners = [&admin, &clients].map(|path| {
        let listener = UnixListener::bind(path).unwrap();
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o000)).unwrap();
        listener
    });
    let program = dir.path().join("tallyctl");
    std::fs::copy(env!("CARGO_BIN_EXE_tallyctl"), &program).unwrap();
    let mut status = Command::new(program);
    status.arg("--socket").arg(&clients).arg("status");
    // Root may open everything.
    if rustix::process::geteuid().is_root() {
        status.uid(65_534);
    }
    let output = status.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let said = said(&output);
    assert!(said.contains("may not be opened by this user"), "{said}");
    assert!(!said.contains("no core answers") && !said.contains("--no-check"), "{said}");
}

#[test]
fn a_library_that_cannot_be_preloaded_and_a_refused_priority_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, library) = (dir.path().join("s"), dir.path().join("preload.so"));
    let shim = dir.path().join("libtally_shim.so");
    let run = |priority: &str| {
        let args =
            ["run", "--priority", priority, "--preload", library.to_str().unwrap(), "--", "true"];
        said(&tallyctl(&socket, &args))
    };
    std::fs::write(&library, library_head()).unwrap();
    std::fs::write(&shim, "text").unwrap();
    assert!(run("high").contains("libtally_shim.so is not a shared library for this machine"));
    std::fs::write(&shim, library_head()).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let asked = wire::receive(stream.as_fd()).unwrap().0;
            let mut answer = vec![wire::PING];
            if asked == [wire::PING, wire::PING_HIGH] {
                answer.extend(b"user 9 may not");
            }
            wire::send(stream.as_fd(), &answer, &[]).unwrap();
        }
    });
    let said = run("high");
    assert!(said.contains("true runs as best-effort") && said.contains("user 9 may not"), "{said}");
    assert!(!run("best-effort").contains("user 9"));
}

#[test]
fn completions_are_printed_for_each_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = tallyctl(Path::new("/nowhere"), &["completions", shell]);
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && script.contains("tallyctl"), "{shell}");
        assert!(script.contains("replace-active") && script.contains("profiles"), "{shell}");
    }
    assert_eq!(tallyctl(Path::new("/nowhere"), &["completions", "tcsh"]).status.code(), Some(2));
}

#[test]
fn who_answers_in_a_folder_that_others_can_write_to_is_not_believed() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin/s");
    std::fs::create_dir(socket.parent().unwrap()).unwrap();
    let _listener = UnixListener::bind(&socket).unwrap();
    std::fs::set_permissions(socket.parent().unwrap(), PermissionsExt::from_mode(0o777)).unwrap();
    let output = tallyctl(&dir.path().join("clients/s"), &["status"]);
    assert_eq!(output.status.code(), Some(69));
    assert!(said(&output).contains("chmod go-w"), "{}", said(&output));
}

#[test]
fn a_missing_library_and_a_wrong_command_line_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let output =
        tallyctl(&socket, &["run", "--no-check", "--preload", "/nonexistent.so", "--", "true"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("/nonexistent.so") && said(&output).contains("tally-preload"));
    assert_eq!(tallyctl(&socket, &["dance"]).status.code(), Some(2));
    assert_eq!(tallyctl(&socket, &["--help"]).status.code(), Some(0));
}

/// Answers one request per connection with `answer`.
fn fake_core(socket: &Path, answer: impl Into<String>) {
    let answer = answer.into();
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut line = String::new();
            let _ = BufReader::new(&stream).read_line(&mut line);
            let _ = (&stream).write_all(answer.as_bytes());
        }
    });
}

#[test]
fn refusals_and_nonsense_from_the_core_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("admin")).unwrap();
    for (i, (answer, code, word)) in [
        ("{\"error\":{\"code\":\"denied\",\"message\":\"user 9 may not\"}}\n", 1, "user 9 may not"),
        ("nonsense\n", 1, "one release"),
        ("", 69, "closed the connection"),
        ("{\"ok\":\"draining\"}\n", 0, ""),
    ]
    .into_iter()
    .enumerate()
    {
        fake_core(&dir.path().join(format!("admin/{i}")), answer);
        let output = tallyctl(&dir.path().join(format!("clients/{i}")), &["stop"]);
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        assert!(said(&output).contains(word), "{}", said(&output));
    }
}

fn sim(args: &[&str]) -> Output {
    let mut all = vec!["sim", "--seconds", "0.2"];
    all.extend(args);
    tallyctl(Path::new("/nowhere"), &all)
}

const PAIR: [&str; 4] = ["--hp", "resnet50_infer_b1", "--be", "resnet50_train_b128"];

#[test]
fn a_simulation_needs_no_core_and_prints_the_same_bytes_each_time() {
    for sharing in ["timeslice", "mps"] {
        let args = [&PAIR[..], &["--sharing", sharing, "--json", "--seed", "3"]].concat();
        let (first, second) = (sim(&args), sim(&args));
        assert!(first.status.success(), "{}", said(&first));
        assert_eq!(first.stdout, second.stdout);
        let report: serde_json::Value = serde_json::from_slice(&first.stdout).unwrap();
        assert_eq!((&report["seed"], &report["sharing"]), (&3.into(), &sharing.into()));
        assert!(report["best_effort"]["share"].as_f64().unwrap() < 1.0);
    }
    let people = sim(&PAIR);
    assert!(String::from_utf8_lossy(&people.stdout).contains("launches a second"));
}

#[test]
fn a_simulation_is_drawn_with_the_figures_that_it_prints() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sim.svg");
    let drawn = |more: &[&str]| {
        let svg = ["--seed", "3", "--svg", file.to_str().unwrap()];
        let output = sim(&[&PAIR[..], &svg, more].concat());
        assert!(output.status.success(), "{}", said(&output));
        (std::fs::read_to_string(&file).unwrap(), output)
    };
    let (svg, printed) = drawn(&[]);
    let (dark, json) = drawn(&["--dark", "--json"]);
    assert_ne!(svg, dark);
    let report: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    for svg in [&svg, &dark] {
        let document = roxmltree::Document::parse(svg).unwrap_or_else(|e| panic!("{e}\n{svg}"));
        let texts: Vec<&str> =
            document.descendants().filter_map(|n| n.text()).map(str::trim).collect();
        for key in ["solo_ms", "service_p50_ms", "service_p99_ms", "queued_p50_ms", "queued_p99_ms"]
        {
            let shown = format!("{:.3}", report["high_priority"][key].as_f64().unwrap());
            assert!(texts.contains(&&*shown) && printed.contains(&shown), "{key} {shown}: {svg}");
        }
        let share = format!("{:.3}", report["best_effort"]["share"].as_f64().unwrap());
        assert!(texts.contains(&&*share) && printed.contains(&share), "{share}: {svg}");
    }
    let alone = sim(&[&PAIR[..], &["--dark"]].concat());
    assert!(!alone.status.success() && said(&alone).contains("--svg"), "{}", said(&alone));
}

#[test]
fn a_simulation_says_which_input_is_bad_and_what_was_expected() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bad.csv");
    std::fs::write(&file, "1\nsoon\n").unwrap();
    let file = file.to_str().unwrap();
    for (args, expected) in [
        (&["--hp", "no-trace", "--be", "resnet50_train_b128"][..], "built-in are"),
        (&["--hp", file, "--be", file], "no column `ts_us`"),
        (&[&PAIR[..], &["--load", "0"]].concat(), "'--load <SHARE>': expected more than 0"),
        (&[&PAIR[..], &["--seconds", "inf"]].concat(), "--seconds"),
        (&[&PAIR[..], &["--warm-up-seconds=-1"]].concat(), "-1: expected 0 to 3600"),
        (&[&PAIR[..], &["--arrivals", file]].concat(), "bad.csv, line 2: `soon`, expected seconds"),
        (&[&PAIR[..], &["--policy", file]].concat(), "bad.csv"),
        (&[&PAIR[..], &["--policy-config", file]].concat(), "built-in has none"),
        (&["--hp", "resnet50_infer_b1"], "--be"),
    ] {
        let output = tallyctl(Path::new("/nowhere"), &[&["sim"][..], args].concat());
        assert!(!output.status.success(), "{args:?}");
        assert!(said(&output).contains(expected), "{args:?}: {}", said(&output));
    }
}

#[test]
fn the_default_policy_is_simulated_alike_each_time() {
    let programs = Path::new(env!("CARGO_BIN_EXE_tallyctl")).parent().unwrap();
    let policy = programs.join("policies/tally-priority.wasm");
    assert!(policy.exists(), "{}: build it by `cargo xtask policies`", policy.display());
    let args = [&PAIR[..], &["--sharing", "mps", "--json", "--policy", policy.to_str().unwrap()]];
    let (first, second) = (sim(&args.concat()), sim(&args.concat()));
    assert!(first.status.success(), "{}", said(&first));
    assert_eq!(first.stdout, second.stdout);
    let report: serde_json::Value = serde_json::from_slice(&first.stdout).unwrap();
    let decisions = &report["decisions"];
    assert_eq!(decisions["built_in_rule"], 0);
    assert!(decisions["preemptible"].as_u64().unwrap() > 0, "{decisions}");
}

#[test]
fn the_native_rule_gives_the_report_of_its_component_but_for_the_name() {
    let programs = Path::new(env!("CARGO_BIN_EXE_tallyctl")).parent().unwrap();
    let policy = programs.join("policies/tally-priority.wasm");
    let report = |policy: &str| {
        let args = [&PAIR[..], &["--sharing", "mps", "--json", "--policy", policy]].concat();
        let out = sim(&args);
        assert!(out.status.success(), "{}", said(&out));
        String::from_utf8(out.stdout).unwrap().replace(policy, "POLICY")
    };
    assert_eq!(report("native:tally-priority"), report(policy.to_str().unwrap()));
    for (name, grant, part) in [
        ("native:mine", "identity", "expected one of slo-herald, tally-priority"),
        (policy.to_str().unwrap(), "root", "there is no capability \"root\""),
    ] {
        let out = sim(&[&PAIR[..], &["--policy", name, "--grant", grant]].concat());
        assert_eq!(out.status.code(), Some(2), "{}", said(&out));
        assert!(said(&out).contains(part), "{}", said(&out));
    }
}
