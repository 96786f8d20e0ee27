//! Streams and their slots: which bit and which completion word belong to a
//! stream.
//!
//! Slots are found without locks (a hint by the handle's hash, else a scan of the
//! few in use) and given out under one (by [`slot_life`](crate::slot_life)). A slot's sequence goes on over
//! all its streams, so a stale word of an earlier one can never look finished.
//! The last slot is shared by every stream that finds no other free.
//!
//! Must never give a slot to another stream while its old one has work in flight.

use crate::activity::SlotWord;
use crate::state;
use crate::turn::Turn;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};
use tally_ipc::layout::STREAM_SLOTS;
use tally_preempt::cuda::{
    LAUNCH_ATTRIBUTE_ACCESS_WINDOW, LAUNCH_ATTRIBUTE_MEMORY_DOMAIN,
    LAUNCH_ATTRIBUTE_MEMORY_DOMAIN_MAP, Ptr, STREAM_LEGACY, STREAM_NON_BLOCKING, STREAM_PER_THREAD,
    SUCCESS, driver, is_default_domain_map,
};
use tally_preempt::lock::Lock;

/// The slot that streams without one of their own share.
pub const OVERFLOW: usize = STREAM_SLOTS - 1;
/// [`Slot::context`] of the overflow slot once streams of several contexts share it.
pub const MANY_CONTEXTS: usize = usize::MAX;

/// No stream has the slot.
pub const FREE: u32 = 0;
pub const LIVE: u32 = 1;
/// Its stream is destroyed, its work may not be done.
pub const DRAINING: u32 = 2;
/// Its context is being destroyed: the driver is not asked about it any more.
pub const GONE: u32 = 3;

/// What is kept for one stream, or for all that found no slot of their own.
#[derive(Debug)]
#[repr(align(128))]
pub struct Slot {
    pub word: SlotWord,
    /// Held over a gated launch: from its ticket to its event.
    pub turn: Turn,
    /// `FREE`, [`LIVE`], [`DRAINING`] or [`GONE`].
    pub phase: AtomicU32,
    /// The stream, for driver calls: its handle, or one of the two special ones.
    pub stream: AtomicUsize,
    pub context: AtomicUsize,
    /// CUDA ordinal of the context's device; -1 if unknown.
    pub device: AtomicI32,
    /// The thread's number for a per-thread stream, else 0.
    pub thread: AtomicU64,
    /// It does not synchronise with the legacy stream.
    pub non_blocking: AtomicU32,
    /// Its thread is to put an event behind what it has launched.
    pub mark_wanted: AtomicBool,
    /// Its stream has attributes that another stream would have to have, too.
    pub has_attributes: AtomicBool,
    /// The program's green context that its stream is in; 0: in none.
    pub green: AtomicUsize,
}

impl Slot {
    const fn new() -> Self {
        Slot {
            word: SlotWord::new(),
            turn: Turn::new(),
            phase: AtomicU32::new(FREE),
            stream: AtomicUsize::new(0),
            context: AtomicUsize::new(0),
            device: AtomicI32::new(-1),
            thread: AtomicU64::new(0),
            non_blocking: AtomicU32::new(0),
            mark_wanted: AtomicBool::new(false),
            has_attributes: AtomicBool::new(false),
            green: AtomicUsize::new(0),
        }
    }
}

/// Every stream slot of this process; the last one is shared by streams that find no other free.
pub static SLOTS: [Slot; STREAM_SLOTS] = [const { Slot::new() }; STREAM_SLOTS];
/// One more than the highest slot ever used, the overflow slot apart.
pub static USED: AtomicUsize = AtomicUsize::new(0);
/// Where a stream was found last, by its hash. Only a hint: the slot itself says
/// whose it is.
static HINTS: [AtomicU8; HINTS_LEN] = [const { AtomicU8::new(0) }; HINTS_LEN];
const HINTS_LEN: usize = 256;
/// Serialises giving and taking slots.
pub static TABLE: Lock = Lock::new();

/// A stream as told apart here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Handle for driver calls.
    pub stream: usize,
    /// The context of a default stream, else 0 (a handle says it).
    pub context: usize,
    /// The thread of a per-thread stream, else 0.
    pub thread: u64,
}

/// The stream handle that means the same to functions without per-thread forms.
#[inline]
pub fn explicit(stream: Ptr, per_thread: bool) -> usize {
    match stream as usize {
        0 if per_thread => STREAM_PER_THREAD,
        0 => STREAM_LEGACY,
        handle => handle,
    }
}

