//! Programs of which some calls reach the driver without the shim: code is loaded and unloaded unseen, and handles
//! that the shim knows are given to other kernels. And programs that count on what the shim must leave alone: the
//! loader, and their descriptors.

use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::process::Command;
use tally_harness::jobs::{ANSWER_MAX, JOB_MAX};
use tally_harness::{Artefacts, Class, Device, Scene};

fn compile(scene: &Scene, from: &str, to: &str, arguments: &[&str]) -> Result<PathBuf> {
    let folder = format!("{}/e2e/bypass", env!("CARGO_MANIFEST_DIR"));
    let file = scene.dir().join(to);
    let mut compile = Command::new("cc");
    compile.args(["-O1", "-Wall", "-Werror", "-o"]).arg(&file).arg(format!("{folder}/{from}"));
    compile.arg("-L").arg(scene.driver_dir()).args(arguments);
    let done = compile.output().context("starting cc (Debian: `apt-get install gcc libc6-dev`)")?;
    ensure!(done.status.success(), "cc: {}", String::from_utf8_lossy(&done.stderr));
    Ok(file)
}

const LINKED: [&str; 2] = ["-lcuda", "-Wl,--allow-shlib-undefined"];
/// Number of `close_range` on x86-64.
const CLOSE_RANGE: &str = "436";
const LIBRARY: [&str; 2] = ["-shared", "-fPIC"];

/// What the client's figures are after it has run in a way, and launched nothing wrong.
fn ran(
    way: &str,
    prepare: impl FnOnce(&Scene, &mut Command) -> Result<()>,
) -> Result<serde_json::Value> {
    ran_of("program.c", way, prepare)
}

fn ran_of(
    source: &str,
    way: &str,
    prepare: impl FnOnce(&Scene, &mut Command) -> Result<()>,
) -> Result<serde_json::Value> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::Software { sms: 2 })?;
    let config = scene.dir().join("random-forms.toml");
    std::fs::write(&config, "form = 1\nslices = 4\n")?;
    let config = config.to_str().context("a path of this test's")?.to_owned();
    let _core =
        scene.core(&artefacts.test_policy("random-forms")?, &["--policy-config", &config])?;
    // A position-dependent program has addresses of its own for functions of others.
    let linked = [&["-no-pie", "-pthread"], &LINKED[..]].concat();
    let file = compile(&scene, source, "program", &linked)?;
    let mut program = scene.command(&file);
    program.arg(way);
    prepare(&scene, &mut program)?;
    let program = scene.governed(Class::BestEffort, way, &program)?;
    let mut program = scene.start(way, program)?;
    let said = program.hear(JOB_MAX).with_context(|| program.quote())?;
    ensure!(said["wrong"] == 0, "{way}: {said}");
    let client = scene.status()?.client(way)?;
    ensure!(client.governed(), "{:#}", client.0);
    ensure!(program.wait(ANSWER_MAX)?.success(), "{}", program.quote());
    Ok(client.0)
}

fn because(client: &serde_json::Value) -> &str {
    client["report"]["whole_because"].as_str().unwrap_or("not there")
}

#[test]
fn a_program_whose_calls_are_all_seen_is_transformed() -> Result<()> {
    let client = ran("plain", |_, _| Ok(()))?;
    ensure!(because(&client).is_empty(), "{client:#}");
    ensure!(client["transformed"]["sliced"].as_u64() > Some(0), "{client:#}");
    Ok(())
}

#[test]
fn a_deep_binding_of_what_does_not_use_the_driver_does_not_matter() -> Result<()> {
    let client = ran("open", |scene, program| {
        let plugin = [&["-DPLAIN"], &LIBRARY[..]].concat();
        program.arg(compile(scene, "plugin.c", "plain.so", &plugin)?);
        Ok(())
    })?;
    ensure!(because(&client).is_empty(), "{client:#}");
    ensure!(client["transformed"]["sliced"].as_u64() > Some(0), "{client:#}");
    Ok(())
}

#[test]
fn beside_a_library_that_binds_the_driver_first_nothing_is_transformed() -> Result<()> {
    for (way, binding) in [("deep", "-Wl,-z,now"), ("late", "-Wl,-z,lazy")] {
        let client = ran(way, |scene, program| {
            let plugin = [&[binding], &LIBRARY[..], &LINKED[..]].concat();
            program.arg(compile(scene, "plugin.c", "plugin.so", &plugin)?);
            Ok(())
        })?;
        ensure!(because(&client).contains("RTLD_DEEPBIND"), "{way}: {client:#}");
        ensure!(client["transformed"]["sliced"] == 0, "{way}: {client:#}");
    }
    Ok(())
}

