//! Bodies of the calls that wait: what they cover is not busy any more.
//!
//! Each takes its snapshots before it calls the driver and uses them after a
//! success (see [`crate::activity`]). What they cover ends [units of work](units).
//! They never change what the program gets.
//!
//! | call | covers |
//! | --- | --- |
//! | stream synchronise, query | the stream, and what it has waited for of one other |
//! | event synchronise, query | the event's stream up to its record, and the same of one other |
//! | context synchronise | the context's streams |
//! | copy to host in the legacy stream | the context's blocking streams |
//! | copy to host in a per-thread stream | that stream |
//! | `cuMemcpy` | the same, if the destination is host memory (between devices it does not wait) |

use crate::activity::{self, Snapshot};
use crate::events::{self, Position};
use crate::linger::{self, Awaited as Lingers};
use crate::slots::{self, DRAINING, LIVE, OVERFLOW, SLOTS};
use crate::{asking, capture, completion, link, quiesce, state, streams, units};
use std::ffi::c_uint;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use tally_ipc::ClientRegion;
use tally_ipc::layout::STREAM_SLOTS;
use tally_preempt::cuda::{
    CuResult, MEMORY_HOST, POINTER_MEMORY_TYPE, Ptr, STREAM_PER_THREAD, SUCCESS, driver,
};
use tally_preempt::occupied_sms;

/// Slots of which a wait may say something.
fn of_interest(busy: u64) -> u64 {
    busy | units::pending() | occupied_sms::open()
}

/// What a slot had launched when this was seen is done.
fn ended((slot, seen): Position) {
    if seen.is_settled() && slot != OVERFLOW {
        occupied_sms::ended(slot, seen.sequence());
    }
}

/// Which slots a call will have covered, as they were before it: those [of interest](of_interest).
struct Covered {
    client: &'static ClientRegion,
    bits: u64,
    busy: u64,
    seen: [Snapshot; STREAM_SLOTS],
}

impl Covered {
    fn busy(which: impl Fn(usize) -> bool) -> Option<Self> {
        let client = state::client()?;
        let busy = client.activity.busy_streams.load(SeqCst);
        let mut covered =
            Covered { client, bits: 0, busy, seen: [Snapshot::settled_at(0); STREAM_SLOTS] };
        let mut left = of_interest(busy);
        while left != 0 {
            let slot = left.trailing_zeros() as usize & 63;
            left &= left - 1;
            if which(slot) {
                covered.bits |= slots::bit(slot);
                covered.seen[slot] = SLOTS[slot].word.snapshot();
            }
        }
        (covered.bits != 0).then_some(covered)
    }

    fn of_context(context: usize, blocking_only: bool) -> Option<Self> {
        if context == 0 {
            return None;
        }
        Self::busy(|i| {
            SLOTS[i].context.load(Relaxed) == context
                && !(blocking_only && (i == OVERFLOW || SLOTS[i].non_blocking.load(Relaxed) != 0))
        })
    }

    fn apply(&self) {
        let slots = (0..STREAM_SLOTS).filter(|slot| self.bits & slots::bit(*slot) != 0);
        let positions = slots.map(|slot| (slot, self.seen[slot]));
        units::waited(self.client, positions.clone(), false);
        positions.clone().for_each(ended);
        let is_busy = |(slot, _): &Position| self.busy & slots::bit(*slot) != 0;
        positions.filter(is_busy).for_each(|(slot, seen)| one(self.client, slot, seen));
    }
}

fn one(client: &ClientRegion, slot: usize, seen: Snapshot) {
    // Not for the overflow slot: waiting for one of its streams says nothing of the others.
    if seen.is_settled() && slot != OVERFLOW {
        completion::seen_done(client, slot, seen.sequence());
    }
    let change =
        activity::covered(&client.activity, &SLOTS[slot & 63].word, slots::bit(slot), seen);
    link::report_change(change);
    linger::after_wait(SLOTS[slot & 63].context.load(Relaxed));
}

