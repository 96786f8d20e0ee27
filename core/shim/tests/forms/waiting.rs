//! Kernels whose blocks wait for one another: stuck when some are held back, and helped.

use crate::common::PATIENCE;
use crate::governor::Governor;
use crate::program::{Cells, Device, ask, hear, ok, say, wait_for};
use crate::yielding::impatient;
use crate::{both, welcome};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use tally_ipc::layout::submission_flags::{CAN_PREEMPT, CAN_PREPARE, CAN_SLICE};
use tally_ipc::layout::transform_state;
use tally_ipc::ring::Answer;
use tally_ipc::wire::{RewriteSettings, Welcome};
use tally_rewriter::TransformRefusal;

const BLOCKS: u32 = 40;
/// Tries to have a launch asked to yield before all of its blocks have begun.
const ROUNDS_MAX: usize = 50;

/// A launch of `unseen`, whose first block waits for its last one, and what follows it.
fn stuck(device: &mut Device) {
    stuck_while(device, 0, |_| ());
}

/// The same; `then` comes once its last blocks may run.
fn stuck_while(device: &mut Device, shared_bytes: u32, then: fn(&Device)) {
    let (words, blocks) = (device.words(), device.crowd);
    let later = device.function("unseen");
    let at = words.as_ptr() as u64;
    let launch = |cells: &Cells, stream| {
        let params = [cells.data, cells.counts, at];
        if shared_bytes > 0 {
            device.allow(later, shared_bytes);
        }
        ok(device.launch_with(later, ([blocks, 1, 1], 1, shared_bytes), stream, &params));
    };
    device.warm_up_with(|| {
        words[1].store(1, SeqCst);
        launch(&device.cells(blocks), null_mut());
    });
    let stream = device.stream(1);
    // A GPU's driver loads it with its first launch, and waits for all that runs.
    device.sum(device.memory(1), device.memory(1), 1, stream);
    device.sync(stream);
    loop {
        let (cells, sum, copy) =
            (device.cells(blocks), device.memory(2), device.memory(blocks as usize));
        words[0].store(0, SeqCst);
        words[1].store(0, SeqCst);
        say("launch");
        assert_eq!(hear(), "go");
        launch(&cells, stream);
        // What follows sees all of its results.
        device.sum(sum, cells.data, blocks, stream);
        // SAFETY: memory of ours.
        unsafe {
            let bytes = blocks as usize * 4;
            ok((device.cuda.cuMemcpyDtoDAsync_v2)(copy, cells.counts, bytes, stream));
        }
        device.sum(sum + 4, cells.counts, blocks, stream);
        wait_for(&words[0], 1);
        // The first block runs and waits; the last ones do not run before they are let.
        say("running");
        assert_eq!(hear(), "go on");
        words[1].store(1, SeqCst);
        then(device);
        device.sync(stream);
        let want: Vec<u32> = (1..=blocks).collect();
        let once = vec![1; blocks as usize];
        device.check_words(cells.data, &want);
        device.check_words(cells.counts, &once);
        device.check_words(copy, &once);
        assert_eq!(device.read(sum, 2), [want.iter().sum::<u32>(), blocks]);
        if ask("right") == "enough" {
            break;
        }
    }
    // Whole from now on, and right.
    let cells = device.cells(blocks);
    launch(&cells, stream);
    device.sync(stream);
    device.check_words(cells.counts, &vec![1; blocks as usize]);
}

pub fn is_helped(core: &Governor) -> bool {
    core.counters().rescued.load(SeqCst) > 0
}

/// Until a launch that was asked to yield is helped, or the program says something: on a busy machine
/// all of its blocks may have run before the flag was raised. Its next part waits at the gate then,
/// which opens in the end, and another round follows.
pub fn helped_or_done(core: &mut Governor) -> Option<String> {
    let start = Instant::now();
    let mut said = None;
    while !is_helped(core) && said.is_none() {
        assert!(start.elapsed() < PATIENCE, "it is not helped");
        said = core.hear_within(Duration::from_millis(1));
        if start.elapsed() > PATIENCE / 4 {
            core.ask_to_yield(false);
        }
    }
    said
}

fn helped_once(core: &mut Governor, answer: Answer, lower: bool) {
    let kernel = "unseen";
    core.warm_up(kernel);
    core.policy(move |request, name| {
        let is_it = name == kernel && crate::governor::offers(request, answer);
        if is_it { answer } else { Answer::Whole }
    });
    for round in 0.. {
        assert!(round < ROUNDS_MAX, "never stuck");
        core.expect("launch");
        core.say("go");
        core.expect("running");
        core.closed();
        core.say("go on");
        if lower {
            // Soon after it has skipped blocks: they begin within a moment.
            std::thread::sleep(Duration::from_millis(20));
            core.ask_to_yield(false);
        }
        let said = helped_or_done(core);
        core.ask_to_yield(false);
        assert_eq!(said.unwrap_or_else(|| core.hear()), "right");
        core.say(if is_helped(core) { "enough" } else { "again" });
        if is_helped(core) {
            break;
        }
    }
    core.ends(0);
    let c = core.counters();
    assert_eq!(c.rescued.load(SeqCst), 1);
    assert!(core.is_refused(kernel, TransformRefusal::BlocksWaited));
    assert!(c.sliced.load(SeqCst) + c.preemptible.load(SeqCst) >= 1);
    let (last, _) = *core.requests(kernel).last().unwrap();
    assert!(!crate::governor::offers(&last, answer), "only whole");
}

