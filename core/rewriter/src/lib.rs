//! CUDA code containers, and transforming the kernels in them.
//!
//! [`fatbin`] reads the container that `nvcc` embeds in programs and that
//! `cuModuleLoadData` takes, [`cubin`] the machine code in it, [`ptx`] the PTX.
//! [`image::rewrite`] gives kernels of any of the three a transformed form: the claim-table
//! prelude or offset block indices, both driven by a [`ControlBlock`]. What cannot be
//! transformed is refused with a [`TransformRefusal`]. [`disk_cache`] keeps what was made for the next time.
//!
//! Nothing here trusts its input, runs code or touches a device.

#![forbid(unsafe_code)]

pub mod control;
pub mod cubin;
pub mod disk_cache;
pub mod fatbin;
pub mod image;
pub mod names;
pub mod proof;
pub mod ptx;
pub mod refusal;
pub mod rewritten;

pub use control::ControlBlock;
pub use refusal::TransformRefusal;
pub use rewritten::{KernelForm, Rewritten, TransformedKernel};
