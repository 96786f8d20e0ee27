//! What comes before a transformed launch in its stream, behind it, and in other streams.

use crate::governor::Governor;
use crate::program::{Device, Ptr, ask, hear, ok, say};
use crate::yielding::Asking;
use crate::{both, both_under, welcome};
use std::ptr::null_mut;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::layout::transform_state;
use tally_ipc::ring::Answer;

const GRID: [u32; 3] = [6, 4, 1];
const BLOCKS: u32 = 24;

/// Kernel, copy, kernel, sum, over and over: each needs what the one before it did.
fn chain(device: &Device, stream: Ptr) {
    let cells = device.cells(BLOCKS);
    let words = (BLOCKS * crate::program::THREADS) as usize;
    let (copies, sums) = (device.memory(words * 8), device.memory(8));
    for k in 0..8_u32 {
        device.step(&cells, GRID, stream, k, 200);
        let copy = copies + u64::from(k) * 4 * words as u64;
        // SAFETY: memory and a stream of ours.
        ok(unsafe { (device.cuda.cuMemcpyDtoDAsync_v2)(copy, cells.data, words * 4, stream) });
        device.sum(sums + u64::from(k) * 4, copy, words as u32, stream);
    }
    device.sync(stream);
    device.check_steps(&cells, &[0, 1, 2, 3, 4, 5, 6, 7]);
    let mut want = vec![0_u32; words];
    let sums = device.read(sums, 8);
    for k in 0..8_u32 {
        for (i, v) in want.iter_mut().enumerate() {
            *v = crate::kernels::step(*v, i as u32, k);
        }
        let sum = want.iter().fold(0_u32, |a, v| a.wrapping_add(*v));
        assert_eq!(sums[k as usize], sum, "after launch {k}");
        assert_eq!(device.read(copies + u64::from(k) * 4 * words as u64, words), want);
    }
}

#[test]
fn chains_keep_their_order_on_every_kind_of_stream() {
    both(
        chains_keep_their_order_on_every_kind_of_stream,
        &welcome(),
        |device| {
            device.warm_up();
            let of_thread = device.per_thread_launch();
            let streams = [null_mut(), device.stream(0), device.stream(1)];
            while ask("round") != "end" {
                for stream in streams {
                    chain(device, stream);
                }
                // By the per-thread function, and by the special handles.
                chain(&of_thread, 2 as Ptr);
                chain(device, 2 as Ptr);
                chain(device, 1 as Ptr);
            }
        },
        |core| {
            core.warm_up("step");
            let asking = Asking::start(core, 1_000);
            for answer in [Answer::Slice(5), Answer::Preemptible(3_000), Answer::Preemptible(0)] {
                core.expect("round");
                core.policy(move |_, name| if name == "step" { answer } else { Answer::Whole });
                core.say("on");
            }
            core.expect("round");
            drop(asking);
            core.say("end");
            core.ends(0);
            let c = core.counters();
            // Those for which there is no room soon are whole.
            let (sliced, preemptible) = (c.sliced.load(SeqCst), c.preemptible.load(SeqCst));
            assert!((6..=48).contains(&sliced), "{sliced}");
            assert!((12..=96).contains(&preemptible), "{preemptible}");
            assert_eq!([&c.rescued, &c.failed].map(|n| n.load(SeqCst)), [0; 2]);
        },
    );
}

/// A launch is one piece of work, whatever it is made of.
#[test]
fn what_another_thread_puts_into_the_stream_is_before_a_launch_or_behind_it() {
    const COPIES: usize = 64;
    both(
        what_another_thread_puts_into_the_stream_is_before_a_launch_or_behind_it,
        &welcome(),
        |device| {
            device.warm_up();
            let (stream, cells) = (device.stream(1), device.cells(BLOCKS));
            let words = BLOCKS as usize;
            let copies = device.memory(words * COPIES);
            let device = &*device;
            while ask("round") == "on" {
                let (done, stream) = (AtomicBool::new(false), stream as usize);
                std::thread::scope(|s| {
                    s.spawn(|| {
                        device.enter();
                        for n in 0..COPIES {
                            let to = copies + (n * words * 4) as u64;
                            // SAFETY: memory and a stream of ours.
                            ok(unsafe {
                                (device.cuda.cuMemcpyDtoDAsync_v2)(
                                    to,
                                    cells.counts,
                                    words * 4,
                                    stream as _,
                                )
                            });
                        }
                        done.store(true, SeqCst);
                    });
                    while !done.load(SeqCst) {
                        device.step(&cells, GRID, stream as _, 1, 0);
                    }
                });
                device.sync(stream as _);
                for (n, counts) in device.read(copies, words * COPIES).chunks(words).enumerate() {
                    assert!(counts.iter().all(|c| *c == counts[0]), "copy {n} is torn: {counts:?}");
                }
            }
        },
        |core| {
            core.warm_up("step");
            let in_parts = |core: &Governor| {
                let c = core.counters();
                c.sliced.load(SeqCst) + c.preemptible.load(SeqCst)
            };
            for answer in [Answer::Slice(5), Answer::Preemptible(3_000)] {
                let before = in_parts(core);
                for rounds in 0.. {
                    core.expect("round");
                    if rounds >= 10 && in_parts(core) > before + 10 {
                        core.say("on");
                        break;
                    }
                    assert!(rounds < 1_000, "{answer:?}: {}", in_parts(core) - before);
                    core.policy(move |_, name| if name == "step" { answer } else { Answer::Whole });
                    core.say("on");
                }
            }
            core.expect("round");
            core.say("end");
            core.ends(0);
            assert_eq!(core.counters().failed.load(SeqCst), 0);
        },
    );
}

