//! What a component says of itself, made fit for messages: of bounded length, and without what acts on a terminal.

use crate::metrics::beginning;
use std::fmt::Write;
use tally_ipc::text::{printable, printable_lines};

/// Longer names are shortened.
const NAME_BYTES_MAX: usize = 160;
/// Longer explanations are shortened.
const WHY_BYTES_MAX: usize = 1024;
/// Names of a list that a message gives, at most.
const NAMES_MAX: usize = 12;

pub fn name(name: &str) -> String {
    let shown = printable(beginning(name, NAME_BYTES_MAX).to_owned());
    if name.len() > NAME_BYTES_MAX { shown + "..." } else { shown }
}

/// A list of names, or `nothing`.
pub fn names(names: &[&str]) -> String {
    let mut shown: Vec<String> = names.iter().take(NAMES_MAX).map(|one| name(one)).collect();
    match names.len() {
        0 => return "nothing".into(),
        all if all > NAMES_MAX => shown.push(format!("{} more", all - NAMES_MAX)),
        _ => {}
    }
    shown.join(", ")
}

/// An explanation that quotes it.
pub fn why(why: &str) -> String {
    printable_lines(why, WHY_BYTES_MAX)
}

/// A function's name, which is demangled if it is Rust's: what a short name of C++ stands for can be of any length.
pub fn function(name: &str) -> String {
    let mut shown = Short(String::new());
    let _ = write!(shown, "{:#}", rustc_demangle::demangle(beginning(name, NAME_BYTES_MAX)));
    printable(shown.0)
}

/// Takes so many bytes, and refuses the rest.
struct Short(String);

impl Write for Short {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = NAME_BYTES_MAX - self.0.len();
        self.0.push_str(beginning(text, room));
        if text.len() > room { Err(std::fmt::Error) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_long_and_nothing_acts_on_a_terminal() {
        let long = "\u{1b}]0;x".repeat(1 << 20);
        assert_eq!(name("a\nb"), "a?b");
        assert_eq!(name(&long).len(), NAME_BYTES_MAX + 3);
        let many = vec![long.as_str(); 1000];
        let shown = names(&many);
        assert!(shown.ends_with(", 988 more") && shown.len() < 4096, "{shown}");
        assert!(!shown.contains('\u{1b}'));
        assert_eq!((names(&[]), names(&["a", "b"])), ("nothing".into(), "a, b".into()));
        assert!(why(&long).len() <= WHY_BYTES_MAX && !why(&long).contains('\u{1b}'));
    }

    #[test]
    fn rusts_names_are_demangled_and_no_others() {
        assert_eq!(function("_ZN5chaos4dive17h0123456789abcdefE"), "chaos::dive");
        let cpp = format!("_Z1f{}", "IS_S_E".repeat(20));
        assert_eq!(function(&cpp), cpp);
        // Each back reference doubles what it stands for.
        let mut doubling = String::from("_RINvC1a1bTuu");
        for _ in 0..20 {
            doubling.push_str("TBa_Ba_E");
        }
        assert!(function(&(doubling + "EE")).len() <= NAME_BYTES_MAX);
    }
}
