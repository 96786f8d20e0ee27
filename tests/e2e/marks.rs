//! Units of work that programs mark with NVTX ranges. `marked.c` plays the part of NVTX's headers.

use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::process::Command;
use tally_admin::Service;
use tally_harness::jobs::{ANSWER_MAX, JOB_MAX};
use tally_harness::process::{Process, wait_until};
use tally_harness::{Artefacts, Class, Device, Scene};

const REQUESTS: u64 = 40;

fn compile(scene: &Scene) -> Result<PathBuf> {
    let program = scene.dir().join("marked");
    let compiled = Command::new("cc")
        .args(["-O1", "-Wall", "-Werror", "-o"])
        .arg(&program)
        .arg(format!("{}/e2e/marked.c", env!("CARGO_MANIFEST_DIR")))
        .arg("-L")
        .arg(scene.driver_dir())
        .args(["-lcuda", "-ldl", "-pthread", "-Wl,--allow-shlib-undefined"])
        .output()
        .context("starting cc (Debian: `apt-get install gcc libc6-dev`)")?;
    ensure!(compiled.status.success(), "cc: {}", String::from_utf8_lossy(&compiled.stderr));
    Ok(program)
}

fn program(scene: &Scene, what: &str) -> Result<Command> {
    let mut program = scene.command(&compile(scene)?);
    program.arg(format!("{}/kernels/probe.ptx", env!("CARGO_MANIFEST_DIR"))).arg(what);
    Ok(program)
}

/// A governed program that has done its work, and what it said of it.
fn run(
    scene: &Scene,
    class: Class,
    name: &str,
    what: &str,
) -> Result<(Process, serde_json::Value)> {
    let governed = scene.governed(class, name, &program(scene, what)?)?;
    let mut process = scene.start(name, governed)?;
    let said = process.hear(JOB_MAX).with_context(|| process.quote())?;
    Ok((process, said))
}

fn service_after(scene: &Scene, name: &str, requests: u64) -> Result<Service> {
    wait_until(&format!("waiting for {requests} requests of {name}"), ANSWER_MAX, || {
        let service = scene.status()?.client(name)?.service();
        Ok(service.filter(|s| s.requests >= requests && s.marks.is_none_or(|m| m.open == 0)))
    })
}

fn end(mut process: Process) -> Result<()> {
    ensure!(process.wait(ANSWER_MAX)?.success(), "{}", process.quote());
    Ok(())
}

#[test]
fn marked_requests_are_counted_as_the_program_counts_them() -> Result<()> {
    let scene = Scene::new(&Artefacts::locate()?, Device::software())?;
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    let (process, said) = run(&scene, Class::High, "web", "marks")?;
    ensure!(said["injected"] == 1, "{said}");
    let service = service_after(&scene, "web", REQUESTS)?;
    let marks = service.marks.context("no marks")?;
    ensure!(service.requests == REQUESTS && service.recent == REQUESTS, "{service:?}");
    ensure!(marks.requests && (marks.tokens.count, marks.prefills.count) == (120, 4), "{marks:?}");
    ensure!((marks.open, marks.dropped, marks.wrong, marks.shortened) == (0, 0, 0, 0), "{marks:?}");
    // Its clocks around the ranges and inside of them bound the longest; figures are kept to a hundredth.
    let most_ms = said["most_ms"].as_f64().context("most_ms")?;
    let inside_ms = said["inside_ms"].as_f64().context("inside_ms")?;
    ensure!(
        service.p99_ms <= most_ms * 1.01 && service.p99_ms >= inside_ms * 0.99,
        "{service:?} {said}"
    );
    ensure!(0.0 < service.p50_ms && service.p50_ms <= service.p99_ms, "{service:?}");
    // Eight of them waited for 2 ms before they began.
    ensure!(service.p99_ms >= 2.0, "{service:?}");
    let text = String::from_utf8(scene.ctl(&["status"])?.stdout)?;
    ensure!(text.contains("requests by its own marks; 0 under way"), "{text}");
    ensure!(text.contains("120 recent tokens"), "{text}");
    let text = String::from_utf8(scene.ctl(&["metrics"])?.stdout)?;
    for (name, value) in
        [("tally_client_requests_total", "40"), ("tally_client_tokens_total", "120")]
    {
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")));
        ensure!(
            line.is_some_and(|line| line.ends_with(&format!("}} {value}"))),
            "{name}: {line:?}"
        );
    }
    end(process)
}