/// The key of a stream as passed by the calling thread.
pub fn key(stream: Ptr, per_thread: bool) -> Key {
    let stream = explicit(stream, per_thread);
    match stream {
        STREAM_LEGACY => Key { stream, context: driver().current_context(), thread: 0 },
        STREAM_PER_THREAD => {
            Key { stream, context: driver().current_context(), thread: state::thread_token() }
        }
        _ => Key { stream, context: 0, thread: 0 },
    }
}

/// Whether launches were seen in a legacy stream.
pub fn has_legacy() -> bool {
    in_use().any(|(_, slot)| slot.stream.load(Relaxed) == STREAM_LEGACY)
}

/// Whether launches were seen in a blocking stream of this context other than the legacy one.
pub fn has_blocking(context: usize, but: impl Fn(usize) -> bool) -> bool {
    SLOTS.iter().any(|slot| {
        slot.phase.load(Acquire) != FREE
            && slot.context.load(Relaxed) == context
            && slot.non_blocking.load(Relaxed) == 0
            && slot.stream.load(Relaxed) != STREAM_LEGACY
            && !but(slot.stream.load(Relaxed))
    })
}

/// The bit of a slot.
#[inline(always)]
pub const fn bit(slot: usize) -> u64 {
    1 << (slot as u32 & 63)
}

fn belongs(slot: &Slot, key: Key) -> bool {
    slot.phase.load(Acquire) == LIVE
        && slot.stream.load(Relaxed) == key.stream
        && (key.context == 0 || slot.context.load(Relaxed) == key.context)
        && slot.thread.load(Relaxed) == key.thread
}

fn hint(stream: usize) -> &'static AtomicU8 {
    // Handles are addresses: their low bits say little.
    &HINTS[((stream >> 4) ^ (stream >> 11) ^ stream) & (HINTS_LEN - 1)]
}

/// The slot of a stream, if its hint is right: the launch path's look-up.
#[inline(always)]
pub fn find_fast(stream: Ptr, per_thread: bool) -> Option<usize> {
    let handle = explicit(stream, per_thread);
    let index = hint(handle).load(Relaxed) as usize & 63;
    let slot = &SLOTS[index];
    // A per-thread stream needs the thread's number: not the fast way.
    if handle == STREAM_PER_THREAD
        || slot.phase.load(Acquire) != LIVE
        || slot.stream.load(Relaxed) != handle
        || index == OVERFLOW
    {
        return None;
    }
    if handle == STREAM_LEGACY && driver().current_context() != slot.context.load(Relaxed) {
        return None;
    }
    Some(index)
}

/// Let [`find_fast`] find it next time.
pub fn set_hint(key: Key, slot: usize) {
    hint(key.stream).store(slot as u8, Relaxed);
}

/// The slot of a stream that has one of its own.
pub fn find(key: Key) -> Option<usize> {
    SLOTS[..USED.load(Acquire).min(OVERFLOW)].iter().position(|slot| belongs(slot, key))
}

/// The program's green context that a stream is in; 0: in none.
pub fn green_of(stream: usize) -> usize {
    let mut green: Ptr = std::ptr::null_mut();
    // SAFETY: the stream that the program launches into now; a valid out-pointer.
    let is_told =
        driver().stream_green.is_some_and(|f| unsafe { f(stream as Ptr, &mut green) == SUCCESS });
    if is_told { green as usize } else { 0 }
}

/// Whether a stream has attributes that a launch in another stream would lose: a window of the second-level
/// cache, or a memory synchronisation domain.
pub fn has_attributes(stream: usize) -> bool {
    let d = driver();
    let is_set = |which, is_default: fn(&[u64; 8]) -> bool| {
        let mut value = [0_u64; 8];
        // SAFETY: as above.
        d.stream_attribute.is_some_and(|f| unsafe {
            f(stream as Ptr, which, &mut value) == SUCCESS && !is_default(&value)
        })
    };
    // An address and a size.
    is_set(LAUNCH_ATTRIBUTE_ACCESS_WINDOW, |v| v[1] == 0)
        || is_set(LAUNCH_ATTRIBUTE_MEMORY_DOMAIN, |v| v[0] as u32 == 0)
        || is_set(LAUNCH_ATTRIBUTE_MEMORY_DOMAIN_MAP, |v| is_default_domain_map(v[0]))
}

