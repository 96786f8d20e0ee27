//! What the lanes of a warp do together, and special registers.

use super::Block;
use super::lanes::{Lanes, Regs, get, put};
use super::memory::Place;
use super::warp::{State, Warp};
use crate::ast::SReg;
use crate::ir::{NONE, Op, R, Redux, Shuffle, Vote};
use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

fn named(op: &Op) -> R {
    match *op {
        Op::WarpSync(mask)
        | Op::Vote { mask, .. }
        | Op::Shfl { mask, .. }
        | Op::Match { mask, .. }
        | Op::Redux { mask, .. }
        | Op::Elect { mask, .. } => mask,
        _ => NONE,
    }
}

/// Whether lanes that the instruction names are elsewhere and may yet come.
#[inline(always)]
pub(crate) fn must_wait(warp: &mut Warp, regs: &Regs, op: &Op, at: usize, m: u32) -> bool {
    if warp.frags.len() == 1 {
        return false;
    }
    let mask = named(op);
    if mask == NONE {
        return false;
    }
    // SAFETY: the row is of the current function.
    let members = unsafe { get(regs, mask, false, m.trailing_zeros() as usize) } as u32;
    let missing = members & warp.live & !warp.frags[at].mask;
    if std::mem::take(&mut warp.force) {
        return false;
    }
    let may_come =
        |f: &&super::warp::Frag| !matches!(f.state, State::Barrier(_)) && f.mask & missing != 0;
    missing != 0 && warp.frags.iter().any(|f| may_come(&f))
}

/// # Safety
/// `op` is of the function whose frame `regs` is.
#[inline(never)]
pub(crate) unsafe fn step(regs: &Regs, op: &Op, m: u32) {
    // SAFETY: throughout: the caller's promise; lanes are below 32.
    unsafe {
        match *op {
            Op::Vote { k, d, src, .. } => {
                let yes = regs.psrc(src) & m;
                let all = |v: bool| 0u32.wrapping_sub(u32::from(v));
                match k {
                    Vote::Ballot => Lanes(m).for_each(|l| put(regs, d, false, l, u64::from(yes))),
                    Vote::All => regs.set_pred(d, m, all(yes == m)),
                    Vote::Any => regs.set_pred(d, m, all(yes != 0)),
                    Vote::Uni => regs.set_pred(d, m, all(yes == m || yes == 0)),
                }
            }
            Op::Shfl { k, d, p, a, b, c, .. } => shuffle(regs, m, k, d, p, a, b, c),
            Op::Match { all, d, p, a, wide, .. } => {
                let first = get(regs, a, wide, m.trailing_zeros() as usize);
                if all {
                    let same = Lanes(m).all(|l| get(regs, a, wide, l) == first);
                    let v = if same { m } else { 0 };
                    Lanes(m).for_each(|l| put(regs, d, false, l, u64::from(v)));
                    regs.set_pred(p, m, if same { m } else { 0 });
                    return;
                }
                let mut out = [0u32; 32];
                for lane in Lanes(m) {
                    let v = get(regs, a, wide, lane);
                    out[lane] = Lanes(m)
                        .filter(|&l| get(regs, a, wide, l) == v)
                        .fold(0, |acc, l| acc | 1 << l);
                }
                Lanes(m).for_each(|l| put(regs, d, false, l, u64::from(out[l])));
            }
            Op::Redux { k, d, a, .. } => {
                let values = Lanes(m).map(|l| get(regs, a, false, l) as u32);
                let float = |f: fn(f32, f32) -> f32| {
                    move |x: u32, y: u32| f(f32::from_bits(x), f32::from_bits(y)).to_bits()
                };
                let v = match k {
                    Redux::Add => values.reduce(u32::wrapping_add),
                    Redux::Min => values.min(),
                    Redux::Max => values.max(),
                    Redux::MinS => values.map(|v| v as i32).min().map(|v| v as u32),
                    Redux::MaxS => values.map(|v| v as i32).max().map(|v| v as u32),
                    Redux::And => values.reduce(|x, y| x & y),
                    Redux::Or => values.reduce(|x, y| x | y),
                    Redux::Xor => values.reduce(|x, y| x ^ y),
                    Redux::FMin => values.reduce(float(f32::min)),
                    Redux::FMax => values.reduce(float(f32::max)),
                };
                let v = u64::from(v.unwrap_or(0));
                Lanes(m).for_each(|l| put(regs, d, false, l, v));
            }
            Op::Elect { d, p, .. } => {
                let leader = m.trailing_zeros();
                Lanes(m).for_each(|l| put(regs, d, false, l, u64::from(leader)));
                regs.set_pred(p, m, 1 << leader);
            }
            _ => {}
        }
    }
}

