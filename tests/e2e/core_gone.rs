//! Without a core: clients go on or wait, as they were told, and come back.

use anyhow::{Result, ensure};
use rustix::process::Signal;
use std::time::Duration;
use tally_harness::jobs::{self, ANSWER_MAX, JOB_MAX, Probe};
use tally_harness::process::wait_until;
use tally_harness::{Artefacts, Class, Device, Scene};

/// Long enough for a launch to come through if nothing holds it.
const HELD_FOR: Duration = Duration::from_millis(700);
/// A program has noticed by then that its core is gone, and after so many launches.
const NOTICES_WITHIN: Duration = Duration::from_secs(10);
const LAUNCHES_MAX: u32 = 200;
/// Exit code of a core whose socket is taken.
const EXIT_IN_USE: i32 = 4;

fn scene() -> Result<Scene> {
    Scene::new(&Artefacts::locate()?, Device::software())
}

fn attached(scene: &Scene, name: &str) -> Result<()> {
    wait_until(&format!("waiting for {name} to attach"), ANSWER_MAX, || {
        Ok(scene.status()?.client(name).ok().map(|_| ()))
    })
}

#[test]
fn a_client_goes_on_without_a_core_and_comes_back() -> Result<()> {
    let scene = scene()?;
    let policy = scene.artefacts().policy("tally-priority")?;
    let mut core = scene.core(&policy, &[])?;
    let mut probes = [
        Probe::start(&scene, Class::High, "web")?,
        Probe::start(&scene, Class::BestEffort, "batch")?,
    ];
    for round in 0..3 {
        for probe in &mut probes {
            probe.ask("launch 10 20")?;
            probe.check()?;
        }
        core.kill()?;
        for probe in &mut probes {
            probe.ask("launch 10 20")?;
            probe.check()?;
        }
        core = scene.core(&policy, &[])?;
        attached(&scene, "web")?;
        attached(&scene, "batch")?;
        ensure!(scene.status()?.client("web")?.is_high(), "round {round}: web lost its class");
    }
    for probe in probes {
        probe.quit()?;
    }
    scene.stop(&mut core, JOB_MAX)
}

/// A client waits while there is no core: told so by options of `tallyctl run`, or
/// by the core with this configuration.
fn held(options: &[&str], configuration: &str) -> Result<()> {
    let scene = scene()?;
    let policy = scene.artefacts().policy("tally-priority")?;
    let config = scene.dir().join("core.toml");
    std::fs::write(&config, configuration)?;
    let config = config.to_string_lossy().into_owned();
    let arguments = ["--config", &config];
    let mut core = scene.core(&policy, &arguments)?;
    let program = scene.program("tally-test-probe")?;
    let program = scene.governed_with(Class::BestEffort, "batch", options, &program)?;
    let mut probe = Probe::from(scene.start("batch", program)?)?;
    probe.ask("launch 5 20")?;
    probe.check()?;
    core.kill()?;
    // Until the program has noticed, which takes a CPU, it uses what was granted before.
    let mut launched = 5;
    loop {
        probe.0.tell("launch 1 20")?;
        launched += 1;
        if probe.0.hear(HELD_FOR).is_err() {
            break;
        }
        ensure!(launched < LAUNCHES_MAX, "launches go through without a core");
        std::thread::sleep(NOTICES_WITHIN / LAUNCHES_MAX);
    }
    let mut core = scene.core(&policy, &arguments)?;
    ensure!(probe.0.hear(ANSWER_MAX)?["launched"] == launched);
    probe.check()?;
    probe.quit()?;
    scene.stop(&mut core, JOB_MAX)
}

#[test]
fn a_client_told_so_when_started_waits_for_the_core() -> Result<()> {
    held(&["--fail", "hold"], "")
}

#[test]
fn a_client_told_so_by_the_core_waits_for_it() -> Result<()> {
    held(&[], "[client]\nfail = \"hold\"\n")
}

#[test]
fn a_program_started_before_the_core_attaches_later() -> Result<()> {
    let scene = scene()?;
    let program = scene.program("tally-test-probe")?;
    let program = scene.governed_with(Class::BestEffort, "early", &["--no-check"], &program)?;
    let mut probe = Probe::from(scene.start("early", program)?)?;
    probe.ask("launch 10")?;
    probe.check()?;
    let mut core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    attached(&scene, "early")?;
    let before = scene.status()?.decisions();
    probe.ask("launch 10")?;
    probe.check()?;
    let decided = scene.status()?.decisions() - before;
    ensure!(decided >= 10, "{decided} of 10 launches were decided");
    probe.quit()?;
    scene.stop(&mut core, JOB_MAX)
}

/// SIGTERM lets everything go that is held, then ends well; programs go on.
#[test]
fn a_core_that_is_stopped_drains() -> Result<()> {
    let scene = scene()?;
    let alone = jobs::training_checksum(&scene, 60)?;
    let mut core = scene.core(&scene.artefacts().policy("tally-priority")?, &[])?;
    let server = scene.governed(Class::High, "serve", &jobs::inference(&scene, 80)?)?;
    let mut server = scene.start("inference", server)?;
    let trainer = scene.governed(Class::BestEffort, "train", &jobs::training(&scene, 60)?)?;
    let mut trainer = scene.start("training", trainer)?;
    attached(&scene, "serve")?;
    attached(&scene, "train")?;
    std::thread::sleep(Duration::from_millis(300));
    scene.stop(&mut core, Duration::from_secs(30))?;
    jobs::all_answered(&mut server, 80)?;
    jobs::trained_to(&mut trainer, &alone)
}

#[test]
fn tallyctl_stops_the_core() -> Result<()> {
    let scene = scene()?;
    let mut core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    let output = scene.ctl(&["stop"])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    ensure!(core.wait(JOB_MAX)?.success(), "{}", core.quote());
    // Nobody is there any more: an error that says so.
    let output = scene.ctl(&["status"])?;
    ensure!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(said.contains("core.sock"), "the message does not name the socket: {said}");
    Ok(())
}

#[test]
fn a_second_core_on_the_socket_is_refused() -> Result<()> {
    let scene = scene()?;
    let policy = scene.artefacts().policy("fifo")?;
    let mut core = scene.core(&policy, &[])?;
    let mut second = scene.core_unready(&policy, &[])?;
    let status = second.wait(ANSWER_MAX)?;
    ensure!(status.code() == Some(EXIT_IN_USE), "{status}\n{}", second.quote());
    // One that was killed leaves its socket behind; that does not stop the next.
    core.kill()?;
    let mut core = scene.core(&policy, &[])?;
    core.signal(Signal::TERM)?;
    ensure!(core.wait(JOB_MAX)?.success(), "{}", core.quote());
    Ok(())
}
