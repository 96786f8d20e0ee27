//! Makes the idioms that use no graphs.

use super::{Maker, Timeline};
use crate::build::{Builder, kernel, node};
use crate::program::{
    Blocks, Id, Kernel, Module, Op, Source, Stream, StreamKind, Target, Word, Work,
};

impl Maker {
    fn launch(&mut self, (on, thread): (Id, Id), kernel: Kernel) -> (Id, Op) {
        (thread, Op::Submit { on, work: Work::Kernel { kernel, module: 0 } })
    }

    /// Two kernels that each wait for the other.
    pub(super) fn meet(&mut self) -> Timeline {
        let one = self.place();
        let other = self.other_place(one);
        let (a, b) = (self.common_word(one, other), self.common_word(one, other));
        vec![
            self.launch(one, Kernel::Meet { set: a, poll: b }),
            self.launch(other, Kernel::Meet { set: b, poll: a }),
        ]
    }

    /// Something waits for a word; what sets it comes later.
    pub(super) fn poll_first(&mut self) -> Timeline {
        let one = self.place();
        let other = self.other_place(one);
        let by_host = self.rng.u32(0..3) == 0;
        let go = if by_host { self.b.host() } else { self.common_word(one, other) };
        let context = self.context_of(one);
        let words = self.b.device_in(context, 8);
        let wait = if self.coin() {
            kernel(Kernel::Poll { word: go, value: 1 })
        } else {
            Work::Wait { word: go, value: 1 }
        };
        let mut timeline = vec![(one.1, Op::Submit { on: one.0, work: wait })];
        for value in 0..self.rng.u32(0..4) {
            let blocks = self.rng.u32(1..=8);
            let each = Kernel::Each { word: words, value, blocks, loops: self.loops() };
            timeline.push(self.launch(one, each));
        }
        if self.coin() {
            timeline.push((one.1, Op::Ask { target: Target::Stream(one.0) }));
        }
        if by_host {
            timeline.push((other.1, Op::Store { word: go, value: 1 }));
        } else {
            timeline.extend(self.signal(other, go));
        }
        timeline
    }

    /// A deep queue behind a wait.
    pub(super) fn deep(&mut self) -> Timeline {
        let (one, count) = (self.place(), self.rng.u32(20..120));
        let other = self.other_place(one);
        let context = self.context_of(one);
        let (go, words) = (self.b.host(), self.b.device_in(context, 8));
        let wait = Work::Wait { word: go, value: 1 };
        let mut timeline = vec![(one.1, Op::Submit { on: one.0, work: wait })];
        let blocks = self.rng.u32(1..=8);
        for value in 0..count {
            let each = Kernel::Each { word: words, value, blocks, loops: 0 };
            timeline.push(self.launch(one, each));
        }
        if self.coin() {
            timeline.push((other.1, Op::Store { word: go, value: 1 }));
        } else {
            timeline.extend(self.signal(other, go));
        }
        timeline
    }

    /// Kernels whose blocks all wait for one another.
    pub(super) fn wave(&mut self) -> Timeline {
        let place = self.place();
        let context = self.context_of(place);
        let word = self.b.device_in(context, 2);
        let mut timeline = Vec::new();
        for _ in 0..self.rng.usize(1..=3) {
            let arrived = self.b.device_in(context, 1);
            let (rounds, streamk) = (self.rng.u32(1..=3), self.coin());
            let blocks = match self.rng.u32(0..5) {
                0 => {
                    let scratch = self.b.scratch(512);
                    let word = word.plus(1);
                    timeline.push(self.launch(place, Kernel::EachSm { arrived, scratch, word }));
                    continue;
                }
                1 => Blocks::Wave,
                2 => Blocks::Sms,
                _ => Blocks::Fixed(self.rng.u32(2..=4)),
            };
            let barrier = Kernel::Barrier { arrived, word, blocks, rounds, streamk };
            timeline.push(self.launch(place, barrier));
            if self.rng.u32(0..3) == 0 {
                let blocks = self.rng.u32(2..=7);
                let scratch = self.b.scratch(blocks + 2);
                let word = self.b.device_in(context, 1);
                let chain = Kernel::LookBack { scratch, word, blocks, fixed: true };
                timeline.push(self.launch(place, chain));
            }
        }
        timeline
    }

