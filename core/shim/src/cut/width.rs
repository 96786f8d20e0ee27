//! Launches on some of the SMs: streams of green contexts, made ahead.
//!
//! A launch hops: its stream records an event, the narrow stream waits for it, runs
//! the kernel and records another, for which the stream waits. So the order is kept
//! whatever the program enqueues next. Each of its streams has narrow ones of its own:
//! launches of two streams do not wait for each other.
//!
//! Green contexts share their device's primary context: launches in another one are
//! not narrowed.

use super::guarded::Guarded;
use crate::cu::{
    CuResult, DevResource, EVENT_DISABLE_TIMING, GREEN_DEFAULT_STREAM, LaunchConfig, NOT_SUPPORTED,
    Ptr, RESOURCE_SM, STREAM_NON_BLOCKING, SUCCESS, driver,
};
use crate::launch::KernelArguments;
use crate::lock::{Held, Lock};
use crate::log;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use tally_ipc::layout::STREAM_SLOTS;

/// Events in turn: a hop's are free again once it is over, long before they come round.
const EVENTS: usize = 256;

/// One width.
#[derive(Debug)]
struct Width {
    sms: u32,
    green: usize,
    /// By slot; 0: not made yet. Changed by whoever holds the slot's lock.
    streams: Box<[usize; STREAM_SLOTS]>,
}

struct Pool {
    reserves: Vec<u32>,
    widths: Vec<Width>,
    events: Vec<usize>,
    next: usize,
}

static POOL: Guarded<Pool> =
    Guarded::new(Pool { reserves: Vec::new(), widths: Vec::new(), events: Vec::new(), next: 0 });
/// The primary context that the widths are for; 0: none yet.
static CONTEXT: AtomicUsize = AtomicUsize::new(0);
static WANTED: AtomicBool = AtomicBool::new(false);
static TRIED: AtomicBool = AtomicBool::new(false);
static ALIVE: Lock = Lock::new();

/// SMs to keep free, one width each.
pub fn configure(reserves: &[u32]) {
    POOL.with(|pool| pool.reserves = reserves.to_vec());
    WANTED.store(!reserves.is_empty(), Release);
}

/// Whether launches in this context can be narrowed.
pub fn offers(context: usize) -> u32 {
    if !WANTED.load(Acquire) || context == 0 {
        return 0;
    }
    if CONTEXT.load(Acquire) == context {
        return tally_ipc::layout::submission_flags::CAN_PARTITION;
    }
    if !TRIED.swap(true, SeqCst) {
        MAKE_IN.store(context, SeqCst);
        super::gate::spawn("tally-width", make);
    }
    0
}

static MAKE_IN: AtomicUsize = AtomicUsize::new(0);

fn make() {
    let context = MAKE_IN.load(SeqCst);
    let _alive = ALIVE.lock();
    if crate::attendant::is_exiting() || MAKE_IN.load(SeqCst) != context {
        return;
    }
    let reserves = POOL.with(|pool| pool.reserves.clone());
    match driver().relaxed(|| make_pool(context, &reserves)) {
        Ok((widths, events)) => {
            let all: Vec<u32> = widths.iter().map(|w| w.sms).collect();
            log!("widths: {all:?} SMs");
            let any = !widths.is_empty();
            POOL.with(|pool| (pool.widths, pool.events) = (widths, events));
            if any {
                CONTEXT.store(context, Release);
            }
        }
        Err(error) => log!("launches cannot be narrowed: CUDA error {error}"),
    }
}

fn make_pool(context: usize, reserves: &[u32]) -> Result<(Vec<Width>, Vec<usize>), CuResult> {
    let d = driver();
    let check = |r: CuResult| if r == SUCCESS { Ok(()) } else { Err(r) };
    let mut widths = Vec::new();
    let mut events = Vec::new();
    let mut device = 0;
    // SAFETY: valid out-pointers throughout; the context lives while `ALIVE` is held.
    // Green contexts are kept for the process's life.
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
                log!("no width of {wanted} SMs: CUDA error {r}");
                continue;
            }
            let (mut description, mut green) = (std::ptr::null_mut(), std::ptr::null_mut());
            check(d.resource_desc.ok_or(NOT_SUPPORTED)?(&mut description, &mut part, 1))?;
            let create = d.green_create.ok_or(NOT_SUPPORTED)?;
            check(create(&mut green, description, device, GREEN_DEFAULT_STREAM))?;
            d.green_stream.ok_or(NOT_SUPPORTED)?;
            let streams = Box::new([0; STREAM_SLOTS]);
            widths.push(Width { sms: part.sm_count, green: green as usize, streams });
        }
        let create = d.event_create.ok_or(NOT_SUPPORTED)?;
        for _ in 0..if widths.is_empty() { 0 } else { EVENTS } {
            let mut event = std::ptr::null_mut();
            check(create(&mut event, EVENT_DISABLE_TIMING))?;
            events.push(event as usize);
        }
    }
    widths.sort_by_key(|w| w.sms);
    Ok((widths, events))
}

