//! Kernels of graphs: launched by themselves, transformed, where they are long. Parts that fail, and attributes of
//! kernels: `graph_parts.rs`.

use crate::governor::Governor;
use crate::kernels::step;
use crate::program::{Cells, Device, Ptr, THREADS, ask, ok, say, wait_for};
use crate::waiting::{helped_or_done, is_helped};
use crate::yielding::{Asking, impatient};
use crate::{both, welcome};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tally_contract::limits::GRAPH_SOLO_MAX as SOLO_MAX;
use tally_ipc::layout::submission_flags::GRAPH;
use tally_ipc::ring::Answer;
use tally_rewriter::TransformRefusal;

/// More than a GPU has SMs: a graph is limited only if it has a kernel of more blocks than the SMs that are left.
pub const BLOCKS: u32 = 160;
pub const WORDS: u32 = BLOCKS * THREADS;
/// Launches of `step` in a graph, each with a copy and a sum behind it.
const STEPS: u32 = 4;
/// As many of them as are launched by themselves, at most, and some more.
const MANY_STEPS: u32 = SOLO_MAX as u32 + 6;

/// What `enqueue` puts into a stream, as a graph that can be launched.
pub fn recorded(device: &Device, stream: Ptr, enqueue: impl FnOnce()) -> Ptr {
    let (mut graph, mut exec) = (null_mut(), null_mut());
    // SAFETY: a stream of ours; valid out-pointers.
    unsafe {
        ok((device.cuda.cuStreamBeginCapture_v2)(stream, 2));
        enqueue();
        ok((device.cuda.cuStreamEndCapture)(stream, &mut graph));
        ok((device.cuda.cuGraphInstantiateWithFlags)(&mut exec, graph, 0));
    }
    exec
}

pub fn launch(device: &Device, exec: Ptr, stream: Ptr) {
    // SAFETY: a graph and a stream of ours.
    ok(unsafe { (device.cuda.cuGraphLaunch)(exec, stream) });
}

/// Kernel, copy, sum, over and over: each needs what the one before it did.
pub struct Rounds {
    steps: u32,
    cells: Cells,
    copies: u64,
    sums: u64,
    pub exec: Ptr,
    pub stream: Ptr,
}

impl Rounds {
    pub fn new(device: &Device, stream: Ptr, steps: u32) -> Rounds {
        let cells = device.cells(BLOCKS);
        let (copies, sums) =
            (device.memory((WORDS * steps) as usize), device.memory(steps as usize));
        let exec = recorded(device, stream, || {
            for k in 0..steps {
                device.step(&cells, [BLOCKS, 1, 1], stream, k, 200);
                let (copy, bytes) = (copies + u64::from(k * WORDS) * 4, WORDS as usize * 4);
                // SAFETY: memory and a stream of ours.
                ok(unsafe { (device.cuda.cuMemcpyDtoDAsync_v2)(copy, cells.data, bytes, stream) });
                device.sum(sums + u64::from(k) * 4, copy, WORDS, stream);
            }
        });
        Rounds { steps, cells, copies, sums, exec, stream }
    }

    fn launch(&self, device: &Device) {
        launch(device, self.exec, self.stream);
    }

    /// Checks the results of this many launches.
    pub fn check(&self, device: &Device, launches: u32) {
        let steps = self.steps;
        let ks: Vec<u32> = (0..launches * steps).map(|n| n % steps).collect();
        device.check_steps(&self.cells, &ks);
        let sums = device.read(self.sums, steps as usize);
        let (before, last) = ks.split_at(ks.len() - steps as usize);
        let after = |i: u32, ks: &[u32]| ks.iter().fold(0, |v, k| step(v, i, *k));
        let mut want: Vec<u32> = (0..WORDS).map(|i| after(i, before)).collect();
        for (n, k) in last.iter().enumerate() {
            (0_u32..).zip(&mut want).for_each(|(i, v)| *v = step(*v, i, *k));
            assert_eq!(
                device.read(self.copies + n as u64 * 4 * u64::from(WORDS), WORDS as usize),
                want
            );
            let sum = want.iter().fold(0_u32, |a, v| a.wrapping_add(*v));
            assert_eq!(sums[n], sum, "after step {n}");
        }
    }
}

