//! `cargo xtask gpu-bundle`: a folder to carry to a machine with a GPU and no
//! compiler.
//!
//! | in it | what |
//! | --- | --- |
//! | `bin/` | the core, `tallyctl`, the preloaded library and the shim, the programs of the demo, and `bin/demo`, which runs it |
//! | `bin/policies/` | the policies, where the core looks for them |
//! | `bin/tests/` | tests of the shim that can have a GPU in place of the software device |
//! | `gpu/` | the GPU suite, `bench/gpu` |
//! | `COMMIT` | what it was built from |
//! | `MANIFEST` | the same, and each file's SHA-256 and size |

use crate::{build, repository};
use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What is taken from the build, stripped.
const PROGRAMS: [&str; 12] = [
    "tally-core",
    "tallyctl",
    "tally-refresh",
    "libtally_preload.so",
    "libtally_shim.so",
    "tally-demo-inference",
    "tally-demo-training",
    "tally-rewrite",
    "tally-litmus",
    "tally-roundtrip",
    "tally-test-probe",
    "xtask",
];
/// Tests of the shim that can have a GPU in place of the software device.
const TESTS: [&str; 2] = ["forms", "graphs"];
/// Runs the demo where there is no Cargo.
const DEMO: &str = "#!/bin/sh\n# The demo on this machine's GPU; --help tells the options.\n\
                    exec \"$(dirname \"$0\")/xtask\" demo --no-build --device cuda \"$@\"\n";
/// Folders of the suite that are no part of it.
const LEFT_OUT: [&str; 3] = ["__pycache__", ".venv", "results"];

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Where to put it; replaced if it is there. Default: gpu-bundle in the
    /// build's target folder.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Use what is built already.
    #[arg(long)]
    no_build: bool,
}

/// Builds everything, unless told not to, and collects it.
pub fn run(args: &Args) -> Result<()> {
    if !args.no_build {
        build::everything()?;
    }
    let out = args.out.clone().unwrap_or_else(|| crate::target_dir().join("gpu-bundle"));
    clear(&out)?;
    let release = build::release_dir();
    for name in PROGRAMS {
        let to = out.join("bin").join(name);
        copy(&release.join(name), &to)?;
        strip(&to)?;
    }
    portable(&out.join("bin"))?;
    fs::create_dir_all(out.join("bin/tests"))?;
    for (name, program) in tests()? {
        let to = out.join("bin/tests").join(name);
        copy(&program, &to)?;
        strip(&to)?;
    }
    copy_tree(&release.join("policies"), &out.join("bin/policies"))?;
    copy_tree(&release.join("test-policies"), &out.join("bin/test-policies"))?;
    copy_tree(&repository().join("bench/gpu"), &out.join("gpu"))?;
    let demo = out.join("bin/demo");
    fs::write(&demo, DEMO)?;
    fs::set_permissions(&demo, fs::Permissions::from_mode(0o755))?;
    let commit = commit();
    fs::write(out.join("COMMIT"), format!("{commit}\n"))?;
    let (manifest, bytes) = manifest(&out, &commit)?;
    fs::write(out.join("MANIFEST"), manifest)?;
    println!("{} ({:.1} MiB)", out.display(), bytes as f64 / f64::from(1 << 20));
    Ok(())
}

/// The shim for an old glibc in place of this machine's, if zig is there to link it.
fn portable(bin: &Path) -> Result<()> {
    let Some(zig) = crate::shim::zig() else {
        eprintln!("no zig: the bundle's shim needs glibc 2.34 (`cargo xtask shim` says more)");
        return Ok(());
    };
    for file in crate::shim::build_with(&zig)? {
        let to = bin.join(file.file_name().context("a library has a name")?);
        copy(&file, &to)?;
        strip(&to)?;
    }
    Ok(())
}

