//! What the whole shim shares: whether it is on, this process's region, the core
//! it is attached to now, and what a forked child forgets.
//!
//! Must never free what a launch may still be reading: regions and registrations of earlier
//! cores are kept on purpose (a few KiB for each time that the core was restarted).

use rustix::thread::futex;
use std::cell::Cell;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};
use std::time::Duration;
use tally_ipc::layout::Counters;
use tally_ipc::{ClientRegion, CoreRegion};

/// [`mode`]: the environment was not looked at yet.
pub const MODE_UNKNOWN: u32 = 0;
/// [`mode`]: nothing asks for Tally: pass everything through and count nothing.
pub const MODE_OFF: u32 = 1;
/// [`mode`]: launches are governed.
pub const MODE_ON: u32 = 2;

static MODE: AtomicU32 = AtomicU32::new(MODE_UNKNOWN);
static CLIENT: AtomicPtr<ClientRegion> = AtomicPtr::new(std::ptr::null_mut());
static REGISTRATION: AtomicPtr<Registration> = AtomicPtr::new(std::ptr::null_mut());
/// Stands in for a core's grant while there is none.
static NO_GRANT: AtomicU64 = AtomicU64::new(0);
static GRANT: AtomicPtr<AtomicU64> = AtomicPtr::new((&raw const NO_GRANT).cast_mut());
/// Bumped when the core comes or goes; threads without a core sleep on it.
static REGISTRATION_CHANGES: AtomicU32 = AtomicU32::new(0);
/// What to do without a core, by the last one's word or the environment's.
static FAIL_HOLD: AtomicBool = AtomicBool::new(false);

/// `cuInit` has run in this process.
static INITIALISED: AtomicBool = AtomicBool::new(false);
/// The program has begun to exit.
static EXITING: AtomicBool = AtomicBool::new(false);

/// This client's class, by the last core's word or, before any, by the environment's.
static HIGH_PRIORITY: AtomicBool = AtomicBool::new(false);

/// One attachment to one core.
#[derive(Debug)]
pub struct Registration {
    pub core: &'static CoreRegion,
    /// How long a waiting thread spins.
    pub spin: Duration,
    /// The first ticket that this core answers; earlier ones belonged to the core before it.
    pub first_ticket: u64,
    /// The heartbeat, plus one, at which it was found stuck; 0: never.
    pub stuck_at: AtomicU64,
}

impl Registration {
    /// It was found stuck and has not moved since.
    pub fn is_stuck(&self) -> bool {
        let at = self.stuck_at.load(Relaxed);
        at != 0 && self.core.heartbeat.load(Relaxed).wrapping_add(1) == at
    }
}

pub fn mode() -> u32 {
    MODE.load(Acquire)
}

/// Set once the environment was looked at.
pub fn set_mode(mode: u32) {
    MODE.store(mode, Release);
}

/// This process's region, if the shim is on.
#[inline]
pub fn client() -> Option<&'static ClientRegion> {
    let p = CLIENT.load(Acquire);
    // SAFETY: null, or leaked by `set_client`.
    unsafe { p.as_ref() }
}

/// Set when the region was made.
pub fn set_client(client: &'static ClientRegion) {
    CLIENT.store(std::ptr::from_ref(client).cast_mut(), Release);
}

/// The shim is not to be on after all. The region stays: a thread may be looking at it.
pub fn forget_client() {
    CLIENT.store(std::ptr::null_mut(), Release);
}

/// The core active, if any.
pub fn registration() -> Option<&'static Registration> {
    // SAFETY: null, or leaked by `enter`.
    unsafe { REGISTRATION.load(Acquire).as_ref() }
}

/// Whether `registration` is not active any more.
pub fn is_over(registration: &'static Registration) -> bool {
    !std::ptr::eq(REGISTRATION.load(Acquire), registration)
}

/// Whether launches are ungated now: the one question that the launch path asks.
#[inline(always)]
pub fn is_ungated() -> bool {
    // SAFETY: `NO_GRANT` or a word in a leaked region, always valid.
    unsafe { &*GRANT.load(Acquire) }.load(Acquire) == u64::MAX
}

/// Hold launches while there is no core, rather than run them unscheduled.
pub fn fail_hold() -> bool {
    FAIL_HOLD.load(Relaxed)
}

