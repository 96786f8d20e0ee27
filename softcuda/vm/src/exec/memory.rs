//! Addresses to host pointers, checked; loads, stores and atomics.
//!
//! Every access is checked against the range that the device reports, the
//! block's shared bytes or the thread's local bytes before a pointer is made.
//! Accesses to memory are relaxed host atomics of their width: on x86-64 the
//! same instructions as plain ones, without undefined behaviour in a race.

use super::lanes::{Lanes, Regs, get, put};
use super::{Block, Checked, FaultKind, fault, window};
use crate::ast::Space;
use crate::ir::{AddrBase, Address, Atom, NONE, R, Transfer, Widen};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// A warp's place in its block, for local memory.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub warp: u32,
    /// Where the current function's frame starts in local memory.
    pub frame: u32,
}

/// The addresses that the lanes give.
///
/// # Safety
/// `at` is of the function whose frame `regs` is.
#[inline(always)]
pub(crate) unsafe fn addresses(regs: &Regs, place: Place, at: &Address) -> [u64; 32] {
    let offset = at.offset as u64;
    let mut out = [0; 32];
    // SAFETY: the caller's promise; rows have 32 lanes.
    unsafe {
        match at.base {
            AddrBase::R64(r) => {
                let base = regs.src::<u64>(r);
                for (i, a) in out.iter_mut().enumerate() {
                    *a = (*base.add(i)).wrapping_add(offset);
                }
            }
            AddrBase::R32(r) => {
                let base = regs.src::<u32>(r);
                for (i, a) in out.iter_mut().enumerate() {
                    *a = u64::from((*base.add(i)).wrapping_add(offset as u32));
                }
            }
            AddrBase::None => out = [offset; 32],
            AddrBase::Frame => out = [offset.wrapping_add(u64::from(place.frame)); 32],
        }
    }
    out
}

impl Block<'_> {
    /// Turns the lanes' addresses into host pointers to `bytes` bytes each,
    /// aligned to `align`.
    #[inline(always)]
    pub(crate) fn resolve(
        &mut self,
        place: Place,
        space: Space,
        addrs: &mut [u64; 32],
        m: u32,
        bytes: u32,
        write: bool,
    ) -> Checked<()> {
        match space {
            Space::Shared => {
                let limit = self.shared_bytes.wrapping_sub(u64::from(bytes));
                if self.shared_bytes >= u64::from(bytes) && within(addrs, m, 0, limit, bytes) {
                    let base = self.shared as u64;
                    addrs.iter_mut().for_each(|a| *a = a.wrapping_add(base));
                    return Ok(());
                }
            }
            Space::Global | Space::Const | Space::Generic => {
                let (base, length) = self.ranges[0];
                let limit = length.wrapping_sub(u64::from(bytes));
                if length >= u64::from(bytes) && within(addrs, m, base, limit, bytes) {
                    return Ok(());
                }
            }
            _ => {}
        }
        self.resolve_each(place, space, addrs, m, bytes, write)
    }

    #[cold]
    #[inline(never)]
    fn resolve_each(
        &mut self,
        place: Place,
        space: Space,
        addrs: &mut [u64; 32],
        m: u32,
        bytes: u32,
        write: bool,
    ) -> Checked<()> {
        for lane in Lanes(m) {
            let a = addrs[lane];
            if a & u64::from(bytes - 1) != 0 {
                return fault(FaultKind::Misaligned { address: a, bytes, space }, lane as u32);
            }
            match self.host(place, space, a, bytes, lane as u32, write) {
                Some(host) => addrs[lane] = host,
                None => {
                    let kind = FaultKind::Illegal { address: a, bytes, space, write };
                    return fault(kind, lane as u32);
                }
            }
        }
        Ok(())
    }

    /// The host address of `bytes` bytes at `a`, if all are there.
    pub(crate) fn host(
        &mut self,
        place: Place,
        space: Space,
        a: u64,
        bytes: u32,
        lane: u32,
        write: bool,
    ) -> Option<u64> {
        let within =
            |a: u64, length: u64| a.checked_add(u64::from(bytes)).is_some_and(|end| end <= length);
        match space {
            Space::Shared => within(a, self.shared_bytes).then(|| self.shared as u64 + a),
            Space::Local => {
                let thread = u64::from(place.warp * 32 + lane);
                within(a, self.local_stride)
                    .then(|| self.local as u64 + thread * self.local_stride + a)
            }
            Space::Param => {
                let params = self.params;
                (!write && within(a, params.len() as u64)).then(|| params.as_ptr() as u64 + a)
            }
            Space::Generic if a >= window::SHARED => {
                let (space, base) = match a {
                    a if a < window::LOCAL => (Space::Shared, window::SHARED),
                    a if a < window::PARAM => (Space::Local, window::LOCAL),
                    a if a < window::PARAM + window::SIZE => (Space::Param, window::PARAM),
                    _ => return None,
                };
                self.host(place, space, a - base, bytes, lane, write)
            }
            Space::Generic | Space::Global | Space::Const => self.mapped(a, bytes).then_some(a),
        }
    }

    /// Whether the device has these bytes mapped; remembers the range.
    fn mapped(&mut self, a: u64, bytes: u32) -> bool {
        let holds = |(base, length): (u64, u64)| {
            a.checked_sub(base)
                .and_then(|at| at.checked_add(u64::from(bytes)))
                .is_some_and(|end| end <= length)
        };
        if let Some(i) = self.ranges.iter().position(|&r| holds(r)) {
            self.ranges[..=i].rotate_right(1);
            return true;
        }
        match self.memory.range(a) {
            Some(range) if holds(range) => {
                self.ranges.rotate_right(1);
                self.ranges[0] = range;
                true
            }
            _ => false,
        }
    }
}

