//! Launches in transformed forms, on the software device, through the real core, shim and
//! policy: results are those of a run alone, and launches really were transformed.

use anyhow::{Result, ensure};
use tally_harness::jobs::{self, JOB_MAX};
use tally_harness::process::wait_until;
use tally_harness::{Artefacts, Class, Device, Scene};

const STEPS: u64 = 60;

/// Train under the policy `random-forms` with this configuration; returns the client's
/// figures of the status before it ended.
fn trained(config: &str, extra: &[&str]) -> Result<serde_json::Value> {
    let artefacts = Artefacts::locate()?;
    // Two SMs at least, so that there is something to be SM-limited to.
    let scene = Scene::new(&artefacts, Device::Software { sms: 2 })?;
    let alone = jobs::training_checksum(&scene, STEPS)?;
    let file = scene.dir().join("random-forms.toml");
    std::fs::write(&file, config)?;
    let file = file.to_string_lossy().into_owned();
    let arguments = [&["--policy-config", &file], extra].concat();
    let mut core = scene.core(&artefacts.test_policy("random-forms")?, &arguments)?;
    let trainer = scene.governed(Class::BestEffort, "train", &jobs::training(&scene, STEPS)?)?;
    let mut trainer = scene.start("training", trainer)?;
    jobs::trained_to(&mut trainer, &alone)?;
    // Figures of a client that left stay in the status.
    let figures = wait_until("the trainer to be seen gone", JOB_MAX, || {
        let departed = scene.status()?.0["departed"][0].clone();
        Ok((!departed.is_null()).then_some(departed))
    })?;
    scene.stop(&mut core, JOB_MAX)?;
    Ok(figures)
}

fn count(figures: &serde_json::Value, which: &str) -> u64 {
    figures["transformed"][which].as_u64().unwrap_or_default()
}

#[test]
fn preemptible_launches_that_yield_at_random_compute_the_same() -> Result<()> {
    let figures = trained("form = 0\ntoggle_us = 3000\nseed = 7\n", &[])?;
    ensure!(count(&figures, "kernels") > 0, "no kernel was transformed: {figures:#}");
    ensure!(count(&figures, "preemptible") > 20, "{figures:#}");
    ensure!(count(&figures, "yields") > 0, "{figures:#}");
    Ok(())
}

#[test]
fn slices_that_yield_at_random_compute_the_same() -> Result<()> {
    let figures = trained("form = 1\nslices = 5\ntoggle_us = 3000\nseed = 8\n", &[])?;
    ensure!(count(&figures, "sliced") > 20, "{figures:#}");
    Ok(())
}

#[test]
fn all_forms_mixed_compute_the_same() -> Result<()> {
    let figures = trained("form = 3\nsms = 1\ntoggle_us = 2000\nseed = 9\n", &[])?;
    ensure!(count(&figures, "sliced") > 0 && count(&figures, "preemptible") > 0, "{figures:#}");
    Ok(())
}
