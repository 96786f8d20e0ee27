//! Tokens of PTX text. Never fails on odd bytes: an unknown character is a
//! token of its own, and the parser says what is wrong with it.

/// One token; text borrowed from the source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Tok<'a> {
    /// A name, a register or an opcode's first word: `%r1`, `add`, `$L1`.
    Ident(&'a str),
    /// A dot and its word, without the dot: `.u32`, `.L2::128B`.
    Dot(&'a str),
    /// An integer, as 64 bits.
    Int(u64),
    /// `0f` and eight hexadecimal digits.
    F32(u32),
    /// `0d` and sixteen hexadecimal digits, or a decimal fraction.
    F64(u64),
    /// A string without its quotes, escapes untouched.
    Str(&'a str),
    Punct(char),
    /// The end of the text.
    End,
}

/// Cuts PTX into tokens, one ahead.
pub(crate) struct Lexer<'a> {
    src: &'a str,
    pos: usize,
    line: u32,
    peeked: Tok<'a>,
    peek_line: u32,
    /// Where the token before `peeked` ended.
    prev_end: usize,
    peek_start: usize,
}

fn ident_start(b: u8) -> bool {
    b.is_ascii_alphabetic() || matches!(b, b'_' | b'$' | b'%')
}

fn ident_more(b: u8) -> bool {
    b.is_ascii_alphanumeric() || matches!(b, b'_' | b'$')
}

impl<'a> Lexer<'a> {
    pub(crate) fn new(src: &'a str) -> Self {
        let mut lexer = Self {
            src,
            pos: 0,
            line: 1,
            peeked: Tok::End,
            peek_line: 1,
            prev_end: 0,
            peek_start: 0,
        };
        lexer.next();
        lexer
    }

    /// The token that [`Lexer::next`] will return.
    pub(crate) fn peek(&self) -> Tok<'a> {
        self.peeked
    }

    /// The line of the token that [`Lexer::next`] will return.
    pub(crate) fn peek_line(&self) -> u32 {
        self.peek_line
    }

    /// The byte at which the next token starts.
    pub(crate) fn start(&self) -> usize {
        self.peek_start
    }

    /// The text from `start` to the end of the last token taken.
    pub(crate) fn text_since(&self, start: usize) -> &'a str {
        self.src.get(start..self.prev_end).unwrap_or("")
    }

    pub(crate) fn next(&mut self) -> Tok<'a> {
        let out = self.peeked;
        self.prev_end = self.pos;
        self.skip_blank();
        self.peek_line = self.line;
        self.peek_start = self.pos;
        self.peeked = self.scan();
        out
    }

    fn byte(&self, ahead: usize) -> u8 {
        *self.src.as_bytes().get(self.pos + ahead).unwrap_or(&0)
    }

    fn skip_blank(&mut self) {
        let bytes = self.src.as_bytes();
        while let Some(&b) = bytes.get(self.pos) {
            match b {
                b'\n' => {
                    self.line += 1;
                    self.pos += 1;
                }
                b' ' | b'\t' | b'\r' | 0 | 0x0b | 0x0c => self.pos += 1,
                b'/' if self.byte(1) == b'/' => self.skip_line(),
                b'/' if self.byte(1) == b'*' => self.skip_comment(),
                // A preprocessor line marker; PTX has no other use for it.
                b'#' => self.skip_line(),
                _ => break,
            }
        }
    }

    fn skip_line(&mut self) {
        let rest = &self.src.as_bytes()[self.pos..];
        self.pos += rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len());
    }

    fn skip_comment(&mut self) {
        self.pos += 2;
        while self.pos < self.src.len() {
            if self.byte(0) == b'*' && self.byte(1) == b'/' {
                self.pos += 2;
                return;
            }
            if self.byte(0) == b'\n' {
                self.line += 1;
            }
            self.pos += 1;
        }
    }

    fn scan(&mut self) -> Tok<'a> {
        let start = self.pos;
        if start >= self.src.len() {
            return Tok::End;
        }
        let b = self.byte(0);
        if ident_start(b) {
            self.pos += 1;
            while ident_more(self.byte(0)) {
                self.pos += 1;
            }
            return Tok::Ident(&self.src[start..self.pos]);
        }
        if b.is_ascii_digit() {
            return self.number();
        }
        if b == b'.' && (ident_more(self.byte(1))) {
            self.pos += 1;
            loop {
                if ident_more(self.byte(0)) {
                    self.pos += 1;
                } else if self.byte(0) == b':' && self.byte(1) == b':' && ident_more(self.byte(2)) {
                    self.pos += 2;
                } else {
                    break;
                }
            }
            return Tok::Dot(&self.src[start + 1..self.pos]);
        }
        if b == b'"' {
            return self.string();
        }
        // Step over one whole character, so that slices stay on boundaries.
        let c = self.src[start..].chars().next().unwrap_or('\u{fffd}');
        self.pos += c.len_utf8();
        Tok::Punct(c)
    }

    fn string(&mut self) -> Tok<'a> {
        let start = self.pos + 1;
        self.pos = start;
        while self.pos < self.src.len() {
            match self.byte(0) {
                b'"' => {
                    let text = &self.src[start..self.pos];
                    self.pos += 1;
                    return Tok::Str(text);
                }
                b'\n' => break,
                b'\\' if self.byte(1) == b'"' => self.pos += 2,
                _ => self.pos += 1,
            }
        }
        Tok::Punct('"')
    }

    fn number(&mut self) -> Tok<'a> {
        let start = self.pos;
        while ident_more(self.byte(0)) {
            self.pos += 1;
        }
        let word = &self.src[start..self.pos];
        let tail = word.get(2..).unwrap_or("");
        match word.as_bytes().get(..2) {
            Some(b"0f" | b"0F") if tail.len() == 8 => {
                if let Ok(v) = u32::from_str_radix(tail, 16) {
                    return Tok::F32(v);
                }
            }
            Some(b"0d" | b"0D") if tail.len() == 16 => {
                if let Ok(v) = u64::from_str_radix(tail, 16) {
                    return Tok::F64(v);
                }
            }
            _ => {}
        }
        let fraction = self.byte(0) == b'.' && self.byte(1).is_ascii_digit();
        let exponent = word.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'e' | b'E'))
            && word.bytes().any(|b| !b.is_ascii_digit());
        if fraction || exponent {
            if fraction {
                self.pos += 1;
                while ident_more(self.byte(0)) {
                    self.pos += 1;
                }
            }
            if matches!(self.src.as_bytes()[self.pos - 1], b'e' | b'E')
                && matches!(self.byte(0), b'+' | b'-')
            {
                self.pos += 1;
                while self.byte(0).is_ascii_digit() {
                    self.pos += 1;
                }
            }
            return match self.src[start..self.pos].parse::<f64>() {
                Ok(v) => Tok::F64(v.to_bits()),
                Err(_) => Tok::Punct('?'),
            };
        }
        let digits = word.trim_end_matches(['u', 'U']);
        let (radix, digits) = match digits.as_bytes() {
            [b'0', b'x' | b'X', ..] => (16, &digits[2..]),
            [b'0', b'b' | b'B', ..] => (2, &digits[2..]),
            [b'0', _, ..] => (8, &digits[1..]),
            _ => (10, digits),
        };
        match u64::from_str_radix(digits, radix) {
            Ok(v) => Tok::Int(v),
            Err(_) => Tok::Punct('?'),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(src: &str) -> Vec<Tok<'_>> {
        let mut lexer = Lexer::new(src);
        std::iter::from_fn(|| Some(lexer.next()).filter(|&t| t != Tok::End)).collect()
    }

    #[test]
    fn numbers_names_and_suffixes() {
        use Tok::*;
        assert_eq!(
            all("ld.global.L2::128B.v4 %r1, [%rd2+-4]; // c\n$L1: 0x1F 017 12U 0f3F800000"),
            [
                Ident("ld"),
                Dot("global"),
                Dot("L2::128B"),
                Dot("v4"),
                Ident("%r1"),
                Punct(','),
                Punct('['),
                Ident("%rd2"),
                Punct('+'),
                Punct('-'),
                Int(4),
                Punct(']'),
                Punct(';'),
                Ident("$L1"),
                Punct(':'),
                Int(31),
                Int(15),
                Int(12),
                F32(0x3f80_0000),
            ]
        );
        assert_eq!(
            all("0d3FF0000000000000 1.5 2e3"),
            [F64(1f64.to_bits()), F64(1.5f64.to_bits()), F64(2000f64.to_bits())]
        );
    }

    #[test]
    fn odd_bytes_end_and_lines() {
        assert_eq!(all("\u{e9} \"open"), [Tok::Punct('\u{e9}'), Tok::Punct('"')]);
        let mut lexer = Lexer::new("/* a\nb */\n x");
        assert_eq!((lexer.peek_line(), lexer.next()), (3, Tok::Ident("x")));
    }
}
