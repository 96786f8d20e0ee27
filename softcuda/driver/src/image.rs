//! What a program hands to `cuModuleLoad` and `cuLibraryLoad`: PTX text, a
//! fatbin, or a wrapper around one. Compiled code (cubins) cannot run here.

use crate::config::{COMPUTE_CAPABILITY, IMAGE_BYTES_MAX};
use crate::error::CuError;
use crate::exec::LoadError;
use crate::ffi::In;
use tally_rewriter::fatbin::{self, Fatbin};

/// `__fatBinC_Wrapper_t`: magic, version, container, more.
#[repr(C)]
#[derive(Clone, Copy)]
struct Wrapper {
    magic: u32,
    version: u32,
    container: *const u8,
    more: *const u8,
}

/// What was linked begins with it.
pub(crate) const LINKED: &str = "// linked\n";

const WRAPPER_MAGIC: u32 = 0x4662_43b1;
const ELF_MAGIC: u32 = u32::from_le_bytes(*b"\x7fELF");

fn refused(code: CuError, text: impl Into<String>) -> LoadError {
    LoadError { code, text: text.into() }
}

/// The PTX in an image of unknown length in memory.
///
/// # Errors
/// [`LoadError`] if there is none that this device can run.
pub(crate) fn ptx_in_memory(image: &In<u8>) -> Result<String, LoadError> {
    let first = image.at(0).map_err(|code| refused(code, "no image"))?;
    // PTX text may be shorter than a magic number.
    if !matches!(first, 0xb1 | 0x50 | 0x7f) {
        let text = image.zero_terminated().map_err(|code| refused(code, "no image"))?;
        return ptx_text(text);
    }
    let magic = image.cast::<u32>().get().map_err(|code| refused(code, "no image"))?;
    match magic {
        WRAPPER_MAGIC => {
            let wrapper = image.cast::<Wrapper>().get();
            let wrapper = wrapper.map_err(|code| refused(code, "no image"))?;
            container(&In::new(wrapper.container))
        }
        fatbin::MAGIC => container(image),
        ELF_MAGIC => Err(cubin()),
        _ => Err(refused(CuError::INVALID_IMAGE, format!("unknown magic number {magic:#x}"))),
    }
}

/// The PTX in an image whose length is known.
///
/// # Errors
/// As [`ptx_in_memory`].
pub(crate) fn ptx_in_bytes(bytes: &[u8]) -> Result<String, LoadError> {
    let magic = bytes.first_chunk::<4>().map(|b| u32::from_le_bytes(*b));
    match magic {
        Some(fatbin::MAGIC) => from_fatbin(bytes),
        Some(ELF_MAGIC) => Err(cubin()),
        _ => ptx_text(bytes.split(|&b| b == 0).next().unwrap_or(bytes)),
    }
}

fn cubin() -> LoadError {
    let text = "a cubin holds machine code only; this device runs PTX";
    refused(CuError::NO_BINARY_FOR_GPU, text)
}

fn ptx_text(bytes: &[u8]) -> Result<String, LoadError> {
    match std::str::from_utf8(bytes) {
        Ok(text) if text.contains(".version") => Ok(text.to_owned()),
        _ => Err(refused(CuError::INVALID_IMAGE, "neither PTX, a fatbin nor a cubin")),
    }
}

/// A fatbin container in memory; its header says how long it is.
fn container(image: &In<u8>) -> Result<String, LoadError> {
    let broken = |e: fatbin::FatbinError| refused(CuError::INVALID_IMAGE, e.to_string());
    let null = |code| refused(code, "the wrapper holds no container");
    let header = image.bytes(fatbin::HEADER_BYTES).map_err(null)?;
    let bytes = fatbin::container_bytes(header).map_err(broken)?;
    if bytes > IMAGE_BYTES_MAX {
        return Err(refused(CuError::INVALID_IMAGE, format!("a fatbin of {bytes} bytes")));
    }
    from_fatbin(image.bytes(bytes as usize).map_err(null)?)
}

/// The PTX for the newest architecture that this device still is.
fn from_fatbin(bytes: &[u8]) -> Result<String, LoadError> {
    let broken = |e: fatbin::FatbinError| refused(CuError::INVALID_IMAGE, e.to_string());
    let own = (COMPUTE_CAPABILITY.0 * 10 + COMPUTE_CAPABILITY.1) as u32;
    let fatbin = Fatbin::parse(bytes).map_err(broken)?;
    let best = fatbin.choose_ptx(own).ok_or_else(|| {
        let text = format!("the fatbin holds no PTX for sm_{own} or older");
        refused(CuError::NO_BINARY_FOR_GPU, text)
    })?;
    let payload = best.payload().map_err(broken)?;
    ptx_text(payload.split(|&b| b == 0).next().unwrap_or(&payload))
}
