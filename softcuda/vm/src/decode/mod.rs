//! From parsed instructions to [`Op`]s: types, operands and constants are
//! resolved here, once, so that `exec` decides nothing twice.

mod alu;
mod compare;
mod control;
mod convert;
mod matrix;
mod memory;
mod types;

use crate::PtxError;
use crate::ast::{Class, Function, Instr, Operand, SReg, Space, Sym, Unit};
use crate::ir::{CONST, FuncInfo, Inst, NONE, Op, P, PSrc, Place, R, Row, Slot};
use crate::parse::FUNCTION_BASE;
use crate::regs::{self, RegMap};
use std::collections::HashMap;
use types::{B16, B32, B64, Kind, Mods, Ty};

/// An instruction that cannot be decoded, and why; the line is added later.
pub(super) type Result<T> = std::result::Result<T, String>;

/// Code and tables of one kernel.
pub(crate) struct Decoded {
    pub code: Vec<Inst>,
    pub consts: Vec<Row>,
    pub funcs: Vec<FuncInfo>,
    pub static_shared: u32,
    pub dynamic_align: u32,
    pub recursive: bool,
    pub unsupported: Option<PtxError>,
}

/// Constants, each broadcast to a row, without duplicates.
#[derive(Default)]
struct Consts {
    rows: Vec<Row>,
    seen: HashMap<(u64, bool), R>,
}

impl Consts {
    fn get(&mut self, value: u64, wide: bool) -> R {
        if let Some(&r) = self.seen.get(&(value, wide)) {
            return r;
        }
        let r = CONST | self.rows.len() as u32;
        let (low, high) = (value as u32, (value >> 32) as u32);
        if wide {
            let mut row = [0; 32];
            for pair in row.chunks_exact_mut(2) {
                pair.copy_from_slice(&[low, high]);
            }
            self.rows.extend([Row(row), Row(row)]);
        } else {
            self.rows.push(Row([low; 32]));
        }
        self.seen.insert((value, wide), r);
        r
    }
}

/// Rows kept free after a function's own for values of one instruction.
const TEMP_ROWS: u32 = 16;

/// Decodes one function of one kernel.
pub(super) struct Decoder<'a> {
    unit: &'a Unit,
    addresses: &'a [u64],
    f: &'a Function,
    map: RegMap,
    temps: u32,
    code: &'a mut Vec<Inst>,
    consts: &'a mut Consts,
    /// Each shared variable's offset in this kernel.
    shared: &'a HashMap<u32, u32>,
    /// Module functions to this kernel's.
    local: &'a HashMap<usize, u32>,
    line: u32,
    guard: u32,
}

/// The functions a kernel may reach, itself first, and whether it can recurse.
fn reachable(unit: &Unit, root: usize) -> (Vec<usize>, bool) {
    let mut order = vec![root];
    let mut seen = vec![false; unit.functions.len()];
    seen[root] = true;
    let (mut at, mut indirect, mut calls) = (0, false, false);
    while at < order.len() {
        let f = &unit.functions[order[at]];
        at += 1;
        for instr in f.instrs.iter().filter(|i| i.root() == "call") {
            let mut direct = false;
            for op in &instr.args {
                if let Operand::Name(name, _) = op
                    && let Some(callee) = unit.function(name)
                {
                    direct = true;
                    calls |= unit.functions[callee].has_body;
                    if !seen[callee] && unit.functions[callee].has_body {
                        seen[callee] = true;
                        order.push(callee);
                    }
                }
            }
            if !direct && !indirect {
                indirect = true;
                calls = true;
                for (i, f) in unit.functions.iter().enumerate() {
                    if !f.entry && f.has_body && !seen[i] {
                        seen[i] = true;
                        order.push(i);
                    }
                }
            }
        }
    }
    (order, calls)
}

fn shared_symbols(f: &Function, out: &mut Vec<u32>) {
    fn visit(op: &Operand, out: &mut Vec<u32>) {
        match op {
            Operand::Sym(Sym::Shared(v), _)
            | Operand::Addr(crate::ast::Base::Sym(Sym::Shared(v)), _) => out.push(*v),
            Operand::Vec(items) | Operand::List(items) => {
                items.iter().for_each(|o| visit(o, out));
            }
            _ => {}
        }
    }
    for instr in &f.instrs {
        instr.args.iter().for_each(|o| visit(o, out));
    }
}

