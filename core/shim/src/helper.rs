//! The helper thread: takes the core's coming and going in, passes its probe on to the
//! [`poller`](crate::poller), and sets time slices. A second thread hears the probe.
//!
//! They block all signals and sleep unless they are told something. They hold no descriptor and
//! do not call the driver.

use crate::news::{self, NEWS, NUDGED, News, PROBED};
use crate::{enter, linger, log, poller, state, threads, timeslice};
use std::ffi::c_void;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
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

/// Hears the core ask what is still running. Never allocates.
extern "C" fn hear(_: *mut c_void) -> *mut c_void {
    // SAFETY: a name with a NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"tally-probe".as_ptr()) };
    let mut heard: Option<(*const CoreRegion, u32)> = None;
    loop {
        let Some(registration) = state::registration() else {
            state::wait_for_core(PROBE_NAP);
            continue;
        };
        let word = registration.core.probes.load(SeqCst);
        let now = (std::ptr::from_ref(registration.core), word);
        if heard != Some(now) {
            heard = Some(now);
            news::notice(PROBED);
        }
        tally_ipc::wait::sleep_on(&registration.core.probes, word, PROBE_NAP);
    }
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
    news::begin();
    Ok(())
}

/// State of the helper thread.
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
    /// Index into [`timeslice::REPEATS`] of the next wait.
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
        let Some(registration) = state::registration() else { return };
        let shared = registration.core.neighbours.load(SeqCst) > 1;
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
        match news::take_latest() {
            Some(News::Connected(connection)) => {
                let sharing = enter::connection(*connection, self.client);
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
        news::sleep(next.map(|at| at.saturating_duration_since(Instant::now())))
    }

    fn core_lost(&mut self) {
        let dropped = state::registration().is_some_and(|e| e.core.serving.load(SeqCst) == 0);
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
