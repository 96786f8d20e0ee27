//! What a kernel refers to, and whether a second copy of the image would double it.
//!
//! The transformed form is loaded as a module of its own, with its own copy of every variable
//! in the image: `__device__` variables (`.nv.global`, `.nv.global.init`) and
//! `__constant__` ones (`.nv.constant3`). A kernel that reads or writes one would use
//! the wrong copy. The rule, for a kernel and every function that it can reach:
//!
//! 1. Relocations of its code, and of the constant banks of its own
//!    (`.nv.constantN.NAME`), may name functions of the image (which are then looked
//!    at too), shared and local memory, and the driver's own functions (`vprintf`,
//!    `malloc`, …). A variable is [`TransformRefusal::WritableGlobals`], but for constants that
//!    are told by name, size and local binding: the tables of CUDA's mathematical
//!    functions (every kernel with a sine has one), string literals and `__func__`
//!    (every kernel with an `assert`), and the objects without members of CUDA's
//!    standard library and Thrust (in the images of most programs that include them).
//!    A function may only be called: its address ([`TransformRefusal::AddressTaken`]) is
//!    another number in another module, and code there. Return addresses are not meant.
//! 2. `ptxas` keeps the addresses of variables in bank 4, whose words are relocated.
//!    Whatever may be a constant operand of bank 4 counts as a reference to what the
//!    relocation of that word names; with an index register, to all of them.
//! 3. If the image has `__constant__` variables: whatever may be a constant operand of
//!    bank 3, or reads the words of bank 0 that hold the constants' address in memory,
//!    is a use of them.
//!
//! Calls of the driver's functions are made with an index register, and so need all
//! of an image's variables to be such constants.
//!
//! For 2 and 3 the operand's bits are looked at in every instruction, whether or not
//! it has such an operand, so that the error is on the refusing side. What the
//! names stand for cannot be proved from a file: a program that writes PTX by hand and
//! gives a variable of its own such a name would have its kernels transformed wrongly.
//! That rests on two facts about the
//! compiler which cannot be proved from a file: constant operands name their bank in
//! those bits, and addresses of variables come from relocated words only.
//!
//! Addresses that a kernel gets at run time, by parameters or from memory, lead to the
//! original's variables and functions, as they should.

use super::elf::{Cubin, Relocation, Symbol};
use super::sass;
use super::template::Template;
use crate::TransformRefusal;
use crate::names::{MATH_TABLES, is_text};
use std::collections::{HashMap, HashSet};

/// Functions that the driver has for kernels to call, and names of its own.
const DRIVERS: [&str; 5] = ["vprintf", "malloc", "free", "__assertfail", "nanosleep"];
/// Parts of names of what dynamic parallelism calls.
const LAUNCHES: [&str; 4] = ["LaunchDevice", "GetParameterBuffer", "cudaCDP", "cudaGraphLaunch"];
const ADDRESS_BANK: u32 = 4;
const USER_BANK: u32 = 3;

/// What kernels of an image can refer to.
pub(super) struct References<'c, 'a> {
    cubin: &'c Cubin<'a>,
    template: &'static Template,
    relocations: HashMap<usize, Vec<Relocation>>,
    /// Sections whose name ends with a function's: constant banks, by that name.
    banks: HashMap<&'a str, Vec<usize>>,
    /// Relocated words of bank 4, by offset.
    addresses: Vec<Relocation>,
    has_user_constants: bool,
    /// Code sections whose first instruction something else in the image names.
    named: HashSet<usize>,
}

impl<'c, 'a> References<'c, 'a> {
    /// Reads what the image refers to.
    ///
    /// # Errors
    /// [`TransformRefusal::Malformed`].
    pub fn of(cubin: &'c Cubin<'a>, template: &'static Template) -> Result<Self, TransformRefusal> {
        let relocations = cubin.relocations()?;
        let mut banks: HashMap<&str, Vec<usize>> = HashMap::new();
        let mut has_user_constants = false;
        for (index, section) in cubin.sections.iter().enumerate() {
            let Some(bank) = section.name.strip_prefix(".nv.constant") else { continue };
            match bank.split_once('.') {
                Some((_, function)) => banks.entry(function).or_default().push(index),
                // Of the whole image: bank 4 has addresses, 3 the user's constants; another
                // is none that a compiler for these architectures makes.
                None if bank == "4" => {}
                None => has_user_constants |= section.bytes() > 0,
            }
        }
        let bank_4 = cubin.find(".nv.constant4");
        let mut addresses = bank_4.and_then(|i| relocations.get(&i).cloned()).unwrap_or_default();
        addresses.sort_by_key(|r| r.offset);
        let mut named = HashSet::new();
        for (from, list) in &relocations {
            for relocation in list {
                let symbol = &cubin.symbols[relocation.symbol as usize];
                let section = usize::from(symbol.section);
                if section != *from && section != 0 && starts_at_entry(symbol, relocation) {
                    named.insert(section);
                }
            }
        }
        Ok(References { cubin, template, relocations, banks, addresses, has_user_constants, named })
    }

