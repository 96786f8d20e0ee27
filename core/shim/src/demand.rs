//! What kernels demand of an SM, asked of the driver once for each kernel, block size and dynamic shared memory.
//!
//! Asked behind a launch of the kernel, by the thread that made it: its code is loaded then, and the launch did not
//! wait for the answer. Later launches carry it to the core.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use tally_ipc::layout::{KERNEL_SLOTS, submission_flags};
use tally_preempt::cuda::driver;
use tally_preempt::launch::{Shape, Target};
use tally_preempt::{registers, resident};

pub use tally_contract::kernel::Demand;

/// Block sizes and amounts of shared memory that are kept of a kernel. Nothing is known of further ones.
const WAYS: usize = 4;
const THREADS_BITS: u32 = 16;
const SHARED_BITS: u32 = 24;
const BLOCKS_BITS: u32 = 8;
const REGISTERS_BITS: u32 = 9;
const _: () = assert!(1 + THREADS_BITS + SHARED_BITS + BLOCKS_BITS + REGISTERS_BITS <= u64::BITS);
/// Bits of a word that say what it is of.
const KEY_BITS: u32 = 1 + THREADS_BITS + SHARED_BITS;

/// By kernel: key, blocks an SM, registers; 0: none. Written once.
static DEMANDS: [[AtomicU64; WAYS]; KERNEL_SLOTS] =
    [const { [const { AtomicU64::new(0) }; WAYS] }; KERNEL_SLOTS];

fn key(shape: &Shape) -> Option<u64> {
    let threads = shape.block.iter().try_fold(1_u32, |all, n| all.checked_mul(*n))?;
    let fits = threads < 1 << THREADS_BITS && shape.shared_bytes < 1 << SHARED_BITS;
    fits.then_some(
        1 | u64::from(threads) << 1 | u64::from(shape.shared_bytes) << (1 + THREADS_BITS),
    )
}

fn pack(key: u64, demand: Demand) -> u64 {
    let blocks = u64::from(demand.blocks_per_sm.min((1 << BLOCKS_BITS) - 1));
    let registers = u64::from(demand.registers.min((1 << REGISTERS_BITS) - 1));
    key | blocks << KEY_BITS | registers << (KEY_BITS + BLOCKS_BITS)
}

fn unpack(word: u64) -> Demand {
    let blocks_per_sm = (word >> KEY_BITS & ((1 << BLOCKS_BITS) - 1)) as u16;
    Demand { blocks_per_sm, registers: (word >> (KEY_BITS + BLOCKS_BITS)) as u16 }
}

fn is_of(word: u64, key: u64) -> bool {
    word & ((1 << KEY_BITS) - 1) == key
}

/// A graph has many kernels; how many blocks of a cooperative launch fit is the program's own affair.
fn can_be_known(shape: &Shape) -> bool {
    shape.flags & (submission_flags::GRAPH | submission_flags::COOPERATIVE) == 0
}

/// What is known of the kernel of a launch.
pub fn of(shape: &Shape) -> Demand {
    let (Some(ways), Some(key), true) =
        (DEMANDS.get(shape.kernel as usize), key(shape), can_be_known(shape))
    else {
        return Demand::default();
    };
    let words = ways.iter().map(|way| way.load(Acquire));
    words
        .take_while(|word| *word != 0)
        .find(|word| is_of(*word, key))
        .map_or_else(Demand::default, unpack)
}

/// The calling thread has made this launch: ask what its kernel demands unless that is known. An answer that the driver
/// does not give is not asked for again.
pub fn learn(shape: &Shape, target: impl FnOnce() -> Target) {
    if !can_be_known(shape) {
        return;
    }
    let (Some(ways), Some(key)) = (DEMANDS.get(shape.kernel as usize), key(shape)) else { return };
    for way in ways {
        match way.load(Acquire) {
            0 => return ask(way, key, shape, target),
            word if is_of(word, key) => return,
            _ => {}
        }
    }
}

#[cold]
fn ask(way: &AtomicU64, key: u64, shape: &Shape, target: impl FnOnce() -> Target) {
    let Target::Kernel(launch) = target() else { return };
    let function = launch.function as usize;
    // A capture of another thread could forbid this one to ask.
    let demand = driver().relaxed(|| Demand {
        blocks_per_sm: resident(function, shape.block, shape.shared_bytes)
            .map_or(0, |blocks| blocks.min(u64::from(u16::MAX)) as u16),
        registers: registers(function).unwrap_or(0),
    });
    // Another thread may have taken the place for another shape: the next launch asks once more.
    let _ = way.compare_exchange(0, pack(key, demand), AcqRel, Acquire);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(kernel: u32, block: [u32; 3], shared_bytes: u32) -> Shape {
        Shape { kernel, flags: 0, grid: [1; 3], block, shared_bytes }
    }

    #[test]
    fn a_word_keeps_what_it_is_of_and_what_is_demanded() {
        for (block, shared_bytes, demand) in [
            ([1, 1, 1], 0, Demand::default()),
            ([32, 32, 1], 232_448, Demand { blocks_per_sm: 1, registers: 255 }),
            ([7, 3, 2], 12, Demand { blocks_per_sm: 48, registers: 24 }),
        ] {
            let key = key(&shape(1, block, shared_bytes)).unwrap();
            let word = pack(key, demand);
            assert!(word != 0 && is_of(word, key));
            assert_eq!(unpack(word), demand);
        }
        assert_eq!(key(&shape(1, [1 << 16, 1, 1], 0)), None);
        assert_eq!(key(&shape(1, [1, 1, 1], 1 << 24)), None);
        assert_eq!(key(&shape(1, [1 << 16, 1 << 16, 1], 0)), None);
    }
}