/// The programs of [`TESTS`], whose names in the build's folder only Cargo knows.
fn tests() -> Result<Vec<(&'static str, PathBuf)>> {
    let mut cargo = build::cargo();
    cargo.args(["test", "--release", "--workspace", "--no-run", "--message-format", "json"]);
    let told = TESTS.iter().fold(&mut cargo, |cargo, name| cargo.args(["--test", name]));
    let output = told.stderr(std::process::Stdio::inherit()).output().context("starting cargo")?;
    ensure!(output.status.success(), "{} failed (why: above)", build::line(&cargo));
    let shim = repository().join("core/shim");
    let output = String::from_utf8_lossy(&output.stdout);
    let found = output.lines().filter_map(|line| {
        let told: serde_json::Value = serde_json::from_str(line).ok()?;
        let name = TESTS.into_iter().find(|name| told["target"]["name"] == *name)?;
        let source = Path::new(told["target"]["src_path"].as_str()?);
        let program = told["executable"].as_str().filter(|_| source.starts_with(&shim))?;
        Some((name, PathBuf::from(program)))
    });
    let found: Vec<_> = found.collect();
    ensure!(found.len() == TESTS.len(), "cargo told of {found:?}, not of all of {TESTS:?}");
    Ok(found)
}

/// Removes an earlier bundle, and nothing else.
fn clear(out: &Path) -> Result<()> {
    if out.exists() {
        let empty = fs::read_dir(out).is_ok_and(|mut files| files.next().is_none());
        ensure!(
            empty || out.join("MANIFEST").is_file(),
            "{} is there and is not a bundle: choose another folder",
            out.display()
        );
        fs::remove_dir_all(out).with_context(|| format!("removing {}", out.display()))?;
    }
    fs::create_dir_all(out.join("bin")).with_context(|| format!("creating {}", out.display()))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// Removes what only a debugger needs.
fn strip(file: &Path) -> Result<()> {
    let done = Command::new("strip").arg("--strip-unneeded").arg(file).status();
    match done.context("starting `strip` (Debian: `apt-get install binutils`)")?.success() {
        true => Ok(()),
        false => bail!("`strip {}` failed (why: above)", file.display()),
    }
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    let entries = fs::read_dir(from).with_context(|| format!("reading {}", from.display()))?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if LEFT_OUT.iter().any(|left| name == *left) || name.to_string_lossy().ends_with(".part") {
            continue;
        }
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &to.join(&name))?;
        } else {
            copy(&entry.path(), &to.join(&name))?;
        }
    }
    Ok(())
}

/// The list of contents, and their size.
fn manifest(out: &Path, commit: &str) -> Result<(String, u64)> {
    let mut files = Vec::new();
    list(out, &mut files)?;
    files.sort();
    let mut text = format!("commit {commit}\n");
    let mut sum = 0;
    for file in files {
        let bytes = fs::read(&file)?;
        let digest: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        sum += bytes.len() as u64;
        let name = file.strip_prefix(out).unwrap_or(&file).display();
        text += &format!("{digest} {:>10} {name}\n", bytes.len());
    }
    Ok((text, sum))
}

fn list(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

/// The commit that was built, marked if the tree differs from it.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        let done = Command::new("git").arg("-C").arg(repository()).args(arguments).output().ok()?;
        done.status.success().then(|| String::from_utf8_lossy(&done.stdout).trim().to_owned())
    };
    let Some(head) = git(&["rev-parse", "--short=12", "HEAD"]) else { return "unknown".into() };
    let dirty = git(&["status", "--porcelain"]).is_none_or(|changes| !changes.is_empty());
    if dirty { format!("{head} (with changes)") } else { head }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_names_every_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("bin")).unwrap();
        fs::write(dir.path().join("bin/a"), "abc").unwrap();
        let (text, bytes) = manifest(dir.path(), "c").unwrap();
        assert_eq!(bytes, 3);
        // SHA-256 of "abc".
        let line =
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad          3 bin/a";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn only_a_bundle_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        clear(&out).unwrap();
        fs::write(out.join("precious"), "x").unwrap();
        assert!(clear(&out).unwrap_err().to_string().contains("not a bundle"));
        fs::write(out.join("MANIFEST"), "x").unwrap();
        clear(&out).unwrap();
        assert!(!out.join("precious").exists());
    }
}
