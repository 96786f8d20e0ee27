//! Yielding.
//!
//! Two threads follow what the core asks ([`tally_ipc::layout::YieldLine`]). One
//! closes and opens the gate, a word in host memory on which streams wait: it makes
//! no driver calls at all, so that nothing in the program can keep it from opening.
//! The other raises and lowers the flag in device memory that running blocks read, by
//! stream writes from a stream of its own. The gate opens once the flag is seen
//! lowered, or after [`LOWERING_NS_MAX`]: blocks that then still see it are skipped
//! once more, and run in a later part.
//!
//! Without a core, with a stuck one, and when the program exits, nobody yields.

use super::watch;
use crate::cu::{BatchOp, Ptr, STREAM_NON_BLOCKING, SUCCESS, driver};
use crate::gated::STUCK_NS;
use crate::lock::Lock;
use crate::{helper, log, state, threads};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::time::Duration;
use tally_contract::limits::CLAIMED_BLOCKS_MAX;
use tally_ipc::ClientRegion;
use tally_ipc::layout::{Gates, STREAM_SLOTS, SharedWord};
use tally_ipc::wait::{self, now_ns};
use tally_rewriter::control::{FLAG_RAISED, FLAG_STRIDE_BYTES};

/// Claim words of a stream: blocks of the largest grid that can be claimed.
pub const TABLE_WORDS: u32 = CLAIMED_BLOCKS_MAX;
/// Words of the flag less one. One word is read by all SMs in turn; each further one
/// takes a write to raise: 1, 4, 16 and 128 words take 5, 7, 15 and 94 us (H100). More
/// than four make the reads of some kernels cheaper still (`docs/internals.md`).
pub const FLAG_MASK: u32 = 3;
/// Doubled and one more, they must be less than the flag's raised state.
const EPOCHS_MAX: u32 = 1 << 30;
/// Streams with a notice word.
pub const NOTICES: usize = STREAM_SLOTS - 2;
/// The gate opens at the latest so long after it was told to.
const LOWERING_NS_MAX: u64 = 200_000;
/// Between two looks when nothing is under way, if all wakes were missed; when the core asks, for it may be stuck; and
/// when a launch is under way.
const NAP_IDLE: Duration = Duration::from_millis(250);
const NAP_ASKED: Duration = Duration::from_millis(20);
const NAP_OPEN: Duration = Duration::from_millis(1);
/// How long a thread with a transformed launch under way spins after the core was heard last.
const SPIN_NS: u64 = 20_000_000;
const FLAG_LINES: usize = FLAG_MASK as usize + 1;

/// The context that transformed forms live in; 0: none yet.
static CONTEXT: AtomicUsize = AtomicUsize::new(0);
static SETUP: Lock = Lock::new();
/// Held while the flag's thread uses the context.
static ALIVE: Lock = Lock::new();
/// The gates' page, for the GPU.
static PAGE: AtomicU64 = AtomicU64::new(0);
/// The flag's words in device memory; behind them one that is never raised.
static FLAG: AtomicU64 = AtomicU64::new(0);
static FLAG_STREAM: AtomicUsize = AtomicUsize::new(0);
static RESCUE_STREAM: AtomicUsize = AtomicUsize::new(0);
static TABLES: [AtomicU64; STREAM_SLOTS] = [const { AtomicU64::new(0) }; STREAM_SLOTS];
static EPOCHS: [AtomicU32; STREAM_SLOTS] = [const { AtomicU32::new(0) }; STREAM_SLOTS];
/// Rescues under way: see [`hold`]. Changed, and looked at before the gate opens,
/// under the lock, which is held over nothing else, and by the program's own threads
/// only when it exits.
static HOLDS: AtomicU32 = AtomicU32::new(0);
static OPENING: Lock = Lock::new();
/// Times the flag was raised.
static RAISES: AtomicU32 = AtomicU32::new(0);
static FOR_GOOD: AtomicBool = AtomicBool::new(false);
static RUNNING: AtomicBool = AtomicBool::new(false);
/// How the flag's thread sleeps on the core's word.
static ASLEEP: AtomicU32 = AtomicU32::new(AWAKE);
const AWAKE: u32 = 0;
/// It looks again soon.
const NAPS: u32 = 1;
const SLEEPS: u32 = 2;

