//! Staying on the GPU between requests.
//!
//! Where contexts take turns (sharing mode `timeslice`), the GPU leaves a program once nothing that
//! it launched is *pending*: a last kernel that still runs does not keep it. A request that comes
//! just then pays for two changes of context: 0.38 ms, not 0.2 (measured on an H200).
//! So a high-priority program lingers. Before it waits for a stream or an event, this puts behind
//! what it waits for, in a stream of its own, a kernel of one thread that only lets time pass, and
//! an empty kernel behind that one, which is what is pending meanwhile. What the program launches
//! in that time runs beside them, at once, but for blocks that need all of the SM that the one thread is on.
//!
//! Only while a best-effort client is connected: alone, a program pays nothing.
//!
//! What must hold:
//! - nothing of the program waits for these kernels. They are in a non-blocking stream, so only
//!   what waits for the whole context does; nothing lingers before such a call.
//! - nothing of the program is ordered that was not: behind the legacy stream only while no other blocking stream has
//!   work, behind a blocking stream only while no launch in the legacy stream is known to run (copies and host
//!   functions there are not looked at), and not where there are more streams than hardware queues;
//! - nothing here waits in the driver, and no stream of the program's finds its hardware queue taken: only while there
//!   are fewer streams in use than queues;
//! - they end by themselves, soon, whatever becomes of the program, the core, or the timer;
//! - there are never more than [`PENDING_MAX`] of them: a further one is left out; and all but the
//!   newest end at once, so that many waits in a row do not add up;
//! - a capture never sees them, and they never outlive their context: all under the capture guard.
//!
//! In the program's own threads, and only in the first context that waits. Its kernels are loaded behind the first
//! such wait after which nothing runs.

use crate::slots::{OVERFLOW, SLOTS};
use crate::{asking, capture, log, quiesce, slots, state, streams};
use std::ffi::CStr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::time::Duration;
use tally_contract::limits::LINGER_US_MAX;
use tally_ipc::ClientRegion;
use tally_ipc::layout::report_state;
use tally_ipc::wire::SharingMode;
use tally_preempt::cuda::{
    EVENT_DISABLE_TIMING, LaunchConfig, NOT_READY, NOT_SUPPORTED, Ptr, STREAM_LEGACY,
    STREAM_NON_BLOCKING, SUCCESS, driver,
};

/// `tally_linger(u64 ns, u32 looks, u64 newest, u32 mine)`: one thread that ends after `ns`, after `looks`
/// reads of the timer (which may be coarse; a read takes 0.5 to 3 us), or once the word at `newest` has passed
/// `mine`.
const PTX: &CStr = c"
.version 6.3
.target sm_70
.address_size 64
.visible .entry tally_linger(.param .u64 p_ns, .param .u32 p_looks, .param .u64 p_newest, .param .u32 p_mine) {
    .reg .pred %p<4>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [p_ns];
    ld.param.u32 %r1, [p_looks];
    ld.param.u64 %rd5, [p_newest];
    ld.param.u32 %r2, [p_mine];
    mov.u64 %rd2, %globaltimer;
look:
    ld.volatile.global.u32 %r3, [%rd5];
    sub.s32 %r3, %r3, %r2;
    setp.gt.s32 %p3, %r3, 0;
    @%p3 bra done;
    nanosleep.u32 500;
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.ge.u64 %p1, %rd4, %rd1;
    @%p1 bra done;
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p2, %r1, 0;
    @%p2 bra look;
done:
    ret;
}
.visible .entry tally_pending() {
    ret;
}
";
/// How long a wait of the program's may begin later for the guard.
const GUARD_WAIT_MAX: Duration = Duration::from_micros(50);
/// Looks in a microsecond, for the bound.
const LOOKS_PER_US: u32 = 2;
/// Lingering kernels that may exist at once. Beside a CUDA graph of dependent kernels each of the two kernels
/// may have to wait for the graph's end (an H200 does that), so requests without a pause between them leave one
/// more behind each time. None may be left out for that.
const PENDING_MAX: usize = 16;

