//! What can go wrong with a kernel that runs.

use crate::PtxError;
use std::fmt;

/// Where a thread was when it trapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// The kernel's PTX name.
    pub kernel: String,
    /// The line of the PTX text.
    pub line: u32,
    pub block: [u32; 3],
    /// `%tid` of the first thread concerned.
    pub thread: [u32; 3],
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([bx, by, bz], [tx, ty, tz]) = (self.block, self.thread);
        write!(
            f,
            "kernel `{}`, PTX line {}, block ({bx}, {by}, {bz}), thread ({tx}, {ty}, {tz})",
            self.kernel, self.line
        )
    }
}

/// Why a block stopped before its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trap {
    /// An access outside what the address space holds.
    #[error("{site}: illegal {} of {bytes} bytes at {space} address {address:#x}", if *.write { "write" } else { "read" })]
    IllegalAddress {
        site: Site,
        /// The address as the kernel gave it.
        address: u64,
        /// The width of the access.
        bytes: u32,
        /// The state space: `global`, `shared`, `local`, `param` or `generic`.
        space: &'static str,
        /// A store or an atomic, not a load.
        write: bool,
    },
    /// An access whose address is not a multiple of its width.
    #[error("{site}: misaligned access of {bytes} bytes at {space} address {address:#x}")]
    Misaligned {
        site: Site,
        /// The address as the kernel gave it.
        address: u64,
        /// The alignment that the access needs.
        bytes: u32,
        /// PTX name of the state space.
        space: &'static str,
    },
    /// A `trap` (or `brkpt`) instruction ran.
    #[error("{site}: the kernel executed `trap`")]
    TrapInstruction { site: Site },
    /// The kernel holds an instruction this interpreter does not know.
    #[error("kernel `{kernel}` cannot run: {error}")]
    Unsupported {
        /// The kernel's PTX name.
        kernel: String,
        /// The instruction and its line.
        error: PtxError,
    },
    /// Calls nested too deeply, or locals outgrew the thread's stack.
    #[error("{site}: the call stack overflowed")]
    StackOverflow { site: Site },
    /// The kernel called `__assertfail`, as a failed device `assert` does.
    #[error("{site}: assertion failed: {message}")]
    Assert {
        site: Site,
        /// The assertion's text, file, line and function.
        message: String,
    },
    /// An instruction met operands it is not defined for.
    #[error("{site}: illegal instruction: {detail}")]
    IllegalInstruction {
        site: Site,
        /// What is wrong with it.
        detail: String,
    },
    /// Every thread left waits at a barrier that can no longer complete.
    #[error("{site}: {waiting} threads wait at barriers that can never complete")]
    BarrierDeadlock {
        /// The first thread that waits.
        site: Site,
        /// Threads that wait at a barrier.
        waiting: u32,
    },
    /// The launch does not fit the kernel.
    #[error("kernel `{kernel}` cannot be launched: {detail}")]
    BadLaunch {
        /// The kernel's PTX name.
        kernel: String,
        detail: String,
    },
    /// The caller's `cancelled` flag was set.
    #[error("the launch was cancelled")]
    Cancelled,
}
