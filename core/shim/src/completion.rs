//! How the core learns that a gated launch is done, and how long it took.
//!
//! The launching thread records an event behind a gated launch, within the launch's own call.
//! Whether it has happened is asked by the shim's [`poller`](crate::poller) and by a thread that
//! waits for its answer.
//!
//! An event without timing, as these are, takes no GPU time and no entry of a hardware queue, holds up
//! no other stream of its queue, and asking for it never waits, whatever other threads do (measured:
//! `bench/gpu`, `streams`). But in a blocking stream it waits for what came into the legacy stream before it, and the
//! other way round, and so would who waits for the launch. So it is recorded there only if no other thread began to
//! put anything anywhere since the launch began; who does meanwhile waits for the record
//! ([`records::undisturbed`]).
//!
//! Must never wait for the GPU. Only [`track_launch`] and [`mark`] put anything into a stream, and only by
//! a thread that the program uses that stream with.

use crate::activity::{self, Snapshot};
use crate::slots::{self, OVERFLOW, SLOTS, Slot};
use crate::{link, poller, records, streams};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use tally_contract::limits::SM_LIMITED_STUCK_NS;
use tally_ipc::ClientRegion;
use tally_ipc::layout::{Completion, STREAM_SLOTS};
use tally_ipc::ring;
use tally_ipc::wait::now_ns;
use tally_preempt::cuda::{EVENT_DISABLE_TIMING, NOT_READY, Ptr, SUCCESS, driver};
use tally_preempt::lock::Locked;
use tally_preempt::{joins, occupied_sms, sm_limit};

/// Events in flight in a slot below which every launch gets one.
const DENSE: usize = 8;
/// The same for the slot that streams share, where one stream's event says nothing about another's launches.
const DENSE_SHARED: usize = 4_096;
/// The same for launches whose time is wanted.
const DENSE_SAMPLES: usize = 128;
/// Under a lease nobody waits for the end of each launch: one in so many gets an event, and the first of an idle
/// stream.
const SPARSE_EVERY: u32 = 4;
/// Time from a launch into an idle stream until it runs, plus the time from its end until that is seen, as measured on
/// an H200, ns. Subtracted from the measured time, of which at least a quarter is left.
pub const LAUNCH_LATENCY_NS: u64 = 4_500;
/// A measured time is reported if its error is at most a quarter of it, or at most this, ns.
pub const UNCERTAIN_NS: u64 = 5_000;

/// An event behind launch `number`.
#[derive(Debug)]
struct Marker {
    id: u64,
    event: usize,
    context: usize,
    number: u32,
    /// When the launch call had returned, ns.
    issued_ns: u64,
    /// [`records::enqueued`] when it was recorded.
    enqueued: u64,
    /// The launch's time is to be reported.
    is_sample: bool,
    /// When it happens is to be known exactly, for this launch's time or the next one's.
    is_watched: bool,
}

/// The events on their way in one slot.
#[derive(Debug)]
struct Track {
    markers: VecDeque<Marker>,
    /// Launches behind the newest of them.
    unmarked: u32,
    /// The last launch that was seen done, when, and how much earlier it may have been, ns.
    last: Option<(u32, u64, u64)>,
    /// When the oldest event was last found not to have happened, ns.
    looked_ns: u64,
    /// [`Marker::enqueued`] of the last event that happened.
    done: u64,
}

impl Track {
    const NEW: Track =
        Track { markers: VecDeque::new(), unmarked: 0, last: None, looked_ns: 0, done: 0 };

    /// What a launch that is now seen done took, if that is known well enough.
    fn took(&self, marker: &Marker, seen_ns: u64) -> Option<u64> {
        if !marker.is_sample {
            return None;
        }
        let off_ns = seen_ns.saturating_sub(self.looked_ns.max(marker.issued_ns));
        let before = self.last.filter(|last| last.0 == marker.number.wrapping_sub(1));
        let (took_ns, off_ns) = match before {
            Some((_, at_ns, before_off_ns)) if at_ns > marker.issued_ns => {
                (seen_ns - at_ns, off_ns.max(before_off_ns))
            }
            // The stream was idle.
            Some(_) => {
                let took_ns = seen_ns.saturating_sub(marker.issued_ns);
                (took_ns.saturating_sub(LAUNCH_LATENCY_NS).max(took_ns / 4), off_ns)
            }
            None => return None,
        };
        (off_ns <= (took_ns / 4).max(UNCERTAIN_NS)).then_some(took_ns.max(1))
    }
}

