//! A PTX module's directives: what it declares, and where in the text.
//!
//! Work and memory are linear in the text, and nothing recurses on it. A directive
//! that is not known refuses the module: its extent would be a guess.

use super::lex::{self, Kind, Token};
use super::params::{self, Layout};
use crate::Refusal;
use std::collections::HashMap;
use std::ops::Range;

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
    pub name_token: Token,
    /// The parentheses and what is between them.
    pub list: Option<Range<usize>>,
    pub layout: Result<Layout, Refusal>,
    pub cluster: Option<[u32; 3]>,
    /// `.explicitcluster` or `.maxclusterrank`: a launch may form clusters.
    pub may_cluster: bool,
    /// `.blocksareclusters`: the launch counts clusters, not blocks.
    pub counts_clusters: bool,
    /// Tokens between the braces.
    pub body: Range<usize>,
}

/// An `.entry` without a body: its name's token and its list.
#[derive(Debug)]
pub(super) struct Declared<'a> {
    pub name: &'a str,
    pub name_token: Token,
    pub list: Option<Range<usize>>,
}

/// A `.func`. Several declarations and a definition are one.
#[derive(Debug)]
pub(super) struct Func<'a> {
    pub name: &'a str,
    pub body: Option<Range<usize>>,
    /// What `.alias` says that it is another name for.
    pub alias_of: Option<&'a str>,
}

/// A variable of the module in `.global`, `.const` or an older space of textures.
#[derive(Debug)]
pub(super) struct Var {
    /// Bytes in `.global`, with initial values, and not visible outside the module:
    /// what compilers make of a string literal.
    pub literal: bool,
    /// A table of CUDA's mathematical functions (the digits of 2/pi, coefficients), told by
    /// its name: with initial values, and not visible outside the module. Constant, under
    /// a name that is the implementation's own.
    pub math_table: bool,
    /// The address of it, or of what shares its directive, is in an initialiser.
    pub in_initialiser: bool,
}

const MATH_TABLES: [&str; 3] = ["__cudart_i2opi_f", "__cudart_i2opi_d", "__cudart_sin_cos_coeffs"];

#[derive(Debug)]
pub(super) struct Module<'a> {
    pub source: &'a str,
    pub tokens: Vec<Token>,
    pub version: (u32, u32),
    pub version_token: Token,
    /// The number in `.target sm_90a`.
    pub target: u32,
    pub entries: Vec<Entry<'a>>,
    pub declared: Vec<Declared<'a>>,
    pub funcs: Vec<Func<'a>>,
    pub vars: Vec<Var>,
    pub symbols: HashMap<&'a str, Symbol>,
    /// Names in initialisers, by which functions and variables escape.
    pub initialisers: Vec<&'a str>,
}

const MALFORMED: Refusal = Refusal::Malformed;

/// Reads a module.
///
/// # Errors
/// [`Refusal::Malformed`], or [`Refusal::PtxVersion`] for 32-bit addresses.
pub(super) fn parse(source: &str) -> Result<Module<'_>, Refusal> {
    let tokens = lex::tokens(source)?;
    let [version, number, ..] = tokens[..] else { return Err(MALFORMED) };
    if version.text(source) != ".version" {
        return Err(MALFORMED);
    }
    let (major, minor) = number.text(source).split_once('.').ok_or(MALFORMED)?;
    let part = |digits: &str| digits.parse::<u32>().map_err(|_| MALFORMED);
    let module = Module {
        source,
        version: (part(major)?, part(minor)?),
        version_token: number,
        target: 0,
        entries: Vec::new(),
        declared: Vec::new(),
        funcs: Vec::new(),
        vars: Vec::new(),
        symbols: HashMap::new(),
        initialisers: Vec::new(),
        tokens,
    };
    let mut parser = Parser { at: 2, module };
    parser.directives()?;
    let mut module = parser.module;
    for name in std::mem::take(&mut module.initialisers) {
        if let Some(Symbol::Var(v)) = module.symbols.get(name) {
            module.vars[*v].in_initialiser = true;
        } else {
            module.initialisers.push(name);
        }
    }
    Ok(module)
}

