//! Whether the program has installed a seccomp filter since it began to use CUDA. A filter may end the process for a
//! call that the shim makes and the program does not: opening files, starting threads, connecting.
//!
//! Asked by reading a descriptor that was opened before: filters hardly ever forbid `pread64`. Filters that were
//! there before, such as a container's, allowed what the driver and the shim did then.

use crate::attach;
use rustix::fd::{BorrowedFd, IntoRawFd};
use rustix::fs::{Mode, OFlags};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicI64};

/// `/proc/self/status`, of the process's first thread; -1: not open.
static STATUS: AtomicI32 = AtomicI32::new(-1);
/// Filters when it was opened; -1: unknown.
static FILTERS: AtomicI64 = AtomicI64::new(-1);
/// Bytes of that file that are read; it has about 1 500.
const STATUS_BYTES_MAX: usize = 8_192;

/// The program begins to use CUDA.
pub fn look() {
    if STATUS.load(Acquire) >= 0 {
        return;
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::open("/proc/self/status", flags, Mode::empty()) else { return };
    STATUS.store(attach::raise(file).into_raw_fd(), Release);
    FILTERS.store(filters().unwrap_or(-1), Release);
}

/// Whether there is a filter that was not there. False, too, where the system did not tell when it was asked first.
pub fn has_changed() -> bool {
    let before = FILTERS.load(Acquire);
    before >= 0 && filters() != Some(before)
}

/// The program closes descriptors that are not its own: what is read then is no such text.
fn filters() -> Option<i64> {
    let status = STATUS.load(Acquire);
    if status < 0 {
        return None;
    }
    let mut bytes = [0; STATUS_BYTES_MAX];
    // SAFETY: only read from.
    let status = unsafe { BorrowedFd::borrow_raw(status) };
    let count = rustix::io::pread(status, &mut bytes, 0).ok()?;
    in_text(bytes.get(..count)?)
}

/// Filters that a text of `/proc/*/status` tells of. Linux before 5.9 says only whether there are any: those that come
/// to others are not noticed there.
fn in_text(text: &[u8]) -> Option<i64> {
    let field = |name: &[u8]| {
        let value = text.split(|b| *b == b'\n').find_map(|line| line.strip_prefix(name))?;
        std::str::from_utf8(value).ok()?.trim().parse::<i64>().ok()
    };
    field(b"Seccomp_filters:").or_else(|| field(b"Seccomp:"))
}

/// Only in a forked child: the descriptor is of the parent.
pub fn reset() {
    FILTERS.store(-1, Relaxed);
    let status = STATUS.swap(-1, SeqCst);
    if status >= 0 {
        // SAFETY: this process's copy.
        unsafe { rustix::io::close(status) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_counted_where_the_system_counts_them() {
        let text = b"Name:\tx\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t3\nThreads:\t1\n";
        assert_eq!(in_text(text), Some(3));
        assert_eq!(in_text(b"Seccomp:\t0\nThreads:\t1\n"), Some(0));
        assert_eq!(in_text(b"another file"), None);
    }

    #[test]
    fn without_a_new_filter_nothing_has_changed() {
        assert!(!has_changed(), "not looked at yet");
        look();
        assert!(filters().is_some() && !has_changed());
        FILTERS.fetch_add(1, SeqCst);
        assert!(has_changed());
        reset();
        assert!(!has_changed());
    }
}
