//! Streams that have not returned from some of the SMs.
//!
//! Behind an SM-limited launch the program's stream has to wait for the SM-limited one. If the next launch is limited in
//! the same way, neither has to wait for the other. So with `sm_limits.lazy_return` that wait, the *return*, is put off
//! until the program does something that could tell the difference: then whoever does it puts the wait into the stream
//! first ([`give`]), or waits for the work itself ([`wait`]).
//!
//! Only streams that no other stream waits for, but by calls that name them, put it off ([`Host::stands_alone`]).
//!
//! What must hold: between an SM-limited launch and its return no call reaches the driver that uses the stream or waits
//! for the context. The shim sees to that in every function that it replaces.
//!
//! [`Host::stands_alone`]: crate::host::Host::stands_alone

use crate::cuda::{CuResult, NOT_READY, Ptr, SUCCESS, driver};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};
use tally_ipc::layout::STREAM_SLOTS;

/// A slot's stream. Everything but `generation` is written only under the slot's turn, while nothing is owed.
struct Owed {
    /// Of the launch to return from; 0: the stream has returned.
    generation: AtomicU64,
    /// Explicit handle of the program's stream.
    stream: AtomicUsize,
    context: AtomicUsize,
    /// The SM-limited stream.
    limited: AtomicUsize,
    /// Behind the latest launch there.
    event: AtomicUsize,
    /// Number of the latest launch there.
    number: AtomicU32,
}

static OWED: [Owed; STREAM_SLOTS] = [const {
    Owed {
        generation: AtomicU64::new(0),
        stream: AtomicUsize::new(0),
        context: AtomicUsize::new(0),
        limited: AtomicUsize::new(0),
        event: AtomicUsize::new(0),
        number: AtomicU32::new(0),
    }
}; STREAM_SLOTS];
/// Slots that may owe a return: bits.
static SLOTS: AtomicU64 = AtomicU64::new(0);
static NEXT: AtomicU64 = AtomicU64::new(1);

/// A stream that has not returned.
#[derive(Clone, Copy, Debug)]
pub struct Away {
    pub slot: usize,
    /// Explicit handle of the program's stream.
    pub stream: usize,
    pub context: usize,
}

/// Whether any stream has not returned.
#[inline(always)]
pub fn is_any() -> bool {
    SLOTS.load(SeqCst) != 0
}

/// The streams that have not returned.
pub fn away() -> impl Iterator<Item = Away> {
    let bits = SLOTS.load(SeqCst);
    let slots = (0..STREAM_SLOTS).filter(move |slot| bits & 1 << slot != 0);
    slots.filter(|slot| OWED[*slot].generation.load(SeqCst) != 0).map(|slot| Away {
        slot,
        stream: OWED[slot].stream.load(Relaxed),
        context: OWED[slot].context.load(Relaxed),
    })
}

/// Whether a slot's stream is in this SM-limited stream.
pub(crate) fn is_in(slot: usize, limited: usize) -> bool {
    let owed = &OWED[slot];
    owed.generation.load(SeqCst) != 0 && owed.limited.load(Relaxed) == limited
}

/// Launch `number` of a slot was made in an SM-limited stream, with an event behind it. Under the slot's turn; what was
/// owed is of the same SM-limited stream.
pub(crate) fn owe(away: Away, limited: usize, event: usize, number: u32) {
    let owed = &OWED[away.slot];
    owed.stream.store(away.stream, Relaxed);
    owed.context.store(away.context, Relaxed);
    owed.limited.store(limited, Relaxed);
    owed.event.store(event, Relaxed);
    owed.number.store(number, Relaxed);
    owed.generation.store(NEXT.fetch_add(1, SeqCst), SeqCst);
    SLOTS.fetch_or(1 << away.slot, SeqCst);
}

/// The SM-limited stream that is behind everything launched in a slot up to `number`, if its stream is not. Under the
/// slot's turn.
pub fn place_of(slot: usize, number: u32) -> Option<usize> {
    let owed = &OWED[slot];
    let limited = owed.limited.load(Relaxed);
    let is_there = owed.generation.load(SeqCst) != 0 || owed.number.load(Relaxed) == number;
    (is_there && limited != 0).then_some(limited)
}

/// Have a slot's stream return. By a thread that the program uses the stream with; of a default stream, in its context.
pub fn give(slot: usize) {
    let owed = &OWED[slot];
    let generation = owed.generation.load(SeqCst);
    if generation == 0 {
        return;
    }
    let (stream, event) = (owed.stream.load(Relaxed), owed.event.load(Relaxed));
    if let Some(wait) = driver().stream_wait_event {
        // SAFETY: the program's stream, an event of ours. An error is of the context, which the program's call hears of.
        let _ = unsafe { wait(stream as Ptr, event as Ptr, 0) };
    }
    returned(slot, generation);
}

/// Wait for what a slot's stream has not returned from.
pub fn wait(slot: usize) -> CuResult {
    let owed = &OWED[slot];
    let event = owed.event.load(Relaxed);
    match driver().event_synchronize {
        // SAFETY: an event of ours.
        Some(f) if owed.generation.load(SeqCst) != 0 => unsafe { f(event as Ptr) },
        _ => SUCCESS,
    }
}

/// Whether nothing runs from which a slot's stream has not returned. Asks the driver; waits for nothing.
pub fn is_done(slot: usize) -> bool {
    let owed = &OWED[slot];
    let event = owed.event.load(Relaxed);
    match driver().event_query {
        // SAFETY: an event of ours.
        Some(f) if owed.generation.load(SeqCst) != 0 => unsafe { f(event as Ptr) != NOT_READY },
        _ => true,
    }
}

/// Another launch may have been made there meanwhile: then it is owed still.
fn returned(slot: usize, generation: u64) {
    let owed = &OWED[slot];
    if owed.generation.compare_exchange(generation, 0, SeqCst, Relaxed).is_ok() {
        SLOTS.fetch_and(!(1 << slot), SeqCst);
        // One of the two sees the other.
        if owed.generation.load(SeqCst) != 0 {
            SLOTS.fetch_or(1 << slot, SeqCst);
        }
    }
}

/// The SM-limited streams of a context go: nothing can be owed to them.
pub(crate) fn forget(context: usize) {
    for owed in OWED.iter().filter(|owed| owed.context.load(Relaxed) == context) {
        owed.generation.store(0, SeqCst);
        owed.limited.store(0, Relaxed);
    }
}

/// Only in a forked child.
pub(crate) fn reset() {
    for owed in &OWED {
        owed.generation.store(0, SeqCst);
        owed.limited.store(0, Relaxed);
    }
    SLOTS.store(0, SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_made_while_a_stream_returns_is_owed_still() {
        let slot = 7;
        let away = Away { slot, stream: 0x70, context: 0x71 };
        owe(away, 0x72, 0x73, 4);
        let before = OWED[slot].generation.load(SeqCst);
        owe(away, 0x72, 0x73, 5);
        returned(slot, before);
        assert!(is_any() && is_in(slot, 0x72) && !is_in(slot, 0x74));
        assert_eq!(super::away().map(|away| away.stream).collect::<Vec<_>>(), [0x70]);
        returned(slot, OWED[slot].generation.load(SeqCst));
        assert!(!is_any() && super::away().next().is_none() && !is_in(slot, 0x72));
        // Its events may still be put there: it is behind all before it.
        assert_eq!((place_of(slot, 5), place_of(slot, 6)), (Some(0x72), None));
        forget(0x71);
        assert_eq!(place_of(slot, 5), None);
    }
}
