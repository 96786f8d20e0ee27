//! Declarations of variables and parameters.

use crate::{Cursor, Kind, Lexeme, PtxError, Result, Token, inside};

/// `.global .align 4 .v2 .b8 name[3][4] = {1, 2}`.
#[derive(Clone, Copy, Debug)]
pub struct Declaration<'a> {
    pub source: &'a str,
    /// The state space: `.global`.
    pub space: &'a str,
    /// Type and alignment; those of the directive's first declaration if it has none.
    pub words: &'a [Token],
    pub name: Token,
    /// The brackets and what is between them.
    pub dimensions: &'a [Token],
    /// What follows the equals sign.
    pub initialiser: Option<&'a [Token]>,
}

/// What a variable looks like in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout<'a> {
    /// The type's name: `.b8`.
    pub element: &'a str,
    /// Bytes of one element; 0 for `.pred`.
    pub element_bytes: u32,
    /// A power of two, at most 2^16.
    pub align: u32,
    /// Bytes in all, `u64::MAX` for as many or more.
    pub bytes: u64,
    /// A dimension is left open: `a[]`.
    pub is_open: bool,
}

/// The bytes of a fundamental type.
pub fn type_bytes(dot: &str) -> Option<u32> {
    Some(match dot {
        ".b8" | ".u8" | ".s8" => 1,
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => 2,
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => 4,
        ".b64" | ".u64" | ".s64" | ".f64" => 8,
        ".b128" => 16,
        _ => return None,
    })
}

/// The declarations of a list, in order. After an error there are no more.
#[derive(Clone, Debug)]
pub struct Declarations<'a> {
    at: Cursor<'a>,
    /// The state space and the words of the first declaration of a directive.
    first: Option<(&'a str, &'a [Token])>,
    is_parameters: bool,
    is_started: bool,
}

/// The parameters or results in a list of a [`Function`](crate::Function), in `.param` or `.reg`.
pub fn parameters<'a>(source: &'a str, list: &'a [Token]) -> Declarations<'a> {
    let at = Cursor::new(source, inside(list));
    Declarations { at, first: None, is_parameters: true, is_started: at.is_at_end() }
}

/// The variables of a directive, from its state space to before its semicolon.
pub fn declarations<'a>(source: &'a str, directive: &'a [Token]) -> Declarations<'a> {
    let at = Cursor::new(source, directive);
    Declarations { at, first: None, is_parameters: false, is_started: false }
}

impl<'a> Iterator for Declarations<'a> {
    type Item = Result<Declaration<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_started && self.at.is_at_end() {
            return None;
        }
        let next = self.declaration();
        self.is_started = true;
        if next.is_err() {
            self.at.finish();
        }
        Some(next)
    }
}

impl<'a> Declarations<'a> {
    fn declaration(&mut self) -> Result<Declaration<'a>> {
        if self.is_started {
            self.at.expect(b',')?;
        }
        if self.is_parameters {
            let Lexeme::Dot(space @ (".param" | ".reg")) = self.at.peek() else {
                return Err(self.at.unexpected("`.param` or `.reg`"));
            };
            self.at.skip();
            return declaration(&mut self.at, space);
        }
        let space = match (self.first, self.at.peek()) {
            (Some((space, _)), _) => space,
            (None, Lexeme::Dot(space)) => {
                self.at.skip();
                space
            }
            (None, _) => return Err(self.at.unexpected("a state space")),
        };
        let mut one = declaration(&mut self.at, space)?;
        let (_, words) = *self.first.get_or_insert((space, one.words));
        if one.words.is_empty() {
            one.words = words;
        }
        if self.at.eat(b'=') {
            one.initialiser = Some(initialiser(&mut self.at)?);
        }
        Ok(one)
    }
}

fn declaration<'a>(at: &mut Cursor<'a>, space: &'a str) -> Result<Declaration<'a>> {
    let from = at.position();
    while matches!(at.peek(), Lexeme::Dot(_) | Lexeme::Number(_)) {
        at.skip();
        at.parenthesised()?;
    }
    let words = at.since(from);
    let name = at.name()?;
    let from = at.position();
    while at.eat(b'[') {
        while !at.eat(b']') {
            if at.is_at_end() || at.is(b'[') {
                return Err(at.unexpected("`]`"));
            }
            at.skip();
        }
    }
    Ok(Declaration {
        source: at.source(),
        space,
        words,
        name,
        dimensions: at.since(from),
        initialiser: None,
    })
}

/// Up to a comma that is in no brackets, or the end.
fn initialiser<'a>(at: &mut Cursor<'a>) -> Result<&'a [Token]> {
    let from = at.position();
    let mut depth = 0usize;
    while let Some(token) = at.token() {
        match token.kind() {
            Kind::Punct(b',') if depth == 0 => break,
            Kind::Punct(b'(' | b'[' | b'{') => depth += 1,
            Kind::Punct(b')' | b']' | b'}') => {
                depth = depth.checked_sub(1).ok_or_else(|| at.unexpected("a value"))?;
            }
            _ => {}
        }
        at.skip();
    }
    if depth > 0 || at.since(from).is_empty() {
        return Err(at.unexpected("a value or a closing bracket"));
    }
    Ok(at.since(from))
}

