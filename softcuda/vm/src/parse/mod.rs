//! PTX text to [`Unit`]: names, variables (`data`), functions (`func`) and operands, on top of
//! the text's structure, which `tally-ptx` reads. Work and memory are linear in the text; nothing
//! recurses on the input.

mod data;
mod func;
mod operand;

pub(crate) use data::FUNCTION_BASE;

use crate::ast::{Class, SReg, Sym, Unit};
use std::collections::HashMap;
use tally_ptx::{Cursor, Item, PtxError, Result};

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
    source: &'a str,
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

pub(crate) fn parse(source: &str) -> Result<Unit> {
    let tokens = tally_ptx::lex(source)?;
    let module = tally_ptx::parse(source, &tokens)?;
    let mut parser = Parser {
        source,
        unit: Unit::default(),
        scopes: vec![Scope::default()],
        regs: Vec::new(),
        global_names: HashMap::new(),
        frame_now: 0,
        frame_max: 0,
    };
    for item in module.items {
        match item? {
            Item::Function(function) => parser.function(&function)?,
            Item::Variable(linkage, declaration) => {
                parser.module_variable(linkage, &declaration)?;
            }
            Item::Alias { name, of } => {
                parser.unit.aliases.insert(name.to_owned(), of.to_owned());
            }
            Item::AddressSize(size) if size.text(source) != "64" => {
                return Err(PtxError::new(size.line, "only 64-bit addresses are supported"));
            }
            Item::AddressSize(_) | Item::Target(_) => {}
        }
    }
    parser.check_relocations()?;
    Ok(parser.unit)
}

impl Parser<'_> {
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

fn special(name: &str, suffix: Option<&str>) -> Option<SReg> {
    let axis = |make: fn(u8) -> SReg| match suffix {
        Some(".x") => Some(make(0)),
        Some(".y") => Some(make(1)),
        Some(".z") => Some(make(2)),
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
