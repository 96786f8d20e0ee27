//! A high-priority program stays on the GPU behind its waits, and only there.

use crate::common::PATIENCE;
use crate::governor::Governor;
use crate::program::{Device, Ptr, ask, ok, say};
use crate::{both, both_under, welcome};
use std::ptr::null_mut;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::layout::report_state;
use tally_ipc::wire::{SharingMode, Welcome};

const GRID: [u32; 3] = [2, 1, 1];
/// Long enough to be still running when it is waited for.
const WORK: u32 = 40_000;
/// Launches that linger at once, at most.
const MOST: u64 = 16;

/// Settings of a high-priority client in sharing mode `timeslice`.
pub fn taking_turns(linger_us: u32) -> Welcome {
    Welcome {
        high_priority: true,
        sharing: SharingMode::TimeSlice { slice_us: 0, shared_us: 0, linger_us },
        ..welcome()
    }
}

/// How often the program had lingered when it was warm.
static BEFORE: AtomicU64 = AtomicU64::new(0);

/// How often the program lingered since, by the shim's account.
pub fn count() -> u64 {
    ask("count").parse::<u64>().unwrap() - BEFORE.load(SeqCst)
}

/// Until nothing lingers: a further one might be left out.
pub fn settle(device: &Device) {
    // SAFETY: no arguments.
    ok(unsafe { (device.cuda.cuCtxSynchronize)() });
}

/// Answer [`count`] until the program has said all.
pub fn counting(core: &mut Governor) {
    loop {
        match core.hear().as_str() {
            "count" => {
                let count = core.counters().lingered.load(SeqCst);
                core.say(&count.to_string());
            }
            "alone" => {
                core.set_neighbours(0);
                core.say("yes");
            }
            "together" => {
                core.set_neighbours(1);
                core.say("yes");
            }
            "end" => break,
            other => panic!("the program says {other}"),
        }
    }
}

/// Until it lingers: its kernels are loaded behind a wait after which nothing runs.
pub fn warm_up(device: &Device, stream: Ptr) {
    let before = count();
    let start = std::time::Instant::now();
    while count() == before {
        assert!(start.elapsed() < PATIENCE, "it does not linger");
        run(device, stream);
        device.sync(stream);
        settle(device);
    }
    BEFORE.fetch_add(count(), SeqCst);
}

fn run(device: &Device, stream: Ptr) {
    device.step(&device.cells(2), GRID, stream, 1, WORK);
}

#[test]
fn lingers_once_behind_each_launch_that_is_waited_for() {
    both(
        lingers_once_behind_each_launch_that_is_waited_for,
        &taking_turns(50),
        |device| {
            let (stream, event) = (device.stream(1), device.event());
            warm_up(device, null_mut());
            let cells = device.cells(2);
            device.step(&cells, GRID, stream, 1, WORK);
            device.sync(stream);
            assert_eq!(count(), 1, "a stream");
            device.sync(stream);
            assert_eq!(count(), 1, "nothing was launched since");

            settle(device);
            device.step(&cells, GRID, stream, 2, WORK);
            // SAFETY: handles of ours.
            unsafe {
                ok((device.cuda.cuEventRecord)(event, stream));
                ok((device.cuda.cuEventSynchronize)(event));
            }
            assert_eq!(count(), 2, "an event");

            settle(device);
            device.step(&cells, GRID, null_mut(), 3, WORK);
            device.check_steps(&cells, &[1, 2, 3]);
            assert_eq!(count(), 3, "a copy to the host");

            settle(device);
            device.step(&cells, GRID, stream, 4, WORK);
            let mut word = 0_u32;
            let to = (&raw mut word).cast();
            // SAFETY: a word for a word of ours.
            ok(unsafe { (device.cuda.cuMemcpyDtoHAsync_v2)(to, cells.counts, 4, stream) });
            assert_eq!(count(), 4, "the beginning of a copy to the host");
            device.sync(stream);
            assert_eq!((count(), word), (4, 4), "waiting for its end");

            settle(device);
            device.step(&cells, GRID, stream, 5, WORK);
            // SAFETY: a stream of ours.
            while unsafe { (device.cuda.cuStreamQuery)(stream) } != 0 {}
            device.step(&cells, GRID, stream, 6, WORK);
            settle(device);
            assert_eq!(count(), 4, "asking, and a wait for the whole context");
            device.check_steps(&cells, &[1, 2, 3, 4, 5, 6]);
            say("end");
        },
        |core| {
            counting(core);
            assert_eq!(core.region().report.linger.load(SeqCst), report_state::ACTIVE);
        },
    );
}

