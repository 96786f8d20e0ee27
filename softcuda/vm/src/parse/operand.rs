//! Parses the operands of instructions.

use super::{Cursor, Found, Parser, Result, special};
use crate::ast::{Base, Operand};
use tally_ptx::{Lexeme, Number, number};

/// The most operands in a vector or a list; calls of real programs pass fewer.
const LIST_MAX: usize = 256;

/// The error of an address of several parts.
pub(super) const TENSOR_ADDRESS: &str = "tensor and multi-part addresses are unsupported";

impl<'a> Parser<'a> {
    pub(super) fn operands(&mut self, at: &mut Cursor<'a>) -> Result<Vec<Operand>> {
        let mut args = Vec::new();
        if at.is_at_end() {
            return Ok(args);
        }
        loop {
            args.push(self.operand(at)?);
            if !at.eat(b',') {
                return Ok(args);
            }
        }
    }

    fn operand(&mut self, at: &mut Cursor<'a>) -> Result<Operand> {
        let first = match at.peek() {
            Lexeme::Punct(b'{') => Operand::Vec(self.list(at, b'{', b'}')?),
            Lexeme::Punct(b'(') => Operand::List(self.list(at, b'(', b')')?),
            Lexeme::Punct(b'[') => self.address(at)?,
            _ => self.scalar(at)?,
        };
        if at.eat(b'|') {
            let second = self.scalar(at)?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }

    fn list(&mut self, at: &mut Cursor<'a>, open: u8, close: u8) -> Result<Vec<Operand>> {
        at.expect(open)?;
        let mut items = Vec::new();
        while !at.eat(close) {
            if items.len() == LIST_MAX {
                return Err(at.error("too many operands in a list"));
            }
            items.push(self.scalar(at)?);
            if !at.eat(b',') {
                at.expect(close)?;
                break;
            }
        }
        Ok(items)
    }

    fn address(&mut self, at: &mut Cursor<'a>) -> Result<Operand> {
        at.expect(b'[')?;
        let base = match at.peek() {
            Lexeme::Word(name) => {
                at.skip();
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
            offset = signed(at)?;
        }
        while matches!(at.peek(), Lexeme::Punct(b'+' | b'-')) {
            let negative = at.take() == Lexeme::Punct(b'-');
            let value = signed(at)?;
            offset = if negative { offset.wrapping_sub(value) } else { offset.wrapping_add(value) };
        }
        if at.is(b',') {
            return Err(at.error(TENSOR_ADDRESS));
        }
        at.expect(b']')?;
        Ok(Operand::Addr(base, offset))
    }

    fn scalar(&mut self, at: &mut Cursor<'a>) -> Result<Operand> {
        match at.peek() {
            Lexeme::Number(_) => literal(at, false),
            Lexeme::Punct(b'-') => {
                at.skip();
                literal(at, true)
            }
            Lexeme::Punct(b'~') => {
                at.skip();
                Ok(Operand::Int(!at.integer()?))
            }
            Lexeme::Punct(b'!') => {
                at.skip();
                let name = at.word()?;
                match self.lookup(name) {
                    Some(Found::Reg(r)) => Ok(Operand::Not(r)),
                    _ => Err(at.error(format!("`{name}` is no register"))),
                }
            }
            Lexeme::Word(name) => self.named(at, name),
            _ => Err(at.unexpected("an operand")),
        }
    }

    fn named(&mut self, at: &mut Cursor<'a>, name: &str) -> Result<Operand> {
        at.skip();
        if name == "_" {
            return Ok(Operand::Sink);
        }
        match self.lookup(name) {
            Some(Found::Reg(r)) => return Ok(Operand::Reg(r)),
            Some(Found::Var(sym)) => {
                let mut offset = 0;
                if matches!(at.peek(), Lexeme::Punct(b'+' | b'-')) {
                    let negative = at.take() == Lexeme::Punct(b'-');
                    let value = signed(at)?;
                    offset = if negative { value.wrapping_neg() } else { value };
                }
                return Ok(Operand::Sym(sym, offset));
            }
            None => {}
        }
        let suffix = match at.peek() {
            Lexeme::Dot(word @ (".x" | ".y" | ".z" | ".w")) => Some(word),
            _ => None,
        };
        if let Some(sreg) = special(name, suffix) {
            if suffix.is_some() {
                at.skip();
            }
            return Ok(Operand::Special(sreg));
        }
        if name.starts_with('%') {
            return Err(at.error(format!("register `{name}` is not declared")));
        }
        let scope = self.scopes.last().map_or(0, |s| s.id);
        Ok(Operand::Name(name.into(), scope))
    }
}

fn signed(at: &mut Cursor<'_>) -> Result<i64> {
    let negative = at.eat(b'-');
    let value = at.integer()? as i64;
    Ok(if negative { value.wrapping_neg() } else { value })
}

fn literal(at: &mut Cursor<'_>, negative: bool) -> Result<Operand> {
    let value = match at.peek() {
        Lexeme::Number(text) => number(text),
        _ => None,
    };
    let value = value.ok_or_else(|| at.unexpected("a number"))?;
    at.skip();
    let sign = u64::from(negative);
    Ok(match value {
        Number::Int(v) => Operand::Int(if negative { v.wrapping_neg() } else { v }),
        Number::F32(v) => Operand::F32(v ^ (sign as u32) << 31),
        Number::F64(v) => Operand::F64(v ^ sign << 63),
    })
}
