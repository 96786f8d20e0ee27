//! Which addresses kernels and copies may touch: device allocations, and host
//! memory that was allocated or registered through the driver.

mod arena;
mod pool;

pub(crate) use pool::Pool;

use crate::error::{CuError, CuResult};
use crate::sm::Arbiter;
use crate::sync::{lock, read, write};
use arena::{Arena, rounded};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, RwLock};

/// Where a region came from, and so who may release it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `cuMemAlloc` and its variants.
    Device,
    Managed,
    /// A variable of a loaded module.
    Global,
    /// `cuMemHostAlloc`, with its flags.
    HostAllocated(u32),
    /// `cuMemHostRegister`, with its flags.
    HostRegistered(u32),
}

impl Kind {
    /// Memory of the device, as opposed to pinned host memory.
    pub(crate) fn on_device(self) -> bool {
        matches!(self, Self::Device | Self::Managed | Self::Global)
    }
}

/// One allocation or registration.
#[derive(Clone)]
pub(crate) struct Region {
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) kind: Kind,
    pub(crate) context: u64,
    /// Unique in the process, as `CU_POINTER_ATTRIBUTE_BUFFER_ID` wants.
    pub(crate) id: u64,
    /// The pool it is from, for stream-ordered allocations.
    pub(crate) pool: Option<Arc<Pool>>,
}

/// What a pointer is to a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Device,
    /// Host memory known to the driver.
    Pinned,
    /// Any other host memory.
    Pageable,
}

/// All memory of this process on the device.
pub(crate) struct MemoryMap {
    regions: RwLock<BTreeMap<u64, Region>>,
    arena: Mutex<Arena>,
    arena_range: Range<u64>,
    next_id: AtomicU64,
}

impl MemoryMap {
    /// Reserves address space for a device of `device_bytes`.
    pub(crate) fn new(device_bytes: u64) -> std::io::Result<Self> {
        let arena = Arena::reserve(crate::config::arena_bytes(device_bytes))?;
        Ok(Self {
            arena_range: arena.range(),
            regions: RwLock::default(),
            arena: Mutex::new(arena),
            next_id: AtomicU64::new(1),
        })
    }

    /// Allocates device memory.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if the device, shared with other processes, is full.
    pub(crate) fn allocate(
        &self,
        arbiter: &Arbiter,
        len: u64,
        kind: Kind,
        context: u64,
        pool: Option<Arc<Pool>>,
    ) -> CuResult<u64> {
        let taken = rounded(len).ok_or(CuError::OUT_OF_MEMORY)?;
        if !arbiter.reserve_bytes(taken) {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let Some(base) = lock(&self.arena).take(taken) else {
            arbiter.release_bytes(taken);
            return Err(CuError::OUT_OF_MEMORY);
        };
        if let Some(pool) = &pool {
            pool.count_allocated(taken);
        }
        self.insert(base, len.max(1), kind, context, pool);
        Ok(base)
    }

    fn insert(&self, base: u64, len: u64, kind: Kind, context: u64, pool: Option<Arc<Pool>>) {
        let id = self.next_id.fetch_add(1, Relaxed);
        write(&self.regions).insert(base, Region { base, len, kind, context, id, pool });
    }

    /// Frees device memory that starts at `base`.
    ///
    /// # Errors
    /// `INVALID_VALUE` if no such allocation starts there.
    pub(crate) fn release(&self, arbiter: &Arbiter, base: u64) -> CuResult {
        let mut regions = write(&self.regions);
        let known = regions.get(&base).is_some_and(|r| r.kind.on_device());
        let region = known.then(|| regions.remove(&base)).flatten();
        drop(regions);
        let region = region.ok_or(CuError::INVALID_VALUE)?;
        self.give_back(arbiter, &region);
        Ok(())
    }

    fn give_back(&self, arbiter: &Arbiter, region: &Region) {
        let taken = rounded(region.len).unwrap_or(region.len);
        lock(&self.arena).give(region.base, taken);
        arbiter.release_bytes(taken);
        if let Some(pool) = &region.pool {
            pool.count_freed(taken);
        }
    }

    /// Allocates host memory that kernels can use.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if the system has none.
    pub(crate) fn allocate_host(&self, len: u64, flags: u32, context: u64) -> CuResult<u64> {
        let size = usize::try_from(len).map_err(|_| CuError::OUT_OF_MEMORY)?;
        let (prot, flags_map) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new anonymous mapping at an address the system picks.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), size, prot, flags_map, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(CuError::OUT_OF_MEMORY);
        }
        self.insert(at as u64, len, Kind::HostAllocated(flags), context, None);
        Ok(at as u64)
    }

    /// Unmaps what [`allocate_host`](Self::allocate_host) gave. The caller has
    /// made sure that no work of the device uses it.
    ///
    /// # Errors
    /// `INVALID_VALUE` if it is not that.
    pub(crate) fn release_host(&self, base: u64) -> CuResult {
        let mut regions = write(&self.regions);
        let known = regions.get(&base).is_some_and(|r| matches!(r.kind, Kind::HostAllocated(_)));
        let region = known.then(|| regions.remove(&base)).flatten();
        drop(regions);
        let region = region.ok_or(CuError::INVALID_VALUE)?;
        // SAFETY: our own mapping of this length, no longer in the map that
        // kernels look addresses up in.
        unsafe { libc::munmap(region.base as *mut _, region.len as usize) };
        Ok(())
    }

    /// Makes the program's own memory usable by kernels.
    ///
    /// # Errors
    /// `HOST_MEMORY_ALREADY_REGISTERED` if part of it is known already.
    pub(crate) fn register_host(&self, base: u64, len: u64, flags: u32, context: u64) -> CuResult {
        let end = base.checked_add(len).ok_or(CuError::INVALID_VALUE)?;
        if base == 0 || len == 0 || (base < self.arena_range.end && end > self.arena_range.start) {
            return Err(CuError::INVALID_VALUE);
        }
        let mut regions = write(&self.regions);
        let below = regions.range(..end).next_back().map(|(_, r)| r.base + r.len);
        if below.is_some_and(|below_end| below_end > base) {
            return Err(CuError::HOST_MEMORY_ALREADY_REGISTERED);
        }
        let id = self.next_id.fetch_add(1, Relaxed);
        let kind = Kind::HostRegistered(flags);
        regions.insert(base, Region { base, len, kind, context, id, pool: None });
        Ok(())
    }

    /// Ends a registration.
    ///
    /// # Errors
    /// `HOST_MEMORY_NOT_REGISTERED` if none starts at `base`.
    pub(crate) fn unregister_host(&self, base: u64) -> CuResult {
        let mut regions = write(&self.regions);
        match regions.get(&base) {
            Some(r) if matches!(r.kind, Kind::HostRegistered(_)) => {
                regions.remove(&base);
                Ok(())
            }
            _ => Err(CuError::HOST_MEMORY_NOT_REGISTERED),
        }
    }

    /// Releases everything that a context owns.
    pub(crate) fn release_context(&self, arbiter: &Arbiter, context: u64) {
        let mut owned = Vec::new();
        write(&self.regions).retain(|_, region| {
            let keep = region.context != context;
            if !keep {
                owned.push(region.clone());
            }
            keep
        });
        for region in owned {
            match region.kind {
                Kind::HostAllocated(_) => {
                    // SAFETY: our own mapping of this length, just taken out
                    // of the map; the context's work has ended.
                    unsafe { libc::munmap(region.base as *mut _, region.len as usize) };
                }
                Kind::HostRegistered(_) => {}
                _ => self.give_back(arbiter, &region),
            }
        }
    }

    /// The region that holds `addr`.
    pub(crate) fn find(&self, addr: u64) -> Option<Region> {
        let regions = read(&self.regions);
        let (_, region) = regions.range(..=addr).next_back()?;
        (addr - region.base < region.len).then(|| region.clone())
    }

    /// What the `len` bytes at `addr` are.
    ///
    /// # Errors
    /// `INVALID_VALUE` if they run over the end of an allocation, or lie where
    /// device memory is but nothing is allocated.
    pub(crate) fn place(&self, addr: u64, len: u64) -> CuResult<Place> {
        if addr == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        match self.find(addr) {
            Some(r) if len > r.len - (addr - r.base) => Err(CuError::INVALID_VALUE),
            Some(r) if r.kind.on_device() => Ok(Place::Device),
            Some(_) => Ok(Place::Pinned),
            None if self.arena_range.contains(&addr) => Err(CuError::INVALID_VALUE),
            None => Ok(Place::Pageable),
        }
    }

    /// Checks that the device may touch `len` bytes at `addr`.
    ///
    /// # Errors
    /// `INVALID_VALUE` if not.
    pub(crate) fn check_device(&self, addr: u64, len: u64) -> CuResult {
        match self.place(addr, len)? {
            Place::Pageable => Err(CuError::INVALID_VALUE),
            _ => Ok(()),
        }
    }
}

