//! The GPU's figures, and what becomes of a kernel on it: blocks, waves, forms.
//!
//! What stands here was measured on one H200, by itself and not in a pair of programs
//! (`docs/results.md`, `docs/internals.md`; [`NARROW_PERMILLE`] and [`SM_BANDWIDTH_PERMILLE`] apart). What may be other
//! elsewhere, or was fitted, is in [`crate::model`]. Left out: contention for caches, clocks,
//! copies beside kernels.

use crate::model::Model;
use crate::trace::Kernel;
use serde::Serialize;
use tally_contract::limits::{LAUNCH_PARTS_MAX, WHOLE_GRID_BLOCKS_MAX};
use tally_contract::widths;
use tally_engine::policy::Decision;

pub const SMS: u32 = 132;
const THREADS_PER_SM: u32 = 2_048;
const REGISTERS_PER_SM: u64 = 65_536;
const SHARED_BYTES_PER_SM: u64 = 228 << 10;
/// Kept by the system for each block.
const SHARED_BYTES_SYSTEM: u64 = 1 << 10;
const BLOCKS_PER_SM: u64 = 32;

/// From the end of the last kernel until the program has seen it.
pub const SEEN_NS: u64 = 3_500;
/// Time slices `[high priority, best effort]` under the core.
pub const SLICES_GOVERNED_NS: [u64; 2] = [100_000_000, 10_000];
/// The same with several best-effort programs (`sharing.timeslice.best_effort_shared_us`).
pub const SLICES_SHARED_NS: [u64; 2] = [100_000_000, 350_000];
pub const SLICES_DRIVER_NS: [u64; 2] = [2_048_000; 2];
/// Between two parts of a preemptible launch, the second of which finds nothing to do.
pub const GATE_NS: u64 = 3_500;
/// From the grant until blocks run again.
pub const RESUME_NS: u64 = 7_100;
/// On some of the SMs a kernel takes longer than by their number, thousandths: matrix
/// products of 8 and 11 ms took 2.05 and 2.09 times as long on 64 of 132 (2.06), as the core
/// measured them in a run of pairs.
pub const NARROW_PERMILLE: u128 = 1_020;
/// Times as much of the memory's bandwidth as its share one SM can take, thousandths: a kernel that moves data takes on
/// some of the SMs only so much less than their number says. Fitted to GPT-2 on 25, 50 and 75 % of the threads of MPS
/// beside a service, which has 0.34, 0.62 and 0.81 of its speed.
pub const SM_BANDWIDTH_PERMILLE: u128 = 1_800;
/// A kernel of a closed library that takes at least so long is bound by arithmetic.
const PRODUCT_NS_MIN: u64 = 100_000;
/// A kernel that moves data takes so much longer, thousandths, beside one on all SMs that does, or does not, move data;
/// on some of the SMs by as much less. A token of a decoder took 1.34 and 1.72 times as long beside copies on 36 and 68
/// of 132 SMs, 1.15 and 1.40 times beside large matrix products, and 1.3 times beside GPT-2 on 64 to 96. Trainings move
/// less than copies do: between these.
pub const CONTENTION_PERMILLE: [u64; 2] = [700, 500];
/// To a stream on some of the SMs and back.
pub const HOP_NS: u64 = 5_000;
/// SMs that each partition leaves free: the core's default.
pub const RESERVE_SMS: [u32; 4] = [16, 32, 64, 96];
/// What the prelude adds to each block, and so to each wave.
pub const PRELUDE_NS: u64 = 1_200;
/// Thousand blocks that have nothing to do. Each part of a launch has all blocks of it.
const EMPTY_NS: u64 = 360;
/// Thousand blocks that see the flag and exit.
const EXIT_NS: u64 = 1_800;
/// Parts of a sliced or preemptible launch.
pub const PARTS_MAX: u64 = LAUNCH_PARTS_MAX as u64;
/// A preemptible launch has one more part for each of these.
const PART_NS: u64 = 800_000;
/// Room of all SMs together; kernels take parts of it.
pub const ROOM: u64 = 1_024;

