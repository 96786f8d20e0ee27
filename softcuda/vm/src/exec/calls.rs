//! Calls and returns. A warp's lanes that call together share an activation:
//! a frame of rows above their caller's, and bytes of local memory.

use super::lanes::{Lanes, Regs, get, put};
use super::warp::{Frag, Node, Warp};
use super::{Block, Checked, FaultKind, fault};
use crate::ast::Space;
use crate::ir::{Builtin, Call, FuncInfo, Op, Place, Target};
use crate::parse::FUNCTION_BASE;

/// Calls nested deeper than this overflow the stack.
const DEPTH_MAX: u32 = 4096;
/// Rows a warp's activations may take in all.
const ROWS_MAX: u32 = 1 << 17;
/// The longest text of an assertion that is reported.
const TEXT_MAX: u32 = 256;

/// Enters a function with the lanes `m`, or does what the driver's would.
#[inline(never)]
pub(crate) fn call(
    block: &mut Block<'_>,
    warp: &mut Warp,
    at: usize,
    call: &Call,
    m: u32,
    pc: u32,
) -> Checked<()> {
    let code = &block.launch.kernel.code;
    let frag = warp.frags[at];
    match call.target {
        Target::Direct(func) => enter(block, warp, at, call, func, m, pc),
        Target::Builtin(b) => {
            builtin(block, warp, frag.node, call, b, m)?;
            warp.frags[at].pc = pc + 1;
            Ok(())
        }
        Target::Row(r) => {
            let regs = warp.regs(block, frag.node);
            let first = m.trailing_zeros() as usize;
            // SAFETY: the row is of the current function.
            let target = |lane| unsafe { get(&regs, r, true, lane) };
            let wanted = target(first);
            let same = Lanes(m).filter(|&l| target(l) == wanted).fold(0, |acc, l| acc | 1 << l);
            let func =
                code.funcs.iter().position(|f| FUNCTION_BASE + u64::from(f.module_index) == wanted);
            let Some(func) = func.filter(|&f| f != 0) else {
                let detail = format!("a call of {wanted:#x}, which is no function");
                return fault(FaultKind::Illegitimate(detail), first as u32);
            };
            let info = &code.funcs[func];
            if info.params.len() != call.args.len() || info.rets.len() != call.rets.len() {
                let detail = "a call whose arguments do not match the function".into();
                return fault(FaultKind::Illegitimate(detail), first as u32);
            }
            // Lanes with another target call again from here.
            if same != m {
                let rest = Frag { pc, mask: m & !same, ..frag };
                warp.frags[at].mask &= !rest.mask;
                warp.frags.push(rest);
            }
            enter(block, warp, at, call, func as u32, same, pc)
        }
    }
}

fn enter(
    block: &mut Block<'_>,
    warp: &mut Warp,
    at: usize,
    call: &Call,
    func: u32,
    m: u32,
    pc: u32,
) -> Checked<()> {
    let code = &block.launch.kernel.code;
    let frag = warp.frags[at];
    let parent = warp.nodes[frag.node as usize];
    let (caller, callee) = (&code.funcs[parent.func as usize], &code.funcs[func as usize]);
    let node = Node {
        parent: frag.node,
        call_pc: pc,
        func,
        row_base: parent.row_base + caller.rows,
        pred_base: parent.pred_base + caller.preds,
        frame: (parent.frame + caller.frame_bytes).next_multiple_of(16),
        depth: parent.depth + 1,
    };
    let rows = node.row_base + callee.rows;
    let bytes = u64::from(node.frame) + u64::from(callee.frame_bytes);
    if node.depth > DEPTH_MAX || rows > ROWS_MAX || bytes > block.local_stride {
        return fault(FaultKind::StackOverflow, m.trailing_zeros());
    }
    warp.reserve(rows, node.pred_base + callee.preds);
    let index = activation(warp, node);
    let (from, to) = (warp.regs(block, frag.node), warp.regs(block, index));
    for (actual, formal) in call.args.iter().zip(&callee.params) {
        copy(
            block,
            warp.index,
            m,
            formal.size,
            (&from, parent.frame, *actual),
            (&to, node.frame, formal.place),
        );
    }
    let entry = Frag { pc: callee.entry, mask: m, node: index, ..frag };
    if frag.mask == m {
        warp.frags[at] = entry;
    } else {
        warp.frags[at].mask &= !m;
        warp.frags[at].pc = pc + 1;
        warp.frags.push(entry);
    }
    Ok(())
}

