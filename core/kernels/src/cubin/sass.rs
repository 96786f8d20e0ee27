//! As much of the machine code of sm_80 to sm_90 as the patch needs: instructions of
//! 16 bytes; opcode in bits 0 to 11, guard predicate in 12 to 15, constant operands'
//! byte offset in 38 to 53 and bank in 54 to 58, scheduling from bit 105 on.
//!
//! Nothing is decoded beyond that. Where a question cannot be answered exactly, the
//! answer errs towards refusing a kernel.

/// Bytes of an instruction.
pub(super) const INSTRUCTION_BYTES: usize = 16;
/// First bit of the scheduling fields.
pub(super) const CONTROL_SHIFT: u32 = 105;
/// First bit of a constant operand's byte offset.
pub(super) const WORD_SHIFT: u32 = 38;

const BRA: u128 = 0x947;
const CALL_REL: u128 = 0x944;
const BSSY: u128 = 0x945;
const NOP: u128 = 0x918;
const LDC: u128 = 0xb82;
const ULDC: u128 = 0xab9;
const ULDC_INDEXED: u128 = 0xabb;
/// Guard predicate PT: always.
const ALWAYS: u128 = 7 << 12;
/// A branch's own predicate, PT.
const BRANCH_ALWAYS: u128 = 7 << 87;
/// No scoreboard is set.
const NO_SCOREBOARDS: u128 = 0x3f << 5;

/// Scheduling: cycles to stall, the yield bit, scoreboards to wait for.
const fn control(stall: u128, yield_bit: u128, wait: u128) -> u128 {
    (stall | yield_bit << 4 | NO_SCOREBOARDS | wait << 11) << CONTROL_SHIFT
}

/// The instructions of some code.
pub(super) fn instructions(code: &[u8]) -> impl Iterator<Item = u128> {
    code.chunks_exact(INSTRUCTION_BYTES)
        .map(|chunk| u128::from_le_bytes(chunk.try_into().unwrap_or_default()))
}

/// An instruction that waits for all six scoreboards.
pub(super) fn wait_for_all() -> u128 {
    NOP | ALWAYS | control(5, 0, 0x3f)
}

/// An instruction that does nothing.
pub(super) fn nop() -> u128 {
    NOP | ALWAYS | control(5, 0, 0)
}

/// An unconditional branch at byte offset `from` to `to`.
pub(super) fn branch(arch: u32, from: usize, to: usize) -> u128 {
    let distance = to as i128 - (from + INSTRUCTION_BYTES) as i128;
    let field = if arch >= 90 {
        let words = (distance >> 2) as u128;
        (words & 0xff) << 16 | (words >> 8 & ((1 << 48) - 1)) << 34
    } else {
        (distance as u128 & ((1 << 50) - 1)) << 32
    };
    BRA | ALWAYS | BRANCH_ALWAYS | field | control(5, 1, 0)
}

/// Where the relative jump `instruction` at byte offset `at` goes, if it is one.
/// Returns are none: they count from their function's start, by a register.
pub(super) fn jump_target(arch: u32, instruction: u128, at: usize) -> Option<i64> {
    let (field, bits) = match instruction & 0xfff {
        BSSY => (instruction >> 32 & 0xffff_ffff, 32),
        BRA | CALL_REL if arch >= 90 => {
            let words = (instruction >> 16 & 0xff) | (instruction >> 34 & ((1 << 48) - 1)) << 8;
            (words << 2, 58)
        }
        BRA | CALL_REL => (instruction >> 32 & ((1 << 50) - 1), 50),
        _ => return None,
    };
    let signed = (field as i64) << (64 - bits) >> (64 - bits);
    // The lowest bits belong to another field where the branch looks at divergence.
    Some((at + INSTRUCTION_BYTES) as i64 + (signed & !3))
}

/// A constant operand that an instruction may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Constant {
    pub bank: u32,
    pub offset: u32,
    /// A register is added to the offset.
    pub indexed: bool,
    /// More than eight bytes may be read.
    pub wide: bool,
}

/// The bits of an instruction where constant operands are: what it reads, if it has one
/// ([`has_constant`]), and otherwise something else.
pub(super) fn constant(instruction: u128) -> Constant {
    let indexed = match instruction & 0xfff {
        LDC => instruction >> 24 & 0xff != 0xff,
        ULDC_INDEXED => true,
        _ => false,
    };
    Constant {
        bank: (instruction >> 54 & 31) as u32,
        offset: (instruction >> WORD_SHIFT & 0xffff) as u32,
        indexed,
        // Loads say how much (4: four bytes, 5: eight); operands of others are eight at most.
        wide: matches!(instruction & 0xfff, LDC | ULDC) && instruction >> 73 & 7 > 5,
    }
}

/// Whether the opcode's form says that an operand is a constant.
pub(super) fn has_constant(instruction: u128) -> bool {
    matches!(instruction >> 9 & 7, 3 | 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branches_go_where_they_are_sent() {
        for arch in [80, 86, 89, 90] {
            for (from, to) in [(0, 0x1000), (0x2000, 0x10), (0x1fe0, 0x1fe0), (0, 1 << 24)] {
                assert_eq!(jump_target(arch, branch(arch, from, to), from), Some(to as i64));
            }
        }
    }

    #[test]
    fn encodings_are_those_that_ptxas_writes() {
        // The jump to itself at a function's end, but for its scheduling.
        let low = (1u128 << CONTROL_SHIFT) - 1;
        assert_eq!(branch(90, 0, 0) & low, 0x000383fffffffffffc00fc7947);
        assert_eq!(branch(80, 0, 0) & low, 0x000383fffffffffff000007947);
        assert_eq!(nop() & low, 0x7918);
        // `LDC R4, c[0x0][0xd0]` and `MOV R2, c[0x4][0x0]`.
        let read = constant(0x000e240000000a0000003400ff047b82);
        assert_eq!(read, Constant { bank: 0, offset: 0xd0, indexed: false, wide: false });
        let read = constant(0x000fe20000000f000100000000027a02);
        assert_eq!(read, Constant { bank: 4, offset: 0, indexed: false, wide: false });
    }
}
