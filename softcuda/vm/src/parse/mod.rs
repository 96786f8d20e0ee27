//! PTX text to [`Unit`]: the module's directives. Variables are in `data`,
//! functions in `func`. Work and memory are linear in the text; nothing
//! recurses on the input.

mod data;
mod func;
mod operand;

pub(crate) use data::FUNCTION_BASE;

use crate::ast::{Class, SReg, Sym, Unit};
use crate::error::PtxError;
use crate::lex::{Lexer, Tok};
use std::collections::HashMap;

type Result<T> = std::result::Result<T, PtxError>;

/// The most bytes that a `.shared` or frame variable may take.
const VARIABLE_BYTES_MAX: u64 = 1 << 24;
/// The most bytes of parameters a function may take.
const PARAM_BYTES_MAX: u64 = 1 << 16;

/// What a name in scope stands for.
#[derive(Clone, Copy)]
pub(crate) enum Entity {
    /// A register; its index is given when it is first used.
    Reg(Class),
    /// `%r<100>`: the names `%r0` to `%r99`.
    Range(Class, u64),
    Var(Sym),
}

/// The names declared between one pair of braces.
#[derive(Default)]
struct Scope {
    names: HashMap<Box<str>, Entity>,
    /// Registers used so far, by name.
    regs: HashMap<Box<str>, u32>,
    id: u32,
    /// The frame's size when the scope was entered.
    frame_mark: u32,
}

pub(crate) struct Parser<'a> {
    lex: Lexer<'a>,
    unit: Unit,
    /// The module's scope first, then a function's.
    scopes: Vec<Scope>,
    /// Classes of the current function's registers.
    regs: Vec<Class>,
    /// Global variables by name, for redeclarations.
    global_names: HashMap<String, usize>,
    /// Bytes of the current function's frame in use, and at most.
    frame_now: u32,
    frame_max: u32,
}

pub(crate) fn parse(src: &str) -> Result<Unit> {
    let mut parser = Parser {
        lex: Lexer::new(src),
        unit: Unit::default(),
        scopes: vec![Scope::default()],
        regs: Vec::new(),
        global_names: HashMap::new(),
        frame_now: 0,
        frame_max: 0,
    };
    parser.module()?;
    parser.check_relocations()?;
    Ok(parser.unit)
}

/// `.visible` and its like, before a variable or a function.
#[derive(Clone, Copy, Default)]
pub(crate) struct Linkage {
    external: bool,
}

