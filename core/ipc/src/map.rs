//! Shared regions as sealed memfds.

use crate::layout::{CLIENT_MAGIC, CORE_MAGIC, ClientRegion, CoreRegion, REGION_VERSION};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;

/// Why a region cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    #[error("{what} a shared region: {source}")]
    Os { what: &'static str, source: rustix::io::Errno },
    /// The peer's region has another size: not this protocol, or hostile.
    #[error(
        "shared region has {found} bytes, expected {expected}: shim and core differ in version"
    )]
    Size { found: u64, expected: u64 },
    /// The process may not make a file of that size: the attempt would end it with SIGXFSZ.
    #[error(
        "the limit on the size of files (RLIMIT_FSIZE, `ulimit -f`) is {limit} bytes, and a shared region has {needed}"
    )]
    FileSizeLimit {
        limit: u64,
        /// Bytes of a shared region.
        needed: u64,
    },
    /// The peer could shrink its region, or make holes in it, under our feet.
    #[error("shared region is not sealed against resizing and holes")]
    Unsealed,
}

fn os(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> MapError {
    move |source| MapError::Os { what, source }
}

/// A region type: plain data, valid when zero-filled.
///
/// # Safety
/// Every bit pattern must be a valid value, and all fields must be atomics or
/// padding, because another process writes to it at any time.
pub unsafe trait Region: Sized {
    const NAME: &'static str;
    /// Write magic and version.
    fn stamp(&self);
}

// SAFETY: only atomics and padding.
unsafe impl Region for ClientRegion {
    const NAME: &'static str = "tally-client";
    fn stamp(&self) {
        self.magic.store(CLIENT_MAGIC, Relaxed);
        self.version.store(REGION_VERSION, Relaxed);
    }
}

// SAFETY: only atomics and padding.
unsafe impl Region for CoreRegion {
    const NAME: &'static str = "tally-core";
    fn stamp(&self) {
        self.magic.store(CORE_MAGIC, Relaxed);
        self.version.store(REGION_VERSION, Relaxed);
    }
}

/// A mapped region; unmapped when dropped.
#[derive(Debug)]
pub struct Mapped<T: Region> {
    at: NonNull<T>,
}

// SAFETY: `T` holds only atomics (see `Region`).
unsafe impl<T: Region> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: Region> Sync for Mapped<T> {}

impl<T: Region> Mapped<T> {
    fn map(fd: BorrowedFd<'_>, write: bool) -> Result<Self, MapError> {
        let prot = if write { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), size_of::<T>(), prot, MapFlags::SHARED, fd, 0)
        }
        .map_err(os("map"))?;
        // mmap never returns null without MAP_FIXED.
        Ok(Mapped { at: NonNull::new(at.cast()).ok_or(MapError::Unsealed)? })
    }

    /// Keep it mapped for the rest of the process: for a region that a driver or
    /// another thread may still hold.
    pub fn leak(self) -> &'static T {
        let at = self.at;
        std::mem::forget(self);
        // SAFETY: never unmapped from here on.
        unsafe { at.as_ref() }
    }
}

impl<T: Region> Deref for Mapped<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: mapped for as long as self lives, valid for any content.
        unsafe { self.at.as_ref() }
    }
}

impl<T: Region> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: our own mapping; no reference outlives self.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), size_of::<T>()) };
    }
}