#[allow(clippy::too_many_arguments)]
unsafe fn shuffle(regs: &Regs, m: u32, k: Shuffle, d: R, p: u32, a: R, b: R, c: R) {
    // SAFETY: the caller's promise; rows have 32 lanes.
    unsafe {
        let from = *regs.src::<[u32; 32]>(a);
        let (bs, cs) = (*regs.src::<[u32; 32]>(b), *regs.src::<[u32; 32]>(c));
        let mut inside = 0;
        for lane in Lanes(m) {
            let (b, c, i) = (bs[lane] & 31, cs[lane], lane as u32);
            let (segment, clamp) = (c >> 8 & 31, c & 31);
            let (low, high) = (i & segment, (i & segment) | (clamp & !segment));
            let (j, ok) = match k {
                Shuffle::Up => (i.wrapping_sub(b), i as i32 - b as i32 >= high as i32),
                Shuffle::Down => (i + b, i + b <= high),
                Shuffle::Bfly => (i ^ b, i ^ b <= high),
                Shuffle::Idx => {
                    let j = low | (b & !segment);
                    (j, j <= high)
                }
            };
            let j = if ok { j } else { i };
            inside |= u32::from(ok) << lane;
            put(regs, d, false, lane, u64::from(from[j as usize & 31]));
        }
        regs.set_pred(p, m, inside);
    }
}

/// A clock that moves at about a GPU's rate: nanoseconds.
fn clock() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

fn global_timer() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
}

/// Reads a special register.
///
/// # Safety
/// `d` is a row of the function whose frame `regs` is; two for 64 bits.
#[inline(never)]
pub(crate) unsafe fn special(block: &Block<'_>, regs: &Regs, s: SReg, d: R, m: u32, place: Place) {
    let launch = block.launch;
    let lane_value = |f: fn(u32) -> u32| {
        for lane in Lanes(m) {
            // SAFETY: the caller's promise.
            unsafe { put(regs, d, false, lane, u64::from(f(lane as u32))) };
        }
    };
    let (value, wide) = match s {
        SReg::Tid(axis) => {
            // SAFETY: `tid` has three rows a warp; the caller's promise.
            unsafe {
                let row = &(*block.tid.add(place.warp as usize * 3 + usize::from(axis))).0;
                Lanes(m).for_each(|l| put(regs, d, false, l, u64::from(row[l])));
            }
            return;
        }
        SReg::LaneId => return lane_value(|l| l),
        SReg::LaneMaskEq => return lane_value(|l| 1 << l),
        SReg::LaneMaskLt => return lane_value(|l| (1 << l) - 1),
        SReg::LaneMaskLe => return lane_value(|l| u32::MAX >> (31 - l)),
        SReg::LaneMaskGt => return lane_value(|l| !(u32::MAX >> (31 - l))),
        SReg::LaneMaskGe => return lane_value(|l| u32::MAX << l),
        SReg::Ntid(axis) => (u64::from(launch.block[usize::from(axis)]), false),
        SReg::Ctaid(axis) => (u64::from(launch.block_index[usize::from(axis)]), false),
        SReg::Nctaid(axis) => (u64::from(launch.grid[usize::from(axis)]), false),
        SReg::WarpId => (u64::from(place.warp), false),
        SReg::NWarpId => (u64::from(block.threads.div_ceil(32)), false),
        SReg::SmId => (u64::from(launch.sm_id), false),
        SReg::NSmId => (u64::from(launch.sm_count), false),
        SReg::Clock => (clock() & 0xffff_ffff, false),
        SReg::ClockHi => (clock() >> 32, false),
        SReg::Clock64 => (clock(), true),
        SReg::GlobalTimer => (global_timer(), true),
        SReg::GlobalTimerLo => (global_timer() & 0xffff_ffff, false),
        SReg::GlobalTimerHi => (global_timer() >> 32, false),
        SReg::GridId => (0, true),
        SReg::DynamicShared => (u64::from(launch.dynamic_shared_bytes), false),
        SReg::TotalShared => (block.shared_bytes, false),
        SReg::Fixed(v) => (u64::from(v), false),
    };
    for lane in Lanes(m) {
        // SAFETY: the caller's promise.
        unsafe { put(regs, d, wide, lane, value) };
    }
}
