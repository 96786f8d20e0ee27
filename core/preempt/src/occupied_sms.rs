//! Launches that may hold the SMs of a green context for as long as they like.
//!
//! Blocks of such a launch are all on the GPU at once, and may wait for the host: nobody read their kernel. Unshared,
//! what the program launches beside it runs on the SMs that it leaves free. Limited to SMs that it has filled, that
//! would not begin, and the host may wait for just that. So no launch is limited to as many SMs as such launches of
//! other streams have blocks.
//!
//! Known limits: a launch that was limited before such a launch came, and had not begun; launches that nobody decided,
//! before the client was gated; such launches with more blocks than the GPU holds, which are not counted although the
//! last ones may be alone there; and kernels of one graph that run side by side, of which the largest counts.

use crate::host::host;
use crate::kernels;
use crate::lock::Lock;
use crate::prepare::{Limitable, limitable_as_known};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;
use tally_ipc::layout::STREAM_SLOTS;
use tally_ipc::ring;

/// Blocks that an SM of any GPU holds at most.
const BLOCKS_OF_SM_MAX: u64 = 32;
/// The slot of streams that share one: nothing of it is ever limited.
const OVERFLOW: usize = STREAM_SLOTS - 1;
/// Longer than a thread holds [`TURN`], unless a signal handler came within.
const TURN_MAX: Duration = Duration::from_secs(1);

/// Launches that follow one another in a slot.
struct Group {
    /// The number of the last one.
    last: AtomicU32,
    /// Blocks that they may have on the GPU at once. 0: there are none.
    blocks: AtomicU64,
}

impl Group {
    const fn new() -> Self {
        Group { last: AtomicU32::new(0), blocks: AtomicU64::new(0) }
    }

    fn set(&self, last: u32, blocks: u64) {
        self.last.store(last, SeqCst);
        self.blocks.store(blocks, SeqCst);
    }

    fn blocks(&self) -> u64 {
        self.blocks.load(SeqCst)
    }
}

/// The launches that have not ended: those that came while there were none, and those since. So a large one counts no
/// longer than until those that came next have ended, too.
struct Slot([Group; 2]);

static SLOTS: [Slot; STREAM_SLOTS] = [const { Slot([const { Group::new() }; 2]) }; STREAM_SLOTS];
/// Slots with such launches: bits.
static OPEN: AtomicU64 = AtomicU64::new(0);
/// Held by who changes them.
static TURN: Lock = Lock::new();

/// Blocks of a launch that may wait for the host while others are to run beside it; else 0. `resident`: blocks of it
/// that the whole GPU holds at once, if that is known.
pub(crate) fn counted(kernel: usize, blocks: u64, resident: impl FnOnce() -> Option<u64>) -> u64 {
    let is_known_to_end =
        limitable_as_known(kernel) == Limitable::Any || kernels::may_be_limited_unread(kernel);
    if is_known_to_end || is_larger(blocks, sms(), resident) { 0 } else { blocks }
}

/// Whether the GPU cannot hold so many blocks at once.
pub(crate) fn is_larger(
    blocks: u64,
    sms: Option<u64>,
    resident: impl FnOnce() -> Option<u64>,
) -> bool {
    match sms {
        // Each holds at least one: the driver need not be asked.
        Some(sms) if blocks <= sms => false,
        Some(sms) if blocks > BLOCKS_OF_SM_MAX * sms => true,
        _ => resident().is_some_and(|resident| blocks > resident),
    }
}

/// The GPU's SMs, if they are known.
fn sms() -> Option<u64> {
    let sms = host().client()?.report.sm_count.load(Relaxed);
    (sms != 0).then_some(sms.into())
}

