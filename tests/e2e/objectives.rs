//! Objectives of high-priority programs: how they are given, changed and shown.

use anyhow::{Result, ensure};
use tally_admin::{Objective, Service};
use tally_harness::jobs::{self, ANSWER_MAX, Probe};
use tally_harness::process::wait_until;
use tally_harness::{Artefacts, Class, Device, Scene};

/// What the status says of the client `web` once so many requests have ended.
fn service_after(scene: &Scene, requests: u64) -> Result<Service> {
    wait_until(&format!("waiting for {requests} requests"), ANSWER_MAX, || {
        let service = scene.status()?.client("web")?.service();
        Ok(service.filter(|s| s.requests >= requests))
    })
}

/// Requests of one launch each.
fn serve(probe: &mut Probe, requests: u64) -> Result<()> {
    for _ in 0..requests {
        probe.ask("launch 1 100000")?;
        probe.ask("sync")?;
    }
    Ok(())
}

#[test]
fn requests_are_measured_against_an_objective_that_changes_while_they_are_served() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let _core = scene.core(&artefacts.policy("tally-priority")?, &[])?;
    let program = scene.program("tally-test-probe")?;
    // The longest that may be asked for: a busy machine keeps it.
    let options = ["--slo", "600s", "--percentile", "90"];
    let web = scene.governed_with(Class::High, "web", &options, &program)?;
    let mut web = Probe::from(scene.start("web", web)?)?;
    let batch = Probe::start(&scene, Class::BestEffort, "batch")?;
    serve(&mut web, 20)?;
    let service = service_after(&scene, 20)?;
    ensure!(service.requests == 20 && service.requests_within == 20, "{service:?}");
    ensure!(
        service.objective == Some(Objective { slo_ms: 600_000.0, percentile: 90.0 }),
        "{service:?}"
    );
    ensure!(service.attainment_percent == Some(100.0), "{service:?}");
    ensure!(0.0 < service.p50_ms && service.p50_ms <= service.p99_ms, "{service:?}");

    // A unit is under way until the program waits.
    ensure!(service.slack_ms.is_none(), "{service:?}");
    let slack = |web: &mut Probe| -> Result<f64> {
        web.ask("launch 1 100000")?;
        let slack_ms = wait_until("waiting for a unit", ANSWER_MAX, || {
            Ok(scene.status()?.client("web")?.service().and_then(|service| service.slack_ms))
        })?;
        web.ask("sync")?;
        Ok(slack_ms)
    };
    let slack_ms = slack(&mut web)?;
    ensure!((1.0..600_000.0).contains(&slack_ms), "{slack_ms}");

    // The shortest that may be asked for: nothing that crosses threads keeps it.
    let said = scene.ctl(&["client", "set", "web", "--slo", "10us"])?;
    ensure!(said.status.success(), "{said:?}");
    ensure!(slack(&mut web)? < 0.0);
    serve(&mut web, 3)?;
    let service = service_after(&scene, 25)?;
    ensure!(service.objective == Some(Objective { slo_ms: 0.01, percentile: 90.0 }), "{service:?}");
    ensure!((service.recent, service.attainment_percent) == (4, Some(0.0)), "{service:?}");
    let text = String::from_utf8(scene.ctl(&["status"])?.stdout)?;
    ensure!(text.contains("objective: 0.01 ms for 90 %, kept by 0.00 %"), "{text}");
    let text = String::from_utf8(scene.ctl(&["metrics"])?.stdout)?;
    for (what, expected) in [("", "25"), ("_within_objective", "21"), ("_late", "4")] {
        let line = format!("tally_client_requests{what}_total{{");
        let value =
            text.lines().find(|l| l.starts_with(&line)).and_then(|l| l.split(' ').next_back());
        ensure!(value == Some(expected), "{line} {value:?}\n{text}");
    }

    let said = scene.ctl(&["client", "set", "web", "--no-slo"])?;
    ensure!(said.status.success(), "{said:?}");
    let service = service_after(&scene, 25)?;
    ensure!((service.objective, service.attainment_percent) == (None, None), "{service:?}");

    // Requests of best effort are not measured.
    ensure!(scene.status()?.client("batch")?.service().is_none());
    let said = scene.ctl(&["client", "set", "batch", "--slo", "1s"])?;
    let why = String::from_utf8(said.stderr)?;
    ensure!(!said.status.success() && why.contains("is best effort: only high-priority"), "{why}");
    web.quit()?;
    batch.quit()
}