/// Longer than the flag's thread is in the driver, unless that waits for the program.
const LEAVE_MAX: Duration = Duration::from_secs(1);

/// Start a thread of the shim.
pub fn spawn(name: &str, run: fn()) -> bool {
    spawn_with(name, threads::STACK_BYTES, run)
}

/// Start one with such a stack.
pub fn spawn_with(name: &str, stack_bytes: usize, run: fn()) -> bool {
    match threads::spawn_with(name, stack_bytes, run) {
        Ok(()) => true,
        Err(error) => {
            log!("thread {name}: {error}");
            false
        }
    }
}

/// Whether a launch in this context could be transformed.
pub fn may_serve(context: usize) -> bool {
    let mine = CONTEXT.load(Acquire);
    context != 0 && (mine == 0 || mine == context)
}

/// Make what yielding needs in the calling thread's context, which is idle. By the worker only.
pub fn set_up(client: &'static ClientRegion, context: usize) -> bool {
    let _held = SETUP.lock();
    match CONTEXT.load(Acquire) {
        0 => {}
        mine => return mine == context,
    }
    match driver().relaxed(|| make(client)) {
        Ok(()) => {}
        Err(error) => {
            log!("kernels are not cut: CUDA error {error}");
            return false;
        }
    }
    let both = || spawn("tally-gate", gate) && spawn("tally-flag", flag);
    if !RUNNING.swap(true, SeqCst) && !both() {
        return false;
    }
    CONTEXT.store(context, Release);
    true
}

fn make(client: &'static ClientRegion) -> Result<(), i32> {
    const MISSING: i32 = crate::cu::NOT_SUPPORTED;
    let d = driver();
    let address = d.share_page(&client.gates)?;
    let mut flag = 0;
    let (mut low, mut high) = (0, 0);
    let (mut flag_stream, mut rescue_stream) = (std::ptr::null_mut(), std::ptr::null_mut());
    let words = 2 * FLAG_LINES * FLAG_STRIDE_BYTES as usize / 4;
    let check = |r: i32| if r == SUCCESS { Ok(()) } else { Err(r) };
    // SAFETY: valid out-pointers, memory and streams of our own.
    unsafe {
        d.stream_wait.ok_or(MISSING)?;
        check(d.mem_alloc.ok_or(MISSING)?(&mut flag, words * 4))?;
        check(d.stream_priorities.ok_or(MISSING)?(&mut low, &mut high))?;
        let create = d.stream_create.ok_or(MISSING)?;
        check(create(&mut flag_stream, STREAM_NON_BLOCKING, high))?;
        check(create(&mut rescue_stream, STREAM_NON_BLOCKING, high))?;
        check(d.mem_set.ok_or(MISSING)?(flag, 0, words, flag_stream))?;
        check(d.stream_synchronize.ok_or(MISSING)?(flag_stream))?;
    }
    PAGE.store(address, Relaxed);
    FLAG.store(flag, Relaxed);
    FLAG_STREAM.store(flag_stream as usize, Relaxed);
    RESCUE_STREAM.store(rescue_stream as usize, Relaxed);
    Ok(())
}

/// The context in which launches are transformed, if there is one.
pub fn context() -> usize {
    CONTEXT.load(Acquire)
}

/// The stream that rescues run in.
pub fn rescue_stream() -> usize {
    RESCUE_STREAM.load(Relaxed)
}

/// The flag, and a word that is never raised: device addresses.
pub fn flags() -> (u64, u64) {
    let flag = FLAG.load(Relaxed);
    (flag, flag + (FLAG_LINES * FLAG_STRIDE_BYTES as usize) as u64)
}

/// The gate's word: device address.
fn gate_address() -> u64 {
    // The half of the line that the CPU writes.
    PAGE.load(Relaxed)
        + (std::mem::offset_of!(Gates, gate) + std::mem::offset_of!(SharedWord, host)) as u64
}

