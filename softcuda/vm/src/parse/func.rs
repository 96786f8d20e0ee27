//! Functions: headers, scopes, labels and statements.

use super::data::{Decl, class_of};
use super::{Entity, PARAM_BYTES_MAX, Parser, Result, Scope};
use crate::ast::{Class, Formal, Function, Instr, Sym};
use crate::error::PtxError;
use crate::lex::Tok;

/// Scopes nested deeper than this are refused.
const SCOPE_DEPTH_MAX: usize = 256;

impl<'a> Parser<'a> {
    pub(super) fn function(&mut self, entry: bool, line: u32) -> Result<()> {
        self.regs = Vec::new();
        (self.frame_now, self.frame_max) = (0, 0);
        let mut f = Function { line, entry, scopes: vec![0], ..Function::default() };
        self.scopes.push(Scope::default());
        if !entry && self.lex.peek() == Tok::Punct('(') {
            f.rets = self.formals(&mut f.param_bytes, false)?;
        }
        f.name = self.ident()?.to_string();
        if self.lex.peek() == Tok::Punct('(') {
            f.params = self.formals(&mut f.param_bytes, entry)?;
        }
        self.function_directives(&mut f)?;
        if self.lex.peek() == Tok::Punct('{') {
            f.has_body = true;
            self.body(&mut f)?;
        } else {
            self.expect(';')?;
        }
        self.scopes.truncate(1);
        f.frame_bytes = self.frame_max.next_multiple_of(16);
        f.regs = std::mem::take(&mut self.regs);
        self.add_function(f)
    }

    fn add_function(&mut self, f: Function) -> Result<()> {
        if let Some(&at) = self.unit.names.get(&f.name) {
            let old = &mut self.unit.functions[at];
            if f.has_body && old.has_body {
                return Err(PtxError::new(f.line, format!("`{}` is defined twice", f.name)));
            }
            if f.has_body {
                *old = f;
            }
            return Ok(());
        }
        self.unit.names.insert(f.name.clone(), self.unit.functions.len());
        self.unit.functions.push(f);
        Ok(())
    }