static TRACKS: [Locked<Track>; STREAM_SLOTS] = [const { Locked::new(Track::NEW) }; STREAM_SLOTS];
/// Events that are free, by context.
static EVENTS: Locked<BTreeMap<usize, Vec<usize>>> = Locked::new(BTreeMap::new());
static NEXT_ID: AtomicU64 = AtomicU64::new(1);
/// Slots with events on their way, or launches behind the last of them: bits.
static TRACKED: AtomicU64 = AtomicU64::new(0);
/// When the poller is to look at an event again, ns. It never pauses for longer than its longest nap.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Not before, if the launch's time is not wanted.
    pub least_ns: u64,
    /// Not after, unless the launch has taken 64 times as long.
    pub most_ns: u64,
}

impl Pace {
    /// Nothing depends on what is looked at. A program that launches without a pause loses time to each look.
    pub const CALM: Pace = Pace { least_ns: 200_000, most_ns: u64::MAX };
    /// Another client may wait for it, but no decision of this one.
    pub const LEASED: Pace = Pace { least_ns: 100_000, most_ns: u64::MAX };
    /// A decision may, or another client.
    pub const SHARED: Pace = Pace { least_ns: 15_000, most_ns: u64::MAX };
    /// A launch of this program waits, and the GPU may have nothing to do before it.
    pub const WAITED_FOR: Pace = Pace { least_ns: 15_000, most_ns: 30_000 };
}

/// What asking for a slot's events found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing is on its way.
    Nothing,
    /// Something is. It is looked at again after so long, ns.
    Later(u64),
}

/// Slots in which something is on its way.
pub fn tracked() -> u64 {
    TRACKED.load(SeqCst)
}

/// Whether a launch behind `unmarked` others gets an event, with so many on their way. Where nothing
/// ends, ever fewer do: thousands of launches may stand behind a wait.
fn is_due(index: usize, pending: usize, unmarked: u32, is_sparse: bool) -> bool {
    if index == OVERFLOW {
        return pending < DENSE_SHARED;
    }
    if is_sparse && pending > 0 && unmarked + 1 < SPARSE_EVERY {
        return false;
    }
    let more = pending.saturating_sub(DENSE - 1).min(16);
    pending < DENSE || unmarked >= 1 << more
}

/// Launch `number` of a slot was made in `stream` (an explicit handle), by the calling thread, which
/// holds the slot's lock unless streams share the slot. A launch that the driver refused counts, too.
/// `since`: [`records::enqueued`] before the launch.
pub fn track_launch(
    index: usize,
    slot: &Slot,
    stream: usize,
    number: u32,
    is_sample: bool,
    is_sparse: bool,
    since: u64,
) {
    let issued_ns = now_ns();
    let track = &TRACKS[index & 63];
    let due = track.with(|track| {
        let pending = track.markers.len();
        (is_sample && pending < DENSE_SAMPLES) || is_due(index, pending, track.unmarked, is_sparse)
    });
    let record = || marker(index, slot, stream, number, issued_ns, is_sample);
    let is_ordering =
        || streams::orders(stream, index != OVERFLOW && slot.non_blocking.load(Relaxed) != 0);
    let marker = match due {
        true if is_ordering() => records::undisturbed(since, record),
        true => record(),
        false => None,
    };
    track.with(|track| match marker {
        Some(marker) => {
            if track.markers.is_empty() {
                track.looked_ns = issued_ns;
            }
            track.markers.push_back(marker);
            track.unmarked = 0;
        }
        None => track.unmarked = track.unmarked.saturating_add(1),
    });
    follow(index);
}

/// An ungated launch was made, which still counts as being issued. Streams that share a slot cannot be asked, and
/// waiting for one of them says nothing of the others: there, an event says when it is done.
pub fn track_ungated(index: usize, stream: usize, number: u32, since: u64) {
    if index == OVERFLOW {
        track_launch(index, &SLOTS[OVERFLOW], stream, number, false, false, since);
    }
}