/// Graphs in parts of so many kernels, everything else whole.
pub fn in_parts_of(core: &Governor, kernels: u32) {
    core.policy(move |request, _| match request.flags & GRAPH {
        0 => Answer::Whole,
        _ => Answer::Slice(kernels),
    });
}

/// The core asks for parts of one node. So many launches went in parts and so many kernels by themselves, and so many
/// launches failed.
pub fn parts_of_one(core: &mut Governor, launches: u64, by_themselves: u64, failed: u64) {
    core.warm_up("step");
    core.expect("go");
    in_parts_of(core, 1);
    core.say("on");
    core.ends(0);
    let c = core.counters();
    let counts = [&c.graph_chained, &c.graph_nodes_transformed, &c.degraded, &c.rescued, &c.failed];
    assert_eq!(counts.map(|n| n.load(SeqCst)), [launches, by_themselves, 0, 0, failed]);
}

#[test]
fn long_kernels_of_a_graph_are_transformed_and_all_keeps_its_order() {
    both(
        long_kernels_of_a_graph_are_transformed_and_all_keeps_its_order,
        &welcome(),
        |device| {
            device.warm_up();
            let all = [null_mut(), device.stream(0), device.stream(1)].map(|stream| {
                // The default stream is not recorded: there it is only launched.
                let recorder = device.stream(1);
                let rounds = Rounds::new(device, recorder, STEPS);
                Rounds { stream, ..rounds }
            });
            let mut launches = 0;
            while ask("round") != "end" {
                launches += 1;
                for rounds in &all {
                    rounds.launch(device);
                }
                all.iter().for_each(|rounds| device.sync(rounds.stream));
            }
            all.iter().for_each(|rounds| device.sync(rounds.stream));
            all.iter().for_each(|rounds| rounds.check(device, launches));
        },
        |core| {
            core.warm_up("step");
            let asking = Asking::start(core, 1_500);
            let mut rounds = 0;
            for kernels in [1, 3, 100] {
                let before = core.counters().launches_yielded.load(SeqCst);
                let is_enough =
                    |core: &Governor| core.counters().launches_yielded.load(SeqCst) > before + 10;
                let mut here = 0;
                while here < 10 || (!is_enough(core) && here < 1_000) {
                    core.expect("round");
                    in_parts_of(core, kernels);
                    core.say("on");
                    (here, rounds) = (here + 1, rounds + 1);
                }
                assert!(is_enough(core), "in parts of {kernels}");
            }
            core.expect("round");
            drop(asking);
            core.say("end");
            core.ends(0);
            let c = core.counters();
            // Those for which there is no room soon are whole.
            let chained = c.graph_chained.load(SeqCst);
            assert!((rounds..=3 * rounds).contains(&chained), "{chained} of {rounds} rounds");
            let transformed = c.graph_nodes_transformed.load(SeqCst);
            assert!(
                (chained..=chained * u64::from(STEPS)).contains(&transformed),
                "{transformed} of {chained} chains"
            );
            assert_eq!([&c.rescued, &c.failed].map(|n| n.load(SeqCst)), [0; 2]);
        },
    );
}

/// An instantiation may wait for all that runs, while other threads cannot launch what that waits for.
#[test]
fn parts_of_a_graph_are_made_only_while_no_stream_waits() {
    both(
        parts_of_a_graph_are_made_only_while_no_stream_waits,
        &welcome(),
        |device| {
            device.warm_up();
            let (rounds, other) = (Rounds::new(device, device.stream(1), STEPS), device.stream(1));
            let words = device.words();
            assert_eq!(ask("go"), "on");
            // SAFETY: a stream and a word of ours.
            ok(unsafe { (device.cuda.cuStreamWaitValue32_v2)(other, words.as_ptr() as u64, 1, 0) });
            rounds.launch(device);
            device.sync(rounds.stream);
            assert_eq!(ask("waits"), "on");
            words[0].store(1, SeqCst);
            device.sync(other);
            let mut launches = 1;
            while ask("round") != "end" {
                launches += 1;
                rounds.launch(device);
                device.sync(rounds.stream);
            }
            rounds.check(device, launches);
        },
        |core| {
            core.warm_up("step");
            core.expect("go");
            in_parts_of(core, 1);
            core.say("on");
            core.expect("waits");
            let chained = |core: &Governor| core.counters().graph_chained.load(SeqCst);
            assert_eq!(chained(core), 0, "whole while a stream waits");
            core.say("on");
            let mut rounds = 0;
            loop {
                core.expect("round");
                if chained(core) > 0 || rounds == 1_000 {
                    break;
                }
                // It is not tried again at once.
                std::thread::sleep(Duration::from_millis(20));
                core.say("on");
                rounds += 1;
            }
            core.say("end");
            core.ends(0);
            assert!(chained(core) > 0, "in parts once none waits");
        },
    );
}