/// The index of an activation; one that equals it is reused, so that lanes
/// which call from one place at different times can merge.
fn activation(warp: &mut Warp, node: Node) -> u32 {
    let newest = warp.frags.iter().map(|f| f.node).max().unwrap_or(0);
    warp.nodes.truncate(newest as usize + 1);
    let same = |n: &Node| (n.parent, n.call_pc, n.func) == (node.parent, node.call_pc, node.func);
    if warp.frags.len() > 1
        && let Some(i) = warp.nodes.iter().skip(1).position(same)
    {
        return i as u32 + 1;
    }
    warp.nodes.push(node);
    warp.nodes.len() as u32 - 1
}

/// Returns from a function with the lanes `m`.
#[inline(never)]
pub(crate) fn ret(block: &mut Block<'_>, warp: &mut Warp, at: usize, m: u32, pc: u32) {
    let code = &block.launch.kernel.code;
    let frag = warp.frags[at];
    let node = warp.nodes[frag.node as usize];
    let callee: &FuncInfo = &code.funcs[node.func as usize];
    let parent = warp.nodes[node.parent as usize];
    if let Op::Call(call) = &code.code[node.call_pc as usize].op {
        let (from, to) = (warp.regs(block, frag.node), warp.regs(block, node.parent));
        for (actual, formal) in call.rets.iter().zip(&callee.rets) {
            copy(
                block,
                warp.index,
                m,
                formal.size,
                (&from, node.frame, formal.place),
                (&to, parent.frame, *actual),
            );
        }
    }
    let back = Frag { pc: node.call_pc + 1, mask: m, node: node.parent, ..frag };
    if frag.mask == m {
        warp.frags[at] = back;
    } else {
        warp.frags[at].mask &= !m;
        warp.frags[at].pc = pc + 1;
        warp.frags.push(back);
    }
}

/// A side of a copy: its registers, where its frame starts, and the place.
type Side<'a> = (&'a Regs, u32, Place);

/// Copies an argument or a result between two activations.
fn copy(block: &mut Block<'_>, warp: u32, m: u32, size: u32, from: Side<'_>, to: Side<'_>) {
    let spot = super::memory::Place { warp, frame: 0 };
    for lane in Lanes(m) {
        let mut address = |frame: u32, at: u32, bytes: u32| {
            block.host(spot, Space::Local, u64::from(frame + at), bytes, lane as u32, true)
        };
        // SAFETY: rows are of the two activations; `host` checked the bytes,
        // which are this thread's own.
        unsafe {
            match (from.2, to.2) {
                (Place::Frame(a), Place::Frame(b)) => {
                    if let (Some(a), Some(b)) = (address(from.1, a, size), address(to.1, b, size)) {
                        std::ptr::copy(a as *const u8, b as *mut u8, size as usize);
                    }
                }
                (Place::Pred(a), Place::Pred(b)) => to.0.set_pred(b, 1 << lane, from.0.pred(a)),
                (_, Place::None) | (Place::None, _) => {}
                (a, b) => {
                    let size = size.min(8);
                    let v = match a {
                        Place::Row32(r) => get(from.0, r, false, lane),
                        Place::Row64(r) => get(from.0, r, true, lane),
                        Place::Pred(p) => u64::from(from.0.pred(p) >> lane & 1),
                        Place::Frame(at) => {
                            let mut word = [0u8; 8];
                            if let Some(host) = address(from.1, at, size) {
                                std::ptr::copy(host as *const u8, word.as_mut_ptr(), size as usize);
                            }
                            u64::from_le_bytes(word)
                        }
                        Place::None => 0,
                    };
                    match b {
                        Place::Row32(r) => put(to.0, r, false, lane, v),
                        Place::Row64(r) => put(to.0, r, true, lane, v),
                        Place::Frame(at) => {
                            if let Some(host) = address(to.1, at, size) {
                                let word = v.to_le_bytes();
                                std::ptr::copy(word.as_ptr(), host as *mut u8, size as usize);
                            }
                        }
                        Place::Pred(p) => {
                            to.0.set_pred(p, 1 << lane, 0u32.wrapping_sub(v as u32 & 1))
                        }
                        Place::None => {}
                    }
                }
            }
        }
    }
}

