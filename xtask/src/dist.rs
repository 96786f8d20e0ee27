//! `cargo xtask dist`: an archive with what a machine needs to run Tally, and a list of what is in it.
//!
//! | in it | what |
//! | --- | --- |
//! | `bin/` | `tally-core`, `tallyctl`, `tally-refresh` |
//! | `lib/tally/` | the preloaded library and the shim, where `tallyctl` looks for them; `policies/`, where the core does |
//! | `lib/systemd/system/` | the unit |
//! | `share/doc/tally/` | the commented configuration |
//! | `LICENSE`, `README.md`, `SECURITY.md` | as in the repository |
//! | `sbom.cdx.json` | every crate that went into it, as CycloneDX |

use crate::{build, repository, sbom, target_dir};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Folder for the archive. Default: dist in the build's target folder.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Use what is built already.
    #[arg(long)]
    no_build: bool,
}

/// From the build, stripped; where it goes, and its permissions.
const BUILT: [(&str, &str, u32); 5] = [
    ("tally-core", "bin", 0o755),
    ("tallyctl", "bin", 0o755),
    ("tally-refresh", "bin", 0o755),
    ("libtally_preload.so", "lib/tally", 0o644),
    ("libtally_shim.so", "lib/tally", 0o644),
];
/// Files that are taken from the repository, with their folder in the archive.
const KEPT: [(&str, &str); 5] = [
    ("LICENSE", ""),
    ("README.md", ""),
    ("SECURITY.md", ""),
    ("core/daemon/systemd/tally-core@.service", "lib/systemd/system"),
    ("core/daemon/tally-core.example.toml", "share/doc/tally"),
];

/// Builds everything, unless told not to, and packs the archive.
pub fn run(args: &Args) -> Result<()> {
    if !args.no_build {
        build::everything()?;
    }
    let out = args.out.clone().unwrap_or_else(|| target_dir().join("dist"));
    let name = format!("tally-{}-{}-linux", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH);
    let folder = out.join(&name);
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
    }
    let release = build::release_dir();
    for (file, to, mode) in BUILT {
        let to = place(&release.join(file), &folder.join(to), mode)?;
        strip(&to)?;
    }
    for (file, to) in KEPT {
        place(&repository().join(file), &folder.join(to), 0o644)?;
    }
    let policies = fs::read_dir(release.join("policies")).context("the built policies")?;
    let mut packed = Vec::new();
    for policy in policies {
        let policy = policy?.path();
        if policy.extension().is_some_and(|extension| extension == "wasm") {
            place(&policy, &folder.join("lib/tally/policies"), 0o644)?;
            packed.push(policy.file_stem().unwrap_or_default().to_string_lossy().into_owned());
        }
    }
    ensure!(!packed.is_empty(), "no policy was built: run `cargo xtask policies`");
    let packed: Vec<&str> = packed.iter().map(String::as_str).collect();
    fs::write(folder.join("sbom.cdx.json"), format!("{:#}\n", sbom::make(&packed)?))?;
    let archive = out.join(format!("{name}.tar.gz"));
    pack(&out, &name, &archive)?;
    println!("{}", archive.display());
    Ok(())
}

fn place(from: &Path, folder: &Path, mode: u32) -> Result<PathBuf> {
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let to = folder.join(from.file_name().context("a file has a name")?);
    fs::copy(from, &to)
        .with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
    fs::set_permissions(&to, fs::Permissions::from_mode(mode))?;
    Ok(to)
}

fn strip(file: &Path) -> Result<()> {
    let mut strip = Command::new("strip");
    build::succeed(strip.arg("--strip-unneeded").arg(file))
        .context("`strip` (Debian: `apt-get install binutils`)")
}

/// The same files give the same bytes.
fn pack(out: &Path, name: &str, archive: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0"]);
    tar.args(["--mode=u+rwX,go+rX,go-w", "--use-compress-program=gzip -n", "--create"]);
    tar.arg("--file").arg(archive).arg("--directory").arg(out).arg(name);
    build::succeed(&mut tar)
}
