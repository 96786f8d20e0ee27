//! As much of the machine code of sm_80 to sm_90 as the patch needs: instructions of
//! 16 bytes; opcode in bits 0 to 11, guard predicate in 12 to 15, constant operands'
//! byte offset in 38 to 53 and bank in 54 to 58, scheduling from bit 105 on.
//!
//! Nothing is decoded beyond that. Where a question cannot be answered exactly, the
//! answer errs towards refusing a kernel.

pub(super) const INSTRUCTION_BYTES: usize = 16;
/// First bit of the scheduling fields.
pub(super) const CONTROL_SHIFT: u32 = 105;
/// First bit of a constant operand's byte offset.
pub(super) const WORD_SHIFT: u32 = 38;

const BRA: u128 = 0x947;
const CALL_REL: u128 = 0x944;
const CALL_ABS: u128 = 0x943;
const BSSY: u128 = 0x945;
const NOP: u128 = 0x918;
const LDC: u128 = 0xb82;
const ULDC: u128 = 0xab9;
const ULDC_INDEXED: u128 = 0xabb;
/// Reads of special registers: to a register, to a uniform one, to a pair.
const S2R: u128 = 0x919;
const S2UR: u128 = 0x9c3;
const CS2R: u128 = 0x805;
const UIADD3: u128 = 0x290;
const LOAD: u128 = 0x980;
const LOAD_GLOBAL: u128 = 0x981;
const LOAD_SHARED: u128 = 0x984;
const STORE: u128 = 0x985;
const STORE_GLOBAL: u128 = 0x986;
const STORE_SHARED: u128 = 0x388;
/// Computations of each thread, without their operands' form: MOV, SEL, FSETP, ISETP, IADD3, LEA, LOP3,
/// PRMT, IMNMX, SHF, FMUL, FADD, FFMA, IMAD, IMAD.WIDE, HFMA2, HMUL2.
const VECTOR_ONLY: [u128; 17] = [
    0x002, 0x007, 0x00b, 0x00c, 0x010, 0x011, 0x012, 0x016, 0x017, 0x019, 0x020, 0x021, 0x023,
    0x024, 0x025, 0x031, 0x032,
];
/// With a uniform register as the second operand.
const IADD3_UNIFORM: u128 = 0xc10;
/// What is in the place of a uniform register that is none.
const NO_UNIFORM: u128 = 63;
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

/// Whether it is a call or a jump to what only a register says, or a table of addresses.
/// Returns and branches within a function (`BRX`) are none.
pub(super) fn is_indirect_call(instruction: u128) -> bool {
    // CALL.ABS, CALL.REL, JMP, JMX; their operands' forms are in the bits above.
    const CALLS_AND_JUMPS: [u128; 4] = [0x143, 0x144, 0x14a, 0x14c];
    let opcode = instruction & 0xfff;
    opcode != CALL_REL && opcode != CALL_ABS && CALLS_AND_JUMPS.contains(&(opcode & 0x1ff))
}

/// Whether it is a call of what the instruction itself says.
pub(super) fn is_direct_call(instruction: u128) -> bool {
    matches!(instruction & 0xfff, CALL_REL | CALL_ABS)
}

/// Whether the instruction lets a block see what other blocks write meanwhile: a load that is neither weak nor
/// constant, an atomic with a result, a load from a surface or from several GPUs; or one that empties the first cache,
/// as a fence wider than a block does, so that later plain loads see it.
pub(super) fn sees_others(instruction: u128) -> bool {
    const LOADS: [u128; 2] = [0x180, 0x181];
    // ATOM and ATOMG: add and the like; of floats, from sm_90 on.
    const ATOMICS: [u128; 4] = [0x18a, 0x1a8, 0x1a2, 0x1a3];
    // ATOM and ATOMG, compare and swap; SULD; LDGMC, of floats and of integers; CCTL.
    const OTHERS: [u128; 6] = [0x18b, 0x1a9, 0x199, 0x1a5, 0x1a4, 0x18f];
    const WEAK: u128 = 0;
    const CONSTANT: u128 = 4;
    let opcode = instruction & 0x1ff;
    let order = instruction >> 77 & 15;
    // To the register and the predicate that are none.
    let has_result = destination(instruction) != 0xff || instruction >> 81 & 7 != 7;
    OTHERS.contains(&opcode)
        || ATOMICS.contains(&opcode) && has_result
        || LOADS.contains(&opcode) && order != WEAK && order != CONSTANT
}

/// Whether a constant's place is said by a uniform register instead of a bank.
pub(super) fn is_bindless(instruction: u128) -> bool {
    instruction >> 91 & 1 == 1
}

/// How a constant is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// By a load of so many bytes.
    Load(u32),
    /// As an operand of something else: four bytes or eight.
    Operand,
}

