//! Which launch an event was recorded after: waiting for the event covers its
//! stream up to there.
//!
//! One word an entry, read and written whole, indexed and tagged by 40 bits of a
//! hash of the handle; a later event of the same index replaces an earlier one,
//! whose wait then proves nothing and leaves the busy bit alone. Two live events
//! that agree in all 40 bits would be mistaken for one another: one chance in
//! 2^26 for a pair that meets in an entry.

use crate::activity::Snapshot;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const INDEX_BITS: u32 = 13;
const TAG_BITS: u32 = 26;
const ENTRIES: usize = 1 << INDEX_BITS;

/// Tag (26 bits), slot (6 bits), sequence (32 bits); 0 is empty.
static TABLE: [AtomicU64; ENTRIES] = [const { AtomicU64::new(0) }; ENTRIES];

fn place(event: usize) -> (&'static AtomicU64, u64) {
    let hash = (event as u64 >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let index = (hash >> (64 - INDEX_BITS)) as usize;
    // A tag of 0 could make an empty entry look taken.
    let tag = ((hash >> (64 - INDEX_BITS - TAG_BITS)) & ((1 << TAG_BITS) - 1)).max(1);
    (&TABLE[index & (ENTRIES - 1)], tag)
}

/// The event was recorded in slot `slot` after launch `sequence`.
pub fn record(event: usize, slot: usize, sequence: u32) {
    let (entry, tag) = place(event);
    entry.store(tag << 38 | (slot as u64 & 63) << 32 | u64::from(sequence), Release);
}

/// The event was recorded after something that cannot be told.
pub fn forget(event: usize) {
    let (entry, tag) = place(event);
    let word = entry.load(Relaxed);
    if word >> 38 == tag {
        let _ = entry.compare_exchange(word, 0, Release, Relaxed);
    }
}

/// Slot and launch of the event's last record, if known.
pub fn lookup(event: usize) -> Option<(usize, Snapshot)> {
    let (entry, tag) = place(event);
    let word = entry.load(Acquire);
    (word >> 38 == tag).then(|| ((word >> 32) as usize & 63, Snapshot::settled_at(word as u32)))
}

/// Only in a forked child.
pub fn reset() {
    for entry in &TABLE {
        entry.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_the_last_record_of_each_event() {
        let events: Vec<usize> = (0..200).map(|i| 0x7f12_3400_0000 + i * 0x90).collect();
        for (i, e) in events.iter().enumerate() {
            record(*e, i % 64, i as u32);
        }
        let mut kept = 0;
        for (i, e) in events.iter().enumerate() {
            if let Some((slot, seen)) = lookup(*e) {
                assert_eq!((slot, seen.sequence()), (i % 64, i as u32));
                assert!(seen.is_settled());
                kept += 1;
            }
        }
        assert!(kept >= 190, "few of 200 events share one of 8192 entries: {kept} kept");
        record(events[0], 5, 77);
        assert_eq!(lookup(events[0]), Some((5, Snapshot::settled_at(77))));
        forget(events[0]);
        assert_eq!(lookup(events[0]), None);
        assert_eq!(lookup(0xdead_0000), None);
    }
}
