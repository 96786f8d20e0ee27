//! Kernels in their transformed forms against themselves, in the interpreter.
//!
//! Every kernel of the corpus, and as many that are made at random, runs whole once.
//! Then it runs transformed: in slices, as parts by offset, given up at random blocks and resumed,
//! also with two launches at work at once. Memory must come out the same, bit for
//! bit, and every block must have run exactly once.
//!
//! `TALLY_DIFFERENTIAL_SCHEDULES` is the number of ways to transform each kernel.
#![allow(missing_docs)]

mod common;
mod generated;

use common::{Case, Random, World, cases};
use tally_rewriter::control::FLAG_RAISED;
use tally_rewriter::ptx;
use tally_rewriter::{ControlBlock, KernelForm, TransformRefusal, TransformedKernel};
use tally_softcuda_vm::{Module, Scratch};

const SCHEDULES_DEFAULT: usize = 24;
/// SMs, and so words of the flag.
const SMS: usize = 4;

/// Puts a count of each block's runs in front of a kernel: one more parameter, and an
/// atomic addition by its first thread. It stands where the rewriter puts things, in
/// text that is not yet rewritten.
fn counting(case: &Case) -> Option<String> {
    let only = [case.kernel.as_str()];
    let plan = ptx::plan(&case.source, KernelForm::ByClaims, Some(&only)).ok()?;
    plan.kernels.first()?;
    let code = "\n{ .reg .pred %cnt_p; .reg .b32 %cnt_<5>; .reg .b64 %cnt_d<3>;\n\
        mov.u32 %cnt_0, %tid.x; mov.u32 %cnt_1, %tid.y; or.b32 %cnt_0, %cnt_0, %cnt_1;\n\
        mov.u32 %cnt_1, %tid.z; or.b32 %cnt_0, %cnt_0, %cnt_1; setp.eq.u32 %cnt_p, %cnt_0, 0;\n\
        mov.u32 %cnt_0, %ctaid.z; mov.u32 %cnt_1, %nctaid.y; mov.u32 %cnt_2, %ctaid.y;\n\
        mad.lo.u32 %cnt_0, %cnt_0, %cnt_1, %cnt_2; mov.u32 %cnt_1, %nctaid.x; mov.u32 %cnt_2, %ctaid.x;\n\
        mad.lo.u32 %cnt_0, %cnt_0, %cnt_1, %cnt_2; ld.param.u64 %cnt_d1, [cnt_param];\n\
        mul.wide.u32 %cnt_d2, %cnt_0, 4; add.u64 %cnt_d1, %cnt_d1, %cnt_d2;\n\
        @%cnt_p red.global.add.u32 [%cnt_d1], 1; }\n";
    let mut out = case.source.clone();
    for edit in plan.edits.iter().rev() {
        let text = match &edit.text {
            t if t.contains("exit;") => code.to_string(),
            t if t.contains("_param_tally") => {
                let before = &t[..t.find(".param").unwrap()];
                let after = if t.ends_with(')') { ")" } else { "" };
                format!("{before}.param .u64 cnt_param{after}")
            }
            t => t.clone(),
        };
        out.replace_range(edit.at..edit.at + edit.removed, &text);
    }
    Some(out)
}

/// A transformed form, parsed.
struct Transformed {
    module: Module,
    kernel: TransformedKernel,
}

impl Transformed {
    fn of(case: &Case, form: KernelForm) -> Result<Transformed, TransformRefusal> {
        let only = [case.kernel.as_str()];
        let transformed = ptx::rewrite(&case.source, form, Some(&only))?;
        if let Some((_, why)) = transformed.refused.first() {
            return Err(*why);
        }
        let text = std::str::from_utf8(&transformed.image).unwrap();
        let module = Module::parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        Ok(Transformed { module, kernel: transformed.kernels[0].clone() })
    }

    fn world(&self, case: &Case, seed: u64, counted: bool) -> World {
        World::new(case, &self.module, &self.kernel.name, seed, counted)
    }
}

