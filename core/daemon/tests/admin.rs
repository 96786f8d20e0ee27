//! Admin requests, start-up errors and policy reloads.

mod common;

use common::{BUILT_IN, Client, Core, admin, eventually, policy};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use tally_ipc::ring::Answer;

/// An A/B test of a policy against itself.
fn ab_start(file: &str, block_ns: u64) -> Value {
    json!({
        "cmd": "ab_start", "a": {"file": file}, "b": {"file": file}, "replace_active": true,
        "plan": {
            "metric": "hp_p99", "block_ns": block_ns, "block_ns_min": block_ns, "washout_ns": 0, "alpha": 0.05,
            "time_ns_max": 600_000_000_000_u64, "blocks_min": 20, "seed": 1,
            "guard_window_ns": 2_000_000_000
        }
    })
}

#[test]
fn an_ab_test_is_refused_and_asked_for_in_vain() {
    let core = Core::start(BUILT_IN, &[]);
    for request in [json!({"cmd": "ab_stop"}), json!({"cmd": "ab_report"})] {
        assert_eq!(core.refused(request).0, "conflict");
    }
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty.wasm");
    std::fs::write(&empty, "").unwrap();
    let empty = empty.to_str().unwrap();
    let (code, message) = core.refused(ab_start(empty, 2_000_000_000));
    assert_eq!(code, "policy_refused");
    assert!(message.contains("arm A") && message.contains("empty.wasm"), "{message}");
    assert!(core.status()["experiment"].is_null());
    // Nothing is left over: policies can be loaded, and a test begun.
    let (code, _) = core.refused(json!({"cmd": "policy_load", "path": empty}));
    assert_eq!(code, "policy_refused");
}

#[test]
fn an_ab_test_does_not_replace_the_active_policy_unless_told_to() {
    let core = Core::start(BUILT_IN, &[]);
    let [fifo, priority] =
        ["fifo", "tally-priority"].map(|name| policy(name).to_str().unwrap().to_owned());
    let start = |a: Option<&str>, config: Option<&str>, replace: bool| {
        let mut request = ab_start(&fifo, 2_000_000_000);
        request["a"] = a.map_or(Value::Null, |a| json!({"file": a, "config_file": config}));
        request["replace_active"] = replace.into();
        request
    };
    for a in [None, Some(&*fifo)] {
        let (code, message) = core.refused(start(a, None, false));
        assert_eq!(code, "conflict");
        assert!(
            message.contains("built-in rule serves") && message.contains("--replace-active"),
            "{message}"
        );
    }
    let dir = tempfile::tempdir().unwrap();
    let (copy, other) = (dir.path().join("tally-priority.wasm"), dir.path().join("other.toml"));
    std::fs::copy(&priority, &copy).unwrap();
    std::fs::write(&other, "forms = false\n").unwrap();
    core.ask(json!({"cmd": "policy_load", "path": copy}));
    let (code, message) = core.refused(start(Some(&fifo), None, false));
    assert_eq!(code, "conflict");
    assert!(message.contains("A (fifo") && message.contains("is tally-priority"), "{message}");
    let (_, message) = core.refused(start(Some(&priority), other.to_str(), false));
    assert!(message.contains("another configuration"), "{message}");
    assert_eq!(core.status()["policy"]["name"], "tally-priority");
    assert!(core.status()["experiment"].is_null());
    // Its own bytes, though the file is gone.
    std::fs::remove_file(&copy).unwrap();
    for a in [None, Some(&*priority)] {
        let begun = core.ask(start(a, None, false));
        assert_eq!((&begun["a"], &begun["b"]), (&json!("tally-priority"), &json!("fifo")));
        core.ask(json!({"cmd": "ab_stop"}));
        assert_eq!(core.status()["policy"]["name"], "tally-priority");
    }
    core.ask(start(Some(&fifo), None, true));
    core.ask(json!({"cmd": "ab_stop"}));
    assert_eq!(core.status()["policy"]["name"], "fifo");
}