#[test]
fn a_preemptible_launch_that_is_stuck_is_helped_once() {
    both(a_preemptible_launch_that_is_stuck_is_helped_once, &impatient(), stuck, |core| {
        helped_once(core, Answer::Preemptible(4_000), false)
    });
}

/// Its rest has what it began with, whatever later launches may have.
#[test]
fn a_stuck_launch_is_helped_although_its_kernel_may_have_less_memory_since() {
    both(
        a_stuck_launch_is_helped_although_its_kernel_may_have_less_memory_since,
        &impatient(),
        |device| {
            stuck_while(device, 64 << 10, |device| device.allow(device.function("unseen"), 1 << 10))
        },
        |core| helped_once(core, Answer::Preemptible(4_000), false),
    );
}

#[test]
fn it_is_helped_although_nobody_asks_any_more() {
    both(
        it_is_helped_although_nobody_asks_any_more,
        // Longer than it is asked for.
        &Welcome { rewrite: RewriteSettings { rescue_ms: 150, ..welcome().rewrite }, ..welcome() },
        stuck,
        |core| helped_once(core, Answer::Preemptible(0), true),
    );
}

#[test]
fn a_function_that_was_asked_for_before_is_had_at_once() {
    both(
        a_function_that_was_asked_for_before_is_had_at_once,
        // Nobody is helped.
        &Welcome {
            rewrite: RewriteSettings { rescue_ms: 10_000, ..welcome().rewrite },
            ..welcome()
        },
        |device| {
            device.warm_up();
            let (cells, stream) = (device.cells(16), device.stream(1));
            let library = device.library();
            let kernel = device.kernel_of(library, "nothing");
            let get = |kernel| {
                let mut function = null_mut();
                // SAFETY: a valid out-pointer, a kernel of ours.
                ok(unsafe { (device.cuda.cuKernelGetFunction)(&mut function, kernel) });
            };
            get(kernel);
            assert_eq!(ask("go"), "on");
            device.step(&cells, [16, 1, 1], stream, 1, 0);
            // Looked up again: the same handle.
            assert_eq!(device.kernel_of(library, "nothing"), kernel);
            get(kernel);
            say("got");
            device.sync(stream);
            device.check_steps(&cells, &[1]);
        },
        |core| {
            core.warm_up("step");
            core.hold_all_at_the_gate();
            // While the launch stands at the gate.
            core.expect("got");
            core.ask_to_yield(false);
            core.ends(0);
            assert_eq!(core.counters().preemptible.load(SeqCst), 1);
        },
    );
}

#[test]
fn slices_whose_waits_are_unseen_are_helped_although_nobody_asks() {
    both(
        slices_whose_waits_are_unseen_are_helped_although_nobody_asks,
        &impatient(),
        stuck,
        |core| helped_once(core, Answer::Slice(8), true),
    );
}

/// The driver waits there for all that runs, and keeps the launch that helps waiting.
#[test]
fn a_call_in_which_launches_wait_lets_what_is_stuck_be_helped_first() {
    for answer in [Answer::Slice(8), Answer::Preemptible(4_000)] {
        both(
            a_call_in_which_launches_wait_lets_what_is_stuck_be_helped_first,
            &impatient(),
            |device| {
                stuck_while(device, 0, |device| {
                    let spare = device.memory(1);
                    // SAFETY: memory of ours, not used again.
                    ok(unsafe { (device.cuda.cuMemFree_v2)(spare) });
                });
            },
            |core| helped_once(core, answer, false),
        );
    }
}

/// The driver loads a library's kernel then, for which it waits.
#[test]
fn a_call_that_loads_a_kernel_lets_what_is_stuck_be_helped_first() {
    both(
        a_call_that_loads_a_kernel_lets_what_is_stuck_be_helped_first,
        &impatient(),
        |device| {
            stuck_while(device, 0, |device| {
                let (kernel, mut function) =
                    (device.kernel_of(device.library(), "nothing"), null_mut());
                // SAFETY: a valid out-pointer, a kernel of ours.
                ok(unsafe { (device.cuda.cuKernelGetFunction)(&mut function, kernel) });
            });
        },
        |core| helped_once(core, Answer::Preemptible(4_000), false),
    );
}

