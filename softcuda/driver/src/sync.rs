//! Waiting without spinning: futexes, a counter to wait on, and locks that do
//! not care about poison (a panicking worker is caught and reported as a
//! failed launch; the data it guarded is consistent at every step).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

/// Locks `mutex`, poisoned or not.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Read-locks `lock`, poisoned or not.
pub(crate) fn read<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Write-locks `lock`, poisoned or not.
pub(crate) fn write<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Who may wait on a futex word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Threads of this process.
    Process,
    /// Any process that maps the page.
    Shared,
}

/// Sleeps while `*word == expected`, at most `timeout`. Returns early for any
/// reason a futex may; callers look at their condition again.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>, scope: Scope) {
    let op = libc::FUTEX_WAIT | if scope == Scope::Process { libc::FUTEX_PRIVATE_FLAG } else { 0 };
    let spec = timeout.map(|t| libc::timespec {
        tv_sec: t.as_secs() as libc::time_t,
        tv_nsec: t.subsec_nanos() as libc::c_long,
    });
    let spec_ptr = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `word` is a live, aligned u32 and `spec_ptr` is null or a valid
    // timespec for the duration of the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, expected, spec_ptr) };
}

/// Wakes up to `count` waiters of `word`.
pub(crate) fn futex_wake(word: &AtomicU32, count: i32, scope: Scope) {
    let op = libc::FUTEX_WAKE | if scope == Scope::Process { libc::FUTEX_PRIVATE_FLAG } else { 0 };
    // SAFETY: `word` is a live, aligned u32; waking touches nothing else.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, count) };
}

/// A counter that only grows and that threads can wait for. A wait costs one
/// load if the value is there already; an advance costs no system call if
/// nobody waits.
#[derive(Default)]
pub(crate) struct Progress {
    value: AtomicU64,
    word: AtomicU32,
    waiters: AtomicU32,
}

impl Progress {
    pub(crate) fn get(&self) -> u64 {
        self.value.load(SeqCst)
    }

    /// Raises the value to `to` and wakes whoever waits.
    pub(crate) fn advance(&self, to: u64) {
        self.value.fetch_max(to, SeqCst);
        self.notify();
    }

    /// Adds `n` and returns the new value.
    pub(crate) fn add(&self, n: u64) -> u64 {
        let new = self.value.fetch_add(n, SeqCst) + n;
        self.notify();
        new
    }

    fn notify(&self) {
        self.word.fetch_add(1, SeqCst);
        if self.waiters.load(SeqCst) != 0 {
            futex_wake(&self.word, i32::MAX, Scope::Process);
        }
    }

    /// Waits until the value is at least `target`.
    pub(crate) fn wait_for(&self, target: u64) {
        while self.get() < target {
            self.waiters.fetch_add(1, SeqCst);
            let seen = self.word.load(SeqCst);
            if self.get() < target {
                futex_wait(&self.word, seen, None, Scope::Process);
            }
            self.waiters.fetch_sub(1, SeqCst);
        }
    }
}

/// Time of `CLOCK_MONOTONIC`, ns.
pub(crate) fn now_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid out pointer; CLOCK_MONOTONIC always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Starts a detached thread that takes no signals of the program and dies
/// with the process.
///
/// # Errors
/// What the system says if it cannot make a thread.
pub(crate) fn spawn_quiet(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    // SAFETY: all sets are valid locals; the mask of this thread is restored
    // before returning, so only the new thread keeps everything blocked.
    let old = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        old
    };
    let started = std::thread::Builder::new()
        .name(name.to_owned())
        .stack_size(crate::config::THREAD_STACK_BYTES)
        .spawn(move || {
            // SAFETY: PR_SET_TIMERSLACK takes a number and affects this thread
            // only: the short sleeps of value waits would take 50 us more.
            unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000 as libc::c_ulong) };
            body();
        });
    // SAFETY: `old` is the mask that pthread_sigmask stored above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &old, std::ptr::null_mut()) };
    started.map(drop)
}
