//! The form by offset of machine code: a launch of few blocks that computes a range of the
//! blocks of a larger grid, of one dimension.
//!
//! Wherever the code reads the block's index in x, the first block of the range is added; where
//! it reads the number of blocks in x, it gets the whole grid's:
//!
//! ```text
//! .text.K + at    S2R R, SR_CTAID.X          ->  BRA to this read's tail
//!         + at    … c[0x0][number of blocks] ->  … c[0x0][the control block's]
//!         + size  tails: the read, to s if it is to a uniform register; ULDC t, the range's
//!                 first block; IADD3 R, R, t or UIADD3 U, s, t, behind the read's scoreboard;
//!                 BRA to at + 16
//! ```
//!
//! `s` and `t` are uniform registers that neither the kernel uses nor a function that it can reach. Threads that have
//! parted share uniform registers, and hardware may change sides anywhere; so none is changed in steps: `s` is always
//! the index and `t` always the first block, whoever writes them, and `U` is only ever written with the sum. (An
//! addition of the constant itself would need no `t`, but gives something else on an H200: code of sm_90 only ever
//! loads constants.) Nothing else of the code is touched, its entry neither: no block claims anything.
//!
//! What could get at the index or the number in another way is refused: special registers by
//! [`KNOWN`], words of bank 0 by [`KNOWN_WORDS`]; functions that are called, which other kernels may call too, if
//! they have anything to do with the grid; and calls by a register, which may lead into the original's
//! code.

use super::elf::Cubin;
use super::info::attribute;
use super::patch::{self, Patch, TEXT_ALIGN};
use super::reach::References;
use super::sass::{self, Destination, INSTRUCTION_BYTES, Read, SpecialRead};
use super::template::Template;
use crate::TransformRefusal;
use crate::control::{DIMS_OFFSET, LO_OFFSET};

/// The block's index in x.
const CTAID_X: u32 = 0x25;
/// Special registers that have nothing to do with where in its grid a block is: the lane, the
/// thread, masks of lanes, the SM, clocks, the block's place in its cluster, zero; and the index in y and z,
/// which is 0 in a grid of one dimension.
const KNOWN: [std::ops::RangeInclusive<u32>; 7] =
    [0x00..=0x00, 0x20..=0x23, 0x26..=0x27, 0x38..=0x3c, 0x43..=0x43, 0x50..=0x53, 0x88..=0x88];
const ZERO: u32 = 0xff;
/// Where bank 0 has the number of blocks in x, on these architectures.
const BLOCKS_X: u32 = 0xc;
const WORD_BYTES: u32 = 4;
/// Uniform registers; the last number means none.
const UNIFORM_REGISTERS: u32 = 63;
/// Instructions of a tail.
const TAIL: usize = 4;
/// Instructions of a kernel that know of the grid, at most. Compilers make one or two.
const USES_MAX: usize = 64;

/// Words of bank 0 below the parameters that have nothing to do with where in its grid a block
/// is: the block's dimensions, the numbers of blocks in y and z (1 in a grid of one dimension), the stack.
const KNOWN_WORDS: [u32; 7] = [0x0, 0x4, 0x8, 0x10, 0x14, 0x28, 0x2c];
/// So is how ordinary memory is to be accessed: eight bytes, from sm_90 on elsewhere.
const DESCRIPTORS: [u32; 2] = [0x118, 0x208];

/// What an instruction has to do with the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// Reads the index in x to a register, which has it once the scoreboard says so.
    Index(Destination, u32),
    /// Has the number of blocks in x as its constant.
    Blocks,
}

