//! Another policy takes over while programs run: no launch is lost or doubled.

use anyhow::{Result, ensure};
use rustix::process::Signal;
use std::path::Path;
use std::time::Duration;
use tally_harness::jobs::{self, ANSWER_MAX, JOB_MAX, Probe};
use tally_harness::process::{Process, wait_until};
use tally_harness::{Artefacts, Class, Device, Scene};

const REQUESTS: u64 = 120;
const STEPS: u64 = 100;

/// Programs run; `reload` is called again and again and must each time put
/// another generation active.
fn reloaded(reload: impl Fn(&Scene, &mut Process, &Path, u32) -> Result<()>) -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let alone = jobs::training_checksum(&scene, STEPS)?;
    let policy = scene.dir().join("policy.wasm");
    std::fs::copy(artefacts.policy("tally-priority")?, &policy)?;
    let mut core = scene.core(&policy, &[])?;
    let trainer = scene.governed(Class::BestEffort, "train", &jobs::training(&scene, STEPS)?)?;
    let mut trainer = scene.start("training", trainer)?;
    let server = scene.governed(Class::High, "serve", &jobs::inference(&scene, REQUESTS)?)?;
    let mut server = scene.start("inference", server)?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    for round in 0..6 {
        let before = scene.status()?.generation();
        reload(&scene, &mut core, &policy, round)?;
        wait_until("waiting for the next generation", ANSWER_MAX, || {
            Ok((scene.status()?.generation() > before).then_some(()))
        })?;
        probe.ask("launch 15 50")?;
        probe.check()?;
    }
    probe.quit()?;
    jobs::all_answered(&mut server, REQUESTS)?;
    jobs::trained_to(&mut trainer, &alone)?;
    let status = scene.status()?;
    ensure!(status.policy_faults() == 0, "{:#}", status.0);
    scene.stop(&mut core, JOB_MAX)
}

/// The two policies in turns.
fn other(scene: &Scene, round: u32) -> Result<std::path::PathBuf> {
    scene.artefacts().policy(if round.is_multiple_of(2) { "fifo" } else { "tally-priority" })
}

#[test]
fn by_signal() -> Result<()> {
    reloaded(|_, core, _, _| core.signal(Signal::HUP))
}

#[test]
fn by_a_changed_file() -> Result<()> {
    reloaded(|scene, _, policy, round| {
        let part = policy.with_extension("part");
        std::fs::copy(other(scene, round)?, &part)?;
        Ok(std::fs::rename(part, policy)?)
    })
}

#[test]
fn by_tallyctl() -> Result<()> {
    reloaded(|scene, _, _, round| {
        let file = other(scene, round)?;
        let output = scene.ctl(&["policy", "load", &file.to_string_lossy()])?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let name = scene.status()?.policy_name();
        ensure!(file.ends_with(format!("{name}.wasm")), "{name} is active after {file:?}");
        Ok(())
    })
}

/// Writes a policy over the core's own file.
fn replace(scene: &Scene, file: &Path, policy: &str) -> Result<()> {
    let part = file.with_extension("part");
    std::fs::copy(scene.artefacts().policy(policy)?, &part)?;
    Ok(std::fs::rename(part, file)?)
}

/// A core on a file of its own: the file, and the digest of `tally-priority`, which is in it.
fn on_own_file(scene: &Scene) -> Result<(std::path::PathBuf, Process, String)> {
    let file = scene.dir().join("policy.wasm");
    replace(scene, &file, "tally-priority")?;
    let core = scene.core(&file, &[])?;
    Ok((file, core, scene.status()?.policy_digest()))
}

/// Waits until a change of the core's own file has put another policy active; its digest.
fn file_changed(scene: &Scene, before: &str) -> Result<String> {
    wait_until("waiting for the changed file", ANSWER_MAX, || {
        let status = scene.status()?;
        let is_new = status.came() == "file-changed" && status.policy_digest() != before;
        Ok(is_new.then(|| status.policy_digest()))
    })
}

/// Also if it was asked for before the change of the file was noticed.
#[test]
fn the_own_file_is_followed_once_it_is_what_was_asked_for() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let (file, mut core, first) = on_own_file(&scene)?;
    replace(&scene, &file, "fifo")?;
    ctl(&scene, &["policy", "load", &file.to_string_lossy()])?;
    let fifo = scene.status()?.policy_digest();
    ensure!(fifo != first);
    replace(&scene, &file, "throughput")?;
    file_changed(&scene, &fifo)?;
    // Another was asked for: changes of the file no longer count.
    ctl(&scene, &["policy", "load", &artefacts.policy("fifo")?.to_string_lossy()])?;
    replace(&scene, &file, "tally-priority")?;
    std::thread::sleep(Duration::from_secs(1));
    ensure!(scene.status()?.policy_digest() == fifo, "{:#}", scene.status()?.0["policy"]);
    scene.stop(&mut core, JOB_MAX)
}

