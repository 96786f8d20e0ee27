//! What ends, and what may not.

use super::check;
use crate::build::{Builder, kernel, node};
use crate::program::{
    Blocks, Device, Environment, Id, Kernel, Op, Program, StreamKind, Target, Word, Work,
};

const DEVICE: Device = Device { sms: 8, wave: 8 };

fn poll(word: Word) -> Kernel {
    Kernel::Poll { word, value: 1 }
}

fn set(word: Word) -> Kernel {
    Kernel::Set { word, value: 1 }
}

fn verdict(b: &Builder) -> Result<super::Values, String> {
    check(&b.program, DEVICE)
}

fn refused(b: &Builder, why: &str) {
    let said = verdict(b).unwrap_err();
    assert!(said.contains(why), "{said}\n{}", b.program);
}

/// A poll in one stream, something in between, and what it waits for in another.
fn with(
    environment: Environment,
    kinds: [StreamKind; 2],
    between: impl FnOnce(&mut Builder, [Id; 2]),
) -> Builder {
    let mut b = Builder::new("test").environment(environment);
    let (go, streams) = (b.device(1), kinds.map(|kind| b.stream(kind)));
    b.launch(0, streams[0], poll(go));
    between(&mut b, streams);
    b.launch(0, streams[1], set(go));
    b.op(0, Op::Sync { target: Target::Context(0), asking: false });
    b
}

const FREE: [StreamKind; 2] = [StreamKind::NonBlocking; 2];
const BLOCKING: [StreamKind; 2] = [StreamKind::Blocking; 2];

fn one_queue() -> Environment {
    Environment { connections: 1, ..Environment::default() }
}

#[test]
fn named_programs_end() {
    for program in crate::named::all() {
        if let Err(why) = check(&program, DEVICE) {
            panic!("{why}\n{program}");
        }
    }
}

#[test]
fn a_shared_queue_is_blocked_by_what_waits_in_it() {
    assert!(verdict(&with(one_queue(), FREE, |_, _| {})).is_ok());
    let untimed = with(one_queue(), FREE, |b, [on, _]| {
        let event = b.event(false);
        b.op(0, Op::Record { event, on });
    });
    assert!(verdict(&untimed).is_ok());
    let blockers: [fn(&mut Builder, Id); 4] = [
        |b, on| {
            let event = b.event(true);
            b.op(0, Op::Record { event, on });
        },
        |b, on| {
            let word = b.host();
            b.submit(0, on, Work::Write { word, value: 1 });
        },
        |b, on| {
            let word = b.host();
            b.op(0, Op::Store { word, value: 1 });
            b.submit(0, on, Work::Wait { word, value: 1 });
        },
        |b, on| {
            let word = b.device(1);
            b.launch(0, on, Kernel::Fold { word, value: 1, loops: 0 });
        },
    ];
    for block in blockers {
        refused(&with(one_queue(), FREE, |b, [on, _]| block(b, on)), "may never end");
        let many = with(Environment::default(), FREE, |b, [on, _]| block(b, on));
        assert!(verdict(&many).is_ok());
        let mut crowded = with(Environment::default(), FREE, |b, [on, _]| block(b, on));
        for _ in 0..3 {
            let (on, word) = (crowded.stream(StreamKind::NonBlocking), crowded.device(1));
            crowded.launch(0, on, set(word));
        }
        refused(&crowded, "may never end");
    }
    // Streams of another priority have no queues of their own.
    let mut urgent = with(one_queue(), FREE, |b, [on, _]| {
        let word = b.host();
        b.submit(0, on, Work::Write { word, value: 1 });
    });
    urgent.program.streams[1].urgency = 1;
    refused(&urgent, "may never end");
}

#[test]
fn the_legacy_stream_is_a_barrier() {
    let with_record = |kinds| {
        with(Environment::default(), kinds, |b, _| {
            let (event, legacy) = (b.event(false), b.stream(StreamKind::Legacy));
            b.op(0, Op::Record { event, on: legacy });
        })
    };
    refused(&with_record(BLOCKING), "may never end");
    assert!(verdict(&with_record(FREE)).is_ok());
    let asked = with(Environment::default(), BLOCKING, |b, _| {
        let legacy = b.stream(StreamKind::Legacy);
        b.op(0, Op::Ask { target: Target::Stream(legacy) });
    });
    assert!(verdict(&asked).is_ok());
}

#[test]
fn order_decides_for_one_stream() {
    let mut b = Builder::new("test");
    let (on, go) = (b.stream(StreamKind::NonBlocking), b.device(1));
    b.launch(0, on, poll(go));
    b.launch(0, on, set(go));
    refused(&b, "may never end");
    b.program.threads[0].ops.swap(0, 1);
    assert!(verdict(&b).is_ok());
    let mut b = Builder::new("test");
    let (on, go) = (b.stream(StreamKind::NonBlocking), b.device(1));
    b.launch(0, on, poll(go));
    b.sync(0, on);
    b.launch(0, on, set(go));
    refused(&b, "may never end");
}

