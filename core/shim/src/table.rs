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
    /// The wrapper for each of `reals`, in the same order.
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

/// The entry point for a `cuGetProcAddress` request by base name: the newest version (`name`, `name_v2`, `name_v3`,
/// ...), with its per-thread form if that is asked for and any version has one. Newer versions only add arguments, so
/// the newest wrapper passes every register that an older function reads.
pub fn requested(name: &[u8], per_thread: bool) -> Option<&'static EntryPoint> {
    if !is_driver_name(name) {
        return None;
    }
    let newest = |per_thread| {
        let variants = all().iter().filter_map(|entry_point| {
            let (version, is_per_thread) =
                variant(entry_point.name.as_bytes().strip_prefix(name)?)?;
            (is_per_thread == per_thread).then_some((version, entry_point))
        });
        variants.max_by_key(|(version, _)| *version).map(|(_, entry_point)| entry_point)
    };
    if per_thread { newest(true).or_else(|| newest(false)) } else { newest(false) }
}

/// Version and whether default streams are the thread's own, from what follows a function's base name: nothing, `_v2`,
/// `_ptsz`, `_v2_ptds`. `None`: the name is another function's.
fn variant(suffix: &[u8]) -> Option<(u32, bool)> {
    let per_thread = [b"_ptsz", b"_ptds"].into_iter().find_map(|end| suffix.strip_suffix(end));
    let version = match per_thread.unwrap_or(suffix) {
        b"" => 1,
        version => std::str::from_utf8(version.strip_prefix(b"_v")?).ok()?.parse().ok()?,
    };
    Some((version, per_thread.is_some()))
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

#[cfg(test)]
mod tests {
    use super::variant;

    #[test]
    fn a_suffix_says_version_and_stream() {
        assert_eq!(variant(b""), Some((1, false)));
        assert_eq!(variant(b"_ptsz"), Some((1, true)));
        assert_eq!(variant(b"_v2"), Some((2, false)));
        assert_eq!(variant(b"_v3"), Some((3, false)));
        assert_eq!(variant(b"_v3_ptsz"), Some((3, true)));
        assert_eq!(variant(b"_v12_ptds"), Some((12, true)));
        for other in ["Ex", "Ex_ptsz", "_v", "_v2x", "_v2_ptsz_v3", "_ptszx", "v2", "_vX"] {
            assert_eq!(variant(other.as_bytes()), None, "{other}");
        }
    }
}
