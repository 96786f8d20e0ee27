//! Functions: headers, scopes, labels and statements.

use super::data::class_of;
use super::operand::TENSOR_ADDRESS;
use super::{Entity, PARAM_BYTES_MAX, Parser, Result, Scope};
use crate::ast::{Class, Formal, Function, Instr, Sym};
use std::iter::Peekable;
use tally_ptx::{
    Cursor, Declaration, Instruction, Lexeme, Linkage, PtxError, Statement, Statements, Token,
    declarations, inside, parameters, statements,
};

impl<'a> Parser<'a> {
    pub(super) fn function(&mut self, head: &tally_ptx::Function<'a>) -> Result<()> {
        self.regs = Vec::new();
        (self.frame_now, self.frame_max) = (0, 0);
        let (entry, line) = (head.is_entry, head.name.line);
        let name = head.name.text(self.source).to_owned();
        let mut f = Function { name, line, entry, scopes: vec![0], ..Function::default() };
        self.scopes.push(Scope::default());
        f.rets = self.formals(head.results, &mut f.param_bytes, false)?;
        f.params = self.formals(head.parameters, &mut f.param_bytes, entry)?;
        let threads = |block: [u32; 3]| block.iter().fold(1u32, |n, &axis| n.saturating_mul(axis));
        f.required_block = head.threads;
        f.max_threads = head.threads.or(head.threads_max).map(threads);
        if head.cluster.is_some_and(|cluster| cluster != [1; 3]) {
            let message = "unsupported directive `.reqnctapercluster` above 1";
            f.unsupported = Some(PtxError::new(line, message));
        }
        if let Some(body) = head.body {
            f.has_body = true;
            self.body(&mut f, inside(body))?;
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

    fn formals(
        &mut self,
        list: Option<&'a [Token]>,
        param_bytes: &mut u32,
        entry: bool,
    ) -> Result<Vec<Formal>> {
        let all = parameters(self.source, list.unwrap_or_default());
        all.map(|parameter| self.formal(&parameter?, param_bytes, entry)).collect()
    }

    fn formal(
        &mut self,
        decl: &Declaration<'a>,
        param_bytes: &mut u32,
        entry: bool,
    ) -> Result<Formal> {
        let layout = decl.layout()?;
        let error = |message| Err(PtxError::new(decl.name.line, message));
        if layout.bytes > PARAM_BYTES_MAX {
            return error(format!("parameter `{}` is too large", decl.name()));
        }
        let (size, align) = (layout.bytes as u32, layout.align);
        if decl.space == ".reg" {
            let is_pred = layout.element == ".pred";
            let class = if is_pred { Class::Pred } else { class_of(layout.element_bytes) };
            self.declare(decl.name(), Entity::Reg(class));
            let reg = self.formal_register(decl.name());
            return Ok(Formal { reg, offset: 0, size, align });
        }
        let offset = if entry {
            let offset = param_bytes.next_multiple_of(align);
            if u64::from(offset) + layout.bytes > PARAM_BYTES_MAX {
                return error("the parameters are too large".to_owned());
            }
            *param_bytes = offset + size;
            self.declare(decl.name(), Entity::Var(Sym::Param(offset)));
            offset
        } else {
            self.frame_variable(decl)?
        };
        Ok(Formal { reg: None, offset, size, align })
    }

    fn body(&mut self, f: &mut Function, body: &'a [Token]) -> Result<()> {
        let mut rest = statements(self.source, body).peekable();
        while let Some(statement) = rest.next() {
            match statement? {
                Statement::Open => self.open_scope(f),
                Statement::Close => {
                    if let Some(scope) = self.scopes.pop() {
                        self.frame_now = scope.frame_mark;
                    }
                }
                Statement::Label(name) => self.label(f, name, &mut rest)?,
                Statement::Directive(directive) => self.local_directive(directive)?,
                Statement::Instruction(instruction) => self.instruction(f, &instruction)?,
            }
        }
        Ok(())
    }

    fn open_scope(&mut self, f: &mut Function) {
        let parent = self.scopes.last().map_or(0, |s| s.id);
        let id = f.scopes.len() as u32;
        f.scopes.push(parent);
        self.scopes.push(Scope { id, frame_mark: self.frame_now, ..Scope::default() });
    }

    /// A label, or the table that it names.
    fn label(
        &mut self,
        f: &mut Function,
        token: Token,
        rest: &mut Peekable<Statements<'a>>,
    ) -> Result<()> {
        let name = token.text(self.source);
        let scope = self.scopes.last().map_or(0, |s| s.id);
        if let Some(Ok(Statement::Directive(table))) = rest.peek() {
            let mut at = Cursor::new(self.source, table);
            match at.take() {
                Lexeme::Dot(".branchtargets") => {
                    let mut labels = vec![(at.word()?.into(), scope)];
                    while at.eat(b',') {
                        labels.push((at.word()?.into(), scope));
                    }
                    if !at.is_at_end() {
                        return Err(at.unexpected("`,` or `;`"));
                    }
                    f.tables.insert(name.into(), labels);
                    rest.next();
                    return Ok(());
                }
                // Says which functions an indirect call may reach: a hint.
                Lexeme::Dot(".calltargets" | ".callprototype") => {
                    rest.next();
                    return Ok(());
                }
                _ => {}
            }
        }
        if f.labels.insert((name.into(), scope), f.instrs.len() as u32).is_some() {
            return Err(PtxError::new(token.line, format!("label `{name}` is defined twice")));
        }
        Ok(())
    }

    fn local_directive(&mut self, directive: &'a [Token]) -> Result<()> {
        let at = Cursor::new(self.source, directive);
        match at.peek() {
            Lexeme::Dot(".reg") => self.registers(directive)?,
            Lexeme::Dot(space @ (".local" | ".param" | ".shared" | ".global" | ".const")) => {
                for declaration in declarations(self.source, directive) {
                    let declaration = declaration?;
                    if let ".local" | ".param" = space {
                        self.frame_variable(&declaration)?;
                    } else {
                        self.module_variable(Linkage::default(), &declaration)?;
                    }
                }
            }
            Lexeme::Dot(".pragma") => {}
            _ => return Err(at.unexpected("a directive of a body")),
        }
        Ok(())
    }

    fn instruction(&mut self, f: &mut Function, instruction: &Instruction<'a>) -> Result<()> {
        let Instruction { opcode, qualifiers, .. } = *instruction;
        let guard = match instruction.guard {
            None => None,
            Some(guard) => {
                let name = guard.register.text(self.source);
                match self.formal_register(name) {
                    Some(r) if self.regs[r as usize] == Class::Pred => Some((r, guard.is_negated)),
                    _ => {
                        let message = format!("`{name}` is no predicate register");
                        return Err(PtxError::new(opcode.line, message));
                    }
                }
            }
        };
        let parts = std::iter::once(&opcode).chain(qualifiers).map(|t| t.text(self.source));
        let op: String = parts.collect();
        let mut at = Cursor::new(self.source, instruction.operands);
        let args = match self.operands(&mut at) {
            Ok(args) if at.is_at_end() => args,
            Ok(_) => return Err(at.unexpected("`,` or `;`")),
            // Operands this parser has no notion of (tensors, textures) make the function
            // unusable, not the module.
            Err(e) if e.message == TENSOR_ADDRESS => {
                f.unsupported.get_or_insert(PtxError::new(
                    opcode.line,
                    format!("unsupported instruction `{op}`: {}", e.message),
                ));
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        let text = instruction.text(self.source).split_whitespace().collect::<Vec<_>>().join(" ");
        let line = opcode.line;
        f.instrs.push(Instr { line, guard, op: op.into(), args, text: text.into() });
        Ok(())
    }
}
