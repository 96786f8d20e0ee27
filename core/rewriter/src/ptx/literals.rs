//! Which variables are only text of messages.
//!
//! A copy of a module has its own copies of the variables, so a kernel in the copy must not use a variable that
//! anything writes. `printf` and `assert` put their strings into variables of the module; those may be doubled.
//! A variable counts as such a string if it is declared like a string literal and every use of it in the module
//! ends as an argument of `vprintf` or `__assertfail`, by way of `mov`, `cvta.global` and `st.param` alone.

use super::body::{self, Facts};
use super::module::{Module, Symbol};
use crate::TransformRefusal;
use std::collections::{HashMap, HashSet};
use tally_ptx::{Instruction, Statement, Token, inside, statements};

const PRINTERS: [&str; 2] = ["vprintf", "__assertfail"];

/// By variable: whether it is only printed. `all` are the facts of all bodies.
pub(super) fn only_printed<'f>(
    module: &Module<'_>,
    all: impl Iterator<Item = &'f Facts>,
) -> Result<Vec<bool>, TransformRefusal> {
    let mut out: Vec<bool> = module.vars.iter().map(|v| v.literal && !v.in_initialiser).collect();
    let bodies = module.entries.iter().map(|e| Some(inside(e.body)));
    let bodies = bodies.chain(module.funcs.iter().map(|f| f.body));
    for (facts, body) in all.zip(bodies) {
        if facts.vars.iter().all(|v| !out[*v]) {
            continue;
        }
        let Some(body) = body else { continue };
        let escaped = escaped(module, body)?;
        for v in &facts.vars {
            out[*v] &= !escaped.contains(v);
        }
    }
    Ok(out)
}

/// How values flow between names in one body.
#[derive(Default)]
struct Flow<'a> {
    /// From a name to the names that its value was copied from.
    sources: HashMap<&'a str, Vec<&'a str>>,
    /// Names that something else was done with.
    bad: Vec<&'a str>,
    blocks: Vec<Block<'a>>,
}

/// A pair of braces.
#[derive(Default)]
struct Block<'a> {
    /// Its own `.param` variables, and what was stored to any.
    params: HashSet<&'a str>,
    stored: Vec<(&'a str, &'a str)>,
    calls: usize,
    prints: usize,
}

fn escaped(module: &Module<'_>, body: &[Token]) -> Result<HashSet<usize>, TransformRefusal> {
    let source = module.source;
    let mut flow = Flow { blocks: vec![Block::default()], ..Flow::default() };
    for statement in statements(source, body) {
        match statement? {
            Statement::Open => flow.blocks.push(Block::default()),
            Statement::Close => flow.close(),
            Statement::Label(_) => {}
            Statement::Directive(directive) => flow.directive(source, directive),
            Statement::Instruction(instruction) => flow.instruction(source, instruction),
        }
    }
    while !flow.blocks.is_empty() {
        flow.close();
    }
    let mut seen: HashSet<&str> = flow.bad.iter().copied().collect();
    let mut work = flow.bad;
    while let Some(name) = work.pop() {
        for source in flow.sources.get(name).into_iter().flatten() {
            if seen.insert(source) {
                work.push(source);
            }
        }
    }
    let vars = seen.iter().filter_map(|name| match module.symbols.get(name) {
        Some(Symbol::Var(v)) => Some(*v),
        _ => None,
    });
    Ok(vars.collect())
}

impl<'a> Flow<'a> {
    fn close(&mut self) {
        let Some(block) = self.blocks.pop() else { return };
        let printed = block.calls > 0 && block.calls == block.prints;
        for (param, value) in block.stored {
            if !printed || !block.params.contains(param) {
                self.bad.push(value);
            }
        }
    }

    fn directive(&mut self, source: &'a str, directive: &[Token]) {
        if let (".param", Some(block)) = (directive[0].text(source), self.blocks.last_mut()) {
            let words = directive.iter().filter(|t| t.is_word());
            block.params.extend(words.map(|t| t.text(source)));
        }
    }

    fn instruction(&mut self, source: &'a str, instruction: Instruction<'_>) {
        let Instruction { opcode, qualifiers, operands, .. } = instruction;
        let text = |t: &Token| t.text(source);
        let is = |names: &[&str]| {
            qualifiers.len() == names.len()
                && qualifiers.iter().zip(names).all(|(q, n)| text(q) == *n)
        };
        match (text(&opcode), operands) {
            ("mov" | "cvta", [to, comma, from])
                if comma.is(b',')
                    && to.is_word()
                    && from.is_word()
                    && (is(&[".u64"]) || is(&[".b64"]) || is(&[".global", ".u64"])) =>
            {
                self.sources.entry(text(to)).or_default().push(text(from));
            }
            ("st", [open, param, offset @ .., value])
                if is(&[".param", ".b64"]) && open.is(b'[') && value.is_word() =>
            {
                let plain = offset.iter().all(|t| !t.is_word());
                let param = if plain { text(param) } else { "" };
                if let Some(block) = self.blocks.last_mut() {
                    block.stored.push((param, text(value)));
                }
            }
            ("call", _) => {
                let target = body::callee(operands);
                let prints = target.is_some_and(|t| PRINTERS.contains(&text(&t)));
                if let Some(block) = self.blocks.last_mut() {
                    block.calls += 1;
                    block.prints += usize::from(prints);
                }
                self.spoil(source, operands);
            }
            _ => self.spoil(source, operands),
        }
    }

    fn spoil(&mut self, source: &'a str, operands: &[Token]) {
        let words = operands.iter().filter(|t| t.is_word());
        self.bad.extend(words.map(|t| t.text(source)));
    }
}
