//! The fuzz target `component` over its committed corpus, without a fuzzer.

use crate::bounds::check;
use crate::entry::shortened;

#[path = "../../../tests/fuzz/bodies/component.rs"]
mod body;

#[test]
fn the_committed_corpus_passes() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fuzz/corpus/component");
    let (mut inputs, mut shorter) = (0, 0);
    for entry in std::fs::read_dir(folder).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        body::component(&bytes);
        inputs += 1;
        shorter += u32::from(shortened(&bytes).is_some());
    }
    assert!(inputs >= 3 && shorter >= 1, "{inputs} inputs, {shorter} of them shortened");
}
