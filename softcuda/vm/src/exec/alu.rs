//! Per-lane instructions. Nothing here can fail or touch memory.

use super::lanes::{Lanes, Regs, get, map1, map2, map3, put, test2};
use crate::ir::{
    Bin32, Bin64, BoolOp, Carry, CarryOp, Cmp, CmpType, Mixed, Op, PSrc, R, Tern32, Tern64, Un,
};
use crate::lanes::float::{NAN32, ftz32};
use crate::lanes::{half, int};

/// f32 results that are NaN have the GPU's bits.
#[inline(always)]
fn nan(x: f32) -> u32 {
    if x.is_nan() { NAN32 } else { x.to_bits() }
}

#[inline(always)]
fn ftz(x: f32) -> f32 {
    ftz32(x)
}

/// Runs `op` if it is per-lane; the caller handles the rest.
///
/// # Safety
/// `op` is of the function whose frame `regs` is.
#[inline(always)]
pub(crate) unsafe fn step(regs: &Regs, op: &Op, m: u32) -> bool {
    // SAFETY: throughout: rows come from the decoder, as the caller promises.
    unsafe {
        match *op {
            Op::Bin32(k, d, a, b) => bin32(regs, m, k, d, a, b),
            Op::Tern32(k, d, a, b, c) => tern32(regs, m, k, d, a, b, c),
            Op::Bin64(k, d, a, b) => bin64(regs, m, k, d, a, b),
            Op::Tern64(k, d, a, b, c) => tern64(regs, m, k, d, a, b, c),
            Op::Mixed(k, d, a, b, c) => mixed(regs, m, k, d, a, b, c),
            Op::Un(k, d, a) => un(regs, m, k, d, a),
            Op::SetP { t, cmp, p, q, a, b, src } => {
                let bits = setp(regs, m, t, cmp, a, b);
                finish_setp(regs, m, bits, p, q, src);
            }
            Op::Lop3(lut, d, a, b, c) => lop3(regs, m, lut, d, a, b, c),
            Op::Sel32(d, a, b, p) => select(regs, m, d, a, b, p),
            Op::Nop => {}
            _ => return rare(regs, op, m),
        }
    }
    true
}

#[inline(never)]
unsafe fn rare(regs: &Regs, op: &Op, m: u32) -> bool {
    // SAFETY: as `step`.
    unsafe {
        match *op {
            Op::Lane { f, m: own, d, a, b, c, wide } => {
                for lane in Lanes(m) {
                    let a = get(regs, a, wide & 2 != 0, lane);
                    let b = get(regs, b, wide & 4 != 0, lane);
                    let c = get(regs, c, wide & 8 != 0, lane);
                    put(regs, d, wide & 1 != 0, lane, f(own, a, b, c));
                }
            }
            Op::Bfi { bits, d, a, b, c, e } => {
                let w = bits == 64;
                for lane in Lanes(m) {
                    let (a, b) = (get(regs, a, w, lane), get(regs, b, w, lane));
                    let (c, e) = (get(regs, c, false, lane), get(regs, e, false, lane));
                    put(regs, d, w, lane, int::bfi(bits, a, b, c as u32, e as u32));
                }
            }
            Op::Sel64(d, a, b, p) => {
                let p = regs.psrc(p);
                for lane in Lanes(m) {
                    let from = if p >> lane & 1 != 0 { a } else { b };
                    put(regs, d, true, lane, get(regs, from, true, lane));
                }
            }
            Op::LaneP { f, m: own, p, q, a, b, wide, src } => {
                let mut bits = 0;
                for lane in Lanes(m) {
                    let a = get(regs, a, wide & 2 != 0, lane);
                    let b = get(regs, b, wide & 4 != 0, lane);
                    bits |= (f(own, a, b, 0) as u32 & 1) << lane;
                }
                finish_setp(regs, m, bits, p, q, src);
            }
            Op::PredTo { d, wide, src, yes } => {
                let p = regs.psrc(src);
                for lane in Lanes(m) {
                    put(regs, d, wide, lane, if p >> lane & 1 != 0 { yes } else { 0 });
                }
            }
            Op::PLogic(k, d, a, b) => {
                let bits = combine(k, regs.psrc(a), regs.psrc(b));
                regs.set_pred(d, m, bits);
            }
            Op::PMov(d, a) => regs.set_pred(d, m, regs.psrc(a)),
            Op::Carry(ref op) => carry(regs, m, op),
            _ => return false,
        }
    }
    true
}

