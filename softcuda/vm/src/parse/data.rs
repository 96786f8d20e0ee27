//! Variables: of the module with their initialisers, of functions, and
//! registers.

use super::{Entity, Found, Parser, Result, VARIABLE_BYTES_MAX};
use crate::GlobalVar;
use crate::ast::{Class, SharedVar, Sym};
use tally_ptx::{
    Cursor, Declaration, Layout, Lexeme, Linkage, Number, PtxError, Token, number, type_bytes,
};

/// A module variable may be larger than the text; this is the device's limit.
const GLOBAL_BYTES_MAX: u64 = 1 << 40;
/// Where function "addresses" lie: the index of the function is added.
pub(crate) const FUNCTION_BASE: u64 = 0x4300_0000_0000_0000;
/// Initialisers are stored in full; longer ones than this are refused.
const INIT_BYTES_MAX: u64 = 1 << 28;

fn error(of: &Declaration<'_>, message: String) -> PtxError {
    PtxError::new(of.name.line, message)
}

impl<'a> Parser<'a> {
    pub(super) fn module_variable(
        &mut self,
        linkage: Linkage,
        declaration: &Declaration<'a>,
    ) -> Result<()> {
        let layout = declaration.layout()?;
        if layout.bytes > GLOBAL_BYTES_MAX {
            let message = format!("variable `{}` is too large", declaration.name());
            return Err(error(declaration, message));
        }
        match declaration.space {
            ".shared" => self.shared_variable(declaration, &layout, linkage.is_extern),
            ".global" | ".const" => self.global_variable(declaration, &layout, linkage.is_extern),
            space => Err(error(declaration, format!("unsupported state space `{space}`"))),
        }
    }

    fn shared_variable(
        &mut self,
        of: &Declaration<'a>,
        layout: &Layout<'a>,
        external: bool,
    ) -> Result<()> {
        if layout.bytes > VARIABLE_BYTES_MAX {
            return Err(error(of, format!("shared variable `{}` is too large", of.name())));
        }
        let index = self.unit.shared.len() as u32;
        let dynamic = layout.is_open || (external && layout.bytes == 0);
        let size = if dynamic { 0 } else { layout.bytes };
        self.unit.shared.push(SharedVar { size, align: layout.align, dynamic });
        self.declare(of.name(), Entity::Var(Sym::Shared(index)));
        Ok(())
    }