#[test]
fn a_kernel_whose_blocks_may_wait_stays_whole() {
    both(
        a_kernel_whose_blocks_may_wait_stays_whole,
        &impatient(),
        |device| {
            let (later, unseen) = (device.function("later"), device.function("unseen"));
            let words = device.words();
            let cells = device.cells(BLOCKS);
            let launch = |kernel| {
                let params = [cells.data, cells.counts, words.as_ptr() as u64];
                ok(device.launch(kernel, [BLOCKS, 1, 1], 1, null_mut(), &params));
            };
            words[1].store(1, SeqCst);
            device.warm_up_with(|| {
                launch(later);
                launch(unseen);
            });
            while ask("refused?") == "no" {
                device.sync(null_mut());
            }
            launch(later);
            device.sync(null_mut());
        },
        |core| {
            core.warm_up("unseen");
            core.answer(Answer::Preemptible(0));
            let start = Instant::now();
            loop {
                core.expect("refused?");
                let refused = core.is_refused("later", TransformRefusal::BlocksMayWait);
                core.say(if refused { "yes" } else { "no" });
                if refused {
                    break;
                }
                assert!(start.elapsed() < PATIENCE, "{:?}", core.state("later"));
            }
            core.ends(0);
            assert_eq!(core.state("unseen").0, transform_state::READY);
            let (last, _) = *core.requests("later").last().unwrap();
            assert_eq!(last.flags & (CAN_SLICE | CAN_PREEMPT | CAN_PREPARE), 0);
            assert_eq!(core.counters().preemptible.load(SeqCst), 0);
        },
    );
}

#[test]
fn a_long_last_slice_is_left_to_end() {
    // All of its blocks are its own: what follows must see all of them.
    both(
        a_long_last_slice_is_left_to_end,
        &impatient(),
        |device| {
            let later = device.function("unseen");
            let words = device.words();
            let launch = |cells: &Cells, stream| {
                let params = [cells.data, cells.counts, words.as_ptr() as u64];
                ok(device.launch(later, [BLOCKS, 1, 1], 1, stream, &params));
            };
            words[1].store(1, SeqCst);
            device.warm_up_with(|| launch(&device.cells(BLOCKS), null_mut()));
            words[1].store(0, SeqCst);
            assert_eq!(ask("go"), "on");
            let (cells, sum, stream) = (device.cells(BLOCKS), device.memory(1), device.stream(1));
            launch(&cells, stream);
            device.sum(sum, cells.data, BLOCKS, stream);
            // Far longer than a slice may take.
            std::thread::sleep(Duration::from_millis(600));
            words[1].store(1, SeqCst);
            device.sync(stream);
            assert_eq!(device.read(sum, 1), [(1..=BLOCKS).sum::<u32>()]);
        },
        |core| {
            core.warm_up("unseen");
            core.expect("go");
            core.policy(|_, name| match name {
                "unseen" => Answer::Slice(BLOCKS),
                _ => Answer::Whole,
            });
            core.say("on");
            core.ends(0);
            let c = core.counters();
            assert_eq!((c.sliced.load(SeqCst), c.rescued.load(SeqCst)), (1, 0));
            assert_eq!(core.state("unseen").0, transform_state::READY);
        },
    );
}

#[test]
fn without_being_asked_nothing_is_stuck() {
    both(without_being_asked_nothing_is_stuck, &welcome(), stuck, |core| {
        core.warm_up("unseen");
        core.policy(|_, name| match name {
            "unseen" => Answer::Preemptible(0),
            _ => Answer::Whole,
        });
        core.expect("launch");
        core.say("go");
        core.expect("running");
        core.say("go on");
        core.expect("right");
        core.say("enough");
        core.ends(0);
        let c = core.counters();
        assert_eq!((c.preemptible.load(SeqCst), c.rescued.load(SeqCst)), (2, 0));
        assert_eq!(core.state("unseen").0, transform_state::READY);
    });
}

/// A hardware queue takes 1 020 launches; the parts of what is held leave room for most of them.
#[test]
fn behind_a_launch_at_the_gate_there_is_room_for_many() {
    const LAUNCHES: usize = 700;
    both(
        behind_a_launch_at_the_gate_there_is_room_for_many,
        &welcome(),
        |device| {
            device.warm_up();
            let (held, cells) = (device.cells(16), device.cells(1));
            let stream = device.stream(1);
            assert_eq!(ask("go"), "on");
            device.step(&held, [16, 1, 1], stream, 5, 100);
            for _ in 0..LAUNCHES {
                device.step(&cells, [1, 1, 1], stream, 6, 0);
            }
            say("launched");
            device.sync(stream);
            device.check_steps(&held, &[5]);
            device.check_steps(&cells, &[6; LAUNCHES]);
        },
        |core| {
            core.warm_up("step");
            core.expect("go");
            core.policy(|request, _| match request.grid[0] {
                16 => Answer::Slice(4),
                _ => Answer::Whole,
            });
            core.closed();
            core.say("on");
            core.expect("launched");
            core.ask_to_yield(false);
            core.ends(0);
            assert_eq!(core.counters().sliced.load(SeqCst), 1);
        },
    );
}
