//! Graphs launched in parts, on the software device: the same memory as launched whole, and what
//! is kept, given up and freed.

mod device;

use device::{BUFFERS, Device, Graph, Ptr, ok};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicUsize};
use tally_preempt::graphs::build::Step;
use tally_preempt::graphs::reason::{GraphState, Reason};
use tally_preempt::graphs::{self, Chain, Making, order};

/// What host nodes did: the order of two of them shows.
static HOST: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn on_host(data: Ptr) {
    HOST.store(HOST.load(SeqCst).wrapping_mul(31).wrapping_add(data as usize), SeqCst);
}

/// A linear congruential generator.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) as usize % n
    }
}

/// A graph with branches: each node comes behind those whose data it needs or overwrites, and
/// behind nothing else, but for nodes that come behind all before them and before all others: there it can be
/// divided. Returns the kernels in it too.
fn branches(device: &Device, seed: u64, nodes: usize) -> (Graph<'_>, u32) {
    let (graph, mut random, mut kernels) = (Graph::new(device), Random(seed), 0);
    let mut writer: Vec<Vec<Ptr>> = vec![Vec::new(); BUFFERS];
    let mut readers: Vec<Vec<Ptr>> = vec![Vec::new(); BUFFERS];
    let mut host: Vec<Ptr> = Vec::new();
    for i in 0..nodes {
        let (to, from) = (random.below(BUFFERS), random.below(BUFFERS));
        let what = random.below(12);
        if what > 9 {
            let mut after = [writer.concat(), readers.concat(), host].concat();
            after.sort_unstable();
            after.dedup();
            let join = vec![graph.empty(&after)];
            (writer, readers) = (vec![join.clone(); BUFFERS], vec![Vec::new(); BUFFERS]);
            host = join;
            continue;
        }
        if what == 9 {
            host = vec![graph.host(&host, on_host, i)];
            continue;
        }
        let mut after = [&writer[to][..], &readers[to]].concat();
        if what != 0 {
            after.extend(&writer[from]);
        }
        after.sort_unstable();
        after.dedup();
        let node = match what {
            0 => graph.fill(&after, to, i as u32),
            1 if from != to => graph.copy(&after, to, from),
            2 => graph.empty(&after),
            _ => {
                kernels += 1;
                graph.mix(&after, to, from, i as u32)
            }
        };
        (writer[to], readers[to]) = (vec![node], Vec::new());
        if what != 0 && from != to {
            readers[from].push(node);
        }
    }
    (graph, kernels)
}

/// The execs of a chain, none of whose kernels is launched by itself.
fn execs(chain: &Chain) -> Vec<usize> {
    let exec = |step: &Step| match step {
        Step::Graph(exec) => *exec,
        Step::Kernel(own) => panic!("{own:?} is no part"),
    };
    chain.steps().iter().map(exec).collect()
}

fn run(device: &Device, execs: &[usize], stream: Ptr) -> (Vec<u32>, usize) {
    device.fill();
    HOST.store(1, SeqCst);
    // Twice: a graph's second launch begins with what its first one left.
    for exec in [execs, execs].concat() {
        device.launch(exec, stream);
    }
    device.sync(stream);
    (device.read(), HOST.load(SeqCst))
}

#[test]
fn parts_do_what_the_whole_does() {
    let device = Device::get();
    let stream = device.stream();
    let mut chains = 0;
    for seed in 0..40 {
        let (graph, kernels) = branches(&device, seed, 4 + 2 * seed as usize);
        let exec = device.instantiate(&graph);
        drop(graph);
        if kernels < 2 {
            assert_eq!(graphs::state(exec), GraphState::Whole(Reason::OneKernel));
            continue;
        }
        assert_eq!(graphs::state(exec), GraphState::Transformable { kernel_nodes: kernels });
        let whole = run(&device, &[exec as usize], stream);
        for size in [1, 3, 10] {
            let chain = graphs::chain(exec, size, Making::AtOnce);
            if kernels <= size {
                assert_eq!(chain.map(|c| execs(&c).len()), Err(Reason::OnePart));
                continue;
            }
            let chain = match chain {
                Err(reason) => {
                    assert_eq!(reason, Reason::OnePart, "it cannot be divided anywhere");
                    continue;
                }
                Ok(chain) => chain,
            };
            chains += 1;
            assert_eq!(run(&device, &execs(&chain), stream), whole, "seed {seed}, size {size}");
        }
        assert_eq!(run(&device, &[exec as usize], stream), whole, "the whole is what it was");
        device.destroy(exec);
    }
    assert!(chains > 60, "only {chains} ways to divide them");
}

