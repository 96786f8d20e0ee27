//! Comparing a patched cubin with its original, independently of how it was made.

use super::elf::{Cubin, SYMBOL_BYTES, Section, u16_at, u32_at};
use super::info::{self, Attribute, Value, attribute};
use super::offset;
use super::reach::References;
use super::sass::{self, INSTRUCTION_BYTES};
use super::template::{REGISTERS_MAX, Template};
use crate::control::CONTROL_BYTES;
use std::collections::HashMap;

/// What is wrong with a patched cubin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// One of the two cannot be read.
    #[error("the {which} cannot be read")]
    Unreadable {
        /// What cannot be read, as a noun.
        which: &'static str,
    },
    /// The file's headers, its segments or its list of sections or symbols differ.
    #[error("the files differ in their {what}")]
    Structure { what: &'static str },
    /// A section differs in a way that a patch does not make.
    #[error("section {section} differs: {what}")]
    Section { section: String, what: &'static str },
}

/// Whether `patched` is `original` in a transformed form and nothing else. All original code is at its place,
/// except for the first instruction of kernels with a prelude, which jumps to what was appended, or for the
/// instructions that read the grid, all of which are patched. Metadata only grew by what the form needs. Every
/// other section is the same.
///
/// # Errors
/// The first difference that no patch makes.
pub fn check(original: &[u8], patched: &[u8]) -> Result<(), CheckError> {
    let read = |image, which| Cubin::parse(image).map_err(|_| CheckError::Unreadable { which });
    let (old, new) = (read(original, "original")?, read(patched, "patched image")?);
    let structure = |same: bool, what| same.then_some(()).ok_or(CheckError::Structure { what });
    if old.relocations().is_ok() && new.relocations().is_err() {
        return Err(CheckError::Unreadable { which: "patched image" });
    }
    structure(old.same_frame(&new), "headers")?;
    structure(old.sections.len() == new.sections.len(), "sections")?;
    structure(old.symbols.len() == new.symbols.len(), "symbols")?;
    structure(old.symbol_table == new.symbol_table, "symbols")?;
    // Code sections that grew, by their kernels' names.
    let mut grown = HashMap::new();
    for (index, (a, b)) in old.sections.iter().zip(&new.sections).enumerate() {
        structure(a.name == b.name && a.fixed_fields() == b.fixed_fields(), "sections")?;
        if let Some(name) = a.name.strip_prefix(".text.")
            && a.data.len() != b.data.len()
        {
            let kernel = old
                .symbols
                .iter()
                .position(|s| s.is_kernel() && s.name == name && usize::from(s.section) == index);
            let kernel = kernel.ok_or(CheckError::Structure { what: "code of a function" })?;
            grown.insert(name, kernel);
        }
    }
    let template = Template::of(old.arch);
    let references = template.and_then(|template| References::of(&old, template).ok());
    for (index, (a, b)) in old.sections.iter().zip(&new.sections).enumerate() {
        let what = if index == old.symbol_table {
            symbols(&a.data, &b.data, &grown, &old)
        } else {
            let name = a.name.strip_prefix(".text.").unwrap_or_default();
            let by_offset = || {
                let called = offset::called(&old, template?, references.as_ref()?, index).ok()?;
                Some((control_in_bank(&new, name)?, called))
            };
            section(&old, a, b, &grown, by_offset)
        };
        if let Some(what) = what {
            return Err(CheckError::Section { section: a.name.to_owned(), what });
        }
    }
    Ok(())
}

fn section(
    old: &Cubin<'_>,
    a: &Section<'_>,
    b: &Section<'_>,
    grown: &HashMap<&str, usize>,
    by_offset: impl FnOnce() -> Option<(u32, u64)>,
) -> Option<&'static str> {
    let patched = |prefix| a.name.strip_prefix(prefix).is_some_and(|n| grown.contains_key(n));
    // The high byte of a code section's `sh_info` is its number of registers.
    let (registers_a, registers_b) = (a.info >> 24, b.info >> 24);
    if a.info != b.info {
        let only_registers =
            a.info << 8 == b.info << 8 && registers_a < registers_b && registers_b <= REGISTERS_MAX;
        if !patched(".text.") || !only_registers {
            return Some("sh_info");
        }
    }
    if patched(".text.") {
        code(old.arch, &a.data, &b.data, by_offset)
    } else if patched(".nv.info.") {
        attributes(&a.data, &b.data)
    } else if a.name == ".nv.info" {
        registers(&a.data, &b.data, grown)
    } else if patched(".nv.constant0.") {
        let grew = b.data.strip_prefix(a.data.as_ref());
        match grew {
            Some(more) if more.len() >= CONTROL_BYTES as usize && more.iter().all(|x| *x == 0) => {
                None
            }
            _ => Some("parameters"),
        }
    } else {
        (a.data != b.data || a.bytes() != b.bytes()).then_some("contents")
    }
}

/// Where bank 0 has a kernel's control block: it ends with the parameters.
fn control_in_bank(cubin: &Cubin<'_>, kernel: &str) -> Option<u32> {
    let section = cubin.find(&format!(".nv.info.{kernel}"))?;
    let attributes = info::read(&cubin.sections[section].data).ok()?;
    let bank = attributes.iter().find(|a| a.number == attribute::PARAMETER_BANK)?;
    let bank = bank.exactly(8).ok()?;
    (u32::from(u16_at(bank, 4)) + u32::from(u16_at(bank, 6))).checked_sub(CONTROL_BYTES)
}

