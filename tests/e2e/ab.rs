//! A/B tests of policies while programs run: what is active, what is counted, what is
//! reported, and that the programs notice nothing but time. Nothing here depends on how
//! long anything takes.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;
use tally_harness::jobs::{self, ANSWER_MAX, JOB_MAX};
use tally_harness::process::{Process, wait_until};
use tally_harness::{Artefacts, Device, Scene};

const REQUESTS: u64 = 600;
const STEPS: u64 = 200;

/// A server and a training under a core.
struct Programs {
    server: Process,
    trainer: Process,
    alone: Value,
}

impl Programs {
    fn start(scene: &Scene, alone: Value) -> Result<Self> {
        let [trainer, server] = jobs::both_launching(scene, STEPS, REQUESTS)?;
        Ok(Programs { server, trainer, alone })
    }

    /// Every answer and every weight is right: no launch was lost or doubled.
    fn finish(mut self) -> Result<()> {
        jobs::all_answered(&mut self.server, REQUESTS)?;
        jobs::trained_to(&mut self.trainer, &self.alone)
    }
}

/// On a busy machine a policy that waits for the CPU must not end a test.
fn start_core(scene: &Scene, policy: &Path) -> Result<Process> {
    let config = scene.dir().join("core.toml");
    std::fs::write(&config, "[policy.limits]\ncall_cpu_ms_max = 2000\n")?;
    scene.core(policy, &["--config", &config.to_string_lossy()])
}

fn ab(scene: &Scene, arguments: &[&str]) -> Result<String> {
    let mut all = vec!["ab"];
    all.extend(arguments);
    let output = scene.ctl(&all)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "tallyctl {all:?}: {said}");
    Ok(String::from_utf8(output.stdout)?)
}

fn start(scene: &Scene, a: &Path, b: &Path, more: &[&str]) -> Result<String> {
    let (a, b) = (a.to_string_lossy(), b.to_string_lossy());
    let mut arguments = vec!["start", &*a, &*b, "--metric=hp_p99", "--seed=5"];
    arguments.extend(more);
    ab(scene, &arguments)
}

fn status(scene: &Scene) -> Result<Value> {
    Ok(serde_json::from_str(&ab(scene, &["status", "--json"])?)?)
}

fn report(scene: &Scene) -> Result<Value> {
    Ok(serde_json::from_str(&ab(scene, &["report", "--json"])?)?)
}

fn ended(scene: &Scene) -> Result<Value> {
    wait_until("waiting for the A/B test to end", JOB_MAX, || {
        Ok((status(scene)?["running"] == false).then_some(()))
    })?;
    report(scene)
}

fn blocks(report: &Value) -> Result<&Vec<Value>> {
    report["blocks"].as_array().context("the report lists no blocks")
}

