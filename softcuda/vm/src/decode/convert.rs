//! `mov`, `cvt`, `cvta` and other moves of values between shapes.

use super::alu::{WA, WD};
use super::{B16, B32, B64, Decoder, Kind, Mods, Result, Ty};
use crate::ast::{Instr, Operand, Space};
use crate::exec::window;
use crate::ir::{Bin64, Op, Un};
use crate::lanes::cvt::{self, Num};
use crate::lanes::{FTZ, LaneFn, RELU, RM, RN, RNA, ROUND, RP, RZ, SAT, half};

impl Decoder<'_> {
    pub(super) fn convert(&mut self, root: &str, i: &Instr, m: &mut Mods<'_>) -> Result<bool> {
        match root {
            "mov" => self.mov(i, m)?,
            "cvt" => self.cvt(i, m)?,
            "cvta" => self.cvta(i, m)?,
            "mapa" => {
                // Clusters of one block: an address maps to itself.
                m.take_prefix("shared");
                let ty = m.ty()?;
                let d = self.dst(self.arg(i, 0)?, ty.bits)?;
                let a = self.src(self.arg(i, 1)?, ty)?;
                self.emit(Op::Un(if ty.wide() { Un::Mov64 } else { Un::Mov32 }, d, a));
            }
            "isspacep" => {
                let space = match m.next() {
                    Some("global") => Space::Global,
                    Some("shared" | "shared::cta" | "shared::cluster") => Space::Shared,
                    Some("local") => Space::Local,
                    Some("const") => Space::Const,
                    Some("param" | "param::entry") => Space::Param,
                    _ => return Err("no such space".into()),
                };
                let p = self.pdst(self.arg(i, 0)?)?;
                let a = self.src(self.arg(i, 1)?, B64)?;
                self.emit(Op::IsSpace { p, a, space });
            }
            "createpolicy" => {
                // Cache policies are hints; any value will do.
                while m.next().is_some() {}
                let d = self.dst(self.arg(i, 0)?, 64)?;
                let zero = self.constant(0, 64);
                self.emit(Op::Un(Un::Mov64, d, zero));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn mov(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let ty = m.ty()?;
        let (to, from) = (self.arg(i, 0)?, self.arg(i, 1)?);
        if ty.kind == Kind::Pred {
            let (p, src) = (self.pdst(to)?, self.psrc(from)?);
            self.emit(Op::PMov(p, src));
            return Ok(());
        }
        match (to, from) {
            (Operand::Vec(parts), _) => self.unpack(ty, parts, from),
            (_, Operand::Vec(parts)) => self.pack(ty, to, parts),
            _ if ty.bits == 128 => {
                let (Operand::Reg(d), Operand::Reg(a)) = (to, from) else {
                    return Err("no such 128-bit move".into());
                };
                let (d, a) = (self.reg(*d, 128)?, self.reg(*a, 128)?);
                self.emit(Op::Un(Un::Mov64, d, a));
                self.emit(Op::Un(Un::Mov64, d + 2, a + 2));
                Ok(())
            }
            _ => {
                let d = self.dst(to, ty.bits)?;
                let a = self.src(from, ty)?;
                self.emit(Op::Un(if ty.wide() { Un::Mov64 } else { Un::Mov32 }, d, a));
                Ok(())
            }
        }
    }

    fn unpack(&mut self, ty: Ty, parts: &[Operand], from: &Operand) -> Result<()> {
        let part_bits = ty.bits / parts.len().max(1) as u32;
        if ty.bits == 128 {
            let Operand::Reg(a) = from else { return Err("no 128-bit register".into()) };
            let a = self.reg(*a, 128)?;
            for (at, part) in parts.iter().enumerate() {
                let d = self.dst(part, 64)?;
                self.emit(Op::Un(Un::Mov64, d, a + 2 * at as u32));
            }
            return Ok(());
        }
        let a = self.src(from, Ty { kind: Kind::Bits, ..ty })?;
        let zero = self.constant(0, 32);
        for (at, part) in parts.iter().enumerate() {
            let d = self.dst(part, part_bits)?;
            let shift = self.constant(u64::from(part_bits) * at as u64, 32);
            let f: LaneFn = match part_bits {
                32 => |_, a, b, _| (a >> b) & 0xffff_ffff,
                16 => |_, a, b, _| (a >> b) & 0xffff,
                _ => |_, a, b, _| (a >> b) & 0xff,
            };
            let wide = if ty.wide() { WA } else { 0 };
            self.emit(Op::Lane { f, m: 0, d, a, b: shift, c: zero, wide });
        }
        Ok(())
    }

    fn pack(&mut self, ty: Ty, to: &Operand, parts: &[Operand]) -> Result<()> {
        if ty.bits == 128 {
            let Operand::Reg(d) = to else { return Err("no 128-bit register".into()) };
            let d = self.reg(*d, 128)?;
            for (at, part) in parts.iter().enumerate().take(2) {
                let a = self.src(part, B64)?;
                self.emit(Op::Un(Un::Mov64, d + 2 * at as u32, a));
            }
            return Ok(());
        }
        let part_bits = ty.bits / parts.len().max(1) as u32;
        let part_ty = match part_bits {
            32 => B32,
            16 => B16,
            8 => Ty { bits: 8, ..B16 },
            _ => return Err("no such parts".into()),
        };
        let d = self.dst(to, ty.bits)?;
        // Built aside, as a part may share the destination's register.
        let acc = self.temp(ty.wide());
        let wide = if ty.wide() { WD | WA } else { 0 };
        let zero = self.constant(0, ty.bits);
        for (at, part) in parts.iter().enumerate() {
            let b = self.src(part, part_ty)?;
            let from = if at == 0 { zero } else { acc };
            let into = if at + 1 == parts.len() { d } else { acc };
            let shift = self.constant(u64::from(part_bits) * at as u64, 32);
            let f: LaneFn = |_, a, b, c| a | b << c;
            self.emit(Op::Lane { f, m: 0, d: into, a: from, b, c: shift, wide });
        }
        Ok(())
    }

    fn cvt(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let integral = m.take_any(&["rni", "rzi", "rmi", "rpi"]);
        if m.take("pack") {
            return self.cvt_pack(i, m);
        }
        let mut flags = m.flags();
        if m.take("satfinite") {
            flags |= half::SATFINITE;
        }
        let names: Vec<&str> =
            i.op.split('.')
                .skip(1)
                .filter(|p| Ty::parse(p).is_some() || matches!(*p, "tf32" | "e4m3x2" | "e5m2x2"))
                .collect();
        let [to, from] = names[..] else { return Err("two types belong here".into()) };
        m.take(to);
        m.take(from);
        if let Some(f) = cvt::packed(&format!("{to}.{from}")) {
            return self.cvt_packed(i, f, flags, to, from);
        }
        let (Some(dst), Some(src)) = (num(to), num(from)) else {
            return Err("no such conversion".into());
        };
        if let Some(mode) = integral {
            flags |= match mode {
                "rni" => RN,
                "rmi" => RM,
                "rpi" => RP,
                _ => RZ,
            };
        } else if src.is_float() && !dst.is_float() && flags & ROUND == RN {
            flags |= RZ;
        }
        let d_op = self.arg(i, 0)?;
        let d_bits = match d_op {
            Operand::Reg(r) => self.class_bits(*r),
            _ => 32,
        };
        let d = self.dst(d_op, d_bits)?;
        let (a, a_wide) = self.any_src(self.arg(i, 1)?, bits_of(src))?;
        if let Some(k) = hot(dst, src, d_bits, a_wide, flags, integral.is_some()) {
            self.emit(Op::Un(k, d, a));
            return Ok(());
        }
        // Between floats of one type only `rni` and its like round.
        let own = cvt::pack(dst, src, d_bits, integral.is_some() && dst.is_float(), flags);
        let zero = self.constant(0, 32);
        let wide = if d_bits == 64 { WD } else { 0 } | if a_wide { WA } else { 0 };
        self.emit(Op::Lane { f: cvt::convert, m: own, d, a, b: zero, c: zero, wide });
        Ok(())
    }

    fn cvt_packed(&mut self, i: &Instr, f: LaneFn, flags: u32, to: &str, from: &str) -> Result<()> {
        let bits = if to.starts_with("e4") || to.starts_with("e5") { 16 } else { 32 };
        let d = self.dst(self.arg(i, 0)?, bits)?;
        let source = if from.starts_with('e') { B16 } else { B32 };
        let a = self.src(self.arg(i, 1)?, source)?;
        let zero = self.constant(0, 32);
        let b = if i.args.len() > 2 { self.src(self.arg(i, 2)?, B32)? } else { zero };
        // tf32's only rounding without a name is to nearest.
        let m = if flags & ROUND == RNA { flags & !ROUND | RNA } else { flags };
        self.emit(Op::Lane { f, m, d, a, b, c: zero, wide: 0 });
        Ok(())
    }

    /// `cvt.pack.sat.s8.s32.b32 d, a, b, c`: two values to the low bits of
    /// `d`, `c` shifted up above them.
    fn cvt_pack(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        m.take("sat");
        let (to, from) = (m.ty()?, m.ty()?);
        m.try_ty();
        if !to.is_int() || from.bits != 32 || to.bits > 16 {
            return Err("no such packed conversion".into());
        }
        let d = self.dst(self.arg(i, 0)?, 32)?;
        let a = self.src(self.arg(i, 1)?, B32)?;
        let b = self.src(self.arg(i, 2)?, B32)?;
        let c =
            if i.args.len() > 3 { self.src(self.arg(i, 3)?, B32)? } else { self.constant(0, 32) };
        let own = to.bits | u32::from(to.signed()) << 7;
        let f: LaneFn = |m, a, b, c| {
            let (bits, sign) = (m & 127, m & 128 != 0);
            let clamp = |v: u64| {
                let (low, high) = if sign {
                    (-(1i64 << (bits - 1)), (1 << (bits - 1)) - 1)
                } else {
                    (0, (1 << bits) - 1)
                };
                i64::from(v as u32 as i32).clamp(low, high) as u64 & ((1 << bits) - 1)
            };
            let low = clamp(a) << bits | clamp(b);
            if bits == 16 { low } else { (c << (2 * bits) | low) & 0xffff_ffff }
        };
        self.emit(Op::Lane { f, m: own, d, a, b, c, wide: 0 });
        Ok(())
    }

    /// Between a space's own addresses and generic ones: an addition.
    fn cvta(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let to = m.take("to");
        let space = m.next().unwrap_or("");
        let ty = m.ty()?;
        if !ty.wide() {
            return Err("only 64-bit addresses are supported".into());
        }
        let base = match space {
            "global" | "const" => 0,
            "shared" | "shared::cta" | "shared::cluster" => window::SHARED,
            "local" => window::LOCAL,
            "param" | "param::entry" => window::PARAM,
            _ => return Err("no such space".into()),
        };
        let d = self.dst(self.arg(i, 0)?, 64)?;
        let a = self.src(self.arg(i, 1)?, B64)?;
        if base == 0 {
            self.emit(Op::Un(Un::Mov64, d, a));
        } else {
            let base = self.constant(base, 64);
            let k = if to { Bin64::Sub } else { Bin64::Add };
            self.emit(Op::Bin64(k, d, a, base));
        }
        Ok(())
    }
}

fn bits_of(n: Num) -> u32 {
    match n {
        Num::U(bits) | Num::S(bits) => bits,
        Num::F16 | Num::BF16 => 16,
        Num::F32 => 32,
        Num::F64 => 64,
    }
}

fn num(name: &str) -> Option<Num> {
    let ty = Ty::parse(name)?;
    match (ty.kind, ty.bits, ty.packed) {
        (Kind::Unsigned | Kind::Bits, bits @ 8..=64, _) => Some(Num::U(bits)),
        (Kind::Signed, bits @ 8..=64, _) => Some(Num::S(bits)),
        (Kind::Float, 16, _) => Some(Num::F16),
        (Kind::Brain, 16, _) => Some(Num::BF16),
        (Kind::Float, 32, false) => Some(Num::F32),
        (Kind::Float, 64, _) => Some(Num::F64),
        _ => None,
    }
}

/// The conversions that have a vectorised form.
fn hot(dst: Num, src: Num, d_bits: u32, a_wide: bool, flags: u32, integral: bool) -> Option<Un> {
    let plain = flags & (SAT | RELU | FTZ | half::SATFINITE) == 0;
    if !plain {
        return None;
    }
    Some(match (dst, src) {
        (Num::U(64) | Num::S(64), Num::U(32)) if !a_wide => Un::U32To64,
        (Num::S(64) | Num::U(64), Num::S(32)) if !a_wide => Un::S32To64,
        (Num::U(32) | Num::S(32), Num::U(64) | Num::S(64)) if d_bits == 32 => Un::Low32,
        (Num::U(32) | Num::S(32), Num::U(32) | Num::S(32)) if d_bits == 32 && !a_wide => Un::Mov32,
        (Num::F32, Num::S(32)) if flags & ROUND == RN && !a_wide => Un::S32ToF32,
        (Num::F32, Num::U(32)) if flags & ROUND == RN && !a_wide => Un::U32ToF32,
        (Num::S(32), Num::F32) if flags & ROUND == RZ && d_bits == 32 => Un::F32ToS32,
        (Num::U(32), Num::F32) if flags & ROUND == RZ && d_bits == 32 => Un::F32ToU32,
        (Num::F64, Num::F32) if !integral => Un::F32ToF64,
        (Num::F32, Num::F64) if flags & ROUND == RN && !integral => Un::F64ToF32,
        (Num::F32, Num::F16) => Un::F16ToF32,
        (Num::F16, Num::F32) if flags & ROUND == RN => Un::F32ToF16,
        (Num::F32, Num::BF16) => Un::Bf16ToF32,
        _ => return None,
    })
}
