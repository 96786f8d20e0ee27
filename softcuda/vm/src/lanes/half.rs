//! f16, bf16 and the 8-bit floats: conversions, and arithmetic through f64
//! with one rounding.

use super::float::{add_odd, fma_odd, pick};
use super::{FTZ, LaneFn, OWN, RELU, RM, RNA, ROUND, RP, RZ, SAT};

/// A binary format with fewer bits than f32.
#[derive(Clone, Copy)]
pub(crate) struct Small {
    pub exp_bits: u32,
    pub mant_bits: u32,
    /// Without infinities (e4m3): the top exponent holds numbers too.
    pub finite: bool,
}

pub(crate) const F16: Small = Small { exp_bits: 5, mant_bits: 10, finite: false };
pub(crate) const BF16: Small = Small { exp_bits: 8, mant_bits: 7, finite: false };
pub(crate) const TF32: Small = Small { exp_bits: 8, mant_bits: 10, finite: false };
pub(crate) const E5M2: Small = Small { exp_bits: 5, mant_bits: 2, finite: false };
pub(crate) const E4M3: Small = Small { exp_bits: 4, mant_bits: 3, finite: true };

impl Small {
    fn nan(self) -> u32 {
        // All ones but the sign: the canonical NaN of every small format.
        (1 << (self.exp_bits + self.mant_bits)) - 1
    }

    fn infinity(self) -> u32 {
        ((1 << self.exp_bits) - 1) << self.mant_bits
    }

    fn largest(self) -> u32 {
        if self.finite { self.nan() - 1 } else { self.infinity() - 1 }
    }

    /// `x` in this format: rounded by the mode in `m`, and clamped to the
    /// largest number under `SATFINITE`.
    pub(crate) fn encode(self, m: u32, x: f64) -> u32 {
        let sign = u32::from(x.is_sign_negative()) << (self.exp_bits + self.mant_bits);
        if x.is_nan() {
            return self.nan();
        }
        let clamp = m & SATFINITE != 0;
        if x.is_infinite() {
            return sign
                | if clamp {
                    self.largest()
                } else if self.finite {
                    self.nan()
                } else {
                    self.infinity()
                };
        }
        let a = x.abs();
        let bits = a.to_bits();
        let bias = (1i32 << (self.exp_bits - 1)) - 1;
        // An f64 subnormal is far below every small format's range.
        let exp = if bits >> 52 == 0 { -1022 } else { (bits >> 52) as i32 - 1023 };
        let mant = bits & ((1 << 52) - 1) | u64::from(bits >> 52 != 0) << 52;
        let exp_field = exp + bias;
        // Bits of the significand to drop.
        let drop = 52 - self.mant_bits as i32 + if exp_field < 1 { 1 - exp_field } else { 0 };
        let drop = drop.min(54) as u32;
        let (kept, rest, half) = (mant >> drop, mant & ((1 << drop) - 1), 1u64 << (drop - 1));
        let negative = x < 0.0;
        let up = match m & ROUND {
            RZ => false,
            RM => negative && rest != 0,
            RP => !negative && rest != 0,
            RNA => rest >= half,
            _ => rest > half || (rest == half && kept & 1 != 0),
        };
        let kept = kept + u64::from(up);
        // The implicit bit carries into the exponent by itself.
        let magnitude =
            if exp_field < 1 { kept } else { (((exp_field - 1) as u64) << self.mant_bits) + kept };
        if magnitude > u64::from(self.largest()) {
            let stay = match m & ROUND {
                RZ => true,
                RM => !negative,
                RP => negative,
                _ => false,
            };
            let over = if self.finite { self.nan() } else { self.infinity() };
            return sign | if stay || clamp { self.largest() } else { over };
        }
        sign | magnitude as u32
    }

    pub(crate) fn decode(self, v: u32) -> f64 {
        let sign = v >> (self.exp_bits + self.mant_bits) & 1 != 0;
        let exp = v >> self.mant_bits & ((1 << self.exp_bits) - 1);
        let mant = v & ((1 << self.mant_bits) - 1);
        let bias = (1i32 << (self.exp_bits - 1)) - 1;
        let top = exp == (1 << self.exp_bits) - 1;
        let magnitude = if top && self.finite && mant == (1 << self.mant_bits) - 1 {
            f64::NAN
        } else if top && !self.finite {
            if mant == 0 { f64::INFINITY } else { f64::NAN }
        } else if exp == 0 {
            f64::from(mant) * power(1 - bias - self.mant_bits as i32)
        } else {
            f64::from(mant | 1 << self.mant_bits) * power(exp as i32 - bias - self.mant_bits as i32)
        };
        if sign { -magnitude } else { magnitude }
    }
}

