//! `cargo xtask policies`: every guest under `policies/` and `tests/policies/`,
//! compiled to a component and put where the core and the tests look for it.
//!
//! | built from | put into |
//! | --- | --- |
//! | `policies/*` | `<target>/release/policies/<folder>.wasm` |
//! | `tests/policies/*` | `<target>/release/test-policies/<folder>.wasm` |

use crate::{guest, repository, target_dir};
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Build the fallback toolchain anew from what the Debian mirrors offer now.
    #[arg(long)]
    refresh_toolchain: bool,
    /// Only the policies, not the misbehaving guests that the tests need.
    #[arg(long)]
    no_test_guests: bool,
    /// Only the project in this folder, made by `tallyctl policy new --lang rust`; its
    /// component is put there.
    #[arg(long, value_name = "FOLDER", conflicts_with = "no_test_guests")]
    project: Option<PathBuf>,
}

/// Builds the policies to WebAssembly components.
pub fn run(args: &Args) -> Result<()> {
    let root = repository();
    let toolchain = guest::find(args.refresh_toolchain)?;
    println!("guest compiler: {}", toolchain.description);
    if let Some(project) = &args.project {
        let project = fs::canonicalize(project)
            .with_context(|| format!("the project {}", project.display()))?;
        for component in toolchain.build(&project, &target_dir().join("guests"))? {
            // Policies have no `_` in their names, crates no `-`.
            let stem = component.file.file_stem().unwrap_or_default().to_string_lossy();
            let to = project.join(stem.replace('_', "-")).with_extension("wasm");
            place(&component.file, &to)?;
        }
        return Ok(());
    }
    let release = target_dir().join("release");
    build(&toolchain, &root.join("policies"), &release.join("policies"))?;
    if !args.no_test_guests {
        build(&toolchain, &root.join("tests/policies"), &release.join("test-policies"))?;
    }
    Ok(())
}

/// Build one workspace of guests and copy its components out.
fn build(toolchain: &guest::Toolchain, workspace: &Path, out: &Path) -> Result<()> {
    fs::create_dir_all(out).with_context(|| format!("creating {}", out.display()))?;
    for component in toolchain.build(workspace, &target_dir().join("guests"))? {
        place(&component.file, &out.join(&component.name).with_extension("wasm"))?;
    }
    Ok(())
}

/// Copy a component and say what it is.
fn place(from: &Path, to: &Path) -> Result<()> {
    let bytes = fs::read(from).with_context(|| format!("reading {}", from.display()))?;
    install(to, &bytes)?;
    println!("{:>8} bytes  sha256 {}  {}", bytes.len(), sha256(&bytes), to.display());
    Ok(())
}

/// Replace `to` in one step, so that a running core that watches the file never
/// sees half of it.
fn install(to: &Path, bytes: &[u8]) -> Result<()> {
    let part = to.with_extension("wasm.part");
    fs::write(&part, bytes).with_context(|| format!("writing {}", part.display()))?;
    fs::rename(&part, to).with_context(|| format!("renaming to {}", to.display()))
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
