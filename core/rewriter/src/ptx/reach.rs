//! What each entry can reach through calls.

use super::body::{self, Facts, fact};
use super::literals;
use super::module::{Module, Symbol};
use crate::TransformRefusal;
use tally_ptx::inside;

/// Functions that the driver defines and that know nothing of the grid.
const BUILTIN: [&str; 5] = ["vprintf", "__assertfail", "malloc", "free", "__trap"];

/// Facts of every entry.
pub(super) struct Reach {
    /// For each entry, the facts of its own body.
    pub entries: Vec<Facts>,
    /// For each entry, the bits of the functions that it can reach, without its own.
    pub below: Vec<u16>,
    /// For each entry, whether something names it.
    pub taken: Vec<bool>,
}

/// Reads all bodies and follows the calls.
///
/// # Errors
/// [`TransformRefusal::Malformed`] for a body that cannot be read, [`TransformRefusal::DeviceLaunch`] for a module that
/// can launch kernels: which, is not known.
pub(super) fn reach(module: &Module<'_>) -> Result<Reach, TransformRefusal> {
    let entries: Result<Vec<Facts>, _> =
        module.entries.iter().map(|e| body::facts(module, inside(e.body), true)).collect();
    let entries = entries?;
    let mut funcs = Vec::with_capacity(module.funcs.len());
    for func in &module.funcs {
        let mut facts = match &func.body {
            Some(body) => body::facts(module, body, false)?,
            None => Facts { bits: undefined(func.name), ..Facts::default() },
        };
        if let Some(of) = func.alias_of {
            match module.symbols.get(of) {
                Some(Symbol::Func(f)) => {
                    (facts.bits, facts.funcs) = (facts.bits & !fact::UNRESOLVED, vec![*f])
                }
                _ => return Err(TransformRefusal::Malformed),
            }
        }
        if facts.bits & fact::DEVICE_RUNTIME != 0 {
            return Err(TransformRefusal::DeviceLaunch);
        }
        funcs.push(facts);
    }
    let mut taken = vec![false; entries.len()];
    for e in entries.iter().chain(&funcs).flat_map(|f| &f.entries) {
        taken[*e] = true;
    }
    for name in &module.initialisers {
        if let Some(Symbol::Entry(e)) = module.symbols.get(name) {
            taken[*e] = true;
        }
    }
    let only_printed = literals::only_printed(module, entries.iter().chain(&funcs))?;
    let uses = |facts: &Facts| {
        let uses = facts.vars.iter().any(|v| {
            let var = &module.vars[*v];
            !only_printed[*v] && (!var.math_table || var.in_initialiser)
        });
        facts.bits | if uses { fact::GLOBALS } else { 0 }
    };
    let mut entries = entries;
    for facts in entries.iter_mut().chain(&mut funcs) {
        facts.bits = uses(facts);
    }
    let mut by_register: Vec<usize> =
        entries.iter().chain(&funcs).flat_map(|f| &f.taken).copied().collect();
    let named = module.initialisers.iter().filter_map(|name| match module.symbols.get(name) {
        Some(Symbol::Func(f)) => Some(*f),
        _ => None,
    });
    by_register.extend(named);
    let of_funcs = close(&funcs, &by_register);
    let below = entries.iter().map(|e| {
        let mut bits = e.funcs.iter().fold(0, |bits, f| bits | of_funcs[*f]);
        if e.bits & fact::INDIRECT != 0 {
            bits |= of_funcs[funcs.len()];
        }
        bits
    });
    let below = below.collect();
    Ok(Reach { entries, below, taken })
}

/// What a function without a body is.
fn undefined(name: &str) -> u16 {
    if BUILTIN.contains(&name) {
        return 0;
    }
    if name.starts_with("cudaCG") {
        return fact::GRID_SYNC;
    }
    let runtime = ["cuda", "__cuda", "cnp", "__cnp"].iter().any(|p| name.starts_with(p));
    if runtime { fact::DEVICE_RUNTIME } else { fact::UNRESOLVED }
}

/// The bits of each function and of all that it can reach, and last those of what a call
/// through a register may reach: every function whose address something takes. A
/// function's bits rise at most once each, so that the work is linear in the calls.
fn close(funcs: &[Facts], by_register: &[usize]) -> Vec<u16> {
    let any = funcs.len();
    let mut callers: Vec<Vec<usize>> = vec![Vec::new(); any + 1];
    let mut bits: Vec<u16> = funcs.iter().map(|f| f.bits).collect();
    bits.push(0);
    for (at, func) in funcs.iter().enumerate() {
        for callee in &func.funcs {
            callers[*callee].push(at);
        }
        if func.bits & fact::INDIRECT != 0 {
            callers[any].push(at);
        }
    }
    for func in by_register {
        callers[*func].push(any);
    }
    let mut work: Vec<usize> = (0..=any).collect();
    while let Some(at) = work.pop() {
        for caller in &callers[at] {
            let more = bits[at] & !bits[*caller];
            if more != 0 {
                bits[*caller] |= more;
                work.push(*caller);
            }
        }
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn func(bits: u16, funcs: &[usize]) -> Facts {
        Facts { bits, funcs: funcs.to_vec(), ..Facts::default() }
    }

    #[test]
    fn facts_rise_through_cycles_and_registers() {
        let funcs = [
            func(0, &[1]),
            func(0, &[0, 2]),
            func(fact::INDEX, &[]),
            func(fact::INDIRECT, &[]),
            func(fact::GRID_ID, &[]),
            func(fact::STEALS, &[]),
        ];
        let bits = close(&funcs, &[1, 4, 4]);
        let reached = fact::INDEX | fact::GRID_ID;
        assert_eq!(bits[..3], [fact::INDEX; 3]);
        assert_eq!(bits[3], reached | fact::INDIRECT);
        assert_eq!(bits[4..], [fact::GRID_ID, fact::STEALS, reached]);
    }
}
