//! Requests of programs that mark none, against the count and the clock of the program itself.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use tally_admin::Service;
use tally_harness::jobs::{ANSWER_MAX, JOB_MAX, Probe};
use tally_harness::process::{Process, wait_until};
use tally_harness::{Artefacts, Class, Device, Scene};

fn compile(scene: &Scene) -> Result<PathBuf> {
    let program = scene.dir().join("served");
    let compiled = Command::new("cc")
        .args(["-O1", "-Wall", "-Werror", "-o"])
        .arg(&program)
        .arg(format!("{}/e2e/served.c", env!("CARGO_MANIFEST_DIR")))
        .arg("-L")
        .arg(scene.driver_dir())
        .args(["-lcuda", "-Wl,--allow-shlib-undefined"])
        .output()
        .context("starting cc (Debian: `apt-get install gcc libc6-dev`)")?;
    ensure!(compiled.status.success(), "cc: {}", String::from_utf8_lossy(&compiled.stderr));
    Ok(program)
}

/// A server: how it launches, its buffers, its requests, how long a kernel spins, how it waits.
type Case = (&'static str, u64, u64, u64, &'static str);

fn name((kind, buffers, requests, _, wait): Case) -> String {
    format!("{kind}-{buffers}-{requests}-{wait}")
}

/// A server that waits for the word to serve.
fn start(scene: &Scene, program: &Path, case: Case, options: &[&str]) -> Result<Process> {
    let name = &name(case);
    let (kind, buffers, requests, spins, wait) = case;
    let mut command = scene.command(program);
    command.arg(format!("{}/kernels/probe.ptx", env!("CARGO_MANIFEST_DIR"))).arg(kind);
    command.args([buffers, requests, spins].map(|n| n.to_string())).arg(wait);
    let mut process =
        scene.start(name, scene.governed_with(Class::High, name, options, &command)?)?;
    ensure!(process.hear(JOB_MAX)?["ready"] == true, "{}", process.quote());
    Ok(process)
}

/// What the core counted of a server that has served, and what that says of itself.
fn serve(scene: &Scene, program: &Path, case: Case) -> Result<(Service, serde_json::Value)> {
    let name = &name(case);
    let mut process = start(scene, program, case, &[])?;
    process.tell("serve")?;
    let said = process.hear(JOB_MAX).with_context(|| process.quote())?;
    let service = wait_until(&format!("waiting for {case:?}"), ANSWER_MAX, || {
        let service = scene.status()?.client(name)?.service();
        Ok(service.filter(|service| service.requests >= case.2))
    })?;
    ensure!(process.wait(ANSWER_MAX)?.success(), "{}", process.quote());
    Ok((service, said))
}

/// The core's count and times are the program's own: it begins its clock before the first launch, and ends it behind
/// the wait.
fn is_told_right(case: Case, service: &Service, said: &serde_json::Value) -> Result<()> {
    let told = format!("{case:?} {service:?} {said}");
    ensure!(service.requests == case.2 && service.recent == case.2, "{told}");
    let own = |key: &str| said[key].as_f64().context(format!("{key} in {said}"));
    let (p50_ms, most_ms) = (own("p50_ms")?, own("most_ms")?);
    // Figures are kept to a hundredth; a busy machine may take a thread's CPU between two clocks.
    ensure!(service.p99_ms <= most_ms * 1.01, "{told}");
    // Its median may be the request behind the one in the middle.
    ensure!((0.95 * p50_ms - 0.1..=1.01 * p50_ms + 0.002).contains(&service.p50_ms), "{told}");
    Ok(())
}

#[test]
fn requests_are_counted_as_the_program_counts_them() -> Result<()> {
    let scene = Scene::new(&Artefacts::locate()?, Device::software())?;
    let program = compile(&scene)?;
    // It asks what still runs after 1 ms, which ends no request.
    let _core = scene.core(&scene.artefacts().policy("tally-priority")?, &[])?;
    for kind in ["eager", "graph"] {
        for (buffers, waits) in [
            (1, &["event", "stream", "context", "poll", "copy", "side"][..]),
            (2, &["event", "poll", "side"]),
        ] {
            for wait in waits {
                let case = (kind, buffers, 40, 5_000, *wait);
                let (service, said) = serve(&scene, &program, case)?;
                is_told_right(case, &service, &said)?;
            }
        }
    }
    Ok(())
}

/// A core that sleeps looks every 200 ms: many requests end between two looks.
#[test]
fn requests_that_end_between_two_looks_are_told_apart() -> Result<()> {
    let scene = Scene::new(&Artefacts::locate()?, Device::software())?;
    let program = compile(&scene)?;
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    for case in [("eager", 1, 900, 10, "stream"), ("graph", 2, 900, 10, "event")] {
        let (service, said) = serve(&scene, &program, case)?;
        is_told_right(case, &service, &said)?;
    }
    Ok(())
}

/// Best effort is beside it, and the policy is told of each unit.
#[test]
fn requests_beside_best_effort_are_told_right() -> Result<()> {
    let scene = Scene::new(&Artefacts::locate()?, Device::software())?;
    let program = compile(&scene)?;
    let _core = scene.core(&scene.artefacts().policy("slo-herald")?, &["--sharing", "mps"])?;
    let mut batch = Probe::start(&scene, Class::BestEffort, "batch")?;
    for case in [("eager", 2, 60, 5_000, "event"), ("graph", 1, 60, 5_000, "stream")] {
        let mut process = start(&scene, &program, case, &[])?;
        process.tell("serve")?;
        batch.ask("launch 40 20000")?;
        let said = process.hear(JOB_MAX).with_context(|| process.quote())?;
        batch.ask("sync")?;
        let service = wait_until("waiting for the requests", ANSWER_MAX, || {
            let service = scene.status()?.client(&name(case))?.service();
            Ok(service.filter(|service| service.requests >= case.2))
        })?;
        is_told_right(case, &service, &said)?;
        ensure!(process.wait(ANSWER_MAX)?.success(), "{}", process.quote());
    }
    batch.quit()
}

