//! Puts a function's virtual registers into as few rows as their lifetimes
//! allow. PTX gives each value a register of its own; without this the
//! register file of a warp would not fit the caches.
//!
//! Lifetimes are per thread, so divergence changes nothing: a lane's part of
//! a row is written only under a mask that holds the lane.

use crate::ast::{Base, Class, Function, Instr, Operand};
use std::collections::BinaryHeap;

/// Past this many bits of liveness sets, each register gets its own row.
const LIVENESS_BITS_MAX: usize = 1 << 29;

/// Loops nest a few deep; code that needs more passes is hostile.
const PASSES_MAX: u32 = 100;

/// Each register's row (or predicate index), and how many there are.
pub(crate) struct RegMap {
    pub slot: Vec<u32>,
    pub rows: u32,
    pub preds: u32,
}

/// Instructions whose first operand is read, not written.
fn writes_nothing(instr: &Instr) -> bool {
    match instr.root() {
        "st" | "red" | "bar" | "barrier" | "membar" | "fence" | "prefetch" | "prefetchu"
        | "bra" | "brx" | "call" | "exit" | "ret" | "trap" | "brkpt" | "cp" | "nanosleep"
        | "stmatrix" | "stackrestore" | "discard" | "applypriority" | "setmaxnreg"
        | "griddepcontrol" | "pmevent" | "wgmma" => !instr.op.contains(".red."),
        "mbarrier" => {
            !(instr.op.contains("arrive")
                || instr.op.contains("wait")
                || instr.op.contains("pending"))
        }
        _ => false,
    }
}

fn visit(op: &Operand, f: &mut dyn FnMut(u32)) {
    match op {
        Operand::Reg(r) | Operand::Not(r) | Operand::Addr(Base::Reg(r), _) => f(*r),
        Operand::Vec(items) | Operand::List(items) => items.iter().for_each(|o| visit(o, f)),
        Operand::Pair(a, b) => {
            visit(a, f);
            visit(b, f);
        }
        _ => {}
    }
}

/// Calls `f(register, is written)` for each operand; uses first.
fn operands(instr: &Instr, f: &mut dyn FnMut(u32, bool)) {
    if let Some((guard, _)) = instr.guard {
        f(guard, false);
    }
    let call = instr.root() == "call";
    let rets = call && instr.args.len() > 1 && matches!(instr.args[0], Operand::List(_));
    let first_written = if call { rets } else { !instr.args.is_empty() && !writes_nothing(instr) };
    for op in &instr.args[usize::from(first_written)..] {
        visit(op, &mut |r| f(r, false));
    }
    if first_written {
        if matches!(instr.args[0], Operand::Addr(..)) {
            visit(&instr.args[0], &mut |r| f(r, false));
            return;
        }
        if instr.guard.is_some() {
            // Lanes without the guard keep what they had.
            visit(&instr.args[0], &mut |r| f(r, false));
        }
        visit(&instr.args[0], &mut |r| f(r, true));
    }
}

struct Block {
    start: usize,
    end: usize,
    next: Vec<usize>,
}

/// The instruction a label operand leads to.
pub(crate) fn label_target(f: &Function, name: &str, mut scope: u32) -> Option<u32> {
    loop {
        if let Some(&at) = f.labels.get(&(name.into(), scope)) {
            return Some(at);
        }
        if scope == 0 {
            return None;
        }
        scope = f.scopes[scope as usize];
    }
}

/// Where a branch may go; empty for other instructions.
pub(crate) fn targets(f: &Function, instr: &Instr) -> Vec<u32> {
    match instr.root() {
        "bra" => match instr.args.first() {
            Some(Operand::Name(name, scope)) => label_target(f, name, *scope).into_iter().collect(),
            _ => vec![],
        },
        "brx" => match instr.args.get(1) {
            Some(Operand::Name(name, _)) => f.tables.get(name).map_or(vec![], |labels| {
                labels.iter().filter_map(|(l, s)| label_target(f, l, *s)).collect()
            }),
            _ => vec![],
        },
        _ => vec![],
    }
}

fn blocks(f: &Function) -> Vec<Block> {
    let n = f.instrs.len();
    let mut leader = vec![false; n + 1];
    leader[0] = true;
    for &at in f.labels.values() {
        leader[at as usize] = true;
    }
    for (i, instr) in f.instrs.iter().enumerate() {
        if matches!(instr.root(), "bra" | "brx" | "ret" | "exit" | "trap") {
            leader[i + 1] = true;
        }
    }
    let starts: Vec<usize> = (0..n).filter(|&i| leader[i]).collect();
    let mut block_of = vec![0; n + 1];
    for (b, &start) in starts.iter().enumerate() {
        let end = starts.get(b + 1).copied().unwrap_or(n);
        block_of[start..end].fill(b);
    }
    let mut out = Vec::with_capacity(starts.len());
    for (b, &start) in starts.iter().enumerate() {
        let end = starts.get(b + 1).copied().unwrap_or(n);
        let last = &f.instrs[end - 1];
        let mut next: Vec<usize> = targets(f, last)
            .into_iter()
            .filter(|&t| (t as usize) < n)
            .map(|t| block_of[t as usize])
            .collect();
        let stops = matches!(last.root(), "bra" | "brx" | "ret" | "exit") && last.guard.is_none();
        if !stops && b + 1 < starts.len() {
            next.push(b + 1);
        }
        next.sort_unstable();
        next.dedup();
        out.push(Block { start, end, next });
    }
    out
}

