//! The helper thread: takes the core's coming and going in, passes its probe on to the
//! [`poller`](crate::poller), and sets time slices. A second thread hears the probe.
//!
//! They block all signals and sleep unless they are told something. They hold no descriptor and
//! do not call the driver.

use crate::activity::Change;
use crate::attach::Connection;
use crate::lock::Locked;
use crate::{linger, link, log, poller, state, threads, timeslice};
use rustix::thread::futex;
use std::ffi::c_void;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::{Duration, Instant};
use tally_ipc::layout::report_state;
use tally_ipc::wire::SharingMode;
use tally_ipc::{ClientRegion, CoreRegion};

/// A shorter time slice is set after this time: programs come and go, and each change costs.
const SHORTEN_AFTER: Duration = Duration::from_secs(1);
/// Between two attempts to set a time slice.
const SLICE_RETRY: Duration = Duration::from_millis(10);
/// Between two looks at the core's word, should a wake have been missed.
const PROBE_NAP: Duration = Duration::from_secs(10);
/// Between two looks whether it has heard the last news.
const HEARD: Duration = Duration::from_millis(1);

/// What it was told; 0: nothing.
static TOLD: AtomicU32 = AtomicU32::new(0);
const NEWS: u32 = 1;
const PROBED: u32 = 2;
const NUDGED: u32 = 4;
/// Of the connection.
static LATEST: Locked<Option<News>> = Locked::new(None);
static IS_THERE: AtomicBool = AtomicBool::new(false);
static EXITING: AtomicBool = AtomicBool::new(false);

/// What the connection's thread tells.
#[derive(Debug)]
pub enum News {
    /// The core is gone, or has let this client go.
    Ended,
    /// There is one.
    Connected(Box<Connection>),
}

/// Tell the core that the client became busy or idle, if it asked to hear.
#[inline]
pub fn report_change(change: Change) {
    if change != Change::None
        && let Some(epoch) = state::epoch()
        && epoch.core.notify_activity.load(SeqCst) != 0
    {
        link::ring();
    }
}

fn notice(what: u32) {
    TOLD.fetch_or(what, SeqCst);
    let _ = futex::wake(&TOLD, futex::Flags::PRIVATE, 1);
}

/// Make the helper thread look around.
pub fn nudge() {
    notice(NUDGED);
}

/// Hears the core ask what is still running. Never allocates.
extern "C" fn hear(_: *mut c_void) -> *mut c_void {
    // SAFETY: a name with a NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"tally-probe".as_ptr()) };
    let mut heard: Option<(*const CoreRegion, u32)> = None;
    loop {
        let Some(epoch) = state::epoch() else {
            state::wait_for_core(PROBE_NAP);
            continue;
        };
        let word = epoch.core.probes.load(SeqCst);
        let now = (std::ptr::from_ref(epoch.core), word);
        if heard != Some(now) {
            heard = Some(now);
            notice(PROBED);
        }
        tally_ipc::wait::sleep_on(&epoch.core.probes, word, PROBE_NAP);
    }
}

/// Tell it of the connection, and wait until it has heard.
pub fn tell(news: News) {
    LATEST.with(|latest| *latest = Some(news));
    notice(NEWS);
    while LATEST.with(|latest| latest.is_some()) && !link::is_given_up() {
        threads::nap(HEARD);
    }
}

/// Whether it has been started.
pub fn is_there() -> bool {
    IS_THERE.load(SeqCst)
}

/// Whether the program has begun to exit: nobody will enqueue writes any more.
pub fn is_exiting() -> bool {
    EXITING.load(SeqCst)
}

/// No more driver calls: the driver is about to be torn down.
pub fn program_exits() {
    EXITING.store(true, SeqCst);
    crate::forms::program_exits();
    poller::wait_out();
}

/// Only in a forked child: the thread is not there.
pub fn reset() {
    TOLD.store(0, SeqCst);
    LATEST.reset(None);
    IS_THERE.store(false, SeqCst);
}

/// Start it, for a client that a core took on if there is a sharing mode.
///
/// # Errors
/// What the system refused.
pub fn spawn(client: &'static ClientRegion, sharing: Option<SharingMode>) -> Result<(), String> {
    let mut helper = Helper {
        client,
        slice_us: 0,
        slices_us: [0; 2],
        shorten_at: None,
        slice_at: None,
        slice_repeat: 0,
    };
    if let Some(sharing) = sharing {
        helper.entered(&sharing);
    }
    threads::spawn("tally-shim", move || helper.run())
        .and_then(|()| threads::spawn_plain(hear))
        .map_err(|error| format!("helper thread: {error}"))?;
    IS_THERE.store(true, SeqCst);
    Ok(())
}

