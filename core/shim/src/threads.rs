//! Threads of the shim's own: small, and deaf to the program's signals.

use std::io;
use std::time::Duration;

/// The driver runs on these stacks now and then.
pub const STACK_BYTES: usize = 512 * 1024;
/// Of a thread that has the driver compile code, which recurses. Only what is used of it
/// takes memory.
pub const STACK_BYTES_COMPILING: usize = 16 << 20;

/// Start one.
///
/// # Errors
/// The system's.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    spawn_with(name, STACK_BYTES, run)
}

/// Start one with such a stack.
///
/// # Errors
/// The system's.
pub fn spawn_with(
    name: &str,
    stack_bytes: usize,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sets filled before use; the new thread inherits the mask, and this
    // thread gets its own back.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        let masked = libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr()) == 0;
        let spawned =
            std::thread::Builder::new().name(name.into()).stack_size(stack_bytes).spawn(run);
        if masked {
            libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut());
        }
        spawned.map(drop)
    }
}

/// Sleep for about so long. Not as the standard library does: that is a point at which the calling thread,
/// which may be the program's, can be cancelled.
pub fn nap(time: Duration) {
    let time = rustix::thread::Timespec {
        tv_sec: time.as_secs().min(3_600) as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    let _ = rustix::thread::nanosleep(&time);
}

/// Have the calling thread, one of the shim's own, wake when it is to: by default the system may take 50 us more.
pub fn wake_on_time() {
    // SAFETY: concerns the calling thread's timers only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000_usize) };
}
