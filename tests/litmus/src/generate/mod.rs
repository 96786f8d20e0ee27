//! Programs from seeds.
//!
//! A program is a few *idioms* (what real programs do with streams, events, words in memory, graphs,
//! modules, contexts) over the same threads and streams, shuffled into one another. An idiom is written as a
//! timeline: the operations of all its threads in an order in which they could run one by one, save
//! for polls that come before what they wait for. What is not certain to end, or to end with one set of
//! values, is thrown away ([`crate::model`]) and another tried.

mod chains;
mod graphs;
mod idioms;

use crate::build::Builder;
use crate::model;
use crate::program::{Device, Environment, Id, Op, Program, Stream, StreamKind, Word};
use fastrand::Rng;

/// The least device that programs are made for.
pub const DEVICE: Device = Device { sms: 8, wave: 8 };
/// Programs tried before a smaller one is taken.
const TRIES: u64 = 60;

/// Environments, and in how many of 100 programs.
const ENVIRONMENTS: [(u32, Environment); 8] = {
    const fn of(connections: u8, blocking: bool, eager: bool, pair: bool) -> Environment {
        Environment { connections, blocking, eager, pair }
    }
    [
        (36, of(8, false, true, false)),
        (14, of(8, false, false, false)),
        (12, of(1, false, true, false)),
        (8, of(2, false, true, false)),
        (8, of(32, false, false, false)),
        (8, of(8, true, true, false)),
        (4, of(1, false, false, false)),
        (10, of(8, false, true, true)),
    ]
};

/// Operations of an idiom's threads, in one possible order.
type Timeline = Vec<(Id, Op)>;

/// The program of a seed: the same one everywhere.
pub fn program(seed: u64) -> Program {
    let mut rng = Rng::with_seed(seed);
    let at = rng.u32(0..100);
    let mut sum = 0;
    let found = ENVIRONMENTS.iter().find(|(percent, _)| {
        sum += percent;
        at < sum
    });
    let environment = found.map_or(Environment::default(), |(_, environment)| *environment);
    for attempt in 0..TRIES {
        // Smaller ones if nothing comes of large ones.
        let idioms = rng.usize(1..=6).min(1 + (TRIES - attempt) as usize / 8);
        let own = Rng::with_seed(rng.u64(..));
        let program = Maker::new(seed, environment, own).make(idioms);
        if model::check(&program, DEVICE).is_ok() {
            return program;
        }
    }
    // An idiom that always ends.
    Maker::new(seed, environment, rng).make(0)
}

/// What a program is made with.
struct Maker {
    b: Builder,
    rng: Rng,
    /// Threads that are there from the start to the end.
    threads: Vec<Id>,
    /// Their streams, with the thread that uses each.
    streams: Vec<(Id, Id)>,
}

impl Maker {
    fn new(seed: u64, environment: Environment, rng: Rng) -> Self {
        let b = Builder::new(format!("seed-{seed}")).environment(environment);
        Self { b, rng, threads: Vec::new(), streams: Vec::new() }
    }

    fn make(mut self, idioms: usize) -> Program {
        let ends = self.cast();
        let timelines: Vec<Timeline> = match idioms {
            0 => vec![self.chain()],
            n => (0..n).map(|_| self.idiom()).collect(),
        };
        for (thread, op) in self.shuffle(timelines) {
            self.b.op(thread, op);
        }
        for (thread, op) in ends {
            self.b.op(thread, op);
        }
        self.b.program
    }

    /// Threads and streams. Returns what comes at the end.
    fn cast(&mut self) -> Timeline {
        let pair = self.b.program.environment.pair;
        let mut ends = Vec::new();
        self.threads.push(0);
        if pair {
            let context = self.b.context(1, true);
            let other = self.b.thread_in(1);
            self.threads.push(other);
            self.some_streams(other, context);
        }
        for _ in 0..self.rng.usize(0..=2) {
            let thread = self.b.thread();
            self.b.op(0, Op::Start { thread });
            ends.push((0, Op::Join { thread }));
            self.threads.push(thread);
            self.some_streams(thread, 0);
        }
        self.some_streams(0, 0);
        ends
    }

    fn some_streams(&mut self, thread: Id, context: Id) {
        use StreamKind::{Blocking, Legacy, NonBlocking, PerThread};
        for _ in 0..self.rng.usize(1..=3) {
            let kind = match self.rng.u32(0..10) {
                0 | 1 => Blocking,
                2 => PerThread,
                // Of one thread only: others' work in it would come in no order.
                3 if thread == self.threads[0] || context != 0 => Legacy,
                _ => NonBlocking,
            };
            let own = matches!(kind, Blocking | NonBlocking);
            let urgency = if own && self.rng.u32(0..5) == 0 { self.rng.u8(1..=3) } else { 0 };
            let stream = self.b.stream_with(Stream { context, kind, urgency });
            self.streams.push((stream, thread));
        }
    }

