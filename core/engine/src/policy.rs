//! What the engine asks of a policy, and what a policy may ask back.
//!
//! The types mirror `wit/policy.wit`, which is their reference manual; the
//! engine knows nothing of WebAssembly. A policy call gets the [`World`] (what
//! it may read) and a [`Commands`] buffer (what it wants done); the engine
//! carries the commands out after the call has returned, so a policy never runs
//! inside a half-changed state machine.

use crate::profile::Profiles;
use std::collections::BTreeMap;

/// A client of this core; dense, never reused within one run.
pub type ClientId = u32;
/// One (kernel, image, grid, block); dense.
pub type KernelId = u32;

/// What a client was admitted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Latency-critical: holds a standing grant.
    High,
    /// Each launch is decided.
    BestEffort,
}

/// Bits of [`Launch::flags`], in the order of the contract's `launch-flags`.
pub mod launch_flags {
    /// A high-priority client has work on this GPU now.
    pub const HIGH_BUSY: u32 = 1 << 0;
    /// Held before, offered again.
    pub const OFFERED_AGAIN: u32 = 1 << 1;
    /// A CUDA graph launch.
    pub const GRAPH: u32 = 1 << 2;
    /// A cooperative launch.
    pub const COOPERATIVE: u32 = 1 << 3;
    /// Launched with thread-block clusters.
    pub const CLUSTERED: u32 = 1 << 4;
    /// Can be run as slices.
    pub const CAN_SLICE: u32 = 1 << 5;
    /// Can give way at block boundaries.
    pub const CAN_PREEMPT: u32 = 1 << 6;
    /// Can be run on a subset of the SMs.
    pub const CAN_PARTITION: u32 = 1 << 7;
    /// A cut form could be made.
    pub const CAN_PREPARE: u32 = 1 << 8;
}

/// One launch to decide; the contract's `launch`, field for field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Now, monotonic nanoseconds.
    pub now_ns: u64,
    /// Who launches.
    pub client: ClientId,
    /// Its class.
    pub class: Class,
    /// What it launches.
    pub kernel: KernelId,
    /// [`launch_flags`].
    pub flags: u32,
    /// Blocks in the grid.
    pub grid_blocks: u64,
    /// Threads in a block.
    pub block_threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Expected GPU time; 0 if never measured.
    pub predicted_ns: u64,
    /// Time this launch has waited.
    pub waited_ns: u64,
    /// Predicted GPU time of the client's unfinished launches.
    pub in_flight_ns: u64,
    /// Time since high-priority activity ended; 0 during, `u64::MAX` if never.
    pub high_quiet_ns: u64,
    /// High-priority clients connected.
    pub high_clients: u32,
    /// Best-effort clients with a launch waiting.
    pub waiting_clients: u32,
    /// Which of the client's streams.
    pub stream: u32,
    /// SMs of the GPU; 0 if unknown.
    pub sm_count: u32,
}

/// What to do with a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Run as is, with a lease of this many further launches.
    Run(u32),
    /// Offer again after this many nanoseconds.
    Hold(u64),
    /// Slices of this many blocks.
    Slice(u32),
    /// Give way at block boundaries.
    Preemptible,
    /// On this many SMs.
    Partition(u32),
}

/// How a launch was run in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Form {
    /// Unchanged.
    Whole,
    /// As slices.
    Sliced,
    /// Able to give way.
    Preemptible,
    /// On a subset of the SMs.
    Partitioned,
}

/// A client as policies see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientInfo {
    /// Its id.
    pub id: ClientId,
    /// Its class.
    pub class: Class,
    /// Its name.
    pub name: String,
    /// Its labels, in the order given.
    pub labels: Vec<(String, String)>,
}

/// A best-effort launch that has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Whose.
    pub client: ClientId,
    /// What.
    pub kernel: KernelId,
    /// How it was run.
    pub form: Form,
    /// Blocks of a slice, SMs of a partition; else 0.
    pub argument: u32,
    /// Predicted when decided; 0 if unknown.
    pub predicted_ns: u64,
    /// Time seen on the device, as its client reports it, bounded by what can be true; `None` if
    /// nobody timed it.
    pub measured_ns: Option<u64>,
    /// GPU time that the accounts count for it: what was measured, or the share of the time until
    /// its end was seen, in bounds that its prediction sets.
    pub charged_ns: u64,
}

impl Completion {
    /// What the contract's `completion.measured-ns` says: 0.1 has one time, and that is the charged
    /// one. The only place that maps the two.
    pub fn contract_measured_ns(&self) -> u64 {
        self.charged_ns
    }
}

/// Something a policy is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A client registered.
    ClientJoined(ClientInfo),
    /// A client is gone.
    ClientLeft(ClientId),
    /// High-priority work appeared.
    HighBusy,
    /// The last high-priority work ended.
    HighIdle,
    /// A best-effort launch finished.
    KernelDone(Completion),
    /// A timer fired, with its token.
    Timer(u64),
}

