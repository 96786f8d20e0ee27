//! Another policy takes over while programs run: no launch is lost or doubled.

use anyhow::{Result, ensure};
use rustix::process::Signal;
use std::path::Path;
use std::time::Duration;
use tally_tests::jobs::{self, ANSWER_MAX, JOB_MAX, Probe};
use tally_tests::process::{Process, wait_until};
use tally_tests::{Artefacts, Class, Device, Scene};

const REQUESTS: u64 = 120;
const STEPS: u64 = 100;

/// Programs run; `reload` is called again and again and must each time put
/// another generation in charge.
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
        ensure!(file.ends_with(format!("{name}.wasm")), "{name} is in charge after {file:?}");
        Ok(())
    })
}

/// A file that is being written, or was written wrong, changes nothing.
#[test]
fn a_bad_file_leaves_the_policy_in_charge() -> Result<()> {
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
