//! The process at the other end of a Unix socket, as a descriptor: unlike a process number it never comes to mean
//! another process.

use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;

/// `SO_PEERPIDFD` of the generic headers (Linux 6.5); x86-64 and AArch64 have it so.
const SO_PEERPIDFD: libc::c_int = 77;

/// A pidfd of the process that connected.
///
/// # Errors
/// [`Errno::NOPROTOOPT`] before Linux 6.5; others if the process is gone.
pub fn of_peer(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let mut fd: libc::c_int = -1;
    let mut bytes = size_of::<libc::c_int>() as libc::socklen_t;
    let (socket, into) = (socket.as_raw_fd(), (&raw mut fd).cast());
    // SAFETY: `into` has room for the `bytes` bytes that the kernel is told of.
    let done =
        unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, SO_PEERPIDFD, into, &raw mut bytes) };
    if done != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    if fd < 0 {
        return Err(Errno::SRCH);
    }
    // SAFETY: a new descriptor that nobody else owns; close-on-exec, as every pidfd is.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
