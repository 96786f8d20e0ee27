//! Units of work (requests, tokens), from the shim's threads to the core: those that a program marks, and those that
//! the shim recognises by launches and waits.
//!
//! A marked unit that begins takes a place in [`Marks::open`]; one of a stream has the stream's word in
//! [`Marks::streams`]. When a unit ends, the thread takes the next slot of the ring, publishes the unit by storing
//! `ticket + 1` in the slot's sequence word, and then frees the place. So the core, which looks at open units first and
//! then reads the ring, misses no end of a unit that it sees gone. Nobody waits: a unit that finds no place or no slot
//! is dropped and counted. The core reads slots in order and says in [`CoreRegion::marks_read`](crate::CoreRegion) how
//! far it is.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use tally_contract::limits::STREAM_SLOTS;
pub use tally_contract::limits::{MARK_SLOTS, OPEN_MARKS_MAX, PROFILED_LAUNCHES_MAX};
use tally_contract::unit_profile::UnitProfile;

/// Longest time in the program's queue that a mark can state, us: 8 years.
const AGE_US_MAX: u64 = (1 << 48) - 1;
const AGE_IS_KNOWN: u64 = 1 << 8;

/// What a unit of work is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Request,
    Token,
    Prefill,
    /// Not marked: from the first launch that no earlier wait covers to the return of the wait that covers it.
    Stream,
}

/// CUDA graphs in a unit of the kind [`Kind::Stream`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Graphs {
    /// Graph launches that its wait covers.
    pub count: u16,
    /// Time from the unit's begin to the end of the one before it in the stream, if that is later, ns.
    pub after_ns: u32,
}

/// Kind of a unit, and how long it had waited in the program before it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct What {
    pub kind: Kind,
    /// `None`: the program did not say.
    pub age_us: Option<u64>,
    /// Of the kind [`Kind::Stream`] only.
    pub graphs: Graphs,
}

impl What {
    pub fn marked(kind: Kind, age_us: Option<u64>) -> Self {
        What { kind, age_us, graphs: Graphs::default() }
    }

    /// A unit of a stream.
    pub fn stream(graphs: Graphs) -> Self {
        What { kind: Kind::Stream, age_us: None, graphs }
    }

    /// As one word, which is never 0. A longer age than a word holds is shortened.
    pub fn pack(self) -> u64 {
        let kind = match self.kind {
            Kind::Request => 1,
            Kind::Token => 2,
            Kind::Prefill => 3,
            Kind::Stream => {
                let Graphs { count, after_ns } = self.graphs;
                return 4 | u64::from(count) << 16 | u64::from(after_ns) << 32;
            }
        };
        kind | self.age_us.map_or(0, |us| AGE_IS_KNOWN | us.min(AGE_US_MAX) << 16)
    }

    /// The inverse of [`What::pack`]; `None` for words that it does not make.
    pub fn unpack(word: u64) -> Option<Self> {
        let kind = match word & 0xff {
            1 => Kind::Request,
            2 => Kind::Token,
            3 => Kind::Prefill,
            4 => {
                let graphs = Graphs { count: (word >> 16) as u16, after_ns: (word >> 32) as u32 };
                return Some(What::stream(graphs));
            }
            _ => return None,
        };
        Some(What::marked(kind, (word & AGE_IS_KNOWN != 0).then_some(word >> 16)))
    }
}

/// When a unit of a stream began, without the lowest bit: that says whether with a CUDA graph.
pub fn even_ns(began_ns: u64) -> u64 {
    began_ns & !1
}

/// When a unit of a stream began, as clients state it: see [`even_ns`].
pub fn began_with_ns(began_ns: u64, is_graph: bool) -> u64 {
    even_ns(began_ns) | u64::from(is_graph)
}

/// A unit that has begun and not ended.
#[repr(C)]
#[derive(Debug)]
pub struct OpenMark {
    /// Monotonic ns; 0: the place is free.
    pub began_ns: AtomicU64,
    /// As [`What::pack`] makes it.
    pub what: AtomicU64,
}

