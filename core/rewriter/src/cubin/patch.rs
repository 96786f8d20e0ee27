//! One kernel's patch: what is checked, what is changed.
//!
//! Every transformed form has room for the control block among the parameters ([`open`], [`Kernel::close`]); the
//! prelude, besides, is put in front of the code:
//!
//! ```text
//! .text.K + 0     the stack pointer's set-up  ->  BRA to the tail
//!         + 16    the kernel's code, untouched
//!         + size  tail: the prelude; a NOP that waits for all scoreboards; the
//!                 displaced instruction; BRA to 16
//! ```
//!
//! All general registers but R1 are dead at a kernel's entry, so that the prelude may
//! use them. Metadata that must follow: the list and size of parameters, registers,
//! and where exits and votes are.

use super::elf::{Cubin, u16_at, u32_at};
use super::info::{self, Attribute, Value, attribute};
use super::reach::References;
use super::sass::{self, INSTRUCTION_BYTES};
use super::template::{CONTROL_OFFSET_MAX, Template};
use crate::control::CONTROL_BYTES;
use crate::{TransformRefusal, TransformedKernel};

/// Code sections end at a multiple of this.
pub(super) const TEXT_ALIGN: usize = 128;
/// A kernel's code, at most: offsets of instructions have 32 bits.
const TEXT_BYTES_MAX: usize = 1 << 30;
/// Of a parameter's description: where its size starts, and what lies below (in bank
/// 0x1f, by value, no special alignment).
const PARAMETER_SIZE_SHIFT: u32 = 18;
const PARAMETER_KIND_MASK: u32 = 0x3_f000;
const PARAMETER_BY_VALUE: u32 = 0x1_f000;

/// New contents of the sections of one kernel.
pub(super) struct Patch {
    pub kernel: TransformedKernel,
    pub symbol: usize,
    /// Registers that the new code needs.
    pub registers: u32,
    pub text: (usize, Vec<u8>),
    pub info: (usize, Vec<u8>),
    pub constants: (usize, Vec<u8>),
}

/// The parameters as a kernel's metadata has them.
struct Parameters {
    count: u32,
    bytes: u32,
}

/// A kernel that can be patched, with room for the control block among its parameters.
pub(super) struct Kernel<'c> {
    symbol: usize,
    name: &'c str,
    /// Index of the section that holds its code.
    pub text: usize,
    pub code: &'c [u8],
    info_at: usize,
    pub attributes: Vec<Attribute>,
    pub cluster: Option<[u32; 3]>,
    may_wait: bool,
    reads_sm: bool,
    parameter_count: u32,
    /// Where the control block lies in the parameter buffer, bytes.
    pub control_offset: u32,
    bank: (usize, Vec<u8>),
}

/// Looks at the kernel `symbol`, and makes room for the control block, or says why it has no transformed form.
pub(super) fn open<'c>(
    cubin: &'c Cubin<'_>,
    template: &'static Template,
    references: &References<'_, '_>,
    symbol: usize,
) -> Result<Kernel<'c>, TransformRefusal> {
    let entry = &cubin.symbols[symbol];
    let name = entry.name;
    let find = |prefix: &str| {
        let index = cubin.find(&format!("{prefix}{name}")).ok_or(TransformRefusal::Metadata)?;
        let section = &cubin.sections[index];
        if section.in_file() && !section.is_table() {
            Ok(index)
        } else {
            Err(TransformRefusal::Metadata)
        }
    };
    let (text, info_at, bank) = (find(".text.")?, find(".nv.info.")?, find(".nv.constant0.")?);
    if usize::from(entry.section) != text || entry.value != 0 {
        return Err(TransformRefusal::Metadata);
    }
    let code = &cubin.sections[text].data;
    check_code(cubin.arch, template, code)?;
    let mut attributes = info::read(&cubin.sections[info_at].data)?;
    check_attributes(&attributes)?;
    let cluster = cluster(&attributes)?;
    references.check_entry(text)?;

    let parameters = parameters(&attributes, template)?;
    let control_offset = parameters.bytes.next_multiple_of(8);
    if control_offset > CONTROL_OFFSET_MAX {
        return Err(TransformRefusal::ParameterSpace);
    }
    let bytes = control_offset + CONTROL_BYTES;
    let constants = constants(cubin, bank, template, &parameters, bytes)?;
    let bank_symbol = cubin.symbols.iter().position(|s| usize::from(s.section) == bank);
    add_parameter(&mut attributes, template, &parameters, control_offset, bank_symbol)?;
    Ok(Kernel {
        symbol,
        name,
        text,
        code,
        info_at,
        attributes,
        cluster,
        may_wait: true,
        reads_sm: true,
        parameter_count: parameters.count,
        control_offset,
        bank: (bank, constants),
    })
}

