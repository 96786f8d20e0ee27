//! A futex lock of one word: no poisoning, no allocation, resettable in a forked
//! child, where its owner does not exist any more.
//!
//! Must never be held while the program's own code runs, apart from a slot's
//! lock, which a launch holds while it waits for its turn (see the shim's `gated`).

use rustix::thread::futex;
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;
/// Tries before a thread sleeps: sections are tens of instructions, mostly.
const SPINS: u32 = 64;

#[derive(Debug, Default)]
pub struct Lock(AtomicU32);

/// Releases the lock when dropped.
#[derive(Debug)]
pub struct Held<'a>(&'a Lock);

impl Lock {
    pub const fn new() -> Self {
        Lock(AtomicU32::new(FREE))
    }

    /// Wait for it and take it.
    #[inline]
    pub fn lock(&self) -> Held<'_> {
        for _ in 0..SPINS {
            if let Some(held) = self.try_lock() {
                return held;
            }
            std::hint::spin_loop();
        }
        while self.0.swap(CONTENDED, Acquire) != FREE {
            // Woken, changed, interrupted: look again in every case.
            let _ = futex::wait(&self.0, futex::Flags::PRIVATE, CONTENDED, None);
        }
        Held(self)
    }

    /// Wait for it at most so long.
    pub fn lock_within(&self, most: Duration) -> Option<Held<'_>> {
        if let Some(held) = self.try_lock() {
            return Some(held);
        }
        let start = Instant::now();
        while self.0.swap(CONTENDED, Acquire) != FREE {
            let left = most.checked_sub(start.elapsed()).filter(|left| !left.is_zero())?;
            let left = futex::Timespec {
                tv_sec: left.as_secs().min(i32::MAX as u64) as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            let _ = futex::wait(&self.0, futex::Flags::PRIVATE, CONTENDED, Some(&left));
        }
        Some(Held(self))
    }

    /// Take it if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<Held<'_>> {
        self.0.compare_exchange(FREE, HELD, Acquire, Relaxed).ok().map(|_| Held(self))
    }

    /// Free it although its owner did not: only in a forked child.
    pub fn reset(&self) {
        self.0.store(FREE, Release);
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.0.0.swap(FREE, Release) == CONTENDED {
            let _ = futex::wake(&self.0.0, futex::Flags::PRIVATE, 1);
        }
    }
}

/// Releases a shared lock when dropped.
#[derive(Debug)]
pub struct ArcHeld(Arc<Lock>);

impl Lock {
    /// Wait for it at most so long, and keep it alive.
    pub fn lock_arc_within(self: Arc<Self>, most: Duration) -> Option<ArcHeld> {
        std::mem::forget(self.lock_within(most)?);
        Some(ArcHeld(self))
    }
}

impl Drop for ArcHeld {
    fn drop(&mut self) {
        drop(Held(&self.0));
    }
}

/// A value that only the holder of its lock reaches.
#[derive(Debug)]
pub struct Locked<T> {
    lock: Lock,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one thread at a time, under the lock.
unsafe impl<T: Send> Sync for Locked<T> {}

impl<T> Locked<T> {
    /// A free lock around `value`.
    pub const fn new(value: T) -> Self {
        Locked { lock: Lock::new(), value: UnsafeCell::new(value) }
    }

    /// Do something with the value, under the lock: nothing that may take it again.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        let _held = self.lock.lock();
        // SAFETY: the lock is held until `work` has returned.
        work(unsafe { &mut *self.value.get() })
    }

    /// Forget the value without looking at it (another thread may have been changing it) and
    /// begin with another: only in a forked child.
    pub fn reset(&self, value: T) {
        // SAFETY: the child has one thread.
        unsafe { self.value.get().write(value) };
        self.lock.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn excludes_and_hands_over() {
        static LOCK: Lock = Lock::new();
        static COUNT: AtomicU64 = AtomicU64::new(0);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..20_000 {
                        let _held = LOCK.lock();
                        // Not atomic as a whole: lost updates would show.
                        let n = COUNT.load(Relaxed);
                        COUNT.store(n + 1, Relaxed);
                    }
                });
            }
        });
        assert_eq!(COUNT.load(Relaxed), 80_000);
        let held = LOCK.try_lock();
        assert!(held.is_some());
        assert!(LOCK.try_lock().is_none());
    }

    #[test]
    fn who_waits_for_so_long_only_gives_up_or_gets_it() {
        static LOCK: Lock = Lock::new();
        let held = LOCK.lock();
        assert!(LOCK.lock_within(Duration::ZERO).is_none());
        assert!(LOCK.lock_within(Duration::from_millis(5)).is_none());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| LOCK.lock_within(Duration::from_secs(3_600)).is_some());
            std::thread::sleep(Duration::from_millis(5));
            drop(held);
            assert!(waiting.join().unwrap());
        });
        assert!(LOCK.try_lock().is_some());
    }
}