#[test]
fn a_diamond_is_transformed_before_and_behind_its_branches() {
    let device = Device::get();
    let stream = device.stream();
    let graph = Graph::new(&device);
    let top = graph.mix(&[], 0, 1, 5);
    let sides: Vec<Ptr> = (1..4).map(|i| graph.mix(&[top], i, 0, 1)).collect();
    let copied = graph.copy(&sides[..1], 4, 1);
    let noted = graph.host(&sides[1..2], on_host, 77);
    let bottom = graph.mix(&[sides[2], copied, noted], 3, 4, 9);
    graph.fill(&[bottom], 0, 3);
    let exec = device.instantiate(&graph);
    let whole = run(&device, &[exec as usize], stream);
    for size in 1..5 {
        let chain = graphs::chain(exec, size, Making::AtOnce).unwrap();
        assert_eq!(run(&device, &execs(&chain), stream), whole, "{size}");
    }
    assert_eq!(graphs::chain(exec, 5, Making::AtOnce).unwrap_err(), Reason::OnePart);
    assert!(
        graphs::chain(exec, 2, Making::AtOnce).is_ok(),
        "too large a size is no lasting reason"
    );
    device.destroy(exec);
}

#[test]
fn a_child_graph_stays_in_one_piece() {
    let device = Device::get();
    let stream = device.stream();
    let child = Graph::line(&device, 5);
    let graph = Graph::new(&device);
    let first = graph.mix(&[], 1, 0, 3);
    let second = graph.mix(&[first], 0, 1, 8);
    let node = graph.child(&[second], &child);
    graph.mix(&[node], 5, 0, 4);
    let exec = device.instantiate(&graph);
    if graphs::state(exec) == GraphState::Whole(Reason::ChildGraph) {
        eprintln!("NOT TESTED: no cuGraphChildGraphNodeGetGraph on this software device");
    } else {
        assert_eq!(graphs::state(exec), GraphState::Transformable { kernel_nodes: 8 });
        let whole = run(&device, &[exec as usize], stream);
        let chain = graphs::chain(exec, 2, Making::AtOnce).unwrap();
        assert_eq!(execs(&chain).len(), 3, "two kernels, the child's five, one");
        assert_eq!(run(&device, &execs(&chain), stream), whole);
    }
    device.destroy(exec);
}

#[test]
fn an_exec_that_changes_is_whole_from_then_on() {
    let device = Device::get();
    let divides = device.divides_graphs();
    let stream = device.stream();
    let graph = Graph::new(&device);
    let first = graph.mix(&[], 0, 1, 1);
    graph.mix(&[first], 0, 2, 2);
    let same = Graph::new(&device);
    let again = same.mix(&[], 0, 1, 100);
    same.mix(&[again], 0, 2, 2);
    let want = {
        let exec = device.instantiate(&same);
        run(&device, &[exec as usize], stream)
    };
    for way in 0..3 {
        let exec = device.instantiate(&graph);
        let parts = if divides {
            execs(&graphs::chain(exec, 1, Making::AtOnce).unwrap())
        } else {
            Vec::new()
        };
        assert_eq!(parts.len(), if divides { 2 } else { 0 });
        let result = match way {
            0 => device.with_mix(0, 1, 100, |p| {
                // SAFETY: objects of ours.
                unsafe { (device.cuda.cuGraphExecKernelNodeSetParams_v2)(exec, first, p) }
            }),
            // SAFETY: objects of ours; a valid out-pointer.
            1 => unsafe { (device.cuda.cuGraphExecUpdate_v2)(exec, same.graph, &mut [0; 3]) },
            // A change that fails may have changed something.
            _ => {
                let other = Graph::line(&device, 3);
                // SAFETY: as above.
                let refused =
                    unsafe { (device.cuda.cuGraphExecUpdate_v2)(exec, other.graph, &mut [0; 3]) };
                assert_eq!(refused, 910, "the driver's answer comes through");
                0
            }
        };
        ok(result);
        if divides {
            assert_eq!(graphs::state(exec), GraphState::Whole(Reason::Changed));
            assert_eq!(graphs::chain(exec, 1, Making::AtOnce).unwrap_err(), Reason::Changed);
        }
        // Once nothing runs, by a thread of the shim's.
        device.await_end(&parts);
        if way < 2 {
            assert_eq!(run(&device, &[exec as usize], stream), want, "way {way}");
        }
        device.destroy(exec);
        assert_eq!(graphs::state(exec), GraphState::Unknown);
    }
}

