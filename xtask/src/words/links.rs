//! Links and anchors of documents, and the tests that the specification names.

use super::{File, Offence, Tree};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// The documents whose paths and functions must be there.
const NAME_TESTS: [&str; 2] = ["SPECIFICATION.md", "tests/e2e/README.md"];

/// Every relative link leads to a file, and every anchor to a heading.
pub fn links(tree: &Tree) -> Vec<Offence> {
    let anchors: BTreeMap<&str, BTreeSet<String>> =
        tree.documents().map(|file| (file.path.as_str(), anchors(file))).collect();
    let mut offences = Vec::new();
    for file in tree.documents() {
        for (line, target) in targets(&file.text) {
            if let Err(what) = follow(tree, &anchors, file, &target) {
                offences.push(Offence { path: file.path.clone(), line, what });
            }
        }
    }
    offences
}

fn follow(
    tree: &Tree,
    anchors: &BTreeMap<&str, BTreeSet<String>>,
    file: &File,
    target: &str,
) -> Result<(), String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return Ok(());
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let folder = Path::new(&file.path).parent().unwrap_or(Path::new(""));
    let leads_to = match path {
        "" => file.path.clone(),
        path => {
            normal(&folder.join(path)).ok_or_else(|| format!("{target} leaves the repository"))?
        }
    };
    if !tree.root.join(&leads_to).exists() {
        return Err(format!("link to {leads_to}, which is not there"));
    }
    match anchors.get(leads_to.as_str()) {
        Some(known) if !anchor.is_empty() && !known.contains(anchor) => {
            Err(format!("{leads_to} has no heading for #{anchor}"))
        }
        _ => Ok(()),
    }
}

/// Without `.` and `..`; `None` for a path that leaves the root.
fn normal(path: &Path) -> Option<String> {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                if !out.pop() {
                    return None;
                }
            }
            Component::Normal(part) => out.push(part),
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(out.to_string_lossy().into_owned())
}

/// Lines outside of fenced code, with their numbers.
pub fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        (!is_code && !is_fence).then_some((at + 1, line))
    })
}

/// What links, images and sources lead to, with their lines.
fn targets(text: &str) -> Vec<(usize, String)> {
    let mut targets = Vec::new();
    for (number, line) in prose(text) {
        let line = without_code(line);
        let mut rest = line.as_str();
        while let Some((_, behind)) = rest.split_once("](") {
            let end = behind.find([')', ' ']).unwrap_or(behind.len());
            targets.push((number, behind[..end].to_owned()));
            rest = &behind[end..];
        }
        for attribute in [" src=\"", " srcset=\"", " href=\""] {
            let mut rest = line.as_str();
            while let Some((_, behind)) = rest.split_once(attribute) {
                let end = behind.find('"').unwrap_or(behind.len());
                targets.push((number, behind[..end].to_owned()));
                rest = &behind[end..];
            }
        }
    }
    targets
}

/// Code spans made blank: what looks like a link in them is none.
fn without_code(line: &str) -> String {
    line.split('`').enumerate().map(|(at, part)| if at % 2 == 0 { part } else { " " }).collect()
}

/// Code spans of a line.
pub fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').enumerate().filter(|(at, _)| at % 2 == 1).map(|(_, part)| part)
}

/// The anchors that GitHub gives headings.
fn anchors(file: &File) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in prose(&file.text) {
        let hashes = line.chars().take_while(|&c| c == '#').count();
        let Some(title) = line[hashes..].strip_prefix(' ').filter(|_| (1..=6).contains(&hashes))
        else {
            continue;
        };
        let slug = slug(title);
        let again = (1..).map(|n| format!("{slug}-{n}"));
        let free = std::iter::once(slug.clone()).chain(again).find(|s| !anchors.contains(s));
        anchors.extend(free);
    }
    anchors
}

fn slug(title: &str) -> String {
    let mut text = String::new();
    let mut rest = title.trim();
    // Of a link its text counts.
    while let Some((before, behind)) = rest.split_once("](") {
        text.push_str(before);
        rest = behind.split_once(')').map_or("", |(_, behind)| behind);
    }
    text.push_str(rest);
    let kept = text.chars().filter_map(|c| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        c if c.is_alphanumeric() => Some(c),
        _ => None,
    });
    kept.flat_map(char::to_lowercase).collect()
}

/// Every test file that the specification and the list of attacks name is there, and every test
/// function in the file named before it.
pub fn tests_named(tree: &Tree) -> Vec<Offence> {
    NAME_TESTS.iter().filter_map(|path| tree.file(path)).flat_map(|d| named_in(tree, d)).collect()
}

fn named_in(tree: &Tree, document: &File) -> Vec<Offence> {
    let mut offences = Vec::new();
    for (line, text) in prose(&document.text) {
        let mut file: Option<&File> = None;
        for span in code_spans(text) {
            let what = if span.contains('/') && span.ends_with(".rs") {
                file = tree.file(span);
                file.is_none().then(|| format!("{span} is not there"))
            } else if let Some(file) = file.filter(|_| is_function(span)) {
                let function = format!("fn {span}(");
                (!file.text.contains(&function))
                    .then(|| format!("{} has no {function})", file.path))
            } else {
                None
            };
            let path = document.path.clone();
            offences.extend(what.map(|what| Offence { path, line, what }));
        }
    }
    offences
}

/// Test functions have names of three words and more; settings, of fewer.
fn is_function(span: &str) -> bool {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    span.chars().all(is_name) && span.matches('_').count() >= 3
}
