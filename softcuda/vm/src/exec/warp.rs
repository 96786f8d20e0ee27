//! A warp: its lanes as fragments that share a program counter, and the loop
//! that runs them.
//!
//! Lanes that diverge become separate fragments. The fragment deepest in
//! calls, and of those the one earliest in the code, runs first; it stops
//! where another one waits, and they merge. Compilers lay code out so that
//! this is where paths meet. Fragments that spin yield, so that a lane may
//! wait for another lane of its warp, as on Volta and later.

use super::lanes::{Lanes, Regs, get, put};
use super::memory::{self, Place};
use super::{Block, Checked, FaultKind, alu, barrier, calls, fault, group, matrix};
use crate::ir::{Op, Row};
use crate::program::Code;
use std::sync::atomic::{Ordering, fence};

/// Strong accesses that a fragment makes before others of its warp go on.
const SPIN_MAX: u32 = 64;
/// Warp instructions for which such another one then has precedence.
const FAVOUR: u64 = 2048;
/// Turns of a warp in which one fragment may keep the others waiting.
const STALE_TURNS: u32 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    /// At a warp-wide instruction, for other lanes it names.
    Lanes,
    /// At the barrier of this number.
    Barrier(u8),
}

/// Lanes of a warp that are at the same instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frag {
    pub pc: u32,
    pub mask: u32,
    /// Lanes of `mask` that take part in the barrier.
    pub waiting: u32,
    /// The call it is in: an index into the warp's nodes.
    pub node: u32,
    pub state: State,
    /// When it last ran, to be fair.
    pub stamp: u64,
}

/// One activation of a function.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Node {
    pub parent: u32,
    /// The call instruction that made it.
    pub call_pc: u32,
    pub func: u32,
    pub row_base: u32,
    pub pred_base: u32,
    pub frame: u32,
    pub depth: u32,
}

#[derive(Default)]
pub(crate) struct Warp {
    pub index: u32,
    /// Threads that have not left.
    pub live: u32,
    pub frags: Vec<Frag>,
    pub nodes: Vec<Node>,
    pub rows: Vec<Row>,
    pub preds: Vec<u32>,
    /// Where the last fault was.
    pub fault_pc: u32,
    spin: u32,
    turns: u32,
    clock: u64,
    /// The next warp-wide instruction goes ahead without its missing lanes.
    pub force: bool,
    /// A lane whose fragment has precedence, and until when.
    favoured: Option<(u32, u64)>,
}

/// Why a warp stopped for now.
pub(crate) enum Outcome {
    /// Its turn is over, or it has nothing to run.
    Turn,
    /// Threads arrived at a barrier or left.
    Barrier,
}

impl Warp {
    pub(crate) fn reset(&mut self, index: u32, lanes: u32, code: &Code) {
        let kernel = &code.funcs[0];
        self.index = index;
        self.live = lanes;
        self.nodes.clear();
        self.nodes.push(Node::default());
        self.frags.clear();
        self.frags.push(Frag {
            pc: kernel.entry,
            mask: lanes,
            waiting: 0,
            node: 0,
            state: State::Ready,
            stamp: 0,
        });
        self.reserve(kernel.rows, kernel.preds);
        (self.spin, self.turns, self.clock) = (0, 0, 0);
        (self.force, self.favoured) = (false, None);
    }

    pub(crate) fn reserve(&mut self, rows: u32, preds: u32) {
        if self.rows.len() < rows as usize {
            self.rows.resize(rows as usize, Row([0; 32]));
        }
        if self.preds.len() < preds as usize {
            self.preds.resize(preds as usize, 0);
        }
    }

    pub(crate) fn done(&self) -> bool {
        self.live == 0
    }

    pub(crate) fn runnable(&self) -> bool {
        self.frags.iter().any(|f| !matches!(f.state, State::Barrier(_)))
    }

    /// The registers of an activation.
    pub(crate) fn regs(&mut self, block: &Block<'_>, node: u32) -> Regs {
        let node = &self.nodes[node as usize];
        // SAFETY: the activation's rows and predicates were reserved when it began.
        unsafe {
            Regs {
                rows: self.rows.as_mut_ptr().add(node.row_base as usize).cast(),
                preds: self.preds.as_mut_ptr().add(node.pred_base as usize),
                consts: block.launch.kernel.code.consts.as_ptr().cast(),
                live: self.live,
            }
        }
    }

    /// Merges fragments at one place.
    fn merge(&mut self) {
        let mut i = 0;
        while i < self.frags.len() {
            let mut j = i + 1;
            while j < self.frags.len() {
                let (a, b) = (self.frags[i], self.frags[j]);
                let waits = |f: Frag| matches!(f.state, State::Barrier(_));
                if a.pc == b.pc && a.node == b.node && !waits(a) && !waits(b) {
                    self.frags[i].mask |= b.mask;
                    self.frags[i].state = State::Ready;
                    self.frags.swap_remove(j);
                } else {
                    j += 1;
                }
            }
            i += 1;
        }
    }

