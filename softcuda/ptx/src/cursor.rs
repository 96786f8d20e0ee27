//! A place among tokens, and what may be asked of it.

use crate::{Kind, PtxError, Result, Token, integer, work};

/// A token with its text; dots and strings keep their dot and quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lexeme<'a> {
    Word(&'a str),
    Dot(&'a str),
    Number(&'a str),
    Str(&'a str),
    Other(&'a str),
    Punct(u8),
    /// The end of the tokens.
    End,
}

/// A place among tokens.
#[derive(Clone, Copy, Debug)]
pub struct Cursor<'a> {
    source: &'a str,
    tokens: &'a [Token],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(source: &'a str, tokens: &'a [Token]) -> Self {
        Cursor { source, tokens, at: 0 }
    }

    pub fn source(&self) -> &'a str {
        self.source
    }

    /// The token at the cursor, which stays; `None` at the end.
    pub fn token(&self) -> Option<Token> {
        work::add(1);
        self.tokens.get(self.at).copied()
    }

    /// The number of tokens before the next one.
    pub(crate) fn position(&self) -> usize {
        self.at
    }

    /// The tokens from position `from` up to the next one.
    pub(crate) fn since(&self, from: usize) -> &'a [Token] {
        &self.tokens[from..self.at]
    }

    pub fn peek(&self) -> Lexeme<'a> {
        let Some(token) = self.token() else { return Lexeme::End };
        let text = token.text(self.source);
        match token.kind() {
            Kind::Word => Lexeme::Word(text),
            Kind::Dot => Lexeme::Dot(text),
            Kind::Number => Lexeme::Number(text),
            Kind::Str => Lexeme::Str(text),
            Kind::Other => Lexeme::Other(text),
            Kind::Punct(byte) => Lexeme::Punct(byte),
        }
    }

    /// Past the next token, if there is one.
    pub fn skip(&mut self) {
        self.at = self.tokens.len().min(self.at + 1);
    }

    /// Moves behind the last token.
    pub(crate) fn finish(&mut self) {
        self.at = self.tokens.len();
    }

    pub fn take(&mut self) -> Lexeme<'a> {
        let lexeme = self.peek();
        self.skip();
        lexeme
    }

    /// The line of the next token, or of the last one at the end.
    pub fn line(&self) -> u32 {
        self.token().or(self.tokens.last().copied()).map_or(1, |t| t.line)
    }

    pub fn is(&self, punct: u8) -> bool {
        self.token().is_some_and(|t| t.is(punct))
    }

    pub fn is_at_end(&self) -> bool {
        self.at == self.tokens.len()
    }

    /// Past the next token if it is `punct`; whether it was.
    pub fn eat(&mut self, punct: u8) -> bool {
        let found = self.is(punct);
        self.at += usize::from(found);
        found
    }

    /// # Errors
    /// The next token is another one. The same holds for the functions below.
    pub fn expect(&mut self, punct: u8) -> Result<()> {
        if self.eat(punct) {
            return Ok(());
        }
        Err(self.unexpected(&format!("`{}`", char::from(punct))))
    }

    pub fn name(&mut self) -> Result<Token> {
        match self.token().filter(|t| t.is_word()) {
            Some(token) => {
                self.at += 1;
                Ok(token)
            }
            None => Err(self.unexpected("a name")),
        }
    }

    pub fn word(&mut self) -> Result<&'a str> {
        self.name().map(|token| token.text(self.source))
    }

    pub fn integer(&mut self) -> Result<u64> {
        let value = match self.peek() {
            Lexeme::Number(text) => integer(text),
            _ => None,
        };
        let value = value.ok_or_else(|| self.unexpected("a number"))?;
        self.at += 1;
        Ok(value)
    }

    pub fn integer32(&mut self) -> Result<u32> {
        let line = self.line();
        u32::try_from(self.integer()?).map_err(|_| PtxError::new(line, "number out of range"))
    }

    /// Past the tokens on the line of the next one.
    pub(crate) fn skip_line(&mut self) {
        let line = self.line();
        while self.token().is_some_and(|t| t.line == line) {
            self.at += 1;
        }
    }

    /// Past the next semicolon; the tokens before it.
    pub(crate) fn statement(&mut self) -> Result<&'a [Token]> {
        let rest = &self.tokens[self.at..];
        let length = rest.iter().position(|t| t.is(b';'));
        work::add(length.unwrap_or(rest.len()));
        let Some(length) = length else {
            return Err(self.error("the statement does not end in a semicolon"));
        };
        self.at += length + 1;
        Ok(&rest[..length])
    }

    /// A list in parentheses and the parentheses, if one comes.
    pub(crate) fn parenthesised(&mut self) -> Result<Option<&'a [Token]>> {
        let from = self.at;
        let mut depth = 0usize;
        while let Some(token) = self.token() {
            match token.kind() {
                Kind::Punct(b'(') => depth += 1,
                _ if depth == 0 => return Ok(None),
                Kind::Punct(b')') => depth -= 1,
                Kind::Punct(b'{' | b'}' | b';') => return Err(self.unexpected("`)`")),
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                return Ok(Some(self.since(from)));
            }
        }
        if depth == 0 { Ok(None) } else { Err(self.unexpected("`)`")) }
    }

    pub fn error(&self, message: impl Into<String>) -> PtxError {
        PtxError::new(self.line(), message)
    }

    pub fn unexpected(&self, wanted: &str) -> PtxError {
        /// A token may be as long as the text.
        const SHOWN_CHARS_MAX: usize = 80;
        let found = match self.peek() {
            Lexeme::Str(text) => text.chars().take(SHOWN_CHARS_MAX).collect(),
            Lexeme::End => "the end".to_owned(),
            Lexeme::Punct(byte) => format!("`{}`", char::from(byte).escape_default()),
            Lexeme::Word(text) | Lexeme::Dot(text) | Lexeme::Number(text) | Lexeme::Other(text) => {
                format!("`{}`", text.chars().take(SHOWN_CHARS_MAX).collect::<String>())
            }
        };
        self.error(format!("expected {wanted}, found {found}"))
    }
}