    fn global_variable(
        &mut self,
        of: &Declaration<'a>,
        layout: &Layout<'a>,
        external: bool,
    ) -> Result<()> {
        let mut var = GlobalVar {
            name: of.name().to_string(),
            size: if layout.is_open { 0 } else { layout.bytes },
            align: u64::from(layout.align),
            init: Vec::new(),
            constant: of.space == ".const",
            relocations: Vec::new(),
        };
        if let Some(tokens) = of.initialiser {
            initialiser(&mut var, layout, Cursor::new(self.source, tokens))?;
            let length = var.init.len() as u64;
            if layout.is_open {
                var.size = length;
            } else if length > var.size {
                return Err(error(of, format!("too many initialisers of `{}`", var.name)));
            }
        }
        if let Some(&at) = self.global_names.get(of.name()) {
            // A declaration (`extern`) and its definition are one variable.
            if !external {
                self.unit.globals[at] = var;
            }
            return Ok(());
        }
        let index = self.unit.globals.len();
        self.global_names.insert(var.name.clone(), index);
        self.declare(of.name(), Entity::Var(Sym::Global(index as u32)));
        self.unit.globals.push(var);
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
    pub(super) fn registers(&mut self, directive: &'a [Token]) -> Result<()> {
        let mut at = Cursor::new(self.source, directive);
        at.skip();
        let mut class = None;
        while let Lexeme::Dot(word) = at.peek() {
            class = match (word, type_bytes(word)) {
                (".pred", _) => Some(Class::Pred),
                (_, Some(bytes)) => Some(class_of(bytes)),
                _ => return Err(at.error(format!("unsupported register type `{word}`"))),
            };
            at.skip();
        }
        let Some(class) = class else { return Err(at.unexpected("a register type")) };
        loop {
            let name = at.word()?;
            if at.eat(b'<') {
                let count = at.integer()?;
                at.expect(b'>')?;
                self.declare(name, Entity::Range(class, count));
            } else {
                self.declare(name, Entity::Reg(class));
            }
            if at.is_at_end() {
                return Ok(());
            }
            at.expect(b',')?;
        }
    }

    /// Places a variable in the current function's frame.
    pub(super) fn frame_variable(&mut self, of: &Declaration<'a>) -> Result<u32> {
        let Layout { align, bytes, .. } = of.layout()?;
        let offset = u64::from(self.frame_now).next_multiple_of(u64::from(align));
        let end = offset.saturating_add(bytes);
        if end > VARIABLE_BYTES_MAX {
            return Err(error(of, format!("local variable `{}` is too large", of.name())));
        }
        self.frame_now = end as u32;
        self.frame_max = self.frame_max.max(self.frame_now);
        self.declare(of.name(), Entity::Var(Sym::Frame(offset as u32)));
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

fn initialiser(var: &mut GlobalVar, layout: &Layout<'_>, mut at: Cursor<'_>) -> Result<()> {
    let mut depth = 0u32;
    loop {
        if at.eat(b'{') {
            depth += 1;
            continue;
        }
        if depth > 0 && at.eat(b'}') {
            depth -= 1;
        } else {
            init_item(var, layout, &mut at)?;
        }
        if depth == 0 {
            return if at.is_at_end() { Ok(()) } else { Err(at.unexpected("`,` or `;`")) };
        }
        if var.init.len() as u64 > INIT_BYTES_MAX {
            return Err(at.error("initialiser is too long"));
        }
        if !at.eat(b',') && !at.is(b'}') {
            return Err(at.unexpected("`,` or `}`"));
        }
    }
}

/// A number, or an address: `sym`, `sym+4`, `generic(sym)`, `0xFF00(sym)`.
fn init_item(var: &mut GlobalVar, layout: &Layout<'_>, at: &mut Cursor<'_>) -> Result<()> {
    let bytes = layout.element_bytes as usize;
    let negative = at.eat(b'-');
    let put = |bits: u64, var: &mut GlobalVar| {
        var.init.extend_from_slice(&bits.to_le_bytes()[..bytes.min(8)]);
        var.init.resize(var.init.len() + bytes.saturating_sub(8), 0);
    };
    match at.peek() {
        Lexeme::Number(text) => {
            let value = number(text).ok_or_else(|| at.unexpected("a number"))?;
            at.skip();
            if at.is(b'(') {
                return Err(at.error("unsupported initialiser: a byte of an address"));
            }
            put(bits(value, negative, layout.element), var);
        }
        Lexeme::Word(mut name) => {
            at.skip();
            if at.eat(b'(') {
                name = at.word()?;
            }
            let mut addend = 0;
            if at.is(b'+') || at.is(b'-') {
                let minus = at.take() == Lexeme::Punct(b'-');
                let v = at.integer()?;
                addend = if minus { v.wrapping_neg() } else { v };
            }
            at.eat(b')');
            if at.eat(b'+') {
                addend = at.integer()?;
            }
            if bytes != 8 {
                return Err(at.error("an address needs a 64-bit initialiser"));
            }
            var.relocations.push((var.init.len() as u64, name.to_string()));
            // The addend stays in place: the device adds the address to it.
            put(addend, var);
        }
        _ => return Err(at.unexpected("an initial value")),
    }
    Ok(())
}

/// The bits of a number in a variable of type `element`.
fn bits(value: Number, negative: bool, element: &str) -> u64 {
    let sign = u64::from(negative);
    match (value, element) {
        (Number::Int(v), _) if negative => v.wrapping_neg(),
        (Number::Int(v), _) => v,
        (Number::F32(v), ".f64") => f64::from(f32::from_bits(v)).to_bits() ^ sign << 63,
        (Number::F32(v), _) => u64::from(v) ^ sign << 31,
        (Number::F64(v), ".f32") => u64::from((f64::from_bits(v) as f32).to_bits()) ^ sign << 31,
        (Number::F64(v), _) => v ^ sign << 63,
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
