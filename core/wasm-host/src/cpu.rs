//! How much CPU time a call has used. Reading that clock costs as much as a decision, so it is read only in a
//! call during which the epoch advanced: the first time to know where to count from.

use rustix::time::{ClockId, clock_gettime};
use std::cell::Cell;

/// CPU time of the call under way; there is one at a time.
#[derive(Debug, Default)]
pub struct Cpu {
    /// The thread's CPU time when it was read first in this call.
    first_ns: Cell<Option<u64>>,
    most_ms: u64,
}

/// A call used more CPU time than it may.
#[derive(Debug, thiserror::Error)]
#[error("used more than {0} ms of CPU time in one call")]
pub struct TookTooLong(u64);

impl Cpu {
    /// Starts a call, which may use `most_ms` of CPU time.
    #[inline]
    pub fn begin(&mut self, most_ms: u64) {
        self.first_ns.set(None);
        self.most_ms = most_ms;
    }

    /// The epoch has advanced since then.
    #[inline]
    pub fn is_long(&self) -> bool {
        self.first_ns.get().is_some()
    }

    /// Called when the epoch has advanced. The first time in a call it only notes the clock.
    ///
    /// # Errors
    /// If the call used its time since then.
    #[cold]
    pub fn look(&self) -> Result<(), TookTooLong> {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        let Some(first_ns) = self.first_ns.get() else {
            self.first_ns.set(Some(now_ns));
            return Ok(());
        };
        if now_ns.saturating_sub(first_ns) / 1_000_000 >= self.most_ms {
            return Err(TookTooLong(self.most_ms));
        }
        Ok(())
    }
}
