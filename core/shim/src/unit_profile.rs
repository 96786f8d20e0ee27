//! What a unit of work of a high-priority program does on the GPU: one in so many
//! ([`UnitProfile::is_of`]) is profiled, at most one at a time.
//!
//! The thread that makes the launches records an event behind each, as [`completion`](crate::completion) does for
//! best-effort launches, and one before the first. Its slot stays [measured](crate::activity::Flag), so that every
//! launch takes the path of one that is noted; other launches cost what they always do. The poller asks for the events
//! and works out times as for best-effort launches: a launch begins when the one before it ended or, in an idle stream,
//! when it was made. An end that is seen late makes one launch longer and the one behind it as much shorter; the unit's
//! GPU time is wrong only if the GPU may have had a gap then, or the unit ended. If that is too much in all
//! ([`UNKNOWN_PART`]), the unit gives no profile.
//!
//! An event in the legacy stream waits for all blocking streams, and they for it: while there are any, launches into it
//! are not measured. Nothing here clears a busy bit or reports a launch as done. Launches come here: must never wait.
//! They lock and allocate only where an event is made, or a kernel's demand is asked for, for the first time.

use crate::completion::{LAUNCH_LATENCY_NS, UNCERTAIN_NS};
use crate::slots::{DRAINING, LIVE, MANY_CONTEXTS, OVERFLOW, SLOTS};
use crate::{asking, capture, demand, poller, slots, tools};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use tally_contract::limits::PROFILED_LAUNCHES_MAX;
use tally_contract::unit_profile::UnitProfile;
use tally_ipc::ClientRegion;
use tally_ipc::layout::{submission_flags, whole_because};
use tally_ipc::wait::now_ns;
use tally_preempt::cuda::{
    CuResult, EVENT_DISABLE_TIMING, NOT_READY, Ptr, STREAM_LEGACY, SUCCESS, driver,
};
use tally_preempt::launch::{Shape, Target};

/// Events: one before the first launch, and one behind each.
const EVENTS: usize = PROFILED_LAUNCHES_MAX + 1;
/// Of a unit's GPU time at most one part in so many, and [`UNCERTAIN_NS`], may be unknown: as of a best-effort
/// launch's.
const UNKNOWN_PART: u64 = 4;
/// A unit in which nothing happens for so long gives no profile, ns.
const FORSAKEN_NS: u64 = 1_000_000_000;

const NONE: u32 = 0;
/// Launches are measured.
const OPEN: u32 = 1;
/// The program has waited for them.
const WAITED: u32 = 2;
/// The unit gives no profile.
const DROPPED: u32 = 3;
/// A thread is about to open it.
const OPENING: u32 = 4;

/// What is known of an event's launch when it was made; the first one's is of no launch.
struct Made {
    event: AtomicUsize,
    issued_ns: AtomicU64,
    /// SMs that the launch fills; 0: unknown.
    sms: AtomicU32,
}

static STAGE: AtomicU32 = AtomicU32::new(NONE);
/// Only the poller goes back to [`NONE`], so what is of one unit stays until it has looked at it.
static SLOT: AtomicUsize = AtomicUsize::new(0);
/// Number of the first launch, and of the last one that was waited for.
static FIRST: AtomicU32 = AtomicU32::new(0);
static UNTIL: AtomicU32 = AtomicU32::new(0);
/// Launches of the whole program before the first one.
static LAUNCHES: AtomicU64 = AtomicU64::new(0);
/// Events recorded for the unit.
static RECORDED: AtomicUsize = AtomicUsize::new(0);
static MADE: [Made; EVENTS] = [const {
    Made { event: AtomicUsize::new(0), issued_ns: AtomicU64::new(0), sms: AtomicU32::new(0) }
}; EVENTS];
/// The context of all events; 0: there are none.
static CONTEXT: AtomicUsize = AtomicUsize::new(0);
/// Units that ended.
static ENDED: AtomicU64 = AtomicU64::new(0);
/// The core wants profiles.
static IS_ENABLED: AtomicBool = AtomicBool::new(false);
/// The next unit that begins is to be profiled.
static IS_WANTED: AtomicBool = AtomicBool::new(true);

/// Whether units are profiled from now on.
pub fn enable(is_wanted: bool) {
    IS_ENABLED.store(is_wanted, SeqCst);
}

