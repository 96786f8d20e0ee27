//! Comparisons, to predicates and to values.

use super::{Decoder, Kind, Mods, Result, Ty};
use crate::ast::Instr;
use crate::ir::{Bin32, BoolOp, Cmp, CmpType, NONE, Op, P, PSrc, R};
use crate::lanes::{FTZ, LaneFn, OWN, float, half, int};

impl Decoder<'_> {
    pub(super) fn setp(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let (p, q) = self.pair(self.arg(i, 0)?);
        let (p, q) = (self.pdst(p)?, q.map_or(Ok(NONE), |q| self.pdst(q))?);
        self.compare(i, m, p, q, None)
    }

    /// The comparison of `setp` or `set` to predicates.
    fn compare(
        &mut self,
        i: &Instr,
        m: &mut Mods<'_>,
        p: P,
        q: P,
        source_type: Option<Ty>,
    ) -> Result<()> {
        let name = m.next().ok_or("no comparison")?;
        let boolean = m.take_any(&["and", "or", "xor"]);
        let z = m.take("ftz");
        let ty = match source_type {
            Some(ty) => ty,
            None => m.ty()?,
        };
        let a = self.src(self.arg(i, 1)?, ty)?;
        let b = self.src(self.arg(i, 2)?, ty)?;
        let src = match boolean {
            None => None,
            Some(k) => {
                let k = match k {
                    "and" => BoolOp::And,
                    "or" => BoolOp::Or,
                    _ => BoolOp::Xor,
                };
                Some((k, self.psrc(self.arg(i, 3)?)?))
            }
        };
        let (cmp, unsigned) = comparison(name)?;
        let signed = ty.signed() && !unsigned;
        let hot = match (ty.is_float(), ty.bits, signed) {
            (true, 32, _) if !z => Some(CmpType::F32),
            (true, 64, _) => Some(CmpType::F64),
            (false, 32, true) if ty.is_int() => Some(CmpType::S32),
            (false, 32, false) if ty.is_int() => Some(CmpType::U32),
            (false, 64, true) => Some(CmpType::S64),
            (false, 64, false) => Some(CmpType::U64),
            // Unsigned 16-bit values are already zero-extended.
            (false, 16, false) if ty.is_int() => Some(CmpType::U32),
            _ => None,
        };
        if let Some(t) = hot {
            self.emit(Op::SetP { t, cmp, p, q, a, b, src });
            return Ok(());
        }
        let own = (cmp as u32) << OWN | if z { FTZ } else { 0 };
        let f: LaneFn = if ty.packed {
            return self.compare_pair(ty, own, p, q, a, b, src);
        } else if ty.kind == Kind::Brain {
            |m, a, b, _| {
                let wide = |v: u64| f64::from(half::bf16_to_f32(v as u32 & 0xffff));
                u64::from(compare_floats(m, wide(a), wide(b)))
            }
        } else if ty.is_half() {
            |m, a, b, _| {
                let wide = |v: u64| f64::from(half::f16_to_f32(v as u32 & 0xffff));
                u64::from(compare_floats(m, wide(a), wide(b)))
            }
        } else if ty.is_float() {
            |m, a, b, _| {
                let wide = |v: u64| f64::from(float::ftz32(f32::from_bits(v as u32)));
                u64::from(compare_floats(m, wide(a), wide(b)))
            }
        } else {
            // Signed 16-bit values; their order survives a flip of the sign.
            |m, a, b, _| {
                u64::from(compare_floats(m, f64::from(a as u16 as i16), f64::from(b as u16 as i16)))
            }
        };
        self.emit(Op::LaneP { f, m: own, p, q, a, b, wide: 0, src });
        Ok(())
    }

    /// `setp.f16x2`: `p` from the low halves, `q` from the high ones.
    #[allow(clippy::too_many_arguments)]
    fn compare_pair(
        &mut self,
        ty: Ty,
        own: u32,
        p: P,
        q: P,
        a: R,
        b: R,
        src: Option<(BoolOp, PSrc)>,
    ) -> Result<()> {
        fn value(m: u32, v: u64) -> f64 {
            let v = v as u32 & 0xffff;
            f64::from(if m & 1 << 20 != 0 { half::bf16_to_f32(v) } else { half::f16_to_f32(v) })
        }
        let own = own | u32::from(ty.kind == Kind::Brain) << 20;
        let low: LaneFn = |m, a, b, _| u64::from(compare_floats(m, value(m, a), value(m, b)));
        let high: LaneFn =
            |m, a, b, _| u64::from(compare_floats(m, value(m, a >> 16), value(m, b >> 16)));
        self.emit(Op::LaneP { f: low, m: own, p, q: NONE, a, b, wide: 0, src });
        self.emit(Op::LaneP { f: high, m: own, p: q, q: NONE, a, b, wide: 0, src });
        Ok(())
    }

    pub(super) fn set(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        // `set.cmp.boolop.ftz.dtype.stype`: the types come last.
        let types: Vec<Ty> = i.op.split('.').skip(1).filter_map(Ty::parse).collect();
        let [dtype, stype] = types[..] else { return Err("two types belong here".into()) };
        let p = self.map.preds;
        self.map.preds += 1;
        let q = self.map.preds;
        self.map.preds += 1;
        self.compare(i, m, p, q, Some(stype))?;
        m.try_ty();
        m.try_ty();
        if dtype.packed {
            let d = self.dst(self.arg(i, 0)?, 32)?;
            let one = if dtype.kind == Kind::Brain { 0x3f80 } else { 0x3c00 };
            let (low, high) = (self.temp(false), self.temp(false));
            self.emit(Op::PredTo { d: low, wide: false, src: PSrc::Reg(p, false), yes: one });
            self.emit(Op::PredTo {
                d: high,
                wide: false,
                src: PSrc::Reg(q, false),
                yes: one << 16,
            });
            self.emit(Op::Bin32(Bin32::Or, d, low, high));
            return Ok(());
        }
        let d = self.dst(self.arg(i, 0)?, dtype.bits)?;
        let yes = match (dtype.kind, dtype.bits) {
            (Kind::Float, 32) => u64::from(1f32.to_bits()),
            (Kind::Float, 16) => 0x3c00,
            (Kind::Brain, _) => 0x3f80,
            (_, bits) => int::low(u64::MAX, bits),
        };
        if stype.packed {
            // Two halves compared into two 16-bit masks.
            let (low, high) = (self.temp(false), self.temp(false));
            self.emit(Op::PredTo { d: low, wide: false, src: PSrc::Reg(p, false), yes: 0xffff });
            self.emit(Op::PredTo {
                d: high,
                wide: false,
                src: PSrc::Reg(q, false),
                yes: 0xffff_0000,
            });
            self.emit(Op::Bin32(Bin32::Or, d, low, high));
            return Ok(());
        }
        self.emit(Op::PredTo { d, wide: dtype.wide(), src: PSrc::Reg(p, false), yes });
        Ok(())
    }

    pub(super) fn slct(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        m.take("ftz");
        let (ty, ctype) = (m.ty()?, m.ty()?);
        let (d, a, b) = self.three(i, ty)?;
        let c = self.src(self.arg(i, 3)?, ctype)?;
        let p = self.map.preds;
        self.map.preds += 1;
        let zero = self.constant(0, 32);
        // NaN is not >= 0, so it selects the second; -0 is.
        let t = if ctype.is_float() { CmpType::F32 } else { CmpType::S32 };
        self.emit(Op::SetP { t, cmp: Cmp::Ge, p, q: NONE, a: c, b: zero, src: None });
        let p = PSrc::Reg(p, false);
        self.emit(if ty.wide() { Op::Sel64(d, a, b, p) } else { Op::Sel32(d, a, b, p) });
        Ok(())
    }
}

