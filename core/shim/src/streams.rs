//! The streams that a program creates, and how many hardware queues it has for them.
//!
//! Streams beyond the number of queues (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 by default) share one, and what
//! waits in a queue holds up all behind it. With [`DYNAMIC_MIN`] queues or more the driver gives new work a queue
//! that is free, so while there are no more streams with work than queues nobody is held up. With fewer, streams
//! are given queues in turn when they are made, so that any two may share one. Streams of all priorities share the
//! queues, those of the shim's too (measured: `bench/gpu`, `streams`).

use crate::handles::Handles;
use crate::{greens, quiesce, slots, state};
use std::cell::Cell;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use tally_ipc::layout::STREAM_SLOTS;
use tally_preempt::cuda::{
    CuResult, Ptr, STREAM_LEGACY, STREAM_NON_BLOCKING, STREAM_PER_THREAD, SUCCESS, driver,
};
use tally_preempt::lock::Locked;

/// Hardware queues of a process that does not say how many it wants.
const QUEUES_DEFAULT: u32 = 8;
/// Most hardware queues that the driver takes.
const QUEUES_MAX: u32 = 32;
/// From so many on, work is given a queue that is free.
const DYNAMIC_MIN: u32 = 8;
/// Created streams that are remembered; more are only counted.
const CREATED_MAX: usize = 4_096;

/// Hardware queues; 0: not looked at yet.
static QUEUES: AtomicU32 = AtomicU32::new(0);

static ATTACHED: AtomicBool = AtomicBool::new(false);

/// A stream that the program has created.
#[derive(Clone, Copy)]
struct Stream {
    handle: usize,
    context: usize,
    /// The green context whose it is; 0: of none.
    green: usize,
    /// Something was put into it, not counting launches, which show in its slot.
    is_used: bool,
}

struct Created {
    /// Streams that do not wait for the legacy stream.
    non_blocking: Vec<Stream>,
    /// Streams that wait for the legacy stream, and it for them.
    blocking: Vec<Stream>,
    /// More streams were created than are remembered.
    is_more: bool,
}

static CREATED: Locked<Created> =
    Locked::new(Created { non_blocking: Vec::new(), blocking: Vec::new(), is_more: false });

/// Created streams into which nothing was put yet; written while [`CREATED`] is held.
static UNUSED: Handles<{ 2 * CREATED_MAX }> = Handles::new();
static UNUSED_COUNT: AtomicUsize = AtomicUsize::new(0);
static USED_COUNT: AtomicUsize = AtomicUsize::new(0);
/// There is, or was, a stream that waits for the legacy one.
static HAS_BLOCKING: AtomicBool = AtomicBool::new(false);
/// Threads that have called functions of which a null stream is the thread's own.
static PER_THREAD: AtomicU32 = AtomicU32::new(0);

/// Whether the thread is counted in [`PER_THREAD`], until it ends.
struct PerThread(Cell<bool>);

impl Drop for PerThread {
    fn drop(&mut self) {
        if self.0.get() {
            PER_THREAD.fetch_sub(1, Relaxed);
        }
    }
}

thread_local! {
    static IS_PER_THREAD: PerThread = const { PerThread(Cell::new(false)) };
}

/// A call puts something into a stream, which is one of its arguments.
#[inline]
pub fn put(per_thread: bool, arguments: &[usize]) {
    if per_thread {
        // While a thread ends, its locals may be gone.
        let is_first = IS_PER_THREAD.try_with(|counted| !counted.0.replace(true));
        if is_first == Ok(true) {
            PER_THREAD.fetch_add(1, Relaxed);
        }
    }
    if UNUSED_COUNT.load(Relaxed) != 0 {
        for argument in arguments.iter().filter(|a| UNUSED.get(**a).is_some()) {
            use_first(*argument);
        }
    }
}

#[cold]
fn use_first(handle: usize) {
    CREATED.with(|all| {
        not_unused(handle);
        let mut mine = all.non_blocking.iter_mut().chain(&mut all.blocking);
        if let Some(stream) = mine.find(|s| s.handle == handle && !s.is_used) {
            stream.is_used = true;
            USED_COUNT.fetch_add(1, SeqCst);
        }
    });
}

/// Takes a stream out of [`UNUSED`]; called by whoever holds [`CREATED`].
fn not_unused(handle: usize) {
    if UNUSED.get(handle).is_some() {
        UNUSED.remove(handle);
        UNUSED_COUNT.fetch_sub(1, SeqCst);
    }
}

/// Streams of a context that may have work although nothing was launched in them: they have no slots. The legacy stream
/// is counted in any case, and so is that of each thread that may have used its own.
pub fn used_without_slot(context: usize) -> u32 {
    let mut with_slot = [0; STREAM_SLOTS];
    let (mut count, mut own) = (0, 0);
    for (_, slot) in slots::in_use() {
        with_slot[count] = slot.stream.load(Relaxed);
        own += u32::from(with_slot[count] == STREAM_PER_THREAD);
        count += 1;
    }
    let with_slot = &with_slot[..count];
    let default = u32::from(!with_slot.contains(&STREAM_LEGACY))
        + PER_THREAD.load(Relaxed).saturating_sub(own);
    if USED_COUNT.load(Relaxed) == 0 {
        return default;
    }
    CREATED.with(|all| {
        let mine = all.non_blocking.iter().chain(&all.blocking);
        let has_work =
            |s: &&Stream| s.is_used && s.context == context && !with_slot.contains(&s.handle);
        default + mine.filter(has_work).count() as u32
    })
}

