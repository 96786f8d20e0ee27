//! Namespaces of processes, by their files below `/proc/PID/ns`: who made them, and what they are in.

use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;

/// Requests of `ioctl_nsfs(2)`, Linux 4.9 and 4.11; they have no parameter that the number would tell the size of.
const NS_GET_USERNS: libc::c_ulong = 0xb701;
const NS_GET_PARENT: libc::c_ulong = 0xb702;
const NS_GET_OWNER_UID: libc::c_ulong = 0xb704;

fn failed() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn related(namespace: BorrowedFd<'_>, request: libc::c_ulong) -> Result<OwnedFd, Errno> {
    // SAFETY: the request has no argument.
    let fd = unsafe { libc::ioctl(namespace.as_raw_fd(), request as _) };
    if fd < 0 {
        return Err(failed());
    }
    // SAFETY: a new descriptor that nobody else owns; close-on-exec, as the kernel makes them.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The PID or user namespace that this one is in.
///
/// # Errors
/// [`Errno::PERM`] if it is the first, or outside the caller's.
pub fn parent(namespace: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    related(namespace, NS_GET_PARENT)
}

/// The user namespace whose rights are needed over this one.
///
/// # Errors
/// [`Errno::PERM`] if it is outside the caller's.
pub fn user_namespace(namespace: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    related(namespace, NS_GET_USERNS)
}

/// The user who made a user namespace, as the caller's user namespace numbers it.
///
/// # Errors
/// The error of the system call that failed.
pub fn owner(user_namespace: BorrowedFd<'_>) -> Result<u32, Errno> {
    let mut uid: libc::uid_t = 0;
    // SAFETY: the request writes one number, for which there is room.
    let done =
        unsafe { libc::ioctl(user_namespace.as_raw_fd(), NS_GET_OWNER_UID as _, &raw mut uid) };
    if done < 0 { Err(failed()) } else { Ok(uid) }
}
