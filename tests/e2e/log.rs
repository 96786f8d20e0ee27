//! The decision log and the shadow, beside real programs on the software device.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::Path;
use tally_harness::jobs::{self, ANSWER_MAX, JOB_MAX, Probe};
use tally_harness::process::wait_until;
use tally_harness::{Artefacts, Class, Device, Scene};

const REQUESTS: u64 = 40;
const STEPS: u64 = 40;

fn path(p: &Path) -> String {
    p.to_string_lossy().into_owned()
}

/// `tallyctl` that must end well; its standard output.
fn ctl(scene: &Scene, arguments: &[&str]) -> Result<String> {
    let output = scene.ctl(arguments)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "tallyctl {arguments:?}: {}\n{said}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

fn json(scene: &Scene, arguments: &[&str]) -> Result<Value> {
    let out = ctl(scene, arguments)?;
    serde_json::from_str(&out).with_context(|| format!("tallyctl {arguments:?}: {out}"))
}

fn count(v: &Value, at: &str) -> u64 {
    v.pointer(at).and_then(Value::as_u64).unwrap_or(u64::MAX)
}

/// An inference and a training, to their ends. Another high-priority client is connected all the while, for alone the
/// training would launch under a lease, by which nothing is decided.
fn two_programs(scene: &Scene) -> Result<()> {
    let high = Probe::start(scene, Class::High, "high")?;
    let trainer = scene.governed(Class::BestEffort, "train", &jobs::training(scene, STEPS)?)?;
    let mut trainer = scene.start("training", trainer)?;
    let server = scene.governed(Class::High, "serve", &jobs::inference(scene, REQUESTS)?)?;
    let mut server = scene.start("inference", server)?;
    jobs::all_answered(&mut server, REQUESTS)?;
    ensure!(trainer.finish(JOB_MAX)?["checksum"].is_string() || trainer.poll()?.is_some());
    high.quit()?;
    wait_until("waiting for all to be gone", ANSWER_MAX, || {
        Ok(scene.status()?.clients()?.is_empty().then_some(()))
    })
}

#[test]
fn a_log_of_two_programs_is_replayed_and_compared() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let file = path(&scene.dir().join("run.tallylog"));
    let mut core = scene.core(&artefacts.policy("tally-priority")?, &["--log", &file])?;
    two_programs(&scene)?;
    // Anew, with what the first instance knew: a part of its own.
    let priority = path(&artefacts.policy("tally-priority")?);
    ctl(&scene, &["policy", "load", &priority])?;
    two_programs(&scene)?;
    ensure!(scene.status()?.0["log"]["dropped"] == 0, "{:#}", scene.status()?.0["log"]);
    scene.stop(&mut core, JOB_MAX)?;
    // The log's own policy: nothing differs, all of it is compared. (Unless the clock of
    // this busy machine stopped a call, which no replay repeats.)
    let output = scene.ctl(&["log", "replay", &file, "--json"])?;
    let report: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["equal"] == true && report["same_policy"] == true, "{report:#}");
    ensure!(count(&report, "/comparison/decisions") > 50, "{report:#}");
    ensure!(count(&report, "/parts/from_start") == 2, "{report:#}");
    ensure!(report["incomplete"].is_null(), "{report:#}");
    let stopped = count(&report, "/parts/timed_faults") > 0;
    ensure!(output.status.success() != stopped, "{}: {report:#}", output.status);
    // Another: where they part is told, and that is no failure.
    let fifo = path(&artefacts.policy("fifo")?);
    let other = json(&scene, &["log", "replay", &file, "--policy", &fifo, "--json"])?;
    ensure!(other["equal"] == false && other["same_policy"] == false, "{other:#}");
    ensure!(count(&other, "/comparison/matrix/1/0") > 0, "held and run: {other:#}");
    ensure!(other["clients"][0]["name"] == "train" || count(&other, "/clients/0/parted") > 0);
    let shown = ctl(&scene, &["log", "replay", &file, "--policy", &fifo])?;
    ensure!(shown.contains("first difference") && shown.contains("hold"), "{shown}");
    // Read.
    let shown = ctl(&scene, &["log", "show", &file, "--json"])?;
    let lines: Vec<Value> = shown.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(lines[0]["header"]["contract"] == "tally:policy@0.1.0", "{}", lines[0]);
    ensure!(lines[1]["policy"]["name"] == "tally-priority", "{}", lines[1]);
    ensure!(lines[2]["begin"]["exact"] == true, "{}", lines[2]);
    ensure!(lines.len() as u64 == count(&report, "/records") + 1);
    let last = ctl(&scene, &["log", "show", &file, "--last", "1"])?;
    ensure!(last.lines().count() == 2 && last.contains("end: the core stopped"), "{last}");
    // Cut off: what is there is used, and it is said.
    let whole = std::fs::read(&file)?;
    let cut = scene.dir().join("cut.tallylog");
    std::fs::write(&cut, &whole[..whole.len() / 2])?;
    let output = scene.ctl(&["log", "replay", &path(&cut), "--json"])?;
    let report: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["equal"] == true && report["incomplete"].is_string(), "{report:#}");
    ensure!(count(&report, "/comparison/decisions") > 10, "{report:#}");
    // A component that changed since is not taken for the log's.
    let output = scene.ctl(&["log", "replay", &file, "--policy", &fifo, "--config", &file])?;
    ensure!(!output.status.success(), "a log is no configuration");
    Ok(())
}