#[test]
fn an_ab_test_without_programs_holds_the_slot_until_it_is_stopped() {
    let core = Core::start(BUILT_IN, &[]);
    let fifo = policy("fifo");
    let fifo = fifo.to_str().unwrap();
    let begun = core.ask(ab_start(fifo, 2_000_000_000));
    assert_eq!((&begun["running"], &begun["a"]), (&json!(true), &json!("fifo")));
    assert_eq!(core.refused(ab_start(fifo, 2_000_000_000)).0, "conflict");
    let (code, message) = core.refused(json!({"cmd": "policy_load", "path": fifo}));
    assert_eq!(code, "conflict");
    assert!(message.contains("tallyctl ab stop"), "{message}");
    core.signal(Signal::HUP);
    let report = core.ask(json!({"cmd": "ab_stop"}));
    assert_eq!(report["ended"]["reason"], "stopped");
    assert!(report["caveats"].to_string().contains("A/A test"), "{report:#}");
    let status = core.status();
    assert_eq!(status["experiment"]["running"], false);
    assert_eq!(
        (&status["policy"]["name"], &status["policy"]["loaded_because"]),
        (&json!("fifo"), &json!("experiment"))
    );
    core.ask(json!({"cmd": "policy_load", "path": fifo}));
}

#[test]
fn wrong_requests_are_named() {
    let core = Core::start(BUILT_IN, &[]);
    for (request, word) in [
        (json!({"cmd": "dance"}), "dance"),
        (json!({"cmd": "status", "colour": 1}), "colour"),
        (json!({"cmd": "policy_load"}), "path"),
        (json!({"cmd": "policy_load", "path": "/none"}), "`component` did not come"),
        (json!({"cmd": "policy_load", "path": "/none", "files": ["component"]}), "1 files and 0"),
        (ab_start("/none", 2_000_000_000), "`a.component` did not come"),
        (ab_start(policy("fifo").to_str().unwrap(), 5), "a block of 5 ns"),
        (json!({"cmd": "ab_start", "a": {"file": "/a"}, "b": {"file": "/b"}}), "plan"),
        (json!({}), "cmd"),
    ] {
        let (code, message) = core.refused(request);
        assert_eq!(code, "bad_request");
        assert!(message.contains(word), "{message}");
    }
    let mut stream = UnixStream::connect(&core.admin).unwrap();
    stream.write_all(b"{not json\n{\"cmd\":\"policy_show\"}\n").unwrap();
    let mut lines = BufReader::new(stream).lines();
    assert!(lines.next().unwrap().unwrap().contains("bad_request"));
    assert!(lines.next().unwrap().unwrap().contains("built-in"), "the connection goes on");
    let mut stream = UnixStream::connect(&core.admin).unwrap();
    let _ = stream.write_all(&[b'{'; 100_000]);
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    assert!(answer.is_empty() || answer.contains("at most"), "{answer}");
    core.status();
}

