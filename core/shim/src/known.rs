//! The driver's functions that this shim knows, used by it or not.
//!
//! One of a newer CUDA may put work into a stream, or wait for it, without the shim's knowing. So once a program has
//! looked such a function up, all its launches go whole, and its status says why.

use crate::{log, table};
use std::ffi::c_int;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, SeqCst};

/// The newest CUDA whose functions are all in the list.
pub const CUDA_VERSION: c_int = 13_050;
/// Base names of the functions of CUDA's headers, sorted.
const NAMES: &str = include_str!("known.txt");

static IS_NEW_FOUND: AtomicBool = AtomicBool::new(false);

/// Whether a function of this base name is in the headers of [`CUDA_VERSION`].
pub fn is_known(name: &[u8]) -> bool {
    NAMES.lines().any(|known| known.as_bytes() == name)
}

/// A program has looked up a function of this base name, as of this version of CUDA, and found it. True if it is the
/// first that is not known.
#[cold]
pub fn looked_up(name: &[u8], version: c_int) -> bool {
    let is_new = version > CUDA_VERSION && table::is_driver_name(name) && !is_known(name);
    if !is_new || IS_NEW_FOUND.swap(true, SeqCst) {
        return false;
    }
    let name = String::from_utf8_lossy(name);
    log!("{name} is of CUDA {version}, which this shim does not know: all launches go whole");
    true
}

/// A program has looked up one that is not known.
pub fn is_new_found() -> bool {
    IS_NEW_FOUND.load(Acquire)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_ipc::layout::whole_because;

    #[test]
    fn functions_of_newer_versions_are_told_from_those_that_are_known() {
        assert!(NAMES.lines().is_sorted() && NAMES.lines().count() > 500);
        for (name, version, is_new) in [
            ("cuNewLaunch", CUDA_VERSION, false),
            ("cuMemAlloc", CUDA_VERSION + 10, false),
            ("cudaNew", CUDA_VERSION + 10, false),
            ("cuNewLaunch", CUDA_VERSION + 10, true),
        ] {
            assert_eq!(looked_up(name.as_bytes(), version), is_new, "{name} of {version}");
            assert_eq!(is_new_found(), is_new, "{name} of {version}");
        }
        assert!(!looked_up(b"cuNewWait", CUDA_VERSION + 10), "told once");
        assert_eq!(crate::tools::whole_because(), whole_because::NEW_CALL);
    }
}
