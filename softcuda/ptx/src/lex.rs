//! Tokens of PTX text, with the bytes that they occupy.
//!
//! Comments, white space and line markers are no tokens. As in `ptxas`, a string ends at the
//! next quote: a backslash escapes nothing.

use crate::{PtxError, Result, work};

/// The longest text that is read. Offsets are 32 bits wide, lengths 29.
pub const SOURCE_BYTES_MAX: usize = 1 << 28;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A name, a register, an opcode's first word: `%r1`, `add`, `$L1`.
    Word,
    /// A dot and its word: `.u32`, `.L2::128B`.
    Dot,
    /// Starts with a digit: `12`, `0f3F800000`, `8.7`, `1.5e-3`.
    Number,
    /// A string with its quotes.
    Str,
    /// A character outside ASCII.
    Other,
    /// Any other ASCII character, by itself.
    Punct(u8),
}

/// 12 bytes: a long text has one for every three of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The offset of its first byte.
    pub start: u32,
    /// Line in the text, from 1.
    pub line: u32,
    /// The kind in the upper bits. Below, the length in bytes, or the byte of a `Punct`.
    shape: u32,
}

const LENGTH_BITS: u32 = 29;
const LENGTH_MASK: u32 = (1 << LENGTH_BITS) - 1;
const PUNCT: u32 = 5 << LENGTH_BITS;

impl Token {
    fn new(kind: Kind, start: usize, end: usize, line: u32) -> Self {
        let length = (end - start) as u32;
        let shape = match kind {
            Kind::Word => length,
            Kind::Dot => 1 << LENGTH_BITS | length,
            Kind::Number => 2 << LENGTH_BITS | length,
            Kind::Str => 3 << LENGTH_BITS | length,
            Kind::Other => 4 << LENGTH_BITS | length,
            Kind::Punct(byte) => PUNCT | u32::from(byte),
        };
        Token { start: start as u32, line, shape }
    }

    pub fn kind(self) -> Kind {
        match self.shape >> LENGTH_BITS {
            0 => Kind::Word,
            1 => Kind::Dot,
            2 => Kind::Number,
            3 => Kind::Str,
            4 => Kind::Other,
            _ => Kind::Punct(self.shape as u8),
        }
    }

    /// The offset behind its last byte.
    pub fn end(self) -> u32 {
        let length = if self.shape >= PUNCT { 1 } else { self.shape & LENGTH_MASK };
        self.start + length
    }

    pub fn is(self, punct: u8) -> bool {
        self.shape == PUNCT | u32::from(punct)
    }

    pub fn is_word(self) -> bool {
        self.kind() == Kind::Word
    }

    pub fn text(self, source: &str) -> &str {
        source.get(self.start as usize..self.end() as usize).unwrap_or("")
    }
}

fn word_start(b: u8) -> bool {
    b.is_ascii_alphabetic() || matches!(b, b'_' | b'$' | b'%')
}

fn word_more(b: u8) -> bool {
    b.is_ascii_alphanumeric() || matches!(b, b'_' | b'$')
}

/// All tokens of a text.
///
/// # Errors
/// A string that does not end on its line, a preprocessor line other than a line marker, and
/// text that is too long.
pub fn lex(source: &str) -> Result<Vec<Token>> {
    let bytes = source.as_bytes();
    if bytes.len() > SOURCE_BYTES_MAX {
        return Err(PtxError::new(0, format!("more than {SOURCE_BYTES_MAX} bytes of text")));
    }
    let mut tokens = Vec::with_capacity(bytes.len() / 8);
    let (mut at, mut line) = (0, 1);
    while let Some(&b) = bytes.get(at) {
        work::add(1);
        let rest = &bytes[at..];
        let start = at;
        let kind = match b {
            b'\n' => {
                line += 1;
                at += 1;
                continue;
            }
            b' ' | b'\t' | b'\r' | 0x0b | 0x0c => {
                at += 1;
                continue;
            }
            b'/' if rest.starts_with(b"//") => {
                at += line_bytes(rest);
                continue;
            }
            b'/' if rest.starts_with(b"/*") => {
                // A comment without an end is one to the text's end.
                at = source[at + 2..].find("*/").map_or(bytes.len(), |n| at + 2 + n + 2);
                work::add(2 * (at - start));
                line += bytes[start..at].iter().filter(|b| **b == b'\n').count() as u32;
                continue;
            }
            b'#' => {
                let marker = rest[1..line_bytes(rest)].trim_ascii_start();
                if !marker.starts_with(b"line") && !marker.first().is_some_and(u8::is_ascii_digit) {
                    return Err(PtxError::new(line, "a preprocessor line that is no line marker"));
                }
                at += line_bytes(rest);
                continue;
            }
            b'"' => {
                match run(&rest[1..], |c| c != b'"' && c != b'\n') {
                    n if rest.get(1 + n) == Some(&b'"') => at += n + 2,
                    _ => return Err(PtxError::new(line, "the string does not end on its line")),
                }
                Kind::Str
            }
            _ if word_start(b) => {
                at += 1 + run(&rest[1..], word_more);
                Kind::Word
            }
            b'.' if rest.get(1).is_some_and(|&c| word_more(c)) => {
                at += 1 + run(&rest[1..], word_more);
                while bytes[at..].starts_with(b"::")
                    && bytes.get(at + 2).is_some_and(|&c| word_more(c))
                {
                    at += 2 + run(&bytes[at + 2..], word_more);
                }
                Kind::Dot
            }
            b'0'..=b'9' => {
                at += number_bytes(rest);
                Kind::Number
            }
            _ if b.is_ascii() => {
                at += 1;
                Kind::Punct(b)
            }
            _ => {
                at += source[at..].chars().next().map_or(1, char::len_utf8);
                Kind::Other
            }
        };
        tokens.push(Token::new(kind, start, at, line));
    }
    Ok(tokens)
}