impl<'a> Parser<'a> {
    fn err<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(PtxError::new(self.lex.peek_line(), message))
    }

    fn unexpected<T>(&self, wanted: &str) -> Result<T> {
        self.err(format!("expected {wanted}, found {}", show(self.lex.peek())))
    }

    fn eat(&mut self, c: char) -> bool {
        let hit = self.lex.peek() == Tok::Punct(c);
        if hit {
            self.lex.next();
        }
        hit
    }

    fn expect(&mut self, c: char) -> Result<()> {
        if self.eat(c) { Ok(()) } else { self.unexpected(&format!("`{c}`")) }
    }

    fn ident(&mut self) -> Result<&'a str> {
        match self.lex.peek() {
            Tok::Ident(name) => {
                self.lex.next();
                Ok(name)
            }
            _ => self.unexpected("a name"),
        }
    }

    fn int(&mut self) -> Result<u64> {
        match self.lex.peek() {
            Tok::Int(v) => {
                self.lex.next();
                Ok(v)
            }
            _ => self.unexpected("a number"),
        }
    }

    fn int32(&mut self) -> Result<u32> {
        let line = self.lex.peek_line();
        u32::try_from(self.int()?).map_err(|_| PtxError::new(line, "number out of range"))
    }

    /// Up to three numbers, the rest 1: `.maxntid 32, 8`.
    fn triple(&mut self) -> Result<[u32; 3]> {
        let mut out = [1; 3];
        for i in 0..3 {
            out[i] = self.int32()?;
            if !self.eat(',') {
                return Ok(out);
            }
        }
        self.unexpected("at most three numbers")
    }

    fn skip_statement(&mut self) {
        while !matches!(self.lex.peek(), Tok::End | Tok::Punct(';')) {
            self.lex.next();
        }
        self.lex.next();
    }

    /// Drops the tokens left on `line`.
    fn skip_line(&mut self, line: u32) {
        while self.lex.peek_line() == line && self.lex.peek() != Tok::End {
            self.lex.next();
        }
    }

    fn module(&mut self) -> Result<()> {
        let mut linkage = Linkage::default();
        let mut versioned = false;
        loop {
            let line = self.lex.peek_line();
            let word = match self.lex.peek() {
                Tok::End if !versioned => return self.err("no `.version` directive: is this PTX?"),
                Tok::End => return Ok(()),
                Tok::Dot(word) => word,
                Tok::Punct(';') => {
                    self.lex.next();
                    continue;
                }
                _ => return self.unexpected("a directive"),
            };
            if !versioned && word != "version" {
                return self.err("PTX must start with `.version`");
            }
            self.lex.next();
            match word {
                "version" => {
                    versioned = true;
                    self.skip_line(line);
                }
                "target" => {
                    self.ident()?;
                    while self.eat(',') {
                        self.ident()?;
                    }
                }
                "address_size" => {
                    if self.int()? != 64 {
                        return Err(PtxError::new(line, "only 64-bit addresses are supported"));
                    }
                }
                "visible" | "weak" | "common" => {}
                "extern" => linkage.external = true,
                "func" | "entry" => self.function(word == "entry", line)?,
                "global" | "const" | "shared" => self.module_variable(word, linkage)?,
                "file" | "loc" => self.skip_line(line),
                "section" => self.section()?,
                "pragma" => self.skip_statement(),
                "alias" => {
                    let from = self.ident()?.to_string();
                    self.expect(',')?;
                    let to = self.ident()?.to_string();
                    self.expect(';')?;
                    self.unit.aliases.insert(from, to);
                }
                // `.local`, `.reg`, `.tex` and others at module scope.
                other => {
                    return Err(PtxError::new(line, format!("unsupported directive `.{other}`")));
                }
            }
            if !matches!(word, "visible" | "weak" | "common" | "extern") {
                linkage = Linkage::default();
            }
        }
    }

    /// Debug data, which says nothing about execution.
    fn section(&mut self) -> Result<()> {
        while !matches!(self.lex.peek(), Tok::End | Tok::Punct('{')) {
            self.lex.next();
        }
        let mut depth = 0u32;
        loop {
            match self.lex.next() {
                Tok::End => return self.err("`.section` never ends"),
                Tok::Punct('{') => depth += 1,
                Tok::Punct('}') if depth <= 1 => return Ok(()),
                Tok::Punct('}') => depth -= 1,
                _ => {}
            }
        }
    }

    fn declare(&mut self, name: &str, entity: Entity) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.names.insert(name.into(), entity);
        }
    }

    /// The register or variable `name`, innermost scope first.
    fn lookup(&mut self, name: &str) -> Option<Found> {
        let stem_len = name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        for scope in self.scopes.iter_mut().rev() {
            if let Some(&reg) = scope.regs.get(name) {
                return Some(Found::Reg(reg));
            }
            let class = match scope.names.get(name) {
                Some(Entity::Var(sym)) => return Some(Found::Var(*sym)),
                Some(Entity::Reg(class)) => Some(*class),
                _ => range_class(scope, name, stem_len),
            };
            if let Some(class) = class {
                let reg = self.regs.len() as u32;
                self.regs.push(class);
                scope.regs.insert(name.into(), reg);
                return Some(Found::Reg(reg));
            }
        }
        None
    }
}