/// Every lane of `m` is at most `limit` above `base`, and aligned.
#[inline(always)]
fn within(addrs: &[u64; 32], m: u32, base: u64, limit: u64, bytes: u32) -> bool {
    let low = u64::from(bytes - 1);
    let bad = |a: u64| u64::from(a.wrapping_sub(base) > limit) | (a & low);
    if m == u32::MAX {
        addrs.iter().fold(0, |acc, &a| acc | bad(a)) == 0
    } else {
        Lanes(m).fold(0, |acc, lane| acc | bad(addrs[lane])) == 0
    }
}

/// # Safety
/// `size` bytes at `at` are mapped, aligned and never only plainly accessed.
#[inline(always)]
unsafe fn read(at: u64, size: u8) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        match size {
            1 => u64::from(AtomicU8::from_ptr(at as *mut u8).load(Ordering::Relaxed)),
            2 => u64::from(AtomicU16::from_ptr(at as *mut u16).load(Ordering::Relaxed)),
            4 => u64::from(AtomicU32::from_ptr(at as *mut u32).load(Ordering::Relaxed)),
            _ => AtomicU64::from_ptr(at as *mut u64).load(Ordering::Relaxed),
        }
    }
}

/// # Safety
/// As [`read`].
#[inline(always)]
unsafe fn write(at: u64, size: u8, v: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        match size {
            1 => AtomicU8::from_ptr(at as *mut u8).store(v as u8, Ordering::Relaxed),
            2 => AtomicU16::from_ptr(at as *mut u16).store(v as u16, Ordering::Relaxed),
            4 => AtomicU32::from_ptr(at as *mut u32).store(v as u32, Ordering::Relaxed),
            _ => AtomicU64::from_ptr(at as *mut u64).store(v, Ordering::Relaxed),
        }
    }
}

/// Runs `f` on each lane of `m`; without a test for each if all are there.
#[inline(always)]
fn each(m: u32, mut f: impl FnMut(usize)) {
    if m == u32::MAX {
        for lane in 0..32 {
            f(lane);
        }
    } else {
        for lane in Lanes(m) {
            f(lane);
        }
    }
}