#[test]
fn behind_the_legacy_stream_only_while_no_other_blocking_one_has_work() {
    both(
        behind_the_legacy_stream_only_while_no_other_blocking_one_has_work,
        &taking_turns(50),
        |device| {
            let blocking = device.stream(0);
            warm_up(device, null_mut());
            let cells = device.cells(2);
            device.step(&cells, GRID, null_mut(), 1, WORK);
            device.sync(null_mut());
            assert_eq!(count(), 1, "the other one is idle");
            settle(device);
            device.step(&cells, GRID, null_mut(), 2, WORK);
            device.step(&cells, GRID, blocking, 3, WORK);
            device.sync(null_mut());
            assert_eq!(count(), 1, "the other one has work");
            device.sync(blocking);
            device.check_steps(&cells, &[1, 2, 3]);
            say("end");
        },
        counting,
    );
}

#[test]
fn captures_and_contexts_do_not_meet_it() {
    both(
        captures_and_contexts_do_not_meet_it,
        &taking_turns(50),
        |device| {
            let (captured, other) = (device.stream(1), device.stream(1));
            warm_up(device, null_mut());
            run(device, other);
            device.sync(other);
            assert_eq!(count(), 1);
            settle(device);
            let cells = device.cells(2);
            let (mut graph, mut exec) = (null_mut(), null_mut());
            // Relaxed: this thread may wait for other streams meanwhile.
            // SAFETY: handles of ours, valid out-pointers.
            unsafe {
                ok((device.cuda.cuStreamBeginCapture_v2)(captured, 2));
                device.step(&cells, GRID, captured, 7, WORK);
                device.step(&cells, GRID, other, 3, WORK);
                device.sync(other);
                assert_eq!(count(), 1, "not while anything is captured");
                ok((device.cuda.cuStreamEndCapture)(captured, &mut graph));
                ok((device.cuda.cuGraphInstantiateWithFlags)(&mut exec, graph, 0));
                ok((device.cuda.cuGraphLaunch)(exec, captured));
            }
            device.sync(captured);
            assert_eq!(count(), 2);
            device.check_steps(&cells, &[3, 7]);

            device.destroy_context();
            device.new_context();
            let stream = device.stream(0);
            warm_up(device, stream);
            let cells = device.cells(2);
            device.step(&cells, GRID, stream, 1, WORK);
            device.sync(stream);
            assert_eq!(count(), 1, "in the next context");
            device.check_steps(&cells, &[1]);
            say("end");
        },
        counting,
    );
}

#[test]
fn two_that_wait_for_one_launch_linger_once() {
    both(
        two_that_wait_for_one_launch_linger_once,
        &taking_turns(50),
        |device| {
            warm_up(device, null_mut());
            let words = device.words();
            let at = std::ptr::from_ref(words) as u64;
            let (stream, cells) = (device.stream(1), device.cells(GRID[0]));
            let params = [cells.data, cells.counts, at];
            ok(device.launch(device.function("later"), GRID, 1, stream, &params));
            let start = std::sync::Arc::new(std::sync::Barrier::new(8));
            let all: Vec<_> = (0..8)
                .map(|_| {
                    let (mine, stream, start) = (device.clone(), stream as usize, start.clone());
                    std::thread::spawn(move || {
                        mine.enter();
                        start.wait();
                        mine.sync(stream as Ptr);
                    })
                })
                .collect();
            std::thread::sleep(std::time::Duration::from_millis(50));
            words[1].store(1, SeqCst);
            all.into_iter().for_each(|waiting| waiting.join().unwrap());
            assert_eq!(count(), 1);
            say("end");
        },
        counting,
    );
}

