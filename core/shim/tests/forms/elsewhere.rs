//! Events that are recorded anew where the shim does not learn of it, and launches made while another context is
//! current.

use crate::governor::Governor;
use crate::program::{Device, Ptr, ok};
use crate::{both, both_under, welcome};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::ring::Answer;

/// More than run at once.
const BLOCKS: u32 = 64;
/// Some tens of milliseconds a launch.
const LONG: u32 = 3_000;
const ROUNDS: u32 = 4;

/// Kernels run preemptible from now on.
fn preempts(core: &mut Governor) {
    core.warm_up("step");
    core.policy(|_, name| if name == "step" { Answer::Preemptible(0) } else { Answer::Whole });
}

/// A graph that records the event.
fn recording(device: &Device, event: Ptr) -> Ptr {
    let (mut graph, mut node, mut exec) = (null_mut(), null_mut(), null_mut());
    let cuda = &device.cuda;
    // SAFETY: valid out-pointers, and what they were filled with.
    unsafe {
        ok((cuda.cuGraphCreate)(&mut graph, 0));
        ok((cuda.cuGraphAddEventRecordNode)(&mut node, graph, std::ptr::null(), 0, event));
        ok((cuda.cuGraphInstantiateWithFlags)(&mut exec, graph, 0));
    }
    exec
}

/// The event stands for the graph by then: a wait for it says nothing of the launch that it was recorded behind first,
/// whose stream goes, and whose slot the next stream gets.
#[test]
fn an_event_that_a_graph_records_anew_proves_nothing_of_the_launch_before() {
    both(
        an_event_that_a_graph_records_anew_proves_nothing_of_the_launch_before,
        &welcome(),
        |device| {
            device.warm_up();
            let event = device.event();
            let (graph, other) = (recording(device, event), device.stream(1));
            let (first, second) = (device.cells(BLOCKS), device.cells(BLOCKS));
            let ks: Vec<u32> = (0..ROUNDS).collect();
            for k in &ks {
                let stream = device.stream(1);
                device.step(&first, [BLOCKS, 1, 1], stream, *k, LONG);
                // SAFETY: an event, a graph and streams of ours.
                unsafe {
                    ok((device.cuda.cuEventRecord)(event, stream));
                    ok((device.cuda.cuGraphLaunch)(graph, other));
                    ok((device.cuda.cuEventSynchronize)(event));
                    ok((device.cuda.cuStreamDestroy_v2)(stream));
                }
                std::thread::sleep(std::time::Duration::from_millis(5));
                let stream = device.stream_of_priority(-5);
                device.step(&second, [BLOCKS, 1, 1], stream, *k, LONG);
                device.sync(stream);
                // SAFETY: no arguments; a stream of ours.
                unsafe {
                    ok((device.cuda.cuCtxSynchronize)());
                    ok((device.cuda.cuStreamDestroy_v2)(stream));
                }
            }
            device.check_steps(&first, &ks);
            device.check_steps(&second, &ks);
        },
        |core| {
            preempts(core);
            core.ends(0);
            // A launch for which there is no room yet runs whole.
            let preemptible = core.counters().preemptible.load(SeqCst);
            assert!(preemptible >= u64::from(ROUNDS), "{preemptible}");
        },
    );
}

/// What a launch needs would be made in the context that is current, and be gone with it.
#[test]
fn a_launch_while_another_context_is_current_is_whole() {
    both_under(
        a_launch_while_another_context_is_current_is_whole,
        &[("TALLY_SOFTCUDA_STRICT", "1")],
        &welcome(),
        |device| {
            device.warm_up();
            let (cells, stream, home) = (device.cells(BLOCKS), device.stream(1), device.clone());
            device.new_context();
            for k in 0..3 {
                home.step(&cells, [BLOCKS, 1, 1], stream, k, 10);
                home.sync(stream);
            }
            device.destroy_context();
            home.enter();
            const WORDS: usize = 1 << 16;
            let mine: Vec<u64> = (0..8).map(|_| home.memory(WORDS)).collect();
            mine.iter().for_each(|memory| home.set(*memory, 7, WORDS));
            for k in 3..6 {
                home.step(&cells, [BLOCKS, 1, 1], stream, k, 10);
                home.sync(stream);
            }
            mine.iter().for_each(|memory| home.check_words(*memory, &[7; WORDS]));
            home.check_steps(&cells, &[0, 1, 2, 3, 4, 5]);
        },
        |core| {
            preempts(core);
            core.ends(0);
            assert_eq!(core.counters().preemptible.load(SeqCst), 3);
        },
    );
}