/// Hardware queues that this process has.
pub fn queues() -> u32 {
    let known = QUEUES.load(Relaxed);
    if known != 0 {
        return known;
    }
    let told = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
    let told = told.and_then(|n| n.trim().parse::<u32>().ok()).filter(|n| *n > 0);
    let queues = told.unwrap_or(QUEUES_DEFAULT).min(QUEUES_MAX);
    QUEUES.store(queues, Relaxed);
    queues
}

/// Whether work is given a queue that is free, if there is one: else any two streams may share one.
pub fn are_queues_chosen() -> bool {
    queues() >= DYNAMIC_MIN
}

/// Whether so many streams more than the program's may have work without holding anybody up.
pub fn has_queues_for(more: u32) -> bool {
    are_queues_chosen() && slots::used().saturating_add(more) <= queues()
}

/// Whether a context may have a blocking stream other than the legacy one: what comes into the legacy
/// stream would order that.
pub fn may_have_blocking(context: usize) -> bool {
    let was_made =
        |all: &mut Created| all.is_more || all.blocking.iter().any(|s| s.context == context);
    slots::has_blocking(context, |_| false) || CREATED.with(was_made)
}

/// Whether what the shim puts into a stream may wait for other streams' work, or they for it: between the legacy stream
/// and those that wait for it.
pub fn orders(stream: usize, is_non_blocking: bool) -> bool {
    !is_non_blocking && (stream != STREAM_LEGACY || HAS_BLOCKING.load(Relaxed))
}

/// A stream is used that waits for the legacy one.
pub fn note_blocking() {
    HAS_BLOCKING.store(true, Relaxed);
}

/// Those streams, to be asked by [`exists`] before each use. `None`: not all are known.
pub fn blocking(context: usize) -> Option<Vec<usize>> {
    let known = CREATED.with(|all| {
        let mine = all.blocking.iter().filter(|s| s.context == context);
        (!all.is_more).then(|| mine.map(|s| s.handle).collect::<Vec<_>>())
    })?;
    (!slots::has_blocking(context, |stream| known.contains(&stream))).then_some(known)
}

/// Streams of a context that do not wait for the legacy stream: each must be asked whether it is idle.
/// `None`: not all are known.
pub fn non_blocking(context: usize) -> Option<Vec<usize>> {
    CREATED.with(|all| {
        let mine = all.non_blocking.iter().filter(|s| s.context == context);
        (!all.is_more).then(|| mine.map(|s| s.handle).collect())
    })
}

/// A stream was created: in this green context, or if 0 in the calling thread's context.
fn created(result: CuResult, stream: *mut Ptr, flags: c_uint, green: usize) -> CuResult {
    if flags & STREAM_NON_BLOCKING == 0 {
        note_blocking();
    }
    if result != SUCCESS || stream.is_null() || state::client().is_none() {
        return result;
    }
    // SAFETY: the driver has just written it.
    let handle = unsafe { *stream } as usize;
    let current = driver().current_context();
    let green = if green == 0 { greens::of_context(current) } else { green };
    // A green context's streams are of the primary context, whatever is current.
    let context = if green == 0 { current } else { slots::context_of(handle) };
    CREATED.with(|all| {
        let of_kind = match flags & STREAM_NON_BLOCKING {
            0 => &mut all.blocking,
            _ => &mut all.non_blocking,
        };
        if of_kind.len() < CREATED_MAX {
            of_kind.push(Stream { handle, context, green, is_used: false });
            if UNUSED.insert(handle, 1) {
                UNUSED_COUNT.fetch_add(1, SeqCst);
            } else if let Some(made) = of_kind.last_mut() {
                made.is_used = true;
                USED_COUNT.fetch_add(1, SeqCst);
            }
        } else {
            all.is_more = true;
        }
    });
    result
}

/// Whether a stream that was seen to be made is still there.
pub fn exists(stream: usize) -> bool {
    CREATED.with(|all| all.non_blocking.iter().chain(&all.blocking).any(|s| s.handle == stream))
}

/// Streams that were taken: those that do not wait for the legacy stream, and those that do.
pub struct Taken([Vec<Stream>; 2]);

impl Taken {
    pub fn handles(&self) -> Vec<usize> {
        self.0.iter().flatten().map(|stream| stream.handle).collect()
    }
}

fn take(are_taken: impl Fn(&Stream) -> bool) -> Taken {
    CREATED.with(|all| {
        let take = |streams: &mut Vec<Stream>| {
            streams.extract_if(.., |stream| are_taken(stream)).collect::<Vec<_>>()
        };
        let taken = [take(&mut all.non_blocking), take(&mut all.blocking)];
        for stream in taken.iter().flatten() {
            not_unused(stream.handle);
            USED_COUNT.fetch_sub(usize::from(stream.is_used), SeqCst);
        }
        Taken(taken)
    })
}

