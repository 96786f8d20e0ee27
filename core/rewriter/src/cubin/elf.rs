//! Cubins as ELF files: read with every bound checked, changed, written again.
//!
//! Only what `ptxas` and `nvlink` make is read: 64-bit little-endian executables for
//! `EM_CUDA`, sections that do not overlap. All else is [`TransformRefusal::Malformed`]. What
//! reading allocates is bounded by a small multiple of the file's size.
//!
//! Not by `object`: a cubin must come out with every byte that is not changed where it was, and `object` writes
//! files of its own layout; it would also be wasmtime's, whose features must not change.

use crate::TransformRefusal;
use std::borrow::Cow;
use std::collections::HashMap;

pub(super) const SYMBOL_TABLE: u32 = 2;
const STRINGS: u32 = 3;
/// `SHT_RELA`: relocations with an addend.
const RELOCATIONS_ADDEND: u32 = 4;
/// `SHT_NOBITS`: no bytes in the file.
const NO_BITS: u32 = 8;
/// `SHT_REL`: relocations whose addend is in the place.
const RELOCATIONS: u32 = 9;
const FLAG_WRITE: u64 = 1;
/// `SHF_ALLOC`: in the device's memory.
const FLAG_ALLOCATED: u64 = 2;
const FLAG_CODE: u64 = 4;
/// `ET_EXEC`; a relocatable object has another.
const TYPE_EXECUTABLE: u16 = 2;
const MACHINE_CUDA: u16 = 190;
/// `e_ident[EI_OSABI]` of cubins whose flags hold the architecture one byte higher.
const ABI_NEW: u8 = 65;
const HEADER_BYTES: usize = 64;
const SECTION_HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
pub(super) const SYMBOL_BYTES: usize = 24;
/// Of a gap between sections, or of an alignment: more is nothing that a compiler makes.
const GAP_BYTES_MAX: u64 = 1 << 16;
/// All names together, in lengths of the file: names share bytes, but not that often.
const NAMES_MAX: usize = 16;

/// A section: its header's fields and its bytes.
#[derive(Clone, Debug)]
pub struct Section<'a> {
    pub name: &'a str,
    /// What is in it, as the file has it (`.nv.global` and the like have no bytes).
    pub data: Cow<'a, [u8]>,
    pub info: u32,
    /// Section that its symbols or names are in.
    pub link: u32,
    pub kind: u32,
    pub flags: u64,
    name_offset: u32,
    address: u64,
    offset: u64,
    size: u64,
    align: u64,
    entry_bytes: u64,
}

impl Section<'_> {
    /// Whether it lies in the device's memory when the module is loaded.
    pub fn allocated(&self) -> bool {
        self.flags & FLAG_ALLOCATED != 0
    }

    /// Its size in memory, bytes.
    pub fn bytes(&self) -> u64 {
        self.size
    }

    /// Whether it has bytes in the file.
    pub fn in_file(&self) -> bool {
        self.kind != NO_BITS
    }

    /// Whether the file's own structure is read from it: names, symbols or relocations. A patch must not change it.
    pub(super) fn is_table(&self) -> bool {
        matches!(self.kind, SYMBOL_TABLE | STRINGS | RELOCATIONS | RELOCATIONS_ADDEND)
    }

    /// Permission bits of a segment that holds the section.
    fn permissions(&self) -> u32 {
        let write = if self.flags & FLAG_WRITE != 0 { 2 } else { 0 };
        4 | write | u32::from(self.flags & FLAG_CODE != 0)
    }

    /// What a writer does not change, for comparison.
    pub(super) fn fixed_fields(&self) -> (u32, u64, u64, u32, u64, u64) {
        (self.kind, self.flags, self.address, self.link, self.align, self.entry_bytes)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Symbol<'a> {
    /// Name of the symbol; empty for those of sections.
    pub name: &'a str,
    /// Type (low four bits) and binding.
    pub info: u8,
    /// Visibility, and CUDA's own bits.
    pub other: u8,
    /// Section that it lies in; 0: undefined.
    pub section: u16,
    /// Offset in the section.
    pub value: u64,
    pub size: u64,
}

impl Symbol<'_> {
    /// Whether it is a kernel (`STO_CUDA_ENTRY` of an `STT_FUNC`).
    pub fn is_kernel(&self) -> bool {
        self.info & 15 == 2 && self.other & 0x10 != 0
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Relocation {
    /// Offset in the section, bytes.
    pub offset: u64,
    /// Index of the symbol in [`Cubin::symbols`].
    pub symbol: u32,
    /// What is added; `None`: that lies at the place.
    pub addend: Option<i64>,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    kind: u32,
    flags: u32,
    offset: u64,
    addresses: [u64; 2],
    file_bytes: u64,
    memory_bytes: u64,
    align: u64,
}

/// A cubin, split into its sections and symbols.
#[derive(Clone, Debug)]
pub struct Cubin<'a> {
    /// Its architecture: 90 for `sm_90` and `sm_90a`.
    pub arch: u32,
    /// Sections, the empty first one too.
    pub sections: Vec<Section<'a>>,
    /// In the order of the symbol table, which relocations index.
    pub symbols: Vec<Symbol<'a>>,
    /// Index of the section that holds the symbol table.
    pub symbol_table: usize,
    header: &'a [u8],
    segments: Vec<Segment>,
    by_name: HashMap<&'a str, usize>,
}

