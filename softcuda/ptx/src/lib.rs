//! Reads the structure of PTX text: tokens, declarations, functions, statements.
//!
//! [`lex`] makes [`Token`]s, which say where they lie and own nothing. [`parse`] finds the
//! module's directives, [`parameters`] and [`declarations`] read lists of variables, and
//! [`statements`] splits a body into instructions: all of them iterators, which keep nothing.
//! What operands mean is left to the caller.
//!
//! No input makes this crate panic or recurse. Time is linear in the text, and memory is what its
//! tokens take. A text has at most [`SOURCE_BYTES_MAX`] bytes and nests braces at most
//! [`NESTING_MAX`] deep. A directive that is not known is an error, because its extent would be a
//! guess.

#![forbid(unsafe_code)]

#[cfg(test)]
mod any_text;
mod body;
mod cursor;
mod declare;
mod lex;
mod module;
mod number;
mod work;

pub use body::{Guard, Instruction, Statement, Statements, statements};
pub use cursor::{Cursor, Lexeme};
pub use declare::{Declaration, Declarations, Layout, declarations, parameters, type_bytes};
pub use lex::{Kind, SOURCE_BYTES_MAX, Token, lex};
pub use module::{Function, Item, Items, Linkage, Module, NESTING_MAX, parse};
pub use number::{Number, integer, number};

/// PTX that cannot be read or used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {message}")]
pub struct PtxError {
    /// The line of the PTX text, from 1; 0 where no line applies.
    pub line: u32,
    /// What is wrong, with the text it is about.
    pub message: String,
}

impl PtxError {
    pub fn new(line: u32, message: impl Into<String>) -> Self {
        Self { line, message: message.into() }
    }
}

pub type Result<T> = std::result::Result<T, PtxError>;

/// What is between the parentheses or braces that `tokens` starts and ends with.
pub fn inside(tokens: &[Token]) -> &[Token] {
    tokens.get(1..tokens.len().saturating_sub(1)).unwrap_or(&[])
}