/// Bits of [`Command::Subscribe`].
pub mod subscription {
    /// `HighBusy` and `HighIdle`.
    pub const HIGH_ACTIVITY: u32 = 1 << 0;
    /// `KernelDone`.
    pub const COMPLETIONS: u32 = 1 << 1;
}

/// What a policy wants done; carried out after its call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Replace the set of costly events.
    Subscribe(u32),
    /// Send `Timer(token)` after `delay_ns`.
    SetTimer {
        /// From now.
        delay_ns: u64,
        /// Given back with the event.
        token: u64,
    },
    /// Bound a client's unfinished GPU time.
    SetWindow {
        /// Whose.
        client: ClientId,
        /// The bound.
        window_ns: u64,
    },
    /// End a lease.
    RevokeLease(ClientId),
    /// Ask a client to give way, or to go on.
    SetYield {
        /// Who.
        client: ClientId,
        /// Give way.
        yielded: bool,
    },
    /// Do so whenever high-priority work appears.
    SetAutoYield {
        /// Who.
        client: ClientId,
        /// On or off.
        enabled: bool,
        /// Silence before it goes on.
        quiet_ns: u64,
    },
    /// Give or take the right to launch undecided.
    SetStandingGrant {
        /// Whose.
        client: ClientId,
        /// Given or taken.
        granted: bool,
    },
}

/// At most this many commands in one call; further ones are dropped and counted.
pub const COMMANDS_MAX: usize = 256;

/// Commands of one call.
#[derive(Debug, Default)]
pub struct Commands {
    list: Vec<Command>,
    /// Commands beyond [`COMMANDS_MAX`], since the start.
    pub dropped: u64,
}

impl Commands {
    /// Nothing to be done.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Those of this call so far.
    pub fn list(&self) -> &[Command] {
        &self.list
    }

    /// Add one. Never grows beyond the bound, so no allocation after the first calls.
    pub fn push(&mut self, command: Command) {
        if self.list.len() < COMMANDS_MAX {
            self.list.push(command);
        } else {
            self.dropped += 1;
        }
    }

    /// Take them out in order, keeping the buffer.
    pub fn drain(&mut self) -> std::vec::Drain<'_, Command> {
        self.list.drain(..)
    }
}

/// How clients share the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// All clients' kernels run at once.
    #[default]
    Concurrent,
    /// Contexts take turns, and the hardware interrupts kernels.
    TimeSliced,
}

/// What a policy may read during a call.
#[derive(Debug, Default)]
pub struct World {
    /// How clients share the GPU; does not change while a core runs.
    pub sharing: Sharing,
    /// Kernels seen and their measured times.
    pub profiles: Profiles,
    /// Clients connected.
    pub clients: BTreeMap<ClientId, ClientInfo>,
}

/// Passed to every policy call. Boxed so that a host which must own it for the
/// length of a call (wasmtime's store) can swap two pointers instead of copying.
#[derive(Debug, Default)]
pub struct Context {
    /// To read.
    pub world: Box<World>,
    /// To be done.
    pub commands: Box<Commands>,
}

/// Why a policy lost its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FaultKind {
    /// It trapped: a panic, `unreachable`, a wild access, stack overflow.
    Trap,
    /// It used more fuel than a call may, or more time.
    Overrun,
    /// It wanted more memory than it may have.
    Memory,
    /// It answered something that makes no sense (slices of 0 blocks).
    Nonsense,
    /// It called a function that it has not been granted.
    Denied,
    /// It held best-effort work for longer than it may while there was nothing to hold
    /// it for.
    Stall,
    /// It was switched off after too many faults; no call was made.
    Disabled,
}

/// A lost turn, with what is known of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind:?}: {message}")]
pub struct Fault {
    /// Why.
    pub kind: FaultKind,
    /// For people: for a trap, its backtrace.
    pub message: String,
}

/// A scheduling policy, whatever it is written in.
pub trait Policy {
    /// Called once, when the engine puts the policy in charge: the place to hand
    /// over what it wanted done while it was being loaded.
    fn start(&mut self, context: &mut Context) {
        let _ = context;
    }

    /// The engine found fault with it, in something that no single call shows. It
    /// counts like a call that failed.
    fn strike(&mut self, now_ns: u64, fault: &Fault) {
        let _ = (now_ns, fault);
    }

    /// Decide one launch. On a fault the engine answers by its own rule.
    ///
    /// # Errors
    /// A [`Fault`] when the policy could not answer.
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Decision, Fault>;

    /// Take note of something.
    ///
    /// # Errors
    /// A [`Fault`] when the policy could not take it.
    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault>;
}
