//! `cargo xtask shim`: the shim for machines with an old glibc, linked by zig.
//!
//! zig brings the symbol versions of every glibc and a static unwinder. The outcome, beside a copy of the
//! preloaded library, is in `portable/` in the build's folder.

use crate::build::{self, cargo};
use crate::target_dir;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tally_demo::artefacts::newest_glibc;

/// Names zig, with its first arguments.
const ENV_ZIG: &str = "TALLY_ZIG";
/// The oldest glibc that Rust's standard library supports.
const GLIBC: (u32, u32) = (2, 17);
const TARGET: &str = "x86_64-unknown-linux-gnu";
const PRELOAD: &str = "libtally_preload.so";
const SHIM: &str = "libtally_shim.so";

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_: &Args) -> Result<()> {
    let Some(zig) = zig() else {
        bail!(
            "zig is missing: `pip install ziglang` has it. Name it in {ENV_ZIG} if it is not on the PATH \
             (`python3 -m ziglang` may be said there)"
        );
    };
    for file in build_with(&zig)? {
        println!("{}", file.display());
    }
    Ok(())
}

/// The command that starts zig, if it is there.
pub fn zig() -> Option<String> {
    let named = std::env::var(ENV_ZIG).ok().filter(|zig| !zig.is_empty());
    let works = |zig: &String| {
        let version = Command::new("sh").args(["-c", &format!("{zig} version")]).output();
        version.is_ok_and(|done| done.status.success())
    };
    match named {
        Some(zig) => Some(zig),
        None => ["zig", "python3 -m ziglang"].map(String::from).into_iter().find(works),
    }
}

/// Builds both libraries with this `zig`, and checks them.
pub fn build_with(zig: &str) -> Result<[PathBuf; 2]> {
    let work = target_dir().join("portable");
    fs::create_dir_all(&work)?;
    let linker = linker(&work, zig)?;
    let mut build = cargo();
    build.args(["build", "--release", "--package", "tally-shim", "--lib", "--target", TARGET]);
    build
        .arg("--target-dir")
        .arg(&work)
        .env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER", linker);
    build::succeed(&mut build)?;
    build::succeed(cargo().args(["build", "--release", "--package", "tally-preload"]))?;
    let to = build::release_dir().join("portable");
    fs::create_dir_all(&to)?;
    let shim = work.join(TARGET).join("release").join(SHIM);
    let newest =
        newest_glibc(&fs::read(&shim).with_context(|| format!("reading {}", shim.display()))?);
    ensure!(
        newest.is_some_and(|newest| newest <= GLIBC),
        "{} needs glibc {newest:?}, newer than {GLIBC:?}",
        shim.display()
    );
    let copies = [(build::release_dir().join(PRELOAD), PRELOAD), (shim, SHIM)];
    for (from, name) in copies {
        // In one step: a program may have the old one mapped.
        let new = to.join(format!("{name}.new"));
        fs::copy(&from, &new).with_context(|| format!("copying {}", from.display()))?;
        fs::rename(&new, to.join(name))?;
    }
    Ok([to.join(PRELOAD), to.join(SHIM)])
}

/// A script that gives zig what rustc says to the linker.
fn linker(folder: &Path, zig: &str) -> Result<PathBuf> {
    let (major, minor) = GLIBC;
    let script = format!(
        "#!/bin/sh\n\
         # Made by `cargo xtask shim`.\n\
         for argument; do\n  \
           shift\n  \
           case $argument in\n    \
             -lgcc_s) set -- \"$@\" -lunwind ;;\n    \
             -fuse-ld=* | -B* | -m64 | -Wl,--no-undefined-version | -Wl,-O1) ;;\n    \
             *) set -- \"$@\" \"$argument\" ;;\n  \
           esac\n\
         done\n\
         exec {zig} cc -target x86_64-linux-gnu.{major}.{minor} \"$@\"\n"
    );
    let file = folder.join("linker");
    fs::write(&file, script)?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
    Ok(file)
}
