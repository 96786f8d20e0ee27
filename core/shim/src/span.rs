//! Where a code image lies in memory, and its bytes, before anybody has said that it is one.
//!
//! Memory is read through the system, which fails where there is none: a driver may refuse an image by its first
//! bytes, without ever reading as far as its headers say.

use std::ffi::c_void;
use tally_rewriter::fatbin::{self, Fatbin};

/// `fatbinData`'s wrapper: what `cuModuleLoadFatBinary` and cudart pass.
pub const WRAPPER_MAGIC: [u8; 4] = 0x4662_43b1_u32.to_le_bytes();
/// First bytes of a fat binary.
pub const FATBIN_MAGIC: [u8; 4] = fatbin::MAGIC.to_le_bytes();
pub const ELF_MAGIC: [u8; 5] = *b"\x7fELF\x02";
const ELF_HEADER_BYTES: usize = 64;
const SECTION_HEADER_BYTES: usize = 64;
/// Sections of the type have no bytes.
const SHT_NOBITS: u64 = 8;
/// The longest image that is kept, bytes.
pub const IMAGE_BYTES_MAX: usize = 1 << 30;
/// Bytes of a text that are read at once.
const CHUNK_BYTES: usize = 4096;

/// Where an image lies, whatever wraps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub start: usize,
    /// How long it is, a text without its NUL.
    pub bytes: usize,
    /// A load of just these bytes is the same load.
    pub is_plain: bool,
}

/// Reads memory of this process; returns how many bytes there were.
pub fn read(at: usize, to: &mut [u8]) -> usize {
    let mut done = 0;
    while done < to.len() {
        let rest = &mut to[done..];
        let local = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let remote =
            libc::iovec { iov_base: at.wrapping_add(done) as *mut c_void, iov_len: rest.len() };
        // SAFETY: writes to `rest`; where there is nothing to read it fails.
        let got = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
        match usize::try_from(got) {
            Ok(got) if got > 0 => done += got,
            _ => break,
        }
    }
    done
}

fn array<const N: usize>(at: usize) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    (read(at, &mut bytes) == N).then_some(bytes)
}

/// Reads a little-endian field of a header.
fn field(header: &[u8], at: usize, bytes: usize) -> u64 {
    header[at..at + bytes].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// The end of what an ELF file's header tables and sections reach. `section` gives the header of a section at an
/// offset.
fn elf_length(
    header: &[u8],
    mut section: impl FnMut(usize) -> Option<[u8; SECTION_HEADER_BYTES]>,
) -> Option<usize> {
    let table = |offset: usize, size: usize, count: usize| {
        (field(header, offset, 8), field(header, size, 2), field(header, count, 2))
    };
    // e_phoff, e_phentsize, e_phnum; e_shoff, e_shentsize, e_shnum.
    let (segments, segment_bytes, segment_count) = table(32, 54, 56);
    let (sections, section_bytes, section_count) = table(40, 58, 60);
    let mut end = sections.checked_add(section_bytes * section_count)?;
    if segment_count > 0 {
        end = end.max(segments.checked_add(segment_bytes * segment_count)?);
    }
    for index in 0..if section_bytes == 64 { section_count } else { 0 } {
        let at = sections.checked_add(index * section_bytes)?;
        let header = section(usize::try_from(at).ok()?)?;
        // sh_type, sh_offset, sh_size.
        if field(&header, 4, 4) != SHT_NOBITS {
            end = end.max(field(&header, 24, 8).checked_add(field(&header, 32, 8))?);
        }
    }
    usize::try_from(end).ok().filter(|end| (ELF_HEADER_BYTES..=IMAGE_BYTES_MAX).contains(end))
}

/// What no text has, but images of kinds that are not known here: control characters other than white space.
fn is_control(byte: &u8) -> bool {
    byte.is_ascii_control() && !matches!(byte, b'\t'..=b'\r')
}

/// Bytes of a text before its NUL; `None` if it is none.
fn text_length(start: usize) -> Option<usize> {
    let mut chunk = [0; CHUNK_BYTES];
    let mut length = 0;
    while length <= IMAGE_BYTES_MAX {
        let got = read(start.checked_add(length)?, &mut chunk);
        if let Some(end) = chunk[..got].iter().position(is_control) {
            return (chunk[end] == 0).then_some(length + end);
        }
        if got < chunk.len() {
            return None;
        }
        length += got;
    }
    None
}

/// Where an image lies that a load is given; `None` if it is of no known kind, or too long.
pub fn of(image: usize) -> Option<Span> {
    let (start, is_plain) = match array::<16>(image) {
        // magic, version, data, what it was linked with. A later version brings other images.
        Some(wrapper) if wrapper.starts_with(&WRAPPER_MAGIC) => {
            (field(&wrapper, 8, 8) as usize, field(&wrapper, 4, 4) == 1)
        }
        _ => (image, true),
    };
    let magic = array::<4>(start)?;
    let bytes = if magic == FATBIN_MAGIC {
        let header = array::<{ fatbin::HEADER_BYTES }>(start)?;
        usize::try_from(fatbin::container_bytes(&header).ok()?).ok()?
    } else if magic == WRAPPER_MAGIC {
        return None;
    } else if let Some(header) =
        array::<ELF_HEADER_BYTES>(start).filter(|header| header.starts_with(&ELF_MAGIC))
    {
        elf_length(&header, |at| array(start.checked_add(at)?))?
    } else {
        text_length(start)?
    };
    (bytes <= IMAGE_BYTES_MAX).then_some(Span { start, bytes, is_plain })
}

/// Whether bytes are an image from its beginning to its end, none of whose tables leads out of it. What is not may
/// lead a driver that is told no length out of them.
pub fn is_whole(bytes: &[u8]) -> bool {
    if bytes.starts_with(&FATBIN_MAGIC) {
        return Fatbin::parse(bytes).is_ok();
    }
    if bytes.starts_with(&ELF_MAGIC) {
        let section = |at: usize| bytes.get(at..)?.first_chunk().copied();
        let length = bytes.first_chunk::<ELF_HEADER_BYTES>();
        let length = length.and_then(|header| elf_length(header, section));
        return length.is_some_and(|length| length <= bytes.len());
    }
    !bytes.is_empty() && !bytes.starts_with(&WRAPPER_MAGIC) && !bytes.iter().any(is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_control_characters_is_no_text() {
        let unknown = *b"\x7fTileIR\0\x0d\x01 more";
        assert_eq!(of(unknown.as_ptr() as usize), None);
        assert!(!is_whole(b"\x7fTileIR"));
        let text = *b"// a\tcomment \xc3\xa9\r\n.version 7.0\n\0";
        let span = of(text.as_ptr() as usize).unwrap();
        assert_eq!((span.bytes, span.is_plain), (text.len() - 1, true));
        assert!(is_whole(&text[..span.bytes]));
    }
}
