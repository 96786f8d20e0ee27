//! Memory pools: names and counters for stream-ordered allocations. Freed
//! memory goes back to the device at once, so a pool never hoards.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A pool, or the device's default one.
#[derive(Default)]
pub(crate) struct Pool {
    used: AtomicU64,
    used_high: AtomicU64,
    /// Attributes 1 to 4: three reuse switches and the release threshold.
    settings: [AtomicU64; 4],
}

impl Pool {
    /// A pool with the driver's defaults.
    pub(crate) fn new() -> Self {
        let pool = Self::default();
        for switch in &pool.settings[..3] {
            switch.store(1, Relaxed);
        }
        pool
    }

    pub(super) fn count_allocated(&self, bytes: u64) {
        let used = self.used.fetch_add(bytes, Relaxed) + bytes;
        self.used_high.fetch_max(used, Relaxed);
    }

    pub(super) fn count_freed(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Relaxed);
    }

    /// An attribute by its number in `CUmemPool_attribute`.
    pub(crate) fn attribute(&self, number: u32) -> Option<u64> {
        match number {
            1..=4 => Some(self.settings[number as usize - 1].load(Relaxed)),
            5 | 7 => Some(self.used.load(Relaxed)),
            6 | 8 => Some(self.used_high.load(Relaxed)),
            _ => None,
        }
    }

    /// Sets an attribute; `false` if it cannot be set to that.
    pub(crate) fn set_attribute(&self, number: u32, value: u64) -> bool {
        match number {
            1..=4 => self.settings[number as usize - 1].store(value, Relaxed),
            6 | 8 if value == 0 => self.used_high.store(self.used.load(Relaxed), Relaxed),
            _ => return false,
        }
        true
    }
}
