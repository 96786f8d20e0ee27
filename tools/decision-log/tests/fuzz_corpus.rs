//! The fuzz target `decision-log` over its committed corpus, without a fuzzer.

#[path = "../../../tests/fuzz/bodies/decision_log.rs"]
mod body;

#[test]
fn the_committed_corpus_passes() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fuzz/corpus/decision-log");
    let mut inputs = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        body::decision_log(&std::fs::read(entry.unwrap().path()).unwrap());
        inputs += 1;
    }
    assert!(inputs >= 2, "{inputs} inputs in {folder}");
}