/// Eager tokens within requests: without graphs only marks tell of them.
#[test]
fn marked_tokens_are_the_steps_of_a_policy() -> Result<()> {
    const TOKENS: u64 = 60;
    let scene = Scene::new(&Artefacts::locate()?, Device::software())?;
    let _core = scene.core(&scene.artefacts().policy("tpot-first")?, &[])?;
    // The longest that may be asked for: a busy machine keeps it.
    let command = program(&scene, "tokens")?;
    let governed = scene.governed_with(Class::High, "llm", &["--tpot", "600s"], &command)?;
    let mut process = scene.start("llm", governed)?;
    process.hear(JOB_MAX).with_context(|| process.quote())?;
    let service = service_after(&scene, "llm", 10)?;
    let marks = service.marks.context("no marks")?;
    ensure!((service.requests, marks.tokens.count) == (10, TOKENS), "{service:?}");
    // What it counted it hands over once the client leaves.
    end(process)?;
    let steps = wait_until("waiting for the policy's counter", ANSWER_MAX, || {
        let text = String::from_utf8(scene.ctl(&["metrics"])?.stdout)?;
        let mut lines = text.lines();
        let line = lines.find(|l| l.starts_with("tally_policy") && l.contains("\"steps\""));
        Ok(line.and_then(|l| l.split(' ').next_back()?.parse::<u64>().ok()).filter(|n| *n > 0))
    })?;
    // Tokens that end in one pass of the core are one step.
    ensure!((TOKENS / 4..=TOKENS).contains(&steps), "{steps} of {TOKENS}");
    Ok(())
}

#[test]
fn lies_and_lost_marks_change_nothing_for_others() -> Result<()> {
    let scene = Scene::new(&Artefacts::locate()?, Device::software())?;
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    let (lies, _) = run(&scene, Class::High, "lies", "lies")?;
    let (many, _) = run(&scene, Class::High, "many", "many")?;
    let (honest, said) = run(&scene, Class::High, "honest", "marks")?;
    let service = service_after(&scene, "honest", REQUESTS)?;
    let most_ms = said["most_ms"].as_f64().context("most_ms")?;
    ensure!(service.requests == REQUESTS && service.p99_ms <= most_ms * 1.01, "{service:?} {said}");

    let client = scene.status()?.client("lies")?;
    let service = client.service().context("lies")?;
    let marks = service.marks.context("no marks")?;
    ensure!((service.requests, marks.shortened) == (REQUESTS, REQUESTS), "{service:?}");
    let connected_ms = client.0["connected_s"].as_f64().context("connected_s")? * 1e3;
    ensure!(service.p99_ms <= connected_ms, "{service:?} {connected_ms}");

    let service = scene.status()?.client("many")?.service().context("many")?;
    let marks = service.marks.context("no marks")?;
    ensure!((service.requests, marks.open, marks.dropped) == (0, 64, 936), "{service:?}");
    [lies, many, honest].into_iter().try_for_each(end)
}

#[test]
fn without_marks_each_wait_ends_a_request() -> Result<()> {
    let scene = Scene::new(&Artefacts::locate()?, Device::software())?;
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    let (process, said) = run(&scene, Class::High, "plain", "nothing")?;
    ensure!(said["injected"] == 1, "{said}");
    // Two of each request, and two of the warm-up.
    let service = service_after(&scene, "plain", 2 * REQUESTS + 2)?;
    ensure!(service.requests == 2 * REQUESTS + 2 && service.marks.is_none(), "{service:?}");
    end(process)?;

    // Marks of best-effort programs have no reader, and NVTX loads nothing.
    let (process, said) = run(&scene, Class::BestEffort, "batch", "marks")?;
    ensure!(
        said["injected"] == 0 && scene.status()?.client("batch")?.service().is_none(),
        "{said}"
    );
    end(process)
}