#[test]
fn other_streams_wait_for_all_of_it() {
    both(
        other_streams_wait_for_all_of_it,
        &welcome(),
        |device| {
            device.warm_up();
            let (a, b, blocking) = (device.stream(1), device.stream(1), device.stream(0));
            let (event, cells) = (device.event(), device.cells(BLOCKS));
            let (sums, legacy) = (device.memory(2), device.cells(BLOCKS));
            assert_eq!(ask("go"), "on");
            device.step(&cells, GRID, a, 1, 0);
            // SAFETY: events and streams of ours.
            unsafe {
                ok((device.cuda.cuEventRecord)(event, a));
                ok((device.cuda.cuStreamWaitEvent)(b, event, 0));
            }
            device.sum(sums, cells.counts, BLOCKS, b);
            // A blocking stream waits for the legacy one.
            device.step(&legacy, GRID, null_mut(), 1, 0);
            device.sum(sums + 4, legacy.counts, BLOCKS, blocking);
            say("launched");
            assert_eq!(hear(), "look");
            for stream in [a, b, blocking] {
                // SAFETY: a stream of ours.
                assert_eq!(unsafe { (device.cuda.cuStreamQuery)(stream) }, 600);
            }
            say("held");
            device.sync(b);
            device.sync(blocking);
            // SAFETY: an event of ours.
            ok(unsafe { (device.cuda.cuEventSynchronize)(event) });
            assert_eq!(device.read(sums, 2), [BLOCKS; 2]);
            device.check_steps(&cells, &[1]);
            device.check_steps(&legacy, &[1]);
        },
        |core| {
            core.warm_up("step");
            core.expect("go");
            core.policy(|_, name| match name {
                "step" => Answer::Preemptible(0),
                _ => Answer::Whole,
            });
            core.closed();
            core.say("on");
            core.expect("launched");
            std::thread::sleep(std::time::Duration::from_millis(50));
            core.say("look");
            core.expect("held");
            core.ask_to_yield(false);
            core.ends(0);
            assert_eq!(core.counters().preemptible.load(SeqCst), 2);
        },
    );
}

#[test]
fn captures_are_neither_transformed_nor_spoilt() {
    // The shim's threads are there before the driver is.
    both_under(
        captures_are_neither_transformed_nor_spoilt,
        &[("TALLY_SOFTCUDA_INIT_MS", "200")],
        &welcome(),
        |device| {
            device.warm_up();
            let (held, stream) = (device.stream(1), device.stream(1));
            let (cells, recorded) = (device.cells(BLOCKS), device.cells(BLOCKS));
            assert_eq!(ask("go"), "on");
            device.step(&cells, GRID, held, 1, 0);
            // In the mode that lets no thread make unsafe calls.
            // SAFETY: a stream of ours.
            ok(unsafe { (device.cuda.cuStreamBeginCapture_v2)(stream, 0) });
            device.step(&recorded, GRID, stream, 2, 0);
            assert_eq!(ask("capturing"), "on");
            device.step(&recorded, GRID, stream, 3, 0);
            let (mut graph, mut exec) = (null_mut(), null_mut());
            // SAFETY: a stream of ours; valid out-pointers.
            unsafe {
                ok((device.cuda.cuStreamEndCapture)(stream, &mut graph));
                ok((device.cuda.cuGraphInstantiateWithFlags)(&mut exec, graph, 0));
                ok((device.cuda.cuGraphLaunch)(exec, stream));
            }
            device.sync(stream);
            device.check_steps(&recorded, &[2, 3]);
            say("captured");
            device.sync(held);
            device.check_steps(&cells, &[1]);
        },
        |core| {
            core.warm_up("step");
            core.expect("go");
            core.policy(|request, name| match name {
                "step" if request.grid == GRID => Answer::Preemptible(0),
                _ => Answer::Whole,
            });
            core.closed();
            core.say("on");
            core.expect("capturing");
            // The threads that watch the transformed launch look many times.
            std::thread::sleep(std::time::Duration::from_millis(100));
            core.say("on");
            core.expect("captured");
            core.ask_to_yield(false);
            core.ends(0);
            let c = core.counters();
            assert_eq!((c.preemptible.load(SeqCst), c.captured.load(SeqCst)), (1, 2));
            assert_eq!(core.state("step").0, transform_state::READY);
        },
    );
}
