//! f32 and f64 operations. Round-to-nearest is the host's; the directed modes
//! go through a wider result rounded to odd (f32) or through the exact error
//! of the operation (f64). Results that are NaN are the GPU's canonical one.

use super::{FTZ, LaneFn, NAN, RM, RN, ROUND, RP, RZ, SAT, XORSIGN};

/// The NaN that f32 arithmetic produces on the GPU.
pub(crate) const NAN32: u32 = 0x7fff_ffff;

pub(crate) fn ftz32(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0f32.copysign(x) } else { x }
}

fn get32(m: u32, v: u64) -> f32 {
    let x = f32::from_bits(v as u32);
    if m & FTZ != 0 { ftz32(x) } else { x }
}

fn put32(m: u32, x: f32) -> u64 {
    let mut x = if m & FTZ != 0 { ftz32(x) } else { x };
    if m & SAT != 0 {
        // NaN saturates to +0.
        x = if x > 0.0 { x.min(1.0) } else { 0.0 };
    }
    u64::from(if x.is_nan() { NAN32 } else { x.to_bits() })
}

fn get64(v: u64) -> f64 {
    f64::from_bits(v)
}

fn put64(m: u32, x: f64) -> u64 {
    if m & SAT != 0 {
        return if x > 0.0 { x.min(1.0) } else { 0.0 }.to_bits();
    }
    x.to_bits()
}

/// `x`, whose true value differs by a little of `err`'s sign, rounded to odd:
/// a later rounding to fewer bits is then as if from the exact value.
pub(crate) fn to_odd(x: f64, err: f64) -> f64 {
    if err == 0.0 || !x.is_finite() || err.is_nan() || x.to_bits() & 1 != 0 {
        return x;
    }
    if x == 0.0 {
        return f64::from_bits(1).copysign(err);
    }
    let away = (err > 0.0) == (x > 0.0);
    f64::from_bits(if away { x.to_bits() + 1 } else { x.to_bits() - 1 })
}

/// The rounding error of `a + b = s`, exactly.
fn sum_error(a: f64, b: f64, s: f64) -> f64 {
    let bb = s - a;
    (a - (s - bb)) + (b - bb)
}

pub(crate) fn add_odd(a: f64, b: f64) -> f64 {
    let s = a + b;
    if s.is_finite() { to_odd(s, sum_error(a, b, s)) } else { s }
}

/// `a * b + c` of values narrow enough for the product to be exact in f64.
pub(crate) fn fma_odd(a: f64, b: f64, c: f64) -> f64 {
    add_odd(a * b, c)
}

pub(crate) fn div_odd(a: f64, b: f64) -> f64 {
    let q = a / b;
    let rest = (-q).mul_add(b, a);
    to_odd(q, if b < 0.0 { -rest } else { rest })
}

pub(crate) fn sqrt_odd(a: f64) -> f64 {
    let r = a.sqrt();
    to_odd(r, (-r).mul_add(r, a))
}

/// f64 to f32 in any of the four modes.
pub(crate) fn narrow(mode: u32, x: f64) -> f32 {
    let r = x as f32;
    let (rw, mode) = (f64::from(r), mode & ROUND);
    if x.is_nan() || rw == x || mode == RN || x.is_infinite() {
        return r;
    }
    let up = match mode {
        RP => true,
        RM => false,
        _ => x < 0.0,
    };
    if up && rw < x {
        r.next_up()
    } else if !up && rw > x {
        r.next_down()
    } else {
        r
    }
}

/// Moves `r`, rounded to nearest from `r + err`, to where `mode` puts it;
/// `finite` says that the operands are, so that an infinite `r` overflowed.
fn direct(mode: u32, r: f64, err: f64, finite: bool) -> f64 {
    if r.is_infinite() && finite {
        return match mode & ROUND {
            RZ => f64::MAX.copysign(r),
            RM if r > 0.0 => f64::MAX,
            RP if r < 0.0 => f64::MIN,
            _ => r,
        };
    }
    if err == 0.0 || err.is_nan() || !r.is_finite() {
        return r;
    }
    match mode & ROUND {
        RZ if r > 0.0 && err < 0.0 => r.next_down(),
        RZ if r < 0.0 && err > 0.0 => r.next_up(),
        RM if err < 0.0 => r.next_down(),
        RP if err > 0.0 => r.next_up(),
        _ => r,
    }
}

/// A sum of `x` and `y`: an exact zero is negative when rounding down, unless
/// both are positive zeros.
fn zero_sum(mode: u32, x: f64, y: f64, sum: f64) -> f64 {
    let down = mode & ROUND == RM && sum == 0.0;
    if down && (x.is_sign_negative() || y.is_sign_negative()) { -0.0 } else { sum }
}

