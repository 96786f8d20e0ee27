//! Reads a policy's configuration: the flat part of TOML, `key = value` lines,
//! which is all that a handful of constants needs. A TOML crate would make a
//! small policy ten times as large.
//!
//! ```
//! use tally_sdk::config::Config;
//!
//! fn read(text: &str) -> Result<(u64, bool), String> {
//!     let mut config = Config::parse(text)?;
//!     let window_ns = config.microseconds("window_us", 1_000, 1..=1_000_000)?;
//!     let greedy = config.boolean("greedy", false)?;
//!     config.finish()?; // what nobody asked for is refused
//!     Ok((window_ns, greedy))
//! }
//!
//! assert_eq!(read("window_us = 2_000 # two milliseconds"), Ok((2_000_000, false)));
//! assert!(read("window_su = 2_000").unwrap_err().contains("known keys: window_us, greedy"));
//! ```

use std::ops::RangeInclusive;

/// A configuration that is being read.
#[derive(Debug)]
pub struct Config<'text> {
    entries: Vec<Entry<'text>>,
    /// The keys that were asked for, each with the value that is in force.
    asked: Vec<(&'static str, String)>,
}

#[derive(Debug)]
struct Entry<'text> {
    line: usize,
    key: &'text str,
    value: &'text str,
}

impl<'text> Config<'text> {
    /// Split the text into keys and values.
    ///
    /// # Errors
    /// A line that is not `key = value`, or a key given twice.
    pub fn parse(text: &'text str) -> Result<Self, String> {
        let mut entries: Vec<Entry> = Vec::new();
        for (index, content) in text.lines().enumerate() {
            let line = index + 1;
            let content = without_comment(content).trim();
            if content.is_empty() {
                continue;
            }
            let (key, value) = content
                .split_once('=')
                .map(|(key, value)| (key.trim(), value.trim()))
                .filter(|(key, value)| is_key(key) && !value.is_empty())
                // Without the line: the file may be one of secrets, named by mistake.
                .ok_or_else(|| format!("line {line}: expected `key = value`"))?;
            if let Some(first) = entries.iter().find(|entry| entry.key == key) {
                return Err(format!(
                    "line {line}: `{key}` is given already in line {}",
                    first.line
                ));
            }
            entries.push(Entry { line, key, value });
        }
        Ok(Config { entries, asked: Vec::new() })
    }

    /// A whole number within a range, or the default if the key is absent.
    ///
    /// # Errors
    /// Not a whole number, or outside of the range.
    pub fn integer(
        &mut self,
        key: &'static str,
        default: u64,
        range: RangeInclusive<u64>,
    ) -> Result<u64, String> {
        let expected = || format!("a whole number from {} to {}", range.start(), range.end());
        let parse =
            |text: &str| text.replace('_', "").parse().ok().filter(|number| range.contains(number));
        self.value(key, default, parse, expected)
    }

    /// Reads a number of 32 bits, as [`Config::integer`] does.
    ///
    /// # Errors
    /// As [`Config::integer`].
    pub fn small(
        &mut self,
        key: &'static str,
        default: u32,
        range: RangeInclusive<u32>,
    ) -> Result<u32, String> {
        let range = u64::from(*range.start())..=u64::from(*range.end());
        self.integer(key, default.into(), range).map(|number| number as u32)
    }

    /// Reads a time that is given in microseconds, and returns it in nanoseconds.
    ///
    /// # Errors
    /// As [`Config::integer`].
    pub fn microseconds(
        &mut self,
        key: &'static str,
        default_us: u64,
        range_us: RangeInclusive<u64>,
    ) -> Result<u64, String> {
        self.integer(key, default_us, range_us).map(|us| us.saturating_mul(1_000))
    }

    /// `true` or `false`, or the default if the key is absent.
    ///
    /// # Errors
    /// Something else.
    pub fn boolean(&mut self, key: &'static str, default: bool) -> Result<bool, String> {
        self.value(key, default, |text| text.parse().ok(), || "true or false".into())
    }

