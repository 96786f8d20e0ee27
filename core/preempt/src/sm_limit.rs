//! Launches on some of the SMs: streams of green contexts, made ahead.
//!
//! A launch hops: its stream records an event, the SM-limited stream waits for it, runs
//! the kernel and records another, for which the stream waits. So the order is kept
//! whatever the program enqueues next. The last wait may be [put off](lazy_return). Each
//! of its streams has SM-limited ones of its own: launches of two streams do not wait for
//! each other.
//!
//! Green contexts share their device's primary context, and keep it: they are given up before the program's
//! last reference to it goes ([`give_up`]). Launches in another context are not SM-limited.
//!
//! A launch is SM-limited only if it has more blocks than the whole GPU holds at once, so that no block can
//! rely on all others, and if its stream has no property that another stream would lack. A launch that does not
//! end is noted, and its kernel is never SM-limited again, neither in this run nor, through the profiles, in
//! later ones.

use crate::contexts::{SM_LIMITED as CONTEXT, has_queues, is_closing};
use crate::cuda::{
    CuResult, DevResource, EVENT_DISABLE_TIMING, GREEN_DEFAULT_STREAM, LaunchConfig, NOT_SUPPORTED,
    Ptr, RESOURCE_SM, STREAM_NON_BLOCKING, SUCCESS, driver,
};
use crate::host::{self, host, log};
use crate::launch::{KernelArguments, PlannedLaunch, StreamState};
use crate::lazy_return::{self, Away};
use crate::lock::{Lock, Locked};
use crate::prepare::{self, BACKLOG_MAX};
use crate::{kernels, settings, transformed};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;
use tally_ipc::layout::STREAM_SLOTS;
use tally_ipc::layout::submission_flags::CAN_LIMIT;
use tally_ipc::{ring, wait};
use tally_rewriter::TransformRefusal;

/// A stream of a green context. Used by whoever holds its slot's turn.
#[derive(Clone, Copy, Debug)]
struct Limited {
    priority: i32,
    stream: usize,
    /// Recorded in the program's stream, and in this one.
    events: [usize; 2],
}

#[derive(Debug)]
struct GreenContext {
    sms: u32,
    green: usize,
    /// Those of each slot, by priority.
    streams: Box<[Vec<Limited>; STREAM_SLOTS]>,
}

/// An SM-limited launch: its slot, its number there, its kernel.
type SmLimited = (usize, u32, usize);
/// SM-limited launches that are remembered.
const SM_LIMITED_MAX: usize = 256;
/// An SM-limited launch that has not ended after so long, ns, waits for blocks that do not fit.
pub const STUCK_NS: u64 = 10_000_000_000;
/// Pause between two attempts to find the context idle: the first one, and the longest.
const RETRY: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

struct Pool {
    reserves: Vec<u32>,
    contexts: Vec<GreenContext>,
}

static POOL: Locked<Pool> = Locked::new(Pool { reserves: Vec::new(), contexts: Vec::new() });
static WANTED: AtomicBool = AtomicBool::new(false);
static TRIED: AtomicBool = AtomicBool::new(false);
static ALIVE: Lock = Lock::new();
static SM_LIMITED: Locked<VecDeque<SmLimited>> = Locked::new(VecDeque::new());

/// SMs to keep free, one green context for each number.
pub fn configure(reserves: &[u32]) {
    POOL.with(|pool| pool.reserves = reserves.to_vec());
    WANTED.store(!reserves.is_empty(), Release);
}

