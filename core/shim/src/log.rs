//! The shim's own log, written only if `TALLY_SHIM_LOG` names a file.
//!
//! Must never write to stdout or stderr (programs' outputs are parsed) and must
//! never be called on the launch path.

use rustix::process::{Resource, getrlimit};
use std::io::Write;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{Acquire, Release};

static FD: AtomicI32 = AtomicI32::new(-1);

/// Open the log if the environment asks for one.
pub fn open() {
    let Some(path) = std::env::var_os(tally_ipc::wire::ENV_SHIM_LOG) else { return };
    if FD.load(Acquire) >= 0 {
        return;
    }
    if let Ok(file) = std::fs::OpenOptions::new().append(true).create(true).open(path) {
        FD.store(file.into_raw_fd(), Release);
    }
}

/// Write one line.
pub fn line(text: std::fmt::Arguments<'_>) {
    let fd = FD.load(Acquire);
    if fd < 0 {
        return;
    }
    // SAFETY: ours, never closed; not closed here either (ManuallyDrop).
    let file = unsafe { std::fs::File::from_raw_fd(fd) };
    let mut file = std::mem::ManuallyDrop::new(file);
    let entry = format!("[{}] {text}\n", std::process::id());
    if has_room(&file, entry.len()) {
        let _ = file.write_all(entry.as_bytes());
    }
}

/// Whether the file may grow so much: a write beyond the process's limit would end it with SIGXFSZ.
fn has_room(file: &std::fs::File, bytes: usize) -> bool {
    let Some(limit) = getrlimit(Resource::Fsize).current else { return true };
    file.metadata().is_ok_and(|meta| meta.len().saturating_add(bytes as u64) <= limit)
}

/// `log!("format", …)`.
#[macro_export]
macro_rules! log {
    ($($t:tt)*) => { $crate::log::line(format_args!($($t)*)) };
}