impl tally_softcuda_vm::Memory for MemoryMap {
    fn range(&self, addr: u64) -> Option<(u64, u64)> {
        let regions = read(&self.regions);
        let (_, region) = regions.range(..=addr).next_back()?;
        (addr - region.base < region.len).then_some((region.base, region.len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_softcuda_vm::Memory;

    #[test]
    fn lookups_end_where_allocations_end() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let wish = crate::sm::Wish { sms: Some(1), memory_bytes: Some(1 << 20) };
        let arbiter = Arbiter::attach(&dir.path().join("device"), wish).unwrap();
        let map = MemoryMap::new(1 << 20).unwrap();
        let at = map.allocate(&arbiter, 100, Kind::Device, 1, None).unwrap();
        assert_eq!(map.range(at + 99), Some((at, 100)));
        assert_eq!(map.range(at + 100), None);
        assert_eq!(map.place(at + 50, 50), Ok(Place::Device));
        assert_eq!(map.place(at + 50, 51), Err(CuError::INVALID_VALUE));
        assert_eq!(
            map.allocate(&arbiter, 1 << 20, Kind::Device, 1, None),
            Err(CuError::OUT_OF_MEMORY)
        );
        assert_eq!(
            map.allocate(&arbiter, u64::MAX, Kind::Device, 1, None),
            Err(CuError::OUT_OF_MEMORY)
        );
        map.release(&arbiter, at).unwrap();
        assert_eq!(map.release(&arbiter, at), Err(CuError::INVALID_VALUE));
        assert_eq!(map.range(at), None);
        assert_eq!(map.place(at, 1), Err(CuError::INVALID_VALUE));
        assert_eq!(arbiter.used_bytes(), 0);

        let host = [0u8; 64];
        let base = host.as_ptr() as u64;
        assert_eq!(map.place(base, 64), Ok(Place::Pageable));
        map.register_host(base, 64, 0, 1).unwrap();
        assert_eq!(
            map.register_host(base + 63, 1, 0, 1),
            Err(CuError::HOST_MEMORY_ALREADY_REGISTERED)
        );
        assert_eq!(map.place(base, 64), Ok(Place::Pinned));
        map.unregister_host(base).unwrap();
        assert_eq!(map.unregister_host(base), Err(CuError::HOST_MEMORY_NOT_REGISTERED));
    }
}
