//! Who waits for whom as on a GPU: hardware queues and their depth, launches of one exec,
//! the legacy stream, and calls that keep other threads' calls waiting.
#![allow(missing_docs)]

mod common;

use common::cuda::*;
use common::{on_device, on_device_with};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// How long something may take to happen.
const SOON: Duration = Duration::from_secs(60);

const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
const DEPTH: &str = "TALLY_SOFTCUDA_QUEUE_DEPTH";

const UNTIMED: u32 = 2;

fn urgent() -> CUstream {
    let mut stream = null_mut();
    // SAFETY: a valid out pointer.
    unsafe { sys::cuStreamCreateWithPriority(&mut stream, 1, -3) }.result().unwrap();
    stream
}

/// Whether work put into `stream` now is done although nothing else moves.
fn passes(stream: CUstream) -> bool {
    let word = pinned_word();
    write_value(stream, word, 1);
    let began = Instant::now();
    while word.load(SeqCst) == 0 && began.elapsed() < STILL {
        std::thread::sleep(Duration::from_micros(100));
    }
    word.load(SeqCst) == 1
}

/// Waits until work in the stream has been done.
fn must_pass(stream: CUstream) {
    let word = pinned_word();
    write_value(stream, word, 1);
    await_word(word, 1);
}

#[test]
fn a_queue_of_many_streams_waits_for_its_first_entry() {
    on_device_with(
        "a_queue_of_many_streams_waits_for_its_first_entry",
        4,
        &[(CONNECTIONS, "1")],
        || {
            let context = CudaContext::new(0).unwrap();
            let (data, one) = (zeros(1), 1u32.to_ne_bytes());
            let f = kept(&context, "affine");
            let satisfied = pinned_word();
            satisfied.store(1, SeqCst);
            for how in 0..6 {
                let (first, second, high) = (stream(1), stream(1), urgent());
                let spinner = Spinner::start(&context, first);
                match how {
                    0 => {}
                    1 => record(event(UNTIMED), first),
                    2 => record(event(0), first),
                    3 => write_value(first, pinned_word(), 1),
                    4 => wait_value(first, satisfied, 1),
                    _ => launch(first, f, [1; 3], [1; 3], &[&data.to_ne_bytes(), &one, &one, &one]),
                }
                if how < 2 {
                    must_pass(second);
                } else {
                    assert!(!passes(second), "way {how} keeps nobody waiting");
                }
                if how < 2 {
                    must_pass(high);
                } else {
                    assert!(!passes(high), "way {how}: another priority has no queue of its own");
                }
                spinner.end();
                [second, first, high].into_iter().for_each(synchronize);
            }
        },
    );
}

#[test]
fn two_queues_are_given_out_in_turn() {
    on_device_with("two_queues_are_given_out_in_turn", 4, &[(CONNECTIONS, "2")], || {
        let context = CudaContext::new(0).unwrap();
        let streams: Vec<CUstream> = (0..6).map(|_| stream(1)).collect();
        let spinner = Spinner::start(&context, streams[0]);
        record(event(0), streams[0]);
        for (i, &stream) in streams.iter().enumerate().skip(1) {
            if i % 2 == 1 {
                must_pass(stream);
            } else {
                assert!(!passes(stream), "stream {i}");
            }
        }
        spinner.end();
        streams.iter().for_each(|&stream| synchronize(stream));
    });
}

#[test]
fn one_blocked_stream_of_many_queues_blocks_no_other() {
    on_device("one_blocked_stream_of_many_queues_blocks_no_other", 4, || {
        let context = CudaContext::new(0).unwrap();
        let streams: Vec<CUstream> = (0..41).map(|_| stream(1)).collect();
        for blocked in [0, 9, 40] {
            let spinner = Spinner::start(&context, streams[blocked]);
            record(event(0), streams[blocked]);
            let others = streams.iter().enumerate().filter(|(i, _)| *i != blocked);
            others.clone().for_each(|(_, &stream)| must_pass(stream));
            spinner.end();
            streams.iter().for_each(|&stream| synchronize(stream));
        }
        // Eight of them leave no queue to the others.
        let spinners: Vec<_> = streams[..8]
            .iter()
            .map(|&stream| {
                wait_value(stream, pinned_word(), 0);
                let gate = pinned_word();
                wait_value(stream, gate, 1);
                gate
            })
            .collect();
        assert!(!passes(streams[20]));
        spinners.iter().for_each(|gate| gate.store(1, SeqCst));
        streams.iter().for_each(|&stream| synchronize(stream));
    });
}