impl<'a> Cubin<'a> {
    /// Reads the cubin at the start of `image`; what follows its last part is ignored.
    ///
    /// # Errors
    /// [`TransformRefusal::Malformed`], or [`TransformRefusal::Relocatable`] for an object that is still to be linked.
    pub fn parse(image: &'a [u8]) -> Result<Self, TransformRefusal> {
        let header = part(image, 0, HEADER_BYTES)?;
        // 64 bits, little-endian.
        if !header.starts_with(b"\x7fELF\x02\x01") || u16_at(header, 18) != MACHINE_CUDA {
            return Err(TransformRefusal::Malformed);
        }
        if u16_at(header, 16) != TYPE_EXECUTABLE {
            return Err(TransformRefusal::Relocatable);
        }
        let flags = u32_at(header, 48);
        let arch = if header[7] == ABI_NEW { flags >> 8 & 0xff } else { flags & 0xff };
        let (count, size) = (usize::from(u16_at(header, 60)), usize::from(u16_at(header, 58)));
        if size != SECTION_HEADER_BYTES || count == 0 {
            return Err(TransformRefusal::Malformed);
        }
        let table = part(image, u64_at(header, 40), count * size)?;
        let headers: Vec<_> = table.chunks_exact(size).collect();
        let mut budget = image.len().saturating_mul(NAMES_MAX);
        let names =
            headers.get(usize::from(u16_at(header, 62))).ok_or(TransformRefusal::Malformed)?;
        if u32_at(names, 4) != STRINGS {
            return Err(TransformRefusal::Malformed);
        }
        let names = part(image, u64_at(names, 24), to_size(u64_at(names, 32))?)?;
        // The first section's header would hold what does not fit the file's.
        if headers[0].iter().any(|b| *b != 0) {
            return Err(TransformRefusal::Malformed);
        }
        let mut sections = Vec::with_capacity(count);
        for (index, raw) in headers.iter().enumerate() {
            sections.push(section(image, raw, index, names, &mut budget)?);
        }
        not_overlapping(&sections)?;
        let mut by_name = HashMap::new();
        for (index, section) in sections.iter().enumerate().skip(1) {
            if by_name.insert(section.name, index).is_some() && section.name.starts_with('.') {
                return Err(TransformRefusal::Malformed);
            }
        }
        let mut tables = (1..count).filter(|i| sections[*i].kind == SYMBOL_TABLE);
        let (Some(symbol_table), None) = (tables.next(), tables.next()) else {
            return Err(TransformRefusal::Malformed);
        };
        let symbols = symbols(image, &sections, headers[symbol_table], &mut budget)?;
        let segments = segments(image, header)?;
        Ok(Cubin { arch, sections, symbols, symbol_table, header, segments, by_name })
    }

