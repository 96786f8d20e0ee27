//! The fatbin container: PTX and cubins for several architectures in one blob.
//!
//! ```text
//! container : u32 magic | u16 version | u16 header bytes | u64 bytes of all entries
//! entry     : u16 kind | u16 version | u32 header bytes | u64 padded payload bytes
//!             u32 compressed bytes | u32 options | u16 minor | u16 major | u32 arch
//!             u32 name offset | u32 name bytes | u64 flags | u64 | u64 unpacked bytes
//!             ... up to the header bytes, then the payload
//! ```
//!
//! There is no public specification; the layout is what files of CUDA 11 to 13
//! show. What is not understood is refused, not guessed.

use std::borrow::Cow;
use std::io::Read;

/// First word of a container.
pub const MAGIC: u32 = 0xBA55_ED50;
/// Bytes of a container's header: enough to know how long the container is.
pub const HEADER_BYTES: usize = 16;
/// Bytes of an entry's header, at least and at most.
pub const ENTRY_HEADER_BYTES: std::ops::RangeInclusive<usize> = 64..=1024;
/// Entries in a container, at most.
pub const ENTRIES_MAX: usize = 4096;
/// An unpacked payload, at most. Also bounds what a hostile size can allocate.
pub const PAYLOAD_BYTES_MAX: u64 = 1 << 30;

const CONTAINER_VERSION: u16 = 1;
const ENTRY_VERSION: u16 = 0x0101;
const KIND_PTX: u16 = 1;
const KIND_ELF: u16 = 2;
const FLAG_LZ4: u64 = 0x2000;
const FLAG_ZSTD: u64 = 0x8000;
/// `sm_90a` and the like: for devices of exactly this architecture.
const FLAG_SPECIFIC: u64 = 0x10_0000;
/// `sm_100f` and the like: for devices of the same major version.
const FLAG_FAMILY: u64 = 0x20_0000;
/// Flags of every entry for 64-bit Linux.
const FLAGS_USUAL: u64 = 0x11;
const FIXED_HEADER_BYTES: u32 = *ENTRY_HEADER_BYTES.start() as u32;
/// Options of a PTX entry without options, behind the fixed header: where their text lies, and an empty text.
/// Driver 580 crashes on PTX entries that lack them.
const OPTIONS_NONE: [u8; 16] =
    [FIXED_HEADER_BYTES as u8 + 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Why a container cannot be read. Offsets count from its first byte.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FatbinError {
    /// The bytes end before a structure does.
    #[error("fatbin: {what} at offset {offset} needs {needed} bytes, {available} are left")]
    Truncated {
        what: &'static str,
        offset: usize,
        needed: u64,
        /// Bytes that follow the offset.
        available: usize,
    },
    /// A field does not hold what it must.
    #[error("fatbin: {what} at offset {offset} is {found:#x}, expected {expected}")]
    Unexpected { what: &'static str, offset: usize, found: u64, expected: &'static str },
    #[error("fatbin: more than {ENTRIES_MAX} entries at offset {offset}")]
    TooManyEntries {
        /// Where the first one too many starts.
        offset: usize,
    },
    /// A payload that does not unpack to what its header says.
    #[error(
        "fatbin: the {how} payload at offset {offset} does not unpack to {expected} bytes: {detail}"
    )]
    Unpack {
        how: Compression,
        offset: usize,
        /// The size its header gives.
        expected: u64,
        /// What the decoder said.
        detail: String,
    },
}

/// What an entry holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Ptx,
    /// Machine code for one architecture.
    Elf,
    /// Something this reader does not know.
    Other(u16),
}

/// How a payload is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compression {
    /// The payload is stored as it is.
    None,
    /// A raw LZ4 block.
    Lz4,
    Zstd,
}

impl std::fmt::Display for Compression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "unpacked",
            Self::Lz4 => "LZ4",
            Self::Zstd => "ZSTD",
        })
    }
}

/// One entry of a container.
#[derive(Clone, Debug)]
pub struct Entry<'a> {
    pub kind: Kind,
    /// The architecture: 90 for `sm_90` or `compute_90`.
    pub arch: u32,
    /// The entry's flags, as they are.
    pub flags: u64,
    /// How the payload is packed.
    pub compression: Compression,
    /// Where the payload starts in the container.
    pub payload_offset: usize,
    unpacked_bytes: u64,
    packed: &'a [u8],
}