/// The sign of `a * b + c - r`.
fn fma_error(a: f64, b: f64, c: f64, r: f64) -> f64 {
    let u = a * b;
    let u_low = a.mul_add(b, -u);
    let s = c + u_low;
    let z = sum_error(c, u_low, s);
    let t = u + s;
    let t_low = sum_error(u, s, t);
    ((t - r) + t_low) + z
}

macro_rules! wide32 {
    ($m:ident, $near:expr, $wide:expr) => {
        put32($m, if $m & ROUND == RN { $near } else { narrow($m, $wide) })
    };
}

pub(crate) fn f32_by_name(name: &str) -> Option<LaneFn> {
    Some(match name {
        "add" => |m, a, b, _| {
            let (a, b) = (get32(m, a), get32(m, b));
            let sum = |a: f64, b: f64| zero_sum(m, a, b, add_odd(a, b));
            wide32!(m, a + b, sum(a.into(), b.into()))
        },
        "sub" => |m, a, b, _| {
            let (a, b) = (get32(m, a), get32(m, b));
            let sum = |a: f64, b: f64| zero_sum(m, a, b, add_odd(a, b));
            wide32!(m, a - b, sum(a.into(), (-b).into()))
        },
        "mul" => |m, a, b, _| {
            let (a, b) = (get32(m, a), get32(m, b));
            wide32!(m, a * b, f64::from(a) * f64::from(b))
        },
        "fma" | "mad" => |m, a, b, c| {
            let (a, b, c) = (get32(m, a), get32(m, b), get32(m, c));
            let sum = |a: f64, b: f64, c: f64| zero_sum(m, a * b, c, fma_odd(a, b, c));
            wide32!(m, a.mul_add(b, c), sum(a.into(), b.into(), c.into()))
        },
        "div" => |m, a, b, _| {
            let (a, b) = (get32(m, a), get32(m, b));
            wide32!(m, a / b, div_odd(a.into(), b.into()))
        },
        // The approximation's reciprocal underflows for divisors this large.
        "div.approx" => |m, a, b, _| {
            let (a, b) = (get32(m, a), get32(m, b));
            let large = b.is_finite() && b.abs() > f32::from_bits(0x7e80_0000);
            let q = match (large, a.is_infinite()) {
                (true, true) => f32::NAN,
                (true, false) if !a.is_nan() => 0f32.copysign(a) * 1f32.copysign(b),
                _ => a / b,
            };
            put32(m, q)
        },
        "rcp" => |m, a, _, _| {
            let a = get32(m, a);
            wide32!(m, 1.0 / a, div_odd(1.0, a.into()))
        },
        "sqrt" => |m, a, _, _| {
            let a = get32(m, a);
            wide32!(m, a.sqrt(), sqrt_odd(a.into()))
        },
        "rsqrt" => |m, a, _, _| put32(m, (1.0 / f64::from(get32(m, a)).sqrt()) as f32),
        "sin" => |m, a, _, _| put32(m, f64::from(get32(m, a)).sin() as f32),
        "cos" => |m, a, _, _| put32(m, f64::from(get32(m, a)).cos() as f32),
        "lg2" => |m, a, _, _| put32(m, get32(m, a).log2()),
        "ex2" => |m, a, _, _| put32(m, get32(m, a).exp2()),
        "tanh" => |m, a, _, _| put32(m, f64::from(get32(m, a)).tanh() as f32),
        "abs" => |m, a, _, _| put32(m, get32(m, a).abs()),
        "neg" => |m, a, _, _| put32(m, -get32(m, a)),
        "min" => |m, a, b, c| min_max32(m, a, b, c, false),
        "max" => |m, a, b, c| min_max32(m, a, b, c, true),
        "copysign" => |_, a, b, _| (b & !(1 << 31)) | (a & 1 << 31),
        _ => return None,
    })
}

/// The third operand is NaN where the instruction has two.
fn min_max32(m: u32, a: u64, b: u64, c: u64, max: bool) -> u64 {
    let (x, y) = (get32(m, a), get32(m, b));
    let mut r = pick(m, x.into(), y.into(), max);
    if m & THREE != 0 {
        r = pick(m, r, get32(m, c).into(), max);
    }
    if m & XORSIGN != 0 {
        let sign = (x.to_bits() ^ y.to_bits()) & 1 << 31;
        return u64::from((r as f32).to_bits() & !(1 << 31) | sign);
    }
    put32(m & !SAT, r as f32)
}

/// `min`/`max` has three operands.
pub(crate) const THREE: u32 = 1 << super::OWN;

