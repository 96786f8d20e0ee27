//! `tallyctl policy new`: a project for a policy, made of what this program carries in
//! itself, so that it works where the repository is not.
//!
//! The SDK is copied into the project (`tally/`), with the contract: a project goes on
//! building whatever becomes of this tallyctl, and an author can read all of it.

use crate::error::CtlError;
use clap::{Args, ValueEnum};
use include_dir::{Dir, File, include_dir};
use std::io::Write;
use std::path::{Component, Path, PathBuf};

static RUST_TEMPLATE: Dir = include_dir!("$CARGO_MANIFEST_DIR/../../sdk/rust/template");
static RUST_SDK: Dir = include_dir!("$CARGO_MANIFEST_DIR/../../sdk/rust/src");
static RUST_MANIFEST: &str = include_str!("../../../../sdk/rust/Cargo.toml");
static C_TEMPLATE: Dir = include_dir!("$CARGO_MANIFEST_DIR/../../sdk/c/template");
static C_BINDINGS: Dir = include_dir!("$CARGO_MANIFEST_DIR/../../sdk/c/bindings");
static C_SDK: Dir = include_dir!("$CARGO_MANIFEST_DIR/../../sdk/c/sdk");
static PYTHON_TEMPLATE: Dir = include_dir!("$CARGO_MANIFEST_DIR/../../sdk/python/template");
static JS_TEMPLATE: Dir = include_dir!("$CARGO_MANIFEST_DIR/../../sdk/js/template");

/// Stands for the policy's name in a template, and with `_` for `-`.
const NAME: &str = "{{name}}";
const CRATE: &str = "{{crate}}";
const NAME_BYTES_MAX: usize = 64;
/// Cargo refuses a package of such a name, or the project could not use it.
const RESERVED: [&str; 9] =
    ["alloc", "build", "core", "crate", "deps", "proc-macro", "std", "tally-sdk", "test"];

#[derive(Debug, Args)]
pub struct NewArgs {
    /// Language of the template
    #[arg(long, value_enum)]
    pub lang: Lang,
    /// Folder to make the project in. Default: one named as the policy, in the current folder.
    #[arg(long, value_name = "FOLDER")]
    pub path: Option<PathBuf>,
    /// The policy's name: lower-case letters, digits and `-`, a letter first.
    #[arg(value_name = "NAME")]
    pub name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Lang {
    /// 40 KiB, 0.2 us a decision.
    Rust,
    /// 20 KiB, 0.2 us a decision.
    C,
    /// 18 MiB, about 10 us a decision: for leases, events and prototypes.
    Python,
    /// 2 MiB, about 10 us a decision: for leases, events and prototypes.
    Js,
}

/// A file of a project.
struct Planned {
    path: PathBuf,
    bytes: Vec<u8>,
}

fn usable(name: &str) -> Result<(), CtlError> {
    let wrong = |why: String| Err(CtlError::Usage(format!("{name:?} as a policy's name: {why}")));
    let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let first = name.chars().next().is_some_and(|c| c.is_ascii_lowercase());
    if !first || !name.chars().all(letters) || name.ends_with('-') || name.contains("--") {
        let expected = "expected lower-case letters, digits and single `-` between them, a letter \
                        first, such as `night-shift`";
        return wrong(expected.into());
    }
    if name.len() > NAME_BYTES_MAX {
        return wrong(format!("it has {} letters, at most {NAME_BYTES_MAX} are", name.len()));
    }
    if RESERVED.contains(&name) {
        return wrong("that is taken by Rust or the SDK: choose another".into());
    }
    Ok(())
}

pub fn run(args: &NewArgs) -> Result<(), CtlError> {
    usable(&args.name)?;
    let root = args.path.clone().unwrap_or_else(|| PathBuf::from(&args.name));
    let shown = root.display();
    let refused = |why: String| CtlError::Failed(format!("{shown}: {why}"));
    match std::fs::create_dir(&root) {
        Ok(()) => {}
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
            let why = "is there already and is not touched: choose another name or --path";
            return Err(refused(why.into()));
        }
        Err(e) => return Err(refused(e.to_string())),
    }
    let written = plan(args.lang, &args.name).iter().try_for_each(|file| write(&root, file));
    if let Err(error) = written {
        // Nothing was there before, and half a project is of no use.
        let _ = std::fs::remove_dir_all(&root);
        return Err(refused(error.to_string()));
    }
    let name = &args.name;
    let limits = match args.lang {
        Lang::Rust | Lang::C => "",
        Lang::Python | Lang::Js => {
            " (with `[policy.limits] preset = \"interpreted\"` in the core's configuration)"
        }
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "made {shown}; README.md there says what is what")?;
    writeln!(out, "  cd {shown}")?;
    writeln!(out, "  make          builds {name}.wasm")?;
    writeln!(out, "  make check    checks that it behaves")?;
    writeln!(out, "  tallyctl policy load {name}.wasm{limits}")?;
    Ok(())
}

fn write(root: &Path, file: &Planned) -> std::io::Result<()> {
    let path = root.join(&file.path);
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(&path, &file.bytes)
}

