//! Fixed programs: what an audit of CUDA's semantics under the shim found, each with the
//! name that it has there, and tests that it proposes (`g1` to `g7`).

use crate::build::{Builder, kernel, node};
use crate::program::{
    Blocks, Environment, Id, Kernel, Op, Program, Source, StreamKind, Target, Word, Work,
};

use StreamKind::{Blocking, Legacy, NonBlocking, PerThread};

/// A work-like launch: several blocks that each fold into a word of their own.
fn each(word: Word, value: u32, blocks: u32, loops: u32) -> Kernel {
    Kernel::Each { word, value, blocks, loops }
}

/// A kernel whose blocks wait for one another, as many as the device holds, launched again and
/// again. SM-limited to some of the SMs it never ends.
fn one_wave(
    name: &str,
    blocks: Blocks,
    streamk: bool,
    times: u32,
    environment: Environment,
) -> Program {
    let mut b = Builder::new(name).environment(environment);
    let (on, word) = (b.stream(NonBlocking), b.device(1));
    for _ in 0..times {
        b.barrier(0, on, word, blocks, streamk);
        b.sync(0, on);
        b.sleep(0, 3_000);
    }
    b.program
}

/// Two threads: a kernel of one polls what a kernel of the other, launched later, sets.
fn two_threads(name: &str, kind: StreamKind) -> Program {
    let mut b = Builder::new(name);
    let (ready, go, seen) = (b.device(1), b.device(1), b.device(1));
    let (mine, theirs) = (b.stream(kind), b.stream(kind));
    let (child, polling) = (b.thread(), b.flag());
    b.warm_up(0, mine, &Kernel::Set { word: ready, value: 1 }, 12);
    b.op(0, Op::Start { thread: child });
    b.warm_up(child, theirs, &Kernel::Poll { word: ready, value: 1 }, 12);
    b.launch(child, theirs, Kernel::Poll { word: go, value: 1 });
    b.launch(child, theirs, Kernel::Fold { word: seen, value: 7, loops: 0 });
    b.op(child, Op::Post { flag: polling });
    b.sync(child, theirs);
    b.op(0, Op::Pass { flag: polling });
    b.sleep(0, 300_000);
    b.launch(0, mine, Kernel::Set { word: go, value: 1 });
    b.sync(0, mine);
    b.op(0, Op::Join { thread: child });
    b.program
}

/// A kernel polls a word of the host; a thread that used its default stream has ended; the host
/// makes and destroys a stream before it lets the kernel go.
fn guard() -> Program {
    let mut b = Builder::new("guard");
    let (go, count) = (b.host(), b.device(1));
    let (on, own, idle) = (b.stream(NonBlocking), b.stream(PerThread), b.stream(NonBlocking));
    let child = b.thread();
    b.launch(0, on, Kernel::Poll { word: go, value: 1 });
    b.op(0, Op::Start { thread: child });
    for _ in 0..20 {
        b.launch(child, own, Kernel::Count { word: count, blocks: 1, loops: 0, apart: false });
    }
    b.op(0, Op::Join { thread: child });
    b.sleep(0, 300_000);
    b.op(0, Op::CreateStream { stream: idle });
    b.op(0, Op::DestroyStream { stream: idle });
    b.op(0, Op::Store { word: go, value: 1 });
    b.sync(0, on);
    b.program
}

/// A graph of two branches, of which one polls what the other sets.
fn graph(captured: bool) -> Program {
    let mut b = Builder::new(if captured { "graph" } else { "graph-by-hand" });
    let (on, flag, seen) = (b.stream(NonBlocking), b.device(1), b.device(1));
    let nodes = vec![
        node(kernel(Kernel::Set { word: flag, value: 0 }), &[]),
        node(kernel(Kernel::Poll { word: flag, value: 1 }), &[0]),
        node(kernel(Kernel::Set { word: flag, value: 1 }), &[0]),
        node(kernel(Kernel::Fold { word: seen, value: 3, loops: 0 }), &[1, 2]),
    ];
    let graph = b.graph(captured, nodes);
    let exec = b.exec(graph);
    for _ in 0..40 {
        b.op(0, Op::Launch { exec, on });
        b.sync(0, on);
        b.sleep(0, 3_000);
    }
    b.program
}

