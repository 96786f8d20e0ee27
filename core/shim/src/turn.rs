//! The lock over a gated launch: of a stream one at a time, from its ticket to its event.
//!
//! The lock is held while a launch waits for its turn, which may take long. So it allows for what programs do
//! meanwhile:
//! - a signal handler that launches into the same stream passes without the lock;
//! - a thread that jumps out of its wait (`siglongjmp`), or ends in it, leaves the lock held: it can take the
//!   lock again itself, and other threads can once the wait has shown no sign of life for [`LEFT_NS`].

use crate::state;
use rustix::thread::futex;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};
use tally_ipc::wait::now_ns;

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;
/// Tries before a thread sleeps.
const SPINS: u32 = 64;
/// Between two looks whether the lock was left behind, ns.
const LOOK_NS: i64 = 100_000_000;
/// A thread that waits looks around far more often.
const LEFT_NS: u64 = 3_000_000_000;

#[derive(Debug)]
pub struct Turn {
    word: AtomicU32,
    stamp: AtomicU32,
    /// Thread token of the owner.
    owner: AtomicU64,
    /// Where the owner's stack was.
    stack: AtomicUsize,
    /// When the owner was last seen waiting for its turn; 0: it does not wait.
    waiting_ns: AtomicU64,
}

/// Releases the lock when dropped, unless it was taken over.
#[derive(Debug)]
pub struct TurnGuard<'a> {
    turn: &'a Turn,
    stamp: u32,
}

impl Turn {
    /// Unlocked, without an owner.
    pub const fn new() -> Self {
        Turn {
            word: AtomicU32::new(FREE),
            stamp: AtomicU32::new(0),
            owner: AtomicU64::new(0),
            stack: AtomicUsize::new(0),
            waiting_ns: AtomicU64::new(0),
        }
    }

    /// Wait for it and take it. `None`: the calling thread has it already.
    #[inline(never)]
    pub fn enter(&self) -> Option<TurnGuard<'_>> {
        let here = 0_u8;
        let stack = (&raw const here).addr();
        let me = state::thread_token();
        for _ in 0..SPINS {
            if self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok() {
                return Some(self.own(self.stamp.load(Relaxed), me, stack));
            }
            if self.owner.load(Relaxed) == me {
                // Deeper on the stack than its owner is a handler within it. Else that frame is gone.
                let is_gone = stack >= self.stack.load(Relaxed);
                return if is_gone { self.take_over(me, stack) } else { None };
            }
            std::hint::spin_loop();
        }
        let look = futex::Timespec { tv_sec: 0, tv_nsec: LOOK_NS };
        // How long the owner has shown no sign of life, by time in which this thread ran, too: a whole process that
        // was stopped goes on with an owner that is there.
        let (mut sign_ns, mut still_ns, mut looked_ns) = (0, 0_u64, now_ns());
        while self.word.swap(CONTENDED, Acquire) != FREE {
            let (waiting_ns, now) = (self.waiting_ns.load(SeqCst), now_ns());
            let passed_ns = now.saturating_sub(looked_ns).min(2 * LOOK_NS as u64);
            let is_still = waiting_ns != 0 && waiting_ns == sign_ns;
            still_ns = if is_still { still_ns + passed_ns } else { 0 };
            (sign_ns, looked_ns) = (waiting_ns, now);
            if still_ns > LEFT_NS
                && let Some(held) = self.take_over(me, stack)
            {
                crate::log!("a launch was left behind in its wait by its thread");
                return Some(held);
            }
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, CONTENDED, Some(&look));
        }
        Some(self.own(self.stamp.load(Relaxed), me, stack))
    }

    fn own(&self, stamp: u32, me: u64, stack: usize) -> TurnGuard<'_> {
        self.owner.store(me, Relaxed);
        self.stack.store(stack, Relaxed);
        self.waiting_ns.store(0, SeqCst);
        TurnGuard { turn: self, stamp }
    }

    fn take_over(&self, me: u64, stack: usize) -> Option<TurnGuard<'_>> {
        let stamp = self.stamp.load(SeqCst);
        let next = stamp.wrapping_add(1);
        self.stamp.compare_exchange(stamp, next, SeqCst, Relaxed).ok()?;
        Some(self.own(next, me, stack))
    }

    /// Take it if it is free.
    pub fn try_enter(&self) -> Option<TurnGuard<'_>> {
        self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).ok()?;
        let here = 0_u8;
        let me = state::thread_token();
        Some(self.own(self.stamp.load(Relaxed), me, (&raw const here).addr()))
    }

    /// Free it although its owner did not: only in a forked child.
    pub fn reset(&self) {
        self.owner.store(0, SeqCst);
        self.waiting_ns.store(0, SeqCst);
        self.word.store(FREE, Release);
    }
}