/// `0..n` in random pieces.
fn pieces(n: u32, random: &mut Random) -> Vec<(u32, u32)> {
    let mut out = Vec::new();
    let mut lo = 0;
    while lo < n {
        let hi = (lo + 1 + random.below(n as usize / 2 + 1) as u32).min(n);
        out.push((lo, hi));
        lo = hi;
    }
    random.shuffle(&mut out);
    out
}

fn order(n: u32, random: &mut Random) -> Vec<u32> {
    let mut out: Vec<u32> = (0..n).collect();
    if random.below(4) > 0 {
        random.shuffle(&mut out);
    }
    out
}

fn sliced(case: &Case, transformed: &Transformed, world: &World, random: &mut Random) {
    let mut scratch = Scratch::new();
    for (lo, hi) in pieces(case.blocks(), random) {
        let control = ControlBlock::slice(lo, hi, [1; 3]);
        let params = world.params_with(transformed.kernel.control_offset, &control);
        for block in order(case.blocks(), random) {
            world.run(&params, case.grid, block, 0, &mut scratch);
        }
    }
}

fn offset_parts(case: &Case, transformed: &Transformed, world: &World, random: &mut Random) {
    let mut scratch = Scratch::new();
    for (lo, hi) in pieces(case.blocks(), random) {
        let control = ControlBlock::by_offset(lo, case.grid);
        let params = world.params_with(transformed.kernel.control_offset, &control);
        for block in order(hi - lo, random) {
            world.run(&params, [hi - lo, 1, 1], block, 0, &mut scratch);
        }
    }
}

/// Launches of the form by claims that are at work at the same time.
fn preempted(case: &Case, transformed: &Transformed, world: &mut World, random: &mut Random) {
    use std::sync::atomic::Ordering::Relaxed;
    let blocks = case.blocks();
    let base = 1 + random.below(1000) as u32;
    let old: Vec<u32> = (0..blocks).map(|_| random.below(2 * base as usize) as u32).collect();
    let table = world.device.alloc_words(&old);
    let flag = world.device.alloc_words(&[0; SMS * 32]);
    let no_flag = world.device.alloc_words(&[0; SMS * 32]);
    let notice = world.device.alloc_words(&[0]);
    let mut scratch = Scratch::new();
    let mut epoch = base;
    let set = |world: &World, sm: usize, value: u32| {
        world.device.word(flag + sm as u64 * 128).store(value, Relaxed);
    };
    for last in [false, false, false, true] {
        // One launch, or two that overlap; the last ones look at a flag that is down.
        let launches: Vec<Vec<u8>> = (0..1 + random.below(2))
            .map(|_| {
                epoch += 1;
                let looks = if last { no_flag } else { flag };
                let control = ControlBlock::preemptible(
                    table,
                    looks,
                    SMS as u32 - 1,
                    if random.below(5) > 0 { notice } else { 0 },
                    2 * epoch,
                    2 * base,
                    [1; 3],
                );
                world.params_with(transformed.kernel.control_offset, &control)
            })
            .collect();
        let mut queues: Vec<Vec<u32>> = launches.iter().map(|_| order(blocks, random)).collect();
        while queues.iter().any(|q| !q.is_empty()) {
            let which = random.below(queues.len());
            let Some(block) = queues[which].pop() else { continue };
            // Another value than raised or down: stop what came before some epoch.
            if random.below(blocks as usize / 2 + 2) == 0 {
                let values = [0, FLAG_RAISED, 2 * epoch, 2 * epoch + 1, 2 * epoch - 1];
                let value = values[random.below(values.len())];
                (0..SMS).filter(|_| random.below(3) > 0).for_each(|sm| set(world, sm, value));
            }
            let sm = random.below(8) as u32;
            world.run(&launches[which], case.grid, block, sm, &mut scratch);
        }
        if random.below(2) == 0 {
            (0..SMS).for_each(|sm| set(world, sm, 0));
        }
    }
    let words = world.device.words(table, blocks as usize);
    for (block, word) in words.iter().enumerate() {
        assert!(word & 1 == 1 && *word >= 2 * base, "{}: block {block}: {word}", case.kernel);
    }
}