/// Whether the poller has something to look at.
pub fn is_open() -> bool {
    STAGE.load(SeqCst) != NONE
}

/// Whether launches of a slot are measured.
fn is_of(index: usize) -> bool {
    STAGE.load(SeqCst) == OPEN && SLOT.load(SeqCst) == index
}

fn drop_open() {
    for stage in [OPENING, OPEN, WAITED] {
        let _ = STAGE.compare_exchange(stage, DROPPED, SeqCst, SeqCst);
    }
}

/// Whether an event in this stream could order streams that were not ordered: between the legacy stream and those that
/// wait for it, where another thread may put something in before the event.
fn orders_others(index: usize, stream: usize, context: usize) -> bool {
    match stream {
        STREAM_LEGACY => slots::has_blocking(context, |_| false),
        _ => SLOTS[index & 63].non_blocking.load(Relaxed) == 0 && slots::has_legacy(),
    }
}

/// Whether another stream has launches that nobody has waited for: the unit may have begun with those.
fn are_others_busy(client: &ClientRegion, index: usize) -> bool {
    client.activity.busy_streams.load(SeqCst) & !(1 << (index & 63)) != 0
}

/// The calling thread is about to make launch `number` of a slot, in `stream` (an explicit handle). `is_first`: it is
/// the first behind something that a wait may cover. Whether the launch is measured.
pub fn measures(
    client: &ClientRegion,
    index: usize,
    number: u32,
    is_first: bool,
    stream: usize,
) -> bool {
    if is_of(index) {
        return true;
    }
    is_first
        && IS_ENABLED.load(SeqCst)
        && IS_WANTED.load(SeqCst)
        && begin(client, index, number, stream)
}

fn begin(client: &ClientRegion, index: usize, number: u32, stream: usize) -> bool {
    let slot = &SLOTS[index & 63];
    let context = slot.context.load(Relaxed);
    if index == OVERFLOW
        || matches!(context, 0 | MANY_CONTEXTS)
        // Its context may end without a call that names it.
        || slot.green.load(Relaxed) != 0
        || orders_others(index, stream, context)
        || are_others_busy(client, index)
        || capture::is_active()
        || tools::whole_because() != whole_because::NOTHING
        || slot.word.snapshot().inside() != 1
        || STAGE.compare_exchange(NONE, OPENING, SeqCst, SeqCst).is_err()
    {
        return false;
    }
    let is_its_context = CONTEXT.compare_exchange(0, context, SeqCst, SeqCst).is_ok()
        || CONTEXT.load(SeqCst) == context;
    if !is_its_context || !IS_WANTED.swap(false, SeqCst) {
        // Unless a context that ends has dropped it.
        let _ = STAGE.compare_exchange(OPENING, NONE, SeqCst, SeqCst);
        return false;
    }
    SLOT.store(index, SeqCst);
    FIRST.store(number, SeqCst);
    LAUNCHES.store(client.counters.launches(), SeqCst);
    RECORDED.store(0, SeqCst);
    let is_recorded = record(0, stream, || 0);
    let to = if is_recorded { OPEN } else { DROPPED };
    let is_open = STAGE.compare_exchange(OPENING, to, SeqCst, SeqCst).is_ok() && is_recorded;
    poller::wake();
    is_open
}

/// Puts an event into a stream that the calling thread uses, and then asks how many SMs the launch before it fills.
fn record(at: usize, stream: usize, sms: impl FnOnce() -> u32) -> bool {
    let (d, context, made) = (driver(), CONTEXT.load(SeqCst), &MADE[at]);
    let issued_ns = now_ns();
    if made.event.load(Relaxed) == 0 {
        let mut event: Ptr = std::ptr::null_mut();
        let Some(create) = d.event_create else { return false };
        // SAFETY: a valid out-pointer; the context lives, for a launch is being made in it.
        let result = d.within(context, || unsafe { create(&mut event, EVENT_DISABLE_TIMING) });
        if result != Some(SUCCESS) {
            return false;
        }
        made.event.store(event as usize, Relaxed);
    }
    let event = made.event.load(Relaxed) as Ptr;
    // SAFETY: an event of ours and the stream of the program's, of one context.
    if d.event_record.is_none_or(|record| unsafe { record(event, stream as Ptr) } != SUCCESS) {
        return false;
    }
    made.issued_ns.store(issued_ns, Relaxed);
    made.sms.store(sms(), Relaxed);
    RECORDED.compare_exchange(at, at + 1, Release, Relaxed).is_ok()
}