/// Hardware queues that are left for streams which the program has not used so far.
const SPARE_QUEUES: u32 = 2;

/// How long, us; 0: not at all.
static LENGTH_US: AtomicU32 = AtomicU32::new(0);

/// Everything below is changed under the capture guard.
static STATE: AtomicU32 = AtomicU32::new(UNMADE);
const UNMADE: u32 = 0;
const READY: u32 = 1;
const FAILED: u32 = 2;
/// The context in which they are to be made; 0: none.
static WANTED: AtomicUsize = AtomicUsize::new(0);
/// The context that the objects belong to.
static CONTEXT: AtomicUsize = AtomicUsize::new(0);
static STREAM: AtomicUsize = AtomicUsize::new(0);
static LINGER: AtomicUsize = AtomicUsize::new(0);
static PENDING: AtomicUsize = AtomicUsize::new(0);
/// Recorded behind what is waited for.
static BEHIND: AtomicUsize = AtomicUsize::new(0);
/// Recorded behind the last ones.
static ENDS: [AtomicUsize; PENDING_MAX] = [const { AtomicUsize::new(0) }; PENDING_MAX];
/// Whose event is the oldest.
static OLDEST: AtomicUsize = AtomicUsize::new(0);
/// What the last one was put behind: slot + 1, sequence. One is enough for a launch.
static LAST: AtomicU64 = AtomicU64::new(0);
/// The number of the last one, where the GPU reads it.
static NEWEST: Page = Page { word: AtomicU32::new(0), _rest: [0; 1023] };
/// Address of [`NEWEST`] for the GPU.
static NEWEST_ADDRESS: AtomicU64 = AtomicU64::new(0);

/// A page of its own, for the driver registers whole pages.
#[repr(C, align(4096))]
struct Page {
    word: AtomicU32,
    _rest: [u32; 1023],
}

#[derive(Clone, Copy, Debug)]
pub enum Awaited {
    /// A stream: an explicit handle.
    Stream(usize),
    Event(usize),
}

/// A core took this client on, or (with `Unmanaged`) let it go.
pub fn configure(client: &ClientRegion, high_priority: bool, sharing: &SharingMode) {
    let length_us = match sharing {
        SharingMode::TimeSlice { linger_us, .. } if high_priority => {
            (*linger_us).min(LINGER_US_MAX)
        }
        _ => 0,
    };
    LENGTH_US.store(length_us, Relaxed);
    let word = match (length_us, STATE.load(Acquire)) {
        (0, _) => report_state::UNUSED,
        (_, READY) => report_state::ACTIVE,
        (_, FAILED) => report_state::FAILED,
        _ => report_state::PENDING,
    };
    client.report.linger.store(word, Relaxed);
}

/// Whether waits are of interest here.
#[inline]
pub fn is_enabled() -> bool {
    LENGTH_US.load(Relaxed) != 0
}

/// The program is about to wait for launch `sequence` of a slot and what was launched before it.
#[inline]
pub fn before_wait(slot: usize, sequence: u32, awaited: Awaited) {
    if is_enabled() && slot != OVERFLOW {
        linger(slot, sequence, awaited);
    }
}

