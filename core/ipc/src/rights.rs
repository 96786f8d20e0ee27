//! Whether descriptors may be sent to a Unix socket. The kernel keeps those that nobody received with the socket, and
//! whoever closes it closes them, which may take for ever. Where a socket takes none there is nothing to close.

use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::Errno;

/// `SO_PASSRIGHTS` of the generic headers (Linux 6.16); x86-64 and AArch64 have it so.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Whether descriptors may be sent to a socket.
pub fn are_allowed(socket: BorrowedFd<'_>) -> bool {
    let mut value: libc::c_int = 1;
    let mut bytes = size_of::<libc::c_int>() as libc::socklen_t;
    let (socket, into) = (socket.as_raw_fd(), (&raw mut value).cast());
    // SAFETY: `into` has room for the `bytes` bytes that the kernel is told of.
    let done =
        unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, SO_PASSRIGHTS, into, &raw mut bytes) };
    // Before Linux 6.16 always.
    done != 0 || value != 0
}

/// Have a socket take descriptors, or have the kernel refuse them to senders (`EPERM`). Connections to a listening
/// socket inherit it from the moment that the other side connects.
///
/// # Errors
/// [`Errno::NOPROTOOPT`] before Linux 6.16: every socket takes them.
pub fn allow(socket: BorrowedFd<'_>, allowed: bool) -> Result<(), Errno> {
    let value = libc::c_int::from(allowed);
    let bytes = size_of::<libc::c_int>() as libc::socklen_t;
    let (socket, from) = (socket.as_raw_fd(), (&raw const value).cast());
    // SAFETY: `from` points to the `bytes` bytes that the kernel is told of.
    let done = unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, SO_PASSRIGHTS, from, bytes) };
    if done == 0 {
        return Ok(());
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}