struct Counts {
    kernels: usize,
    schedules: usize,
}

/// All schedules of one kernel.
fn check(case: &Case, schedules: usize, seed: u64, counts: &mut Counts) {
    if case.refused {
        for form in [KernelForm::ByClaims, KernelForm::ByOffset] {
            let why = Transformed::of(case, form).err();
            assert_eq!(why, Some(TransformRefusal::WritableGlobals), "{} {form:?}", case.kernel);
        }
        return;
    }
    let counted = counting(case).map(|source| Case { source, ..case.clone() });
    let variants: Vec<(&Case, bool)> =
        [Some((case, false)), counted.as_ref().map(|c| (c, true))].into_iter().flatten().collect();
    counts.kernels += 1;
    for (variant, (case, counted)) in variants.iter().copied().enumerate() {
        let module = Module::parse(&case.source).unwrap_or_else(|e| panic!("{e}\n{}", case.source));
        let whole = World::new(case, &module, &case.kernel, seed, counted);
        let mut scratch = Scratch::new();
        for block in 0..case.blocks() {
            whole.run(&whole.params, case.grid, block, 0, &mut scratch);
        }
        let want = whole.device.snapshot(whole.compared);
        let prelude = Transformed::of(case, KernelForm::ByClaims);
        let prelude = prelude.unwrap_or_else(|e| panic!("{}: {e}", case.kernel));
        let by_offset = Transformed::of(case, KernelForm::ByOffset);
        assert_eq!(by_offset.is_err(), case.prelude_only, "{}: {:?}", case.kernel, by_offset.err());
        for schedule in (variant..schedules).step_by(variants.len()) {
            let mut random = Random::new(seed + 1000 * schedule as u64);
            let (how, world) = match (schedule / variants.len() % 4, &by_offset) {
                (0, Ok(transformed)) => {
                    let world = transformed.world(case, seed, counted);
                    offset_parts(case, transformed, &world, &mut random);
                    ("by offset", world)
                }
                (0 | 1, _) => {
                    let world = prelude.world(case, seed, counted);
                    sliced(case, &prelude, &world, &mut random);
                    ("slices", world)
                }
                _ => {
                    let mut world = prelude.world(case, seed, counted);
                    preempted(case, &prelude, &mut world, &mut random);
                    ("preempted", world)
                }
            };
            if let Some(at) = world.counts {
                let ran = world.device.words(at, case.blocks() as usize);
                assert!(ran.iter().all(|n| *n == 1), "{} {how} {schedule}: {ran:?}", case.kernel);
            }
            let got = world.device.snapshot(world.compared);
            assert!(
                got == want,
                "{} {how} {schedule}: other results\n{}",
                case.kernel,
                case.source
            );
            counts.schedules += 1;
        }
    }
}

fn schedules() -> usize {
    let set = std::env::var("TALLY_DIFFERENTIAL_SCHEDULES");
    set.map_or(SCHEDULES_DEFAULT, |n| n.parse().expect("TALLY_DIFFERENTIAL_SCHEDULES: a number"))
}

#[test]
fn transformed_kernels_do_what_whole_ones_do() {
    let schedules = schedules();
    let mut counts = Counts { kernels: 0, schedules: 0 };
    let corpus = cases();
    assert!(corpus.len() >= 14);
    for (i, case) in corpus.iter().enumerate() {
        check(case, schedules, i as u64 + 1, &mut counts);
    }
    generated::each(16 * schedules, |i, case| {
        check(&case, 8, 7000 + i as u64, &mut counts);
    });
    println!(
        "differential: {} kernels, {} transformed schedules",
        counts.kernels, counts.schedules
    );
}