    /// One of the idioms, at random.
    fn idiom(&mut self) -> Timeline {
        match self.rng.u32(0..46) {
            0..=6 => self.chain(),
            7 => self.meet(),
            8..=10 => self.poll_first(),
            11 | 12 => self.deep(),
            13 | 14 => self.wave(),
            15..=17 => self.many_blocks(),
            18 | 19 => self.exec_of_two_threads(),
            20..=22 => self.branches(),
            23..=25 => self.graph(),
            26 | 27 => self.modules(),
            28 => self.free(),
            29 | 30 => self.short_thread(),
            31 | 32 => self.many_streams(),
            33 => self.second_context(),
            34 => self.timing(),
            35 | 36 => self.turns_with_legacy(),
            37 => self.attribute(),
            38 | 39 => self.recorded_anew(),
            40 | 41 => self.beside(),
            _ => self.shared_stream(),
        }
    }

    /// Timelines shuffled into one, each in its own order.
    fn shuffle(&mut self, timelines: Vec<Timeline>) -> Timeline {
        let mut left: Vec<_> = timelines.into_iter().map(Vec::into_iter).collect();
        let mut all = Vec::new();
        while !left.is_empty() {
            let at = self.rng.usize(0..left.len());
            // A few at a time: what belongs together often stays so.
            for _ in 0..self.rng.usize(1..=4) {
                all.extend(left[at].next());
            }
            if left[at].len() == 0 {
                drop(left.swap_remove(at));
            }
        }
        all
    }

    /// A stream, with its thread.
    fn place(&mut self) -> (Id, Id) {
        self.streams[self.rng.usize(0..self.streams.len())]
    }

    /// Another one, if there is another.
    fn other_place(&mut self, than: (Id, Id)) -> (Id, Id) {
        let others: Vec<_> = self.streams.iter().copied().filter(|p| *p != than).collect();
        if others.is_empty() { than } else { others[self.rng.usize(0..others.len())] }
    }

    fn context_of(&self, place: (Id, Id)) -> Id {
        self.b.program.streams[place.0].context
    }

    /// A word that both places can use.
    fn common_word(&mut self, one: (Id, Id), other: (Id, Id)) -> Word {
        let (a, b) = (self.context_of(one), self.context_of(other));
        if a != b || self.rng.u32(0..3) == 0 { self.b.host() } else { self.b.device_in(a, 1) }
    }

    fn coin(&mut self) -> bool {
        self.rng.bool()
    }

    /// How long blocks spin: mostly not at all.
    fn loops(&mut self) -> u32 {
        match self.rng.u32(0..8) {
            0 => self.rng.u32(1_000..10_000),
            1 | 2 => self.rng.u32(100..1_000),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_the_same_program_each_time() {
        for seed in 0..40 {
            let one = program(seed);
            assert_eq!(one, program(seed));
            let text = serde_json::to_string(&one).unwrap();
            assert_eq!(serde_json::from_str::<Program>(&text).unwrap(), one);
            model::check(&one, DEVICE).unwrap();
        }
    }

    #[test]
    fn every_operation_and_environment_comes_up() {
        let mut seen = std::collections::BTreeSet::new();
        for program in (0..600).map(program) {
            seen.insert(format!("{:?}", program.environment));
            let nodes = program.graphs.iter().flat_map(|graph| &graph.nodes);
            if nodes.into_iter().any(|n| matches!(n.work, crate::program::Work::Record { .. })) {
                seen.insert("RecordInGraph".to_owned());
            }
            for (_, _, op) in program.ops() {
                let text = format!("{op:?}");
                seen.insert(text.split([' ', '{']).next().unwrap_or_default().to_owned());
                if let Op::Submit { work, .. } = op.plain() {
                    let text = format!("{work:?}").replace("Kernel { kernel: ", "");
                    seen.insert(text.split([' ', '{']).next().unwrap_or_default().to_owned());
                }
            }
        }
        let missing: Vec<_> = [
            "WaitEvent",
            "Record",
            "Launch",
            "Beside",
            "Sync",
            "Ask",
            "Elapsed",
            "Store",
            "Await",
            "Post",
            "Pass",
            "Start",
            "Join",
            "Free",
            "CopyNow",
            "Load",
            "Unload",
            "CreateStream",
            "DestroyStream",
            "CreateContext",
            "DestroyContext",
            "Instantiate",
            "Update",
            "DestroyExec",
            "SetAttribute",
            "Set",
            "Poll",
            "Meet",
            "Fold",
            "Each",
            "Count",
            "Barrier",
            "LookBack",
            "LastBlock",
            "EachSm",
            "Window",
            "Fill",
            "Copy",
            "Pageable",
            "HostFold",
            "HostSet",
            "Write",
            "Wait",
            "Pool",
            "RecordInGraph",
        ]
        .into_iter()
        .filter(|name| !seen.contains(*name))
        .collect();
        assert!(missing.is_empty(), "{missing:?} of {seen:?}");
        let environments = seen.iter().filter(|s| s.starts_with("Environment")).count();
        // `Environment { .. }` is cut off at its fields above: all are one.
        assert!(environments >= ENVIRONMENTS.len(), "{environments}");
    }
}