    /// The fragment to run, and the code address at which to look again.
    fn pick(&mut self, rotate: bool) -> Option<(usize, u32)> {
        if self.frags.len() > 1 {
            self.merge();
        }
        if let [only] = &mut self.frags[..] {
            self.favoured = None;
            self.spin = 0;
            if matches!(only.state, State::Barrier(_)) {
                return None;
            }
            only.state = State::Ready;
            return Some((0, u32::MAX));
        }
        let ready = |f: &&Frag| f.state == State::Ready;
        if !self.frags.iter().any(|f| f.state == State::Ready) {
            // Lanes that never come must not hold up the rest for ever.
            let first =
                self.frags.iter_mut().filter(|f| f.state == State::Lanes).min_by_key(|f| f.pc)?;
            first.state = State::Ready;
            self.force = true;
        }
        if rotate && let Some(oldest) = self.frags.iter().filter(ready).min_by_key(|f| f.stamp) {
            self.favoured = Some((oldest.mask.trailing_zeros(), self.clock + FAVOUR));
        }
        if self.favoured.is_some_and(|(_, until)| self.clock >= until) {
            self.favoured = None;
        }
        let favoured = self.favoured.and_then(|(lane, _)| {
            self.frags.iter().position(|f| f.mask >> lane & 1 != 0 && f.state == State::Ready)
        });
        let chosen = match favoured {
            Some(i) => i,
            None => {
                let key = |f: &Frag| (std::cmp::Reverse(self.nodes[f.node as usize].depth), f.pc);
                let first = self.frags.iter().enumerate().filter(|(_, f)| ready(f));
                first.min_by_key(|(_, f)| key(f))?.0
            }
        };
        self.clock += 1;
        self.frags[chosen].stamp = self.clock;
        let pc = self.frags[chosen].pc;
        let others =
            self.frags.iter().enumerate().filter(|(i, f)| {
                *i != chosen && f.pc > pc && !matches!(f.state, State::Barrier(_))
            });
        let stop = others.map(|(_, f)| f.pc).min().unwrap_or(u32::MAX);
        Some((chosen, stop))
    }
}

/// Runs the warp until its turn ends or nothing of it can run.
pub(crate) fn run(block: &mut Block<'_>, warp: &mut Warp, quantum: u64) -> Checked<Outcome> {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { run_avx2(block, warp, quantum) };
    }
    run_with(block, warp, quantum)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
fn run_avx2(block: &mut Block<'_>, warp: &mut Warp, quantum: u64) -> Checked<Outcome> {
    run_with(block, warp, quantum)
}

/// What ends a fragment's run.
enum End {
    /// Look again which fragment to run.
    Look,
    Turn,
    Barrier,
    /// Spinning: let another fragment have precedence.
    Rotate,
}

#[inline(always)]
fn run_with(block: &mut Block<'_>, warp: &mut Warp, quantum: u64) -> Checked<Outcome> {
    let (mut spent, mut rotate) = (0, false);
    loop {
        let Some((at, stop)) = warp.pick(rotate) else { return Ok(Outcome::Barrier) };
        rotate = false;
        let mask = warp.frags[at].mask;
        let mut n = 0;
        let end = run_frag(block, warp, at, stop, quantum.saturating_sub(spent), &mut n);
        spent += n;
        warp.clock += n;
        block.stats.thread_instructions += n * u64::from(mask.count_ones());
        match end? {
            End::Look => {}
            End::Rotate => rotate = warp.frags.len() > 1,
            End::Barrier => return Ok(Outcome::Barrier),
            End::Turn => {
                warp.turns += 1;
                if warp.frags.len() > 1 && warp.turns.is_multiple_of(STALE_TURNS) {
                    warp.pick(true);
                }
                return Ok(Outcome::Turn);
            }
        }
    }
}