/// All files of a project.
fn plan(lang: Lang, name: &str) -> Vec<Planned> {
    let mut files = Vec::new();
    let folder = match lang {
        Lang::Rust | Lang::C => "tally/wit",
        // Where their tools look for what `wit/world.wit` includes.
        Lang::Python | Lang::Js => "wit/deps/tally",
    };
    let contract = Planned {
        path: Path::new(folder).join("policy.wit"),
        bytes: crate::policy::CONTRACT.into(),
    };
    match lang {
        Lang::Rust => {
            template(&RUST_TEMPLATE, name, &mut files);
            copied(&RUST_SDK, Path::new("tally/sdk/rust/src"), &mut files);
            files.push(Planned {
                path: "tally/sdk/rust/Cargo.toml".into(),
                bytes: manifest_alone(RUST_MANIFEST).into(),
            });
        }
        Lang::C => {
            template(&C_TEMPLATE, name, &mut files);
            copied(&C_BINDINGS, Path::new("tally"), &mut files);
            copied(&C_SDK, Path::new("tally"), &mut files);
        }
        Lang::Python => template(&PYTHON_TEMPLATE, name, &mut files),
        Lang::Js => template(&JS_TEMPLATE, name, &mut files),
    }
    files.push(contract);
    files
}

/// The files of a folder and of those in it.
fn all<'a>(dir: &'a Dir<'a>) -> Vec<&'a File<'a>> {
    dir.files().chain(dir.dirs().flat_map(all)).collect()
}

/// The files of a template: `dot-x` becomes `.x` (a repository would heed a real one), and
/// `x.in` becomes `x`.
fn template(dir: &Dir, name: &str, files: &mut Vec<Planned>) {
    for file in all(dir) {
        let parts = file.path().components().map(|part| match part {
            Component::Normal(part) => {
                let part = part.to_string_lossy();
                let part = part.strip_suffix(".in").unwrap_or(&part);
                part.strip_prefix("dot-").map_or(part.to_owned(), |rest| format!(".{rest}"))
            }
            other => other.as_os_str().to_string_lossy().into_owned(),
        });
        let bytes = match file.contents_utf8() {
            Some(text) => text.replace(NAME, name).replace(CRATE, &name.replace('-', "_")).into(),
            None => file.contents().to_vec(),
        };
        files.push(Planned { path: parts.collect(), bytes });
    }
}

/// The files of a folder as they are.
fn copied(dir: &Dir, to: &Path, files: &mut Vec<Planned>) {
    for file in all(dir) {
        files.push(Planned { path: to.join(file.path()), bytes: file.contents().to_vec() });
    }
}

/// The SDK's manifest without what ties it to the repository's workspace.
fn manifest_alone(manifest: &str) -> String {
    let mut alone = String::new();
    for line in manifest.lines() {
        let tied = ["workspace = ", "[lints]", "# Built and tested with"];
        if !tied.iter().any(|start| line.starts_with(start)) {
            alone.push_str(line);
            alone.push('\n');
        }
    }
    alone
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_not_work_are_refused() {
        for name in ["polite", "night-shift", "a1"] {
            assert!(usable(name).is_ok(), "{name}");
        }
        let long = "a".repeat(65);
        for name in ["", "-x", "x-", "a--b", "Polite", "1st", "a/b", "..", "a b", "core", &*long] {
            assert!(usable(name).is_err(), "{name}");
        }
    }

    #[test]
    fn every_template_builds_something_and_carries_the_contract() {
        for lang in Lang::value_variants() {
            let files = plan(*lang, "night-shift");
            let has = |path: &str| files.iter().any(|file| file.path == Path::new(path));
            for path in ["Makefile", "README.md", ".gitignore"] {
                assert!(has(path), "{lang:?}: {path}");
            }
            assert!(has("tally/wit/policy.wit") ^ has("wit/deps/tally/policy.wit"), "{lang:?}");
            assert_eq!(has("wit/world.wit"), matches!(lang, Lang::Python | Lang::Js));
            for file in &files {
                let text = String::from_utf8_lossy(&file.bytes);
                assert!(
                    !text.contains("{{name}}") && !text.contains("{{crate}}"),
                    "{:?}",
                    file.path
                );
            }
        }
    }

    #[test]
    fn the_sdk_stands_alone_in_a_project() {
        let manifest = manifest_alone(RUST_MANIFEST);
        assert!(!manifest.contains("workspace"), "{manifest}");
        assert!(manifest.contains("name = \"tally-sdk\"") && manifest.contains("wit-bindgen"));
    }

    #[test]
    fn what_is_there_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine");
        let args = NewArgs { lang: Lang::Rust, path: Some(path.clone()), name: "mine".into() };
        run(&args).unwrap();
        std::fs::write(path.join("src/lib.rs"), "precious").unwrap();
        let error = run(&args).unwrap_err().to_string();
        assert!(error.contains("not touched"), "{error}");
        assert_eq!(std::fs::read_to_string(path.join("src/lib.rs")).unwrap(), "precious");
    }
}
