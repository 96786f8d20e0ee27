//! Threads of the shim's own: small, and deaf to the program's signals.

use std::io;

/// The driver runs on these stacks now and then.
const STACK_BYTES: usize = 512 * 1024;

/// Start one.
///
/// # Errors
/// The system's.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sets filled before use; the new thread inherits the mask, and this
    // thread gets its own back.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        let masked = libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr()) == 0;
        let spawned =
            std::thread::Builder::new().name(name.into()).stack_size(STACK_BYTES).spawn(run);
        if masked {
            libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut());
        }
        spawned.map(drop)
    }
}
