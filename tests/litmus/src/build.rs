//! Helpers that put litmus programs together.

use crate::program::{
    Blocks, Context, Environment, Event, Graph, Id, Kernel, Module, Node, Op, Program, Source,
    Stream, StreamKind, Target, Thread, Word, Work,
};

/// A program in the making. Every call that makes something returns its index.
pub struct Builder {
    pub program: Program,
}

impl Builder {
    pub fn new(name: impl Into<String>) -> Self {
        Self { program: Program::new(name) }
    }

    pub fn environment(mut self, environment: Environment) -> Self {
        self.program.environment = environment;
        self
    }

    /// `count` new words of the device, of the same place in all contexts.
    pub fn device(&mut self, count: u32) -> Word {
        self.device_in(0, count)
    }

    pub fn device_in(&mut self, context: Id, count: u32) -> Word {
        let at = self.program.device_words;
        self.program.device_words += count;
        Word::Device(context, at)
    }

    pub fn host(&mut self) -> Word {
        let at = self.program.host_words;
        self.program.host_words += 1;
        Word::Host(at)
    }

    pub fn scratch(&mut self, count: u32) -> u32 {
        let at = self.program.scratch_words;
        self.program.scratch_words += count;
        at
    }

    pub fn context(&mut self, process: u8, primary: bool) -> Id {
        self.program.contexts.push(Context { process, primary });
        self.program.contexts.len() - 1
    }

    pub fn stream(&mut self, kind: StreamKind) -> Id {
        self.stream_with(Stream { context: 0, kind, urgency: 0 })
    }

    pub fn stream_with(&mut self, stream: Stream) -> Id {
        self.program.streams.push(stream);
        self.program.streams.len() - 1
    }

    pub fn event(&mut self, timed: bool) -> Id {
        self.event_in(0, timed)
    }

    pub fn event_in(&mut self, context: Id, timed: bool) -> Id {
        self.program.events.push(Event { context, timed });
        self.program.events.len() - 1
    }

    pub fn module(&mut self, source: Source, constant: u32) -> Id {
        self.program.modules.push(Module { context: 0, source, constant });
        self.program.modules.len() - 1
    }

    pub fn graph(&mut self, captured: bool, nodes: Vec<Node>) -> Id {
        self.program.graphs.push(Graph { context: 0, captured, cloned: false, nodes });
        self.program.graphs.len() - 1
    }

    pub fn exec(&mut self, graph: Id) -> Id {
        self.program.execs.push(graph);
        self.program.execs.len() - 1
    }

    pub fn flag(&mut self) -> Id {
        self.program.flags += 1;
        self.program.flags - 1
    }

    pub fn thread(&mut self) -> Id {
        self.thread_in(0)
    }

    pub fn thread_in(&mut self, process: u8) -> Id {
        self.program.threads.push(Thread { process, ops: Vec::new() });
        self.program.threads.len() - 1
    }

    /// Appends an operation to a thread.
    pub fn op(&mut self, thread: Id, op: Op) {
        self.program.threads[thread].ops.push(op);
    }

    pub fn submit(&mut self, thread: Id, on: Id, work: Work) {
        self.op(thread, Op::Submit { on, work });
    }

    /// A kernel of the module that is there anyway.
    pub fn launch(&mut self, thread: Id, on: Id, kernel: Kernel) {
        self.submit(thread, on, Work::Kernel { kernel, module: 0 });
    }

    pub fn sync(&mut self, thread: Id, on: Id) {
        self.op(thread, Op::Sync { target: Target::Stream(on), asking: false });
    }

    pub fn sleep(&mut self, thread: Id, us: u32) {
        self.op(thread, Op::Sleep { us });
    }

    /// A meeting of all blocks of one wave, over a word of its own.
    pub fn barrier(&mut self, thread: Id, on: Id, word: Word, blocks: Blocks, streamk: bool) {
        let arrived = self.device(1);
        self.launch(thread, on, Kernel::Barrier { arrived, word, blocks, rounds: 2, streamk });
    }

    /// `times` short launches, each waited for: what a scheduler learns a kernel from.
    pub fn warm_up(&mut self, thread: Id, on: Id, kernel: &Kernel, times: u32) {
        for _ in 0..times {
            self.launch(thread, on, kernel.clone());
            self.sync(thread, on);
            self.sleep(thread, 1_000);
        }
    }
}

/// A node that does `work` after others.
pub fn node(work: Work, after: &[Id]) -> Node {
    Node { work, after: after.to_vec() }
}

/// A kernel of the module that is there anyway, as work.
pub fn kernel(kernel: Kernel) -> Work {
    Work::Kernel { kernel, module: 0 }
}
