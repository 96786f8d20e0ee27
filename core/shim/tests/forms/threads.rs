//! Threads that the driver keeps waiting, and others that go on, as without the shim.

use crate::graphs::{Rounds, in_parts_of, launch};
use crate::program::{Device, Ptr, ask, ok, say, wait_for};
use crate::{both, both_under, welcome};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

/// Streams with a slot of their own.
const SLOTS: usize = 63;
/// Entries of a hardware queue.
const DEPTH: usize = 8;
/// Until a thread is where the driver keeps it waiting.
const THERE: Duration = Duration::from_millis(100);

/// A launch that the driver keeps waiting, for its stream is full, keeps no other stream waiting, whether these streams
/// have slots of their own or share one.
fn one_is_full(device: &mut Device, streams: usize) {
    let all: Vec<usize> = (0..streams).map(|_| device.stream(1) as usize).collect();
    let cells = device.cells(2);
    for stream in &all {
        device.step(&cells, [2, 1, 1], *stream as Ptr, 1, 0);
        device.sync(*stream as Ptr);
    }
    let (words, one) = (device.words(), device.memory(1));
    let at = words.as_ptr() as u64;
    device.set(one, 1, 1);
    let [full, other] = [all[streams - 1], all[streams - 2]].map(|stream| stream as Ptr);
    // SAFETY: a stream and a word of ours.
    ok(unsafe { (device.cuda.cuStreamWaitValue32_v2)(full, at, 1, 0) });
    let (mine, stream, more) = (device.clone(), full as usize, device.cells(2));
    let filling = std::thread::spawn(move || {
        mine.enter();
        for _ in 0..2 * DEPTH {
            mine.step(&more, [2, 1, 1], stream as Ptr, 1, 0);
        }
    });
    std::thread::sleep(THERE);
    assert!(!filling.is_finished(), "the stream is not full");
    device.sum(at, one, 1, other);
    filling.join().unwrap();
    device.sync(full);
    device.check_steps(&more, &[1; 2 * DEPTH]);
}

#[test]
fn a_full_stream_with_a_slot_keeps_no_other_waiting() {
    both_under(
        a_full_stream_with_a_slot_keeps_no_other_waiting,
        &[("TALLY_SOFTCUDA_QUEUE_DEPTH", "8")],
        &welcome(),
        |device| one_is_full(device, 2),
        |core| core.ends(0),
    );
}

#[test]
fn a_full_stream_without_a_slot_keeps_no_other_waiting() {
    both_under(
        a_full_stream_without_a_slot_keeps_no_other_waiting,
        &[("TALLY_SOFTCUDA_QUEUE_DEPTH", "8")],
        &welcome(),
        |device| one_is_full(device, SLOTS + 3),
        |core| {
            core.ends(0);
            assert!(core.counters().stream_overflow.load(SeqCst) > 0);
        },
    );
}

/// While memory is freed the driver keeps those waiting who begin a capture, but not those who end one.
#[test]
fn a_capture_ends_while_another_one_cannot_begin() {
    both(
        a_capture_ends_while_another_one_cannot_begin,
        &welcome(),
        |device| {
            const THREAD_LOCAL: i32 = 1;
            let [held, captured, other] = [(); 3].map(|()| device.stream(1));
            let (words, memory, mut graph) = (device.words(), device.memory(1), null_mut());
            let (cells, steps) = (device.cells(2), device.cells(2));
            // SAFETY: a stream of ours.
            ok(unsafe { (device.cuda.cuStreamBeginCapture_v2)(captured, THREAD_LOCAL) });
            device.step(&steps, [2, 1, 1], captured, 1, 0);
            let params = [cells.data, cells.counts, words.as_ptr() as u64];
            ok(device.launch(device.function("later"), [2, 1, 1], 1, held, &params));
            wait_for(&words[0], 1);
            let threads = [device.clone(), device.clone()];
            let other = other as usize;
            let [freeing, beginning] = {
                let [freeing, beginning] = threads;
                let freeing = std::thread::spawn(move || {
                    freeing.enter();
                    // SAFETY: memory of ours.
                    ok(unsafe { (freeing.cuda.cuMemFree_v2)(memory) });
                });
                std::thread::sleep(THERE);
                let beginning = std::thread::spawn(move || {
                    let mut graph = null_mut();
                    beginning.enter();
                    // SAFETY: a stream of ours, a valid out-pointer.
                    unsafe {
                        let other = other as Ptr;
                        ok((beginning.cuda.cuStreamBeginCapture_v2)(other, THREAD_LOCAL));
                        ok((beginning.cuda.cuStreamEndCapture)(other, &mut graph));
                    }
                });
                [freeing, beginning]
            };
            std::thread::sleep(THERE);
            assert!(!freeing.is_finished() && !beginning.is_finished());
            // SAFETY: a stream of ours, a valid out-pointer.
            ok(unsafe { (device.cuda.cuStreamEndCapture)(captured, &mut graph) });
            words[1].store(1, SeqCst);
            freeing.join().unwrap();
            beginning.join().unwrap();
            device.step(&steps, [2, 1, 1], captured, 2, 0);
            device.sync(captured);
            device.check_steps(&steps, &[2]);
        },
        |core| core.ends(0),
    );
}