/// Lays out the shared variables that the functions use: sized ones in order
/// of declaration, then the dynamic ones, which all start at the same place.
fn shared_layout(unit: &Unit, functions: &[usize]) -> Result<(HashMap<u32, u32>, u32, u32)> {
    let mut used = Vec::new();
    for &f in functions {
        shared_symbols(&unit.functions[f], &mut used);
    }
    used.sort_unstable();
    used.dedup();
    let (mut next, mut dynamic_align, mut out) = (0u64, 1u32, HashMap::new());
    for &v in &used {
        let var = &unit.shared[v as usize];
        if var.dynamic {
            dynamic_align = dynamic_align.max(var.align);
            continue;
        }
        next = next.next_multiple_of(u64::from(var.align));
        out.insert(v, next as u32);
        next += var.size;
        if next > 1 << 24 {
            return Err("too much shared memory".into());
        }
    }
    let total = (next as u32).next_multiple_of(dynamic_align);
    for &v in used.iter().filter(|&&v| unit.shared[v as usize].dynamic) {
        out.insert(v, total);
    }
    Ok((out, total, dynamic_align))
}

pub(crate) fn kernel(unit: &Unit, addresses: &[u64], root: usize) -> Decoded {
    let (order, recursive) = reachable(unit, root);
    let mut out = Decoded {
        code: Vec::new(),
        consts: Vec::new(),
        funcs: Vec::new(),
        static_shared: 0,
        dynamic_align: 1,
        recursive,
        unsupported: None,
    };
    let shared = match shared_layout(unit, &order) {
        Ok((shared, total, align)) => {
            (out.static_shared, out.dynamic_align) = (total, align);
            shared
        }
        Err(message) => {
            out.unsupported = Some(PtxError::new(unit.functions[root].line, message));
            return out;
        }
    };
    let local: HashMap<usize, u32> =
        order.iter().enumerate().map(|(i, &f)| (f, i as u32)).collect();
    let mut consts = Consts::default();
    for &index in &order {
        let f = &unit.functions[index];
        if let (None, Some(e)) = (&out.unsupported, &f.unsupported) {
            out.unsupported = Some(e.clone());
        }
        let mut decoder = Decoder {
            unit,
            addresses,
            f,
            map: regs::allocate(f),
            temps: 0,
            code: &mut out.code,
            consts: &mut consts,
            shared: &shared,
            local: &local,
            line: f.line,
            guard: NONE,
        };
        match decoder.function(index as u32) {
            Ok(info) => out.funcs.push(info),
            Err(e) => {
                out.unsupported.get_or_insert(e);
                out.funcs.push(FuncInfo::default());
            }
        }
    }
    out.consts = consts.rows;
    out
}

