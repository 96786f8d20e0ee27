//! From the bytes that a program loads to the transformed form of its kernels.

use crate::fatbin::{self, Fatbin};
use crate::{KernelForm, Rewritten, TransformRefusal, cubin, ptx};

/// What kind of image some bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// A container of cubins and PTX for several architectures.
    Fatbin,
    Cubin,
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

/// Give the kernels named in `only` (all, if it is `None`) of an image the transformed form
/// `form` for a device of architecture `arch` (90 for compute capability 9.0), of the
/// code that the driver would choose there: machine code where there is some for the
/// device, else PTX.
///
/// # Errors
/// Why nothing of the image can be transformed. What only concerns one kernel is in
/// [`Rewritten::refused`].
pub fn rewrite(
    image: &[u8],
    arch: u32,
    form: KernelForm,
    only: Option<&[&str]>,
) -> Result<Rewritten, TransformRefusal> {
    match ImageKind::of(image).ok_or(TransformRefusal::UnknownImage)? {
        ImageKind::Cubin => cubin::rewrite(image, form, only),
        ImageKind::Ptx => rewrite_text(image, form, only),
        ImageKind::Fatbin => {
            let container = Fatbin::parse(image).map_err(|_| TransformRefusal::Malformed)?;
            let entry = container.choose(arch).ok_or(TransformRefusal::NoCodeForDevice)?;
            if !container.is_certain(entry) {
                return Err(TransformRefusal::SeveralCodes);
            }
            let payload = entry.payload().map_err(|_| TransformRefusal::Malformed)?;
            match entry.kind {
                fatbin::Kind::Elf => cubin::rewrite(&payload, form, only),
                _ => rewrite_text(&payload, form, only),
            }
        }
    }
}

/// Bytes of memory that [`rewrite`] may take, beside the image: an estimate from above.
pub fn working_bytes(image: &[u8], arch: u32) -> usize {
    /// Texts, their parts and what comes out, for each byte of code.
    const EACH_BYTE: usize = 12;
    /// What is put in front of a kernel, and noted of it.
    const EACH_KERNEL_BYTES: usize = 12 << 10;
    const AT_LEAST_BYTES: usize = 16 << 20;
    let unpacked = match ImageKind::of(image) {
        Some(ImageKind::Fatbin) => {
            let container = Fatbin::parse(image).ok();
            container.and_then(|c| Some(c.choose(arch)?.unpacked_bytes())).unwrap_or(0) as usize
        }
        _ => image.len(),
    };
    // Of packed texts it is not known how many kernels they have.
    let kernels = occurrences(image, b".entry").max((unpacked.saturating_sub(image.len())) / 2_048);
    unpacked
        .saturating_mul(EACH_BYTE)
        .saturating_add(kernels.saturating_mul(EACH_KERNEL_BYTES))
        .saturating_add(AT_LEAST_BYTES)
}

fn occurrences(bytes: &[u8], word: &[u8]) -> usize {
    let mut count = 0;
    let mut rest = bytes;
    while let Some(at) = rest.iter().position(|b| *b == word[0]) {
        rest = &rest[at..];
        count += usize::from(rest.starts_with(word));
        rest = &rest[1..];
    }
    count
}

fn rewrite_text(
    image: &[u8],
    form: KernelForm,
    only: Option<&[&str]>,
) -> Result<Rewritten, TransformRefusal> {
    let text = image.split(|b| *b == 0).next().unwrap_or_default();
    let text = std::str::from_utf8(text).map_err(|_| TransformRefusal::Malformed)?;
    ptx::rewrite(text, form, only)
}
