//! Computes a version of the rewriter: a hash over the sources of this crate and of the PTX parser, so that
//! forms kept on disk (`src/disk_cache.rs`) are not taken for those that other code would make.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).expect("the sources can be listed");
    for path in entries.map(|entry| entry.expect("the sources can be listed").path()) {
        if path.is_dir() {
            sources(&path, found);
        } else {
            found.push(path);
        }
    }
}

fn main() {
    let mut files = Vec::new();
    for folder in ["src", "../../softcuda/ptx/src"] {
        sources(Path::new(folder), &mut files);
        println!("cargo::rerun-if-changed={folder}");
    }
    files.sort();
    // Keys of one release's algorithm: the same for everybody who builds it with one compiler.
    let mut all = DefaultHasher::new();
    for file in files {
        std::fs::read(&file).expect("the sources can be read").hash(&mut all);
    }
    println!("cargo::rustc-env=TALLY_KERNELS_SOURCES={:016x}", all.finish());
}
