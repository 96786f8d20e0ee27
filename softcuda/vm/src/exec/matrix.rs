//! `mma.sync`: the whole warp's fragments to matrices, the product, and back.
//! Sums are in f32 from k = 0 up; the hardware's order is not documented.

use super::lanes::{Regs, get, put};
use crate::ir::{Mma, MmaType, R};
use crate::lanes::{half, int};

const M: usize = 16;
const K_MAX: usize = 32;
const N: usize = 8;

fn element(t: MmaType, word: u64, at: usize) -> f64 {
    match t {
        MmaType::F16 => f64::from(half::f16_to_f32((word >> (16 * at)) as u32 & 0xffff)),
        MmaType::Bf16 => f64::from(half::bf16_to_f32((word >> (16 * at)) as u32 & 0xffff)),
        // The hardware reads the upper 19 bits.
        MmaType::Tf32 => f64::from(f32::from_bits(word as u32 & !0x1fff)),
        MmaType::S8 => int::signed(word >> (8 * at), 8) as f64,
        MmaType::U8 => (word >> (8 * at) & 0xff) as f64,
        MmaType::F64 => f64::from_bits(word),
    }
}

/// Where register `r`'s element `e` of a lane is in A (16 by k).
fn place_a(per: usize, lane: usize, r: usize, e: usize) -> (usize, usize) {
    let (group, t) = (lane / 4, lane % 4);
    let tall = r % 2;
    let far = r / 2;
    // Registers alternate between rows 0-7 and 8-15, then move right.
    (group + 8 * tall, t * per + e + far * 4 * per)
}

/// As [`place_a`], in B (k by 8).
fn place_b(per: usize, lane: usize, r: usize, e: usize) -> (usize, usize) {
    (lane % 4 * per + e + r * 4 * per, lane / 4)
}

/// # Safety
/// `op` is of the function whose frame `regs` is.
#[inline(never)]
pub(crate) unsafe fn mma(regs: &Regs, op: &Mma) {
    let per = |t: MmaType| match t {
        MmaType::Tf32 | MmaType::F64 => 1,
        MmaType::F16 | MmaType::Bf16 => 2,
        MmaType::S8 | MmaType::U8 => 4,
    };
    let (k, per_a, per_b) = (op.k as usize, per(op.a_type), per(op.b_type));
    let word = |r: R, lane: usize| {
        // SAFETY: the caller's promise.
        unsafe { get(regs, r, false, lane) }
    };
    let mut a = [[0f64; K_MAX]; M];
    let mut b = [[0f64; N]; K_MAX];
    for lane in 0..32 {
        for (r, &row) in op.a.iter().enumerate() {
            for e in 0..per_a {
                let (i, j) = place_a(per_a, lane, r, e);
                a[i][j] = element(op.a_type, word(row, lane), e);
            }
        }
        for (r, &row) in op.b.iter().enumerate() {
            for e in 0..per_b {
                let (i, j) = place_b(per_b, lane, r, e);
                b[i][j] = element(op.b_type, word(row, lane), e);
            }
        }
    }
    let integers = matches!(op.a_type, MmaType::S8 | MmaType::U8);
    for lane in 0..32 {
        let (group, t) = (lane / 4, lane % 4);
        let mut out = [0u64; 4];
        for (at, out) in out.iter_mut().enumerate() {
            let (i, j) = (group + 8 * (at / 2), 2 * t + at % 2);
            let c = if op.half {
                word(op.c[at / 2], lane) >> (16 * (at % 2)) & 0xffff
            } else {
                word(op.c[at], lane)
            };
            let products = (0..k).map(|x| a[i][x] * b[x][j]);
            *out = if integers {
                let sum = products.sum::<f64>() as i64 + int::signed(c, 32);
                let sum = if op.m != 0 {
                    sum.clamp(i64::from(i32::MIN), i64::from(i32::MAX))
                } else {
                    sum
                };
                int::low(sum as u64, 32)
            } else if op.half {
                let c = half::f16_to_f32(c as u32);
                let sum = products.fold(c, |s, p| (f64::from(s) + p) as f32);
                u64::from(half::f32_to_f16(sum))
            } else {
                let sum = products.fold(f32::from_bits(c as u32), |s, p| (f64::from(s) + p) as f32);
                u64::from(sum.to_bits())
            };
        }
        for (at, &d) in op.d.iter().enumerate() {
            let v = if op.half { out[2 * at] | out[2 * at + 1] << 16 } else { out[at] };
            // SAFETY: the caller's promise. D may share rows with C: each lane
            // reads its own before it writes.
            unsafe { put(regs, d, false, lane, v) };
        }
    }
}
