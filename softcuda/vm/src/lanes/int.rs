//! Integer operations, as the PTX ISA defines them at their edges.

use super::{LaneFn, OWN, SAT};

/// Keeps the low `bits`.
pub(crate) fn low(v: u64, bits: u32) -> u64 {
    if bits >= 64 { v } else { v & ((1 << bits) - 1) }
}

/// Sign-extends the low `bits`.
pub(crate) fn signed(v: u64, bits: u32) -> i64 {
    let shift = 64 - bits.min(64);
    ((v << shift) as i64) >> shift
}

/// A type's width and signedness, kept in the modifiers.
pub(crate) fn pack(bits: u32, sign: bool) -> u32 {
    (bits | u32::from(sign) << 7) << OWN
}

fn bits(m: u32) -> u32 {
    m >> OWN & 127
}

fn is_signed(m: u32) -> bool {
    m >> (OWN + 7) & 1 != 0
}

fn wide(m: u32, v: u64) -> i128 {
    if is_signed(m) { i128::from(signed(v, bits(m))) } else { i128::from(low(v, bits(m))) }
}

/// The result, clamped under `.sat`.
fn fit(m: u32, v: i128) -> u64 {
    let n = bits(m);
    let v = if m & SAT != 0 && is_signed(m) {
        v.clamp(-(1i128 << (n - 1)), (1i128 << (n - 1)) - 1)
    } else {
        v
    };
    low(v as u64, n)
}

/// Two-, three- and one-operand operations by opcode; the modifiers come from
/// [`pack`].
pub(crate) fn by_name(name: &str) -> Option<LaneFn> {
    Some(match name {
        "add" => |m, a, b, _| fit(m, wide(m, a) + wide(m, b)),
        "sub" => |m, a, b, _| fit(m, wide(m, a) - wide(m, b)),
        "mul.lo" => |m, a, b, _| low(a.wrapping_mul(b), bits(m)),
        "mul.hi" => |m, a, b, _| low(mul_hi(m, a, b), bits(m)),
        "mad.lo" => |m, a, b, c| low(a.wrapping_mul(b).wrapping_add(c), bits(m)),
        "mad.hi" => |m, a, b, c| fit(m, wide(m, mul_hi(m, a, b)) + wide(m, c)),
        // The product of the low 24 bits is 48 bits wide: `hi` takes 47..16.
        "mul24.lo" => |m, a, b, _| low(mul24(m, a, b) as u64, 32),
        "mul24.hi" => |m, a, b, _| low((mul24(m, a, b) >> 16) as u64, 32),
        "mad24.lo" => |m, a, b, c| fit(m, i128::from(mul24(m, a, b) as i32) + wide(m, c)),
        "mad24.hi" => |m, a, b, c| {
            let product = mul24(m, a, b) >> 16;
            let product = if is_signed(m) { product as i32 as i64 } else { product as u32 as i64 };
            fit(m, i128::from(product) + wide(m, c))
        },
        "sad" => |m, a, b, c| {
            low(((wide(m, a) - wide(m, b)).unsigned_abs() as u64).wrapping_add(c), bits(m))
        },
        "div" => |m, a, b, _| {
            if low(b, bits(m)) == 0 {
                low(u64::MAX, bits(m))
            } else {
                fit(m, wide(m, a) / wide(m, b))
            }
        },
        "rem" => |m, a, b, _| {
            if low(b, bits(m)) == 0 {
                low(u64::MAX, bits(m))
            } else {
                fit(m, wide(m, a) % wide(m, b))
            }
        },
        "min" => |m, a, b, _| relu(m, if wide(m, a) <= wide(m, b) { a } else { b }),
        "max" => |m, a, b, _| relu(m, if wide(m, a) >= wide(m, b) { a } else { b }),
        "abs" => |m, a, _, _| low(wide(m, a).unsigned_abs() as u64, bits(m)),
        "neg" => |m, a, _, _| fit(m, -wide(m, a)),
        "and" => |_, a, b, _| a & b,
        "or" => |_, a, b, _| a | b,
        "xor" => |_, a, b, _| a ^ b,
        "not" => |m, a, _, _| low(!a, bits(m)),
        "cnot" => |m, a, _, _| u64::from(low(a, bits(m)) == 0),
        // Shifts clamp at the width; the amount is 32 bits, unsigned.
        "shl" => |m, a, b, _| {
            let n = b as u32;
            if n >= bits(m) { 0 } else { low(a << n, bits(m)) }
        },
        "shr" => |m, a, b, _| {
            let n = (b as u32).min(bits(m));
            if is_signed(m) {
                low((signed(a, bits(m)) >> n.min(63)) as u64, bits(m))
            } else if n >= bits(m) {
                0
            } else {
                low(a, bits(m)) >> n
            }
        },
        "popc" => |m, a, _, _| u64::from(low(a, bits(m)).count_ones()),
        "clz" => |m, a, _, _| u64::from(low(a, bits(m)).leading_zeros() - (64 - bits(m))),
        "brev" => |m, a, _, _| a.reverse_bits() >> (64 - bits(m)),
        "bfind" => |m, a, _, _| bfind(m, a, false),
        "bfind.shiftamt" => |m, a, _, _| bfind(m, a, true),
        "bfe" => bfe,
        "fns" => |_, a, b, c| fns(a as u32, b as u32, c as i32),
        "prmt" => |m, a, b, c| prmt(m >> OWN, a, b, c),
        "shf.l.wrap" => |_, a, b, c| ((b << 32 | a) << (c & 31)) >> 32,
        "shf.l.clamp" => |_, a, b, c| {
            let n = (c as u32).min(32);
            if n == 32 { a } else { low(((b << 32 | a) << n) >> 32, 32) }
        },
        "shf.r.wrap" => |_, a, b, c| low((b << 32 | a) >> (c & 31), 32),
        "shf.r.clamp" => |_, a, b, c| low((b << 32 | a) >> (c as u32).min(32), 32),
        "szext.wrap" => |m, a, b, _| szext(m, a, b as u32 & 31),
        "szext.clamp" => |m, a, b, _| szext(m, a, b as u32),
        "bmsk.wrap" => |_, a, b, _| bmsk(a as u32 & 31, b as u32 & 31),
        "bmsk.clamp" => |_, a, b, _| bmsk(a as u32, b as u32),
        _ => return None,
    })
}