pub fn set_fail_hold(hold: bool) {
    FAIL_HOLD.store(hold, Relaxed);
}

/// Whether the shim is on and this client is a best-effort one, even while a grant in advance leaves its launches
/// ungated.
pub fn is_best_effort() -> bool {
    client().is_some() && !HIGH_PRIORITY.load(Relaxed)
}

pub fn set_high_priority(high: bool) {
    HIGH_PRIORITY.store(high, Relaxed);
}

/// Whether `cuInit` has run.
pub fn is_initialised() -> bool {
    INITIALISED.load(Acquire)
}

pub fn set_initialised(has_run: bool) {
    INITIALISED.store(has_run, Release);
}

/// Whether the program has begun to exit: nobody will enqueue writes any more, and the driver is about to be torn down.
pub fn is_exiting() -> bool {
    EXITING.load(SeqCst)
}

pub fn begin_exit() {
    EXITING.store(true, SeqCst);
}

/// A core took this client on.
pub fn enter(registration: Registration) {
    let registration: &'static Registration = Box::leak(Box::new(registration));
    REGISTRATION.store(std::ptr::from_ref(registration).cast_mut(), SeqCst);
    GRANT.store((&raw const registration.core.granted.ticket).cast_mut(), SeqCst);
    changed();
}

/// The core is gone: wake everybody who waits for it.
pub fn leave() {
    let over = registration();
    GRANT.store((&raw const NO_GRANT).cast_mut(), SeqCst);
    REGISTRATION.store(std::ptr::null_mut(), SeqCst);
    if let Some(over) = over {
        tally_ipc::wait::wake_own(over.core);
        tally_ipc::wait::wake_sleepers(&over.core.yielding.word);
        tally_ipc::wait::wake_sleepers(&over.core.probes);
    }
    changed();
}

fn changed() {
    REGISTRATION_CHANGES.fetch_add(1, SeqCst);
    let _ = futex::wake(&REGISTRATION_CHANGES, futex::Flags::PRIVATE, i32::MAX as u32);
}

/// Sleep until a core comes (or goes), at most so long.
pub fn wait_for_core(most: Duration) {
    let seen = REGISTRATION_CHANGES.load(SeqCst);
    if registration().is_none() {
        let nap = rustix::fs::Timespec {
            tv_sec: most.as_secs() as i64,
            tv_nsec: i64::from(most.subsec_nanos()),
        };
        let _ = futex::wait(&REGISTRATION_CHANGES, futex::Flags::PRIVATE, seen, Some(&nap));
    }
}

/// Add one to a counter of this client, if the shim is on.
pub fn count(which: impl Fn(&Counters) -> &AtomicU64) {
    if let Some(client) = client() {
        which(&client.counters).fetch_add(1, Relaxed);
    }
}

/// In a forked child: forget the parent's core and region. The region's pages
/// may be pinned and missing here; nothing touches them again.
pub fn reset() {
    GRANT.store((&raw const NO_GRANT).cast_mut(), SeqCst);
    REGISTRATION.store(std::ptr::null_mut(), SeqCst);
    CLIENT.store(std::ptr::null_mut(), SeqCst);
    FAIL_HOLD.store(false, SeqCst);
    HIGH_PRIORITY.store(false, SeqCst);
    set_mode(MODE_UNKNOWN);
}

thread_local! {
    /// Inside a wrapped launch on its slow path; see [`crate::resolve`] on nesting.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// A number for this thread that no other one of the process ever has; 0: none yet.
    static TOKEN: Cell<u64> = const { Cell::new(0) };
}

/// Whether the calling thread is inside a wrapped launch: what it calls in turn,
/// through another interposer, is the same launch and passes straight through.
pub fn is_inside() -> bool {
    INSIDE.get()
}

/// Run the inside of a launch.
pub fn inside<T>(run: impl FnOnce() -> T) -> T {
    INSIDE.set(true);
    let result = run();
    INSIDE.set(false);
    result
}

/// The calling thread's own number.
pub fn thread_token() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    if TOKEN.get() == 0 {
        TOKEN.set(NEXT.fetch_add(1, Relaxed));
    }
    TOKEN.get()
}