#[test]
fn a_full_queue_makes_the_launch_wait() {
    on_device_with("a_full_queue_makes_the_launch_wait", 2, &[(DEPTH, "16")], || {
        let context = CudaContext::new(0).unwrap();
        let f = kept(&context, "affine");
        let (held, other, gate) = (stream(1), stream(1), pinned_word());
        let (data, one) = (zeros(1), 1u32.to_ne_bytes());
        let add = || launch(held, f, [1; 3], [1; 3], &[&data.to_ne_bytes(), &one, &one, &one]);
        wait_value(held, gate, 1);
        let untimed = event(UNTIMED);
        for _ in 0..15 {
            add();
            (0..5).for_each(|_| record(untimed, held));
        }
        let (launched, began) = (AtomicBool::new(false), AtomicBool::new(false));
        let (held_too, f_too) = (held as usize, f as usize);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                context.bind_to_thread().unwrap();
                began.store(true, SeqCst);
                let params: [&[u8]; 4] = [&data.to_ne_bytes(), &one, &one, &one];
                launch(held_too as CUstream, f_too as sys::CUfunction, [1; 3], [1; 3], &params);
                launched.store(true, SeqCst);
            });
            while !began.load(SeqCst) {
                std::thread::yield_now();
            }
            std::thread::sleep(STILL);
            assert!(!launched.load(SeqCst), "a queue of 16 took 17 entries");
            must_pass(other);
            assert_eq!(query(held), CUresult::CUDA_ERROR_NOT_READY);
            // SAFETY: an event of ours.
            assert_eq!(unsafe { sys::cuEventQuery(untimed) }, CUresult::CUDA_ERROR_NOT_READY);
            gate.store(1, SeqCst);
        });
        synchronize(held);
        assert_eq!(fetch(data, 1), [16]);
    });
}

/// What a graph's host node counts.
static INSIDE: AtomicU32 = AtomicU32::new(0);
static OVERLAPS: AtomicU32 = AtomicU32::new(0);
static RUNS: AtomicU32 = AtomicU32::new(0);

extern "C" fn alone(_: *mut c_void) {
    if INSIDE.fetch_add(1, SeqCst) != 0 {
        OVERLAPS.fetch_add(1, SeqCst);
    }
    std::thread::sleep(Duration::from_micros(100));
    INSIDE.fetch_sub(1, SeqCst);
    RUNS.fetch_add(1, SeqCst);
}

#[test]
fn launches_of_one_exec_come_one_after_another() {
    on_device("launches_of_one_exec_come_one_after_another", 2, || {
        let context = CudaContext::new(0).unwrap();
        let (mut graph, mut node, mut exec) = (null_mut(), null_mut(), null_mut());
        let host = sys::CUDA_HOST_NODE_PARAMS { fn_: Some(alone), userData: null_mut() };
        // SAFETY: valid pointers, and handles that these calls gave.
        unsafe {
            sys::cuGraphCreate(&mut graph, 0).result().unwrap();
            sys::cuGraphAddHostNode(&mut node, graph, std::ptr::null(), 0, &host).result().unwrap();
            sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result().unwrap();
        }
        let exec = exec as usize;
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    context.bind_to_thread().unwrap();
                    let stream = stream(1);
                    for _ in 0..100 {
                        // SAFETY: an exec and a stream of ours.
                        unsafe { sys::cuGraphLaunch(exec as sys::CUgraphExec, stream) }
                            .result()
                            .unwrap();
                    }
                    synchronize(stream);
                });
            }
        });
        assert_eq!((RUNS.load(SeqCst), OVERLAPS.load(SeqCst)), (300, 0));
    });
}

#[test]
fn the_legacy_stream_is_a_barrier_and_asking_it_is_none() {
    on_device("the_legacy_stream_is_a_barrier_and_asking_it_is_none", 4, || {
        let context = CudaContext::new(0).unwrap();
        let legacy = null_mut();
        let satisfied = pinned_word();
        satisfied.store(1, SeqCst);
        let (data, one) = (zeros(1), 1u32.to_ne_bytes());
        let f = kept(&context, "affine");
        for how in 0..6 {
            let (first, second, free) = (stream(0), stream(0), stream(1));
            synchronize(legacy);
            let spinner = Spinner::start(&context, first);
            assert_eq!(query(legacy), CUresult::CUDA_ERROR_NOT_READY, "a blocking stream is busy");
            match how {
                0 => {}
                1 => record(event(UNTIMED), legacy),
                2 => record(event(0), legacy),
                3 => write_value(legacy, pinned_word(), 1),
                4 => wait_value(legacy, satisfied, 1),
                _ => launch(legacy, f, [1; 3], [1; 3], &[&data.to_ne_bytes(), &one, &one, &one]),
            }
            if how == 0 {
                must_pass(second);
            } else {
                assert!(!passes(second), "way {how} is no barrier");
            }
            must_pass(free);
            spinner.end();
            synchronize(second);
            synchronize(legacy);
            assert_eq!(query(legacy), CUresult::CUDA_SUCCESS);
        }
    });
}