#[test]
fn a_graph_whose_kernel_yielded_waits_until_nobody_asks() {
    both(
        a_graph_whose_kernel_yielded_waits_until_nobody_asks,
        &impatient(),
        |device| {
            device.warm_up();
            let stream = device.stream(1);
            let rounds = Rounds::new(device, stream, STEPS);
            assert_eq!(ask("go"), "on");
            rounds.launch(device);
            assert_eq!(ask("launched"), "look");
            // SAFETY: a stream of ours.
            assert_eq!(unsafe { (device.cuda.cuStreamQuery)(stream) }, 600);
            say("held");
            device.sync(stream);
            rounds.check(device, 1);
        },
        |core| {
            core.warm_up("step");
            core.expect("go");
            in_parts_of(core, 1);
            core.closed();
            core.say("on");
            core.expect("launched");
            // Longer than what is stuck is waited for.
            std::thread::sleep(Duration::from_millis(300));
            core.say("look");
            core.expect("held");
            core.ask_to_yield(false);
            core.ends(0);
            let c = core.counters();
            assert_eq!(c.graph_nodes_transformed.load(SeqCst), u64::from(STEPS));
            assert_eq!([&c.rescued, &c.failed].map(|n| n.load(SeqCst)), [0; 2]);
        },
    );
}

#[test]
fn short_kernels_stay_in_their_part_and_what_is_ready_later_is_transformed_later() {
    both(
        short_kernels_stay_in_their_part_and_what_is_ready_later_is_transformed_later,
        &welcome(),
        |device| {
            let stream = device.stream(1);
            // Half as many blocks as the launch that made the policy wish for the form; and fewer.
            let (half, fewer) = (device.cells(30), device.cells(29));
            let exec = recorded(device, stream, || {
                device.step(&half, [30, 1, 1], stream, 1, 0);
                device.step(&fewer, [29, 1, 1], stream, 2, 0);
                device.step(&fewer, [1, 29, 1], stream, 3, 0);
            });
            let sixty = device.cells(60);
            let warm_up = |grid| device.step(&sixty, grid, null_mut(), 1, 0);
            say("early");
            // The first wish for parts has the gate made; then they are whole no more.
            while ask("chained?") == "no" {
                launch(device, exec, stream);
                device.sync(stream);
            }
            device.warm_up_with(|| warm_up([60, 1, 1]));
            let early = device.read(half.counts, 1)[0];
            assert_eq!(ask("go"), "on");
            for _ in 0..5 {
                launch(device, exec, stream);
            }
            device.sync(stream);
            let launches = (early + 5) as usize;
            device.check_steps(&half, &vec![1; launches]);
            device.check_steps(&fewer, &[2, 3].repeat(launches));
        },
        |core| {
            core.expect("early");
            in_parts_of(core, 2);
            loop {
                core.expect("chained?");
                let chained = core.counters().graph_chained.load(SeqCst) > 0;
                core.say(if chained { "yes" } else { "no" });
                if chained {
                    break;
                }
            }
            assert_eq!(
                core.counters().graph_nodes_transformed.load(SeqCst),
                0,
                "nothing can be transformed yet"
            );
            core.warm_up("step");
            core.expect("go");
            in_parts_of(core, 2);
            core.say("on");
            core.ends(0);
            let c = core.counters();
            assert_eq!(c.graph_nodes_transformed.load(SeqCst), 5);
            assert_eq!([&c.degraded, &c.rescued, &c.failed].map(|n| n.load(SeqCst))[1..], [0; 2]);
        },
    );
}

