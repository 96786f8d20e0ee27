//! Cubins: CUDA machine code in ELF files.

use crate::{CutForm, Refusal, Rewritten};

/// Give kernels of a cubin a cut form; see [`crate::image::rewrite`].
///
/// # Errors
/// What makes the whole cubin unfit.
pub fn rewrite(image: &[u8], form: CutForm, only: Option<&[&str]>) -> Result<Rewritten, Refusal> {
    let _ = (image, form, only);
    Err(Refusal::UnknownImage)
}
