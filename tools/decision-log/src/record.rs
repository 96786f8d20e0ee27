//! What a log consists of, and how each record is written as bytes.
//!
//! ```text
//! "TALLYLOG"  version u32  length u32  crc32 u32  header
//! length u32  crc32 u32  record                            as often as there are records
//! ```
//!
//! Numbers are little-endian; `crc32` is IEEE's, over the header or the record. A text or list is its
//! length (u32) and its content. The header is JSON: `contract`, `core`, `started_unix_s`, `limits`,
//! `capabilities`. The first byte of a record is its kind:
//!
//! | kind | record | content |
//! | ---: | --- | --- |
//! | 1 | policy activated | generation u64; texts name, SHA-256, path, configuration; reasons: number u8, text; 0, or 1 and the state that it restored or saved: format text, version u32, data |
//! | 2 | base | how the GPU is shared (u8: 0 all at once, 1 in turns); `sm_limits.reserve_sms`, a list of u32; forget the world; a description of it follows, up to 7 |
//! | 3 | kernel | id u32 (the lower 16 bits are its place in the core's table), image 2 x u64, grid 3 x u32, block 3 x u32, name |
//! | 4 | profile | id u32; count, mean, median, p99, latest, waves u64; blocks an SM, registers u32; transformation u8 with its detail; forms: kind u8, argument u32, count, mean, median, p99, latest, turnaround u64 |
//! | 5 | client | id u32, class u8, name, labels |
//! | 6 | client left | id u32 |
//! | 7 | begin | 0 with the policy's start, 1 in mid-run, 2 after a gap, 3 in mid-run with saved state; records lost u64; subscriptions u8; SMs u32 |
//! | 8 | start | commands of `init` |
//! | 9 | decide | the values of `launch`; outcome, with the reason u8; commands |
//! | 10 | event | now u64; event; outcome; commands |
//! | 11 | completion | now u64; one that the policy did not ask for |
//! | 12 | end | reason; records dropped in all u64 |
//! | 13 | fault | now u64; the fault that the engine found with the policy |
//! | 14 | usage | client u32; waiting since u64, in flight u32, in flight ns, measured ns, charged ns u64, floor u32, backlogged ns, backlogged since, cost of an SM limit ns u64: before a call of a policy that reads it |
//! | 15 | service | client u32; objective: 0, or 1 and ns u64, percentile f64; open since u64, open is a token u8, units, units within u64, recent, recent within u32, p50, p99 u64; tokens: 0, or 1 and objective, count, within u64, recent, recent within u32, p50, p99 u64; profile: 0, or 1 and units u64, launches u32, busy u64, gaps u32, gaps, median gap, longest gap u64, most and mean SMs u32: likewise |
//!
//! A profile is written before the call that could see its change. An outcome of 0x10 and more is a fault.
//! A log without an end is good up to its last whole record.
//!
//! The encoders write into a buffer that is kept, so that none of them allocates once it is large enough.

mod encode;

pub use encode::{Encoder, of_call};

use tally_engine::policy::{
    self, ClientId, ClientInfo, Command, Completion, Event, Fault, FaultKind, KernelId, Launch,
    ServiceView, SharingMode, Subscriptions, Usage,
};
use tally_engine::profile::{KernelKey, KernelView};

/// Longest text of a fault that is kept.
pub const FAULT_BYTES_MAX: usize = 512;
/// Longest record. The largest hold a policy's configuration and saved state.
pub const RECORD_BYTES_MAX: usize = 4 << 20;

/// The first byte of each record.
pub mod kind {
    pub const POLICY: u8 = 1;
    pub const BASE: u8 = 2;
    pub const KERNEL: u8 = 3;
    pub const PROFILE: u8 = 4;
    pub const CLIENT: u8 = 5;
    pub const GONE: u8 = 6;
    pub const BEGIN: u8 = 7;
    pub const START: u8 = 8;
    pub const DECIDE: u8 = 9;
    pub const EVENT: u8 = 10;
    pub const COMPLETION: u8 = 11;
    pub const END: u8 = 12;
    pub const FAULT: u8 = 13;
    pub const USAGE: u8 = 14;
    pub const SERVICE: u8 = 15;
}