/// The same where an event was waited for that the program had recorded behind the launch. By now it may stand for
/// something else, of which the shim does not learn: a graph or another process can record it anew. So of launches
/// behind which the shim has put events, those tell.
fn by_event(client: &ClientRegion, slot: usize, seen: Snapshot) {
    if completion::tracked() & slots::bit(slot) == 0 {
        return one(client, slot, seen);
    }
    let context = SLOTS[slot & 63].context.load(Relaxed);
    let is_there = || {
        matches!(SLOTS[slot & 63].phase.load(SeqCst), LIVE | DRAINING)
            && driver().current_context() == context
    };
    // Elsewhere the poller asks, soon.
    let pace = completion::Pace::SHARED;
    asking::ask(is_there, || {
        driver().relaxed(|| completion::poll_events(client, slot, false, pace))
    });
    linger::after_wait(context);
}

/// What a call covers that waits for one stream or event, as it was before it.
#[derive(Clone, Copy)]
struct Awaited {
    client: &'static ClientRegion,
    /// Of the stream that was waited for.
    stream: Option<Position>,
    /// Of those that an event stands behind.
    events: [Option<Position>; 2],
}

impl Awaited {
    fn of_stream(stream: Ptr, per_thread: bool) -> Option<Self> {
        let client = state::client()?;
        let busy = client.activity.busy_streams.load(SeqCst);
        let of_interest = of_interest(busy);
        if of_interest == 0 {
            return None;
        }
        let slot = slots::find(slots::key(stream, per_thread));
        let wanted = slot.filter(|slot| of_interest & slots::bit(*slot) != 0);
        let stream_at = wanted.map(|slot| (slot, SLOTS[slot].word.snapshot()));
        let joined = events::joined(slots::explicit(stream, per_thread));
        Some(Awaited { client, stream: stream_at, events: [joined, None] })
    }

    fn of_event(event: Ptr) -> Option<Self> {
        let client = state::client()?;
        let events = [events::lookup(event as usize), events::lookup_joined(event as usize)];
        (events != [None; 2]).then_some(Awaited { client, stream: None, events })
    }

    /// To be called once the driver's call has returned.
    fn apply(self) {
        let events = self.events.into_iter().flatten();
        units::waited(self.client, self.stream.into_iter().chain(events.clone()), true);
        self.stream.into_iter().for_each(ended);
        let busy = self.client.activity.busy_streams.load(SeqCst);
        let is_busy = |(slot, _): &Position| busy & slots::bit(*slot) != 0;
        let stream = self.stream.filter(is_busy);
        stream.into_iter().for_each(|(slot, seen)| one(self.client, slot, seen));
        events.filter(is_busy).for_each(|(slot, seen)| by_event(self.client, slot, seen));
    }
}

/// The stream's slot and its snapshot, if it is busy.
fn of_stream(stream: Ptr, per_thread: bool) -> Option<(&'static ClientRegion, usize, Snapshot)> {
    let client = state::client()?;
    let busy = client.activity.busy_streams.load(SeqCst);
    if busy == 0 {
        return None;
    }
    let slot = slots::find(slots::key(stream, per_thread))?;
    (busy & slots::bit(slot) != 0).then(|| (client, slot, SLOTS[slot].word.snapshot()))
}

/// `cuStreamSynchronize`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn stream_wait(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    per_thread: bool,
    stream: Ptr,
) -> CuResult {
    before_stream(stream, per_thread);
    // SAFETY: the caller's arguments.
    unsafe { self::stream(real, per_thread, stream) }
}

/// A wait for all of a stream comes next.
fn before_stream(stream: Ptr, per_thread: bool) {
    if linger::is_enabled()
        && let Some((_, slot, seen)) = of_stream(stream, per_thread)
    {
        let awaited = Lingers::Stream(slots::explicit(stream, per_thread));
        linger::before_wait(slot, seen.sequence(), awaited);
    }
}

/// `cuStreamQuery`, and `cuStreamSynchronize` behind [`stream_wait`].
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn stream(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    per_thread: bool,
    stream: Ptr,
) -> CuResult {
    quiesce::wait_until_open();
    let awaited = Awaited::of_stream(stream, per_thread);
    // Behind the snapshot: a launch that comes between is not in it.
    quiesce::join();
    // SAFETY: the caller's arguments.
    let result = unsafe { real(stream) };
    if let (SUCCESS, Some(awaited)) = (result, awaited) {
        awaited.apply();
    }
    result
}

/// `cuEventSynchronize`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn event_wait(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    per_thread: bool,
    event: Ptr,
) -> CuResult {
    if linger::is_enabled()
        && let Some(client) = state::client()
        && let Some((slot, seen)) = events::lookup(event as usize)
        && client.activity.busy_streams.load(SeqCst) & slots::bit(slot) != 0
    {
        linger::before_wait(slot, seen.sequence(), Lingers::Event(event as usize));
    }
    // SAFETY: the caller's arguments.
    unsafe { self::event(real, per_thread, event) }
}

