//! Text that clients send and others see on terminals, in logs and in files.

/// The same without characters that would move a cursor, end a line or turn text around: `?` in their places.
pub fn printable(text: String) -> String {
    match text.chars().any(is_unprintable) {
        true => text.chars().map(|c| if is_unprintable(c) { '?' } else { c }).collect(),
        false => text,
    }
}

/// Control characters, separators of lines and paragraphs, marks of direction, and the mark of byte order.
fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_act_on_a_terminal_is_replaced_and_the_rest_is_kept() {
        for (given, shown) in [
            ("gemm<float, 4>(größe)", "gemm<float, 4>(größe)"),
            ("\x1b]0;owned\x07", "?]0;owned?"),
            ("a\nb\tc\r", "a?b?c?"),
            ("\u{9b}31m\u{202e}txt\u{2066}\u{2028}", "?31m?txt??"),
        ] {
            assert_eq!(printable(given.into()), shown);
        }
    }
}
