//! Types and the other suffixes of opcodes.

use super::Result;
use crate::lanes::{FTZ, NAN, RELU, RM, RN, RNA, RP, RZ, SAT, XORSIGN};

/// What kind of number a type holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Pred,
    Bits,
    Unsigned,
    Signed,
    Float,
    /// Brain float: bf16 and its pair.
    Brain,
    /// Two integers of 16 bits each.
    Pair,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ty {
    pub kind: Kind,
    pub bits: u32,
    /// Two halves of 16 bits.
    pub packed: bool,
}

impl Ty {
    pub(super) fn parse(name: &str) -> Option<Ty> {
        let ty = |kind, bits, packed| Some(Ty { kind, bits, packed });
        match name {
            "pred" => ty(Kind::Pred, 1, false),
            "f16x2" => ty(Kind::Float, 32, true),
            "bf16x2" => ty(Kind::Brain, 32, true),
            "bf16" => ty(Kind::Brain, 16, false),
            "u16x2" | "s16x2" => ty(Kind::Pair, 32, true),
            _ => {
                let kind = match name.as_bytes().first()? {
                    b'b' => Kind::Bits,
                    b'u' => Kind::Unsigned,
                    b's' => Kind::Signed,
                    b'f' => Kind::Float,
                    _ => return None,
                };
                let bits = name[1..].parse().ok()?;
                let fits = matches!(bits, 8 | 16 | 32 | 64 | 128)
                    && !(kind == Kind::Float && matches!(bits, 8 | 128))
                    && !name[1..].starts_with(['0', '+']);
                fits.then_some(Ty { kind, bits, packed: false })
            }
        }
    }

    pub(super) fn is_int(self) -> bool {
        matches!(self.kind, Kind::Bits | Kind::Unsigned | Kind::Signed)
    }

    pub(super) fn signed(self) -> bool {
        self.kind == Kind::Signed
    }

    /// Whether it is f32 or f64; f16 and packed types are not.
    pub(super) fn is_float(self) -> bool {
        self.kind == Kind::Float && self.bits >= 32 && !self.packed
    }

    pub(super) fn is_half(self) -> bool {
        self.kind == Kind::Brain || (self.kind == Kind::Float && (self.bits == 16 || self.packed))
    }

    pub(super) fn wide(self) -> bool {
        self.bits == 64
    }
}

/// The suffixes of an opcode; each must be taken for the instruction to decode.
pub(super) struct Mods<'a> {
    parts: Vec<(&'a str, bool)>,
}

impl<'a> Mods<'a> {
    pub(super) fn new(op: &'a str) -> Self {
        Self { parts: op.split('.').skip(1).map(|p| (p, false)).collect() }
    }

    pub(super) fn take(&mut self, name: &str) -> bool {
        match self.parts.iter_mut().find(|p| p.0 == name && !p.1) {
            Some(part) => {
                part.1 = true;
                true
            }
            None => false,
        }
    }

    pub(super) fn take_any(&mut self, names: &[&'static str]) -> Option<&'static str> {
        names.iter().copied().find(|n| self.take(n))
    }

    /// Takes every suffix that starts so: cache hints.
    pub(super) fn take_prefix(&mut self, prefix: &str) -> bool {
        let mut hit = false;
        for part in self.parts.iter_mut().filter(|p| p.0.starts_with(prefix)) {
            part.1 = true;
            hit = true;
        }
        hit
    }

    /// The next suffix that is a type.
    pub(super) fn ty(&mut self) -> Result<Ty> {
        self.try_ty().ok_or_else(|| "no type".to_string())
    }

    pub(super) fn try_ty(&mut self) -> Option<Ty> {
        let part = self.parts.iter_mut().find(|p| !p.1 && Ty::parse(p.0).is_some())?;
        part.1 = true;
        Ty::parse(part.0)
    }

    /// The first suffix not taken yet, which is then taken.
    pub(super) fn next(&mut self) -> Option<&'a str> {
        let part = self.parts.iter_mut().find(|p| !p.1)?;
        part.1 = true;
        Some(part.0)
    }

    /// Rounding, flushing and clamping, as the lane functions take them.
    pub(super) fn flags(&mut self) -> u32 {
        let mut m = match self.take_any(&["rn", "rz", "rm", "rp", "rna"]) {
            Some("rz") => RZ,
            Some("rm") => RM,
            Some("rp") => RP,
            Some("rna") => RNA,
            _ => RN,
        };
        for (name, bit) in
            [("ftz", FTZ), ("sat", SAT), ("relu", RELU), ("NaN", NAN), ("xorsign", XORSIGN)]
        {
            if self.take(name) {
                m |= bit;
            }
        }
        self.take("abs");
        m
    }

    pub(super) fn finish(&self) -> Result<()> {
        match self.parts.iter().find(|p| !p.1) {
            Some((part, _)) => Err(format!("modifier `.{part}` is unknown here")),
            None => Ok(()),
        }
    }
}

/// A type for operands that are plain bits.
pub(super) const B32: Ty = Ty { kind: Kind::Bits, bits: 32, packed: false };
pub(super) const B64: Ty = Ty { kind: Kind::Bits, bits: 64, packed: false };
pub(super) const B16: Ty = Ty { kind: Kind::Bits, bits: 16, packed: false };
