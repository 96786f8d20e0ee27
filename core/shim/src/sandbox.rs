//! Whether the program has installed a seccomp filter since it began to use CUDA. A filter may end the process for a
//! call that the shim makes and the program does not: opening files, starting threads, connecting.
//!
//! Asked by reading a descriptor that was opened before: filters hardly ever forbid `pread64`. Filters that were
//! there before, such as a container's, allowed what the driver and the shim did then.

use crate::link;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicI64};

/// `/proc/self/status`, of the process's first thread, for threads with the program's descriptors; -1: not open.
static STATUS: AtomicI32 = AtomicI32::new(-1);
/// Filters when it was opened; -1: unknown.
static FILTERS: AtomicI64 = AtomicI64::new(-1);
/// They cannot be looked at.
const UNSEEN: i64 = i64::MAX;
/// Bytes of that file that are read; it has about 1 500.
const STATUS_BYTES_MAX: usize = 8_192;

/// The same for a thread with descriptors of its own.
#[derive(Debug)]
pub struct Filters {
    status: OwnedFd,
    before: i64,
}

impl Filters {
    /// Those that there are now. `None`: the system does not tell.
    pub fn open() -> Option<Self> {
        let status = open()?;
        let before = filters(status.as_fd())?;
        Some(Filters { status, before })
    }

    /// Whether there are others now.
    pub fn have_changed(&self) -> bool {
        filters(self.status.as_fd()) != Some(self.before)
    }
}

fn open() -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    rustix::fs::open("/proc/self/status", flags, Mode::empty()).ok().map(link::raise)
}

/// The program begins to use CUDA.
pub fn look() {
    if STATUS.load(Acquire) >= 0 {
        return;
    }
    let Some(status) = open() else { return };
    if status.as_raw_fd() < link::FD_FLOOR {
        // None of the low numbers is to be ours: as if there were a filter.
        return FILTERS.store(UNSEEN, Release);
    }
    FILTERS.store(filters(status.as_fd()).unwrap_or(-1), Release);
    STATUS.store(status.into_raw_fd(), Release);
}

/// Whether there is a filter that was not there. False, too, where the system did not tell when it was asked first.
pub fn has_changed() -> bool {
    let (before, status) = (FILTERS.load(Acquire), STATUS.load(Acquire));
    // SAFETY: only read from, at a position: if the program has closed it, and opened another under its number, that
    // one does not notice, and what is read is no such text.
    before == UNSEEN
        || before >= 0 && filters(unsafe { BorrowedFd::borrow_raw(status) }) != Some(before)
}

fn filters(status: BorrowedFd<'_>) -> Option<i64> {
    let mut bytes = [0; STATUS_BYTES_MAX];
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

/// Only in a forked child. The descriptor is the parent's, or by now another of the program's: it stays.
pub fn reset() {
    FILTERS.store(-1, Relaxed);
    STATUS.store(-1, Relaxed);
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
        let mut own = Filters::open().unwrap();
        assert!(!has_changed() && !own.have_changed());
        FILTERS.fetch_add(1, Relaxed);
        own.before += 1;
        assert!(has_changed() && own.have_changed());
        reset();
        assert!(!has_changed());
    }
}