#[test]
fn never_more_than_sixteen() {
    both_under(
        never_more_than_sixteen,
        // A queue for each stream.
        &[("CUDA_DEVICE_MAX_CONNECTIONS", "32")],
        &taking_turns(50),
        |device| {
            let words = device.words();
            let at = std::ptr::from_ref(words) as u64;
            warm_up(device, null_mut());
            let lingering = count;
            let all: Vec<_> = (1..=MOST + 1)
                .map(|n| {
                    // Runs until the host says so.
                    let (stream, cells) = (device.stream(1), device.cells(GRID[0]));
                    let params = [cells.data, cells.counts, at];
                    ok(device.launch(device.function("later"), GRID, 1, stream, &params));
                    let (mine, stream) = (device.clone(), stream as usize);
                    let waiting = std::thread::spawn(move || {
                        mine.enter();
                        mine.sync(stream as Ptr);
                    });
                    let start = std::time::Instant::now();
                    while n <= MOST && lingering() < n {
                        assert!(start.elapsed() < PATIENCE, "it does not linger");
                        std::thread::yield_now();
                    }
                    waiting
                })
                .collect();
            // However long it takes to get there: it must not be more by then.
            std::thread::sleep(std::time::Duration::from_millis(100));
            assert_eq!(lingering(), MOST);
            words[1].store(1, SeqCst);
            all.into_iter().for_each(|waiting| waiting.join().unwrap());
            assert_eq!(lingering(), MOST, "the last was left out");
            say("end");
        },
        counting,
    );
}

#[test]
fn only_who_is_told_to() {
    both(
        only_who_is_told_to,
        &taking_turns(0),
        |device| {
            run(device, null_mut());
            device.sync(null_mut());
            assert_eq!(count(), 0);
            say("end");
        },
        |core| {
            counting(core);
            assert_eq!(core.region().report.linger.load(SeqCst), report_state::UNUSED);
        },
    );
}

#[test]
fn not_at_best_effort() {
    both(
        not_at_best_effort,
        &Welcome { high_priority: false, ..taking_turns(50) },
        |device| {
            run(device, null_mut());
            device.sync(null_mut());
            assert_eq!(count(), 0);
            say("end");
        },
        counting,
    );
}

#[test]
fn alone_it_leaves_at_once() {
    both(
        alone_it_leaves_at_once,
        &taking_turns(50),
        |device| {
            warm_up(device, null_mut());
            for (company, lingered) in [("alone", 0), ("together", 1), ("alone", 1)] {
                ask(company);
                run(device, null_mut());
                device.sync(null_mut());
                assert_eq!(count(), lingered, "{company}");
            }
            say("end");
        },
        counting,
    );
}

/// Streams that wait for a word, which a stream sets that is used only then.
const WAITING: usize = 7;

/// The program waits for one of [`WAITING`] streams, so that it might linger behind that. All of them wait for what
/// comes into one more stream meanwhile, for which there is a hardware queue.
fn the_last_queue(device: &mut Device, are_launched: bool) {
    let streams: Vec<usize> = (0..WAITING).map(|_| device.stream(1) as usize).collect();
    warm_up(device, streams[0] as Ptr);
    let words = device.words();
    let at = words.as_ptr() as u64;
    let cells: Vec<_> = streams.iter().map(|_| device.cells(2)).collect();
    for (i, stream) in streams.iter().enumerate() {
        let stream = *stream as Ptr;
        // SAFETY: a stream and a word of ours.
        ok(unsafe { (device.cuda.cuStreamWaitValue32_v2)(stream, at, 1, 0) });
        if are_launched || i == 0 {
            device.step(&cells[i], GRID, stream, 1, 0);
        }
    }
    let late = device.stream(1) as usize;
    let mine = device.clone();
    let setting = std::thread::spawn(move || {
        mine.enter();
        // Until the other thread waits.
        std::thread::sleep(std::time::Duration::from_millis(100));
        // SAFETY: as above.
        ok(unsafe { (mine.cuda.cuStreamWriteValue32_v2)(late as Ptr, at, 1, 0) });
    });
    device.sync(streams[0] as Ptr);
    setting.join().unwrap();
    assert_eq!(count(), 0);
    streams.iter().for_each(|stream| device.sync(*stream as Ptr));
    device.check_steps(&cells[0], &[1]);
    say("end");
}