    /// The index of the section of a name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The section that a symbol lies in, if it lies in one.
    pub fn section_of(&self, symbol: &Symbol<'_>) -> Option<&Section<'a>> {
        let index = usize::from(symbol.section);
        if index == 0 { None } else { self.sections.get(index) }
    }

    /// Relocations, by the section that they apply to.
    ///
    /// # Errors
    /// [`TransformRefusal::Malformed`]: a table of odd size, or a symbol that is not there.
    pub fn relocations(&self) -> Result<HashMap<usize, Vec<Relocation>>, TransformRefusal> {
        let mut found: HashMap<usize, Vec<Relocation>> = HashMap::new();
        for section in &self.sections {
            let bytes = match section.kind {
                RELOCATIONS => 16,
                RELOCATIONS_ADDEND => 24,
                _ => continue,
            };
            let target = section.info as usize;
            let applies = self.sections.get(target).ok_or(TransformRefusal::Malformed)?;
            if section.data.len() % bytes != 0 {
                return Err(TransformRefusal::Malformed);
            }
            if !applies.allocated() {
                continue;
            }
            for raw in section.data.chunks_exact(bytes) {
                let symbol = (u64_at(raw, 8) >> 32) as u32;
                if symbol as usize >= self.symbols.len() {
                    return Err(TransformRefusal::Malformed);
                }
                let addend = (bytes == 24).then(|| u64_at(raw, 16) as i64);
                let relocation = Relocation { offset: u64_at(raw, 0), symbol, addend };
                found.entry(target).or_default().push(relocation);
            }
        }
        Ok(found)
    }

    /// Changes a symbol's size, here and in the table.
    pub fn set_symbol_size(&mut self, index: usize, size: u64) {
        self.symbols[index].size = size;
        let at = index * SYMBOL_BYTES + 16;
        self.sections[self.symbol_table].data.to_mut()[at..at + 8]
            .copy_from_slice(&size.to_le_bytes());
    }

    /// The whole file, sections in their old order, headers last.
    pub fn emit(&self) -> Vec<u8> {
        let mut out = self.header.to_vec();
        let mut order: Vec<usize> = (1..self.sections.len()).collect();
        order.sort_by_key(|i| (self.sections[*i].offset, *i));
        let mut offsets = vec![0u64; self.sections.len()];
        for index in order {
            let section = &self.sections[index];
            pad(&mut out, section.align.max(1) as usize);
            offsets[index] = out.len() as u64;
            out.extend_from_slice(&section.data);
        }
        pad(&mut out, SECTION_HEADER_BYTES);
        let sections_at = out.len() as u64;
        for (section, offset) in self.sections.iter().zip(&offsets) {
            let size = if section.in_file() { section.data.len() as u64 } else { section.size };
            out.extend(section.name_offset.to_le_bytes());
            out.extend(section.kind.to_le_bytes());
            for long in [section.flags, section.address, *offset, size] {
                out.extend(long.to_le_bytes());
            }
            out.extend(section.link.to_le_bytes());
            out.extend(section.info.to_le_bytes());
            out.extend(section.align.to_le_bytes());
            out.extend(section.entry_bytes.to_le_bytes());
        }
        let segments_at = if self.segments.is_empty() { 0 } else { out.len() as u64 };
        for segment in &self.segments {
            let segment = self.moved(segment, &offsets, segments_at);
            out.extend(segment.kind.to_le_bytes());
            out.extend(segment.flags.to_le_bytes());
            let [virtual_address, physical_address] = segment.addresses;
            let sizes = [segment.file_bytes, segment.memory_bytes, segment.align];
            for long in [segment.offset, virtual_address, physical_address].into_iter().chain(sizes)
            {
                out.extend(long.to_le_bytes());
            }
        }
        out[32..40].copy_from_slice(&segments_at.to_le_bytes());
        out[40..48].copy_from_slice(&sections_at.to_le_bytes());
        out
    }

    /// A segment after its sections have moved and grown.
    fn moved(&self, segment: &Segment, offsets: &[u64], segments_at: u64) -> Segment {
        let mut new = *segment;
        if segment.offset == u64_at(self.header, 32) {
            new.offset = segments_at;
            return new;
        }
        let end = segment.offset.saturating_add(segment.file_bytes.max(segment.memory_bytes));
        let inside = |section: &Section<'_>| {
            let bytes = if section.in_file() { section.size } else { 0 };
            section.allocated()
                && section.permissions() == segment.flags
                && section.offset >= segment.offset
                && section.offset + bytes <= end
        };
        let inside = self.sections.iter().zip(offsets).skip(1).filter(|(s, _)| inside(s));
        let (mut first, mut last) = (u64::MAX, 0);
        for (section, offset) in inside {
            first = first.min(*offset);
            last = last.max(offset + section.data.len() as u64);
        }
        if first != u64::MAX {
            new.offset = first;
            if segment.file_bytes != 0 {
                new.file_bytes = last - first;
                let beyond = segment.memory_bytes.saturating_sub(segment.file_bytes);
                new.memory_bytes = new.file_bytes.saturating_add(beyond);
            }
        }
        new
    }

    /// Whether what a writer does not change of the file's header and segments is the same.
    pub(super) fn same_frame(&self, other: &Cubin<'_>) -> bool {
        let same = |a: &Segment, b: &Segment| {
            (a.kind, a.flags, a.align, a.addresses) == (b.kind, b.flags, b.align, b.addresses)
        };
        self.header[..32] == other.header[..32]
            && self.header[48..] == other.header[48..]
            && self.segments.len() == other.segments.len()
            && self.segments.iter().zip(&other.segments).all(|(a, b)| same(a, b))
    }
}

