//! `cargo xtask asan`: tests across processes with the shim and the software device built for AddressSanitizer.
//!
//! Both libraries are loaded into the usual programs, which have the sanitizer's runtime preloaded; the core, the
//! preloaded library and the programs themselves stay as they are.

use crate::build::{self, cargo, succeed};
use crate::target_dir;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tally_demo::artefacts::ENV_BIN_DIR;
use tally_demo::scene::ENV_PRELOAD;

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Only these of the tests across processes.
    #[arg(default_values_t = TESTS.map(String::from))]
    tests: Vec<String>,
    /// Use what is built already for everything but the two libraries.
    #[arg(long)]
    no_build: bool,
}

/// Those that do not choose what is preloaded themselves, and set no clock to programs that are slower here.
const TESTS: [&str; 6] = ["transforming", "core_gone", "sharing", "reload", "faults", "chaos"];
const LIBRARIES: [&str; 2] = ["libtally_shim.so", "libtally_softcuda.so"];
/// Shim and driver keep what other threads may still use until the process ends, and are no programs that begin with
/// the runtime.
const OPTIONS: &str = "detect_leaks=0:verify_asan_link_order=0:abort_on_error=1";

/// Build, run, and tell what was found.
pub fn run(args: &Args) -> Result<()> {
    let runtime = runtime()?;
    if !args.no_build {
        build::everything()?;
    }
    let work = target_dir().join("asan");
    let bin = folder(&work, &libraries(&work)?)?;
    let reports = work.join("reports");
    let _ = fs::remove_dir_all(&reports);
    fs::create_dir_all(&reports)?;
    let mut test = cargo();
    test.args(["test", "--release", "--workspace", "--no-fail-fast"]);
    test.args(args.tests.iter().flat_map(|name| ["--test", name]));
    test.args(["--", "--test-threads=2"])
        .env(ENV_BIN_DIR, &bin)
        .env(ENV_PRELOAD, &runtime)
        .env("ASAN_OPTIONS", format!("{OPTIONS}:log_path={}", reports.join("of").display()));
    let passed = succeed(&mut test);
    let found: Vec<PathBuf> = fs::read_dir(&reports)?.flatten().map(|entry| entry.path()).collect();
    for report in &found {
        println!("{}", report.display());
        print!("{}", fs::read_to_string(report).unwrap_or_default());
    }
    println!("{} with {}: {} reports", args.tests.join(", "), runtime.display(), found.len());
    ensure!(found.is_empty(), "AddressSanitizer found errors");
    passed
}

/// The compiler's runtime as a library of its own.
fn runtime() -> Result<PathBuf> {
    let output = Command::new("cc").arg("-print-file-name=libasan.so").output();
    let output = output.context("starting `cc` (Debian: `apt-get install gcc`)")?;
    let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    match fs::canonicalize(&path) {
        Ok(path) => Ok(path),
        Err(_) => bail!("the compiler has no libasan.so (Debian: libgcc-12-dev and libasan8)"),
    }
}

fn libraries(work: &Path) -> Result<[PathBuf; 2]> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut cargo = cargo();
    cargo
        .args(["build", "--release", "--lib", "--target", &target])
        .args(["--package", "tally-shim", "--package", "tally-softcuda"])
        .env("CARGO_TARGET_DIR", work)
        // The flag is not stable yet.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", "-Zsanitizer=address -Cforce-frame-pointers=yes");
    succeed(&mut cargo)?;
    Ok(LIBRARIES.map(|name| work.join(&target).join("release").join(name)))
}

/// Everything that was built, with these libraries in place of the usual ones.
fn folder(work: &Path, libraries: &[PathBuf]) -> Result<PathBuf> {
    let bin = work.join("bin");
    let _ = fs::remove_dir_all(&bin);
    fs::create_dir_all(&bin)?;
    for entry in fs::read_dir(build::release_dir())? {
        let entry = entry?;
        let name = entry.file_name();
        let is_replaced = LIBRARIES.iter().any(|library| name == *library);
        if entry.file_type()?.is_file() && !is_replaced {
            // No symbolic link: programs look beside what they are.
            fs::hard_link(entry.path(), bin.join(name))?;
        }
    }
    for folder in ["policies", "test-policies"] {
        std::os::unix::fs::symlink(build::release_dir().join(folder), bin.join(folder))?;
    }
    for library in libraries {
        let name = library.file_name().context("a library has a name")?;
        fs::copy(library, bin.join(name)).with_context(|| library.display().to_string())?;
    }
    Ok(bin)
}
