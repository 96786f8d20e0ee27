//! `cargo xtask references`: writes `docs/reference/` and the example configuration, from what the code itself uses,
//! and the figures in `docs/ab.md`. The files are committed; `cargo xtask test references` keeps them what the code
//! says.
//!
//! This program links neither wasmtime nor the daemon: the built programs print what is about themselves.

mod contract;
mod limits;

use crate::build;
use crate::repository;
use crate::test_count::Count;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Documents that a built program prints: file, program, what it is asked for.
const PRINTED: [(&str, &str, &str); 5] = [
    ("../../core/daemon/tally-core.example.toml", "tally-core", "example"),
    ("configuration.md", "tally-core", "configuration"),
    ("tally-core.md", "tally-core", "cli"),
    ("tallyctl.md", "tallyctl", "cli"),
    ("metrics.md", "tallyctl", "metrics"),
];

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing; fail if the committed files are not what the code says.
    #[arg(long)]
    check: bool,
    /// Use the programs that are built already.
    #[arg(long)]
    no_build: bool,
}

/// Writes the documents, or compares them with the committed ones.
pub fn run(args: &Args) -> Result<()> {
    if !args.no_build {
        build::everything()?;
    }
    if args.check {
        let count = check(None)?;
        ensure!(count.failed == 0, "{} of docs/reference differ (which: above)", count.failed);
        return Ok(());
    }
    fs::create_dir_all(folder()).with_context(|| folder().display().to_string())?;
    for (name, text) in documents()? {
        let path = folder().join(name);
        fs::write(&path, text).with_context(|| path.display().to_string())?;
        println!("{}", path.display());
    }
    Ok(())
}

/// Compare the documents whose names contain `filter`, each a check.
pub fn check(filter: Option<&str>) -> Result<Count> {
    let made = documents()?;
    let offences = compare(&made, &folder())?;
    let is_asked = |name: &str| filter.is_none_or(|filter| name.contains(filter));
    let mut count = Count::default();
    count.reported = true;
    for (name, what) in offences.iter().filter(|(name, _)| is_asked(name)) {
        eprintln!("docs/reference/{name}: {what}");
        count.failed += 1;
    }
    let is_right = |name: &str| !offences.iter().any(|(other, _)| other == name);
    let right = made.iter().filter(|(name, _)| is_asked(name) && is_right(name));
    count.passed += right.count() as u64;
    Ok(count)
}

fn folder() -> PathBuf {
    repository().join("docs/reference")
}

/// File names and contents.
fn documents() -> Result<Vec<(String, String)>> {
    let mut documents = vec![
        ("contract.md".to_owned(), contract::reference(tally_contract::TEXT)?),
        ("limits.md".to_owned(), limits::reference()),
        ("../ab.md".to_owned(), crate::ab_record::document()?),
    ];
    for (name, program, document) in PRINTED {
        documents.push((name.into(), printed(program, document)?));
    }
    Ok(documents)
}

fn printed(program: &str, document: &str) -> Result<String> {
    let path = build::release_dir().join(program);
    let mut command = Command::new(&path);
    command.args(["reference", document]).stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().with_context(|| path.display().to_string())?;
    ensure!(output.status.success(), "{}: {}", build::line(&command), output.status);
    String::from_utf8(output.stdout).with_context(|| build::line(&command))
}

/// Files that are not what was made, not there, or none of these; and why.
fn compare(made: &[(String, String)], folder: &Path) -> Result<Vec<(String, String)>> {
    let mut offences = Vec::new();
    for (name, text) in made {
        let committed = fs::read_to_string(folder.join(name)).unwrap_or_default();
        if committed != *text {
            let line = committed.lines().zip(text.lines()).take_while(|(a, b)| a == b).count() + 1;
            let what =
                format!("line {line} is not what the code says: run `cargo xtask references`");
            offences.push((name.clone(), what));
        }
    }
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !made.iter().any(|(known, _)| *known == name) {
            offences.push((
                name,
                "no reference that `cargo xtask references` writes: remove it".into(),
            ));
        }
    }
    Ok(offences)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_that_differs_is_missing_or_is_no_longer_made_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let made = [("a.md", "one\ntwo\n"), ("b.md", "b\n"), ("c.md", "c\n")];
        let made = made.map(|(name, text)| (name.to_owned(), text.to_owned()));
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        for (name, text) in &made {
            write(name, text);
        }
        assert_eq!(compare(&made, folder.path()).unwrap(), []);
        write("a.md", "one\nplanted\n");
        fs::remove_file(folder.path().join("b.md")).unwrap();
        write("old.md", "");
        let found = compare(&made, folder.path()).unwrap();
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["a.md", "b.md", "old.md"]);
        assert!(found[0].1.starts_with("line 2 "), "{}", found[0].1);
    }

    /// The others need built programs: `cargo xtask test references`.
    #[test]
    fn the_committed_contract_and_limits_are_those_of_the_code() {
        for (name, text) in [
            ("contract.md", contract::reference(tally_contract::TEXT).unwrap()),
            ("limits.md", limits::reference()),
        ] {
            let committed = fs::read_to_string(super::folder().join(name)).unwrap();
            assert!(committed == text, "docs/reference/{name}: run `cargo xtask references`");
        }
    }
}
