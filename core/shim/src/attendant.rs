//! The helper thread: watches the connection, passes the core's probe on to the
//! [`poller`](crate::poller), and sets time slices.
//!
//! It blocks all signals and sleeps unless one of its descriptors says something. It
//! does not call the driver.

use crate::activity::Change;
use crate::attach::{self, Connection, Settings};
use crate::{linger, log, poller, sandbox, state, threads, timeslice};
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::Timespec;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32};
use std::time::{Duration, Instant};
use tally_ipc::ClientRegion;
use tally_ipc::layout::report_state;
use tally_ipc::wire::Residency;

/// Between two attempts to find the core again.
pub const RETRY: Duration = Duration::from_millis(250);
/// How often the descriptors are checked: a sleeping poll keeps closed files open
/// and does not notice.
const CHECK: Duration = Duration::from_secs(1);
/// A shorter time slice is set after this time: programs come and go, and each change costs.
const SHORTEN_AFTER: Duration = Duration::from_secs(1);
/// Between two attempts to set a time slice.
const SLICE_RETRY: Duration = Duration::from_millis(10);

/// The attendant's own eventfd.
static WAKE: AtomicI32 = AtomicI32::new(-1);
/// Descriptors that a forked child must close: socket, probe, wake, region, doorbell.
static FDS: [AtomicI32; 5] = [const { AtomicI32::new(-1) }; 5];
const FD_SOCKET: usize = 0;
const FD_PROBE: usize = 1;
const FD_WAKE: usize = 2;
const FD_REGION: usize = 3;
const FD_DOORBELL: usize = 4;
static EXITING: AtomicBool = AtomicBool::new(false);

/// Tell the core that the client became busy or idle, if it asked to hear.
#[inline]
pub fn report_change(change: Change) {
    if change != Change::None
        && let Some(epoch) = state::epoch()
        && epoch.core.notify_activity.load(SeqCst) != 0
    {
        epoch.ring();
    }
}

/// Make the attendant look around.
pub fn nudge() {
    let fd = WAKE.load(Acquire);
    if fd >= 0 {
        // SAFETY: open for as long as the process lives.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
    }
}

/// Whether the program has begun to exit: nobody will enqueue writes any more.
pub fn is_exiting() -> bool {
    EXITING.load(SeqCst)
}

/// A forked child must close this doorbell.
pub fn inherit_nothing(doorbell: i32) {
    FDS[FD_DOORBELL].store(doorbell, Release);
}

/// No more driver calls: the driver is about to be torn down.
pub fn program_exits() {
    EXITING.store(true, SeqCst);
    crate::cut::program_exits();
    poller::wait_out();
}

/// Only in a forked child: the thread is not there, its descriptors are. Were the
/// socket kept, the core would not learn of the parent's end.
pub fn reset() {
    for fd in &FDS {
        let fd = fd.swap(-1, SeqCst);
        if fd >= 0 {
            // SAFETY: the parent's, of which this process has a copy of its own.
            unsafe { rustix::io::close(fd) };
        }
    }
    WAKE.store(-1, SeqCst);
}

/// The thread's state.
#[derive(Debug)]
pub struct Attendant {
    settings: Settings,
    region: OwnedFd,
    region_inode: (u64, u64),
    client: &'static ClientRegion,
    wake: OwnedFd,
    socket: Option<OwnedFd>,
    probe: Option<OwnedFd>,
    /// The time slice that is wanted, us: this client's, or that of several; 0: the driver's.
    slice_us: u64,
    /// What the core said: `[alone in its class, with others]`.
    slices_us: [u64; 2],
    /// When a shorter one is to be set, if it is wanted still.
    shorten_at: Option<Instant>,
    retry_at: Option<Instant>,
    slice_at: Option<Instant>,
    /// Next of [`timeslice::REPEATS`].
    slice_repeat: usize,
}

