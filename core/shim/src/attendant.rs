//! The helper thread: watches the connection, answers the core's probe, sets
//! time slices, and lets go of destroyed streams' slots.
//!
//! It blocks all signals and sleeps unless one of its descriptors says something.
//! It calls the driver only under the capture guard, never while any stream is
//! capturing, and never once the program has begun to exit.
//!
//! The probe: a program that never waits for its streams stays busy in our books
//! for ever. When the core suspects that, the attendant puts a completion write
//! behind each busy stream's work, watches for it, and clears the bit by the same
//! rule as a call that waits. Streams whose handle means nothing in this thread
//! (per-thread ones) are reached through the legacy stream, which waits for them;
//! those that have no handle any more, through their context.

use crate::activity::{self, Change};
use crate::attach::{self, Connection, Settings};
use crate::cu::{Ptr, STREAM_LEGACY, STREAM_PER_THREAD, SUCCESS, driver};
use crate::slots::{self, DRAINING, MANY_CONTEXTS, OVERFLOW, Slot};
use crate::{capture, completion, linger, log, state, threads, timeslice};
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
/// Between two looks at a completion write on its way: first, and at most.
const LOOK_FIRST: Duration = Duration::from_micros(50);
const LOOK_MAX: Duration = Duration::from_millis(1);
/// How often the descriptors are checked: a sleeping poll keeps closed files open
/// and does not notice.
const CHECK: Duration = Duration::from_secs(1);
/// A shorter time slice is set after this time: programs come and go, and each change costs.
const SHORTEN_AFTER: Duration = Duration::from_secs(1);
/// Between two attempts to set a time slice.
const SLICE_RETRY: Duration = Duration::from_millis(10);
/// An exiting program waits for the attendant's driver calls at most this long.
const EXIT_WAIT_MAX: Duration = Duration::from_millis(10);

/// The attendant's own eventfd.
static WAKE: AtomicI32 = AtomicI32::new(-1);
/// Descriptors that a forked child must close: socket, probe, wake, region, doorbell.
static FDS: [AtomicI32; 5] = [const { AtomicI32::new(-1) }; 5];
const FD_SOCKET: usize = 0;
const FD_PROBE: usize = 1;
const FD_WAKE: usize = 2;
const FD_REGION: usize = 3;
const FD_DOORBELL: usize = 4;
/// See [`mark_soon`].
static MARK: AtomicBool = AtomicBool::new(false);
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

/// Have completion writes put behind all unmarked work: a launch waits for it.
pub fn mark_soon() {
    MARK.store(true, SeqCst);
    nudge();
}

/// A forked child must close this doorbell.
pub fn inherit_nothing(doorbell: i32) {
    FDS[FD_DOORBELL].store(doorbell, Release);
}

/// No more driver calls: the driver is about to be torn down.
pub fn program_exits() {
    EXITING.store(true, SeqCst);
    crate::cut::program_exits();
    let start = Instant::now();
    while capture::GUARD.try_lock().is_none() && start.elapsed() < EXIT_WAIT_MAX {
        std::thread::yield_now();
    }
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
    look_at: Option<Instant>,
    look_after: Duration,
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
            look_at: None,
            look_after: LOOK_FIRST,
        };
        if let Some((socket, probe, residency)) = entered {
            attendant.entered(socket, probe, &residency);
        }
        WAKE.store(number, Release);
        let spawned = threads::spawn("tally-shim", move || attendant.run());
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
                if MARK.swap(false, SeqCst) {
                    self.mark_all();
                }
                // A new channel group, or a destroyed stream.
                if self.slice_us != 0 && timeslice::has_new() {
                    self.slice_at = Some(now + timeslice::DELAY);
                    self.slice_repeat = 0;
                }
                self.look_soon(now);
            }
            if ended {
                self.core_lost();
            }
            if probed {
                if let Some(probe) = &self.probe {
                    drain(probe);
                }
                // First: `mark_all` may wait for work that gets nowhere with the wrong one.
                self.choose_slice();
                self.mark_all();
                self.look_soon(now);
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
            if self.look_at.is_some_and(|t| t <= now) {
                let more = look(self.client);
                self.look_at = more.then(|| Instant::now() + self.look_after);
                self.look_after = (self.look_after * 2).min(LOOK_MAX);
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

    fn look_soon(&mut self, now: Instant) {
        self.look_after = LOOK_FIRST;
        self.look_at = Some(now);
    }

    /// Wait for something to do: `[connection ended, probe, nudge]`.
    fn sleep(&mut self) -> [bool; 3] {
        let times = [self.retry_at, self.slice_at, self.shorten_at, self.look_at];
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
            Err(_) => std::thread::sleep(RETRY),
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

    /// Put a completion write behind the work of every busy stream.
    fn mark_all(&self) {
        let _guard = capture::GUARD.lock();
        if capture::is_active() || EXITING.load(SeqCst) {
            return;
        }
        let busy = self.client.activity.busy_streams.load(SeqCst);
        for (i, slot) in slots::in_use().filter(|(i, _)| busy & slots::bit(*i) != 0) {
            mark(self.client, i, slot);
        }
    }
}

fn mark(client: &'static ClientRegion, index: usize, slot: &Slot) {
    // Taken: a launch is under way, and says itself when it is done.
    let Some(_held) = slot.lock.try_lock() else { return };
    let seen = slot.word.snapshot();
    let context = slot.context.load(Relaxed);
    let draining = slot.phase.load(Acquire) == DRAINING;
    if !seen.is_settled()
        || context == 0
        || context == MANY_CONTEXTS
        || (slot.marked.load(Acquire) == seen.sequence() && index != OVERFLOW)
    {
        return;
    }
    let d = driver();
    // SAFETY: under the guard the context cannot be destroyed.
    if d.ctx_set.is_none_or(|f| unsafe { f(context as Ptr) } != SUCCESS) {
        return;
    }
    let tracked = completion::ensure(client);
    if index == OVERFLOW || draining || !tracked {
        // SAFETY: no arguments; the slot's context is current.
        let waited = d.relaxed(|| d.ctx_synchronize.is_some_and(|f| unsafe { f() } == SUCCESS));
        if waited {
            if index != OVERFLOW && seen.is_settled() {
                completion::seen_done(client, index, seen.sequence());
            }
            let word = &slot.word;
            report_change(activity::covered(&client.activity, word, slots::bit(index), seen));
        }
        return;
    }
    let stream = match slot.stream.load(Relaxed) {
        STREAM_PER_THREAD => STREAM_LEGACY,
        stream => stream,
    };
    let _ = d.relaxed(|| completion::write(index, slot, stream, seen.sequence()));
}

/// Look at completion writes on their way. Returns whether any still is.
fn look(client: &ClientRegion) -> bool {
    let mut more = false;
    for (i, slot) in slots::in_use() {
        let bit = slots::bit(i);
        let seen = slot.word.snapshot();
        let busy = client.activity.busy_streams.load(SeqCst) & bit != 0;
        if busy && slot.marked.load(Acquire) == seen.sequence() && i != OVERFLOW {
            if completion::has_reached(client, i, seen.sequence()) {
                report_change(activity::covered(&client.activity, &slot.word, bit, seen));
            } else {
                more = true;
            }
        }
        let idle = client.activity.busy_streams.load(SeqCst) & bit == 0;
        if slot.phase.load(Acquire) == DRAINING && idle && i != OVERFLOW {
            slots::release(i);
        }
    }
    more
}

fn drain(readable: &OwnedFd) {
    // It does not block; how often it was written does not matter.
    let _ = rustix::io::read(readable, &mut [0_u8; 4096]);
}
