//! A configuration file: every table with its keys, from the schema of its type (`tally_settings::schema`) and the
//! values that are in force without a file.

use crate::{escaped, one_line, table};
use serde_json::Value;
use std::fmt::Write;

/// Further defaults of a table, in a column of their own.
pub struct Preset {
    /// Name of the table as in the file: `policy.limits`.
    pub table: &'static str,
    /// Title of the column.
    pub name: &'static str,
    /// The values of its keys.
    pub values: Value,
}

/// All tables, each under its name as in the file.
pub fn tables(schema: &Value, defaults: &Value, presets: &[Preset]) -> String {
    let mut out = String::new();
    one_table("", schema, defaults, presets, &mut out);
    out
}

/// A file of all settings with their defaults, as TOML. Those without a default are comments, with the value that
/// `samples` has for them; so are those of a table with a preset, which decides what they are.
///
/// # Panics
/// If a setting without a default has no sample.
pub fn example(
    introduction: &str,
    schema: &Value,
    defaults: &Value,
    presets: &[Preset],
    samples: &[(&str, &str)],
) -> String {
    let mut out = comment(introduction);
    example_table("", schema, defaults, presets, samples, &mut out);
    out
}

fn example_table(
    name: &str,
    schema: &Value,
    defaults: &Value,
    presets: &[Preset],
    samples: &[(&str, &str)],
    out: &mut String,
) {
    let within = |key: &str| if name.is_empty() { key.into() } else { format!("{name}.{key}") };
    let preset = presets.iter().find(|preset| preset.table == name);
    if !name.is_empty() {
        let about = schema["description"].as_str().unwrap_or_default();
        *out += &format!("\n{}[{name}]\n", comment(about));
    }
    if let Some(preset) = preset {
        let other = preset.name.trim_matches('`');
        *out +=
            &comment(&format!("\"default\", or \"{other}\" with other defaults of this table."));
        *out += "preset = \"default\"\n";
    }
    for (key, of) in properties(schema).filter(|(_, of)| !is_table(of)) {
        let text = of["description"].as_str().unwrap_or_default();
        let range = match (range(of), unit(key)) {
            (range, _) if range.is_empty() => range,
            (range, unit) if unit.is_empty() => format!("({range})"),
            (range, unit) => format!("({range} {unit})"),
        };
        *out += &comment(&format!("{text} {} {range}", values(of)));
        let setting = within(key);
        let sample = samples.iter().find(|(name, _)| *name == setting).map(|(_, value)| *value);
        *out += &match (literal(&defaults[key]).replace('`', ""), preset) {
            (none, _) if none.is_empty() => {
                format!("#{key} = {}\n", sample.unwrap_or_else(|| panic!("no sample: {setting}")))
            }
            (value, Some(_)) => format!("#{key} = {value}\n"),
            (value, None) => format!("{key} = {value}\n"),
        };
    }
    for (key, of) in properties(schema).filter(|(_, of)| is_table(of)) {
        example_table(&within(key), of, &defaults[key], presets, samples, out);
    }
}

/// Wraps a text into lines of a TOML comment.
fn comment(text: &str) -> String {
    const COLUMNS: usize = 96;
    let mut out = String::new();
    let mut line = "#".to_owned();
    for word in text.split_whitespace() {
        if line.chars().count() + 1 + word.chars().count() > COLUMNS {
            out += &line;
            out += "\n";
            line = "#".into();
        }
        line += " ";
        line += word;
    }
    if line.len() > 1 {
        out += &line;
        out += "\n";
    }
    out
}

fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema["properties"].as_object().into_iter().flatten()
}

fn is_table(schema: &Value) -> bool {
    schema["properties"].is_object()
}

fn one_table(name: &str, schema: &Value, defaults: &Value, presets: &[Preset], out: &mut String) {
    let keys: Vec<_> = properties(schema).filter(|(_, of)| !is_table(of)).collect();
    // Writing to a string does not fail.
    if !name.is_empty() {
        let about = schema["description"].as_str().unwrap_or_default();
        let _ = writeln!(out, "## `[{name}]`\n\n{}\n", escaped(&one_line(about)));
    }
    if !keys.is_empty() {
        let cells = |key: &str, of: &Value| {
            let text = of["description"].as_str().unwrap_or_default();
            let meaning = one_line(&format!("{} {}", escaped(text), values(of)));
            [format!("`{key}`"), kind(of), literal(&defaults[key]), range(of), unit(key), meaning]
        };
        let rows = keys.iter().map(|(key, of)| (key, cells(key, of)));
        let made = match presets.iter().find(|preset| preset.table == name) {
            Some(preset) => {
                let rows = rows.map(|(key, [a, b, c, d, e, f])| {
                    [a, b, c, literal(&preset.values[key.as_str()]), d, e, f]
                });
                let head = ["key", "type", "default", preset.name, "range", "unit", "meaning"];
                table(head, rows)
            }
            None => {
                let head = ["key", "type", "default", "range", "unit", "meaning"];
                table(head, rows.map(|(_, cells)| cells))
            }
        };
        let _ = writeln!(out, "{made}");
    }
    for (key, of) in properties(schema).filter(|(_, of)| is_table(of)) {
        let dot = if name.is_empty() { "" } else { "." };
        one_table(&format!("{name}{dot}{key}"), of, &defaults[key], presets, out);
    }
}

fn kind(schema: &Value) -> String {
    let named = match &schema["type"] {
        Value::String(one) => one.as_str(),
        // With `null`, for a setting that need not be.
        Value::Array(several) => several
            .iter()
            .filter_map(Value::as_str)
            .find(|kind| *kind != "null")
            .unwrap_or_default(),
        _ => "",
    };
    match named {
        "integer" | "number" => "number".into(),
        "array" => format!("list of {}s", kind(&schema["items"])),
        "boolean" => "`true`, `false`".into(),
        _ => "text".into(),
    }
}

