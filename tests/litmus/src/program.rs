//! What a litmus program is: the objects that it declares and what its threads do.
//!
//! All work is on 32-bit words that are 0 at first. What the words hold at the end is the
//! program's value. Objects are made before the threads start, unless an operation makes them.

use serde::{Deserialize, Serialize};

/// The index of an object in the program's list of its kind.
pub type Id = usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Word {
    /// A word of device memory, in a context's own memory.
    Device(Id, u32),
    /// A word of host memory: pinned and mapped, the same in all contexts and processes.
    Host(u32),
}

impl Word {
    /// The word `by` further on.
    pub fn plus(self, by: u32) -> Self {
        match self {
            Word::Device(context, at) => Word::Device(context, at + by),
            Word::Host(at) => Word::Host(at + by),
        }
    }
}

/// How many blocks a launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Blocks {
    Fixed(u32),
    /// As many as the device holds at once, as `cuOccupancyMaxActiveBlocksPerMultiprocessor` says.
    Wave,
    /// One on each SM, forced apart by shared memory.
    Sms,
}

/// A kernel of `kernels.ptx` and its arguments. `loops` is how long a block takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kernel {
    Set {
        word: Word,
        value: u32,
    },
    /// Spins until `word >= value`.
    Poll {
        word: Word,
        value: u32,
    },
    /// Sets `set` to 1, then spins until `poll` is: two of these need each other.
    Meet {
        set: Word,
        poll: Word,
    },
    /// `word = word * 31 + value`, plus the module's constant: the order of two shows.
    Fold {
        word: Word,
        value: u32,
        loops: u32,
    },
    /// Block `i` folds `word + i`: a block that runs twice, or never, shows.
    Each {
        word: Word,
        value: u32,
        blocks: u32,
        loops: u32,
    },
    /// Every block adds 1, atomically. `apart`: with so much shared memory that an SM holds one block.
    Count {
        word: Word,
        blocks: u32,
        loops: u32,
        apart: bool,
    },
    /// Adds to `errors` if another kernel is between its begin and end on `inside`.
    Alone {
        inside: Word,
        errors: Word,
        loops: u32,
    },
    /// Every block draws a number; those of one launch must be next to each other, or `errors` is added to. All that
    /// share scratch memory have as many blocks and are in one stream, in which no two have the same `id`, from 1.
    Window {
        scratch: u32,
        errors: Word,
        id: u32,
        blocks: u32,
        loops: u32,
    },
    /// All blocks meet `rounds` times, then each adds 1 to `word`. `arrived` is a word of its
    /// own. `streamk`: under a name by which such kernels are known.
    Barrier {
        arrived: Word,
        word: Word,
        blocks: Blocks,
        rounds: u32,
        streamk: bool,
    },
    /// Block `i` waits for what block `i - 1` leaves in scratch memory; the last one folds the
    /// sum into `word`. Blocks number themselves as they start, or by `%ctaid` if `fixed`.
    LookBack {
        scratch: u32,
        word: Word,
        blocks: u32,
        fixed: bool,
    },
    /// Every block leaves something in scratch memory; the last to finish folds the sum.
    LastBlock {
        scratch: u32,
        word: Word,
        blocks: u32,
        loops: u32,
    },
    /// One block on each SM: they meet, then each adds 1 for an SM not seen before.
    EachSm {
        arrived: Word,
        scratch: u32,
        word: Word,
    },
}

/// Work for the device, in a stream or as a node of a graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// A kernel of a module (0: the one that every context has).
    Kernel { kernel: Kernel, module: Id },
    /// A fill of `count` words.
    Fill { word: Word, value: u32, count: u32 },
    /// A copy of one word.
    Copy { from: Word, to: Word },
    /// A word from pageable memory, by `cuMemcpyHtoDAsync`. Not in graphs.
    Pageable { word: Word, value: u32 },
    /// A host function that folds into a word of the host.
    HostFold { word: Word, value: u32 },
    /// A host function that sets a word of the host.
    HostSet { word: Word, value: u32 },
    /// `cuStreamWriteValue32`. Not in graphs.
    Write { word: Word, value: u32 },
    /// `cuStreamWaitValue32`, for `word >= value`. Not in graphs.
    Wait { word: Word, value: u32 },
    /// Memory from a pool: allocated, filled, added to `word` and freed, all in stream order.
    /// Not in graphs.
    Pool { word: Word, value: u32 },
    /// A record of an event: only in graphs.
    Record { event: Id },
    /// Nothing: only in graphs.
    Empty,
}

