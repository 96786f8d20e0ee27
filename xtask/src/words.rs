//! `cargo xtask test words`: the language of code and documents.
//!
//! Each check is a function from the repository's files to offences. What is allowed, and how long
//! a document may be, is in the tables below and nowhere else.

mod commands;
mod links;
mod suite;

use crate::test_count::Count;
use anyhow::{Context, Result, ensure};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Columns of a line of a document, or of a comment in code; tables are exempt.
const COLUMNS_MAX: usize = 120;
/// Words that a doc comment must have at least.
const DOC_WORDS_MIN: usize = 3;
/// What a doc comment may not be, though it has as many words: it fits anything. Found at the beginning of a line.
const EMPTY_DOCS: [&str; 4] = [
    "As the driver's.",
    "The system call's",
    "What came of it.",
    "See the module's documentation.",
];
/// Documents and the words that they may have together.
const LENGTHS: [(&[&str], usize); 4] = [
    (&["README.md"], 700),
    (&["SPECIFICATION.md"], 1_200),
    (&["ARCHITECTURE.md"], 1_900),
    (&GUIDES, 14_000),
];
const GUIDES: [&str; 5] =
    ["docs/operate.md", "docs/internals.md", "docs/ab.md", "docs/policies.md", "docs/languages.md"];

/// Where a word of [`WORDS`] must not be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Source code and documents alike.
    Everywhere,
    /// Documents; code may have it as an ordinary word.
    Documents,
}

/// Words that must not come back, and what to say. Identifiers count: `_`, `-` and a capital
/// letter end a word as a space does, and so does the end of a line. One that begins with a quotation mark is found as
/// it is.
const WORDS: &[(&str, &str, Place)] = &[
    ("attendant", "helper thread", Place::Everywhere),
    ("door", "entry point", Place::Everywhere),
    ("doors", "entry points", Place::Everywhere),
    ("residency", "sharing mode", Place::Everywhere),
    ("residencies", "sharing modes", Place::Everywhere),
    ("seat", "policy adapter", Place::Everywhere),
    ("tape", "recorder", Place::Everywhere),
    ("errand", "background task", Place::Everywhere),
    ("in charge", "active", Place::Everywhere),
    ("struck out", "disabled", Place::Everywhere),
    ("strike out", "disable", Place::Everywhere),
    ("\"content_of\"", "same_as_generation", Place::Everywhere),
    ("\"came\"", "loaded_because", Place::Everywhere),
    ("\"went\"", "unloaded_because", Place::Everywhere),
    ("cut form", "transformed form", Place::Everywhere),
    ("cut forms", "transformed forms", Place::Everywhere),
    ("cut kernel", "transformed kernel", Place::Everywhere),
    ("cut kernels", "transformed kernels", Place::Everywhere),
    ("cut launch", "launch in parts", Place::Everywhere),
    ("cut launches", "launches in parts", Place::Everywhere),
    ("tally-cut", "tally-rewrite", Place::Everywhere),
    ("partitioned launch", "SM-limited launch", Place::Everywhere),
    ("narrowed", "SM-limited", Place::Everywhere),
    ("give way", "yield", Place::Everywhere),
    ("gives way", "yields", Place::Everywhere),
    ("gave way", "yielded", Place::Everywhere),
    ("giving way", "yielding, preemption", Place::Everywhere),
    ("decided launch", "gated launch", Place::Everywhere),
    ("decided launches", "gated launches", Place::Everywhere),
    ("standing launch", "ungated launch", Place::Everywhere),
    ("standing launches", "ungated launches", Place::Everywhere),
    ("quiet_us", "idle_gap_us", Place::Everywhere),
    ("quiet time", "idle gap", Place::Everywhere),
    ("is let go", "is granted", Place::Everywhere),
    ("are let go", "are granted", Place::Everywhere),
    ("be let go", "be granted", Place::Everywhere),
    ("was let go", "was granted", Place::Everywhere),
    ("were let go", "were granted", Place::Everywhere),
    ("held launch go", "grants every held launch", Place::Everywhere),
    ("switched off", "disabled", Place::Everywhere),
    ("learnt", "profiled, in the profile", Place::Documents),
    ("standing aside", "waiting", Place::Everywhere),
    ("stand aside", "wait", Place::Everywhere),
    ("stands aside", "waits", Place::Everywhere),
    ("stood aside", "waited", Place::Everywhere),
    ("policy-host", "wasm-host", Place::Everywhere),
    ("simcuda", "softcuda", Place::Everywhere),
    ("ptx-vm", "softcuda/vm", Place::Everywhere),
    ("declog", "decision log", Place::Everywhere),
    ("core/replay", "tools/simulator", Place::Everywhere),
    ("core/kernels", "core/rewriter", Place::Everywhere),
    ("tests/gpu", "bench/gpu", Place::Everywhere),
];

/// Files below a path that may have a word. Generated documents are exempt altogether.
const ALLOWED: &[(&str, &str)] = &[];

