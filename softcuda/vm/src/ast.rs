//! PTX after parsing: names resolved to indices, instructions still as text
//! opcodes. `decode` turns them into what the interpreter runs.

use crate::GlobalVar;
use crate::PtxError;

/// A PTX state space, or generic addressing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    Generic,
    Global,
    Const,
    Shared,
    Local,
    Param,
}

impl Space {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Space::Generic => "generic",
            Space::Global => "global",
            Space::Const => "const",
            Space::Shared => "shared",
            Space::Local => "local",
            Space::Param => "param",
        }
    }
}

/// How a register is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Class {
    /// One bit a lane, in a mask.
    Pred,
    /// 16 bits (or 8), kept zero-extended in a 32-bit lane.
    W16,
    W32,
    W64,
    /// 128 bits, stored as four 32-bit rows.
    W128,
}

/// What a name for storage refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Sym {
    /// A `.global` or `.const` variable of the module.
    Global(u32),
    /// A `.shared` variable of the module, wherever declared.
    Shared(u32),
    /// A byte of the function's frame in local memory.
    Frame(u32),
    /// A byte of the kernel's parameters.
    Param(u32),
}

/// A special register, with its dimension where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SReg {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    NWarpId,
    SmId,
    NSmId,
    LaneMaskEq,
    LaneMaskLt,
    LaneMaskLe,
    LaneMaskGt,
    LaneMaskGe,
    Clock,
    ClockHi,
    Clock64,
    GlobalTimer,
    GlobalTimerLo,
    GlobalTimerHi,
    GridId,
    DynamicShared,
    TotalShared,
    /// Reads as this number everywhere (cluster size 1, `%envreg`).
    Fixed(u32),
}

/// What an address is relative to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Base {
    None,
    Reg(u32),
    Sym(Sym),
    Name(Box<str>),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    Reg(u32),
    Int(u64),
    F32(u32),
    F64(u64),
    Special(SReg),
    /// Address of a variable, plus an offset in bytes.
    Sym(Sym, i64),
    /// A label, a function or a table, and the scope it is named in.
    Name(Box<str>, u32),
    Addr(Base, i64),
    Vec(Vec<Operand>),
    /// `(a, b)` of a call.
    List(Vec<Operand>),
    Sink,
    Pair(Box<Operand>, Box<Operand>),
    Not(u32),
}

#[derive(Clone, Debug)]
pub(crate) struct Instr {
    pub line: u32,
    /// The predicate register and whether it is negated.
    pub guard: Option<(u32, bool)>,
    pub op: Box<str>,
    pub args: Vec<Operand>,
    /// The source text, for messages.
    pub text: Box<str>,
}

impl Instr {
    pub(crate) fn root(&self) -> &str {
        self.op.split('.').next().unwrap_or("")
    }
}

/// A parameter or a returned value of a function, or a kernel's parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Formal {
    /// `None` for `.param` storage; the register otherwise.
    pub reg: Option<u32>,
    /// In the kernel's parameters, or in the function's frame.
    pub offset: u32,
    pub size: u32,
    pub align: u32,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Function {
    pub name: String,
    pub line: u32,
    pub entry: bool,
    pub has_body: bool,
    pub params: Vec<Formal>,
    pub rets: Vec<Formal>,
    /// The class of each register used.
    pub regs: Vec<Class>,
    pub instrs: Vec<Instr>,
    /// `(label, scope)` to the instruction it stands before.
    pub labels: std::collections::HashMap<(Box<str>, u32), u32>,
    /// `.branchtargets` by name: the labels, with their scope.
    pub tables: std::collections::HashMap<Box<str>, Vec<(Box<str>, u32)>>,
    /// Each scope's parent; scope 0 is the body.
    pub scopes: Vec<u32>,
    /// Bytes of local memory a call of this function needs.
    pub frame_bytes: u32,
    pub param_bytes: u32,
    pub max_threads: Option<u32>,
    pub required_block: Option<[u32; 3]>,
    /// The first thing in it that cannot run, found while parsing.
    pub unsupported: Option<PtxError>,
}

/// A `.shared` variable; its place is chosen per kernel.
#[derive(Clone, Debug)]
pub(crate) struct SharedVar {
    pub size: u64,
    pub align: u32,
    /// `extern .shared x[]`: the launch's dynamic bytes.
    pub dynamic: bool,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Unit {
    pub globals: Vec<GlobalVar>,
    pub shared: Vec<SharedVar>,
    pub functions: Vec<Function>,
    /// Index into `functions` by name.
    pub names: std::collections::HashMap<String, usize>,
    /// From `.alias NAME, OF`: the function that each name stands for.
    pub aliases: std::collections::HashMap<String, String>,
}

impl Unit {
    pub(crate) fn function(&self, name: &str) -> Option<usize> {
        let name = self.aliases.get(name).map_or(name, String::as_str);
        self.names.get(name).copied()
    }
}