fn relu(m: u32, v: u64) -> u64 {
    if m & super::RELU != 0 && signed(v, bits(m)) < 0 { 0 } else { low(v, bits(m)) }
}

fn mul_hi(m: u32, a: u64, b: u64) -> u64 {
    let n = bits(m);
    if n == 64 && !is_signed(m) {
        return ((u128::from(a) * u128::from(b)) >> 64) as u64;
    }
    low(((wide(m, a) * wide(m, b)) >> n) as u64, n)
}

fn mul24(m: u32, a: u64, b: u64) -> i64 {
    if is_signed(m) { signed(a, 24) * signed(b, 24) } else { (low(a, 24) * low(b, 24)) as i64 }
}

fn bfind(m: u32, a: u64, shift: bool) -> u64 {
    let n = bits(m);
    let v = if is_signed(m) && signed(a, n) < 0 { low(!a, n) } else { low(a, n) };
    if v == 0 {
        return u64::from(u32::MAX);
    }
    let position = 63 - v.leading_zeros();
    u64::from(if shift { n - 1 - position } else { position })
}

/// A bit field's position or length: the low byte, but that the 64-bit forms
/// read the whole word. (So says the H100.)
fn field(n: u32, v: u32) -> u32 {
    if n == 64 { v.min(255) } else { v & 255 }
}

fn bfe(m: u32, a: u64, b: u64, c: u64) -> u64 {
    let n = bits(m);
    let (position, length) = (field(n, b as u32), field(n, c as u32));
    let a = low(a, n);
    let sign_at = (position + length).saturating_sub(1).min(n - 1);
    let negative = is_signed(m) && length != 0 && a >> sign_at & 1 != 0;
    let field = if position >= n { 0 } else { low(a >> position, length) };
    let taken = length.min(n.saturating_sub(position));
    let fill = if negative && taken < n { u64::MAX << taken } else { 0 };
    low(field | fill, n)
}

