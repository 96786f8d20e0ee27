//! Weights of best-effort programs: how they are given and shown, and that GPU time goes by them.

use anyhow::{Result, ensure};
use tally_harness::jobs::{JOB_MAX, Probe};
use tally_harness::process::{Process, wait_until};
use tally_harness::{Artefacts, Class, Device, Scene};

/// More launches than a test takes, of about a millisecond each.
const ENDLESS: &str = "launch 10000000 20000";
/// GPU time of both programs over which it is compared: many rounds of 40 ms.
const COMPARED_MS: f64 = 1_500.0;
/// What the core's status says of a client's GPU time. A program that gets no CPU asks for nothing: far from 1 is
/// enough.
const RATIO: std::ops::RangeInclusive<f64> = 1.7..=4.5;

fn start(scene: &Scene, name: &str, options: &[&str], variable: Option<&str>) -> Result<Process> {
    let program = scene.program("tally-test-probe")?;
    let mut command = scene.governed_with(Class::BestEffort, name, options, &program)?;
    variable.map(|weight| command.env("TALLY_WEIGHT", weight));
    Ok(Probe::from(scene.start(name, command)?)?.0)
}

/// What it was charged so far, ms.
fn charged_ms(scene: &Scene, name: &str) -> Result<f64> {
    Ok(scene.status()?.client(name)?.0["charged_ms"].as_f64().unwrap_or(0.0))
}

fn both_ms(scene: &Scene) -> Result<[f64; 2]> {
    Ok([charged_ms(scene, "heavy")?, charged_ms(scene, "light")?])
}

#[test]
fn gpu_time_goes_by_weight_under_each_policy() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    for policy in ["tally-priority", "slo-herald", "tpot-first"] {
        let scene = Scene::new(&artefacts, Device::software())?;
        let _core = scene.core(&artefacts.policy(policy)?, &[])?;
        let mut heavy = start(&scene, "heavy", &["--weight", "3"], None)?;
        let mut light = start(&scene, "light", &[], None)?;
        heavy.tell(ENDLESS)?;
        light.tell(ENDLESS)?;
        let from = wait_until("waiting for both to be charged", JOB_MAX, || {
            Ok(Some(both_ms(&scene)?).filter(|both| both.iter().all(|ms| *ms > 100.0)))
        })?;
        let until = wait_until("waiting for GPU time to compare", JOB_MAX, || {
            let both = both_ms(&scene)?;
            let more = both[0] - from[0] + both[1] - from[1];
            Ok((more > COMPARED_MS).then_some(both))
        })?;
        let ratio = (until[0] - from[0]) / (until[1] - from[1]);
        ensure!(RATIO.contains(&ratio), "{policy}: {ratio}, from {from:?} to {until:?}");
        heavy.kill()?;
        light.kill()?;
    }
    Ok(())
}

#[test]
fn a_weight_comes_from_an_option_a_label_or_the_environment_and_is_shown() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let _core = scene.core(&artefacts.policy("fifo")?, &[])?;
    for (name, options, variable, expected) in [
        ("option", &["--weight", "3"][..], None, 3),
        ("label", &["--label", "weight=4"], None, 4),
        ("variable", &[], Some("5"), 5),
        ("both", &["--weight", "6"], Some("7"), 6),
        ("plain", &[], None, 1),
        ("nonsense", &[], Some("heavy"), 1),
    ] {
        let program = start(&scene, name, options, variable)?;
        let client = scene.status()?.client(name)?;
        ensure!(client.0["weight"] == expected, "{name}: {:#}", client.0);
        let percent = client.0["charged_percent"].as_f64();
        ensure!(percent.is_some_and(|percent| (0.0..=100.0).contains(&percent)), "{percent:?}");
        let text = String::from_utf8(scene.ctl(&["status"])?.stdout)?;
        let line = text.lines().find(|line| line.contains(&format!(" {name} ")));
        let cells = line.map(|line| line.split_whitespace().collect::<Vec<_>>());
        let shown = cells.is_some_and(|cells| cells.contains(&&*expected.to_string()));
        ensure!(shown, "{text}");
        let text = String::from_utf8(scene.ctl(&["metrics"])?.stdout)?;
        let sample = format!("name=\"{name}\",class=\"best-effort\"}} {expected}");
        let found =
            text.lines().any(|l| l.starts_with("tally_client_weight{") && l.ends_with(&sample));
        ensure!(found, "{sample}\n{text}");
        Probe(program).quit()?;
    }
    let refused = scene.ctl(&["run", "--weight", "0", "--", "true"])?;
    let why = String::from_utf8(refused.stderr)?;
    ensure!(!refused.status.success() && why.contains("1..=1000"), "{why}");
    Ok(())
}