#[test]
fn only_admins_change_things() {
    // The rules are the core's; only root can play another user here.
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root to act as another user");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let open = |p: &std::path::Path| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(p, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    open(dir.path());
    let config = format!("{BUILT_IN}[admin]\nmode = \"0666\"\n");
    let core = Core::start_in(dir, &config, &[]);
    open(&core.dir.path().join("run/admin"));
    // Credentials belong to the thread, and SO_PEERCRED tells the connecting one's.
    let ask_as_nobody = |request: &str| -> Value {
        let (socket, request) = (core.admin.clone(), serde_json::from_str(request).unwrap());
        let nobody = rustix::process::Uid::from_raw(65_534);
        std::thread::spawn(move || {
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            admin(&socket, &request).unwrap()
        })
        .join()
        .unwrap()
    };
    for request in [
        r#"{"cmd":"stop"}"#,
        r#"{"cmd":"profiles_clear"}"#,
        r#"{"cmd":"ab_stop"}"#,
        r#"{"cmd":"policy_load","path":"/x"}"#,
        r#"{"cmd":"policy_rollback"}"#,
    ] {
        let answer = ask_as_nobody(request);
        assert_eq!(answer["error"]["code"], "denied", "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("65534"));
    }
    assert!(ask_as_nobody(r#"{"cmd":"status"}"#)["ok"].is_object());
}

#[test]
fn what_cannot_start_says_why_with_its_exit_code() {
    let run = |config: &str, args: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        let status = Core::command(dir.path(), config, args).status().unwrap();
        (status.code().unwrap(), std::fs::read_to_string(dir.path().join("log")).unwrap())
    };
    let (code, log) = run("[socket]\nmodus = 1\n", &[]);
    assert!(code == 2 && log.contains("modus"), "{code} {log}");
    let (code, log) = run("", &["--no-such-flag"]);
    assert!(code == 2 && log.contains("no-such-flag"), "{code} {log}");
    let (code, log) = run("", &["--policy", "/nonexistent/p.wasm"]);
    assert!(code == 3 && log.contains("/nonexistent/p.wasm"), "{code} {log}");
    let required = format!(
        "{BUILT_IN}[sharing]\nmode = \"mps\"\nrequired = true\n\
         [sharing.mps]\ncontrol = \"/nonexistent/mps\"\n"
    );
    let (code, log) = run(&required, &[]);
    assert!(code == 1 && log.contains("/nonexistent/mps"), "{code} {log}");
    let (code, log) = run(
        &required.replace("mode = \"mps\"\nrequired = true", "mode = \"auto\""),
        &["--pin-cpu", "100000"],
    );
    assert!(code == 2 && log.contains("pin_cpu"), "{code} {log}");
}

#[test]
fn mps_that_cannot_be_had_falls_back_and_status_says_so() {
    let config = format!(
        "{BUILT_IN}[sharing]\nmode = \"mps\"\n[sharing.mps]\ncontrol = \"/nonexistent/mps\"\n"
    );
    let core = Core::start(&config, &[]);
    let status = core.status();
    assert_eq!(status["sharing"]["asked"], "mps");
    // Time slices are set through the device, too.
    let has_device = std::path::Path::new("/dev/nvidiactl").exists();
    let instead = if has_device { "timeslice" } else { "none" };
    assert_eq!(status["sharing"]["in_force"], instead);
    let reason = status["sharing"]["reason"].as_str().unwrap();
    assert!(reason.contains("/nonexistent/mps"), "{reason}");
    assert_eq!(reason.contains("no NVIDIA device"), !has_device, "{reason}");
}

/// Stands in for `nvidia-cuda-mps-control`.
const FAKE_MPS: &str = r#"#!/bin/sh
dir="$CUDA_MPS_PIPE_DIRECTORY"
if [ "$1" = "-f" ]; then
  echo $$ > "$dir/control"
  trap 'rm -f "$dir/control"; exit 0' TERM
  while [ -e "$dir/control" ]; do sleep 0.05; done
  exit 0
fi
read line
[ -e "$dir/control" ] || exit 1
echo "$line" >> "$dir/asked"
[ "$line" = quit ] && rm -f "$dir/control"
exit 0
"#;

/// A program in a file, as a setting has it.
fn script(dir: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&path, mode).unwrap();
    format!("{:?}", path.display().to_string())
}

#[test]
fn contexts_are_refreshed_while_clients_of_both_classes_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let fake = script(&dir, "fake-mps", FAKE_MPS);
    let noted = dir.path().join("noted");
    let noting =
        format!("#!/bin/sh\necho $$ $CUDA_MPS_PIPE_DIRECTORY > {}\nexec cat\n", noted.display());
    let program = script(&dir, "refresh", &noting);
    let config = |program| {
        format!(
            "{BUILT_IN}[sharing]\nmode = \"mps\"\n[sharing.mps]\ncontrol = {fake}\n\
             refresh_ms = 5\nrefresh_program = {program}\n"
        )
    };
    let failing = script(&dir, "failing", "#!/bin/sh\necho no device >&2\nexit 1\n");
    let failing = config(failing);
    let core = Core::start(&config(program), &[]);
    let shown = |core: &Core| core.status()["sharing"]["refresh"].clone();
    let _low = Client::best_effort(&core, "low");
    assert_eq!(
        shown(&core),
        json!({"every_ms": 5, "state": "waiting for clients of both classes", "count": 0})
    );
    let high = Client::high(&core, "high");
    eventually("some were made", || shown(&core)["count"].as_u64() > Some(3));
    assert_eq!(shown(&core)["state"], "running");
    let noted = std::fs::read_to_string(noted).unwrap();
    let (pid, daemon) = noted.trim().split_once(' ').unwrap();
    assert_eq!(daemon, "/nonexistent", "it stays out of MPS");
    drop(high);
    eventually("it gives its context back", || {
        shown(&core)["state"] == "waiting for clients of both classes"
            && !std::path::Path::new("/proc").join(pid).exists()
    });
    drop(core);

    let core = Core::start(&failing, &[]);
    let _both = (Client::best_effort(&core, "low"), Client::high(&core, "high"));
    eventually("it failed", || shown(&core)["state"] == "failed: it ended: no device");
    assert_eq!(shown(&core)["count"], 0);
}

