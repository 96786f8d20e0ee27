//! Builds everything that ships, and the programs that tests and the demo run.
//!
//! Always one profile, and for every dependency one set of features: another one compiles wasmtime again. The demo
//! selects fewer packages, for a clean clone shows it sooner, with the same features; a test compares them.

use crate::{guest, repository, target_dir};
use anyhow::{Context, Result, ensure};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// What [`everything`] builds. Benches are built when they run.
const EVERYTHING: [&str; 4] = ["--workspace", "--lib", "--bins", "--tests"];

/// Everything: programs, libraries, tests; then the policies.
/// All output goes to standard error.
pub fn everything() -> Result<()> {
    eprintln!("building (release)");
    beside_toolchain(cargo().args(["build", "--release"]).args(EVERYTHING))?;
    // A process of its own, because it reports on standard output. Not by
    // `current_exe`: the build may have put another file in this one's place.
    succeed(Command::new(release_dir().join("xtask")).arg("policies"))
}

/// What the demo runs, and no more; then the policies. All output goes to standard error.
pub fn demo() -> Result<()> {
    eprintln!("building what the demo runs (release)");
    beside_toolchain(cargo().args(["build", "--release"]).args(demo_selection()))?;
    let policies = ["policies", "--no-test-guests"];
    succeed(Command::new(std::env::current_exe()?).args(policies))
}

/// Runs a build while the compiler for policies is found or made, which is mostly waiting for packages. If that fails,
/// `policies` says so.
fn beside_toolchain(build: &mut Command) -> Result<()> {
    std::thread::scope(|scope| {
        scope.spawn(|| guest::find(false).map(drop));
        succeed(build)
    })
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

fn demo_selection() -> impl Iterator<Item = &'static str> {
    DEMO.into_iter().flat_map(|package| ["--package", package])
}

/// Folder of the programs after [`everything`].
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use sha2::{Digest, Sha256};
    use std::collections::{BTreeMap, BTreeSet};

    /// What Cargo would compile for a selection: each crate with its features and those of all behind it.
    fn units(selection: &[&str]) -> BTreeSet<String> {
        let mut cargo = cargo();
        // For `--unit-graph`, which only tells.
        cargo.env("RUSTC_BOOTSTRAP", "1").args(["build", "--release", "--offline"]);
        cargo.args(["--unit-graph", "-Zunstable-options"]).args(selection);
        let done = cargo.output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let graph: Value = serde_json::from_slice(&done.stdout).unwrap();
        let units = graph["units"].as_array().unwrap();
        let mut known = BTreeMap::new();
        (0..units.len()).map(|at| identity(units, at, &mut known)).collect()
    }

    fn identity(units: &[Value], at: usize, known: &mut BTreeMap<usize, String>) -> String {
        if let Some(identity) = known.get(&at) {
            return identity.clone();
        }
        let unit = &units[at];
        let behind: Vec<String> = unit["dependencies"]
            .as_array()
            .unwrap()
            .iter()
            .map(|d| identity(units, d["index"].as_u64().unwrap() as usize, known))
            .collect();
        let of_it = ["pkg_id", "target", "mode", "features", "profile", "platform"];
        let of_it: Vec<String> = of_it.iter().map(|key| unit[*key].to_string()).collect();
        let name = format!("{} {}", unit["pkg_id"], unit["features"]);
        let hash = Sha256::digest(format!("{of_it:?} {behind:?}"));
        let identity = format!("{name} {:02x?}", &hash[..8]);
        known.insert(at, identity.clone());
        identity
    }

    #[test]
    fn nothing_is_compiled_again_for_the_demo_or_for_xtask() {
        let everything = units(&EVERYTHING);
        let demo: Vec<&str> = demo_selection().collect();
        for selection in [&demo[..], &["--bin", "xtask"]] {
            let again: Vec<String> = units(selection).difference(&everything).cloned().collect();
            assert!(again.is_empty(), "{selection:?}: {again:#?}");
        }
    }
}