/// A stream was given attributes.
pub fn attributes_set(stream: Ptr, per_thread: bool) {
    if let Some(slot) = find(key(stream, per_thread)) {
        SLOTS[slot & 63].has_attributes.store(true, Relaxed);
    }
}

pub fn inspect(key: Key) -> (usize, i32, u32) {
    let driver = driver();
    let (mut context, mut device, mut flags) = (key.context, -1, 0);
    if context == 0 {
        context = context_of(key.stream);
        if let Some(f) = driver.stream_flags {
            // SAFETY: as above.
            let _ = unsafe { f(key.stream as Ptr, &mut flags) };
        }
    }
    if let Some(f) = driver.ctx_device {
        // SAFETY: a valid out-pointer; the context of a stream that the program uses now.
        let _ = driver.within(context, || unsafe { f(&mut device) });
    }
    (context, device, flags & STREAM_NON_BLOCKING)
}

/// The streams of these slots were not destroyed after all: they are live again.
pub fn reattach_all(slots: u64) {
    (0..OVERFLOW).filter(|index| slots & bit(*index) != 0).for_each(reattach);
}

/// Take a stream's slot away before the stream is destroyed. The slot waits in
/// [`DRAINING`] for its work.
pub fn detach(slot: usize) {
    let _held = TABLE.lock();
    SLOTS[slot & 63].phase.store(DRAINING, Release);
}

/// Give it back: the stream was not destroyed after all.
pub fn reattach(slot: usize) {
    let _held = TABLE.lock();
    SLOTS[slot & 63].phase.store(LIVE, Release);
}

/// A slot's work is done and its stream gone. Only a draining one is free after:
/// whoever comes second may find it another stream's already.
pub fn release(slot: usize) {
    let _held = TABLE.lock();
    let _ = SLOTS[slot & 63].phase.compare_exchange(DRAINING, FREE, SeqCst, Relaxed);
}

/// A launch of this slot was not waited for; of interest for the overflow slot only.
/// Slots in use, the overflow slot included.
pub fn in_use() -> impl Iterator<Item = (usize, &'static Slot)> {
    let used = USED.load(Acquire).min(OVERFLOW);
    (0..used)
        .chain(std::iter::once(OVERFLOW))
        .map(|i| (i, &SLOTS[i]))
        .filter(|(_, slot)| slot.phase.load(Acquire) != FREE)
}

/// Streams with slots; those that share one count as one.
pub fn used() -> u32 {
    in_use().count() as u32
}

/// Slots that [`close_context`] took away: bits of those that were [`LIVE`], and of those [`DRAINING`].
pub struct Closed([u64; 2]);

/// A context is about to be destroyed: the driver is not asked about its streams and events any more. Returns what
/// to put back if it is not destroyed after all.
pub fn close_context(context: usize) -> Closed {
    let _held = TABLE.lock();
    let mut closed = Closed([0; 2]);
    for (i, slot) in in_use().filter(|(_, slot)| slot.context.load(Relaxed) == context) {
        for (phase, bits) in [LIVE, DRAINING].into_iter().zip(&mut closed.0) {
            if slot.phase.compare_exchange(phase, GONE, SeqCst, Relaxed).is_ok() {
                *bits |= bit(i);
                break;
            }
        }
    }
    closed
}

/// The context was not destroyed after all: its slots are as they were.
pub fn reopen(closed: &Closed) {
    let _held = TABLE.lock();
    for (phase, bits) in [LIVE, DRAINING].into_iter().zip(closed.0) {
        for (_, slot) in SLOTS.iter().enumerate().filter(|(i, _)| bits & bit(*i) != 0) {
            let _ = slot.phase.compare_exchange(GONE, phase, SeqCst, Relaxed);
        }
    }
}

/// The context of a stream (an explicit handle) that the calling thread uses.
pub fn context_of(stream: usize) -> usize {
    let mut context: Ptr = std::ptr::null_mut();
    let is_told = driver().stream_ctx.is_some_and(|f| {
        // SAFETY: a stream that the program uses now; a valid out-pointer.
        stream > STREAM_PER_THREAD && unsafe { f(stream as Ptr, &mut context) } == SUCCESS
    });
    if is_told { context as usize } else { driver().current_context() }
}

/// Only in a forked child: none of the parent's streams exists here.
pub fn reset() {
    TABLE.reset();
    for slot in &SLOTS {
        slot.turn.reset();
        slot.phase.store(FREE, SeqCst);
        slot.word.reset();
    }
    USED.store(0, SeqCst);
}