/// A container's entries, in order.
#[derive(Clone, Debug)]
pub struct Fatbin<'a> {
    entries: Vec<Entry<'a>>,
}

/// The length of the container that starts with `header`, its header included:
/// for callers that only have an address.
///
/// # Errors
/// [`FatbinError`] if these are not the first bytes of a container.
pub fn container_bytes(header: &[u8]) -> Result<u64, FatbinError> {
    let at = Cursor { bytes: header };
    at.need("container header", 0, HEADER_BYTES as u64)?;
    let magic = at.u32(0);
    if magic != MAGIC {
        return Err(unexpected("magic number", 0, magic, "0xba55ed50"));
    }
    let version = at.u16(4);
    if version != CONTAINER_VERSION {
        return Err(unexpected("container version", 4, version, "1"));
    }
    let header_bytes = at.u16(6);
    if usize::from(header_bytes) < HEADER_BYTES {
        return Err(unexpected("container header size", 6, header_bytes, "16 or more"));
    }
    let size = at.u64(8);
    size.checked_add(header_bytes.into())
        .ok_or_else(|| unexpected("size of all entries", 8, size, "a size below 2^64"))
}

impl<'a> Fatbin<'a> {
    /// Reads the container at the start of `bytes`; what follows it is ignored.
    ///
    /// # Errors
    /// [`FatbinError`], with the offset of what is wrong.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, FatbinError> {
        let total = container_bytes(bytes)?;
        let at = Cursor { bytes };
        at.need("container", 0, total)?;
        let at = Cursor { bytes: &bytes[..total as usize] };
        let mut entries = Vec::new();
        let mut offset = usize::from(at.u16(6));
        // A few bytes of padding may follow the last entry.
        while at.bytes.len().saturating_sub(offset) >= *ENTRY_HEADER_BYTES.start() {
            if entries.len() == ENTRIES_MAX {
                return Err(FatbinError::TooManyEntries { offset });
            }
            let (entry, next) = read_entry(&at, offset)?;
            entries.push(entry);
            offset = next;
        }
        Ok(Self { entries })
    }

    pub fn entries(&self) -> &[Entry<'a>] {
        &self.entries
    }

    /// The entry that the driver uses on a device of architecture `arch` (90 for
    /// compute capability 9.0): machine code of the same major version and the highest
    /// minor one that is no later, else the newest PTX that is no later. Code for one
    /// architecture only (`sm_90a`) fits no other, and goes before code for `sm_90`.
    ///
    /// The first part is NVIDIA's documented rule; which of two entries for the same
    /// device is used is not documented, nor measured here: see [`is_certain`](Self::is_certain).
    pub fn choose(&self, arch: u32) -> Option<&Entry<'a>> {
        self.best(Kind::Elf, arch).or_else(|| self.best(Kind::Ptx, arch))
    }

    /// The PTX entry that the driver would use for a device; cubins are passed over.
    pub fn choose_ptx(&self, arch: u32) -> Option<&Entry<'a>> {
        self.best(Kind::Ptx, arch)
    }

    fn best(&self, kind: Kind, arch: u32) -> Option<&Entry<'a>> {
        let fits = |e: &&Entry<'a>| e.kind == kind && e.fits(arch);
        self.entries.iter().filter(fits).max_by_key(|e| (e.arch, e.reach()))
    }

    /// Whether no other entry is for the same device as `chosen`, so that the driver surely uses it.
    pub fn is_certain(&self, chosen: &Entry<'a>) -> bool {
        let rivals = self.entries.iter().filter(|e| (e.kind, e.arch) == (chosen.kind, chosen.arch));
        rivals.count() == 1
    }
}