/// What a policy was handed by the one before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedState {
    /// The name of its format.
    pub format: String,
    /// Rises when the form of the data changes.
    pub version: u32,
    /// The state itself, which only policies of that format can read.
    pub data: Vec<u8>,
}

/// A policy that became active.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// Rises with each policy that becomes active; the first is 1.
    pub generation: u64,
    pub name: String,
    /// SHA-256 of its file, hexadecimal; empty for one that is no file.
    pub digest: String,
    /// Its file; empty if there is none.
    pub path: String,
    /// The text of its configuration.
    pub config: String,
    /// The texts of its reasons, by number.
    pub reasons: Vec<(u8, String)>,
    /// What it started with; before [`Begin::Saved`] what it knew then.
    pub saved: Option<SavedState>,
}

/// How what follows begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// With the policy's start: nothing that it knows came before.
    PolicyStart,
    /// While the policy ran: what it remembers is not in the log.
    MidRun,
    /// After records were lost: what the policy remembers is not in the log.
    AfterGap,
    /// While the policy ran, which wrote down what it knew then: the record of the policy
    /// has it.
    Saved,
}

/// How a call ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome<T> {
    Ok(T),
    /// The policy lost its turn.
    Fault {
        kind: FaultKind,
        /// It ran for too long by the clock, which no replay repeats.
        timed: bool,
        /// The beginning of the message.
        message: String,
    },
}

/// How a call ended, and what the policy wanted done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer<T> {
    pub outcome: Outcome<T>,
    /// In the order in which the policy gave them.
    pub commands: Vec<Command>,
}

/// What holds for the whole GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Base {
    pub sharing: SharingMode,
    /// SMs that each partition leaves free.
    pub reserve_sms: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// This policy is active from now on.
    Policy(About),
    /// Forget the world: all of it follows, up to [`Record::Begin`].
    Base(Base),
    /// A kernel that is new, or at the place of one that is gone (see `tally_engine::profile::Profiles`).
    Kernel { id: KernelId, key: KernelKey },
    /// What policies can learn of a kernel from now on.
    Profile { id: KernelId, view: KernelView },
    /// A client is connected.
    Client(ClientInfo),
    /// What a client has under way, waits for and has used, for a policy that reads it.
    Usage {
        id: ClientId,
        /// What holds from this record on.
        usage: Usage,
    },
    /// What a high-priority client needs and gets, for a policy that reads it.
    Service {
        id: ClientId,
        /// What holds from this record on.
        view: ServiceView,
    },
    /// A client is no longer known; the policy is told later.
    Gone(ClientId),
    /// From here on every call is in the log.
    Begin {
        how: Begin,
        /// Records lost since the last `Begin`.
        lost: u64,
        /// What the active policy has subscribed to.
        subscribed: Subscriptions,
        /// SMs of the GPU, as of the latest decision; 0 before any. Later decisions say it themselves.
        sm_count: u32,
    },
    /// The policy became active, with the commands of its `init`.
    Start(Vec<Command>),
    /// A call of `decide`.
    Decide { launch: Launch, answer: Answer<policy::Answer> },
    /// A call for an event.
    Event { now_ns: u64, event: Event, answer: Answer<()> },
    /// A completion that the policy did not ask for.
    Completion { now_ns: u64, done: Completion },
    /// The engine found fault with the policy, in something that no single call shows.
    Fault {
        now_ns: u64,
        kind: FaultKind,
        /// The beginning of its message.
        message: String,
    },
    /// The log ends in an orderly way.
    End {
        reason: String,
        /// Records lost in all.
        dropped: u64,
    },
}

/// Whether a fault was one of time (`tally-wasm-host` words it so).
pub fn timed(fault: &Fault) -> bool {
    fault.kind == FaultKind::Overrun && fault.message.contains("ms of CPU time")
}

/// The beginning of a text, at most so many bytes.
pub fn beginning(text: &str, bytes_max: usize) -> &str {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
