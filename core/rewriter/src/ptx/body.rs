//! What a function's body does that transforming must know of.

use super::module::{Module, Symbol};
use crate::TransformRefusal;
use std::collections::HashMap;
use tally_ptx::{Instruction, Kind, Statement, Token, statements};

/// Facts of a function, or of all that it can reach: bits to be or-ed.
pub(super) mod fact {
    /// Reads `%ctaid` or `%nctaid`.
    pub const INDEX: u16 = 1;
    /// Reads `%envreg`, where the driver puts the workspace of grid barriers, or calls them.
    pub const GRID_SYNC: u16 = 2;
    pub const DEPENDS: u16 = 4;
    /// Reads a special register of clusters.
    pub const CLUSTER: u16 = 8;
    /// Reads which grid or graph it is of: each part of a launch is another.
    pub const GRID_ID: u16 = 16;
    /// `clusterlaunchcontrol`: takes blocks of its grid that have not started.
    pub const STEALS: u16 = 32;
    /// Calls through a register.
    pub const INDIRECT: u16 = 64;
    /// Names a variable of the module that is more than a literal for messages, or declares one of its own.
    pub const GLOBALS: u16 = 128;
    /// Names a function that neither the module nor the driver defines.
    pub const UNRESOLVED: u16 = 256;
    /// Names a function of the device runtime.
    pub const DEVICE_RUNTIME: u16 = 512;
    /// Reads global memory so that it sees what other blocks write meanwhile.
    pub const SEES_OTHERS: u16 = 1024;
    /// Reads which SM it runs on, or how many there are.
    pub const SM: u16 = 2048;
    /// Takes a function's address: in another module it is another number.
    pub const TAKES_ADDRESS: u16 = 4096;
}

/// The token that names what a call calls: after the results, if there are any.
pub(super) fn callee(operands: &[Token]) -> Option<Token> {
    if !operands.first()?.is(b'(') {
        return operands.first().copied();
    }
    let close = operands.iter().position(|t| t.is(b')'))?;
    operands.get(close + 1).filter(|t| t.is(b','))?;
    operands.get(close + 2).copied()
}

/// A read of the block's index or the grid's size.
#[derive(Clone, Copy, Debug)]
pub(super) struct IndexRead {
    /// Reads `%nctaid` rather than `%ctaid`.
    pub size: bool,
    /// 0 to 2, or `None` for all of them as a vector.
    pub axis: Option<usize>,
    pub start: u32,
    pub end: u32,
    /// A `mov` or `cvt` of 32 bits, in which a register may stand instead.
    pub replaceable: bool,
}

/// Whether an instruction lets a block see what other blocks write meanwhile: by itself (in machine code a strong load,
/// an atomic, a load of a surface), or through plain loads later in the program (a fence wider than a block).
fn sees_others(source: &str, opcode: &str, qualifiers: &[Token]) -> bool {
    const SEES: [&str; 6] = [".volatile", ".relaxed", ".acquire", ".mmio", ".cv", ".cg"];
    // A block's own, or its cluster's.
    const APART: [&str; 4] = [".shared", ".local", ".param", ".const"];
    // Nobody writes what is read so.
    const CONSTANT: [&str; 1] = [".nc"];
    const WIDE: [&str; 5] = [".gl", ".sys", ".gpu", ".cluster", ".sc"];
    let any = |of: &[&str]| {
        let is_one = |text: &str| of.iter().any(|o| text.split("::").next() == Some(o));
        qualifiers.iter().any(|q| is_one(q.text(source)))
    };
    match opcode {
        "ld" => any(&SEES) && !any(&APART) && !any(&CONSTANT),
        // Between a thread and its own asynchronous copies; the start of barriers in shared memory.
        "fence" if any(&[".proxy", ".mbarrier_init"]) => any(&[".gpu", ".sys"]),
        "fence" | "membar" => any(&WIDE),
        "atom" => !any(&APART),
        "multimem" => any(&[".ld_reduce"]),
        "suld" => true,
        _ => false,
    }
}

/// A body's own facts.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub bits: u16,
    /// Functions that it names, with repeats.
    pub funcs: Vec<usize>,
    /// Those of them that it names other than to call them: their addresses are taken.
    pub taken: Vec<usize>,
    /// Entries that it names.
    pub entries: Vec<usize>,
    /// Variables that it names.
    pub vars: Vec<usize>,
    pub reads: Vec<IndexRead>,
    /// Registers that atomics write.
    pub results: Vec<Token>,
}