/// Before a launch of a slot's with so many such blocks.
pub(crate) fn note(slot: usize, number: u32, blocks: u64) {
    if blocks == 0 {
        return;
    }
    let _held = TURN.lock_within(TURN_MAX);
    let slot = slot & 63;
    let Slot([older, newer]) = &SLOTS[slot];
    match (slot, older.blocks(), newer.blocks()) {
        (OVERFLOW, sum, _) => older.set(number, sum.saturating_add(blocks)),
        (_, 0, _) => older.set(number, blocks),
        (_, _, most) => newer.set(number, most.max(blocks)),
    }
    OPEN.fetch_or(1 << slot, SeqCst);
}

/// Whether launches in other slots may hold all of so many SMs.
pub(crate) fn may_be_all(slot: usize, sms: u32) -> bool {
    let mut slots = OPEN.load(SeqCst) & !(1 << (slot & 63));
    let mut blocks = 0_u64;
    while slots != 0 {
        let Slot([older, newer]) = &SLOTS[slots.trailing_zeros() as usize];
        // In this order: what moves is in the older one before it leaves the newer one.
        let newer = newer.blocks();
        blocks = blocks.saturating_add(newer.max(older.blocks()));
        slots &= slots - 1;
    }
    blocks > 0 && blocks >= u64::from(sms)
}

/// Slots that have such launches.
pub fn open() -> u64 {
    OPEN.load(SeqCst)
}

/// A slot's launches up to `number` have ended.
pub fn ended(slot: usize, number: u32) {
    let slot = slot & 63;
    if OPEN.load(SeqCst) & 1 << slot == 0 {
        return;
    }
    let _held = TURN.lock_within(TURN_MAX);
    let Slot([older, newer]) = &SLOTS[slot];
    for _ in 0..2 {
        if older.blocks() > 0 && ring::is_done(number, older.last.load(SeqCst)) {
            older.set(newer.last.load(SeqCst), newer.blocks());
            newer.set(0, 0);
        }
    }
    if older.blocks() == 0 {
        OPEN.fetch_and(!(1 << slot), SeqCst);
    }
}

/// Only in a forked child.
pub(crate) fn reset() {
    TURN.reset();
    SLOTS.iter().flat_map(|slot| &slot.0).for_each(|group| group.set(0, 0));
    OPEN.store(0, SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_of_other_slots_hold_sms_until_they_have_ended() {
        let (mine, other, third) = (4, 9, 10);
        note(other, 7, 100);
        assert!(may_be_all(mine, 100) && !may_be_all(mine, 112));
        assert!(!may_be_all(other, 100), "its own stream keeps the order");
        note(third, 1, 16);
        assert!(may_be_all(mine, 112), "both together");
        ended(third, 1);
        // One that never drains: the large one counts no longer than those that came next.
        for number in 8..=10 {
            note(other, number, 20);
        }
        assert!(may_be_all(mine, 100));
        ended(other, 7);
        assert!(may_be_all(mine, 20) && !may_be_all(mine, 21));
        note(other, 11, 3);
        ended(other, 10);
        assert!(may_be_all(mine, 3) && !may_be_all(mine, 4));
        ended(other, 11);
        assert!(!may_be_all(mine, 0));

        // Streams that share a slot have their launches side by side.
        note(OVERFLOW, 1, 60);
        note(OVERFLOW, 1, 60);
        assert!(may_be_all(mine, 120));
        ended(OVERFLOW, 1);
        assert!(!may_be_all(mine, 1));
    }

    #[test]
    fn more_blocks_than_the_gpu_holds_leave_no_sm_to_others_unshared_either() {
        let unknown = usize::MAX;
        assert_eq!(counted(unknown, 132, || Some(264)), 132);
        assert_eq!(counted(unknown, 265, || Some(264)), 0);
        assert_eq!(counted(unknown, 132, || None), 132);

        let never = || panic!("the driver is not asked");
        assert!(!is_larger(132, Some(132), never) && is_larger(4_225, Some(132), never));
        assert!(is_larger(133, Some(132), || Some(132)) && !is_larger(133, Some(132), || None));
    }
}