    /// Whether something refers to the first instruction of a kernel: a launch from the
    /// device or a use of its address elsewhere, or a relocation in its own code.
    pub fn check_entry(&self, text: usize) -> Result<(), TransformRefusal> {
        if self.named.contains(&text) {
            return Err(TransformRefusal::DeviceLaunch);
        }
        for relocation in self.relocations.get(&text).into_iter().flatten() {
            let symbol = &self.cubin.symbols[relocation.symbol as usize];
            let in_place = relocation.offset < sass::INSTRUCTION_BYTES as u64;
            let to_entry =
                usize::from(symbol.section) == text && starts_at_entry(symbol, relocation);
            if in_place || to_entry {
                return Err(TransformRefusal::EntryReferenced);
            }
        }
        Ok(())
    }

    /// The rule above, from the code of section `text` on. Returns the code sections that
    /// can be reached, this one among them.
    pub fn check_reach(&self, text: usize) -> Result<HashSet<usize>, TransformRefusal> {
        let (mut seen, mut open) = (HashSet::from([text]), vec![text]);
        while let Some(section) = open.pop() {
            let mut found = Vec::new();
            self.read_by_code(section, &mut found)?;
            let name = self.cubin.sections[section].name;
            let banks = name.strip_prefix(".text.").and_then(|f| self.banks.get(f));
            for bank in banks.into_iter().flatten() {
                found.extend(self.relocations.get(bank).into_iter().flatten());
            }
            let in_banks = found.into_iter().map(|relocation| (relocation, false));
            let in_code = self.relocations.get(&section).into_iter().flatten();
            for (relocation, is_code) in in_banks.chain(in_code.map(|r| (r, true))) {
                let symbol = &self.cubin.symbols[relocation.symbol as usize];
                let Some(function) = self.leads_to(symbol)? else { continue };
                if function != section && self.is_kernel(function) {
                    return Err(TransformRefusal::DeviceLaunch);
                }
                let is_call = is_code && self.is_call(section, relocation);
                let is_own =
                    function == section && !(is_code && starts_at_entry(symbol, relocation));
                if !is_call && !is_own {
                    return Err(TransformRefusal::AddressTaken);
                }
                if seen.insert(function) {
                    open.push(function);
                }
            }
        }
        Ok(seen)
    }

    /// Whether the instruction at byte offset `at` of a section is relocated.
    pub fn is_relocated(&self, section: usize, at: usize) -> bool {
        let bytes = at as u64..(at + sass::INSTRUCTION_BYTES) as u64;
        let list = self.relocations.get(&section).into_iter().flatten();
        list.into_iter().any(|r| bytes.contains(&r.offset))
    }

    /// Whether a relocation of a code section is that of a direct call.
    fn is_call(&self, section: usize, relocation: &Relocation) -> bool {
        let at = usize::try_from(relocation.offset).unwrap_or(usize::MAX)
            & !(sass::INSTRUCTION_BYTES - 1);
        let code = self.cubin.sections[section].data.get(at..).unwrap_or_default();
        sass::instructions(code).next().is_some_and(sass::is_direct_call)
    }

    fn is_kernel(&self, text: usize) -> bool {
        // Kernels' sections are few against relocations to them: none, in ordinary images.
        self.cubin.symbols.iter().any(|s| s.is_kernel() && usize::from(s.section) == text)
    }

