//! Programs that share a device compute what they compute alone, and the status
//! tells who they are and what was decided.

use anyhow::{Result, ensure};
use tally_harness::jobs::{self, ANSWER_MAX, JOB_MAX, Probe, TRAINING_DEPTH};
use tally_harness::process::wait_until;
use tally_harness::{Artefacts, Class, Device, Scene};

const REQUESTS: u64 = 90;
const STEPS: u64 = 60;

fn shared(policy: &str) -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let alone = jobs::training_checksum(&scene, STEPS)?;
    let mut core = scene.core(&artefacts.policy(policy)?, &[])?;
    // Two best-effort jobs, so that one could starve.
    let trainer = scene.governed(Class::BestEffort, "train", &jobs::training(&scene, STEPS)?)?;
    let mut trainers = [
        scene.start("training", trainer)?,
        scene.start("training", {
            scene.governed(Class::BestEffort, "train-2", &jobs::training(&scene, STEPS)?)?
        })?,
    ];
    let server = scene.governed(Class::High, "serve", &jobs::inference(&scene, REQUESTS)?)?;
    let mut server = scene.start("inference", server)?;
    jobs::all_answered(&mut server, REQUESTS)?;
    for trainer in &mut trainers {
        jobs::trained_to(trainer, &alone)?;
    }
    let status = scene.status()?;
    ensure!(status.policy_faults() == 0, "the policy lost turns: {:#}", status.0);
    ensure!(status.decisions() > 0, "nothing was decided: {:#}", status.0);
    if policy == "fifo" {
        // It gives no leases: it is asked about every best-effort launch.
        let launches = 2 * STEPS * TRAINING_DEPTH;
        ensure!(
            status.decisions() >= launches,
            "{} decisions for {launches} launches",
            status.decisions()
        );
    }
    scene.stop(&mut core, JOB_MAX)
}

#[test]
fn results_under_fifo_are_those_of_a_run_alone() -> Result<()> {
    shared("fifo")
}

#[test]
fn results_under_tally_priority_are_those_of_a_run_alone() -> Result<()> {
    shared("tally-priority")
}

#[test]
fn results_under_slo_herald_are_those_of_a_run_alone() -> Result<()> {
    shared("slo-herald")
}

#[test]
fn results_under_detshares_policies_are_those_of_a_run_alone() -> Result<()> {
    shared("throughput")?;
    shared("tpot-first")
}

#[test]
fn the_status_tells_of_clients_and_policy() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let policy = artefacts.policy("tally-priority")?;
    let _core = scene.core(&policy, &[])?;
    let mut high = Probe::start(&scene, Class::High, "web")?;
    let mut best = Probe::start(&scene, Class::BestEffort, "batch")?;
    for probe in [&mut high, &mut best] {
        probe.ask("launch 20 100")?;
        probe.ask("sync")?;
        probe.check()?;
    }
    let status = scene.status()?;
    ensure!(status.clients()?.len() == 2, "{:#}", status.0);
    let (web, batch) = (status.client("web")?, status.client("batch")?);
    ensure!(web.is_high() && !batch.is_high(), "{:#}", status.0);
    ensure!(web.governed() && batch.governed(), "{:#}", status.0);
    ensure!(web.launches() == 20 && batch.launches() == 20, "{:#}", status.0);
    ensure!(status.policy_name() == "tally-priority", "{:#}", status.0);
    ensure!(status.policy_digest().len() == 64, "{:#}", status.0);
    ensure!(status.generation() == 1, "{:#}", status.0);
    // The form for people names them too.
    let text = String::from_utf8(scene.ctl(&["status"])?.stdout)?;
    for word in ["web", "batch", "tally-priority"] {
        ensure!(text.contains(word), "`tallyctl status` does not name {word}:\n{text}");
    }
    high.quit()?;
    best.quit()?;
    Ok(())
}

#[test]
fn best_effort_programs_have_longer_time_slices_while_there_are_several() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let policy = artefacts.policy("tally-priority")?;
    // The software device has no time slices: what the programs would set is looked at.
    let mut core = scene.core(&policy, &["--sharing", "timeslice"])?;
    let slices = |expected: &[(&str, u64)]| {
        wait_until(&format!("waiting for the time slices {expected:?}"), ANSWER_MAX, || {
            let status = scene.status()?;
            let slice_us = |name| Ok::<_, anyhow::Error>(status.client(name)?.time_slice_us());
            let found: Result<Vec<_>> = expected.iter().map(|(name, _)| slice_us(name)).collect();
            Ok(found?.iter().eq(expected.iter().map(|(_, us)| us)).then_some(()))
        })
    };
    let high = Probe::start(&scene, Class::High, "web")?;
    let mut first = Probe::start(&scene, Class::BestEffort, "first")?;
    slices(&[("web", 100_000), ("first", 10)])?;
    let mut second = Probe::start(&scene, Class::BestEffort, "second")?;
    slices(&[("web", 100_000), ("first", 350), ("second", 350)])?;
    for probe in [&mut first, &mut second] {
        probe.ask("launch 20 100")?;
        probe.ask("sync")?;
        probe.check()?;
    }
    second.quit()?;
    slices(&[("web", 100_000), ("first", 10)])?;
    first.quit()?;
    high.quit()?;
    scene.stop(&mut core, JOB_MAX)
}