/// The notice word of a stream slot: device address.
pub fn notice_address(slot: usize) -> u64 {
    let at = std::mem::offset_of!(Gates, notices) + slot * size_of::<SharedWord>();
    PAGE.load(Relaxed) + at as u64
}

/// The claim words of a slot, for a launch into `stream`; made at first use.
pub fn table(slot: usize, stream: usize) -> Option<u64> {
    let known = TABLES[slot].load(Acquire);
    if known != 0 {
        return Some(known);
    }
    let d = driver();
    let (alloc, set) = (d.mem_alloc?, d.mem_set?);
    let mut table = 0;
    // SAFETY: a valid out-pointer; memory of our own, cleared before its first use
    // because that is in the same stream. The slot's lock is held.
    unsafe {
        let got = d.relaxed(|| alloc(&mut table, TABLE_WORDS as usize * 4));
        if got != SUCCESS || set(table, 0, TABLE_WORDS as usize, stream as Ptr) != SUCCESS {
            return None;
        }
    }
    TABLES[slot].store(table, Release);
    Some(table)
}

/// So many epochs of a slot's table, in a row, for a launch into `stream`; the first one
/// doubled. The slot's lock is held.
pub fn epochs(slot: usize, count: u32, stream: usize) -> Option<u32> {
    let (mut first, mut next) = in_a_row(EPOCHS[slot].load(Relaxed), count);
    if next > EPOCHS_MAX {
        // Used up: the table is as new once what was launched before is over. A rescue is,
        // too, by then: see `hold`.
        let (table, words) = (TABLES[slot].load(Acquire), TABLE_WORDS as usize);
        // SAFETY: memory of our own, the program's stream.
        if unsafe { driver().mem_set?(table, 0, words, stream as Ptr) } != SUCCESS {
            return None;
        }
        (first, next) = in_a_row(0, count);
    }
    EPOCHS[slot].store(next - 1, Relaxed);
    Some(first * 2)
}

/// The first of so many epochs behind `last`, and the one behind them.
fn in_a_row(last: u32, count: u32) -> (u32, u32) {
    (last + 1, last.saturating_add(1).saturating_add(count))
}

/// Close the gate, whatever the core says, until [`release`]: what passes it would
/// overtake a rescue.
pub fn hold(client: &ClientRegion) {
    let _held = OPENING.lock();
    HOLDS.fetch_add(1, SeqCst);
    if FOR_GOOD.load(SeqCst) {
        return;
    }
    client.gates.gate.host.store(1, SeqCst);
}

pub fn release() {
    let held = OPENING.lock();
    HOLDS.fetch_sub(1, SeqCst);
    drop(held);
    // Its thread may have slept since before.
    if let Some(epoch) = state::epoch() {
        wait::wake_sleepers(&epoch.core.yielding.word);
    }
}

/// Have a stream wait until nobody is asked to yield.
pub fn wait_in(stream: usize) -> bool {
    let wait = driver().stream_wait;
    // SAFETY: the program's stream; a registered word.
    wait.is_some_and(|f| unsafe {
        f(stream as Ptr, gate_address(), 0, crate::cu::WAIT_VALUE_EQUAL) == SUCCESS
    })
}

/// A transformed launch was issued: see that the flag's thread looks.
pub fn launched() {
    let asleep = ASLEEP.load(SeqCst);
    if asleep != AWAKE
        && let Some(epoch) = state::epoch()
        && (asleep == SLEEPS || !epoch.spin.is_zero())
    {
        wait::wake_sleepers(&epoch.core.yielding.word);
    }
}

/// When the core asked to yield, if it does now.
fn asked(pulse: &mut Pulse) -> Option<u64> {
    if FOR_GOOD.load(SeqCst) {
        return None;
    }
    let epoch = state::epoch()?;
    let line = &epoch.core.yielding;
    if line.word.load(Acquire) & 1 == 0 || epoch.core.serving.load(Relaxed) == 0 {
        pulse.since_ns = 0;
        return None;
    }
    if !state::fail_hold() && pulse.is_stuck(epoch.core.heartbeat.load(Relaxed)) {
        return None;
    }
    Some(line.at_ns.load(Relaxed))
}