impl Kernel<'_> {
    /// See whether blocks may wait for one another, and whether they know their SM, from all code that
    /// is reached.
    pub fn look_through<'s>(&mut self, reached: impl Iterator<Item = &'s [u8]>) {
        (self.may_wait, self.reads_sm) = (false, false);
        for instruction in reached.flat_map(sass::instructions) {
            let calls = sass::is_indirect_call(instruction);
            self.may_wait |= calls || sass::sees_others(instruction);
            self.reads_sm |= calls || sass::reads_sm(instruction);
        }
    }

    /// The patch with this code.
    pub fn close(self, code: Vec<u8>, registers: u32) -> Result<Patch, TransformRefusal> {
        let kernel = TransformedKernel {
            name: self.name.to_owned(),
            parameter_count: self.parameter_count,
            control_offset: self.control_offset,
            cluster: self.cluster,
            may_wait: self.may_wait,
            reads_sm: self.reads_sm,
        };
        let info = info::write(&self.attributes).ok_or(TransformRefusal::Metadata)?;
        Ok(Patch {
            kernel,
            symbol: self.symbol,
            registers,
            text: (self.text, code),
            info: (self.info_at, info),
            constants: self.bank,
        })
    }
}

/// The kernel `symbol` with the prelude, or why it has none.
pub(super) fn prelude(
    cubin: &Cubin<'_>,
    template: &'static Template,
    references: &References<'_, '_>,
    symbol: usize,
) -> Result<Patch, TransformRefusal> {
    let mut kernel = open(cubin, template, references, symbol)?;
    let reached = references.check_reach(kernel.text)?;
    kernel.look_through(reached.iter().map(|section| &*cubin.sections[*section].data));
    let base = kernel.code.len();
    add_offsets(&mut kernel.attributes, template, base as u32)?;
    let mut code = kernel.code.to_vec();
    let first = sass::instructions(&code).next().unwrap_or_default();
    let jump = sass::branch(cubin.arch, 0, base);
    code[..INSTRUCTION_BYTES].copy_from_slice(&jump.to_le_bytes());
    code.extend(template.tail(base, kernel.control_offset, first, TEXT_ALIGN));
    kernel.close(code, template.registers)
}

/// Whether the first instruction is one that can be displaced, and nothing jumps to it or out.
fn check_code(arch: u32, template: &Template, code: &[u8]) -> Result<(), TransformRefusal> {
    if !code.len().is_multiple_of(TEXT_ALIGN) || code.len() > TEXT_BYTES_MAX {
        return Err(TransformRefusal::Metadata);
    }
    let first = sass::instructions(code).next().ok_or(TransformRefusal::FirstInstruction)?;
    if !template.displaces(first) {
        return Err(TransformRefusal::FirstInstruction);
    }
    for (index, instruction) in sass::instructions(code).enumerate() {
        match sass::jump_target(arch, instruction, index * INSTRUCTION_BYTES) {
            Some(to) if (0..INSTRUCTION_BYTES as i64).contains(&to) => {
                return Err(TransformRefusal::EntryReferenced);
            }
            // Out of its section, which is about to grow.
            Some(to) if !(0..code.len() as i64).contains(&to) => {
                return Err(TransformRefusal::Metadata);
            }
            _ => {}
        }
    }
    Ok(())
}

fn check_attributes(attributes: &[Attribute]) -> Result<(), TransformRefusal> {
    for attribute in attributes {
        match attribute.number {
            attribute::NEEDS_LAUNCH_WRAPPER | attribute::NEEDS_LAUNCH_PATCH => {
                return Err(TransformRefusal::DeviceLaunch);
            }
            attribute::PARAMETER
            | attribute::PARAMETER_BYTES
            | attribute::PARAMETER_BANK
            | attribute::EXIT_OFFSETS
            | attribute::VOTE_OFFSETS
            | attribute::VOTE_MASKS => {}
            _ if attribute.unaffected() => {}
            _ => return Err(TransformRefusal::Metadata),
        }
    }
    Ok(())
}

