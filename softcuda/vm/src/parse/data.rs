//! Variables: of the module with their initialisers, of functions, and
//! registers.

use super::{Entity, Found, Linkage, Parser, Result, VARIABLE_BYTES_MAX, type_bytes};
use crate::GlobalVar;
use crate::ast::{Class, SharedVar, Sym};
use crate::error::PtxError;
use crate::lex::Tok;

/// A module variable may be larger than the text; this is the device's limit.
const GLOBAL_BYTES_MAX: u64 = 1 << 40;
/// Where function "addresses" lie: the index of the function is added.
pub(crate) const FUNCTION_BASE: u64 = 0x4300_0000_0000_0000;
/// Initialisers are stored in full; longer ones than this are refused.
const INIT_BYTES_MAX: u64 = 1 << 28;

/// A declaration's type, name and size.
pub(super) struct Decl<'a> {
    pub name: &'a str,
    /// The type's own name.
    pub elem: &'a str,
    pub elem_bytes: u32,
    pub align: u32,
    /// Bytes in all.
    pub size: u64,
    pub unsized_array: bool,
}

impl<'a> Parser<'a> {
    /// `.align 4 .v2 .b8 name[3][4]`, after the state space.
    pub(super) fn decl(&mut self) -> Result<Decl<'a>> {
        let (mut align, mut elem, mut lanes) = (0u32, None, 1u32);
        let line = self.lex.peek_line();
        let mut pointer = false;
        while let Tok::Dot(word) = self.lex.peek() {
            self.lex.next();
            match word {
                // After `.ptr` it is the alignment of what is pointed to.
                "align" if pointer => {
                    self.int32()?;
                }
                "align" => align = self.int32()?,
                "ptr" => pointer = true,
                "v2" => lanes = 2,
                "v4" => lanes = 4,
                // Attributes of pointers to parameters: `.ptr .global`.
                "global" | "const" | "shared" | "local" | "param" | "reg" => {}
                "attribute" => while !matches!(self.lex.next(), Tok::Punct(')') | Tok::End) {},
                "pred" => elem = Some((word, 0)),
                _ => match type_bytes(word) {
                    Some(bytes) => elem = Some((word, bytes)),
                    None => {
                        return Err(PtxError::new(line, format!("unsupported type `.{word}`")));
                    }
                },
            }
        }
        let Some((elem, elem_bytes)) = elem else {
            return self.unexpected("a type");
        };
        let name = self.ident()?;
        let unit = elem_bytes * lanes;
        let mut size = u64::from(unit);
        let mut unsized_array = false;
        while self.eat('[') {
            if self.eat(']') {
                unsized_array = true;
                continue;
            }
            let count = self.int()?;
            self.expect(']')?;
            size = match size.checked_mul(count) {
                Some(n) if n <= GLOBAL_BYTES_MAX => n,
                _ => return self.err(format!("variable `{name}` is too large")),
            };
        }
        let align = if align == 0 { unit.max(1) } else { align };
        if !align.is_power_of_two() || align > 1 << 16 {
            return Err(PtxError::new(line, format!("alignment {align} is no power of two")));
        }
        Ok(Decl { name, elem, elem_bytes, align, size, unsized_array })
    }

    pub(super) fn module_variable(&mut self, space: &str, linkage: Linkage) -> Result<()> {
        loop {
            let line = self.lex.peek_line();
            let decl = self.decl()?;
            if space == "shared" {
                self.shared_variable(&decl, linkage.external)?;
            } else {
                self.global_variable(&decl, space == "const", linkage.external, line)?;
            }
            if !self.eat(',') {
                break;
            }
        }
        self.expect(';')
    }

    pub(super) fn shared_variable(&mut self, decl: &Decl<'_>, external: bool) -> Result<()> {
        if decl.size > VARIABLE_BYTES_MAX {
            return self.err(format!("shared variable `{}` is too large", decl.name));
        }
        let index = self.unit.shared.len() as u32;
        let dynamic = decl.unsized_array || (external && decl.size == 0);
        let size = if dynamic { 0 } else { decl.size };
        self.unit.shared.push(SharedVar { size, align: decl.align, dynamic });
        self.declare(decl.name, Entity::Var(Sym::Shared(index)));
        Ok(())
    }

    fn global_variable(
        &mut self,
        decl: &Decl<'_>,
        constant: bool,
        external: bool,
        line: u32,
    ) -> Result<()> {
        let mut var = GlobalVar {
            name: decl.name.to_string(),
            size: if decl.unsized_array { 0 } else { decl.size },
            align: u64::from(decl.align),
            init: Vec::new(),
            constant,
            relocations: Vec::new(),
        };
        if self.eat('=') {
            self.initialiser(&mut var, decl)?;
            let length = var.init.len() as u64;
            if decl.unsized_array {
                var.size = length;
            } else if length > var.size {
                return Err(PtxError::new(
                    line,
                    format!("too many initialisers of `{}`", var.name),
                ));
            }
        }
        let at = self.global_names.get(decl.name).copied();
        if let Some(at) = at {
            // A declaration (`extern`) and its definition are one variable.
            if !external {
                self.unit.globals[at] = var;
            }
            return Ok(());
        }
        let index = self.unit.globals.len();
        self.global_names.insert(decl.name.to_string(), index);
        self.declare(decl.name, Entity::Var(Sym::Global(index as u32)));
        self.unit.globals.push(var);
        Ok(())
    }

    fn initialiser(&mut self, var: &mut GlobalVar, decl: &Decl<'_>) -> Result<()> {
        let mut depth = 0u32;
        loop {
            match self.lex.peek() {
                Tok::Punct('{') => {
                    self.lex.next();
                    depth += 1;
                    continue;
                }
                Tok::Punct('}') if depth > 0 => {
                    self.lex.next();
                    depth -= 1;
                }
                _ => self.init_item(var, decl)?,
            }
            if depth == 0 {
                return Ok(());
            }
            if var.init.len() as u64 > INIT_BYTES_MAX {
                return self.err("initialiser is too long");
            }
            if !self.eat(',') && self.lex.peek() != Tok::Punct('}') {
                return self.unexpected("`,` or `}`");
            }
        }
    }

    /// A number, or an address: `sym`, `sym+4`, `generic(sym)`, `0xFF00(sym)`.
    fn init_item(&mut self, var: &mut GlobalVar, decl: &Decl<'_>) -> Result<()> {
        let bytes = decl.elem_bytes as usize;
        let negative = self.eat('-');
        let put = |bits: u64, var: &mut GlobalVar| {
            var.init.extend_from_slice(&bits.to_le_bytes()[..bytes.min(8)]);
            var.init.resize(var.init.len() + bytes.saturating_sub(8), 0);
        };
        match self.lex.peek() {
            Tok::Int(v) => {
                self.lex.next();
                if self.lex.peek() == Tok::Punct('(') {
                    return self.err("unsupported initialiser: a byte of an address");
                }
                put(if negative { v.wrapping_neg() } else { v }, var);
            }
            Tok::F32(v) => {
                self.lex.next();
                let v = if negative { v ^ 1 << 31 } else { v };
                if decl.elem == "f64" {
                    put(f64::from(f32::from_bits(v)).to_bits(), var);
                } else {
                    put(u64::from(v), var);
                }
            }
            Tok::F64(v) => {
                self.lex.next();
                let v = if negative { v ^ 1 << 63 } else { v };
                if decl.elem == "f32" {
                    put(u64::from((f64::from_bits(v) as f32).to_bits()), var);
                } else {
                    put(v, var);
                }
            }
            Tok::Ident(mut name) => {
                self.lex.next();
                if self.eat('(') {
                    name = self.ident()?;
                }
                let mut addend = 0;
                if matches!(self.lex.peek(), Tok::Punct('+' | '-')) {
                    let minus = self.lex.next() == Tok::Punct('-');
                    let v = self.int()?;
                    addend = if minus { v.wrapping_neg() } else { v };
                }
                self.eat(')');
                if matches!(self.lex.peek(), Tok::Punct('+')) {
                    self.lex.next();
                    addend = self.int()?;
                }
                if bytes != 8 {
                    return self.err("an address needs a 64-bit initialiser");
                }
                var.relocations.push((var.init.len() as u64, name.to_string()));
                // The addend stays in place: the device adds the address to it.
                put(addend, var);
            }
            _ => return self.unexpected("an initial value"),
        }
        Ok(())
    }

    /// Functions have no address on the device: their stand-ins are written
    /// here. What is left must be variables.
    pub(super) fn check_relocations(&mut self) -> Result<()> {
        for i in 0..self.unit.globals.len() {
            let mut kept = Vec::new();
            for (offset, name) in std::mem::take(&mut self.unit.globals[i].relocations) {
                if self.global_names.contains_key(&name) {
                    kept.push((offset, name));
                } else if let Some(f) = self.unit.function(&name) {
                    let at = offset as usize;
                    let value = FUNCTION_BASE + f as u64;
                    self.unit.globals[i].init[at..at + 8].copy_from_slice(&value.to_le_bytes());
                } else {
                    let message = format!(
                        "variable `{}` is initialised with `{name}`, which the module does not define",
                        self.unit.globals[i].name
                    );
                    return Err(PtxError::new(0, message));
                }
            }
            self.unit.globals[i].relocations = kept;
        }
        Ok(())
    }

    /// `.reg .b32 %r<10>, %x;`
    pub(super) fn registers(&mut self) -> Result<()> {
        let mut class = None;
        let line = self.lex.peek_line();
        while let Tok::Dot(word) = self.lex.peek() {
            self.lex.next();
            class = match (word, type_bytes(word)) {
                ("pred", _) => Some(Class::Pred),
                (_, Some(bytes)) => Some(class_of(bytes)),
                _ => {
                    return Err(PtxError::new(
                        line,
                        format!("unsupported register type `.{word}`"),
                    ));
                }
            };
        }
        let Some(class) = class else { return self.unexpected("a register type") };
        loop {
            let name = self.ident()?;
            if self.eat('<') {
                let count = self.int()?;
                self.expect('>')?;
                self.declare(name, Entity::Range(class, count));
            } else {
                self.declare(name, Entity::Reg(class));
            }
            if !self.eat(',') {
                return self.expect(';');
            }
        }
    }

    /// Places a variable in the current function's frame.
    pub(super) fn frame_variable(&mut self, decl: &Decl<'_>) -> Result<u32> {
        let offset = u64::from(self.frame_now).next_multiple_of(u64::from(decl.align));
        let end = offset + decl.size;
        if decl.size > VARIABLE_BYTES_MAX || end > VARIABLE_BYTES_MAX {
            return self.err(format!("local variable `{}` is too large", decl.name));
        }
        self.frame_now = end as u32;
        self.frame_max = self.frame_max.max(self.frame_now);
        self.declare(decl.name, Entity::Var(Sym::Frame(offset as u32)));
        Ok(offset as u32)
    }

    /// The index of a register declared as a formal parameter.
    pub(super) fn formal_register(&mut self, name: &str) -> Option<u32> {
        match self.lookup(name) {
            Some(Found::Reg(r)) => Some(r),
            _ => None,
        }
    }
}

pub(super) fn class_of(bytes: u32) -> Class {
    match bytes {
        1 | 2 => Class::W16,
        4 => Class::W32,
        8 => Class::W64,
        _ => Class::W128,
    }
}