fn section<'a>(
    image: &'a [u8],
    raw: &[u8],
    index: usize,
    names: &'a [u8],
    budget: &mut usize,
) -> Result<Section<'a>, TransformRefusal> {
    let (kind, flags) = (u32_at(raw, 4), u64_at(raw, 8));
    let (offset, size, align) = (u64_at(raw, 24), u64_at(raw, 32), u64_at(raw, 48));
    let in_file = kind != NO_BITS && index != 0;
    let data = if in_file { part(image, offset, to_size(size)?)? } else { &[] };
    if align > GAP_BYTES_MAX || (align > 1 && !align.is_power_of_two()) {
        return Err(TransformRefusal::Malformed);
    }
    // Else the sum of an offset and a size could overflow later.
    if offset > u64::from(u32::MAX) || size > u64::from(u32::MAX) << 16 {
        return Err(TransformRefusal::Malformed);
    }
    Ok(Section {
        name: if index == 0 { "" } else { name(names, u32_at(raw, 0), budget)? },
        data: Cow::Borrowed(data),
        info: u32_at(raw, 44),
        link: u32_at(raw, 40),
        kind,
        flags,
        name_offset: u32_at(raw, 0),
        address: u64_at(raw, 16),
        offset,
        size,
        align,
        entry_bytes: u64_at(raw, 56),
    })
}

/// That no byte is in two sections: a file of small size could else stand for a huge one.
fn not_overlapping(sections: &[Section<'_>]) -> Result<(), TransformRefusal> {
    let mut order: Vec<_> = sections.iter().skip(1).filter(|s| s.in_file() && s.size > 0).collect();
    order.sort_by_key(|s| s.offset);
    let mut end = HEADER_BYTES as u64;
    for section in order {
        if section.offset < end {
            return Err(TransformRefusal::Malformed);
        }
        end = section.offset + section.size;
    }
    Ok(())
}

fn symbols<'a>(
    image: &'a [u8],
    sections: &[Section<'a>],
    header: &[u8],
    budget: &mut usize,
) -> Result<Vec<Symbol<'a>>, TransformRefusal> {
    let table = part(image, u64_at(header, 24), to_size(u64_at(header, 32))?)?;
    let link = sections.get(u32_at(header, 40) as usize).ok_or(TransformRefusal::Malformed)?;
    let names = part(image, link.offset, to_size(link.size)?)?;
    if table.len() % SYMBOL_BYTES != 0 || link.kind != STRINGS {
        return Err(TransformRefusal::Malformed);
    }
    let read = |raw: &[u8]| {
        let section = u16_at(raw, 6);
        // Not those with special meanings (absolute, common).
        if section < 0xff00 && usize::from(section) >= sections.len() {
            return Err(TransformRefusal::Malformed);
        }
        Ok(Symbol {
            name: name(names, u32_at(raw, 0), budget)?,
            info: raw[4],
            other: raw[5],
            section,
            value: u64_at(raw, 8),
            size: u64_at(raw, 16),
        })
    };
    table.chunks_exact(SYMBOL_BYTES).map(read).collect()
}

fn segments(image: &[u8], header: &[u8]) -> Result<Vec<Segment>, TransformRefusal> {
    let (size, count) = (usize::from(u16_at(header, 54)), usize::from(u16_at(header, 56)));
    if count == 0 {
        return Ok(Vec::new());
    }
    if size != PROGRAM_HEADER_BYTES {
        return Err(TransformRefusal::Malformed);
    }
    let table = part(image, u64_at(header, 32), count * size)?;
    let read = |raw: &[u8]| Segment {
        kind: u32_at(raw, 0),
        flags: u32_at(raw, 4),
        offset: u64_at(raw, 8),
        addresses: [u64_at(raw, 16), u64_at(raw, 24)],
        file_bytes: u64_at(raw, 32),
        memory_bytes: u64_at(raw, 40),
        align: u64_at(raw, 48),
    };
    Ok(table.chunks_exact(size).map(read).collect())
}

/// The name at an offset of a string table.
fn name<'a>(names: &'a [u8], offset: u32, budget: &mut usize) -> Result<&'a str, TransformRefusal> {
    let rest = names.get(offset as usize..).ok_or(TransformRefusal::Malformed)?;
    if rest.is_empty() {
        return Ok("");
    }
    let length = rest.iter().position(|b| *b == 0).ok_or(TransformRefusal::Malformed)?;
    *budget = budget.checked_sub(length).ok_or(TransformRefusal::Malformed)?;
    std::str::from_utf8(&rest[..length]).map_err(|_| TransformRefusal::Malformed)
}

fn pad(out: &mut Vec<u8>, align: usize) {
    out.resize(out.len().next_multiple_of(align), 0);
}

fn part(image: &[u8], offset: u64, bytes: usize) -> Result<&[u8], TransformRefusal> {
    let start = to_size(offset)?;
    let end = start.checked_add(bytes).ok_or(TransformRefusal::Malformed)?;
    image.get(start..end).ok_or(TransformRefusal::Malformed)
}

fn to_size(value: u64) -> Result<usize, TransformRefusal> {
    usize::try_from(value).map_err(|_| TransformRefusal::Malformed)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; N])
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}
