//! Parses PTX and executes it on the CPU, one thread block at a time.
//!
//! This is the fixed interface between the interpreter and the software
//! device (`softcuda/driver`); see [`Module`], [`Program`] and [`run_block`].
//!
//! `tally-ptx` splits the text into statements, `parse` makes an `ast` of them, `regs` packs its registers,
//! `decode` makes the instructions of `ir`, and `exec` runs them with the
//! scalar functions of `lanes`. PTX semantics are those of the PTX ISA 8.x;
//! where that leaves a choice, of a real GPU.

mod ast;
mod decode;
mod error;
mod exec;
mod ir;
mod lanes;
mod parse;
mod program;
mod regs;

pub use error::{Site, Trap};
pub use exec::{BlockLaunch, BlockStats, Scratch, run_block};
pub use program::{Kernel, Module, Param, Program};
pub use tally_ptx::PtxError;

/// Where device memory lives. A device address is a host address; the
/// implementor says which ranges a kernel may touch.
pub trait Memory: Sync {
    /// The allocation that holds `addr`, as `(base, length in bytes)`, or
    /// `None` where nothing is mapped. The interpreter caches the answer for
    /// the duration of one block; generation changes are not needed because a
    /// device frees memory only when no kernel runs.
    fn range(&self, addr: u64) -> Option<(u64, u64)>;
}

/// A module-scope variable that the device must place before the module can run.
#[derive(Clone, Debug)]
pub struct GlobalVar {
    pub name: String,
    pub size: u64,
    pub align: u64,
    /// Initial bytes; shorter than `size` means zero-filled to the end.
    pub init: Vec<u8>,
    /// `true` for `.const`, `false` for `.global`.
    pub constant: bool,
    /// `(byte offset in init, name of another variable)` whose address is stored there.
    pub relocations: Vec<(u64, String)>,
}
