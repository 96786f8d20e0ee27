//! Has the program built again when a template changes: a folder that is included is
//! not watched by itself.

fn main() {
    for folder in ["rust", "c", "python", "js"] {
        println!("cargo:rerun-if-changed=../../sdk/{folder}");
    }
}
