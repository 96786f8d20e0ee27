//! Transformed launches under way: how soon they yield, and help for those that do not.
//!
//! Each part has an event before and one behind it. Only the flag's thread looks at them, and only while the
//! core asks to yield, or once a millisecond. The blocks of a stuck part ([`Progress`]) wait for others which
//! it did not run. Then the same kernel is launched once more beside it, over the same claim table, without the
//! flag. So every block runs once, the part ends, and the kernel is never transformed again.
//!
//! Kernels whose code lets their blocks wait are never launched in parts, so this is for kernels whose code
//! does not show it. Help is a launch, and calls such as `cuMemFree` hold launches back: they begin only when
//! no launch may need help any more ([`may_need_help`]). Help that is enqueued ahead of time, behind a wait for
//! a word, would avoid that, but it can share a hardware queue with the very launch that it is to help, and
//! block it for good.

use crate::cuda::{EVENT_DISABLE_TIMING, NOT_READY, Ptr, SUCCESS, driver};
use crate::host::{host, log};
use crate::issue::{Again, launch_again};
use crate::lock::Locked;
use crate::progress::Progress;
use crate::settings::rescue_ns;
use crate::{gate, kernels};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::{Duration, Instant};
pub use tally_contract::limits::LAUNCH_PARTS_MAX as PARTS_MAX;
use tally_contract::limits::{LAUNCHES_OPEN_MAX as OPEN_MAX, PARTS_OPEN_MAX};
use tally_ipc::layout::TURNAROUND_SLOTS;
use tally_ipc::{ClientRegion, ring, wait};
use tally_rewriter::{ControlBlock, TransformRefusal};

/// How long a launch waits for room before it goes whole.
const ROOM_WAIT_MAX: Duration = Duration::from_millis(5);
/// Pause between two looks for room.
const ROOM_NAP: Duration = Duration::from_micros(50);
/// In place of the event behind a launch that helps: it is being made.
const LAUNCHING: usize = usize::MAX;

/// Events of one launch: two a part, one where it begins, behind its gate, and one where
/// it ends.
pub type Events = Box<[usize; 2 * PARTS_MAX]>;

/// A transformed launch under way.
#[derive(Debug)]
pub struct Open {
    pub ticket: u64,
    /// Index in the kernel table.
    pub kernel: usize,
    pub slot: usize,
    /// Number of the launch in the slot.
    pub number: u32,
    pub events: Events,
    /// How far it has come.
    pub progress: Progress,
    /// The first part's epoch, doubled.
    pub epoch2: u32,
    /// How it is made again; `None` if it cannot be.
    pub again: Option<Again>,
    /// The launch has yielded before.
    pub launches_yielded: bool,
    /// The event behind the launch that helps, until it is done.
    pub helping: Option<usize>,
}

struct Table {
    open: Vec<Open>,
    free: Vec<Events>,
}

/// Held while events are looked at: see the module's documentation on who does.
static TABLE: Locked<Table> = Locked::new(Table { open: Vec::new(), free: Vec::new() });
static COUNT: AtomicUsize = AtomicUsize::new(0);
static PARTS: AtomicUsize = AtomicUsize::new(0);
/// A launch has waited for room in vain, and there was none since.
static IS_STALLED: AtomicBool = AtomicBool::new(false);

/// Whether any transformed launch is under way.
pub fn is_open() -> bool {
    COUNT.load(Acquire) != 0
}

/// Whether a launch under way may be stuck and is not helped yet: a call that keeps launches waiting until all has
/// ended must not begin.
pub fn may_need_help() -> bool {
    is_open()
        && TABLE.with(|t| {
            let may = |o: &Open| o.progress.may_be_stuck() || o.helping == Some(LAUNCHING);
            t.open.iter().any(may)
        })
}

/// Whether there is room for another launch in parts.
pub fn has_room() -> bool {
    PARTS.load(Acquire) <= PARTS_OPEN_MAX && COUNT.load(Acquire) < OPEN_MAX
}

/// The same. Waits a moment for it, unless that was in vain the last time:
/// a program that makes launches ahead of something which it only does later is held up once.
pub fn makes_room() -> bool {
    let start = Instant::now();
    let nap = || {
        let goes_on = start.elapsed() < ROOM_WAIT_MAX && !host().is_exiting();
        if goes_on {
            wait::nap(ROOM_NAP);
        }
        goes_on
    };
    makes_room_while(has_room, nap, &IS_STALLED)
}

/// Wait for room while `nap` says that it has waited.
fn makes_room_while(
    has_room: impl Fn() -> bool,
    mut nap: impl FnMut() -> bool,
    is_stalled: &AtomicBool,
) -> bool {
    loop {
        if has_room() {
            is_stalled.store(false, Relaxed);
            return true;
        }
        if is_stalled.load(Relaxed) || !nap() {
            is_stalled.store(true, Relaxed);
            return false;
        }
    }
}