/// # Safety
/// `t` is of the function whose frame `regs` is.
#[inline(always)]
pub(crate) unsafe fn load(
    b: &mut Block<'_>,
    regs: &Regs,
    place: Place,
    t: &Transfer,
    m: u32,
) -> Checked<()> {
    // SAFETY: the caller's promise, here and below; pointers come from `resolve`.
    let mut at = unsafe { addresses(regs, place, &t.at) };
    let bytes = u32::from(t.size) * u32::from(t.count);
    b.resolve(place, t.at.space, &mut at, m, bytes, false)?;
    for (e, &d) in t.rows.iter().enumerate().take(usize::from(t.count)) {
        if d == NONE {
            continue;
        }
        let step = u64::from(t.size) * e as u64;
        // SAFETY: as above.
        unsafe {
            match (t.size, t.widen) {
                (4, Widen::Zero32) => {
                    let d = regs.dst::<u32>(d);
                    each(m, |lane| *d.add(lane) = read(at[lane] + step, 4) as u32);
                }
                (8, _) => {
                    let d = regs.dst::<u64>(d);
                    each(m, |lane| *d.add(lane) = read(at[lane] + step, 8));
                }
                _ => {
                    let unused = 64 - 8 * u32::from(t.size);
                    for lane in Lanes(m) {
                        let v = read(at[lane] + step, t.size);
                        let s = ((v << unused) as i64 >> unused) as u64;
                        match t.widen {
                            Widen::Zero32 => put(regs, d, false, lane, v),
                            Widen::Sign32 => put(regs, d, false, lane, s),
                            Widen::Sign16 => put(regs, d, false, lane, s & 0xffff),
                            Widen::Zero64 => put(regs, d, true, lane, v),
                            Widen::Sign64 => put(regs, d, true, lane, s),
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// # Safety
/// As [`load`].
#[inline(always)]
pub(crate) unsafe fn store(
    b: &mut Block<'_>,
    regs: &Regs,
    place: Place,
    t: &Transfer,
    m: u32,
) -> Checked<()> {
    // SAFETY: the caller's promise, here and below; pointers come from `resolve`.
    let mut at = unsafe { addresses(regs, place, &t.at) };
    let bytes = u32::from(t.size) * u32::from(t.count);
    b.resolve(place, t.at.space, &mut at, m, bytes, true)?;
    for (e, &s) in t.rows.iter().enumerate().take(usize::from(t.count)) {
        let step = u64::from(t.size) * e as u64;
        // SAFETY: as above.
        unsafe {
            match (t.size, t.wide) {
                (4, false) => {
                    let s = regs.src::<u32>(s);
                    each(m, |lane| write(at[lane] + step, 4, u64::from(*s.add(lane))));
                }
                (8, true) => {
                    let s = regs.src::<u64>(s);
                    each(m, |lane| write(at[lane] + step, 8, *s.add(lane)));
                }
                _ => {
                    for lane in Lanes(m) {
                        write(at[lane] + step, t.size, get(regs, s, t.wide, lane));
                    }
                }
            }
        }
    }
    Ok(())
}

/// # Safety
/// As [`load`].
#[inline(never)]
pub(crate) unsafe fn atom(
    b: &mut Block<'_>,
    regs: &Regs,
    place: Place,
    op: &Atom,
    m: u32,
) -> Checked<()> {
    // SAFETY: the caller's promise; `f` gets mapped, aligned words.
    unsafe {
        let mut at = addresses(regs, place, &op.at);
        b.resolve(place, op.at.space, &mut at, m, u32::from(op.size), true)?;
        for lane in Lanes(m) {
            let (x, y) = (get(regs, op.b, op.wide, lane), get(regs, op.c, op.wide, lane));
            let old = (op.f)(at[lane] as *mut u8, x, y);
            if op.d != NONE {
                put(regs, op.d, op.wide, lane, old);
            }
        }
    }
    Ok(())
}

/// `ld.param` at a constant offset: one value for all lanes.
///
/// # Safety
/// As [`load`].
#[inline(always)]
pub(crate) unsafe fn load_param(
    b: &Block<'_>,
    regs: &Regs,
    m: u32,
    (d, offset, size, wide): (R, u32, u8, bool),
) -> Checked<()> {
    let (from, n) = (offset as usize, usize::from(size));
    let Some(bytes) = b.params.get(from..from + n) else {
        let kind = FaultKind::Illegal {
            address: u64::from(offset),
            bytes: u32::from(size),
            space: Space::Param,
            write: false,
        };
        return fault(kind, m.trailing_zeros());
    };
    let mut word = [0; 8];
    word[..n].copy_from_slice(bytes);
    let v = u64::from_le_bytes(word);
    for lane in Lanes(m) {
        // SAFETY: the caller's promise.
        unsafe { put(regs, d, wide, lane, v) };
    }
    Ok(())
}

/// # Safety
/// As [`load`].
#[inline(never)]
pub(crate) unsafe fn cp_async(
    b: &mut Block<'_>,
    regs: &Regs,
    place: Place,
    (dst, src, size, n): (&Address, &Address, u8, R),
    m: u32,
) -> Checked<()> {
    // SAFETY: the caller's promise; pointers come from `resolve`.
    unsafe {
        let mut to = addresses(regs, place, dst);
        let mut from = addresses(regs, place, src);
        b.resolve(place, dst.space, &mut to, m, u32::from(size), true)?;
        // Lanes that read nothing may point anywhere.
        let reads =
            Lanes(m).filter(|&l| get(regs, n, false, l) != 0).fold(0, |acc, l| acc | 1 << l);
        b.resolve(place, src.space, &mut from, reads, u32::from(size), false)?;
        for lane in Lanes(m) {
            let count = get(regs, n, false, lane).min(u64::from(size));
            for i in 0..u64::from(size) {
                let v = if i < count { read(from[lane] + i, 1) } else { 0 };
                write(to[lane] + i, 1, v);
            }
        }
    }
    Ok(())
}

/// `ldmatrix` and `stmatrix`: 8 by 8 matrices of 16-bit elements; lanes 8i to
/// 8i+7 give the rows of matrix i.
///
/// # Safety
/// As [`load`].
#[inline(never)]
pub(crate) unsafe fn matrix(
    b: &mut Block<'_>,
    regs: &Regs,
    place: Place,
    (at, count, trans, stores, rows): (&Address, u8, bool, bool, &[R; 4]),
    m: u32,
) -> Checked<()> {
    // SAFETY: the caller's promise; pointers come from `resolve`.
    unsafe {
        let mut from = addresses(regs, place, at);
        let lanes = u32::MAX >> (32 - 8 * u32::from(count));
        b.resolve(place, at.space, &mut from, lanes, 16, stores)?;
        for (i, &d) in rows.iter().enumerate().take(usize::from(count)) {
            for lane in Lanes(m) {
                let mut v = 0;
                for half in 0..2 {
                    let (mut row, mut col) = (lane / 4, 2 * (lane % 4) + half);
                    if trans {
                        (row, col) = (col, row);
                    }
                    let element = from[8 * i + row] + 2 * col as u64;
                    if stores {
                        write(element, 2, get(regs, d, false, lane) >> (16 * half));
                    } else {
                        v |= read(element, 2) << (16 * half);
                    }
                }
                if !stores {
                    put(regs, d, false, lane, v);
                }
            }
        }
    }
    Ok(())
}

/// Whether a generic address is in `space`.
pub(crate) fn in_space(b: &mut Block<'_>, space: Space, a: u64) -> bool {
    let window = |base: u64| (base..base + window::SIZE).contains(&a);
    match space {
        Space::Shared => window(window::SHARED),
        Space::Local => window(window::LOCAL),
        Space::Param => window(window::PARAM),
        Space::Const => false,
        _ => a < window::SHARED && b.mapped(a, 1),
    }
}