/// What a synchronising operation waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    Stream(Id),
    Event(Id),
    Context(Id),
}

/// What a thread does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Puts work into a stream.
    Submit {
        on: Id,
        work: Work,
    },
    Record {
        event: Id,
        on: Id,
    },
    WaitEvent {
        on: Id,
        event: Id,
    },
    Launch {
        exec: Id,
        on: Id,
    },
    /// A launch, of a kernel or an exec, into a stream made for it, while another context of the process is current.
    Beside {
        context: Id,
        op: Box<Op>,
    },
    /// Waits in a synchronising call, or asks again and again if `asking`.
    Sync {
        target: Target,
        asking: bool,
    },
    /// Asks once, whatever the answer.
    Ask {
        target: Target,
    },
    /// `cuEventElapsedTime`, which must work.
    Elapsed {
        from: Id,
        to: Id,
    },
    /// A plain store to a word of the host.
    Store {
        word: Word,
        value: u32,
    },
    /// Waits until a word of the host is at least `value`.
    Await {
        word: Word,
        value: u32,
    },
    /// Lets threads in [`Op::Pass`] go on; no driver call.
    Post {
        flag: Id,
    },
    /// Waits for the flag.
    Pass {
        flag: Id,
    },
    Start {
        thread: Id,
    },
    /// Waits for the thread's end.
    Join {
        thread: Id,
    },
    /// Lets time pass, microseconds.
    Sleep {
        us: u32,
    },
    /// `cuMemFree` of memory made for this.
    Free {
        context: Id,
    },
    /// A copy through pageable memory by two synchronous calls.
    CopyNow {
        from: Word,
        to: Word,
    },
    Load {
        module: Id,
    },
    Unload {
        module: Id,
    },
    CreateStream {
        stream: Id,
    },
    DestroyStream {
        stream: Id,
    },
    CreateContext {
        context: Id,
    },
    /// `cuCtxDestroy`, after its words were read.
    DestroyContext {
        context: Id,
    },
    /// Makes an exec's graph, and the exec.
    Instantiate {
        exec: Id,
    },
    /// `cuGraphExecUpdate` to another graph of the same shape.
    Update {
        exec: Id,
        graph: Id,
    },
    DestroyExec {
        exec: Id,
    },
    /// `cuFuncSetAttribute` of a kernel, to what it is anyway.
    SetAttribute {
        module: Id,
    },
}

impl Op {
    /// What the operation does, whatever context is current.
    pub fn plain(&self) -> &Op {
        match self {
            Op::Beside { op, .. } => op,
            op => op,
        }
    }
}

/// How streams relate to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StreamKind {
    /// The legacy default stream.
    Legacy,
    /// The default stream of the thread that uses it, by the `_ptsz` entry points.
    PerThread,
    /// Waits for the legacy stream, and the legacy stream for it.
    Blocking,
    NonBlocking,
}

/// A stream. Mostly one thread puts work into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stream {
    pub context: Id,
    pub kind: StreamKind,
    /// Steps above the least urgent priority.
    pub urgency: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    pub context: Id,
    pub timed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Context {
    /// The process that it is in, 0 or 1.
    pub process: u8,
    /// The primary context, which every process has from its start.
    pub primary: bool,
}

/// How a module's image gets to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// Text on the heap, freed after the load.
    Heap,
    /// Text in a static buffer that all such modules use, one after the other.
    Static,
    /// A file that is replaced after the load by another program with the same kernels.
    File,
    Library,
    /// PTX in a fatbin.
    Fatbin,
}

/// A module with all kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    pub context: Id,
    pub source: Source,
    /// What its kernels add in each fold; no two modules look different otherwise.
    pub constant: u32,
}

/// A node of a graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub work: Work,
    /// Nodes before it, by their place in the list.
    pub after: Vec<Id>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Graph {
    pub context: Id,
    /// By stream capture, else node by node.
    pub captured: bool,
    /// An exec is made of a clone.
    pub cloned: bool,
    pub nodes: Vec<Node>,
}

/// A thread of the program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thread {
    /// The first thread of each process is there from the start; [`Op::Start`] starts others.
    pub process: u8,
    pub ops: Vec<Op>,
}

/// What the process was started with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Environment {
    pub connections: u8,
    pub blocking: bool,
    /// `CUDA_MODULE_LOADING` is `EAGER`, not `LAZY`.
    pub eager: bool,
    pub pair: bool,
}

impl Default for Environment {
    fn default() -> Self {
        Self { connections: 8, blocking: false, eager: true, pair: false }
    }
}