#[test]
fn a_file_that_changes_during_an_ab_test_is_loaded_after_it() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let (file, mut core, first) = on_own_file(&scene)?;
    let fifo = artefacts.policy("fifo")?;
    ctl(&scene, &["ab", "start", &fifo.to_string_lossy(), "--metric=hp_p99"])?;
    replace(&scene, &file, "throughput")?;
    std::thread::sleep(Duration::from_secs(1));
    ensure!(scene.status()?.came() != "file-changed", "an A/B test runs");
    ctl(&scene, &["ab", "stop"])?;
    file_changed(&scene, &first)?;
    scene.stop(&mut core, JOB_MAX)
}

/// The short form of `cargo xtask test reload`.
#[test]
fn hundreds_of_reloads_lose_nothing() -> Result<()> {
    let outcome = tally_harness::reload::run(&Artefacts::locate()?, 200)?;
    ensure!(outcome.lost + outcome.doubled == 0, "{outcome:?}");
    // Two of three keep what they learned; the first of them was offered it by a policy
    // that keeps nothing, and had it from before.
    ensure!(outcome.states_accepted >= 130, "{outcome:?}");
    ensure!(outcome.launches > 0, "nothing was launched meanwhile");
    Ok(())
}

fn ctl(scene: &Scene, arguments: &[&str]) -> Result<String> {
    let output = scene.ctl(arguments)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "tallyctl {arguments:?}: {said}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// What `tally-priority` learned of kernels is there after a reload, and after another
/// policy was active meanwhile.
#[test]
fn what_was_learnt_outlives_a_reload() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let priority = artefacts.policy("tally-priority")?;
    let mut core = scene.core(&priority, &[])?;
    let high = Probe::start(&scene, Class::High, "high")?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    let known = || -> Result<i64> {
        let known = &scene.status()?.0["policy"]["gauges"]["kernels_known"];
        Ok(known.as_i64().unwrap_or(0))
    };
    // Kernels that take longer than high priority should have to wait.
    wait_until("waiting for long kernels to be known", JOB_MAX, || {
        for blocks in [16, 24, 32] {
            probe.ask(&format!("launch 2 3000 {blocks}"))?;
            probe.ask("sync")?;
        }
        Ok((known()? == 3).then_some(()))
    })?;
    ensure!(scene.status()?.restored() == "not-offered");
    let priority = priority.to_string_lossy().into_owned();
    ctl(&scene, &["policy", "load", &priority])?;
    let status = scene.status()?;
    ensure!(status.restored() == "accepted", "{:#}", status.0["policy"]);
    ensure!(known()? == 3, "{:#}", status.0["policy"]);
    // Over a policy that keeps nothing, too.
    ctl(&scene, &["policy", "load", &artefacts.policy("fifo")?.to_string_lossy()])?;
    ensure!(scene.status()?.restored() == "no-interface");
    ctl(&scene, &["policy", "load", &priority])?;
    ensure!(scene.status()?.restored() == "accepted" && known()? == 3);
    // And one that does not know the format says so, and starts all the same.
    ctl(&scene, &["policy", "load", &artefacts.test_policy("chaos")?.to_string_lossy()])?;
    let status = scene.status()?;
    ensure!(status.restored() == "refused" && status.policy_name() == "chaos");
    let why = status.0["policy"]["restored"]["why"].to_string();
    ensure!(why.contains("tally-forms"), "{why}");
    probe.check()?;
    probe.quit()?;
    high.quit()?;
    scene.stop(&mut core, JOB_MAX)
}