impl Decoder<'_> {
    fn function(&mut self, module_index: u32) -> std::result::Result<FuncInfo, PtxError> {
        let entry = self.code.len() as u32;
        let mut starts = Vec::with_capacity(self.f.instrs.len() + 1);
        let f = self.f;
        for instr in &f.instrs {
            starts.push(self.code.len() as u32);
            self.line = instr.line;
            self.temps = 0;
            self.guard = match instr.guard {
                Some((r, negated)) => self.map.slot[r as usize] << 1 | u32::from(negated),
                None => NONE,
            };
            self.instruction(instr).map_err(|why| {
                let mut text: String = instr.text.chars().take(120).collect();
                if text.len() < instr.text.len() {
                    text.push_str("...");
                }
                PtxError::new(
                    instr.line,
                    format!("unsupported instruction `{}`: {why} in `{text}`", instr.op),
                )
            })?;
        }
        starts.push(self.code.len() as u32);
        self.guard = NONE;
        self.emit(Op::Ret);
        // Branches hold instruction numbers until now.
        for inst in &mut self.code[entry as usize..] {
            match &mut inst.op {
                Op::Bra(target) => *target = starts[*target as usize],
                Op::BrxIdx(_, table) => {
                    table.iter_mut().for_each(|t| *t = starts[*t as usize]);
                }
                _ => {}
            }
        }
        Ok(FuncInfo {
            entry,
            rows: self.map.rows + TEMP_ROWS,
            preds: self.map.preds,
            frame_bytes: f.frame_bytes,
            params: if f.entry { Box::default() } else { self.slots(&f.params) },
            rets: self.slots(&f.rets),
            module_index,
        })
    }

    fn slots(&self, formals: &[crate::ast::Formal]) -> Box<[Slot]> {
        let slot = |formal: &crate::ast::Formal| {
            let place = match formal.reg {
                None => Place::Frame(formal.offset),
                Some(r) => self.place(r),
            };
            Slot { place, size: formal.size }
        };
        formals.iter().map(slot).collect()
    }

    fn place(&self, r: u32) -> Place {
        let slot = self.map.slot[r as usize];
        match self.f.regs[r as usize] {
            Class::Pred => Place::Pred(slot),
            Class::W16 | Class::W32 => Place::Row32(slot),
            Class::W64 | Class::W128 => Place::Row64(slot),
        }
    }

    fn emit(&mut self, op: Op) {
        self.code.push(Inst { op, guard: self.guard, line: self.line });
    }

    fn instruction(&mut self, instr: &Instr) -> Result<()> {
        let mut mods = Mods::new(&instr.op);
        let root = instr.root();
        let done = self.alu(root, instr, &mut mods)?
            || self.convert(root, instr, &mut mods)?
            || self.memory(root, instr, &mut mods)?
            || self.control(root, instr, &mut mods)?
            || self.matrix(root, instr, &mut mods)?;
        if !done {
            return Err("no such instruction is implemented".into());
        }
        mods.finish()
    }

    /// A row for a value that lives for one instruction.
    fn temp(&mut self, wide: bool) -> R {
        let rows = if wide { 2 } else { 1 };
        // Sources of one instruction are few; wrapping never meets a live one.
        if self.temps + rows > TEMP_ROWS {
            self.temps = 0;
        }
        let r = self.map.rows + self.temps;
        self.temps += rows;
        r
    }

    fn arg<'i>(&self, instr: &'i Instr, i: usize) -> Result<&'i Operand> {
        instr.args.get(i).ok_or_else(|| "too few operands".to_string())
    }

    fn class(&self, r: u32) -> Class {
        self.f.regs[r as usize]
    }

    fn reg(&self, r: u32, bits: u32) -> Result<R> {
        let have = match self.class(r) {
            Class::Pred => return Err("a predicate where a value belongs".into()),
            Class::W16 => 16,
            Class::W32 => 32,
            Class::W64 => 64,
            Class::W128 => 128,
        };
        if have == bits.max(16) {
            Ok(self.map.slot[r as usize])
        } else {
            Err(format!("a {have}-bit register where {bits} bits belong"))
        }
    }

    fn dst(&mut self, op: &Operand, bits: u32) -> Result<R> {
        match op {
            Operand::Reg(r) => self.reg(*r, bits),
            Operand::Sink => Ok(self.temp(bits == 64)),
            _ => Err("the destination is no register".into()),
        }
    }

    fn constant(&mut self, value: u64, bits: u32) -> R {
        self.consts.get(crate::lanes::int::low(value, bits), bits == 64)
    }

    /// Emits something that every lane needs, guard or not.
    fn unguarded(&mut self, op: Op) {
        let guard = std::mem::replace(&mut self.guard, NONE);
        self.emit(op);
        self.guard = guard;
    }

    fn src(&mut self, op: &Operand, ty: Ty) -> Result<R> {
        let bits = ty.bits;
        match op {
            Operand::Reg(r) => self.reg(*r, bits),
            Operand::Int(v) if ty.is_float() => Ok(match bits {
                32 => self.constant(u64::from((*v as i64 as f32).to_bits()), 32),
                _ => self.constant((*v as i64 as f64).to_bits(), 64),
            }),
            Operand::Int(v) => Ok(self.constant(*v, bits)),
            Operand::F32(v) if bits == 64 && ty.is_float() => {
                Ok(self.constant(f64::from(f32::from_bits(*v)).to_bits(), 64))
            }
            Operand::F32(v) => Ok(self.constant(u64::from(*v), bits)),
            Operand::F64(v) if bits == 32 => {
                Ok(self.constant(u64::from((f64::from_bits(*v) as f32).to_bits()), 32))
            }
            Operand::F64(v) => Ok(self.constant(*v, bits)),
            Operand::Special(s) => self.special(*s, bits),
            Operand::Sym(sym, offset) => self.symbol(*sym, *offset, bits),
            Operand::Name(name, _) => self.function_address(name, bits),
            _ => Err("an operand of this form does not belong here".into()),
        }
    }

    fn special(&mut self, s: SReg, bits: u32) -> Result<R> {
        let wide = matches!(s, SReg::Clock64 | SReg::GlobalTimer | SReg::GridId);
        if let SReg::Fixed(v) = s {
            return Ok(self.constant(u64::from(v), bits));
        }
        let d = self.temp(wide);
        self.unguarded(Op::SReg(s, d));
        match (wide, bits) {
            (true, 64) | (false, 32) => Ok(d),
            (false, 16) => Ok(d),
            (false, 64) => {
                let w = self.temp(true);
                self.unguarded(Op::Un(crate::ir::Un::U32To64, w, d));
                Ok(w)
            }
            _ => {
                let n = self.temp(false);
                self.unguarded(Op::Un(crate::ir::Un::Low32, n, d));
                Ok(n)
            }
        }
    }

    /// A variable's address within its own state space.
    fn symbol(&mut self, sym: Sym, offset: i64, bits: u32) -> Result<R> {
        let (space, value) = self.symbol_value(sym, offset)?;
        if space == Space::Local {
            let d = self.temp(bits == 64);
            self.unguarded(Op::FrameAddr { d, wide: bits == 64, offset: value as u32 });
            return Ok(d);
        }
        Ok(self.constant(value, bits))
    }

    fn symbol_value(&self, sym: Sym, offset: i64) -> Result<(Space, u64)> {
        let (space, at) = match sym {
            Sym::Global(v) => {
                let constant = self.unit.globals[v as usize].constant;
                let space = if constant { Space::Const } else { Space::Global };
                (space, self.addresses[v as usize])
            }
            Sym::Shared(v) => match self.shared.get(&v) {
                Some(&at) => (Space::Shared, u64::from(at)),
                None => return Err("a shared variable without a place".into()),
            },
            Sym::Frame(at) => (Space::Local, u64::from(at)),
            Sym::Param(at) => (Space::Param, u64::from(at)),
        };
        Ok((space, at.wrapping_add(offset as u64)))
    }

    fn function_address(&mut self, name: &str, bits: u32) -> Result<R> {
        match self.unit.function(name) {
            Some(f) if bits == 64 => Ok(self.constant(FUNCTION_BASE + f as u64, 64)),
            _ => Err(format!("`{name}` is not defined")),
        }
    }

    fn pdst(&self, op: &Operand) -> Result<P> {
        match op {
            Operand::Reg(r) if self.class(*r) == Class::Pred => Ok(self.map.slot[*r as usize]),
            Operand::Sink => Ok(NONE),
            _ => Err("a predicate register belongs here".into()),
        }
    }

    fn psrc(&self, op: &Operand) -> Result<PSrc> {
        match op {
            Operand::Reg(r) if self.class(*r) == Class::Pred => {
                Ok(PSrc::Reg(self.map.slot[*r as usize], false))
            }
            Operand::Not(r) if self.class(*r) == Class::Pred => {
                Ok(PSrc::Reg(self.map.slot[*r as usize], true))
            }
            Operand::Int(v) => Ok(PSrc::Fixed(*v != 0)),
            _ => Err("a predicate belongs here".into()),
        }
    }

    /// `d|p`, or `d` alone.
    fn pair<'i>(&self, op: &'i Operand) -> (&'i Operand, Option<&'i Operand>) {
        match op {
            Operand::Pair(a, b) => (a, Some(b)),
            other => (other, None),
        }
    }
}