/// The cluster dimensions fixed at compile time.
fn cluster(attributes: &[Attribute]) -> Result<Option<[u32; 3]>, TransformRefusal> {
    let Some(attribute) = single(attributes, attribute::CLUSTER)? else { return Ok(None) };
    let bytes = attribute.exactly(12)?;
    let dims = [u32_at(bytes, 0), u32_at(bytes, 4), u32_at(bytes, 8)];
    // All zero: a cluster kernel whose dimensions the launch gives.
    if dims == [0; 3] {
        return Ok(None);
    }
    if dims.iter().all(|d| d.is_power_of_two()) {
        Ok(Some(dims))
    } else {
        Err(TransformRefusal::ClusterShape)
    }
}

fn parameters(
    attributes: &[Attribute],
    template: &Template,
) -> Result<Parameters, TransformRefusal> {
    let mut ordinals = Vec::new();
    let mut end = 0;
    for attribute in attributes.iter().filter(|a| a.number == attribute::PARAMETER) {
        let bytes = attribute.exactly(12)?;
        let (ordinal, offset, word) = (u16_at(bytes, 4), u16_at(bytes, 6), u32_at(bytes, 8));
        if u32_at(bytes, 0) != 0 || word & PARAMETER_KIND_MASK != PARAMETER_BY_VALUE {
            return Err(TransformRefusal::Metadata);
        }
        end = end.max(u32::from(offset) + (word >> PARAMETER_SIZE_SHIFT));
        ordinals.push(u32::from(ordinal));
    }
    ordinals.sort_unstable();
    if !ordinals.iter().copied().eq(0..ordinals.len() as u32) {
        return Err(TransformRefusal::Metadata);
    }
    let bytes = match single(attributes, attribute::PARAMETER_BYTES)?.map(|a| &a.value) {
        Some(Value::Short { format: 3, value }) => u32::from(*value),
        Some(_) => return Err(TransformRefusal::Metadata),
        None => 0,
    };
    let bank = single(attributes, attribute::PARAMETER_BANK)?;
    if let Some(bank) = bank {
        let value = bank.exactly(8)?;
        if [u32::from(u16_at(value, 4)), u32::from(u16_at(value, 6))]
            != [template.parameter_base, bytes]
        {
            return Err(TransformRefusal::Metadata);
        }
    }
    // The two go together, and the parameters end where they say.
    if end != bytes || bank.is_some() != (bytes > 0) {
        return Err(TransformRefusal::Metadata);
    }
    Ok(Parameters { count: ordinals.len() as u32, bytes })
}

/// Bank 0 with room for the control block.
fn constants(
    cubin: &Cubin<'_>,
    bank: usize,
    template: &Template,
    parameters: &Parameters,
    bytes: u32,
) -> Result<Vec<u8>, TransformRefusal> {
    let old = &cubin.sections[bank].data;
    let start = template.parameter_base as usize;
    let ends =
        start + parameters.bytes as usize..=start + parameters.bytes.next_multiple_of(4) as usize;
    // More than parameters would be overwritten by what is appended.
    if !ends.contains(&old.len()) {
        return Err(TransformRefusal::Metadata);
    }
    let mut new = old.to_vec();
    new.resize(start + bytes as usize, 0);
    Ok(new)
}

