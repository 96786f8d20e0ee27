//! `tallyctl` as a process: exit codes, messages, and becoming the program.
//! What it says to a living core is tested where the core is, and by the
//! end-to-end tests.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};
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
    std::fs::write(&library, "").unwrap();
    std::fs::write(dir.path().join("libtally_shim.so"), "").unwrap();
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
        std::fs::write(file, "").unwrap();
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
fn fake_core(socket: &Path, answer: &'static str) {
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
        (&[&PAIR[..], &["--load", "0"]].concat(), "--load 0: expected more than 0"),
        (&[&PAIR[..], &["--seconds", "inf"]].concat(), "--seconds"),
        (&[&PAIR[..], &["--warm-up-seconds=-1"]].concat(), "-1: expected 0 to 3600"),
        (&[&PAIR[..], &["--arrivals", file]].concat(), "bad.csv, line 2: `soon`, expected seconds"),
        (&[&PAIR[..], &["--policy", file]].concat(), "bad.csv"),
        (&[&PAIR[..], &["--policy-config", file]].concat(), "built-in has none"),
        (&["--calibrate", file], "expected an array of rows"),
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
    assert_eq!(decisions["fallback"], 0);
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
        ("native:mine", "client-identity", "expected tally-priority"),
        (policy.to_str().unwrap(), "root", "there is no capability \"root\""),
    ] {
        let out = sim(&[&PAIR[..], &["--policy", name, "--grant", grant]].concat());
        assert_eq!(out.status.code(), Some(2), "{}", said(&out));
        assert!(said(&out).contains(part), "{}", said(&out));
    }
}