impl<'a> Declaration<'a> {
    pub fn name(&self) -> &'a str {
        self.name.text(self.source)
    }

    /// # Errors
    /// A type, an alignment or a dimension that is not known.
    pub fn layout(&self) -> Result<Layout<'a>> {
        /// A larger alignment is refused.
        const ALIGN_MAX: u32 = 1 << 16;
        let mut at = Cursor::new(self.source, self.words);
        let (mut align, mut element, mut lanes, mut is_pointer) = (None, None, 1, false);
        while let Some(token) = at.token() {
            match at.take() {
                Lexeme::Dot(".align") => {
                    let value = at.integer32()?;
                    if !value.is_power_of_two() || value > ALIGN_MAX {
                        let message = format!("alignment {value} is no power of two up to 2^16");
                        return Err(at.error(message));
                    }
                    // After `.ptr` it is the alignment of what is pointed to.
                    if !is_pointer {
                        align = Some(value);
                    }
                }
                Lexeme::Dot(".ptr") => is_pointer = true,
                Lexeme::Dot(".global" | ".const" | ".shared" | ".local") if is_pointer => {}
                Lexeme::Dot(".attribute") => {
                    at.parenthesised()?;
                }
                Lexeme::Dot(".v2") => lanes = 2,
                Lexeme::Dot(".v4") => lanes = 4,
                Lexeme::Dot(word @ ".pred") => element = Some((word, 0)),
                _ => {
                    let word = token.text(self.source);
                    let bytes = type_bytes(word)
                        .ok_or_else(|| at.error(format!("unsupported type `{word}`")))?;
                    element = Some((word, bytes));
                }
            }
        }
        let mut at = Cursor::new(self.source, self.dimensions);
        let Some((element, element_bytes)) = element else {
            return Err(PtxError::new(self.name.line, "the variable has no type"));
        };
        let unit = element_bytes * lanes;
        let (mut bytes, mut is_open) = (u64::from(unit), false);
        while at.eat(b'[') {
            if at.eat(b']') {
                is_open = true;
                continue;
            }
            bytes = bytes.saturating_mul(at.integer()?);
            at.expect(b']')?;
        }
        Ok(Layout { element, element_bytes, align: align.unwrap_or(unit.max(1)), bytes, is_open })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lex;

    fn layouts(text: &str) -> Result<Vec<(String, u32, u64)>> {
        let text = format!(".global {text}");
        let tokens = lex(&text).unwrap();
        let layout = |one: Result<Declaration<'_>>| {
            let (name, layout) = one.and_then(|one| Ok((one.name().to_owned(), one.layout()?)))?;
            Ok((name, layout.align, layout.bytes))
        };
        declarations(&text, &tokens).map(layout).collect()
    }

    #[test]
    fn layouts_follow_type_lanes_dimensions_and_alignment() {
        for (text, want) in [
            (".u32 a", vec![("a", 4, 4)]),
            (".u32 a, b[2] = {1, (2)}, c = a+4", vec![("a", 4, 4), ("b", 4, 8), ("c", 4, 4)]),
            (".u32 a, .align 8 .b8 b", vec![("a", 4, 4), ("b", 8, 1)]),
            (".align 16 .v4 .f32 a[3][0x2]", vec![("a", 16, 96)]),
            (".u64 .ptr .global .align 256 a", vec![("a", 8, 8)]),
            (".attribute(.unified(19, 95)) .b16 a[]", vec![("a", 2, 2)]),
            (".u64 a[0xffffffffffffffff]", vec![("a", 8, u64::MAX)]),
        ] {
            let want = want.into_iter().map(|(name, align, bytes)| (name.to_owned(), align, bytes));
            assert_eq!(layouts(text), Ok(want.collect()), "{text}");
        }
    }

    #[test]
    fn what_has_no_layout_is_an_error() {
        for text in [
            "",
            ".u32",
            "a",
            ".texref a",
            ".align 3 .b8 a",
            ".align .b8 a",
            ".align 131072 .b8 a",
            ".u32 a[4",
            ".u32 a[4[2]]",
            ".u32 a[b]",
            ".u32 a = ",
            ".u32 a = {1",
            ".u32 a = 1}",
            ".u32 a,",
            ".u32 a b",
            ".global .u32 a",
        ] {
            assert!(layouts(text).is_err(), "{text}");
        }
    }
    #[test]
    fn lists_end_at_their_first_error() {
        for text in ["(.param .b8 a b, .param .b8 c)", "(.param .b8 a,)", "(.local .b8 a)", "(a)"] {
            let tokens = lex(text).unwrap();
            let mut all = parameters(text, &tokens);
            assert!(all.by_ref().any(|one| one.is_err()), "{text}");
            assert!(all.next().is_none(), "{text}");
        }
        let tokens = lex("()").unwrap();
        assert!(parameters("()", &tokens).next().is_none());
    }
}