fn number_bytes(rest: &[u8]) -> usize {
    let mut at = run(rest, word_more);
    while rest.get(at) == Some(&b'.') && rest.get(at + 1).is_some_and(u8::is_ascii_digit) {
        at += 1 + run(&rest[at + 1..], word_more);
    }
    let decimal = |b: &u8| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E');
    work::add(at);
    let signed = matches!(rest[at - 1], b'e' | b'E')
        && matches!(rest.get(at), Some(b'+' | b'-'))
        && rest.get(at + 1).is_some_and(u8::is_ascii_digit);
    if signed && rest[..at].iter().all(decimal) {
        at += 1 + run(&rest[at + 1..], |b| b.is_ascii_digit());
    }
    at
}

/// Bytes before the end of the line.
fn line_bytes(rest: &[u8]) -> usize {
    run(rest, |b| b != b'\n')
}

fn run(bytes: &[u8], of: impl Fn(u8) -> bool) -> usize {
    let length = bytes.iter().position(|&b| !of(b)).unwrap_or(bytes.len());
    work::add(length);
    length
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str) -> Vec<&str> {
        lex(source).unwrap().iter().map(|t| t.text(source)).collect()
    }

    #[test]
    fn comments_strings_and_markers_hide_what_they_hold() {
        let source = "a// {\nb/* } \" */c\"//x\\\"d # 12 \"x\" {\ne";
        assert_eq!(texts(source), ["a", "b", "c", "\"//x\\\"", "d", "e"]);
        assert_eq!(texts("# 1 \"f.cu\"\nx /* open"), ["x"]);
        for (bad, line) in [("\n\"open\n\"", 2), ("\"open", 1), ("#define X", 1), ("\n\n#", 3)] {
            assert_eq!(lex(bad).unwrap_err().line, line, "{bad}");
        }
    }

    #[test]
    fn words_carry_their_registers_and_dots_their_qualifiers() {
        let source = "@!%p1 ld.global.L2::128B.u32 %r<10>,[$x+0x10], %ctaid.x, 8.7 -1.5e-3;";
        let want = "@ ! %p1 ld .global .L2::128B .u32 %r < 10 > , [ $x + 0x10 ] , %ctaid .x , \
                    8.7 - 1.5e-3 ;";
        assert_eq!(texts(source), want.split(' ').collect::<Vec<_>>());
        assert_eq!(
            texts("0x1e-3 1e+ .a:: \0"),
            ["0x1e", "-", "3", "1e", "+", ".a", ":", ":", "\0"]
        );
    }

    #[test]
    fn tokens_lie_at_their_bytes_and_lines() {
        let source = "/* a\nb */\n é: \"s\"\r\n;";
        let all: Vec<_> = lex(source).unwrap();
        let places: Vec<_> = all.iter().map(|t| (t.kind(), t.start, t.end(), t.line)).collect();
        let want = [
            (Kind::Other, 11, 13, 3),
            (Kind::Punct(b':'), 13, 14, 3),
            (Kind::Str, 15, 18, 3),
            (Kind::Punct(b';'), 20, 21, 4),
        ];
        assert_eq!(places, want);
        assert!(all[3].is(b';') && !all[3].is(b':') && !all[2].is(b';'));
    }

    #[test]
    fn text_that_is_too_long_is_refused() {
        let source = " ".repeat(SOURCE_BYTES_MAX + 1);
        assert!(lex(&source).unwrap_err().message.contains("268435456"));
        assert_eq!(lex(&source[1..]), Ok(Vec::new()));
    }
}
