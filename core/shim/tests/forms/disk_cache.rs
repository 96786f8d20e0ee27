//! Transformed forms on disk, from one start of a program to the next.

use crate::{both_under, welcome};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, SystemTime};
use tally_ipc::ring::Answer;
use tally_ipc::wire::{RewriteSettings, Welcome};

/// A program whose kernel is transformed, and computes what it should.
pub fn transforms<T: Copy>(test: T, environment: &[(&str, &str)], welcome: &Welcome) {
    const BLOCKS: u32 = 33;
    both_under(
        test,
        environment,
        welcome,
        |device| {
            device.warm_up();
            let cells = device.cells(BLOCKS);
            assert_eq!(crate::program::ask("next"), "on");
            device.step(&cells, [BLOCKS, 1, 1], null_mut(), 5, 0);
            device.check_steps(&cells, &[5]);
        },
        |core| {
            core.warm_up("step");
            core.expect("next");
            core.answer(Answer::Slice(7));
            core.say("on");
            core.ends(0);
            assert_eq!(core.counters().sliced.load(SeqCst), 1);
        },
    );
}

/// The same with this folder for caches.
fn start<T: Copy>(test: T, caches: &Path, cache_mib: u32) {
    let welcome =
        Welcome { rewrite: RewriteSettings { cache_mib, ..welcome().rewrite }, ..welcome() };
    transforms(test, &[("XDG_CACHE_HOME", caches.to_str().unwrap())], &welcome);
}

fn kept(caches: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(caches.join("tally").join("forms")) else { return vec![] };
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_transformed_form_is_kept_for_the_next_start() {
    let test = a_transformed_form_is_kept_for_the_next_start;
    // Made by the program that first keeps something.
    let caches = std::env::temp_dir().join(format!("tally-kept-{}", std::process::id()));
    start(test, &caches, 0);
    assert!(!caches.exists(), "0 MiB: nothing is kept");

    start(test, &caches, 64);
    let [file] = &kept(&caches)[..] else { panic!("one image: {:?}", kept(&caches)) };
    let (bytes, meta) = (std::fs::read(file).unwrap(), std::fs::metadata(file).unwrap());
    assert_eq!(meta.mode() & 0o777, 0o600);

    // Found: it is the same file, and was used.
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    std::fs::File::options().write(true).open(file).unwrap().set_modified(long_ago).unwrap();
    start(test, &caches, 64);
    assert_eq!(kept(&caches), std::slice::from_ref(file));
    let again = std::fs::metadata(file).unwrap();
    assert_eq!(again.ino(), meta.ino());
    assert!(again.modified().unwrap() > long_ago);

    // Not what was written: made, and written, again.
    let mut broken = bytes.clone();
    let middle = broken.len() / 2;
    broken[middle] ^= 1;
    std::fs::write(file, &broken).unwrap();
    start(test, &caches, 64);
    assert_eq!(kept(&caches), std::slice::from_ref(file));
    assert_eq!(std::fs::read(file).unwrap(), bytes);

    std::fs::remove_dir_all(&caches).unwrap();
}