/// The kernel `symbol` in the form by offset, or why it has none.
pub(super) fn by_offset(
    cubin: &Cubin<'_>,
    template: &'static Template,
    references: &References<'_, '_>,
    symbol: usize,
) -> Result<Patch, TransformRefusal> {
    let mut kernel = patch::open(cubin, template, references, symbol)?;
    if kernel.attributes.iter().any(|a| a.number == attribute::CLUSTER) {
        return Err(TransformRefusal::ClusterShape);
    }
    let reached = references.check_reach(kernel.text)?;
    kernel.look_through(reached.iter().map(|section| &*cubin.sections[*section].data));
    let called = called(cubin, template, references, kernel.text)?;
    let mut found = Vec::new();
    for (index, instruction) in sass::instructions(kernel.code).enumerate() {
        if sass::is_indirect_call(instruction) {
            return Err(TransformRefusal::IndexInFunction);
        }
        let Some(used) = uses(instruction, template)? else { continue };
        let at = index * INSTRUCTION_BYTES;
        if found.len() == USES_MAX {
            return Err(TransformRefusal::IndexRead);
        }
        if references.is_relocated(kernel.text, at) {
            return Err(TransformRefusal::Metadata);
        }
        found.push((at, instruction, used));
    }
    let in_use = in_use(kernel.code) | called;
    let mut free = (0..UNIFORM_REGISTERS).rev().filter(|number| in_use >> number & 1 == 0);
    let spares = (free.next(), free.next());

    let control = template.parameter_base + kernel.control_offset;
    let mut code = kernel.code.to_vec();
    let put = |code: &mut Vec<u8>, at: usize, instruction: u128| {
        code[at..at + INSTRUCTION_BYTES].copy_from_slice(&instruction.to_le_bytes());
    };
    for (at, instruction, used) in found {
        match used {
            Use::Blocks => {
                put(&mut code, at, sass::with_offset(instruction, control + DIMS_OFFSET));
            }
            Use::Index(to, scoreboard) => {
                let (place, read) = (code.len(), (instruction, to, scoreboard));
                let tail = tail(cubin.arch, (at, place), read, control + LO_OFFSET, spares)
                    .ok_or(TransformRefusal::NoSpareRegister)?;
                put(&mut code, at, sass::branch(cubin.arch, at, place));
                code.extend(tail.iter().flat_map(|i| i.to_le_bytes()));
            }
        }
    }
    // As behind every function: nothing runs on from here.
    let end = code.len();
    code.extend(sass::branch(cubin.arch, end, end).to_le_bytes());
    while !code.len().is_multiple_of(TEXT_ALIGN) {
        code.extend(sass::nop().to_le_bytes());
    }
    kernel.close(code, 0)
}

/// The uniform registers, a bit each, that functions may use which the code of section `text` can reach: they
/// share them with their caller. Or why there is no such form: they have something to do with the grid.
pub(super) fn called(
    cubin: &Cubin<'_>,
    template: &Template,
    references: &References<'_, '_>,
    text: usize,
) -> Result<u64, TransformRefusal> {
    let mut found = 0;
    for section in references.check_reach(text)?.into_iter().filter(|section| *section != text) {
        let code = &cubin.sections[section].data;
        for instruction in sass::instructions(code) {
            if uses(instruction, template) != Ok(None) || sass::is_indirect_call(instruction) {
                return Err(TransformRefusal::IndexInFunction);
            }
        }
        found |= in_use(code);
    }
    Ok(found)
}

/// The uniform registers that some code may use, a bit each.
fn in_use(code: &[u8]) -> u64 {
    sass::instructions(code).fold(0, |all, i| all | sass::uniform_registers(i))
}

/// Uniform registers that a kernel does not use: for a range's first block, for the index.
type Spares = (Option<u32>, Option<u32>);

/// What stands at `place` for a read of the index at `at`: see the module's documentation.
/// `first_block` is where bank 0 has the range's; `None` if it takes spare registers and there are none.
fn tail(
    arch: u32,
    (at, place): (usize, usize),
    (instruction, to, scoreboard): (u128, Destination, u32),
    first_block: u32,
    spares: Spares,
) -> Option<[u128; TAIL]> {
    let (first, index) = spares;
    let (read, from) = match to {
        Destination::Vector(register) => (instruction, register),
        Destination::Uniform(_) => (sass::with_destination(instruction, index?), index?),
    };
    let load = sass::load_uniform(first?, first_block);
    let add = sass::add_uniform(to, from, first?, scoreboard);
    let back = place + (TAIL - 1) * INSTRUCTION_BYTES;
    Some([read, load, add, sass::branch(arch, back, at + INSTRUCTION_BYTES)])
}

/// What an instruction has to do with the grid.
///
/// # Errors
/// [`TransformRefusal::IndexRead`]: maybe something, in a way that is not known.
fn uses(instruction: u128, template: &Template) -> Result<Option<Use>, TransformRefusal> {
    if let Some(read) = sass::special_read(instruction) {
        return match read {
            SpecialRead { number: CTAID_X, to: Some(to), always: true, scoreboard: Some(s) } => {
                Ok(Some(Use::Index(to, s)))
            }
            // A pair is that register and the next.
            SpecialRead { number, to: None, .. } if number != CTAID_X - 1 && is_known(number) => {
                Ok(None)
            }
            SpecialRead { number, to: Some(_), .. } if is_known(number) => Ok(None),
            _ => Err(TransformRefusal::IndexRead),
        };
    }
    if !sass::has_constant(instruction) {
        return Ok(None);
    }
    // A uniform register says where: nobody knows what that is.
    if sass::is_bindless(instruction) {
        return Err(TransformRefusal::IndexRead);
    }
    let constant = sass::constant(instruction);
    if constant.bank != 0 {
        return Ok(None);
    }
    let (from, first) = (constant.offset, template.parameter_base);
    let read = sass::read(instruction);
    if constant.indexed || from >= first {
        // Into the parameters, from there on.
        return if from >= first { Ok(None) } else { Err(TransformRefusal::IndexRead) };
    }
    if from == BLOCKS_X && matches!(read, Read::Load(WORD_BYTES) | Read::Operand) {
        return Ok(Some(Use::Blocks));
    }
    let bytes = match read {
        Read::Load(bytes) => bytes,
        // Eight bytes, perhaps: never across their size.
        Read::Operand if from.is_multiple_of(2 * WORD_BYTES) => 2 * WORD_BYTES,
        Read::Operand => WORD_BYTES,
    };
    let descriptor = DESCRIPTORS[usize::from(template.arch >= 90)];
    let is_known = |word: u32| {
        KNOWN_WORDS.contains(&word) || (descriptor..descriptor + 2 * WORD_BYTES).contains(&word)
    };
    let mut words = (from..from + bytes).map(|byte| byte & !(WORD_BYTES - 1));
    if words.all(|word| word >= first || is_known(word)) {
        Ok(None)
    } else {
        Err(TransformRefusal::IndexRead)
    }
}

