//! Graphs on some of the SMs.

use crate::bounds::{crowd, limiting};
use crate::governor::{Governor, SMS};
use crate::graphs::{BLOCKS, Rounds, launch, recorded};
use crate::program::{Device, Ptr, THREADS, ask, ok, wait_for};
use crate::{both, both_under, welcome};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::layout::submission_flags::{CAN_LIMIT, GRAPH, LEASED};
use tally_ipc::ring::{Answer, Request};
use tally_ipc::wire::{RewriteSettings, SharingMode, Welcome};

/// This answer for graphs, everything else whole.
fn graphs_as(core: &Governor, answer: Answer) {
    core.policy(move |request, _| match request.flags & GRAPH {
        0 => Answer::Whole,
        _ => answer,
    });
}

/// Answers a program's question with "on" until `is_done` says so for the first time.
fn on_until(core: &mut Governor, question: &str, is_done: impl Fn(&Governor) -> bool) {
    for round in 0.. {
        assert!(round < 10_000, "{question}: in vain");
        core.expect(question);
        if is_done(core) {
            return;
        }
        core.say("on");
    }
}

fn limited(core: &Governor) -> u64 {
    core.counters().sm_limited.load(SeqCst)
}

/// Graphs' launches that the core was asked for, of so many kernels.
fn of_graphs(core: &Governor, kernels: u32) -> Vec<Request> {
    let all = core.requests("").into_iter().map(|(request, _)| request);
    all.filter(|r| r.flags & GRAPH != 0 && r.grid[0] == kernels).collect()
}

fn can_limit(request: &Request) -> bool {
    request.flags & CAN_LIMIT != 0
}

#[test]
fn graphs_on_some_of_the_sms_keep_their_order_and_compute_the_same() {
    const STEPS: u32 = 4;
    let rewrite = RewriteSettings { reserve_sms: vec![1, 2], ..welcome().rewrite };
    let welcome = Welcome { sharing: SharingMode::Unmanaged, rewrite, ..welcome() };
    both(
        graphs_on_some_of_the_sms_keep_their_order_and_compute_the_same,
        &welcome,
        |device| {
            device.primary_context();
            device.warm_up();
            let (stream, other) = (device.stream(1), device.stream(1));
            let rounds = Rounds::new(device, stream, STEPS);
            let mut launches = 0;
            while ask("round") != "end" {
                // On two streams: each launch of an exec comes behind the one before it.
                for stream in [stream, other, stream, other] {
                    launch(device, rounds.exec, stream);
                }
                launches += 4;
                device.sync(stream);
                device.sync(other);
            }
            rounds.check(device, launches);
        },
        |core| {
            core.warm_up("step");
            let chained = |core: &Governor| core.counters().graph_chained.load(SeqCst);
            for sms in [SMS - 1, SMS - 2, u32::MAX, 1, SMS - 1] {
                graphs_as(core, Answer::SmLimited(sms));
                let before = limited(core);
                on_until(core, "round", |core| limited(core) > before + 6);
                core.say("on");
                // In parts in between: other execs, of the same graph.
                graphs_as(core, Answer::Slice(1));
                let before = chained(core);
                on_until(core, "round", |core| chained(core) > before + 2);
                core.say("on");
            }
            // From one stream to the other each time, and all of them are limited.
            graphs_as(core, Answer::SmLimited(SMS - 1));
            let counts = |core: &Governor| {
                let c = core.counters();
                (c.sm_limited.load(SeqCst), c.degraded.load(SeqCst))
            };
            on_until(core, "round", |_| true);
            core.say("on");
            let before = counts(core);
            for _ in 0..10 {
                core.expect("round");
                core.say("on");
            }
            core.expect("round");
            let after = counts(core);
            core.say("end");
            core.ends(0);
            assert!(after.0 >= before.0 + 36, "{before:?} {after:?}");
            let c = core.counters();
            assert_eq!((c.failed.load(SeqCst), c.rescued.load(SeqCst)), (0, 0));
        },
    );
}

/// A kernel that ends when the host says so, and one that does nothing.
const HOLDS: &str = ".version 7.0
.target sm_70
.address_size 64
.visible .entry holds(.param .u64 p_words) {
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [p_words];
    st.volatile.global.u32 [%rd1], 1;
again:
    ld.volatile.global.u32 %r1, [%rd1+4];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra again;
    ret;
}
.visible .entry idles() {
    ret;
}
";

/// A graph of which a kernel of so many blocks holds its SMs until the second word is set.
fn holding(device: &Device, module: Ptr, blocks: u32, words: u64, stream: Ptr) -> Ptr {
    let [holds, idles] = ["holds", "idles"].map(|name| device.function_of(module, name));
    recorded(device, stream, || {
        ok(device.launch(idles, [1; 3], 1, stream, &[]));
        ok(device.launch(holds, [blocks, 1, 1], 1, stream, &[words]));
        ok(device.launch(idles, [1; 3], 1, stream, &[]));
    })
}

