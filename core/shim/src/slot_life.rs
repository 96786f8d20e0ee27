//! Giving slots to streams, and the ends of streams: the last chances to learn when their work is done.

use crate::slots::{
    FREE, GONE, Key, LIVE, MANY_CONTEXTS, OVERFLOW, SLOTS, TABLE, USED, bit, detach, find,
    green_of, has_attributes, in_use, inspect, release,
};
use crate::{
    activity, capture, completion, device, link, poller, quiesce, records, state, streams, units,
};
use std::cell::Cell;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::time::Duration;
use tally_ipc::ClientRegion;
use tally_preempt::cuda::{CuResult, STREAM_LEGACY, STREAM_PER_THREAD, driver};
use tally_preempt::occupied_sms;

/// Gives a slot to a stream that has none. [`OVERFLOW`] if none is free.
#[cold]
pub fn give(key: Key) -> usize {
    // Outside the lock: these call the driver.
    let (context, device, non_blocking) = inspect(key);
    device::report(device);
    let _held = TABLE.lock();
    if let Some(there) = find(key) {
        return there;
    }
    if non_blocking == 0 && key.stream != STREAM_LEGACY {
        streams::note_blocking();
    }
    let Some(free) = SLOTS[..OVERFLOW].iter().position(|s| s.phase.load(Acquire) == FREE) else {
        let slot = &SLOTS[OVERFLOW];
        let before = slot.context.load(Relaxed);
        if before != context {
            let mixed = slot.phase.load(Relaxed) == LIVE;
            slot.context.store(if mixed { MANY_CONTEXTS } else { context }, Relaxed);
        }
        slot.device.store(device, Relaxed);
        slot.phase.store(LIVE, Release);
        return OVERFLOW;
    };
    let slot = &SLOTS[free];
    slot.stream.store(key.stream, Relaxed);
    slot.context.store(context, Relaxed);
    slot.device.store(device, Relaxed);
    slot.thread.store(key.thread, Relaxed);
    slot.non_blocking.store(non_blocking, Relaxed);
    // A free slot's work is done: say so, as a write does that has arrived.
    if let Some(client) = state::client() {
        completion::begin(client, free, slot.word.snapshot().sequence());
        units::forget(client, free);
    }
    slot.mark_wanted.store(false, Relaxed);
    slot.word.forget_note();
    let green = green_of(key.stream);
    slot.green.store(green, Relaxed);
    slot.has_attributes.store(green != 0 || has_attributes(key.stream), Relaxed);
    if key.thread != 0 {
        // While a thread ends, its locals may be gone: the slot then stays.
        let _ = THREAD_END.try_with(|end| end.0.set(key.thread));
    }
    slot.phase.store(LIVE, Release);
    USED.fetch_max(free + 1, SeqCst);
    free
}

/// Put an event behind what was launched in a slot's stream, which is about to end: the last chance to learn when that
/// is done.
pub fn mark_last(client: &ClientRegion, index: usize, stream: usize) {
    let slot = &SLOTS[index & 63];
    let busy = client.activity.busy_streams.load(SeqCst) & bit(index) != 0;
    if busy
        && !(capture::is_active() && capture::is_capturing(stream))
        && let Some(_held) = slot.turn.try_enter()
    {
        completion::mark(index, slot, stream);
    }
}

/// A green context is about to be destroyed: take the slots of its streams away. Returns them as bits.
pub fn detach_green(client: &ClientRegion, green: usize) -> u64 {
    let mut detached = 0;
    for (index, slot) in in_use().filter(|(index, _)| *index != OVERFLOW) {
        let stream = slot.stream.load(Relaxed);
        if slot.green.load(Relaxed) == green && slot.phase.load(Acquire) == LIVE {
            // Default streams go with its context.
            if stream > STREAM_PER_THREAD {
                mark_last(client, index, stream);
            }
            detach(index);
            detached |= bit(index);
        }
    }
    poller::probe();
    detached
}

/// A context is destroyed, and all work in it over.
pub fn drop_context(context: usize) {
    let Some(client) = state::client() else { return };
    for (i, slot) in in_use() {
        // Others are of a new context with its handle.
        if slot.context.load(Relaxed) == context && slot.phase.load(SeqCst) == GONE {
            completion::seen_done(client, i, slot.word.snapshot().sequence());
            occupied_sms::ended(i, slot.word.snapshot().sequence());
            units::forget(client, i);
            link::report_change(activity::clear(&client.activity, &slot.word, bit(i)));
            detach(i);
            release(i);
        }
    }
}

/// How long the end of a thread waits for others to leave the driver.
const MARK_WAIT_MAX: Duration = Duration::from_micros(100);

struct ThreadEnd(Cell<u64>);

impl Drop for ThreadEnd {
    fn drop(&mut self) {
        thread_ended(self.0.get());
    }
}

thread_local! {
    /// Only touched by threads that use their per-thread stream.
    static THREAD_END: ThreadEnd = const { ThreadEnd(Cell::new(0)) };
}

/// A thread with per-thread streams ends: its slots drain.
fn thread_ended(token: u64) {
    for (i, slot) in in_use() {
        if slot.thread.load(Relaxed) == token && slot.phase.load(Acquire) == LIVE {
            // The last chance to learn when its work is done.
            // Not while another thread is in a call that keeps this waiting: what that waits for may wait for
            // the thread's end.
            if driver().current_context() == slot.context.load(Relaxed) {
                let mark = || {
                    completion::mark(i, slot, STREAM_PER_THREAD);
                    Some(())
                };
                let _ = quiesce::alone_outside(MARK_WAIT_MAX, mark);
            }
            detach(i);
            poller::probe();
        }
    }
}

/// Launch into the calling thread's own default stream, and put an event behind that if one is wanted. Only if nothing
/// came between ([`records`]): else behind the next launch. Within [`quiesce::while_open`](crate::quiesce::while_open).
#[inline]
pub fn mark_behind(index: usize, launch: impl FnOnce() -> CuResult) -> CuResult {
    let slot = &SLOTS[index & 63];
    let since = records::enqueued();
    let result = launch();
    if slot.mark_wanted.load(Relaxed) && slot.mark_wanted.swap(false, SeqCst) {
        let mark = || {
            completion::mark(index, slot, STREAM_PER_THREAD);
            Some(())
        };
        if records::undisturbed(since, mark).is_none() {
            slot.mark_wanted.store(true, Relaxed);
        }
    }
    result
}