fn create<T: Region>() -> Result<(OwnedFd, Mapped<T>), MapError> {
    let needed = size_of::<T>() as u64;
    if let Some(limit) = getrlimit(Resource::Fsize).current.filter(|limit| *limit < needed) {
        return Err(MapError::FileSizeLimit { limit, needed });
    }
    let fd = rustix::fs::memfd_create(T::NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(os("create"))?;
    rustix::fs::ftruncate(&fd, needed).map_err(os("size"))?;
    let mapped = Mapped::<T>::map(fd.as_fd(), true)?;
    mapped.stamp();
    Ok((fd, mapped))
}

/// What a region has, so that neither side can make the other fault: it cannot be resized, have holes made in it, or
/// be written but through the mapping of who made it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

fn seal<T: Region>() -> Result<(OwnedFd, Mapped<T>), MapError> {
    let (fd, mapped) = create()?;
    rustix::fs::fcntl_add_seals(&fd, SEALS | SealFlags::SEAL).map_err(os("seal"))?;
    Ok((fd, mapped))
}

/// Client: make its region.
///
/// # Errors
/// The system call that failed.
pub fn create_client() -> Result<(OwnedFd, Mapped<ClientRegion>), MapError> {
    seal()
}

/// Core: make a client's core region. Nobody but this mapping can ever write it.
///
/// # Errors
/// The system call that failed.
pub fn create_core() -> Result<(OwnedFd, Mapped<CoreRegion>), MapError> {
    seal()
}

/// Map the region that the peer sent, read-only.
fn open<T: Region>(fd: BorrowedFd<'_>) -> Result<Mapped<T>, MapError> {
    if !rustix::fs::fcntl_get_seals(fd).map_err(os("inspect"))?.contains(SEALS) {
        return Err(MapError::Unsealed);
    }
    let found = rustix::fs::fstat(fd).map_err(os("inspect"))?.st_size as u64;
    let expected = size_of::<T>() as u64;
    if found != expected {
        return Err(MapError::Size { found, expected });
    }
    Mapped::map(fd, false)
}

/// Core: map the region a client sent, read-only.
///
/// # Errors
/// If it has the wrong size or is not sealed.
pub fn open_client(fd: BorrowedFd<'_>) -> Result<Mapped<ClientRegion>, MapError> {
    open(fd)
}

/// Client: map the region the core sent, read-only.
///
/// # Errors
/// If it has the wrong size or is not sealed.
pub fn open_core(fd: BorrowedFd<'_>) -> Result<Mapped<CoreRegion>, MapError> {
    open(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::SeqCst;

    #[test]
    fn both_sides_see_one_memory() {
        let (fd, client) = create_client().unwrap();
        let core_view = open_client(fd.as_fd()).unwrap();
        client.activity.busy_periods.store(7, SeqCst);
        assert_eq!(core_view.activity.busy_periods.load(SeqCst), 7);
        assert_eq!(core_view.magic.load(SeqCst), CLIENT_MAGIC);
    }

    #[test]
    fn client_cannot_map_the_core_region_writable() {
        let (fd, core) = create_core().unwrap();
        let client_view = open_core(fd.as_fd()).unwrap();
        core.granted.ticket.store(9, SeqCst);
        assert_eq!(client_view.granted.ticket.load(SeqCst), 9);
        assert!(matches!(Mapped::<CoreRegion>::map(fd.as_fd(), true), Err(MapError::Os { .. })));
    }

    #[test]
    fn neither_side_can_take_memory_from_under_the_other() {
        let (client, _mapped) = create_client().unwrap();
        let (core, _core) = create_core().unwrap();
        for fd in [client, core] {
            let hole =
                rustix::fs::FallocateFlags::PUNCH_HOLE.union(rustix::fs::FallocateFlags::KEEP_SIZE);
            let made = rustix::fs::fallocate(&fd, hole, 0, 4096);
            assert_eq!(made, Err(rustix::io::Errno::PERM));
            assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        }
    }

    #[test]
    fn an_unsealed_or_short_region_is_refused() {
        let region = |bytes: u64, seals: SealFlags| {
            let fd = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
            rustix::fs::ftruncate(&fd, bytes).unwrap();
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
            fd
        };
        for missing in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::FUTURE_WRITE] {
            let fd = region(size_of::<ClientRegion>() as u64, SEALS.difference(missing));
            assert!(matches!(open_client(fd.as_fd()), Err(MapError::Unsealed)));
            let fd = region(size_of::<CoreRegion>() as u64, SEALS.difference(missing));
            assert!(matches!(open_core(fd.as_fd()), Err(MapError::Unsealed)));
        }
        let fd = region(4096, SEALS);
        assert!(matches!(open_client(fd.as_fd()), Err(MapError::Size { found: 4096, .. })));
        assert!(matches!(open_core(fd.as_fd()), Err(MapError::Size { found: 4096, .. })));
    }
}
