//! The table of functions replaced, as look-ups use it. It is [`entry_points`](crate::entry_points)', which names the
//! functions' bodies.

use crate::host;
use std::ffi::CStr;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Acquire;

/// Distinct real functions of one name that are told apart.
pub const REALS: usize = 4;

/// One driver function that the shim replaces.
#[derive(Debug)]
pub struct EntryPoint {
    /// Name as exported, with any suffix (`_v2`, `_ptsz`).
    pub name: &'static str,
    /// The name with a NUL, to look it up.
    pub symbol: &'static CStr,
    /// The real function that a program linked to the driver calls; 0: not known yet.
    pub linked: &'static AtomicUsize,
    /// What a program linked to the driver calls.
    pub direct: *const (),
    /// Real functions, in the order they were found; 0 is free.
    pub reals: &'static [AtomicUsize; REALS],
    /// The wrapper for each.
    pub wrappers: [*const (); REALS],
}

// SAFETY: function pointers and atomics.
unsafe impl Sync for EntryPoint {}

static ALL: OnceLock<&'static [EntryPoint]> = OnceLock::new();

/// From now on the table is this. Only the first counts.
pub fn set(all: &'static [EntryPoint]) {
    let _ = ALL.set(all);
}

/// All functions replaced; none before the shim has started.
pub fn all() -> &'static [EntryPoint] {
    ALL.get().copied().unwrap_or_default()
}

/// The entry point of exactly this name.
pub fn exact(name: &[u8]) -> Option<&'static EntryPoint> {
    if !is_driver_name(name) {
        return None;
    }
    all().iter().find(|entry_point| entry_point.name.as_bytes() == name)
}

/// `cu` and a capital: neither `cudaMalloc` nor `cublasCreate`.
pub fn is_driver_name(name: &[u8]) -> bool {
    name.starts_with(b"cu") && name.get(2).is_some_and(u8::is_ascii_uppercase)
}

/// The entry point for a `cuGetProcAddress` request by base name: `name`, else
/// `name_v2`, with the per-thread form of either where asked for and there is one.
pub fn requested(name: &[u8], per_thread: bool) -> Option<&'static EntryPoint> {
    if !is_driver_name(name) {
        return None;
    }
    let with = |suffix: &str| {
        all().iter().find(|entry_point| {
            entry_point
                .name
                .as_bytes()
                .strip_prefix(name)
                .is_some_and(|rest| rest == suffix.as_bytes())
        })
    };
    let per_thread_form =
        || ["_v2_ptsz", "_v2_ptds", "_ptsz", "_ptds"].iter().find_map(|s| with(s));
    // The newer version first: it passes every register the older one has.
    let plain = || ["_v2", ""].iter().find_map(|s| with(s));
    if per_thread { per_thread_form().or_else(plain) } else { plain() }
}

/// Whether an address is one of our own functions, or an export of the preloaded library.
pub fn is_ours(address: usize) -> bool {
    all().iter().any(|entry_point| {
        entry_point.direct as usize == address
            || entry_point.wrappers.iter().any(|w| *w as usize == address)
    }) || host::exports(all().len()).iter().any(|export| *export as usize == address)
}

/// Some real function found so far.
pub fn first_real() -> Option<usize> {
    all()
        .iter()
        .flat_map(|entry_point| entry_point.reals.iter())
        .map(|r| r.load(Acquire))
        .find(|r| *r != 0)
}