    pub(super) fn many_blocks(&mut self) -> Timeline {
        let place = self.place();
        let context = self.context_of(place);
        let mut timeline = Vec::new();
        for _ in 0..self.rng.usize(1..=3) {
            let word = self.b.device_in(context, 1);
            let loops = self.rng.u32(0..40);
            let kernel = match self.rng.u32(0..8) {
                0 | 1 => {
                    let blocks = self.rng.u32(64..600);
                    let word = self.b.device_in(context, blocks);
                    Kernel::Each { word, value: self.rng.u32(0..100), blocks, loops }
                }
                2 => {
                    // By offset, where slices are made: more than 8192 blocks.
                    let blocks = if self.rng.u32(0..8) == 0 { 9_000 } else { 500 };
                    let word = self.b.device_in(context, blocks);
                    Kernel::Each { word, value: self.rng.u32(0..100), blocks, loops: 0 }
                }
                3..=5 => {
                    // Most are more than a whole GPU holds at once, so that fewer SMs may be offered.
                    let (blocks, apart) = match self.rng.u32(0..6) {
                        0 => (4_500..9_000, false),
                        1 => (64..2_000, false),
                        _ => (150..400, true),
                    };
                    let blocks = self.rng.u32(blocks);
                    Kernel::Count { word, blocks, loops: loops / 4, apart }
                }
                6 => {
                    let blocks = self.rng.u32(64..400);
                    let scratch = self.b.scratch(blocks + 2);
                    Kernel::LastBlock { scratch, word, blocks, loops }
                }
                _ => {
                    let blocks = self.rng.u32(64..300);
                    let scratch = self.b.scratch(blocks + 2);
                    Kernel::LookBack { scratch, word, blocks, fixed: false }
                }
            };
            timeline.push(self.launch(place, kernel));
            if self.rng.u32(0..3) == 0 {
                let target = Target::Stream(place.0);
                timeline.push((place.1, Op::Sync { target, asking: self.coin() }));
            }
        }
        timeline
    }

    /// Modules of the same names, loaded, used side by side and unloaded.
    pub(super) fn modules(&mut self) -> Timeline {
        let place = self.place();
        let context = self.context_of(place);
        let words = self.b.device_in(context, 16);
        let sources = [Source::Heap, Source::Static, Source::File, Source::Library, Source::Fatbin];
        let source = sources[self.rng.usize(0..sources.len())];
        let (mut timeline, mut loaded) = (Vec::new(), Vec::new());
        for _ in 0..self.rng.usize(1..=3) {
            let constant = self.rng.u32(0..1_000_000);
            let module = self.b.module(source, constant);
            self.b.program.modules[module] = Module { context, source, constant };
            if self.coin() {
                timeline.push((place.1, Op::Load { module }));
                loaded.push(module);
            }
            for _ in 0..self.rng.u32(1..=6) {
                let (value, blocks) = (self.rng.u32(0..100), self.rng.u32(1..=16));
                let kernel = Kernel::Each { word: words, value, blocks, loops: self.loops() };
                let work = Work::Kernel { kernel, module };
                timeline.push((place.1, Op::Submit { on: place.0, work }));
            }
            if loaded.last() == Some(&module) && self.coin() {
                timeline.push((place.1, Op::Unload { module }));
            }
        }
        timeline
    }

    /// Memory freed while something else runs.
    pub(super) fn free(&mut self) -> Timeline {
        let (one, other) = (self.place(), self.place());
        let mut timeline = self.many_blocks();
        let context = self.context_of(one);
        timeline.push((other.1, Op::Free { context: self.context_of(other) }));
        timeline.extend(self.many_blocks());
        timeline.push((one.1, Op::Free { context }));
        timeline
    }