/// Behind a launch of which nothing was issued, in parts or whole, the one before it is still the last one.
#[test]
fn a_graph_that_cannot_go_in_parts_goes_whole_behind_the_parts_before_it() {
    both_under(
        a_graph_that_cannot_go_in_parts_goes_whole_behind_the_parts_before_it,
        // Behind four parts of the first launch.
        &[("TALLY_SOFTCUDA_FAULT_GRAPH", "5")],
        &welcome(),
        |device| {
            device.warm_up();
            let [a, refused, b, full] = [(); 4].map(|()| device.stream(1));
            let rounds = Rounds::new(device, a, 4);
            let (words, copies) = (device.words(), device.memory(2));
            assert_eq!(ask("go"), "on");
            launch(device, rounds.exec, a);
            // A thread that the driver keeps waiting: no launch is made in parts meanwhile.
            // SAFETY: a stream and a word of ours.
            ok(unsafe { (device.cuda.cuStreamWaitValue32_v2)(full, words.as_ptr() as u64, 1, 0) });
            let copied = Arc::new(AtomicU32::new(0));
            let (mine, count, stream) = (device.clone(), copied.clone(), full as usize);
            let filling = std::thread::spawn(move || {
                mine.enter();
                for _ in 0..2_000 {
                    let copy = mine.cuda.cuMemcpyDtoDAsync_v2;
                    // SAFETY: memory and a stream of ours.
                    ok(unsafe { copy(copies, copies + 4, 4, stream as Ptr) });
                    count.fetch_add(1, SeqCst);
                }
            });
            loop {
                let before = copied.load(SeqCst);
                std::thread::sleep(THERE);
                if before > 0 && copied.load(SeqCst) == before {
                    break;
                }
            }
            assert!(!filling.is_finished(), "the stream is not full");
            // SAFETY: a graph and a stream of ours.
            assert_eq!(unsafe { (device.cuda.cuGraphLaunch)(rounds.exec, refused) }, 719);
            launch(device, rounds.exec, b);
            assert_eq!(ask("launched"), "look");
            // SAFETY: a stream of ours.
            assert_eq!(unsafe { (device.cuda.cuStreamQuery)(b) }, 600, "it waits");
            words[0].store(1, SeqCst);
            filling.join().unwrap();
            say("held");
            [a, b].iter().for_each(|stream| device.sync(*stream));
            rounds.check(device, 2);
        },
        |core| {
            core.warm_up("step");
            core.expect("go");
            in_parts_of(core, 1);
            core.closed();
            core.say("on");
            core.expect("launched");
            let c = core.counters();
            let [chained, degraded] = [&c.graph_chained, &c.degraded].map(|n| n.load(SeqCst));
            assert_eq!((chained, degraded, c.failed.load(SeqCst)), (1, 2, 1));
            // It would have ended by then.
            std::thread::sleep(Duration::from_millis(300));
            core.say("look");
            core.expect("held");
            core.ask_to_yield(false);
            core.ends(0);
        },
    );
}
