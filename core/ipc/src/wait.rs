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
    pub fn sleep<T, W: Word<u32>>(
        waiters: &W,
        wake: &W,
        ready: impl Fn() -> Option<T>,
        futex_wait: impl FnOnce(u32),
    ) -> Option<T> {
        waiters.fetch_add(1, SeqCst);
        // See [`crate::ring::steps::made_room`].
        W::fence();
        let seen = wake.load(SeqCst);
        let mut result = ready();
        if result.is_none() {
            futex_wait(seen);
            result = ready();
        }
        waiters.fetch_sub(1, Relaxed);
        result
    }

    /// Core: wake whoever sleeps; the answers are stored already. What `futex_wake` returns, if it was called.
    #[inline]
    pub fn wake<T>(
        wake: &impl Word<u32>,
        waiters: &impl Word<u32>,
        futex_wake: impl FnOnce() -> T,
    ) -> Option<T> {
        wake.fetch_add(1, SeqCst);
        (waiters.load(SeqCst) != 0).then(futex_wake)
    }
}

/// Threads of a client that the core wakes at once. Who made them sleep is the client: it could be any number, and each
/// takes a third of a microsecond.
pub const WAKES_MAX: u32 = 8;

/// A sleeping client looks around at least this often, so that a lost core is
/// noticed even if nobody wakes it.
pub const CLIENT_NAP: Duration = Duration::from_millis(20);

/// A core whose heartbeat stands still for this long while a client waits for it is stuck, ns.
pub const CORE_STUCK_NS: u64 = 2_000_000_000;

/// CLOCK_MONOTONIC in nanoseconds: one clock for client and core.
pub fn now_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Sleep for about so long. Not as the standard library does: that is a point at which the calling thread,
/// which may be the program's, can be cancelled.
pub fn nap(time: Duration) {
    let time = rustix::thread::Timespec {
        tv_sec: time.as_secs().min(3_600) as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    let _ = rustix::thread::nanosleep(&time);
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

/// Core: wake the client's threads if any sleeps, up to [`WAKES_MAX`]. Call after storing answers. How many were woken,
/// if the system was asked: with [`WAKES_MAX`] more may sleep, which [`wake_some`] wakes.
pub fn wake(client: &ClientRegion, core: &CoreRegion) -> Option<u32> {
    wake_by(client, core, wake_some)
}

/// The same, by a system call of the caller's on this word.
pub fn wake_by<T>(
    client: &ClientRegion,
    core: &CoreRegion,
    wake: impl FnOnce(&std::sync::atomic::AtomicU32) -> T,
) -> Option<T> {
    steps::wake(&core.wake, &client.activity.waiters, || wake(&core.wake))
}

/// Core: wake up to [`WAKES_MAX`] threads that sleep on a word. How many were.
pub fn wake_some(word: &std::sync::atomic::AtomicU32) -> u32 {
    futex::wake(word, futex::Flags::empty(), WAKES_MAX).map_or(0, |woken| woken as u32)
}

/// Core: give a word that one or two of a client's threads sleep on another value. Up to [`WAKES_MAX`] are woken.
pub fn change(word: &std::sync::atomic::AtomicU32, value: u32) {
    word.store(value, std::sync::atomic::Ordering::SeqCst);
    wake_some(word);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;

    #[test]
    fn few_threads_are_woken_at_once_and_in_the_end_all() {
        const THREADS: usize = 20;
        let (_fd, core) = crate::map::create_core().unwrap();
        let (_region_fd, region) = crate::map::create_client().unwrap();
        let woken = AtomicUsize::new(0);
        let eventually = |what: &str, is: &dyn Fn() -> bool| {
            let start = Instant::now();
            while !is() {
                assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let asleep = |tid: i32| {
            let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat"));
            stat.is_ok_and(|stat| {
                stat.rsplit(')').next().is_some_and(|s| s.trim().starts_with('S'))
            })
        };
        let tids = std::sync::Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    tids.lock().unwrap().push(rustix::thread::gettid().as_raw_nonzero().get());
                    region.activity.waiters.fetch_add(1, SeqCst);
                    // Until somebody wakes it, whatever the word says.
                    let seen = core.wake.load(SeqCst);
                    let _ = futex::wait(&core.wake, futex::Flags::empty(), seen, None);
                    woken.fetch_add(1, SeqCst);
                });
            }
            eventually("all sleep", &|| {
                let tids = tids.lock().unwrap();
                tids.len() == THREADS && tids.iter().all(|tid| asleep(*tid))
            });
            assert_eq!(wake(&region, &core), Some(WAKES_MAX), "more may sleep");
            eventually("eight are woken", &|| woken.load(SeqCst) == WAKES_MAX as usize);
            assert_eq!(wake_some(&core.wake), WAKES_MAX);
            eventually("sixteen are", &|| woken.load(SeqCst) == 2 * WAKES_MAX as usize);
            assert_eq!(wake_some(&core.wake), THREADS as u32 - 2 * WAKES_MAX, "the last");
        });
        assert_eq!(woken.load(SeqCst), THREADS);
    }
}