#[test]
fn an_objective_comes_from_the_environment_and_one_that_is_none_is_ignored() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let _core = scene.core(&artefacts.policy("fifo")?, &[])?;
    for (value, expected) in
        [("2s", Some(Objective { slo_ms: 2_000.0, percentile: 99.0 })), ("soon", None)]
    {
        let mut web = scene.governed(Class::High, "web", &scene.program("tally-test-probe")?)?;
        web.env("TALLY_SLO", value);
        let mut web = Probe::from(scene.start("web", web)?)?;
        serve(&mut web, 1)?;
        let service = service_after(&scene, 1)?;
        ensure!(service.objective == expected, "{value}: {service:?}");
        web.quit()?;
    }
    Ok(())
}

/// A counter of the active policy's.
fn counted(scene: &Scene, name: &str) -> Result<u64> {
    Ok(scene.status()?.0["policy"]["counters"][name].as_u64().unwrap_or(0))
}

/// The service's CPU part is most of a request: best effort has the device meanwhile.
#[test]
fn slo_herald_lets_best_effort_in_where_the_objective_leaves_time() -> Result<()> {
    const REQUESTS: u64 = 180;
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let _core = scene.core(&artefacts.policy("slo-herald")?, &["--sharing", "mps"])?;
    let training = scene.governed(Class::BestEffort, "train", &jobs::training(&scene, 10_000)?)?;
    let mut training = scene.start("training", training)?;
    let within = |slo: Option<&str>| -> Result<[u64; 2]> {
        let mut server = scene.governed(Class::High, "web", &jobs::inference(&scene, REQUESTS)?)?;
        slo.map(|slo| server.env("TALLY_SLO", slo));
        let before = counted(&scene, "launches_within_units")?;
        let mut server = scene.start("inference", server)?;
        jobs::all_answered(&mut server, REQUESTS)?;
        let alone = counted(&scene, "units_measured_alone")?;
        Ok([counted(&scene, "launches_within_units")? - before, alone])
    };
    let [strict, alone] = within(None)?;
    ensure!(strict == 0 && alone > 8, "{strict} {alone}");
    // The longest that may be asked for: a busy machine keeps it.
    let [shared, alone] = within(Some("600s"))?;
    ensure!(shared > 0, "{alone}: {:#}", scene.status()?.0["policy"]);
    training.kill()?;
    Ok(())
}

/// It has no requests, and changes nothing of another service's, nor keeps best effort waiting once its work is done.
#[test]
fn a_program_that_never_waits_has_no_requests() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let _core = scene.core(&artefacts.policy("slo-herald")?, &[])?;
    let program = scene.program("tally-test-probe")?;
    // What no work on a busy machine keeps, and what all does.
    let start = |name: &str, slo: &str| -> Result<Probe> {
        let governed = scene.governed_with(Class::High, name, &["--slo", slo], &program)?;
        Probe::from(scene.start(name, governed)?)
    };
    let (mut never, mut web) = (start("never", "10us")?, start("web", "600s")?);
    let mut batch = Probe::start(&scene, Class::BestEffort, "batch")?;
    for _ in 0..20 {
        never.ask("launch 2 1000")?;
        serve(&mut web, 1)?;
    }
    let service = service_after(&scene, 20)?;
    ensure!((service.requests, service.requests_within) == (20, 20), "{service:?}");
    serve(&mut batch, 5)?;
    let service = scene.status()?.client("never")?.service();
    ensure!(service.as_ref().is_some_and(|service| service.requests == 0), "{service:?}");
    [never, web, batch].into_iter().try_for_each(Probe::quit)
}
