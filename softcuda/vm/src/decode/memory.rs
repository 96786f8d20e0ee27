//! Loads, stores, atomics, copies and fences.

use super::{B16, B32, B64, Decoder, Kind, Mods, Result, Ty};
use crate::ast::{Base, Class, Instr, Operand, Space, Sym};
use crate::exec::atomic;
use crate::ir::{AddrBase, Address, Atom, NONE, Op, R, Transfer, Widen};

/// Orderings, scopes and hints: accesses are as strong as any of them.
const STRONG: [&str; 6] = ["volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"];
const SCOPES: [&str; 4] = ["cta", "cluster", "gpu", "sys"];
const CACHE: [&str; 11] =
    ["ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "unified", "L1::no_allocate"];

fn hints(m: &mut Mods<'_>) -> bool {
    let strong = m.take_any(&STRONG).is_some();
    m.take_any(&SCOPES);
    while m.take_any(&CACHE).is_some() {}
    m.take_prefix("L1::");
    m.take_prefix("L2::");
    strong
}

fn space(m: &mut Mods<'_>) -> Space {
    let names = [
        ("global", Space::Global),
        ("const", Space::Const),
        ("shared", Space::Shared),
        ("shared::cta", Space::Shared),
        ("shared::cluster", Space::Shared),
        ("local", Space::Local),
        ("param", Space::Param),
        ("param::entry", Space::Param),
        ("param::func", Space::Param),
    ];
    names.iter().find(|(n, _)| m.take(n)).map_or(Space::Generic, |(_, s)| *s)
}

impl Decoder<'_> {
    pub(super) fn memory(&mut self, root: &str, i: &Instr, m: &mut Mods<'_>) -> Result<bool> {
        match root {
            "ld" | "ldu" => self.load(i, m)?,
            "st" => self.store(i, m)?,
            "atom" | "red" => self.atom(root == "red", i, m)?,
            "prefetch" | "prefetchu" | "discard" | "applypriority" => {
                while m.next().is_some() {}
                self.emit(Op::Nop);
            }
            "membar" | "fence" => {
                while m.next().is_some() {}
                self.emit(Op::Fence);
            }
            "cp" => self.cp_async(i, m)?,
            "ldmatrix" | "stmatrix" => self.ldmatrix(root == "stmatrix", i, m)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn address(&mut self, op: &Operand, space: Space) -> Result<Address> {
        let Operand::Addr(base, offset) = op else {
            return Err("an address belongs here".into());
        };
        let mut at = Address { space, base: AddrBase::None, offset: *offset };
        match base {
            Base::None => {}
            Base::Reg(r) => {
                let row = self.map.slot[*r as usize];
                at.base = match self.class(*r) {
                    Class::W64 => AddrBase::R64(row),
                    Class::W32 => AddrBase::R32(row),
                    _ => return Err("an address of this width".into()),
                };
                // A function's own parameters are in its frame.
                if space == Space::Param && !self.f.entry {
                    at.space = Space::Local;
                }
            }
            Base::Sym(sym) => {
                let (own, value) = self.symbol_value(*sym, 0)?;
                at.space = own;
                at.offset = offset.wrapping_add(value as i64);
                if matches!(sym, Sym::Frame(_)) {
                    at.base = AddrBase::Frame;
                }
            }
            Base::Name(name) => return Err(format!("`{name}` is not declared")),
        }
        Ok(at)
    }

    fn elements(op: &Operand, count: usize) -> Result<&[Operand]> {
        let items = match op {
            Operand::Vec(items) => items.as_slice(),
            one => std::slice::from_ref(one),
        };
        if items.len() == count { Ok(items) } else { Err(format!("{count} values belong here")) }
    }

    fn vector(m: &mut Mods<'_>) -> usize {
        match m.take_any(&["v2", "v4", "v8"]) {
            Some("v2") => 2,
            Some("v4") => 4,
            Some(_) => 8,
            None => 1,
        }
    }

    fn load(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let strong = hints(m);
        let space = space(m);
        let count = Self::vector(m);
        let ty = m.ty()?;
        let at = self.address(self.arg(i, 1)?, space)?;
        let items = Self::elements(self.arg(i, 0)?, count)?;
        if ty.bits == 128 {
            return self.load128(items, at, strong);
        }
        let mut rows = [NONE; 8];
        let mut widen = None;
        for (slot, item) in rows.iter_mut().zip(items) {
            match item {
                Operand::Sink => {}
                Operand::Reg(r) => {
                    let bits = self.class_bits(*r);
                    if bits < ty.bits.max(16) || bits > 64 {
                        return Err(format!("a {bits}-bit register cannot hold this"));
                    }
                    let w = match (bits, ty.signed() && ty.bits < bits) {
                        (64, false) => Widen::Zero64,
                        (64, true) => Widen::Sign64,
                        (32, true) => Widen::Sign32,
                        (16, true) => Widen::Sign16,
                        _ => Widen::Zero32,
                    };
                    if widen.is_some_and(|have| have != w) {
                        return Err("registers of different widths".into());
                    }
                    widen = Some(w);
                    *slot = self.map.slot[*r as usize];
                }
                _ => return Err("the destination is no register".into()),
            }
        }
        let widen = widen.unwrap_or(if ty.wide() { Widen::Zero64 } else { Widen::Zero32 });
        let wide = matches!(widen, Widen::Zero64 | Widen::Sign64);
        if at.space == Space::Param && at.base == AddrBase::None && count == 1 && rows[0] != NONE {
            let plain = matches!(widen, Widen::Zero32 | Widen::Zero64);
            if plain && (0..1 << 17).contains(&at.offset) {
                let (offset, size) = (at.offset as u32, (ty.bits / 8) as u8);
                self.emit(Op::LdParam { d: rows[0], offset, size, wide });
                return Ok(());
            }
        }
        let (size, count) = ((ty.bits / 8) as u8, count as u8);
        self.emit(Op::Load(Box::new(Transfer { at, size, count, widen, wide, strong, rows })));
        Ok(())
    }

    fn load128(&mut self, items: &[Operand], at: Address, strong: bool) -> Result<()> {
        let [Operand::Reg(r)] = items else { return Err("no such 128-bit load".into()) };
        let row = self.reg(*r, 128)?;
        let mut rows = [NONE; 8];
        (rows[0], rows[1]) = (row, row + 2);
        let widen = Widen::Zero64;
        self.emit(Op::Load(Box::new(Transfer {
            at,
            size: 8,
            count: 2,
            widen,
            wide: true,
            strong,
            rows,
        })));
        Ok(())
    }

    fn store(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let strong = hints(m);
        let space = space(m);
        let count = Self::vector(m);
        let ty = m.ty()?;
        let at = self.address(self.arg(i, 0)?, space)?;
        let items = Self::elements(self.arg(i, 1)?, count)?;
        let mut rows = [NONE; 8];
        let widen = Widen::Zero32;
        if ty.bits == 128 {
            let [Operand::Reg(r)] = items else { return Err("no such 128-bit store".into()) };
            let row = self.reg(*r, 128)?;
            (rows[0], rows[1]) = (row, row + 2);
            self.emit(Op::Store(Box::new(Transfer {
                at,
                size: 8,
                count: 2,
                widen,
                wide: true,
                strong,
                rows,
            })));
            return Ok(());
        }
        let mut wide = None;
        for (slot, item) in rows.iter_mut().zip(items) {
            let (row, w) = match item {
                Operand::Reg(_) => self.any_src(item, ty.bits)?,
                _ => {
                    let w = wide.unwrap_or(ty.wide());
                    let ty =
                        if w { Ty { bits: 64, ..ty } } else { Ty { bits: ty.bits.min(32), ..ty } };
                    (self.src(item, ty)?, w)
                }
            };
            if wide.is_some_and(|have| have != w) || (ty.wide() && !w) {
                return Err("registers of different widths".into());
            }
            wide = Some(w);
            *slot = row;
        }
        let (size, count) = ((ty.bits / 8) as u8, count as u8);
        let wide = wide.unwrap_or(false);
        self.emit(Op::Store(Box::new(Transfer { at, size, count, widen, wide, strong, rows })));
        Ok(())
    }

    fn atom(&mut self, red: bool, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        m.take_any(&["sem"]);
        hints(m);
        let space = space(m);
        m.take("noftz");
        let op = m
            .take_any(&["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"])
            .ok_or("no such atomic operation")?;
        m.take("noftz");
        let count = Self::vector(m);
        let ty = m.ty()?;
        let at = self.address(self.arg(i, if red { 0 } else { 1 })?, space)?;
        let f = atomic::by_name(
            op,
            ty.kind == Kind::Brain,
            ty.kind == Kind::Float,
            ty.signed(),
            ty.packed,
            ty.bits,
        )
        .ok_or("no such atomic operation on this type")?;
        let value_ty = match ty.bits {
            16 => B16,
            32 if ty.is_float() => ty,
            64 if ty.is_float() => ty,
            32 => B32,
            64 => B64,
            _ => return Err("no such width".into()),
        };
        let first = if red { 1 } else { 2 };
        let values = Self::elements(self.arg(i, first)?, count)?;
        let size = (ty.bits / 8) as u8;
        for (n, value) in values.iter().enumerate() {
            let d = if red {
                NONE
            } else {
                match &Self::elements(self.arg(i, 0)?, count)?[n] {
                    Operand::Sink => NONE,
                    op => self.dst(op, ty.bits)?,
                }
            };
            let b = self.src(value, value_ty)?;
            let c = if op == "cas" {
                self.src(self.arg(i, first + 1)?, value_ty)?
            } else {
                self.constant(0, ty.bits)
            };
            let mut at = at;
            at.offset = at.offset.wrapping_add(i64::from(size) * n as i64);
            self.emit(Op::Atom(Box::new(Atom { f, at, size, wide: ty.wide(), d, b, c })));
        }
        Ok(())
    }

    /// `cp.async`, done at once; its groups complete as soon as they are made.
    fn cp_async(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        if !m.take("async") || m.take("bulk") {
            return Err("only `cp.async` of threads is implemented".into());
        }
        if m.take_any(&["commit_group", "wait_group", "wait_all"]).is_some() {
            self.emit(Op::Nop);
            return Ok(());
        }
        if m.take("mbarrier") {
            return Err("`mbarrier` is not implemented".into());
        }
        hints(m);
        space(m);
        space(m);
        let dst = Box::new(self.address(self.arg(i, 0)?, Space::Shared)?);
        let src = Box::new(self.address(self.arg(i, 1)?, Space::Global)?);
        let Operand::Int(size @ (4 | 8 | 16)) = self.arg(i, 2)? else {
            return Err("the size must be 4, 8 or 16".into());
        };
        // A third number is the bytes to read; a predicate, whether to ignore them.
        let n: R = match i.args.get(3) {
            None => self.constant(*size, 32),
            Some(op) if self.psrc(op).is_ok() && !matches!(op, Operand::Int(_)) => {
                let (zero, all) = (self.constant(0, 32), self.constant(*size, 32));
                let (p, d) = (self.psrc(op)?, self.temp(false));
                self.emit(Op::Sel32(d, zero, all, p));
                d
            }
            Some(op @ Operand::Reg(r)) if self.class(*r) == Class::W64 => {
                // A cache policy.
                let _ = op;
                self.constant(*size, 32)
            }
            Some(op) => self.src(op, B32)?,
        };
        self.emit(Op::CpAsync { dst, src, size: *size as u8, n });
        Ok(())
    }

    fn ldmatrix(&mut self, store: bool, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        m.take("sync");
        m.take("aligned");
        m.take("m8n8");
        let count = match m.take_any(&["x1", "x2", "x4"]) {
            Some("x1") => 1,
            Some("x2") => 2,
            Some(_) => 4,
            None => return Err("no count".into()),
        };
        let trans = m.take("trans");
        let space = space(m);
        if m.ty()?.bits != 16 {
            return Err("only 16-bit matrices are implemented".into());
        }
        let (regs, addr) = if store { (1, 0) } else { (0, 1) };
        let at = Box::new(self.address(self.arg(i, addr)?, space)?);
        let mut rows = [NONE; 4];
        for (slot, item) in rows.iter_mut().zip(Self::elements(self.arg(i, regs)?, count)?) {
            *slot = if store { self.src(item, B32)? } else { self.dst(item, 32)? };
        }
        self.emit(Op::LdMatrix { at, count: count as u8, trans, store, rows });
        Ok(())
    }
}