/// Whether a launch can be SM-limited: [`CAN_LIMIT`] or 0.
pub fn offers(kernel: usize, launch: &KernelArguments, stream: &StreamState) -> u32 {
    let context = stream.context;
    if !WANTED.load(Acquire) || context == 0 || is_closing(context) {
        return 0;
    }
    if CONTEXT.load(Acquire) != context {
        if !TRIED.swap(true, SeqCst) {
            MAKE_IN.store(context, SeqCst);
            host().spawn("tally-sm-limit", false, make);
        }
        return 0;
    }
    let blocks = launch.grid.iter().fold(1_u64, |all, n| all.saturating_mul(u64::from(*n)));
    let fits = !stream.has_attributes
        && !host().is_memory_attached()
        // One takes two entries of a queue.
        && stream.backlog <= BACKLOG_MAX
        && has_queues(context)
        && prepare::may_be_limited(kernel, launch.function)
        && transformed::resident_on_all(launch).is_some_and(|resident| blocks > resident);
    if fits { CAN_LIMIT } else { 0 }
}

/// A slot's launches up to `number` have not ended for [`STUCK_NS`]: the kernels of those that were SM-limited never are
/// again.
pub fn stuck(slot: usize, number: u32) {
    let mut found = Vec::new();
    SM_LIMITED.with(|all| {
        all.retain(|(of, n, kernel)| {
            let is_stuck = *of == slot && ring::is_done(number, *n);
            if is_stuck {
                found.push(*kernel);
            }
            !is_stuck
        });
    });
    for kernel in found {
        log!("kernel {kernel} did not end on some of the SMs: it is launched whole from now on");
        kernels::refuse_sm_limit(kernel);
        kernels::refuse(kernel, TransformRefusal::StuckLimited);
    }
}

/// A slot's launches up to `number` have ended.
pub fn ended(slot: usize, number: u32) {
    if CONTEXT.load(Relaxed) != 0 {
        SM_LIMITED.with(|all| all.retain(|(of, n, _)| *of != slot || !ring::is_done(number, *n)));
    }
}

static MAKE_IN: AtomicUsize = AtomicUsize::new(0);

fn make() {
    driver().relax_thread();
    let context = MAKE_IN.load(SeqCst);
    let mut retry = RETRY[0];
    loop {
        {
            let _alive = ALIVE.lock();
            if host().is_exiting()
                || MAKE_IN.load(SeqCst) != context
                || is_closing(context)
                || make_now(context)
            {
                return;
            }
        }
        wait::nap(retry);
        retry = (2 * retry).min(RETRY[1]);
    }
}

/// False: the context was not idle.
fn make_now(context: usize) -> bool {
    let reserves = POOL.with(|pool| pool.reserves.clone());
    // SAFETY: the context lives while `ALIVE` is held.
    if driver().ctx_set.is_none_or(|f| unsafe { f(context as Ptr) } != SUCCESS) {
        return true;
    }
    let made = host::load(context, host::LOAD_PATIENCE, || make_pool(context, &reserves));
    match made {
        None => return false,
        Some(Ok(contexts)) => {
            let all: Vec<u32> = contexts.iter().map(|w| w.sms).collect();
            log!("green contexts of {all:?} SMs");
            let any = !contexts.is_empty();
            POOL.with(|pool| pool.contexts = contexts);
            if any {
                CONTEXT.store(context, Release);
            }
        }
        Some(Err(error)) => log!("launches cannot be sm_limited: CUDA error {error}"),
    }
    true
}