#[test]
fn a_test_runs_and_reports_and_nothing_else_loads_a_policy_meanwhile() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let alone = jobs::training_checksum(&scene, STEPS)?;
    let (fifo, priority) = (artefacts.policy("fifo")?, artefacts.policy("tally-priority")?);
    let mut core = start_core(&scene, &fifo)?;
    let programs = Programs::start(&scene, alone)?;
    let timing = ["--block=400ms", "--washout=40ms", "--max-time=8s", "--to-end"];
    let said = start(&scene, &fifo, &priority, &timing)?;
    ensure!(said.contains("fifo (A) against tally-priority (B)"), "{said}");

    let now = status(&scene)?;
    ensure!(now["running"] == true && now["arm"].is_string(), "{now:#}");
    let whole = scene.status()?;
    ensure!(whole.0["experiment"]["running"] == true, "{:#}", whole.0);
    let load = scene.ctl(&["policy", "load", &fifo.to_string_lossy()])?;
    let refusal = String::from_utf8_lossy(&load.stderr).into_owned();
    ensure!(!load.status.success() && refusal.contains("tallyctl ab stop"), "{refusal}");
    ensure!(start(&scene, &fifo, &priority, &[]).is_err(), "two tests at once");
    let running: Value = report(&scene)?;
    ensure!(running["ended"].is_null() && running["schema"] == 1, "{running:#}");

    let report = ended(&scene)?;
    let reason = report["ended"]["reason"].as_str().unwrap_or_default();
    ensure!(["max_time", "no_traffic"].contains(&reason), "{:#}", report["ended"]);
    let blocks = blocks(&report)?;
    ensure!(blocks.len() >= 2 && blocks.len().is_multiple_of(2), "{} blocks", blocks.len());
    for pair in blocks.chunks(2) {
        ensure!(pair[0]["arm"] != pair[1]["arm"], "{pair:#?}");
    }
    let sum = |arm: &str, what: &str| -> u64 {
        blocks.iter().filter(|b| b["arm"] == arm).filter_map(|b| b[what].as_u64()).sum()
    };
    for arm in ["A", "B"] {
        ensure!(sum(arm, "requests") > 0, "arm {arm} has no requests: {blocks:#?}");
    }
    // B may hold the training for as long as a slow machine's server is busy.
    ensure!(sum("A", "be_launches") > 0, "arm A has no launches: {blocks:#?}");
    ensure!(report["b"]["keeps_state"] == true, "{:#}", report["b"]);
    let policy = scene.status()?;
    ensure!(policy.policy_name() == "fifo", "{:#}", policy.0["policy"]);
    ensure!(policy.policy_faults() == 0, "{:#}", policy.0["policy"]);

    let svg = scene.dir().join("plot.svg");
    let text = ab(&scene, &["report", "--svg", &svg.to_string_lossy()])?;
    ensure!(text.contains("pairs of blocks"), "{text}");
    let svg = std::fs::read_to_string(svg)?;
    ensure!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
    let load = scene.ctl(&["policy", "load", &priority.to_string_lossy()])?;
    ensure!(load.status.success(), "{}", String::from_utf8_lossy(&load.stderr));
    programs.finish()?;
    scene.stop(&mut core, JOB_MAX)
}

/// No request takes less than a nanosecond: B breaches the guard with its second request.
#[test]
fn a_breached_guard_makes_a_active_at_once() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let alone = jobs::training_checksum(&scene, STEPS)?;
    let (fifo, priority) = (artefacts.policy("fifo")?, artefacts.policy("tally-priority")?);
    let mut core = start_core(&scene, &priority)?;
    let programs = Programs::start(&scene, alone)?;
    // A block is much longer than it takes to notice.
    let guard = ["--block=3s", "--max-time=60s", "--guard=hp_p99<1ns"];
    start(&scene, &priority, &fifo, &guard)?;
    let report = ended(&scene)?;
    ensure!(report["ended"]["reason"] == "guard", "{:#}", report["ended"]);
    ensure!(report["ended"]["arm"] == "B", "{:#}", report["ended"]);
    ensure!(report["verdict"] == "withdrawn", "{:#}", report["why"]);
    let message = report["ended"]["message"].as_str().unwrap_or_default();
    ensure!(message.contains("hp_p99<1ns"), "{message}");
    ensure!(report["a_back_after_ns"].as_u64().is_some(), "{report:#}");
    let of_b = blocks(&report)?.iter().filter(|b| b["arm"] == "B").count();
    ensure!(of_b == 0, "a whole block of B went by: {report:#}");
    let policy = scene.status()?;
    ensure!(policy.policy_name() == "tally-priority", "{:#}", policy.0["policy"]);
    programs.finish()?;
    scene.stop(&mut core, JOB_MAX)
}

/// The training's second kernel is one that `chaos` traps on.
#[test]
fn a_policy_that_traps_ends_the_test_and_a_serves() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let alone = jobs::training_checksum(&scene, STEPS)?;
    let (fifo, chaos) = (artefacts.policy("fifo")?, artefacts.test_policy("chaos")?);
    let mut core = start_core(&scene, &fifo)?;
    let programs = Programs::start(&scene, alone)?;
    start(&scene, &fifo, &chaos, &["--block=300ms", "--washout=30ms", "--max-time=60s"])?;
    let report = ended(&scene)?;
    ensure!(report["ended"]["reason"] == "policy_failed", "{:#}", report["ended"]);
    let message = report["ended"]["message"].as_str().unwrap_or_default();
    ensure!(message.contains("arm B") && message.contains("Trap"), "{message}");
    // Whether it failed as it took over or later.
    ensure!(report["ended"]["arm"] == "B", "{:#}", report["ended"]);
    ensure!(report["verdict"] == "keep_a", "{:#}", report["why"]);
    programs.finish()?;
    let policy = scene.status()?;
    ensure!(policy.policy_name() == "fifo" && !policy.policy_disabled(), "{:#}", policy.0);
    scene.stop(&mut core, JOB_MAX)
}

