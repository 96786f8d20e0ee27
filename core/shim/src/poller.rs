//! The thread that asks the driver what has ended: events behind gated launches
//! ([`completion`](crate::completion)), and, when the core wants to know what a client still runs,
//! its streams; also events of a [profiled unit](crate::unit_profile).
//!
//! [Asking](crate::asking) waits for nothing and puts nothing into any stream. The thread holds none of the shim's
//! locks while it is in the driver.
//!
//! A stream without a handle of its own (a thread's default stream) means something else in this thread:
//! the thread that it belongs to is asked to put an event into it the next time that it calls the driver.

use crate::activity::{self, Snapshot};
use crate::completion::{self, Found, Pace};
use crate::slots::{self, DRAINING, GONE, LIVE, MANY_CONTEXTS, OVERFLOW, SLOTS, Slot};
use crate::{asking, capture, link, state, threads, unit_profile, units};
use rustix::thread::futex;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;
use tally_ipc::ClientRegion;
use tally_ipc::layout::STREAM_SLOTS;
use tally_ipc::wait::{self, now_ns};
use tally_preempt::cuda::{NOT_READY, Ptr, STREAM_PER_THREAD, SUCCESS, driver};
use tally_preempt::{joins, occupied_sms};

/// Longest pause between two looks, ns.
const NAP_NS_MAX: u64 = 200_000;
/// Shortest pause between two looks where nobody spins, ns.
const NAP_NS_MIN: u64 = 50_000;
/// Looks closer together than this are not worth a sleep, ns.
const SPIN_NS: u64 = 4_000;
/// The thread looks around for so long after the last launch before it must be woken, ns.
const AWAKE_NS: u64 = 10_000_000;
const AWAKE_NAP_NS: u64 = 100_000;
/// Between two looks at a busy stream that the core asked about: first, and at most, ns.
const LOOK_NS: [u64; 2] = [50_000, 1_000_000];

static WORK: AtomicU32 = AtomicU32::new(0);
/// Launches that wait for their decision.
static WAITING: AtomicU32 = AtomicU32::new(0);
/// The latest launch was leased: nobody decides by what is under way before the lease is used up.
static IS_LEASED: AtomicBool = AtomicBool::new(false);
static ASLEEP: AtomicBool = AtomicBool::new(false);
/// The core wants to know what is still running.
static PROBED: AtomicBool = AtomicBool::new(false);

/// Start it.
///
/// # Errors
/// The system's.
pub fn spawn() -> std::io::Result<()> {
    threads::spawn("tally-poll", run)
}

/// Wakes the thread, if it sleeps, because there is something to look at.
#[inline]
pub fn wake() {
    if ASLEEP.load(SeqCst) {
        wake_now();
    }
}

#[cold]
fn wake_now() {
    WORK.fetch_add(1, SeqCst);
    let _ = futex::wake(&WORK, futex::Flags::PRIVATE, 1);
}

/// The core asks what is still running.
pub fn probe() {
    PROBED.store(true, SeqCst);
    wake_now();
}

/// Whether a slot's stream has nothing to do. `None`: it cannot be asked. By this thread only.
pub fn is_stream_idle(index: usize, slot: &Slot) -> Option<bool> {
    let (stream, context) = (slot.stream.load(Relaxed), slot.context.load(Relaxed));
    let can_be_asked = index != OVERFLOW
        && stream != STREAM_PER_THREAD
        && context != MANY_CONTEXTS
        && slot.phase.load(Acquire) == LIVE;
    let query = driver().stream_query.filter(|_| can_be_asked)?;
    // A stream that is captured must not be asked, nor one that might be.
    // The slot may be another stream's meanwhile.
    let is_there = || {
        slot.phase.load(SeqCst) == LIVE
            && slot.stream.load(SeqCst) == stream
            && slot.context.load(SeqCst) == context
            && !capture::is_active()
    };
    let is_idle = asking::ask(is_there, || {
        // SAFETY: stream and context live, see the module's documentation.
        unsafe {
            driver().ctx_set.is_some_and(|set| set(context as Ptr) == SUCCESS)
                && query(joins::latest(index, stream) as Ptr) != NOT_READY
        }
    });
    Some(is_idle.unwrap_or(false))
}

/// When to look at the streams that the core asked about.
#[derive(Default)]
struct Probe {
    due_ns: Option<u64>,
    pause_ns: u64,
    /// Launches of each slot when it asked.
    seen: Option<Box<[u32; STREAM_SLOTS]>>,
}

