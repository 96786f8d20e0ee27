//! The fuzz target `disk-cache` over its committed corpus, without a fuzzer.

#[path = "../../../tests/fuzz/bodies/disk_cache.rs"]
mod body;

#[test]
fn the_committed_corpus_passes() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fuzz/corpus/disk-cache");
    let mut inputs = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        body::disk_cache(&std::fs::read(entry.unwrap().path()).unwrap());
        inputs += 1;
    }
    assert!(inputs >= 2, "{inputs} inputs in {folder}");
}
