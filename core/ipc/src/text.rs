//! Text of clients and policies that others see on terminals, in logs and in files.

/// The same without characters that would move a cursor, end a line or turn text around: `?` in their places.
pub fn printable(text: String) -> String {
    match text.chars().any(is_unprintable) {
        true => text.chars().map(|c| if is_unprintable(c) { '?' } else { c }).collect(),
        false => text,
    }
}

/// At most so many bytes of several lines: each printable, and all but the first marked, so that none can pass for a
/// line of somebody else's.
pub fn printable_lines(text: &str, bytes_max: usize) -> String {
    let text = &text[..text.floor_char_boundary(bytes_max)];
    let lines = text.lines().map(|line| printable(line.replace('\t', " ")));
    lines.collect::<Vec<_>>().join("\n  | ")
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

    #[test]
    fn no_line_passes_for_another() {
        let forged = "first\r\n2026-11-24 INFO\x1b[2J\n\tat x";
        assert_eq!(printable_lines(forged, 100), "first\n  | 2026-11-24 INFO?[2J\n  |  at x");
        assert_eq!(printable_lines("größe", 3), "gr");
    }
}
