//! The paths of a launch and of a reload, as ARCHITECTURE.md tells them: each file and function named is there, and a
//! launch is carried by few files. That no other file is entered is not tested; reading found it, and samples of 40 000
//! gated launches (`perf record`) agreed.

use super::repository;
use std::collections::BTreeSet;

/// Files that carry a gated launch, at most.
const FILES_MAX: usize = 20;
/// What begins the chapters, and the table of helpers.
const LAUNCH: &str = "## Path of a gated launch";
const RELOAD: &str = "## Path of a reload";
const HELPERS: &str = "| crate | helpers |";

/// The text of a repository's file.
type Read<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Rows of the first table behind `heading`, without its head, as cells.
fn rows<'a>(document: &'a str, heading: &str) -> Vec<Vec<&'a str>> {
    let behind = document.lines().skip_while(|line| !line.starts_with(heading));
    let table = behind.skip_while(|line| !line.starts_with('|'));
    let rows = table.take_while(|line| line.starts_with('|')).skip(2);
    rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

/// Texts and targets of a cell's links.
fn links(cell: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = cell.split("](").collect();
    let pairs = parts.windows(2).filter_map(|pair| {
        let text = pair[0].rsplit('[').next()?.trim_matches('`');
        Some((text, pair[1].split(')').next()?))
    });
    pairs.collect()
}

/// The last segments of a cell's code spans.
fn names(cell: &str) -> Vec<&str> {
    let spans = cell.split('`').skip(1).step_by(2);
    spans.filter_map(|span| span.rsplit("::").next()).collect()
}

/// Whether a source defines a function, or names a type's variant.
fn defines(source: &str, name: &str) -> bool {
    if name.starts_with(char::is_uppercase) {
        return source.contains(name);
    }
    let function = format!("fn {name}");
    source.split(&function).skip(1).any(|rest| rest.starts_with(['(', '<']))
}

/// What is wrong with the table of steps behind a heading, and the files that it names.
fn steps(document: &str, heading: &str, read: Read) -> (Vec<String>, BTreeSet<String>) {
    let (mut wrong, mut files) = (Vec::new(), BTreeSet::new());
    for row in rows(document, heading) {
        let [step, places, functions] = row[..] else {
            wrong.push(format!("not three cells: {row:?}"));
            continue;
        };
        let step = step.split('.').next().unwrap_or(step);
        let sources: Vec<(&str, String)> = links(places)
            .into_iter()
            .map(|(_, path)| (path, read(path).unwrap_or_default()))
            .collect();
        files.extend(sources.iter().map(|(path, _)| (*path).to_owned()));
        let names = names(functions);
        for name in names.iter().filter(|name| !sources.iter().any(|(_, s)| defines(s, name))) {
            wrong.push(format!("step {step}: no file of it has {name}"));
        }
        for (path, source) in &sources {
            if !names.iter().any(|name| defines(source, name)) {
                wrong.push(format!("step {step}: {path} has no function of it"));
            }
        }
    }
    (wrong, files)
}

/// What is wrong with what the document tells of a gated launch.
fn launch(document: &str, read: Read) -> Vec<String> {
    let (mut wrong, files) = steps(document, LAUNCH, read);
    let mut helpers = BTreeSet::new();
    for (text, path) in rows(document, HELPERS).iter().flatten().flat_map(|cell| links(cell)) {
        let (module, name) = text.split_once("::").unwrap_or((text, ""));
        if !path.ends_with(&format!("/{module}.rs")) {
            wrong.push(format!("{text} leads to {path}"));
        }
        if !read(path).is_some_and(|source| defines(&source, name)) {
            wrong.push(format!("{path} has no {name}"));
        }
        if files.contains(path) || !helpers.insert(path) {
            wrong.push(format!("{path} is named twice"));
        }
    }
    if files.len() > FILES_MAX {
        wrong.push(format!("{} files carry a launch, at most {FILES_MAX} may", files.len()));
    }
    let told = format!("These {} files carry the launch.", files.len());
    let more = format!("{} more execute code for it", helpers.len());
    let is_missing = |what: &&String| !document.contains(what.as_str());
    wrong.extend([told, more].iter().filter(is_missing).map(|what| format!("not told: {what}")));
    wrong
}

fn source(path: &str) -> Option<String> {
    std::fs::read_to_string(repository().join(path)).ok()
}

fn architecture() -> String {
    source("ARCHITECTURE.md").unwrap()
}

#[test]
fn few_files_carry_a_gated_launch_and_each_has_the_functions_named() {
    let (_, files) = steps(&architecture(), LAUNCH, &source);
    assert!(files.len() > 10, "the table was not found: {files:?}");
    let wrong = launch(&architecture(), &source);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_path_of_a_reload_has_the_functions_named() {
    let (wrong, files) = steps(&architecture(), RELOAD, &source);
    assert!(wrong.is_empty() && files.len() > 5, "{wrong:#?}");
}

#[test]
fn planted_faults_in_the_path_of_a_launch_are_found() {
    let read = |path: &str| match path {
        "a/one.rs" => Some("fn first() {}".to_owned()),
        "a/two.rs" => Some("fn second<T>() {}".to_owned()),
        "a/lock.rs" => Some("fn lock() {}".to_owned()),
        _ => None,
    };
    let document = |steps: &str, helpers: &str| {
        format!(
            "{LAUNCH}\n\n| step | where | function |\n| --- | --- | --- |\n{steps}\n\n\
             These 2 files carry the launch. 1 more execute code for it.\n\n\
             {HELPERS}\n| --- | --- |\n| a | {helpers} |\n"
        )
    };
    let right = "| 1. It | [`one.rs`](a/one.rs), [`two.rs`](a/two.rs) | `first`; `Two::second` |";
    let lock = "[`lock::lock`](a/lock.rs)";
    let wrong = |steps: &str, helpers: &str| launch(&document(steps, helpers), &read);
    assert_eq!(wrong(right, lock), [""; 0]);
    assert_eq!(wrong(&right.replace("first", "third"), lock).len(), 2, "and one.rs has none");
    assert_eq!(wrong(&right.replace("a/two", "a/three"), lock).len(), 2);
    assert_eq!(wrong(right, "[`lock::free`](a/lock.rs)"), ["a/lock.rs has no free"]);
    let twice = wrong(right, "[`one::first`](a/one.rs)");
    assert_eq!(twice[0], "a/one.rs is named twice");
    assert_eq!(wrong(right, "[`key::lock`](a/lock.rs)"), ["key::lock leads to a/lock.rs"]);
    let many: String = (0..21).map(|i| format!("| {i}. It | [`f`](a/{i}.rs) | `f` |\n")).collect();
    let read = |_: &str| Some("fn f() {}".to_owned());
    let found = launch(&document(many.trim_end(), ""), &read);
    assert!(found.contains(&"21 files carry a launch, at most 20 may".to_owned()), "{found:?}");
    assert!(found.iter().any(|what| what.starts_with("not told: These 21 files")), "{found:?}");
}
