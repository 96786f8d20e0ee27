//! Programs with little room of a kind: they run as without Tally, ungoverned if need be, and the status says why.

use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::process::Command;
use tally_harness::jobs::ANSWER_MAX;
use tally_harness::process::wait_until;
use tally_harness::{Artefacts, Class, Device, Process, Scene};

fn scene() -> Result<Scene> {
    Scene::new(&Artefacts::locate()?, Device::software())
}

/// The program of the preload matrix.
fn program(scene: &Scene) -> Result<PathBuf> {
    let source = format!("{}/e2e/preload/program.c", env!("CARGO_MANIFEST_DIR"));
    let file = scene.dir().join("program");
    let done = Command::new("cc").arg("-o").arg(&file).arg(source).arg("-ldl").output();
    let done = done.context("starting cc (Debian: `apt-get install gcc libc6-dev`)")?;
    ensure!(done.status.success(), "cc: {}", String::from_utf8_lossy(&done.stderr));
    Ok(file)
}

/// The program, begun behind a command of the shell, once it has initialised CUDA.
fn started(scene: &Scene, name: &str, limit: &str) -> Result<Process> {
    started_behind(scene, name, limit, "")
}

/// Starts the program as [`started`] does, by way of the command `by`.
fn started_behind(scene: &Scene, name: &str, limit: &str, by: &str) -> Result<Process> {
    let mut shell = scene.command("sh");
    shell.arg("-c").arg(format!("{limit}; exec {by} {} cuda", program(scene)?.display()));
    shell.env("TALLY_SHIM_LOG", scene.dir().join("log"));
    let mut program = scene.start(name, scene.governed(Class::BestEffort, name, &shell)?)?;
    let said = program.hear(ANSWER_MAX).with_context(|| program.quote())?;
    ensure!(said["init"] == 0, "{limit}: {said}");
    Ok(program)
}

/// That the program runs ungoverned, and the status's reason.
fn ungoverned(limit: &str) -> Result<String> {
    ungoverned_behind(limit, "")
}

fn ungoverned_behind(limit: &str, by: &str) -> Result<String> {
    let scene = scene()?;
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    let mut program = started_behind(&scene, "limited", limit, by)?;
    let reason = wait_until("the status to name it", ANSWER_MAX, || {
        let status = scene.status()?;
        let all = status.0["ungoverned"].as_array().context("no such list")?;
        let program = all.iter().find(|program| program["name"] == "limited");
        Ok(program.and_then(|program| Some(program["reason"].as_str()?.to_owned())))
    })?;
    ensure!(scene.status()?.clients()?.is_empty(), "it is a client all the same");
    ensure!(program.wait(ANSWER_MAX)?.success(), "{limit}: {}", program.quote());
    Ok(reason)
}

#[test]
fn a_program_that_may_only_write_small_files_runs_ungoverned() -> Result<()> {
    let reason = ungoverned("ulimit -f 1024")?;
    ensure!(reason.contains("ulimit -f"), "{reason}");
    Ok(())
}

#[test]
fn a_program_with_few_descriptors_left_initialises_cuda_ungoverned() -> Result<()> {
    for limit in [5, 8] {
        let scene = scene()?;
        let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
        let mut program = started(&scene, "limited", &format!("ulimit -n {limit}"))?;
        ensure!(scene.status()?.clients()?.is_empty(), "{limit}: it is a client all the same");
        ensure!(program.wait(ANSWER_MAX)?.success(), "{limit}: {}", program.quote());
    }
    let reason = ungoverned("ulimit -n 8")?;
    ensure!(reason.contains("ulimit -n"), "{reason}");
    Ok(())
}

#[test]
fn a_limit_on_files_that_leaves_room_does_not_matter() -> Result<()> {
    let scene = scene()?;
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    // Of the program's descriptors none is the shim's.
    let mut program = started(&scene, "limited", "ulimit -f 65536; ulimit -n 20")?;
    ensure!(scene.status()?.client("limited")?.governed());
    ensure!(program.wait(ANSWER_MAX)?.success(), "{}", program.quote());
    Ok(())
}

#[test]
fn a_program_whose_threads_cannot_have_descriptors_of_their_own_runs_ungoverned() -> Result<()> {
    let scene = scene()?;
    let without = scene.dir().join("without");
    let source = format!("{}/e2e/bypass/without.c", env!("CARGO_MANIFEST_DIR"));
    let done = Command::new("cc").arg("-o").arg(&without).arg(source).output()?;
    ensure!(done.status.success(), "cc: {}", String::from_utf8_lossy(&done.stderr));
    // close_range and unshare.
    let reason = ungoverned_behind("true", &format!("{} 436,272", without.display()))?;
    ensure!(reason.contains("unshare"), "{reason}");
    Ok(())
}