/// 2 to a power within f64's normal range.
fn power(n: i32) -> f64 {
    f64::from_bits(((n + 1023) as u64) << 52)
}

pub(crate) const SATFINITE: u32 = 1 << 30;
/// The lane holds two values, in its low and its high 16 bits.
pub(crate) const PACKED: u32 = 1 << OWN;
/// The values are bf16 rather than f16.
pub(crate) const BRAIN: u32 = 1 << (OWN + 1);

pub(crate) fn f16_to_f32(h: u32) -> f32 {
    let sign = (h & 0x8000) << 16;
    let magnitude = h & 0x7fff;
    let value = if magnitude >= 0x7c00 {
        0x7f80_0000 | (magnitude & 0x3ff) << 13
    } else if magnitude >= 0x400 {
        (magnitude << 13) + (112 << 23)
    } else {
        // Subnormal: the significand times 2^-24, exactly.
        (magnitude as f32 * f32::from_bits(0x3380_0000)).to_bits()
    };
    f32::from_bits(sign | value)
}

/// Rounds to the nearest f16, ties to even.
pub(crate) fn f32_to_f16(x: f32) -> u32 {
    F16.encode(0, f64::from(x))
}

pub(crate) fn bf16_to_f32(h: u32) -> f32 {
    f32::from_bits(h << 16)
}

fn get(m: u32, v: u32) -> f64 {
    let x = if m & BRAIN != 0 { f64::from(bf16_to_f32(v)) } else { f64::from(f16_to_f32(v)) };
    let tiny = if m & BRAIN != 0 { f64::from(f32::MIN_POSITIVE) } else { power(-14) };
    if m & FTZ != 0 && x.abs() < tiny { 0f64.copysign(x) } else { x }
}

fn put(m: u32, mut x: f64) -> u32 {
    if m & SAT != 0 {
        x = if x > 0.0 { x.min(1.0) } else { 0.0 };
    }
    if m & RELU != 0 && x < 0.0 {
        x = 0.0;
    }
    let out = if m & BRAIN != 0 { BF16 } else { F16 }.encode(m, x);
    let exponent = if m & BRAIN != 0 { 0x7f80 } else { 0x7c00 };
    if m & FTZ != 0 && out & exponent == 0 { out & 0x8000 } else { out }
}

/// `out`, but the canonical NaN if `v` is one.
fn number(m: u32, v: u32, out: u32) -> u32 {
    let infinity = if m & BRAIN != 0 { 0x7f80 } else { 0x7c00 };
    if v & 0x7fff > infinity { 0x7fff } else { out }
}

fn each(m: u32, a: u64, b: u64, c: u64, f: impl Fn(u32, u32, u32) -> u32) -> u64 {
    let one = |shift: u32| {
        let cut = |v: u64| (v >> shift) as u32 & 0xffff;
        u64::from(f(cut(a), cut(b), cut(c))) << shift
    };
    if m & PACKED != 0 { one(0) | one(16) } else { one(0) }
}

fn math(m: u32, a: u64, b: u64, c: u64, f: impl Fn(f64, f64, f64) -> f64) -> u64 {
    each(m, a, b, c, |a, b, c| put(m, f(get(m, a), get(m, b), get(m, c))))
}

/// Operations on f16, bf16 and their pairs, by opcode.
pub(crate) fn by_name(name: &str) -> Option<LaneFn> {
    Some(match name {
        "add" => |m, a, b, _| math(m, a, b, 0, |a, b, _| add_odd(a, b)),
        "sub" => |m, a, b, _| math(m, a, b, 0, |a, b, _| add_odd(a, -b)),
        "mul" => |m, a, b, _| math(m, a, b, 0, |a, b, _| a * b),
        "fma" | "mad" => |m, a, b, c| math(m, a, b, c, fma_odd),
        "abs" => |m, a, _, _| each(m, a, 0, 0, |a, _, _| number(m, a, a & 0x7fff)),
        "neg" => |m, a, _, _| each(m, a, 0, 0, |a, _, _| number(m, a, a ^ 0x8000)),
        "min" => |m, a, b, _| math(m, a, b, 0, |a, b, _| pick(m, a, b, false)),
        "max" => |m, a, b, _| math(m, a, b, 0, |a, b, _| pick(m, a, b, true)),
        "ex2" => |m, a, _, _| math(m, a, 0, 0, |a, _, _| a.exp2()),
        "tanh" => |m, a, _, _| math(m, a, 0, 0, |a, _, _| a.tanh()),
        _ => return None,
    })
}
