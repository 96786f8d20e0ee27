//! The submission protocol: many client threads, one core.
//!
//! A thread takes a ticket (`next_ticket += 1`), waits until the core has
//! consumed the ring slot's previous user, fills the slot and publishes it by
//! storing `ticket + 1` in its sequence word. The core reads slots in ticket
//! order and answers in ticket order, so a held launch holds every later one of
//! that client: holding one stream while another goes on could deadlock on an
//! event between them.
//!
//! The answer is [`CoreRegion::granted`](crate::CoreRegion::granted) rising above
//! the ticket (run whole), or the ticket's decision slot (any other form).
//!
//! Every access whose ordering matters is a function of [`steps`], which
//! `tests/loom.rs` runs under loom.

use crate::layout::{
    ClientRegion, CoreRegion, KERNEL_SLOTS, KERNEL_UNKNOWN, RING_SLOTS, STREAM_SLOTS,
    decision_kind, submission_flags,
};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use tally_contract::kernel::Demand;
use tally_contract::limits::SMS_MAX;

/// The protocol's accesses, over any kind of atomic word: the real ones here,
/// loom's in `tests/loom.rs`.
#[doc(hidden)]
pub mod steps {
    use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release, SeqCst};

    /// The operations that the protocol uses, of std's atomics and loom's alike.
    pub trait Word<T> {
        fn load(&self, order: Ordering) -> T;
        fn store(&self, value: T, order: Ordering);
        fn fetch_add(&self, value: T, order: Ordering) -> T;
        fn fetch_sub(&self, value: T, order: Ordering) -> T;
        /// A fence that is sequentially consistent.
        fn fence();
    }

    macro_rules! words {
        ($($atomic:ident: $int:ty),*) => {$(
            impl Word<$int> for std::sync::atomic::$atomic {
                #[inline]
                fn load(&self, order: Ordering) -> $int {
                    self.load(order)
                }
                #[inline]
                fn store(&self, value: $int, order: Ordering) {
                    self.store(value, order);
                }
                #[inline]
                fn fetch_add(&self, value: $int, order: Ordering) -> $int {
                    self.fetch_add(value, order)
                }
                #[inline]
                fn fetch_sub(&self, value: $int, order: Ordering) -> $int {
                    self.fetch_sub(value, order)
                }
                #[inline]
                fn fence() {
                    std::sync::atomic::fence(SeqCst);
                }
            }
        )*};
    }
    words!(AtomicU32: u32, AtomicU64: u64);

    /// Client: the slot's other fields are valid.
    #[inline]
    pub fn publish(sequence: &impl Word<u64>, ticket: u64) {
        // SeqCst: ordered before the read of `parked` in `core_needs_wake`; the core
        // stores `parked` and then reads the rings. One of the two sees the other.
        sequence.store(ticket + 1, SeqCst);
    }

    /// Client: whether the core sleeps.
    #[inline]
    pub fn core_needs_wake(parked: &impl Word<u32>) -> bool {
        parked.load(SeqCst) != 0
    }

    /// Core: the sequence that a slot holds.
    #[inline]
    pub fn poll(sequence: &impl Word<u64>) -> u64 {
        sequence.load(SeqCst)
    }

    /// Core: the slots of all tickets below `until` may be used again. Whether one that is out was without room while
    /// only those below `from` had been: its thread may sleep.
    #[inline]
    pub fn made_room<W: Word<u64>>(next_ticket: &W, from: u64, slots: u64) -> bool {
        // The client takes its ticket, and behind a fence looks whether there is room, before it sleeps
        // ([`crate::wait::steps::sleep`]); the core has made room, and looks behind this one. One sees the other.
        W::fence();
        next_ticket.load(Relaxed).wrapping_sub(from) as i64 > slots as i64
    }

    /// Core: say that it sleeps, before it looks at the rings once more.
    #[inline]
    pub fn park(parked: &impl Word<u32>, asleep: bool) {
        parked.store(asleep.into(), SeqCst);
    }

    /// Core: the only writer of `granted`; see [`super::grant`].
    #[inline]
    pub fn grant(granted: &impl Word<u64>, until: u64) {
        granted.store(until, Release);
    }

    /// Core: writes the answer before its ticket; see [`super::decide`].
    #[inline]
    pub fn decide(
        sequence_and_kind: &impl Word<u64>,
        argument: &impl Word<u64>,
        ticket: u64,
        kind: u8,
        value: u64,
    ) {
        argument.store(value, Relaxed);
        sequence_and_kind.store((ticket + 1) << 8 | u64::from(kind), Release);
    }

    /// Client: kind and argument of the answer, if there is one; 0 is whole.
    #[inline]
    pub fn answer(
        sequence_and_kind: &impl Word<u64>,
        argument: &impl Word<u64>,
        granted: &impl Word<u64>,
        ticket: u64,
    ) -> Option<(u8, u64)> {
        // The grant is read first and the slot counts first: a later ticket's
        // grant also rises above this one and must not turn its slices into a
        // whole launch. Who sees that grant sees the slot as it was before it.
        let granted = granted.load(Acquire) > ticket;
        let word = sequence_and_kind.load(Acquire);
        if word >> 8 == (ticket + 1) & (u64::MAX >> 8) {
            return Some((word as u8, argument.load(Relaxed)));
        }
        granted.then_some((0, 0))
    }
}

