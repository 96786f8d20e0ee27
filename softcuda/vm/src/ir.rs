//! What the interpreter runs: instructions with every name resolved.

use crate::ast::{SReg, Space};
use crate::lanes::LaneFn;

/// A row of 32 lanes: an index into the frame's registers, or with [`CONST`]
/// into the kernel's constants. 64-bit values take two rows.
pub(crate) type R = u32;
/// A predicate register: an index into the frame's masks.
pub(crate) type P = u32;

/// The row is in the kernel's constants.
pub(crate) const CONST: u32 = 1 << 31;
/// No register: a sink, or an operand that is not there.
pub(crate) const NONE: u32 = u32::MAX;

/// 32 lanes of 32 bits.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub(crate) struct Row(pub [u32; 32]);

/// A predicate operand: the register, and whether to negate it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum PSrc {
    Reg(P, bool),
    Fixed(bool),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bin32 {
    Add,
    Sub,
    Mul,
    And,
    Or,
    Xor,
    Shl,
    ShrU,
    ShrS,
    MinU,
    MaxU,
    MinS,
    MaxS,
    FAdd,
    FSub,
    FMul,
    FAddZ,
    FSubZ,
    FMulZ,
    FMin,
    FMax,
    FDiv,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Tern32 {
    Mad,
    Fma,
    FmaZ,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bin64 {
    Add,
    Sub,
    Mul,
    And,
    Or,
    Xor,
    MinS,
    MaxS,
    MinU,
    MaxU,
    DAdd,
    DSub,
    DMul,
    DDiv,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Tern64 {
    Mad,
    Fma,
}

/// Shifts of 64 bits, whose amount has 32; and products of 32 bits in 64.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Mixed {
    Shl64,
    ShrU64,
    ShrS64,
    MulWideU,
    MulWideS,
    MadWideU,
    MadWideS,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Un {
    Mov32,
    Mov64,
    Not32,
    Neg32,
    FNeg,
    FAbs,
    U32To64,
    S32To64,
    Low32,
    S32ToF32,
    U32ToF32,
    F32ToS32,
    F32ToU32,
    F32ToF64,
    F64ToF32,
    F16ToF32,
    F32ToF16,
    Bf16ToF32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CmpType {
    S32,
    U32,
    F32,
    S64,
    U64,
    F64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Cmp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum BoolOp {
    And,
    Or,
    Xor,
}

/// What an address is relative to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum AddrBase {
    None,
    R32(R),
    R64(R),
    Frame,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Address {
    pub space: Space,
    pub base: AddrBase,
    pub offset: i64,
}

/// How loaded bytes become a register's lanes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Widen {
    Zero32,
    Sign32,
    Sign16,
    Zero64,
    Sign64,
}

/// A load or a store of one to four elements.
#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    pub at: Address,
    /// Bytes of an element: 1, 2, 4, 8.
    pub size: u8,
    pub count: u8,
    pub widen: Widen,
    /// A store's registers are 64-bit rows.
    pub wide: bool,
    /// Volatile, relaxed or stronger: others may change it while we spin.
    pub strong: bool,
    pub rows: [R; 8],
}

/// `(address, b, c) -> old value`; the address is mapped and aligned.
pub(crate) type AtomFn = unsafe fn(*mut u8, u64, u64) -> u64;

#[derive(Clone, Debug)]
pub(crate) struct Atom {
    pub f: AtomFn,
    pub at: Address,
    pub size: u8,
    /// The registers are 64-bit rows.
    pub wide: bool,
    pub d: R,
    pub b: R,
    pub c: R,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Vote {
    All,
    Any,
    Uni,
    Ballot,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Bfly,
    Idx,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Redux {
    Add,
    Min,
    Max,
    MinS,
    MaxS,
    And,
    Or,
    Xor,
    FMin,
    FMax,
}

/// What a barrier gives its threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum BarKind {
    Sync,
    Arrive,
    Popc(R),
    And(P),
    Or(P),
}

#[derive(Clone, Debug)]
pub(crate) struct Bar {
    pub kind: BarKind,
    pub id: R,
    /// `NONE`: every thread of the block.
    pub count: R,
    pub src: PSrc,
}

/// An argument or a result at the caller's side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Place {
    /// Bytes of the frame, from this offset.
    Frame(u32),
    Row32(R),
    Row64(R),
    Pred(P),
    None,
}

/// A formal parameter at the callee's side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Slot {
    pub place: Place,
    pub size: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub target: Target,
    pub args: Box<[Place]>,
    pub rets: Box<[Place]>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Target {
    /// An index into the kernel's functions.
    Direct(u32),
    /// A row of function "addresses".
    Row(R),
    Builtin(Builtin),
}

/// Functions that the CUDA driver provides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Builtin {
    Vprintf,
    Malloc,
    Free,
    AssertFail,
}

/// Carry-in and carry-out arithmetic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Carry {
    Add,
    Sub,
    MadLo,
    MadHi,
}

#[derive(Clone, Debug)]
pub(crate) struct CarryOp {
    pub k: Carry,
    pub bits: u32,
    pub sign: bool,
    pub take: bool,
    pub give: bool,
    pub d: R,
    pub a: R,
    pub b: R,
    pub c: R,
}

/// Matrix fragments' element types of `mma.sync`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum MmaType {
    F16,
    Bf16,
    Tf32,
    S8,
    U8,
    F64,
}