/// A recording begun while the policy runs has what that knew, and is replayed from there.
/// `tally-priority` learns from the first launch on.
#[test]
fn a_recording_begun_in_mid_run_is_replayed_from_what_the_policy_knew() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let mut core = scene.core(&artefacts.policy("tally-priority")?, &[])?;
    two_programs(&scene)?;
    let high = Probe::start(&scene, Class::High, "high")?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    // Kernels that are longer than high priority should wait are looked at more closely.
    let launch = |probe: &mut Probe, times: u32| -> Result<()> {
        for blocks in [16, 24, 32].repeat(times as usize) {
            probe.ask(&format!("launch 2 3000 {blocks}"))?;
            probe.ask("sync")?;
        }
        Ok(())
    };
    wait_until("waiting for it to have learned something", JOB_MAX, || {
        launch(&mut probe, 1)?;
        let known = scene.status()?.0["policy"]["gauges"]["kernels_known"].as_i64();
        Ok((known > Some(0)).then_some(()))
    })?;
    let file = path(&scene.dir().join("mid.tallylog"));
    ctl(&scene, &["log", "record", "--out", &file])?;
    launch(&mut probe, 20)?;
    probe.check()?;
    let stopped = ctl(&scene, &["log", "stop"])?;
    ensure!(stopped.contains(" 0 dropped"), "{stopped}");
    probe.quit()?;
    high.quit()?;
    scene.stop(&mut core, JOB_MAX)?;
    let output = scene.ctl(&["log", "replay", &file, "--json"])?;
    let report: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["equal"] == true && report["same_policy"] == true, "{report:#}");
    ensure!(count(&report, "/comparison/decisions") > 50, "{report:#}");
    ensure!(count(&report, "/parts/from_saved") == 1, "{report:#}");
    ensure!(count(&report, "/parts/mid_run") == 0, "{report:#}");
    let shown = ctl(&scene, &["log", "show", &file])?;
    ensure!(shown.contains("while the policy runs, with what it knew"), "{shown}");
    Ok(())
}

