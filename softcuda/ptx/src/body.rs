//! Statements of a function's body.

use crate::{Cursor, Lexeme, Result, Token};

/// A piece of a body.
#[derive(Clone, Copy, Debug)]
pub enum Statement<'a> {
    Open,
    Close,
    Label(Token),
    /// From its dot to before its semicolon.
    Directive(&'a [Token]),
    Instruction(Instruction<'a>),
}

#[derive(Clone, Copy, Debug)]
pub struct Instruction<'a> {
    pub guard: Option<Guard>,
    pub opcode: Token,
    pub qualifiers: &'a [Token],
    /// Tokens of the operands, up to the semicolon.
    pub operands: &'a [Token],
}

/// The predicate of an instruction: `@%p1`, or `@!%p1` if it is negated.
#[derive(Clone, Copy, Debug)]
pub struct Guard {
    pub register: Token,
    pub is_negated: bool,
}

impl<'a> Instruction<'a> {
    /// From the opcode to the last operand.
    pub fn text(&self, source: &'a str) -> &'a str {
        let last = self.operands.last().or(self.qualifiers.last()).unwrap_or(&self.opcode);
        source.get(self.opcode.start as usize..last.end() as usize).unwrap_or("")
    }
}

/// The statements of a body: what is between its braces. `.loc` and other lines of debug data
/// are left out. After an error there are no more.
pub fn statements<'a>(source: &'a str, body: &'a [Token]) -> Statements<'a> {
    Statements { at: Cursor::new(source, body) }
}

#[derive(Clone, Debug)]
pub struct Statements<'a> {
    at: Cursor<'a>,
}

impl<'a> Iterator for Statements<'a> {
    type Item = Result<Statement<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.statement().transpose();
        if let Some(Err(_)) = next {
            self.at.finish();
        }
        next
    }
}

impl<'a> Statements<'a> {
    fn statement(&mut self) -> Result<Option<Statement<'a>>> {
        let at = &mut self.at;
        loop {
            let statement = match at.peek() {
                Lexeme::End => return Ok(None),
                Lexeme::Punct(b';') => {
                    at.skip();
                    continue;
                }
                Lexeme::Dot(".loc" | ".file") => {
                    at.skip_line();
                    continue;
                }
                Lexeme::Punct(b'{') => Statement::Open,
                Lexeme::Punct(b'}') => Statement::Close,
                Lexeme::Dot(_) => return Ok(Some(Statement::Directive(at.statement()?))),
                Lexeme::Punct(b'@') => {
                    let mut ahead = *at;
                    ahead.skip();
                    if ahead.is(b'@') {
                        at.skip_line();
                        continue;
                    }
                    let is_negated = ahead.eat(b'!');
                    let guard = Guard { register: ahead.name()?, is_negated };
                    *at = ahead;
                    return instruction(at, Some(guard)).map(Some);
                }
                Lexeme::Word(_) => {
                    let mut ahead = *at;
                    let name = ahead.name()?;
                    if ahead.eat(b':') {
                        *at = ahead;
                        return Ok(Some(Statement::Label(name)));
                    }
                    return instruction(at, None).map(Some);
                }
                _ => return Err(at.unexpected("a statement")),
            };
            at.skip();
            return Ok(Some(statement));
        }
    }
}

fn instruction<'a>(at: &mut Cursor<'a>, guard: Option<Guard>) -> Result<Statement<'a>> {
    let opcode = at.name()?;
    let from = at.position();
    while let Lexeme::Dot(_) = at.peek() {
        at.skip();
    }
    let qualifiers = at.since(from);
    let operands = at.statement()?;
    Ok(Statement::Instruction(Instruction { guard, opcode, qualifiers, operands }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lex;

    fn shown(source: &str) -> Result<Vec<String>> {
        let tokens = lex(source)?;
        let all = statements(source, &tokens).map(|statement| {
            Ok(match statement? {
                Statement::Open => "{".to_owned(),
                Statement::Close => "}".to_owned(),
                Statement::Label(name) => format!("{}:", name.text(source)),
                Statement::Directive(tokens) => format!("directive {}", tokens.len()),
                Statement::Instruction(it) => {
                    let guard = it.guard.map(|g| (g.register.text(source), g.is_negated));
                    let sizes = (it.qualifiers.len(), it.operands.len());
                    format!("{guard:?} {} {sizes:?}", it.text(source))
                }
            })
        });
        all.collect()
    }

    #[test]
    fn bodies_fall_into_statements() {
        let source = ".reg .b32 %r<2>;\n{ $L: @!%p mov.u32 %r1, {1};;\n.loc 1 2 3\n@@DWARF x y\nret; }\n\
            t: .branchtargets a, b;";
        assert_eq!(
            shown(source).unwrap(),
            [
                "directive 6",
                "{",
                "$L:",
                "Some((\"%p\", true)) mov.u32 %r1, {1} (1, 5)",
                "None ret (0, 0)",
                "}",
                "t:",
                "directive 4",
            ]
        );
    }

    #[test]
    fn statements_that_are_none_end_the_body() {
        for source in ["ret", "ret; 3;", "@ ret;", "@%p;", "@!;", ".reg .b32 %r", "\"s\";", "é"] {
            let tokens = lex(source).unwrap();
            let mut all = statements(source, &tokens);
            assert!(all.by_ref().any(|s| s.is_err()), "{source}");
            assert!(all.next().is_none(), "{source}");
        }
    }
}
