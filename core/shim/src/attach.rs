//! Meeting the core: before the program's `cuInit`, or at its first launch if
//! that was not seen.
//!
//! With neither `TALLY_SOCKET` nor `TALLY_PRIORITY` the shim passes every call through and counts nothing.
//! May delay a program by at most `link::FIRST_MAX` (5 s). Never prints.

use crate::connection::Settings;
use crate::{
    apart, asking, bypass, capture, completion, contexts, device, enter, events, exec_nodes, exit,
    greens, helper, images, linger, link, log, marks, names, news, nvtx, poller, quiesce, slots,
    state, streams, threads, timeslice, tools, unit_profile, units,
};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use tally_ipc::layout::report_state;
use tally_preempt::cuda::driver;
use tally_preempt::lock::Lock;

static ONCE: Lock = Lock::new();
static HANDLERS: AtomicBool = AtomicBool::new(false);

/// In the wrapper of `cuInit`, before the real one.
pub fn before_init() {
    start();
}

/// In the wrapper of `cuInit`, once it has succeeded.
pub fn after_init() {
    state::set_initialised(true);
    let Some(client) = state::client() else { return };
    let mut version = 0;
    if let Some(f) = driver().driver_version {
        // SAFETY: a valid out-pointer.
        let _ = unsafe { f(&mut version) };
    }
    client.report.driver_version.store(version.max(0) as u32, Relaxed);
    if state::is_best_effort() {
        tally_preempt::initialised();
    }
    exit::watch();
}

/// At a launch, if `cuInit` was not seen.
pub fn late() {
    if state::mode() == state::MODE_UNKNOWN {
        state::set_initialised(true);
        start();
        if state::mode() == state::MODE_ON {
            after_init();
        }
    }
}

#[cold]
fn start() {
    if state::mode() != state::MODE_UNKNOWN {
        return;
    }
    let _held = ONCE.lock();
    if state::mode() != state::MODE_UNKNOWN {
        return;
    }
    let Some(settings) = Settings::from_environment() else {
        return state::set_mode(state::MODE_OFF);
    };
    log::open();
    if settings.hello.high_priority {
        nvtx::note_other();
    }
    if !HANDLERS.swap(true, SeqCst) {
        // SAFETY: functions without state; kept for the process's life.
        unsafe { libc::pthread_atfork(None, None, Some(in_forked_child)) };
    }
    match begin(settings) {
        Ok(()) => state::set_mode(state::MODE_ON),
        Err(error) => {
            log!("not governed: {error}");
            state::leave();
            state::forget_client();
            state::set_mode(state::MODE_OFF);
        }
    }
}

fn begin(settings: Settings) -> Result<(), String> {
    state::set_fail_hold(enter::told_fail_hold().unwrap_or(false));
    state::set_high_priority(settings.hello.high_priority);
    threads::settle_allocator();
    let (client, connection) = link::start(settings)?;
    let sharing = connection.map(|connection| enter::connection(connection, client));
    if sharing.is_none() {
        client.report.governed.store(report_state::FAILED, Relaxed);
    }
    // Its threads look for it.
    state::set_client(client);
    tools::look();
    let poller = poller::spawn().map_err(|error| format!("helper thread: {error}"));
    poller.and_then(|()| helper::spawn(client, sharing)).inspect_err(link::give_up)
}

/// The child has no helper thread, no connection and no CUDA: it starts afresh at
/// its own `cuInit` or first launch. Only async-signal-safe calls: the parent had threads.
unsafe extern "C" fn in_forked_child() {
    ONCE.reset();
    apart::reset();
    enter::reset();
    news::reset();
    link::reset();
    log::reset();
    state::reset();
    capture::reset();
    completion::reset();
    asking::reset();
    contexts::reset();
    greens::reset();
    tally_preempt::reset();
    bypass::reset();
    tools::reset();
    events::reset();
    exec_nodes::reset();
    images::reset();
    linger::reset();
    marks::reset();
    names::reset();
    poller::reset();
    quiesce::reset();
    slots::reset();
    streams::reset();
    timeslice::reset();
    units::reset();
    unit_profile::reset();
    state::set_initialised(false);
    device::reset();
}
