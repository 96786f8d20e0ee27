//! `cuDevice*`: what there is, and the primary context.

use crate::config::{
    BLOCK_DIM_MAX, BLOCK_THREADS_MAX, COMPUTE_CAPABILITY, DEVICE_NAME, GRID_DIM_MAX,
    SHARED_BYTES_DEFAULT, WARP_THREADS,
};
use crate::context::Context;
use crate::device::{PCI_BUS_ID, UUID, attribute, check};
use crate::driver::driver;
use crate::error::CuError;
use crate::ffi::{In, Out, exports};
use crate::registry::handle_of;
use crate::sync::lock;
use std::ffi::c_char;
use std::sync::atomic::Ordering::SeqCst;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    threads_per_block: i32,
    block_dim: [i32; 3],
    grid_dim: [i32; 3],
    shared_per_block: i32,
    constant_bytes: i32,
    warp: i32,
    pitch: i32,
    registers: i32,
    clock_khz: i32,
    texture_align: i32,
}

exports! {
    fn cuDeviceGet(device: Out<i32>, ordinal: i32) {
        driver()?;
        check(ordinal)?;
        device.set(0)
    }

    fn cuDeviceGetCount(count: Out<i32>) {
        driver()?;
        count.set(1)
    }

    fn cuDeviceGetName(name: Out<c_char>, length: i32, device: i32) {
        driver()?;
        check(device)?;
        name.set_text(DEVICE_NAME, usize::try_from(length).unwrap_or(0))
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: i32) {
        driver()?;
        check(device)?;
        uuid.set(UUID)
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) {
        driver()?;
        check(device)?;
        uuid.set(UUID)
    }

    fn cuDeviceGetLuid(_luid: Out<c_char>, _mask: Out<u32>, device: i32) {
        driver()?;
        check(device)?;
        // Windows only.
        Err(CuError::NOT_SUPPORTED)
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) {
        let driver = driver()?;
        check(device)?;
        bytes.set(driver.arbiter.memory_bytes() as usize)
    }

    fn cuDeviceGetAttribute(value: Out<i32>, number: i32, device: i32) {
        let driver = driver()?;
        check(device)?;
        value.set(attribute(number, driver.arbiter.sms())?)
    }

    fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, device: i32) {
        driver()?;
        check(device)?;
        major.set(COMPUTE_CAPABILITY.0)?;
        minor.set(COMPUTE_CAPABILITY.1)
    }

    fn cuDeviceGetProperties(properties: Out<Properties>, device: i32) {
        driver()?;
        check(device)?;
        properties.set(Properties {
            threads_per_block: BLOCK_THREADS_MAX as i32,
            block_dim: BLOCK_DIM_MAX.map(|d| d as i32),
            grid_dim: GRID_DIM_MAX.map(|d| d as i32),
            shared_per_block: SHARED_BYTES_DEFAULT as i32,
            constant_bytes: 64 << 10,
            warp: WARP_THREADS,
            pitch: i32::MAX,
            registers: 65_536,
            clock_khz: attribute(13, 1)?,
            texture_align: 512,
        })
    }

    fn cuDeviceGetPCIBusId(text: Out<c_char>, length: i32, device: i32) {
        driver()?;
        check(device)?;
        text.set_text(PCI_BUS_ID, usize::try_from(length).unwrap_or(0))
    }

    fn cuDeviceGetByPCIBusId(device: Out<i32>, text: In<c_char>) {
        driver()?;
        let text = text.text()?;
        // The domain may be left out, and the function.
        let known = [PCI_BUS_ID, &PCI_BUS_ID[5..], &PCI_BUS_ID[..10], &PCI_BUS_ID[5..10]];
        if !known.iter().any(|k| k.eq_ignore_ascii_case(text)) {
            return Err(CuError::INVALID_DEVICE);
        }
        device.set(0)
    }

    fn cuDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) {
        driver()?;
        check(device)?;
        check(peer)?;
        can.set(0)
    }

    fn cuDeviceGetP2PAttribute(value: Out<i32>, _attribute: u32, device: i32, peer: i32) {
        driver()?;
        check(device)?;
        check(peer)?;
        value.set(0)
    }

    fn cuDeviceGetExecAffinitySupport(supported: Out<i32>, _kind: u32, device: i32) {
        driver()?;
        check(device)?;
        supported.set(0)
    }

    fn cuDevicePrimaryCtxRetain(context: Out<usize>, device: i32) {
        let driver = driver()?;
        check(device)?;
        context.check()?;
        driver.retain_primary();
        context.set(handle_of(&driver.primary))
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        let driver = driver()?;
        check(device)?;
        driver.release_primary()
    }

    fn cuDevicePrimaryCtxReset_v2(device: i32) {
        let driver = driver()?;
        check(device)?;
        let refs = lock(&driver.primary_refs);
        if driver.primary.is_alive() {
            driver.primary.tear_down(driver);
        }
        if *refs > 0 {
            driver.primary.revive();
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32) {
        let driver = driver()?;
        check(device)?;
        Context::check_flags(flags)?;
        driver.primary.set_flags(flags)
    }

    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) {
        let driver = driver()?;
        check(device)?;
        flags.set_if(driver.primary.flags.load(SeqCst) & !8);
        active.set_if(i32::from(driver.primary.is_alive()));
        Ok(())
    }
}