struct Parser<'a> {
    at: usize,
    module: Module<'a>,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<Token> {
        self.module.tokens.get(self.at).copied()
    }

    fn text(&self, token: Token) -> &'a str {
        token.text(self.module.source)
    }

    fn next(&mut self) -> Result<Token, Refusal> {
        let token = self.peek().ok_or(MALFORMED)?;
        self.at += 1;
        Ok(token)
    }

    fn next_is(&self, punct: u8) -> bool {
        self.peek().is_some_and(|t| t.is(punct))
    }

    fn name(&mut self) -> Result<Token, Refusal> {
        self.next().and_then(|t| if t.kind == Kind::Word { Ok(t) } else { Err(MALFORMED) })
    }

    fn number(&mut self) -> Result<u64, Refusal> {
        let token = self.next()?;
        lex::integer(self.text(token)).ok_or(MALFORMED)
    }

    fn directives(&mut self) -> Result<(), Refusal> {
        let mut has_linkage = false;
        while let Some(token) = self.peek() {
            self.at += 1;
            if token.is(b'@') {
                // `@@DWARF`, debug data of old compilers.
                self.skip_line(token);
                continue;
            }
            match self.text(token) {
                ".visible" | ".extern" | ".weak" | ".common" => {
                    has_linkage = true;
                    continue;
                }
                ".entry" => self.entry()?,
                ".func" => self.func()?,
                ".global" | ".const" | ".tex" => {
                    let literal = !has_linkage && self.text(token) == ".global";
                    self.variables(literal)?;
                }
                ".shared" | ".pragma" => self.skip_statement()?,
                ".target" => self.target()?,
                ".address_size" => {
                    if self.number()? != 64 {
                        return Err(Refusal::PtxVersion);
                    }
                }
                ".file" | ".loc" => self.skip_line(token),
                ".section" => {
                    while !self.next()?.is(b'{') {}
                    self.skip_braces()?;
                }
                ".alias" => {
                    let (name, of) = (self.name()?, (self.next()?, self.name()?).1);
                    let of = Some(self.text(of));
                    self.skip_statement()?;
                    self.add_func(self.text(name), None, of)?;
                }
                ";" => {}
                _ => return Err(MALFORMED),
            }
            has_linkage = false;
        }
        Ok(())
    }

    fn target(&mut self) -> Result<(), Refusal> {
        loop {
            let name = self.name()?;
            if let Some(number) = self.text(name).strip_prefix("sm_") {
                let digits = number.trim_end_matches(|c: char| c.is_ascii_lowercase());
                self.module.target = digits.parse().map_err(|_| MALFORMED)?;
            }
            if !self.next_is(b',') {
                return Ok(());
            }
            self.at += 1;
        }
    }

    fn skip_line(&mut self, of: Token) {
        let end = lex::line_end(self.module.source, of.start);
        while self.peek().is_some_and(|t| t.start < end) {
            self.at += 1;
        }
    }

    fn skip_statement(&mut self) -> Result<(), Refusal> {
        while !self.next()?.is(b';') {}
        Ok(())
    }

    /// Past the brace that closes the one just taken.
    fn skip_braces(&mut self) -> Result<(), Refusal> {
        let mut depth = 1usize;
        while depth > 0 {
            match self.next()?.kind {
                Kind::Punct(b'{') => depth += 1,
                Kind::Punct(b'}') => depth -= 1,
                _ => {}
            }
        }
        Ok(())
    }

    /// A parenthesised list, if one comes; the range includes the parentheses.
    fn list(&mut self) -> Result<Option<Range<usize>>, Refusal> {
        if !self.next_is(b'(') {
            return Ok(None);
        }
        let start = self.at;
        let mut depth = 0usize;
        loop {
            match self.next()?.kind {
                Kind::Punct(b'(') => depth += 1,
                Kind::Punct(b')') => depth -= 1,
                Kind::Punct(b'{' | b'}' | b';') => return Err(MALFORMED),
                _ => {}
            }
            if depth == 0 {
                return Ok(Some(start..self.at));
            }
        }
    }

    /// The body that follows, or `None` for a declaration.
    fn body(&mut self) -> Result<Option<Range<usize>>, Refusal> {
        let open = self.next()?;
        if open.is(b';') {
            return Ok(None);
        }
        if !open.is(b'{') {
            return Err(MALFORMED);
        }
        let start = self.at;
        self.skip_braces()?;
        Ok(Some(start..self.at - 1))
    }

    fn entry(&mut self) -> Result<(), Refusal> {
        let name_token = self.name()?;
        let name = self.text(name_token);
        let list = self.list()?;
        let inner = list.clone().map_or(0..0, |l| l.start + 1..l.end - 1);
        let layout = params::layout(self.module.source, &self.module.tokens[inner]);
        let mut entry = Entry {
            name,
            name_token,
            list,
            layout,
            cluster: None,
            may_cluster: false,
            counts_clusters: false,
            body: 0..0,
        };
        self.entry_directives(&mut entry)?;
        let Some(body) = self.body()? else {
            self.module.declared.push(Declared { name, name_token, list: entry.list });
            return Ok(());
        };
        entry.body = body;
        let symbol = Symbol::Entry(self.module.entries.len());
        if self.module.symbols.insert(name, symbol).is_some() {
            return Err(MALFORMED);
        }
        self.module.entries.push(entry);
        Ok(())
    }

    fn entry_directives(&mut self, entry: &mut Entry<'a>) -> Result<(), Refusal> {
        while let Some(token) = self.peek().filter(|t| t.kind == Kind::Dot) {
            self.at += 1;
            match self.text(token) {
                ".reqnctapercluster" => {
                    let mut dims = [1; 3];
                    for (i, value) in self.numbers()?.into_iter().enumerate() {
                        *dims.get_mut(i).ok_or(MALFORMED)? =
                            u32::try_from(value).map_err(|_| MALFORMED)?;
                    }
                    entry.cluster = Some(dims);
                }
                ".explicitcluster" => entry.may_cluster = true,
                ".maxclusterrank" => {
                    entry.may_cluster = true;
                    self.number()?;
                }
                ".blocksareclusters" => entry.counts_clusters = true,
                ".maxntid" | ".reqntid" | ".minnctapersm" | ".maxnctapersm" | ".maxnreg" => {
                    self.numbers()?;
                }
                ".noreturn" => {}
                ".pragma" => self.skip_statement()?,
                _ => return Err(MALFORMED),
            }
        }
        Ok(())
    }

    /// One or more numbers between commas.
    fn numbers(&mut self) -> Result<Vec<u64>, Refusal> {
        let mut out = vec![self.number()?];
        while self.next_is(b',') && out.len() < 3 {
            self.at += 1;
            out.push(self.number()?);
        }
        Ok(out)
    }

    fn func(&mut self) -> Result<(), Refusal> {
        // `.attribute(...)` and `.noreturn` may come before the results.
        while self.peek().is_some_and(|t| t.kind == Kind::Dot) {
            self.at += 1;
            self.list()?;
        }
        self.list()?;
        let name = self.name()?;
        self.list()?;
        while let Some(token) = self.peek().filter(|t| t.kind == Kind::Dot) {
            self.at += 1;
            match self.text(token) {
                ".noreturn" => {}
                ".pragma" => self.skip_statement()?,
                // `.abi_preserve 8`, `.unified (...)` and what may come.
                _ => {
                    self.list()?;
                    while self.peek().is_some_and(|t| t.kind == Kind::Number || t.is(b',')) {
                        self.at += 1;
                    }
                }
            }
        }
        let body = self.body()?;
        self.add_func(self.text(name), body, None)
    }

    fn add_func(
        &mut self,
        name: &'a str,
        body: Option<Range<usize>>,
        alias_of: Option<&'a str>,
    ) -> Result<(), Refusal> {
        match self.module.symbols.get(name) {
            None => {
                self.module.symbols.insert(name, Symbol::Func(self.module.funcs.len()));
                self.module.funcs.push(Func { name, body, alias_of });
            }
            Some(Symbol::Func(at)) => {
                let func = &mut self.module.funcs[*at];
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

    /// `.global .align 4 .u32 a[2] = {1, 2}, b;` after the space.
    fn variables(&mut self, private: bool) -> Result<(), Refusal> {
        let first = self.module.vars.len();
        let (mut depth, mut named, mut bytes, mut values) = (0usize, false, false, false);
        let (mut fresh, mut name) = (false, "");
        loop {
            let token = self.next()?;
            match token.kind {
                Kind::Punct(b';') if depth == 0 => break,
                Kind::Punct(b';') => return Err(MALFORMED),
                Kind::Punct(b'(' | b'[' | b'{') => depth += 1,
                Kind::Punct(b')' | b']' | b'}') => {
                    depth = depth.checked_sub(1).ok_or(MALFORMED)?;
                }
                Kind::Punct(b',') if depth == 0 => (named, values) = (false, false),
                Kind::Punct(b'=') if depth == 0 => {
                    values = true;
                    let var = self.module.vars[first..].last_mut().ok_or(MALFORMED)?;
                    var.literal = private && bytes && fresh;
                    var.math_table = private && fresh && MATH_TABLES.contains(&name);
                }
                Kind::Dot => bytes |= matches!(self.text(token), ".b8" | ".u8" | ".s8"),
                Kind::Word if values => self.module.initialisers.push(self.text(token)),
                Kind::Word if depth == 0 && !named => {
                    named = true;
                    name = self.text(token);
                    fresh = self.variable(name)?;
                }
                _ => {}
            }
        }
        if self.module.vars.len() == first { Err(MALFORMED) } else { Ok(()) }
    }

    /// Whether the name is new. A declaration and its definition are one variable, and
    /// no literal.
    fn variable(&mut self, name: &'a str) -> Result<bool, Refusal> {
        let at = self.module.vars.len();
        self.module.vars.push(Var { literal: false, math_table: false, in_initialiser: false });
        match self.module.symbols.insert(name, Symbol::Var(at)) {
            None => Ok(true),
            Some(Symbol::Var(_)) => Ok(false),
            Some(_) => Err(MALFORMED),
        }
    }
}