/// A launch as submitted; plain values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Index into the kernel table, or `KERNEL_UNKNOWN`.
    pub kernel: u32,
    pub flags: u32,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared_bytes: u32,
    pub stream: u32,
    /// Value of its completion word when done.
    pub completion: u32,
    /// Of the kernel, as far as the client knows it.
    pub demand: Demand,
    /// Of a leased launch: on at most so many SMs; 0: on all.
    pub limited_sms: u32,
}

/// How a launch is to be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Whole, as the program asked for it.
    Whole,
    /// Slices of this many blocks.
    Slice(u32),
    /// Yields at block boundaries; expected to take so many microseconds (0: unknown).
    Preemptible(u32),
    /// On this many SMs.
    SmLimited(u32),
}

fn slot(ticket: u64) -> usize {
    (ticket as usize) & (RING_SLOTS - 1)
}

/// Client: take the next ticket. Every ticket taken must be published.
pub fn take_ticket(client: &ClientRegion) -> u64 {
    client.activity.next_ticket.fetch_add(1, Relaxed)
}

/// Client: whether the ring has room for `ticket`. While it has not, wait as
/// for a decision.
pub fn has_room(core: &CoreRegion, ticket: u64) -> bool {
    // A re-attached core starts from this client's ticket, so `consumed` may be
    // ahead of an old ticket: that is room.
    (ticket.wrapping_sub(core.consumed.load(Acquire)) as i64) < RING_SLOTS as i64
}

/// Client: publish a request in its slot. Call [`core_needs_wake`] afterwards.
pub fn publish(client: &ClientRegion, ticket: u64, request: &Request) {
    let s = &client.submissions[slot(ticket)];
    s.kernel.store(request.kernel, Relaxed);
    s.flags.store(request.flags, Relaxed);
    for i in 0..3 {
        s.grid[i].store(request.grid[i], Relaxed);
        s.block[i].store(request.block[i], Relaxed);
    }
    s.shared_bytes.store(request.shared_bytes, Relaxed);
    s.stream.store(request.stream, Relaxed);
    s.completion.store(request.completion, Relaxed);
    let Demand { blocks_per_sm, registers } = request.demand;
    s.demand.store(u32::from(blocks_per_sm) | u32::from(registers) << 16, Relaxed);
    s.limited_sms.store(request.limited_sms, Relaxed);
    steps::publish(&s.sequence, ticket);
}

/// Client: whether the core sleeps and must be woken through the doorbell.
pub fn core_needs_wake(core: &CoreRegion) -> bool {
    steps::core_needs_wake(&core.parked)
}

/// Client: the answer for `ticket`, if there is one.
pub fn answer(core: &CoreRegion, ticket: u64) -> Option<Answer> {
    let d = &core.decisions[slot(ticket)];
    let (kind, argument) =
        steps::answer(&d.sequence_and_kind, &d.argument, &core.granted.ticket, ticket)?;
    Some(match kind {
        decision_kind::SLICE => Answer::Slice(argument as u32),
        decision_kind::PREEMPTIBLE => Answer::Preemptible(argument as u32),
        decision_kind::SM_LIMITED => Answer::SmLimited(argument as u32),
        _ => Answer::Whole,
    })
}

/// What the core finds at a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// The client has not published this ticket yet.
    Empty,
    Request(Request),
    /// A later ticket took the slot: its owner gave up on this one while there
    /// was no core. Go on with the next ticket.
    Abandoned,
}

/// Core: whether [`poll`] finds anything at `ticket`.
#[inline]
pub fn has_come(client: &ClientRegion, ticket: u64) -> bool {
    steps::poll(&client.submissions[slot(ticket)].sequence) > ticket
}

