//! `tallyctl policy history`: which policies were active, and why each came and went.

use crate::admin::Core;
use crate::error::CtlError;
use crate::status::{count, number, text};
use crate::table::{Align, table};
use serde_json::Value;
use std::io::Write;
use tally_admin::Request;

/// Show it, the latest first.
pub fn run(core: &mut Core, out: &mut impl Write, as_json: bool) -> Result<(), CtlError> {
    let history = core.ask(&Request::PolicyHistory {})?;
    if as_json {
        writeln!(out, "{history:#}")?;
        return Ok(());
    }
    let now_s = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    Ok(show(out, history.as_array().map_or(&[], Vec::as_slice), now_s)?)
}

fn show(out: &mut impl Write, records: &[Value], now_s: u64) -> std::io::Result<()> {
    use Align::{Left, Right};
    let header = [
        ("GENERATION", Right),
        ("NAME", Left),
        ("SHA256", Left),
        ("CAME", Left),
        ("AGO", Right),
        ("STATE", Left),
        ("WENT", Left),
        ("DECIDES", Right),
        ("FAULTS", Right),
        ("KEPT", Left),
    ];
    let rows: Vec<Vec<String>> = records.iter().rev().map(|record| row(record, now_s)).collect();
    for line in table(&header, &rows) {
        writeln!(out, "{line}")?;
    }
    for record in records.iter().rev() {
        if let Some(message) = record.pointer("/disabled/message").and_then(Value::as_str) {
            let (generation, kind) = (count(record, "/generation"), text(record, "/disabled/kind"));
            writeln!(out, "\n{generation} was disabled: {kind}: {message}")?;
        }
    }
    Ok(())
}

fn row(record: &Value, now_s: u64) -> Vec<String> {
    let faults = record["faults"].as_object().into_iter().flatten();
    let faults: u64 = faults.filter_map(|(_, n)| n.as_u64()).sum();
    let loaded_because = text(record, "/loaded_because");
    let own = record["same_as_generation"] == record["generation"];
    let loaded_because = if own {
        loaded_because.into()
    } else {
        format!("{loaded_because} of {}", count(record, "/same_as_generation"))
    };
    let active = record["unloaded_because"].is_null();
    let figure = |n: String| if active { "-".into() } else { n };
    vec![
        count(record, "/generation"),
        crate::status::short(text(record, "/name")),
        text(record, "/digest").get(..16).unwrap_or("none").to_owned(),
        loaded_because,
        ago(now_s.saturating_sub(number(record, "/loaded_at_unix_s") as u64)),
        text(record, "/restored/outcome").to_owned(),
        if active { "active".into() } else { text(record, "/unloaded_because").to_owned() },
        figure(count(record, "/decides")),
        figure(faults.to_string()),
        if record["kept"] == true { "yes" } else { "no" }.to_owned(),
    ]
}

fn ago(s: u64) -> String {
    match s {
        0..120 => format!("{s} s"),
        120..7_200 => format!("{} min", s / 60),
        _ => format!("{} h", s / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_latest_comes_first_and_strikes_are_told_in_full() {
        let records = [
            json!({
                "generation": 1, "name": "old", "digest": "0123456789abcdef0123", "loaded_because": "start",
                "same_as_generation": 1, "loaded_at_unix_s": 100, "restored": {"outcome": "not-offered"},
                "unloaded_because": "disabled", "decides": 5, "faults": {"trap": 2, "stall": 1},
                "disabled": {"kind": "trap", "message": "unreachable\n  at chaos"}, "kept": true,
            }),
            json!({
                "generation": 2, "name": "new", "digest": "", "loaded_because": "strikes", "same_as_generation": 1,
                "loaded_at_unix_s": 400, "restored": {"outcome": "accepted"}, "unloaded_because": null,
                "decides": 0, "faults": {}, "kept": true,
            }),
        ];
        let mut out = Vec::new();
        show(&mut out, &records, 500).unwrap();
        let shown = String::from_utf8(out).unwrap();
        let at =
            |word: &str| shown.find(word).unwrap_or_else(|| panic!("{word:?} is not in\n{shown}"));
        assert!(at("strikes of 1") < at("disabled"));
        assert!(at("1 was disabled: trap: unreachable") > at("disabled"));
        assert!(shown.contains("100 s") && shown.contains("6 min") && shown.contains("active"));
    }

    #[test]
    fn an_answer_that_lacks_everything_is_shown_all_the_same() {
        let mut out = Vec::new();
        show(&mut out, &[json!({})], 0).unwrap();
        assert!(String::from_utf8(out).unwrap().contains('?'));
    }
}