/// A unit that ended.
#[repr(C, align(32))]
#[derive(Debug)]
pub struct Mark {
    /// `ticket + 1` once the other fields are valid.
    pub sequence: AtomicU64,
    /// Monotonic ns, as is `ended_ns`.
    pub began_ns: AtomicU64,
    pub ended_ns: AtomicU64,
    /// As [`What::pack`] makes it.
    pub what: AtomicU64,
}

/// The latest profiled unit of work, written by one thread of the client's.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ProfileWords {
    /// Odd while the words are written; 0: there is none yet.
    pub sequence: AtomicU64,
    words: [AtomicU64; 8],
}

impl ProfileWords {
    /// Client: a unit was profiled. [`UnitProfile::units`] is the core's to count.
    pub fn publish(&self, profile: &UnitProfile) {
        let p = profile;
        let [launches, gaps, sms_max, sms_mean] =
            [p.launches, p.gaps, p.sms_max, p.sms_mean].map(u64::from);
        let times = [p.gpu_busy_ns, p.gaps_ns, p.gap_median_ns, p.gap_longest_ns];
        let sequence = self.sequence.load(Relaxed) | 1;
        self.sequence.store(sequence, SeqCst);
        let values = [launches, gaps, sms_max, sms_mean].into_iter().chain(times);
        self.words.iter().zip(values).for_each(|(word, value)| word.store(value, SeqCst));
        self.sequence.store(sequence.wrapping_add(1), SeqCst);
    }

    /// Core: what was published since `seen`, and the sequence to state next time. Nothing of it is checked.
    pub fn read(&self, seen: u64) -> Option<(u64, UnitProfile)> {
        let sequence = self.sequence.load(SeqCst);
        if sequence == seen || sequence & 1 == 1 {
            return None;
        }
        let word = |at: usize| self.words[at].load(SeqCst);
        let small = |at| word(at).try_into().unwrap_or(u32::MAX);
        let profile = UnitProfile {
            units: 0,
            launches: small(0),
            gaps: small(1),
            sms_max: small(2),
            sms_mean: small(3),
            gpu_busy_ns: word(4),
            gaps_ns: word(5),
            gap_median_ns: word(6),
            gap_longest_ns: word(7),
        };
        (self.sequence.load(SeqCst) == sequence).then_some((sequence, profile))
    }
}

/// A client's marks; only the client writes them.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Marks {
    /// Slots taken so far: the next ticket.
    pub next: AtomicU64,
    /// Rises with each change to `open` and `streams`.
    pub changes: AtomicU64,
    /// Units dropped for lack of a place or a slot.
    pub dropped: AtomicU64,
    _pad: [u64; 5],
    pub open: [OpenMark; OPEN_MARKS_MAX],
    pub profile: ProfileWords,
    /// When the open unit of each stream slot began, monotonic ns; 0: none is open.
    pub streams: [AtomicU64; STREAM_SLOTS],
    /// The slot is the ticket modulo [`MARK_SLOTS`].
    pub ring: [Mark; MARK_SLOTS],
}

const _: () = assert!(MARK_SLOTS.is_power_of_two() && size_of::<Mark>() == 32);

/// A unit that ended, as the client states it: nothing of it is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stated {
    pub began_ns: u64,
    pub ended_ns: u64,
    /// As [`What::pack`] makes it.
    pub what: u64,
}

/// What the core finds at a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// The client has not published this ticket yet.
    Empty,
    Ended(Stated),
    /// Its slot was used for this later ticket.
    Overtaken(u64),
}

impl Marks {
    fn slot(&self, ticket: u64) -> &Mark {
        &self.ring[ticket as usize & (MARK_SLOTS - 1)]
    }

    /// Client: a unit begins in this place, which is the caller's.
    pub fn begin(&self, place: usize, began_ns: u64, what: u64) {
        if let Some(open) = self.open.get(place) {
            open.what.store(what, Relaxed);
            open.began_ns.store(began_ns, Release);
            self.changes.fetch_add(1, Release);
        }
    }

    /// Client: the unit in this place is over.
    pub fn free(&self, place: usize) {
        if let Some(open) = self.open.get(place) {
            open.began_ns.store(0, Release);
            self.changes.fetch_add(1, Release);
        }
    }

