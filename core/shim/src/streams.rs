//! The streams that a program creates, and how many hardware queues it has for them.
//!
//! Streams beyond the number of queues (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 by default) share one, and what
//! waits in a queue holds up all behind it. With [`DYNAMIC_MIN`] queues or more the driver gives new work a queue
//! that is free, so while there are no more streams with work than queues nobody is held up. With fewer, streams
//! are given queues in turn when they are made, so that any two may share one. Streams of all priorities share the
//! queues, those of the shim's too (measured: `bench/gpu`, `streams`).

use crate::cu::{CuResult, Ptr, STREAM_NON_BLOCKING, SUCCESS, driver};
use crate::forms::guarded::Guarded;
use crate::{slots, state};
use std::ffi::{c_int, c_uint};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};

/// Hardware queues of a process that does not say how many it wants.
const QUEUES_DEFAULT: u32 = 8;
/// What the driver takes.
const QUEUES_MAX: u32 = 32;
/// From so many on, work is given a queue that is free.
const DYNAMIC_MIN: u32 = 8;
/// Created streams that are remembered; more are only counted.
const CREATED_MAX: usize = 4_096;

/// Hardware queues; 0: not looked at yet.
static QUEUES: AtomicU32 = AtomicU32::new(0);

/// See [`is_memory_attached`].
static ATTACHED: AtomicBool = AtomicBool::new(false);

struct Created {
    /// Streams that do not wait for the legacy stream, and their contexts.
    non_blocking: Vec<(usize, usize)>,
    /// Those that do.
    blocking: Vec<(usize, usize)>,
    /// More streams were created than are remembered.
    is_more: bool,
}

static CREATED: Guarded<Created> =
    Guarded::new(Created { non_blocking: Vec::new(), blocking: Vec::new(), is_more: false });

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
        |all: &mut Created| all.is_more || all.blocking.iter().any(|(_, of)| *of == context);
    slots::has_blocking(context, |_| false) || CREATED.with(was_made)
}

/// Those streams, to be asked by [`exists`] before each use. `None`: not all are known.
pub fn blocking(context: usize) -> Option<Vec<usize>> {
    let known = CREATED.with(|all| {
        let mine = all.blocking.iter().filter(|(_, of)| *of == context);
        (!all.is_more).then(|| mine.map(|(stream, _)| *stream).collect::<Vec<_>>())
    })?;
    (!slots::has_blocking(context, |stream| known.contains(&stream))).then_some(known)
}

/// Streams of a context that do not wait for the legacy stream: each must be asked whether it is idle.
/// `None`: not all are known.
pub fn non_blocking(context: usize) -> Option<Vec<usize>> {
    CREATED.with(|all| {
        let mine = all.non_blocking.iter().filter(|(_, of)| *of == context);
        (!all.is_more).then(|| mine.map(|(stream, _)| *stream).collect())
    })
}

fn created(result: CuResult, stream: *mut Ptr, flags: c_uint) -> CuResult {
    if result != SUCCESS || stream.is_null() || state::client().is_none() {
        return result;
    }
    // SAFETY: the driver has just written it.
    let stream = unsafe { *stream } as usize;
    let context = driver().current_context();
    CREATED.with(|all| {
        let of_kind = match flags & STREAM_NON_BLOCKING {
            0 => &mut all.blocking,
            _ => &mut all.non_blocking,
        };
        if of_kind.len() < CREATED_MAX {
            of_kind.push((stream, context));
        } else {
            all.is_more = true;
        }
    });
    result
}

/// Whether a stream that was seen to be made is still there.
pub fn exists(stream: usize) -> bool {
    CREATED.with(|all| all.non_blocking.iter().chain(&all.blocking).any(|(s, _)| *s == stream))
}

/// A stream is about to be destroyed.
pub fn destroyed(stream: usize) {
    CREATED.with(|all| {
        all.non_blocking.retain(|(s, _)| *s != stream);
        all.blocking.retain(|(s, _)| *s != stream);
    });
}

/// Streams that [`take_context`] took: those that do not wait for the legacy stream, and those that do.
pub struct Taken([Vec<(usize, usize)>; 2]);

/// A context is about to be destroyed, and its streams. Before it is: another thread may get a context of the same
/// handle, and make streams in it, as soon as it is gone.
pub fn take_context(context: usize) -> Taken {
    CREATED.with(|all| {
        let take = |streams: &mut Vec<(usize, usize)>| {
            streams.extract_if(.., |(_, of)| *of == context).collect()
        };
        Taken([take(&mut all.non_blocking), take(&mut all.blocking)])
    })
}

/// It was not.
pub fn put_back(Taken([non_blocking, blocking]): Taken) {
    CREATED.with(|all| {
        all.non_blocking.extend(non_blocking);
        all.blocking.extend(blocking);
    });
}

/// `cuStreamCreate`.
///
/// # Safety
/// As the driver's.
pub unsafe fn create(
    real: unsafe extern "C" fn(*mut Ptr, c_uint) -> CuResult,
    _per_thread: bool,
    stream: *mut Ptr,
    flags: c_uint,
) -> CuResult {
    // SAFETY: the caller's arguments.
    created(unsafe { real(stream, flags) }, stream, flags)
}

/// `cuStreamCreateWithPriority`.
///
/// # Safety
/// As the driver's.
pub unsafe fn create_with_priority(
    real: unsafe extern "C" fn(*mut Ptr, c_uint, c_int) -> CuResult,
    _per_thread: bool,
    stream: *mut Ptr,
    flags: c_uint,
    priority: c_int,
) -> CuResult {
    // SAFETY: the caller's arguments.
    created(unsafe { real(stream, flags, priority) }, stream, flags)
}

/// `cuGreenCtxStreamCreate`.
///
/// # Safety
/// As the driver's.
pub unsafe fn create_in_green(
    real: unsafe extern "C" fn(*mut Ptr, Ptr, c_uint, c_int) -> CuResult,
    _per_thread: bool,
    stream: *mut Ptr,
    green: Ptr,
    flags: c_uint,
    priority: c_int,
) -> CuResult {
    // SAFETY: the caller's arguments.
    created(unsafe { real(stream, green, flags, priority) }, stream, flags)
}

/// `cuStreamSetAttribute`.
///
/// # Safety
/// As the driver's.
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
/// As the driver's.
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
/// As the driver's.
pub unsafe fn attach_memory(
    real: unsafe extern "C" fn(Ptr, usize, usize, usize) -> CuResult,
    _per_thread: bool,
    stream: Ptr,
    a: usize,
    b: usize,
    c: usize,
) -> CuResult {
    ATTACHED.store(true, Relaxed);
    // SAFETY: the caller's arguments.
    unsafe { real(stream, a, b, c) }
}

/// Whether there may be memory that only one stream may use.
pub fn is_memory_attached() -> bool {
    ATTACHED.load(Relaxed)
}

/// Only in a forked child.
pub fn reset() {
    CREATED.reset(Created { non_blocking: Vec::new(), blocking: Vec::new(), is_more: false });
    QUEUES.store(0, SeqCst);
    ATTACHED.store(false, SeqCst);
}