/// `cuEventQuery`, and `cuEventSynchronize` behind [`event_wait`].
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn event(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    _per_thread: bool,
    event: Ptr,
) -> CuResult {
    let awaited = Awaited::of_event(event);
    // SAFETY: the caller's arguments.
    let result = unsafe { real(event) };
    if let (SUCCESS, Some(awaited)) = (result, awaited) {
        awaited.apply();
    }
    result
}

fn recorded(
    event: Ptr,
    stream: Ptr,
    per_thread: bool,
    real: impl FnOnce() -> CuResult,
) -> CuResult {
    let Some(_) = state::client() else { return real() };
    let handle = slots::explicit(stream, per_thread);
    if capture::is_active() && capture::is_capturing(handle) {
        events::forget(event as usize);
        return real();
    }
    let before = slots::find(slots::key(stream, per_thread)).map(|i| (i, SLOTS[i].word.snapshot()));
    // Between the record and its bookkeeping the old entry would be wrong.
    events::forget(event as usize);
    let result = real();
    if result != SUCCESS {
        return result;
    }
    if let Some((slot, seen)) = before.filter(|(_, seen)| seen.is_settled()) {
        events::record(event as usize, slot, seen.sequence());
        if units::are_told() {
            // A wait for the event covers no more than this.
            SLOTS[slot & 63].word.forget_note();
        }
    }
    if units::are_told() {
        events::record_joined(event as usize, handle);
    }
    result
}

/// `cuStreamWaitEvent`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn stream_joins(
    real: unsafe extern "C" fn(Ptr, Ptr, c_uint) -> CuResult,
    per_thread: bool,
    stream: Ptr,
    event: Ptr,
    flags: c_uint,
) -> CuResult {
    streams::put(per_thread, &[stream as usize]);
    // Before the call: it may be recorded anew while that lasts.
    let position = events::waited_for(event as usize);
    // SAFETY: the caller's arguments.
    let result = quiesce::while_open(|| unsafe { real(stream, event, flags) });
    let handle = slots::explicit(stream, per_thread);
    // A thread's own stream has the handle of all threads' own ones.
    if result == SUCCESS
        && units::are_told()
        && handle != STREAM_PER_THREAD
        && !(capture::is_active() && capture::is_capturing(handle))
    {
        position.into_iter().for_each(|position| events::join(handle, position));
    }
    result
}

/// `cuEventRecord`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn event_record(
    real: unsafe extern "C" fn(Ptr, Ptr) -> CuResult,
    per_thread: bool,
    event: Ptr,
    stream: Ptr,
) -> CuResult {
    streams::put(per_thread, &[stream as usize]);
    // SAFETY: the caller's arguments.
    recorded(event, stream, per_thread, || quiesce::while_open(|| unsafe { real(event, stream) }))
}

/// `cuEventDestroy`: its handle may be a new event's right after, which was never
/// recorded.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn event_destroy(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    _per_thread: bool,
    event: Ptr,
) -> CuResult {
    events::forget(event as usize);
    // SAFETY: the caller's arguments.
    unsafe { real(event) }
}

/// `cuEventRecordWithFlags`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn event_record_flags(
    real: unsafe extern "C" fn(Ptr, Ptr, c_uint) -> CuResult,
    per_thread: bool,
    event: Ptr,
    stream: Ptr,
    flags: c_uint,
) -> CuResult {
    streams::put(per_thread, &[stream as usize]);
    // SAFETY: the caller's arguments.
    let real = || unsafe { real(event, stream, flags) };
    recorded(event, stream, per_thread, || quiesce::while_open(real))
}

fn around(covered: Option<Covered>, real: impl FnOnce() -> CuResult) -> CuResult {
    let result = real();
    if let (SUCCESS, Some(covered)) = (result, covered) {
        covered.apply();
    }
    result
}

fn joined(real: impl FnOnce() -> CuResult) -> CuResult {
    quiesce::join();
    real()
}

fn current_context() -> usize {
    // Off, or idle: nothing to find out.
    match state::client() {
        Some(client) if of_interest(client.activity.busy_streams.load(SeqCst)) != 0 => {
            driver().current_context()
        }
        _ => 0,
    }
}

