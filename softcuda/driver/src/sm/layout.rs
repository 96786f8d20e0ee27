//! The bytes of the device file. Everything is an atomic: other processes
//! write at any time, and a torn or hostile value must at worst be refused.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// First word of the file.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"SOFTCUDA");
/// Version of this layout. In the default file's name too, so that processes
/// with libraries of two versions do not refuse one another's device.
pub const VERSION: u32 = 1;
/// SMs of a device, at most.
pub const SMS_MAX: usize = 256;
/// Kernels of all processes that run or wait at one time, at most.
pub const KERNELS_MAX: usize = 1024;
/// Processes on a device, at most.
pub const PROCESSES_MAX: usize = 512;

/// A value with a cache line of its own.
#[repr(C, align(64))]
pub(super) struct Line<T>(pub T);

/// A process on the device. `pid` is written last when it comes and cleared
/// last when it goes: zero means a free row.
#[repr(C)]
pub(super) struct ProcessRow {
    pub pid: AtomicU64,
    /// Start time in clock ticks since boot, so that a reused pid is told apart.
    pub started: AtomicU64,
    pub used_bytes: AtomicU64,
}

/// A kernel that runs or waits. `ticket` is written last when it arrives;
/// zero means a free row.
#[repr(C, align(64))]
pub(super) struct KernelRow {
    pub ticket: AtomicU64,
    /// Lower goes first: priority in the top byte, then order of arrival.
    pub key: AtomicU64,
    pub process: AtomicU32,
    /// SMs it could use now, those it has included.
    pub want: AtomicU32,
    /// Not 0: all of `want` at once or none (cooperative launches).
    pub gang: AtomicU32,
    /// Futex: changes when the kernel is granted an SM or no longer needs one.
    pub word: AtomicU32,
    /// Threads of its process that wait on `word`.
    pub waiters: AtomicU32,
    /// SMs that it may run on, as an [`SmSet`](super::SmSet).
    pub allowed: [AtomicU64; super::set::WORDS],
}

/// Layout of the device file, which all processes map.
#[repr(C)]
pub(super) struct Device {
    pub magic: AtomicU64,
    pub version: AtomicU32,
    pub bytes: AtomicU32,
    pub sms: AtomicU32,
    pub _reserved: AtomicU32,
    pub memory_bytes: AtomicU64,
    pub next_ticket: AtomicU64,
    /// One above the highest kernel row in use.
    pub kernels_high: AtomicU32,
    pub _reserved2: AtomicU32,
    pub mutex: Line<UnsafeCell<libc::pthread_mutex_t>>,
    /// By SM: key of the first kernel in line that waits and could run there,
    /// `u64::MAX` if none does: what a worker looks at between two blocks.
    pub first_waiting: [Line<AtomicU64>; SMS_MAX],
    /// Who has which SM: 0 or an [`SmWord`].
    pub owners: [Line<AtomicU64>; SMS_MAX],
    pub processes: [ProcessRow; PROCESSES_MAX],
    pub kernels: [KernelRow; KERNELS_MAX],
}

// SAFETY: all fields are atomics except the mutex, which is only touched
// through pthread calls made for sharing.
unsafe impl Sync for Device {}

/// An SM's owner in one word: ticket, kernel row, and whether a worker took it up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SmWord(pub u64);

const RUNNING: u64 = 1;
const ROW_SHIFT: u32 = 1;
const ROW_BITS: u32 = 11;
const TICKET_SHIFT: u32 = ROW_SHIFT + ROW_BITS;
/// Tickets stay below this so that they fit a key and an [`SmWord`].
pub(super) const TICKET_LIMIT: u64 = 1 << (64 - TICKET_SHIFT);

impl SmWord {
    pub fn granted(ticket: u64, row: usize) -> Self {
        Self(ticket << TICKET_SHIFT | (row as u64) << ROW_SHIFT)
    }

    pub fn running(ticket: u64, row: usize) -> Self {
        Self(Self::granted(ticket, row).0 | RUNNING)
    }

    pub fn ticket(self) -> u64 {
        self.0 >> TICKET_SHIFT
    }

    pub fn row(self) -> usize {
        (self.0 >> ROW_SHIFT) as usize & ((1 << ROW_BITS) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sm_word_keeps_its_parts() {
        let word = SmWord::running(TICKET_LIMIT - 1, KERNELS_MAX - 1);
        assert_eq!((word.ticket(), word.row()), (TICKET_LIMIT - 1, KERNELS_MAX - 1));
        assert_ne!(word, SmWord::granted(TICKET_LIMIT - 1, KERNELS_MAX - 1));
    }
}