/// Updates [`PARTS`] and [`COUNT`] after the table has changed.
fn count(open: &[Open]) {
    PARTS.store(open.iter().map(|o| o.progress.parts()).sum(), Release);
    COUNT.store(open.len(), Release);
}

/// Events for a launch of so many parts; `None` if too many are under way.
pub fn events(parts: usize) -> Option<Events> {
    let mut events = TABLE.with(|t| {
        if t.open.len() >= OPEN_MAX {
            return None;
        }
        Some(t.free.pop().unwrap_or_else(|| Box::new([0; 2 * PARTS_MAX])))
    })?;
    let create = driver().event_create?;
    for event in events[..2 * parts].iter_mut().filter(|e| **e == 0) {
        let mut made: Ptr = std::ptr::null_mut();
        // SAFETY: a valid out-pointer.
        if driver().relaxed(|| unsafe { create(&mut made, EVENT_DISABLE_TIMING) }) != SUCCESS {
            give_back(events);
            return None;
        }
        *event = made as usize;
    }
    Some(events)
}

/// Events that were not needed.
pub fn give_back(events: Events) {
    TABLE.with(|t| t.free.push(events));
}

/// Record an event of a launch in the program's stream.
pub(crate) fn record(events: &Events, at: usize, stream: Ptr) {
    if let Some(record) = driver().event_record {
        // SAFETY: an event of ours, the program's stream. If it fails, the event says
        // done at once, which only makes a measurement wrong.
        let _ = unsafe { record(events[at] as Ptr, stream) };
    }
}

/// A transformed launch was issued.
pub fn opened(open: Open) {
    TABLE.with(|t| {
        t.open.push(open);
        count(&t.open);
    });
    gate::launched();
}

fn is_over(client: &ClientRegion, open: &Open) -> bool {
    ring::is_done(client.completions[open.slot & 63].done.load(Acquire), open.number)
}

/// Look at all of them. `asked_ns`: they have been asked to yield since then. The
/// calling thread's context is theirs, and lives.
pub fn look(now_ns: u64, asked_ns: Option<u64>) {
    let Some(client) = host().client() else { return };
    let mut stuck = Vec::new();
    TABLE.with(|t| {
        let mut slots_seen = 0_u64;
        let mut at = 0;
        while at < t.open.len() {
            let open = &mut t.open[at];
            // Of a stream only the oldest can be running.
            let first = slots_seen & (1 << (open.slot & 63)) == 0;
            slots_seen |= 1 << (open.slot & 63);
            if first {
                stuck.extend(advance(client, open, now_ns, asked_ns));
            }
            if open.helping.is_some_and(|event| event != LAUNCHING && is_done(event)) {
                open.helping = None;
                gate::release();
            }
            let is_over = open.progress.is_over() || is_over(client, open);
            if is_over && open.helping.is_none() {
                let gone = t.open.remove(at);
                t.free.push(gone.events);
                // Now the next one of its stream is the oldest.
                slots_seen &= !(1 << (gone.slot & 63));
            } else {
                at += 1;
            }
        }
        count(&t.open);
    });
    // Without the lock, which launches take: the driver may keep this one waiting.
    for help in stuck {
        let (ticket, slot) = (help.ticket, help.slot);
        let helping = rescue(client, help);
        host().help_ends();
        TABLE.with(|t| {
            let found = t.open.iter_mut().find(|open| (open.ticket, open.slot) == (ticket, slot));
            if let Some(open) = found {
                open.helping = helping;
            }
        });
    }
}

/// A launch that is to be made once more, beside what is stuck.
struct Help {
    ticket: u64,
    slot: usize,
    again: Again,
    /// The event to be recorded behind the helping launch.
    event: usize,
}

fn is_done(event: usize) -> bool {
    // SAFETY: an event of ours, recorded. In a context in error nothing runs any more.
    driver().event_query.is_some_and(|f| unsafe { f(event as Ptr) } != NOT_READY)
}

fn advance(
    client: &ClientRegion,
    open: &mut Open,
    now_ns: u64,
    asked_ns: Option<u64>,
) -> Option<Help> {
    let (events, slot, epoch2) = (&open.events, open.slot, open.epoch2);
    // A launch without claims, slices, never says that it skipped anything.
    let notice = || client.gates.notices[slot].gpu.load(Acquire);
    let has_skipped = |part: usize| notice() == epoch2.wrapping_add(2 * part as u32);
    let is_done = |event: usize| is_done(events[event]);
    let found = open.progress.look(now_ns, asked_ns, rescue_ns(), is_done, has_skipped);
    if let Some((part, took_ns)) = found.ended {
        let skipped = has_skipped(part);
        launches_yielded(client, open, part, skipped, took_ns);
    }
    if !found.stuck {
        return None;
    }
    if !host().help_begins() {
        open.progress.put_off();
        return None;
    }
    kernels::refuse(open.kernel, TransformRefusal::BlocksWaited);
    client.counters.rescued.fetch_add(1, SeqCst);
    log!("kernel {}: its blocks wait for one another; it is run whole from now on", open.kernel);
    let Some(again) = open.again.take() else {
        host().help_ends();
        return None;
    };
    open.helping = Some(LAUNCHING);
    // The event before the first part has done its service.
    Some(Help { ticket: open.ticket, slot: open.slot, again, event: open.events[0] })
}

