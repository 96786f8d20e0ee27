//! Units of work of programs that mark none: from the first launch that no earlier wait covers to the return of the
//! program's call that waits for it.
//!
//! Launches are counted by stream slot. The first launch behind a point that a wait may cover (a recorded event, or a
//! wait itself) is *noted* with its time; the slot's [flag](crate::activity) says whether the next one is. So a launch
//! that needs no note costs nothing here. A wait covers a slot up to some launch: the unit began at the first note that
//! was not covered before, and the next one begins at the first note behind. With two buffers in flight the next unit
//! therefore begins while the last is under way.
//!
//! A call that waits for several streams ends one unit. A unit of a stream is shown to the core as open only once the
//! program has waited for that stream alone, so that a program that never waits, or a side stream, shows none.
//!
//! Must never lock or allocate: launches come here.

use crate::activity::{Flag, Snapshot};
use crate::slots::{self, OVERFLOW, SLOTS};
use crate::{marks, state, unit_profile};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use tally_ipc::ClientRegion;
use tally_ipc::layout::STREAM_SLOTS;
use tally_ipc::marks::{Graphs, Stated, What, began_with_ns, even_ns};
use tally_ipc::wait::now_ns;

/// Notes kept for a slot. While all are of launches that no wait has covered, further launches are not noted.
const NOTES: u64 = 128;
const IS_GRAPH: u64 = 1 << 32;
/// An open unit is hidden once nothing of it runs any more and it is this old: the program does not wait for it.
const FORSAKEN_NS: u64 = 1_000_000_000;

struct Note {
    /// Which note (31 bits), whether of a graph, the launch's number (32 bits); 0: none yet.
    word: AtomicU64,
    at_ns: AtomicU64,
}

/// What is kept for a slot.
struct Stream {
    /// Launches up to this number (wrapping) were waited for.
    covered: AtomicU32,
    /// Notes written so far, and one more.
    next: AtomicU64,
    notes: [Note; NOTES as usize],
    /// Graph launches without a note.
    graphs: AtomicU32,
    /// Its open unit is shown to the core.
    is_shown: AtomicBool,
    /// When its last unit ended, ns.
    ended_ns: AtomicU64,
}

static STREAMS: [Stream; STREAM_SLOTS] = [const {
    Stream {
        covered: AtomicU32::new(0),
        next: AtomicU64::new(1),
        notes: [const { Note { word: AtomicU64::new(0), at_ns: AtomicU64::new(0) } };
            NOTES as usize],
        graphs: AtomicU32::new(0),
        is_shown: AtomicBool::new(false),
        ended_ns: AtomicU64::new(0),
    }
}; STREAM_SLOTS];

/// Slots with launches that were noted and not waited for, as bits.
static PENDING: AtomicU64 = AtomicU64::new(0);

/// What a wait has covered of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Found {
    /// When the first launch was made that it covers, and no wait before, and whether of a graph; and its number.
    began: Option<(u64, bool)>,
    first: Option<u32>,
    /// When the first launch was made that it does not cover, and whether of a graph.
    next: Option<(u64, bool)>,
    /// Graph launches that it covers.
    graphs: u32,
}

fn is_behind(number: u32, other: u32) -> bool {
    number.wrapping_sub(other) as i32 > 0
}

impl Stream {
    /// The word of note `at`, if that is kept.
    fn note(&self, at: u64) -> Option<(u64, u64)> {
        let note = &self.notes[(at % NOTES) as usize];
        let word = note.word.load(Acquire);
        (word >> 33 == at & 0x7fff_ffff).then(|| (word, note.at_ns.load(Relaxed)))
    }

