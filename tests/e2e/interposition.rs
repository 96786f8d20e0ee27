//! Every launch is seen, however the program came by its driver, and nothing
//! else about the program changes.

use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::process::Command;
use tally_harness::jobs::{ANSWER_MAX, Probe};
use tally_harness::process::{Process, wait_until};
use tally_harness::{Artefacts, Class, Device, Scene};

fn scene() -> Result<Scene> {
    Scene::new(&Artefacts::locate()?, Device::software())
}

/// That the core counts `launches` of the client `name`. The probe has read its
/// counters back, so all are done; the core may learn of it a moment later.
fn counted(scene: &Scene, name: &str, launches: u64) -> Result<()> {
    wait_until(&format!("{launches} launches of {name} in the status"), ANSWER_MAX, || {
        let seen = scene.status()?.client(name)?.launches();
        ensure!(seen <= launches, "{name}: {seen} launches counted, {launches} made");
        Ok((seen == launches).then_some(()))
    })
}

#[test]
fn launches_through_a_dynamically_loaded_driver_are_counted() -> Result<()> {
    let scene = scene()?;
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    for class in [Class::BestEffort, Class::High] {
        let name = format!("probe-{class:?}");
        let mut probe = Probe::start(&scene, class, &name)?;
        for (launches, total) in [(57, 57), (1, 58), (200, 258)] {
            probe.ask(&format!("launch {launches} 10"))?;
            probe.ask("sync")?;
            probe.check()?;
            counted(&scene, &name, total)?;
        }
        probe.quit()?;
    }
    Ok(())
}

/// Compiles a C program of this folder.
fn compile(scene: &Scene, name: &str, libraries: &[String]) -> Result<PathBuf> {
    let program = scene.dir().join(name);
    let compiled = Command::new("cc")
        .args(["-O1", "-Wall", "-Werror", "-o"])
        .arg(&program)
        .arg(format!("{}/e2e/{name}.c", env!("CARGO_MANIFEST_DIR")))
        .args(libraries)
        .output()
        .context("starting cc (Debian: `apt-get install gcc libc6-dev`)")?;
    ensure!(compiled.status.success(), "cc: {}", String::from_utf8_lossy(&compiled.stderr));
    Ok(program)
}

/// With a core and without one: the shim is inert then, and still in front of the driver.
#[test]
fn get_proc_address_finds_functions_that_the_shim_does_not_wrap() -> Result<()> {
    let scene = scene()?;
    let program = Command::new(compile(&scene, "lookup", &["-ldl".into()])?);
    let run = |mut command: Command| -> Result<()> {
        let done = command.output()?;
        let printed = String::from_utf8_lossy(&done.stdout).into_owned();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        ensure!(
            done.status.success() && printed == "1 device\n",
            "{}: {printed}{said}",
            done.status
        );
        Ok(())
    };
    run(scene.command(program.get_program()))?;
    run(scene.governed(Class::BestEffort, "lookup", &program)?)?;
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    run(scene.governed(Class::BestEffort, "lookup", &program)?)
}

#[test]
fn launches_of_a_c_program_linked_with_the_driver_are_counted() -> Result<()> {
    let scene = scene()?;
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    let folder = env!("CARGO_MANIFEST_DIR");
    let driver = ["-L", &*scene.driver_dir().to_string_lossy(), "-lcuda"].map(String::from);
    let program = compile(
        &scene,
        "direct",
        &[&driver[..], &["-Wl,--allow-shlib-undefined".into()]].concat(),
    )?;
    let mut direct = scene.command(&program);
    direct.arg("140").arg(format!("{folder}/kernels/probe.ptx"));
    let direct = scene.governed(Class::BestEffort, "direct", &direct)?;
    let mut direct = scene.start("direct", direct)?;
    ensure!(direct.hear(ANSWER_MAX)?["launched"] == 140);
    counted(&scene, "direct", 140)?;
    ensure!(direct.wait(ANSWER_MAX)?.success(), "{}", direct.quote());
    Ok(())
}

/// `tallyctl run` is a convenience: the environment it sets is all there is.
#[test]
fn two_environment_variables_are_enough() -> Result<()> {
    let scene = scene()?;
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    let mut program = scene.program("tally-test-probe")?;
    program.env("LD_PRELOAD", scene.artefacts().file("libtally_preload.so")?);
    let mut probe = Probe::from(scene.start("probe", program)?)?;
    probe.ask("launch 9")?;
    probe.check()?;
    counted(&scene, "tally-test-probe", 9)?;
    probe.quit()
}

#[test]
fn a_program_that_is_not_preloaded_is_not_a_client() -> Result<()> {
    let scene = scene()?;
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    let mut probe = Probe::from(scene.start("probe", scene.program("tally-test-probe")?)?)?;
    probe.ask("launch 3")?;
    probe.check()?;
    ensure!(scene.status()?.clients()?.is_empty(), "it is listed as a client");
    probe.quit()
}

/// A program without CUDA is untouched: no output of ours, its own exit code.
#[test]
fn other_programs_are_left_alone() -> Result<()> {
    let scene = scene()?;
    let _core = scene.core(&scene.artefacts().policy("fifo")?, &[])?;
    let mut shell = Command::new("sh");
    shell.args(["-c", "echo out; echo err >&2; exit 37"]);
    let shell = scene.governed(Class::High, "shell", &shell)?;
    let mut shell: Process = scene.start("shell", shell)?;
    let status = shell.wait(ANSWER_MAX)?;
    ensure!(status.code() == Some(37), "{status}\n{}", shell.quote());
    ensure!(shell.stdout()? == "out\n" && shell.stderr()? == "err\n", "{}", shell.quote());
    Ok(())
}
