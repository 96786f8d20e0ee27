//! What a PTX module declares: kernels, functions, variables, and their names.

use super::params::{self, Layout};
use crate::TransformRefusal;
use crate::names::{MATH_TABLES, is_text};
use std::collections::HashMap;
use tally_ptx::{Declaration, Function, Item, Linkage, Token, inside};

/// What a name at module scope stands for; the number indexes the list of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Symbol {
    Entry(usize),
    Func(usize),
    Var(usize),
}

/// An `.entry` with a body.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    pub name: &'a str,
    pub head: Function<'a>,
    pub layout: Result<Layout, TransformRefusal>,
    /// From its opening to its closing brace.
    pub body: &'a [Token],
}

/// A `.func`. Several declarations and a definition are one.
#[derive(Debug)]
pub(super) struct Func<'a> {
    pub name: &'a str,
    /// Tokens between the braces; `None` without a definition.
    pub body: Option<&'a [Token]>,
    /// What `.alias` says that it is another name for.
    pub alias_of: Option<&'a str>,
}

/// A variable of the module in `.global`, `.const` or an older space of textures.
#[derive(Debug)]
pub(super) struct Var {
    /// Bytes in `.global`, with initial values, not visible outside the module, under a name that compilers give a
    /// string literal. A program may find any other name, and write there.
    pub literal: bool,
    /// A table of CUDA's mathematical functions (the digits of 2/pi, coefficients), told by
    /// its name: with initial values, and not visible outside the module. Constant, under
    /// a name that is the implementation's own.
    pub math_table: bool,
    /// The address of it, or of what shares its directive, is in an initialiser.
    pub in_initialiser: bool,
}

#[derive(Debug)]
pub(super) struct Module<'a> {
    pub source: &'a str,
    pub version: (u32, u32),
    pub version_token: Token,
    /// The number in `.target sm_90a`.
    pub target: u32,
    pub entries: Vec<Entry<'a>>,
    /// Entries without a body.
    pub declared: Vec<Function<'a>>,
    pub funcs: Vec<Func<'a>>,
    pub vars: Vec<Var>,
    pub symbols: HashMap<&'a str, Symbol>,
    /// Names in initialisers, by which functions and variables escape.
    pub initialisers: Vec<&'a str>,
}

const MALFORMED: TransformRefusal = TransformRefusal::Malformed;

/// Reads a module; `tokens` are those of `source`.
///
/// # Errors
/// [`TransformRefusal::Malformed`], or [`TransformRefusal::PtxVersion`] for 32-bit addresses.
pub(super) fn read<'a>(
    source: &'a str,
    tokens: &'a [Token],
) -> Result<Module<'a>, TransformRefusal> {
    let parsed = tally_ptx::parse(source, tokens)?;
    let mut module = Module {
        source,
        version: parsed.version,
        version_token: parsed.version_token,
        target: 0,
        entries: Vec::new(),
        declared: Vec::new(),
        funcs: Vec::new(),
        vars: Vec::new(),
        symbols: HashMap::new(),
        initialisers: Vec::new(),
    };
    for item in parsed.items {
        match item? {
            Item::Function(head) if head.is_entry => module.add_entry(head)?,
            Item::Function(head) => {
                module.add_func(head.name.text(source), head.body.map(inside), None)?;
            }
            Item::Alias { name, of } => module.add_func(name, None, Some(of))?,
            Item::Variable(linkage, declaration) => module.add_variable(linkage, &declaration)?,
            Item::Target(words) => {
                for number in words.iter().filter_map(|w| w.text(source).strip_prefix("sm_")) {
                    let digits = number.trim_end_matches(|c: char| c.is_ascii_lowercase());
                    module.target = digits.parse().map_err(|_| MALFORMED)?;
                }
            }
            Item::AddressSize(size) if size.text(source) != "64" => {
                return Err(TransformRefusal::PtxVersion);
            }
            Item::AddressSize(_) => {}
        }
    }
    for name in std::mem::take(&mut module.initialisers) {
        if let Some(Symbol::Var(v)) = module.symbols.get(name) {
            module.vars[*v].in_initialiser = true;
        } else {
            module.initialisers.push(name);
        }
    }
    Ok(module)
}

/// Special registers that the prelude, or what replaces reads of them, names: PTX does not let a module declare them.
const PREDEFINED: [&str; 6] = ["%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "%smid"];

fn may_be_declared(name: &str) -> Result<(), TransformRefusal> {
    if PREDEFINED.contains(&name) { Err(MALFORMED) } else { Ok(()) }
}

impl<'a> Module<'a> {
    fn add_entry(&mut self, head: Function<'a>) -> Result<(), TransformRefusal> {
        let Some(body) = head.body else {
            self.declared.push(head);
            return Ok(());
        };
        let name = head.name.text(self.source);
        may_be_declared(name)?;
        if self.symbols.insert(name, Symbol::Entry(self.entries.len())).is_some() {
            return Err(MALFORMED);
        }
        let layout = params::layout(self.source, head.parameters.unwrap_or_default());
        self.entries.push(Entry { name, head, layout, body });
        Ok(())
    }

    fn add_func(
        &mut self,
        name: &'a str,
        body: Option<&'a [Token]>,
        alias_of: Option<&'a str>,
    ) -> Result<(), TransformRefusal> {
        may_be_declared(name)?;
        match self.symbols.get(name) {
            None => {
                self.symbols.insert(name, Symbol::Func(self.funcs.len()));
                self.funcs.push(Func { name, body, alias_of });
            }
            Some(Symbol::Func(at)) => {
                let func = &mut self.funcs[*at];
                if func.body.is_some() && body.is_some() {
                    return Err(MALFORMED);
                }
                func.body = func.body.take().or(body);
                func.alias_of = func.alias_of.or(alias_of);
            }
            Some(_) => return Err(MALFORMED),
        }
        Ok(())
    }

    /// A declaration and its definition are one variable, and no literal.
    fn add_variable(
        &mut self,
        linkage: Linkage,
        of: &Declaration<'a>,
    ) -> Result<(), TransformRefusal> {
        let source = self.source;
        may_be_declared(of.name())?;
        if of.space == ".shared" {
            return Ok(());
        }
        let is_new = match self.symbols.insert(of.name(), Symbol::Var(self.vars.len())) {
            None => true,
            Some(Symbol::Var(_)) => false,
            Some(_) => return Err(MALFORMED),
        };
        let values = of.initialiser.unwrap_or_default();
        let is_constant =
            is_new && of.space == ".global" && !linkage.is_given && !values.is_empty();
        let is_bytes = |word: &Token| matches!(word.text(source), ".b8" | ".u8" | ".s8");
        self.vars.push(Var {
            literal: is_constant && is_text(of.name()) && of.words.iter().any(is_bytes),
            math_table: is_constant && MATH_TABLES.iter().any(|(name, _)| *name == of.name()),
            in_initialiser: false,
        });
        let names = values.iter().filter(|t| t.is_word());
        self.initialisers.extend(names.map(|t| t.text(source)));
        Ok(())
    }
}
