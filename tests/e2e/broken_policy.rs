//! A policy that misbehaves costs itself its turn, never the clients: the
//! built-in rule serves, the message says what was wrong, and after three times the
//! last good policy is back by itself.
//!
//! The guest `chaos` misbehaves by the number of a kernel, in order of first
//! launch: 1 traps, 2 loops, 3 takes all memory, 10 holds for ever, 11 answers
//! nonsense. The probe's
//! launches with different numbers of blocks are different kernels.

use anyhow::{Context, Result, ensure};
use tally_harness::jobs::{self, ANSWER_MAX, JOB_MAX, Probe};
use tally_harness::process::{Process, wait_until};
use tally_harness::status::Status;
use tally_harness::{Artefacts, Class, Device, Scene};

/// Exit code of a core whose policy cannot be loaded.
const EXIT_POLICY: i32 = 3;

/// Launches the kernels before `number`, so that they get their numbers.
fn number_kernels(probe: &mut Probe, number: u32) -> Result<()> {
    for blocks in 1..=number {
        probe.ask(&format!("launch 1 10 {blocks}"))?;
        probe.ask("sync")?;
    }
    Ok(())
}

/// Launches kernel `number` until the policy is disabled.
fn get_disabled(probe: &mut Probe, number: u32) -> Result<()> {
    for _ in 0..5 {
        probe.ask(&format!("launch 2 10 {}", number + 1))?;
        probe.ask("sync")?;
    }
    Ok(())
}

/// A core on `policy` that notices stalls soon.
fn core(scene: &Scene, policy: &std::path::Path, more: &str) -> Result<Process> {
    let config = scene.dir().join("core.toml");
    let text = format!(
        "[policy]\ndebounce_ms = 20\n[policy.limits]\ncall_cpu_ms_max = 2000\n\
         [policy.disabling]\nstall_ms = 150\n{more}"
    );
    std::fs::write(&config, text)?;
    scene.core(policy, &["--config", &config.to_string_lossy()])
}

/// What fails when a policy is to be replaced counts like any other fault, and the next one takes over.
#[test]
fn a_snapshot_that_fails_is_counted() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let fifo = artefacts.policy("fifo")?;
    let mut core = core(&scene, &fifo, "")?;
    let config = scene.dir().join("chaos.toml");
    std::fs::write(&config, "snapshot-1")?;
    let (chaos, config) = (artefacts.test_policy("chaos")?, config.to_string_lossy().into_owned());
    for load in
        [vec![&*chaos.to_string_lossy(), "--config", &*config], vec![&*fifo.to_string_lossy()]]
    {
        let load = scene.ctl(&[&["policy", "load"], &load[..]].concat())?;
        ensure!(load.status.success(), "{}", String::from_utf8_lossy(&load.stderr));
    }
    let status = scene.status()?;
    ensure!(status.policy_faults() == 1, "{:#}", status.0["policy"]);
    scene.stop(&mut core, JOB_MAX)
}

/// Launches kernel `number` under `chaos` and expects a fault of one of the `kinds`.
fn misbehaves(number: u32, kinds: &[&str]) -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    // The kernels before it get their numbers while another policy is active.
    let mut core = core(&scene, &artefacts.policy("fifo")?, "")?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    number_kernels(&mut probe, number)?;
    let chaos = artefacts.test_policy("chaos")?;
    let load = scene.ctl(&["policy", "load", &chaos.to_string_lossy()])?;
    ensure!(load.status.success(), "{}", String::from_utf8_lossy(&load.stderr));
    probe.ask(&format!("launch 1 10 {}", number + 1))?;
    let status = scene.status()?;
    let counted = kinds.iter().map(|kind| status.faults_of(kind)).sum::<u64>();
    ensure!(counted >= 1, "none of {kinds:?} counted: {:#}", status.0);
    ensure!(
        status.built_in_rule_decisions() >= 1,
        "no launch of the built-in rule counted: {:#}",
        status.0
    );
    let last = status.last_fault().to_lowercase();
    ensure!(kinds.iter().any(|kind| last.contains(kind)), "the last fault is {last}");
    // After three faults it is asked no more; launches go on all the same.
    get_disabled(&mut probe, number)?;
    probe.check()?;
    // The last good policy is back by itself, and the status says why.
    let status = back(&scene, "fifo", "fallback")?;
    let disabled = status.disabled().unwrap_or_default();
    ensure!(
        kinds.contains(&&*disabled),
        "disabled for {disabled:?}, not {kinds:?}: {:#}",
        status.0
    );
    let cost = status.0["policy"]["fault_cost_us"]["max"].as_f64().unwrap_or(0.0);
    ensure!(disabled == "stall" || cost > 0.0, "no cost was measured: {:#}", status.0["policy"]);
    println!("{disabled}: a call that failed kept its launch waiting for at most {cost:.0} us");
    probe.ask(&format!("launch 3 10 {}", number + 1))?;
    probe.check()?;
    probe.quit()?;
    scene.stop(&mut core, JOB_MAX)
}