/// What is asked of a launch that may be measured.
pub struct Measured<'a> {
    /// An explicit handle.
    pub stream: usize,
    pub shape: &'a dyn Fn() -> Shape,
    pub target: &'a dyn Fn() -> Target,
}

/// A launch that is measured was made, by the calling thread; its slot's word still counts it as being made.
pub fn launched(
    client: &ClientRegion,
    index: usize,
    number: u32,
    result: CuResult,
    measured: &Measured<'_>,
) {
    if !is_of(index) {
        return;
    }
    let at = number.wrapping_sub(FIRST.load(SeqCst)) as usize;
    let is_next = at < PROFILED_LAUNCHES_MAX && RECORDED.load(Acquire) == at + 1;
    let is_alone = SLOTS[index & 63].word.snapshot().inside() == 1;
    let can_record = result == SUCCESS
        && is_next
        && is_alone
        && !capture::is_active()
        && !orders_others(index, measured.stream, CONTEXT.load(SeqCst));
    let sms = || sms(client, &(measured.shape)(), measured.target);
    if !(can_record && record(at + 1, measured.stream, sms)) {
        drop_open();
    }
}

/// SMs that a launch fills; 0: unknown.
fn sms(client: &ClientRegion, shape: &Shape, target: impl FnOnce() -> Target) -> u32 {
    if shape.flags & submission_flags::GRAPH != 0 {
        return 0;
    }
    demand::learn(shape, target);
    let each = u64::from(demand::of(shape).blocks_per_sm);
    let blocks = shape.grid.iter().fold(1_u64, |all, n| all.saturating_mul(u64::from(*n)));
    let sm_count = u64::from(client.report.sm_count.load(Acquire));
    if each == 0 { 0 } else { blocks.div_ceil(each).min(sm_count) as u32 }
}

/// A launch of a slot is made in a way that cannot be measured, or its stream is gone.
pub fn lost(index: usize) {
    if is_of(index) {
        drop_open();
    }
}

/// The program has waited for a slot's launches up to `until`. `first`: the number of the first one that no wait before
/// covers, if a unit ended.
pub fn waited(client: &ClientRegion, index: usize, until: u32, first: Option<u32>) {
    if first.is_some() {
        let ended = ENDED.fetch_add(1, SeqCst) + 1;
        if UnitProfile::is_of(ended) {
            IS_WANTED.store(true, SeqCst);
        }
    }
    let begun = FIRST.load(SeqCst);
    if !is_of(index) || (until.wrapping_sub(begun) as i32) < 0 {
        return;
    }
    let made = SLOTS[index & 63].word.snapshot().sequence().wrapping_sub(begun).wrapping_add(1);
    let launches = client.counters.launches().wrapping_sub(LAUNCHES.load(SeqCst));
    UNTIL.store(until, SeqCst);
    // Another stream has launches of this unit, or it was profiled from its middle on.
    if first != Some(begun) || launches != u64::from(made) {
        return drop_open();
    }
    let _ = STAGE.compare_exchange(OPEN, WAITED, SeqCst, SeqCst);
}

/// What the poller has seen of a unit's events.
#[derive(Default)]
pub struct Look {
    /// The next event to ask for.
    next: usize,
    /// When the one before it was seen, and how much earlier it may have happened, ns.
    ended_ns: u64,
    off_ns: u64,
    /// When one was last found not to have happened, ns: nor had those behind it.
    looked_ns: u64,
    launches: Vec<(u64, u32)>,
    /// Of each launch, ns: by how much GPU time may be wrong where it began, and how much earlier it may have ended.
    unknown_ns: Vec<[u64; 2]>,
    gaps_ns: Vec<u64>,
}