    fn formals(&mut self, param_bytes: &mut u32, entry: bool) -> Result<Vec<Formal>> {
        self.expect('(')?;
        let mut out = Vec::new();
        while !self.eat(')') {
            let in_reg = match self.lex.peek() {
                Tok::Dot("reg") => true,
                Tok::Dot("param") => false,
                _ => return self.unexpected("`.param` or `.reg`"),
            };
            self.lex.next();
            let decl = self.decl()?;
            out.push(self.formal(&decl, in_reg, param_bytes, entry)?);
            if !self.eat(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(out)
    }

    fn formal(
        &mut self,
        decl: &Decl<'a>,
        in_reg: bool,
        param_bytes: &mut u32,
        entry: bool,
    ) -> Result<Formal> {
        let size = decl.size as u32;
        if decl.size > PARAM_BYTES_MAX {
            return self.err(format!("parameter `{}` is too large", decl.name));
        }
        if in_reg {
            let class = if decl.elem == "pred" { Class::Pred } else { class_of(decl.elem_bytes) };
            self.declare(decl.name, Entity::Reg(class));
            let reg = self.formal_register(decl.name);
            return Ok(Formal { reg, offset: 0, size, align: decl.align });
        }
        let offset = if entry {
            let offset = param_bytes.next_multiple_of(decl.align);
            if u64::from(offset) + decl.size > PARAM_BYTES_MAX {
                return self.err("the parameters are too large");
            }
            *param_bytes = offset + size;
            self.declare(decl.name, Entity::Var(Sym::Param(offset)));
            offset
        } else {
            self.frame_variable(decl)?
        };
        Ok(Formal { reg: None, offset, size, align: decl.align })
    }

    fn function_directives(&mut self, f: &mut Function) -> Result<()> {
        while let Tok::Dot(word) = self.lex.peek() {
            self.lex.next();
            match word {
                "maxntid" => {
                    let [x, y, z] = self.triple()?;
                    f.max_threads = Some(x.saturating_mul(y).saturating_mul(z));
                }
                "reqntid" => {
                    let block = self.triple()?;
                    f.required_block = Some(block);
                    f.max_threads =
                        Some(block.iter().fold(1u32, |n, &axis| n.saturating_mul(axis)));
                }
                "minnctapersm" | "maxnreg" | "maxnctapersm" | "maxclusterrank" => {
                    self.int32()?;
                }
                "reqnctapercluster" => {
                    let cluster = self.triple()?;
                    if cluster != [1, 1, 1] {
                        f.unsupported.get_or_insert(PtxError::new(
                            self.lex.peek_line(),
                            "unsupported directive `.reqnctapercluster` above 1",
                        ));
                    }
                }
                "explicitcluster" | "noreturn" | "blocksareclusters" => {}
                "pragma" | "abi_preserve" | "abi_preserve_control" => {
                    while matches!(
                        self.lex.peek(),
                        Tok::Str(_) | Tok::Punct(',' | ';') | Tok::Int(_)
                    ) {
                        self.lex.next();
                    }
                }
                other => return self.err(format!("unsupported directive `.{other}`")),
            }
        }
        Ok(())
    }

    fn body(&mut self, f: &mut Function) -> Result<()> {
        self.expect('{')?;
        let floor = self.scopes.len();
        loop {
            let line = self.lex.peek_line();
            match self.lex.peek() {
                Tok::End => return self.err(format!("the body of `{}` never ends", f.name)),
                Tok::Punct('{') => {
                    self.lex.next();
                    self.open_scope(f, floor)?;
                }
                Tok::Punct('}') => {
                    self.lex.next();
                    if self.scopes.len() == floor {
                        return Ok(());
                    }
                    if let Some(scope) = self.scopes.pop() {
                        self.frame_now = scope.frame_mark;
                    }
                }
                Tok::Punct(';') => {
                    self.lex.next();
                }
                Tok::Dot(word) => {
                    self.lex.next();
                    self.local_directive(word, line)?;
                }
                Tok::Punct('@') => {
                    self.lex.next();
                    let negated = self.eat('!');
                    let name = self.ident()?;
                    let guard = match self.formal_register(name) {
                        Some(r) if self.regs[r as usize] == Class::Pred => Some((r, negated)),
                        _ => return self.err(format!("`{name}` is no predicate register")),
                    };
                    let start = self.lex.start();
                    let root = self.ident()?;
                    self.instruction(f, root, start, line, guard)?;
                }
                Tok::Ident(word) => {
                    let start = self.lex.start();
                    self.lex.next();
                    if self.eat(':') {
                        self.label(f, word)?;
                    } else {
                        self.instruction(f, word, start, line, None)?;
                    }
                }
                _ => return self.unexpected("a statement"),
            }
        }
    }

    fn open_scope(&mut self, f: &mut Function, floor: usize) -> Result<()> {
        if self.scopes.len() - floor >= SCOPE_DEPTH_MAX {
            return self.err("scopes are nested too deeply");
        }
        let parent = self.scopes.last().map_or(0, |s| s.id);
        let id = f.scopes.len() as u32;
        f.scopes.push(parent);
        self.scopes.push(Scope { id, frame_mark: self.frame_now, ..Scope::default() });
        Ok(())
    }

    /// A label, or the table that it names.
    fn label(&mut self, f: &mut Function, name: &str) -> Result<()> {
        let scope = self.scopes.last().map_or(0, |s| s.id);
        match self.lex.peek() {
            Tok::Dot("branchtargets") => {
                self.lex.next();
                let mut labels = vec![(self.ident()?.into(), scope)];
                while self.eat(',') {
                    labels.push((self.ident()?.into(), scope));
                }
                self.expect(';')?;
                f.tables.insert(name.into(), labels);
            }
            // Says which functions an indirect call may reach: a hint.
            Tok::Dot("calltargets" | "callprototype") => self.skip_statement(),
            _ => {
                if f.labels.insert((name.into(), scope), f.instrs.len() as u32).is_some() {
                    return self.err(format!("label `{name}` is defined twice"));
                }
            }
        }
        Ok(())
    }

    fn local_directive(&mut self, word: &str, line: u32) -> Result<()> {
        match word {
            "reg" => self.registers(),
            "local" | "param" | "shared" => {
                loop {
                    let decl = self.decl()?;
                    if word == "shared" {
                        self.shared_variable(&decl, false)?;
                    } else {
                        self.frame_variable(&decl)?;
                    }
                    if !self.eat(',') {
                        break;
                    }
                }
                self.expect(';')
            }
            "global" | "const" => self.module_variable(word, super::Linkage::default()),
            "loc" => {
                self.skip_line(line);
                Ok(())
            }
            "pragma" => {
                self.skip_statement();
                Ok(())
            }
            other => Err(PtxError::new(line, format!("unsupported directive `.{other}`"))),
        }
    }

    fn instruction(
        &mut self,
        f: &mut Function,
        root: &str,
        start: usize,
        line: u32,
        guard: Option<(u32, bool)>,
    ) -> Result<()> {
        let mut op = root.to_string();
        while let Tok::Dot(word) = self.lex.peek() {
            self.lex.next();
            op.push('.');
            op.push_str(word);
        }
        let args = match self.operands() {
            Ok(args) if self.lex.peek() == Tok::Punct(';') => args,
            Ok(_) => return self.unexpected("`,` or `;`"),
            // Operands this parser has no notion of (tensors, textures) make
            // the function unusable, not the module.
            Err(e) if self.lex_bracketed() => {
                self.skip_statement();
                f.unsupported.get_or_insert(PtxError::new(
                    line,
                    format!("unsupported instruction `{op}`: {}", e.message),
                ));
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        self.lex.next();
        let text = self.lex.text_since(start);
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        f.instrs.push(Instr { line, guard, op: op.into(), args, text: text.into() });
        Ok(())
    }

    /// The parser stopped inside `[...]` at a comma.
    fn lex_bracketed(&self) -> bool {
        self.lex.peek() == Tok::Punct(',')
    }
}
