//! `cuPointer*`: what an address is.

use crate::context::current;
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::ffi::{In, Out, exports};
use crate::memory::{Kind, Region};
use crate::registry::handle_of;
use std::ffi::c_void;

const CONTEXT: u32 = 1;
const MEMORY_TYPE: u32 = 2;
const DEVICE_POINTER: u32 = 3;
const HOST_POINTER: u32 = 4;
const SYNC_MEMOPS: u32 = 6;
const BUFFER_ID: u32 = 7;
const IS_MANAGED: u32 = 8;
const DEVICE_ORDINAL: u32 = 9;
const IPC_CAPABLE: u32 = 10;
const RANGE_START: u32 = 11;
const RANGE_SIZE: u32 = 12;
const MAPPED: u32 = 13;
const HANDLE_TYPES: u32 = 14;
const RDMA_CAPABLE: u32 = 15;
const ACCESS_FLAGS: u32 = 16;
const POOL: u32 = 17;

fn write(data: &Out<c_void>, number: u32, address: u64, region: &Region) -> CuResult {
    let on_device = region.kind.on_device();
    match number {
        CONTEXT => {
            // The owner, if it is still there; contexts are few.
            let driver = driver()?;
            let current = current()?;
            let owner = [&driver.primary, &current].into_iter().find(|c| c.id == region.context);
            data.cast::<usize>().set(owner.map_or(0, handle_of))
        }
        MEMORY_TYPE => data.cast::<u32>().set(if on_device { 2 } else { 1 }),
        DEVICE_POINTER => data.cast::<u64>().set(address),
        HOST_POINTER if region.kind == Kind::Device => {
            data.cast::<usize>().set(0)?;
            Err(CuError::INVALID_VALUE)
        }
        HOST_POINTER => data.cast::<u64>().set(address),
        SYNC_MEMOPS | IPC_CAPABLE | RDMA_CAPABLE => data.cast::<u8>().set(0),
        BUFFER_ID => data.cast::<u64>().set(region.id),
        IS_MANAGED => data.cast::<u8>().set(u8::from(region.kind == Kind::Managed)),
        DEVICE_ORDINAL => data.cast::<i32>().set(0),
        RANGE_START => data.cast::<u64>().set(region.base),
        RANGE_SIZE => data.cast::<usize>().set(region.len as usize),
        MAPPED => data.cast::<u8>().set(1),
        HANDLE_TYPES => data.cast::<u64>().set(0),
        ACCESS_FLAGS => data.cast::<u32>().set(3),
        POOL => data.cast::<usize>().set(region.pool.as_ref().map_or(0, handle_of)),
        _ => Err(CuError::INVALID_VALUE),
    }
}

exports! {
    fn cuPointerGetAttribute(data: Out<c_void>, number: u32, address: u64) {
        current()?;
        data.check()?;
        let region = driver()?.memory.find(address).ok_or(CuError::INVALID_VALUE)?;
        write(&data, number, address, &region)
    }

    fn cuPointerGetAttributes(
        count: u32,
        numbers: In<u32>,
        data: In<Out<c_void>>,
        address: u64,
    ) {
        current()?;
        let region = driver()?.memory.find(address);
        for i in 0..count as usize {
            let number = numbers.at(i)?;
            let slot = data.cast::<*mut c_void>().at(i)?;
            let slot = Out::new(slot);
            match &region {
                Some(region) => match write(&slot, number, address, region) {
                    // A pointer that is not valid on one side reads as null.
                    Err(CuError::INVALID_VALUE) if number == HOST_POINTER => {}
                    other => other?,
                },
                // Unknown to the driver: zeros, and the ordinal of no device.
                None if number == DEVICE_ORDINAL => slot.cast::<i32>().set(-2)?,
                None => match number {
                    MEMORY_TYPE | ACCESS_FLAGS => slot.cast::<u32>().set(0)?,
                    SYNC_MEMOPS | IS_MANAGED | IPC_CAPABLE | MAPPED | RDMA_CAPABLE => {
                        slot.cast::<u8>().set(0)?;
                    }
                    CONTEXT..=POOL => slot.cast::<u64>().set(0)?,
                    _ => return Err(CuError::INVALID_VALUE),
                },
            }
        }
        Ok(())
    }

    fn cuPointerSetAttribute(_value: *const c_void, number: u32, address: u64) {
        current()?;
        driver()?.memory.find(address).ok_or(CuError::INVALID_VALUE)?;
        if number == SYNC_MEMOPS { Ok(()) } else { Err(CuError::INVALID_VALUE) }
    }
}
