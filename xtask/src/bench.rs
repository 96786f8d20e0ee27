//! `cargo xtask bench`: the crates' criterion benchmarks, one after the other; or
//! [`crate::containment`].

use crate::build::{cargo, succeed};
use anyhow::{Context, Result, ensure};

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Run only the benchmarks of this package
    #[arg(long, short)]
    package: Option<String>,
    /// Only the benchmarks whose name contains this, and criterion's own flags; or
    /// `containment`: what a policy that fails costs, on the software device.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub fn run(args: &Args) -> Result<()> {
    if args.arguments.first().is_some_and(|first| first == "containment") {
        return crate::containment::run();
    }
    let listed = cargo().args(["metadata", "--no-deps", "--format-version=1"]).output()?;
    ensure!(listed.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&listed.stderr));
    let metadata = serde_json::from_slice(&listed.stdout).context("reading cargo's metadata")?;
    let benches = benches(&metadata);
    let wanted = |package: &str| args.package.as_ref().is_none_or(|only| only == package);
    let mut ran = 0;
    for (package, bench) in benches.iter().filter(|(package, _)| wanted(package)) {
        eprintln!("\n{package}: {bench}");
        let mut command = cargo();
        // Of the whole workspace, as everything is built: see `build`.
        command.args(["bench", "-q", "--workspace", "--bench", bench]);
        if !args.arguments.is_empty() {
            command.arg("--").args(&args.arguments);
        }
        succeed(&mut command)?;
        ran += 1;
    }
    ensure!(ran > 0, "no benchmarks found");
    Ok(())
}

/// Package and name of every benchmark of the workspace.
fn benches(metadata: &serde_json::Value) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        for target in package["targets"].as_array().into_iter().flatten() {
            let kinds = target["kind"].as_array();
            let is_bench = kinds.is_some_and(|kinds| kinds.iter().any(|kind| kind == "bench"));
            if let (true, Some(p), Some(t)) =
                (is_bench, package["name"].as_str(), target["name"].as_str())
            {
                found.push((p.to_owned(), t.to_owned()));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benches_are_found() {
        let metadata = serde_json::json!({ "packages": [
            { "name": "a", "targets": [
                { "kind": ["lib"], "name": "a" }, { "kind": ["bench"], "name": "call" } ] },
            { "name": "b", "targets": [{ "kind": ["bin"], "name": "b" }] },
        ]});
        assert_eq!(benches(&metadata), [("a".to_owned(), "call".to_owned())]);
    }
}