#[cold]
fn linger(slot: usize, sequence: u32, awaited: Awaited) {
    let launch = (slot as u64 + 1) << 32 | u64::from(sequence);
    // Without a core programs run unscheduled: there may be somebody.
    let alone = state::registration()
        .is_some_and(|registration| registration.core.neighbours.load(Relaxed) == 0);
    if alone || LAST.load(Relaxed) == launch || capture::is_active() || state::is_exiting() {
        return;
    }
    // Taken for long: something is destroyed. For moments: a capture begins, another thread is here. The GPU
    // has the launch to do meanwhile.
    let Some(_guard) = capture::GUARD.lock_within(GUARD_WAIT_MAX) else { return };
    let context = SLOTS[slot].context.load(Relaxed);
    let d = driver();
    // Another thread that waits for the same, or the program's end, may have come meanwhile.
    if LAST.load(Relaxed) == launch
        || state::is_exiting()
        || capture::is_active()
        || context == 0
        || SLOTS[slot].green.load(Relaxed) != 0
        || d.current_context() != context
    {
        return;
    }
    // Our stream waits in a hardware queue. In one of another stream's it would be held up, in the driver if that is
    // full, and hold that up; and what the program does next, in a stream that it has not used yet, may need one.
    if !streams::has_queues_for(1 + SPARE_QUEUES + streams::used_without_slot(context)) {
        log_once(&LOGGED_QUEUES, "it has nearly as many streams as hardware queues");
        return;
    }
    let Some(client) = state::client() else { return };
    // A record there is a barrier between the program's blocking streams.
    let is_barrier =
        matches!(awaited, Awaited::Stream(STREAM_LEGACY)) && streams::may_have_blocking(context);
    // A record there waits for what came into the legacy stream since the launch.
    let is_behind_legacy = matches!(awaited, Awaited::Stream(stream) if stream != STREAM_LEGACY)
        && SLOTS[slot].non_blocking.load(Relaxed) == 0;
    let may_issue = || match (is_barrier, is_behind_legacy) {
        (true, _) => are_idle(context),
        (_, true) => !has_legacy_launches(client, context),
        _ => true,
    };
    let issued = d.relaxed(|| match STATE.load(Acquire) {
        READY if CONTEXT.load(Relaxed) == context => {
            let issue = || may_issue().then(|| issue(awaited));
            // Beside a call that waits for all that runs the driver would keep us waiting, too.
            quiesce::alone_outside(GUARD_WAIT_MAX, issue).unwrap_or(Ok(false))
        }
        UNMADE => {
            WANTED.store(context, Relaxed);
            Ok(false)
        }
        _ => Ok(false),
    });
    match issued {
        Ok(true) => {
            LAST.store(launch, Relaxed);
            client.counters.lingered.fetch_add(1, Relaxed);
        }
        Ok(false) => {}
        Err(error) => failed(client, error),
    }
}

/// Whether launches in a context's legacy stream may still run. Nothing comes into any stream meanwhile.
fn has_legacy_launches(client: &ClientRegion, context: usize) -> bool {
    let busy = client.activity.busy_streams.load(SeqCst);
    slots::in_use().any(|(index, slot)| {
        let is_legacy = index == OVERFLOW || slot.stream.load(Relaxed) == STREAM_LEGACY;
        let is_here = index == OVERFLOW || slot.context.load(Relaxed) == context;
        is_legacy && is_here && busy & slots::bit(index) != 0
    })
}

/// Whether none of a context's blocking streams but the legacy one has work: a barrier then orders nothing that the
/// launch before it does not. Nothing comes into any stream meanwhile.
fn are_idle(context: usize) -> bool {
    let Some(query) = driver().stream_query else { return false };
    let Some(others) = streams::blocking(context) else {
        log_once(&LOGGED_BLOCKING, "it has blocking streams that nobody saw made");
        return false;
    };
    // SAFETY: the stream lives while it is known to exist.
    let is_idle = |stream: usize| unsafe { query(stream as Ptr) == SUCCESS };
    let ask = |stream: usize| asking::ask(|| streams::exists(stream), || is_idle(stream));
    others.into_iter().all(|stream| ask(stream).unwrap_or_else(|| !streams::exists(stream)))
}

static LOGGED_QUEUES: AtomicBool = AtomicBool::new(false);
static LOGGED_BLOCKING: AtomicBool = AtomicBool::new(false);

#[cold]
fn log_once(logged: &AtomicBool, why: &str) {
    if !logged.swap(true, Relaxed) {
        log!("this program does not linger on the GPU behind some waits: {why}");
    }
}

