//! The fuzz target `kept` over its committed corpus, without a fuzzer.

#[path = "../../../tests/fuzz/bodies/kept.rs"]
mod body;

#[test]
fn the_committed_corpus_passes() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fuzz/corpus/kept");
    let mut inputs = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        body::kept(&std::fs::read(entry.unwrap().path()).unwrap());
        inputs += 1;
    }
    assert!(inputs >= 2, "{inputs} inputs in {folder}");
}
