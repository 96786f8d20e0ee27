//! Modules, programs and kernels: what the device sees.

use crate::GlobalVar;
use crate::PtxError;
use crate::ast::{Function, Unit};
use crate::decode::{self, Decoded};
use crate::ir::{FuncInfo, Inst, Row};
use crate::parse;
use std::collections::HashMap;

/// The most threads of a block of any kernel.
const THREADS_MAX: u32 = 1024;

/// PTX that has been parsed: syntax and names are right, and each variable
/// has a size. Give the variables addresses with [`Module::link`] to run it.
#[derive(Clone, Debug)]
pub struct Module {
    unit: Unit,
}

impl Module {
    /// Parses PTX text, as `nvcc`, NVRTC and Triton emit it.
    ///
    /// # Errors
    /// Text that is no PTX, with its line. An instruction that this
    /// interpreter does not know is no error here: it makes the kernels that
    /// can reach it [unsupported](Kernel::unsupported).
    pub fn parse(ptx: &str) -> Result<Module, PtxError> {
        Ok(Module { unit: parse::parse(ptx)? })
    }

    /// The variables that need memory before [`Module::link`].
    pub fn globals(&self) -> &[GlobalVar] {
        &self.unit.globals
    }

    pub fn entry_names(&self) -> impl Iterator<Item = &str> {
        self.unit.functions.iter().filter(|f| f.entry).map(|f| f.name.as_str())
    }

    /// Resolves every address; `addr_of` gives each variable's.
    ///
    /// # Errors
    /// None at present; what a kernel cannot do is in its `unsupported`.
    pub fn link(self, addr_of: &mut dyn FnMut(&GlobalVar) -> u64) -> Result<Program, PtxError> {
        let addresses: Vec<u64> = self.unit.globals.iter().map(addr_of).collect();
        let mut kernels = Vec::new();
        for (i, f) in self.unit.functions.iter().enumerate() {
            if f.entry && f.has_body {
                kernels.push(Kernel::new(f, decode::kernel(&self.unit, &addresses, i)));
            }
        }
        let names = kernels.iter().enumerate().map(|(i, k)| (k.name.clone(), i)).collect();
        Ok(Program { kernels, names })
    }
}

/// A linked module: immutable, shared by all that run it.
#[derive(Debug)]
pub struct Program {
    kernels: Vec<Kernel>,
    names: HashMap<String, usize>,
}

impl Program {
    /// The kernel of this PTX name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.names.get(name).map(|&i| &self.kernels[i])
    }

    /// All kernels, in the order of the text.
    pub fn kernels(&self) -> impl Iterator<Item = &Kernel> {
        self.kernels.iter()
    }
}

/// Where one of a kernel's parameters lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// Bytes from the start of the parameters.
    pub offset: u32,
    pub size: u32,
    pub align: u32,
}

/// A kernel, ready to run.
#[derive(Debug)]
pub struct Kernel {
    pub name: String,
    pub params: Vec<Param>,
    pub param_bytes: u32,
    /// Bytes of shared memory it declares.
    pub static_shared_bytes: u32,
    /// 32-bit registers a thread needs: an estimate, from lifetimes.
    pub registers: u32,
    /// Bytes of local memory of its own frame, a thread.
    pub local_bytes: u32,
    /// The most threads in a block: `.maxntid`, else 1024.
    pub max_threads: u32,
    pub required_block: Option<[u32; 3]>,
    /// Why it cannot run, if it cannot.
    pub unsupported: Option<PtxError>,
    pub(crate) code: Code,
}

/// What the interpreter runs.
#[derive(Debug)]
pub(crate) struct Code {
    pub code: Vec<Inst>,
    pub consts: Vec<Row>,
    /// The kernel first, then the functions it can reach.
    pub funcs: Vec<FuncInfo>,
    /// It calls functions, perhaps itself again.
    pub recursive: bool,
}

impl std::fmt::Debug for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Row({:#x}..)", self.0[0])
    }
}

impl Kernel {
    fn new(f: &Function, d: Decoded) -> Kernel {
        let param =
            |p: &crate::ast::Formal| Param { offset: p.offset, size: p.size, align: p.align };
        // Half of the rows kept for one instruction's own values are spare.
        let rows = d.funcs.iter().map(|f| f.rows).max().unwrap_or(0);
        Kernel {
            name: f.name.clone(),
            params: f.params.iter().map(param).collect(),
            param_bytes: f.param_bytes,
            static_shared_bytes: d.static_shared,
            registers: rows.saturating_sub(8).next_multiple_of(8).clamp(16, 255),
            local_bytes: f.frame_bytes,
            max_threads: f.max_threads.unwrap_or(THREADS_MAX).min(THREADS_MAX),
            required_block: f.required_block,
            unsupported: d.unsupported,
            code: Code { code: d.code, consts: d.consts, funcs: d.funcs, recursive: d.recursive },
        }
    }
}