/// How an instruction that [`has_constant`] reads it.
pub(super) fn read(instruction: u128) -> Read {
    match instruction & 0xfff {
        LDC | ULDC | ULDC_INDEXED => Read::Load(match instruction >> 73 & 7 {
            0 | 1 => 1,
            2 | 3 => 2,
            4 => 4,
            5 => 8,
            _ => 16,
        }),
        _ => Read::Operand,
    }
}

/// The instruction with another byte offset of its constant operand.
pub(super) fn with_offset(instruction: u128, offset: u32) -> u128 {
    instruction & !(0xffff << WORD_SHIFT) | u128::from(offset) << WORD_SHIFT
}

/// A read of a special register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpecialRead {
    pub number: u32,
    /// Where it goes; `None`: to a pair, with the register behind it.
    pub to: Option<Destination>,
    /// Whether it runs without a predicate.
    pub always: bool,
    /// The scoreboard that says when it is there.
    pub scoreboard: Option<u32>,
}

/// Where a special register is read to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// A register of each thread.
    Vector(u32),
    /// A uniform register, which all threads of a warp share.
    Uniform(u32),
}

/// Decodes an instruction that reads a special register; `None` for others.
pub(super) fn special_read(instruction: u128) -> Option<SpecialRead> {
    let register = destination(instruction);
    let to = match instruction & 0xfff {
        S2R => Some(Destination::Vector(register)),
        S2UR => Some(Destination::Uniform(register)),
        CS2R => None,
        _ => return None,
    };
    let scoreboard = (instruction >> (CONTROL_SHIFT + 5) & 7) as u32;
    Some(SpecialRead {
        number: (instruction >> 72 & 0xff) as u32,
        to,
        always: instruction & 0xf000 == ALWAYS,
        scoreboard: (scoreboard < 6).then_some(scoreboard),
    })
}

/// Whether it reads which SM it runs on (`%smid`, or what `%warpid` is taken from), or how many there are
/// (`%nsmid`, a word of bank 0 on all architectures that have templates).
pub(super) fn reads_sm(instruction: u128) -> bool {
    const SM_REGISTERS: [u32; 2] = [0x43, 3];
    const SM_COUNT_WORD: u32 = 0x10c;
    if let Some(read) = special_read(instruction) {
        return SM_REGISTERS.contains(&read.number);
    }
    let constant = constant(instruction);
    let bytes = if constant.wide { 16 } else { 8 };
    has_constant(instruction)
        && constant.bank == 0
        && (constant.offset & !3..(constant.offset & !3) + bytes).contains(&SM_COUNT_WORD)
}

/// Longest stall: more cycles than any instruction of fixed length takes.
const STALL_MAX: u128 = 15;

/// Load of 32 bits of bank 0 at byte `offset` to a uniform register.
pub(super) fn load_uniform(register: u32, offset: u32) -> u128 {
    let size_32 = 4 << 73;
    let to = u128::from(register) << 16;
    size_32 | u128::from(offset) << WORD_SHIFT | to | ULDC | ALWAYS | control(STALL_MAX, 0, 0)
}

/// `to` = register `from`, of the same kind, + uniform register `added`, once scoreboard `after`
/// says so.
pub(super) fn add_uniform(to: Destination, from: u32, added: u32, after: u32) -> u128 {
    let (opcode, to, rest) = match to {
        Destination::Vector(r) => (IADD3_UNIFORM, r, 0x0fff_e0ff),
        Destination::Uniform(r) => (UIADD3, r, 0x0fff_e000 | NO_UNIFORM),
    };
    let registers = u128::from(added) << 32 | u128::from(from) << 24 | u128::from(to) << 16;
    rest << 64 | registers | opcode | ALWAYS | control(STALL_MAX, 0, 1 << after)
}

/// The register that an instruction of the tail of a form by offset writes.
pub(super) fn destination(instruction: u128) -> u32 {
    (instruction >> 16 & 0xff) as u32
}

/// The instruction with another destination register.
pub(super) fn with_destination(instruction: u128, register: u32) -> u128 {
    instruction & !(0xff << 16) | u128::from(register) << 16
}

