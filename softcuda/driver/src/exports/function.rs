//! `cuFunc*` and `cuOccupancy*`: what a kernel needs, and what fits an SM.

use crate::config::{BLOCK_THREADS_MAX, COMPUTE_CAPABILITY, SHARED_BYTES_OPTIN, WARP_THREADS};
use crate::context::current;
use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::ffi::{Out, exports};
use crate::module::{Function, resolve_function};
use crate::registry::handle_of;
use std::ffi::{c_char, c_void};
use std::sync::atomic::Ordering::SeqCst;

/// `CUfunction_attribute` by its number.
pub(super) fn attribute(function: &Function, number: u32) -> CuResult<i32> {
    let kernel = function.kernel()?;
    let code = COMPUTE_CAPABILITY.0 * 10 + COMPUTE_CAPABILITY.1;
    Ok(match number {
        0 => kernel.max_threads.min(BLOCK_THREADS_MAX) as i32,
        1 => kernel.static_shared_bytes as i32,
        // Constants, cache mode, whether a cluster size must be given.
        2 | 7 | 10 | 16 | 17 => 0,
        3 => kernel.local_bytes as i32,
        4 => kernel.registers.min(255) as i32,
        5 | 6 => code,
        8 => function.dynamic_shared_max()? as i32,
        9 => function.attributes.carveout.load(SeqCst),
        11..=13 => function.attributes.required_cluster[number as usize - 11].load(SeqCst),
        14 => function.attributes.cluster_nonportable.load(SeqCst),
        15 => function.attributes.cluster_policy.load(SeqCst),
        _ => return Err(CuError::INVALID_VALUE),
    })
}

/// Sets what may be set.
pub(super) fn set_attribute(function: &Function, number: u32, value: i32) -> CuResult {
    match number {
        8 => return function.set_dynamic_shared_max(value),
        9 if (-1..=100).contains(&value) => function.attributes.carveout.store(value, SeqCst),
        11..=13 if value >= 0 => {
            function.attributes.required_cluster[number as usize - 11].store(value, SeqCst);
        }
        14 if (0..=1).contains(&value) => {
            function.attributes.cluster_nonportable.store(value, SeqCst);
        }
        // Default, spread, load balancing.
        15 if (0..=2).contains(&value) => function.attributes.cluster_policy.store(value, SeqCst),
        _ => return Err(CuError::INVALID_VALUE),
    }
    Ok(())
}

/// Offset and size of a parameter.
pub(super) fn param(
    function: &Function,
    index: usize,
    offset: &Out<usize>,
    size: &Out<usize>,
) -> CuResult {
    let param = function.kernel()?.params.get(index).ok_or(CuError::INVALID_VALUE)?;
    offset.set(param.offset as usize)?;
    size.set_if(param.size as usize);
    Ok(())
}

type SharedForBlock = extern "C" fn(i32) -> usize;

/// The largest block that fits, and the grid that fills the device with it.
fn best_block(
    grid: &Out<i32>,
    block: &Out<i32>,
    function: usize,
    shared_for: Option<SharedForBlock>,
    shared: usize,
    limit: i32,
) -> CuResult {
    let function = resolve_function(function)?;
    let context = current()?;
    let _launching = context.launching();
    let own_limit = function.kernel()?.max_threads.min(BLOCK_THREADS_MAX) as i32;
    let limit = if limit > 0 { limit.min(own_limit) } else { own_limit };
    let warps = (1..=limit / WARP_THREADS).rev().map(|w| w * WARP_THREADS);
    let fits = |&threads: &i32| {
        let shared = shared_for.map_or(shared, |f| f(threads));
        function.blocks_per_sm(threads as u64, shared as u64).is_ok_and(|blocks| blocks > 0)
    };
    let best = warps.chain(std::iter::once(limit)).find(fits).ok_or(CuError::INVALID_VALUE)?;
    grid.set(driver()?.arbiter.sms() as i32)?;
    block.set(best)
}

