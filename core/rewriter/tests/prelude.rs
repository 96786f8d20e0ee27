//! The emitted prelude's decisions, one by one, in the interpreter.
#![allow(missing_docs)]

mod common;

use common::{COUNTER, Case, World};
use tally_rewriter::control::FLAG_RAISED;
use tally_rewriter::{ControlBlock, KernelForm, ptx};
use tally_softcuda_vm::{Module, Scratch};

const WARPS: u32 = 3;

struct Bench {
    world: World,
    offset: u32,
    counts: u64,
    table: u64,
    flag: u64,
    notice: u64,
}

impl Bench {
    fn new() -> Bench {
        let case = Case::read(COUNTER, "k grid=8,1,1 block=70,1,1");
        let transformed = ptx::rewrite(COUNTER, KernelForm::ByClaims, None).unwrap();
        let module = Module::parse(std::str::from_utf8(&transformed.image).unwrap()).unwrap();
        let mut world = World::new(&case, &module, "k", 1, false);
        let counts = world.device.alloc_words(&[0; 8]);
        world.params[..8].copy_from_slice(&counts.to_le_bytes());
        let table = world.device.alloc_words(&[0; 8]);
        let flag = world.device.alloc_words(&[0; 8 * 32]);
        let notice = world.device.alloc_words(&[0]);
        Bench { world, offset: transformed.kernels[0].control_offset, counts, table, flag, notice }
    }

    fn set(&self, at: u64, word: usize, value: u32) {
        let word = self.world.device.word(at + 4 * word as u64);
        word.store(value, std::sync::atomic::Ordering::Relaxed);
    }

    fn words(&self, at: u64, n: usize) -> Vec<u32> {
        self.world.device.words(at, n)
    }

    /// Block `block` on an SM: whether it ran.
    fn runs(&self, control: &ControlBlock, block: u32, sm: u32) -> bool {
        self.set(self.counts, block as usize, 0);
        let params = self.world.params_with(self.offset, control);
        self.world.run(&params, [8, 1, 1], block, sm, &mut Scratch::new());
        match self.words(self.counts, 8)[block as usize] {
            0 => false,
            n => {
                assert_eq!(n, WARPS, "warps disagree");
                true
            }
        }
    }
}

#[test]
fn every_word_of_the_table_decides_as_documented() {
    let bench = Bench::new();
    for (base2, epoch2) in [(10, 10), (10, 12), (10, 16), (2, 4)] {
        for word in 0..epoch2 + 6 {
            for stop in [false, true] {
                bench.set(bench.table, 2, word);
                bench.set(bench.flag, 0, if stop { FLAG_RAISED } else { 0 });
                bench.set(bench.notice, 0, 0);
                let control = ControlBlock::preemptible(
                    bench.table,
                    bench.flag,
                    0,
                    bench.notice,
                    epoch2,
                    base2,
                    [1; 3],
                );
                let ran = bench.runs(&control, 2, 0);
                let (skip, run) = (epoch2, epoch2 + 1);
                let taken =
                    word == run || word % 2 == 1 && word >= base2 || word % 2 == 0 && word >= skip;
                let after = match (taken, stop) {
                    (true, _) => word,
                    (false, true) => skip,
                    (false, false) => run,
                };
                let context = format!("word {word}, base {base2}, epoch {epoch2}, stop {stop}");
                assert_eq!(bench.words(bench.table, 8)[2], after, "{context}");
                assert_eq!(ran, word == run || !taken && !stop, "{context}");
                let noticed = if !taken && stop { epoch2 } else { 0 };
                assert_eq!(bench.words(bench.notice, 1)[0], noticed, "{context}");
            }
        }
    }
}

#[test]
fn the_flag_stops_the_epochs_up_to_its_value_on_the_sms_of_its_word() {
    let bench = Bench::new();
    let mut epoch2 = 2;
    for mask in [0, 1, 3, 7] {
        for word in 0..=mask {
            for (above, stops) in [(-1, false), (0, true), (1, true)] {
                for other in 0..8 {
                    bench.set(bench.flag, 32 * other, 0);
                }
                epoch2 += 2;
                let value = (epoch2 as i32 + above) as u32;
                bench.set(bench.flag, 32 * word as usize, value);
                let control = ControlBlock::preemptible(
                    bench.table,
                    bench.flag,
                    mask,
                    0,
                    epoch2,
                    epoch2,
                    [1; 3],
                );
                for sm in 0..16 {
                    bench.set(bench.table, 5, 0);
                    let looks = sm & mask == word;
                    assert_eq!(
                        bench.runs(&control, 5, sm),
                        !(stops && looks),
                        "{mask} {word} {sm}"
                    );
                }
            }
        }
    }
    // No notice was asked for, none was given.
    assert_eq!(bench.words(bench.notice, 1), [0]);
}

#[test]
fn slices_claim_nothing_and_end_where_they_should() {
    let bench = Bench::new();
    for (lo, hi) in [(0, 8), (3, 5), (4, 4), (7, 100), (0, u32::MAX), (0, 0)] {
        let control = ControlBlock::slice(lo, hi, [1; 3]);
        for block in 0..8 {
            assert_eq!(bench.runs(&control, block, 0), lo <= block && block < hi);
        }
    }
    assert_eq!(bench.words(bench.table, 8), [0; 8]);
}

#[test]
fn the_blocks_of_a_cluster_share_its_first_ones_word() {
    let bench = Bench::new();
    let control = ControlBlock::preemptible(bench.table, bench.flag, 0, 0, 4, 4, [4, 1, 1]);
    assert!(bench.runs(&control, 6, 0) && bench.runs(&control, 4, 0));
    bench.set(bench.flag, 0, FLAG_RAISED);
    assert!(bench.runs(&control, 5, 0), "its cluster runs already");
    assert!(!bench.runs(&control, 3, 0) && !bench.runs(&control, 0, 0));
    bench.set(bench.flag, 0, 0);
    assert!(!bench.runs(&control, 1, 0), "its cluster was skipped in this launch");
    assert_eq!(bench.words(bench.table, 8), [4, 0, 0, 0, 5, 0, 0, 0]);
}
