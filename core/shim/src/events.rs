//! Which launches an event stands behind: waiting for the event covers a stream up to there.
//!
//! An event is behind the launches of the stream in which it was recorded, and behind those of one other stream if that
//! stream had waited for an event there: so programs copy results to the host in a stream of its own.
//!
//! One word an entry, read and written whole, indexed and tagged by 39 bits or so of a hash of the handle; a later
//! event of the same index replaces an earlier one, whose wait then proves nothing and leaves the busy bit alone. Two
//! live events that agree in all these bits would be mistaken for one another: one chance in 2^26 for a pair that meets
//! in an entry.

use crate::activity::Snapshot;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const TAG_BITS: u32 = 26;

/// By a handle: tag (26 bits), slot (6 bits), sequence (32 bits); 0 is empty.
struct Table<const ENTRIES: usize>([AtomicU64; ENTRIES]);

/// What each event was recorded behind, in its own stream.
static OWN: Table<8_192> = Table::new();
/// The same in the stream that its stream had waited for.
static OTHER: Table<8_192> = Table::new();
/// What each stream has waited for last, by its handle.
static JOINED: Table<1_024> = Table::new();

/// A slot and a launch of it.
pub type Position = (usize, Snapshot);

impl<const ENTRIES: usize> Table<ENTRIES> {
    const fn new() -> Self {
        assert!(ENTRIES.is_power_of_two());
        Table([const { AtomicU64::new(0) }; ENTRIES])
    }

    fn place(&self, handle: usize) -> (&AtomicU64, u64) {
        let hash = (handle as u64 >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let index_bits = ENTRIES.trailing_zeros();
        let index = (hash >> (64 - index_bits)) as usize;
        // A tag of 0 could make an empty entry look taken.
        let tag = ((hash >> (64 - index_bits - TAG_BITS)) & ((1 << TAG_BITS) - 1)).max(1);
        (&self.0[index & (ENTRIES - 1)], tag)
    }

    fn set(&self, handle: usize, slot: usize, sequence: u32) {
        let (entry, tag) = self.place(handle);
        entry.store(tag << 38 | (slot as u64 & 63) << 32 | u64::from(sequence), Release);
    }

    fn forget(&self, handle: usize) {
        let (entry, tag) = self.place(handle);
        let word = entry.load(Relaxed);
        if word >> 38 == tag {
            let _ = entry.compare_exchange(word, 0, Release, Relaxed);
        }
    }

    fn get(&self, handle: usize) -> Option<Position> {
        let (entry, tag) = self.place(handle);
        let word = entry.load(Acquire);
        (word >> 38 == tag).then(|| ((word >> 32) as usize & 63, Snapshot::settled_at(word as u32)))
    }

    fn reset(&self) {
        self.0.iter().for_each(|entry| entry.store(0, Relaxed));
    }
}

/// The event was recorded in slot `slot` after launch `sequence`.
pub fn record(event: usize, slot: usize, sequence: u32) {
    OWN.set(event, slot, sequence);
}

/// The event was recorded in a stream (an explicit handle): it is behind what that has waited for, too.
pub fn record_joined(event: usize, stream: usize) {
    if let Some((slot, seen)) = JOINED.get(stream) {
        OTHER.set(event, slot, seen.sequence());
    }
}

/// A stream (an explicit handle) waits for the event.
pub fn join(stream: usize, position: Position) {
    let (slot, seen) = position;
    JOINED.set(stream, slot, seen.sequence());
}

/// Slot and launch that a wait for the event's last record covers, if known.
pub fn waited_for(event: usize) -> Option<Position> {
    OWN.get(event).or_else(|| OTHER.get(event))
}

/// The event was recorded after something that cannot be told.
pub fn forget(event: usize) {
    OWN.forget(event);
    OTHER.forget(event);
}

/// To be called when a stream is destroyed.
pub fn forget_stream(stream: usize) {
    JOINED.forget(stream);
}

/// Slot and launch of the event's last record, if known.
pub fn lookup(event: usize) -> Option<Position> {
    OWN.get(event)
}

/// The same of another stream that it is behind.
pub fn lookup_joined(event: usize) -> Option<Position> {
    OTHER.get(event)
}

/// What a stream (an explicit handle) has waited for last, if known.
pub fn joined(stream: usize) -> Option<Position> {
    JOINED.get(stream)
}

/// Only in a forked child.
pub fn reset() {
    OWN.reset();
    OTHER.reset();
    JOINED.reset();
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

    #[test]
    fn an_event_is_behind_what_its_stream_has_waited_for() {
        let (copied, computed, stream) = (0x51_0000, 0x52_0000, 0x53_0000);
        record_joined(copied, stream);
        assert_eq!(lookup_joined(copied), None);
        record(computed, 3, 9);
        join(stream, waited_for(computed).unwrap());
        record(computed, 3, 12);
        record_joined(copied, stream);
        assert_eq!(
            (lookup(copied), lookup_joined(copied)),
            (None, Some((3, Snapshot::settled_at(9))))
        );
        assert_eq!(joined(stream), Some((3, Snapshot::settled_at(9))));
        // A stream that waits for it waits for the same.
        join(stream + 0x100, waited_for(copied).unwrap());
        assert_eq!(joined(stream + 0x100), joined(stream));
        forget_stream(stream);
        forget(copied);
        assert_eq!((joined(stream), lookup_joined(copied)), (None, None));
    }
}
