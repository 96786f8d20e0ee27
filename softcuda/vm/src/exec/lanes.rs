//! Rows of lanes: the loops that the compiler turns into vector code.

use crate::ir::{CONST, PSrc, R};

/// The registers of the current frame.
#[derive(Clone, Copy)]
pub(crate) struct Regs {
    pub rows: *mut u32,
    pub preds: *mut u32,
    pub consts: *const u32,
    /// Threads of the warp that have not left. An instruction for all of them
    /// may write whole rows: nobody reads the other lanes.
    pub live: u32,
}

impl Regs {
    /// The row `r`, to read.
    ///
    /// # Safety
    /// `r` comes from this kernel's decoder, for the current function.
    #[inline(always)]
    pub(crate) unsafe fn src<T>(&self, r: R) -> *const T {
        let base = if r & CONST != 0 { self.consts } else { self.rows.cast_const() };
        // SAFETY: the caller's promise: the row is within the frame or the constants.
        unsafe { base.add((r & !CONST) as usize * 32).cast() }
    }

    /// The row `r`, to write.
    ///
    /// # Safety
    /// As [`Regs::src`]; destinations are never constants.
    #[inline(always)]
    pub(crate) unsafe fn dst<T>(&self, r: R) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.rows.add(r as usize * 32).cast() }
    }

    /// # Safety
    /// `p` comes from the decoder, for the current function.
    #[inline(always)]
    pub(crate) unsafe fn pred(&self, p: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { *self.preds.add(p as usize) }
    }

    /// # Safety
    /// As [`Regs::pred`].
    #[inline(always)]
    pub(crate) unsafe fn psrc(&self, p: PSrc) -> u32 {
        match p {
            // SAFETY: the caller's promise.
            PSrc::Reg(p, negated) => unsafe {
                self.pred(p) ^ 0u32.wrapping_sub(u32::from(negated))
            },
            PSrc::Fixed(v) => 0u32.wrapping_sub(u32::from(v)),
        }
    }

    /// Sets the lanes `m` of `p`; a sink is no register.
    ///
    /// # Safety
    /// As [`Regs::pred`].
    #[inline(always)]
    pub(crate) unsafe fn set_pred(&self, p: u32, m: u32, bits: u32) {
        if p != crate::ir::NONE {
            // SAFETY: the caller's promise.
            unsafe {
                let slot = self.preds.add(p as usize);
                *slot = (*slot & !m) | (bits & m);
            }
        }
    }
}

/// The set lanes of a mask, in order.
#[derive(Clone, Copy)]
pub(crate) struct Lanes(pub u32);

impl Iterator for Lanes {
    type Item = usize;
    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let lane = self.0.trailing_zeros() as usize;
        self.0 &= self.0 - 1;
        Some(lane)
    }
}

/// Lanes handled at a time: what fits a few vector registers.
const CHUNK: usize = 8;

#[inline(always)]
unsafe fn chunk<T: Copy>(p: *const T, c: usize) -> [T; CHUNK] {
    // SAFETY: the caller's row has 32 lanes; rows are aligned for any lane.
    unsafe { p.add(c * CHUNK).cast::<[T; CHUNK]>().read() }
}

macro_rules! map {
    ($name:ident, $($arg:ident : $ty:ident),+) => {
        /// `d = f(..)` in the lanes `m`.
        ///
        /// # Safety
        /// Rows of 32 lanes of these types, identical or disjoint.
        #[inline(always)]
        pub(crate) unsafe fn $name<$($ty: Copy,)+ D: Copy + Default>(
            m: u32,
            live: u32,
            d: *mut D,
            $($arg: *const $ty,)+
            f: impl Fn($($ty),+) -> D,
        ) {
            if m == live {
                for c in 0..32 / CHUNK {
                    // SAFETY: the caller's promise; a chunk is read before it is written.
                    unsafe {
                        $(let $arg = chunk($arg, c);)+
                        let mut out = [D::default(); CHUNK];
                        for i in 0..CHUNK {
                            out[i] = f($($arg[i]),+);
                        }
                        d.add(c * CHUNK).cast::<[D; CHUNK]>().write(out);
                    }
                }
            } else {
                for lane in Lanes(m) {
                    // SAFETY: the caller's promise; `lane` is below 32.
                    unsafe { *d.add(lane) = f($(*$arg.add(lane)),+) };
                }
            }
        }
    };
}

map!(map1, a: A);
map!(map2, a: A, b: B);
map!(map3, a: A, b: B, c: C);

/// The lanes in which `f` holds.
///
/// # Safety
/// Rows of 32 lanes of these types.
#[inline(always)]
pub(crate) unsafe fn test2<A: Copy, B: Copy>(
    m: u32,
    live: u32,
    a: *const A,
    b: *const B,
    f: impl Fn(A, B) -> bool,
) -> u32 {
    let mut out = 0;
    if m == live {
        for c in 0..32 / CHUNK {
            // SAFETY: the caller's promise.
            let (a, b) = unsafe { (chunk(a, c), chunk(b, c)) };
            let mut bits = 0;
            for i in 0..CHUNK {
                bits |= u32::from(f(a[i], b[i])) << i;
            }
            out |= bits << (c * CHUNK);
        }
    } else {
        for lane in Lanes(m) {
            // SAFETY: the caller's promise; `lane` is below 32.
            out |= u32::from(unsafe { f(*a.add(lane), *b.add(lane)) }) << lane;
        }
    }
    out
}

/// A row's lane as 64 bits, zero-extended.
///
/// # Safety
/// As [`Regs::src`]; `lane` is below 32.
#[inline(always)]
pub(crate) unsafe fn get(regs: &Regs, r: R, wide: bool, lane: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        if wide { *regs.src::<u64>(r).add(lane) } else { u64::from(*regs.src::<u32>(r).add(lane)) }
    }
}

/// Writes a lane of a row.
///
/// # Safety
/// As [`Regs::dst`]; `lane` is below 32.
#[inline(always)]
pub(crate) unsafe fn put(regs: &Regs, r: R, wide: bool, lane: usize, v: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        if wide {
            *regs.dst::<u64>(r).add(lane) = v;
        } else {
            *regs.dst::<u32>(r).add(lane) = v as u32;
        }
    }
}