impl Default for Turn {
    fn default() -> Self {
        Self::new()
    }
}

impl TurnGuard<'_> {
    /// The owner waits for its turn, and is there.
    pub fn waits(&self) {
        self.turn.waiting_ns.store(now_ns(), SeqCst);
    }

    /// The owner goes on, into the driver.
    pub fn goes_on(&self) {
        self.turn.waiting_ns.store(0, SeqCst);
    }
}

impl Drop for TurnGuard<'_> {
    fn drop(&mut self) {
        let turn = self.turn;
        let next = self.stamp.wrapping_add(1);
        // Else it was taken over, and is the other's to free.
        if turn.stamp.compare_exchange(self.stamp, next, SeqCst, Relaxed).is_ok() {
            turn.owner.store(0, Relaxed);
            turn.waiting_ns.store(0, SeqCst);
            if turn.word.swap(FREE, Release) == CONTENDED {
                let _ = futex::wake(&turn.word, futex::Flags::PRIVATE, 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    #[test]
    fn one_thread_at_a_time_has_it() {
        static TURN: Turn = Turn::new();
        static COUNT: AtomicU64 = AtomicU64::new(0);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..5_000 {
                        let _held = TURN.enter().unwrap();
                        // Not atomic as a whole: lost updates would show.
                        let n = COUNT.load(Relaxed);
                        COUNT.store(n + 1, Relaxed);
                    }
                });
            }
        });
        assert_eq!(COUNT.load(Relaxed), 20_000);
    }

    #[inline(never)]
    fn deeper(turn: &Turn, levels: u32) -> bool {
        let pad = std::hint::black_box([0_u8; 256]);
        let entered = if levels == 0 { turn.enter().is_some() } else { deeper(turn, levels - 1) };
        std::hint::black_box(pad);
        entered
    }

    #[test]
    fn a_handler_within_a_wait_passes_and_a_frame_that_is_gone_is_taken_over() {
        let turn = Turn::new();
        let held = turn.enter().unwrap();
        assert!(!deeper(&turn, 3), "within it");
        std::mem::forget(held);
        // As after a jump out of a wait that was deeper.
        turn.stack.fetch_sub(4_096, Relaxed);
        let again = turn.enter().expect("its own, left behind");
        drop(again);
        assert!(turn.try_enter().is_some());
    }

    #[test]
    fn what_was_left_behind_in_a_wait_others_take_over_and_nothing_else() {
        let turn = Turn::new();
        let left = std::thread::scope(|s| s.spawn(|| turn.enter().unwrap()).join().unwrap());
        let done = AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                drop(turn.enter().unwrap());
                done.store(true, SeqCst);
            });
            std::thread::sleep(Duration::from_millis(150));
            assert!(!done.load(SeqCst), "its owner is in the driver, maybe for long");
            turn.waiting_ns.store(now_ns() - LEFT_NS - 1, SeqCst);
        });
        assert!(done.load(SeqCst));
        drop(left);
        assert_eq!(turn.word.load(SeqCst), FREE);
        assert!(turn.try_enter().is_some());
    }
}