/// Back to an earlier policy from memory: the files are gone.
#[test]
fn a_rollback_needs_no_file() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let file = scene.dir().join("policy.wasm");
    let config = scene.dir().join("policy.toml");
    std::fs::copy(artefacts.policy("tally-priority")?, &file)?;
    std::fs::write(&config, "idle_gap_us = 70\n")?;
    let (path, config_path) = (file.to_string_lossy(), config.to_string_lossy());
    let core_config = scene.dir().join("core.toml");
    std::fs::write(&core_config, "[policy]\nwatch = false\n")?;
    let core_config = core_config.to_string_lossy().into_owned();
    let mut core =
        scene.core(&file, &["--policy-config", &config_path, "--config", &core_config])?;
    let first = scene.status()?;
    // The file is overwritten, loaded, and deleted.
    std::fs::copy(artefacts.policy("fifo")?, &file)?;
    ctl(&scene, &["policy", "load", &path])?;
    let second = scene.status()?.policy_digest();
    ensure!(second != first.policy_digest());
    std::fs::remove_file(&file)?;
    std::fs::remove_file(&config)?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    probe.ask("launch 5 10")?;
    ctl(&scene, &["policy", "rollback"])?;
    let status = scene.status()?;
    ensure!(status.policy_digest() == first.policy_digest(), "{:#}", status.0["policy"]);
    ensure!(status.came() == "rollback" && status.generation() == 3);
    ensure!(core.stderr()?.contains("idle_gap_us = 70"), "its configuration came along");
    // Further back there is nothing; forth there is.
    let further = scene.ctl(&["policy", "rollback"])?;
    let said = String::from_utf8_lossy(&further.stderr).into_owned();
    ensure!(!further.status.success() && said.contains("no earlier policy"), "{said}");
    let nowhere = scene.ctl(&["policy", "rollback", "--to", "77"])?;
    let said = String::from_utf8_lossy(&nowhere.stderr).into_owned();
    ensure!(!nowhere.status.success() && said.contains("generation 77"), "{said}");
    ctl(&scene, &["policy", "rollback", "--to", "2"])?;
    ensure!(scene.status()?.policy_digest() == second);
    probe.ask("launch 5 10")?;
    probe.check()?;
    probe.quit()?;
    // The history tells all of it.
    let history: serde_json::Value =
        serde_json::from_str(&ctl(&scene, &["policy", "history", "--json"])?)?;
    let all = |key: &str| -> Vec<String> {
        history.as_array().into_iter().flatten().map(|r| r[key].to_string()).collect()
    };
    ensure!(all("generation") == ["1", "2", "3", "4"], "{history:#}");
    let quoted = |words: [&str; 4]| words.map(|word| format!("{word:?}"));
    ensure!(
        all("loaded_because") == quoted(["start", "asked", "rollback", "rollback"]),
        "{history:#}"
    );
    ensure!(all("same_as_generation") == ["1", "2", "1", "2"], "{history:#}");
    let unloaded_because = all("unloaded_because");
    ensure!(
        unloaded_because[..3] == quoted(["replaced", "rolled-back", "rolled-back", ""])[..3],
        "{unloaded_because:?}"
    );
    ensure!(
        unloaded_because[3] == "null" && all("kept").iter().all(|kept| kept == "true"),
        "{history:#}"
    );
    let decided = history[1]["decides"].as_u64().unwrap_or(0);
    ensure!(decided >= 1, "fifo decided {decided} launches: {history:#}");
    let table = ctl(&scene, &["policy", "history"])?;
    ensure!(table.contains("rollback of 1") && table.contains("active"), "{table}");
    scene.stop(&mut core, JOB_MAX)
}

/// What a collector of metrics reads names the active policy.
#[test]
fn the_metrics_name_the_active_policy() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let mut core = scene.core(&artefacts.policy("fifo")?, &[])?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    probe.ask("launch 10")?;
    ctl(&scene, &["policy", "load", &artefacts.policy("tally-priority")?.to_string_lossy()])?;
    let status = scene.status()?;
    let file = scene.dir().join("tally.prom");
    let printed = ctl(&scene, &["metrics"])?;
    ctl(&scene, &["metrics", "--out", &file.to_string_lossy()])?;
    for text in [printed, std::fs::read_to_string(&file)?] {
        let has = |part: &str| text.lines().any(|line| line.contains(part));
        let socket = format!("socket=\"{}\"", scene.socket().display());
        let generation = format!("{socket}}} {}", status.generation());
        ensure!(has("tally_policy_generation{gpu=\"GPU-") && has(&generation), "{text}");
        ensure!(has(&format!("digest=\"{}\"", status.policy_digest())), "{text}");
        ensure!(has(&format!("{socket},client=\"1\",name=\"probe\"")), "{text}");
        ensure!(has("# TYPE tally_client_launches_total counter"), "{text}");
        ensure!(!text.contains("# EOF"), "{text}");
    }
    probe.quit()?;
    scene.stop(&mut core, JOB_MAX)
}

/// A file that is being written, or was written wrong, changes nothing.
#[test]
fn a_bad_file_leaves_the_active_policy() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let policy = scene.dir().join("policy.wasm");
    std::fs::copy(artefacts.policy("fifo")?, &policy)?;
    let mut core = scene.core(&policy, &[])?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    let digest = scene.status()?.policy_digest();
    let whole = std::fs::read(&policy)?;
    std::fs::write(&policy, &whole[..whole.len() / 2])?;
    core.signal(Signal::HUP)?;
    wait_until("waiting for the refusal", ANSWER_MAX, || {
        Ok(scene.status()?.load_failure().is_some().then_some(()))
    })?;
    probe.ask("launch 10")?;
    probe.check()?;
    let status = scene.status()?;
    ensure!(status.policy_digest() == digest, "{:#}", status.0);
    std::fs::write(&policy, &whole)?;
    core.signal(Signal::HUP)?;
    wait_until("waiting for the good file", ANSWER_MAX, || {
        Ok(scene.status()?.load_failure().is_none().then_some(()))
    })?;
    probe.quit()?;
    scene.stop(&mut core, Duration::from_secs(30))
}