#[test]
fn a_trace_of_a_program_is_simulated() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let mut core = scene.core(&artefacts.policy("fifo")?, &[])?;
    let file = path(&scene.dir().join("alone.tallylog"));
    ctl(&scene, &["log", "record", "--out", &file, "--completions"])?;
    let trainer = scene.governed(Class::BestEffort, "train", &jobs::training(&scene, 20)?)?;
    scene.start("training", trainer)?.finish(JOB_MAX)?;
    let stopped = ctl(&scene, &["log", "stop"])?;
    ensure!(stopped.contains("asked to stop"), "{stopped}");
    let trace = path(&scene.dir().join("train.csv.gz"));
    let made = ctl(&scene, &["log", "trace", &file, "--client", "train", "--out", &trace])?;
    ensure!(made.contains("kernels of train"), "{made}");
    let sim = ["sim", "--hp", "resnet50_infer_b1", "--be", &trace, "--seconds", "0.2", "--json"];
    let report = json(&scene, &sim)?;
    ensure!(count(&report, "/best_effort/done") > 0, "{report:#}");
    let output = scene.ctl(&["log", "trace", &file, "--client", "nobody", "--out", &trace])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && said.contains("nobody"), "{said}");
    scene.stop(&mut core, JOB_MAX)
}

fn shadow(scene: &Scene) -> Result<Value> {
    json(scene, &["shadow", "status", "--json"])
}

#[test]
fn a_shadow_agrees_with_itself_and_not_with_another() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let priority = artefacts.policy("tally-priority")?;
    let mut core = scene.core(&priority, &[])?;
    for (policy, same) in [(priority.clone(), true), (artefacts.policy("fifo")?, false)] {
        ctl(&scene, &["shadow", "start", &path(&policy), "--cpu-percent", "100"])?;
        two_programs(&scene)?;
        let stopped = ctl(&scene, &["shadow", "stop"])?;
        ensure!(stopped.contains("asked to stop"), "{stopped}");
        let s = shadow(&scene)?;
        ensure!(s["running"] == false && s["active"] == "tally-priority", "{s:#}");
        ensure!(count(&s, "/comparison/decisions") > 50, "{s:#}");
        ensure!(count(&s, "/dropped") == 0 && count(&s, "/parts/lost") == 0, "{s:#}");
        if same {
            // What the clock did to the active policy is not the shadow's doing.
            let timed = count(&s, "/parts/timed_faults") > 0;
            ensure!(timed || s["agreement_percent"] == 100.0, "{s:#}");
            ensure!(timed || count(&s, "/comparison/calls_differ") == 0, "{s:#}");
        } else {
            ensure!(s["agreement_percent"].as_f64().context("a number")? < 100.0, "{s:#}");
            ensure!(count(&s, "/kernels/0/parted") > 0, "{s:#}");
            ensure!(s["comparison"]["first"][0]["recorded"].is_string(), "{s:#}");
        }
    }
    let brief = &scene.status()?.0["shadow"];
    ensure!(brief["name"] == "fifo" && brief["ended"] == "asked to stop", "{brief:#}");
    scene.stop(&mut core, JOB_MAX)
}

/// `chaos` traps on the second kernel, three times, and is disabled.
#[test]
fn a_shadow_that_traps_hurts_nobody() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let mut core = scene.core(&artefacts.policy("tally-priority")?, &[])?;
    let before = scene.status()?.policy_faults();
    ctl(&scene, &["shadow", "start", &path(&artefacts.test_policy("chaos")?)])?;
    // While it is connected every best-effort launch is decided.
    let high = Probe::start(&scene, Class::High, "high")?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    wait_until("waiting for the shadow to be disabled", ANSWER_MAX, || {
        for blocks in [1, 2] {
            probe.ask(&format!("launch 3 10 {blocks}"))?;
            probe.ask("sync")?;
        }
        let s = shadow(&scene)?;
        Ok((s["running"] == false).then_some(s))
    })?;
    let s = shadow(&scene)?;
    let why = s["ended"].as_str().context("a reason")?;
    ensure!(why.contains("disabled") && why.contains("trap"), "{s:#}");
    ensure!(count(&s, "/comparison/faults/trap") == 3, "{s:#}");
    probe.ask("launch 10")?;
    probe.check()?;
    let status = scene.status()?;
    ensure!(status.policy_name() == "tally-priority" && !status.policy_disabled());
    ensure!(status.policy_faults() == before, "{:#}", status.0);
    probe.quit()?;
    high.quit()?;
    scene.stop(&mut core, JOB_MAX)
}
