//! The sixteen barriers of a block. Threads are counted, not warps, so that
//! lanes of one warp may arrive from different places.

use super::lanes::{Lanes, put};
use super::warp::{State, Warp};
use super::{Block, Checked, FaultKind, fault};
use crate::ir::{Bar, BarKind, NONE, Op};

#[derive(Clone, Copy, Default)]
pub(crate) struct Barrier {
    /// Lanes that arrived, by warp.
    arrived: [u32; 32],
    /// Threads awaited, if a number was given.
    count: Option<u32>,
    /// Of the predicates given: how many hold, and how many there are.
    yes: u32,
    all: u32,
    active: bool,
}

/// Notes the arrival of the lanes `m`; whether they have to wait.
pub(crate) fn arrive(
    block: &mut Block<'_>,
    warp: &Warp,
    bar: &Bar,
    pred: u32,
    m: u32,
    id: u32,
    count: u32,
) -> Checked<bool> {
    let lane = m.trailing_zeros();
    let Some(barrier) = block.barriers.get_mut(id as usize) else {
        return fault(FaultKind::Illegitimate(format!("barrier {id}, of 0 to 15")), lane);
    };
    barrier.active = true;
    barrier.arrived[warp.index as usize] |= m;
    barrier.yes += (pred & m).count_ones();
    barrier.all += m.count_ones();
    if bar.count != NONE {
        if count == 0 || !count.is_multiple_of(32) {
            let detail = format!("a barrier of {count} threads, which is no multiple of 32");
            return fault(FaultKind::Illegitimate(detail), lane);
        }
        barrier.count = Some(count);
    }
    block.waiting = true;
    Ok(bar.kind != BarKind::Arrive)
}

/// Releases the threads of every barrier that has all it waits for.
pub(crate) fn complete(block: &mut Block<'_>, warps: &mut [Warp]) {
    if !block.waiting {
        return;
    }
    block.waiting = false;
    for id in 0..block.barriers.len() {
        let barrier = &block.barriers[id];
        if !barrier.active {
            continue;
        }
        let done = match barrier.count {
            // Lanes that left or never were count with their warp.
            Some(count) => {
                let here: u32 = warps
                    .iter()
                    .filter(|w| barrier.arrived[w.index as usize] != 0)
                    .map(|w| (barrier.arrived[w.index as usize] | !w.live).count_ones())
                    .sum();
                here >= count
            }
            None => warps.iter().all(|w| w.live & !barrier.arrived[w.index as usize] == 0),
        };
        if !done {
            block.waiting = true;
            continue;
        }
        let barrier = std::mem::take(&mut block.barriers[id]);
        for warp in warps.iter_mut() {
            release(block, warp, id as u8, &barrier);
        }
    }
}

fn release(block: &Block<'_>, warp: &mut Warp, id: u8, barrier: &Barrier) {
    let code = &block.launch.kernel.code.code;
    for i in 0..warp.frags.len() {
        if warp.frags[i].state != State::Barrier(id) {
            continue;
        }
        let frag = warp.frags[i];
        let m = frag.waiting;
        if let Op::Bar(bar) = &code[frag.pc as usize].op {
            let regs = warp.regs(block, frag.node);
            let bits = |v: bool| 0u32.wrapping_sub(u32::from(v));
            // SAFETY: the instruction is of the fragment's own function.
            unsafe {
                match bar.kind {
                    BarKind::Popc(d) => {
                        for lane in Lanes(m) {
                            put(&regs, d, false, lane, u64::from(barrier.yes));
                        }
                    }
                    BarKind::And(p) => regs.set_pred(p, m, bits(barrier.yes == barrier.all)),
                    BarKind::Or(p) => regs.set_pred(p, m, bits(barrier.yes != 0)),
                    BarKind::Sync | BarKind::Arrive => {}
                }
            }
        }
        warp.frags[i].pc += 1;
        warp.frags[i].state = State::Ready;
    }
}
