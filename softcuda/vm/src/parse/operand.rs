//! Operands of instructions.

use super::{Found, Parser, Result, special};
use crate::ast::{Base, Operand};
use crate::lex::Tok;

/// The most operands in a vector or a list; calls of real programs pass fewer.
const LIST_MAX: usize = 256;

impl Parser<'_> {
    pub(super) fn operands(&mut self) -> Result<Vec<Operand>> {
        let mut args = Vec::new();
        if self.lex.peek() == Tok::Punct(';') {
            return Ok(args);
        }
        loop {
            args.push(self.operand()?);
            if !self.eat(',') {
                return Ok(args);
            }
        }
    }

    fn operand(&mut self) -> Result<Operand> {
        let first = match self.lex.peek() {
            Tok::Punct('{') => Operand::Vec(self.list('{', '}')?),
            Tok::Punct('(') => Operand::List(self.list('(', ')')?),
            Tok::Punct('[') => self.address()?,
            _ => self.scalar()?,
        };
        if self.eat('|') {
            let second = self.scalar()?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }

    fn list(&mut self, open: char, close: char) -> Result<Vec<Operand>> {
        self.expect(open)?;
        let mut items = Vec::new();
        while !self.eat(close) {
            if items.len() == LIST_MAX {
                return self.err("too many operands in a list");
            }
            items.push(self.scalar()?);
            if !self.eat(',') {
                self.expect(close)?;
                break;
            }
        }
        Ok(items)
    }

    fn address(&mut self) -> Result<Operand> {
        self.expect('[')?;
        let base = match self.lex.peek() {
            Tok::Ident(name) => {
                self.lex.next();
                match self.lookup(name) {
                    Some(Found::Reg(r)) => Base::Reg(r),
                    Some(Found::Var(sym)) => Base::Sym(sym),
                    None => Base::Name(name.into()),
                }
            }
            _ => Base::None,
        };
        let mut offset = 0i64;
        if base == Base::None {
            offset = self.signed()?;
        }
        while matches!(self.lex.peek(), Tok::Punct('+' | '-')) {
            let negative = self.lex.next() == Tok::Punct('-');
            let value = self.signed()?;
            offset = if negative { offset.wrapping_sub(value) } else { offset.wrapping_add(value) };
        }
        if self.lex.peek() == Tok::Punct(',') {
            return self.err("tensor and multi-part addresses are unsupported");
        }
        self.expect(']')?;
        Ok(Operand::Addr(base, offset))
    }

    fn signed(&mut self) -> Result<i64> {
        let negative = self.eat('-');
        let value = self.int()? as i64;
        Ok(if negative { value.wrapping_neg() } else { value })
    }

    fn scalar(&mut self) -> Result<Operand> {
        let tok = self.lex.peek();
        match tok {
            Tok::Int(v) => {
                self.lex.next();
                Ok(Operand::Int(v))
            }
            Tok::F32(v) => {
                self.lex.next();
                Ok(Operand::F32(v))
            }
            Tok::F64(v) => {
                self.lex.next();
                Ok(Operand::F64(v))
            }
            Tok::Punct('-') => {
                self.lex.next();
                match self.scalar_number()? {
                    Operand::Int(v) => Ok(Operand::Int(v.wrapping_neg())),
                    Operand::F32(v) => Ok(Operand::F32(v ^ 1 << 31)),
                    Operand::F64(v) => Ok(Operand::F64(v ^ 1 << 63)),
                    _ => self.unexpected("a number"),
                }
            }
            Tok::Punct('~') => {
                self.lex.next();
                Ok(Operand::Int(!self.int()?))
            }
            Tok::Punct('!') => {
                self.lex.next();
                let name = self.ident()?;
                match self.lookup(name) {
                    Some(Found::Reg(r)) => Ok(Operand::Not(r)),
                    _ => self.err(format!("`{name}` is no register")),
                }
            }
            Tok::Ident(name) => self.named(name),
            _ => self.unexpected("an operand"),
        }
    }

    fn scalar_number(&mut self) -> Result<Operand> {
        match self.lex.peek() {
            Tok::Int(_) | Tok::F32(_) | Tok::F64(_) => self.scalar(),
            _ => self.unexpected("a number"),
        }
    }

    fn named(&mut self, name: &str) -> Result<Operand> {
        self.lex.next();
        if name == "_" {
            return Ok(Operand::Sink);
        }
        match self.lookup(name) {
            Some(Found::Reg(r)) => return Ok(Operand::Reg(r)),
            Some(Found::Var(sym)) => {
                let mut offset = 0;
                if matches!(self.lex.peek(), Tok::Punct('+' | '-')) {
                    let negative = self.lex.next() == Tok::Punct('-');
                    let value = self.signed()?;
                    offset = if negative { value.wrapping_neg() } else { value };
                }
                return Ok(Operand::Sym(sym, offset));
            }
            None => {}
        }
        let suffix = match self.lex.peek() {
            Tok::Dot(word @ ("x" | "y" | "z" | "w")) => Some(word),
            _ => None,
        };
        if let Some(sreg) = special(name, suffix) {
            if suffix.is_some() {
                self.lex.next();
            }
            return Ok(Operand::Special(sreg));
        }
        if name.starts_with('%') {
            return self.err(format!("register `{name}` is not declared"));
        }
        let scope = self.scopes.last().map_or(0, |s| s.id);
        Ok(Operand::Name(name.into(), scope))
    }
}
