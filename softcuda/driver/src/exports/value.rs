//! Stream memory operations: a stream writes a word, or waits for one.

use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::ffi::{In, exports_per_thread};
use crate::op::{Op, check_value_address};
use crate::stream::{NullStream, resolve};

/// Flags of a wait: the comparison, and the flush, which is always done.
const WAIT_FLAGS: u32 = 3 | 1 << 30;
/// Flags of a write: none. The driver refuses `NO_MEMORY_BARRIER` in this
/// generation of the interface, so this device does.
const WRITE_FLAGS: u32 = 0;
/// Operations in a batch, at most, as the driver has it.
const BATCH_MAX: u32 = 256;

fn write_op(address: u64, value: u64, flags: u32, wide: bool) -> CuResult<Op> {
    if flags & !WRITE_FLAGS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    check_value_address(address, wide)?;
    Ok(Op::WriteValue { address, value, wide })
}

fn wait_op(address: u64, value: u64, flags: u32, wide: bool) -> CuResult<Op> {
    if flags & !WAIT_FLAGS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    check_value_address(address, wide)?;
    Ok(Op::WaitValue { address, value, wide, flags })
}

/// One `CUstreamBatchMemOpParams`: a wait, a write, or a barrier.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BatchOp {
    operation: u32,
    address: u64,
    value: u64,
    flags: u32,
    alias: u64,
    reserved: u64,
}

const _: () = assert!(size_of::<BatchOp>() == 48);

impl BatchOp {
    pub(super) fn op(&self) -> CuResult<Op> {
        let Self { address, value, flags, .. } = *self;
        let narrow = value & u64::from(u32::MAX);
        match self.operation {
            1 => wait_op(address, narrow, flags, false),
            2 => write_op(address, narrow, flags, false),
            4 => wait_op(address, value, flags, true),
            5 => write_op(address, value, flags, true),
            // Flush and barrier: everything is ordered anyway.
            3 | 6 => Ok(Op::Nop),
            _ => Err(CuError::NOT_SUPPORTED),
        }
    }
}

fn batch(stream: usize, count: u32, ops: &In<BatchOp>, flags: u32, null: NullStream) -> CuResult {
    driver()?;
    let stream = resolve(stream, null)?;
    if count > BATCH_MAX || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    // All or nothing: each is checked before the first is submitted.
    let ops = ops.to_vec(count as usize)?;
    let ops: Vec<Op> = ops.iter().map(BatchOp::op).collect::<CuResult<_>>()?;
    ops.into_iter().try_for_each(|op| stream.submit(op))
}

macro_rules! value_functions {
    ($($write:ident / $write_pt:ident, $wait:ident / $wait_pt:ident: $ty:ty, $wide:expr;)*) => {
        exports_per_thread! {$(
            fn $write / $write_pt |null| (stream: usize, address: u64, value: $ty, flags: u32) {
                resolve(stream, null)?.submit(write_op(address, value.into(), flags, $wide)?)
            }

            fn $wait / $wait_pt |null| (stream: usize, address: u64, value: $ty, flags: u32) {
                resolve(stream, null)?.submit(wait_op(address, value.into(), flags, $wide)?)
            }
        )*}
    };
}

value_functions! {
    cuStreamWriteValue32 / cuStreamWriteValue32_ptsz,
        cuStreamWaitValue32 / cuStreamWaitValue32_ptsz: u32, false;
    cuStreamWriteValue32_v2 / cuStreamWriteValue32_v2_ptsz,
        cuStreamWaitValue32_v2 / cuStreamWaitValue32_v2_ptsz: u32, false;
    cuStreamWriteValue64 / cuStreamWriteValue64_ptsz,
        cuStreamWaitValue64 / cuStreamWaitValue64_ptsz: u64, true;
    cuStreamWriteValue64_v2 / cuStreamWriteValue64_v2_ptsz,
        cuStreamWaitValue64_v2 / cuStreamWaitValue64_v2_ptsz: u64, true;
}

exports_per_thread! {
    fn cuStreamBatchMemOp / cuStreamBatchMemOp_ptsz |null| (
        stream: usize, count: u32, ops: In<BatchOp>, flags: u32
    ) {
        batch(stream, count, &ops, flags, null)
    }

    fn cuStreamBatchMemOp_v2 / cuStreamBatchMemOp_v2_ptsz |null| (
        stream: usize, count: u32, ops: In<BatchOp>, flags: u32
    ) {
        batch(stream, count, &ops, flags, null)
    }
}
