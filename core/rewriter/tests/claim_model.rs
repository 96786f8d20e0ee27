//! The claim protocol, with every interleaving of the warps of a block over several
//! launches; and the emitted prelude itself, with launches at work at once on several
//! host threads while the flag flips.
//!
//! The model is one block's word: blocks share nothing else. A warp's steps are its
//! accesses to memory. The flag may be raised and lowered at any time, so that a read
//! of it may give either, except in a launch that ignores it.
#![allow(missing_docs)]

mod common;

use common::{COUNTER, Case, Random, World};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use tally_rewriter::control::FLAG_RAISED;
use tally_rewriter::{ControlBlock, KernelForm, ptx};
use tally_softcuda_vm::{Module, Scratch};

const WARPS_MAX: usize = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    LoadWord,
    LoadFlag,
    Swap,
    Ran,
    Left,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Warp {
    at: At,
    /// The word that it last saw.
    word: u8,
    /// The warp saw the flag raised.
    stop: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    word: u8,
    warps: [Warp; WARPS_MAX],
}

/// Bounds and variants of a model.
#[derive(Clone, Copy)]
struct Model {
    launches: usize,
    warps: usize,
    /// A launch starts before those before it have ended.
    overlap: bool,
    /// After a failed swap, again with the word found. Without, that word decides.
    retry: bool,
    /// The last launch ignores the flag.
    last_ignores: bool,
    /// The word before all launches: below the first epoch.
    before: u8,
}

/// Twice the first epoch.
const BASE: u8 = 4;

fn epoch(launch: usize) -> u8 {
    BASE + 2 * launch as u8
}

impl Model {
    fn launch_of(&self, warp: usize) -> usize {
        warp / self.warps
    }

    fn ended(&self, state: &State, launch: usize) -> bool {
        let warps = &state.warps[launch * self.warps..(launch + 1) * self.warps];
        warps.iter().all(|w| matches!(w.at, At::Ran | At::Left))
    }

    /// What the word says to a warp: its end, or to try to claim.
    fn decide(word: u8, epoch: u8) -> At {
        if word == epoch + 1 {
            At::Ran
        } else if word >= if word % 2 == 1 { BASE } else { epoch } {
            At::Left
        } else {
            At::Swap
        }
    }

    /// Every state after one step of a warp.
    fn steps(&self, state: &State, index: usize, out: &mut Vec<State>) {
        let launch = self.launch_of(index);
        let epoch = epoch(launch);
        let mut next = state.clone();
        let warp = &mut next.warps[index];
        match warp.at {
            At::Ran | At::Left => return,
            At::LoadWord => {
                (warp.word, warp.at) = (state.word, At::LoadFlag);
            }
            At::LoadFlag => {
                warp.at = Self::decide(warp.word, epoch);
                if !(self.last_ignores && launch + 1 == self.launches) {
                    let mut raised = next.clone();
                    raised.warps[index].stop = true;
                    out.push(raised);
                }
            }
            At::Swap if state.word == warp.word => {
                next.word = if warp.stop { epoch } else { epoch + 1 };
                warp.at = if warp.stop { At::Left } else { At::Ran };
            }
            At::Swap => {
                warp.word = state.word;
                warp.at = match Self::decide(state.word, epoch) {
                    At::Swap if !self.retry => At::Left,
                    at => at,
                };
            }
        }
        out.push(next);
    }

    /// Tries everything; the number of states, or what is wrong.
    fn explore(&self) -> Result<usize, String> {
        let idle = Warp { at: At::LoadWord, word: 0, stop: false };
        let first = State { word: self.before, warps: [idle; WARPS_MAX] };
        let total = self.launches * self.warps;
        assert!(total <= WARPS_MAX);
        let mut seen = HashSet::from([first.clone()]);
        let mut work = vec![first];
        let mut after = Vec::new();
        while let Some(state) = work.pop() {
            for index in 0..total {
                let launch = self.launch_of(index);
                if !self.overlap && (0..launch).any(|l| !self.ended(&state, l)) {
                    continue;
                }
                self.steps(&state, index, &mut after);
            }
            if after.is_empty() {
                self.check(&state)?;
            }
            for next in after.drain(..) {
                // Every swap raises the word, so that warps do not swap for ever.
                if next.word < state.word {
                    return Err(format!("the word falls: {next:?}"));
                }
                if seen.insert(next.clone()) {
                    work.push(next);
                }
            }
        }
        Ok(seen.len())
    }