/// A wait for launches of a context has ended.
#[inline]
pub fn after_wait(context: usize) {
    if WANTED.load(Relaxed) == context && context != 0 {
        make_now(context);
    }
}

/// Make what lingering needs, unless something runs: the driver would wait for it.
#[cold]
fn make_now(context: usize) {
    let d = driver();
    let Some(_guard) = capture::GUARD.lock_within(GUARD_WAIT_MAX) else { return };
    if STATE.load(Acquire) != UNMADE
        || state::is_exiting()
        || capture::is_active()
        || d.current_context() != context
    {
        return;
    }
    let Some(client) = state::client() else { return };
    match d.relaxed(|| quiesce::load(context, Duration::ZERO, || make(context))) {
        None => return,
        Some(Ok(())) => client.report.linger.store(report_state::ACTIVE, Relaxed),
        Some(Err(error)) => failed(client, error),
    }
    WANTED.store(0, Relaxed);
}

fn failed(client: &ClientRegion, error: i32) {
    // What was put in ends by itself.
    STATE.store(FAILED, Release);
    client.report.linger.store(report_state::FAILED, Relaxed);
    client.report.linger_error.store(error as u32, Relaxed);
    log!("this program does not linger on the GPU any more: CUDA error {error}");
}

fn check(result: i32) -> Result<(), i32> {
    if result == SUCCESS { Ok(()) } else { Err(result) }
}