/// The uniform registers, a bit each, that the instruction may have to do with: those whose
/// number is in some field where one can stand, and those that may be read with them, in groups
/// of up to eight. A relative jump's distance lies in all of these fields but one.
pub(super) fn uniform_registers(instruction: u128) -> u64 {
    const GROUP: u64 = 0xff;
    let (opcode, form) = (instruction & 0xfff, instruction >> 9 & 7);
    let fields: &[u32] = match opcode {
        BRA | CALL_REL => &[24],
        BSSY => &[16, 24],
        // Data and addresses are threads' own; how memory is accessed, and offsets, need not be.
        LOAD | LOAD_GLOBAL | LOAD_SHARED | STORE | STORE_GLOBAL | STORE_SHARED => &[32, 64],
        _ if VECTOR_ONLY.contains(&(opcode & 0x1ff)) => match form {
            // Registers, immediates and constants.
            1..=5 => &[],
            // One of the operands is uniform.
            _ => &[32, 64],
        },
        // An immediate. (Loads and stores, `0x9…`, are of the same form.)
        _ if opcode >> 8 == 8 => &[16, 24, 64],
        _ => &[16, 24, 32, 64],
    };
    fields.iter().fold(0, |all, at| all | GROUP << (instruction >> at & 63))
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
    fn uniform_registers_are_seen_wherever_one_can_stand() {
        let bits = |range: std::ops::Range<u32>| range.fold(0_u64, |all, n| all | 1 << n);
        // UIADD3 UR4, UR9, UR17, URZ; STG.E desc[UR30][R2.64], R40; BRXU UR6. A store's field for
        // data may have an offset.
        let add = 0x000f_c800_0fff_e03f_0000_0011_0904_7290;
        assert_eq!(uniform_registers(add), bits(4..17) | bits(17..25) | 1 << 63);
        let store = 0x000f_e200_0c10_191e_0000_0028_0200_7986;
        assert_eq!(uniform_registers(store), bits(30..38) | bits(40..48));
        assert_eq!(uniform_registers(0x000f_ea00_0b83_ffff_ffff_fef0_0600_7958) & 1 << 6, 1 << 6);
        // A distance is none, wherever it lies; an immediate neither.
        for arch in [80, 90] {
            for to in [0x40, 0x1_0000, 0x12_3450] {
                assert_eq!(uniform_registers(branch(arch, 0x2000, to)), bits(0..8), "{to:#x}");
            }
        }
        // IADD3 R0, R0, UR5, RZ; IADD3 R5, R0, c[0x0][0xc], RZ; IMAD.WIDE.U32 R2, R5, 0x4, R2.
        let uniform = 0x000f_e200_0fff_e0ff_0000_0005_0000_7c10;
        assert_eq!(uniform_registers(uniform), bits(5..13) | 1 << 63);
        assert_eq!(uniform_registers(0x000f_c600_07ff_e0ff_0000_0300_0005_7a10), 0);
        assert_eq!(uniform_registers(0x000f_ca00_078e_0002_0000_0004_0502_7825), 0);
        // UIADD3 UR4, UR4, 0x1234_5678, URZ.
        let immediate = 0x000f_e200_0fff_e03f_1234_5678_0404_7890;
        assert_eq!(uniform_registers(immediate), bits(4..12) | 1 << 63);
    }

    #[test]
    fn loads_that_see_others_are_told_from_those_that_do_not() {
        let load = |opcode: u128, order: u128| opcode | ALWAYS | order << 77;
        // LD and LDG, .STRONG of the SM, the GPU, the system, .MMIO; with a register and with an immediate.
        for opcode in [0x980, 0x981, 0x381] {
            assert!([5, 7, 10, 12].iter().all(|order| sees_others(load(opcode, *order))));
            assert!([0, 4].iter().all(|order| !sees_others(load(opcode, *order))));
        }
        // ATOM and ATOMG: add, compare and swap, of floats; LDGMC, SULD, CCTL.IVALL.
        for opcode in [0x98a, 0x38b, 0x9a2, 0x9a8, 0x3a9, 0x9a3, 0x9a5, 0x9a4, 0xb99, 0xf99, 0x98f]
        {
            assert!(sees_others(load(opcode, 7)), "{opcode:x}");
        }
        // RED, ATOMS, LDS, LDL, LDC, LDGSTS.
        for opcode in [0x98e, 0x38c, 0x38d, 0x984, 0x983, 0xb82, 0xfae] {
            assert!(!sees_others(load(opcode, 7)), "{opcode:x}");
        }
        // An addition to RZ and PT; one of them is something; compare and swap, which may go on by itself.
        let nowhere = 0xff << 16 | 7 << 81;
        assert!(!sees_others(load(0x9a8, 7) | nowhere));
        assert!(sees_others(load(0x9a8, 7) | 0xff << 16) && sees_others(load(0x9a8, 7) | 7 << 81));
        assert!(sees_others(load(0x3a9, 7) | nowhere));
    }

    #[test]
    fn calls_by_a_register_are_told_from_calls_of_what_is_written_there() {
        // CALL.REL.NOINC R2 `f; CALL.ABS.NOINC R2, on sm_80 and sm_90; CALL.REL.NOINC `f.
        for indirect in [
            0x000f_ea00_03c3_ffff_ffff_ff80_0200_7344,
            0x003f_ea00_03c3_ffff_ffff_fffc_02e0_7344,
            0x002f_ea00_03c0_0000_0000_0000_0200_7343,
        ] {
            assert!(is_indirect_call(indirect), "{indirect:x}");
        }
        // CALL.REL.NOINC `f; BRA, BSSY, BRXU; EXIT, NOP, S2R.
        let direct = 0x000f_ea00_03c0_0000_0000_0040_0000_7944;
        let others = [direct, branch(90, 0, 64), 0x6_7945, 0x0600_7958, 0x794d, nop(), 0x7919];
        assert!(others.iter().all(|i| !is_indirect_call(*i)));
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