#[inline(always)]
fn combine(k: BoolOp, a: u32, b: u32) -> u32 {
    match k {
        BoolOp::And => a & b,
        BoolOp::Or => a | b,
        BoolOp::Xor => a ^ b,
    }
}

#[inline(always)]
unsafe fn finish_setp(regs: &Regs, m: u32, bits: u32, p: u32, q: u32, src: Option<(BoolOp, PSrc)>) {
    // SAFETY: as `step`.
    unsafe {
        let (mut yes, mut no) = (bits, !bits);
        if let Some((k, src)) = src {
            let other = regs.psrc(src);
            (yes, no) = (combine(k, yes, other), combine(k, no, other));
        }
        regs.set_pred(p, m, yes);
        regs.set_pred(q, m, no);
    }
}

#[inline(always)]
unsafe fn select(regs: &Regs, m: u32, d: R, a: R, b: R, p: PSrc) {
    // SAFETY: as `step`.
    unsafe {
        let p = regs.psrc(p);
        let mut lanes = [0u32; 32];
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane = 0u32.wrapping_sub(p >> i & 1);
        }
        map3(
            m,
            regs.live,
            regs.dst::<u32>(d),
            lanes.as_ptr(),
            regs.src::<u32>(a),
            regs.src::<u32>(b),
            |p, a, b| (a & p) | (b & !p),
        );
    }
}

#[inline(always)]
unsafe fn bin32(regs: &Regs, m: u32, k: Bin32, d: R, a: R, b: R) {
    macro_rules! go {
        ($t:ty, $f:expr) => {
            // SAFETY: as `step`.
            unsafe { map2(m, regs.live, regs.dst(d), regs.src::<$t>(a), regs.src::<$t>(b), $f) }
        };
    }
    match k {
        Bin32::Add => go!(u32, |a, b| a.wrapping_add(b)),
        Bin32::Sub => go!(u32, |a, b| a.wrapping_sub(b)),
        Bin32::Mul => go!(u32, |a, b| a.wrapping_mul(b)),
        Bin32::And => go!(u32, |a, b| a & b),
        Bin32::Or => go!(u32, |a, b| a | b),
        Bin32::Xor => go!(u32, |a, b| a ^ b),
        Bin32::Shl => go!(u32, |a, b| if b > 31 { 0 } else { a << (b & 31) }),
        Bin32::ShrU => go!(u32, |a, b| if b > 31 { 0 } else { a >> (b & 31) }),
        Bin32::ShrS => go!(u32, |a, b| ((a as i32) >> b.min(31)) as u32),
        Bin32::MinU => go!(u32, |a, b| a.min(b)),
        Bin32::MaxU => go!(u32, |a, b| a.max(b)),
        Bin32::MinS => go!(i32, |a, b| a.min(b)),
        Bin32::MaxS => go!(i32, |a, b| a.max(b)),
        Bin32::FAdd => go!(f32, |a, b| nan(a + b)),
        Bin32::FSub => go!(f32, |a, b| nan(a - b)),
        Bin32::FMul => go!(f32, |a, b| nan(a * b)),
        Bin32::FAddZ => go!(f32, |a, b| nan(ftz(ftz(a) + ftz(b)))),
        Bin32::FSubZ => go!(f32, |a, b| nan(ftz(ftz(a) - ftz(b)))),
        Bin32::FMulZ => go!(f32, |a, b| nan(ftz(ftz(a) * ftz(b)))),
        Bin32::FDiv => go!(f32, |a, b| nan(a / b)),
        Bin32::FMin => go!(f32, fmin),
        Bin32::FMax => go!(f32, fmax),
    }
}