#[test]
fn a_graph_on_some_of_the_sms_leaves_the_others_free() {
    both(
        a_graph_on_some_of_the_sms_leaves_the_others_free,
        &limiting(),
        |device| {
            device.primary_context();
            device.warm_up();
            let module = device.load_in_library(HOLDS, "libcublas.so.0");
            let (stream, other) = (device.stream(1), device.stream(1));
            let words = device.words();
            let blocks = crowd(device);
            let exec = holding(device, module, blocks, words.as_ptr() as u64, stream);
            words[1].store(1, SeqCst);
            let by_itself = || {
                while ask("by itself") == "on" {
                    let holds = device.function_of(module, "holds");
                    let params = [words.as_ptr() as u64];
                    ok(device.launch(holds, [blocks, 1, 1], 1, stream, &params));
                    device.sync(stream);
                }
            };
            by_itself();
            loop {
                let answer = ask("round");
                if answer == "end" {
                    break;
                }
                if answer == "again" {
                    by_itself();
                    continue;
                }
                launch(device, exec, stream);
                device.sync(stream);
            }
            let cells = device.cells(BLOCKS);
            words[0].store(0, SeqCst);
            words[1].store(0, SeqCst);
            launch(device, exec, stream);
            wait_for(&words[0], 1);
            // Were the graph everywhere, this would wait for it.
            device.step(&cells, [BLOCKS, 1, 1], other, 1, 0);
            device.sync(other);
            // SAFETY: a stream of ours.
            assert_eq!(unsafe { (device.cuda.cuStreamQuery)(stream) }, 600, "it holds, still");
            words[1].store(1, SeqCst);
            device.sync(stream);
            device.check_steps(&cells, &[1]);
        },
        |core| {
            core.warm_up("step");
            let is_offered = |core: &Governor| of_graphs(core, 3).iter().any(can_limit);
            graphs_as(core, Answer::SmLimited(SMS - 1));
            core.expect("by itself");
            core.say("end");
            for _ in 0..200 {
                core.expect("round");
                core.say("on");
            }
            assert!(
                !is_offered(core),
                "nobody read the kernel, and the core had none of it limited"
            );
            core.expect("round");
            core.say("again");
            core.policy(|request, _| match request.flags & CAN_LIMIT {
                0 => Answer::Whole,
                _ => Answer::SmLimited(SMS - 1),
            });
            on_until(core, "by itself", |core| limited(core) > 2);
            core.say("end");
            let before = limited(core);
            on_until(core, "round", |core| limited(core) > before + 2);
            // What runs beside it has all SMs.
            graphs_as(core, Answer::SmLimited(SMS - 1));
            core.say("end");
            core.ends(0);
            assert!(is_offered(core));
            assert_eq!(core.counters().failed.load(SeqCst), 0);
        },
    );
}

#[test]
fn a_graph_with_a_large_kernel_that_may_wait_is_never_limited() {
    both(
        a_graph_with_a_large_kernel_that_may_wait_is_never_limited,
        &limiting(),
        |device| {
            device.primary_context();
            device.warm_up();
            let module = device.load(HOLDS);
            let stream = device.stream(1);
            let words = device.words();
            words[1].store(1, SeqCst);
            // Three kernels, of which one is the program's own and may wait: it has more blocks than the device holds,
            // or no more, but more than the width has SMs. And five that may be limited.
            let waits = [crowd(device), SMS]
                .map(|blocks| holding(device, module, blocks, words.as_ptr() as u64, stream));
            let cells = device.cells(BLOCKS);
            let steps = recorded(device, stream, || {
                (0..5).for_each(|k| device.step(&cells, [BLOCKS, 1, 1], stream, k, 0));
            });
            let mut ks = Vec::new();
            while ask("round") == "on" {
                waits.into_iter().for_each(|exec| launch(device, exec, stream));
                // Copies are made only while nothing runs.
                device.sync(stream);
                launch(device, steps, stream);
                device.sync(stream);
                ks.extend(0..5);
            }
            device.check_steps(&cells, &ks);
        },
        |core| {
            core.warm_up("step");
            core.policy(|request, _| match request.flags & CAN_LIMIT {
                0 => Answer::Whole,
                _ => Answer::SmLimited(1),
            });
            on_until(core, "round", |core| limited(core) > 20);
            core.say("end");
            core.ends(0);
            assert!(of_graphs(core, 5).iter().any(can_limit));
            let waits = of_graphs(core, 3);
            assert!(waits.len() > 20 && !waits.iter().any(can_limit));
        },
    );
}

