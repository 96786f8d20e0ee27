//! From the bytes that a program loads to the cut form of its kernels.

use crate::fatbin::{self, Fatbin};
use crate::{CutForm, Refusal, Rewritten, cubin, ptx};

/// What kind of image some bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// A fatbin container.
    Fatbin,
    /// Machine code.
    Cubin,
    /// PTX text.
    Ptx,
}

impl ImageKind {
    /// Of an image, by its first bytes.
    pub fn of(image: &[u8]) -> Option<Self> {
        if image.starts_with(&fatbin::MAGIC.to_le_bytes()) {
            return Some(ImageKind::Fatbin);
        }
        if image.starts_with(b"\x7fELF") {
            return Some(ImageKind::Cubin);
        }
        let text = std::str::from_utf8(&image[..image.len().min(4096)]);
        let text = text.or_else(|e| std::str::from_utf8(&image[..e.valid_up_to()])).ok()?;
        text.contains(".version").then_some(ImageKind::Ptx)
    }
}

/// Give the kernels named in `only` (all, if it is `None`) of an image the cut form
/// `form` for a device of architecture `arch` (90 for compute capability 9.0), of the
/// code that the driver would choose there: machine code where there is some for the
/// device, else PTX.
///
/// # Errors
/// Why nothing of the image can be cut. What only concerns one kernel is in
/// [`Rewritten::refused`].
pub fn rewrite(
    image: &[u8],
    arch: u32,
    form: CutForm,
    only: Option<&[&str]>,
) -> Result<Rewritten, Refusal> {
    match ImageKind::of(image).ok_or(Refusal::UnknownImage)? {
        ImageKind::Cubin => cubin::rewrite(image, form, only),
        ImageKind::Ptx => rewrite_text(image, form, only),
        ImageKind::Fatbin => {
            let container = Fatbin::parse(image).map_err(|_| Refusal::Malformed)?;
            let entry = container.choose(arch).ok_or(Refusal::NoCodeForDevice)?;
            if !container.is_certain(entry) {
                return Err(Refusal::SeveralCodes);
            }
            let payload = entry.payload().map_err(|_| Refusal::Malformed)?;
            match entry.kind {
                fatbin::Kind::Elf => cubin::rewrite(&payload, form, only),
                _ => rewrite_text(&payload, form, only),
            }
        }
    }
}

fn rewrite_text(image: &[u8], form: CutForm, only: Option<&[&str]>) -> Result<Rewritten, Refusal> {
    let text = image.split(|b| *b == 0).next().unwrap_or_default();
    let text = std::str::from_utf8(text).map_err(|_| Refusal::Malformed)?;
    ptx::rewrite(text, form, only)
}