/// The number if one is NaN; -0 below +0.
#[inline(always)]
fn fmin(a: f32, b: f32) -> u32 {
    let less = a < b || (a == b && a.is_sign_negative());
    let r = if less || b.is_nan() { a } else { b };
    nan(r)
}

#[inline(always)]
fn fmax(a: f32, b: f32) -> u32 {
    let more = a > b || (a == b && a.is_sign_positive());
    let r = if more || b.is_nan() { a } else { b };
    nan(r)
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn tern32(regs: &Regs, m: u32, k: Tern32, d: R, a: R, b: R, c: R) {
    macro_rules! go {
        ($t:ty, $f:expr) => {
            // SAFETY: as `step`.
            unsafe {
                map3(
                    m,
                    regs.live,
                    regs.dst::<u32>(d),
                    regs.src::<$t>(a),
                    regs.src::<$t>(b),
                    regs.src::<$t>(c),
                    $f,
                )
            }
        };
    }
    match k {
        Tern32::Mad => go!(u32, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        Tern32::Fma => go!(f32, |a, b, c| nan(a.mul_add(b, c))),
        Tern32::FmaZ => go!(f32, |a, b, c| nan(ftz(ftz(a).mul_add(ftz(b), ftz(c))))),
    }
}

#[inline(always)]
unsafe fn bin64(regs: &Regs, m: u32, k: Bin64, d: R, a: R, b: R) {
    macro_rules! go {
        ($t:ty, $f:expr) => {
            // SAFETY: as `step`.
            unsafe { map2(m, regs.live, regs.dst(d), regs.src::<$t>(a), regs.src::<$t>(b), $f) }
        };
    }
    match k {
        Bin64::Add => go!(u64, |a, b| a.wrapping_add(b)),
        Bin64::Sub => go!(u64, |a, b| a.wrapping_sub(b)),
        Bin64::Mul => go!(u64, |a, b| a.wrapping_mul(b)),
        Bin64::And => go!(u64, |a, b| a & b),
        Bin64::Or => go!(u64, |a, b| a | b),
        Bin64::Xor => go!(u64, |a, b| a ^ b),
        Bin64::MinS => go!(i64, |a, b| a.min(b)),
        Bin64::MaxS => go!(i64, |a, b| a.max(b)),
        Bin64::MinU => go!(u64, |a, b| a.min(b)),
        Bin64::MaxU => go!(u64, |a, b| a.max(b)),
        Bin64::DAdd => go!(f64, |a, b| a + b),
        Bin64::DSub => go!(f64, |a, b| a - b),
        Bin64::DMul => go!(f64, |a, b| a * b),
        Bin64::DDiv => go!(f64, |a, b| a / b),
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn tern64(regs: &Regs, m: u32, k: Tern64, d: R, a: R, b: R, c: R) {
    // SAFETY: as `step`.
    unsafe {
        match k {
            Tern64::Mad => map3(
                m,
                regs.live,
                regs.dst::<u64>(d),
                regs.src::<u64>(a),
                regs.src::<u64>(b),
                regs.src::<u64>(c),
                |a, b, c| a.wrapping_mul(b).wrapping_add(c),
            ),
            Tern64::Fma => map3(
                m,
                regs.live,
                regs.dst::<f64>(d),
                regs.src::<f64>(a),
                regs.src::<f64>(b),
                regs.src::<f64>(c),
                |a, b, c| a.mul_add(b, c),
            ),
        }
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn mixed(regs: &Regs, m: u32, k: Mixed, d: R, a: R, b: R, c: R) {
    macro_rules! go {
        ($a:ty, $b:ty, $f:expr) => {
            // SAFETY: as `step`.
            unsafe {
                map3(
                    m,
                    regs.live,
                    regs.dst::<u64>(d),
                    regs.src::<$a>(a),
                    regs.src::<$b>(b),
                    regs.src::<u64>(c),
                    $f,
                )
            }
        };
    }
    match k {
        Mixed::Shl64 => go!(u64, u32, |a, b, _| if b > 63 { 0 } else { a << (b & 63) }),
        Mixed::ShrU64 => go!(u64, u32, |a, b, _| if b > 63 { 0 } else { a >> (b & 63) }),
        Mixed::ShrS64 => go!(u64, u32, |a, b, _| ((a as i64) >> b.min(63)) as u64),
        Mixed::MulWideU => go!(u32, u32, |a, b, _| u64::from(a) * u64::from(b)),
        Mixed::MulWideS => go!(i32, i32, |a, b, _| (i64::from(a) * i64::from(b)) as u64),
        Mixed::MadWideU => go!(u32, u32, |a, b, c| (u64::from(a) * u64::from(b)).wrapping_add(c)),
        Mixed::MadWideS => {
            go!(i32, i32, |a, b, c| ((i64::from(a) * i64::from(b)) as u64).wrapping_add(c))
        }
    }
}

#[inline(always)]
unsafe fn un(regs: &Regs, m: u32, k: Un, d: R, a: R) {
    macro_rules! go {
        ($a:ty => $d:ty, $f:expr) => {
            // SAFETY: as `step`.
            unsafe { map1(m, regs.live, regs.dst::<$d>(d), regs.src::<$a>(a), $f) }
        };
    }
    match k {
        Un::Mov32 => go!(u32 => u32, |a| a),
        Un::Mov64 => go!(u64 => u64, |a| a),
        Un::Not32 => go!(u32 => u32, |a| !a),
        Un::Neg32 => go!(u32 => u32, |a| a.wrapping_neg()),
        Un::FNeg => go!(f32 => u32, |a| nan(-a)),
        Un::FAbs => go!(f32 => u32, |a| nan(a.abs())),
        Un::U32To64 => go!(u32 => u64, u64::from),
        Un::S32To64 => go!(i32 => i64, i64::from),
        Un::Low32 => go!(u64 => u32, |a| a as u32),
        Un::S32ToF32 => go!(i32 => f32, |a| a as f32),
        Un::U32ToF32 => go!(u32 => f32, |a| a as f32),
        Un::F32ToS32 => go!(f32 => i32, |a| a as i32),
        Un::F32ToU32 => go!(f32 => u32, |a| a as u32),
        Un::F32ToF64 => go!(f32 => f64, f64::from),
        Un::F64ToF32 => go!(f64 => f32, |a| a as f32),
        Un::F16ToF32 => go!(u32 => u32, |a| nan(half::f16_to_f32(a))),
        Un::F32ToF16 => go!(f32 => u32, half::f32_to_f16),
        Un::Bf16ToF32 => go!(u32 => u32, |a| a << 16),
    }
}

// NaN makes `!(a < b)` and `a >= b` different questions.
#[allow(clippy::neg_cmp_op_on_partial_ord, clippy::nonminimal_bool, clippy::double_comparisons)]
#[inline(always)]
unsafe fn setp(regs: &Regs, m: u32, t: CmpType, cmp: Cmp, a: R, b: R) -> u32 {
    macro_rules! go {
        ($t:ty, $f:expr) => {
            // SAFETY: as `step`.
            unsafe { test2(m, regs.live, regs.src::<$t>(a), regs.src::<$t>(b), $f) }
        };
    }
    macro_rules! ints {
        ($t:ty) => {
            match cmp {
                Cmp::Eq | Cmp::Equ => go!($t, |a, b| a == b),
                Cmp::Ne | Cmp::Neu => go!($t, |a, b| a != b),
                Cmp::Lt | Cmp::Ltu => go!($t, |a, b| a < b),
                Cmp::Le | Cmp::Leu => go!($t, |a, b| a <= b),
                Cmp::Gt | Cmp::Gtu => go!($t, |a, b| a > b),
                Cmp::Ge | Cmp::Geu => go!($t, |a, b| a >= b),
                Cmp::Num => m,
                Cmp::Nan => 0,
            }
        };
    }
    macro_rules! floats {
        ($t:ty) => {
            match cmp {
                Cmp::Eq => go!($t, |a, b| a == b),
                // `ne` is ordered: false where either is NaN.
                Cmp::Ne => go!($t, |a, b| a < b || a > b),
                Cmp::Lt => go!($t, |a, b| a < b),
                Cmp::Le => go!($t, |a, b| a <= b),
                Cmp::Gt => go!($t, |a, b| a > b),
                Cmp::Ge => go!($t, |a, b| a >= b),
                Cmp::Equ => go!($t, |a, b| !(a < b || a > b)),
                Cmp::Neu => go!($t, |a, b| a != b),
                Cmp::Ltu => go!($t, |a, b| !(a >= b)),
                Cmp::Leu => go!($t, |a, b| !(a > b)),
                Cmp::Gtu => go!($t, |a, b| !(a <= b)),
                Cmp::Geu => go!($t, |a, b| !(a < b)),
                Cmp::Num => go!($t, |a, b| !(a.is_nan() || b.is_nan())),
                Cmp::Nan => go!($t, |a, b| a.is_nan() || b.is_nan()),
            }
        };
    }
    match t {
        CmpType::S32 => ints!(i32),
        CmpType::U32 => ints!(u32),
        CmpType::S64 => ints!(i64),
        CmpType::U64 => ints!(u64),
        CmpType::F32 => floats!(f32),
        CmpType::F64 => floats!(f64),
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn lop3(regs: &Regs, m: u32, lut: u8, d: R, a: R, b: R, c: R) {
    macro_rules! go {
        ($f:expr) => {
            // SAFETY: as `step`.
            unsafe {
                map3(
                    m,
                    regs.live,
                    regs.dst::<u32>(d),
                    regs.src::<u32>(a),
                    regs.src::<u32>(b),
                    regs.src::<u32>(c),
                    $f,
                )
            }
        };
    }
    match lut {
        0x80 => go!(|a, b, c| a & b & c),
        0xfe => go!(|a, b, c| a | b | c),
        0x96 => go!(|a, b, c| a ^ b ^ c),
        0xc0 => go!(|a, b, _| a & b),
        0xfc => go!(|a, b, _| a | b),
        0x3c => go!(|a, b, _| a ^ b),
        0xf8 => go!(|a, b, c| a | (b & c)),
        0xea => go!(|a, b, c| (a & b) | c),
        _ => go!(|a, b, c| int::lop3(lut, a, b, c)),
    }
}

/// Predicate 0 of a frame is the carry flag.
unsafe fn carry(regs: &Regs, m: u32, op: &CarryOp) {
    let w = op.bits == 64;
    let top = op.bits;
    // SAFETY: as `step`.
    unsafe {
        let flag = regs.pred(0);
        let mut out = 0u32;
        for lane in Lanes(m) {
            let (a, b) = (get(regs, op.a, w, lane), get(regs, op.b, w, lane));
            let c = get(regs, op.c, w, lane);
            let cin = if op.take { u128::from(flag >> lane & 1) } else { 0 };
            let sum = match op.k {
                Carry::Add => u128::from(a) + u128::from(b) + cin,
                // The flag is the borrow.
                Carry::Sub => u128::from(a).wrapping_sub(u128::from(b)).wrapping_sub(cin),
                Carry::MadLo => u128::from(int::low(a.wrapping_mul(b), top)) + u128::from(c) + cin,
                Carry::MadHi => {
                    let high = if op.sign {
                        (i128::from(int::signed(a, top)) * i128::from(int::signed(b, top))) >> top
                    } else {
                        ((u128::from(a) * u128::from(b)) >> top) as i128
                    };
                    u128::from(int::low(high as u64, top)) + u128::from(c) + cin
                }
            };
            out |= ((sum >> top) as u32 & 1) << lane;
            put(regs, op.d, w, lane, int::low(sum as u64, top));
        }
        if op.give {
            regs.set_pred(0, m, out);
        }
    }
}
