//! The shim's own log, written only if `TALLY_SHIM_LOG` names a file.
//!
//! Must never write to stdout or stderr (programs' outputs are parsed) and must
//! never be called on the launch path.

use crate::apart;
use rustix::fd::{AsFd, BorrowedFd, IntoRawFd};
use rustix::process::{Resource, getrlimit};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicI32, AtomicU64};

/// In the program's table the file is moved above this number.
const FD_FLOOR: i32 = 600;

/// The file in a table of descriptors.
struct Place {
    fd: AtomicI32,
    /// Device and inode: the program may have closed it, and opened another under its number.
    file: [AtomicU64; 2],
}

impl Place {
    const fn new() -> Self {
        Place { fd: AtomicI32::new(-1), file: [const { AtomicU64::new(0) }; 2] }
    }
}

/// In the program's, and in that of the threads that have left it.
static PLACES: [Place; 2] = [const { Place::new() }; 2];

fn place() -> &'static Place {
    &PLACES[usize::from(apart::is_apart())]
}

/// Open the log for the calling thread's table if the environment asks for one.
pub fn open() {
    let Some(path) = std::env::var_os(tally_ipc::wire::ENV_SHIM_LOG) else { return };
    let place = place();
    if place.fd.load(Acquire) >= 0 {
        return;
    }
    // Who names a FIFO that nobody reads is not kept waiting.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let mut options = std::fs::OpenOptions::new();
    if let Ok(file) = options.append(true).create(true).custom_flags(flags).open(path) {
        let mut file = file.into();
        if !apart::is_apart() {
            // Programs that close or reuse the low numbers (shells, daemons) do not meet it. It stays where it is if
            // the process may not have so many.
            file = rustix::io::fcntl_dupfd_cloexec(&file, FD_FLOOR).unwrap_or(file);
        }
        if let Ok(stat) = rustix::fs::fstat(&file) {
            place.file[0].store(stat.st_dev, Release);
            place.file[1].store(stat.st_ino, Release);
            place.fd.store(file.into_raw_fd(), Release);
        }
    }
}

/// Write one line; dropped if there is nowhere to write to.
pub fn line(text: std::fmt::Arguments<'_>) {
    let place = place();
    let fd = place.fd.load(Acquire);
    if fd < 0 {
        return;
    }
    // SAFETY: ours, never closed by us; whether it is still is looked at.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    let entry = format!("[{}] {text}\n", std::process::id());
    let Ok(stat) = rustix::fs::fstat(file) else { return };
    let is_ours =
        [stat.st_dev, stat.st_ino] == place.file.each_ref().map(|word| word.load(Acquire));
    if is_ours && has_room(stat.st_size, entry.len()) {
        let _ = rustix::io::write(file.as_fd(), entry.as_bytes());
    }
}

/// Whether a file of so many bytes may grow so much: a write beyond the process's limit would end it with SIGXFSZ.
fn has_room(size: i64, bytes: usize) -> bool {
    let Some(limit) = getrlimit(Resource::Fsize).current else { return true };
    (size.max(0) as u64).saturating_add(bytes as u64) <= limit
}

/// Only in a forked child: the threads that have left the program's table are not there.
pub fn reset() {
    PLACES[1].fd.store(-1, Release);
}

#[macro_export]
macro_rules! log {
    ($($t:tt)*) => { $crate::log::line(format_args!($($t)*)) };
}