/// Tells a stuck core from one that is waited for.
#[derive(Default)]
struct Pulse {
    beat: u64,
    since_ns: u64,
}

impl Pulse {
    fn is_stuck(&mut self, beat: u64) -> bool {
        if self.since_ns == 0 || beat != self.beat {
            (self.beat, self.since_ns) = (beat, now_ns());
            return false;
        }
        now_ns().saturating_sub(self.since_ns) > STUCK_NS
    }
}

/// Sleep until the core's word may have changed.
fn sleep(seen: Option<u32>, nap: Duration) {
    match (state::epoch(), seen) {
        (Some(epoch), Some(seen)) => wait::sleep_on(&epoch.core.yielding.word, seen, nap),
        _ => state::wait_for_core(nap),
    }
}

/// How long, with nothing under way, if the core's word is `seen`.
fn nap(seen: Option<u32>) -> Duration {
    if seen.is_some_and(|word| word & 1 != 0) { NAP_ASKED } else { NAP_IDLE }
}

fn word() -> Option<u32> {
    state::epoch().map(|e| e.core.yielding.word.load(SeqCst))
}

/// The gate's thread. No driver calls, no locks of ours that others hold over any.
fn gate() {
    let mut pulse = Pulse::default();
    loop {
        let Some(client) = state::client() else { return };
        let seen = word();
        let gate = &client.gates.gate.host;
        if asked(&mut pulse).is_some() {
            gate.store(1, SeqCst);
        } else if gate.load(Relaxed) != 0 {
            let start = now_ns();
            let lowered = || client.gates.flag_seen.gpu.load(Acquire) == RAISES.load(Acquire);
            while !lowered()
                && now_ns().saturating_sub(start) < LOWERING_NS_MAX
                && !FOR_GOOD.load(SeqCst)
            {
                std::thread::yield_now();
            }
            let held = OPENING.lock();
            if HOLDS.load(SeqCst) == 0 || FOR_GOOD.load(SeqCst) {
                gate.store(0, SeqCst);
                continue;
            }
            drop(held);
            threads::nap(NAP_OPEN);
            continue;
        }
        sleep(seen, nap(seen));
    }
}

/// The flag's thread.
fn flag() {
    driver().relax_thread();
    let mut pulse = Pulse::default();
    let mut raised = false;
    let mut heard_ns = now_ns();
    let mut looked_ns = 0;
    loop {
        if helper::is_exiting() || state::client().is_none() {
            return;
        }
        let seen = word();
        let asked_ns = asked(&mut pulse);
        if asked_ns.is_some() != raised {
            raised = apply(asked_ns.is_some(), raised);
            heard_ns = now_ns();
        }
        let is_open = watch::is_open();
        if is_open {
            let now = now_ns();
            // Often only while somebody waits for the answer.
            if raised || now.saturating_sub(looked_ns) > 1_000_000 {
                looked_ns = now;
                let _alive = ALIVE.lock();
                let context = context();
                // SAFETY: the context lives while the lock is held.
                let set = |f: unsafe extern "C" fn(Ptr) -> i32| unsafe { f(context as Ptr) };
                let is_usable = context != 0 && !super::is_closing(context);
                if is_usable && driver().ctx_set.map(set) == Some(SUCCESS) {
                    watch::look(now, asked_ns.filter(|_| raised));
                }
            }
            let spins = state::epoch().is_some_and(|e| !e.spin.is_zero());
            if spins && now.saturating_sub(heard_ns) < SPIN_NS {
                for _ in 0..16 {
                    std::hint::spin_loop();
                }
                continue;
            }
        }
        let (how, nap) = match is_open {
            true => (NAPS, NAP_OPEN),
            false if raised => (SLEEPS, NAP_ASKED),
            false => (SLEEPS, nap(seen)),
        };
        ASLEEP.store(how, SeqCst);
        if watch::is_open() == is_open {
            sleep(seen, nap);
        }
        ASLEEP.store(AWAKE, SeqCst);
        if !is_open {
            heard_ns = now_ns();
        }
    }
}

