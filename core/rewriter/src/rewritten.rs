//! What a rewriter gives back.

use crate::Refusal;

/// Which transformed form an image was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelForm {
    /// The claim-table prelude: any range of blocks, preemptible. The grid stays.
    Prelude,
    /// Block indices offset: a launch of few blocks computes a range of a larger
    /// grid's. In machine code, of one with a single dimension.
    SubGrid,
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
    pub refused: Vec<(String, Refusal)>,
}

impl Rewritten {
    /// The transformed form of a kernel, or why it has none.
    pub fn kernel(&self, name: &str) -> Result<&TransformedKernel, Refusal> {
        if let Some(kernel) = self.kernels.iter().find(|k| k.name == name) {
            return Ok(kernel);
        }
        let refused = self.refused.iter().find(|(n, _)| n == name);
        Err(refused.map_or(Refusal::NoSuchKernel, |(_, why)| *why))
    }
}
