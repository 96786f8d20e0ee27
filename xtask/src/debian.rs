//! A compiler for guests where the installed one has no WebAssembly target:
//! Debian's web toolchain (`rustc-web`, kept current by security updates for
//! the browsers), unpacked into `target/guest-toolchain/` without root and
//! without a change to the system.
//!
//! Nothing is pinned: `apt` is asked for today's candidate, with package lists
//! of our own, so that a machine whose lists were never updated works too. The
//! standard library for the target is then compiled from Debian's sources
//! (`-Zbuild-std`) and installed into the unpacked sysroot. The outcome is kept;
//! a stamp with the version says that it is complete.
//!
//! `$TALLY_GUEST_TOOLCHAIN` names another folder, to share one among checkouts.

use crate::guest::{self, TARGET, Toolchain, output};
use crate::repository;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What is wanted of Debian; what these need and the system lacks comes along.
const PACKAGES: [&str; 3] = ["rustc-web", "cargo-web", "rust-web-src"];
/// Which of them carries the compiler's version.
const COMPILER: &str = "rustc-web";
/// The oldest compiler that policies build with: `rust-version` of the SDK.
const VERSION_MIN: (u32, u32) = (1, 95);

/// The toolchain made of Debian's packages, making it first if it is not there.
pub fn toolchain(refresh: bool) -> Result<Toolchain> {
    let dir = match std::env::var_os("TALLY_GUEST_TOOLCHAIN") {
        Some(dir) => PathBuf::from(dir),
        None => repository().join("target/guest-toolchain"),
    };
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    // Two builds at once would unpack over each other.
    let lock = fs::File::create(dir.join("lock"))?;
    lock.lock().with_context(|| format!("locking {}", dir.display()))?;
    let stamp = dir.join("version");
    if refresh {
        let _ = fs::remove_file(&stamp);
    }
    let version = match fs::read_to_string(&stamp) {
        Ok(version) => version,
        Err(_) => {
            let version = make(&dir)?;
            fs::write(&stamp, &version)?;
            version
        }
    };
    unpacked(&dir, &version)
}

#[derive(Debug, PartialEq)]
struct Package {
    name: String,
    version: String,
}

/// Fetch, unpack and complete it; returns the compiler's package version.
fn make(dir: &Path) -> Result<String> {
    for tool in ["apt-get", "dpkg-deb", "cc"] {
        ensure!(
            Command::new(tool).arg("--version").output().is_ok_and(|done| done.status.success()),
            "`{tool}` is missing (Debian and its derivatives have it: `apt-get install gcc`)"
        );
    }
    eprintln!("making a compiler for guests in {} (two minutes, once)", dir.display());
    let apt = Apt::new(dir)?;
    let packages = apt.resolve()?;
    let version = acceptable(&packages)?;
    let root = dir.join("root");
    let _ = fs::remove_dir_all(&root);
    let debs = dir.join("debs");
    let _ = fs::remove_dir_all(&debs);
    fs::create_dir_all(&debs)?;
    eprintln!("fetching {} packages ({COMPILER} {version})", packages.len());
    apt.download(&packages, &debs)?;
    for deb in fs::read_dir(&debs)? {
        output(Command::new("dpkg-deb").arg("-x").arg(deb?.path()).arg(&root))?;
    }
    build_std(dir, &version)?;
    // What is left of 1.3 GB is what compiling needs.
    for spent in ["debs", "std", "apt", "root/usr/src", "root/usr/share"] {
        let _ = fs::remove_dir_all(dir.join(spent));
    }
    Ok(version)
}