/// The thread's state.
#[derive(Debug)]
struct Helper {
    client: &'static ClientRegion,
    /// The time slice that is wanted, us: this client's, or that of several; 0: the driver's.
    slice_us: u64,
    /// What the core said: `[alone in its class, with others]`.
    slices_us: [u64; 2],
    /// When a shorter one is to be set, if it is wanted still.
    shorten_at: Option<Instant>,
    slice_at: Option<Instant>,
    /// Next of [`timeslice::REPEATS`].
    slice_repeat: usize,
}

impl Helper {
    fn entered(&mut self, sharing: &SharingMode) {
        self.slices_us = match sharing {
            SharingMode::TimeSlice { slice_us, shared_us, .. } => [*slice_us, *shared_us],
            _ => [0; 2],
        };
        self.choose_slice();
        if self.slice_us != 0 {
            self.slice_repeat = 0;
            self.slice_at = Some(Instant::now() + timeslice::DELAY);
        }
    }

    /// By how many best-effort clients there are. Longer at once, for with slices that are too
    /// short for several none of them gets on; shorter when that has lasted.
    fn choose_slice(&mut self) {
        let Some(epoch) = state::epoch() else { return };
        let shared = epoch.core.neighbours.load(SeqCst) > 1;
        let wanted = self.slices_us[usize::from(shared)];
        let is_shorter = wanted != 0 && self.slice_us != 0 && wanted < self.slice_us;
        match self.shorten_at {
            _ if !is_shorter => self.want_slice(wanted),
            None => self.shorten_at = Some(Instant::now() + SHORTEN_AFTER),
            Some(at) if at <= Instant::now() => self.want_slice(wanted),
            Some(_) => {}
        }
    }

    fn want_slice(&mut self, wanted: u64) {
        self.shorten_at = None;
        if wanted == self.slice_us {
            return;
        }
        self.slice_us = wanted;
        self.slice_repeat = 0;
        self.client.report.time_slice_us.store(u32::try_from(wanted).unwrap_or(u32::MAX), Relaxed);
        if wanted == 0 {
            timeslice::restore(self.client);
        } else {
            timeslice::renew();
            self.set_slices();
        }
    }

    fn run(mut self) {
        loop {
            let told = self.sleep();
            let now = Instant::now();
            // A new channel group.
            if told & NUDGED != 0 && self.slice_us != 0 && timeslice::has_new() {
                self.slice_at = Some(now + timeslice::DELAY);
                self.slice_repeat = 0;
            }
            if told & NEWS != 0 {
                self.take_in();
            }
            if told & PROBED != 0 {
                self.choose_slice();
                poller::probe();
            }
            if self.shorten_at.is_some_and(|t| t <= now) {
                self.choose_slice();
            }
            if self.slice_at.is_some_and(|t| t <= now) {
                self.set_slices();
            }
        }
    }

    fn take_in(&mut self) {
        match LATEST.with(Option::take) {
            Some(News::Connected(connection)) => {
                let sharing = connection.enter(self.client);
                self.entered(&sharing);
            }
            Some(News::Ended) => self.core_lost(),
            None => {}
        }
    }

    /// Set the time slice of the groups whose turn it is, and settle when next.
    fn set_slices(&mut self) {
        self.slice_at = None;
        if self.slice_us == 0 {
            return;
        }
        if !timeslice::has_new() {
            timeslice::renew();
            self.slice_repeat = (self.slice_repeat + 1).min(timeslice::REPEATS.len() - 1);
        }
        let wait = if timeslice::apply(self.client, self.slice_us) {
            SLICE_RETRY
        } else {
            timeslice::REPEATS[self.slice_repeat]
        };
        self.slice_at = Some(Instant::now() + wait);
    }

    /// Wait for something to do: what it was told.
    fn sleep(&mut self) -> u32 {
        let next = [self.slice_at, self.shorten_at].into_iter().flatten().min();
        let left = next.map(|at| at.saturating_duration_since(Instant::now()));
        let told = TOLD.swap(0, SeqCst);
        if told != 0 || left.is_some_and(|left| left.is_zero()) {
            return told;
        }
        let left = left.map(|left| futex::Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        let _ = futex::wait(&TOLD, futex::Flags::PRIVATE, 0, left.as_ref());
        TOLD.swap(0, SeqCst)
    }

    fn core_lost(&mut self) {
        let dropped = state::epoch().is_some_and(|e| e.core.serving.load(SeqCst) == 0);
        log!("core {}", if dropped { "let this client go" } else { "lost" });
        self.client.report.governed.store(report_state::FAILED, Relaxed);
        state::leave();
        if dropped {
            linger::configure(self.client, false, &SharingMode::Unmanaged);
        }
        // Without a core nobody says how many there are: as for several.
        self.want_slice(if dropped { 0 } else { self.slices_us[1] });
    }
}
