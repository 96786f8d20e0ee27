//! `cuMemAlloc*`, `cuMemFree*`, `cuMemHost*`: getting and returning memory.

use crate::capture;
use crate::context::current;
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::ffi::{Out, exports};
use crate::memory::Kind;
use crate::stream::NullStream;
use crate::sync::lock;
use std::ffi::c_void;

/// Flags of `cuMemHostAlloc`: portable, device map, write combined.
const HOST_ALLOC_FLAGS: u32 = 7;
/// Flags of `cuMemHostRegister`: also I/O and read-only memory.
const HOST_REGISTER_FLAGS: u32 = 15;
/// Row pitch of `cuMemAllocPitch`.
const PITCH_ALIGN_BYTES: usize = 512;

fn allocate(out: &Out<u64>, bytes: usize, kind: Kind) -> CuResult {
    let context = current()?;
    out.check()?;
    if bytes == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    capture::forbid()?;
    let driver = driver()?;
    out.set(driver.memory.allocate(&driver.arbiter, bytes as u64, kind, context.id, None)?)
}

fn allocate_host(out: &Out<*mut c_void>, bytes: usize, flags: u32) -> CuResult {
    let context = current()?;
    out.check()?;
    if bytes == 0 || flags & !HOST_ALLOC_FLAGS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    capture::forbid()?;
    let address = driver()?.memory.allocate_host(bytes as u64, flags, context.id)?;
    out.set(address as *mut c_void)
}

exports! {
    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        allocate(&address, bytes, Kind::Device)
    }

    fn cuMemAllocManaged(address: Out<u64>, bytes: usize, flags: u32) {
        // Attached to all streams, the host's only, or one stream.
        if !matches!(flags, 1 | 2 | 4) {
            return Err(CuError::INVALID_VALUE);
        }
        allocate(&address, bytes, Kind::Managed)
    }

    fn cuMemAllocPitch_v2(
        address: Out<u64>,
        pitch: Out<usize>,
        width: usize,
        height: usize,
        element: u32,
    ) {
        if !matches!(element, 4 | 8 | 16) {
            return Err(CuError::INVALID_VALUE);
        }
        pitch.check()?;
        let row = width.checked_next_multiple_of(PITCH_ALIGN_BYTES).ok_or(CuError::INVALID_VALUE)?;
        let bytes = row.checked_mul(height).ok_or(CuError::OUT_OF_MEMORY)?;
        allocate(&address, bytes, Kind::Device)?;
        pitch.set(row)
    }

    fn cuMemFree_v2(address: u64) {
        let context = current()?;
        if address == 0 {
            return Ok(());
        }
        capture::forbid()?;
        let driver = driver()?;
        let region = driver.memory.find(address).filter(|r| r.base == address);
        if !region.is_some_and(|r| r.kind.on_device()) {
            return Err(CuError::INVALID_VALUE);
        }
        // As on hardware, memory is freed when nothing runs any more.
        let _alone = context.synchronize_alone()?;
        driver.memory.release(&driver.arbiter, address)
    }

    fn cuMemAllocHost_v2(address: Out<*mut c_void>, bytes: usize) {
        allocate_host(&address, bytes, 0)
    }

    fn cuMemHostAlloc(address: Out<*mut c_void>, bytes: usize, flags: u32) {
        allocate_host(&address, bytes, flags)
    }

    fn cuMemFreeHost(address: *mut c_void) {
        let context = current()?;
        if address.is_null() {
            return Ok(());
        }
        capture::forbid()?;
        let _alone = context.synchronize_alone()?;
        driver()?.memory.release_host(address as u64)
    }

    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: u32) {
        let context = current()?;
        if flags & !HOST_REGISTER_FLAGS != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        driver()?.memory.register_host(address as u64, bytes as u64, flags, context.id)
    }

    fn cuMemHostUnregister(address: *mut c_void) {
        let context = current()?;
        let _alone = context.synchronize_alone()?;
        driver()?.memory.unregister_host(address as u64)
    }

    fn cuMemHostGetDevicePointer_v2(device: Out<u64>, address: *mut c_void, flags: u32) {
        current()?;
        if flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let region = driver()?.memory.find(address as u64);
        if region.is_none_or(|r| r.kind.on_device()) {
            return Err(CuError::INVALID_VALUE);
        }
        device.set(address as u64)
    }

    fn cuMemHostGetFlags(flags: Out<u32>, address: *mut c_void) {
        current()?;
        match driver()?.memory.find(address as u64).map(|r| r.kind) {
            // Everything is mapped, as with unified addressing on hardware.
            Some(Kind::HostAllocated(set) | Kind::HostRegistered(set)) => flags.set(set | 2),
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        current()?;
        let arbiter = &driver()?.arbiter;
        let bytes = arbiter.memory_bytes();
        free.set_if(bytes.saturating_sub(arbiter.used_bytes()) as usize);
        total.set_if(bytes as usize);
        Ok(())
    }

    fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, address: u64) {
        current()?;
        let region = driver()?.memory.find(address).filter(|r| r.kind.on_device());
        let region = region.ok_or(CuError::NOT_FOUND)?;
        base.set_if(region.base);
        size.set_if(region.len as usize);
        Ok(())
    }
}

crate::ffi::exports_per_thread! {
    fn cuMemAllocAsync / cuMemAllocAsync_ptsz |null| (address: Out<u64>, bytes: usize, stream: usize) {
        let pool = lock(&driver()?.current_pool).clone();
        super::pool::allocate(&address, bytes, pool, stream, null)
    }

    fn cuMemFreeAsync / cuMemFreeAsync_ptsz |null| (address: u64, stream: usize) {
        super::pool::free(address, stream, null)
    }

    fn cuMemPrefetchAsync / cuMemPrefetchAsync_ptsz |null| (address: u64, bytes: usize, _device: i32, stream: usize) {
        prefetch(address, bytes, stream, null)
    }

    fn cuMemPrefetchAsync_v2 / cuMemPrefetchAsync_v2_ptsz |null| (
        address: u64, bytes: usize, _location: u64, _flags: u32, stream: usize
    ) {
        prefetch(address, bytes, stream, null)
    }

    fn cuStreamAttachMemAsync / cuStreamAttachMemAsync_ptsz |null| (
        stream: usize, address: u64, _bytes: usize, _flags: u32
    ) {
        prefetch(address, 1, stream, null)
    }
}

exports! {
    fn cuMemAdvise(address: u64, bytes: usize, _advice: u32, _device: i32) {
        current()?;
        driver()?.memory.check_device(address, bytes as u64)
    }

    fn cuMemAdvise_v2(address: u64, bytes: usize, _advice: u32, _location: u64) {
        current()?;
        driver()?.memory.check_device(address, bytes as u64)
    }
}

/// Memory is where it is; only the arguments are looked at.
fn prefetch(address: u64, bytes: usize, stream: usize, null: NullStream) -> CuResult {
    crate::stream::resolve(stream, null)?;
    driver()?.memory.check_device(address, bytes as u64)
}
