//! Waiting for, and waking, threads of another process.

use crate::layout::{ClientRegion, CoreRegion};
use rustix::thread::futex;
use std::time::{Duration, Instant};

/// The protocol's accesses, over any kind of atomic word; see
/// [`crate::ring::steps`].
#[doc(hidden)]
pub mod steps {
    use crate::ring::steps::Word;
    use std::sync::atomic::Ordering::{Relaxed, SeqCst};

    /// Client: sleep once unless `ready`. `futex_wait` sleeps only while the
    /// wake word is what it is given.
    #[inline]
    pub fn sleep<T>(
        waiters: &impl Word<u32>,
        wake: &impl Word<u32>,
        ready: impl Fn() -> Option<T>,
        futex_wait: impl FnOnce(u32),
    ) -> Option<T> {
        waiters.fetch_add(1, SeqCst);
        let seen = wake.load(SeqCst);
        let mut result = ready();
        if result.is_none() {
            futex_wait(seen);
            result = ready();
        }
        waiters.fetch_sub(1, Relaxed);
        result
    }

    /// Core: wake whoever sleeps; the answers are stored already.
    #[inline]
    pub fn wake(wake: &impl Word<u32>, waiters: &impl Word<u32>, futex_wake: impl FnOnce()) {
        wake.fetch_add(1, SeqCst);
        if waiters.load(SeqCst) != 0 {
            futex_wake();
        }
    }
}

/// A sleeping client looks around at least this often, so that a lost core is
/// noticed even if nobody wakes it.
pub const CLIENT_NAP: Duration = Duration::from_millis(20);

/// CLOCK_MONOTONIC in nanoseconds: one clock for client and core.
pub fn now_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Look for what `ready` returns for up to `spin`; at least once.
pub fn spin<T>(spin: Duration, ready: impl Fn() -> Option<T>) -> Option<T> {
    let first = ready();
    if first.is_some() || spin.is_zero() {
        return first;
    }
    let start = Instant::now();
    loop {
        for _ in 0..32 {
            std::hint::spin_loop();
            if let Some(t) = ready() {
                return Some(t);
            }
        }
        if start.elapsed() >= spin {
            return None;
        }
    }
}

/// Client: wait until `ready` returns something or `nap` has passed: spin for
/// `spin`, then sleep on the core's wake word. Returns what `ready` gave.
pub fn wait<T>(
    client: &ClientRegion,
    core: &CoreRegion,
    spin: Duration,
    nap: Duration,
    ready: impl Fn() -> Option<T>,
) -> Option<T> {
    if let Some(t) = self::spin(spin, &ready) {
        return Some(t);
    }
    steps::sleep(&client.activity.waiters, &core.wake, ready, |seen| {
        let timeout = rustix::fs::Timespec {
            tv_sec: nap.as_secs() as _,
            tv_nsec: i64::from(nap.subsec_nanos()) as _,
        };
        // The word is in memory shared between processes, so not PRIVATE. Any
        // outcome (woken, changed already, timed out, signal) means: look again.
        let _ = futex::wait(&core.wake, futex::Flags::empty(), seen, Some(&timeout));
    })
}

/// Core: wake the client's threads if any sleeps. Call after storing answers.
pub fn wake(client: &ClientRegion, core: &CoreRegion) {
    steps::wake(&core.wake, &client.activity.waiters, || {
        let _ = futex::wake(&core.wake, futex::Flags::empty(), i32::MAX as u32);
    });
}

/// Core: give a word that clients sleep on another value.
pub fn change(word: &std::sync::atomic::AtomicU32, value: u32) {
    word.store(value, std::sync::atomic::Ordering::SeqCst);
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// Client: sleep until a word of the core's is not `seen` any more, or `nap` has passed.
pub fn sleep_on(word: &std::sync::atomic::AtomicU32, seen: u32, nap: Duration) {
    let timeout = rustix::fs::Timespec {
        tv_sec: nap.as_secs() as _,
        tv_nsec: i64::from(nap.subsec_nanos()) as _,
    };
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&timeout));
}

/// Client: wake whoever of this process sleeps on a word of the core's.
pub fn wake_sleepers(word: &std::sync::atomic::AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// Client: wake this process's own waiting threads (the core is gone).
pub fn wake_own(core: &CoreRegion) {
    let _ = futex::wake(&core.wake, futex::Flags::empty(), i32::MAX as u32);
}
