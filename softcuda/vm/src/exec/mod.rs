//! Runs one block: warps of 32 lanes in lock-step, in turn, until every
//! thread has left. Start reading at [`run_block`]; a warp's loop is in
//! `warp`.
//!
//! Invariant that the `unsafe` code rests on: `decode` only makes row,
//! predicate and code indices that lie within the function's frame (whose
//! size it also computed) and the kernel's tables, and a frame is allocated
//! before code runs in it.

mod alu;
pub(crate) mod atomic;
mod barrier;
mod calls;
mod group;
mod lanes;
mod matrix;
mod memory;
mod warp;

use crate::ast::Space;
use crate::error::{Site, Trap};
use crate::ir::Row;
use crate::{Kernel, Memory, Program};
use barrier::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use warp::{Outcome, Warp};

/// Generic addresses of a block's own memory. No host address is so large.
pub(crate) mod window {
    pub(crate) const SHARED: u64 = 0x4000_0000_0000_0000;
    pub(crate) const LOCAL: u64 = 0x4100_0000_0000_0000;
    pub(crate) const PARAM: u64 = 0x4200_0000_0000_0000;
    /// Bytes of each of the windows.
    pub(crate) const SIZE: u64 = 1 << 56;
}

/// Warp instructions before another warp of the block has its turn.
const QUANTUM: u64 = 8192;
/// Bytes of stack a thread gets for calls, beyond its kernel's own frame.
const STACK_BYTES: u32 = 64 << 10;

/// What it takes to run one block.
#[derive(Clone, Copy)]
pub struct BlockLaunch<'a> {
    /// The program that `kernel` is of.
    pub program: &'a Program,
    pub kernel: &'a Kernel,
    /// The kernel's parameters, laid out as its `params` say.
    pub params: &'a [u8],
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub block_index: [u32; 3],
    /// Bytes of `extern .shared` memory.
    pub dynamic_shared_bytes: u32,
    pub sm_id: u32,
    pub sm_count: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockStats {
    /// Instructions, each counted once for every active thread.
    pub thread_instructions: u64,
    /// Calls of `vprintf`, which print nothing.
    pub printf_calls: u64,
}

/// Buffers of one worker, reused from block to block.
#[derive(Default)]
pub struct Scratch {
    warps: Vec<Warp>,
    shared: Vec<u128>,
    local: Vec<u128>,
    /// The parameters, aligned for any access.
    params: Vec<u128>,
    /// `%tid` by warp: a row each of x, y and z.
    tid: Vec<Row>,
    tid_of: [u32; 3],
}

impl Scratch {
    /// Empty buffers, which grow to what kernels need.
    pub fn new() -> Self {
        Self::default()
    }
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scratch").field("warps", &self.warps.len()).finish_non_exhaustive()
    }
}

/// What went wrong, before it is known where.
#[derive(Debug)]
pub(crate) enum FaultKind {
    Illegal { address: u64, bytes: u32, space: Space, write: bool },
    Misaligned { address: u64, bytes: u32, space: Space },
    Trap,
    StackOverflow,
    Assert(String),
    Illegitimate(String),
}

#[derive(Debug)]
pub(crate) struct Fault {
    pub kind: FaultKind,
    pub lane: u32,
}

pub(crate) type Checked<T> = Result<T, Box<Fault>>;

pub(crate) fn fault<T>(kind: FaultKind, lane: u32) -> Checked<T> {
    Err(Box::new(Fault { kind, lane }))
}

/// What the warps of a block share.
pub(crate) struct Block<'a> {
    launch: &'a BlockLaunch<'a>,
    memory: &'a dyn Memory,
    threads: u32,
    shared: *mut u8,
    shared_bytes: u64,
    local: *mut u8,
    params: &'a [u8],
    /// Bytes of local memory a thread has.
    local_stride: u64,
    tid: *const Row,
    /// The last ranges that the memory gave, newest first.
    ranges: [(u64, u64); 4],
    barriers: [Barrier; 16],
    /// Some barrier has threads waiting.
    waiting: bool,
    stats: BlockStats,
}

fn check(launch: &BlockLaunch<'_>) -> Result<u32, Trap> {
    let kernel = launch.kernel;
    if let Some(error) = &kernel.unsupported {
        return Err(Trap::Unsupported { kernel: kernel.name.clone(), error: error.clone() });
    }
    let bad = |detail: String| Err(Trap::BadLaunch { kernel: kernel.name.clone(), detail });
    let threads = launch.block.iter().try_fold(1u32, |n, &axis| n.checked_mul(axis));
    let Some(threads @ 1..=1024) = threads else {
        return bad(format!("a block of {:?} threads", launch.block));
    };
    if threads > kernel.max_threads {
        return bad(format!("{threads} threads, but at most {} are allowed", kernel.max_threads));
    }
    if kernel.required_block.is_some_and(|b| b != launch.block) {
        return bad(format!("a block of {:?}, not the one it requires", launch.block));
    }
    if launch.params.len() < kernel.param_bytes as usize {
        return bad(format!(
            "{} bytes of parameters, not {}",
            launch.params.len(),
            kernel.param_bytes
        ));
    }
    Ok(threads)
}

fn fill_tid(scratch: &mut Scratch, block: [u32; 3], warps: usize) {
    if scratch.tid_of == block {
        return;
    }
    scratch.tid_of = block;
    scratch.tid.clear();
    for warp in 0..warps {
        let mut rows = [Row([0; 32]); 3];
        for lane in 0..32 {
            let t = (warp * 32 + lane) as u32;
            rows[0].0[lane] = t % block[0];
            rows[1].0[lane] = t / block[0] % block[1];
            rows[2].0[lane] = t / block[0] / block[1];
        }
        scratch.tid.extend(rows);
    }
}