#[test]
fn behind_a_library_with_a_dlsym_of_its_own_nothing_is_transformed() -> Result<()> {
    let client = ran("hook", |scene, program| {
        let hook = compile(scene, "hook.c", "hook.so", &LIBRARY)?;
        // As a launcher below `tallyctl run` would put it.
        let file = program.get_program().to_owned();
        let preload = scene.artefacts().file("libtally_preload.so")?;
        let mut inner = scene.command("env");
        inner.arg(format!("LD_PRELOAD={}:{}", hook.display(), preload.display()));
        inner.arg(file).args(program.get_args());
        *program = inner;
        Ok(())
    })?;
    ensure!(because(&client).contains("LD_PRELOAD"), "{client:#}");
    ensure!(client["transformed"]["sliced"] == 0, "{client:#}");
    Ok(())
}

#[test]
fn before_a_library_that_changes_code_nothing_is_transformed_and_nothing_is_copied() -> Result<()> {
    let client = ran("patched", |scene, program| {
        let patch = compile(scene, "patch.c", "patch.so", &LIBRARY)?;
        let file = program.get_program().to_owned();
        let preload = scene.artefacts().file("libtally_preload.so")?;
        let mut inner = scene.command("env");
        inner.arg(format!("LD_PRELOAD={}:{}", preload.display(), patch.display()));
        inner.arg(file).args(program.get_args());
        *program = inner;
        Ok(())
    })?;
    ensure!(because(&client).contains("stands between"), "{client:#}");
    ensure!(client["transformed"]["sliced"] == 0, "{client:#}");
    Ok(())
}

#[test]
fn a_constructor_may_wait_for_a_thread_that_loads_and_launches() -> Result<()> {
    let client = ran("waits", |scene, program| {
        program.arg(compile(scene, "waiting.c", "waiting.so", &LIBRARY)?);
        Ok(())
    })?;
    ensure!(client["transformed"]["sliced"].as_u64() > Some(0), "{client:#}");
    Ok(())
}

#[test]
fn a_threads_own_descriptors_are_not_taken_for_the_programs() -> Result<()> {
    let client = ran("files", |scene, program| {
        program.arg(scene.dir());
        Ok(())
    })?;
    ensure!(client["transformed"]["sliced"].as_u64() > Some(0), "{client:#}");
    Ok(())
}

#[test]
fn a_program_meets_no_descriptor_of_the_shims() -> Result<()> {
    for way in ["lowest", "closed", "ends"] {
        let client = ran_of("descriptors.c", way, |scene, program| {
            program.arg(scene.dir().join("own"));
            Ok(())
        })?;
        ensure!(client["transformed"]["sliced"].as_u64() > Some(0), "{client:#}");
    }
    Ok(())
}

/// Have a program started for which some system calls are not there.
fn without(calls: &str, scene: &Scene, program: &mut Command) -> Result<()> {
    let mut inner = scene.command(compile(scene, "without.c", "without", &[])?);
    inner.arg(calls).arg(program.get_program()).args(program.get_args());
    *program = inner;
    Ok(())
}

#[test]
fn on_an_old_system_too_a_program_meets_no_descriptor_of_the_shims() -> Result<()> {
    for way in ["lowest", "closed", "ends"] {
        let client = ran_of("descriptors.c", way, |scene, program| {
            program.arg(scene.dir().join("own"));
            without(CLOSE_RANGE, scene, program)
        })?;
        ensure!(client["transformed"]["sliced"].as_u64() > Some(0), "{client:#}");
    }
    Ok(())
}

#[test]
fn threads_with_much_local_data_and_no_files_to_open_are_no_hindrance() -> Result<()> {
    // The allocator opens a file for the ninth. The first thread's and the last one's are further ones.
    let few = (0..=6).map(|threads| (threads, 0, ""));
    // With the last one pieces of 64 KiB and more have mappings of their own.
    for (threads, freed_kib, mmap_bytes) in
        few.chain([(0, 300, ""), (0, 1_900, ""), (0, 0, "65536")])
    {
        ran_of("arenas.c", "arenas", |_, program| {
            program.args([threads.to_string(), freed_kib.to_string()]);
            if !mmap_bytes.is_empty() {
                program.env("MALLOC_MMAP_THRESHOLD_", mmap_bytes);
            }
            Ok(())
        })
        .with_context(|| format!("{threads} threads, {freed_kib} KiB freed"))?;
    }
    Ok(())
}