/// Waits until that policy is active for that reason.
fn back(scene: &Scene, name: &str, loaded_because: &str) -> Result<Status> {
    wait_until(&format!("waiting for {name} to come back"), ANSWER_MAX, || {
        let status = scene.status()?;
        Ok((status.policy_name() == name && status.came() == loaded_because).then_some(status))
    })
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

#[test]
fn a_stall() -> Result<()> {
    misbehaves(10, &["stall"])
}

/// The file watch takes a policy that fails; the last good one comes back from memory,
/// and the same file is not taken again, unless somebody asks for it.
#[test]
fn a_disabled_file_is_not_taken_again() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let file = scene.dir().join("policy.wasm");
    let replace = |with: &std::path::Path| -> Result<()> {
        let part = file.with_extension("part");
        std::fs::copy(with, &part)?;
        Ok(std::fs::rename(part, &file)?)
    };
    let (fifo, chaos) = (artefacts.policy("fifo")?, artefacts.test_policy("chaos")?);
    replace(&fifo)?;
    let mut core = core(&scene, &file, "back_off_initial_ms = 50\nback_off_max_ms = 50\n")?;
    let good = scene.status()?.policy_digest();
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    number_kernels(&mut probe, 1)?;
    replace(&chaos)?;
    let bad = wait_until("waiting for the changed file", ANSWER_MAX, || {
        let status = scene.status()?;
        Ok((status.policy_digest() != good && status.came() == "file-changed").then_some(status))
    })?;
    get_disabled(&mut probe, 1)?;
    let status = back(&scene, "policy", "fallback")?;
    ensure!(status.policy_digest() == good, "{:#}", status.0["policy"]);
    // The same content again, as a deployment would: not taken, and the log says so.
    let generation = status.generation();
    std::fs::copy(&artefacts.policy("tally-priority")?, scene.dir().join("aside"))?;
    replace(&scene.dir().join("aside"))?;
    wait_until("waiting for other content", ANSWER_MAX, || {
        Ok((scene.status()?.generation() > generation).then_some(()))
    })?;
    let generation = scene.status()?.generation();
    replace(&chaos)?;
    wait_until("waiting for the refusal in the log", ANSWER_MAX, || {
        Ok(core.stderr()?.contains("this policy was disabled").then_some(()))
    })?;
    ensure!(scene.status()?.generation() == generation, "taken again");
    // Somebody wants it: so be it.
    let load = scene.ctl(&["policy", "load", &file.to_string_lossy()])?;
    ensure!(load.status.success(), "{}", String::from_utf8_lossy(&load.stderr));
    ensure!(scene.status()?.policy_digest() == bad.policy_digest());
    probe.check()?;
    probe.quit()?;
    scene.stop(&mut core, JOB_MAX)
}

/// With no good policy to go back to, the built-in rule serves and the same one is tried
/// again after a while.
#[test]
fn without_a_good_one_the_same_is_tried_again_later() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let chaos = artefacts.test_policy("chaos")?;
    let mut core = core(&scene, &chaos, "back_off_initial_ms = 300\n")?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    number_kernels(&mut probe, 1)?;
    get_disabled(&mut probe, 1)?;
    let status = back(&scene, "chaos", "retry")?;
    ensure!(status.disabled().as_deref() == Some("trap"), "{:#}", status.0["policy"]);
    ensure!(status.0["policy"]["same_as_generation"] == 1, "{:#}", status.0["policy"]);
    probe.check()?;
    probe.quit()?;
    scene.stop(&mut core, JOB_MAX)
}

/// `restore = "built-in"`: nothing comes back by itself.
#[test]
fn the_built_in_rule_can_be_all_that_comes_back() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let mut core = core(&scene, &artefacts.policy("fifo")?, "restore = \"built-in\"\n")?;
    let mut probe = Probe::start(&scene, Class::BestEffort, "probe")?;
    number_kernels(&mut probe, 1)?;
    let chaos = artefacts.test_policy("chaos")?;
    let load = scene.ctl(&["policy", "load", &chaos.to_string_lossy()])?;
    ensure!(load.status.success(), "{}", String::from_utf8_lossy(&load.stderr));
    get_disabled(&mut probe, 1)?;
    let status = wait_until("waiting for the status to say so", ANSWER_MAX, || {
        let status = scene.status()?;
        Ok(status.disabled().is_some().then_some(status))
    })?;
    ensure!(status.policy_disabled() && status.policy_name() == "chaos", "{:#}", status.0);
    get_disabled(&mut probe, 1)?;
    probe.check()?;
    ensure!(scene.status()?.generation() == status.generation(), "something came back");
    // By hand it does.
    let output = scene.ctl(&["policy", "rollback"])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    ensure!(scene.status()?.policy_name() == "fifo");
    probe.quit()?;
    scene.stop(&mut core, JOB_MAX)
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
