//! Reads integer and floating-point literals.

/// A number's value; floating-point numbers as their bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    Int(u64),
    /// `0f` and eight hexadecimal digits.
    F32(u32),
    /// `0d` and sixteen hexadecimal digits, or a decimal fraction.
    F64(u64),
}

/// The value of a number's text.
pub fn number(text: &str) -> Option<Number> {
    let hex = text.get(2..).unwrap_or("");
    match text.as_bytes() {
        [b'0', b'f' | b'F', ..] if hex.len() == 8 => {
            u32::from_str_radix(hex, 16).ok().map(Number::F32)
        }
        [b'0', b'd' | b'D', ..] if hex.len() == 16 => {
            u64::from_str_radix(hex, 16).ok().map(Number::F64)
        }
        _ => integer(text).map(Number::Int).or_else(|| {
            let fraction = text.contains(['.', 'e', 'E']);
            let value = text.parse::<f64>().ok().filter(|_| fraction)?;
            Some(Number::F64(value.to_bits()))
        }),
    }
}

/// The value of an integer: decimal, `0x`, `0b` or octal, perhaps with a `U`.
pub fn integer(text: &str) -> Option<u64> {
    let text = text.strip_suffix(['u', 'U']).unwrap_or(text);
    let (digits, radix) = match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&text[2..], 16),
        [b'0', b'b' | b'B', ..] => (&text[2..], 2),
        [b'0', _, ..] => (&text[1..], 8),
        _ => (text, 10),
    };
    u64::from_str_radix(digits, radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_every_radix() {
        for (text, value) in [("48", 48), ("0x30U", 48), ("060", 48), ("0b110000", 48), ("0", 0)] {
            assert_eq!(integer(text), Some(value), "{text}");
        }
        for text in ["", "0x", "1.5", "08", "99999999999999999999", "0é"] {
            assert_eq!(integer(text), None, "{text}");
        }
    }

    #[test]
    fn floats_in_hexadecimal_and_decimal() {
        for (text, value) in [
            ("0f3F800000", Number::F32(0x3f80_0000)),
            ("0d3FF0000000000000", Number::F64(1f64.to_bits())),
            ("1.5", Number::F64(1.5f64.to_bits())),
            ("2e3", Number::F64(2000f64.to_bits())),
            ("1.5e-3", Number::F64(1.5e-3f64.to_bits())),
            ("0x1e3", Number::Int(0x1e3)),
        ] {
            assert_eq!(number(text), Some(value), "{text}");
        }
        for text in ["08", "0f3F80", "1e", "1.2.3", "0fGGGGGGGG", "nan"] {
            assert_eq!(number(text), None, "{text}");
        }
    }
}