fn builtin(
    block: &mut Block<'_>,
    warp: &mut Warp,
    node: u32,
    call: &Call,
    which: Builtin,
    m: u32,
) -> Checked<()> {
    let regs = warp.regs(block, node);
    let frame = warp.nodes[node as usize].frame;
    let spot = super::memory::Place { warp: warp.index, frame: 0 };
    let lane = m.trailing_zeros();
    match which {
        Builtin::AssertFail => {
            let mut read = |i: usize| match call.args.get(i) {
                Some(Place::Frame(at)) => {
                    let bytes = if i == 2 { 4 } else { 8 };
                    let host =
                        block.host(spot, Space::Local, u64::from(frame + at), bytes, lane, false);
                    // SAFETY: `host` checked the bytes, which are this thread's own.
                    host.map_or(0, |host| unsafe {
                        let mut word = [0u8; 8];
                        std::ptr::copy(host as *const u8, word.as_mut_ptr(), bytes as usize);
                        u64::from_le_bytes(word)
                    })
                }
                // SAFETY: rows are of the current function.
                Some(Place::Row64(r)) => unsafe { get(&regs, *r, true, lane as usize) },
                // SAFETY: as above.
                Some(Place::Row32(r)) => unsafe { get(&regs, *r, false, lane as usize) },
                _ => 0,
            };
            let (message, file, line, function) = (read(0), read(1), read(2), read(3));
            let text = format!(
                "`{}` at {}:{line} in {}",
                text(block, message),
                text(block, file),
                text(block, function)
            );
            return fault(FaultKind::Assert(text), lane);
        }
        Builtin::Vprintf => block.stats.printf_calls += u64::from(m.count_ones()),
        Builtin::Malloc | Builtin::Free => {}
    }
    // `vprintf` returns 0; `malloc` a null pointer, as from an exhausted heap.
    for place in &call.rets {
        let size = if which == Builtin::Malloc { 8 } else { 4 };
        for lane in Lanes(m) {
            // SAFETY: rows are of the current function; `host` checked the bytes.
            unsafe {
                match *place {
                    Place::Row32(r) => put(&regs, r, false, lane, 0),
                    Place::Row64(r) => put(&regs, r, true, lane, 0),
                    Place::Frame(at) => {
                        let at = u64::from(frame + at);
                        if let Some(host) =
                            block.host(spot, Space::Local, at, size, lane as u32, true)
                        {
                            std::ptr::write_bytes(host as *mut u8, 0, size as usize);
                        }
                    }
                    Place::Pred(_) | Place::None => {}
                }
            }
        }
    }
    Ok(())
}

/// A zero-terminated text in global memory.
fn text(block: &mut Block<'_>, at: u64) -> String {
    let spot = super::memory::Place { warp: 0, frame: 0 };
    let mut bytes = Vec::new();
    for i in 0..u64::from(TEXT_MAX) {
        let a = at.wrapping_add(i);
        let Some(host) = block.host(spot, Space::Generic, a, 1, 0, false) else { break };
        // SAFETY: `host` checked that the byte is mapped.
        match unsafe { (host as *const u8).read_volatile() } {
            0 => break,
            b => bytes.push(b),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