/// The class of `%r12` if the scope declares `%r<13>` or more. The prefix may
/// itself end in digits (`%p1<4>`), so every split is tried, longest first.
fn range_class(scope: &Scope, name: &str, stem_len: usize) -> Option<Class> {
    for split in (stem_len..name.len()).take(20) {
        if let Some(Entity::Range(class, count)) = scope.names.get(&name[..split]) {
            let digits = &name[split..];
            let plain = digits == "0" || !digits.starts_with('0');
            if plain && digits.parse::<u64>().is_ok_and(|n| n < *count) {
                return Some(*class);
            }
        }
    }
    None
}

enum Found {
    Reg(u32),
    Var(Sym),
}

fn show(tok: Tok<'_>) -> String {
    match tok {
        Tok::Ident(s) => format!("`{s}`"),
        Tok::Dot(s) => format!("`.{s}`"),
        Tok::Int(v) => format!("`{v}`"),
        Tok::F32(_) | Tok::F64(_) => "a floating-point number".into(),
        Tok::Str(s) => format!("\"{s}\""),
        Tok::Punct(c) => format!("`{c}`"),
        Tok::End => "the end of the text".into(),
    }
}

/// The bytes of a fundamental type, by name.
fn type_bytes(name: &str) -> Option<u32> {
    Some(match name {
        "b8" | "u8" | "s8" => 1,
        "b16" | "u16" | "s16" | "f16" | "bf16" => 2,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" => 4,
        "b64" | "u64" | "s64" | "f64" => 8,
        "b128" => 16,
        _ => return None,
    })
}

fn special(name: &str, suffix: Option<&str>) -> Option<SReg> {
    let axis = |make: fn(u8) -> SReg| match suffix {
        Some("x") => Some(make(0)),
        Some("y") => Some(make(1)),
        Some("z") => Some(make(2)),
        _ => None,
    };
    Some(match name {
        "%tid" => return axis(SReg::Tid),
        "%ntid" => return axis(SReg::Ntid),
        "%ctaid" => return axis(SReg::Ctaid),
        "%nctaid" => return axis(SReg::Nctaid),
        // Clusters of one block: the cluster's index is the block's.
        "%clusterid" => return axis(SReg::Ctaid),
        "%nclusterid" => return axis(SReg::Nctaid),
        "%cluster_ctaid" => return axis(|_| SReg::Fixed(0)),
        "%cluster_nctaid" => return axis(|_| SReg::Fixed(1)),
        "%cluster_ctarank" => SReg::Fixed(0),
        "%cluster_nctarank" => SReg::Fixed(1),
        "%laneid" => SReg::LaneId,
        "%warpid" => SReg::WarpId,
        "%nwarpid" => SReg::NWarpId,
        "%smid" => SReg::SmId,
        "%nsmid" => SReg::NSmId,
        "%lanemask_eq" => SReg::LaneMaskEq,
        "%lanemask_lt" => SReg::LaneMaskLt,
        "%lanemask_le" => SReg::LaneMaskLe,
        "%lanemask_gt" => SReg::LaneMaskGt,
        "%lanemask_ge" => SReg::LaneMaskGe,
        "%clock" => SReg::Clock,
        "%clock_hi" => SReg::ClockHi,
        "%clock64" => SReg::Clock64,
        "%globaltimer" => SReg::GlobalTimer,
        "%globaltimer_lo" => SReg::GlobalTimerLo,
        "%globaltimer_hi" => SReg::GlobalTimerHi,
        "%gridid" => SReg::GridId,
        "%dynamic_smem_size" => SReg::DynamicShared,
        "%total_smem_size" | "%aggr_smem_size" => SReg::TotalShared,
        "%reserved_smem_offset_begin" | "%reserved_smem_offset_end" => SReg::Fixed(0),
        "WARP_SZ" => SReg::Fixed(32),
        _ => {
            let digits = name.strip_prefix("%envreg").or_else(|| name.strip_prefix("%pm"))?;
            digits.parse::<u8>().ok()?;
            SReg::Fixed(0)
        }
    })
}
