//! Memory pools and stream-ordered allocation.

use crate::capture;
use crate::context::current;
use crate::device::check;
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::ffi::{In, Out, exports, exports_per_thread};
use crate::memory::{Kind, Pool};
use crate::op::Op;
use crate::registry::handle_of;
use crate::stream::{NullStream, resolve};
use crate::sync::lock;
use std::ffi::c_void;
use std::sync::Arc;

/// Allocates at once; what was freed earlier in the stream is there again when
/// the stream gets to it, so being out of memory means to wait for that.
pub(super) fn allocate(
    out: &Out<u64>,
    bytes: usize,
    pool: Arc<Pool>,
    stream: usize,
    null: NullStream,
) -> CuResult {
    let stream = resolve(stream, null)?;
    out.check()?;
    if bytes == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let driver = driver()?;
    let take = || {
        let (id, pool) = (stream.context.id, Some(pool.clone()));
        driver.memory.allocate(&driver.arbiter, bytes as u64, Kind::Device, id, pool)
    };
    if let Some(fork) = capture::fork_of(&stream) {
        // The address is the graph's for as long as the graph is there.
        let address = take()?;
        let id = driver.memory.find(address).map_or(0, |r| r.id);
        lock(&fork.session.graph.memory).push((address, id));
        stream.submit(Op::Nop)?;
        return out.set(address);
    }
    let address = take().or_else(|_| {
        stream.wait_all();
        take()
    });
    out.set(address?)
}

pub(super) fn free(address: u64, stream: usize, null: NullStream) -> CuResult {
    let stream = resolve(stream, null)?;
    if address == 0 {
        return Ok(());
    }
    let region = driver()?.memory.find(address).filter(|r| r.base == address);
    if !region.is_some_and(|r| r.kind.on_device()) {
        return Err(CuError::INVALID_VALUE);
    }
    match capture::fork_of(&stream) {
        Some(fork) if lock(&fork.session.graph.memory).iter().any(|m| m.0 == address) => {
            stream.submit(Op::Nop)
        }
        _ => stream.submit(Op::Free(address)),
    }
}

/// Which attributes are 32 bits wide: the reuse switches.
fn is_narrow(number: u32) -> bool {
    number <= 3
}

exports! {
    fn cuDeviceGetDefaultMemPool(pool: Out<usize>, device: i32) {
        let driver = driver()?;
        check(device)?;
        pool.set(handle_of(&driver.default_pool))
    }

    fn cuDeviceGetMemPool(pool: Out<usize>, device: i32) {
        let driver = driver()?;
        check(device)?;
        pool.set(handle_of(&*lock(&driver.current_pool)))
    }

    fn cuDeviceSetMemPool(device: i32, pool: usize) {
        let driver = driver()?;
        check(device)?;
        *lock(&driver.current_pool) = driver.pools.get(pool)?;
        Ok(())
    }

    fn cuMemPoolCreate(pool: Out<usize>, properties: In<u32>) {
        let driver = driver()?;
        pool.check()?;
        // The first field is the allocation type: pinned.
        if properties.get()? != 1 {
            return Err(CuError::INVALID_VALUE);
        }
        pool.set(driver.pools.insert(&Arc::new(Pool::new())))
    }

    fn cuMemPoolDestroy(pool: usize) {
        let driver = driver()?;
        let found = driver.pools.get(pool)?;
        if Arc::ptr_eq(&found, &driver.default_pool) {
            return Err(CuError::INVALID_VALUE);
        }
        driver.pools.remove(pool)?;
        let mut current = lock(&driver.current_pool);
        if Arc::ptr_eq(&current, &found) {
            *current = driver.default_pool.clone();
        }
        Ok(())
    }

    fn cuMemPoolTrimTo(pool: usize, _keep: usize) {
        driver()?.pools.get(pool).map(drop)
    }

    fn cuMemPoolGetAttribute(pool: usize, number: u32, value: Out<c_void>) {
        let pool = driver()?.pools.get(pool)?;
        let found = pool.attribute(number).ok_or(CuError::INVALID_VALUE)?;
        if is_narrow(number) {
            value.cast::<i32>().set(found as i32)
        } else {
            value.cast::<u64>().set(found)
        }
    }

    fn cuMemPoolSetAttribute(pool: usize, number: u32, value: In<c_void>) {
        let pool = driver()?.pools.get(pool)?;
        let value = if is_narrow(number) {
            u64::from(value.cast::<u32>().get()?)
        } else {
            value.cast::<u64>().get()?
        };
        if pool.set_attribute(number, value) { Ok(()) } else { Err(CuError::INVALID_VALUE) }
    }

    fn cuMemPoolSetAccess(pool: usize, _access: *const c_void, _count: usize) {
        driver()?.pools.get(pool).map(drop)
    }

    fn cuMemPoolGetAccess(flags: Out<u32>, pool: usize, _location: *mut c_void) {
        current()?;
        driver()?.pools.get(pool)?;
        // Read and write.
        flags.set(3)
    }
}

exports_per_thread! {
    fn cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync_ptsz |null| (
        address: Out<u64>, bytes: usize, pool: usize, stream: usize
    ) {
        let pool = driver()?.pools.get(pool)?;
        allocate(&address, bytes, pool, stream, null)
    }
}
