//! What the preloaded library needs of the programs that it is loaded into: nothing.

use std::path::PathBuf;
use std::process::Command;

fn readelf(argument: &str) -> String {
    let library: PathBuf =
        std::env::current_exe().unwrap().parent().unwrap().join("../libtally_preload.so");
    let output = Command::new("readelf").args(["--wide", argument]).arg(&library).output();
    let output = output.expect("readelf runs (Debian: binutils)");
    assert!(output.status.success(), "readelf {}", library.display());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn no_library_no_version_no_thread_local_storage() {
    let dynamic = readelf("--dynamic");
    assert!(dynamic.contains("SONAME") && dynamic.contains("NODELETE"), "{dynamic}");
    for needed in ["(NEEDED)", "(VERNEED)", "(TEXTREL)", "STATIC_TLS"] {
        assert!(!dynamic.contains(needed), "{needed} in {dynamic}");
    }
    let segments = readelf("--segments");
    assert!(segments.contains("DYNAMIC") && !segments.contains("TLS"), "{segments}");
}

#[test]
fn undefined_symbols_are_weak_and_few() {
    let symbols = readelf("--dyn-syms");
    let columns = symbols.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let undefined: Vec<(String, String)> = columns
        .filter(|c| c.len() == 8 && c[6] == "UND")
        .map(|c| (c[7].to_owned(), c[4].to_owned()))
        .collect();
    for (name, binding) in &undefined {
        assert!(
            ["environ", "dl_iterate_phdr"].contains(&&**name) && binding == "WEAK",
            "{undefined:?}"
        );
    }
    assert_eq!(undefined.len(), 2, "{undefined:?}");
}

#[test]
fn it_exports_the_entry_points_and_three_functions_more() {
    let symbols = readelf("--dyn-syms");
    let columns = symbols.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut exports: Vec<String> = columns
        .filter(|c| c.len() == 8 && c[3] == "FUNC" && c[6] != "UND")
        .map(|c| c[7].to_owned())
        .collect();
    let names = tally_preload::entry::NAMES.iter().map(|name| name.to_str().unwrap().to_owned());
    let mut expected: Vec<String> =
        names.chain(["dlopen", "dlsym", "ioctl"].map(String::from)).collect();
    exports.sort();
    expected.sort();
    assert_eq!(exports, expected);
}
