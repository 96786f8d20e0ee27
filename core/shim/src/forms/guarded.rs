//! A value behind a lock that a forked child can start anew.

use crate::lock::Lock;
use std::cell::UnsafeCell;

/// The value and its lock. Never held while the program's code or the driver runs,
/// unless said otherwise.
pub struct Guarded<T> {
    lock: Lock,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached with the lock held.
unsafe impl<T: Send> Sync for Guarded<T> {}

impl<T> Guarded<T> {
    /// A free one.
    pub const fn new(value: T) -> Self {
        Guarded { lock: Lock::new(), value: UnsafeCell::new(value) }
    }

    /// Use the value.
    pub fn with<R>(&self, use_it: impl FnOnce(&mut T) -> R) -> R {
        let _held = self.lock.lock();
        // SAFETY: the lock is held.
        use_it(unsafe { &mut *self.value.get() })
    }

    /// Only in a forked child: whoever held the lock is not there, and what it left
    /// half done is never looked at again.
    pub fn reset(&self, fresh: T) {
        // SAFETY: the child has one thread.
        std::mem::forget(std::mem::replace(unsafe { &mut *self.value.get() }, fresh));
        self.lock.reset();
    }
}