fn run() {
    threads::wake_on_time();
    // This thread is older than the driver's start.
    let mut is_relaxed = false;
    let mut probe = Probe::default();
    let mut look = unit_profile::Look::default();
    let mut active_ns = now_ns();
    loop {
        let Some(client) = state::client() else { return };
        if state::is_exiting() {
            return;
        }
        let word = WORK.load(SeqCst);
        is_relaxed = is_relaxed || driver().relax_thread();
        let now = now_ns();
        let mut nap_ns = u64::MAX;
        let mut left = completion::tracked();
        let pace = pace();
        if left != 0 {
            active_ns = now;
        }
        while left != 0 {
            let index = left.trailing_zeros() as usize;
            left &= left - 1;
            let slot = &SLOTS[index];
            let is_there = || matches!(slot.phase.load(SeqCst), LIVE | DRAINING);
            let poll = || completion::poll_events(client, index, true, pace);
            let found = match asking::ask(is_there, poll) {
                Some(Found::Nothing) => completion::tail(client, index),
                Some(later) => later,
                // Its context is being destroyed.
                None if slot.phase.load(SeqCst) == GONE => Found::Later(NAP_NS_MAX),
                None => completion::tail(client, index),
            };
            if let Found::Later(ns) = found {
                nap_ns = nap_ns.min(ns);
            }
        }
        if let Some(ns) = look.look(client) {
            (nap_ns, active_ns) = (nap_ns.min(ns), now);
        }
        release_drained(client);
        if PROBED.swap(false, SeqCst) {
            probe = Probe { due_ns: Some(now), pause_ns: LOOK_NS[0], seen: Some(sequences()) };
        }
        if probe.due_ns.is_some_and(|due| due <= now) {
            probe.look(client, now);
        }
        if let Some(due) = probe.due_ns {
            nap_ns = nap_ns.min(due.saturating_sub(now));
        }
        nap(word, nap_ns, now.saturating_sub(active_ns) < AWAKE_NS);
    }
}

/// Do something that waits for a decision, which may wait for a launch to end.
pub fn while_waiting<T>(wait: impl FnOnce() -> T) -> T {
    WAITING.fetch_add(1, Relaxed);
    let result = wait();
    WAITING.fetch_sub(1, Relaxed);
    result
}

/// A launch was made, under a lease or not.
pub fn note_leased(is_leased: bool) {
    if IS_LEASED.load(Relaxed) != is_leased {
        IS_LEASED.store(is_leased, Relaxed);
    }
}

/// Whether something may depend on another launch's end: a launch of this program, another client's, or a decision.
fn pace() -> Pace {
    let is_shared =
        |registration: &state::Registration| registration.core.neighbours.load(Relaxed) > 1;
    if WAITING.load(Relaxed) > 0 {
        Pace::WAITED_FOR
    } else if !IS_LEASED.load(Relaxed) {
        Pace::SHARED
    } else if state::registration().is_some_and(is_shared) {
        Pace::LEASED
    } else {
        Pace::CALM
    }
}

fn nap(word: u32, nap_ns: u64, is_active: bool) {
    let spins = state::registration().is_some_and(|registration| !registration.spin.is_zero());
    if nap_ns != u64::MAX || is_active {
        let nap_ns = nap_ns.min(if nap_ns == u64::MAX { AWAKE_NAP_NS } else { NAP_NS_MAX });
        match nap_ns {
            ns if spins && ns < SPIN_NS => (0..32).for_each(|_| std::hint::spin_loop()),
            ns if spins => wait::nap(Duration::from_nanos(ns)),
            ns => wait::nap(Duration::from_nanos(ns.max(NAP_NS_MIN))),
        }
        return;
    }
    ASLEEP.store(true, SeqCst);
    if completion::tracked() == 0 && !unit_profile::is_open() && !PROBED.load(SeqCst) {
        let _ = futex::wait(&WORK, futex::Flags::PRIVATE, word, None);
    }
    ASLEEP.store(false, SeqCst);
}

fn sequences() -> Box<[u32; STREAM_SLOTS]> {
    Box::new(std::array::from_fn(|i| SLOTS[i].word.snapshot().sequence()))
}

impl Probe {
    /// Look at all busy streams in which nothing was launched since the core asked.
    fn look(&mut self, client: &ClientRegion, now: u64) {
        let busy = client.activity.busy_streams.load(SeqCst);
        let mut is_any_left = false;
        for (index, slot) in slots::in_use().filter(|(i, _)| busy & slots::bit(*i) != 0) {
            let seen = slot.word.snapshot();
            let asked_at = self.seen.as_ref().map(|seen| seen[index]);
            if !seen.is_settled() || asked_at != Some(seen.sequence()) {
                continue;
            }
            match is_stream_idle(index, slot) {
                Some(true) => over(client, index, slot, seen),
                Some(false) => is_any_left = true,
                // Its thread can put an event into a stream of its own.
                None if slot.stream.load(Relaxed) == STREAM_PER_THREAD => {
                    slot.mark_wanted.store(true, Relaxed);
                }
                None => {}
            }
        }
        self.due_ns = is_any_left.then_some(now + self.pause_ns);
        self.pause_ns = (2 * self.pause_ns).min(LOOK_NS[1]);
    }
}

/// What was launched in a slot until `seen` is over.
fn over(client: &ClientRegion, index: usize, slot: &Slot, seen: Snapshot) {
    completion::seen_done(client, index, seen.sequence());
    occupied_sms::ended(index, seen.sequence());
    units::idle(client, index);
    let bit = slots::bit(index);
    link::report_change(activity::covered(&client.activity, &slot.word, bit, seen));
}

/// Free the slots of destroyed streams whose work is over.
fn release_drained(client: &ClientRegion) {
    for (index, slot) in slots::in_use().filter(|(i, _)| *i != OVERFLOW) {
        if slot.phase.load(Acquire) != DRAINING {
            continue;
        }
        if completion::tracked() & slots::bit(index) == 0 {
            // No event could be put behind its work, or that has happened.
            over(client, index, slot, slot.word.snapshot());
            units::forget(client, index);
            slots::release(index);
        }
    }
}

/// Only in a forked child: the thread is not there.
pub fn reset() {
    ASLEEP.store(false, SeqCst);
    PROBED.store(false, SeqCst);
    WAITING.store(0, SeqCst);
}
