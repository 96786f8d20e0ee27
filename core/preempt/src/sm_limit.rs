//! Launches on some of the SMs: streams of green contexts, made ahead.
//!
//! Before a launch its stream records an event, for which the SM-limited stream waits; behind it the SM-limited stream
//! records another, for which the program's stream waits: at once, or (`put_off_joins`) once that matters ([`joins`]).
//! So the order is kept whatever the program enqueues next, and with the latter launches that follow one another on the
//! same SMs need no event between them. Each of
//! its streams has SM-limited ones of its own: launches of two streams do not wait for each other.
//!
//! Green contexts share their device's primary context, and keep it: they are given up before the program's
//! last reference to it goes ([`give_up`]). Launches in another context are not SM-limited.
//!
//! A launch is SM-limited only if no block can rely on all others: its code was read ([`Limitable`]), or it has more
//! blocks than the whole GPU holds at once. Its stream must have no property that another stream would lack. A launch
//! that does not end is noted, and its kernel is never SM-limited again, neither in this run nor, through the profiles,
//! in later ones.
//!
//! Graphs need no stream of the shim's: [`graphs::limit`] has copies of them whose kernels are bound to a green
//! context.

use crate::contexts::{SM_LIMITED as CONTEXT, has_queues, has_queues_for, is_closing, is_primary};
use crate::cuda::{
    CuResult, DevResource, EVENT_DISABLE_TIMING, GREEN_DEFAULT_STREAM, LaunchConfig, NOT_SUPPORTED,
    Ptr, RESOURCE_SM, STREAM_NON_BLOCKING, SUCCESS, driver,
};
use crate::host::{self, host, log};
use crate::launch::{KernelArguments, PlannedLaunch, StreamState, blocks_of};
use crate::lock::{Lock, Locked};
use crate::prepare::{self, Limitable};
use crate::{joins, kernels, limit_cost, limited, occupancy, occupied_sms, places, settings};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::time::Duration;
use tally_contract::limits::BACKLOG_MAX;
use tally_contract::widths;
use tally_ipc::layout::submission_flags::CAN_LIMIT;
use tally_ipc::layout::{KERNEL_SLOTS, STREAM_SLOTS};
use tally_ipc::wait;

/// Events in turn: each is recorded and waited for at once, long before it comes round.
const EVENTS: usize = 256;

#[derive(Debug)]
struct GreenContext {
    sms: u32,
    green: usize,
    /// By slot: priority and handle. Changed by whoever holds the slot's turn.
    streams: Box<[Vec<(i32, usize)>; STREAM_SLOTS]>,
}

/// Pause between two attempts to find the context idle: the first one, and the longest.
const RETRY: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

struct Pool {
    reserves: Vec<u32>,
    contexts: Vec<GreenContext>,
    events: Vec<usize>,
    next: usize,
}

impl Pool {
    /// The place of the green context for a launch on at most `sms` SMs.
    fn at(&self, sms: u32) -> usize {
        self.contexts.iter().rposition(|green| green.sms <= sms).unwrap_or(0)
    }
}

static POOL: Locked<Pool> =
    Locked::new(Pool { reserves: Vec::new(), contexts: Vec::new(), events: Vec::new(), next: 0 });
static LARGEST: AtomicU32 = AtomicU32::new(0);
static WANTED: AtomicBool = AtomicBool::new(false);
static TRIED: AtomicBool = AtomicBool::new(false);
static ALIVE: Lock = Lock::new();
/// Kernels, by their place in the table, of which the core decided that a launch be limited: a bit each. Others it may
/// know not to end then, by an earlier run.
static DECIDED: [AtomicU64; KERNEL_SLOTS.div_ceil(64)] =
    [const { AtomicU64::new(0) }; KERNEL_SLOTS.div_ceil(64)];

/// SMs to keep free, one green context for each number.
pub fn configure(reserves: &[u32]) {
    POOL.with(|pool| pool.reserves = reserves.to_vec());
    WANTED.store(!reserves.is_empty(), Release);
}