#[test]
fn parts_live_as_long_as_exec_or_chain() {
    let device = Device::get();
    let stream = device.stream();
    let exec = device.instantiate(&Graph::line(&device, 10));
    let chain = graphs::chain(exec, 4, Making::AtOnce).unwrap();
    let parts = execs(&chain);
    assert_eq!(parts.len(), 3);
    assert_eq!(execs(&graphs::chain(exec, 4, Making::AtOnce).unwrap()), parts, "made once");
    let other = graphs::chain(exec, 5, Making::AtOnce).unwrap();
    assert_eq!(execs(&other).len(), 2);
    device.assert_exist(&parts, true);
    assert_eq!(run(&device, &parts, stream), run(&device, &execs(&other), stream));
    drop(chain);
    device.await_end(&parts);
    let parts = execs(&other);
    device.destroy(exec);
    device.assert_exist(&parts, true);
    drop(other);
    device.await_end(&parts);
    assert_eq!(graphs::state(exec), GraphState::Unknown);
    assert_eq!(graphs::chain(exec, 4, Making::AtOnce).unwrap_err(), Reason::NoCopy);
}

#[test]
fn what_cannot_be_transformed_says_why() {
    let device = Device::get();
    let whole = |graph: &Graph<'_>| match graphs::state(device.instantiate(graph)) {
        GraphState::Whole(reason) => reason,
        state => panic!("{state}"),
    };
    assert_eq!(whole(&Graph::new(&device)), Reason::OneKernel);
    assert_eq!(whole(&Graph::line(&device, 1)), Reason::OneKernel);
    let graph = Graph::line(&device, 3);
    graph.record(&[]);
    assert_eq!(whole(&graph), Reason::Events);
    if device.divides_graphs() {
        let exec = device.instantiate(&Graph::line(&device, 300));
        assert_eq!(graphs::chain(exec, 1, Making::AtOnce).unwrap_err(), Reason::TooManyParts(300));
        assert_eq!(execs(&graphs::chain(exec, 2, Making::AtOnce).unwrap()).len(), 150);
        device.destroy(exec);
    }
    assert_eq!(
        GraphState::Whole(Reason::Events).to_string(),
        "launched whole: it records or waits for events"
    );
    assert_eq!(graphs::state(null_mut()), GraphState::Unknown);
}