/// Raise or lower the flag. Returns whether it is raised now.
fn apply(raise: bool, before: bool) -> bool {
    let _alive = ALIVE.lock();
    let (context, d) = (context(), driver());
    if context == 0 || helper::is_exiting() || super::is_closing(context) {
        return false;
    }
    // SAFETY: the context lives while the lock is held.
    if d.ctx_set.is_none_or(|f| unsafe { f(context as Ptr) } != SUCCESS) {
        return before;
    }
    let (flag, _) = flags();
    let mut ops = [BatchOp::default(); FLAG_LINES + 1];
    for (i, op) in ops[..FLAG_LINES].iter_mut().enumerate() {
        let address = flag + i as u64 * u64::from(FLAG_STRIDE_BYTES);
        *op = BatchOp::write(address, if raise { FLAG_RAISED } else { 0 });
    }
    let mut count = FLAG_LINES;
    if raise {
        RAISES.fetch_add(1, SeqCst);
    } else {
        let at = PAGE.load(Relaxed) + std::mem::offset_of!(Gates, flag_seen) as u64;
        ops[FLAG_LINES] = BatchOp::write(at, RAISES.load(SeqCst));
        count += 1;
    }
    let stream = FLAG_STREAM.load(Relaxed) as Ptr;
    let done = d.relaxed(|| match (d.stream_batch, d.stream_write) {
        // SAFETY: a stream and words of our own.
        (Some(batch), _) => unsafe { batch(stream, count as u32, ops.as_mut_ptr(), 0) },
        (None, Some(write)) => ops[..count].iter().fold(SUCCESS, |result, op| {
            // SAFETY: as above.
            let r = unsafe { write(stream, op.address, op.value as u32, op.flags) };
            if result == SUCCESS { r } else { result }
        }),
        (None, None) => crate::cu::NOT_SUPPORTED,
    });
    if done == SUCCESS { raise } else { before }
}

/// Nobody yields any more: the driver is about to be torn down.
pub fn open_for_good() {
    FOR_GOOD.store(true, SeqCst);
    // Whoever closes it under the lock has seen that, or is done.
    let held = OPENING.lock();
    if let Some(client) = state::client() {
        client.gates.gate.host.store(0, SeqCst);
    }
    drop(held);
    if let Some(epoch) = state::epoch() {
        wait::wake_sleepers(&epoch.core.yielding.word);
    }
}

/// Wait until the flag's thread is out of the context that it uses.
pub fn leave_context() {
    drop(ALIVE.lock_within(LEAVE_MAX));
}

/// A context is destroyed. Nothing uses it any more.
pub fn forget_context(gone: usize) {
    if CONTEXT.load(Acquire) == gone {
        CONTEXT.store(0, Release);
        HOLDS.store(0, SeqCst);
        for table in &TABLES {
            table.store(0, Release);
        }
        watch::forget();
    }
}

/// Only in a forked child.
pub fn reset() {
    CONTEXT.store(0, SeqCst);
    for (table, epoch) in TABLES.iter().zip(&EPOCHS) {
        table.store(0, SeqCst);
        epoch.store(0, SeqCst);
    }
    RUNNING.store(false, SeqCst);
    FOR_GOOD.store(false, SeqCst);
    ASLEEP.store(AWAKE, SeqCst);
    HOLDS.store(0, SeqCst);
    RAISES.store(0, SeqCst);
    OPENING.reset();
    SETUP.reset();
    ALIVE.reset();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_do_not_overlap_and_stay_below_the_flag() {
        let (first, next) = in_a_row(0, 3);
        assert_eq!((first, next), (1, 4));
        assert_eq!(in_a_row(next - 1, 2), (4, 6));
        assert!(in_a_row(EPOCHS_MAX - 2, 1).1 <= EPOCHS_MAX);
        assert!(in_a_row(EPOCHS_MAX - 2, 2).1 > EPOCHS_MAX);
        // The last epoch's claimed state is no raised flag.
        const { assert!(2 * (EPOCHS_MAX - 1) < FLAG_RAISED) };
    }
}
