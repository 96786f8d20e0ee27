//! What the preloaded library and the shim give each other. Both compile this file; a hash of the
//! entry points' names tells builds apart that do not belong together.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::AtomicU64;

/// Rises with each change to this file; the start of the hash.
pub const VERSION: u64 = 1;
/// What the shim exports for the preloaded library, a [`Start`].
pub const START: &CStr = c"tally_shim_start";

/// Returns null if `abi` differs. May be called more than once.
pub type Start = unsafe extern "C" fn(&'static Host) -> *const Entries;

/// What the preloaded library gives the shim.
#[repr(C)]
pub struct Host {
    /// [`hash`] of all names, in order.
    pub abi: u64,
    /// libc's `dlsym`, behind the preloaded library's own.
    pub dlsym: *const (),
    /// libc's `ioctl`, behind the preloaded library's own.
    pub ioctl: *const (),
    /// Exports of the preloaded library, one for each entry point.
    pub exports: *const *const (),
    /// Looks a name up behind the preloaded library (`RTLD_NEXT`).
    pub next: unsafe extern "C" fn(*const c_char) -> *mut c_void,
    /// Of the preloaded library, for the process's life.
    pub deep_bind: *const DeepBind,
}

/// The first `dlopen` with `RTLD_DEEPBIND`.
#[repr(C)]
pub struct DeepBind {
    /// 1 more than the objects that were loaded before it; 0: there was none yet.
    pub objects: AtomicU64,
    /// Objects that had been unloaded before it; `u64::MAX`: there was none yet.
    pub unloaded: AtomicU64,
}

/// What the shim gives the preloaded library.
#[repr(C)]
pub struct Entries {
    /// What programs linked to the driver call, one for each entry point.
    pub direct: *const *const (),
    /// The wrapper of the entry point of this index for a real function.
    pub wrap: unsafe extern "C" fn(usize, usize) -> usize,
    /// Takes the place of `ioctl`.
    pub ioctl: *const (),
    /// The program opens a library, with these arguments of `dlopen`.
    pub opens: unsafe extern "C" fn(*const c_char, c_int),
}

// SAFETY: function pointers and pointers to constants.
unsafe impl Sync for Host {}
// SAFETY: as above.
unsafe impl Sync for Entries {}

/// Extends an FNV-1a hash by one name.
pub const fn hash(mut hash: u64, name: &[u8]) -> u64 {
    let mut i = 0;
    while i < name.len() {
        hash = (hash ^ name[i] as u64).wrapping_mul(0x100_0000_01b3);
        i += 1;
    }
    (hash ^ 0xff).wrapping_mul(0x100_0000_01b3)
}
