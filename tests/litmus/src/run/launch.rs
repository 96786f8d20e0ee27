//! Kernels with their arguments, ready for a launch or a graph's node.

use super::Run;
use crate::cu::Handle;
use crate::kernels;
use crate::program::{Blocks, Id, Kernel};
use std::ffi::c_void;

/// Threads of a block of a kernel with several blocks; only the first one works.
const THREADS: u32 = 32;
/// Arguments that a kernel has at most.
const ARGUMENTS_MAX: usize = 3;

/// A kernel as the driver wants it.
pub struct Call {
    pub function: Handle,
    pub blocks: u32,
    pub threads: u32,
    pub shared_bytes: u32,
    arguments: [u64; ARGUMENTS_MAX],
}

impl Call {
    /// A kernel of the program's, whose objects are there, for a stream or graph of `context`.
    ///
    /// # Errors
    /// What is not there.
    pub fn new(run: &Run, kernel: &Kernel, module: Id, context: Id) -> Result<Self, String> {
        let at = |word| run.address(word);
        let scratch = |word: u32| run.scratch(context, word);
        let spin = |loops: &u32| u64::from(run.machine.loops(*loops));
        let arguments = match kernel {
            Kernel::Set { word, value } | Kernel::Poll { word, value } => {
                [at(*word)?, (*value).into(), 0]
            }
            Kernel::Meet { set, poll } => [at(*set)?, at(*poll)?, 0],
            Kernel::Fold { word, value, loops } | Kernel::Each { word, value, loops, .. } => {
                [at(*word)?, (*value).into(), spin(loops)]
            }
            Kernel::Count { word, loops, .. } => [at(*word)?, spin(loops), 0],
            Kernel::Alone { inside, errors, loops } => [at(*inside)?, at(*errors)?, spin(loops)],
            Kernel::Window { scratch: s, errors, id, loops, .. } => {
                [scratch(*s)?, at(*errors)?, spin(loops) << 32 | u64::from(*id)]
            }
            Kernel::Barrier { arrived, word, rounds, .. } => {
                [at(*arrived)?, at(*word)?, (*rounds).into()]
            }
            Kernel::LookBack { scratch: s, word, fixed, .. } => {
                [scratch(*s)?, at(*word)?, (*fixed).into()]
            }
            Kernel::LastBlock { scratch: s, word, loops, .. } => {
                [scratch(*s)?, at(*word)?, spin(loops)]
            }
            Kernel::EachSm { arrived, scratch: s, word } => {
                [at(*arrived)?, scratch(*s)?, at(*word)?]
            }
        };
        let apart = match kernel {
            Kernel::Barrier { blocks, .. } => *blocks == Blocks::Sms,
            Kernel::Count { apart, .. } => *apart,
            Kernel::EachSm { .. } => true,
            _ => false,
        };
        let blocks = kernel.blocks(run.machine.device);
        Ok(Self {
            function: run.function(kernels::name(kernel), module, context)?,
            blocks,
            threads: if blocks > 1 { THREADS } else { 1 },
            shared_bytes: if apart { run.machine.shared_max } else { 0 },
            arguments,
        })
    }

    /// `word += *from`, of the program's own module.
    ///
    /// # Errors
    /// What is not there.
    pub fn add_from(run: &Run, context: Id, word: u64, from: u64) -> Result<Self, String> {
        let function = run.function("add_from", 0, context)?;
        let arguments = [word, from, 0];
        Ok(Self { function, blocks: 1, threads: 1, shared_bytes: 0, arguments })
    }

    /// Where the arguments are; each has eight bytes, of which the kernel takes what it needs.
    pub fn params(&self) -> [*mut c_void; ARGUMENTS_MAX] {
        self.arguments.each_ref().map(|a| std::ptr::from_ref(a).cast_mut().cast())
    }
}