    /// A thread that uses its default stream, and ends while something waits for the host.
    pub(super) fn short_thread(&mut self) -> Timeline {
        let mains: Vec<_> = self.streams.iter().copied().filter(|(_, t)| *t == 0).collect();
        let place = mains[self.rng.usize(0..mains.len())];
        let thread = self.b.thread();
        let kind = StreamKind::PerThread;
        let own = self.b.stream_with(Stream { context: 0, kind, urgency: 0 });
        let (go, count) = (self.b.host(), self.b.device(1));
        let mut timeline = Vec::new();
        let waits = self.coin();
        if waits {
            timeline.push(self.launch(place, Kernel::Poll { word: go, value: 1 }));
        }
        timeline.push((0, Op::Start { thread }));
        for _ in 0..self.rng.u32(1..=12) {
            let blocks = self.rng.u32(1..=4);
            timeline.push(self.launch(
                (own, thread),
                Kernel::Count { word: count, blocks, loops: 0, apart: false },
            ));
        }
        if self.coin() {
            let target = Target::Stream(own);
            timeline.push((thread, Op::Sync { target, asking: false }));
        }
        timeline.push((0, Op::Join { thread }));
        if waits {
            timeline.push((0, Op::Store { word: go, value: 1 }));
        }
        timeline
    }

    /// Several threads put launches of many blocks into one stream: each is in one piece.
    pub(super) fn shared_stream(&mut self) -> Timeline {
        let (on, thread) = self.place();
        let stream = self.b.program.streams[on];
        let process = |b: &Builder, thread: Id| b.program.threads[thread].process;
        let mine = process(&self.b, thread);
        let mut threads = vec![thread];
        if stream.kind != StreamKind::PerThread {
            let others = self.threads.iter().copied().filter(|t| *t != thread);
            threads.extend(others.filter(|t| process(&self.b, *t) == mine));
        }
        let (count, blocks) = (self.rng.u32(4..=24), self.rng.u32(2..=80));
        // So often first by itself that its forms can be made.
        let alone = if self.coin() { 6 } else { 0 };
        let errors = self.b.device_in(stream.context, 1);
        let scratch = self.b.scratch(alone + count + 2);
        let loops = self.rng.u32(0..200);
        let mut timeline = Vec::new();
        for id in 1..=alone {
            let window = Kernel::Window { scratch, errors, id, blocks, loops };
            timeline.push(self.launch((on, thread), window));
            let target = Target::Stream(on);
            timeline.push((thread, Op::Sync { target, asking: false }));
            timeline.push((thread, Op::Sleep { us: 2_000 }));
        }
        for other in threads[1..].iter().copied() {
            let flag = self.b.flag();
            timeline.push((thread, Op::Post { flag }));
            timeline.push((other, Op::Pass { flag }));
        }
        for id in alone + 1..=alone + count {
            let thread = threads[self.rng.usize(0..threads.len())];
            let window = Kernel::Window { scratch, errors, id, blocks, loops };
            timeline.push(self.launch((on, thread), window));
            if self.rng.u32(0..6) == 0 {
                timeline.push((thread, Op::Ask { target: Target::Stream(on) }));
            }
        }
        timeline
    }

    /// More streams than there are queues, or than anybody counts on.
    pub(super) fn many_streams(&mut self) -> Timeline {
        let count = if self.rng.u32(0..4) == 0 { 66 } else { self.rng.u32(9..24) };
        let (sum, kind) = (
            self.b.device(1),
            if self.coin() { StreamKind::Blocking } else { StreamKind::NonBlocking },
        );
        let (mut timeline, destroy) = (Vec::new(), self.coin());
        for _ in 0..count {
            let on = self.b.stream_with(Stream { context: 0, kind, urgency: 0 });
            if destroy {
                timeline.push((0, Op::CreateStream { stream: on }));
            }
            if self.rng.u32(0..4) == 0 {
                // Poll in one, set in another: the other comes later in any queue.
                let go = self.b.device(1);
                let other = self.b.stream_with(Stream { context: 0, kind, urgency: 0 });
                timeline.push(self.launch((on, 0), Kernel::Poll { word: go, value: 1 }));
                timeline.push(self.launch((other, 0), Kernel::Set { word: go, value: 1 }));
                let target = Target::Stream(on);
                timeline.push((0, Op::Sync { target, asking: self.coin() }));
            }
            let blocks = self.rng.u32(1..=3);
            timeline.push(
                self.launch((on, 0), Kernel::Count { word: sum, blocks, loops: 0, apart: false }),
            );
            if destroy {
                timeline.push((0, Op::DestroyStream { stream: on }));
            }
        }
        timeline
    }