    fn look(&self, covered: u32, until: u32) -> Found {
        let (mut found, next) = (Found::default(), self.next.load(SeqCst));
        for at in (next.saturating_sub(NOTES).max(1)..next).rev() {
            // Two threads may have written one at once.
            let Some((word, at_ns)) = self.note(at) else { continue };
            let number = word as u32;
            if !is_behind(number, covered) {
                break;
            }
            let is_graph = word & IS_GRAPH != 0;
            if is_behind(number, until) {
                let this = (at_ns, is_graph);
                found.next = Some(found.next.map_or(this, |next| next.min(this)));
            } else {
                let this = (at_ns, is_graph);
                found.began = Some(found.began.map_or(this, |began| began.min(this)));
                let is_first = found.first.is_none_or(|first| is_behind(first, number));
                found.first = if is_first { Some(number) } else { found.first };
                found.graphs += u32::from(is_graph);
            }
        }
        found
    }

    /// Notes a launch that is made now. False if there is no room.
    fn write(&self, number: u32, graph: u64) -> bool {
        let at = self.next.load(SeqCst);
        let note = &self.notes[(at % NOTES) as usize];
        let oldest = note.word.load(Relaxed);
        if oldest != 0 && is_behind(oldest as u32, self.covered.load(Relaxed)) {
            return false;
        }
        note.at_ns.store(now_ns(), Relaxed);
        note.word.store((at & 0x7fff_ffff) << 33 | graph | u64::from(number), Release);
        self.next.fetch_add(1, SeqCst);
        true
    }
}

/// Slots with units under way, as bits.
#[inline]
pub fn pending() -> u64 {
    PENDING.load(SeqCst)
}

/// Whether units are told from launches and waits in this process.
#[inline]
pub fn are_told() -> bool {
    state::client().is_some() && !state::is_best_effort()
}

/// A launch is made that is the first behind something that a wait may cover, or of a graph; not by a best-effort
/// client.
#[cold]
pub fn note(client: &ClientRegion, index: usize, number: u32, is_graph: bool) {
    if index == OVERFLOW {
        return;
    }
    let (stream, bit) = (&STREAMS[index & 63], slots::bit(index));
    let last = stream.next.load(Relaxed) - 1;
    let graph = if is_graph { IS_GRAPH } else { 0 };
    match stream.note(last) {
        // Before it was held.
        Some((word, _)) if word as u32 == number => {
            stream.notes[(last % NOTES) as usize].word.fetch_or(graph, SeqCst);
        }
        _ if stream.write(number, graph) => {}
        _ => {
            stream.graphs.fetch_add(u32::from(is_graph), Relaxed);
            return;
        }
    }
    if PENDING.load(SeqCst) & bit == 0 {
        PENDING.fetch_or(bit, SeqCst);
    }
    if client.marks.streams[index & 63].load(SeqCst) == 0 {
        show(client, index);
    }
}

/// A launch is about to be held, which will be the next of its slot: its unit begins now.
pub fn note_held(client: &ClientRegion, index: usize, is_graph: bool) {
    let word = &SLOTS[index & 63].word;
    if word.flag() == Flag::Lowered {
        note(client, index, word.snapshot().sequence().wrapping_add(1), is_graph);
    }
}

/// Show the core the open unit of a slot, or that there is none.
fn show(client: &ClientRegion, index: usize) {
    let stream = &STREAMS[index & 63];
    let is_shown = stream.is_shown.load(Relaxed) && !marks::are_requests_marked();
    loop {
        let state = || (stream.covered.load(SeqCst), stream.next.load(SeqCst));
        let now = state();
        let open = is_shown.then(|| stream.look(now.0, now.0).next).flatten();
        let (open_ns, is_graph) = open.unwrap_or_default();
        client.marks.show_stream(index, open_ns, is_graph);
        if state() == now {
            return;
        }
    }
}

/// Takes what a wait covers of a slot; once, whoever waits.
fn take(index: usize, until: u32) -> Option<Found> {
    let stream = &STREAMS[index & 63];
    let later = |covered| is_behind(until, covered).then_some(until);
    let covered = stream.covered.fetch_update(SeqCst, SeqCst, later).ok()?;
    let mut found = stream.look(covered, until);
    if found.began.is_some() {
        found.graphs = found.graphs.saturating_add(stream.graphs.swap(0, Relaxed));
    }
    let word = &SLOTS[index & 63].word;
    // Another thread has launched while this one waited, into a stream that had its note.
    let is_noted = word.flag() != Flag::Lowered;
    if found.next.is_none() && is_noted && word.snapshot().sequence() != until {
        stream.write(until.wrapping_add(1), 0);
    }
    let has_next = || stream.look(until, until).next.is_some();
    if !has_next() {
        PENDING.fetch_and(!slots::bit(index), SeqCst);
        // One of the two sees the other.
        if has_next() {
            PENDING.fetch_or(slots::bit(index), SeqCst);
        }
    }
    Some(found)
}