/// `by_offset`: where bank 0 has the kernel's control block, and the uniform registers of what it calls; `None` if
/// it has no such form.
fn code(
    arch: u32,
    a: &[u8],
    b: &[u8],
    by_offset: impl FnOnce() -> Option<(u32, u64)>,
) -> Option<&'static str> {
    if a.len() < INSTRUCTION_BYTES || b.len() < a.len() {
        return Some("shorter code");
    }
    if a[..INSTRUCTION_BYTES] == b[..INSTRUCTION_BYTES] {
        let is_by_offset = Template::of(arch)
            .zip(by_offset())
            .is_some_and(|(template, kernel)| offset::is_by_offset(template, a, b, kernel));
        return (!is_by_offset).then_some("original code");
    }
    if a[INSTRUCTION_BYTES..] != b[INSTRUCTION_BYTES..a.len()] {
        return Some("original code");
    }
    let jump = sass::instructions(b).next().unwrap_or_default();
    if jump != sass::branch(arch, 0, a.len()) {
        return Some("the first instruction");
    }
    let displaced = sass::instructions(a).next().unwrap_or_default();
    let mut tail = sass::instructions(&b[a.len()..]);
    (!tail.any(|x| x == displaced)).then_some("the displaced instruction is gone")
}

/// A kernel's attributes: those of the original in order, some longer, and those of the prelude.
fn attributes(a: &[u8], b: &[u8]) -> Option<&'static str> {
    let (Ok(a), Ok(b)) = (info::read(a), info::read(b)) else { return Some("attributes") };
    let count = |list: &[Attribute], n| list.iter().filter(|x| x.number == n).count();
    if count(&b, attribute::PARAMETER) != count(&a, attribute::PARAMETER) + 1 {
        return Some("number of parameters");
    }
    // The control block, described as any parameter, at the end of them all.
    let ordinal = count(&a, attribute::PARAMETER) as u16;
    let is_block = |x: &&Attribute| x.exactly(12).is_ok_and(|v| u16_at(v, 4) == ordinal);
    let block = b.iter().filter(|x| x.number == attribute::PARAMETER).find(is_block);
    let end = b.iter().find(|x| x.number == attribute::PARAMETER_BYTES).map(|x| &x.value);
    let (Some(block), Some(Value::Short { value: end, .. })) = (block, end) else {
        return Some("the control block");
    };
    let block = block.exactly(12).unwrap_or_default();
    let offset = u32::from(*end).wrapping_sub(CONTROL_BYTES);
    if u32_at(block, 0) != 0
        || u32::from(u16_at(block, 6)) != offset
        || u32_at(block, 8) != CONTROL_BYTES << 18 | 0x1_f000
    {
        return Some("the control block");
    }
    let mut rest = b.iter();
    for old in &a {
        let follows = |new: &Attribute| {
            new.number == old.number
                && match (old.number, &old.value, &new.value) {
                    (
                        attribute::EXIT_OFFSETS | attribute::VOTE_OFFSETS | attribute::VOTE_MASKS,
                        Value::Bytes(x),
                        Value::Bytes(y),
                    ) => y.starts_with(x),
                    (attribute::PARAMETER_BANK, Value::Bytes(x), Value::Bytes(y)) => {
                        x.len() == 8 && y.len() == 8 && x[..6] == y[..6] && u16_at(y, 6) == *end
                    }
                    (attribute::PARAMETER_BYTES, ..) => true,
                    (_, x, y) => x == y,
                }
        };
        // What comes between is new, and of the few kinds that a patch adds.
        loop {
            match rest.next() {
                Some(new) if follows(new) => break,
                Some(new) if added(new) => {}
                _ => return Some("attributes"),
            }
        }
    }
    rest.all(added).then_some(()).map_or(Some("attributes"), |()| None)
}

fn added(attribute: &Attribute) -> bool {
    matches!(
        attribute.number,
        attribute::PARAMETER
            | attribute::PARAMETER_BYTES
            | attribute::PARAMETER_BANK
            | attribute::VOTE_OFFSETS
            | attribute::VOTE_MASKS
            | attribute::EXIT_OFFSETS
            | attribute::CONVERGENCE_STACK
            | attribute::CTAID_Z_USED
    )
}

/// The image's attributes: the same, but for more registers of patched kernels.
fn registers(a: &[u8], b: &[u8], grown: &HashMap<&str, usize>) -> Option<&'static str> {
    if a == b {
        return None;
    }
    let (Ok(a), Ok(b)) = (info::read(a), info::read(b)) else { return Some("attributes") };
    let same = |old: &Attribute, new: &Attribute| {
        if old == new {
            return true;
        }
        let (Ok(x), Ok(y)) = (old.exactly(8), new.exactly(8)) else { return false };
        let symbol = u32_at(x, 0) as usize;
        old.number == attribute::REGISTERS
            && new.number == attribute::REGISTERS
            && x[..4] == y[..4]
            && u32_at(x, 4) < u32_at(y, 4)
            && u32_at(y, 4) <= REGISTERS_MAX
            && grown.values().any(|kernel| *kernel == symbol)
    };
    let all = a.len() == b.len() && a.iter().zip(&b).all(|(x, y)| same(x, y));
    (!all).then_some("attributes")
}

/// The symbol table: the same, but for the sizes of patched kernels.
fn symbols(
    a: &[u8],
    b: &[u8],
    grown: &HashMap<&str, usize>,
    old: &Cubin<'_>,
) -> Option<&'static str> {
    if a.len() != b.len() {
        return Some("length");
    }
    let pairs = a.chunks_exact(SYMBOL_BYTES).zip(b.chunks_exact(SYMBOL_BYTES));
    for ((x, y), symbol) in pairs.zip(&old.symbols) {
        let patched = symbol.is_kernel() && grown.contains_key(symbol.name);
        let compared = if patched { 16 } else { SYMBOL_BYTES };
        if x[..compared] != y[..compared] {
            return Some("symbols");
        }
    }
    None
}