    /// A second context, which comes and goes.
    pub(super) fn second_context(&mut self) -> Timeline {
        let context = self.b.context(0, false);
        let kind = StreamKind::NonBlocking;
        let on = self.b.stream_with(Stream { context, kind, urgency: 0 });
        let words = self.b.device_in(context, 8);
        let mut timeline = vec![(0, Op::CreateContext { context })];
        for value in 0..self.rng.u32(1..=10) {
            let blocks = self.rng.u32(1..=8);
            let kernel = Kernel::Each { word: words, value, blocks, loops: self.loops() };
            timeline.push(self.launch((on, 0), kernel));
        }
        timeline.push((0, Op::DestroyContext { context }));
        timeline
    }

    /// How long something takes, by events.
    pub(super) fn timing(&mut self) -> Timeline {
        let place = self.place();
        let context = self.context_of(place);
        let (from, to) = (self.b.event_in(context, true), self.b.event_in(context, true));
        let (on, thread) = place;
        let mut timeline = Vec::new();
        for _ in 0..self.rng.usize(1..=3) {
            timeline.push((thread, Op::Record { event: from, on }));
            timeline.extend(self.work_at(place));
            timeline.push((thread, Op::Record { event: to, on }));
            let (target, asking) = (Target::Event(to), self.coin());
            timeline.push((thread, Op::Sync { target, asking }));
            timeline.push((thread, Op::Elapsed { from, to }));
        }
        timeline
    }

    fn work_at(&mut self, place: (Id, Id)) -> Timeline {
        let context = self.context_of(place);
        let blocks = self.rng.u32(1..=16);
        let word = self.b.device_in(context, blocks);
        let kernel = Kernel::Each { word, value: 3, blocks, loops: self.loops() };
        vec![self.launch(place, kernel)]
    }

    /// The legacy stream and a blocking one work on the same words in turns.
    pub(super) fn turns_with_legacy(&mut self) -> Timeline {
        let legacy = self.legacy();
        let blocking = self.b.stream(StreamKind::Blocking);
        let words = self.b.device(16);
        let mut timeline = Vec::new();
        for value in 0..self.rng.u32(2..=8) {
            for on in [legacy, blocking] {
                let blocks = self.rng.u32(1..=16);
                let kernel = Kernel::Each { word: words, value, blocks, loops: self.loops() };
                timeline.push(self.launch((on, 0), kernel));
            }
        }
        timeline
    }

    /// The main thread's legacy stream.
    fn legacy(&mut self) -> Id {
        let is_legacy = |s: &Stream| s.kind == StreamKind::Legacy && s.context == 0;
        let known = self.b.program.streams.iter().position(is_legacy);
        known.unwrap_or_else(|| self.b.stream(StreamKind::Legacy))
    }

    /// A kernel's attribute set between its launches.
    pub(super) fn attribute(&mut self) -> Timeline {
        let place = self.place();
        let context = self.context_of(place);
        let module = self.b.module(Source::Heap, 42);
        self.b.program.modules[module].context = context;
        let words: Word = self.b.device_in(context, 4);
        let mut timeline = Vec::new();
        for value in 0..3 {
            let kernel = Kernel::Each { word: words, value, blocks: 4, loops: 0 };
            let work = Work::Kernel { kernel, module };
            timeline.push((place.1, Op::Submit { on: place.0, work }));
            timeline.push((place.1, Op::SetAttribute { module }));
        }
        timeline
    }

    /// Launches of one kernel, each by itself, so that its forms can be made.
    fn warm_up(&mut self, (on, thread): (Id, Id), kernel: &Kernel) -> Timeline {
        let mut timeline = Vec::new();
        for _ in 0..6 {
            timeline.push(self.launch((on, thread), kernel.clone()));
            let target = Target::Stream(on);
            timeline.push((thread, Op::Sync { target, asking: false }));
            timeline.push((thread, Op::Sleep { us: 2_000 }));
        }
        timeline
    }

