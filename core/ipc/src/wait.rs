//! Waiting for, and waking, threads of another process.

use crate::layout::{ClientRegion, CoreRegion};
use rustix::thread::futex;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

/// A sleeping client looks around at least this often, so that a lost core is
/// noticed even if nobody wakes it.
pub const CLIENT_NAP: Duration = Duration::from_millis(20);

/// CLOCK_MONOTONIC in nanoseconds: one clock for client and core.
pub fn now_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
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
    if let Some(t) = ready() {
        return Some(t);
    }
    if !spin.is_zero() {
        let start = Instant::now();
        loop {
            for _ in 0..32 {
                std::hint::spin_loop();
                if let Some(t) = ready() {
                    return Some(t);
                }
            }
            if start.elapsed() >= spin {
                break;
            }
        }
    }
    client.activity.waiters.fetch_add(1, SeqCst);
    let seen = core.wake.load(SeqCst);
    let mut result = ready();
    if result.is_none() {
        let timeout = rustix::fs::Timespec {
            tv_sec: nap.as_secs() as _,
            tv_nsec: i64::from(nap.subsec_nanos()) as _,
        };
        // The word is in memory shared between processes, so not PRIVATE. Any
        // outcome (woken, changed already, timed out, signal) means: look again.
        let _ = futex::wait(&core.wake, futex::Flags::empty(), seen, Some(&timeout));
        result = ready();
    }
    client.activity.waiters.fetch_sub(1, Relaxed);
    result
}

/// Core: wake the client's threads if any sleeps. Call after storing answers.
pub fn wake(client: &ClientRegion, core: &CoreRegion) {
    core.wake.fetch_add(1, SeqCst);
    if client.activity.waiters.load(SeqCst) != 0 {
        let _ = futex::wake(&core.wake, futex::Flags::empty(), i32::MAX as u32);
    }
}

/// Client: wake this process's own waiting threads (the core is gone).
pub fn wake_own(core: &CoreRegion) {
    let _ = futex::wake(&core.wake, futex::Flags::empty(), i32::MAX as u32);
}