    /// Client: the open unit of a stream slot began then, with the launch of a CUDA graph or not; 0: none is open.
    pub fn show_stream(&self, slot: usize, began_ns: u64, is_graph: bool) {
        let began_ns = if began_ns == 0 { 0 } else { began_with_ns(began_ns, is_graph) };
        if let Some(word) = self.streams.get(slot)
            && word.load(Relaxed) != began_ns
        {
            word.store(began_ns, Release);
            self.changes.fetch_add(1, Release);
        }
    }

    /// Client: count a unit that is not reported.
    pub fn drop_one(&self) {
        self.dropped.fetch_add(1, Relaxed);
    }

    /// Client: report a unit that ended. `read`: as far as the core is. How many wait for the core then; `None` if the
    /// ring is full, and the unit dropped.
    pub fn publish(&self, read: u64, unit: Stated) -> Option<u64> {
        let has_room = |next: u64| {
            // A core that has just started may be ahead of an old ticket: that is room.
            ((next.wrapping_sub(read) as i64) < MARK_SLOTS as i64).then(|| next.wrapping_add(1))
        };
        let Ok(ticket) = self.next.fetch_update(Relaxed, Relaxed, has_room) else {
            self.drop_one();
            return None;
        };
        let slot = self.slot(ticket);
        slot.began_ns.store(unit.began_ns, Relaxed);
        slot.ended_ns.store(unit.ended_ns, Relaxed);
        slot.what.store(unit.what, Relaxed);
        // SeqCst, as the read of the core's wish to be woken that follows.
        slot.sequence.swap(ticket.wrapping_add(1), SeqCst);
        Some(ticket.wrapping_add(1).wrapping_sub(read))
    }

    /// Core: what is at this ticket.
    pub fn poll(&self, ticket: u64) -> Polled {
        let slot = self.slot(ticket);
        let sequence = slot.sequence.load(SeqCst);
        match sequence.wrapping_sub(ticket.wrapping_add(1)) as i64 {
            0 => Polled::Ended(Stated {
                began_ns: slot.began_ns.load(Relaxed),
                ended_ns: slot.ended_ns.load(Relaxed),
                what: slot.what.load(Relaxed),
            }),
            // Never 0: an unused slot.
            later if later > 0 && sequence != 0 => Polled::Overtaken(sequence.wrapping_sub(1)),
            _ => Polled::Empty,
        }
    }