/// How the two programs share the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SharingMode {
    /// One process runs at a time.
    #[default]
    Timeslice,
    /// Blocks of both programs run side by side.
    Mps,
}

/// Which best-effort kernels have other forms than whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Transformable {
    None,
    /// All but those that look like closed libraries'.
    #[default]
    Open,
    All,
}

impl Transformable {
    /// Whether this kernel can be transformed.
    pub fn allows(self, name: &str) -> bool {
        match self {
            Transformable::None => false,
            Transformable::All => true,
            Transformable::Open => !closed(name),
        }
    }
}

/// Names that kernels of NVIDIA's closed libraries have.
fn closed(name: &str) -> bool {
    const MARKS: [&str; 8] =
        ["cublas", "cudnn", "cutlass", "gemm", "gemv", "nvjet", "xmma", "splitKreduce"];
    MARKS.iter().any(|mark| name.contains(mark))
}

/// Bound by the memory's bandwidth and not by arithmetic: all but long matrix products and the like. Short ones read
/// weights for few rows.
fn moves_data(k: &Kernel) -> bool {
    k.dur_ns < PRODUCT_NS_MIN || !closed(&k.name)
}

/// One kernel as the device runs it; times are without disturbance.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// The launch it belongs to.
    pub launch: u64,
    /// Whether it is the last kernel of the launch.
    pub last: bool,
    pub ready_ns: u64,
    /// Least pause after the kernel before, ns.
    pub gap_ns: u64,
    pub total_ns: u64,
    /// Part of `total_ns` that the last wave of blocks takes.
    pub tail_ns: u64,
    /// Room taken before the last wave, and in it; of [`ROOM`].
    pub room: [u64; 2],
    /// It can stop at multiples of this; 0: it cannot.
    pub quantum_ns: u64,
    /// Once stopped, blocks that have not started exit: so long if none had started.
    pub exit_ns: u64,
    /// Launches that the program makes for it, besides one.
    pub more_launches: u64,
    /// The memory's bandwidth bounds it.
    pub moves_data: bool,
}

impl Work {
    /// The same with so many thousandths of the work.
    #[must_use]
    pub fn scaled(self, permille: u64) -> Self {
        let scaled = |ns: u64| ns * permille / 1_000;
        Work {
            gap_ns: scaled(self.gap_ns),
            total_ns: scaled(self.total_ns).max(1),
            tail_ns: scaled(self.tail_ns).max(1),
            quantum_ns: scaled(self.quantum_ns),
            ..self
        }
    }
}

/// Blocks of the kernel that fit one SM.
pub fn blocks_per_sm(k: &Kernel) -> u64 {
    let threads = u64::from(k.threads().clamp(1, THREADS_PER_SM).next_multiple_of(32));
    let by_threads = u64::from(THREADS_PER_SM) / threads;
    let by_registers = REGISTERS_PER_SM / (threads * u64::from(k.regs.max(1)));
    let by_shared = SHARED_BYTES_PER_SM / (u64::from(k.smem) + SHARED_BYTES_SYSTEM);
    by_threads.min(by_registers).min(by_shared).clamp(1, BLOCKS_PER_SM)
}