/// The next launch of the calling thread's is to be measured: see that the end of the one before it is known, too, also
/// in a program that launches far ahead. The caller holds the slot's lock.
pub fn mark_before_sample(index: usize, slot: &Slot, stream: usize) {
    let seen = slot.word.snapshot();
    if index == OVERFLOW || !seen.is_settled() {
        return;
    }
    let number = seen.sequence();
    let is_wanted = TRACKS[index & 63].with(|track| match track.markers.back_mut() {
        Some(newest) if newest.number == number => {
            newest.is_watched = true;
            false
        }
        Some(_) => track.markers.len() < DENSE_SAMPLES,
        None => track.unmarked > 0,
    });
    if is_wanted && let Some(mut marker) = marker(index, slot, stream, number, now_ns(), false) {
        marker.is_watched = true;
        TRACKS[index & 63].with(|track| {
            track.markers.push_back(marker);
            track.unmarked = 0;
        });
    }
}

/// Put an event behind what the calling thread has launched in its own stream so far.
pub fn mark(index: usize, slot: &Slot, stream: usize) {
    let seen = slot.word.snapshot();
    if !seen.is_settled() {
        return;
    }
    let number = seen.sequence();
    let is_newest = TRACKS[index & 63].with(|track| match track.markers.back() {
        Some(newest) => newest.number == number,
        None => track.last.is_some_and(|last| last.0 == number) && track.unmarked == 0,
    });
    if !is_newest && let Some(marker) = marker(index, slot, stream, number, now_ns(), false) {
        TRACKS[index & 63].with(|track| {
            track.markers.push_back(marker);
            track.unmarked = 0;
        });
    }
    follow(index);
}

fn follow(index: usize) {
    let bit = slots::bit(index);
    if TRACKED.load(Relaxed) & bit == 0 {
        TRACKED.fetch_or(bit, SeqCst);
        poller::wake();
    }
}

fn marker(
    index: usize,
    slot: &Slot,
    stream: usize,
    number: u32,
    issued_ns: u64,
    is_sample: bool,
) -> Option<Marker> {
    let context = match slot.context.load(Relaxed) {
        _ if index == OVERFLOW => slots::context_of(stream),
        context => context,
    };
    let event = event(context)?;
    let record = driver().event_record?;
    // Streams that share a slot have no launches on some of the SMs.
    let stream = if index == OVERFLOW { stream } else { joins::latest(index, stream) };
    // SAFETY: an event of ours and the stream of the program's, or the one that it is to wait for, all of this context.
    if unsafe { record(event as Ptr, stream as Ptr) } != SUCCESS {
        give_back(context, event);
        return None;
    }
    let id = NEXT_ID.fetch_add(1, Relaxed);
    let enqueued = records::enqueued();
    Some(Marker {
        id,
        event,
        context,
        number,
        issued_ns,
        enqueued,
        is_sample,
        is_watched: is_sample,
    })
}

fn event(context: usize) -> Option<usize> {
    if let Some(free) = EVENTS.with(|all| all.get_mut(&context)?.pop()) {
        return Some(free);
    }
    let create = driver().event_create?;
    let mut made: Ptr = std::ptr::null_mut();
    // SAFETY: a valid out-pointer; the context lives, for a launch is being made in it.
    let result = driver().within(context, || unsafe { create(&mut made, EVENT_DISABLE_TIMING) });
    (result == Some(SUCCESS)).then_some(made as usize)
}

fn give_back(context: usize, event: usize) {
    EVENTS.with(|all| all.entry(context).or_default().push(event));
}