#[test]
fn marks_harm_no_program_that_is_not_governed() -> Result<()> {
    let scene = Scene::new(&Artefacts::locate()?, Device::software())?;
    let shim = scene.artefacts().file("libtally_shim.so")?;
    // Named by hand without the rest: the library takes nothing, and NVTX goes on without.
    let mut alone = program(&scene, "marks")?;
    alone.env("NVTX_INJECTION64_PATH", &shim);
    let mut process = scene.start("alone", alone)?;
    ensure!(process.hear(JOB_MAX)?["injected"] == 0, "{}", process.quote());
    end(process)?;
    // Its core is not there.
    let (process, said) = run(&scene, Class::High, "lonely", "marks")?;
    ensure!(said["injected"] == 1, "{said}");
    end(process)?;
    // Another tool has the variable, and keeps it.
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    let mut profiled = program(&scene, "marks")?;
    profiled.env("NVTX_INJECTION64_PATH", "/nonexistent/profiler.so");
    let governed = scene.governed(Class::High, "profiled", &profiled)?;
    let mut process = scene.start("profiled", governed)?;
    ensure!(process.hear(JOB_MAX)?["injected"] == 0, "{}", process.quote());
    let service = service_after(&scene, "profiled", 2 * REQUESTS + 2)?;
    ensure!(service.marks.is_none(), "{service:?}");
    end(process)
}

fn report(scene: &Scene) -> Result<serde_json::Value> {
    Ok(serde_json::from_slice(&scene.ctl(&["ab", "report", "--json"])?.stdout)?)
}

/// The report of a test between two policies that has ended; meanwhile this is done again and again.
fn tested(
    scene: &Scene,
    more: &[&str],
    mut meanwhile: impl FnMut(usize) -> Result<()>,
) -> Result<serde_json::Value> {
    let b = scene.artefacts().policy("tally-priority")?;
    let b = b.to_string_lossy();
    let start = ["ab", "start", &*b, "--metric=token_p99", "--seed=5"];
    let output = scene.ctl(&[&start[..], more].concat())?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut round = 0;
    loop {
        meanwhile(round)?;
        round += 1;
        let report = report(scene)?;
        if !report["ended"].is_null() && scene.status()?.0["experiment"]["running"] == false {
            return Ok(report);
        }
    }
}

/// Nothing depends on how many tokens fall into blocks, as long as some do.
#[test]
fn a_test_by_tokens_counts_those_that_the_program_marks() -> Result<()> {
    let scene = Scene::new(&Artefacts::locate()?, Device::software())?;
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    let (mut marked, mut most_ms) = (0, 0.0_f64);
    let timing = ["--block=400ms", "--washout=40ms", "--max-time=8s", "--to-end"];
    let report = tested(&scene, &timing, |round| {
        let (process, said) = run(&scene, Class::High, &format!("llm{round}"), "marks")?;
        marked += 120;
        most_ms = most_ms.max(said["most_ms"].as_f64().context("most_ms")?);
        end(process)
    })?;
    let blocks = report["blocks"].as_array().context("no blocks")?;
    let sum = |what: &str| blocks.iter().filter_map(|block| block[what].as_u64()).sum::<u64>();
    let (tokens, requests) = (sum("tokens"), sum("requests"));
    ensure!(0 < tokens && tokens <= marked, "{tokens} of {marked}: {blocks:#?}");
    ensure!(requests < tokens, "three tokens in each request: {requests} and {tokens}");
    ensure!(sum("tokens_judged") == 0, "no client has an objective for tokens");
    for block in blocks.iter().filter(|block| block["tokens"] != 0) {
        let p99_ns = block["token_p99_ns"].as_f64().context("token_p99_ns")?;
        ensure!(block["value"].as_f64() == Some(p99_ns), "{block:#}");
        ensure!(p99_ns / 1e6 <= most_ms, "{block:#} {most_ms}");
    }

    // Without tokens it says so, and nothing else.
    let timing = ["--block=60ms", "--washout=10ms", "--max-time=60s", "--guard-window=50ms"];
    let guard = ["--guard=token_p99<1s"];
    let report = tested(&scene, &[&timing[..], &guard].concat(), |round| {
        let (process, said) = run(&scene, Class::High, &format!("plain{round}"), "nothing")?;
        ensure!(said["injected"] == 1, "{said}");
        end(process)
    })?;
    ensure!(report["verdict"] == "invalid", "{:#}", report["verdict"]);
    let why = report["why"].as_str().unwrap_or_default();
    ensure!(why.contains("no token of a high-priority client"), "{why}");
    let caveats = report["caveats"].to_string();
    ensure!(caveats.contains("has judged nothing, or too little: B served no tokens"), "{caveats}");
    Ok(())
}