#[test]
fn a_capture_elsewhere_is_not_disturbed() {
    let device = Device::get();
    let exec = device.instantiate(&Graph::line(&device, 20));
    let stream = device.stream();
    let launch = |stream: Ptr| {
        let (a, b, k) = (0_u64, 0_u64, 0_u32);
        let mut p: [Ptr; 3] = [
            (&raw const a).cast_mut().cast(),
            (&raw const b).cast_mut().cast(),
            (&raw const k).cast_mut().cast(),
        ];
        // SAFETY: captured only, never run.
        ok(unsafe {
            (device.cuda.cuLaunchKernel)(
                device.mix,
                1,
                1,
                1,
                8,
                1,
                1,
                0,
                stream,
                p.as_mut_ptr(),
                null_mut(),
            )
        });
    };
    // SAFETY: a stream of ours. Global mode: any thread's unsafe call would spoil it.
    ok(unsafe { (device.cuda.cuStreamBeginCapture_v2)(stream, 0) });
    launch(stream);
    let (key, context, cuda) = (exec as usize, device.context as usize, device.cuda);
    std::thread::spawn(move || {
        // No context is current here: that of the exec is borrowed, and put back.
        assert_eq!(execs(&graphs::chain(key as Ptr, 3, Making::AtOnce).unwrap()).len(), 7);
        let mut now = null_mut();
        // SAFETY: a valid out-pointer.
        ok(unsafe { (cuda.cuCtxGetCurrent)(&mut now) });
        assert!(now.is_null() && context != 0);
    })
    .join()
    .unwrap();
    launch(stream);
    let mut graph = null_mut();
    // SAFETY: a stream of ours; a valid out-pointer.
    ok(unsafe { (device.cuda.cuStreamEndCapture)(stream, &mut graph) });
    assert!(!graph.is_null());
    device.destroy(exec);
}

#[test]
fn launches_on_several_streams_keep_their_order() {
    let device = Device::get();
    let (a, b) = (device.stream(), device.stream());
    let exec = device.instantiate(&Graph::line(&device, 12));
    let want = run(&device, &[exec as usize], a).0;
    let chain = graphs::chain(exec, 4, Making::AtOnce).unwrap();
    let launch = |stream: Ptr, in_parts: bool| {
        let launching = in_parts.then(|| order::begin(exec, stream as usize, true));
        match launching.filter(|launching| launching.may_be_in_parts) {
            Some(launching) => {
                execs(&chain).iter().for_each(|e| device.launch(*e, stream));
                launching.end(true);
                true
            }
            // The shim's `cuGraphLaunch` comes through there itself.
            None => {
                device.launch(exec as usize, stream);
                false
            }
        }
    };
    let mut word = null_mut();
    // SAFETY: a valid out-pointer; never freed.
    let word = unsafe {
        ok((device.cuda.cuMemHostAlloc)(&mut word, 64, 0));
        &*word.cast::<AtomicU32>()
    };
    for (round, (first, second)) in [(true, true), (true, false)].into_iter().enumerate() {
        device.fill();
        // SAFETY: a stream of ours and pinned memory.
        ok(unsafe {
            (device.cuda.cuStreamWaitValue32_v2)(a, word.as_ptr() as u64, round as u32 + 1, 0)
        });
        assert_eq!(launch(a, first), round == 0 || first);
        assert_eq!(launch(b, second), second);
        std::thread::sleep(std::time::Duration::from_millis(30));
        // SAFETY: a stream of ours.
        assert_eq!(unsafe { (device.cuda.cuStreamQuery)(b) }, 600, "waits for the other launch");
        word.store(round as u32 + 1, SeqCst);
        device.sync(a);
        device.sync(b);
        assert_eq!(device.read(), want);
        // The next round begins on the first stream again: whole, then in parts.
        assert_eq!(launch(a, true), second, "behind a whole launch on another stream");
        launch(a, false);
        device.sync(a);
    }
    device.destroy(exec);
}

#[test]
fn a_destroyed_context_is_left_alone() {
    let mut device = Device::get();
    let divides = device.divides_graphs();
    let mut other = null_mut();
    // SAFETY: a valid out-pointer; it becomes current.
    ok(unsafe { (device.cuda.cuCtxCreate_v2)(&mut other, 0, 0) });
    device.mix = device.load();
    let exec = device.instantiate(&Graph::line(&device, 8));
    let chain = divides.then(|| graphs::chain(exec, 2, Making::AtOnce).unwrap());
    // SAFETY: contexts of ours.
    unsafe {
        ok((device.cuda.cuCtxDestroy_v2)(other));
        ok((device.cuda.cuCtxSetCurrent)(device.context));
    }
    if let Some(chain) = chain {
        assert_eq!(graphs::state(exec), GraphState::Unknown);
        assert_eq!(graphs::chain(exec, 2, Making::AtOnce).unwrap_err(), Reason::NoCopy);
        drop(chain);
    }
}