#[test]
fn a_kernel_of_a_graph_whose_blocks_wait_is_helped_and_stays_whole() {
    both(
        a_kernel_of_a_graph_whose_blocks_wait_is_helped_and_stays_whole,
        &impatient(),
        |device| {
            let (stream, words, later) =
                (device.stream(1), device.words(), device.function("unseen"));
            let blocks = device.crowd;
            let launch_later = |cells: &Cells, stream| {
                let params = [cells.data, cells.counts, words.as_ptr() as u64];
                ok(device.launch(later, [blocks, 1, 1], 1, stream, &params));
            };
            words[1].store(1, SeqCst);
            device.warm_up_with(|| launch_later(&device.cells(blocks), null_mut()));
            let (cells, sums) = (device.cells(blocks), device.memory(2));
            let exec = recorded(device, stream, || {
                device.sum(sums, cells.counts, blocks, stream);
                launch_later(&cells, stream);
                device.sum(sums + 4, cells.counts, blocks, stream);
            });
            for n in 0.. {
                (0..2).for_each(|i| words[i].store(0, SeqCst));
                // The word by which the last block lets the first one go.
                let release = cells.counts + u64::from(blocks) * 4;
                device.set(release, 0, 1);
                let more = ask("launch?") == "yes";
                launch(device, exec, stream);
                if more {
                    // Its first block runs and waits; the last ones do not run before they are let.
                    wait_for(&words[0], 1);
                    assert_eq!(ask("running"), "go on");
                }
                words[1].store(1, SeqCst);
                device.sync(stream);
                let want = [n, n + 1].map(|runs| runs * blocks);
                assert_eq!(device.read(sums, 2), want, "every block once, and all before the sum");
                if !more {
                    // Nor is a graph that is made later.
                    let exec = recorded(device, stream, || {
                        launch_later(&cells, stream);
                        device.sum(sums, cells.counts, blocks, stream);
                    });
                    device.set(release, 0, 1);
                    launch(device, exec, stream);
                    device.sync(stream);
                    assert_eq!(device.read(sums, 1), [(n + 2) * blocks]);
                    break;
                }
                say("right");
            }
        },
        |core| {
            core.warm_up("unseen");
            in_parts_of(core, 1);
            let mut rounds = 0;
            while !is_helped(core) {
                rounds += 1;
                assert!(rounds < 50, "never stuck");
                core.expect("launch?");
                core.say("yes");
                core.expect("running");
                core.closed();
                core.say("go on");
                let said = helped_or_done(core);
                core.ask_to_yield(false);
                assert_eq!(said.unwrap_or_else(|| core.hear()), "right");
            }
            assert_eq!(core.counters().graph_nodes_transformed.load(SeqCst), rounds);
            assert!(core.is_refused("unseen", TransformRefusal::BlocksWaited));
            core.expect("launch?");
            core.say("no");
            core.ends(0);
            let c = core.counters();
            assert_eq!(
                c.graph_nodes_transformed.load(SeqCst),
                rounds,
                "it is never transformed again"
            );
            assert_eq!((c.graph_chained.load(SeqCst), c.rescued.load(SeqCst)), (rounds, 1));
            assert_eq!(c.failed.load(SeqCst), 0);
        },
    );
}

#[test]
fn graphs_of_many_long_kernels_and_launches_of_one_graph_on_two_streams_are_transformed() {
    both(
        graphs_of_many_long_kernels_and_launches_of_one_graph_on_two_streams_are_transformed,
        &welcome(),
        |device| {
            device.warm_up();
            let (a, b) = (device.stream(1), device.stream(1));
            let rounds = Rounds::new(device, a, MANY_STEPS);
            assert_eq!(ask("go"), "on");
            // The driver keeps launches of one graph in order, whatever stream they are in.
            for stream in [a, b, b, a, b, a] {
                launch(device, rounds.exec, stream);
            }
            [a, b].iter().for_each(|stream| device.sync(*stream));
            rounds.check(device, 6);
        },
        |core| {
            core.warm_up("step");
            core.expect("go");
            in_parts_of(core, 3);
            let asking = Asking::start(core, 1_000);
            core.say("on");
            core.ends(0);
            drop(asking);
            let c = core.counters();
            // Those for which there is no room soon are whole.
            let chained = c.graph_chained.load(SeqCst);
            assert!((1..=6).contains(&chained), "{chained}");
            let transformed = c.graph_nodes_transformed.load(SeqCst);
            assert!(
                (chained..=chained * SOLO_MAX as u64).contains(&transformed),
                "{transformed} of {chained} chains"
            );
            assert_eq!([&c.rescued, &c.failed].map(|n| n.load(SeqCst)), [0; 2]);
        },
    );
}

