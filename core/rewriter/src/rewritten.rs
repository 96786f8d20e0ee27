//! What a rewriter gives back.

use crate::TransformRefusal;

/// Which transformed form an image was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelForm {
    /// By claims: in a prelude, each block claims itself in a table. The launch keeps the whole grid, runs any range
    /// of its blocks, and can be preempted.
    ByClaims,
    /// By offset: the launch has only some of the blocks, and the kernel adds the first one's number to the index that
    /// it reads. In machine code, for grids of one dimension.
    ByOffset,
}

/// One kernel in its transformed form: how it is launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransformedKernel {
    /// Its name in the rewritten image (the same as in the original).
    pub name: String,
    /// Parameters that the original has: the control block is the next.
    pub parameter_count: u32,
    /// Where the control block lies in the parameter buffer, bytes.
    pub control_offset: u32,
    /// Cluster dimensions fixed at compile time, in blocks.
    pub cluster: Option<[u32; 3]>,
    /// Its blocks may wait for one another: it has reads that see what other blocks write meanwhile (volatile
    /// or strong loads, atomics whose result it uses, fences wider than a block), or calls a function through a
    /// register. Other kernels are taken not to wait: without a fence, compilers may hoist a plain load out of
    /// a loop.
    pub may_wait: bool,
    /// It reads which SM it runs on, or how many there are: on some of the SMs it may do other work.
    pub reads_sm: bool,
}

/// An image after rewriting, with what the launcher must know of its kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rewritten {
    /// PTX text (not NUL-terminated) or a cubin.
    pub image: Vec<u8>,
    /// Whether [`Rewritten::image`] is PTX.
    pub is_ptx: bool,
    /// Kernels that have the transformed form.
    pub kernels: Vec<TransformedKernel>,
    /// Kernels that were asked for and have not.
    pub refused: Vec<(String, TransformRefusal)>,
}

impl Rewritten {
    /// The transformed form of a kernel, or why it has none.
    pub fn kernel(&self, name: &str) -> Result<&TransformedKernel, TransformRefusal> {
        if let Some(kernel) = self.kernels.iter().find(|k| k.name == name) {
            return Ok(kernel);
        }
        let refused = self.refused.iter().find(|(n, _)| n == name);
        Err(refused.map_or(TransformRefusal::NoSuchKernel, |(_, why)| *why))
    }
}