/// `bfi`: inserts `a` into `b`; the modifiers carry nothing but the width.
pub(crate) fn bfi(n: u32, a: u64, b: u64, position: u32, length: u32) -> u64 {
    let (position, length) = (field(n, position), field(n, length));
    if position >= n {
        return b;
    }
    let mask = low(low(u64::MAX, length) << position, n);
    (b & !mask) | (a << position & mask)
}

fn fns(mask: u32, base: u32, offset: i32) -> u64 {
    let none = u64::from(u32::MAX);
    if offset == i32::MIN {
        // What the H100 gives; the ISA does not say.
        return 0;
    }
    if base > 31 {
        return none;
    }
    if offset == 0 {
        return if mask >> base & 1 != 0 { u64::from(base) } else { none };
    }
    let (mut left, step) = (offset.unsigned_abs(), offset.signum());
    let mut at = base as i32;
    while (0..32).contains(&at) {
        if mask >> at & 1 != 0 {
            left -= 1;
            if left == 0 {
                return at as u64;
            }
        }
        at += step;
    }
    none
}

fn szext(m: u32, a: u64, n: u32) -> u64 {
    if n >= 32 {
        return low(a, 32);
    }
    if is_signed(m) && n > 0 { low(signed(a, n) as u64, 32) } else { low(a, n) }
}

fn bmsk(position: u32, count: u32) -> u64 {
    if position >= 32 { 0 } else { low(low(u64::MAX, count.min(32)) << position, 32) }
}

/// Byte permute; `mode` 0 is the default, then f4e b4e rc8 ecl ecr rc16.
fn prmt(mode: u32, a: u64, b: u64, c: u64) -> u64 {
    let pool = b << 32 | low(a, 32);
    let c = c as u32;
    let mut out = 0;
    for i in 0..4u32 {
        let (index, sign) = match mode {
            0 => (c >> (4 * i) & 7, c >> (4 * i + 3) & 1 != 0),
            1 => (((c & 3) + i) & 7, false),
            2 => ((c & 3).wrapping_sub(i) & 7, false),
            3 => (c & 3, false),
            4 => (i.max(c & 3), false),
            5 => (i.min(c & 3), false),
            _ => ((c & 1) * 2 + (i & 1), false),
        };
        let mut byte = pool >> (8 * index) & 0xff;
        if sign {
            byte = if byte & 0x80 != 0 { 0xff } else { 0 };
        }
        out |= byte << (8 * i);
    }
    out
}

/// `dp4a`: bit 0 of the own bits says that `a` is signed, bit 1 that `b` is.
pub(crate) fn dp4a(m: u32, a: u64, b: u64, c: u64) -> u64 {
    let pick = |v: u64, i: u32, sign: bool| {
        let byte = v >> (8 * i) & 0xff;
        if sign { signed(byte, 8) } else { byte as i64 }
    };
    let sum: i64 =
        (0..4).map(|i| pick(a, i, m >> OWN & 1 != 0) * pick(b, i, m >> OWN & 2 != 0)).sum();
    low(c.wrapping_add(sum as u64), 32)
}

/// `dp2a`: as `dp4a`; bit 2 chooses `b`'s high half.
pub(crate) fn dp2a(m: u32, a: u64, b: u64, c: u64) -> u64 {
    let base = if m >> OWN & 4 != 0 { 2 } else { 0 };
    let sum: i64 = (0..2)
        .map(|i| {
            let (x, y) = (a >> (16 * i) & 0xffff, b >> (8 * (base + i)) & 0xff);
            let x = if m >> OWN & 1 != 0 { signed(x, 16) } else { x as i64 };
            let y = if m >> OWN & 2 != 0 { signed(y, 8) } else { y as i64 };
            x * y
        })
        .sum();
    low(c.wrapping_add(sum as u64), 32)
}

/// Any function of three bits, bit by bit.
pub(crate) fn lop3(lut: u8, a: u32, b: u32, c: u32) -> u32 {
    let mut out = 0;
    for i in 0..8 {
        if lut >> i & 1 != 0 {
            let x = if i & 4 != 0 { a } else { !a };
            let y = if i & 2 != 0 { b } else { !b };
            let z = if i & 1 != 0 { c } else { !c };
            out |= x & y & z;
        }
    }
    out
}