impl Look {
    /// The event of a launch that was issued then was seen.
    fn saw(&mut self, issued_ns: u64, sms: u32, seen_ns: u64) {
        let off_ns = seen_ns.saturating_sub(self.looked_ns.max(issued_ns));
        let before = (self.ended_ns, self.off_ns);
        (self.ended_ns, self.off_ns) = (seen_ns, off_ns);
        self.next += 1;
        if self.next == 1 {
            return;
        }
        let took_ns = if before.0 > issued_ns {
            seen_ns - before.0
        } else {
            let took_ns = seen_ns.saturating_sub(issued_ns);
            took_ns.saturating_sub(LAUNCH_LATENCY_NS).max(took_ns / 4)
        };
        // What is before the first launch is no gap.
        let began_ns = if self.next == 2 {
            before.0.saturating_sub(issued_ns)
        } else {
            self.gaps_ns.push(seen_ns.saturating_sub(before.0).saturating_sub(took_ns));
            issued_ns.saturating_sub(before.0 - before.1)
        };
        self.launches.push((took_ns.max(1), sms));
        self.unknown_ns.push([began_ns.min(before.1), off_ns]);
    }

    /// Whether the GPU time of the first so many launches is known well enough.
    fn is_known(&self, launches: usize) -> bool {
        let busy_ns: u64 = self.launches.iter().take(launches).map(|(ns, _)| ns).sum();
        let unknown_ns = &self.unknown_ns[..launches.min(self.unknown_ns.len())];
        let began_ns: u64 = unknown_ns.iter().map(|[began_ns, _]| began_ns).sum();
        let ended_ns = unknown_ns.last().map_or(0, |[_, ended_ns]| *ended_ns);
        began_ns + ended_ns <= busy_ns / UNKNOWN_PART + UNCERTAIN_NS
    }

    /// Of the unit's launches, so many: some of the next unit may have been seen, too.
    fn profile(&mut self, launches: usize) -> UnitProfile {
        self.launches.truncate(launches);
        self.gaps_ns.truncate(launches - 1);
        UnitProfile::new(&self.launches, &mut self.gaps_ns)
    }

    /// Asks for a unit's events. By the poller only. When to look again, ns; `None`: there is no unit.
    pub fn look(&mut self, client: &ClientRegion) -> Option<u64> {
        loop {
            let stage = STAGE.load(SeqCst);
            let recorded = RECORDED.load(Acquire);
            let last = UNTIL.load(SeqCst).wrapping_sub(FIRST.load(SeqCst)) as usize + 1;
            match stage {
                NONE => return None,
                OPENING => return Some(0),
                DROPPED => return self.end(),
                WAITED if self.next > last => {
                    if self.is_known(last) {
                        client.marks.profile.publish(&self.profile(last));
                    }
                    return self.end();
                }
                _ => {}
            }
            let now = now_ns();
            if self.next >= recorded {
                // Of the last event: the next launch is looked at soon, wherever it comes.
                let idle_ns = now.saturating_sub(self.ended_ns);
                if self.next > 0 && idle_ns > FORSAKEN_NS {
                    drop_open();
                }
                return Some(if self.next == 0 { 0 } else { idle_ns / 16 });
            }
            let made = &MADE[self.next];
            let (event, issued_ns) = (made.event.load(Relaxed), made.issued_ns.load(Relaxed));
            let slot = &SLOTS[SLOT.load(SeqCst) & 63];
            let context = CONTEXT.load(SeqCst);
            let is_there = || {
                // A context that ends drops the unit first: the event may be gone with it.
                matches!(STAGE.load(SeqCst), OPEN | WAITED)
                    && matches!(slot.phase.load(SeqCst), LIVE | DRAINING)
                    && slot.context.load(SeqCst) == context
            };
            let is_done = asking::ask(is_there, || {
                let d = driver();
                // SAFETY: an event of ours, in a context that lives: see `asking::wait_out`.
                unsafe {
                    d.ctx_set.is_some_and(|set| set(context as Ptr) == SUCCESS)
                        && d.event_query.is_some_and(|query| query(event as Ptr) != NOT_READY)
                }
            });
            let now = now_ns();
            match is_done {
                None => drop_open(),
                Some(false) => {
                    let since_ns = now.saturating_sub(self.ended_ns.max(issued_ns));
                    self.looked_ns = now;
                    return Some(since_ns / 16);
                }
                Some(true) => self.saw(issued_ns, made.sms.load(Relaxed), now),
            }
        }
    }

    fn end(&mut self) -> Option<u64> {
        self.launches.clear();
        self.gaps_ns.clear();
        self.unknown_ns.clear();
        *self = Look {
            launches: std::mem::take(&mut self.launches),
            gaps_ns: std::mem::take(&mut self.gaps_ns),
            unknown_ns: std::mem::take(&mut self.unknown_ns),
            ..Look::default()
        };
        STAGE.store(NONE, SeqCst);
        None
    }
}

