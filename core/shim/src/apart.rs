//! Threads of the shim's own whose descriptors are not the program's, and work that they do for others.
//!
//! A program may close descriptors that are not its own, open others under their numbers, count on the lowest
//! free number, and count on the end of a pipe once it has closed its side. So the shim has no descriptor in
//! the program's table, and its own table has none of the program's. The table is copied once, while `cuInit`
//! waits; threads that the first such thread starts share it.

use crate::threads;
use rustix::thread::futex;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32};
use tally_preempt::lock::Locked;

type Job = Box<dyn FnOnce() + Send>;

static JOBS: Locked<VecDeque<Job>> = Locked::new(VecDeque::new());
/// Jobs that were ever handed over.
static HANDED: AtomicU32 = AtomicU32::new(0);
static IS_SERVED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static IS_APART: Cell<bool> = const { Cell::new(false) };
}

/// Give the calling thread, one of the shim's own, a descriptor table of its own, which is empty, and which the threads
/// that it starts share. False: the system does not allow that, and the thread must end, for it may hold copies of the
/// program's descriptors.
pub fn leave_table() -> bool {
    const CLOSE_RANGE_UNSHARE: libc::c_uint = 1 << 1;
    // SAFETY: closes all descriptors, in a table that only this thread has.
    let is_empty = unsafe {
        libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, CLOSE_RANGE_UNSHARE) == 0
    };
    // Before Linux 5.9, and in containers made for it.
    // SAFETY: concerns the calling thread only.
    let is_apart = is_empty || unsafe { libc::unshare(libc::CLONE_FILES) == 0 } && close_all();
    IS_APART.set(is_apart);
    is_apart
}

/// Close the calling thread's descriptors, whose table is its own. False: they cannot be found.
fn close_all() -> bool {
    let Ok(folder) = std::fs::read_dir("/proc/thread-self/fd") else { return false };
    let open: Vec<i32> =
        folder.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for fd in open {
        // SAFETY: copies that nobody else has; that of the folder is closed by now, or its number is free.
        unsafe { libc::close(fd) };
    }
    true
}

/// Whether the calling thread has left the program's table.
pub fn is_apart() -> bool {
    IS_APART.get()
}

/// Have [`run`] served by a thread that the calling one, which has left the program's table, starts.
///
/// # Errors
/// The system's.
pub fn serve() -> std::io::Result<()> {
    threads::spawn("tally-files", || {
        IS_APART.set(true);
        loop {
            let seen = HANDED.load(SeqCst);
            match JOBS.with(VecDeque::pop_front) {
                // A panic is the job's, which its owner notices.
                Some(job) => drop(std::panic::catch_unwind(std::panic::AssertUnwindSafe(job))),
                None => drop(futex::wait(&HANDED, futex::Flags::PRIVATE, seen, None)),
            }
        }
    })?;
    IS_SERVED.store(true, SeqCst);
    Ok(())
}

/// Run something that opens files, one after another, and wait for it. `None`: there is nobody to do it.
pub fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    if !IS_SERVED.load(SeqCst) {
        return None;
    }
    let done = Arc::new((AtomicU32::new(0), Locked::new(None)));
    let theirs = done.clone();
    let job = Box::new(move || {
        let result = work();
        theirs.1.with(|all| *all = Some(result));
        theirs.0.store(1, SeqCst);
        let _ = futex::wake(&theirs.0, futex::Flags::PRIVATE, 1);
    });
    JOBS.with(|jobs| jobs.push_back(job));
    HANDED.fetch_add(1, SeqCst);
    let _ = futex::wake(&HANDED, futex::Flags::PRIVATE, 1);
    // A panic drops what the job shares.
    while done.0.load(SeqCst) == 0 && Arc::strong_count(&done) > 1 {
        let most = futex::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        let _ = futex::wait(&done.0, futex::Flags::PRIVATE, 0, Some(&most));
    }
    done.1.with(Option::take)
}

/// Only in a forked child, in which the thread is not.
pub fn reset() {
    IS_SERVED.store(false, SeqCst);
    JOBS.reset(VecDeque::new());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn work_is_done_in_a_table_without_the_programs_descriptors() {
        let ours = std::fs::File::open("/dev/null").unwrap();
        let number = ours.as_raw_fd();
        let is_there = move || {
            rustix::io::fcntl_getfd(unsafe {
                // SAFETY: only asked whether it is open.
                std::os::fd::BorrowedFd::borrow_raw(number)
            })
            .is_ok()
        };
        assert_eq!(run(|| ()), None, "nobody serves yet");
        std::thread::spawn(|| assert!(leave_table() && serve().is_ok())).join().unwrap();
        assert_eq!(run(is_there), Some(false));
        assert!(is_there(), "it is the program's still");
        assert_eq!(run(|| -> u32 { panic!("a job's") }), None);
        assert_eq!(run(|| 7), Some(7), "the thread goes on");
        reset();
    }

    #[test]
    fn copies_in_a_table_of_ones_own_are_all_closed() {
        let open = || std::fs::read_dir("/proc/thread-self/fd").unwrap().count();
        std::thread::spawn(move || {
            // SAFETY: concerns this thread only.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
            assert!(open() > 1 && close_all());
            assert_eq!(open(), 1, "but for that of the folder");
        })
        .join()
        .unwrap();
    }
}