/// Ask for a slot's events, oldest first, and tell the core of what is done. By the poller, which goes into
/// their contexts, or by the thread that launches in the slot's stream. `pace` bounds when they are looked at again.
pub fn poll_events(client: &ClientRegion, index: usize, goes_there: bool, pace: Pace) -> Found {
    let (slot, track) = (&SLOTS[index & 63], &TRACKS[index & 63]);
    let Some(query) = driver().event_query else { return Found::Nothing };
    loop {
        let oldest = track.with(|track| track.markers.front().map(|m| (m.id, m.event, m.context)));
        let Some((id, event, context)) = oldest else { return Found::Nothing };
        if goes_there && let Some(set) = driver().ctx_set {
            // SAFETY: the context lives, see below.
            let _ = unsafe { set(context as Ptr) };
        }
        // SAFETY: an event of ours, in a context that lives: see `asking::wait_out`. In a context
        // in error nothing runs any more.
        let is_done = unsafe { query(event as Ptr) } != NOT_READY;
        let now = now_ns();
        if !is_done {
            let (found, stuck) = track.with(|track| match track.markers.front() {
                Some(oldest) if oldest.id == id => {
                    track.looked_ns = now;
                    let since_ns = track.last.map_or(0, |last| last.1).max(oldest.issued_ns);
                    let since_ns = now.saturating_sub(since_ns);
                    // Exact to a sixteenth where the time is wanted.
                    let later_ns = match oldest.is_watched {
                        true => since_ns / 16,
                        false => (since_ns / 4).max(pace.least_ns),
                    };
                    // What takes long is looked at more seldom.
                    let later_ns = later_ns.min(pace.most_ns.max(since_ns / 64));
                    let stuck = (since_ns > SM_LIMITED_STUCK_NS).then_some(oldest.number);
                    (Found::Later(later_ns), stuck)
                }
                _ => (Found::Later(0), None),
            });
            if let Some(number) = stuck {
                tally_preempt::stuck(index, number);
            }
            return found;
        }
        let number = track.with(|track| {
            track.markers.front().filter(|oldest| oldest.id == id)?;
            let marker = track.markers.pop_front()?;
            let off_ns = now.saturating_sub(track.looked_ns.max(marker.issued_ns));
            let took_ns = track.took(&marker, now);
            track.last = Some((marker.number, now, off_ns));
            track.looked_ns = now;
            track.done = marker.enqueued;
            report(client, index, marker.number, took_ns);
            give_back(marker.context, marker.event);
            Some(marker.number)
        });
        if let Some(number) = number {
            // An event of one of the streams that share a slot says nothing of the others.
            if index != OVERFLOW {
                occupied_sms::ended(index, number);
            }
            covered(client, index, slot, number);
        }
    }
}

/// Launches behind the last event: only that the whole stream is idle says that they are done. By the
/// poller only.
pub fn tail(client: &ClientRegion, index: usize) -> Found {
    let (slot, track) = (&SLOTS[index & 63], &TRACKS[index & 63]);
    if track.with(|track| track.unmarked) == 0 {
        TRACKED.fetch_and(!slots::bit(index), SeqCst);
        // One of the two sees the other.
        if track.with(|track| !track.markers.is_empty() || track.unmarked > 0) {
            TRACKED.fetch_or(slots::bit(index), SeqCst);
        }
        return Found::Nothing;
    }
    let seen = slot.word.snapshot();
    // Where it cannot be asked, all up to the last event is done, and nothing depends on the rest but when this
    // client's next launch is granted.
    let is_idle = poller::is_stream_idle(index, slot);
    if is_idle == Some(false) || !seen.is_settled() {
        return Found::Later(LOOK_TAIL_NS);
    }
    let is_over = track.with(|track| {
        if !track.markers.is_empty() {
            return false;
        }
        track.unmarked = 0;
        // Else an event is put behind them once the thread ends.
        track.last = is_idle.map(|_| (seen.sequence(), now_ns(), u64::MAX));
        report(client, index, seen.sequence(), None);
        true
    });
    if is_over {
        if is_idle.is_some() {
            occupied_sms::ended(index, seen.sequence());
        }
        covered(client, index, slot, seen.sequence());
    }
    Found::Later(Pace::SHARED.least_ns)
}

/// Between two looks at a stream without an event on its way, ns.
const LOOK_TAIL_NS: u64 = 200_000;

/// A launch is done, and all before it. The caller holds the track's lock.
fn report(client: &ClientRegion, index: usize, number: u32, took_ns: Option<u64>) {
    let word = &client.completions[index & 63];
    if let Some(took_ns) = took_ns {
        word.measured.store(Completion::pack_measured(number, took_ns), Relaxed);
    }
    let now = word.done.load(Relaxed);
    if !ring::is_done(now, number) {
        word.done.store(number, Release);
    }
}

/// The busy bit, if no launch came since.
fn covered(client: &ClientRegion, index: usize, slot: &Slot, number: u32) {
    sm_limit::ended(index, number);
    let mut seen = Snapshot::settled_at(number);
    let mut are_all_done = true;
    if index == OVERFLOW {
        // Of several streams: an ungated launch has its event before it counts as issued.
        seen = slot.word.snapshot();
        are_all_done = seen.is_settled()
            && TRACKS[index & 63].with(|track| track.markers.is_empty() && track.unmarked == 0);
    }
    if are_all_done {
        if index == OVERFLOW {
            occupied_sms::ended(index, seen.sequence());
        }
        let bit = slots::bit(index);
        link::report_change(activity::covered(&client.activity, &slot.word, bit, seen));
    }
}