/// Whether there are green contexts in a context, which is current. If there could be, they are made.
pub fn serves(context: usize) -> bool {
    if !WANTED.load(Acquire) || context == 0 || is_closing(context) {
        return false;
    }
    let is_made = CONTEXT.load(Acquire) == context;
    if !is_made && is_primary(context) && !TRIED.swap(true, SeqCst) {
        MAKE_IN.store(context, SeqCst);
        MAKERS.fetch_add(1, SeqCst);
        host().spawn("tally-sm-limit", false, make);
    }
    is_made
}

/// Whether a launch can be SM-limited: [`CAN_LIMIT`] or 0.
pub fn offers(kernel: usize, launch: &KernelArguments, stream: &StreamState) -> u32 {
    let context = stream.context;
    if !serves(context) {
        return 0;
    }
    let fits = !stream.has_attributes
        && !host().is_memory_attached()
        // One takes two entries of a queue.
        && stream.backlog <= BACKLOG_MAX
        && has_queues(context)
        && match prepare::limitable(kernel, launch.function) {
            Limitable::Never => false,
            Limitable::Any => occupancy::sm_count().is_some(),
            Limitable::Larger => occupancy::sm_count().is_some_and(|sms| {
                let resident = || occupancy::resident_on_all(launch);
                occupied_sms::is_larger(blocks_of(launch.grid), Some(sms.into()), resident)
            }),
        }
        && !occupied_sms::may_be_all(stream.slot, largest());
    if fits { CAN_LIMIT } else { 0 }
}

/// Whether a launch of so many blocks, of which the whole GPU holds `resident` at once, may be limited.
pub(crate) fn allows(limitable: Limitable, blocks: u64, resident: u64) -> bool {
    match limitable {
        Limitable::Never => false,
        Limitable::Larger => blocks > resident,
        Limitable::Any => true,
    }
}

/// Whether there are green contexts in a context, and stay as long as the caller is counted.
pub(crate) fn has_green(context: usize) -> bool {
    context != 0 && CONTEXT.load(SeqCst) == context
}

/// Whether launches in this context are limited, or may be once there are green contexts.
pub fn may_serve(context: usize) -> bool {
    match CONTEXT.load(Acquire) {
        0 => WANTED.load(Acquire),
        serving => serving == context,
    }
}

/// SMs of the largest green context.
pub(crate) fn largest() -> u32 {
    LARGEST.load(Acquire)
}

/// SMs of each green context, rising.
pub(crate) fn all_green_sms() -> Vec<u32> {
    POOL.with(|pool| pool.contexts.iter().map(|green| green.sms).collect())
}

/// SMs of the green context that a launch on at most `sms` SMs goes to: the smallest one if none has so few.
pub(crate) fn green_sms(sms: u32) -> Option<u32> {
    POOL.with(|pool| Some(pool.contexts.get(pool.at(sms))?.sms))
}

/// Runs `work` with a stream of the green context of exactly so many SMs, in which nothing was launched.
pub(crate) fn within_green<T>(sms: u32, work: impl FnOnce(Ptr) -> T) -> Option<T> {
    let green =
        POOL.with(|pool| Some(pool.contexts.iter().find(|green| green.sms == sms)?.green))?;
    let d = driver();
    let (create, destroy) = (d.green_stream?, d.stream_destroy?);
    let mut stream = std::ptr::null_mut();
    // SAFETY: a green context of ours; a valid out-pointer.
    let made = unsafe { create(&mut stream, green as Ptr, STREAM_NON_BLOCKING, 0) };
    if made != SUCCESS {
        return None;
    }
    let result = work(stream);
    // SAFETY: the stream made above.
    unsafe { destroy(stream) };
    Some(result)
}

/// A core was met that may know more of kernels.
pub fn forget_decided() {
    DECIDED.iter().for_each(|word| word.store(0, Relaxed));
    kernels::changed();
}

/// The core decided that a launch of this kernel be limited.
pub fn note_decided(kernel: u32) {
    if let Some(word) = DECIDED.get(kernel as usize / 64) {
        let bit = 1 << (kernel % 64);
        if word.load(Relaxed) & bit == 0 {
            word.fetch_or(bit, Relaxed);
            kernels::changed();
        }
    }
}

/// Whether it did so before.
pub fn was_decided(kernel: u32) -> bool {
    let word = DECIDED.get(kernel as usize / 64);
    word.is_some_and(|word| word.load(Relaxed) & 1 << (kernel % 64) != 0)
}