/// A container of unpacked entries, as `fatbinary --compress=false` writes it: kind,
/// architecture and content of each. For tests, and to load a rewritten image where a
/// container is expected.
pub fn pack(entries: &[(Kind, u32, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (kind, arch, content) in entries {
        let kind = match kind {
            Kind::Ptx => KIND_PTX,
            Kind::Elf => KIND_ELF,
            Kind::Other(kind) => *kind,
        };
        let padded = content.len().next_multiple_of(8);
        let options = if kind == KIND_PTX { OPTIONS_NONE.as_slice() } else { &[] };
        let options_offset = if kind == KIND_PTX { FIXED_HEADER_BYTES } else { 0 };
        body.extend(kind.to_le_bytes());
        body.extend(ENTRY_VERSION.to_le_bytes());
        body.extend((FIXED_HEADER_BYTES + options.len() as u32).to_le_bytes());
        body.extend((padded as u64).to_le_bytes());
        // Packed size.
        body.extend([0; 4]);
        body.extend(options_offset.to_le_bytes());
        let [major, minor] = if kind == KIND_PTX { ptx_version(content) } else { [0; 2] };
        body.extend(minor.to_le_bytes());
        body.extend(major.to_le_bytes());
        body.extend(arch.to_le_bytes());
        body.extend([0; 8]);
        body.extend(FLAGS_USUAL.to_le_bytes());
        body.extend([0; 16]);
        body.extend(options);
        body.extend(*content);
        body.resize(body.len() + padded - content.len(), 0);
    }
    let mut out = MAGIC.to_le_bytes().to_vec();
    out.extend(CONTAINER_VERSION.to_le_bytes());
    out.extend((HEADER_BYTES as u16).to_le_bytes());
    out.extend((body.len() as u64).to_le_bytes());
    out.extend(body);
    out
}

/// Of PTX, as its text has it; 0.0 if it has none.
fn ptx_version(text: &[u8]) -> [u16; 2] {
    let text = String::from_utf8_lossy(text);
    let version = text.lines().find_map(|line| line.trim().strip_prefix(".version"));
    let numbers = version.and_then(|version| version.trim().split_once('.'));
    let parse = |number: &str| number.parse().unwrap_or(0);
    numbers.map_or([0; 2], |(major, minor)| [parse(major), parse(minor)])
}

fn read_entry<'a>(at: &Cursor<'a>, offset: usize) -> Result<(Entry<'a>, usize), FatbinError> {
    at.need("entry header", offset, *ENTRY_HEADER_BYTES.start() as u64)?;
    let version = at.u16(offset + 2);
    if version != ENTRY_VERSION {
        return Err(unexpected("entry version", offset + 2, version, "0x101"));
    }
    let header_bytes = at.u32(offset + 4);
    if !ENTRY_HEADER_BYTES.contains(&(header_bytes as usize)) {
        return Err(unexpected("entry header size", offset + 4, header_bytes, "64 to 1024"));
    }
    let padded = at.u64(offset + 8);
    let payload_offset = offset + header_bytes as usize;
    at.need("entry header", offset, header_bytes.into())?;
    at.need("payload", payload_offset, padded)?;
    let flags = at.u64(offset + 40);
    let compression = match (flags & FLAG_ZSTD != 0, flags & FLAG_LZ4 != 0) {
        (false, false) => Compression::None,
        (true, false) => Compression::Zstd,
        (false, true) => Compression::Lz4,
        (true, true) => {
            return Err(unexpected("flags", offset + 40, flags, "one way of packing"));
        }
    };
    let payload = &at.bytes[payload_offset..payload_offset + padded as usize];
    let (packed, unpacked_bytes) = match compression {
        Compression::None => (payload, padded),
        _ => {
            let packed_bytes = at.u32(offset + 16);
            let packed = payload.get(..packed_bytes as usize).ok_or_else(|| {
                unexpected("packed size", offset + 16, packed_bytes, "no more than the padded size")
            })?;
            let unpacked = at.u64(offset + 56);
            if unpacked > PAYLOAD_BYTES_MAX {
                return Err(unexpected("unpacked size", offset + 56, unpacked, "1 GiB or less"));
            }
            (packed, unpacked)
        }
    };
    let kind = match at.u16(offset) {
        KIND_PTX => Kind::Ptx,
        KIND_ELF => Kind::Elf,
        other => Kind::Other(other),
    };
    let arch = at.u32(offset + 28);
    let entry = Entry { kind, arch, flags, compression, payload_offset, unpacked_bytes, packed };
    Ok((entry, payload_offset + padded as usize))
}

impl<'a> Entry<'a> {
    /// Bytes of the payload once unpacked, as its header says.
    pub fn unpacked_bytes(&self) -> u64 {
        self.unpacked_bytes
    }

    /// How narrow its code is: for all later devices (0), for a family, for one architecture.
    fn reach(&self) -> u8 {
        match self.flags {
            flags if flags & FLAG_SPECIFIC != 0 => 2,
            flags if flags & FLAG_FAMILY != 0 => 1,
            _ => 0,
        }
    }

    /// Whether a device of an architecture can run it, or compile it.
    fn fits(&self, arch: u32) -> bool {
        let same_major = self.arch / 10 == arch / 10;
        self.arch <= arch
            && match self.reach() {
                2 => self.arch == arch,
                1 => same_major,
                _ => same_major || self.kind != Kind::Elf,
            }
    }

    /// The payload, unpacked if need be. PTX ends with a zero byte, and
    /// unpacked payloads with padding.
    ///
    /// # Errors
    /// [`FatbinError::Unpack`] if it does not unpack to the size its header gives.
    pub fn payload(&self) -> Result<Cow<'a, [u8]>, FatbinError> {
        let unpacked = match self.compression {
            Compression::None => return Ok(Cow::Borrowed(self.packed)),
            Compression::Lz4 => self.unpack_lz4(),
            Compression::Zstd => self.unpack_zstd(),
        };
        match unpacked {
            Ok(bytes) if bytes.len() as u64 == self.unpacked_bytes => Ok(Cow::Owned(bytes)),
            Ok(bytes) => Err(self.unpack_error(format!("it has {} bytes", bytes.len()))),
            Err(detail) => Err(self.unpack_error(detail)),
        }
    }

    fn unpack_error(&self, detail: String) -> FatbinError {
        FatbinError::Unpack {
            how: self.compression,
            offset: self.payload_offset,
            expected: self.unpacked_bytes,
            detail,
        }
    }

    fn unpack_lz4(&self) -> Result<Vec<u8>, String> {
        // LZ4 packs at most 255 to 1: a larger size cannot be true, and is not
        // worth allocating for.
        if self.unpacked_bytes > self.packed.len() as u64 * 256 {
            return Err(format!("{} packed bytes cannot hold that much", self.packed.len()));
        }
        lz4_flex::block::decompress(self.packed, self.unpacked_bytes as usize)
            .map_err(|e| e.to_string())
    }

    fn unpack_zstd(&self) -> Result<Vec<u8>, String> {
        let decoder =
            ruzstd::decoding::StreamingDecoder::new(self.packed).map_err(|e| e.to_string())?;
        let mut bytes = Vec::new();
        // One byte more than expected shows that it is too long.
        decoder.take(self.unpacked_bytes + 1).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
        Ok(bytes)
    }
}

fn unexpected(
    what: &'static str,
    offset: usize,
    found: impl Into<u64>,
    expected: &'static str,
) -> FatbinError {
    FatbinError::Unexpected { what, offset, found: found.into(), expected }
}

/// Little-endian fields; `need` is asked before they are read.
struct Cursor<'a> {
    bytes: &'a [u8],
}

impl Cursor<'_> {
    fn need(&self, what: &'static str, offset: usize, needed: u64) -> Result<(), FatbinError> {
        let available = self.bytes.len().saturating_sub(offset);
        if needed > available as u64 {
            return Err(FatbinError::Truncated { what, offset, needed, available });
        }
        Ok(())
    }

    fn array<const N: usize>(&self, offset: usize) -> [u8; N] {
        let field = self.bytes.get(offset..).and_then(<[u8]>::first_chunk);
        field.copied().unwrap_or([0; N])
    }

    fn u16(&self, offset: usize) -> u16 {
        u16::from_le_bytes(self.array(offset))
    }

    fn u32(&self, offset: usize) -> u32 {
        u32::from_le_bytes(self.array(offset))
    }

    fn u64(&self, offset: usize) -> u64 {
        u64::from_le_bytes(self.array(offset))
    }
}