/// Reads the body of an entry or a function.
///
/// # Errors
/// [`TransformRefusal::Malformed`].
pub(super) fn facts(
    module: &Module<'_>,
    body: &[Token],
    is_entry: bool,
) -> Result<Facts, TransformRefusal> {
    let mut facts = Facts::default();
    for statement in statements(module.source, body) {
        match statement? {
            Statement::Instruction(instruction) => facts.instruction(module, instruction),
            Statement::Directive([space, ..])
                if matches!(space.text(module.source), ".global" | ".const" | ".tex") =>
            {
                facts.bits |= fact::GLOBALS;
            }
            // What an indirect call may reach; it counts as reaching everything.
            _ => {}
        }
    }
    if facts.uses_results(module.source, body, is_entry) {
        facts.bits |= fact::SEES_OTHERS;
    }
    Ok(facts)
}

impl Facts {
    fn instruction(&mut self, module: &Module<'_>, instruction: Instruction<'_>) {
        let Instruction { opcode, qualifiers, operands, .. } = instruction;
        let source = module.source;
        let opcode = opcode.text(source);
        let mut called = None;
        match opcode {
            "griddepcontrol" => self.bits |= fact::DEPENDS,
            "clusterlaunchcontrol" => self.bits |= fact::STEALS,
            "call" => {
                let token = callee(operands);
                let target = token.and_then(|t| module.symbols.get(t.text(source)));
                match target {
                    Some(Symbol::Func(_)) => called = token.map(|t| t.start),
                    _ => self.bits |= fact::INDIRECT,
                }
            }
            _ if sees_others(source, opcode, qualifiers) => match operands.first() {
                // Compilers write them for reductions, too, and do not look at what they give.
                Some(result) if opcode == "atom" && result.is_word() => {
                    self.results.push(*result);
                }
                _ => self.bits |= fact::SEES_OTHERS,
            },
            _ => {}
        }
        for (i, token) in operands.iter().enumerate() {
            if !token.is_word() {
                continue;
            }
            let word = token.text(source);
            match module.symbols.get(word) {
                Some(Symbol::Entry(e)) => self.entries.push(*e),
                Some(Symbol::Func(f)) => {
                    self.funcs.push(*f);
                    if called != Some(token.start) {
                        self.bits |= fact::TAKES_ADDRESS;
                        self.taken.push(*f);
                    }
                }
                Some(Symbol::Var(v)) => self.vars.push(*v),
                None if word.starts_with('%') => {
                    let component = operands.get(i + 1).filter(|t| t.kind() == Kind::Dot);
                    self.special(source, word, *token, component, opcode, qualifiers);
                }
                None => {}
            }
        }
    }

    /// Whether the body names the result of an atomic anywhere else. A function may give it back, and say so
    /// in its head alone.
    fn uses_results(&self, source: &str, body: &[Token], is_entry: bool) -> bool {
        if self.results.is_empty() {
            return false;
        }
        let mut named: HashMap<&str, u32> =
            self.results.iter().map(|result| (result.text(source), 0)).collect();
        named.remove("_");
        if !is_entry {
            return !named.is_empty();
        }
        for token in body.iter().filter(|token| token.is_word()) {
            if let Some(times) = named.get_mut(token.text(source)) {
                *times += 1;
            }
        }
        named.values().any(|times| *times > 1)
    }

    fn special(
        &mut self,
        source: &str,
        word: &str,
        token: Token,
        component: Option<&Token>,
        opcode: &str,
        qualifiers: &[Token],
    ) {
        match word {
            "%ctaid" | "%nctaid" => {
                self.bits |= fact::INDEX;
                let axis = component.map(|c| match c.text(source) {
                    ".x" => Some(0),
                    ".y" => Some(1),
                    ".z" => Some(2),
                    _ => None,
                });
                let last = qualifiers.last().map_or("", |q| q.text(source));
                let vector = qualifiers.iter().any(|q| q.text(source) == ".v4");
                let whole = axis.is_none();
                self.reads.push(IndexRead {
                    size: word == "%nctaid",
                    axis: axis.flatten(),
                    start: token.start,
                    end: component.map_or(token.end(), |c| c.end()),
                    replaceable: matches!(opcode, "mov" | "cvt")
                        && matches!(last, ".u32" | ".s32" | ".b32")
                        && axis != Some(None)
                        && vector == whole,
                });
            }
            "%gridid" | "%current_graph_exec" => self.bits |= fact::GRID_ID,
            "%smid" | "%nsmid" => self.bits |= fact::SM,
            "%clusterid" | "%nclusterid" | "%is_explicit_cluster" => self.bits |= fact::CLUSTER,
            _ if word.starts_with("%cluster_") => self.bits |= fact::CLUSTER,
            _ if word.starts_with("%envreg") => self.bits |= fact::GRID_SYNC,
            _ => {}
        }
    }
}
