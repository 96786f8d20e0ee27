//! Machine code that differs in one byte is another image: what names a rewritten image on disk
//! tells all of them apart. (The software device cannot run machine code; PTX is run by
//! `tally-litmus pairs`.)

use std::collections::HashSet;
use tally_rewriter::KernelForm;
use tally_rewriter::disk_cache::Key;

fn cubins() -> Vec<Vec<u8>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../core/rewriter/tests/cubins");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .expect("the cubins of core/rewriter")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "cubin"))
        .collect();
    files.sort();
    files.iter().map(|path| std::fs::read(path).expect("a file")).collect()
}

#[test]
fn every_byte_of_a_cubin_counts() {
    let cubins = cubins();
    assert!(cubins.len() > 5);
    for image in &cubins {
        let key = |bytes: &[u8]| Key::new(bytes, 90, KernelForm::ByClaims).to_string();
        let mut keys = HashSet::from([key(image)]);
        let mut changed = image.clone();
        // Every offset of a small one, and a thousand over all of a large one.
        let step = (image.len() / 1_000).max(1);
        let mut places: Vec<usize> = (0..image.len()).step_by(step).collect();
        places.push(image.len() - 1);
        places.dedup();
        for &at in &places {
            changed[at] ^= 1;
            keys.insert(key(&changed));
            changed[at] ^= 1;
        }
        assert_eq!(keys.len(), 1 + places.len());
    }
}