#[inline(always)]
fn run_frag(
    block: &mut Block<'_>,
    warp: &mut Warp,
    at: usize,
    stop: u32,
    quantum: u64,
    count: &mut u64,
) -> Checked<End> {
    let kernel = block.launch.kernel;
    let code = kernel.code.code.as_slice();
    let Frag { mut pc, mask, mut node, .. } = warp.frags[at];
    let mut regs = warp.regs(block, node);
    let mut place = Place { warp: warp.index, frame: warp.nodes[node as usize].frame };
    let mut n = 0u64;
    macro_rules! leave {
        ($end:expr) => {{
            warp.frags[at].pc = pc;
            *count = n;
            return Ok($end);
        }};
    }
    macro_rules! check {
        ($done:expr) => {
            if let Err(f) = $done {
                warp.fault_pc = pc;
                *count = n;
                return Err(f);
            }
        };
    }
    // A strong access may be part of a wait for another lane.
    macro_rules! strong {
        () => {
            if mask != warp.live {
                warp.spin += 1;
                if warp.spin >= SPIN_MAX {
                    warp.spin = 0;
                    pc += 1;
                    leave!(End::Rotate);
                }
            }
        };
    }
    loop {
        if pc >= stop {
            leave!(End::Look);
        }
        // SAFETY: code ends with `ret`, and branches stay within it.
        let inst = unsafe { code.get_unchecked(pc as usize) };
        n += 1;
        let mut m = mask;
        if inst.guard != crate::ir::NONE {
            // SAFETY: the guard is a predicate of this function.
            let p = unsafe { regs.pred(inst.guard >> 1) };
            m &= p ^ 0u32.wrapping_sub(inst.guard & 1);
            if m == 0 {
                pc += 1;
                continue;
            }
        }
        match &inst.op {
            Op::Bra(target) => {
                let target = *target;
                if m != mask {
                    warp.frags[at].mask = mask & !m;
                    let frag = Frag { pc: target, mask: m, ..warp.frags[at] };
                    warp.frags.push(frag);
                    pc += 1;
                    leave!(End::Look);
                }
                let back = target <= pc;
                pc = target;
                if back && n >= quantum {
                    leave!(End::Turn);
                }
                if back && stop != u32::MAX {
                    leave!(End::Look);
                }
                continue;
            }
            Op::Load(t) => {
                // SAFETY: the instruction is of the function whose frame this is.
                check!(unsafe { memory::load(block, &regs, place, t, m) });
                if t.strong {
                    strong!();
                }
            }
            // SAFETY: the instruction is of the function whose frame this is.
            Op::Store(t) => check!(unsafe { memory::store(block, &regs, place, t, m) }),
            &Op::LdParam { d, offset, size, wide } => {
                // SAFETY: the instruction is of the function whose frame this is.
                check!(unsafe { memory::load_param(block, &regs, m, (d, offset, size, wide)) });
            }
            Op::Atom(a) => {
                // SAFETY: the instruction is of the function whose frame this is.
                check!(unsafe { memory::atom(block, &regs, place, a, m) });
                strong!();
            }
            Op::Exit => {
                leave_block(warp, at, m, pc);
                *count = n;
                return Ok(if block.waiting { End::Barrier } else { End::Look });
            }
            Op::Ret if node == 0 => {
                leave_block(warp, at, m, pc);
                *count = n;
                return Ok(if block.waiting { End::Barrier } else { End::Look });
            }
            Op::Ret => {
                calls::ret(block, warp, at, m, pc);
                *count = n;
                if n >= quantum {
                    return Ok(End::Turn);
                }
                return Ok(End::Look);
            }
            Op::Call(call) => {
                check!(calls::call(block, warp, at, call, m, pc));
                if warp.frags.len() > 1 || n >= quantum {
                    *count = n;
                    return Ok(if n >= quantum { End::Turn } else { End::Look });
                }
                (pc, node) = (warp.frags[at].pc, warp.frags[at].node);
                regs = warp.regs(block, node);
                place.frame = warp.nodes[node as usize].frame;
                continue;
            }
            Op::BrxIdx(a, table) => {
                check!(brx(warp, &regs, at, *a, table, m, pc));
                *count = n;
                return Ok(if n >= quantum { End::Turn } else { End::Look });
            }
            Op::Bar(bar) => {
                let first = m.trailing_zeros() as usize;
                // SAFETY: the instruction is of the function whose frame this is.
                let (pred, id, threads) = unsafe {
                    let threads = if bar.count == crate::ir::NONE {
                        0
                    } else {
                        get(&regs, bar.count, false, first)
                    };
                    (regs.psrc(bar.src), get(&regs, bar.id, false, first), threads)
                };
                let waits = barrier::arrive(block, warp, bar, pred, m, id as u32, threads as u32);
                match waits {
                    Ok(true) => {
                        if m != mask {
                            // The others go on.
                            warp.frags[at].mask = mask & !m;
                            let frag = Frag {
                                pc,
                                mask: m,
                                waiting: m,
                                state: State::Barrier(id as u8),
                                ..warp.frags[at]
                            };
                            warp.frags.push(frag);
                            pc += 1;
                        } else {
                            warp.frags[at].waiting = m;
                            warp.frags[at].state = State::Barrier(id as u8);
                        }
                        leave!(End::Barrier);
                    }
                    Ok(false) => {
                        pc += 1;
                        leave!(End::Barrier);
                    }
                    Err(f) => {
                        warp.fault_pc = pc;
                        return Err(f);
                    }
                }
            }
            Op::WarpSync(_)
            | Op::Vote { .. }
            | Op::Shfl { .. }
            | Op::Match { .. }
            | Op::Redux { .. }
            | Op::Elect { .. } => {
                if group::must_wait(warp, &regs, &inst.op, at, m) {
                    warp.frags[at].state = State::Lanes;
                    n -= 1;
                    leave!(End::Look);
                }
                // SAFETY: as above.
                unsafe { group::step(&regs, &inst.op, m) };
            }
            Op::ActiveMask(d) => {
                for lane in Lanes(m) {
                    // SAFETY: the instruction is of the function whose frame this is.
                    unsafe { put(&regs, *d, false, lane, u64::from(m)) };
                }
            }
            // SAFETY: the instruction is of the function whose frame this is.
            &Op::SReg(s, d) => unsafe { group::special(block, &regs, s, d, m, place) },
            &Op::FrameAddr { d, wide, offset } => {
                for lane in Lanes(m) {
                    // SAFETY: the instruction is of the function whose frame this is.
                    unsafe { put(&regs, d, wide, lane, u64::from(place.frame + offset)) };
                }
            }
            &Op::IsSpace { p, a, space } => {
                let mut bits = 0;
                for lane in Lanes(m) {
                    // SAFETY: the instruction is of the function whose frame this is.
                    let address = unsafe { get(&regs, a, true, lane) };
                    bits |= u32::from(memory::in_space(block, space, address)) << lane;
                }
                // SAFETY: the instruction is of the function whose frame this is.
                unsafe { regs.set_pred(p, m, bits) };
            }
            Op::Fence => fence(Ordering::SeqCst),
            Op::Sleep => {
                std::thread::yield_now();
                warp.spin += SPIN_MAX / 4;
                pc += 1;
                leave!(if warp.frags.len() > 1 && warp.spin >= SPIN_MAX {
                    End::Rotate
                } else {
                    End::Turn
                });
            }
            Op::CpAsync { dst, src, size, n } => {
                // SAFETY: the instruction is of the function whose frame this is.
                check!(unsafe { memory::cp_async(block, &regs, place, (dst, src, *size, *n), m) });
            }
            Op::LdMatrix { at, count, trans, store, rows } => {
                // SAFETY: the instruction is of the function whose frame this is.
                check!(unsafe {
                    memory::matrix(block, &regs, place, (at, *count, *trans, *store, rows), m)
                });
            }
            // SAFETY: the instruction is of the function whose frame this is.
            Op::Mma(op) => unsafe { matrix::mma(&regs, op) },
            Op::Trap => check!(fault::<()>(FaultKind::Trap, m.trailing_zeros())),
            op => {
                // SAFETY: the instruction is of the function whose frame this is.
                let known = unsafe { alu::step(&regs, op, m) };
                debug_assert!(known, "{op:?}");
            }
        }
        pc += 1;
    }
}

