//! `cvt`: every pair of scalar types, driven by the modifiers. The hot pairs
//! have fast twins in `exec`.

use super::half::{BF16, E4M3, E5M2, F16, SATFINITE, Small, TF32};
use super::int::{low, signed};
use super::{FTZ, LaneFn, RELU, RM, RN, RNA, ROUND, RP, SAT, float};

/// A scalar type of `cvt`, as five bits: the low two are log2 of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Num {
    U(u32),
    S(u32),
    F16,
    BF16,
    F32,
    F64,
}

impl Num {
    fn code(self) -> u32 {
        match self {
            Num::U(bits) => bits.trailing_zeros() - 3,
            Num::S(bits) => 4 + bits.trailing_zeros() - 3,
            Num::F16 => 8,
            Num::BF16 => 9,
            Num::F32 => 10,
            Num::F64 => 11,
        }
    }

    fn from_code(code: u32) -> Num {
        match code & 15 {
            c @ 0..=3 => Num::U(8 << c),
            c @ 4..=7 => Num::S(8 << (c - 4)),
            8 => Num::F16,
            9 => Num::BF16,
            10 => Num::F32,
            _ => Num::F64,
        }
    }

    pub(crate) fn is_float(self) -> bool {
        !matches!(self, Num::U(_) | Num::S(_))
    }
}

/// A float converts to an integral value of its own type: `cvt.rni.f32.f32`.
const INTEGRAL: u32 = 1 << 29;
const DST: u32 = 12;
const SRC: u32 = 16;
/// log2 of the destination register's bits, less 3.
const REG: u32 = 20;

/// Packs the modifiers of [`convert`].
pub(crate) fn pack(dst: Num, src: Num, reg_bits: u32, integral: bool, rest: u32) -> u32 {
    rest | dst.code() << DST
        | src.code() << SRC
        | (reg_bits.trailing_zeros() - 3) << REG
        | if integral { INTEGRAL } else { 0 }
}

fn round_integral(mode: u32, x: f64) -> f64 {
    match mode & ROUND {
        RN => x.round_ties_even(),
        RM => x.floor(),
        RP => x.ceil(),
        RNA => x.round(),
        _ => x.trunc(),
    }
}

/// An integer to f64's or f32's precision in any mode.
fn int_to_float(m: u32, v: i128, dst: Num) -> u64 {
    let mode = m & ROUND;
    // The nearest f64, then rounded to odd, serves every narrower type.
    let near = v as f64;
    let err = v - near as i128;
    let odd = float::to_odd(near, err as f64);
    match dst {
        Num::F64 => {
            let r = match (mode, err.signum()) {
                (RP, 1) => near.next_up(),
                (RM, -1) => near.next_down(),
                (super::RZ, 1) if v < 0 => near.next_up(),
                (super::RZ, -1) if v > 0 => near.next_down(),
                _ => near,
            };
            r.to_bits()
        }
        Num::F32 => u64::from(float::narrow(mode, odd).to_bits()),
        Num::F16 => u64::from(F16.encode(m, odd)),
        _ => u64::from(BF16.encode(m, odd)),
    }
}

fn read_float(src: Num, m: u32, a: u64) -> f64 {
    match src {
        Num::F16 => f64::from(super::half::f16_to_f32(a as u32 & 0xffff)),
        Num::BF16 => f64::from(super::half::bf16_to_f32(a as u32 & 0xffff)),
        Num::F32 => {
            let x = f32::from_bits(a as u32);
            if m & FTZ != 0 {
                // Flushing is an addition, which makes NaNs canonical.
                let x = if x.is_nan() { f32::from_bits(float::NAN32) } else { x };
                return f64::from(float::ftz32(x));
            }
            f64::from(x)
        }
        _ => f64::from_bits(a),
    }
}

fn write_float(dst: Num, m: u32, mut x: f64) -> u64 {
    if m & SAT != 0 {
        x = if x > 0.0 { x.min(1.0) } else { 0.0 };
    }
    if m & RELU != 0 && x < 0.0 {
        x = 0.0;
    }
    match dst {
        Num::F64 => x.to_bits(),
        Num::F32 => {
            let r = float::narrow(m, x);
            let r = if m & FTZ != 0 { float::ftz32(r) } else { r };
            u64::from(if r.is_nan() { float::NAN32 } else { r.to_bits() })
        }
        Num::F16 => u64::from(F16.encode(m, x)),
        _ => u64::from(BF16.encode(m, x)),
    }
}

/// Clamps, and extends to the destination register by the type's sign.
fn write_int(dst: Num, m: u32, v: i128, clamp: bool) -> u64 {
    let reg_bits = 8 << (m >> REG & 7);
    let (bits, sign) = match dst {
        Num::S(bits) => (bits, true),
        Num::U(bits) => (bits, false),
        _ => (64, false),
    };
    let v = match (clamp, sign) {
        (false, _) => v,
        (true, true) => v.clamp(-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1),
        (true, false) => v.clamp(0, (1i128 << bits) - 1),
    };
    let v = if sign { signed(v as u64, bits) as u64 } else { low(v as u64, bits) };
    low(v, reg_bits)
}