/// Core: the request at `ticket`. Values are bounded here: what comes back is
/// safe to index with.
pub fn poll(client: &ClientRegion, ticket: u64) -> Polled {
    let s = &client.submissions[slot(ticket)];
    let sequence = steps::poll(&s.sequence);
    if sequence != ticket + 1 {
        return if sequence > ticket + 1 { Polled::Abandoned } else { Polled::Empty };
    }
    let demand = s.demand.load(Relaxed);
    let three = |a: &[std::sync::atomic::AtomicU32; 3]| [0, 1, 2].map(|i| a[i].load(Relaxed));
    Polled::Request(Request {
        kernel: s.kernel.load(Relaxed),
        flags: s.flags.load(Relaxed) & submission_flags::ALL,
        grid: three(&s.grid),
        block: three(&s.block),
        shared_bytes: s.shared_bytes.load(Relaxed),
        stream: s.stream.load(Relaxed) % STREAM_SLOTS as u32,
        completion: s.completion.load(Relaxed),
        demand: Demand { blocks_per_sm: demand as u16, registers: (demand >> 16) as u16 },
        limited_sms: s.limited_sms.load(Relaxed).min(SMS_MAX),
    })
}

/// Core: what the slot of `ticket` holds that no shim of this protocol writes. [`poll`] bounded it.
pub fn breach(client: &ClientRegion, ticket: u64) -> Option<&'static str> {
    let s = &client.submissions[slot(ticket)];
    let kernel = s.kernel.load(Relaxed);
    if s.stream.load(Relaxed) >= STREAM_SLOTS as u32 {
        Some("a launch names a stream slot that does not exist")
    } else if s.flags.load(Relaxed) & !submission_flags::ALL != 0 {
        Some("a launch has flags that do not exist")
    } else if kernel >= KERNEL_SLOTS as u32 && kernel != KERNEL_UNKNOWN {
        Some("a launch names a kernel beyond the table")
    } else {
        None
    }
}

/// Core: the slot of `ticket` may be used again.
pub fn consume(core: &CoreRegion, ticket: u64) {
    core.consumed.store(ticket + 1, Release);
}

/// Core: it has consumed tickets from `from` on. Whether a thread may sleep that had no room before; the caller wakes.
pub fn made_room(client: &ClientRegion, from: u64) -> bool {
    steps::made_room(&client.activity.next_ticket, from, RING_SLOTS as u64)
}

/// Core: let every ticket below `until` run whole. The caller wakes.
pub fn grant(core: &CoreRegion, until: u64) {
    steps::grant(&core.granted.ticket, until);
}

/// Core: answer one ticket with a form. The caller wakes.
pub fn decide(core: &CoreRegion, ticket: u64, answer: Answer) {
    let (kind, argument) = match answer {
        Answer::Whole => (decision_kind::WHOLE, 0),
        Answer::Slice(n) => (decision_kind::SLICE, n),
        Answer::Preemptible(us) => (decision_kind::PREEMPTIBLE, us),
        Answer::SmLimited(n) => (decision_kind::SM_LIMITED, n),
    };
    let d = &core.decisions[slot(ticket)];
    steps::decide(&d.sequence_and_kind, &d.argument, ticket, kind, argument.into());
}

/// Whether the launch whose completion value is `completion` is done when its
/// word reads `word`. Sequence arithmetic: right while fewer than 2^31 launches
/// of one stream are in flight.
pub fn is_done(word: u32, completion: u32) -> bool {
    word.wrapping_sub(completion) as i32 >= 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn something_has_come_exactly_if_it_can_be_polled() {
        let (_fd, client) = crate::map::create_client().unwrap();
        let request = Request {
            kernel: 0,
            flags: 0,
            grid: [1; 3],
            block: [1; 3],
            shared_bytes: 0,
            stream: 0,
            completion: 1,
            demand: Demand { blocks_per_sm: 48, registers: 255 },
            limited_sms: 112,
        };
        // Not published yet, published, and taken by a later ticket.
        let finds = |ticket| (has_come(&client, ticket), poll(&client, ticket));
        assert_eq!(finds(0), (false, Polled::Empty));
        publish(&client, 0, &request);
        assert_eq!(finds(0), (true, Polled::Request(request)));
        publish(&client, RING_SLOTS as u64, &request);
        assert_eq!(finds(0), (true, Polled::Abandoned));
        assert_eq!(finds(2 * RING_SLOTS as u64), (false, Polled::Empty));
    }
}
