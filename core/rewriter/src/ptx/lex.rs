//! Tokens of PTX text, with the bytes that they occupy.
//!
//! The rewriter edits text at byte offsets, so tokens say where they lie and own
//! nothing. Comments, white space and line markers are no tokens. As in `ptxas`, a
//! string ends at the next quote: a backslash escapes nothing.

use crate::Refusal;

/// The longest text that is read. Offsets are 32 bits wide.
pub const SOURCE_BYTES_MAX: usize = 1 << 28;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A name, a register, an opcode's first word: `%r1`, `add`, `$L1`.
    Word,
    /// A dot and its word: `.u32`, `.L2::128B`.
    Dot,
    /// Starts with a digit: `12`, `0f3F800000`, `8.7`.
    Number,
    /// A string with its quotes.
    Str,
    /// One byte of anything else.
    Punct(u8),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Token {
    pub kind: Kind,
    pub start: u32,
    pub end: u32,
}

impl Token {
    pub fn is(&self, punct: u8) -> bool {
        self.kind == Kind::Punct(punct)
    }

    pub fn text<'a>(&self, source: &'a str) -> &'a str {
        source.get(self.start as usize..self.end as usize).unwrap_or("")
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
/// [`Refusal::Malformed`] for a string that does not end on its line, for
/// preprocessor lines other than markers, and for text that is too long.
pub(super) fn tokens(source: &str) -> Result<Vec<Token>, Refusal> {
    let bytes = source.as_bytes();
    if bytes.len() > SOURCE_BYTES_MAX {
        return Err(Refusal::Malformed);
    }
    let mut tokens = Vec::with_capacity(bytes.len() / 8);
    let mut at = 0;
    while let Some(&b) = bytes.get(at) {
        let rest = &bytes[at..];
        let start = at;
        let kind = match b {
            b'/' if rest.starts_with(b"//") => {
                at += line_bytes(rest);
                continue;
            }
            b'/' if rest.starts_with(b"/*") => {
                // A comment without an end is one to the text's end.
                at = source[at + 2..].find("*/").map_or(bytes.len(), |n| at + 2 + n + 2);
                continue;
            }
            b'#' => {
                let line = &rest[1..line_bytes(rest)];
                let line = line.trim_ascii_start();
                if !line.starts_with(b"line") && !line.first().is_some_and(u8::is_ascii_digit) {
                    return Err(Refusal::Malformed);
                }
                at += line_bytes(rest);
                continue;
            }
            b' ' | b'\t' | b'\r' | b'\n' | 0x0b | 0x0c => {
                at += 1;
                continue;
            }
            b'"' => {
                let inside = rest[1..].iter().position(|&c| c == b'"' || c == b'\n');
                match inside {
                    Some(n) if rest[1 + n] == b'"' => at += n + 2,
                    _ => return Err(Refusal::Malformed),
                }
                Kind::Str
            }
            _ if word_start(b) => {
                at += 1 + run(&rest[1..], word_more);
                Kind::Word
            }
            b'.' if rest.get(1).is_some_and(|&c| word_more(c)) => {
                at += 1 + run(&rest[1..], word_more);
                while bytes[at..].starts_with(b"::") {
                    at += 2 + run(&bytes[at + 2..], word_more);
                }
                Kind::Dot
            }
            b'0'..=b'9' => {
                at += run(rest, word_more);
                while bytes.get(at) == Some(&b'.')
                    && bytes.get(at + 1).is_some_and(u8::is_ascii_digit)
                {
                    at += 1 + run(&bytes[at + 1..], word_more);
                }
                Kind::Number
            }
            _ => {
                at += 1;
                Kind::Punct(b)
            }
        };
        tokens.push(Token { kind, start: start as u32, end: at as u32 });
    }
    Ok(tokens)
}

/// Bytes before the end of the line.
fn line_bytes(rest: &[u8]) -> usize {
    run(rest, |b| b != b'\n')
}

fn run(bytes: &[u8], of: fn(u8) -> bool) -> usize {
    bytes.iter().position(|&b| !of(b)).unwrap_or(bytes.len())
}

/// Where the line ends that holds byte `at`.
pub(super) fn line_end(source: &str, at: u32) -> u32 {
    let at = at as usize;
    (at + line_bytes(&source.as_bytes()[at..])) as u32
}

/// The value of an integer: decimal, `0x`, `0b` or octal, perhaps with a `U`.
pub(super) fn integer(text: &str) -> Option<u64> {
    let text = text.strip_suffix('U').unwrap_or(text);
    let radix = |digits, radix| u64::from_str_radix(digits, radix).ok();
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return radix(hex, 16);
    }
    if let Some(binary) = text.strip_prefix("0b").or_else(|| text.strip_prefix("0B")) {
        return radix(binary, 2);
    }
    if text.len() > 1 && text.starts_with('0') {
        return radix(&text[1..], 8);
    }
    radix(text, 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str) -> Vec<&str> {
        tokens(source).unwrap().iter().map(|t| t.text(source)).collect()
    }

    #[test]
    fn comments_strings_and_markers_hide_what_they_hold() {
        let source = "a// {\nb/* } \" */c\"//x\\\"d # 12 \"x\" {\ne";
        assert_eq!(texts(source), ["a", "b", "c", "\"//x\\\"", "d", "e"]);
        assert_eq!(texts("# 1 \"f.cu\"\nx /* open"), ["x"]);
        for bad in ["\"open\n\"", "\"open", "#define X", "#"] {
            assert!(tokens(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn words_carry_their_registers_and_dots_their_qualifiers() {
        assert_eq!(
            texts("@!%p1 ld.global.L2::128B.u32 %r<10>,[$x+0x10], %ctaid.x, 8.7 -1.5e-3;"),
            [
                "@",
                "!",
                "%p1",
                "ld",
                ".global",
                ".L2::128B",
                ".u32",
                "%r",
                "<",
                "10",
                ">",
                ",",
                "[",
                "$x",
                "+",
                "0x10",
                "]",
                ",",
                "%ctaid",
                ".x",
                ",",
                "8.7",
                "-",
                "1.5e",
                "-",
                "3",
                ";"
            ]
        );
        assert_eq!(texts("é"), ["", ""]);
    }

    #[test]
    fn integers_of_every_radix() {
        for (text, value) in [("48", 48), ("0x30U", 48), ("060", 48), ("0b110000", 48), ("0", 0)] {
            assert_eq!(integer(text), Some(value), "{text}");
        }
        for text in ["", "0x", "1.5", "99999999999999999999"] {
            assert_eq!(integer(text), None, "{text}");
        }
    }
}
