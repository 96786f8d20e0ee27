//! Launches in transformed forms, on the software device, through the real core, shim and
//! policy: results are those of a run alone, and launches really were transformed.

use anyhow::{Result, bail};
use tally_harness::jobs::{self, JOB_MAX};
use tally_harness::process::wait_until;
use tally_harness::{Artefacts, Class, Device, Scene};

/// Code is loaded only while nothing runs, which on a busy machine is late: a training that ended before its kernels
/// were transformed is repeated, longer.
const STEPS: [u64; 3] = [60, 240, 960];

/// Train under the policy `random-forms` with this configuration, until launches were in all of these forms; the
/// results must be right every time.
fn trains_in_forms(config: &str, wanted: &[(&str, u64)]) -> Result<()> {
    let mut figures = serde_json::Value::Null;
    for steps in STEPS {
        figures = trained(config, "", steps)?["transformed"].clone();
        let is_more = |(which, more_than): &(&str, u64)| {
            figures[which].as_u64().is_some_and(|count| count > *more_than)
        };
        if wanted.iter().all(is_more) {
            return Ok(());
        }
    }
    bail!("expected more than {wanted:?}: {figures:#}")
}

/// The client's figures, once it has trained under the policy with this configuration, and the core with that one.
fn trained(config: &str, of_core: &str, steps: u64) -> Result<serde_json::Value> {
    let artefacts = Artefacts::locate()?;
    // Two SMs at least, so that there is something to be SM-limited to.
    let scene = Scene::new(&artefacts, Device::Software { sms: 2 })?;
    let alone = jobs::training_checksum(&scene, steps)?;
    let file = scene.dir().join("random-forms.toml");
    std::fs::write(&file, config)?;
    let core_file = scene.dir().join("core.toml");
    std::fs::write(&core_file, of_core)?;
    let files = [&file, &core_file].map(|path| path.to_string_lossy());
    let arguments = ["--policy-config", &files[0], "--config", &files[1]];
    let mut core = scene.core(&artefacts.test_policy("random-forms")?, &arguments)?;
    let trainer = scene.governed(Class::BestEffort, "train", &jobs::training(&scene, steps)?)?;
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

#[test]
fn preemptible_launches_that_yield_at_random_compute_the_same() -> Result<()> {
    let config = "form = 0\ntoggle_us = 3000\nseed = 7\n";
    trains_in_forms(config, &[("kernels", 0), ("preemptible", 20), ("yields", 0)])
}

#[test]
fn slices_that_yield_at_random_compute_the_same() -> Result<()> {
    let config = "form = 1\nslices = 5\ntoggle_us = 3000\nseed = 8\n";
    trains_in_forms(config, &[("sliced", 20)])
}

#[test]
fn all_forms_mixed_compute_the_same() -> Result<()> {
    let config = "form = 3\nsms = 1\ntoggle_us = 2000\nseed = 9\n";
    trains_in_forms(config, &[("sliced", 0), ("preemptible", 0)])
}

#[test]
fn two_hundred_changes_of_width_compute_the_same() -> Result<()> {
    let config = "form = 6\nlease = 9\ntoggle_us = 300\nseed = 10\n";
    let mut figures = serde_json::Value::Null;
    for steps in STEPS {
        figures = trained(config, "[sm_limits]\nreserve_sms = [1]\n", steps)?;
        let count = |pointer| figures.pointer(pointer).and_then(serde_json::Value::as_u64);
        let [changes, limited, decided] =
            ["/decisions/width_changes", "/transformed/sm_limited", "/decisions/sm_limited"]
                .map(count);
        // The others were leased.
        let leased = limited.zip(decided).map(|(limited, decided)| limited.saturating_sub(decided));
        if changes >= Some(200) && decided > Some(20) && leased > Some(20) {
            return Ok(());
        }
    }
    bail!("expected 200 changes, and more than 20 limited and leased launches: {figures:#}")
}