fn is_known(number: u32) -> bool {
    number == ZERO || KNOWN.iter().any(|range| range.contains(&number))
}

/// Whether `new` is `old` in this form: see the module's documentation. `control`: the control block's
/// place in bank 0; `called`: see [`called`].
pub(super) fn is_by_offset(
    template: &Template,
    old: &[u8],
    new: &[u8],
    (control, called): (u32, u64),
) -> bool {
    let arch = template.arch;
    let tails: Vec<u128> = sass::instructions(&new[old.len()..]).collect();
    let in_use = in_use(old) | called;
    let is_spare = |number: u32| number < UNIFORM_REGISTERS && in_use >> number & 1 == 0;
    // The same ones everywhere: one that had both meanings would not always have the same value.
    let (mut first_is, mut index_is) = (None, None);
    let mut next = 0;
    for (number, (a, b)) in sass::instructions(old).zip(sass::instructions(new)).enumerate() {
        let at = number * INSTRUCTION_BYTES;
        let (to, scoreboard) = match uses(a, template) {
            Ok(None) if a == b && !sass::is_indirect_call(a) => continue,
            Ok(Some(Use::Blocks)) if b == sass::with_offset(a, control + DIMS_OFFSET) => continue,
            Ok(Some(Use::Index(to, scoreboard))) => (to, scoreboard),
            _ => return false,
        };
        let place = old.len() + next * INSTRUCTION_BYTES;
        let Some(found) = tails.get(next..next + TAIL) else { return false };
        let (index, first) = (sass::destination(found[0]), sass::destination(found[1]));
        let spare = |number| Some(number).filter(|n| is_spare(*n));
        let first = *first_is.get_or_insert(first);
        let index = match to {
            Destination::Vector(_) => None,
            Destination::Uniform(_) => Some(*index_is.get_or_insert(index)),
        };
        let spares = (spare(first), index.and_then(spare));
        if spares.0.is_some() && spares.0 == index_is {
            return false;
        }
        let expected = tail(arch, (at, place), (a, to, scoreboard), control + LO_OFFSET, spares);
        if expected.is_none_or(|expected| expected != found) || b != sass::branch(arch, at, place) {
            return false;
        }
        next += TAIL;
    }
    let end = old.len() + next * INSTRUCTION_BYTES;
    let mut rest = tails[next..].iter();
    rest.next() == Some(&sass::branch(arch, end, end)) && rest.all(|i| *i == sass::nop())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(instruction: u128) -> Result<Option<Use>, TransformRefusal> {
        super::uses(instruction, Template::of(90).unwrap())
    }

    #[test]
    fn reads_of_the_index_are_told() {
        let vector = 0x000e_2200_0000_2500_0000_0000_0002_7919;
        assert_eq!(uses(vector), Ok(Some(Use::Index(Destination::Vector(2), 0))));
        let uniform = 0x000e_6200_0000_2500_0000_0000_0005_79c3;
        assert_eq!(uses(uniform), Ok(Some(Use::Index(Destination::Uniform(5), 1))));
        // Of the thread's, of the index in y.
        assert_eq!(uses(0x000e_2400_0000_2100_0000_0000_0005_7919), Ok(None));
        assert_eq!(uses(0x000e_2200_0000_2600_0000_0000_0004_79c3), Ok(None));
        // Under a predicate; without a scoreboard; of a pair that has the index; unknown.
        let odd = [
            vector & !0xf000,
            vector | 7 << (sass::CONTROL_SHIFT + 5),
            vector & !0xfff & !(0xff << 72) | 0x805 | 0x24 << 72,
            vector & !0xfff | 0x805,
            vector & !(0xff << 72) | 0x2d << 72,
        ];
        for instruction in odd {
            assert_eq!(uses(instruction), Err(TransformRefusal::IndexRead), "{instruction:x}");
        }
    }

    #[test]
    fn reads_of_the_number_of_blocks_are_told() {
        // IADD3 R5, R0, c[0x0][0xc], RZ; MOV R5, c[0x0][0xc]; LDC R5, c[0x0][0xc].
        let add = 0x000f_c600_07ff_e0ff_0000_0300_0005_7a10;
        let load = 0x000e_6200_0000_0800_0000_0300_ff05_7b82;
        for instruction in [add, 0x000f_e200_0000_0f00_0000_0300_0005_7a02, load] {
            assert_eq!(uses(instruction), Ok(Some(Use::Blocks)), "{instruction:x}");
        }
        let at = |instruction, offset| uses(sass::with_offset(instruction, offset));
        // Others' words, with eight bytes and with four.
        for offset in [0, 4, 0x10, 0x14, 0x28, 0x208, 0x210] {
            assert_eq!(at(add, offset), Ok(None), "{offset}");
            assert_eq!(at(load, offset), Ok(None), "{offset}");
        }
        assert_eq!(at(add, 8), Err(TransformRefusal::IndexRead), "it may be eight bytes");
        assert_eq!(at(load, 8), Ok(None));
        let load_16 = load | 6 << 73;
        assert_eq!(at(load_16, 0), Err(TransformRefusal::IndexRead));
        assert_eq!(
            at(load_16, 0x10),
            Err(TransformRefusal::IndexRead),
            "its second half is not known"
        );
        assert_eq!(at(load_16, 0x210), Ok(None));
        let load_2 = load & !(7 << 73) | 2 << 73;
        assert_eq!(at(load_2, 0xe), Err(TransformRefusal::IndexRead));
        // What is not known: the number of clusters, which is that of blocks where there are none;
        // the descriptor of other architectures.
        for offset in [0x15c, 0x150, 0x118, 0x20] {
            assert_eq!(at(load, offset), Err(TransformRefusal::IndexRead), "{offset:#x}");
        }
        assert_eq!(uses(load | 1 << 91), Err(TransformRefusal::IndexRead), "by a uniform register");
        // By a register: from the parameters on.
        let indexed = load & !(0xff << 24) | 4 << 24;
        assert_eq!(at(indexed, 0x210), Ok(None));
        assert_eq!(at(indexed, 0x20), Err(TransformRefusal::IndexRead));
    }

    #[test]
    fn registers_of_called_functions_are_not_spare() {
        let (arch, control) = (90, 0x230);
        // S2R R2, SR_CTAID.X; UIADD3 UR2, UR3, UR4, URZ.
        let read = 0x000e_2200_0000_2500_0000_0000_0002_7919;
        let old = [read, 0x000f_c800_0fff_e03f_0000_0004_0302_7290];
        let place = old.len() * INSTRUCTION_BYTES;
        let spares = (Some(40), None);
        let how = (read, Destination::Vector(2), 0);
        let tail = tail(arch, (0, place), how, control + LO_OFFSET, spares).unwrap();
        let end = place + TAIL * INSTRUCTION_BYTES;
        let new = [sass::branch(arch, 0, place), old[1]].into_iter().chain(tail);
        let new = new.chain([sass::branch(arch, end, end), sass::nop()]);
        let bytes = |code: &[u128]| code.iter().flat_map(|i| i.to_le_bytes()).collect::<Vec<_>>();
        let (old, new) = (bytes(&old), bytes(&new.collect::<Vec<_>>()));
        let is_right =
            |called| is_by_offset(Template::of(arch).unwrap(), &old, &new, (control, called));
        assert!(is_right(0) && is_right(!(1 << 40)));
        assert!(!is_right(1 << 40), "a function that is called has something there");
    }

    /// As `ptxas` writes them, but for the stall.
    #[test]
    fn the_tails_are_what_is_meant() {
        let low = (1_u128 << sass::CONTROL_SHIFT) - 1;
        assert_eq!(sass::load_uniform(5, 0x194) & low, 0x800_0000_6500_0005_7ab9);
        let vector = sass::add_uniform(Destination::Vector(7), 7, 4, 0);
        assert_eq!(vector & low, 0x0fff_e0ff_0000_0004_0707_7c10);
        let uniform = sass::add_uniform(Destination::Uniform(4), 9, 7, 2);
        assert_eq!(uniform & low, 0x0fff_e03f_0000_0007_0904_7290);
        // Stall 15, no scoreboard set, waits for the third.
        assert_eq!(uniform >> sass::CONTROL_SHIFT, 0b100 << 11 | 0x3f << 5 | 15);
    }
}