/// Launch, from the stream of a slot, on at most `sms` SMs (or on the narrowest width there is). `None`: nothing
/// was issued.
pub fn launch(
    stream: usize,
    slot: usize,
    kernel: usize,
    arguments: &KernelArguments,
    sms: u32,
) -> Option<CuResult> {
    let (at, green, mut narrow, before, behind) = POOL.with(|pool| {
        let at = pool.widths.iter().rposition(|w| w.sms <= sms).unwrap_or(0);
        let width = pool.widths.get(at)?;
        let (green, narrow) = (width.green, *width.streams.get(slot)?);
        let mut event = || {
            pool.next = (pool.next + 1) % pool.events.len().max(1);
            pool.events.get(pool.next).copied()
        };
        Some((at, green, narrow, event()?, event()?))
    })?;
    let d = driver();
    if narrow == 0 {
        let mut made = std::ptr::null_mut();
        let create = d.green_stream?;
        // SAFETY: a green context of ours; a valid out-pointer.
        let r = d.relaxed(|| unsafe { create(&mut made, green as Ptr, STREAM_NON_BLOCKING, 0) });
        if r != SUCCESS {
            return None;
        }
        narrow = made as usize;
        POOL.with(|pool| {
            if let Some(width) = pool.widths.get_mut(at) {
                width.streams[slot] = narrow;
            }
        });
    }
    let (record, wait, launch) = (d.event_record?, d.stream_wait_event?, d.launch_ex?);
    let (stream, narrow) = (stream as Ptr, narrow as Ptr);
    let config = LaunchConfig {
        grid: arguments.grid,
        block: arguments.block,
        shared_bytes: arguments.shared_bytes,
        stream: narrow,
        attributes: arguments.attributes,
        attribute_count: arguments.attribute_count,
    };
    // SAFETY: the program's stream and arguments; events and a stream of ours.
    unsafe {
        if record(before as Ptr, stream) != SUCCESS || wait(narrow, before as Ptr, 0) != SUCCESS {
            return None;
        }
        let result = launch(&config, arguments.function, arguments.params, arguments.extra);
        if result != SUCCESS {
            // Nothing runs; what was recorded and waited for does not matter. Kernels
            // whose clusters do not fit, for one, are refused on fewer SMs.
            log!("kernel {kernel} is not narrowed: CUDA error {result}");
            super::kernels::refuse_narrow(kernel);
            return None;
        }
        let mut result = record(behind as Ptr, narrow);
        if result == SUCCESS {
            result = wait(stream, behind as Ptr, 0);
        }
        if result != SUCCESS && d.stream_synchronize.is_none_or(|f| f(narrow) != SUCCESS) {
            return Some(result);
        }
        Some(SUCCESS)
    }
}

/// While it is held no width is made.
pub fn pause() -> Held<'static> {
    ALIVE.lock()
}

/// A context is destroyed. Everything is paused.
pub fn forget_context(gone: usize) {
    if MAKE_IN.load(SeqCst) == gone {
        MAKE_IN.store(0, SeqCst);
        CONTEXT.store(0, Release);
        TRIED.store(false, Relaxed);
        POOL.with(|pool| {
            pool.widths.clear();
            pool.events.clear();
        });
    }
}

/// Only in a forked child.
pub fn reset() {
    for word in [&CONTEXT, &MAKE_IN] {
        word.store(0, SeqCst);
    }
    for word in [&WANTED, &TRIED] {
        word.store(false, SeqCst);
    }
    ALIVE.reset();
    POOL.reset(Pool { reserves: Vec::new(), widths: Vec::new(), events: Vec::new(), next: 0 });
}
