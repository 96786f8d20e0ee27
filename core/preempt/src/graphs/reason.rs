//! Why graphs are launched whole.

use crate::cuda::{CuResult, OUT_OF_MEMORY};
use std::fmt;

/// Why a graph is launched whole.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Reason {
    /// Its instantiation was not seen, or happened while the client kept no copies.
    NoCopy,
    /// The copies have reached [`GRAPH_NODES_KEPT_MAX`](tally_contract::limits::GRAPH_NODES_KEPT_MAX) nodes.
    TooManyCopies,
    /// It has more nodes or edges than the shim examines.
    TooManyNodes(usize),
    /// Fewer than two nodes with kernels: nothing to divide between.
    OneKernel,
    /// Its nodes allocate or free memory.
    Memory,
    /// It has conditional nodes.
    Conditional,
    /// It records events or waits for them.
    Events,
    /// It signals external semaphores or waits for them.
    Semaphores,
    /// It writes or waits for words in memory.
    MemoryOperations,
    /// It has a child graph that cannot be looked into.
    ChildGraph,
    /// It has a node of a kind unknown here.
    OtherNode(i32),
    /// A kernel may start before the one before it ends (programmatic dependent launch).
    ProgrammaticEdges,
    /// Its kernel nodes may be changed by kernels.
    DeviceUpdatable,
    /// Kernels may launch the graph, or others of the program.
    DeviceLaunch,
    /// It has kernels of several contexts.
    SeveralContexts,
    /// A kernel of it waits for others, or for other GPUs, by its name or as was seen.
    Waits,
    /// The program has graphs retain objects, whose ends it may wait for.
    UserObjects,
    /// It was changed after its instantiation.
    Changed,
    /// Two threads launched it at one time, and one did not come back from the driver.
    Contended,
    /// The driver does not copy it.
    CloneRefused(CuResult),
    /// A copy did not have its original's attributes.
    AttributesLost,
    /// Its dependencies have a cycle or name unknown nodes.
    NoOrder,
    /// There was no context to make it in.
    NoContext,
    /// The driver lacks a function.
    Missing(&'static str),
    /// The driver refused something.
    Driver(&'static str, CuResult),
    /// It has no more kernels than a part may have.
    OnePart,
    /// It would have more than [`GRAPH_PARTS_MAX`](tally_contract::limits::GRAPH_PARTS_MAX) parts of this size.
    TooManyParts(usize),
    /// All chains together have [`GRAPH_EXECS_MAX`](tally_contract::limits::GRAPH_EXECS_MAX) parts.
    TooManyExecs,
    /// Another thread is making its parts now.
    BeingMade,
    /// Its parts are made by a launch that finds nothing running in the context.
    Busy,
}

impl Reason {
    /// For another size of parts the answer may be different.
    pub(crate) fn is_of_this_size(self) -> bool {
        matches!(self, Reason::OnePart | Reason::TooManyParts(_))
    }

    /// The driver had no memory.
    pub(crate) fn is_of_memory(self) -> bool {
        matches!(self, Reason::Driver(_, OUT_OF_MEMORY))
    }

    /// It may be different at any time.
    pub(crate) fn will_pass(self) -> bool {
        matches!(self, Reason::Busy | Reason::TooManyExecs)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::NoCopy => "its instantiation was not seen",
            Reason::TooManyCopies => "too many graphs are kept already",
            Reason::TooManyNodes(n) => return write!(f, "it has {n} nodes or edges, too many"),
            Reason::OneKernel => "it has fewer than two nodes with kernels",
            Reason::Memory => "it allocates or frees memory",
            Reason::Conditional => "it has conditional nodes",
            Reason::Events => "it records or waits for events",
            Reason::Semaphores => "it signals or waits for external semaphores",
            Reason::MemoryOperations => "it writes or waits for words in memory",
            Reason::ChildGraph => "it has a child graph that cannot be looked into",
            Reason::OtherNode(kind) => return write!(f, "it has a node of unknown kind {kind}"),
            Reason::ProgrammaticEdges => "it uses programmatic dependent launch",
            Reason::DeviceUpdatable => "its kernel nodes may be changed from the device",
            Reason::DeviceLaunch => "kernels may launch graphs of the program",
            Reason::SeveralContexts => "it has kernels of several contexts",
            Reason::Waits => "a kernel of it waits for others, by its name or as was seen",
            Reason::UserObjects => "the program has graphs retain objects",
            Reason::Changed => "it was changed after its instantiation",
            Reason::Contended => "two threads launched it at one time",
            Reason::CloneRefused(error) => {
                return write!(f, "the driver does not copy it (error {error})");
            }
            Reason::AttributesLost => "a copy did not keep its kernels' attributes",
            Reason::NoOrder => "its dependencies make no order",
            Reason::NoContext => "it was instantiated without a current context",
            Reason::Missing(call) => return write!(f, "the driver has no {call}"),
            Reason::Driver(call, error) => return write!(f, "{call} failed (error {error})"),
            Reason::OnePart => "it has no more kernels than one part may have",
            Reason::TooManyParts(n) => return write!(f, "it would have {n} parts, too many"),
            Reason::TooManyExecs => "too many parts of graphs exist already",
            Reason::BeingMade => "its parts are being made",
            Reason::Busy => {
                "its parts are made by a launch that finds nothing running in its context"
            }
        })
    }
}

/// What is known about an exec.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum GraphState {
    /// Nothing: its instantiation was not seen, or not kept.
    Unknown,
    /// It can be launched in parts.
    Transformable {
        /// Kernel nodes, those in child graphs included.
        kernel_nodes: u32,
    },
    /// It is only launched whole, for this reason.
    Whole(Reason),
}

impl fmt::Display for GraphState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GraphState::Unknown => f.write_str("unknown"),
            GraphState::Transformable { kernel_nodes } => {
                write!(f, "can be launched in parts ({kernel_nodes} kernels)")
            }
            GraphState::Whole(reason) => write!(f, "launched whole: {reason}"),
        }
    }
}
