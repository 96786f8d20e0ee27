//! Loads that take long keep nobody waiting: a later load, a rollback and the automatic recovery overtake them.

mod common;

use common::{Client, Core, eventually, policy};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::thread::{ScopedJoinHandle, scope};
use tally_harness::components;

/// A component that takes seconds to compile.
fn bulky(folder: &Path) -> PathBuf {
    let path = folder.join("bulky.wasm");
    std::fs::write(&path, components::bulky(80)).unwrap();
    path
}

/// Whether the core's compiler runs.
fn is_compiling(core: &Core) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", core.pid())).unwrap();
    tasks.flatten().any(|task| {
        let children = std::fs::read_to_string(task.path().join("children"));
        children.is_ok_and(|children| !children.trim().is_empty())
    })
}

fn load(path: &Path) -> Value {
    json!({"cmd": "policy_load", "path": path})
}

/// The refusal of a load that was stopped.
fn stopped(refused: ScopedJoinHandle<'_, (String, String)>, by: &str) {
    let (code, message) = refused.join().unwrap();
    assert_eq!(code, "conflict", "{message}");
    for part in ["bulky.wasm", by, "load it again"] {
        assert!(message.contains(part), "{message}");
    }
}

fn core_with_two_policies() -> Core {
    let core = Core::start("", &["--policy", policy("fifo").to_str().unwrap()]);
    core.ask(load(&policy("tally-priority")));
    core
}

#[test]
fn a_rollback_stops_a_load_that_is_being_compiled() {
    let core = core_with_two_policies();
    let bulky = bulky(core.dir.path());
    scope(|scope| {
        let refused = scope.spawn(|| core.refused(load(&bulky)));
        eventually("it is being compiled", || is_compiling(&core));
        let back = core.ask(json!({"cmd": "policy_rollback"}));
        assert_eq!((&back["name"], &back["generation"]), (&json!("fifo"), &json!(3)));
        stopped(refused, "a rollback came");
    });
    assert!(!is_compiling(&core));
    assert_eq!(core.status()["policy"]["load_failures"], 0, "nothing is wrong with it");
}

#[test]
fn a_later_load_stops_one_that_is_being_compiled() {
    let core = core_with_two_policies();
    let bulky = bulky(core.dir.path());
    scope(|scope| {
        let refused = scope.spawn(|| core.refused(load(&bulky)));
        eventually("it is being compiled", || is_compiling(&core));
        let loaded = core.ask(load(&policy("fifo")));
        assert_eq!((&loaded["name"], &loaded["generation"]), (&json!("fifo"), &json!(3)));
        stopped(refused, "a later load came");
    });
    assert!(!is_compiling(&core));
    assert_eq!(core.status()["policy"]["name"], "fifo");
}

#[test]
fn the_automatic_recovery_does_not_wait_for_a_compilation() {
    let core = core_with_two_policies();
    let bulky = bulky(core.dir.path());
    let config = core.dir.path().join("chaos.toml");
    std::fs::write(&config, "always 1").unwrap();
    let chaos = policy("../test-policies/chaos");
    core.ask(json!({"cmd": "policy_load", "path": chaos, "config": config}));
    let mut client = Client::best_effort(&core, "client");
    scope(|scope| {
        let asked = scope.spawn(|| core.refused(load(&bulky)));
        eventually("it is being compiled", || is_compiling(&core));
        for _ in 0..4 {
            client.launch();
        }
        eventually("the last good policy is back", || {
            core.status()["policy"]["name"] == "tally-priority"
        });
        assert!(is_compiling(&core) && !asked.is_finished(), "recovery has waited");
        // Nobody stopped that load; it is no policy.
        let (code, message) = asked.join().unwrap();
        assert_eq!(code, "policy_refused", "{message}");
        assert!(message.contains("does not export"), "{message}");
    });
    assert_eq!(core.status()["policy"]["name"], "tally-priority");
}

#[test]
fn a_core_goes_on_when_a_component_takes_too_much() {
    let config = "[policy.limits]\ncompile_cpu_s = 1\n";
    let core = Core::start(config, &["--policy", policy("fifo").to_str().unwrap()]);
    let (code, message) = core.refused(load(&bulky(core.dir.path())));
    assert_eq!(code, "policy_refused");
    for part in ["bulky.wasm", "1 s of CPU time", "raise `compile_cpu_s` (now 1)"] {
        assert!(message.contains(part), "{message}");
    }
    let mut client = Client::best_effort(&core, "client");
    client.launch();
    assert_eq!(core.status()["policy"]["name"], "fifo");
}

/// The number behind `name` in a file of the core's below `/proc`.
fn of_process(core: &Core, file: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/{file}", core.pid())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Ticks of CPU time of the core and of the processes that it has waited for, 100 a second.
fn cpu_ticks(core: &Core) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/stat", core.pid())).unwrap();
    let fields = text.rsplit_once(')').unwrap().1.split_whitespace();
    fields.skip(11).take(4).map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

/// The audit's finding 8: it took 31 s and 7.9 GB.
#[test]
fn a_core_refuses_the_audits_component_in_a_second_and_little_memory() {
    let core = Core::start("", &["--policy", policy("fifo").to_str().unwrap()]);
    let (path, bytes) = (core.dir.path().join("bomb.wasm"), components::nested(20_000));
    assert_eq!(bytes.len(), 238_506);
    std::fs::write(&path, bytes).unwrap();
    let before = cpu_ticks(&core);
    for _ in 0..3 {
        let (code, message) = core.refused(load(&path));
        assert_eq!(code, "policy_refused");
        // By its bound, before anything is compiled.
        assert!(message.contains("bomb.wasm") && message.contains("8 levels"), "{message}");
    }
    // Of CPU time, since the machine may be busy.
    let took = cpu_ticks(&core) - before;
    assert!(took < 3 * 100, "{took} ticks for three");
    let most_kib = of_process(&core, "status", "VmHWM:");
    assert!(most_kib < 256 << 10, "{most_kib} KiB");
    assert_eq!(core.status()["policy"]["generation"], 1);
}