#[test]
fn a_private_mps_daemon_is_started_watched_and_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let fake = script(&dir, "fake-mps", FAKE_MPS);
    let config = format!(
        "{BUILT_IN}[sharing]\nmode = \"mps\"\n[sharing.mps]\ncontrol = {fake}\nbest_effort_percent = 60\n"
    );
    let mut core = Core::start_in(dir, &config, &[]);
    let mps = core.status()["sharing"]["mps"].clone();
    assert_eq!((&mps["managed"], &mps["state"]), (&json!(true), &json!("running")));
    let pipes = core.dir.path().join("run/clients/mps/pipe");
    let client = Client::best_effort(&core, "x");
    assert_eq!(
        client.welcome.sharing,
        tally_ipc::wire::SharingMode::Mps {
            pipe_directory: pipes.display().to_string(),
            client_priority: 1,
            thread_percent: 60,
        }
    );
    // It dies: started again.
    let pid = mps["pid"].as_u64().unwrap() as i32;
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
    eventually("it is started again", || {
        let mps = core.status()["sharing"]["mps"].clone();
        mps["restarts"] == 1 && mps["state"] == "running"
    });
    // Left to the next core, which takes it over.
    let asked = || std::fs::read_to_string(pipes.join("asked")).unwrap();
    core.ask(json!({"cmd": "stop", "keep_mps": true}));
    assert_eq!(core.wait().code(), Some(0));
    assert!(!asked().contains("quit") && pipes.join("control").exists(), "kept");
    let mut core = Core::start_in(core.kill(), &config, &[]);
    let mps = core.status()["sharing"]["mps"].clone();
    assert_eq!(
        (&mps["restarts"], &mps["state"], &mps["pid"]),
        (&json!(0), &json!("running"), &json!(null))
    );
    core.signal(Signal::TERM);
    assert_eq!(core.wait().code(), Some(0));
    assert!(asked().contains("quit"));
    assert!(!pipes.join("control").exists(), "stopped");
    let logs = core.admin.parent().unwrap().join("mps-log");
    assert!(logs.join("output.log").exists(), "where no container can replace it");
    assert!(!pipes.with_file_name("log").exists());
}

#[test]
fn a_reload_under_load_loses_no_launch() {
    let (one, two) = (policy("fifo"), policy("tally-priority"));
    let core = Core::start("", &["--policy", one.to_str().unwrap()]);
    let stop = AtomicBool::new(false);
    let (launched, generations) = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut client = Client::best_effort(&core, "load");
            let mut launched = 0u64;
            while launched < 10_000 || !stop.load(SeqCst) {
                assert_eq!(client.launch(), Answer::Whole);
                launched += 1;
            }
            // A lease's last launches may be in the ring still.
            eventually("all are seen done", || {
                let shown = core.client(client.id()).unwrap();
                shown["decisions"]["completed"] == launched
            });
            launched
        });
        let mut generations = Vec::new();
        for i in 0..20 {
            let path = if i % 2 == 0 { &two } else { &one };
            let loaded = core.ask(json!({"cmd": "policy_load", "path": path}));
            generations.push(loaded["generation"].as_u64().unwrap());
        }
        stop.store(true, SeqCst);
        (load.join().unwrap(), generations)
    });
    assert!(launched >= 10_000);
    assert_eq!(generations, (2..=21).collect::<Vec<_>>());
    let status = core.status();
    assert_eq!(status["policy"]["built_in_rule_decisions"], 0);
    assert_eq!(status["policy"]["name"], "fifo");
}