    /// Core: when the open units of streams began, in [`even_ns`], and whether with the launch of a CUDA graph.
    pub fn open_streams(&self) -> impl Iterator<Item = (u64, bool)> + '_ {
        let words = self.streams.iter().map(|word| word.load(Acquire)).filter(|word| *word != 0);
        words.map(|word| (even_ns(word), word & 1 == 1))
    }

    /// Core: when the marked units that are open began, and what they are.
    pub fn open(&self) -> impl Iterator<Item = (u64, What)> + '_ {
        self.open.iter().filter_map(|open| {
            let began_ns = open.began_ns.load(Acquire);
            let what = What::unpack(open.what.load(Relaxed))?;
            // Else the place is free, or has been given to another one meanwhile.
            (began_ns != 0 && open.began_ns.load(Acquire) == began_ns).then_some((began_ns, what))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map;

    fn unit(began_ns: u64) -> Stated {
        let what = What::marked(Kind::Token, None).pack();
        Stated { began_ns, ended_ns: began_ns + 5, what }
    }

    #[test]
    fn what_a_unit_is_fits_a_word() {
        for kind in [Kind::Request, Kind::Token, Kind::Prefill] {
            for age_us in [None, Some(0), Some(1_500), Some(AGE_US_MAX)] {
                let what = What::marked(kind, age_us);
                assert_eq!(What::unpack(what.pack()), Some(what));
            }
        }
        for count in [0, 1, u16::MAX] {
            let what = What::stream(Graphs { count, after_ns: u32::MAX - u32::from(count) });
            assert_eq!(What::unpack(what.pack()), Some(what));
        }
        let longest = What::marked(Kind::Request, Some(u64::MAX)).pack();
        assert_eq!(What::unpack(longest).and_then(|what| what.age_us), Some(AGE_US_MAX));
        assert_eq!((What::unpack(0), What::unpack(5)), (None, None));
    }

    #[test]
    fn units_come_out_in_order_and_a_full_ring_drops() {
        let (_file, region) = map::create_client().unwrap();
        let marks = &region.marks;
        assert_eq!(marks.poll(0), Polled::Empty);
        for n in 0..MARK_SLOTS as u64 {
            assert_eq!(marks.publish(0, unit(n)), Some(n + 1));
        }
        assert_eq!(marks.publish(0, unit(9_999)), None);
        assert_eq!(marks.dropped.load(Relaxed), 1);
        for n in 0..MARK_SLOTS as u64 {
            assert_eq!(marks.poll(n), Polled::Ended(unit(n)));
        }
        let last = MARK_SLOTS as u64;
        assert_eq!(marks.poll(last), Polled::Empty);
        // One slot is free again.
        assert_eq!(marks.publish(1, unit(last)), Some(last));
        assert_eq!(marks.poll(0), Polled::Overtaken(last));
        assert_eq!(marks.poll(last), Polled::Ended(unit(last)));
    }

    #[test]
    fn threads_lose_no_unit_while_there_is_room() {
        let (_file, region) = map::create_client().unwrap();
        let marks = &region.marks;
        let each = MARK_SLOTS as u64 / 4;
        std::thread::scope(|s| {
            for thread in 0..4 {
                s.spawn(move || {
                    (0..each).for_each(|n| _ = marks.publish(0, unit(thread * each + n)))
                });
            }
        });
        let mut seen: Vec<u64> = (0..MARK_SLOTS as u64)
            .map(|ticket| match marks.poll(ticket) {
                Polled::Ended(unit) => unit.began_ns,
                other => panic!("{ticket}: {other:?}"),
            })
            .collect();
        seen.sort_unstable();
        assert!(seen.iter().copied().eq(0..MARK_SLOTS as u64));
        assert_eq!(marks.dropped.load(Relaxed), 0);
    }

    #[test]
    fn a_profile_is_read_once_and_never_while_it_is_written() {
        let (_file, region) = map::create_client().unwrap();
        let words = &region.marks.profile;
        assert_eq!(words.read(0), None);
        let profile = UnitProfile {
            units: 0,
            launches: 1,
            gpu_busy_ns: 2,
            gaps: 3,
            gaps_ns: 4,
            gap_median_ns: 5,
            gap_longest_ns: 6,
            sms_max: 7,
            sms_mean: 8,
        };
        words.publish(&profile);
        let (seen, read) = words.read(0).unwrap();
        assert_eq!((read, words.read(seen)), (profile, None));
        words.publish(&UnitProfile { launches: 9, ..profile });
        let (later, read) = words.read(seen).unwrap();
        assert_eq!((read.launches, words.read(later)), (9, None));
        words.sequence.fetch_add(1, SeqCst);
        assert_eq!(words.read(0), None);
    }

    #[test]
    fn open_units_are_listed_until_they_end() {
        let (_file, region) = map::create_client().unwrap();
        let marks = &region.marks;
        let what = What::marked(Kind::Request, Some(7));
        marks.begin(3, 100, what.pack());
        marks.begin(OPEN_MARKS_MAX, 1, what.pack());
        assert_eq!(marks.open().collect::<Vec<_>>(), [(100, what)]);
        marks.free(3);
        assert_eq!((marks.open().count(), marks.changes.load(Relaxed)), (0, 2));
        marks.show_stream(STREAM_SLOTS - 1, 201, false);
        marks.show_stream(STREAM_SLOTS - 1, 200, false);
        marks.show_stream(STREAM_SLOTS, 1, true);
        assert_eq!(marks.open_streams().collect::<Vec<_>>(), [(200, false)]);
        marks.show_stream(STREAM_SLOTS - 1, 200, true);
        assert_eq!(marks.open_streams().collect::<Vec<_>>(), [(200, true)]);
        marks.show_stream(STREAM_SLOTS - 1, 0, true);
        assert_eq!((marks.open_streams().count(), marks.changes.load(Relaxed)), (0, 5));
    }
}
