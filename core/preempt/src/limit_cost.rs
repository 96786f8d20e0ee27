//! What it costs a stream that a launch goes to another one, on some of the SMs: how long the GPU has nothing of the
//! program's stream to do, from when what is before the launch has ended to when the launch may start, by two timed
//! events.
//!
//! The first [`FIRST`] such launches are timed, and then one in [`EVERY`], none while another is open. The time of one
//! is read when the next is to be timed. If the GPU had ended all before the launch was made, that says nothing.

use crate::cuda::{NOT_READY, Ptr, SUCCESS, driver};
use std::ffi::c_uint;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicUsize};
use tally_ipc::ClientRegion;
use tally_ipc::layout::LIMIT_COST_SLOTS;

/// So many launches are timed at first.
const FIRST: u32 = 15;
/// Of later launches one in so many is timed.
const EVERY: u32 = 4;

/// There are no events.
const NONE: u32 = 0;
/// The events are free.
const FREE: u32 = 1;
/// A thread uses them.
const TAKEN: u32 = 2;
/// Both are in streams, and their times are not read yet.
const OPEN: u32 = 3;

static STATE: AtomicU32 = AtomicU32::new(NONE);
/// Launches that went to another stream.
static GONE: AtomicU32 = AtomicU32::new(0);
/// Behind what was before, and before the launch.
static EVENTS: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

fn take(from: u32) -> bool {
    STATE.compare_exchange(from, TAKEN, AcqRel, Acquire).is_ok()
}

fn leave(to: u32) {
    // Unless the events went meanwhile.
    let _ = STATE.compare_exchange(TAKEN, to, AcqRel, Acquire);
}

fn event(which: usize) -> Ptr {
    EVENTS[which].load(Acquire) as Ptr
}

/// Makes the events, in the current context. Without them nothing is timed.
pub fn make() {
    let Some(create) = driver().event_create else { return };
    for slot in &EVENTS {
        let mut event: Ptr = std::ptr::null_mut();
        // SAFETY: a valid out-pointer.
        if unsafe { create(&mut event, TIMED) } != SUCCESS {
            return destroy();
        }
        slot.store(event as usize, Release);
    }
    GONE.store(0, Relaxed);
    STATE.store(FREE, Release);
}

/// Default flags: an event that knows its time.
const TIMED: c_uint = 0;

/// Destroys the events, which nobody uses.
pub fn destroy() {
    let d = driver();
    for event in forget() {
        if let (Some(destroy), true) = (d.event_destroy, event != 0) {
            // SAFETY: an event of ours.
            d.relaxed(|| unsafe { destroy(event as Ptr) });
        }
    }
}

/// The events are gone, with their context or by fork.
pub fn forget() -> [usize; 2] {
    STATE.store(NONE, Release);
    [0, 1].map(|which| EVENTS[which].swap(0, AcqRel))
}

/// A launch that is timed. Dropped, it says nothing.
pub struct Timed(());

/// The next launch goes to another stream than `latest`, which has the work before it.
pub fn begin(client: &ClientRegion, latest: usize) -> Option<Timed> {
    let before = GONE.fetch_add(1, Relaxed);
    if before >= FIRST && !before.is_multiple_of(EVERY) {
        return None;
    }
    let was_open = take(OPEN);
    if was_open && !publish(client) {
        leave(OPEN);
        return None;
    }
    if !was_open && !take(FREE) {
        return None;
    }
    let timed = Timed(());
    record(0, latest).then_some(timed)
}

fn record(which: usize, stream: usize) -> bool {
    // SAFETY: an event of ours, and a stream that the caller launches into.
    driver().event_record.is_some_and(|f| unsafe { f(event(which), stream as Ptr) } == SUCCESS)
}

fn is_ended(which: usize) -> Option<bool> {
    let d = driver();
    let query = d.event_query?;
    // SAFETY: an event of ours.
    match d.relaxed(|| unsafe { query(event(which)) }) {
        SUCCESS => Some(true),
        NOT_READY => Some(false),
        _ => None,
    }
}

/// False: it has not ended.
fn publish(client: &ClientRegion) -> bool {
    let d = driver();
    match (is_ended(1), d.event_elapsed) {
        (Some(false), _) => return false,
        (Some(true), Some(elapsed)) => {
            let mut ms = 0_f32;
            // SAFETY: a valid out-pointer; events of ours.
            let asked = d.relaxed(|| unsafe { elapsed(&mut ms, event(0), event(1)) });
            if asked == SUCCESS && ms.is_finite() {
                let costs = &client.limit_costs;
                let count = costs.count.load(Relaxed);
                let slot = &costs.latest_ns[(count % LIMIT_COST_SLOTS as u64) as usize];
                slot.store((f64::from(ms) * 1e6).max(1.0) as u64, Relaxed);
                costs.count.store(count + 1, Release);
            }
        }
        _ => {}
    }
    true
}

impl Timed {
    /// The launch comes next into `limited`, which waits for what is before it.
    pub fn behind(self, limited: usize) -> Option<Self> {
        record(1, limited).then_some(self)
    }

    /// To be called once the launch was made.
    pub fn launched(self) {
        if is_ended(0) == Some(false) {
            leave(OPEN);
            std::mem::forget(self);
        }
    }
}

impl Drop for Timed {
    fn drop(&mut self) {
        leave(FREE);
    }
}