/// Makes `call` again and again in another thread while a call that may keep it waiting is
/// under way, until one of them takes long; `release` then ends the other call, and so this.
/// `false` if none ever does.
fn is_kept_waiting(
    context: &Arc<CudaContext>,
    call: &(dyn Fn() + Sync),
    release: impl Fn(),
) -> bool {
    let (calls, stop) = (AtomicU32::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| {
            context.bind_to_thread().unwrap();
            while !stop.load(SeqCst) {
                call();
                calls.fetch_add(1, SeqCst);
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        let (began, mut last, mut since) = (Instant::now(), u32::MAX, Instant::now());
        let mut waits = false;
        while !waits && began.elapsed() < SOON {
            let now = calls.load(SeqCst);
            if now != last {
                (last, since) = (now, Instant::now());
            }
            waits = since.elapsed() > Duration::from_millis(200);
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, SeqCst);
        release();
        caller.join().unwrap();
        waits
    })
}

#[test]
fn calls_that_load_or_free_keep_some_calls_of_others_waiting() {
    on_device("calls_that_load_or_free_keep_some_calls_of_others_waiting", 4, || {
        let context = CudaContext::new(0).unwrap();
        let other = stream(1);
        let (ready, quick) = (event(UNTIMED), kept(&context, "affine"));
        let (ready, quick, other) = (ready as usize, quick as usize, other as usize);
        let (data, one) = (zeros(1), 1u32.to_ne_bytes());
        type Call<'a> = (&'a str, bool, Box<dyn Fn() + Sync + 'a>);
        let calls: Vec<Call<'_>> = vec![
            (
                "event query",
                false,
                Box::new(|| {
                    // SAFETY: an event of ours.
                    let _ = unsafe { sys::cuEventQuery(ready as CUevent) };
                }),
            ),
            (
                "stream query",
                false,
                Box::new(|| {
                    let _ = query(other as CUstream);
                }),
            ),
            ("event record", true, Box::new(|| record(ready as CUevent, other as CUstream))),
            (
                "event",
                true,
                Box::new(|| {
                    event(0);
                }),
            ),
            (
                "stream",
                true,
                Box::new(|| {
                    // SAFETY: a stream just made, not used again.
                    unsafe { sys::cuStreamDestroy_v2(stream(1)) }.result().unwrap();
                }),
            ),
            (
                "launch",
                true,
                Box::new(|| {
                    let params: [&[u8]; 4] = [&data.to_ne_bytes(), &one, &one, &one];
                    launch(other as CUstream, quick as sys::CUfunction, [1; 3], [1; 3], &params);
                }),
            ),
            (
                "begin of a capture",
                true,
                Box::new(|| {
                    let (stream, mut graph) = (stream(1), null_mut());
                    let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
                    // SAFETY: a stream of ours, and a valid out pointer.
                    unsafe {
                        sys::cuStreamBeginCapture_v2(stream, relaxed).result().unwrap();
                        sys::cuStreamEndCapture(stream, &mut graph).result().unwrap();
                    }
                }),
            ),
            (
                "occupancy",
                true,
                Box::new(|| {
                    let mut blocks = 0;
                    // SAFETY: a function of ours and a valid out pointer.
                    unsafe {
                        sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                            &mut blocks,
                            quick as sys::CUfunction,
                            32,
                            0,
                        )
                    }
                    .result()
                    .unwrap();
                }),
            ),
        ];
        for (name, waits, call) in &calls {
            let (running, memory) = (stream(1), zeros(1));
            let spinner = Spinner::start(&context, running);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    context.bind_to_thread().unwrap();
                    // SAFETY: memory of ours, not used again.
                    unsafe { sys::cuMemFree_v2(memory) }.result().unwrap();
                });
                let release = || {
                    // Beside a call that is kept waiting, so that the other has begun.
                    if !waits {
                        (0..100).for_each(|_| call());
                    }
                    spinner.end();
                };
                let create = || {
                    event(0);
                };
                let waiting: &(dyn Fn() + Sync) = if *waits { call } else { &create };
                assert!(is_kept_waiting(&context, waiting, release), "{name}");
            });
            synchronize(running);
        }
        // Calls that only wait keep nobody waiting.
        for (name, _, call) in &calls {
            let running = stream(1);
            let spinner = Spinner::start(&context, running);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    context.bind_to_thread().unwrap();
                    // SAFETY: no preconditions.
                    unsafe { sys::cuCtxSynchronize() }.result().unwrap();
                });
                let began = Instant::now();
                call();
                assert!(began.elapsed() < SOON, "{name} waited");
                spinner.end();
            });
        }
    });
}

#[test]
fn launches_return_when_kernels_have_ended_if_asked_to() {
    let env = [("CUDA_LAUNCH_BLOCKING", "1")];
    on_device_with("launches_return_when_kernels_have_ended_if_asked_to", 2, &env, || {
        let context = CudaContext::new(0).unwrap();
        let spinner = Spinner::new(&context);
        let stream = stream(1) as usize;
        let f = spinner.f as usize;
        std::thread::scope(|scope| {
            let launching = scope.spawn(|| {
                context.bind_to_thread().unwrap();
                let at = [address(spinner.until), address(pinned_word()), spinner.seen];
                let at = at.map(u64::to_ne_bytes);
                let params: [&[u8]; 3] = [&at[0], &at[1], &at[2]];
                launch(stream as CUstream, f as sys::CUfunction, [1; 3], [1; 3], &params);
                query(stream as CUstream)
            });
            std::thread::sleep(STILL);
            assert!(!launching.is_finished());
            spinner.end();
            assert_eq!(launching.join().unwrap(), CUresult::CUDA_SUCCESS);
        });
    });
}