fn make_pool(context: usize, reserves: &[u32]) -> Result<Vec<GreenContext>, CuResult> {
    let d = driver();
    let check = |r: CuResult| if r == SUCCESS { Ok(()) } else { Err(r) };
    let mut contexts = Vec::new();
    let mut device = 0;
    // SAFETY: valid out-pointers throughout; the context lives while `ALIVE` is held.
    unsafe {
        check(d.ctx_set.ok_or(NOT_SUPPORTED)?(context as Ptr))?;
        check(d.ctx_device.ok_or(NOT_SUPPORTED)?(&mut device))?;
        let mut all = DevResource::default();
        check(d.device_resource.ok_or(NOT_SUPPORTED)?(device, &mut all, RESOURCE_SM))?;
        for reserve in reserves.iter().filter(|r| **r < all.sm_count) {
            let (mut part, mut rest) = (DevResource::default(), DevResource::default());
            let mut count = 1;
            let split = d.split_sms.ok_or(NOT_SUPPORTED)?;
            let wanted = all.sm_count - reserve;
            // Rounded down, so that at least so many stay free.
            let wanted = (wanted / 8 * 8).max(wanted.min(8));
            let r = split(&mut part, &mut count, &all, &mut rest, 0, wanted);
            if r != SUCCESS || count == 0 {
                log!("no green context of {wanted} SMs: CUDA error {r}");
                continue;
            }
            let (mut description, mut green) = (std::ptr::null_mut(), std::ptr::null_mut());
            check(d.resource_desc.ok_or(NOT_SUPPORTED)?(&mut description, &mut part, 1))?;
            let create = d.green_create.ok_or(NOT_SUPPORTED)?;
            check(create(&mut green, description, device, GREEN_DEFAULT_STREAM))?;
            d.green_stream.ok_or(NOT_SUPPORTED)?;
            let streams = Box::new([const { Vec::new() }; STREAM_SLOTS]);
            contexts.push(GreenContext { sms: part.sm_count, green: green as usize, streams });
        }
    }
    contexts.sort_by_key(|w| w.sms);
    Ok(contexts)
}

/// The stream for a slot's launches of a priority, of the green context of at most `sms` SMs, or of the smallest one.
fn limited(slot: usize, priority: i32, sms: u32) -> Option<Limited> {
    let (at, green, known) = POOL.with(|pool| {
        let at = pool.contexts.iter().rposition(|w| w.sms <= sms).unwrap_or(0);
        let chosen = pool.contexts.get(at)?;
        let known = chosen.streams.get(slot)?.iter().find(|limited| limited.priority == priority);
        Some((at, chosen.green, known.copied()))
    })?;
    if known.is_some() {
        return known;
    }
    let d = driver();
    let mut stream = std::ptr::null_mut();
    let mut events = [std::ptr::null_mut(); 2];
    let (create, create_event) = (d.green_stream?, d.event_create?);
    // SAFETY: a green context of ours; valid out-pointers.
    let is_made = d.relaxed(|| unsafe {
        events.iter_mut().all(|event| create_event(event, EVENT_DISABLE_TIMING) == SUCCESS)
            && create(&mut stream, green as Ptr, STREAM_NON_BLOCKING, priority) == SUCCESS
    });
    let events = events.map(|event| event as usize);
    if !is_made {
        destroy_events(events);
        return None;
    }
    let made = Limited { priority, stream: stream as usize, events };
    POOL.with(|pool| {
        if let Some(chosen) = pool.contexts.get_mut(at) {
            chosen.streams[slot].push(made);
        }
    });
    Some(made)
}

fn destroy_events(events: [usize; 2]) {
    let Some(destroy) = driver().event_destroy else { return };
    for event in events.into_iter().filter(|event| *event != 0) {
        // SAFETY: an event of ours that nobody uses any more.
        driver().relaxed(|| unsafe { destroy(event as Ptr) });
    }
}

/// Whether a stream may put off its returns.
pub(crate) fn is_lazy(slot: usize, stream: usize) -> bool {
    settings::returns_lazily() && host().stands_alone(slot, stream) && !host().may_be_bypassed()
}