#[derive(Clone, Debug)]
pub(crate) struct Mma {
    pub k: u32,
    pub a_type: MmaType,
    pub b_type: MmaType,
    /// Accumulators are f16 pairs.
    pub half: bool,
    pub m: u32,
    pub d: Box<[R]>,
    pub a: Box<[R]>,
    pub b: Box<[R]>,
    pub c: Box<[R]>,
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Nop,
    Bin32(Bin32, R, R, R),
    Tern32(Tern32, R, R, R, R),
    Bin64(Bin64, R, R, R),
    Tern64(Tern64, R, R, R, R),
    Mixed(Mixed, R, R, R, R),
    Un(Un, R, R),
    Lop3(u8, R, R, R, R),
    /// Any per-lane function; `wide` says which of d, a, b, c are 64-bit.
    Lane {
        f: LaneFn,
        m: u32,
        d: R,
        a: R,
        b: R,
        c: R,
        wide: u8,
    },
    /// `bfi`, which has four inputs.
    Bfi {
        bits: u32,
        d: R,
        a: R,
        b: R,
        c: R,
        e: R,
    },
    SetP {
        t: CmpType,
        cmp: Cmp,
        p: P,
        q: P,
        a: R,
        b: R,
        src: Option<(BoolOp, PSrc)>,
    },
    /// Any per-lane function whose low bit is a predicate.
    LaneP {
        f: LaneFn,
        m: u32,
        p: P,
        q: P,
        a: R,
        b: R,
        wide: u8,
        src: Option<(BoolOp, PSrc)>,
    },
    /// A predicate to a register: one of two constants.
    PredTo {
        d: R,
        wide: bool,
        src: PSrc,
        yes: u64,
    },
    Sel32(R, R, R, PSrc),
    Sel64(R, R, R, PSrc),
    PLogic(BoolOp, P, PSrc, PSrc),
    PMov(P, PSrc),
    Carry(Box<CarryOp>),
    SReg(SReg, R),
    /// A frame variable's address in local space.
    FrameAddr {
        d: R,
        wide: bool,
        offset: u32,
    },
    Load(Box<Transfer>),
    LdParam {
        d: R,
        offset: u32,
        size: u8,
        wide: bool,
    },
    Store(Box<Transfer>),
    Atom(Box<Atom>),
    /// `dst` in shared memory, `src` in global; `n` bytes of `size`, then zeroes.
    CpAsync {
        dst: Box<Address>,
        src: Box<Address>,
        size: u8,
        n: R,
    },
    IsSpace {
        p: P,
        a: R,
        space: Space,
    },
    Bra(u32),
    BrxIdx(R, Box<[u32]>),
    Call(Box<Call>),
    Ret,
    Exit,
    Trap,
    Bar(Box<Bar>),
    WarpSync(R),
    Vote {
        k: Vote,
        d: u32,
        src: PSrc,
        mask: R,
    },
    Shfl {
        k: Shuffle,
        d: R,
        p: P,
        a: R,
        b: R,
        c: R,
        mask: R,
    },
    Match {
        all: bool,
        d: R,
        p: P,
        a: R,
        wide: bool,
        mask: R,
    },
    Redux {
        k: Redux,
        d: R,
        a: R,
        mask: R,
    },
    Elect {
        d: R,
        p: P,
        mask: R,
    },
    ActiveMask(R),
    Fence,
    Sleep,
    LdMatrix {
        at: Box<Address>,
        count: u8,
        trans: bool,
        store: bool,
        rows: [R; 4],
    },
    Mma(Box<Mma>),
}

#[derive(Clone, Debug)]
pub(crate) struct Inst {
    pub op: Op,
    /// `NONE`, or the predicate's index times two, plus one if negated.
    pub guard: u32,
    pub line: u32,
}

/// A function's place in a kernel's code, and what a call of it needs.
#[derive(Clone, Debug, Default)]
pub(crate) struct FuncInfo {
    pub entry: u32,
    pub rows: u32,
    pub preds: u32,
    pub frame_bytes: u32,
    pub params: Box<[Slot]>,
    pub rets: Box<[Slot]>,
    /// The function's index in the module: its "address".
    pub module_index: u32,
}