/// The lanes `m` of a fragment leave the kernel.
#[inline(never)]
fn leave_block(warp: &mut Warp, at: usize, m: u32, pc: u32) {
    warp.live &= !m;
    let frag = &mut warp.frags[at];
    frag.mask &= !m;
    frag.pc = pc + 1;
    if frag.mask == 0 {
        warp.frags.swap_remove(at);
    }
}

/// Splits a fragment by the lanes' targets.
#[inline(never)]
fn brx(
    warp: &mut Warp,
    regs: &Regs,
    at: usize,
    a: u32,
    table: &[u32],
    m: u32,
    pc: u32,
) -> Checked<()> {
    let frag = warp.frags[at];
    let mut left = m;
    let mut parts: Vec<Frag> = Vec::new();
    for lane in Lanes(m) {
        if left >> lane & 1 == 0 {
            continue;
        }
        // SAFETY: the row is of the current function.
        let index = |lane| unsafe { get(regs, a, false, lane) };
        let Some(&target) = table.get(index(lane) as usize) else {
            let detail = format!("branch index {} of a table of {}", index(lane), table.len());
            return fault(FaultKind::Illegitimate(detail), lane as u32);
        };
        let same = Lanes(left).filter(|&l| index(l) == index(lane)).fold(0, |acc, l| acc | 1 << l);
        left &= !same;
        parts.push(Frag { pc: target, mask: same, ..frag });
    }
    if frag.mask & !m != 0 {
        parts.push(Frag { pc: pc + 1, mask: frag.mask & !m, ..frag });
    }
    warp.frags.swap_remove(at);
    warp.frags.extend(parts);
    Ok(())
}