    /// A text in double quotes without escapes, or the default if the key is
    /// absent.
    ///
    /// # Errors
    /// Something else.
    pub fn text(&mut self, key: &'static str, default: &'text str) -> Result<&'text str, String> {
        let parse = |text: &'text str| {
            let inner = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
            inner.filter(|inner| !inner.contains(['"', '\\']))
        };
        self.value(key, default, parse, || "a text in double quotes, without escapes".into())
    }

    /// What was asked for so far, with the values that are in force, for a line of the log.
    pub fn in_force(&self) -> String {
        let pairs: Vec<String> = self.asked.iter().map(|(key, v)| format!("{key} = {v}")).collect();
        pairs.join(", ")
    }

    /// Nothing may be left.
    ///
    /// # Errors
    /// A key that was never asked for: a typing error, most likely.
    pub fn finish(self) -> Result<(), String> {
        match self.entries.first() {
            None => Ok(()),
            Some(Entry { line, key, .. }) => {
                let known: Vec<&str> = self.asked.iter().map(|(key, _)| *key).collect();
                let known = known.join(", ");
                Err(format!("line {line}: unknown key `{key}`; known keys: {known}"))
            }
        }
    }

    /// The value of a key, as `parse` understands it.
    fn value<T: std::fmt::Display>(
        &mut self,
        key: &'static str,
        default: T,
        parse: impl FnOnce(&'text str) -> Option<T>,
        expected: impl FnOnce() -> String,
    ) -> Result<T, String> {
        let value = match self.entries.iter().position(|entry| entry.key == key) {
            None => default,
            Some(at) => {
                let entry = self.entries.remove(at);
                parse(entry.value).ok_or_else(|| entry.unexpected(&expected()))?
            }
        };
        self.asked.push((key, value.to_string()));
        Ok(value)
    }
}

impl Entry<'_> {
    fn unexpected(&self, expected: &str) -> String {
        format!("line {}: `{} = {}`: expected {expected}", self.line, self.key, self.value)
    }
}

/// The line up to a `#` that is not within quotes.
fn without_comment(line: &str) -> &str {
    let mut quoted = false;
    let comment = line.char_indices().find(|&(_, c)| {
        quoted ^= c == '"';
        c == '#' && !quoted
    });
    comment.map_or(line, |(at, _)| &line[..at])
}

fn is_key(key: &str) -> bool {
    !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn integer(text: &str) -> Result<u64, String> {
        let mut config = Config::parse(text)?;
        let number = config.integer("n", 7, 1..=100)?;
        config.finish()?;
        Ok(number)
    }

    #[test]
    fn defaults_and_values() {
        assert_eq!(integer(""), Ok(7));
        assert_eq!(integer("# nothing\n\n"), Ok(7));
        assert_eq!(integer("n=1_0 # ten"), Ok(10));
    }

    #[test]
    fn complaints_name_line_key_value_and_what_was_expected() {
        let why = "line 2: `n = 101`: expected a whole number from 1 to 100";
        assert_eq!(integer("\nn = 101"), Err(why.into()));
        assert_eq!(integer("n = -1").unwrap_err().matches("`n = -1`").count(), 1);
        assert_eq!(integer("m = 1"), Err("line 1: unknown key `m`; known keys: n".into()));
        assert_eq!(integer("[n]"), Err("line 1: expected `key = value`".into()));
        assert!(integer("n = 1\nn = 2").unwrap_err().contains("already in line 1"));
        assert!(integer("n =").is_err() && integer("= 1").is_err() && integer("a b = 1").is_err());
    }

    #[test]
    fn what_is_in_force_is_said_with_defaults() {
        let mut config = Config::parse("gap_us = 5").unwrap();
        assert_eq!(config.microseconds("gap_us", 1, 0..=9), Ok(5_000));
        assert_eq!(config.small("n", 7, 0..=u32::MAX), Ok(7));
        assert_eq!(config.in_force(), "gap_us = 5, n = 7");
        assert!(Config::parse("n = 4294967296").unwrap().small("n", 7, 0..=u32::MAX).is_err());
    }

    #[test]
    fn other_types() {
        let mut config = Config::parse("on = true\nname = \"a # b\" # c").unwrap();
        assert_eq!(config.boolean("on", false), Ok(true));
        assert_eq!(config.text("name", ""), Ok("a # b"));
        assert_eq!(config.text("absent", "default"), Ok("default"));
        config.finish().unwrap();
        let mut config = Config::parse("on = 1\nname = bare").unwrap();
        assert!(config.boolean("on", false).unwrap_err().contains("true or false"));
        assert!(config.text("name", "").unwrap_err().contains("double quotes"));
    }
}