pub(crate) fn pick(m: u32, x: f64, y: f64, max: bool) -> f64 {
    if x.is_nan() || y.is_nan() {
        return if m & NAN != 0 || (x.is_nan() && y.is_nan()) {
            f64::NAN
        } else if x.is_nan() {
            y
        } else {
            x
        };
    }
    let (kx, ky) = if m & XORSIGN != 0 { (x.abs(), y.abs()) } else { (x, y) };
    // -0 is less than +0.
    let x_less = kx < ky || (kx == ky && kx.is_sign_negative());
    if x_less == max { y } else { x }
}

pub(crate) fn f64_by_name(name: &str) -> Option<LaneFn> {
    Some(match name {
        "add" => |m, a, b, _| add64(m, get64(a), get64(b)),
        "sub" => |m, a, b, _| add64(m, get64(a), -get64(b)),
        "mul" => |m, a, b, _| {
            let (a, b) = (get64(a), get64(b));
            let r = a * b;
            put64(
                m,
                if m & ROUND == RN {
                    r
                } else {
                    direct(m, r, a.mul_add(b, -r), a.is_finite() && b.is_finite())
                },
            )
        },
        "fma" | "mad" => |m, a, b, c| {
            let (a, b, c) = (get64(a), get64(b), get64(c));
            let r = a.mul_add(b, c);
            let finite = a.is_finite() && b.is_finite() && c.is_finite();
            put64(
                m,
                if m & ROUND == RN {
                    r
                } else {
                    zero_sum(m, a * b, c, direct(m, r, fma_error(a, b, c, r), finite))
                },
            )
        },
        "div" => |m, a, b, _| div64(m, get64(a), get64(b)),
        "rcp" => |m, a, _, _| div64(m, 1.0, get64(a)),
        "sqrt" => |m, a, _, _| {
            let a = get64(a);
            let r = a.sqrt();
            put64(m, if m & ROUND == RN { r } else { direct(m, r, (-r).mul_add(r, a), false) })
        },
        "rsqrt" => |m, a, _, _| put64(m, 1.0 / get64(a).sqrt()),
        // The approximations of f64 give the high word; the low one is zero.
        "rcp.approx" => |_, a, _, _| (1.0 / get64(a)).to_bits() & !0xffff_ffff,
        "rsqrt.approx" => |_, a, _, _| (1.0 / get64(a).sqrt()).to_bits() & !0xffff_ffff,
        // f64 NaNs pass as they are, sign included.
        "abs" => |_, a, _, _| if get64(a).is_nan() { a } else { a & !(1 << 63) },
        "neg" => |_, a, _, _| if get64(a).is_nan() { a } else { a ^ (1 << 63) },
        "min" => |m, a, b, _| put64(m, pick(m, get64(a), get64(b), false)),
        "max" => |m, a, b, _| put64(m, pick(m, get64(a), get64(b), true)),
        "copysign" => |_, a, b, _| (b & !(1 << 63)) | (a & 1 << 63),
        _ => return None,
    })
}

fn add64(m: u32, a: f64, b: f64) -> u64 {
    let r = a + b;
    put64(
        m,
        if m & ROUND == RN {
            r
        } else {
            zero_sum(m, a, b, direct(m, r, sum_error(a, b, r), a.is_finite() && b.is_finite()))
        },
    )
}

fn div64(m: u32, a: f64, b: f64) -> u64 {
    let r = a / b;
    if m & ROUND == RN {
        return put64(m, r);
    }
    let rest = (-r).mul_add(b, a);
    put64(m, direct(m, r, if b < 0.0 { -rest } else { rest }, a.is_finite() && b != 0.0))
}

/// `testp` by its suffix.
pub(crate) fn testp(name: &str, double: bool) -> Option<LaneFn> {
    fn wide(m: u32, v: u64) -> f64 {
        if m != 0 { f64::from_bits(v) } else { f64::from(f32::from_bits(v as u32)) }
    }
    fn subnormal(m: u32, v: u64) -> bool {
        if m != 0 {
            f64::from_bits(v).is_subnormal()
        } else {
            f32::from_bits(v as u32).is_subnormal()
        }
    }
    let _ = double;
    Some(match name {
        "finite" => |m, a, _, _| u64::from(wide(m, a).is_finite()),
        "infinite" => |m, a, _, _| u64::from(wide(m, a).is_infinite()),
        "number" => |m, a, _, _| u64::from(!wide(m, a).is_nan()),
        "notanumber" => |m, a, _, _| u64::from(wide(m, a).is_nan()),
        "normal" => |m, a, _, _| {
            let x = wide(m, a);
            // Zeros count as normal.
            u64::from(x.is_finite() && !subnormal(m, a))
        },
        "subnormal" => |m, a, _, _| u64::from(subnormal(m, a)),
        _ => return None,
    })
}
