//! Text of others, as it may be shown on a terminal.

use serde_json::Value;
use tally_ipc::text::printable;

/// Each line of it printable.
pub fn printable_lines(text: &str) -> String {
    text.split('\n').map(|line| printable(line.into())).collect::<Vec<_>>().join("\n")
}

/// Makes each text in it printable, names of fields included.
pub fn make_printable(value: &mut Value) {
    match value {
        Value::String(text) => *text = printable(std::mem::take(text)),
        Value::Array(values) => values.iter_mut().for_each(make_printable),
        Value::Object(fields) => {
            let named = std::mem::take(fields).into_iter().map(|(name, mut value)| {
                make_printable(&mut value);
                (printable(name), value)
            });
            *fields = named.collect();
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn texts_are_cleaned_wherever_they_are_and_all_else_is_kept() {
        let mut value =
            json!({"a\u{1b}": ["\u{9b}31m", {"b": "x\ny"}, 1.5, null, true], "größe": -3});
        make_printable(&mut value);
        assert_eq!(value, json!({"a?": ["?31m", {"b": "x?y"}, 1.5, null, true], "größe": -3}));
        assert_eq!(printable_lines("a\u{1b}b\nc\td\n"), "a?b\nc?d\n");
    }
}
