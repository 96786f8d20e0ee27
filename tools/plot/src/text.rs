//! Labels: what may be in them, and how much room they take.

/// Mean width of a character over the font's size.
const WIDTH_OF_SIZE: f64 = 0.54;

/// Characters that XML 1.0 cannot hold, that break the line or that turn the text around
/// become spaces.
pub fn clean(text: &str) -> String {
    let harmless = |c: char| match c {
        '\u{fffe}' | '\u{ffff}' | '\u{2028}' | '\u{2029}' => ' ',
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' => ' ',
        c if c.is_control() => ' ',
        c => c,
    };
    text.chars().map(harmless).collect()
}

/// About how wide a label is, in pixels.
pub fn width(text: &str, size: u32) -> i32 {
    (text.chars().count() as f64 * f64::from(size) * WIDTH_OF_SIZE).ceil() as i32
}

/// Cleaned, and with an ellipsis if it is wider than `room` pixels.
pub fn fitted(text: &str, size: u32, room: i32) -> String {
    let text = clean(text);
    if width(&text, size) <= room {
        return text;
    }
    let fits = (f64::from(room.max(0)) / (f64::from(size) * WIDTH_OF_SIZE)).floor() as usize;
    let mut short: String = text.chars().take(fits.saturating_sub(1)).collect();
    short.push('…');
    short
}

/// Cleaned, and broken at spaces into lines of at most `room` pixels; beyond `lines_max` lines
/// the last ends in an ellipsis.
pub fn wrapped(text: &str, size: u32, room: i32, lines_max: usize) -> Vec<String> {
    let text = clean(text);
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        match lines.last_mut() {
            Some(line) if width(line, size) + width(word, size) + size as i32 / 2 <= room => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(fitted(word, size, room)),
        }
    }
    if lines.len() > lines_max {
        let rest = lines.split_off(lines_max).join(" ");
        if let Some(last) = lines.last_mut() {
            *last = fitted(&format!("{last} {rest}"), size, room);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_labels_are_shortened_to_the_room() {
        assert_eq!(fitted("abc", 10, 100), "abc");
        let short = fitted(&"x".repeat(90), 10, 100);
        assert!(short.ends_with('…') && width(&short, 10) <= 100, "{short}");
        assert_eq!(fitted("a\u{0}\u{1b}[1m\u{202e}b", 10, 100), "a  [1m b");
    }

    #[test]
    fn captions_are_broken_at_spaces() {
        let text = "one two three four five six seven";
        let lines = wrapped(text, 10, 90, 9);
        assert!(lines.len() > 1 && lines.iter().all(|line| width(line, 10) <= 90), "{lines:?}");
        assert_eq!(lines.join(" "), text);
        let cut = wrapped(text, 10, 90, 2);
        assert!(cut.len() == 2 && cut[1].ends_with('…'), "{cut:?}");
    }
}