#[test]
fn a_test_is_stopped_by_hand_and_by_the_cores_end() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let (fifo, priority) = (artefacts.policy("fifo")?, artefacts.policy("tally-priority")?);
    let mut core = start_core(&scene, &priority)?;
    ensure!(ab(&scene, &["report"]).is_err(), "there was no test");
    ensure!(start(&scene, &fifo, &priority, &[]).is_err(), "A is not the active policy");
    start(&scene, &fifo, &priority, &["--replace-active"])?;
    let said = ab(&scene, &["stop"])?;
    ensure!(said.contains("stopped after"), "{said}");
    ensure!(scene.status()?.policy_name() == "fifo", "A serves after a test");
    ensure!(ab(&scene, &["stop"]).is_err(), "there is none to stop");
    start(&scene, &priority, &fifo, &["--replace-active"])?;
    wait_until("waiting for the first block", ANSWER_MAX, || {
        Ok((status(&scene)?["elapsed_s"].as_f64() > Some(0.1)).then_some(()))
    })?;
    scene.stop(&mut core, Duration::from_secs(30))?;
    let said = core.stderr()?;
    ensure!(said.contains("the core was stopped") && said.contains("drained"), "{said}");
    // The next core has the report.
    let mut core = start_core(&scene, &priority)?;
    let kept = report(&scene)?;
    ensure!(kept["ended"]["reason"] == "core_stopping", "{kept:#}");
    ensure!(kept["a"]["name"] == "tally-priority" && kept["b"]["name"] == "fifo", "{kept:#}");
    let experiment = &scene.status()?.0["experiment"];
    ensure!(experiment["ended"] == "core_stopping" && experiment["running"] == false);
    scene.stop(&mut core, JOB_MAX)
}

/// What was known when a core died is there, and says that it was.
#[test]
fn a_test_that_a_dead_core_left_is_reported_as_interrupted() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let (fifo, priority) = (artefacts.policy("fifo")?, artefacts.policy("tally-priority")?);
    let mut core = start_core(&scene, &priority)?;
    // Long enough until ten pairs without traffic end it.
    start(&scene, &fifo, &priority, &["--block=1s", "--washout=10ms", "--replace-active"])?;
    let folder = scene.dir().join("state/tally/ab");
    let file = wait_until("waiting for blocks to be written down", ANSWER_MAX, || {
        let Ok(mut entries) = std::fs::read_dir(&folder) else { return Ok(None) };
        let is_report = |path: &std::path::PathBuf| path.extension().is_some_and(|e| e == "json");
        let Some(file) = entries.find_map(|e| Some(e.ok()?.path()).filter(is_report)) else {
            return Ok(None);
        };
        let kept: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
        ensure!(kept["report"]["ended"].is_null(), "{kept:#}");
        Ok((!blocks(&kept["report"])?.is_empty()).then_some(file))
    })?;
    core.kill()?;
    let mut core = start_core(&scene, &priority)?;
    let kept = report(&scene)?;
    ensure!(kept["ended"]["reason"] == "interrupted", "{kept:#}");
    ensure!(!blocks(&kept)?.is_empty(), "{kept:#}");
    ensure!(ab(&scene, &["report"])?.contains("A/B test, interrupted after"));
    ensure!(core.stderr()?.contains("an A/B test was interrupted"), "{}", core.stderr()?);
    ensure!(scene.status()?.0["experiment"]["ended"] == "interrupted");
    ensure!(ab(&scene, &["stop"]).is_err(), "there is none to stop");
    // A damaged one is said, and no reason not to serve.
    scene.stop(&mut core, JOB_MAX)?;
    std::fs::write(&file, "{")?;
    let mut core = start_core(&scene, &priority)?;
    ensure!(ab(&scene, &["report"]).is_err(), "there is none");
    ensure!(core.stderr()?.contains("it is damaged"), "{}", core.stderr()?);
    scene.stop(&mut core, JOB_MAX)
}
