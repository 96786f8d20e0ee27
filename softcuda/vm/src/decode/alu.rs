//! Arithmetic, logic and comparisons.

use super::{B32, B64, Decoder, Kind, Mods, Result, Ty};
use crate::ast::{Class, Instr, Operand};
use crate::ir::{
    Bin32, Bin64, BoolOp, Carry, CarryOp, Cmp, CmpType, Mixed, NONE, Op, PSrc, R, Tern32, Tern64,
    Un,
};
use crate::lanes::{FTZ, LaneFn, OWN, RELU, RN, ROUND, SAT, float, half, int};

/// Which operands of a lane function are 64 bits wide.
pub(super) const WD: u8 = 1;
pub(super) const WA: u8 = 2;
pub(super) const WB: u8 = 4;
pub(super) const WC: u8 = 8;
const ALL: u8 = WD | WA | WB | WC;

impl Decoder<'_> {
    pub(super) fn alu(&mut self, root: &str, i: &Instr, m: &mut Mods<'_>) -> Result<bool> {
        match root {
            "add" | "sub" | "mul" | "mad" | "fma" | "div" | "rem" | "min" | "max" | "abs"
            | "neg" | "rcp" | "sqrt" | "rsqrt" | "sin" | "cos" | "lg2" | "ex2" | "tanh"
            | "copysign" | "sad" | "mul24" | "mad24" => self.arithmetic(root, i, m)?,
            "addc" | "subc" | "madc" => self.carry(root, i, m)?,
            "and" | "or" | "xor" | "not" | "cnot" => self.logic(root, i, m)?,
            "shl" | "shr" => self.shift(root, i, m)?,
            "popc" | "clz" | "brev" | "bfind" | "bfe" | "fns" | "szext" | "bmsk" | "shf"
            | "prmt" | "dp4a" | "dp2a" => self.bits(root, i, m)?,
            "bfi" => {
                let ty = m.ty()?;
                let d = self.dst(self.arg(i, 0)?, ty.bits)?;
                let a = self.src(self.arg(i, 1)?, ty)?;
                let b = self.src(self.arg(i, 2)?, ty)?;
                let c = self.src(self.arg(i, 3)?, B32)?;
                let e = self.src(self.arg(i, 4)?, B32)?;
                self.emit(Op::Bfi { bits: ty.bits, d, a, b, c, e });
            }
            "lop3" => self.lop3(i, m)?,
            "setp" => self.setp(i, m)?,
            "set" => self.set(i, m)?,
            "selp" => {
                let ty = m.ty()?;
                let d = self.dst(self.arg(i, 0)?, ty.bits)?;
                let (a, b) = (self.src(self.arg(i, 1)?, ty)?, self.src(self.arg(i, 2)?, ty)?);
                let p = self.psrc(self.arg(i, 3)?)?;
                self.emit(if ty.wide() { Op::Sel64(d, a, b, p) } else { Op::Sel32(d, a, b, p) });
            }
            "slct" => self.slct(i, m)?,
            "testp" => {
                let what = m.next().unwrap_or("");
                let ty = m.ty()?;
                let f = float::testp(what, ty.wide()).ok_or("no such test")?;
                let p = self.pdst(self.arg(i, 0)?)?;
                let a = self.src(self.arg(i, 1)?, ty)?;
                let zero = self.constant(0, 32);
                let wide = if ty.wide() { WA } else { 0 };
                let own = u32::from(ty.wide());
                self.emit(Op::LaneP { f, m: own, p, q: NONE, a, b: zero, wide, src: None });
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Emits a lane function over the operands from 1 on, all of type `ty`.
    fn lanes(&mut self, i: &Instr, f: LaneFn, own: u32, ty: Ty, inputs: usize) -> Result<()> {
        let d = self.dst(self.arg(i, 0)?, ty.bits)?;
        let mut rows = [self.constant(0, ty.bits); 3];
        for (at, row) in rows.iter_mut().enumerate().take(inputs) {
            *row = self.src(self.arg(i, at + 1)?, ty)?;
        }
        let [a, b, c] = rows;
        let wide = if ty.wide() { ALL } else { 0 };
        self.emit(Op::Lane { f, m: own, d, a, b, c, wide });
        Ok(())
    }

    fn arithmetic(&mut self, root: &str, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        if i.op.split('.').any(|p| p == "cc") {
            return self.carry(root, i, m);
        }
        let part = m.take_any(&["lo", "hi", "wide"]);
        let shape = m.take_any(&["approx", "full"]);
        let flags = m.flags();
        let ty = m.ty()?;
        // Mixed-precision forms, `add.f32.f16`, name a second type.
        if ty.kind == Kind::Pred || ty.kind == Kind::Pair {
            return Err("unsupported type".into());
        }
        let inputs = i.args.len().saturating_sub(1);
        if ty.is_half() {
            let f = half::by_name(root).ok_or("no such operation on half precision")?;
            let mut own = flags;
            if ty.kind == Kind::Brain {
                own |= half::BRAIN;
            }
            if ty.packed {
                own |= half::PACKED;
            }
            return self.lanes(i, f, own, ty, inputs.min(3));
        }
        if ty.is_float() {
            if shape.is_none() && self.hot_float(root, i, flags, ty)? {
                return Ok(());
            }
            let f = if ty.wide() {
                let name = match (root, shape) {
                    ("rcp", Some(_)) => "rcp.approx",
                    ("rsqrt", Some(_)) if flags & FTZ != 0 => "rsqrt.approx",
                    _ => root,
                };
                float::f64_by_name(name)
            } else {
                let name = match (root, shape) {
                    ("div", Some("approx")) => "div.approx",
                    _ => root,
                };
                float::f32_by_name(name)
            };
            let mut own = flags;
            if matches!(root, "min" | "max") && inputs == 3 {
                own |= float::THREE;
            }
            return self.lanes(i, f.ok_or("no such operation on floats")?, own, ty, inputs.min(3));
        }
        if part == Some("wide") {
            return self.wide(root, i, ty);
        }
        if self.hot_int(root, part, i, flags, ty)? {
            return Ok(());
        }
        let name = match part {
            Some(part) => format!("{root}.{part}"),
            None => root.to_string(),
        };
        let f = int::by_name(&name).ok_or("no such operation on integers")?;
        let own = int::pack(ty.bits, ty.signed()) | flags & (SAT | RELU);
        self.lanes(i, f, own, ty, inputs.min(3))
    }

    fn hot_float(&mut self, root: &str, i: &Instr, flags: u32, ty: Ty) -> Result<bool> {
        if flags & (ROUND | SAT) != RN || flags & !FTZ != 0 {
            return Ok(false);
        }
        let z = flags & FTZ != 0;
        if ty.bits == 32 {
            let k = match root {
                "add" if z => Bin32::FAddZ,
                "add" => Bin32::FAdd,
                "sub" if z => Bin32::FSubZ,
                "sub" => Bin32::FSub,
                "mul" if z => Bin32::FMulZ,
                "mul" => Bin32::FMul,
                "div" if !z => Bin32::FDiv,
                "min" if !z && i.args.len() == 3 => Bin32::FMin,
                "max" if !z && i.args.len() == 3 => Bin32::FMax,
                "fma" | "mad" => {
                    let (d, a, b, c) = self.four(i, ty, ty)?;
                    let k = if z { Tern32::FmaZ } else { Tern32::Fma };
                    self.emit(Op::Tern32(k, d, a, b, c));
                    return Ok(true);
                }
                "neg" | "abs" if !z => {
                    let d = self.dst(self.arg(i, 0)?, 32)?;
                    let a = self.src(self.arg(i, 1)?, ty)?;
                    self.emit(Op::Un(if root == "neg" { Un::FNeg } else { Un::FAbs }, d, a));
                    return Ok(true);
                }
                _ => return Ok(false),
            };
            let (d, a, b) = self.three(i, ty)?;
            self.emit(Op::Bin32(k, d, a, b));
            return Ok(true);
        }
        let k = match root {
            "add" => Bin64::DAdd,
            "sub" => Bin64::DSub,
            "mul" => Bin64::DMul,
            "div" => Bin64::DDiv,
            "fma" | "mad" => {
                let (d, a, b, c) = self.four(i, ty, ty)?;
                self.emit(Op::Tern64(Tern64::Fma, d, a, b, c));
                return Ok(true);
            }
            _ => return Ok(false),
        };
        let (d, a, b) = self.three(i, ty)?;
        self.emit(Op::Bin64(k, d, a, b));
        Ok(true)
    }

    fn hot_int(
        &mut self,
        root: &str,
        part: Option<&str>,
        i: &Instr,
        flags: u32,
        ty: Ty,
    ) -> Result<bool> {
        if flags != 0 || !matches!(ty.bits, 32 | 64) || part == Some("hi") {
            return Ok(false);
        }
        let (s, w) = (ty.signed(), ty.wide());
        if root == "mad" {
            let (d, a, b, c) = self.four(i, ty, ty)?;
            self.emit(if w {
                Op::Tern64(Tern64::Mad, d, a, b, c)
            } else {
                Op::Tern32(Tern32::Mad, d, a, b, c)
            });
            return Ok(true);
        }
        if root == "neg" && !w {
            let d = self.dst(self.arg(i, 0)?, 32)?;
            let a = self.src(self.arg(i, 1)?, ty)?;
            self.emit(Op::Un(Un::Neg32, d, a));
            return Ok(true);
        }
        let pair = match root {
            "add" => (Bin32::Add, Bin64::Add),
            "sub" => (Bin32::Sub, Bin64::Sub),
            "mul" => (Bin32::Mul, Bin64::Mul),
            "min" if s => (Bin32::MinS, Bin64::MinS),
            "min" => (Bin32::MinU, Bin64::MinU),
            "max" if s => (Bin32::MaxS, Bin64::MaxS),
            "max" => (Bin32::MaxU, Bin64::MaxU),
            _ => return Ok(false),
        };
        let (d, a, b) = self.three(i, ty)?;
        self.emit(if w { Op::Bin64(pair.1, d, a, b) } else { Op::Bin32(pair.0, d, a, b) });
        Ok(true)
    }

    pub(super) fn three(&mut self, i: &Instr, ty: Ty) -> Result<(R, R, R)> {
        let d = self.dst(self.arg(i, 0)?, ty.bits)?;
        Ok((d, self.src(self.arg(i, 1)?, ty)?, self.src(self.arg(i, 2)?, ty)?))
    }

    fn four(&mut self, i: &Instr, ty: Ty, last: Ty) -> Result<(R, R, R, R)> {
        let d = self.dst(self.arg(i, 0)?, last.bits)?;
        let (a, b) = (self.src(self.arg(i, 1)?, ty)?, self.src(self.arg(i, 2)?, ty)?);
        Ok((d, a, b, self.src(self.arg(i, 3)?, last)?))
    }

    /// Products twice as wide as their factors.
    fn wide(&mut self, root: &str, i: &Instr, ty: Ty) -> Result<()> {
        let double = Ty { bits: ty.bits * 2, ..ty };
        let mad = root == "mad";
        let d = self.dst(self.arg(i, 0)?, double.bits)?;
        let (a, b) = (self.src(self.arg(i, 1)?, ty)?, self.src(self.arg(i, 2)?, ty)?);
        let c =
            if mad { self.src(self.arg(i, 3)?, double)? } else { self.constant(0, double.bits) };
        match (ty.bits, mad, ty.signed()) {
            (32, false, true) => self.emit(Op::Mixed(Mixed::MulWideS, d, a, b, c)),
            (32, false, false) => self.emit(Op::Mixed(Mixed::MulWideU, d, a, b, c)),
            (32, true, true) => self.emit(Op::Mixed(Mixed::MadWideS, d, a, b, c)),
            (32, true, false) => self.emit(Op::Mixed(Mixed::MadWideU, d, a, b, c)),
            (16, _, true) => {
                let f: LaneFn = |_, a, b, c| {
                    let p = i64::from(a as i16) * i64::from(b as i16);
                    int::low(c.wrapping_add(p as u64), 32)
                };
                self.emit(Op::Lane { f, m: 0, d, a, b, c, wide: 0 });
            }
            (16, _, false) => {
                let f: LaneFn = |_, a, b, c| int::low(c.wrapping_add(a * b), 32);
                self.emit(Op::Lane { f, m: 0, d, a, b, c, wide: 0 });
            }
            _ => return Err("no such width".into()),
        }
        Ok(())
    }

    fn carry(&mut self, root: &str, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let part = m.take_any(&["lo", "hi"]);
        let take = matches!(root, "addc" | "subc" | "madc");
        let give = m.take("cc");
        let ty = m.ty()?;
        let k = match (root, part) {
            ("add" | "addc", _) => Carry::Add,
            ("sub" | "subc", _) => Carry::Sub,
            ("mad" | "madc", Some("lo")) => Carry::MadLo,
            ("mad" | "madc", Some("hi")) => Carry::MadHi,
            _ => return Err("no such carrying operation".into()),
        };
        let mad = matches!(k, Carry::MadLo | Carry::MadHi);
        let (d, a, b) = self.three(i, ty)?;
        let c = if mad { self.src(self.arg(i, 3)?, ty)? } else { self.constant(0, ty.bits) };
        let op = CarryOp { k, bits: ty.bits, sign: ty.signed(), take, give, d, a, b, c };
        self.emit(Op::Carry(Box::new(op)));
        Ok(())
    }

    fn logic(&mut self, root: &str, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let ty = m.ty()?;
        if ty.kind == Kind::Pred {
            let d = self.pdst(self.arg(i, 0)?)?;
            let a = self.psrc(self.arg(i, 1)?)?;
            match root {
                "not" => {
                    let flipped = match a {
                        PSrc::Reg(p, n) => PSrc::Reg(p, !n),
                        PSrc::Fixed(v) => PSrc::Fixed(!v),
                    };
                    self.emit(Op::PMov(d, flipped));
                }
                "cnot" => return Err("no such predicate operation".into()),
                _ => {
                    let b = self.psrc(self.arg(i, 2)?)?;
                    let k = match root {
                        "and" => BoolOp::And,
                        "or" => BoolOp::Or,
                        _ => BoolOp::Xor,
                    };
                    self.emit(Op::PLogic(k, d, a, b));
                }
            }
            return Ok(());
        }
        let pair = match root {
            "and" => (Bin32::And, Bin64::And),
            "or" => (Bin32::Or, Bin64::Or),
            "xor" => (Bin32::Xor, Bin64::Xor),
            "not" if ty.bits == 32 => {
                let d = self.dst(self.arg(i, 0)?, 32)?;
                let a = self.src(self.arg(i, 1)?, ty)?;
                self.emit(Op::Un(Un::Not32, d, a));
                return Ok(());
            }
            _ => {
                let f = int::by_name(root).ok_or("no such operation")?;
                return self.lanes(i, f, int::pack(ty.bits, false), ty, 1);
            }
        };
        let (d, a, b) = self.three(i, ty)?;
        // 16-bit values are zero-extended, and stay so.
        self.emit(if ty.wide() { Op::Bin64(pair.1, d, a, b) } else { Op::Bin32(pair.0, d, a, b) });
        Ok(())
    }

    fn shift(&mut self, root: &str, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let ty = m.ty()?;
        let d = self.dst(self.arg(i, 0)?, ty.bits)?;
        let a = self.src(self.arg(i, 1)?, ty)?;
        let b = self.src(self.arg(i, 2)?, B32)?;
        let (left, s) = (root == "shl", ty.signed());
        match ty.bits {
            32 => {
                let k = if left {
                    Bin32::Shl
                } else if s {
                    Bin32::ShrS
                } else {
                    Bin32::ShrU
                };
                self.emit(Op::Bin32(k, d, a, b));
            }
            64 => {
                let k = if left {
                    Mixed::Shl64
                } else if s {
                    Mixed::ShrS64
                } else {
                    Mixed::ShrU64
                };
                let c = self.constant(0, 64);
                self.emit(Op::Mixed(k, d, a, b, c));
            }
            _ => {
                let f = int::by_name(root).ok_or("no such shift")?;
                let c = self.constant(0, 32);
                self.emit(Op::Lane { f, m: int::pack(ty.bits, s), d, a, b, c, wide: 0 });
            }
        }
        Ok(())
    }

    fn bits(&mut self, root: &str, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let zero = self.constant(0, 32);
        let (mut name, mut own) = (root.to_string(), None);
        match root {
            "prmt" => {
                let modes = ["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"];
                let mode = m.take_any(&modes);
                let code = mode.map_or(0, |x| 1 + modes.iter().position(|y| *y == x).unwrap_or(0));
                own = Some((code as u32) << OWN);
            }
            "shf" => {
                let side = m.take_any(&["l", "r"]).ok_or("no direction")?;
                let mode = m.take_any(&["wrap", "clamp"]).ok_or("no mode")?;
                name = format!("shf.{side}.{mode}");
            }
            "szext" | "bmsk" => {
                name = format!("{root}.{}", m.take_any(&["wrap", "clamp"]).ok_or("no mode")?);
            }
            "bfind" if m.take("shiftamt") => name = "bfind.shiftamt".into(),
            "dp2a" => {
                let high = m.take_any(&["lo", "hi"]) == Some("hi");
                own = Some(if high { 4 << OWN } else { 0 });
            }
            _ => {}
        }
        let ty = m.ty()?;
        if matches!(root, "dp4a" | "dp2a") {
            let second = m.ty()?;
            let signs = u32::from(ty.signed()) | u32::from(second.signed()) << 1;
            let (d, a, b, c) = self.four(i, B32, B32)?;
            let f: LaneFn = if root == "dp4a" { int::dp4a } else { int::dp2a };
            let own = own.unwrap_or(0) | signs << OWN;
            self.emit(Op::Lane { f, m: own, d, a, b, c, wide: 0 });
            return Ok(());
        }
        let f = int::by_name(&name).ok_or("no such operation")?;
        let own = own.unwrap_or(int::pack(ty.bits, ty.signed()));
        // Counts are 32 bits whatever is counted.
        let counts = matches!(root, "popc" | "clz" | "bfind");
        let d = self.dst(self.arg(i, 0)?, if counts { 32 } else { ty.bits })?;
        let a = self.src(self.arg(i, 1)?, ty)?;
        let mut wide = if ty.wide() { WA | if counts { 0 } else { WD } } else { 0 };
        let (mut b, mut c) = (zero, zero);
        if i.args.len() > 2 {
            b = self.src(self.arg(i, 2)?, B32)?;
        }
        if i.args.len() > 3 {
            c = self.src(self.arg(i, 3)?, B32)?;
        }
        if ty.bits < 32 {
            wide = 0;
        }
        self.emit(Op::Lane { f, m: own, d, a, b, c, wide });
        Ok(())
    }

    fn lop3(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let boolean = m.take_any(&["or", "and"]);
        m.ty()?;
        let (d, p) = self.pair(self.arg(i, 0)?);
        let (d, p) = (self.dst(d, 32)?, p.map(|p| self.pdst(p)).transpose()?);
        let a = self.src(self.arg(i, 1)?, B32)?;
        let b = self.src(self.arg(i, 2)?, B32)?;
        let c = self.src(self.arg(i, 3)?, B32)?;
        let Operand::Int(lut) = self.arg(i, 4)? else {
            return Err("the look-up table is no number".into());
        };
        self.emit(Op::Lop3(*lut as u8, d, a, b, c));
        if let (Some(p), Some(boolean)) = (p, boolean) {
            let q = self.psrc(self.arg(i, 5)?)?;
            let zero = self.constant(0, 32);
            let k = if boolean == "or" { BoolOp::Or } else { BoolOp::And };
            self.emit(Op::SetP {
                t: CmpType::U32,
                cmp: Cmp::Ne,
                p,
                q: NONE,
                a: d,
                b: zero,
                src: Some((k, q)),
            });
        }
        Ok(())
    }

    /// The bits that a register of this class holds.
    pub(super) fn class_bits(&self, r: u32) -> u32 {
        match self.class(r) {
            Class::Pred => 1,
            Class::W16 => 16,
            Class::W32 => 32,
            Class::W64 => 64,
            Class::W128 => 128,
        }
    }

    /// A row of an operand whose width is its register's own.
    pub(super) fn any_src(&mut self, op: &Operand, least_bits: u32) -> Result<(R, bool)> {
        let bits = match op {
            Operand::Reg(r) => self.class_bits(*r),
            _ => least_bits.max(32),
        };
        let ty = if bits == 64 { B64 } else { Ty { bits, ..B32 } };
        Ok((self.src(op, ty)?, bits == 64))
    }
}