/// Runs one block to its end. `cancelled` is polled every few thousand
/// instructions of a warp.
///
/// Other blocks may run at the same time, in other threads and processes:
/// atomics are the host's, and plain accesses are relaxed host atomics of the
/// access's width where that costs nothing, so that a kernel's data race is
/// no more than that.
pub fn run_block(
    launch: &BlockLaunch<'_>,
    memory: &dyn Memory,
    scratch: &mut Scratch,
    cancelled: &AtomicBool,
) -> Result<BlockStats, Trap> {
    let threads = check(launch)?;
    let code = &launch.kernel.code;
    let warps = threads.div_ceil(32) as usize;
    fill_tid(scratch, launch.block, warps);
    let shared_bytes =
        u64::from(launch.kernel.static_shared_bytes) + u64::from(launch.dynamic_shared_bytes);
    let calls: u32 = if code.recursive {
        STACK_BYTES + code.funcs.iter().map(|f| f.frame_bytes + 16).sum::<u32>()
    } else {
        0
    };
    let local_stride = u64::from(launch.kernel.local_bytes + calls).next_multiple_of(16);
    grow(&mut scratch.shared, shared_bytes);
    grow(&mut scratch.local, local_stride * u64::from(threads));
    let param_bytes = launch.kernel.param_bytes as usize;
    grow(&mut scratch.params, param_bytes as u64);
    // SAFETY: `grow` made room for the bytes; any bytes make a `u128`.
    let params = unsafe {
        let at = scratch.params.as_mut_ptr().cast::<u8>();
        at.copy_from_nonoverlapping(launch.params.as_ptr(), param_bytes);
        std::slice::from_raw_parts(at, param_bytes)
    };
    while scratch.warps.len() < warps {
        scratch.warps.push(Warp::default());
    }
    let mut block = Block {
        launch,
        memory,
        threads,
        shared: scratch.shared.as_mut_ptr().cast(),
        shared_bytes,
        local: scratch.local.as_mut_ptr().cast(),
        params,
        local_stride,
        tid: scratch.tid.as_ptr(),
        ranges: [(0, 0); 4],
        barriers: Default::default(),
        waiting: false,
        stats: BlockStats::default(),
    };
    let warps = &mut scratch.warps[..warps];
    for (i, warp) in warps.iter_mut().enumerate() {
        let lanes = (threads - 32 * i as u32).min(32);
        warp.reset(i as u32, u32::MAX >> (32 - lanes), code);
    }
    run_warps(&mut block, warps, cancelled)?;
    Ok(block.stats)
}

fn grow(buffer: &mut Vec<u128>, bytes: u64) {
    let words = bytes.div_ceil(16) as usize;
    if buffer.len() < words {
        // Fresh zero pages cost nothing until touched; copying would.
        *buffer = vec![0; words];
    }
}

fn run_warps(
    block: &mut Block<'_>,
    warps: &mut [Warp],
    cancelled: &AtomicBool,
) -> Result<(), Trap> {
    loop {
        let (mut ran, mut alive) = (false, false);
        for i in 0..warps.len() {
            if warps[i].done() {
                continue;
            }
            alive = true;
            if !warps[i].runnable() {
                continue;
            }
            ran = true;
            if cancelled.load(Ordering::Relaxed) {
                return Err(Trap::Cancelled);
            }
            match warp::run(block, &mut warps[i], QUANTUM) {
                Ok(Outcome::Turn) => {}
                // Arrivals and exits may complete a barrier.
                Ok(Outcome::Barrier) => barrier::complete(block, warps),
                Err(f) => return Err(trap(block, &warps[i], *f)),
            }
        }
        if !alive {
            return Ok(());
        }
        if !ran {
            barrier::complete(block, warps);
            if !warps.iter().any(Warp::runnable) {
                return Err(deadlock(block, warps));
            }
        }
    }
}

fn site(block: &Block<'_>, warp: &Warp, pc: u32, lane: u32) -> Site {
    let kernel = block.launch.kernel;
    // SAFETY: `tid` has three rows for each warp of the block.
    let axis =
        |a: usize| unsafe { (*block.tid.add(warp.index as usize * 3 + a)).0[lane as usize & 31] };
    Site {
        kernel: kernel.name.clone(),
        line: kernel.code.code.get(pc as usize).map_or(0, |i| i.line),
        block: block.launch.block_index,
        thread: [axis(0), axis(1), axis(2)],
    }
}

fn deadlock(block: &Block<'_>, warps: &[Warp]) -> Trap {
    let waiting = warps.iter().map(|w| w.live.count_ones()).sum();
    let first = warps.iter().find(|w| !w.done());
    let site = match first.and_then(|w| w.frags.first().map(|f| (w, f))) {
        Some((w, f)) => site(block, w, f.pc, f.mask.trailing_zeros()),
        None => Site {
            kernel: block.launch.kernel.name.clone(),
            line: 0,
            block: [0; 3],
            thread: [0; 3],
        },
    };
    Trap::BarrierDeadlock { site, waiting }
}

fn trap(block: &Block<'_>, warp: &Warp, fault: Fault) -> Trap {
    let site = site(block, warp, warp.fault_pc, fault.lane);
    match fault.kind {
        FaultKind::Illegal { address, bytes, space, write } => {
            Trap::IllegalAddress { site, address, bytes, space: space.name(), write }
        }
        FaultKind::Misaligned { address, bytes, space } => {
            Trap::Misaligned { site, address, bytes, space: space.name() }
        }
        FaultKind::Trap => Trap::TrapInstruction { site },
        FaultKind::StackOverflow => Trap::StackOverflow { site },
        FaultKind::Assert(message) => Trap::Assert { site, message },
        FaultKind::Illegitimate(detail) => Trap::IllegalInstruction { site, detail },
    }
}
