//! The tests of the preload matrix (`tests/e2e/preload.rs`) that need what a machine may lack.

use crate::build::cargo;
use anyhow::Result;
use std::process::Command;

/// The folder that Python finds it in.
const ENV_CUDA_PYTHON: &str = "TALLY_CUDA_PYTHON";
const ENV_OLD_GLIBC: &str = "TALLY_OLD_GLIBC";

#[derive(Clone, Copy, PartialEq)]
enum Need {
    CudaPython,
    Musl,
    Root,
    OldGlibc,
    Zig,
}

const TESTS: [(&str, &[Need]); 6] = [
    ("cuda_python_finds_the_whole_driver", &[Need::CudaPython]),
    ("a_program_of_musl_is_named", &[Need::Musl]),
    ("a_set_user_id_program_is_named", &[Need::Root]),
    ("with_an_old_glibc_a_program_runs_and_is_named", &[Need::OldGlibc]),
    ("with_an_old_glibc_the_portable_shim_governs", &[Need::OldGlibc, Need::Zig]),
    ("the_portable_shim_needs_an_old_glibc_only_and_governs", &[Need::Zig]),
];

impl Need {
    /// What is missing, if it is.
    fn missing(self) -> Option<&'static str> {
        let (there, missing) = match self {
            Need::CudaPython => {
                let mut import = Command::new("python3");
                if let Some(folder) = std::env::var_os(ENV_CUDA_PYTHON) {
                    import.env("PYTHONPATH", folder);
                }
                let found = import.args(["-c", "import cuda.bindings.driver"]).output();
                let missing = "cuda-python (`pip install cuda-python`, or TALLY_CUDA_PYTHON)";
                (found.is_ok_and(|done| done.status.success()), missing)
            }
            Need::Musl => {
                let found = Command::new("musl-gcc").arg("--version").output();
                (found.is_ok_and(|done| done.status.success()), "musl-gcc (Debian: musl-tools)")
            }
            Need::Root => (rustix::process::geteuid().is_root(), "root"),
            Need::OldGlibc => (
                std::env::var_os(ENV_OLD_GLIBC).is_some(),
                "an old glibc (TALLY_OLD_GLIBC names its folder)",
            ),
            Need::Zig => (crate::shim::zig().is_some(), "zig (`pip install ziglang`)"),
        };
        (!there).then_some(missing)
    }
}

fn missing(needs: &[Need]) -> Vec<&'static str> {
    needs.iter().filter_map(|need| need.missing()).collect()
}

/// Tests that do not run on this machine, and what they would need.
pub fn left_out() -> Vec<String> {
    let lacking = TESTS.iter().map(|(name, needs)| (name, missing(needs)));
    let lacking = lacking.filter(|(_, missing)| !missing.is_empty());
    lacking
        .map(|(name, missing)| {
            format!("tests/e2e/preload.rs {name} (lacks {})", missing.join(", "))
        })
        .collect()
}

/// Runs the others; builds the shim that some of them take.
pub fn commands(filter: Option<&str>) -> Result<Vec<Command>> {
    let possible = TESTS.iter().filter(|(_, needs)| missing(needs).is_empty());
    let wanted: Vec<_> =
        possible.filter(|(name, _)| filter.is_none_or(|f| name.contains(f))).collect();
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    if wanted.iter().any(|(_, needs)| needs.contains(&Need::Zig))
        && let Some(zig) = crate::shim::zig()
    {
        crate::shim::build_with(&zig)?;
    }
    let mut test = cargo();
    test.args([
        "test",
        "--release",
        "--workspace",
        "--test",
        "preload",
        "--",
        "--ignored",
        "--exact",
    ]);
    test.args(wanted.iter().map(|(name, _)| name)).arg("--test-threads=2");
    Ok(vec![test])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ignored_test_of_the_matrix_is_known() {
        let source = crate::repository().join("tests/e2e/preload.rs");
        let source = std::fs::read_to_string(source).unwrap();
        let ignored: Vec<_> = source
            .split("#[ignore")
            .skip(1)
            .map(|rest| rest.split_once("fn ").unwrap().1.split('(').next().unwrap())
            .collect();
        let mut known: Vec<_> = TESTS.iter().map(|(name, _)| *name).collect();
        known.sort_by_key(|name| ignored.iter().position(|i| i == name));
        assert_eq!(known, ignored);
    }
}