pub(crate) fn convert(m: u32, a: u64, _: u64, _: u64) -> u64 {
    let (dst, src) = (Num::from_code(m >> DST), Num::from_code(m >> SRC));
    match (dst.is_float(), src) {
        (false, Num::U(bits)) => write_int(dst, m, i128::from(low(a, bits)), m & SAT != 0),
        (false, Num::S(bits)) => write_int(dst, m, i128::from(signed(a, bits)), m & SAT != 0),
        (true, Num::U(bits)) => sat01(dst, m, int_to_float(m, i128::from(low(a, bits)), dst)),
        (true, Num::S(bits)) => sat01(dst, m, int_to_float(m, i128::from(signed(a, bits)), dst)),
        (false, _) => {
            let x = read_float(src, m, a);
            if x.is_nan() {
                // The ISA's two rules: 0 among narrow types, else the top bit.
                let (Num::U(bits) | Num::S(bits)) = dst else { return 0 };
                if bits != 64 && src != Num::F64 {
                    return 0;
                }
                return write_int(dst, m, 1 << (bits - 1), false);
            }
            // `as` saturates far outside every integer's range.
            write_int(dst, m, round_integral(m, x) as i128, true)
        }
        (true, _) => {
            let x = read_float(src, m, a);
            if x.is_nan() && src == Num::F64 && dst != Num::F64 && m & SAT == 0 {
                return narrow_nan(dst, a);
            }
            if m & INTEGRAL != 0 {
                let r = round_integral(m, x);
                return write_float(dst, m & !ROUND, r.copysign(x));
            }
            // Same type: bits pass, but for what the modifiers ask.
            write_float(dst, m, x)
        }
    }
}

/// An f64 NaN in fewer bits: quiet, with its sign and its upper bits.
fn narrow_nan(dst: Num, a: u64) -> u64 {
    let f = a >> 32 & 0x8000_0000 | 0x7fc0_0000 | a >> 29 & 0x003f_ffff;
    match dst {
        Num::F16 => f >> 16 & 0x8000 | 0x7e00 | f >> 13 & 0x1ff,
        Num::BF16 => f >> 16,
        _ => f,
    }
}

fn sat01(dst: Num, m: u32, bits: u64) -> u64 {
    if m & SAT == 0 { bits } else { write_float(dst, m & !ROUND, read_float(dst, 0, bits)) }
}

fn relu_encode(format: Small, m: u32, x: u64) -> u32 {
    let mut x = f64::from(f32::from_bits(x as u32));
    // Negative zero too becomes zero; NaN stays.
    if m & RELU != 0 && x <= 0.0 {
        x = 0.0;
    }
    format.encode(m, x)
}

fn halves(format: Small, v: u64) -> (f64, f64) {
    let bits = format.exp_bits + format.mant_bits + 1;
    (
        format.decode((v >> bits) as u32 & ((1 << bits) - 1)),
        format.decode(v as u32 & ((1 << bits) - 1)),
    )
}

/// `cvt` to and from pairs, and to tf32; named `dst.src`.
pub(crate) fn packed(name: &str) -> Option<LaneFn> {
    Some(match name {
        "f16x2.f32" => {
            |m, a, b, _| u64::from(relu_encode(F16, m, a) << 16 | relu_encode(F16, m, b))
        }
        "bf16x2.f32" => {
            |m, a, b, _| u64::from(relu_encode(BF16, m, a) << 16 | relu_encode(BF16, m, b))
        }
        "tf32.f32" => |m, a, _, _| {
            let x = f32::from_bits(a as u32);
            if m & RELU != 0 && x <= 0.0 {
                return 0;
            }
            match m & ROUND {
                // Half is added to the bits, NaN or not.
                RNA => u64::from((a as u32).wrapping_add(0x1000) & !0x1fff),
                _ => u64::from(TF32.encode(m, f64::from(x)) << 13),
            }
        },
        "e4m3x2.f32" => |m, a, b, _| {
            let m = m | SATFINITE;
            u64::from(relu_encode(E4M3, m, a) << 8 | relu_encode(E4M3, m, b))
        },
        "e5m2x2.f32" => |m, a, b, _| {
            let m = m | SATFINITE;
            u64::from(relu_encode(E5M2, m, a) << 8 | relu_encode(E5M2, m, b))
        },
        "e4m3x2.f16x2" => |m, a, _, _| {
            let (high, low) = halves(F16, a);
            let m = m | SATFINITE;
            u64::from(E4M3.encode(m, high) << 8 | E4M3.encode(m, low))
        },
        "e5m2x2.f16x2" => |m, a, _, _| {
            let (high, low) = halves(F16, a);
            let m = m | SATFINITE;
            u64::from(E5M2.encode(m, high) << 8 | E5M2.encode(m, low))
        },
        "f16x2.e4m3x2" => |m, a, _, _| {
            let (high, low) = halves(E4M3, a);
            u64::from(F16.encode(m, high) << 16 | F16.encode(m, low))
        },
        "f16x2.e5m2x2" => |m, a, _, _| {
            let (high, low) = halves(E5M2, a);
            u64::from(F16.encode(m, high) << 16 | F16.encode(m, low))
        },
        _ => return None,
    })
}