fn make(context: usize) -> Result<(), i32> {
    let d = driver();
    let load = d.module_load.ok_or(NOT_SUPPORTED)?;
    let function = d.module_function.ok_or(NOT_SUPPORTED)?;
    let create_stream = d.stream_create.ok_or(NOT_SUPPORTED)?;
    let create_event = d.event_create.ok_or(NOT_SUPPORTED)?;
    let (mut module, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: valid out-pointers and texts; the context is the calling thread's, and nobody
    // destroys it while the guard is held.
    unsafe {
        check(load(&mut module, PTX.as_ptr().cast()))?;
        for (to, name) in [(&LINGER, c"tally_linger"), (&PENDING, c"tally_pending")] {
            let mut found = std::ptr::null_mut();
            check(function(&mut found, module, name.as_ptr()))?;
            to.store(found as usize, Relaxed);
        }
        check(create_stream(&mut stream, STREAM_NON_BLOCKING, 0))?;
        for to in ENDS.iter().chain([&BEHIND]) {
            let mut event = std::ptr::null_mut();
            check(create_event(&mut event, EVENT_DISABLE_TIMING))?;
            to.store(event as usize, Relaxed);
        }
    }
    NEWEST_ADDRESS.store(d.share_page(&NEWEST)?, Relaxed);
    STREAM.store(stream as usize, Relaxed);
    CONTEXT.store(context, Relaxed);
    STATE.store(READY, Release);
    Ok(())
}

/// Returns whether it was put in: not if as many as may be are there.
fn issue(awaited: Awaited) -> Result<bool, i32> {
    let d = driver();
    let oldest = OLDEST.load(Relaxed);
    let end = ENDS[oldest].load(Relaxed) as Ptr;
    let length_us = LENGTH_US.load(Relaxed);
    let (mut ns, mut looks) = (u64::from(length_us) * 1_000, length_us * LOOKS_PER_US);
    let mut newest = NEWEST_ADDRESS.load(Relaxed);
    let mut mine = NEWEST.word.load(Relaxed).wrapping_add(1);
    let stream = STREAM.load(Relaxed) as Ptr;
    let mut params: [Ptr; 4] = [
        (&raw mut ns).cast(),
        (&raw mut looks).cast(),
        (&raw mut newest).cast(),
        (&raw mut mine).cast(),
    ];
    let query = d.event_query.ok_or(NOT_SUPPORTED)?;
    let record = d.event_record.ok_or(NOT_SUPPORTED)?;
    let wait = d.stream_wait_event.ok_or(NOT_SUPPORTED)?;
    // SAFETY: objects of ours in the current context, the guard held; the program's stream or
    // event is the one that it is using now.
    unsafe {
        match query(end) {
            SUCCESS => {}
            NOT_READY => return Ok(false),
            error => return Err(error),
        }
        let behind = match awaited {
            Awaited::Event(event) => event as Ptr,
            Awaited::Stream(of) => {
                let behind = BEHIND.load(Relaxed) as Ptr;
                check(record(behind, of as Ptr))?;
                behind
            }
        };
        check(wait(stream, behind, 0))?;
        launch(LINGER.load(Relaxed), stream, params.as_mut_ptr())?;
        launch(PENDING.load(Relaxed), stream, std::ptr::null_mut())?;
        check(record(end, stream))?;
    }
    OLDEST.store((oldest + 1) % PENDING_MAX, Relaxed);
    // Not before: until this one is in place, the one before it keeps the GPU.
    NEWEST.word.store(mine, Release);
    Ok(true)
}

/// # Safety
/// A function of ours, its stream, its parameters.
unsafe fn launch(function: usize, stream: Ptr, params: *mut Ptr) -> Result<(), i32> {
    let config = LaunchConfig {
        grid: [1; 3],
        block: [1; 3],
        shared_bytes: 0,
        stream,
        attributes: std::ptr::null(),
        attribute_count: 0,
    };
    let f = driver().launch_ex.ok_or(NOT_SUPPORTED)?;
    // SAFETY: by the caller.
    check(unsafe { f(&config, function as Ptr, params, std::ptr::null_mut()) })
}

/// A context was destroyed, and what was in it.
pub fn forget_context(gone: usize) {
    let _guard = capture::GUARD.lock();
    LAST.store(0, Relaxed);
    if CONTEXT.load(Relaxed) == gone {
        CONTEXT.store(0, Relaxed);
        STATE.store(UNMADE, Release);
    }
}

/// Only in a forked child.
pub fn reset() {
    LENGTH_US.store(0, Relaxed);
    WANTED.store(0, Relaxed);
    CONTEXT.store(0, Relaxed);
    STATE.store(UNMADE, Release);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use tally_softcuda_vm::{BlockLaunch, Memory, Module, Scratch, run_block};

    struct Word(AtomicU32);

    impl Memory for Word {
        fn range(&self, at: u64) -> Option<(u64, u64)> {
            let base = &raw const self.0 as u64;
            (base..base + 4).contains(&at).then_some((base, 4))
        }
    }

    /// Instructions of a timer that looks at most a thousand times.
    fn instructions(newest: u32, mine: u32) -> u64 {
        let program = Module::parse(PTX.to_str().unwrap()).unwrap().link(&mut |_| 0).unwrap();
        let word = Word(AtomicU32::new(newest));
        let mut params = vec![];
        params.extend(u64::MAX.to_le_bytes());
        params.extend(1_000_u32.to_le_bytes());
        params.extend([0; 4]);
        params.extend((&raw const word.0 as u64).to_le_bytes());
        params.extend(mine.to_le_bytes());
        let launch = BlockLaunch {
            program: &program,
            kernel: program.kernel("tally_linger").unwrap(),
            params: &params,
            grid: [1; 3],
            block: [1; 3],
            block_index: [0; 3],
            dynamic_shared_bytes: 0,
            sm_id: 0,
            sm_count: 1,
        };
        let running = AtomicBool::new(false);
        run_block(&launch, &word, &mut Scratch::new(), &running).unwrap().thread_instructions
    }

    #[test]
    fn all_but_the_newest_end_at_once() {
        for mine in [1, u32::MAX] {
            let whole = instructions(mine, mine);
            assert!(whole > 5_000, "{whole}");
            // Not announced yet, for it is being put in.
            assert_eq!(instructions(mine.wrapping_sub(1), mine), whole);
            for later in [1, 2, 1_000] {
                let ended = instructions(mine.wrapping_add(later), mine);
                assert!(ended < 20, "{ended}");
            }
        }
    }
}
