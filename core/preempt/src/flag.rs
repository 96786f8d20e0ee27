//! Yielding.
//!
//! Two threads follow what the core asks ([`tally_ipc::layout::YieldLine`]). One
//! closes and opens the [`gate`]: it makes
//! no driver calls at all, so that nothing in the program can keep it from opening.
//! The other raises and lowers the flag, by
//! stream writes from a stream of its own. The gate opens once the flag is seen
//! lowered, or after [`LOWERING_NS_MAX`]: blocks that then still see it are skipped
//! once more, and run in a later part.
//!
//! Without a core, with a stuck one, and when the program exits, nobody yields.

use crate::contexts::is_closing;
use crate::cuda::{BatchOp, NOT_SUPPORTED, OUT_OF_MEMORY, Ptr, SUCCESS, driver};
use crate::gate::{
    ALIVE, ASLEEP, AWAKE, CONTEXT, FLAG_LINES, FLAG_STREAM, FOR_GOOD, HOLDS, NAPS, OPENING, PAGE,
    SLEEPS, context, flags,
};
use crate::host::{host, log};
use crate::lock::Lock;
use crate::{gate, watch};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;
use tally_ipc::ClientRegion;
use tally_ipc::layout::Gates;
use tally_ipc::wait::{self, CORE_STUCK_NS, now_ns};
use tally_rewriter::TransformRefusal;
use tally_rewriter::control::{FLAG_RAISED, FLAG_STRIDE_BYTES};

/// The gate opens at the latest so long after it was told to.
const LOWERING_NS_MAX: u64 = 200_000;
/// Longest sleep if all wakes were missed: while nothing is under way; while the core asks, because a launch
/// may be stuck; and while a launch is under way.
const NAP_IDLE: Duration = Duration::from_millis(250);
const NAP_ASKED: Duration = Duration::from_millis(20);
const NAP_OPEN: Duration = Duration::from_millis(1);
/// How long a thread with a transformed launch under way spins after the core was heard last.
const SPIN_NS: u64 = 20_000_000;
static SETUP: Lock = Lock::new();
/// Times the flag was raised.
static RAISES: AtomicU32 = AtomicU32::new(0);
static RUNNING: AtomicBool = AtomicBool::new(false);

/// Make what yielding needs in the calling thread's context, which is idle. By the worker only.
pub fn set_up(client: &'static ClientRegion, context: usize) -> Result<(), TransformRefusal> {
    const REFUSED: TransformRefusal = TransformRefusal::DriverRefused;
    let _held = SETUP.lock();
    match CONTEXT.load(Acquire) {
        0 => {}
        mine if mine == context => return Ok(()),
        _ => return Err(REFUSED),
    }
    match driver().relaxed(|| gate::make(client)) {
        Ok(()) => {}
        Err(error) => {
            log!("kernels are not transformed: CUDA error {error}");
            return Err(if error == OUT_OF_MEMORY {
                TransformRefusal::OutOfMemory
            } else {
                REFUSED
            });
        }
    }
    let spawn = |name, run| host().spawn(name, false, run);
    let both = || spawn("tally-gate", run_gate) && spawn("tally-flag", run_flag);
    // Under the lock.
    if !RUNNING.load(SeqCst) {
        if !both() {
            return Err(REFUSED);
        }
        RUNNING.store(true, SeqCst);
    }
    CONTEXT.store(context, Release);
    Ok(())
}

/// When the core asked to yield, if it does now.
fn asked(pulse: &mut Pulse) -> Option<u64> {
    if FOR_GOOD.load(SeqCst) {
        return None;
    }
    let core = host().core()?.region;
    let line = &core.yielding;
    if line.word.load(Acquire) & 1 == 0 || core.serving.load(Relaxed) == 0 {
        pulse.since_ns = 0;
        return None;
    }
    if !host().holds_without_core() && pulse.is_stuck(core.heartbeat.load(Relaxed)) {
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
        now_ns().saturating_sub(self.since_ns) > CORE_STUCK_NS
    }
}

/// Sleep until the core's word may have changed.
fn sleep(seen: Option<u32>, nap: Duration) {
    match (host().core(), seen) {
        (Some(core), Some(seen)) => wait::sleep_on(&core.region.yielding.word, seen, nap),
        _ => host().wait_for_core(nap),
    }
}

/// How long, with nothing under way, if the core's word is `seen`.
fn nap(seen: Option<u32>) -> Duration {
    if seen.is_some_and(|word| word & 1 != 0) { NAP_ASKED } else { NAP_IDLE }
}

fn word() -> Option<u32> {
    host().core().map(|core| core.region.yielding.word.load(SeqCst))
}

/// The gate's thread. No driver calls, no locks of ours that others hold over any.
fn run_gate() {
    let mut pulse = Pulse::default();
    loop {
        let Some(client) = host().client() else { return };
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
            wait::nap(NAP_OPEN);
            continue;
        }
        sleep(seen, nap(seen));
    }
}

/// Body of the thread that raises and lowers the flag.
fn run_flag() {
    driver().relax_thread();
    let mut pulse = Pulse::default();
    let mut raised = false;
    let mut heard_ns = now_ns();
    let mut looked_ns = 0;
    loop {
        if host().is_exiting() || host().client().is_none() {
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
                let is_usable = context != 0 && !is_closing(context);
                if is_usable && driver().ctx_set.map(set) == Some(SUCCESS) {
                    watch::look(now, asked_ns.filter(|_| raised));
                }
            }
            let spins = host().core().is_some_and(|core| !core.spin.is_zero());
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
    if context == 0 || host().is_exiting() || is_closing(context) {
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
        (None, None) => NOT_SUPPORTED,
    });
    if done == SUCCESS { raise } else { before }
}

/// Only in a forked child.
pub(crate) fn reset() {
    RUNNING.store(false, SeqCst);
    RAISES.store(0, SeqCst);
    SETUP.reset();
}
