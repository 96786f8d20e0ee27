//! The orderings of `ring.rs` and `wait.rs` under loom: every interleaving of
//! the very functions that shim and core call, over loom's atomics.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p tally-ipc --test loom \
//!     --target-dir target/loom
//! ```
//!
//! Loom gives an access with `SeqCst` no more than acquire and release, so
//! [`Loom32`] and [`Loom64`] put `SeqCst` fences around it, as a compiler for a
//! weakly ordered machine does. There are no time-outs here: what the real code
//! would repair by looking around after 20 ms is a deadlock, which loom reports.
#![allow(unexpected_cfgs, reason = "`--cfg loom` is given by whoever runs this")]
#![cfg(loom)]

use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release, SeqCst};
use tally_ipc::ring::steps::{self as ring, Word};
use tally_ipc::wait::steps as wait;

macro_rules! words {
    ($($name:ident($atomic:ident): $int:ty),*) => {$(
        struct $name($atomic);

        impl $name {
            fn new(value: $int) -> Self {
                $name($atomic::new(value))
            }
        }

        impl Word<$int> for $name {
            fn load(&self, order: Ordering) -> $int {
                if order == SeqCst {
                    fence(SeqCst);
                    return self.0.load(Acquire);
                }
                self.0.load(order)
            }
            fn store(&self, value: $int, order: Ordering) {
                if order == SeqCst {
                    self.0.store(value, Release);
                    return fence(SeqCst);
                }
                self.0.store(value, order);
            }
            fn fetch_add(&self, value: $int, order: Ordering) -> $int {
                fenced(order, || self.0.fetch_add(value, order))
            }
            fn fetch_sub(&self, value: $int, order: Ordering) -> $int {
                fenced(order, || self.0.fetch_sub(value, order))
            }
            fn fence() {
                fence(SeqCst);
            }
        }
    )*};
}
words!(Loom32(AtomicU32): u32, Loom64(AtomicU64): u64);

fn fenced<T>(order: Ordering, access: impl FnOnce() -> T) -> T {
    if order != SeqCst {
        return access();
    }
    fence(SeqCst);
    let result = access();
    fence(SeqCst);
    result
}

/// The kernel's side of an eventfd, or of a futex: compare and sleep are one
/// step against a wake-up.
#[derive(Default)]
struct Sleepers {
    rings: Mutex<u32>,
    changed: Condvar,
}

impl Sleepers {
    /// An eventfd: a ring before the wait is not lost.
    fn ring(&self) {
        *self.rings.lock().unwrap() += 1;
        self.changed.notify_all();
    }

    fn wait_for_ring(&self) {
        let mut rings = self.rings.lock().unwrap();
        while *rings == 0 {
            rings = self.changed.wait(rings).unwrap();
        }
        *rings = 0;
    }

    /// A futex: a wake-up reaches only who sleeps already.
    fn futex_wait(&self, word: &Loom32, seen: u32) {
        let rings = self.rings.lock().unwrap();
        if word.load(SeqCst) == seen {
            drop(self.changed.wait(rings).unwrap());
        }
    }

    fn futex_wake(&self) {
        drop(self.rings.lock().unwrap());
        self.changed.notify_all();
    }
}

const SLICE: u8 = 2;

/// The words of one client that the protocol is about.
struct Shared {
    sequence: [Loom64; 2],
    payload: [Loom32; 2],
    next_ticket: Loom64,
    parked: Loom32,
    doorbell: Sleepers,
    busy: Loom32,
    notify: Loom32,
    consumed: Loom64,
    granted: Loom64,
    decision: Loom64,
    argument: Loom64,
    wake: Loom32,
    waiters: Loom32,
    futex: Sleepers,
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Shared {
            sequence: [Loom64::new(0), Loom64::new(0)],
            payload: [Loom32::new(0), Loom32::new(0)],
            next_ticket: Loom64::new(0),
            parked: Loom32::new(0),
            doorbell: Sleepers::default(),
            busy: Loom32::new(0),
            notify: Loom32::new(0),
            consumed: Loom64::new(0),
            granted: Loom64::new(0),
            decision: Loom64::new(0),
            argument: Loom64::new(0),
            wake: Loom32::new(0),
            waiters: Loom32::new(0),
            futex: Sleepers::default(),
        })
    }

    /// As the shim: take a ticket, publish, ring if need be.
    fn submit(&self) -> u64 {
        let ticket = self.next_ticket.fetch_add(1, Relaxed);
        self.payload[ticket as usize].store(ticket as u32 + 7, Relaxed);
        ring::publish(&self.sequence[ticket as usize], ticket);
        if ring::core_needs_wake(&self.parked) {
            self.doorbell.ring();
        }
        ticket
    }

    /// As the core: sleep until `ticket` is there, then take it.
    fn take(&self, ticket: u64) {
        let sequence = &self.sequence[ticket as usize];
        while ring::poll(sequence) != ticket + 1 {
            ring::park(&self.parked, true);
            if ring::poll(sequence) != ticket + 1 {
                self.doorbell.wait_for_ring();
            }
            ring::park(&self.parked, false);
        }
        assert_eq!(self.payload[ticket as usize].load(Relaxed), ticket as u32 + 7);
    }

    fn answer(&self, ticket: u64) -> Option<(u8, u64)> {
        ring::answer(&self.decision, &self.argument, &self.granted, ticket)
    }

    fn wait(&self, ticket: u64) -> (u8, u64) {
        self.sleep_until(|| self.answer(ticket))
    }

    fn sleep_until<T>(&self, ready: impl Fn() -> Option<T>) -> T {
        loop {
            let futex_wait = |seen| self.futex.futex_wait(&self.wake, seen);
            if let Some(answer) = wait::sleep(&self.waiters, &self.wake, &ready, futex_wait) {
                return answer;
            }
        }
    }

    fn wake(&self) {
        wait::wake(&self.wake, &self.waiters, || self.futex.futex_wake());
    }
}

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    // Enough for every bug of this kind known; all of them would take hours.
    builder.preemption_bound = Some(3);
    builder.check(f);
}