/// The comparison by name, and whether it is of unsigned numbers.
fn comparison(name: &str) -> Result<(Cmp, bool)> {
    Ok(match name {
        "eq" => (Cmp::Eq, false),
        "ne" => (Cmp::Ne, false),
        "lt" => (Cmp::Lt, false),
        "le" => (Cmp::Le, false),
        "gt" => (Cmp::Gt, false),
        "ge" => (Cmp::Ge, false),
        "lo" => (Cmp::Lt, true),
        "ls" => (Cmp::Le, true),
        "hi" => (Cmp::Gt, true),
        "hs" => (Cmp::Ge, true),
        "equ" => (Cmp::Equ, false),
        "neu" => (Cmp::Neu, false),
        "ltu" => (Cmp::Ltu, false),
        "leu" => (Cmp::Leu, false),
        "gtu" => (Cmp::Gtu, false),
        "geu" => (Cmp::Geu, false),
        "num" => (Cmp::Num, false),
        "nan" => (Cmp::Nan, false),
        _ => return Err(format!("no comparison `.{name}`")),
    })
}

/// The comparison whose number is in the own bits.
fn compare_floats(m: u32, a: f64, b: f64) -> bool {
    let unordered = a.is_nan() || b.is_nan();
    match m >> OWN & 15 {
        0 => a == b,
        // `ne` is ordered: false where either is NaN.
        1 => !unordered && a != b,
        2 => a < b,
        3 => a <= b,
        4 => a > b,
        5 => a >= b,
        6 => unordered || a == b,
        7 => unordered || a != b,
        8 => unordered || a < b,
        9 => unordered || a <= b,
        10 => unordered || a > b,
        11 => unordered || a >= b,
        12 => !unordered,
        _ => unordered,
    }
}
