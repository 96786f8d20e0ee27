//! Makes the idioms that use graphs.

use super::{Maker, Timeline};
use crate::build::{kernel, node};
use crate::program::{Id, Kernel, Node, Op, Target, Word, Work};

impl Maker {
    /// A graph of random shape, launched a few times in one or two streams of a thread.
    pub(super) fn graph(&mut self) -> Timeline {
        let place = self.place();
        let (captured, count) = (self.coin(), self.rng.usize(2..=7));
        let context = self.context_of(place);
        let words = self.b.device_in(context, 8 * count as u32);
        let nodes = self.nodes(count, words);
        let mut timeline = Vec::new();
        let graph = self.new_graph(captured, nodes.clone(), context);
        let exec = self.b.exec(graph);
        if self.rng.u32(0..3) == 0 {
            timeline.push((place.1, Op::Instantiate { exec }));
        }
        let launches = self.rng.usize(1..=4);
        for i in 0..launches {
            timeline.push((place.1, Op::Launch { exec, on: place.0 }));
            if i + 1 < launches && self.rng.u32(0..4) == 0 {
                let changed = self.changed(&nodes);
                let other = self.new_graph(captured, changed, context);
                timeline.push((place.1, Op::Update { exec, graph: other }));
            }
        }
        if self.rng.u32(0..3) == 0 {
            let target = Target::Stream(place.0);
            timeline.push((place.1, Op::Sync { target, asking: self.coin() }));
            timeline.push((place.1, Op::DestroyExec { exec }));
        }
        timeline
    }

    fn new_graph(&mut self, captured: bool, nodes: Vec<Node>, context: Id) -> Id {
        let graph = self.b.graph(captured, nodes);
        self.b.program.graphs[graph].context = context;
        self.b.program.graphs[graph].cloned = self.rng.u32(0..5) == 0;
        graph
    }

    /// Nodes that each work on words of their own, or on those of a node before them.
    fn nodes(&mut self, count: usize, words: Word) -> Vec<Node> {
        let mut nodes: Vec<Node> = Vec::new();
        let mut last: Vec<u32> = Vec::new();
        for i in 0..count {
            let mut after: Vec<Id> = (0..i).filter(|_| self.rng.u32(0..3) == 0).collect();
            after.truncate(3);
            // The words of one that it depends on, or new ones.
            let own = after.first().map_or(8 * i as u32, |&before| last[before]);
            let taken = |b: &Id| {
                last[*b] == own
                    && nodes
                        .iter()
                        .enumerate()
                        .any(|(n, other)| n != *b && other.after.contains(b) && last[n] == own)
            };
            let own = if after.iter().any(taken) { 8 * i as u32 } else { own };
            last.push(own);
            let (word, value) = (words.plus(own), self.rng.u32(0..1_000));
            let work = match self.rng.u32(0..8) {
                0 => Work::Fill { word, value, count: self.rng.u32(1..=8) },
                1 => Work::Copy { from: word, to: word.plus(self.rng.u32(1..8)) },
                2 => {
                    let word = self.b.host();
                    Work::HostFold { word, value }
                }
                3 | 4 => {
                    let blocks = self.rng.u32(2..=8);
                    kernel(Kernel::Each { word, value, blocks, loops: self.loops() })
                }
                _ => kernel(Kernel::Fold { word, value, loops: self.loops() }),
            };
            nodes.push(node(work, &after));
        }
        nodes
    }

    /// The same nodes with other values.
    fn changed(&mut self, nodes: &[Node]) -> Vec<Node> {
        let mut nodes = nodes.to_vec();
        for node in &mut nodes {
            let new = self.rng.u32(0..1_000);
            match &mut node.work {
                Work::Fill { value, .. } | Work::HostFold { value, .. } => *value = new,
                Work::Kernel {
                    kernel: Kernel::Fold { value, .. } | Kernel::Each { value, .. },
                    ..
                } => {
                    *value = new;
                }
                _ => {}
            }
        }
        nodes
    }

    /// A graph whose branches wait for each other.
    pub(super) fn branches(&mut self) -> Timeline {
        let place = self.place();
        let context = self.context_of(place);
        let (go, seen) = (self.b.device_in(context, 1), self.b.device_in(context, 8));
        let value = self.rng.u32(0..100);
        let mut nodes = vec![node(kernel(Kernel::Set { word: go, value: 0 }), &[])];
        let polls = node(kernel(Kernel::Poll { word: go, value: 1 }), &[0]);
        let fold = |word, value, loops| kernel(Kernel::Fold { word, value, loops });
        let (captured, behind) = (self.coin(), self.rng.u32(0..3));
        if behind == 0 {
            nodes.push(polls);
            nodes.push(node(kernel(Kernel::Set { word: go, value: 1 }), &[0]));
            nodes.push(node(fold(seen, value, 0), &[1, 2]));
        } else {
            // What sets comes late in its branch.
            nodes.push(node(fold(seen.plus(1), value, self.rng.u32(0..2_000)), &[0]));
            nodes.push(polls);
            nodes.push(node(kernel(Kernel::Set { word: go, value: 1 }), &[1]));
            nodes.push(node(fold(seen, value, 0), &[2]));
            nodes.push(node(fold(seen.plus(1), value, 0), &[3]));
        }
        let graph = self.new_graph(captured, nodes, context);
        let exec = self.b.exec(graph);
        let mut timeline = Vec::new();
        for _ in 0..self.rng.usize(1..=5) {
            timeline.push((place.1, Op::Launch { exec, on: place.0 }));
            if self.coin() {
                let target = Target::Stream(place.0);
                timeline.push((place.1, Op::Sync { target, asking: false }));
            }
        }
        timeline
    }

    /// One exec that two threads launch, each in a stream of its own.
    pub(super) fn exec_of_two_threads(&mut self) -> Timeline {
        let one = self.place();
        let other = self.other_place(one);
        let context = self.context_of(one);
        let (inside, errors) = (self.b.device_in(context, 1), self.b.device_in(context, 1));
        let words = self.b.device_in(context, 8);
        let loops = self.loops();
        let alone = || kernel(Kernel::Alone { inside, errors, loops });
        let (value, blocks) = (self.rng.u32(0..100), self.rng.u32(2..=8));
        let nodes = vec![
            node(alone(), &[]),
            node(kernel(Kernel::Each { word: words, value, blocks, loops }), &[0]),
            node(alone(), &[1]),
        ];
        let captured = self.coin();
        let graph = self.new_graph(captured, nodes, context);
        let exec = self.b.exec(graph);
        let mut timeline = Vec::new();
        for _ in 0..self.rng.usize(1..=6) {
            for (on, thread) in [one, other] {
                if self.b.program.streams[on].context == context {
                    timeline.push((thread, Op::Launch { exec, on }));
                }
            }
        }
        timeline
    }
}
