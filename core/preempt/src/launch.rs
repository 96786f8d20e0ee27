//! What launches are made of, as they are asked for and as they are decided.

use crate::cuda::{LaunchAttribute, Ptr};
use tally_ipc::ClientRegion;

/// What a launch runs, worked out only if the core is asked.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Index into the kernel table.
    pub kernel: u32,
    pub flags: u32,
    /// Blocks; for a graph its kernel nodes.
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared_bytes: u32,
}

/// What a launch is made of, for whoever launches it in another form.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    Kernel(KernelArguments),
    /// A `CUgraphExec` as the program passed it.
    Graph(Ptr),
    /// Something that is only run as it is.
    Other,
}

/// The arguments of a kernel launch.
#[derive(Clone, Copy, Debug)]
pub struct KernelArguments {
    /// The function or kernel handle.
    pub function: Ptr,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared_bytes: u32,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: u32,
    /// Pointers to the parameters, or null.
    pub params: *mut Ptr,
    /// The other way to pass them, or null.
    pub extra: *mut Ptr,
}

/// Blocks of a grid.
pub(crate) fn blocks_of(grid: [u32; 3]) -> u64 {
    grid.iter().fold(1, |all, n| all.saturating_mul(u64::from(*n)))
}

impl KernelArguments {
    pub(crate) fn attributes(&self) -> &[LaunchAttribute] {
        if self.attributes.is_null() {
            return &[];
        }
        // SAFETY: the caller's array of this length, valid during its call.
        unsafe { std::slice::from_raw_parts(self.attributes, self.attribute_count as usize) }
    }
}

/// The stream that a launch goes to, and its context.
#[derive(Clone, Copy, Debug)]
pub struct StreamState {
    /// The slot of its stream, which no other stream shares.
    pub slot: usize,
    /// The context of its stream.
    pub context: usize,
    /// Launches of its stream that may be unfinished.
    pub backlog: u32,
    /// The stream is in a green context of the program's.
    pub is_in_green: bool,
    /// The stream has attributes that another stream would have to have, too.
    pub has_attributes: bool,
}

/// A launch that is to be made in another form. Its slot's lock is held.
pub struct PlannedLaunch<'a> {
    pub client: &'a ClientRegion,
    pub slot: usize,
    /// The stream, an explicit handle.
    pub stream: usize,
    /// The context of the stream.
    pub context: usize,
    /// It waits for the legacy stream, and that for it.
    pub is_blocking: bool,
    pub kernel: u32,
    /// What another form of the launch is made from.
    pub target: Target,
    pub ticket: u64,
    /// Number of the launch in the slot.
    pub number: u32,
    /// More of the same launch is before it: its first part waits at the gate, too.
    pub follows: bool,
}