impl Environment {
    pub fn variables(&self) -> [(&'static str, String); 3] {
        [
            ("CUDA_DEVICE_MAX_CONNECTIONS", self.connections.to_string()),
            ("CUDA_LAUNCH_BLOCKING", u8::from(self.blocking).to_string()),
            ("CUDA_MODULE_LOADING", if self.eager { "EAGER" } else { "LAZY" }.to_owned()),
        ]
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    pub name: String,
    pub environment: Environment,
    /// Words of the device in every context, and of the host, whose values count.
    pub device_words: u32,
    pub host_words: u32,
    /// Words of the device that do not count, in every context.
    pub scratch_words: u32,
    pub contexts: Vec<Context>,
    pub streams: Vec<Stream>,
    pub events: Vec<Event>,
    /// The first is the one that is there anyway.
    pub modules: Vec<Module>,
    pub graphs: Vec<Graph>,
    /// The graph that each exec is of.
    pub execs: Vec<Id>,
    pub flags: usize,
    pub threads: Vec<Thread>,
}

impl Program {
    /// One with nothing but a primary context, its module, and a thread.
    pub fn new(name: impl Into<String>) -> Self {
        let base = Module { context: 0, source: Source::Heap, constant: 0 };
        Self {
            name: name.into(),
            environment: Environment::default(),
            device_words: 0,
            host_words: 0,
            scratch_words: 0,
            contexts: vec![Context { process: 0, primary: true }],
            streams: Vec::new(),
            events: Vec::new(),
            modules: vec![base],
            graphs: Vec::new(),
            execs: Vec::new(),
            flags: 0,
            threads: vec![Thread::default()],
        }
    }

    /// All operations, with their threads and places.
    pub fn ops(&self) -> impl Iterator<Item = (Id, usize, &Op)> {
        let threads = self.threads.iter().enumerate();
        threads.flat_map(|(t, thread)| thread.ops.iter().enumerate().map(move |(i, op)| (t, i, op)))
    }

    /// Whether an operation satisfies `is`.
    pub fn has(&self, is: impl Fn(&Op) -> bool) -> bool {
        self.ops().any(|(_, _, op)| is(op))
    }

    /// Whether a thread that is started may end while there is work in its per-thread stream. On an H200 (driver
    /// 580) about one in a hundred such ends never returns, without Tally.
    pub fn ends_threads_with_work(&self) -> bool {
        let is_own = |on: Id| self.streams[on].kind == StreamKind::PerThread;
        let open = |open: bool, op: &Op| match *op {
            Op::Submit { on, .. }
            | Op::Record { on, .. }
            | Op::WaitEvent { on, .. }
            | Op::Launch { on, .. }
                if is_own(on) =>
            {
                true
            }
            Op::Sync { target: Target::Stream(on), .. } if is_own(on) => false,
            _ => open,
        };
        let started = self.ops().filter_map(|(_, _, op)| match op {
            Op::Start { thread } => Some(*thread),
            _ => None,
        });
        started.into_iter().any(|thread| self.threads[thread].ops.iter().fold(false, open))
    }

    /// The process that a context, and what belongs to it, is in.
    pub fn process_of(&self, context: Id) -> u8 {
        self.contexts[context].process
    }
}

/// What a device holds, as far as programs' values depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    pub sms: u32,
    /// Blocks of a [`Blocks::Wave`].
    pub wave: u32,
}

impl Kernel {
    /// Blocks of the grid on this device.
    pub fn blocks(&self, device: Device) -> u32 {
        match self {
            Kernel::Each { blocks, .. }
            | Kernel::Count { blocks, .. }
            | Kernel::Window { blocks, .. }
            | Kernel::LookBack { blocks, .. }
            | Kernel::LastBlock { blocks, .. } => *blocks,
            Kernel::Barrier { blocks, .. } => match blocks {
                Blocks::Fixed(n) => *n,
                Blocks::Wave => device.wave,
                Blocks::Sms => device.sms,
            },
            Kernel::EachSm { .. } => device.sms,
            _ => 1,
        }
    }

    /// Blocks that may spin until something else happens, their own kernel's blocks included.
    pub fn spinning(&self, device: Device) -> u32 {
        match self {
            Kernel::Poll { .. } | Kernel::Meet { .. } => 1,
            Kernel::Barrier { .. } | Kernel::EachSm { .. } => self.blocks(device),
            // Blocks that start later wait for those that started before: these never spin for ever.
            Kernel::LookBack { fixed: true, .. } => self.blocks(device),
            _ => 0,
        }
    }
}