#[test]
fn a_broken_file_never_replaces_the_policy_and_a_good_one_does() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("policy.wasm");
    std::fs::copy(policy("fifo"), &file).unwrap();
    let mut core =
        Core::start("[policy]\ndebounce_ms = 20\n", &["--policy", file.to_str().unwrap()]);
    let shown = |core: &Core| core.ask(json!({"cmd": "policy_show"}));
    let first = shown(&core);
    assert_eq!(first["generation"], 1);
    let replace = |bytes: &[u8]| {
        let aside = dir.path().join("aside");
        std::fs::write(&aside, bytes).unwrap();
        std::fs::rename(&aside, &file).unwrap();
    };
    replace(b"\0asm nonsense");
    eventually("the failure is shown", || shown(&core)["last_load_error"].is_object());
    assert_eq!(shown(&core)["digest"], first["digest"]);
    let (code, message) = core.refused(json!({"cmd": "policy_load", "path": file}));
    assert_eq!(code, "policy_refused");
    assert!(message.contains("policy.wasm"), "{message}");
    Client::best_effort(&core, "x").launch();
    // A good one by rename, then the same again by SIGHUP.
    replace(&std::fs::read(policy("tally-priority")).unwrap());
    eventually("the new one is active", || shown(&core)["generation"] == 2);
    assert_ne!(shown(&core)["digest"], first["digest"]);
    assert_eq!(shown(&core)["last_load_error"], json!(null));
    assert!(shown(&core)["load_failures"].as_u64().unwrap() >= 2);
    core.signal(Signal::HUP);
    eventually("loaded again", || shown(&core)["generation"] == 3);
    core.signal(Signal::TERM);
    assert_eq!(core.wait().code(), Some(0));
    assert!(admin(&core.admin, &json!({"cmd": "status"})).is_none());
}

#[test]
fn a_policys_configuration_reaches_it_and_a_wrong_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (good, bad) = (dir.path().join("good.toml"), dir.path().join("bad.toml"));
    std::fs::write(&good, "idle_gap_us = 250\n").unwrap();
    std::fs::write(&bad, "idle_gap_us = \"soon\"\n").unwrap();
    let wasm = policy("tally-priority");
    let core = Core::start(
        "",
        &["--policy", wasm.to_str().unwrap(), "--policy-config", good.to_str().unwrap()],
    );
    let (code, message) = core.refused(json!({"cmd": "policy_load", "path": wasm, "config": bad}));
    assert_eq!(code, "policy_refused");
    assert!(message.contains("idle_gap_us"), "{message}");
    let shown = core.ask(json!({"cmd": "policy_show"}));
    assert_eq!(shown["source"]["config_file"], json!(good));
}

#[test]
fn a_configuration_is_checked_without_a_core() {
    let dir = tempfile::tempdir().unwrap();
    let check = |config: &str| {
        let mut command = Core::command(dir.path(), config, &["--check-config", "--spin-us", "7"]);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, shown, said) = check("[engine]\nwindow_us = 77\n");
    assert_eq!(code, Some(0), "{said}");
    for line in ["window_us = 77", "spin_us = 7", "run/admin/core.sock"] {
        assert!(shown.contains(line), "{line}\n{shown}");
    }
    assert!(!dir.path().join("run").exists(), "nothing is made");
    for (config, word) in
        [("[engine]\nwindow = 3\n", "window"), ("[engine]\nwindow_us = 0\n", "window_us is 0")]
    {
        let (code, shown, said) = check(config);
        assert_eq!((code, &*shown), (Some(2), ""), "{said}");
        assert!(said.contains(word), "{said}");
    }
}