/// What is bound to green contexts goes before they do, and is made anew for later ones.
#[test]
fn limited_graphs_end_with_the_primary_context() {
    both_under(
        limited_graphs_end_with_the_primary_context,
        &[("TALLY_SOFTCUDA_STRICT", "1")],
        &limiting(),
        |device| {
            let first = device.context;
            for question in ["one", "two"] {
                device.primary_context();
                device.warm_up();
                let stream = device.stream(1);
                let rounds = Rounds::new(device, stream, 2);
                let mut launches = 0;
                while ask(question) == "on" {
                    launch(device, rounds.exec, stream);
                    device.sync(stream);
                    launches += 1;
                }
                rounds.check(device, launches);
                if question == "two" {
                    // What was made for it goes, too, though nobody asks for it any more.
                    // SAFETY: a graph of ours, which has ended.
                    ok(unsafe { (device.cuda.cuGraphExecDestroy)(rounds.exec) });
                }
                // SAFETY: retained above.
                ok(unsafe { (device.cuda.cuDevicePrimaryCtxRelease_v2)(0) });
                let (mut flags, mut active) = (0, 0);
                // SAFETY: valid out-pointers.
                ok(unsafe { (device.cuda.cuDevicePrimaryCtxGetState)(0, &mut flags, &mut active) });
                assert_eq!(active, 0, "nothing of the shim's keeps it");
                // SAFETY: a context of ours.
                ok(unsafe { (device.cuda.cuCtxSetCurrent)(first) });
            }
            device.context = first;
            device.reload();
            assert_eq!(ask("done"), "on");
            device.step(&device.cells(2), [2, 1, 1], null_mut(), 1, 0);
        },
        |core| {
            for question in ["one", "two"] {
                core.warm_up("step");
                graphs_as(core, Answer::SmLimited(1));
                let before = limited(core);
                on_until(core, question, |core| limited(core) > before + 2);
                core.say("end");
            }
            core.expect("done");
            core.say("on");
            core.ends(0);
            assert_eq!(core.counters().failed.load(SeqCst), 0);
        },
    );
}

#[test]
fn leased_graphs_have_the_clients_width() {
    both(
        leased_graphs_have_the_clients_width,
        &limiting(),
        |device| {
            device.primary_context();
            device.warm_up();
            let stream = device.stream(1);
            // One kernel is a graph, too.
            let cells = device.cells(BLOCKS);
            let exec = recorded(device, stream, || {
                device.step(&cells, [BLOCKS, 1, 1], stream, 7, 0);
            });
            let mut ks = Vec::new();
            while ask("round") == "on" {
                launch(device, exec, stream);
                device.sync(stream);
                ks.push(7);
            }
            device.check_steps(&cells, &ks);
        },
        |core| {
            core.warm_up("step");
            on_until(core, "round", |core| of_graphs(core, 1).iter().any(can_limit));
            assert_eq!(limited(core), 0, "nobody asked for it");
            core.lease(1_000_000, SMS - 1);
            core.say("on");
            on_until(core, "round", |core| limited(core) > 10);
            core.lease(0, 0);
            core.say("end");
            core.ends(0);
            let leased = of_graphs(core, 1).into_iter().filter(|r| r.flags & LEASED != 0);
            assert!(leased.filter(|r| r.limited_sms == SMS - 1).count() > 9);
            assert_eq!(core.counters().failed.load(SeqCst), 0);
        },
    );
}

/// A copy that the driver refuses to launch: the program's graph is launched, once.
#[test]
fn a_limited_graph_that_is_refused_runs_whole() {
    both_under(
        a_limited_graph_that_is_refused_runs_whole,
        &[("TALLY_SOFTCUDA_FAULT_GRAPH", "600")],
        &limiting(),
        |device| {
            device.primary_context();
            device.warm_up();
            let rounds = Rounds::new(device, device.stream(1), 2);
            // The first ones are whole, until green contexts and a copy are there.
            for _ in 0..620 {
                launch(device, rounds.exec, rounds.stream);
                device.sync(rounds.stream);
            }
            rounds.check(device, 620);
        },
        |core| {
            core.warm_up("step");
            graphs_as(core, Answer::SmLimited(1));
            core.ends(0);
            let c = core.counters();
            let counts = [&c.sm_limited, &c.degraded, &c.failed].map(|n| n.load(SeqCst));
            assert!((1..600).contains(&counts[0]), "{counts:?}");
            assert_eq!(counts[1..], [1, 0]);
        },
    );
}

/// Programs on cudart launch a handle of the library's kernel, and nodes of graphs tell a function.
#[test]
fn kernels_of_libraries_are_limited_in_graphs() {
    both(
        kernels_of_libraries_are_limited_in_graphs,
        &limiting(),
        |device| {
            device.primary_context();
            let step = device.kernel_of(device.library(), "step");
            let (stream, cells) = (device.stream(1), device.cells(BLOCKS));
            let step_with = |stream, k: u64| {
                let params = [cells.data, cells.counts, k, 0];
                ok(device.launch(step, [BLOCKS, 1, 1], THREADS, stream, &params));
            };
            let mut ks = Vec::new();
            device.warm_up_with(|| step_with(stream, 1));
            device.sync(stream);
            device.set(cells.data, 0, (BLOCKS * THREADS) as usize);
            device.set(cells.counts, 0, BLOCKS as usize);
            let exec = recorded(device, stream, || (2..5).for_each(|k| step_with(stream, k)));
            while ask("round") == "on" {
                launch(device, exec, stream);
                device.sync(stream);
                ks.extend(2..5);
            }
            device.check_steps(&cells, &ks);
        },
        |core| {
            core.warm_up("step");
            graphs_as(core, Answer::SmLimited(1));
            on_until(core, "round", |core| limited(core) > 2);
            core.say("end");
            core.ends(0);
            assert_eq!(core.counters().failed.load(SeqCst), 0);
        },
    );
}