/// A call that waits has shown that everything up to `number` is done.
pub fn seen_done(client: &ClientRegion, index: usize, number: u32) {
    sm_limit::ended(index, number);
    TRACKS[index & 63].with(|track| {
        report(client, index, number, None);
        let Track { markers, last, unmarked, done, .. } = track;
        while markers.front().is_some_and(|m| ring::is_done(number, m.number)) {
            if let Some(marker) = markers.pop_front() {
                *done = marker.enqueued;
                give_back(marker.context, marker.event);
            }
        }
        *last = Some((number, now_ns(), u64::MAX));
        if markers.is_empty() && SLOTS[index & 63].word.snapshot() == Snapshot::settled_at(number) {
            *unmarked = 0;
        }
    });
}

/// Launches of a slot that may be unfinished, as far as its events tell; at most so many are told apart.
pub fn backlog(client: &ClientRegion, index: usize, slot: &Slot) -> u32 {
    slot.word.snapshot().sequence().wrapping_sub(client.completions[index & 63].done.load(Acquire))
}

/// Calls of all threads since the last event of a slot's that happened: so many at most have put something into its
/// stream that may still be there.
pub fn enqueued_since_done(index: usize) -> u64 {
    records::enqueued().saturating_sub(TRACKS[index & 63].with(|track| track.done))
}

/// Keep `done` within 2^31 of the next launch's number, because they are compared with wrap-around. The caller holds
/// the slot's lock.
pub fn refresh(client: &ClientRegion, index: usize, slot: &Slot) {
    /// Ungated launches move no word.
    const STALE_MAX: u32 = 1 << 30;
    let now = slot.word.snapshot().sequence();
    TRACKS[index & 63].with(|track| {
        let word = &client.completions[index & 63].done;
        if now.wrapping_sub(word.load(Relaxed)) > STALE_MAX {
            let oldest = track.markers.front().map_or(now, |m| m.number.wrapping_sub(1));
            word.store(oldest, SeqCst);
        }
    });
}

/// A slot begins anew, all its launches done.
pub fn begin(client: &ClientRegion, index: usize, number: u32) {
    TRACKS[index & 63].with(|track| {
        debug_assert!(track.markers.is_empty());
        (track.unmarked, track.last) = (0, Some((number, now_ns(), u64::MAX)));
        track.done = records::enqueued();
        client.completions[index & 63].done.store(number, SeqCst);
    });
}

/// The events of a context: on their way in slots, and free ones.
pub struct Taken(Vec<(usize, Vec<Marker>)>, Option<(usize, Vec<usize>)>);

/// A context is about to be destroyed: nobody asks for its events any more, whichever slots they are in.
pub fn take_context(context: usize) -> Taken {
    let take = |(index, track): (usize, &Locked<Track>)| {
        let taken = track.with(|track| {
            let all = std::mem::take(&mut track.markers).into_iter();
            let (taken, left): (Vec<_>, Vec<_>) = all.partition(|m| m.context == context);
            track.markers = left.into();
            taken
        });
        (!taken.is_empty()).then_some((index, taken))
    };
    let under_way = TRACKS.iter().enumerate().filter_map(take).collect();
    Taken(under_way, EVENTS.with(|all| all.remove(&context)).map(|free| (context, free)))
}

/// The context was not destroyed after all: what was taken of it is followed again.
pub fn put_back(taken: Taken) {
    for (index, taken) in taken.0 {
        TRACKS[index & 63].with(|track| {
            let mut all: Vec<_> = taken.into_iter().chain(track.markers.drain(..)).collect();
            all.sort_unstable_by_key(|marker| marker.id);
            track.markers = all.into();
        });
        follow(index);
    }
    if let Some((context, free)) = taken.1 {
        EVENTS.with(|all| all.entry(context).or_default().extend(free));
    }
}

/// A context was destroyed, and its events; what was launched in it is over.
pub fn forget_context(client: &ClientRegion, taken: &Taken) {
    for (index, _) in &taken.0 {
        let number = SLOTS[index & 63].word.snapshot().sequence();
        let is_over = TRACKS[index & 63].with(|track| {
            let is_over = track.markers.is_empty();
            if is_over {
                track.unmarked = 0;
                report(client, *index, number, None);
            }
            is_over
        });
        if is_over {
            occupied_sms::ended(*index, number);
        }
    }
    for track in &TRACKS {
        track.with(|track| track.last = None);
    }
}

/// Only in a forked child.
pub fn reset() {
    for track in &TRACKS {
        track.reset(Track::NEW);
    }
    EVENTS.reset(BTreeMap::new());
    TRACKED.store(0, SeqCst);
}