fn add_parameter(
    attributes: &mut Vec<Attribute>,
    template: &Template,
    old: &Parameters,
    control_offset: u32,
    bank_symbol: Option<usize>,
) -> Result<(), TransformRefusal> {
    let bytes = (control_offset + CONTROL_BYTES) as u16;
    let mut value = vec![0; 4];
    value.extend((old.count as u16).to_le_bytes());
    value.extend((control_offset as u16).to_le_bytes());
    value.extend((CONTROL_BYTES << PARAMETER_SIZE_SHIFT | PARAMETER_BY_VALUE).to_le_bytes());
    let parameter = Attribute::bytes(attribute::PARAMETER, value);
    if old.bytes > 0 {
        // The last parameter comes first, as the compiler has it.
        let at = attributes.iter().position(|a| a.number == attribute::PARAMETER);
        attributes.insert(at.unwrap_or(0), parameter);
        for a in attributes {
            match (a.number, &mut a.value) {
                (attribute::PARAMETER_BYTES, Value::Short { value, .. }) => *value = bytes,
                (attribute::PARAMETER_BANK, Value::Bytes(value)) => {
                    value[6..8].copy_from_slice(&bytes.to_le_bytes());
                }
                _ => {}
            }
        }
        return Ok(());
    }
    let symbol = bank_symbol.ok_or(TransformRefusal::Metadata)? as u32;
    let mut value = symbol.to_le_bytes().to_vec();
    value.extend((template.parameter_base as u16).to_le_bytes());
    value.extend(bytes.to_le_bytes());
    let size = Attribute::short(attribute::PARAMETER_BYTES, 3, bytes);
    let bank = Attribute::bytes(attribute::PARAMETER_BANK, value);
    let after = |attributes: &[Attribute], number| {
        attributes.iter().position(|a| a.number == number).map_or(0, |at| at + 1)
    };
    let at = after(attributes, attribute::API_VERSION);
    attributes.insert(at, parameter);
    let at = after(attributes, attribute::EXIT_OFFSETS).max(at + 1);
    attributes.splice(at..at, [size, bank]);
    Ok(())
}

/// Where the prelude exits and votes, and what else its code asks for.
fn add_offsets(
    attributes: &mut Vec<Attribute>,
    template: &Template,
    base: u32,
) -> Result<(), TransformRefusal> {
    let moved = |offsets: &[u32]| -> Vec<u8> {
        offsets.iter().flat_map(|offset| (base + offset).to_le_bytes()).collect()
    };
    extend(attributes, attribute::EXIT_OFFSETS, &moved(template.exits), None)?;
    let masks = vec![0xff; template.votes.len() * 4];
    let exits = attributes.iter().position(|a| a.number == attribute::EXIT_OFFSETS);
    extend(attributes, attribute::VOTE_MASKS, &masks, exits)?;
    let masks = attributes.iter().position(|a| a.number == attribute::VOTE_MASKS);
    extend(attributes, attribute::VOTE_OFFSETS, &moved(template.votes), masks.map(|at| at + 1))?;
    let exits = attributes.iter().position(|a| a.number == attribute::EXIT_OFFSETS);
    let after_exits = exits.map_or(attributes.len(), |at| at + 1);
    let lacks = |attributes: &[Attribute], n| !attributes.iter().any(|a| a.number == n);
    if template.convergence && lacks(attributes, attribute::CONVERGENCE_STACK) {
        let none = Attribute::bytes(attribute::CONVERGENCE_STACK, vec![0; 4]);
        attributes.insert(after_exits, none);
    }
    if template.ctaid_z && lacks(attributes, attribute::CTAID_Z_USED) {
        attributes.insert(after_exits, Attribute::short(attribute::CTAID_Z_USED, 1, 0));
    }
    Ok(())
}

/// Appends to an attribute's bytes; makes it, before `at` or last, if it is not there.
fn extend(
    attributes: &mut Vec<Attribute>,
    number: u8,
    bytes: &[u8],
    at: Option<usize>,
) -> Result<(), TransformRefusal> {
    single(attributes, number)?;
    match attributes.iter_mut().find(|a| a.number == number).map(|a| &mut a.value) {
        Some(Value::Bytes(old)) if old.len() % 4 == 0 => old.extend_from_slice(bytes),
        Some(_) => return Err(TransformRefusal::Metadata),
        None => {
            let at = at.unwrap_or(attributes.len());
            attributes.insert(at, Attribute::bytes(number, bytes));
        }
    }
    Ok(())
}

/// The attribute of a number, which must not be there twice.
fn single(attributes: &[Attribute], number: u8) -> Result<Option<&Attribute>, TransformRefusal> {
    let mut found = attributes.iter().filter(|a| a.number == number);
    match (found.next(), found.next()) {
        (first, None) => Ok(first),
        _ => Err(TransformRefusal::Metadata),
    }
}