/// The kernel of a program that finds so many SMs, in the form that was decided. A launch of `n`
/// blocks runs in waves of as many as fit the SMs; all waves take equally long.
pub fn work(k: &Kernel, decision: Decision, model: &Model, sms: u32) -> Work {
    let (blocks, each) = (k.blocks().max(1), blocks_per_sm(k));
    let on = |sms: u32| {
        let capacity = each * u64::from(sms.clamp(1, SMS));
        let waves = [capacity, each * u64::from(SMS)].map(|room| blocks.div_ceil(room));
        let on_all_ns = u128::from(k.dur_ns);
        let by_waves_ns = on_all_ns * u128::from(waves[0]) / u128::from(waves[1]);
        let all_ns = match sms < SMS {
            true if moves_data(k) => (by_waves_ns * 1_000 / SM_BANDWIDTH_PERMILLE).max(on_all_ns),
            true => by_waves_ns * NARROW_PERMILLE / 1_000,
            false => by_waves_ns,
        };
        (capacity, waves[0], all_ns as u64)
    };
    let (capacity, waves, dur_ns) = on(sms);
    let scaled = |room: u64, sms: u32| (room * u64::from(sms) / u64::from(SMS)).max(1);
    let last_room = |blocks, capacity| scaled(last_room(blocks, capacity), sms);
    let whole = Work {
        launch: 0,
        last: true,
        ready_ns: 0,
        gap_ns: k.gap_ns,
        total_ns: dur_ns,
        tail_ns: (dur_ns / waves).max(1),
        room: [scaled(ROOM, sms), last_room(blocks, capacity)],
        quantum_ns: 0,
        exit_ns: 0,
        more_launches: 0,
        moves_data: moves_data(k),
    };
    match decision {
        Decision::Run(_) | Decision::Hold(_) | Decision::HoldUntilCompletion(_) => whole,
        Decision::Preemptible => {
            let wave_ns = (dur_ns / waves).max(1) + PRELUDE_NS;
            // The parts behind it find nothing left to do.
            let empty = (dur_ns / PART_NS + 1).min(PARTS_MAX - 1);
            let empty_ns = empty * (GATE_NS + empty_ns(blocks));
            let total_ns = wave_ns * waves + empty_ns;
            let exit_ns = blocks * EXIT_NS / 1_000;
            let more_launches = empty;
            Work {
                total_ns,
                tail_ns: wave_ns,
                quantum_ns: wave_ns,
                exit_ns,
                more_launches,
                ..whole
            }
        }
        Decision::Sliced(n) => {
            let n = u64::from(n).max(blocks.div_ceil(PARTS_MAX)).min(blocks);
            let by_offset = blocks > u64::from(WHOLE_GRID_BLOCKS_MAX) && k.grid[1..] == [1; 2];
            let prelude_ns = if by_offset { 0 } else { PRELUDE_NS };
            let empty_ns = |blocks| if by_offset { 0 } else { empty_ns(blocks) };
            let wave_ns = (dur_ns / waves).max(1) + prelude_ns;
            let part_ns = wave_ns * n.div_ceil(capacity) + model.slice_ns + empty_ns(blocks - n);
            let rest = blocks % n;
            let last_ns = wave_ns * if rest == 0 { n } else { rest }.div_ceil(capacity);
            let total_ns = (blocks.div_ceil(n) - 1) * part_ns + last_ns + empty_ns(blocks - n);
            let room = [last_room(n, capacity), last_room(blocks, capacity)];
            let more_launches = blocks.div_ceil(n) - 1;
            Work { total_ns, tail_ns: wave_ns, quantum_ns: part_ns, room, more_launches, ..whole }
        }
        Decision::SmLimited(n) => {
            let sms = widths::partition_of(SMS, &RESERVE_SMS, n).unwrap_or(n).min(sms);
            let (capacity, waves, run_ns) = on(sms);
            Work {
                total_ns: run_ns + HOP_NS,
                tail_ns: (run_ns / waves).max(1),
                room: [scaled(ROOM, sms), scaled(self::last_room(blocks, capacity), sms)],
                ..whole
            }
        }
    }
}

fn empty_ns(blocks: u64) -> u64 {
    blocks * EMPTY_NS / 1_000
}

/// Room that the blocks of the last wave take.
fn last_room(blocks: u64, capacity: u64) -> u64 {
    let rest = blocks % capacity;
    if rest == 0 { ROOM } else { (ROOM * rest).div_ceil(capacity) }
}