/// A call of the program has returned that waited for these slots. `is_alone`: for one stream, and what that stands
/// for.
pub fn waited(
    client: &ClientRegion,
    covered: impl Iterator<Item = (usize, Snapshot)> + Clone,
    is_alone: bool,
) {
    if PENDING.load(SeqCst) == 0 {
        return;
    }
    let now = now_ns();
    let covered = covered.filter(|(index, seen)| *index != OVERFLOW && seen.is_settled());
    let mut unit: Option<(bool, u64, usize, bool)> = None;
    let (mut ended, mut graphs) = (0_u64, 0_u32);
    for (index, seen) in covered {
        let Some(found) = take(index, seen.sequence()) else { continue };
        unit_profile::waited(client, index, seen.sequence(), found.first);
        ended |= slots::bit(index);
        let Some((began_ns, is_graph)) = found.began else { continue };
        graphs = graphs.saturating_add(found.graphs);
        // The oldest; before those of streams that the program never waits for alone.
        let is_side = !is_alone && !STREAMS[index & 63].is_shown.load(Relaxed);
        let this = (is_side, began_ns, index, is_graph);
        unit = Some(unit.map_or(this, |unit| unit.min(this)));
    }
    if let Some((_, began_ns, index, is_graph)) = unit {
        let stream = &STREAMS[index & 63];
        if is_alone || ended.count_ones() == 1 {
            stream.is_shown.store(true, Relaxed);
        }
        let after_ns = stream.ended_ns.swap(now, Relaxed).saturating_sub(even_ns(began_ns));
        let graphs = Graphs {
            count: graphs.try_into().unwrap_or(u16::MAX),
            after_ns: after_ns.try_into().unwrap_or(u32::MAX),
        };
        // Tokens may be told by graphs although requests are marked.
        if graphs.count > 0 || !marks::are_requests_marked() {
            let what = What::stream(graphs).pack();
            let began_ns = began_with_ns(began_ns, is_graph);
            marks::publish(Stated { began_ns, ended_ns: now, what });
        }
    }
    (0..OVERFLOW).filter(|i| ended & slots::bit(*i) != 0).for_each(|index| show(client, index));
}

/// Nothing that was launched in a slot runs any more, and no call of the program has waited for it.
pub fn idle(client: &ClientRegion, index: usize) {
    let began_ns = client.marks.streams[index & 63].load(Relaxed);
    if began_ns != 0 && now_ns().saturating_sub(began_ns) > FORSAKEN_NS {
        STREAMS[index & 63].is_shown.store(false, Relaxed);
        show(client, index);
    }
}

/// A slot is another stream's from now on, or its stream is gone: what was under way never ends.
pub fn forget(client: &ClientRegion, index: usize) {
    unit_profile::lost(index);
    let stream = &STREAMS[index & 63];
    stream.covered.store(SLOTS[index & 63].word.snapshot().sequence(), SeqCst);
    PENDING.fetch_and(!slots::bit(index), SeqCst);
    stream.graphs.store(0, Relaxed);
    stream.is_shown.store(false, Relaxed);
    stream.ended_ns.store(0, Relaxed);
    show(client, index);
}

/// Only in a forked child.
pub fn reset() {
    for stream in &STREAMS {
        stream.notes.iter().for_each(|note| note.word.store(0, SeqCst));
        stream.next.store(1, SeqCst);
        stream.covered.store(0, SeqCst);
        stream.graphs.store(0, SeqCst);
        stream.is_shown.store(false, SeqCst);
        stream.ended_ns.store(0, SeqCst);
    }
    PENDING.store(0, SeqCst);
}