fn active_blocks(blocks: &Out<i32>, function: usize, threads: i32, shared: usize) -> CuResult {
    let threads = u64::try_from(threads).map_err(|_| CuError::INVALID_VALUE)?;
    if threads == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let function = resolve_function(function)?;
    let context = current()?;
    let _launching = context.launching();
    let kernel = function.kernel()?;
    if crate::config::is_crowded(&kernel.name, kernel.param_bytes as usize) {
        return blocks.set(0);
    }
    blocks.set(function.blocks_per_sm(threads, shared as u64)? as i32)
}

exports! {
    fn cuFuncGetAttribute(value: Out<i32>, number: u32, function: usize) {
        value.set(attribute(&*resolve_function(function)?, number)?)
    }

    fn cuFuncSetAttribute(function: usize, number: u32, value: i32) {
        set_attribute(&*resolve_function(function)?, number, value)
    }

    fn cuFuncSetCacheConfig(function: usize, config: u32) {
        resolve_function(function)?;
        if config > 3 { Err(CuError::INVALID_VALUE) } else { Ok(()) }
    }

    fn cuFuncSetSharedMemConfig(function: usize, config: u32) {
        resolve_function(function)?;
        if config > 2 { Err(CuError::INVALID_VALUE) } else { Ok(()) }
    }

    fn cuFuncGetName(name: Out<*const c_char>, function: usize) {
        name.set(resolve_function(function)?.c_name.as_ptr())
    }

    fn cuFuncGetModule(module: Out<usize>, function: usize) {
        module.set(handle_of(&resolve_function(function)?.module))
    }

    fn cuFuncGetParamInfo(function: usize, index: usize, offset: Out<usize>, size: Out<usize>) {
        param(&*resolve_function(function)?, index, &offset, &size)
    }

    fn cuFuncGetParamCount(function: usize, count: Out<usize>) {
        count.set(resolve_function(function)?.kernel()?.params.len())
    }

    fn cuFuncIsLoaded(state: Out<u32>, function: usize) {
        resolve_function(function)?;
        // CU_FUNCTION_LOADING_STATE_LOADED.
        state.set(1)
    }

    fn cuFuncLoad(function: usize) {
        resolve_function(function).map(drop)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<i32>,
        function: usize,
        threads: i32,
        shared: usize,
    ) {
        active_blocks(&blocks, function, threads, shared)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<i32>,
        function: usize,
        threads: i32,
        shared: usize,
        flags: u32,
    ) {
        if flags > 1 {
            return Err(CuError::INVALID_VALUE);
        }
        active_blocks(&blocks, function, threads, shared)
    }

    fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<i32>,
        block: Out<i32>,
        function: usize,
        shared_for: Option<SharedForBlock>,
        shared: usize,
        limit: i32,
    ) {
        best_block(&grid, &block, function, shared_for, shared, limit)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<i32>,
        block: Out<i32>,
        function: usize,
        shared_for: Option<SharedForBlock>,
        shared: usize,
        limit: i32,
        _flags: u32,
    ) {
        best_block(&grid, &block, function, shared_for, shared, limit)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(
        bytes: Out<usize>,
        function: usize,
        blocks: i32,
        threads: i32,
    ) {
        let function = resolve_function(function)?;
        let fits = blocks == 1 && threads > 0 && function.blocks_per_sm(threads as u64, 0)? == 1;
        let left = SHARED_BYTES_OPTIN.saturating_sub(function.kernel()?.static_shared_bytes);
        bytes.set(if fits { left as usize } else { 0 })
    }

    fn cuOccupancyMaxPotentialClusterSize(
        size: Out<i32>,
        function: usize,
        _config: *const c_void,
    ) {
        resolve_function(function)?;
        // No clusters: each block is one of its own.
        size.set(1)
    }

    fn cuOccupancyMaxActiveClusters(
        clusters: Out<i32>,
        function: usize,
        _config: *const c_void,
    ) {
        resolve_function(function)?;
        clusters.set(driver()?.arbiter.sms() as i32)
    }
}
