//! What the device says about itself.

use crate::config::{
    BLOCK_DIM_MAX, BLOCK_THREADS_MAX, COMPUTE_CAPABILITY, GRID_DIM_MAX, SHARED_BYTES_DEFAULT,
    SHARED_BYTES_OPTIN, SHARED_BYTES_SM, WARP_THREADS,
};
use crate::error::{CuError, CuResult};

/// Reported clock, in kHz. Nothing runs at it; programs divide by it.
const CLOCK_KHZ: i32 = 1_000_000;
/// `CU_DEVICE_ATTRIBUTE_MAX`: numbers from here on are invalid, unknown ones
/// below it are features that the device does not have.
const ATTRIBUTE_END: i32 = 162;

/// Fails unless the ordinal is 0, the only device.
pub(crate) fn check(device: i32) -> CuResult {
    if device == 0 { Ok(()) } else { Err(CuError::INVALID_DEVICE) }
}

/// The same in every process on the host, and unlike any GPU's.
pub(crate) const UUID: [u8; 16] = *b"tally-softcuda-1";

/// Domain, bus and device as in `cuDeviceGetPCIBusId`.
pub(crate) const PCI_BUS_ID: &str = "0000:54:00.0";

/// A `CUdevice_attribute` by its number.
///
/// # Errors
/// `INVALID_VALUE` for a number that no attribute has.
pub(crate) fn attribute(number: i32, sms: u32) -> CuResult<i32> {
    Ok(match number {
        1 => BLOCK_THREADS_MAX as i32,
        2..=4 => BLOCK_DIM_MAX[number as usize - 2] as i32,
        5..=7 => GRID_DIM_MAX[number as usize - 5] as i32,
        8 => SHARED_BYTES_DEFAULT as i32,
        9 => 64 << 10,
        10 => WARP_THREADS,
        11 => i32::MAX,
        12 | 82 => 65_536,
        13 | 36 => CLOCK_KHZ,
        14 | 30 => 512,
        51 => 32,
        16 => sms as i32,
        // Overlap, mapped host memory, concurrent kernels, unified addressing,
        // stream priorities, L1 caches, managed memory, registered pointers.
        15 | 19 | 31 | 41 | 78 | 79 | 80 | 83 | 91 => 1,
        33 => 0x54,
        37 => 64,
        38 => 4 << 20,
        39 => BLOCK_THREADS_MAX as i32,
        40 => 2,
        75 => COMPUTE_CAPABILITY.0,
        76 => COMPUTE_CAPABILITY.1,
        81 => SHARED_BYTES_SM as i32,
        87 => 2,
        // Stream memory operations, cooperative launch, host registration.
        92 | 93 | 94 | 95 | 99 | 122 | 123 => 1,
        97 => SHARED_BYTES_OPTIN as i32,
        // Blocks on an SM: one at a time.
        106 => 1,
        111 => 1 << 10,
        // Memory pools.
        115 => 1,
        126 => 1,
        0 => return Err(CuError::INVALID_VALUE),
        n if !(0..ATTRIBUTE_END).contains(&n) => return Err(CuError::INVALID_VALUE),
        _ => 0,
    })
}
