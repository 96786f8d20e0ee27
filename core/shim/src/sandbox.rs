//! Whether the program has installed a seccomp filter since it began to use CUDA. A filter may end the process for a
//! call that the shim makes and the program does not: opening files, starting threads, connecting.
//!
//! Asked by reading a descriptor that was opened before: filters hardly ever forbid `pread64`. Filters that were
//! there before, such as a container's, allowed what the driver and the shim did then.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};

/// Bytes of that file that are read; it has about 1 500.
const STATUS_BYTES_MAX: usize = 8_192;

/// The seccomp filters of the process's first thread when they were last read.
#[derive(Debug)]
pub struct Filters {
    status: OwnedFd,
    before: i64,
}

impl Filters {
    /// Reads the filters that there are now. `None`: the system does not tell.
    pub fn open() -> Option<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let status = rustix::fs::open("/proc/self/status", flags, Mode::empty()).ok()?;
        let before = filters(status.as_fd())?;
        Some(Filters { status, before })
    }

    /// Whether the process has other filters now.
    pub fn have_changed(&self) -> bool {
        filters(self.status.as_fd()) != Some(self.before)
    }
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
        let mut filters = Filters::open().unwrap();
        assert!(!filters.have_changed());
        filters.before += 1;
        assert!(filters.have_changed());
    }
}