#[test]
fn threads_may_wait_for_one_another_one_way_only() {
    let mut b = Builder::new("test");
    let (child, one, other) = (b.thread(), b.flag(), b.flag());
    b.op(0, Op::Start { thread: child });
    b.op(0, Op::Pass { flag: one });
    b.op(0, Op::Post { flag: other });
    b.op(child, Op::Post { flag: one });
    b.op(child, Op::Pass { flag: other });
    b.op(0, Op::Join { thread: child });
    assert!(verdict(&b).is_ok());
    b.program.threads[child].ops.swap(0, 1);
    assert!(verdict(&b).is_err());
}

#[test]
fn memory_is_not_freed_while_something_waits_for_the_thread_that_frees() {
    let mut b = Builder::new("test");
    let (on, go, child) = (b.stream(StreamKind::NonBlocking), b.host(), b.thread());
    b.launch(0, on, poll(go));
    b.op(0, Op::Start { thread: child });
    b.op(child, Op::Free { context: 0 });
    b.op(0, Op::Store { word: go, value: 1 });
    b.sync(0, on);
    assert!(verdict(&b).is_ok(), "{:?}", verdict(&b));
    // What sets the word is not submitted while the call waits for the poll.
    let (mut other, set_by) = (Builder::new("test"), set(Word::Host(0)));
    let streams = FREE.map(|kind| other.stream(kind));
    other.program = Program { threads: b.program.threads.clone(), host_words: 1, ..other.program };
    other.program.threads[0].ops[2] = Op::Submit { on: streams[1], work: kernel(set_by) };
    refused(&other, "may never end");
    // A launch would wait for the call, the call for the poll.
    let word = b.device(1);
    b.program.threads[0]
        .ops
        .insert(2, Op::Submit { on, work: kernel(Kernel::Fold { word, value: 1, loops: 0 }) });
    refused(&b, "may never end");
}

#[test]
fn graphs_branches_may_meet_where_there_are_queues() {
    let mut b = Builder::new("test");
    let (on, go) = (b.stream(StreamKind::NonBlocking), b.device(1));
    let nodes = vec![
        node(kernel(Kernel::Set { word: go, value: 0 }), &[]),
        node(kernel(poll(go)), &[0]),
        node(kernel(set(go)), &[0]),
    ];
    let graph = b.graph(true, nodes);
    let exec = b.exec(graph);
    (0..2).for_each(|_| b.op(0, Op::Launch { exec, on }));
    assert!(verdict(&b).is_ok());
    b.program.environment.connections = 2;
    refused(&b, "may never end");
    b.program.environment.connections = 8;
    b.program.graphs[0].nodes[2].after = vec![1];
    refused(&b, "may never end");
}

#[test]
fn blocks_that_spin_have_room() {
    let mut b = Builder::new("test");
    let go = b.host();
    for _ in 0..8 {
        let on = b.stream(StreamKind::NonBlocking);
        b.launch(0, on, poll(go));
    }
    b.op(0, Op::Store { word: go, value: 1 });
    refused(&b, "may spin at one time");
    let mut b = Builder::new("test");
    let (on, word) = (b.stream(StreamKind::NonBlocking), b.device(1));
    b.barrier(0, on, word, Blocks::Wave, false);
    b.barrier(0, on, word, Blocks::Wave, false);
    assert!(verdict(&b).is_ok());
    let other = b.stream(StreamKind::NonBlocking);
    b.barrier(0, other, word, Blocks::Wave, false);
    refused(&b, "may spin at one time");
}

#[test]
fn values_that_depend_on_luck_are_refused() {
    let fold = |word| Kernel::Fold { word, value: 1, loops: 0 };
    let mut b = Builder::new("test");
    let (one, other) = (b.stream(StreamKind::NonBlocking), b.stream(StreamKind::NonBlocking));
    let (word, event) = (b.device(1), b.event(false));
    b.launch(0, one, fold(word));
    b.launch(0, other, fold(word));
    refused(&b, "used by two");
    b.program.threads[0].ops.insert(1, Op::Record { event, on: one });
    b.program.threads[0].ops.insert(2, Op::WaitEvent { on: other, event });
    let ((device, _), fold_of) = (verdict(&b).unwrap(), |x: u32| {
        x.wrapping_mul(31).wrapping_add(crate::kernels::addend(0) + 1)
    });
    assert_eq!(device[0], [fold_of(fold_of(0))]);
    // Atomic additions do not mind.
    let mut b = Builder::new("test");
    let word = b.device(1);
    for _ in 0..3 {
        let on = b.stream(StreamKind::NonBlocking);
        b.launch(0, on, Kernel::Count { word, blocks: 5, loops: 0, apart: false });
    }
    assert_eq!(verdict(&b).unwrap().0[0], [15]);
}

#[test]
fn a_poll_needs_a_write_that_stays() {
    let mut b = Builder::new("test");
    let (one, other) = (b.stream(StreamKind::NonBlocking), b.stream(StreamKind::NonBlocking));
    let go = b.device(1);
    b.launch(0, one, poll(go));
    refused(&b, "nothing makes sure");
    b.launch(0, other, set(go));
    assert!(verdict(&b).is_ok());
    b.launch(0, other, Kernel::Set { word: go, value: 0 });
    refused(&b, "nothing makes sure");
}
