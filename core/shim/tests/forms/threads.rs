//! Threads that the driver keeps waiting, and others that go on, as without the shim.

use crate::program::{Device, Ptr, ok, wait_for};
use crate::{both, both_under, welcome};
use std::ptr::null_mut;
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
