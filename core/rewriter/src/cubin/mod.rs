//! Cubins: CUDA machine code in ELF files, and the claim-table prelude as a patch of
//! one instruction.
//!
//! The first instruction of a kernel becomes a branch to code appended behind it: the
//! prelude, the displaced instruction, and a branch back (`patch`). Nothing else
//! moves. In the form by offset the instructions that read the block's index and the grid's
//! width are patched instead (`offset`). What is not exactly as the patch knows it is refused: by architecture and
//! first instruction (`template`), by metadata (`info`), and by what the kernel refers
//! to (`reach`). [`check`] compares the result with the original.
//!
//! sm_80 to sm_90 only: later architectures keep a second form of the code in further
//! sections, which a patch would have to follow.

mod check;
mod elf;
mod info;
mod offset;
mod patch;
mod reach;
mod sass;
mod template;
mod templates;

pub use check::{CheckError, check};
pub use elf::{Cubin, Relocation, Section, Symbol};

use crate::{KernelForm, Rewritten, TransformRefusal};
use info::{Attribute, Value, attribute};
use patch::Patch;
use reach::References;
use std::borrow::Cow;
use std::collections::HashSet;
use template::Template;

/// Give kernels of a cubin a transformed form; see [`crate::image::rewrite`]. The form by offset is one for grids of
/// one dimension ([`Rewritten::is_ptx`]).
///
/// # Errors
/// What makes the whole cubin unfit.
pub fn rewrite(
    image: &[u8],
    form: KernelForm,
    only: Option<&[&str]>,
) -> Result<Rewritten, TransformRefusal> {
    let mut cubin = Cubin::parse(image)?;
    let template = Template::of(cubin.arch).ok_or(TransformRefusal::Architecture)?;
    check_sections(&cubin)?;
    let wanted: Option<HashSet<&str>> = only.map(|names| names.iter().copied().collect());
    let mut out =
        Rewritten { image: Vec::new(), is_ptx: false, kernels: Vec::new(), refused: Vec::new() };
    let mut patches = Vec::new();
    let mut found = HashSet::new();
    {
        let references = References::of(&cubin, template)?;
        for (index, symbol) in cubin.symbols.iter().enumerate() {
            if !symbol.is_kernel() || wanted.as_ref().is_some_and(|w| !w.contains(symbol.name)) {
                continue;
            }
            if !found.insert(symbol.name) {
                return Err(TransformRefusal::Malformed);
            }
            let made = match form {
                KernelForm::ByClaims => patch::prelude(&cubin, template, &references, index),
                KernelForm::ByOffset => offset::by_offset(&cubin, template, &references, index),
            };
            match made {
                Ok(patch) => patches.push(patch),
                Err(why) => out.refused.push((symbol.name.to_owned(), why)),
            }
        }
    }
    let missing = only.unwrap_or_default().iter().filter(|name| !found.contains(**name));
    out.refused.extend(missing.map(|name| ((*name).to_owned(), TransformRefusal::NoSuchKernel)));
    apply(&mut cubin, patches, &mut out)?;
    out.image = cubin.emit();
    Ok(out)
}

/// Puts patches in place, with the registers that they need.
fn apply(
    cubin: &mut Cubin<'_>,
    patches: Vec<Patch>,
    out: &mut Rewritten,
) -> Result<(), TransformRefusal> {
    let is_plain = |section: &Section<'_>| section.in_file() && !section.is_table();
    let globals = cubin.find(".nv.info").filter(|i| is_plain(&cubin.sections[*i]));
    let Some(globals) = globals else {
        out.refused
            .extend(patches.into_iter().map(|p| (p.kernel.name, TransformRefusal::Metadata)));
        return Ok(());
    };
    let mut attributes = info::read(&cubin.sections[globals].data)?;
    let mut counts = std::collections::HashMap::new();
    for (at, attribute) in attributes.iter().enumerate() {
        if attribute.number == attribute::REGISTERS {
            let symbol = elf::u32_at(attribute.exactly(8)?, 0);
            if counts.insert(symbol as usize, at).is_some() {
                return Err(TransformRefusal::Metadata);
            }
        }
    }
    for patch in patches {
        let Some(at) = counts.get(&patch.symbol) else {
            out.refused.push((patch.kernel.name, TransformRefusal::Metadata));
            continue;
        };
        raise(&mut attributes[*at], patch.registers);
        for (index, data) in [patch.text, patch.info, patch.constants] {
            cubin.sections[index].data = Cow::Owned(data);
            let section = &mut cubin.sections[index];
            // Older tools keep the number there too.
            if section.name.starts_with(".text.") && section.info >> 24 != 0 {
                let registers = (section.info >> 24).max(patch.registers);
                section.info = section.info & 0xff_ffff | registers << 24;
            }
            if section.name.starts_with(".text.") {
                let size = section.data.len() as u64;
                cubin.set_symbol_size(patch.symbol, size);
            }
        }
        out.kernels.push(patch.kernel);
    }
    let data = info::write(&attributes).ok_or(TransformRefusal::Malformed)?;
    cubin.sections[globals].data = Cow::Owned(data);
    Ok(())
}

/// Raises a number of registers to at least `registers`.
fn raise(attribute: &mut Attribute, registers: u32) {
    if let Value::Bytes(bytes) = &mut attribute.value {
        let count = elf::u32_at(bytes, 4).max(registers);
        bytes[4..8].copy_from_slice(&count.to_le_bytes());
    }
}

/// Refuses sections that the patch does not know, those of the device's memory or of a second form of the code, and two
/// of one name, of which the driver may take the other.
fn check_sections(cubin: &Cubin<'_>) -> Result<(), TransformRefusal> {
    const KNOWN: [&str; 6] =
        [".text.", ".nv.constant", ".nv.shared", ".nv.local", ".nv.global", ".nv.uft"];
    let mut names = std::collections::HashSet::new();
    for section in &cubin.sections {
        let is_patched =
            [".text.", ".nv.info", ".nv.constant"].iter().any(|p| section.name.starts_with(p));
        if is_patched && !names.insert(section.name) {
            return Err(TransformRefusal::Malformed);
        }
        if section.name.contains("merc") && section.name.starts_with(".nv.") {
            return Err(TransformRefusal::Architecture);
        }
        if section.allocated() && !KNOWN.iter().any(|known| section.name.starts_with(known)) {
            return Err(TransformRefusal::Metadata);
        }
    }
    Ok(())
}
