//! The green contexts, by their places in the pool, in which each slot has launches that have not ended. A stream of
//! each holds a hardware queue while it waits, and what comes behind it in that queue waits, too.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64};
use tally_contract::limits::RESERVES_MAX;
use tally_ipc::layout::STREAM_SLOTS;
use tally_ipc::ring;

struct Slot {
    /// Places: a bit each.
    open: AtomicU32,
    /// By place: the number of its last launch.
    last: [AtomicU32; RESERVES_MAX],
}

static SLOTS: [Slot; STREAM_SLOTS] =
    [const { Slot { open: AtomicU32::new(0), last: [const { AtomicU32::new(0) }; RESERVES_MAX] } };
        STREAM_SLOTS];
/// Slots with more than one: bits.
static SEVERAL: AtomicU64 = AtomicU64::new(0);

/// Queues that they may hold beyond one for each slot.
pub(crate) fn beyond_first() -> u32 {
    let (mut slots, mut queues) = (SEVERAL.load(SeqCst), 0);
    while slots != 0 {
        let open = SLOTS[slots.trailing_zeros() as usize].open.load(SeqCst);
        queues += open.count_ones().saturating_sub(1);
        slots &= slots - 1;
    }
    queues
}

/// Whether a launch may go to `at`: not if it needs one more queue, and there is none.
pub(crate) fn has_room(slot: usize, at: usize, has_queue: impl FnOnce() -> bool) -> bool {
    let open = SLOTS[slot & 63].open.load(SeqCst);
    open == 0 || open & 1 << at != 0 || has_queue()
}

/// A slot's launch of this number goes to `at`.
pub(crate) fn note(slot: usize, at: usize, number: u32) {
    let here = &SLOTS[slot & 63];
    here.last[at].store(number, SeqCst);
    let open = here.open.fetch_or(1 << at, SeqCst) | 1 << at;
    if open.count_ones() > 1 {
        SEVERAL.fetch_or(1 << (slot & 63), SeqCst);
    }
}

/// A slot's launches up to `number` have ended.
pub(crate) fn ended(slot: usize, number: u32) {
    let here = &SLOTS[slot & 63];
    let mut places = here.open.load(SeqCst);
    while places != 0 {
        let at = places.trailing_zeros() as usize;
        places &= places - 1;
        let is_done = || ring::is_done(number, here.last[at].load(SeqCst));
        if is_done() {
            here.open.fetch_and(!(1 << at), SeqCst);
            // One came meanwhile.
            if !is_done() {
                here.open.fetch_or(1 << at, SeqCst);
            }
        }
    }
    if here.open.load(SeqCst).count_ones() <= 1 {
        SEVERAL.fetch_and(!(1 << (slot & 63)), SeqCst);
        if here.open.load(SeqCst).count_ones() > 1 {
            SEVERAL.fetch_or(1 << (slot & 63), SeqCst);
        }
    }
}

/// The green contexts are gone, and all that was launched in them has ended; or this is a forked child.
pub(crate) fn forget() {
    SLOTS.iter().for_each(|slot| slot.open.store(0, SeqCst));
    SEVERAL.store(0, SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_with_work_is_a_queue_and_a_new_one_is_taken_only_if_there_is_one() {
        let (slot, other) = (5, 6);
        assert!(has_room(slot, 2, || false), "the first is counted with its stream");
        note(slot, 2, 10);
        assert!(beyond_first() == 0 && has_room(slot, 2, || false));
        assert!(has_room(slot, 3, || true) && !has_room(slot, 3, || false));
        note(slot, 3, 11);
        note(slot, 0, 12);
        note(other, 0, 4);
        assert!(beyond_first() == 2 && !has_room(slot, 1, || false));
        ended(slot, 11);
        assert!(beyond_first() == 0 && !has_room(slot, 3, || false));
        note(slot, 3, 13);
        assert_eq!(beyond_first(), 1);
        ended(slot, 13);
        assert!(beyond_first() == 0 && has_room(slot, 1, || false));
        forget();
        assert!(has_room(other, 1, || false));
    }
}