/// A stream is about to be destroyed.
pub fn take_stream(stream: usize) -> Taken {
    take(|s| s.handle == stream)
}

/// A context is about to be destroyed, and its streams. Before it is: another thread may get a context of the same
/// handle, and make streams in it, as soon as it is gone.
pub fn take_context(context: usize) -> Taken {
    take(|s| s.context == context)
}

/// A green context is about to be destroyed: its streams may not be asked for any more.
pub fn take_green(green: usize) -> Taken {
    take(|s| s.green == green && green != 0)
}

/// What was taken was not destroyed after all: it is remembered again, as used.
pub fn put_back(Taken([mut non_blocking, mut blocking]): Taken) {
    USED_COUNT.fetch_add(non_blocking.len() + blocking.len(), SeqCst);
    non_blocking.iter_mut().chain(&mut blocking).for_each(|stream| stream.is_used = true);
    CREATED.with(|all| {
        all.non_blocking.extend(non_blocking);
        all.blocking.extend(blocking);
    });
}

/// `cuStreamCreate`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn create(
    real: unsafe extern "C" fn(*mut Ptr, c_uint) -> CuResult,
    _per_thread: bool,
    stream: *mut Ptr,
    flags: c_uint,
) -> CuResult {
    // SAFETY: the caller's arguments.
    created(unsafe { real(stream, flags) }, stream, flags, 0)
}

/// `cuStreamCreateWithPriority`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn create_with_priority(
    real: unsafe extern "C" fn(*mut Ptr, c_uint, c_int) -> CuResult,
    _per_thread: bool,
    stream: *mut Ptr,
    flags: c_uint,
    priority: c_int,
) -> CuResult {
    // SAFETY: the caller's arguments.
    created(unsafe { real(stream, flags, priority) }, stream, flags, 0)
}

/// `cuGreenCtxStreamCreate`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn create_in_green(
    real: unsafe extern "C" fn(*mut Ptr, Ptr, c_uint, c_int) -> CuResult,
    _per_thread: bool,
    stream: *mut Ptr,
    green: Ptr,
    flags: c_uint,
    priority: c_int,
) -> CuResult {
    // SAFETY: the caller's arguments.
    created(unsafe { real(stream, green, flags, priority) }, stream, flags, green as usize)
}

/// `cuStreamSetAttribute`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn set_attribute(
    real: unsafe extern "C" fn(Ptr, usize, usize) -> CuResult,
    per_thread: bool,
    stream: Ptr,
    a: usize,
    b: usize,
) -> CuResult {
    slots::attributes_set(stream, per_thread);
    // SAFETY: the caller's arguments.
    unsafe { real(stream, a, b) }
}

/// `cuStreamCopyAttributes`: its first argument is the stream that gets them.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn copy_attributes(
    real: unsafe extern "C" fn(Ptr, usize) -> CuResult,
    per_thread: bool,
    stream: Ptr,
    a: usize,
) -> CuResult {
    slots::attributes_set(stream, per_thread);
    // SAFETY: the caller's arguments.
    unsafe { real(stream, a) }
}

/// `cuStreamAttachMemAsync`: memory that only this stream may use.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn attach_memory(
    real: unsafe extern "C" fn(Ptr, usize, usize, usize) -> CuResult,
    _per_thread: bool,
    stream: Ptr,
    a: usize,
    b: usize,
    c: usize,
) -> CuResult {
    ATTACHED.store(true, Relaxed);
    quiesce::join();
    // SAFETY: the caller's arguments.
    unsafe { real(stream, a, b, c) }
}

/// Whether there may be memory that only one stream may use.
pub fn is_memory_attached() -> bool {
    ATTACHED.load(Relaxed)
}

/// As if the program had created a stream.
#[cfg(test)]
pub fn create_for_a_test(handle: usize, context: usize) {
    let stream = Stream { handle, context, green: 0, is_used: false };
    CREATED.with(|all| all.non_blocking.push(stream));
}

/// Only in a forked child.
pub fn reset() {
    CREATED.reset(Created { non_blocking: Vec::new(), blocking: Vec::new(), is_more: false });
    UNUSED.retain(|_| false);
    UNUSED_COUNT.store(0, SeqCst);
    PER_THREAD.store(0, SeqCst);
    USED_COUNT.store(0, SeqCst);
    QUEUES.store(0, SeqCst);
    ATTACHED.store(false, SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_with_a_default_stream_of_its_own_counts_until_it_ends() {
        fn counted() -> u32 {
            PER_THREAD.load(SeqCst)
        }
        fn count_twice() -> u32 {
            put(true, &[]);
            put(true, &[]);
            counted()
        }
        put(false, &[]);
        assert_eq!(counted(), 0);
        for _ in 0..3 {
            assert_eq!(std::thread::spawn(count_twice).join().unwrap(), 1);
            assert_eq!(counted(), 0);
        }
        put(true, &[]);
        assert_eq!(counted(), 1, "this one's");
    }
}
