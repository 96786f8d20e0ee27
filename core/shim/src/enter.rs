//! Putting a core's welcome in force.

use crate::connection::Connection;
use crate::state::{self, Registration};
use crate::{linger, log, samples, tools, unit_profile};
use std::ffi::{CStr, CString};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::Duration;
use tally_ipc::ClientRegion;
use tally_ipc::layout::report_state;
use tally_ipc::wire::{self, SharingMode};
use tally_preempt::lock::Locked;
use tally_preempt::sm_limit;

/// Puts a new connection in force; returns its sharing mode.
pub fn connection(connection: Connection, client: &ClientRegion) -> SharingMode {
    let Connection { welcome, first_ticket, core } = connection;
    if let SharingMode::Mps { pipe_directory, client_priority, thread_percent } = &welcome.sharing
        && !state::is_initialised()
    {
        if !pipe_directory.is_empty() {
            set_environment(c"CUDA_MPS_PIPE_DIRECTORY", pipe_directory, true);
        }
        // Normal is what it is without.
        if *client_priority != 0 {
            let priority = client_priority.to_string();
            set_environment(c"CUDA_MPS_CLIENT_PRIORITY", &priority, false);
        }
        // All SMs are what it has without.
        if (1..100).contains(thread_percent) {
            let percent = thread_percent.to_string();
            set_environment(c"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", &percent, false);
        }
    }
    state::set_high_priority(welcome.high_priority);
    // What this client was started with wins. Who goes first goes without a core, too.
    let holds = told_fail_hold().unwrap_or(welcome.fail_hold);
    state::set_fail_hold(holds && !welcome.high_priority);
    unit_profile::enable(welcome.profiles_units);
    let slice = match welcome.sharing {
        SharingMode::TimeSlice { slice_us: 1.., .. } => report_state::PENDING,
        _ => report_state::UNUSED,
    };
    client.report.time_slice.store(slice, Relaxed);
    log!(
        "client {} ({}) {:?} {}",
        welcome.client_id,
        if welcome.high_priority { "high" } else { "best-effort" },
        welcome.sharing,
        welcome.class_reason
    );
    samples::forget_samples();
    sm_limit::forget_decided();
    tally_preempt::configure(&welcome.rewrite, &welcome.sharing);
    tools::look();
    linger::configure(client, welcome.high_priority, &welcome.sharing);
    state::enter(Registration {
        core: core.leak(),
        spin: Duration::from_nanos(welcome.spin_ns),
        first_ticket,
        stuck_at: AtomicU64::new(0),
    });
    // Only now are launches gated.
    client.report.governed.store(report_state::ACTIVE, Release);
    welcome.sharing
}

/// What the environment says of a lost core: hold (true) or open.
pub fn told_fail_hold() -> Option<bool> {
    match std::env::var(wire::ENV_FAIL).ok()?.as_str() {
        "hold" => Some(true),
        "open" => Some(false),
        _ => None,
    }
}

/// What variables were before [`set_environment`].
static BEFORE: Locked<Vec<(&'static CStr, Option<CString>)>> = Locked::new(Vec::new());

/// Set a variable until `cuInit` has returned: the driver reads it there (seen on an H200), and programs
/// that this one starts without the preloaded library must not find it.
fn set_environment(name: &'static CStr, value: &str, overwrite: bool) {
    let Ok(value) = CString::new(value) else { return };
    // SAFETY: NUL-terminated. Not safe against other threads that read the
    // environment now, but it must be set and `cuInit` reads it next.
    unsafe {
        let before = libc::getenv(name.as_ptr());
        let before = (!before.is_null()).then(|| CStr::from_ptr(before).to_owned());
        if before.is_some() && !overwrite {
            return;
        }
        BEFORE.with(|all| {
            if all.iter().all(|(known, _)| *known != name) {
                all.push((name, before));
            }
        });
        libc::setenv(name.as_ptr(), value.as_ptr(), 1);
    }
}

/// In the wrapper of `cuInit`, behind the real one.
pub fn restore_environment() {
    for (name, before) in BEFORE.with(std::mem::take) {
        // SAFETY: as in `set_environment`.
        unsafe {
            match before {
                Some(value) => libc::setenv(name.as_ptr(), value.as_ptr(), 1),
                None => libc::unsetenv(name.as_ptr()),
            };
        }
    }
}

/// Only in a forked child.
pub fn reset() {
    BEFORE.reset(Vec::new());
}