/// Make a launch on at most `sms` SMs (or on the smallest green context there is), and
/// put the return off or not. `None`: nothing was issued.
pub(crate) fn launch(
    planned: &PlannedLaunch<'_>,
    arguments: &KernelArguments,
    sms: u32,
    is_lazy: bool,
) -> Option<CuResult> {
    let PlannedLaunch { stream, slot, number, .. } = *planned;
    let kernel = planned.kernel as usize;
    let d = driver();
    let mut priority = 0;
    // SAFETY: the program's stream; a valid out-pointer.
    if unsafe { d.stream_priority?(stream as Ptr, &mut priority) } != SUCCESS {
        return None;
    }
    let limited = limited(slot, priority, sms)?;
    let (record, wait, launch) = (d.event_record?, d.stream_wait_event?, d.launch_ex?);
    let (stream_there, [before, behind]) =
        (limited.stream as Ptr, limited.events.map(|event| event as Ptr));
    let config = LaunchConfig {
        grid: arguments.grid,
        block: arguments.block,
        shared_bytes: arguments.shared_bytes,
        stream: stream_there,
        attributes: arguments.attributes,
        attribute_count: arguments.attribute_count,
    };
    let is_there = lazy_return::is_in(slot, limited.stream);
    if is_there {
        planned.client.counters.sm_limited_stayed.fetch_add(1, Relaxed);
    } else {
        lazy_return::give(slot);
    }
    // SAFETY: the program's stream and arguments; events and a stream of ours.
    unsafe {
        let stream = stream as Ptr;
        if !is_there
            && (record(before, stream) != SUCCESS || wait(stream_there, before, 0) != SUCCESS)
        {
            return None;
        }
        let result = launch(&config, arguments.function, arguments.params, arguments.extra);
        if result != SUCCESS {
            // Nothing runs; what was recorded and waited for does not matter. Kernels
            // whose clusters do not fit, for one, are refused on fewer SMs.
            log!("kernel {kernel} is not sm_limited: CUDA error {result}");
            kernels::refuse_sm_limit(kernel);
            return None;
        }
        let mut result = record(behind, stream_there);
        if result == SUCCESS && !is_lazy {
            result = wait(stream, behind, 0);
        }
        if result != SUCCESS {
            // The context is lost: what was launched is, too.
            return Some(result);
        }
        if is_lazy {
            let context = CONTEXT.load(Acquire);
            let away = Away { slot, stream: stream as usize, context };
            lazy_return::owe(away, limited.stream, behind as usize, number);
        }
    }
    SM_LIMITED.with(|all| {
        if all.len() >= SM_LIMITED_MAX {
            all.pop_front();
        }
        all.push_back((slot, number, kernel));
    });
    Some(SUCCESS)
}

/// Wait until no green context is being made.
pub fn leave_context() {
    drop(ALIVE.lock());
}

/// The program may give up its last reference to a primary context: give up those of its green contexts.
/// Should it not be the last, they are made anew.
pub fn give_up(context: usize) {
    let _alive = ALIVE.lock();
    if CONTEXT.load(Acquire) != context {
        return;
    }
    CONTEXT.store(0, Release);
    lazy_return::forget(context);
    let contexts = POOL.with(|pool| std::mem::take(&mut pool.contexts));
    let d = driver();
    for green_context in contexts {
        for limited in green_context.streams.iter().flatten() {
            if let Some(destroy) = d.stream_destroy {
                // SAFETY: a stream of ours; what is in it goes on.
                d.relaxed(|| unsafe { destroy(limited.stream as Ptr) });
            }
            destroy_events(limited.events);
        }
        if let Some(destroy) = d.green_destroy {
            // SAFETY: a green context of ours, in which nothing is launched any more.
            d.relaxed(|| unsafe { destroy(green_context.green as Ptr) });
        }
    }
    TRIED.store(false, SeqCst);
}

/// A context is destroyed. Nothing uses it any more.
pub fn forget_context(gone: usize) {
    if MAKE_IN.load(SeqCst) == gone {
        MAKE_IN.store(0, SeqCst);
        CONTEXT.store(0, Release);
        TRIED.store(false, Relaxed);
        lazy_return::forget(gone);
        POOL.with(|pool| pool.contexts.clear());
    }
}

/// Only in a forked child.
pub fn reset() {
    MAKE_IN.store(0, SeqCst);
    for word in [&WANTED, &TRIED] {
        word.store(false, SeqCst);
    }
    ALIVE.reset();
    SM_LIMITED.reset(VecDeque::new());
    POOL.reset(Pool { reserves: Vec::new(), contexts: Vec::new() });
    lazy_return::reset();
}