    /// Whether what has come to its end is right.
    fn check(&self, state: &State) -> Result<(), String> {
        let mut runs = 0;
        for launch in 0..self.launches {
            let warps = &state.warps[launch * self.warps..(launch + 1) * self.warps];
            let ran = warps.iter().filter(|w| w.at == At::Ran).count();
            if ran != 0 && ran != self.warps {
                return Err(format!("warps of launch {launch} disagree: {state:?}"));
            }
            runs += usize::from(ran > 0);
        }
        if runs > 1 {
            return Err(format!("the block ran {runs} times: {state:?}"));
        }
        if self.last_ignores && runs == 0 {
            return Err(format!("the block never ran: {state:?}"));
        }
        Ok(())
    }
}

#[test]
fn every_interleaving_runs_a_block_once() {
    let mut states = 0;
    for (launches, warps) in [(1, 1), (1, 6), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)] {
        for overlap in [false, true] {
            for last_ignores in [false, true] {
                for before in [0, BASE - 1] {
                    let model =
                        Model { launches, warps, overlap, retry: true, last_ignores, before };
                    states += model.explore().unwrap_or_else(|e| panic!("{e}"));
                }
            }
        }
    }
    println!("claim model: {states} states");
}

#[test]
fn without_a_retry_the_model_finds_what_goes_wrong() {
    let model =
        Model { launches: 2, warps: 1, overlap: true, retry: false, last_ignores: true, before: 0 };
    let wrong = model.explore().unwrap_err();
    assert!(wrong.contains("never ran"), "{wrong}");
    // One launch after the other, a single swap would do.
    assert!(Model { overlap: false, ..model }.explore().is_ok());
    // And the warps of a block may disagree with three of them.
    let three = Model { launches: 3, warps: 2, last_ignores: false, ..model };
    assert!(three.explore().is_err());
}

#[test]
fn launches_at_work_at_once_run_each_block_once() {
    const BLOCKS: u32 = 400;
    const WARPS: u32 = 5;
    let case = Case::read(COUNTER, "k grid=400,1,1 block=150,1,1");
    let transformed = ptx::rewrite(COUNTER, KernelForm::ByClaims, None).unwrap();
    let offset = transformed.kernels[0].control_offset;
    let module = Module::parse(std::str::from_utf8(&transformed.image).unwrap()).unwrap();
    let mut world = World::new(&case, &module, "k", 1, false);
    let counts = world.device.alloc_words(&[0; BLOCKS as usize]);
    world.params[..8].copy_from_slice(&counts.to_le_bytes());
    // One table for every instance: what is left of the last is below the next one's base.
    let table = world.device.alloc_words(&[0; BLOCKS as usize]);
    for round in 0..8u32 {
        let base = 1 + 10 * round;
        let device = &mut world.device;
        let (flag, down) = (device.alloc_words(&[0]), device.alloc_words(&[0]));
        let notice = device.alloc_words(&[0]);
        let launch = |epoch: u32, flag: u64| {
            let control =
                ControlBlock::preemptible(table, flag, 0, notice, 2 * epoch, 2 * base, [1; 3]);
            world.params_with(offset, &control)
        };
        let params: Vec<Vec<u8>> = (0..3).map(|i| launch(base + i, flag)).collect();
        let world = &world;
        let (done, next) = (AtomicBool::new(false), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = Random::new(u64::from(round) + 7);
                while !done.load(Ordering::Relaxed) {
                    let value = [0, FLAG_RAISED, 2 * base + 2][random.below(3)];
                    world.device.word(flag).store(value, Ordering::Relaxed);
                    (0..random.below(300)).for_each(|_| std::hint::spin_loop());
                }
            });
            let workers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        let mut scratch = Scratch::new();
                        // Blocks of three launches in turn: they overlap throughout.
                        loop {
                            let i = next.fetch_add(1, Ordering::Relaxed);
                            if i >= 3 * BLOCKS {
                                return;
                            }
                            let launch = &params[(i % 3) as usize];
                            world.run(launch, case.grid, i / 3, 0, &mut scratch);
                        }
                    })
                })
                .collect();
            workers.into_iter().for_each(|w| w.join().unwrap());
            done.store(true, Ordering::Relaxed);
        });
        let early = world.device.words(counts, BLOCKS as usize);
        assert!(early.iter().all(|n| *n == round * WARPS || *n == (round + 1) * WARPS));
        let last = launch(base + 5, down);
        let mut scratch = Scratch::new();
        (0..BLOCKS).for_each(|b| world.run(&last, case.grid, b, 0, &mut scratch));
        let words = world.device.words(counts, BLOCKS as usize);
        assert!(words.iter().all(|n| *n == (round + 1) * WARPS), "{words:?}");
    }
}