#[test]
fn a_submission_is_never_slept_through() {
    model(|| {
        let shared = Shared::new();
        let client = shared.clone();
        let client = thread::spawn(move || client.submit());
        shared.take(0);
        client.join().unwrap();
    });
}

#[test]
fn two_threads_submissions_are_each_taken_once_and_in_order() {
    model(|| {
        let shared = Shared::new();
        let clients: Vec<_> = (0..2)
            .map(|_| {
                let client = shared.clone();
                thread::spawn(move || client.submit())
            })
            .collect();
        shared.take(0);
        shared.take(1);
        let mut tickets: Vec<u64> = clients.into_iter().map(|c| c.join().unwrap()).collect();
        tickets.sort_unstable();
        assert_eq!(tickets, [0, 1]);
    });
}

#[test]
fn an_activity_change_is_never_slept_through() {
    model(|| {
        let shared = Shared::new();
        let client = shared.clone();
        let client = thread::spawn(move || {
            // As the shim: the bits first, the core's wish second.
            client.busy.fetch_add(1, SeqCst);
            if client.notify.load(SeqCst) != 0 {
                client.doorbell.ring();
            }
        });
        while shared.busy.load(SeqCst) == 0 {
            shared.notify.store(1, SeqCst);
            if shared.busy.load(SeqCst) == 0 {
                shared.doorbell.wait_for_ring();
            }
            shared.notify.store(0, SeqCst);
        }
        client.join().unwrap();
    });
}

#[test]
fn an_answer_is_never_slept_through() {
    model(|| {
        let shared = Shared::new();
        let client = shared.clone();
        let client = thread::spawn(move || client.wait(0));
        ring::grant(&shared.granted, 1);
        shared.wake();
        assert_eq!(client.join().unwrap(), (0, 0));
    });
}

#[test]
fn two_waiting_threads_both_get_their_answers() {
    model(|| {
        let shared = Shared::new();
        let waiting: Vec<_> = (0..2)
            .map(|ticket| {
                let client = shared.clone();
                thread::spawn(move || client.wait(ticket))
            })
            .collect();
        ring::grant(&shared.granted, 2);
        shared.wake();
        for client in waiting {
            assert_eq!(client.join().unwrap(), (0, 0));
        }
    });
}

/// A leased launch, which nobody answers, waits only for room: in a ring of one slot, behind another one.
#[test]
fn room_is_never_slept_through() {
    model(|| {
        let shared = Shared::new();
        let client = shared.clone();
        let client = thread::spawn(move || {
            client.submit();
            let ticket = client.next_ticket.fetch_add(1, Relaxed);
            client.sleep_until(|| (client.consumed.load(Acquire) >= ticket).then_some(()));
        });
        shared.take(0);
        shared.consumed.store(1, Release);
        if ring::made_room(&shared.next_ticket, 0, 1) {
            shared.wake();
        }
        client.join().unwrap();
    });
}

/// A ticket has one answer: the grant of a later one does not change it.
#[test]
fn a_decided_ticket_is_not_answered_again_by_a_later_grant() {
    model(|| {
        let shared = Shared::new();
        let client = shared.clone();
        let first = thread::spawn(move || client.wait(0));
        ring::decide(&shared.decision, &shared.argument, 0, SLICE, 33);
        ring::grant(&shared.granted, 2);
        shared.wake();
        assert_eq!(shared.answer(1), Some((0, 0)));
        assert_eq!(first.join().unwrap(), (SLICE, 33));
    });
}

/// There and back: submitted to a sleeping core, answered to a sleeping client.
#[test]
fn a_round_trip_ends() {
    model(|| {
        let shared = Shared::new();
        let client = shared.clone();
        let client = thread::spawn(move || {
            let ticket = client.submit();
            client.wait(ticket)
        });
        shared.take(0);
        ring::grant(&shared.granted, 1);
        shared.wake();
        assert_eq!(client.join().unwrap(), (0, 0));
    });
}
