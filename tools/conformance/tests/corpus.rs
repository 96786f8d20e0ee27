//! Components kept of each contract version: they must load, and behave as they did
//! (`tests/policies/corpus/README.md`).

use std::path::{Path, PathBuf};
use tally_conformance::{Capabilities, Options, Wasm, check_loaded};
use tally_wasm_host::{Compiler, Limits};

/// Misbehaves on command, which the random streams are bound to give: it need only load.
const MISBEHAVES: &str = "chaos";

fn components() -> Vec<PathBuf> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/policies/corpus");
    let mut found = Vec::new();
    for release in std::fs::read_dir(&corpus).unwrap().flatten().filter(|e| e.path().is_dir()) {
        let before = found.len();
        for file in std::fs::read_dir(release.path()).unwrap().flatten() {
            found.extend(Some(file.path()).filter(|p| p.extension().is_some_and(|e| e == "wasm")));
        }
        assert!(found.len() > before, "{} has no components", release.path().display());
    }
    found.sort();
    found
}

#[test]
fn components_of_every_release_load_and_behave() {
    let all = components();
    assert!(all.len() >= 3, "{all:?}");
    for file in all {
        let subject = Wasm::open(
            Compiler::in_process(),
            &file,
            "",
            &Limits::default(),
            Capabilities::default(),
        )
        .unwrap();
        if let Err(error) = &subject {
            panic!("{error}");
        }
        if file.file_stem().is_some_and(|name| name == MISBEHAVES) {
            continue;
        }
        let report = check_loaded(&subject, &Options { streams: 24, ..Options::default() });
        assert!(report.passed(), "{}: {report:#?}", file.display());
    }
}
