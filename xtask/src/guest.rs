//! Compiles guests: finds a compiler for `wasm32-unknown-unknown`, and calls
//! Cargo so that the outcome is a component and the same bytes everywhere.
//!
//! The compiler is the installed one if it has the target's standard library
//! (`rustup target add wasm32-unknown-unknown`, for the *user* to run), else
//! one made from Debian's packages ([`crate::debian`]).
//!
//! # Reproducible digests
//! A policy is known by the digest of its file, so the same sources and compiler
//! must give the same bytes. Four things would change them: paths, which end up
//! in panic messages (remapped here) and in symbol names ([`crate::wrapper`]); the
//! versions of dependencies (the lock files are committed and `--locked` is
//! passed); and the flags of the caller's environment (cleared here). The digest of
//! a policy built by Debian's compiler differs from one built by another.

use crate::{debian, repository, wrapper};
use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The only target of guests: it has no WASI imports that a core would refuse.
pub const TARGET: &str = "wasm32-unknown-unknown";
/// Rust reserves 1 MiB of stack by default; a policy needs far less, and a core
/// that keeps instances resident pays for all of it.
const STACK_BYTES: u32 = 65_536;
/// Cargo settings of the caller that would change a guest.
pub const CLEARED: &[&str] = &[
    "CARGO_BUILD_RUSTFLAGS",
    "CARGO_BUILD_TARGET",
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS",
    "RUSTC_BOOTSTRAP",
    "RUSTC_WORKSPACE_WRAPPER",
    "RUSTC_WRAPPER",
    "RUSTFLAGS",
];

/// A compiler that can make guests.
pub struct Toolchain {
    pub description: String,
    pub cargo: PathBuf,
    /// Changes whenever the compiler or its standard library does.
    pub identity: String,
    /// Environment variables that `cargo` needs to be run with.
    pub environment: Vec<(&'static str, OsString)>,
}

/// A component that was built.
pub struct Component {
    /// The folder of its crate.
    pub name: String,
    /// Path of the component that Cargo built.
    pub file: PathBuf,
}

/// The installed compiler if it has the target, else one from Debian's packages.
pub fn find(refresh: bool) -> Result<Toolchain> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let libdir =
        output(Command::new(&rustc).args(["--print", "target-libdir", "--target", TARGET]))
            .context("asking the installed rustc for its target's library folder")?;
    if std_in(Path::new(&libdir)) {
        let version = output(Command::new(&rustc).arg("--version"))?;
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        return Ok(Toolchain {
            description: format!("{version} (installed)"),
            identity: version,
            cargo: cargo.into(),
            environment: Vec::new(),
        });
    }
    debian::toolchain(refresh).with_context(|| {
        format!(
            "no compiler for {TARGET}: the installed rustc lacks the target's standard library, \
             and making one from Debian's packages failed (why: below). With rustup, run \
             `rustup target add {TARGET}`; on Fedora install `rust-std-static-{TARGET}`"
        )
    })
}

fn std_in(libdir: &Path) -> bool {
    std::fs::read_dir(libdir).is_ok_and(|files| {
        files.flatten().any(|file| file.file_name().to_string_lossy().starts_with("libstd-"))
    })
}