    /// Constant operands: words of bank 4 that code may read go to `found`.
    fn read_by_code<'s>(
        &'s self,
        section: usize,
        found: &mut Vec<&'s Relocation>,
    ) -> Result<(), TransformRefusal> {
        let code = &self.cubin.sections[section].data;
        let mut all = false;
        let mut words = HashSet::new();
        for instruction in sass::instructions(code) {
            let constant = sass::constant(instruction);
            match constant.bank {
                USER_BANK if self.has_user_constants => {
                    return Err(TransformRefusal::WritableGlobals);
                }
                ADDRESS_BANK if constant.indexed => all = true,
                ADDRESS_BANK => {
                    let word = constant.offset & !7;
                    words.extend(
                        [Some(word), constant.wide.then_some(word + 8)].into_iter().flatten(),
                    );
                }
                0 if sass::has_constant(instruction) => {
                    let word = constant.offset & !3;
                    if self.template.grid_words.contains(&word) {
                        return Err(TransformRefusal::GridSync);
                    }
                    if self.template.launch_words.contains(&word) {
                        return Err(TransformRefusal::LaunchForm);
                    }
                    if self.has_user_constants && self.template.constant_words.contains(&word) {
                        return Err(TransformRefusal::WritableGlobals);
                    }
                }
                _ => {}
            }
        }
        if all {
            found.extend(&self.addresses);
        } else {
            let read =
                |r: &&Relocation| u32::try_from(r.offset & !7).is_ok_and(|w| words.contains(&w));
            found.extend(self.addresses.iter().filter(read));
        }
        Ok(())
    }

    /// What a reference to a symbol means: the code section to follow, or nothing, or a refusal.
    fn leads_to(&self, symbol: &Symbol<'a>) -> Result<Option<usize>, TransformRefusal> {
        let index = usize::from(symbol.section);
        let Some(section) = self.cubin.section_of(symbol) else {
            return match symbol.name {
                name if LAUNCHES.iter().any(|part| name.contains(part)) => {
                    Err(TransformRefusal::DeviceLaunch)
                }
                name if name.contains("reservedSMEM") || name.contains("reservedSmem") => Ok(None),
                name if index == 0 && DRIVERS.contains(&name) => Ok(None),
                _ => Err(TransformRefusal::Metadata),
            };
        };
        let name = section.name;
        if name.starts_with(".text.") {
            return Ok(Some(index));
        }
        if name.starts_with(".nv.shared") || name.starts_with(".nv.local") {
            return Ok(None);
        }
        let local = symbol.info >> 4 == 0;
        let table = MATH_TABLES.contains(&(symbol.name, symbol.size));
        if local && table && name == ".nv.global.init" {
            return Ok(None);
        }
        if local && (is_text(symbol.name) && name == ".nv.global.init" || is_empty_object(symbol)) {
            return Ok(None);
        }
        if name.starts_with(".nv.global") || name.starts_with(".nv.constant") {
            return Err(TransformRefusal::WritableGlobals);
        }
        Err(TransformRefusal::Metadata)
    }
}

/// Objects without members of CUDA's standard library and Thrust (`std::ignore`,
/// `std::ranges::begin`, `thrust::placeholders::_1`, ...): a byte that means nothing.
fn is_empty_object(symbol: &Symbol<'_>) -> bool {
    symbol.size == 1 && is_of_library(symbol.name)
}

/// Whether a mangled name is in the namespace `cuda::std` or `thrust`, behind the component that stands for the
/// translation unit of a local object, and behind a prefix if nvcc compiled for separate linking.
fn is_of_library(name: &str) -> bool {
    let (prefix, mut rest) = name.split_once("_ZN").unwrap_or_default();
    if !(prefix.is_empty() || prefix.starts_with("__nv_static_")) {
        return false;
    }
    let mut component = || {
        let (length, after) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?);
        let (component, after) = after.split_at_checked(length.parse().ok()?)?;
        rest = after;
        Some(component)
    };
    let first = component().filter(|first| !first.starts_with("_INTERNAL_"));
    match first.or_else(&mut component) {
        Some("thrust") => true,
        Some("cuda") => component() == Some("std"),
        _ => false,
    }
}

/// Whether a relocation is to the first instruction of its symbol's section. Where the
/// addend lies at the place, any to its start counts.
fn starts_at_entry(symbol: &Symbol<'_>, relocation: &Relocation) -> bool {
    let target = symbol.value.wrapping_add_signed(relocation.addend.unwrap_or(0));
    target < sass::INSTRUCTION_BYTES as u64
}

#[cfg(test)]
mod tests {
    use super::is_of_library;

    #[test]
    fn objects_of_libraries_are_told_by_their_namespace() {
        for name in [
            "_ZN4cuda3std3__48in_placeE",
            "_ZN38_INTERNAL_5a2e6c2e_4_k_cu_11ab2c7f_1234cuda3std6ranges3__45beginE",
            "_ZN6thrust24THRUST_300000_SM_900_NS12placeholders2_1E",
            "_ZN38_INTERNAL_5a2e6c2e_4_k_cu_11ab2c7f_1236thrust6system3cpu3parE",
            "__nv_static_49__4_k_cu__ZN38_INTERNAL_5a2e6c2e_4_k_cu_11ab2c7f_1236thrust3seqE",
        ] {
            assert!(is_of_library(name), "{name}");
        }
        for name in [
            "_ZN16thrust_extension4doneE",
            "_ZN4mine6thrust4doneE",
            "mine_ZN6thrust4doneE",
            "_ZN4cuda4mine4doneE",
            "_ZN38_INTERNAL_5a2e6c2e_4_k_cu_11ab2c7f_1234mine4doneE",
            "_ZN99cuda",
            "6thrust",
            "",
        ] {
            assert!(!is_of_library(name), "{name}");
        }
    }
}
