//! The archive of `cargo xtask dist`, unpacked: its programs find one another.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use tally_harness::jobs::{JOB_MAX, Probe};
use tally_harness::process::wait_until;
use tally_harness::{Artefacts, Device, Scene};

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned() + &said)
}

/// Packs, unpacks elsewhere, and gives the folder that the archive has.
fn unpacked(artefacts: &Artefacts, dir: &Path) -> Result<PathBuf> {
    let mut xtask = Command::new(artefacts.file("xtask")?);
    let packed = dir.join("packed");
    output(xtask.args(["dist", "--no-build", "--out"]).arg(&packed))?;
    let archives = std::fs::read_dir(&packed)?.flatten().map(|entry| entry.path());
    let archives: Vec<_> =
        archives.filter(|path| path.to_string_lossy().ends_with(".tar.gz")).collect();
    ensure!(archives.len() == 1, "{archives:?}");
    let name = archives[0].file_name().context("a name")?.to_string_lossy().into_owned();
    let version = env!("CARGO_PKG_VERSION");
    let expected = format!("tally-{version}-{}-linux.tar.gz", std::env::consts::ARCH);
    ensure!(name == expected, "{name}, expected {expected}");
    output(Command::new("tar").arg("-xzf").arg(&archives[0]).arg("-C").arg(dir))?;
    Ok(dir.join(name.trim_end_matches(".tar.gz")))
}

#[test]
fn unpacked_programs_find_one_another_and_schedule() -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let scene = Scene::new(&artefacts, Device::software())?;
    let folder = unpacked(&artefacts, scene.dir())?;
    for file in [
        "LICENSE",
        "README.md",
        "SECURITY.md",
        "lib/systemd/system/tally-core@.service",
        "lib/tally/libtally_shim.so",
        "lib/tally/policies/tally-priority.wasm",
        "share/doc/tally/tally-core.example.toml",
    ] {
        ensure!(folder.join(file).is_file(), "{file} is missing");
    }
    for program in ["tally-core", "tallyctl"] {
        let said = output(Command::new(folder.join("bin").join(program)).arg("--version"))?;
        ensure!(said.contains(env!("CARGO_PKG_VERSION")), "{program}: {said}");
    }
    let sbom: Value = serde_json::from_slice(&std::fs::read(folder.join("sbom.cdx.json"))?)?;
    ensure!(sbom["bomFormat"] == "CycloneDX" && sbom["specVersion"] == "1.6", "{sbom:#}");
    ensure!(sbom["components"].as_array().is_some_and(|all| all.len() > 100), "{sbom:#}");
    // With the policy and the libraries that they find themselves.
    let mut core = scene.command(folder.join("bin/tally-core"));
    core.arg("--socket").arg(scene.socket()).env("XDG_STATE_HOME", scene.state_dir());
    let mut core = scene.start("core", core)?;
    wait_until("waiting for the core", JOB_MAX, || {
        ensure!(core.poll()?.is_none(), "{}", core.quote());
        Ok(scene.status().ok().map(drop))
    })?;
    let mut run = scene.command(folder.join("bin/tallyctl"));
    run.args(["run", "--priority=best-effort", "--name=shipped", "--"]);
    run.arg(artefacts.file("tally-test-probe")?);
    let mut probe = Probe::from(scene.start("shipped", run)?)?;
    probe.ask("launch 10 20")?;
    probe.check()?;
    let status = scene.status()?;
    ensure!(status.policy_name() == "tally-priority", "{:#}", status.0["policy"]);
    ensure!(status.client("shipped")?.governed(), "{:#}", status.0["clients"]);
    let said = probe.0.stderr()?;
    ensure!(!said.contains("will not be governed"), "{said}");
    probe.quit()?;
    scene.stop(&mut core, JOB_MAX)
}
