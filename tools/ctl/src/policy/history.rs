//! `tallyctl policy history`: which policies were active, and why each came and went.

use crate::admin::{Core, read};
use crate::error::CtlError;
use crate::status::{short, short_digest};
use crate::table::{Align, table};
use std::io::Write;
use tally_admin::{PolicyRecord, Request};

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
    let records: Vec<PolicyRecord> = read(history)?;
    Ok(show(out, &records, now_s)?)
}

fn show(out: &mut impl Write, records: &[PolicyRecord], now_s: u64) -> std::io::Result<()> {
    use Align::{Left, Right};
    let header = [
        ("GENERATION", Right),
        ("NAME", Left),
        ("SHA256", Left),
        ("LOADED BECAUSE", Left),
        ("AGO", Right),
        ("STATE", Left),
        ("UNLOADED BECAUSE", Left),
        ("DECIDES", Right),
        ("FAULTS", Right),
        ("KEPT", Left),
    ];
    let rows: Vec<Vec<String>> = records.iter().rev().map(|record| row(record, now_s)).collect();
    for line in table(&header, &rows) {
        writeln!(out, "{line}")?;
    }
    for record in records.iter().rev() {
        if let Some(how) = &record.disabled {
            let generation = record.generation;
            writeln!(out, "\n{generation} was disabled: {}: {}", how.kind, how.message)?;
        }
    }
    Ok(())
}

fn row(record: &PolicyRecord, now_s: u64) -> Vec<String> {
    let loaded_because = if record.same_as_generation == record.generation {
        record.loaded_because.to_string()
    } else {
        format!("{} of {}", record.loaded_because, record.same_as_generation)
    };
    let figure = |n: u64| match record.unloaded_because {
        Some(_) => n.to_string(),
        None => "-".into(),
    };
    vec![
        record.generation.to_string(),
        short(&record.name),
        short_digest(&record.digest).to_owned(),
        loaded_because,
        ago(now_s.saturating_sub(record.loaded_at_unix_s)),
        record.restored.outcome().to_owned(),
        record.unloaded_because.map_or("active", |why| why.as_str()).to_owned(),
        figure(record.decides),
        figure(record.faults.total()),
        if record.kept { "yes" } else { "no" }.to_owned(),
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
    use tally_admin::{Disabled, FaultCounts, LoadedBecause, Restored, UnloadedBecause};

    #[test]
    fn the_latest_comes_first_and_faults_are_told_in_full() {
        let how = Disabled {
            kind: "trap".into(),
            message: "unreachable\n  at chaos".into(),
            ..Disabled::default()
        };
        let records = [
            PolicyRecord {
                generation: 1,
                name: "old".into(),
                digest: "0123456789abcdef0123".into(),
                loaded_because: LoadedBecause::Start,
                same_as_generation: 1,
                loaded_at_unix_s: 100,
                unloaded_because: Some(UnloadedBecause::Disabled),
                decides: 5,
                faults: FaultCounts { trap: 2, stall: 1, ..FaultCounts::default() },
                disabled: Some(how),
                kept: true,
                ..PolicyRecord::default()
            },
            PolicyRecord {
                generation: 2,
                name: "new".into(),
                loaded_because: LoadedBecause::Fallback,
                same_as_generation: 1,
                loaded_at_unix_s: 400,
                restored: Restored::Accepted,
                kept: true,
                ..PolicyRecord::default()
            },
        ];
        let mut out = Vec::new();
        show(&mut out, &records, 500).unwrap();
        let shown = String::from_utf8(out).unwrap();
        let at =
            |word: &str| shown.find(word).unwrap_or_else(|| panic!("{word:?} is not in\n{shown}"));
        assert!(at("fallback of 1") < at("disabled"));
        assert!(at("1 was disabled: trap: unreachable") > at("disabled"));
        assert!(shown.contains("100 s") && shown.contains("6 min") && shown.contains("active"));
        assert!(shown.contains(" 0123456789abcdef  start "), "{shown}");
    }
}