/// With an objective for tokens each launch of a CUDA graph is one: from its launch, or the end of the token before if
/// that is later, to the return of the wait.
#[test]
fn graph_launches_are_tokens_of_a_decode_loop() -> Result<()> {
    const TOKENS: u64 = 60;
    let scene = Scene::new(&Artefacts::locate()?, Device::software())?;
    let program = compile(&scene)?;
    let _core = scene.core(&scene.artefacts().policy("tally-priority")?, &[])?;
    for (kind, buffers) in [("graph", 1), ("graph", 2), ("eager", 1)] {
        let case = (kind, buffers, TOKENS, 5_000, "event");
        // The longest that may be asked for: a busy machine keeps it.
        let mut process = start(&scene, &program, case, &["--tpot", "600s"])?;
        process.tell("serve")?;
        let said = process.hear(JOB_MAX).with_context(|| process.quote())?;
        let service = wait_until(&format!("waiting for {case:?}"), ANSWER_MAX, || {
            let service = scene.status()?.client(&name(case))?.service();
            Ok(service.filter(|service| service.requests >= TOKENS))
        })?;
        is_told_right(case, &service, &said)?;
        let told = format!("{case:?} {service:?} {said}");
        let (tpot, marks) = (service.tpot.context("tpot")?, service.marks.context("marks")?);
        ensure!(tpot.tpot_ms == 600_000.0 && service.objective.is_none(), "{told}");
        if kind == "eager" {
            ensure!(marks.tokens.count == 0 && tpot.attainment_percent.is_none(), "{told}");
            ensure!(process.wait(ANSWER_MAX)?.success(), "{}", process.quote());
            continue;
        }
        let tokens = marks.tokens;
        ensure!(
            (tokens.count, tokens.recent, tpot.tokens_within) == (TOKENS, TOKENS, TOKENS),
            "{told}"
        );
        ensure!(tpot.attainment_percent == Some(100.0) && !marks.requests, "{told}");
        let p50_ms = said["token_p50_ms"].as_f64().context("token_p50_ms")?;
        ensure!((0.95 * p50_ms - 0.1..=1.02 * p50_ms + 0.1).contains(&tokens.p50_ms), "{told}");
        let text = String::from_utf8(scene.ctl(&["status"])?.stdout)?;
        ensure!(text.contains("objective: 600000 ms a token, kept by 100.00 %"), "{text}");
        let text = String::from_utf8(scene.ctl(&["metrics"])?.stdout)?;
        let line =
            text.lines().find(|l| l.starts_with("tally_client_tokens_within_objective_total{"));
        ensure!(line.is_some_and(|l| l.ends_with(&format!("}} {TOKENS}"))), "{text}");

        // Each objective is changed without the other.
        let set = |options: &[&str]| -> Result<Service> {
            let said = scene.ctl(&[&["client", "set", &name(case)], options].concat())?;
            ensure!(said.status.success(), "{said:?}");
            scene.status()?.client(&name(case))?.service().context("service")
        };
        let service = set(&["--slo", "1s"])?;
        ensure!(service.objective.is_some() && service.tpot.is_some(), "{service:?}");
        let service = set(&["--tpot", "10us"])?;
        let tpot = service.tpot.context("tpot")?;
        ensure!(service.objective.is_some() && tpot.tpot_ms == 0.01, "{service:?}");
        ensure!((tpot.tokens_within, tpot.attainment_percent) == (TOKENS, None), "{service:?}");
        let service = set(&["--no-tpot"])?;
        ensure!(service.objective.is_some() && service.tpot.is_none(), "{service:?}");
        ensure!(process.wait(ANSWER_MAX)?.success(), "{}", process.quote());
    }
    Ok(())
}

/// The GPU is idle while a program pauses within its requests: best effort has that time, as long as the objective
/// allows it.
#[test]
fn best_effort_runs_within_requests_that_pause() -> Result<()> {
    best_effort_runs_within("eager", &["--slo", "900ms"])
}

/// A request that begins with the launch of a CUDA graph has the objective of tokens.
#[test]
fn best_effort_runs_within_tokens_that_pause() -> Result<()> {
    best_effort_runs_within("graph", &["--tpot", "900ms"])
}

fn best_effort_runs_within(kind: &'static str, objective: &[&str]) -> Result<()> {
    let scene = Scene::new(&Artefacts::locate()?, Device::software())?;
    let program = compile(&scene)?;
    let _core = scene.core(&scene.artefacts().policy("slo-herald")?, &["--sharing", "mps"])?;
    let mut batch = Probe::start(&scene, Class::BestEffort, "batch")?;
    batch.ask("launch 200 100")?;
    batch.ask("sync")?;
    // A busy machine needs many: it is killed once enough is seen.
    let case = (kind, 1, 1_000_000, 100, "pause");
    let mut process = start(&scene, &program, case, objective)?;
    process.tell("serve")?;
    wait_until("waiting for launches within requests", JOB_MAX, || {
        batch.ask("launch 40 100")?;
        batch.ask("sync")?;
        let within = &scene.status()?.0["policy"]["counters"]["launches_within_units"];
        Ok((within.as_u64() > Some(100)).then_some(()))
    })?;
    batch.quit()
}
