//! Takes the names of the entry points from the shim's table, so that the two cannot differ, and compiles
//! `libtally_preload.so`, which Cargo cannot: see `src/lib.rs`.

#[path = "src/abi.rs"]
#[allow(dead_code, missing_docs)]
mod abi;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const TABLE: &str = "../shim/src/entry_points.rs";
const PROTOCOL: &str = "../ipc/src/lib.rs";

fn main() {
    for file in ["build.rs", "src", TABLE, PROTOCOL] {
        println!("cargo:rerun-if-changed={file}");
    }
    println!("cargo:rustc-check-cfg=cfg(preload)");
    let table = std::fs::read_to_string(TABLE).expect("the shim's table of entry points");
    let names = names(&table);
    assert!(names.len() > 100, "{TABLE} has {} entry points", names.len());
    let mut out = String::from("entry_points! {\n");
    for (index, name) in names.iter().enumerate() {
        writeln!(out, "    {index} {name};").unwrap();
    }
    out.push_str("}\n");
    writeln!(out, "/// Number of entry points.\npub const COUNT: usize = {};", names.len())
        .unwrap();
    let abi = names.iter().fold(abi::VERSION, |hash, name| abi::hash(hash, name.as_bytes()));
    writeln!(out, "/// See [`crate::abi`].\npub const ABI: u64 = {abi};").unwrap();
    let protocol = std::fs::read_to_string(PROTOCOL).expect("the crate of the protocol");
    let version =
        protocol.split_once("PROTOCOL_VERSION: u32 = ").expect("the protocol's version").1;
    let version = version.split(';').next().unwrap();
    writeln!(out, "/// `tally_ipc::PROTOCOL_VERSION`.\npub const PROTOCOL: u32 = {version};")
        .unwrap();
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    std::fs::write(folder.join("entry_points.rs"), out).unwrap();
    library(&folder);
}

/// Compile the library, and put it where Cargo puts others: OUT_DIR is `build/NAME/out` there.
fn library(folder: &Path) {
    const NAME: &str = "libtally_preload.so";
    let built = folder.join(NAME);
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap());
    rustc.args(["--edition", "2024", "--crate-name", "tally_preload", "--crate-type", "cdylib"]);
    rustc.args(["--cfg", "preload", "--check-cfg", "cfg(preload)", "src/lib.rs", "-o"]).arg(&built);
    rustc.args(["-Cpanic=abort", "-Copt-level=2", "-Ccodegen-units=1", "-Cstrip=debuginfo"]);
    rustc.arg("--target").arg(std::env::var_os("TARGET").unwrap());
    for argument in [
        // No start files: they refer to the C library.
        "-nostartfiles",
        "-Wl,-soname,libtally_preload.so",
        "-Wl,-z,nodelete",
        "-Wl,--hash-style=both",
    ] {
        rustc.arg(format!("-Clink-arg={argument}"));
    }
    let done = rustc.status().expect("rustc runs");
    assert!(done.success(), "compiling {NAME}: {done}");
    let place = folder.ancestors().nth(3).expect("the profile's folder");
    // In one step: programs may have the old one mapped.
    let new = place.join(format!("{NAME}.new"));
    std::fs::copy(&built, &new).unwrap();
    std::fs::rename(&new, place.join(NAME)).unwrap();
}

/// The lines of the form `cuName(...) ...;` in the invocation of `entry_points!`.
fn names(table: &str) -> Vec<&str> {
    let rows = table.lines().skip_while(|line| *line != "entry_points! {").skip(1);
    let rows = rows.take_while(|line| *line != "}");
    rows.filter_map(|row| row.trim().split_once('(').map(|(name, _)| name))
        .filter(|name| name.starts_with("cu"))
        .collect()
}
