//! The kept profiles of a GPU.

use tally_core::profile_store::file::decode;

const KERNELS_MAX: usize = 64;

/// No panic, and no more kernels and verdicts than asked for.
pub fn profiles(data: &[u8]) {
    if let Ok((_, profiled)) = decode(data, KERNELS_MAX) {
        assert!(profiled.kernels().count() <= KERNELS_MAX);
        assert!(profiled.verdicts().count() <= KERNELS_MAX);
    }
}