/// Beside other nodes it may rely on running at the same time as they do.
#[test]
fn a_long_kernel_on_a_branch_stays_in_its_part_with_all_that_is_beside_it() {
    const LAUNCHES: u32 = 5;
    both(
        a_long_kernel_on_a_branch_stays_in_its_part_with_all_that_is_beside_it,
        &welcome(),
        |device| {
            device.warm_up();
            let (stream, side) = (device.stream(1), device.stream(1));
            let (fork, join) = (device.event(), device.event());
            let (first, beside) = (device.cells(BLOCKS), device.cells(BLOCKS));
            let sums = device.memory(1);
            let exec = recorded(device, stream, || {
                device.step(&first, [BLOCKS, 1, 1], stream, 1, 0);
                // SAFETY: streams and events of ours.
                unsafe {
                    ok((device.cuda.cuEventRecord)(fork, stream));
                    ok((device.cuda.cuStreamWaitEvent)(side, fork, 0));
                }
                device.step(&beside, [BLOCKS, 1, 1], stream, 2, 0);
                device.sum(sums, first.counts, BLOCKS, side);
                // SAFETY: as above.
                unsafe {
                    ok((device.cuda.cuEventRecord)(join, side));
                    ok((device.cuda.cuStreamWaitEvent)(stream, join, 0));
                }
            });
            assert_eq!(ask("go"), "on");
            for n in 1..=LAUNCHES {
                launch(device, exec, stream);
                device.sync(stream);
                assert_eq!(device.read(sums, 1), [n * BLOCKS]);
            }
            device.check_steps(&first, &[1; LAUNCHES as usize]);
            device.check_steps(&beside, &[2; LAUNCHES as usize]);
        },
        // Of each launch the first kernel only.
        |core| parts_of_one(core, LAUNCHES.into(), LAUNCHES.into(), 0),
    );
}

#[test]
fn large_grids_in_a_graph_go_in_slices_by_offset() {
    const GRID: [u32; 3] = [9_000, 1, 1];
    both(
        large_grids_in_a_graph_go_in_slices_by_offset,
        &welcome(),
        |device| {
            device.warm_up();
            let (stream, cells) = (device.stream(1), device.cells(GRID[0]));
            let exec = recorded(device, stream, || {
                (1..3).for_each(|k| device.step(&cells, GRID, stream, k, 0));
            });
            let mut launches = 0;
            let mut once = || {
                launches += 1;
                launch(device, exec, stream);
                device.sync(stream);
            };
            // That form is made when the first launch could use it: perhaps between the two kernels of one.
            while ask("transformed?") == "no" {
                once();
            }
            once();
            device.check_steps(&cells, &[1, 2].repeat(launches));
        },
        |core| {
            core.warm_up("step");
            in_parts_of(core, 1);
            let sliced = |core: &Governor| core.counters().sliced_by_offset.load(SeqCst);
            let mut before = 0;
            for launches in 0.. {
                assert!(launches < 5_000, "{:?}", core.state("step"));
                core.expect("transformed?");
                before = sliced(core);
                core.say(if before > 0 { "yes" } else { "no" });
                if before > 0 {
                    break;
                }
            }
            core.ends(0);
            let c = core.counters();
            assert!((1..=2).contains(&before), "{before}");
            assert_eq!(
                (c.graph_nodes_transformed.load(SeqCst), sliced(core)),
                (before + 2, before + 2)
            );
            assert_eq!([&c.rescued, &c.failed].map(|n| n.load(SeqCst)), [0; 2]);
        },
    );
}
