//! `mma.sync`: the shapes that compilers use.

use super::{B32, Decoder, Mods, Result};
use crate::ast::{Instr, Operand};
use crate::ir::{Mma, MmaType, Op, R};

impl Decoder<'_> {
    pub(super) fn matrix(&mut self, root: &str, i: &Instr, m: &mut Mods<'_>) -> Result<bool> {
        if root != "mma" {
            return Ok(false);
        }
        m.take("sync");
        m.take("aligned");
        let shape = m.next().unwrap_or("");
        if !(m.take("row") && m.take("col")) {
            return Err("only row by column products are implemented".into());
        }
        let mut names = Vec::new();
        while let Some(name) = m.next() {
            names.push(name);
        }
        let saturate = names.contains(&"satfinite");
        names.retain(|n| *n != "satfinite");
        let [d, a, b, c] = names[..] else { return Err("four types belong here".into()) };
        if d != c {
            return Err("accumulators of two types are not implemented".into());
        }
        let kind = |name| {
            Some(match name {
                "f16" => MmaType::F16,
                "bf16" => MmaType::Bf16,
                "tf32" => MmaType::Tf32,
                "s8" => MmaType::S8,
                "u8" => MmaType::U8,
                "f64" => MmaType::F64,
                _ => return None,
            })
        };
        let (Some(a_type), Some(b_type)) = (kind(a), kind(b)) else {
            return Err("element types that are not implemented".into());
        };
        let (n, k) = match (shape, a) {
            ("m16n8k16", "f16" | "bf16") => (8, 16),
            ("m16n8k8", "f16" | "bf16" | "tf32") => (8, 8),
            ("m16n8k4", "tf32") => (8, 4),
            ("m16n8k32", "s8" | "u8") => (8, 32),
            ("m16n8k16", "s8" | "u8") => (8, 16),
            _ => return Err(format!("shape `{shape}` of `{a}` is not implemented")),
        };
        let half = d == "f16";
        let fits = match a_type {
            MmaType::F16 => matches!(d, "f16" | "f32"),
            MmaType::S8 | MmaType::U8 => d == "s32" && matches!(b, "s8" | "u8"),
            _ => d == "f32",
        };
        if !fits || (a != b && d != "s32") {
            return Err("a mix of types that is not implemented".into());
        }
        let per_row: u32 = match a_type {
            MmaType::Tf32 => 1,
            MmaType::S8 | MmaType::U8 => 4,
            _ => 2,
        };
        let acc = if half { 2 } else { 4 };
        let d = self.fragment(self.arg(i, 0)?, acc, true)?;
        let a = self.fragment(self.arg(i, 1)?, 16 * k / 32 / per_row, false)?;
        let b = self.fragment(self.arg(i, 2)?, n * k / 32 / per_row, false)?;
        let c = self.fragment(self.arg(i, 3)?, acc, false)?;
        let m = u32::from(saturate);
        self.emit(Op::Mma(Box::new(Mma { k, a_type, b_type, half, m, d, a, b, c })));
        Ok(true)
    }

    fn fragment(&mut self, op: &Operand, count: u32, write: bool) -> Result<Box<[R]>> {
        let items = match op {
            Operand::Vec(items) => items.as_slice(),
            one => std::slice::from_ref(one),
        };
        if items.len() != count as usize {
            return Err(format!("{count} registers belong here"));
        }
        items.iter().map(|op| if write { self.dst(op, 32) } else { self.src(op, B32) }).collect()
    }
}