/// Launches behind a wait for a word that a kernel of another stream, launched last, sets.
fn xs() -> Program {
    let mut b = Builder::new("xs");
    let (on, other) = (b.stream(NonBlocking), b.stream(NonBlocking));
    let (go, words) = (b.host(), b.device(16));
    b.warm_up(0, on, &each(words, 1, 16, 5_000), 25);
    b.submit(0, on, Work::Wait { word: go, value: 1 });
    for i in 0..40 {
        b.launch(0, on, each(words, i, 16, 5_000));
    }
    b.launch(0, other, Kernel::Set { word: go, value: 1 });
    b.sync(0, on);
    b.program
}

/// Launches behind a wait for a word that the host sets when all are submitted.
fn wv(count: u32) -> Program {
    let mut b = Builder::new(format!("wv-{count}"));
    let (on, go, words) = (b.stream(NonBlocking), b.host(), b.device(64));
    b.warm_up(0, on, &each(words, 1, 64, 0), 40);
    b.submit(0, on, Work::Wait { word: go, value: 1 });
    for i in 0..count {
        b.launch(0, on, each(words, i, 64, 0));
    }
    b.op(0, Op::Store { word: go, value: 1 });
    b.sync(0, on);
    b.program
}

/// Many streams; in each a kernel that the host releases once it is launched.
fn over() -> Program {
    let mut b = Builder::new("over");
    for _ in 0..70 {
        let (on, go) = (b.stream(NonBlocking), b.host());
        b.launch(0, on, Kernel::Poll { word: go, value: 1 });
        b.op(0, Op::Store { word: go, value: 1 });
        b.sync(0, on);
    }
    b.program
}

/// Two contexts; the one that launched first is destroyed while the other works. Also `g4`.
fn two_contexts() -> Program {
    let mut b = Builder::new("ctx2");
    let (first, second) = (b.context(0, false), b.context(0, false));
    let (one, two) = (b.device_in(first, 4), b.device_in(second, 64));
    let stream = |context| crate::program::Stream { context, kind: NonBlocking, urgency: 0 };
    let (a, c) = (b.stream_with(stream(first)), b.stream_with(stream(second)));
    b.op(0, Op::CreateContext { context: first });
    for i in 0..20 {
        b.launch(0, a, each(one, i, 4, 10));
    }
    b.sync(0, a);
    b.op(0, Op::CreateContext { context: second });
    for i in 0..60 {
        b.launch(0, c, each(two, i, 64, 300));
    }
    b.op(0, Op::DestroyContext { context: first });
    b.sync(0, c);
    for i in 0..20 {
        b.launch(0, c, each(two, i, 64, 300));
    }
    b.sync(0, c);
    b.program
}

/// One kernel at a time between two events that take the time.
fn ev() -> Program {
    let mut b = Builder::new("ev");
    let (on, words) = (b.stream(NonBlocking), b.device(8));
    let (from, to) = (b.event(true), b.event(true));
    for i in 0..60 {
        b.op(0, Op::Record { event: from, on });
        b.launch(0, on, each(words, i, 8, 5_000));
        b.op(0, Op::Record { event: to, on });
        b.op(0, Op::Sync { target: Target::Event(to), asking: false });
        b.op(0, Op::Elapsed { from, to });
    }
    b.program
}

/// One hardware queue: a kernel in one stream polls what a kernel in another sets.
fn g1() -> Program {
    let environment = Environment { connections: 1, ..Environment::default() };
    let mut b = Builder::new("g1").environment(environment);
    let (one, other) = (b.stream(NonBlocking), b.stream(NonBlocking));
    for _ in 0..20 {
        let go = b.device(1);
        b.launch(0, one, Kernel::Poll { word: go, value: 1 });
        b.launch(0, other, Kernel::Set { word: go, value: 1 });
        b.sync(0, one);
        b.sync(0, other);
    }
    b.program
}