    /// An event behind a long launch, which a graph in another stream records anew: what waits for it says nothing of
    /// the launch, whose stream goes while it runs.
    pub(super) fn recorded_anew(&mut self) -> Timeline {
        let (kind, thread) = (StreamKind::NonBlocking, 0);
        let beside = self.b.stream(kind);
        let timed = self.coin();
        let (event, word) = (self.b.event(timed), self.b.device(1));
        let fold = Kernel::Fold { word: self.b.device(1), value: 5, loops: 0 };
        let record = Work::Record { event };
        let nodes = match self.rng.u32(0..3) {
            0 => vec![node(record, &[])],
            1 => vec![node(kernel(fold), &[]), node(record, &[0])],
            _ => vec![node(record, &[]), node(kernel(fold), &[0])],
        };
        let captured = self.coin();
        let graph = self.b.graph(captured, nodes);
        let exec = self.b.exec(graph);
        let (blocks, loops) = (self.rng.u32(64..200), self.rng.u32(500..3_000));
        let count = |loops| Kernel::Count { word, blocks, loops, apart: false };
        let mut timeline = self.warm_up((beside, thread), &count(0));
        for _ in 0..self.rng.u32(1..=4) {
            let urgency = self.rng.u8(0..=3);
            let on = self.b.stream_with(Stream { context: 0, kind, urgency });
            timeline.push((thread, Op::CreateStream { stream: on }));
            timeline.push(self.launch((on, thread), count(loops)));
            timeline.push((thread, Op::Record { event, on }));
            timeline.push((thread, Op::Launch { exec, on: beside }));
            let target = Target::Event(event);
            timeline.push(match self.rng.u32(0..4) {
                0 => (thread, Op::Ask { target }),
                1 => (thread, Op::WaitEvent { on: beside, event }),
                _ => (thread, Op::Sync { target, asking: self.coin() }),
            });
            let again = if self.coin() { on } else { beside };
            timeline.push(self.launch((again, thread), count(loops)));
            timeline.push((thread, Op::DestroyStream { stream: on }));
            if self.coin() {
                timeline.push((thread, Op::Sleep { us: 5_000 }));
            }
        }
        timeline
    }

    /// Launches into streams of one context while another is current, which is destroyed while they run.
    pub(super) fn beside(&mut self) -> Timeline {
        let (own, other) = (0, self.b.context(0, false));
        let kind = if self.coin() { StreamKind::Blocking } else { StreamKind::NonBlocking };
        let on = self.b.stream_with(Stream { context: own, kind, urgency: 0 });
        let others = self.b.stream_with(Stream { context: other, kind, urgency: 0 });
        let (word, theirs) = (self.b.device(1), self.b.device_in(other, 1));
        let (blocks, loops) = (self.rng.u32(64..500), self.rng.u32(0..400));
        let long = Kernel::Count { word, blocks, loops, apart: false };
        let of_other = Kernel::Count { word: theirs, blocks, loops: 0, apart: false };
        let nodes = vec![node(kernel(long.clone()), &[]), node(kernel(long.clone()), &[0])];
        let captured = self.coin();
        let graph = self.b.graph(captured, nodes);
        let exec = self.b.exec(graph);
        let mut timeline = if self.coin() { self.warm_up((on, 0), &long) } else { Vec::new() };
        timeline.push((0, Op::CreateContext { context: other }));
        for _ in 0..self.rng.u32(1..=8) {
            let (context, op) = match self.rng.u32(0..5) {
                0 => (own, self.launch((others, 0), of_other.clone()).1),
                1 => (other, Op::Launch { exec, on }),
                _ => (other, self.launch((on, 0), long.clone()).1),
            };
            timeline.push((0, Op::Beside { context, op: Box::new(op) }));
        }
        timeline.push((0, Op::DestroyContext { context: other }));
        timeline.push(self.launch((on, 0), long));
        timeline
    }
}
