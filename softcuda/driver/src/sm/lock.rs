//! The device file's mutex: shared between processes and robust, so that the
//! kernel releases it when its holder is killed and the next one knows.

use super::layout::Device;
use std::cell::UnsafeCell;

/// Makes the mutex of a file that nobody else maps yet.
pub(super) fn init(mutex: &UnsafeCell<libc::pthread_mutex_t>) -> std::io::Result<()> {
    let check = |rc: libc::c_int| match rc {
        0 => Ok(()),
        code => Err(std::io::Error::from_raw_os_error(code)),
    };
    // SAFETY: the attribute object is a local that lives to its destroy; the
    // mutex memory is ours alone until the file is linked into place.
    unsafe {
        let mut attr: libc::pthread_mutexattr_t = std::mem::zeroed();
        check(libc::pthread_mutexattr_init(&mut attr))?;
        check(libc::pthread_mutexattr_setpshared(&mut attr, libc::PTHREAD_PROCESS_SHARED))?;
        check(libc::pthread_mutexattr_setrobust(&mut attr, libc::PTHREAD_MUTEX_ROBUST))?;
        check(libc::pthread_mutex_init(mutex.get(), &attr))?;
        libc::pthread_mutexattr_destroy(&mut attr);
    }
    Ok(())
}

/// Proof that the device is locked; unlocks when dropped.
pub(super) struct Locked<'a> {
    pub device: &'a Device,
}

/// Locks the device. The second value says whether the last holder died in
/// the middle of an update, so that the caller must repair.
pub(super) fn lock(device: &Device) -> (Locked<'_>, bool) {
    // SAFETY: the mutex was initialised before the file got its name, and the
    // mapping lives as long as `device`.
    let rc = unsafe { libc::pthread_mutex_lock(device.mutex.0.get()) };
    (Locked { device }, made_consistent(device, rc))
}

/// Like [`lock`], but gives up after `tries` milliseconds: a process that is
/// about to end must not wait for one that is stopped.
pub(super) fn try_lock(device: &Device, tries: u32) -> Option<(Locked<'_>, bool)> {
    for _ in 0..tries {
        // SAFETY: as in `lock`.
        let rc = unsafe { libc::pthread_mutex_trylock(device.mutex.0.get()) };
        if rc == 0 || rc == libc::EOWNERDEAD {
            return Some((Locked { device }, made_consistent(device, rc)));
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    None
}

fn made_consistent(device: &Device, rc: libc::c_int) -> bool {
    if rc == libc::EOWNERDEAD {
        // SAFETY: we hold the mutex in the inconsistent state that this call
        // ends.
        unsafe { libc::pthread_mutex_consistent(device.mutex.0.get()) };
    }
    rc == libc::EOWNERDEAD
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // SAFETY: `Locked` exists only while this thread holds the mutex.
        unsafe { libc::pthread_mutex_unlock(self.device.mutex.0.get()) };
    }
}
