//! Floors of best-effort programs: how they are given, cut and shown, and that a high-priority program that is busy
//! without end does not keep one from its share.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tally_harness::jobs::{ANSWER_MAX, JOB_MAX, Probe};
use tally_harness::process::{Process, wait_until};
use tally_harness::{Artefacts, Class, Device, Scene};

/// More launches than a test takes, of about a millisecond each.
const ENDLESS: &str = "launch 10000000 20000";

fn start(scene: &Scene, class: Class, name: &str, options: &[&str]) -> Result<Process> {
    let program = scene.program("tally-test-probe")?;
    let command = scene.governed_with(class, name, options, &program)?;
    Ok(Probe::from(scene.start(name, command)?)?.0)
}

/// A core that lets programs have floors of so much.
fn core(scene: &Scene, policy: &str, percent_max: u32) -> Result<Process> {
    let config = scene.dir().join("core.toml");
    std::fs::write(&config, format!("[admission]\nmin_share_percent_max = {percent_max}\n"))?;
    scene.core(&scene.artefacts().policy(policy)?, &["--config", &config.to_string_lossy()])
}

fn client(scene: &Scene, name: &str) -> Result<Value> {
    Ok(scene.status()?.client(name)?.0)
}

/// What was asked for and granted, %.
fn floor(scene: &Scene, name: &str) -> Result<Option<[f64; 2]>> {
    let floor = &client(scene, name)?["min_share"];
    let percent = |key: &str| floor[key].as_f64();
    Ok(percent("asked_percent").zip(percent("granted_percent")).map(|(a, b)| [a, b]))
}

fn said(scene: &Scene, arguments: &[&str]) -> Result<String> {
    let said = scene.ctl(arguments)?;
    ensure!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    Ok(String::from_utf8(said.stdout)?)
}

#[test]
fn a_client_with_a_floor_gets_on_beside_high_priority_work_without_end() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    for policy in ["tally-priority", "slo-herald"] {
        let scene = Scene::new(&artefacts, Device::software())?;
        let _core = core(&scene, policy, 30)?;
        let mut web = start(&scene, Class::High, "web", &[])?;
        let mut plain = start(&scene, Class::BestEffort, "plain", &[])?;
        let floored = start(&scene, Class::BestEffort, "floored", &["--min-share", "50%"])?;
        let mut floored = Probe(floored);
        web.tell(ENDLESS)?;
        wait_until("waiting for high priority to be busy", ANSWER_MAX, || {
            Ok((client(&scene, "web")?["busy"] == true).then_some(()))
        })?;
        plain.tell("launch 1 20000")?;
        let waits = |waiting: &Value| waiting.as_u64().is_some_and(|launches| launches > 0);
        wait_until("waiting for the other one to wait", ANSWER_MAX, || {
            Ok(waits(&client(&scene, "plain")?["waiting"]).then_some(()))
        })?;
        for _ in 0..3 {
            floored.ask("launch 5 20000")?;
            floored.ask("sync").context("the floor is not kept")?;
        }
        let plain_now = client(&scene, "plain")?;
        ensure!(
            waits(&plain_now["waiting"]) && plain_now["decisions"]["completed"] == 0,
            "{policy}: without a floor it was let in: {plain_now:#}"
        );
        let had = client(&scene, "floored")?["min_share"]["had_percent"].as_f64();
        ensure!(had.is_some_and(|percent| percent > 0.0), "{policy}: {had:?}");
        let counters = scene.status()?.0["policy"]["counters"].clone();
        ensure!(counters.to_string().contains("launches_for_min_share"), "{counters}");
        web.kill()?;
        plain.hear(JOB_MAX).context("nobody is in its way")?;
        floored.check()?;
        floored.quit()?;
        Probe(plain).quit()?;
    }
    Ok(())
}

#[test]
fn a_floor_is_cut_to_what_the_operator_allows_and_to_what_others_leave() -> Result<()> {
    let scene = Scene::new(&Artefacts::locate()?, Device::software())?;
    let _core = core(&scene, "fifo", 30)?;
    let first = start(&scene, Class::BestEffort, "first", &["--min-share", "20%"])?;
    let second = start(&scene, Class::BestEffort, "second", &["--label", "min-share=12.5%"])?;
    let third = start(&scene, Class::BestEffort, "third", &[])?;
    let web = start(&scene, Class::High, "web", &["--label", "min-share=20%"])?;
    let are = |expected: [Option<[f64; 2]>; 3]| -> Result<()> {
        let now = [floor(&scene, "first")?, floor(&scene, "second")?, floor(&scene, "third")?];
        ensure!(now == expected, "{now:?}, not {expected:?}");
        Ok(())
    };
    are([Some([20.0, 20.0]), Some([12.5, 10.0]), None])?;
    ensure!(floor(&scene, "web")?.is_none());
    let text = said(&scene, &["status"])?;
    ensure!(text.contains("floor: 12.5 % of GPU time asked, 10 % granted"), "{text}");
    let text = said(&scene, &["metrics"])?;
    for (metric, value) in
        [("tally_client_min_share_asked_ratio{", "0.125"), ("tally_client_min_share_ratio{", "0.1")]
    {
        let is_second = |l: &&str| l.starts_with(metric) && l.contains("name=\"second\"");
        let line = text.lines().find(is_second).context("no such metric")?;
        ensure!(line.ends_with(value), "{line}");
    }
    // Admins' wishes come first, and may exceed what programs may have, but not 90 % in all.
    let text = said(&scene, &["client", "set", "third", "--min-share", "80%"])?;
    ensure!(text.contains("floor 80 % of GPU time"), "{text}");
    are([Some([20.0, 10.0]), Some([12.5, 0.0]), Some([80.0, 80.0])])?;
    said(&scene, &["client", "set", "first", "--no-min-share"])?;
    are([None, Some([12.5, 10.0]), Some([80.0, 80.0])])?;
    let text = said(&scene, &["client", "set", "first", "--min-share", "30%"])?;
    ensure!(text.contains("floor 10 % of GPU time"), "{text}");
    are([Some([30.0, 10.0]), Some([12.5, 0.0]), Some([80.0, 80.0])])?;
    Probe(first).quit()?;
    wait_until("waiting for what it leaves", ANSWER_MAX, || {
        Ok((floor(&scene, "second")? == Some([12.5, 10.0])).then_some(()))
    })?;
    for (arguments, expected) in [
        (&["client", "set", "web", "--min-share", "10%"][..], "is high priority: only best-effort"),
        (&["client", "set", "third", "--min-share", "95%"], "from 1% to 90%"),
        (&["run", "--min-share", "20", "--", "true"], "such as 20%"),
    ] {
        let refused = scene.ctl(arguments)?;
        let why = String::from_utf8(refused.stderr)?;
        ensure!(!refused.status.success() && why.contains(expected), "{why}");
    }
    [second, third, web].into_iter().try_for_each(|process| Probe(process).quit())
}

#[test]
fn by_default_no_program_gets_a_floor() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let _core = scene.core(&artefacts.policy("fifo")?, &[])?;
    let asks = start(&scene, Class::BestEffort, "asks", &["--min-share", "20%"])?;
    ensure!(floor(&scene, "asks")? == Some([20.0, 0.0]));
    Probe(asks).quit()?;
    let mut command =
        scene.governed(Class::BestEffort, "told", &scene.program("tally-test-probe")?)?;
    command.env("TALLY_MIN_SHARE", "12%");
    let told = Probe::from(scene.start("told", command)?)?;
    let told_floor = floor(&scene, "told")?;
    ensure!(told_floor == Some([12.0, 0.0]), "{told_floor:?}");
    told.quit()
}
