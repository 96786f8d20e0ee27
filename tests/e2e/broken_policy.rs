//! A policy that misbehaves costs itself its turn, never the clients: the
//! built-in rule serves, and the message says what was wrong.
//!
//! The guest `chaos` misbehaves by the number of a kernel, in order of first
//! launch: 1 traps, 2 loops, 3 takes all memory, 11 answers nonsense. The probe's
//! launches with different numbers of blocks are different kernels.

use anyhow::{Context, Result, ensure};
use tally_tests::jobs::{self, ANSWER_MAX, JOB_MAX, Probe};
use tally_tests::process::wait_until;
use tally_tests::{Artefacts, Class, Device, Scene};

/// Exit code of a core whose policy cannot be loaded.
const EXIT_POLICY: i32 = 3;

/// Launches kernel `number` under `chaos` and expects a fault of one of the `kinds`.
fn misbehaves(number: u32, kinds: &[&str]) -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    // The kernels before it get their numbers while another policy is in charge.
    let mut core = scene.core(&artefacts.policy("fifo")?, &[])?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    for blocks in 1..=number {
        probe.ask(&format!("launch 1 10 {blocks}"))?;
        probe.ask("sync")?;
    }
    let chaos = artefacts.test_policy("chaos")?;
    let load = scene.ctl(&["policy", "load", &chaos.to_string_lossy()])?;
    ensure!(load.status.success(), "{}", String::from_utf8_lossy(&load.stderr));
    let blocks = number + 1;
    probe.ask(&format!("launch 1 10 {blocks}"))?;
    let status = scene.status()?;
    let counted = kinds.iter().map(|kind| status.faults_of(kind)).sum::<u64>();
    ensure!(counted >= 1, "none of {kinds:?} counted: {:#}", status.0);
    ensure!(status.fallbacks() >= 1, "no fallback counted: {:#}", status.0);
    let last = status.last_fault().to_lowercase();
    ensure!(kinds.iter().any(|kind| last.contains(kind)), "the last fault is {last}");
    // Three strikes, and it is asked no more; launches go on all the same.
    for _ in 0..5 {
        probe.ask(&format!("launch 2 10 {blocks}"))?;
        probe.ask("sync")?;
    }
    probe.check()?;
    let status = scene.status()?;
    ensure!(status.policy_disabled(), "still asked after its faults: {:#}", status.0);
    probe.quit()?;
    scene.stop(&mut core, JOB_MAX)
}

#[test]
fn a_trap() -> Result<()> {
    misbehaves(1, &["trap"])
}

#[test]
fn a_loop() -> Result<()> {
    misbehaves(2, &["overrun"])
}

#[test]
fn a_memory_bomb() -> Result<()> {
    // Filling memory takes fuel; whichever runs out first.
    misbehaves(3, &["memory", "overrun"])
}

#[test]
fn a_nonsense_answer() -> Result<()> {
    misbehaves(11, &["nonsense"])
}

/// Real programs under a policy that traps: the training's second kernel is the
/// one that does it.
#[test]
fn programs_finish_under_a_policy_that_traps() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let alone = jobs::training_checksum(&scene, 40)?;
    let mut core = scene.core(&artefacts.test_policy("chaos")?, &[])?;
    let trainer = scene.governed(Class::BestEffort, "train", &jobs::training(&scene, 40)?)?;
    let mut trainer = scene.start("training", trainer)?;
    let server = scene.governed(Class::High, "serve", &jobs::inference(&scene, 60)?)?;
    let mut server = scene.start("inference", server)?;
    jobs::all_answered(&mut server, 60)?;
    jobs::trained_to(&mut trainer, &alone)?;
    let status = scene.status()?;
    ensure!(status.policy_faults() >= 1, "{:#}", status.0);
    scene.stop(&mut core, JOB_MAX)
}

/// Starting with something that is no policy: exit code 3 and a message that
/// names the file and what is wrong with it.
fn refused(name: &str, content: &[u8], words: &[&str]) -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let file = scene.dir().join(name);
    std::fs::write(&file, content)?;
    let mut core = scene.core_unready(&file, &[])?;
    let status = core.wait(ANSWER_MAX)?;
    ensure!(status.code() == Some(EXIT_POLICY), "{status}\n{}", core.quote());
    let said = core.stderr()?;
    for word in words.iter().chain(&[name]) {
        ensure!(said.contains(word), "{word:?} is not in the message:\n{said}");
    }
    // The same into a core that runs: refused, and the old one stays.
    let mut core = scene.core(&artefacts.policy("fifo")?, &[])?;
    let load = scene.ctl(&["policy", "load", &file.to_string_lossy()])?;
    ensure!(!load.status.success(), "loading it succeeded");
    let said = String::from_utf8_lossy(&load.stderr).into_owned();
    for word in words.iter().chain(&[name]) {
        ensure!(said.contains(word), "{word:?} is not in the message:\n{said}");
    }
    ensure!(scene.status()?.policy_name() == "fifo");
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    probe.ask("launch 10")?;
    probe.check()?;
    probe.quit()?;
    scene.stop(&mut core, JOB_MAX)
}

#[test]
fn a_file_that_is_not_wasm() -> Result<()> {
    refused("notes.wasm", b"#!/bin/sh\necho no policy\n", &["not a WebAssembly component"])
}

#[test]
fn a_core_module() -> Result<()> {
    refused("module.wasm", b"\0asm\x01\0\0\0", &["core WebAssembly module, not a component"])
}

/// The smallest component there is: it implements the empty world.
#[test]
fn a_component_of_another_world() -> Result<()> {
    refused("other.wasm", b"\0asm\x0d\0\x01\0", &["does not export", "wit/policy.wit"])
}

#[test]
fn an_init_that_traps() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let config = scene.dir().join("chaos.toml");
    std::fs::write(&config, "1")?;
    let config = config.to_string_lossy().into_owned();
    let chaos = artefacts.test_policy("chaos")?;
    let mut core = scene.core_unready(&chaos, &["--policy-config", &config])?;
    let status = core.wait(ANSWER_MAX)?;
    ensure!(status.code() == Some(EXIT_POLICY), "{status}\n{}", core.quote());
    ensure!(core.stderr()?.contains("chaos.wasm"), "{}", core.quote());
    Ok(())
}

/// `policy.required = false`: the core serves by its built-in rule instead.
#[test]
fn the_built_in_rule_serves_without_a_policy() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let alone = jobs::training_checksum(&scene, 30)?;
    let config = scene.dir().join("core.toml");
    std::fs::write(&config, "[policy]\nrequired = false\n")?;
    let config = config.to_string_lossy().into_owned();
    let missing = scene.dir().join("missing.wasm");
    let mut core = scene.core(&missing, &["--config", &config])?;
    let failure = scene.status()?.load_failure().context("the failure is not in the status")?;
    ensure!(failure.contains("missing.wasm"), "{failure}");
    let trainer = scene.governed(Class::BestEffort, "train", &jobs::training(&scene, 30)?)?;
    let mut trainer = scene.start("training", trainer)?;
    let server = scene.governed(Class::High, "serve", &jobs::inference(&scene, 40)?)?;
    let mut server = scene.start("inference", server)?;
    jobs::all_answered(&mut server, 40)?;
    jobs::trained_to(&mut trainer, &alone)?;
    wait_until("waiting for both to be gone", ANSWER_MAX, || {
        Ok(scene.status()?.clients()?.is_empty().then_some(()))
    })?;
    scene.stop(&mut core, JOB_MAX)
}