/// `cuCtxSynchronize`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn context(real: unsafe extern "C" fn() -> CuResult, _per_thread: bool) -> CuResult {
    quiesce::wait_until_open();
    // SAFETY: no arguments.
    around(Covered::of_context(current_context(), false), || joined(|| unsafe { real() }))
}

/// `cuCtxSynchronize_v2`, which names the context.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn context_given(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    _per_thread: bool,
    ctx: Ptr,
) -> CuResult {
    quiesce::wait_until_open();
    let context = if ctx.is_null() { current_context() } else { ctx as usize };
    // SAFETY: the caller's arguments.
    around(Covered::of_context(context, false), || joined(|| unsafe { real(ctx) }))
}

fn of_copy(per_thread: bool) -> Option<Covered> {
    if !per_thread {
        return Covered::of_context(current_context(), true);
    }
    let slot = slots::find(slots::key(std::ptr::null_mut(), true))?;
    Covered::busy(|i| i == slot)
}

/// `cuMemcpyDtoH_v2`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn copy_to_host(
    real: unsafe extern "C" fn(Ptr, u64, usize) -> CuResult,
    per_thread: bool,
    dst: Ptr,
    src: u64,
    bytes: usize,
) -> CuResult {
    let covered = if bytes == 0 { None } else { of_copy(per_thread) };
    if covered.is_some() {
        before_stream(std::ptr::null_mut(), per_thread);
    }
    // SAFETY: the caller's arguments.
    around(covered, || quiesce::while_open(|| unsafe { real(dst, src, bytes) }))
}

/// `cuMemcpyDtoHAsync_v2`: it waits for the stream if the memory is pageable, so programs that
/// read a result without pinned memory wait here and not at the synchronisation that follows.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn copy_to_host_async(
    real: unsafe extern "C" fn(Ptr, u64, usize, Ptr) -> CuResult,
    per_thread: bool,
    dst: Ptr,
    src: u64,
    bytes: usize,
    stream: Ptr,
) -> CuResult {
    streams::put(per_thread, &[stream as usize]);
    // Into pinned memory it does not wait: the wait comes later.
    if bytes != 0 && linger::is_enabled() && is_pageable(dst as u64) {
        before_stream(stream, per_thread);
    }
    // SAFETY: the caller's arguments.
    quiesce::while_open(|| unsafe { real(dst, src, bytes, stream) })
}

/// `cuMemcpyAtoH_v2`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn array_to_host(
    real: unsafe extern "C" fn(Ptr, Ptr, usize, usize) -> CuResult,
    per_thread: bool,
    dst: Ptr,
    src: Ptr,
    offset: usize,
    bytes: usize,
) -> CuResult {
    let covered = if bytes == 0 { None } else { of_copy(per_thread) };
    // SAFETY: the caller's arguments.
    around(covered, || quiesce::while_open(|| unsafe { real(dst, src, offset, bytes) }))
}

/// `cuMemcpy`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn copy_any(
    real: unsafe extern "C" fn(u64, u64, usize) -> CuResult,
    per_thread: bool,
    dst: u64,
    src: u64,
    bytes: usize,
) -> CuResult {
    let covered = if bytes == 0 { None } else { of_copy(per_thread) };
    // Asked only if it matters.
    let covered = covered.filter(|_| is_host(dst) && !is_host(src));
    // SAFETY: the caller's arguments.
    around(covered, || quiesce::while_open(|| unsafe { real(dst, src, bytes) }))
}

/// Host memory that the driver does not know.
fn is_pageable(address: u64) -> bool {
    let mut kind: c_uint = 0;
    // SAFETY: a valid out-pointer; the address is only looked up.
    driver().pointer_attribute.is_some_and(|f| unsafe {
        f((&raw mut kind).cast(), POINTER_MEMORY_TYPE, address)
            == tally_preempt::cuda::INVALID_VALUE
    })
}

fn is_host(address: u64) -> bool {
    let mut kind: c_uint = 0;
    let Some(f) = driver().pointer_attribute else { return false };
    // SAFETY: a valid out-pointer; the address is only looked up.
    let r = unsafe { f((&raw mut kind).cast(), POINTER_MEMORY_TYPE, address) };
    // The driver does not know pageable host memory.
    r == tally_preempt::cuda::INVALID_VALUE || (r == SUCCESS && kind == MEMORY_HOST)
}