/// The first and the last instruction at which each register holds a value.
fn lifetimes(f: &Function) -> Option<Vec<Option<(usize, usize)>>> {
    let blocks = blocks(f);
    let words = f.regs.len().div_ceil(64);
    if blocks.len().checked_mul(words)?.checked_mul(64 * 3)? > LIVENESS_BITS_MAX {
        return None;
    }
    let mut gen_ = vec![0u64; blocks.len() * words];
    let mut kill = gen_.clone();
    for (b, block) in blocks.iter().enumerate() {
        let (used, written) = (&mut gen_[b * words..][..words], &mut kill[b * words..][..words]);
        for instr in &f.instrs[block.start..block.end] {
            operands(instr, &mut |r, write| {
                let (word, bit) = (r as usize / 64, 1u64 << (r % 64));
                if write {
                    written[word] |= bit;
                } else if written[word] & bit == 0 {
                    used[word] |= bit;
                }
            });
        }
    }
    // Live at each block's start, to a fixed point from the end.
    let mut live = gen_.clone();
    let (mut changed, mut passes) = (true, 0);
    while changed {
        passes += 1;
        if passes > PASSES_MAX {
            return None;
        }
        changed = false;
        for b in (0..blocks.len()).rev() {
            for w in 0..words {
                let out = blocks[b].next.iter().fold(0, |acc, &s| acc | live[s * words + w]);
                let new = gen_[b * words + w] | (out & !kill[b * words + w]);
                changed |= new != live[b * words + w];
                live[b * words + w] = new;
            }
        }
    }
    let mut spans: Vec<Option<(usize, usize)>> = vec![None; f.regs.len()];
    let mut touch = |r: usize, at: usize| {
        let span = spans[r].get_or_insert((at, at));
        *span = (span.0.min(at), span.1.max(at));
    };
    for (b, block) in blocks.iter().enumerate() {
        for w in 0..words {
            let out = block.next.iter().fold(0, |acc, &s| acc | live[s * words + w]);
            for (mut set, at) in [(live[b * words + w], block.start), (out, block.end - 1)] {
                while set != 0 {
                    touch(w * 64 + set.trailing_zeros() as usize, at);
                    set &= set - 1;
                }
            }
        }
        for (i, instr) in f.instrs.iter().enumerate().take(block.end).skip(block.start) {
            operands(instr, &mut |r, _| touch(r as usize, i));
        }
    }
    // Formal registers arrive before the first instruction and leave with `ret`.
    let end = f.instrs.len().saturating_sub(1);
    for formal in &f.params {
        if let Some(r) = formal.reg {
            touch(r as usize, 0);
        }
    }
    for formal in &f.rets {
        if let Some(r) = formal.reg {
            touch(r as usize, 0);
            touch(r as usize, end);
        }
    }
    Some(spans)
}

/// Free slots of one kind; the last freed is used first, as it is in cache.
#[derive(Default)]
struct Pool {
    free: Vec<u32>,
    /// `(instruction after which it is free, slot)`, soonest on top.
    busy: BinaryHeap<(std::cmp::Reverse<usize>, u32)>,
}

impl Pool {
    fn take(&mut self, (start, end): (usize, usize), next: &mut u32, rows: u32) -> u32 {
        while let Some(&(std::cmp::Reverse(until), slot)) = self.busy.peek() {
            if until >= start {
                break;
            }
            self.busy.pop();
            self.free.push(slot);
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            *next += rows;
            *next - rows
        });
        self.busy.push((std::cmp::Reverse(end), slot));
        slot
    }
}

pub(crate) fn allocate(f: &Function) -> RegMap {
    // Predicate 0 is the carry flag.
    let mut map = RegMap { slot: vec![0; f.regs.len()], rows: 0, preds: 1 };
    let spans = if f.instrs.is_empty() { None } else { lifetimes(f) };
    let mut order: Vec<usize> = (0..f.regs.len()).collect();
    let whole = (0, f.instrs.len());
    let span = |r: usize| spans.as_ref().map_or(whole, |s| s[r].unwrap_or((0, 0)));
    order.sort_by_key(|&r| span(r));
    let mut pools: [Pool; 4] = Default::default();
    for r in order {
        let (kind, rows) = match f.regs[r] {
            Class::Pred => (0, 1),
            Class::W16 | Class::W32 => (1, 1),
            Class::W64 => (2, 2),
            Class::W128 => (3, 4),
        };
        let next = if kind == 0 { &mut map.preds } else { &mut map.rows };
        map.slot[r] = pools[kind].take(span(r), next, rows);
    }
    map
}
