//! A core on policies in interpreted languages, beside real programs on the software
//! device.
//!
//! Ignored: it needs the components, which `cargo xtask languages` builds with the languages'
//! own tools, and which it names by `TALLY_LANGUAGE_COMPONENTS`.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tally_harness::jobs::{self, ANSWER_MAX, JOB_MAX, TRAINING_DEPTH};
use tally_harness::process::{Process, wait_until};
use tally_harness::{Artefacts, Class, Device, Scene};

const REQUESTS: u64 = 40;
const STEPS: u64 = 40;
/// What compiling an interpreter may take, on a busy machine.
const COMPILE_MAX: Duration = Duration::from_secs(300);
/// The clock and the stall's are for machines that have time: here only fuel may end a call.
const CONFIG: &str = "[policy.limits]\npreset = \"interpreted\"\ncall_cpu_ms_max = 10000\n\
                      init_cpu_ms_max = 60000\n[policy.disabling]\nstall_ms = 0\n";

/// The component of an example in a language; `None` if it was not built.
fn component(example: &str, language: &str) -> Result<Option<PathBuf>> {
    let folder =
        std::env::var_os("TALLY_LANGUAGE_COMPONENTS").context("set by `xtask languages`")?;
    let file = PathBuf::from(folder).join(example).join(language).with_extension("wasm");
    Ok(file.is_file().then_some(file))
}

fn core(scene: &Scene, policy: &Path) -> Result<Process> {
    let config = scene.dir().join("core.toml");
    std::fs::write(&config, CONFIG)?;
    let mut core = scene.core_unready(policy, &["--config", &config.to_string_lossy()])?;
    wait_until("waiting for the core", COMPILE_MAX, || {
        ensure!(core.poll()?.is_none(), "the core ended\n{}", core.quote());
        if !scene.admin_socket().exists() {
            return Ok(None);
        }
        Ok(scene.status().ok())
    })?;
    Ok(core)
}

/// An inference and a training at once; both must end, and end right.
fn programs_end_right(scene: &Scene) -> Result<()> {
    let alone = jobs::training_checksum(scene, STEPS)?;
    let server = scene.governed(Class::High, "serve", &jobs::inference(scene, REQUESTS)?)?;
    let mut server = scene.start("inference", server)?;
    let trainer = scene.governed(Class::BestEffort, "train", &jobs::training(scene, STEPS)?)?;
    let mut trainer = scene.start("training", trainer)?;
    jobs::trained_to(&mut trainer, &alone)?;
    jobs::all_answered(&mut server, REQUESTS)?;
    wait_until("waiting for both to be gone", ANSWER_MAX, || {
        Ok(scene.status()?.clients()?.is_empty().then_some(()))
    })
}

/// Each launch of the training is decided by the policy, none by the built-in rule.
fn is_run_by(language: &str) -> Result<()> {
    let Some(policy) = component("idle-gap", language)? else {
        println!("left out: policies in {language}");
        return Ok(());
    };
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let mut core = core(&scene, &policy)?;
    programs_end_right(&scene)?;
    let status = scene.status()?;
    let (decided, launches) = (status.decisions(), STEPS * TRAINING_DEPTH);
    ensure!(decided >= launches, "{decided} of {launches} decided: {:#}", status.0["policy"]);
    ensure!(
        status.policy_faults() == 0 && status.built_in_rule_decisions() == 0,
        "{:#}",
        status.0["policy"]
    );
    ensure!(status.policy_name() == language && !status.policy_disabled(), "{:#}", status.0);
    println!("{language}: {decided} decisions for {launches} launches");
    scene.stop(&mut core, JOB_MAX)
}

#[test]
#[ignore = "needs the components of `cargo xtask languages`"]
fn programs_run_under_a_policy_in_python() -> Result<()> {
    is_run_by("python")
}

#[test]
#[ignore = "needs the components of `cargo xtask languages`"]
fn programs_run_under_a_policy_in_javascript() -> Result<()> {
    is_run_by("js")
}

/// From language to language through a running core, and back to the first.
#[test]
#[ignore = "needs the components of `cargo xtask languages`"]
fn what_a_policy_learnt_outlives_a_reload_in_every_language() -> Result<()> {
    let mut policies = Vec::new();
    for language in ["python", "js", "c", "rust"] {
        policies.extend(component("patient", language)?);
    }
    let first = policies.first().context("no language was built")?.clone();
    policies.push(first);
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let mut core = core(&scene, &policies[0])?;
    ensure!(scene.status()?.restored() == "not-offered");
    programs_end_right(&scene)?;
    let known = || -> Result<i64> {
        let known = &scene.status()?.0["policy"]["gauges"]["pause_ns"];
        known.as_i64().with_context(|| format!("no pause is shown: {known}"))
    };
    let learned = known()?;
    ensure!(learned > 0, "it learned nothing");
    for policy in &policies[1..] {
        let mut load: Command = scene.program("tallyctl")?;
        load.args(["policy", "load"]).arg(policy);
        let mut load = scene.start("load", load)?;
        let loaded = load.wait(COMPILE_MAX)?;
        ensure!(loaded.success(), "{}", load.stderr()?);
        let status = scene.status()?;
        ensure!(status.restored() == "accepted", "{:#}", status.0["policy"]);
        ensure!(policy.ends_with(format!("{}.wasm", status.policy_name())), "{:#}", status.0);
        ensure!(known()? == learned, "{} of {learned} in {}", known()?, status.policy_name());
    }
    scene.stop(&mut core, JOB_MAX)
}