/// A part that was asked to yield has ended.
fn launches_yielded(
    client: &ClientRegion,
    open: &mut Open,
    part: usize,
    skipped: bool,
    took_ns: u64,
) {
    let all = &client.turnarounds;
    let count = all.count.load(Relaxed);
    let entry = &all.latest[(count % TURNAROUND_SLOTS as u64) as usize];
    entry.ticket.store(open.ticket, Relaxed);
    entry.ns.store(took_ns.max(1), Relaxed);
    all.count.store(count + 1, Release);
    let really =
        if open.progress.is_sliced() { open.progress.is_before_last(part) } else { skipped };
    if really && !open.launches_yielded {
        open.launches_yielded = true;
        client.counters.launches_yielded.fetch_add(1, Relaxed);
    }
}

/// Launch the rest beside what is stuck. Returns the event behind it.
fn rescue(client: &ClientRegion, help: Help) -> Option<usize> {
    let Help { mut again, event, .. } = help;
    let (_, never) = gate::flags();
    let control = ControlBlock {
        // The one behind the parts' is kept for this: what follows in the stream has
        // later ones still.
        epoch2: again.control.epoch2,
        flag: never,
        flag_mask: 0,
        notice: 0,
        lo: 0,
        hi: u32::MAX,
        ..again.control
    };
    let end = again.control_offset + control.bytes().len();
    again.parameters[again.control_offset..end].copy_from_slice(&control.bytes());
    let stream = gate::rescue_stream() as Ptr;
    // What is stuck ends as soon as the blocks that it waits for have run; what follows
    // it in its stream must wait for all of them. The gate stands between.
    gate::hold(client);
    let result = launch_again(&again, stream);
    let recorded = result == SUCCESS
        // SAFETY: an event and a stream of ours.
        && driver().event_record.is_some_and(|f| unsafe { f(event as Ptr, stream) } == SUCCESS);
    if recorded {
        return Some(event);
    }
    log!("the rescue launch failed: CUDA error {result}");
    gate::release();
    None
}

/// A kernel's forms are unloaded: its launches are not made again.
pub fn forget_kernel(index: usize) {
    TABLE.with(|t| {
        t.open.iter_mut().filter(|open| open.kernel == index).for_each(|open| open.again = None);
    });
}

/// The context is destroyed, and everything in it over.
pub fn forget() {
    TABLE.with(|t| {
        t.open.clear();
        t.free.clear();
        count(&t.open);
    });
}

/// Only in a forked child.
pub fn reset() {
    TABLE.reset(Table { open: Vec::new(), free: Vec::new() });
    PARTS.store(0, SeqCst);
    COUNT.store(0, SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Naps of a launch before it goes whole, at most.
    const NAPS_MAX: u32 = (ROOM_WAIT_MAX.as_micros() / ROOM_NAP.as_micros()) as u32;

    #[test]
    fn only_the_first_launch_of_a_stall_waits_for_room() {
        let (is_stalled, naps) = (AtomicBool::new(false), Cell::new(0));
        let launch = |room_after: u32| {
            naps.set(0);
            let nap = || {
                naps.set(naps.get() + 1);
                naps.get() <= NAPS_MAX
            };
            let made = makes_room_while(|| naps.get() >= room_after, nap, &is_stalled);
            (made, naps.get())
        };
        assert_eq!(launch(0), (true, 0));
        assert_eq!(launch(7), (true, 7), "room that comes in time is waited for");
        for stall in 0..3 {
            assert_eq!(launch(u32::MAX), (false, NAPS_MAX + 1), "stall {stall}");
            for _ in 0..1_000 {
                assert_eq!(launch(u32::MAX), (false, 0), "it goes whole at once");
            }
            assert_eq!(launch(0), (true, 0), "the stall is over");
        }
    }

    #[test]
    fn the_wait_for_room_ends_where_there_is_none() {
        assert_eq!(ROOM_WAIT_MAX, Duration::from_millis(5));
        PARTS.store(PARTS_OPEN_MAX + 1, SeqCst);
        assert!(!has_room() && !makes_room());
        assert!(IS_STALLED.load(SeqCst));
        PARTS.store(0, SeqCst);
        assert!(makes_room() && !IS_STALLED.load(SeqCst));
    }
}