impl Toolchain {
    /// Build every component of a workspace.
    pub fn build(&self, workspace: &Path, target_dir: &Path) -> Result<Vec<Component>> {
        let manifest = workspace.join("Cargo.toml");
        ensure!(manifest.is_file(), "{} is missing", manifest.display());
        let linker = linker()?;
        self.forget_other_toolchain(target_dir)?;
        let mut cargo = self.cargo();
        cargo
            .args(["build", "--release", "--message-format=json-render-diagnostics"])
            .args(["--target", TARGET, "--manifest-path"])
            .arg(&manifest)
            .arg("--target-dir")
            .arg(target_dir)
            .env("PATH", self.path_with(&linker)?)
            .env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER", &linker)
            .env("RUSTC_WORKSPACE_WRAPPER", std::env::current_exe()?)
            .env(wrapper::MARK, "1")
            .env("CARGO_ENCODED_RUSTFLAGS", Self::flags(target_dir)?.join("\x1f"));
        if workspace.join("Cargo.lock").is_file() {
            cargo.arg("--locked");
        }
        let built = cargo.stderr(Stdio::inherit()).output().context("starting cargo")?;
        ensure!(built.status.success(), "building {} failed (why: above)", workspace.display());
        let mut components = Vec::new();
        for line in built.stdout.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
            let message = serde_json::from_slice(line).context("reading cargo's messages")?;
            components.extend(component(&message));
        }
        components.sort_by(|a, b| a.name.cmp(&b.name));
        ensure!(!components.is_empty(), "{} has no cdylib", workspace.display());
        Ok(components)
    }

    /// Cargo would take what another build of the standard library left for fresh:
    /// it looks at the compiler's version only.
    pub fn forget_other_toolchain(&self, target_dir: &Path) -> Result<()> {
        let stamp = target_dir.join("toolchain");
        if std::fs::read_to_string(&stamp).is_ok_and(|built_by| built_by == self.identity) {
            return Ok(());
        }
        if target_dir.exists() {
            std::fs::remove_dir_all(target_dir)
                .with_context(|| format!("emptying {}", target_dir.display()))?;
        }
        std::fs::create_dir_all(target_dir)?;
        std::fs::write(&stamp, &self.identity)
            .with_context(|| format!("writing {}", stamp.display()))
    }

    /// Its `cargo`, with nothing of the caller's settings that would change a guest.
    pub fn cargo(&self) -> Command {
        let mut cargo = Command::new(&self.cargo);
        for name in CLEARED {
            cargo.env_remove(name);
        }
        cargo.envs(self.environment.iter().map(|(name, value)| (name, value)));
        cargo
    }

    /// The linker looks for `rust-lld` on the PATH. Their own rustc puts it there,
    /// another one does not.
    pub fn path_with(&self, linker: &Path) -> Result<OsString> {
        let own = self.environment.iter().find(|(name, _)| *name == "PATH");
        let path = own.map(|(_, path)| path.clone()).or_else(|| std::env::var_os("PATH"));
        let path = path.unwrap_or_default();
        let folders = std::env::split_paths(&path).chain(linker.parent().map(PathBuf::from));
        Ok(std::env::join_paths(folders)?)
    }

    fn flags(target_dir: &Path) -> Result<Vec<String>> {
        let mut flags = vec![format!("-Clink-arg=-zstack-size={STACK_BYTES}")];
        // The last that matches wins, so from the widest to the narrowest.
        flags.push(remap(&repository(), "/tally"));
        flags.push(remap(target_dir, "/target"));
        flags.extend(remap_registry()?);
        Ok(flags)
    }
}

/// The component a message of Cargo tells of, if it does.
fn component(message: &serde_json::Value) -> Option<Component> {
    let kinds = message["target"]["kind"].as_array()?;
    if message["reason"] != "compiler-artifact" || !kinds.iter().any(|kind| kind == "cdylib") {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let mut files = message["filenames"].as_array()?.iter().filter_map(|file| file.as_str());
    Some(Component {
        name: folder.file_name()?.to_string_lossy().into_owned(),
        file: files.find(|file| file.ends_with(".wasm"))?.into(),
    })
}

/// `wasm-component-ld`, which links a component where `rust-lld` alone would link
/// a core module. The Rust project ships the two side by side.
pub fn linker() -> Result<PathBuf> {
    const NAME: &str = "wasm-component-ld";
    let mut folders = Vec::new();
    if let Ok(sysroot) = output(Command::new("rustc").args(["--print", "sysroot"])) {
        let host = output(Command::new("rustc").args(["--print", "host-tuple"]))?;
        folders.push(PathBuf::from(sysroot).join("lib/rustlib").join(host).join("bin"));
    }
    folders.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    match folders.iter().map(|folder| folder.join(NAME)).find(|file| file.is_file()) {
        Some(file) => Ok(file),
        None => bail!(
            "{NAME} is neither beside rust-lld in the Rust toolchain ({}) nor on the PATH. The \
             toolchains of rustup have it; elsewhere run `cargo install {NAME}`",
            folders.first().map_or("none found".into(), |folder| folder.display().to_string())
        ),
    }
}

/// The flag that hides a folder of this machine from what is compiled.
pub fn remap(from: &Path, to: &str) -> String {
    format!("--remap-path-prefix={}={to}", from.display())
}

/// The flags that hide where Cargo keeps the sources of dependencies.
pub fn remap_registry() -> Result<Vec<String>> {
    let home = cargo_home()?;
    let mut flags = vec![remap(&home, "/cargo")];
    // The folder of a registry's sources is named after the registry, which may
    // be a mirror.
    let folders = std::fs::read_dir(home.join("registry/src")).into_iter().flatten().flatten();
    flags.extend(folders.map(|folder| remap(&folder.path(), "/cargo/registry")));
    Ok(flags)
}

fn cargo_home() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os("CARGO_HOME") {
        return Ok(home.into());
    }
    let home = std::env::var_os("HOME").context("neither CARGO_HOME nor HOME is set")?;
    Ok(PathBuf::from(home).join(".cargo"))
}

/// What a command prints, trimmed; an error with what it complained of otherwise.
pub fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let done = command.output().with_context(|| format!("starting `{name}`"))?;
    if !done.status.success() {
        let arguments: Vec<_> = command.get_args().map(|a| a.to_string_lossy()).collect();
        let complaint = String::from_utf8_lossy(&done.stderr);
        bail!("`{name} {}`: {}\n{}", arguments.join(" "), done.status, complaint.trim());
    }
    Ok(String::from_utf8_lossy(&done.stdout).trim().into())
}
