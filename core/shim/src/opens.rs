//! Libraries that the program opens, as far as they concern the order of streams.
//!
//! Some of NVIDIA's libraries take a program's stream and put work into it by calls that the shim does not see, and so
//! may libraries opened with `RTLD_DEEPBIND` ([`bypass`](crate::bypass)). They must not find a stream idle that has
//! launches on some of the SMs.

use crate::{objects, quiesce};
use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

/// How the names of such libraries begin: ray tracing, video, optical flow, NGX.
const STREAMS_ELSEWHERE: [&str; 5] =
    ["libnvoptix.", "libnvcuvid.", "libnvidia-encode.", "libnvidia-opticalflow.", "libnvidia-ngx."];
const DEEP: c_int = 8;

static FOUND: AtomicBool = AtomicBool::new(false);

/// Whether such a library was opened, or was loaded when a core took this client on.
#[inline]
pub fn has_streams_elsewhere() -> bool {
    FOUND.load(Acquire)
}

/// A core took this client on: look around.
pub fn look() {
    if objects::is_any_named(&STREAMS_ELSEWHERE) {
        FOUND.store(true, Release);
    }
}

/// The program opens a library, at once after this.
///
/// # Safety
/// `file` is null, or a NUL-terminated path.
pub unsafe extern "C" fn opens(file: *const c_char, flags: c_int) {
    let is_one = !file.is_null() && {
        // SAFETY: by the caller.
        is_named(unsafe { CStr::from_ptr(file) }.to_bytes())
    };
    if is_one {
        FOUND.store(true, Release);
    }
    if is_one || flags & DEEP != 0 {
        quiesce::join();
    }
}

fn is_named(path: &[u8]) -> bool {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    STREAMS_ELSEWHERE.iter().any(|beginning| name.starts_with(beginning.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_told_by_the_last_part_of_their_path() {
        assert!(is_named(b"libnvcuvid.so.1") && is_named(b"/usr/lib/libnvidia-encode.so"));
        assert!(
            !is_named(b"libcudart.so.13")
                && !is_named(b"/libnvoptix.so/other.so")
                && !is_named(b"")
        );
        // SAFETY: a NUL-terminated path.
        unsafe { opens(c"libnone.so".as_ptr(), 1) };
        assert!(!has_streams_elsewhere());
        // SAFETY: as above.
        unsafe { opens(c"libnvoptix.so.1".as_ptr(), 1) };
        assert!(has_streams_elsewhere());
        FOUND.store(false, Release);
    }
}