/// Neither code nor prose, or not ours to word.
const SKIPPED: [&str; 5] =
    ["xtask/src/words", "docs/results/", "Cargo.lock", "tests/fuzz/corpus/", "LICENSE"];

/// A file that is checked.
struct File {
    /// Path from the repository's root, with slashes.
    path: String,
    text: String,
}

impl File {
    fn has_ending(&self, endings: &[&str]) -> bool {
        Path::new(&self.path)
            .extension()
            .is_some_and(|e| endings.iter().any(|ending| e.eq_ignore_ascii_case(ending)))
    }

    fn is_document(&self) -> bool {
        self.has_ending(&["md"])
    }

    fn is_code(&self) -> bool {
        self.has_ending(&["rs", "wit"])
    }

    /// What people read of a line, without what marks a comment: all of a document's, a comment of code.
    fn prose<'a>(&self, line: &'a str) -> Option<&'a str> {
        let line = line.trim();
        if !self.is_code() {
            return Some(line.trim_start_matches(['#', '>', '*']).trim());
        }
        line.strip_prefix("//").map(|rest| rest.trim_start_matches(['/', '!']).trim())
    }

    /// A program wrote it, and says so at its top.
    fn is_generated(&self) -> bool {
        let says_so = |line: &str| {
            line.starts_with("<!--") && line.contains("Made ")
                || line.starts_with("// Generated by")
        };
        self.text.lines().take(5).any(says_so)
    }
}

/// The files that the checks read.
struct Tree {
    root: PathBuf,
    files: Vec<File>,
}

impl Tree {
    /// The files that git follows or would follow.
    fn of(root: &Path) -> Result<Self> {
        let arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
        let listed = Command::new("git").current_dir(root).args(arguments).output();
        let listed = listed.context("starting git, which lists the files to check")?;
        ensure!(listed.status.success(), "git: {}", String::from_utf8_lossy(&listed.stderr));
        let names = String::from_utf8(listed.stdout).context("a file's name is not UTF-8")?;
        let names = names.split('\0').filter(|name| {
            !name.is_empty() && !SKIPPED.iter().any(|skipped| name.starts_with(skipped))
        });
        // Binary files, and ones that were deleted and not yet committed, have no text.
        let files = names.filter_map(|path| {
            let text = std::fs::read_to_string(root.join(path)).ok()?;
            Some(File { path: path.into(), text })
        });
        Ok(Tree { root: root.into(), files: files.collect() })
    }

    fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    fn documents(&self) -> impl Iterator<Item = &File> {
        self.files.iter().filter(|file| file.is_document())
    }
}

/// Something that should be otherwise.
#[derive(Debug, PartialEq, Eq)]
struct Offence {
    path: String,
    /// From 1; 0 is the file as a whole.
    line: usize,
    what: String,
}

impl fmt::Display for Offence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.what),
            line => write!(f, "{}:{line}: {}", self.path, self.what),
        }
    }
}

type Check = fn(&Tree) -> Vec<Offence>;

const CHECKS: [(&str, Check); 8] = [
    ("doc_comments", doc_comments),
    ("columns", columns),
    ("glossary", glossary),
    ("lengths", lengths),
    ("links", links::links),
    ("tests_named", links::tests_named),
    ("commands", commands::commands),
    ("suite_commands", suite::commands),
];

/// Run the checks whose names contain `filter`, print the offences, and count checks.
pub fn run(filter: Option<&str>) -> Result<Count> {
    let tree = Tree::of(&crate::repository())?;
    let mut count = Count::default();
    for (name, check) in CHECKS {
        if filter.is_some_and(|filter| !name.contains(filter)) {
            continue;
        }
        let offences = check(&tree);
        offences.iter().for_each(|offence| eprintln!("{offence}"));
        eprintln!("words::{name}: {} offences", offences.len());
        count.passed += u64::from(offences.is_empty());
        count.failed += u64::from(!offences.is_empty());
    }
    count.reported = true;
    Ok(count)
}

/// Programs that are not built, whose commands in documents are therefore not checked.
pub fn left_out() -> Vec<String> {
    commands::left_out()
}

/// Tokens with a letter or digit, so that the bars of a table are no words.
fn words(text: &str) -> usize {
    text.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count()
}

fn doc_comments(tree: &Tree) -> Vec<Offence> {
    let mut offences = Vec::new();
    for file in tree.files.iter().filter(|file| file.is_code()) {
        let mut comment = String::new();
        let mut begun = 0;
        // One more line ends a comment at the file's end.
        for (at, line) in file.text.lines().chain([""]).enumerate() {
            let line = line.trim_start();
            let rest = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
            match rest.filter(|rest| !rest.starts_with('/')) {
                Some(rest) => {
                    if comment.is_empty() {
                        begun = at + 1;
                    }
                    comment.push_str(rest);
                    comment.push('\n');
                }
                None if comment.is_empty() => {}
                None => {
                    let is_empty = |line: &str| {
                        EMPTY_DOCS.iter().any(|empty| line.trim_start().starts_with(empty))
                    };
                    if words(&comment) < DOC_WORDS_MIN || comment.lines().any(is_empty) {
                        let what = format!(
                            "doc comment {:?}: say what the name does not, or leave it out",
                            comment.trim()
                        );
                        offences.push(Offence { path: file.path.clone(), line: begun, what });
                    }
                    comment.clear();
                }
            }
        }
    }
    offences
}