#[test]
fn the_last_queue_is_left_to_a_stream_that_is_used_later() {
    both(
        the_last_queue_is_left_to_a_stream_that_is_used_later,
        &taking_turns(50),
        |device| the_last_queue(device, true),
        counting,
    );
}

#[test]
fn streams_in_which_nothing_is_launched_have_queues_too() {
    both(
        streams_in_which_nothing_is_launched_have_queues_too,
        &taking_turns(50),
        |device| the_last_queue(device, false),
        counting,
    );
}

/// Freeing memory waits for all that runs, and the driver keeps launches waiting meanwhile, but not those who wait for
/// a stream: what runs may wait for one of these.
#[test]
fn a_wait_ends_while_another_thread_frees_memory() {
    both(
        a_wait_ends_while_another_thread_frees_memory,
        &taking_turns(50),
        |device| {
            let (held, stream) = (device.stream(1), device.stream(1));
            warm_up(device, stream);
            let memory = device.memory(1);
            let all = [held, stream].map(|of| (of, device.words(), device.cells(GRID[0])));
            for (stream, words, cells) in &all {
                let params = [cells.data, cells.counts, words.as_ptr() as u64];
                ok(device.launch(device.function("later"), GRID, 1, *stream, &params));
                crate::program::wait_for(&words[0], 1);
            }
            let mine = device.clone();
            let freeing = std::thread::spawn(move || {
                mine.enter();
                // SAFETY: memory of ours.
                ok(unsafe { (mine.cuda.cuMemFree_v2)(memory) });
            });
            // Until it is in the driver.
            std::thread::sleep(std::time::Duration::from_millis(100));
            let [(_, first, _), (_, second, _)] = all;
            let ending = std::thread::spawn(move || {
                // Until the other thread waits.
                std::thread::sleep(std::time::Duration::from_millis(200));
                second[1].store(1, SeqCst);
            });
            device.sync(stream);
            assert_eq!(count(), 0, "it would have been kept waiting");
            first[1].store(1, SeqCst);
            freeing.join().unwrap();
            ending.join().unwrap();
            say("end");
        },
        counting,
    );
}

#[test]
fn a_thread_ends_while_another_one_frees_memory() {
    both(
        a_thread_ends_while_another_one_frees_memory,
        &taking_turns(50),
        |device| {
            let held = device.stream(1);
            assert_eq!(ask("grant"), "granted");
            let (words, memory) = (device.words(), device.memory(1));
            let (cells, steps) = (device.cells(GRID[0]), device.cells(2));
            let params = [cells.data, cells.counts, words.as_ptr() as u64];
            ok(device.launch(device.function("later"), GRID, 1, held, &params));
            crate::program::wait_for(&words[0], 1);
            let (mine, other) = (device.clone(), device.clone());
            let (launched, goes_on) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
            let ending = std::thread::spawn(move || {
                mine.enter();
                mine.per_thread_launch().step(&steps, GRID, null_mut(), 1, 0);
                launched.0.send(()).unwrap();
                goes_on.1.recv().unwrap();
            });
            launched.1.recv().unwrap();
            let freeing = std::thread::spawn(move || {
                other.enter();
                // SAFETY: memory of ours.
                ok(unsafe { (other.cuda.cuMemFree_v2)(memory) });
            });
            std::thread::sleep(std::time::Duration::from_millis(100));
            goes_on.0.send(()).unwrap();
            ending.join().unwrap();
            words[1].store(1, SeqCst);
            freeing.join().unwrap();
            device.check_steps(&steps, &[1]);
            say("end");
        },
        |core| {
            core.expect("grant");
            // Behind launches that nobody asks for no events are recorded, but behind a thread's last.
            core.grant_all();
            core.say("granted");
            core.expect("end");
        },
    );
}
