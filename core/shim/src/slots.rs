//! Streams and their slots: which bit and which completion word belong to a
//! stream.
//!
//! Slots are found without locks (a hint by the handle's hash, else a scan of the
//! few in use) and given out under one. A slot's sequence goes on over
//! all its streams, so a stale word of an earlier one can never look finished.
//! The last slot is shared by every stream that finds no other free.
//!
//! Must never give a slot to another stream while its old one has work in flight.

use crate::activity::SlotWord;
use crate::attendant;
use crate::cu::{Ptr, STREAM_LEGACY, STREAM_NON_BLOCKING, STREAM_PER_THREAD, SUCCESS, driver};
use crate::lock::Lock;
use crate::state;
use std::cell::Cell;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};
use tally_ipc::layout::STREAM_SLOTS;

/// The slot that streams without one of their own share.
pub const OVERFLOW: usize = STREAM_SLOTS - 1;
/// [`Slot::context`] of the overflow slot once streams of several contexts share it.
pub const MANY_CONTEXTS: usize = usize::MAX;

/// Not in use.
const FREE: u32 = 0;
/// A stream's.
const LIVE: u32 = 1;
/// Its stream is destroyed, its work may not be done.
pub const DRAINING: u32 = 2;

/// One stream's slot.
#[derive(Debug)]
#[repr(align(128))]
pub struct Slot {
    /// See [`crate::activity`].
    pub word: SlotWord,
    /// Held over a decided launch: from its ticket to its completion write.
    pub lock: Lock,
    /// `FREE`, `LIVE` or [`DRAINING`].
    pub phase: AtomicU32,
    /// The stream, for driver calls: its handle, or one of the two special ones.
    pub stream: AtomicUsize,
    /// Its context.
    pub context: AtomicUsize,
    /// Its context's device.
    pub device: AtomicI32,
    /// The thread's number for a per-thread stream, else 0.
    pub thread: AtomicU64,
    /// It does not synchronise with the legacy stream.
    pub non_blocking: AtomicU32,
    /// The launch that the last completion write on its way stands for.
    pub marked: AtomicU32,
    /// When the first launch was issued that no completion write stands for.
    pub unmarked_since_ns: AtomicU64,
}

impl Slot {
    const fn new() -> Self {
        Slot {
            word: SlotWord::new(),
            lock: Lock::new(),
            phase: AtomicU32::new(FREE),
            stream: AtomicUsize::new(0),
            context: AtomicUsize::new(0),
            device: AtomicI32::new(-1),
            thread: AtomicU64::new(0),
            non_blocking: AtomicU32::new(0),
            marked: AtomicU32::new(0),
            unmarked_since_ns: AtomicU64::new(0),
        }
    }
}

/// All slots of this process.
pub static SLOTS: [Slot; STREAM_SLOTS] = [const { Slot::new() }; STREAM_SLOTS];
/// One more than the highest slot ever used, the overflow slot apart.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Where a stream was found last, by its hash. Only a hint: the slot itself says
/// whose it is.
static HINTS: [AtomicU8; HINTS_LEN] = [const { AtomicU8::new(0) }; HINTS_LEN];
const HINTS_LEN: usize = 256;
/// See [`ran_ahead`].
static OVERFLOW_AHEAD: AtomicBool = AtomicBool::new(false);
/// Serialises giving and taking slots.
static TABLE: Lock = Lock::new();

/// A stream as told apart here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Handle for driver calls.
    pub stream: usize,
    /// The context of a default stream, else 0 (a handle says it).
    context: usize,
    /// The thread of a per-thread stream, else 0.
    thread: u64,
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

/// Whether launches were seen in a blocking stream of this context other than the legacy one.
pub fn has_blocking(context: usize) -> bool {
    SLOTS.iter().any(|slot| {
        slot.phase.load(Acquire) != FREE
            && slot.context.load(Relaxed) == context
            && slot.non_blocking.load(Relaxed) == 0
            && slot.stream.load(Relaxed) != STREAM_LEGACY
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

/// The slot of a stream; gives it one if it has none. [`OVERFLOW`] if none is free.
pub fn find_or_give(key: Key) -> usize {
    find(key).unwrap_or_else(|| give(key))
}

#[cold]
fn give(key: Key) -> usize {
    // Outside the lock: these call the driver.
    let (context, device, non_blocking) = inspect(key);
    crate::attach::report_device(device);
    let _held = TABLE.lock();
    if let Some(there) = find(key) {
        return there;
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
    let done = slot.word.snapshot().sequence();
    slot.marked.store(done, Relaxed);
    if let Some(client) = state::client() {
        crate::completion::seen_done(client, free, done);
    }
    if key.thread != 0 {
        // While a thread ends, its locals may be gone: the slot then stays.
        let _ = THREAD_END.try_with(|end| end.0.set(key.thread));
    }
    slot.phase.store(LIVE, Release);
    USED.fetch_max(free + 1, SeqCst);
    free
}

fn inspect(key: Key) -> (usize, i32, u32) {
    let driver = driver();
    let (mut context, mut device, mut flags) = (key.context, -1, 0);
    if context == 0 {
        let mut of_stream: Ptr = std::ptr::null_mut();
        context = match driver.stream_ctx {
            // SAFETY: the stream that the program launches into now.
            Some(f) if unsafe { f(key.stream as Ptr, &mut of_stream) } == SUCCESS => {
                of_stream as usize
            }
            _ => driver.current_context(),
        };
        if let Some(f) = driver.stream_flags {
            // SAFETY: as above.
            let _ = unsafe { f(key.stream as Ptr, &mut flags) };
        }
    }
    if let Some(f) = driver.ctx_device {
        // SAFETY: a valid out-pointer.
        let _ = unsafe { f(&mut device) };
    }
    (context, device, flags & STREAM_NON_BLOCKING)
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
pub fn ran_ahead(slot: usize) {
    if slot == OVERFLOW {
        OVERFLOW_AHEAD.store(true, SeqCst);
    }
}

/// Whether any launch of the overflow slot was ever not waited for.
pub fn overflow_ran_ahead() -> bool {
    OVERFLOW_AHEAD.load(SeqCst)
}

/// Slots in use, the overflow slot included.
pub fn in_use() -> impl Iterator<Item = (usize, &'static Slot)> {
    let used = USED.load(Acquire).min(OVERFLOW);
    (0..used)
        .chain(std::iter::once(OVERFLOW))
        .map(|i| (i, &SLOTS[i]))
        .filter(|(_, slot)| slot.phase.load(Acquire) != FREE)
}

/// Drop what `of` names: their contexts are destroyed and all their work is over.
pub fn drop_where(of: impl Fn(&Slot) -> bool) {
    let Some(client) = state::client() else { return };
    for (i, slot) in in_use() {
        if of(slot) {
            let word = &client.completions.words[i];
            word.host.store(slot.word.snapshot().sequence(), SeqCst);
            attendant::report_change(crate::activity::clear(&client.activity, bit(i)));
            detach(i);
            release(i);
        }
    }
}

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
            detach(i);
            attendant::nudge();
        }
    }
}

/// Only in a forked child: none of the parent's streams exists here.
pub fn reset() {
    TABLE.reset();
    for slot in &SLOTS {
        slot.lock.reset();
        slot.phase.store(FREE, SeqCst);
        slot.word.reset();
        slot.marked.store(0, SeqCst);
    }
    USED.store(0, SeqCst);
    OVERFLOW_AHEAD.store(false, SeqCst);
}