/// A slot's launches up to `number` have ended.
pub fn ended(slot: usize, number: u32) {
    if CONTEXT.load(Relaxed) != 0 {
        places::ended(slot, number);
        limited::ended(slot, number);
    }
}

static MAKE_IN: AtomicUsize = AtomicUsize::new(0);
/// Makers so far. One that naps ends once there is a later one: a context may end and another have its handle.
static MAKERS: AtomicU32 = AtomicU32::new(0);

fn make() {
    driver().relax_thread();
    let me = MAKERS.load(SeqCst);
    let context = MAKE_IN.load(SeqCst);
    let mut retry = RETRY[0];
    loop {
        {
            let _alive = ALIVE.lock();
            if host().is_exiting()
                || context == 0
                || MAKE_IN.load(SeqCst) != context
                || MAKERS.load(SeqCst) != me
                || CONTEXT.load(SeqCst) == context
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

/// Free bytes of the current context's GPU, of all.
fn memory() -> Option<(usize, usize)> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: valid out-pointers.
    let result = unsafe { driver().mem_info?(&mut free, &mut total) };
    (result == SUCCESS).then_some((free, total))
}

fn free_bytes() -> Option<usize> {
    memory().map(|(free, _)| free)
}

/// Whether a twentieth of the current context's memory is free: what the shim can do without takes none of the rest.
pub(crate) fn has_spare_memory() -> bool {
    memory().is_none_or(|(free, total)| free >= total / 20)
}

/// False: the context was not idle.
fn make_now(context: usize) -> bool {
    let reserves = POOL.with(|pool| pool.reserves.clone());
    // SAFETY: the context lives while `ALIVE` is held.
    if driver().ctx_set.is_none_or(|f| unsafe { f(context as Ptr) } != SUCCESS) {
        return true;
    }
    let made = host::load(context, host::LOAD_PATIENCE, || {
        let before = free_bytes();
        make_pool(context, &reserves).map(|pool| {
            let taken = before.zip(free_bytes()).map(|(before, now)| before.saturating_sub(now));
            (pool, taken.unwrap_or(0) as u64)
        })
    });
    match made {
        None => return false,
        Some(Ok(((contexts, events), bytes))) => {
            let all: Vec<u32> = contexts.iter().map(|w| w.sms).collect();
            log!("green contexts of {all:?} SMs");
            let any = !contexts.is_empty();
            POOL.with(|pool| (pool.contexts, pool.events) = (contexts, events));
            if any {
                limit_cost::make();
                if let Some(client) = host().client() {
                    client.report.sm_limit_bytes.store(bytes, Relaxed);
                }
                LARGEST.store(all.last().copied().unwrap_or(0), Release);
                CONTEXT.store(context, Release);
            }
        }
        Some(Err(error)) => log!("launches cannot be sm_limited: CUDA error {error}"),
    }
    true
}

fn make_pool(
    context: usize,
    reserves: &[u32],
) -> Result<(Vec<GreenContext>, Vec<usize>), CuResult> {
    let (mut contexts, mut events) = (Vec::new(), Vec::new());
    let made = fill_pool(context, reserves, &mut contexts, &mut events);
    if let Err(error) = made {
        // They would keep the primary context for ever.
        destroy(contexts, events);
        return Err(error);
    }
    contexts.sort_by_key(|w| w.sms);
    Ok((contexts, events))
}

/// Contexts in which nothing is launched any more, and events that nobody will wait for.
fn destroy(contexts: Vec<GreenContext>, events: Vec<usize>) {
    let d = driver();
    for event in events {
        if let Some(destroy) = d.event_destroy {
            // SAFETY: an event of ours.
            d.relaxed(|| unsafe { destroy(event as Ptr) });
        }
    }
    for green_context in contexts {
        for (_, stream) in green_context.streams.iter().flatten() {
            if let Some(destroy) = d.stream_destroy {
                // SAFETY: a stream of ours; what is in it goes on.
                d.relaxed(|| unsafe { destroy(*stream as Ptr) });
            }
        }
        if let Some(destroy) = d.green_destroy {
            // SAFETY: a green context of ours, in which nothing is launched any more.
            d.relaxed(|| unsafe { destroy(green_context.green as Ptr) });
        }
    }
}

fn fill_pool(
    context: usize,
    reserves: &[u32],
    contexts: &mut Vec<GreenContext>,
    events: &mut Vec<usize>,
) -> Result<(), CuResult> {
    let d = driver();
    let check = |r: CuResult| if r == SUCCESS { Ok(()) } else { Err(r) };
    let mut device = 0;
    // SAFETY: valid out-pointers throughout; the context lives while `ALIVE` is held.
    unsafe {
        check(d.ctx_set.ok_or(NOT_SUPPORTED)?(context as Ptr))?;
        check(d.ctx_device.ok_or(NOT_SUPPORTED)?(&mut device))?;
        let mut all = DevResource::default();
        check(d.device_resource.ok_or(NOT_SUPPORTED)?(device, &mut all, RESOURCE_SM))?;
        let partitions = reserves.iter().filter_map(|r| widths::partition_sms(all.sm_count, *r));
        for wanted in partitions {
            let (mut part, mut rest) = (DevResource::default(), DevResource::default());
            let mut count = 1;
            let split = d.split_sms.ok_or(NOT_SUPPORTED)?;
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
        let create = d.event_create.ok_or(NOT_SUPPORTED)?;
        for _ in 0..if contexts.is_empty() { 0 } else { EVENTS } {
            let mut event = std::ptr::null_mut();
            check(create(&mut event, EVENT_DISABLE_TIMING))?;
            events.push(event as usize);
        }
    }
    Ok(())
}

/// The next event of [`EVENTS`].
fn next_event() -> Option<usize> {
    POOL.with(|pool| {
        pool.next = (pool.next + 1) % pool.events.len().max(1);
        pool.events.get(pool.next).copied()
    })
}

#[cfg(test)]
pub(crate) fn add_event(event: usize) {
    POOL.with(|pool| pool.events.push(event));
}

/// Have a stream wait for what is in another one now. In the context of the first, if that is a default stream.
pub(crate) fn wait_behind(stream: usize, other: usize) -> CuResult {
    let d = driver();
    let (Some(record), Some(wait), Some(event)) =
        (d.event_record, d.stream_wait_event, next_event())
    else {
        return NOT_SUPPORTED;
    };
    // SAFETY: an event of ours, a stream of the program's that it uses, and one of ours.
    unsafe {
        match record(event as Ptr, other as Ptr) {
            SUCCESS => wait(stream as Ptr, event as Ptr, 0),
            error => error,
        }
    }
}

/// The stream of a slot's, of this priority, in the green context at this place.
fn limited_stream(slot: usize, priority: i32, at: usize) -> Option<usize> {
    let (green, made) = POOL.with(|pool| {
        let chosen = pool.contexts.get(at)?;
        let made = chosen.streams.get(slot)?.iter().find(|(p, _)| *p == priority);
        Some((chosen.green, made.map(|(_, stream)| *stream)))
    })?;
    if made.is_some() {
        return made;
    }
    let d = driver();
    let mut made = std::ptr::null_mut();
    let create = d.green_stream?;
    // SAFETY: a green context of ours; a valid out-pointer.
    let result =
        d.relaxed(|| unsafe { create(&mut made, green as Ptr, STREAM_NON_BLOCKING, priority) });
    if result != SUCCESS {
        return None;
    }
    POOL.with(|pool| {
        if let Some(chosen) = pool.contexts.get_mut(at) {
            chosen.streams[slot].push((priority, made as usize));
        }
    });
    Some(made as usize)
}

/// Launch on at most `sms` SMs (or on the smallest green context there is). `None`: the launch was not issued.
pub fn launch(
    planned: &PlannedLaunch<'_>,
    arguments: &KernelArguments,
    sms: u32,
) -> Option<CuResult> {
    let (slot, stream, kernel) = (planned.slot, planned.stream, planned.kernel as usize);
    let d = driver();
    let mut priority = 0;
    // SAFETY: the program's stream; a valid out-pointer.
    if unsafe { d.stream_priority?(stream as Ptr, &mut priority) } != SUCCESS {
        return None;
    }
    // Others may have come since it was offered; a larger green context they may not fill.
    let is_free = |green: &GreenContext| !occupied_sms::may_be_all(slot, green.sms);
    let at = POOL.with(|pool| {
        let wanted = pool.at(sms);
        Some(wanted + pool.contexts.get(wanted..)?.iter().position(is_free)?)
    })?;
    if !places::has_room(slot, at, || has_queues_for(planned.context, 1)) {
        return None;
    }
    let limited = limited_stream(slot, priority, at)?;
    let launch = d.launch_ex?;
    if planned.is_blocking && !joins::before(slot, stream, planned.context) {
        return None;
    }
    let latest = joins::latest(slot, stream);
    let is_consecutive = latest == limited;
    let mut timed = None;
    if !is_consecutive {
        timed = limit_cost::begin(planned.client, latest);
        if !joins::try_one(slot) || wait_behind(limited, stream) != SUCCESS {
            return None;
        }
        timed = timed.and_then(|timed| timed.behind(limited));
    }
    let config = LaunchConfig {
        grid: arguments.grid,
        block: arguments.block,
        shared_bytes: arguments.shared_bytes,
        stream: limited as Ptr,
        attributes: arguments.attributes,
        attribute_count: arguments.attribute_count,
    };
    places::note(slot, at, planned.number);
    let home = (stream, planned.context);
    // Before the launch, too: a signal handler that joins within it comes behind what was there before it.
    joins::open(slot, limited, home, planned.is_blocking);
    // SAFETY: the program's arguments; a stream of ours.
    let result = unsafe { launch(&config, arguments.function, arguments.params, arguments.extra) };
    if result != SUCCESS {
        // Kernels whose clusters do not fit, for one, are refused on fewer SMs.
        log!("kernel {kernel} is not sm_limited: CUDA error {result}");
        kernels::refuse_sm_limit(kernel);
        return None;
    }
    if let Some(timed) = timed {
        timed.launched();
    }
    joins::open(slot, limited, home, planned.is_blocking);
    // Asked here: a capture that begins joins what is open by then.
    if !settings::puts_off_joins() || host().joins_at_once(slot, stream) {
        joins::try_one(slot);
    }
    if is_consecutive {
        planned.client.counters.sm_limited_consecutive.fetch_add(1, Relaxed);
    }
    limited::note_kernel(slot, planned.number, kernel);
    Some(SUCCESS)
}

/// Wait until no green context is being made.
pub fn leave_context() {
    drop(ALIVE.lock());
}

/// The program may give up its last reference to a primary context: give up those of its green contexts.
/// Should it not be the last, they are made anew. `first` comes before they go, and says whether they may.
pub(crate) fn give_up(context: usize, first: impl FnOnce() -> bool) {
    let _alive = ALIVE.lock();
    if MAKE_IN.load(SeqCst) == context {
        // One that naps makes none any more: the program's next launch begins anew.
        MAKE_IN.store(0, SeqCst);
        TRIED.store(false, SeqCst);
    }
    if CONTEXT.load(Acquire) != context {
        return;
    }
    CONTEXT.store(0, SeqCst);
    joins::forget(context);
    places::forget();
    let may_go = first();
    let (contexts, events) =
        POOL.with(|pool| (std::mem::take(&mut pool.contexts), std::mem::take(&mut pool.events)));
    if may_go {
        destroy(contexts, events);
        limit_cost::destroy();
    } else {
        limit_cost::forget();
    }
    if let Some(client) = host().client() {
        client.report.sm_limit_bytes.store(0, Relaxed);
    }
}

/// A context is destroyed. Nothing uses it any more.
pub fn forget_context(gone: usize) {
    if MAKE_IN.load(SeqCst) == gone || CONTEXT.load(SeqCst) == gone {
        MAKE_IN.store(0, SeqCst);
        CONTEXT.store(0, Release);
        TRIED.store(false, Relaxed);
        joins::forget(gone);
        places::forget();
        limit_cost::forget();
        POOL.with(|pool| {
            pool.contexts.clear();
            pool.events.clear();
        });
    }
}

/// Only in a forked child.
pub fn reset() {
    MAKE_IN.store(0, SeqCst);
    for word in [&WANTED, &TRIED] {
        word.store(false, SeqCst);
    }
    ALIVE.reset();
    occupied_sms::reset();
    limited::reset();
    joins::reset();
    limit_cost::forget();
    forget_decided();
    POOL.reset(Pool { reserves: Vec::new(), contexts: Vec::new(), events: Vec::new(), next: 0 });
}