fn columns(tree: &Tree) -> Vec<Offence> {
    let mut offences = Vec::new();
    let checked = tree.files.iter().filter(|file| file.is_document() || file.is_code());
    for file in checked.filter(|file| !file.is_generated()) {
        for (at, line) in file.text.lines().enumerate() {
            // `cargo fmt` breaks code.
            let Some(text) = file.prose(line) else { continue };
            // With or without a pipe at its edges.
            let is_table = text.starts_with('|')
                || text.matches(" | ").count() + text.matches("||").count() >= 2;
            // A line cannot be broken within a word, such as an address.
            let can_break = text.trim_start_matches([' ', '-', '*', '>']).contains(' ');
            let columns = line.chars().count();
            if columns > COLUMNS_MAX && !is_table && can_break {
                let what = format!("{columns} columns, at most {COLUMNS_MAX}");
                offences.push(Offence { path: file.path.clone(), line: at + 1, what });
            }
        }
    }
    offences
}

fn lengths(tree: &Tree) -> Vec<Offence> {
    let mut offences = Vec::new();
    for (paths, most) in LENGTHS {
        let texts = paths.iter().filter_map(|path| tree.file(path));
        let count: usize = texts.map(|file| words(&file.text)).sum();
        if count > most {
            let what = format!("{count} words, at most {most}");
            offences.push(Offence { path: paths.join(" + "), line: 0, what });
        }
    }
    offences
}

fn glossary(tree: &Tree) -> Vec<Offence> {
    let mut offences = Vec::new();
    let plain_words: Vec<String> = WORDS.iter().map(|(word, ..)| plain(word)).collect();
    for file in tree.files.iter().filter(|file| !file.is_generated()) {
        let lines: Vec<&str> = file.text.lines().collect();
        for (at, &line) in lines.iter().enumerate() {
            // With the next line, in which a word may go on.
            let next = lines.get(at + 1).and_then(|next| file.prose(next));
            let next = next.filter(|next| !next.is_empty()).unwrap_or_default();
            let joined = file.prose(line).map(|this| format!("{this} {next}"));
            let plain_line =
                format!("{} {}", plain(line), plain(joined.as_deref().unwrap_or_default()));
            for (&(word, instead, place), plain_word) in WORDS.iter().zip(&plain_words) {
                // Hardly any line has one: a quick look first.
                if !plain_line.contains(plain_word)
                    || (place == Place::Documents && !file.is_document())
                {
                    continue;
                }
                let allowed = |(path, allowed): &(&str, &str)| {
                    *allowed == word && file.path.starts_with(path)
                };
                // One that is in the next line alone is found there.
                let goes_on =
                    || joined.as_ref().is_some_and(|j| has_word(j, word)) && !has_word(next, word);
                if (has_word(line, word) || goes_on()) && !ALLOWED.iter().any(allowed) {
                    let what = format!("{word:?}: say {instead:?}");
                    offences.push(Offence { path: file.path.clone(), line: at + 1, what });
                }
            }
        }
    }
    offences
}

/// In small letters, with spaces between words however they are joined.
fn plain(text: &str) -> String {
    text.to_ascii_lowercase().replace(['_', '-'], " ")
}

/// Whether a line has a word of [`WORDS`].
fn has_word(line: &str, word: &str) -> bool {
    if word.starts_with('"') {
        return line.contains(word);
    }
    let same = |a: char, b: char| {
        let is_space = |c: char| matches!(c, ' ' | '_' | '-');
        a.eq_ignore_ascii_case(&b) || (is_space(a) && is_space(b))
    };
    let line: Vec<char> = line.chars().collect();
    let word: Vec<char> = word.chars().collect();
    line.windows(word.len()).enumerate().any(|(at, window)| {
        let before = at.checked_sub(1).map(|at| line[at]);
        let after = line.get(at + word.len());
        // A capital behind a small letter begins a word: `OpenDoor`, `DoorKind`.
        let begins = before
            .is_none_or(|c| !c.is_alphanumeric() || (window[0].is_uppercase() && c.is_lowercase()));
        let last = window[window.len() - 1];
        let ends = after
            .is_none_or(|c| !c.is_alphanumeric() || (c.is_uppercase() && !last.is_uppercase()));
        begins && ends && window.iter().zip(&word).all(|(&a, &b)| same(a, b))
    })
}

#[cfg(test)]
mod tests;