/// The value as it is written in the file.
fn literal(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::Number(number) => format!("`{}`", number.as_u64().map(grouped).unwrap_or_default()),
        Value::Array(all) => {
            let all: Vec<_> = all.iter().map(|one| literal(one).replace('`', "")).collect();
            format!("`[{}]`", all.join(", "))
        }
        other => format!("`{other}`"),
    }
}

/// In groups of three digits, as TOML allows.
fn grouped(value: u64) -> String {
    tally_contract::limits::grouped(value).replace(' ', "_")
}

fn range(schema: &Value) -> String {
    let bound = |schema: &Value, key: &str| schema[key].as_u64();
    let between = |schema: &Value| match (bound(schema, "minimum"), bound(schema, "maximum")) {
        (least, Some(most)) => format!("{} to {}", grouped(least.unwrap_or(0)), grouped(most)),
        (Some(least), None) if least > 0 => format!("at least {}", grouped(least)),
        _ => String::new(),
    };
    match bound(schema, "maxItems") {
        Some(most) => format!("at most {most}, each {}", between(&schema["items"])),
        None => between(schema),
    }
}

/// The values of a setting that has only some, each with what it means.
fn values(schema: &Value) -> String {
    let plain = schema["enum"].as_array().into_iter().flatten().map(|value| (value, ""));
    let told = schema["oneOf"].as_array().into_iter().flatten().flat_map(|one| {
        let alike = one["enum"].as_array().into_iter().flatten();
        let about = one["description"].as_str().unwrap_or_default();
        alike.chain(one.get("const")).map(move |value| (value, about))
    });
    let all = plain.chain(told).filter(|(value, _)| value.is_string()).map(|(value, about)| {
        let about = escaped(&one_line(about));
        let about = about.trim_end_matches('.');
        if about.is_empty() { format!("`{value}`") } else { format!("`{value}` ({about})") }
    });
    let all: Vec<_> = all.collect();
    if all.is_empty() { String::new() } else { format!("Values: {}.", all.join(", ")) }
}

/// That the name of a key ends with, or has before `max`.
fn unit(key: &str) -> String {
    if key.contains("_per_s") {
        return "1/s".into();
    }
    let units = key.split('_').rev().filter_map(|part| match part {
        "us" | "ms" | "s" | "bytes" => Some(part),
        "kib" => Some("KiB"),
        "mib" => Some("MiB"),
        "fuel" => Some("fuel"),
        _ => None,
    });
    units.take(1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_have_their_types_ranges_units_and_defaults() {
        let schema = json!({"properties": {
            "a": {"description": "Table a.", "properties": {
                "time_us": {"type": ["integer", "null"], "minimum": 0, "maximum": 1_000_000, "description": "How <long>."},
                "sms": {"type": "array", "maxItems": 16, "items": {"type": "integer", "minimum": 1, "maximum": 9}},
                "bytes_max": {"type": "integer", "minimum": 4096},
                "on": {"type": "boolean"},
                "way": {"oneOf": [{"const": "x", "description": "One way."}, {"enum": ["y", "z"]}]},
                "b": {"properties": {"joins_per_s": {"type": "integer", "minimum": 0}}},
            }},
        }});
        let defaults = json!({"a": {
            "time_us": null, "sms": [16, 32], "bytes_max": 65536, "on": true, "way": "x",
            "b": {"joins_per_s": 7},
        }});
        let preset = Preset { table: "a.b", name: "other", values: json!({"joins_per_s": 8}) };
        let made = tables(&schema, &defaults, &[preset]);
        for part in [
            "## `[a]`\n\nTable a.\n\n| key | type | default | range | unit | meaning |\n",
            "| `time_us` | number | | 0 to 1_000_000 | us | How \\<long>. |\n",
            "| `sms` | list of numbers | `[16, 32]` | at most 16, each 1 to 9 | | |\n",
            "| `bytes_max` | number | `65_536` | at least 4_096 | bytes | |\n",
            "| `on` | `true`, `false` | `true` | | | |\n",
            "| `way` | text | `\"x\"` | | | Values: `\"x\"` (One way), `\"y\"`, `\"z\"`. |\n",
            "## `[a.b]`\n",
            "| `joins_per_s` | number | `7` | `8` | | 1/s | |\n",
        ] {
            assert!(made.contains(part), "{part}\n{made}");
        }
        let preset = Preset { table: "a.b", name: "`other`", values: json!({}) };
        let samples = [("a.time_us", "5")];
        assert_eq!(
            example("All.", &schema, &defaults, &[preset], &samples),
            "# All.\n\n# Table a.\n[a]\n# (at least 4_096 bytes)\nbytes_max = 65_536\non = true\n\
             # (at most 16, each 1 to 9)\nsms = [16, 32]\n\
             # How <long>. (0 to 1_000_000 us)\n#time_us = 5\n\
             # Values: `\"x\"` (One way), `\"y\"`, `\"z\"`.\nway = \"x\"\n\n[a.b]\n\
             # \"default\", or \"other\" with other defaults of this table.\npreset = \"default\"\n\
             #joins_per_s = 7\n"
        );
    }

    #[test]
    fn comments_are_wrapped() {
        let made = comment(&"word ".repeat(50));
        assert!(made.lines().count() == 3 && made.lines().all(|line| line.len() <= 96), "{made}");
        assert_eq!(comment(" "), "");
    }
}
