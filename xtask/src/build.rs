//! Builds everything that ships, and the programs that tests and the demo run.
//!
//! Always one selection of packages, targets and profile: another one gives shared dependencies other features and
//! compiles wasmtime again. The demo has its own, for a clean clone shows it sooner.

use crate::{repository, target_dir};
use anyhow::{Context, Result, ensure};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Everything: programs, libraries, tests, benches; then the policies.
/// All output goes to standard error.
pub fn everything() -> Result<()> {
    eprintln!("building (release)");
    succeed(cargo().args(["build", "--release", "--workspace", "--all-targets"]))?;
    // A process of its own, because it reports on standard output. Not by
    // `current_exe`: the build may have put another file in this one's place.
    succeed(Command::new(release_dir().join("xtask")).arg("policies"))
}

/// What the demo runs, and no more; then the policies. All output goes to standard error.
pub fn demo() -> Result<()> {
    eprintln!("building what the demo runs (release)");
    let mut build = cargo();
    build.args(["build", "--release"]);
    for package in DEMO {
        build.args(["--package", package]);
    }
    succeed(&mut build)?;
    let policies = ["policies", "--no-test-guests"];
    succeed(Command::new(std::env::current_exe()?).args(policies))
}

/// Packages of what serves (the README installs it by the demo), the software device and the programs that share it.
const DEMO: [&str; 7] = [
    "tally-core",
    "tally-refresh",
    "tallyctl",
    "tally-preload",
    "tally-shim",
    "tally-softcuda",
    "tally-demo",
];

/// Where the programs are after [`everything`].
pub fn release_dir() -> PathBuf {
    target_dir().join("release")
}

/// `cargo`, in the root of the repository.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(repository()).env("CARGO_TARGET_DIR", target_dir());
    cargo
}

/// Runs a command to a good end; what it prints goes to standard error.
pub fn succeed(command: &mut Command) -> Result<()> {
    let done = command
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .status()
        .with_context(|| format!("starting {:?}", command.get_program()))?;
    ensure!(done.success(), "{} failed: {done} (why: above)", line(command));
    Ok(())
}

/// A command as one would type it.
pub fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// Ends the program with what was done so far flushed.
pub fn flush() {
    let _ = std::io::stdout().flush();
}