/// A context is about to be destroyed.
pub fn drop_open_in(context: usize) {
    if CONTEXT.load(SeqCst) == context {
        drop_open();
    }
}

/// A context is about to be destroyed, and nobody asks for its events any more. Should it live on, they are made anew.
pub fn forget_context(context: usize) {
    if CONTEXT.load(SeqCst) == context {
        MADE.iter().for_each(|made| made.event.store(0, SeqCst));
        CONTEXT.store(0, SeqCst);
    }
}

/// Only in a forked child.
pub fn reset() {
    STAGE.store(NONE, SeqCst);
    CONTEXT.store(0, SeqCst);
    MADE.iter().for_each(|made| made.event.store(0, SeqCst));
    ENDED.store(0, SeqCst);
    IS_WANTED.store(true, SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Event, then launches: when each was issued, last found under way, and seen done.
    fn looked(events: &[[u64; 3]]) -> Look {
        let mut look = Look::default();
        for &[issued_ns, looked_ns, seen_ns] in events {
            look.looked_ns = look.looked_ns.max(looked_ns);
            look.saw(issued_ns, 1, seen_ns);
        }
        look
    }

    #[test]
    fn a_launch_begins_when_the_one_before_it_ends_or_when_it_is_made() {
        // In nanoseconds: the second launch waits for the first; the third finds the stream idle.
        let look = looked(&[
            [1_000, 1_000, 2_000],
            [3_000, 40_000, 41_000],
            [4_000, 60_000, 61_000],
            [100_000, 130_000, 131_000],
        ]);
        let times: Vec<u64> = look.launches.iter().map(|(ns, _)| *ns).collect();
        assert_eq!(times, [38_000 - LAUNCH_LATENCY_NS, 20_000, 31_000 - LAUNCH_LATENCY_NS]);
        assert_eq!(look.gaps_ns, [0, 39_000 + LAUNCH_LATENCY_NS]);
        assert!(look.is_known(3));
    }

    #[test]
    fn launches_of_the_next_unit_are_not_the_units() {
        let mut look = looked(&[
            [1_000, 1_000, 2_000],
            [3_000, 40_000, 41_000],
            [4_000, 60_000, 61_000],
            // Made before the program's late wait for the two.
            [900_000, 990_000, 991_000],
        ]);
        assert!(look.is_known(2));
        let profile = look.profile(2);
        assert_eq!((profile.launches, profile.gaps), (2, 0));
        assert_eq!(profile.gpu_busy_ns, 58_000 - LAUNCH_LATENCY_NS);
    }

    #[test]
    fn an_end_that_was_seen_late_counts_where_the_gpu_may_have_been_idle() {
        const FIRST: [u64; 3] = [1_000, 1_000, 2_000];
        // A long launch whose end is seen late, and short ones that were made while it ran and are found to be over,
        // too.
        let mut events = vec![FIRST, [3_000, 2_500_000, 2_660_000]];
        events.extend((0..8).map(|n| [4_000 + n, 0, 2_660_000 + n]));
        let mut look = looked(&events);
        assert!(look.is_known(9));
        let profile = look.profile(9);
        // At least 1 ns each.
        assert_eq!(profile.gpu_busy_ns, 2_660_008 - 3_000 - LAUNCH_LATENCY_NS);
        // The next one was made while it ran, or perhaps when it was over.
        let late =
            |issued_ns| looked(&[FIRST, [3_000, 50_000, 210_000], [issued_ns, 299_000, 300_000]]);
        assert!(late(50_000).is_known(2));
        for issued_ns in [150_000, 200_000, 210_000, 250_000] {
            assert!(!late(issued_ns).is_known(2), "{issued_ns}");
        }
        // That a unit's last one was seen late is not made up for by the next unit's.
        assert!(!late(50_000).is_known(1));
        assert!(!looked(&[FIRST, [3_000, 50_000, 300_000], [4_000, 0, 300_100]]).is_known(2));
        // The first one may have begun long before the event in front of it was seen.
        assert!(!looked(&[[1_000, 0, 100_000], [3_000, 149_000, 150_000]]).is_known(1));
        assert!(looked(&[[1_000, 0, 3_500], [3_000, 149_000, 150_000]]).is_known(1));
    }
}
