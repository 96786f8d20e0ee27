//! Each check on planted offences.

use super::*;

/// A repository of these files, of which nothing is on the disk.
pub fn tree(files: &[(&str, &str)]) -> Tree {
    let file = |(path, text): &(&str, &str)| File { path: (*path).into(), text: (*text).into() };
    Tree { root: "/nonexistent".into(), files: files.iter().map(file).collect() }
}

/// A repository of these files on the disk.
fn on_disk(files: &[(&str, &str)]) -> (tempfile::TempDir, Tree) {
    let folder = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let tree = Tree { root: folder.path().into(), ..tree(files) };
    (folder, tree)
}

fn lines(offences: &[Offence]) -> Vec<usize> {
    offences.iter().map(|offence| offence.line).collect()
}

#[test]
fn doc_comments_of_a_word_or_two_are_found() {
    let code = "//! Whose.\n\nstruct A;\n/// Which file.\nfn b() {}\n/// Bytes, at most,\n/// of one.\n\
                fn c() {}\n//// No doc\n// Nor this\n    /// `x`\n";
    assert_eq!(lines(&doc_comments(&tree(&[("a.rs", code)]))), [1, 4, 11]);
    assert_eq!(lines(&doc_comments(&tree(&[("a.wit", "/// Which.\n")]))), [1]);
    assert_eq!(lines(&doc_comments(&tree(&[("a.md", code)]))), [0; 0]);
    let empty = "/// Calls it.\n///\n/// # Errors\n/// The system call's; or none.\nfn d() {}\n\
                 /// What came of it.\nstruct E;\n/// It is as fast as the driver's.\nfn f() {}\n";
    assert_eq!(lines(&doc_comments(&tree(&[("a.rs", empty)]))), [1, 6]);
}

#[test]
fn long_lines_are_found_but_not_in_tables_or_generated_documents() {
    let long = "word ".repeat(25);
    let address = format!("- https://example.org/{}", "x".repeat(120));
    let text = format!("short\n{long}\n| {long} |\n{address}\n");
    assert_eq!(lines(&columns(&tree(&[("a.md", text.as_str())]))), [2]);
    let made = format!("# A\n\n<!-- Made by x; do not edit. -->\n{long}\n");
    assert_eq!(lines(&columns(&tree(&[("a.md", made.as_str()), ("a.py", long.as_str())]))), [0; 0]);
}

#[test]
fn long_comments_are_found_but_not_long_code_or_tables() {
    let long = "word ".repeat(25);
    let text = format!(
        "//! {long}\n//! | {long} |\nlet text = \"{long}\";\n    // {long}\n/// See\n/// {}\n",
        "x".repeat(120)
    );
    assert_eq!(lines(&columns(&tree(&[("a.rs", text.as_str())]))), [1, 4]);
    assert_eq!(lines(&columns(&tree(&[("a.wit", text.as_str())]))), [1, 4]);
}

#[test]
fn words_that_were_to_go_are_found() {
    let code = "struct OpenDoor;\nlet door_count = 1;\nindoors and doorbell, DOORBELL\n\"came\": 1\n\
                // whoever came here is in charge\n// it is disabled\nlast_struck_out\nTally-Cut\n";
    assert_eq!(lines(&glossary(&tree(&[("a.rs", code)]))), [1, 2, 4, 5, 7, 8]);
    let broken = "/// Whoever came is in\n    /// charge.\nlet is_in = 1;\ncharge(is_in);\n\
                  // Launches stand\n\n// aside\n// The next line has tape:\n// tape\n";
    assert_eq!(lines(&glossary(&tree(&[("a.rs", broken)]))), [1, 8, 9]);
    assert_eq!(lines(&glossary(&tree(&[("a.md", "It is switched\n  off.\n")]))), [1]);
    let learnt = "// what was learnt\n";
    assert_eq!(lines(&glossary(&tree(&[("a.rs", learnt), ("a.md", learnt)]))), [1]);
}

#[test]
fn documents_that_are_too_long_are_found() {
    let words = |n: usize| "word | ".repeat(n);
    let texts = [("README.md", words(701)), ("SPECIFICATION.md", words(1_200))];
    let guides = [("docs/operate.md", words(7_000)), ("docs/policies.md", words(7_001))];
    let all: Vec<(&str, &str)> =
        texts.iter().chain(&guides).map(|(p, t)| (*p, t.as_str())).collect();
    let offences = lengths(&tree(&all));
    let what: Vec<_> = offences.iter().map(|offence| offence.what.as_str()).collect();
    assert_eq!(what, ["701 words, at most 700", "14001 words, at most 14000"]);
}

#[test]
fn links_that_lead_nowhere_are_found() {
    let text = "# Title\n## The `code` of A/B: [x](b.md)\n## Twice\n## Twice\n\
                [a](b.md) [b](#title) [c](#the-code-of-ab-x) [d](#twice-1) [e](../src/c.rs#L3)\n\
                [f](https://example.org/none) `[g](none.md)`\n```\n[h](none.md)\n```\n\
                [i](none.md)\n[j](b.md#none)\n[k](#none)\n[l](../../outside.md)\n\
                <img src=\"none.svg\">\n[m](b.md#here)\n";
    let files = [("docs/a.md", text), ("docs/b.md", "# Here\n"), ("src/c.rs", "fn main() {}\n")];
    let (_folder, tree) = on_disk(&files);
    assert_eq!(lines(&links::links(&tree)), [10, 11, 12, 13, 14]);
}

#[test]
fn tests_that_are_not_there_are_found() {
    let text = "| a | `core/tests/a.rs` `it_does_what_it_says`, `other_test_not_there` |\n\
                | b | `core/tests/none.rs` |\n| c | `rescue_ms`, `some_test_without_file` |\n";
    let files = [
        ("SPECIFICATION.md", text),
        ("core/tests/a.rs", "#[test]\nfn it_does_what_it_says() {}\n"),
    ];
    let offences = links::tests_named(&tree(&files));
    let what: Vec<_> = offences.iter().map(|offence| offence.what.as_str()).collect();
    assert_eq!(
        what,
        ["core/tests/a.rs has no fn other_test_not_there()", "core/tests/none.rs is not there"]
    );
}

#[test]
fn what_a_check_finds_names_the_place() {
    let offence = Offence { path: "a.md".into(), line: 3, what: "wrong".into() };
    assert_eq!(offence.to_string(), "a.md:3: wrong");
    assert_eq!(Offence { line: 0, ..offence }.to_string(), "a.md: wrong");
}

#[test]
fn each_word_is_found_in_itself_and_has_a_word_instead() {
    for &(word, instead, _) in WORDS {
        assert!(has_word(&format!("x {word} y"), word), "{word}");
        assert!(!has_word(instead, word), "{word}: {instead}");
    }
}