impl Attendant {
    /// Start it.
    ///
    /// # Errors
    /// What the system refused.
    pub fn spawn(
        settings: Settings,
        region: OwnedFd,
        client: &'static ClientRegion,
        entered: Option<(OwnedFd, OwnedFd, Residency)>,
    ) -> Result<(), String> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| format!("eventfd: {e}"))?;
        let wake = attach::raise(wake);
        let number = wake.as_raw_fd();
        let inode = rustix::fs::fstat(&region).map_err(|e| format!("region: {e}"))?;
        FDS[FD_WAKE].store(number, Release);
        FDS[FD_REGION].store(region.as_raw_fd(), Release);
        let mut attendant = Attendant {
            settings,
            region,
            region_inode: (inode.st_dev, inode.st_ino),
            client,
            wake,
            socket: None,
            probe: None,
            slice_us: 0,
            slices_us: [0; 2],
            shorten_at: None,
            retry_at: Some(Instant::now() + RETRY),
            slice_at: None,
            slice_repeat: 0,
        };
        if let Some((socket, probe, residency)) = entered {
            attendant.entered(socket, probe, &residency);
        }
        WAKE.store(number, Release);
        let spawned =
            poller::spawn().and_then(|()| threads::spawn("tally-shim", move || attendant.run()));
        match spawned {
            Ok(()) => Ok(()),
            Err(error) => {
                WAKE.store(-1, Release);
                Err(format!("helper thread: {error}"))
            }
        }
    }

    fn entered(&mut self, socket: OwnedFd, probe: OwnedFd, residency: &Residency) {
        FDS[FD_SOCKET].store(socket.as_raw_fd(), Release);
        FDS[FD_PROBE].store(probe.as_raw_fd(), Release);
        self.socket = Some(socket);
        self.probe = Some(probe);
        self.retry_at = None;
        self.slices_us = match residency {
            Residency::TimeSlice { slice_us, shared_us, .. } => [*slice_us, *shared_us],
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
            let [ended, probed, nudged] = self.sleep();
            let now = Instant::now();
            if nudged {
                drain(&self.wake);
                // A new channel group.
                if self.slice_us != 0 && timeslice::has_new() {
                    self.slice_at = Some(now + timeslice::DELAY);
                    self.slice_repeat = 0;
                }
            }
            if ended {
                self.core_lost();
            }
            if probed {
                if let Some(probe) = &self.probe {
                    drain(probe);
                }
                self.choose_slice();
                poller::probe();
            }
            if self.retry_at.is_some_and(|t| t <= now) {
                self.find_core();
            }
            if self.shorten_at.is_some_and(|t| t <= now) {
                self.choose_slice();
            }
            if self.slice_at.is_some_and(|t| t <= now) {
                self.set_slices();
            }
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

    /// Wait for something to do: `[connection ended, probe, nudge]`.
    fn sleep(&mut self) -> [bool; 3] {
        let times = [self.retry_at, self.slice_at, self.shorten_at];
        let next = times.into_iter().flatten().min();
        let left = next.map_or(CHECK, |t| t.saturating_duration_since(Instant::now()).min(CHECK));
        let timeout =
            Timespec { tv_sec: left.as_secs() as _, tv_nsec: i64::from(left.subsec_nanos()) as _ };
        let mut fds = Vec::with_capacity(3);
        fds.push(PollFd::new(&self.wake, PollFlags::IN));
        for fd in [&self.socket, &self.probe].into_iter().flatten() {
            fds.push(PollFd::new(fd, PollFlags::IN));
        }
        if rustix::event::poll(&mut fds, Some(&timeout)).is_err() {
            return [false; 3];
        }
        let said = |i: usize| fds.get(i).map_or(PollFlags::empty(), |f| f.revents());
        let [nudge, socket, probe] = [said(0), said(1), said(2)];
        drop(fds);
        let is_open = |fd: i32| {
            // SAFETY: only asked about; a number that is nobody's is an error.
            let fd = unsafe { BorrowedFd::borrow_raw(fd.max(0)) };
            rustix::io::fcntl_getfd(fd).is_ok()
        };
        let closed = (socket | probe).contains(PollFlags::NVAL)
            || state::epoch().is_some_and(|e| !is_open(e.doorbell));
        if !is_open(self.wake.as_raw_fd()) {
            self.renew_wake();
        }
        [
            // The core closes its end of the probe when it lets go, and when it dies.
            closed || probe.contains(PollFlags::HUP) || (!socket.is_empty() && self.has_ended()),
            probe.contains(PollFlags::IN),
            nudge.contains(PollFlags::IN),
        ]
    }

    /// The program closed descriptors that are not its own (daemons close all):
    /// the number may be anybody's now, so it is neither used nor closed.
    fn renew_wake(&mut self) {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        match rustix::event::eventfd(0, flags) {
            Ok(fresh) => {
                let fresh = attach::raise(fresh);
                WAKE.store(fresh.as_raw_fd(), Release);
                FDS[FD_WAKE].store(fresh.as_raw_fd(), Release);
                std::mem::forget(std::mem::replace(&mut self.wake, fresh));
            }
            // No descriptors left: try again later, without spinning.
            Err(_) => threads::nap(RETRY),
        }
    }

    /// The socket says something: its end, or bytes that mean nothing.
    fn has_ended(&self) -> bool {
        let Some(socket) = &self.socket else { return false };
        let mut bytes = [0; 256];
        let flags = rustix::net::RecvFlags::DONTWAIT;
        match rustix::net::recv(socket, &mut bytes[..], flags) {
            Ok((_, n)) => n == 0,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => false,
            Err(_) => true,
        }
    }

    fn core_lost(&mut self) {
        let dropped = state::epoch().is_some_and(|e| e.core.serving.load(SeqCst) == 0);
        log!("core {}", if dropped { "let this client go" } else { "lost" });
        self.client.report.governed.store(report_state::FAILED, Relaxed);
        state::leave();
        // Numbers first: a fork in between must not close a stranger's descriptor.
        FDS[FD_SOCKET].store(-1, Release);
        FDS[FD_PROBE].store(-1, Release);
        // Closed by the program already? Then the numbers are not ours to close.
        for fd in [self.socket.take(), self.probe.take()].into_iter().flatten() {
            if rustix::io::fcntl_getfd(&fd).is_err() {
                std::mem::forget(fd);
            }
        }
        if dropped {
            linger::configure(self.client, false, &Residency::Unmanaged);
        }
        // Without a core nobody says how many there are: as for several.
        self.want_slice(if dropped { 0 } else { self.slices_us[1] });
        self.retry_at = Some(Instant::now() + RETRY);
    }

    /// The region's descriptor is still the region's.
    fn has_region(&self) -> bool {
        rustix::fs::fstat(&self.region).is_ok_and(|s| (s.st_dev, s.st_ino) == self.region_inode)
    }

    fn find_core(&mut self) {
        if !self.has_region() {
            // The program closed it: no core can be shown it again, and holding
            // launches would hold them for ever.
            log!("the region's descriptor was closed by the program: not governed any more");
            state::set_fail_hold(false);
            self.retry_at = None;
            return;
        }
        if sandbox::has_changed() {
            // A filter may forbid to connect, and end the process.
            log!(
                "not governed any more: the program has installed a seccomp filter, and the core is gone"
            );
            state::set_fail_hold(false);
            self.retry_at = None;
            return;
        }
        match self.settings.connect(&self.region, self.client) {
            Ok(connection) => self.take(connection),
            Err(error) => {
                log!("no core: {error}");
                self.retry_at = Some(Instant::now() + RETRY);
            }
        }
    }

    fn take(&mut self, connection: Connection) {
        let (socket, probe, residency) = connection.enter(self.client);
        self.entered(socket, probe, &residency);
    }
}

fn drain(readable: &OwnedFd) {
    // It does not block; how often it was written does not matter.
    let _ = rustix::io::read(readable, &mut [0_u8; 4096]);
}