/// The same with more streams than there are queues, each pair of neighbours.
fn g1_many() -> Program {
    let mut b = Builder::new("g1-many");
    let streams: Vec<Id> = (0..16).map(|_| b.stream(NonBlocking)).collect();
    for (i, &one) in streams.iter().enumerate() {
        for step in [1, 8] {
            let (go, other) = (b.device(1), streams[(i + step) % streams.len()]);
            b.launch(0, one, Kernel::Poll { word: go, value: 1 });
            b.launch(0, other, Kernel::Set { word: go, value: 1 });
            b.sync(0, one);
            b.sync(0, other);
        }
    }
    b.program
}

/// The legacy stream and a blocking stream take turns; nobody waits on the host.
fn g6() -> Program {
    let mut b = Builder::new("g6");
    let (legacy, blocking) = (b.stream(Legacy), b.stream(Blocking));
    let words = b.device(64);
    for i in 0..60 {
        b.launch(0, legacy, each(words, 2 * i, 64, 500));
        b.launch(0, blocking, each(words, 2 * i + 1, 64, 500));
    }
    b.sync(0, blocking);
    b.program
}

/// One exec, launched by two threads on two streams: one launch at a time.
fn g7() -> Program {
    let mut b = Builder::new("g7");
    let (inside, errors, count) = (b.device(1), b.device(1), b.device(1));
    let words = b.device(64);
    let alone = |loops| kernel(Kernel::Alone { inside, errors, loops });
    let fold = kernel(Kernel::Fold { word: count, value: 1, loops: 2_000 });
    let nodes = vec![
        node(alone(2_000), &[]),
        node(fold, &[0]),
        node(kernel(each(words, 1, 64, 100)), &[1]),
        node(alone(2_000), &[2]),
    ];
    let graph = b.graph(false, nodes);
    let exec = b.exec(graph);
    let child = b.thread();
    let streams = [b.stream(NonBlocking), b.stream(NonBlocking)];
    b.op(0, Op::Start { thread: child });
    for (thread, on) in [(0, streams[0]), (child, streams[1])] {
        for _ in 0..100 {
            b.op(thread, Op::Launch { exec, on });
        }
        b.sync(thread, on);
    }
    b.op(0, Op::Join { thread: child });
    b.program
}

/// Two modules of the same names and length, told apart by the value that they add.
fn identity(name: &str, source: Source) -> Program {
    let mut b = Builder::new(format!("identity-{name}"));
    // Images that no other program here has: one kept from before would serve.
    let own = 10_000 * (source as u32 + 1);
    let modules = [b.module(source, own + 1_111), b.module(source, own + 2_222)];
    let words = modules.map(|_| b.device(64));
    let on = b.stream(NonBlocking);
    for round in 0..40 {
        for (&module, &word) in modules.iter().zip(&words) {
            let kernel = each(word, round, 64, 500);
            b.submit(0, on, Work::Kernel { kernel, module });
            b.sync(0, on);
        }
        b.sleep(0, 2_000);
    }
    b.program
}

/// A module loaded, used and unloaded again and again: handles and addresses come back.
fn recompiling() -> Program {
    let mut b = Builder::new("recompiling");
    let (on, words) = (b.stream(NonBlocking), b.device(64));
    for i in 0..12 {
        let module = b.module(Source::Heap, 1_000 * i + 7);
        b.op(0, Op::Load { module });
        for round in 0..8 {
            b.submit(0, on, Work::Kernel { kernel: each(words, round, 64, 500), module });
        }
        b.op(0, Op::Unload { module });
    }
    b.program
}

/// Every named program, in a fixed order.
pub fn all() -> Vec<Program> {
    let usual = Environment::default();
    let blocking = Environment { blocking: true, ..usual };
    vec![
        one_wave("barrier", Blocks::Sms, false, 60, usual),
        one_wave("skbar", Blocks::Sms, true, 60, usual),
        two_threads("ptds", PerThread),
        two_threads("expl", Blocking),
        guard(),
        graph(true),
        graph(false),
        xs(),
        wv(400),
        wv(900),
        over(),
        two_contexts(),
        ev(),
        g1(),
        g1_many(),
        one_wave("g2", Blocks::Wave, false, 100, usual),
        one_wave("g3", Blocks::Wave, false, 200, blocking),
        g6(),
        g7(),
        identity("heap", Source::Heap),
        identity("static", Source::Static),
        identity("file", Source::File),
        identity("fatbin", Source::Fatbin),
        identity("library", Source::Library),
        recompiling(),
    ]
}