/// Refuse a compiler that is too old to build policies.
fn acceptable(packages: &[Package]) -> Result<String> {
    let compiler = packages.iter().find(|package| package.name == COMPILER);
    let compiler = compiler.with_context(|| {
        format!("`{COMPILER}` is installed on this system already, yet is not the `rustc` in use")
    })?;
    let mut numbers = compiler.version.split('.').map(|number| number.parse().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    ensure!(
        version >= VERSION_MIN,
        "this system's packages offer {COMPILER} {}, older than the {}.{} that policies need",
        compiler.version,
        VERSION_MIN.0,
        VERSION_MIN.1
    );
    Ok(compiler.version.clone())
}

/// `apt` with package lists and a cache of its own, so that it needs no root.
struct Apt {
    options: Vec<String>,
}

impl Apt {
    fn new(dir: &Path) -> Result<Self> {
        let apt = dir.join("apt");
        fs::create_dir_all(apt.join("lists/partial"))?;
        fs::create_dir_all(apt.join("cache/archives/partial"))?;
        let option = |name: &str, value: &Path| format!("-o{name}={}", value.display());
        let apt = Apt {
            options: vec![
                "-q".into(),
                option("Dir::State::Lists", &apt.join("lists")),
                option("Dir::Cache", &apt.join("cache")),
                // Called by root it would drop to a user who cannot write there.
                "-oAPT::Sandbox::User=root".into(),
            ],
        };
        // A system may list further sources that cannot be reached; whether the
        // lists suffice shows when the packages are looked up.
        if let Err(error) = output(apt.get().arg("update")) {
            eprintln!("updating the package lists: {error:#}");
        }
        Ok(apt)
    }

    fn get(&self) -> Command {
        let mut command = Command::new("apt-get");
        command.args(&self.options);
        command
    }

    /// The wanted packages and whatever of theirs this system lacks, at today's
    /// versions. A simulation: nothing is installed.
    fn resolve(&self) -> Result<Vec<Package>> {
        let plan = output(
            self.get().args(["--simulate", "--no-install-recommends", "install"]).args(PACKAGES),
        )
        .with_context(|| format!("`apt` finds no {}", PACKAGES.join(", ")))?;
        Ok(plan.lines().filter_map(planned).collect())
    }

    fn download(&self, packages: &[Package], to: &Path) -> Result<()> {
        let wanted = packages.iter().map(|p| format!("{}={}", p.name, p.version));
        output(self.get().arg("download").args(wanted).current_dir(to))?;
        Ok(())
    }
}

/// A line of apt's plan: `Inst name [installed] (version source [architecture])`.
fn planned(line: &str) -> Option<Package> {
    let rest = line.strip_prefix("Inst ")?;
    let name = rest.split(' ').next()?;
    let version = rest.split_once('(')?.1.split(' ').next()?;
    Some(Package { name: name.into(), version: version.into() })
}

/// The toolchain in an unpacked root.
fn unpacked(dir: &Path, version: &str) -> Result<Toolchain> {
    let usr = dir.join("root/usr");
    let cargo = usr.join("bin/cargo");
    ensure!(cargo.is_file(), "{} is incomplete: delete it and try again", dir.display());
    let mut libraries = vec![usr.join("lib")];
    for folder in fs::read_dir(usr.join("lib"))?.flatten() {
        if folder.file_name().to_string_lossy().contains("-linux-gnu") {
            libraries.push(folder.path());
        }
    }
    let mut path = vec![usr.join("bin")];
    path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    let made = fs::metadata(&cargo)?.ctime();
    Ok(Toolchain {
        identity: format!("{COMPILER} {version}, unpacked at {made}"),
        description: format!("Debian's {COMPILER} {version} in {}", dir.display()),
        cargo,
        environment: vec![
            ("RUSTC", usr.join("bin/rustc").into()),
            ("RUSTDOC", usr.join("bin/rustdoc").into()),
            ("LD_LIBRARY_PATH", std::env::join_paths(libraries)?),
            ("PATH", std::env::join_paths(path)?),
        ],
    })
}

/// Compile the target's standard library and install it into the sysroot.
fn build_std(dir: &Path, version: &str) -> Result<()> {
    eprintln!("compiling the standard library for {TARGET}");
    let toolchain = unpacked(dir, version)?;
    let build = dir.join("std");
    let _ = fs::remove_dir_all(&build);
    fs::create_dir_all(build.join("src"))?;
    // Cargo builds the standard library only on the way to something else.
    fs::write(build.join("src/lib.rs"), "#![no_std]\n")?;
    fs::write(
        build.join("Cargo.toml"),
        "[package]\nname = \"anchor\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n",
    )?;
    let sources = dir.join("root/usr/lib/rustlib/src");
    // Without bitcode a policy's link-time optimisation stops at std's border.
    let sources = fs::canonicalize(&sources).unwrap_or(sources);
    let flags = [
        "-Cembed-bitcode=yes".into(),
        guest::remap(&build, "/std"),
        guest::remap(&sources, "/rustc/library"),
    ];
    let flags = flags.into_iter().chain(guest::remap_registry()?).collect::<Vec<_>>();
    output(
        toolchain
            .cargo()
            .args(["build", "--release", "--target", TARGET, "-Zbuild-std=std,panic_abort"])
            // Without backtraces, which a policy has none of.
            .arg("-Zbuild-std-features=")
            .current_dir(&build)
            .env("CARGO_TARGET_DIR", build.join("target"))
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
            // Debian's compiler is a stable one; -Zbuild-std is the only unstable
            // thing asked of it, and only here.
            .env("RUSTC_BOOTSTRAP", "1"),
    )?;
    let to = dir.join("root/usr/lib/rustlib").join(TARGET).join("lib");
    let _ = fs::remove_dir_all(&to);
    fs::create_dir_all(&to)?;
    let mut installed = 0;
    for file in fs::read_dir(build.join("target").join(TARGET).join("release/deps"))?.flatten() {
        let name = file.file_name().to_string_lossy().into_owned();
        if name.ends_with(".rlib") && !name.starts_with("libanchor") {
            fs::copy(file.path(), to.join(&name))?;
            installed += 1;
        }
    }
    if installed == 0 {
        bail!("compiling the standard library left no libraries in {}", build.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, version: &str) -> Package {
        Package { name: name.into(), version: version.into() }
    }

    #[test]
    fn a_plan_is_read() {
        let new = "Inst rustc-web (1.96.0+dfsg1-1 Debian-Security:12/oldstable-security [amd64])";
        assert_eq!(planned(new), Some(package("rustc-web", "1.96.0+dfsg1-1")));
        let upgrade = "Inst libssl3 [3.0.1-1] (3.0.2-1 Debian:12/oldstable [amd64]) []";
        assert_eq!(planned(upgrade), Some(package("libssl3", "3.0.2-1")));
        assert_eq!(planned("Conf rustc-web (1.96.0 Debian [amd64])"), None);
        assert_eq!(planned("Reading package lists..."), None);
    }

    #[test]
    fn an_old_compiler_is_refused() {
        let error = acceptable(&[package(COMPILER, "1.85.0+dfsg3-1")]).unwrap_err().to_string();
        assert!(error.contains("1.85.0+dfsg3-1") && error.contains("1.95"), "{error}");
        assert!(acceptable(&[package(COMPILER, "1.96.0+dfsg1-1")]).is_ok());
        assert!(acceptable(&[package(COMPILER, "2.0.0")]).is_ok());
        assert!(acceptable(&[]).is_err());
    }
}
