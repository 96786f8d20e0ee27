//! Rows of a trace's text.

use super::{Alone, TraceError};
use csv::{ReaderBuilder, StringRecord, Trim};

pub(super) struct Row {
    pub name: String,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub regs: u32,
    pub smem: u32,
    pub start_ns: u64,
    pub end_ns: u64,
    /// Number of the recording's iteration that it is in.
    pub iteration: Option<u32>,
    pub call: Option<Call>,
}

/// The call that launched it. On the clock of the kernels; may lie before the first one.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Call {
    pub start_ns: i64,
    pub dur_ns: u64,
    /// When the last wait ended that the program was in since the call before.
    pub waited_ns: Option<i64>,
}

/// Contents of a trace file.
pub(super) struct Text {
    pub rows: Vec<Row>,
    /// What the program takes without a profiler: `[plain, under MPS]`.
    pub alone: [Option<Alone>; 2],
}

struct Columns {
    start: usize,
    duration: usize,
    name: usize,
    grid: usize,
    block: usize,
    regs: usize,
    smem: usize,
    iteration: Option<usize>,
    launch: Option<usize>,
    launch_dur: Option<usize>,
    waited: Option<usize>,
}

/// Parses the comments, the header and every row.
pub(super) fn read(name: &str, text: &str) -> Result<Text, TraceError> {
    let mut alone = [None; 2];
    let comments = text.lines().enumerate().take_while(|(_, line)| line.starts_with('#'));
    for (index, line) in comments {
        figures(name, index + 1, &line[1..], &mut alone)?;
    }
    let mut format = ReaderBuilder::new();
    format.comment(Some(b'#')).flexible(true).has_headers(false).trim(Trim::All);
    // Of a text, whose lines may be of any length, no record is wrong.
    let mut reader = format.from_reader(text.as_bytes());
    let mut records = reader.records().flatten();
    let header = records.next().unwrap_or_default();
    let find = |column| header.iter().position(|h| h == column);
    let at = |column| find(column).ok_or(TraceError::Column { file: name.into(), column });
    let columns = Columns {
        start: at("ts_us")?,
        duration: at("dur_us")?,
        name: at("name")?,
        grid: at("grid")?,
        block: at("block")?,
        regs: at("regs")?,
        smem: at("smem")?,
        iteration: find("iteration"),
        launch: find("launch_us"),
        launch_dur: find("launch_dur_us"),
        waited: find("waited_us"),
    };
    let mut rows = Vec::new();
    for record in records {
        rows.push(row(name, &record, &columns)?);
    }
    if rows.is_empty() {
        return Err(TraceError::Empty { file: name.into() });
    }
    Ok(Text { rows, alone })
}

/// `key=value` of a comment line: what the program takes alone.
fn figures(
    file: &str,
    line: usize,
    text: &str,
    alone: &mut [Option<Alone>; 2],
) -> Result<(), TraceError> {
    for (key, value) in text.split_whitespace().filter_map(|word| word.split_once('=')) {
        let wrong = |column| TraceError::Field {
            file: file.into(),
            line,
            column,
            found: value.into(),
            expected: "milliseconds, more than 0",
        };
        let ns = value.parse::<f64>().ok().filter(|v| (1e-6..1e9).contains(v));
        let ns = ns.map(|v| (v * 1e6).round() as u64);
        let set = |slot: &mut Option<Alone>, column: &'static str| -> Result<(), TraceError> {
            let (ns, slot) = (ns.ok_or_else(|| wrong(column))?, slot.get_or_insert_default());
            match column {
                "ms" => slot.ns = ns,
                "p99_ms" => slot.p99_ns = ns,
                _ => slot.launched_ns = ns,
            }
            Ok(())
        };
        match key {
            "plain_ms" => set(&mut alone[0], "ms")?,
            "plain_p99_ms" => set(&mut alone[0], "p99_ms")?,
            "plain_launched_ms" => set(&mut alone[0], "launched_ms")?,
            "mps_ms" => set(&mut alone[1], "ms")?,
            "mps_p99_ms" => set(&mut alone[1], "p99_ms")?,
            "mps_launched_ms" => set(&mut alone[1], "launched_ms")?,
            _ => {}
        }
    }
    Ok(())
}

fn row(file: &str, fields: &StringRecord, columns: &Columns) -> Result<Row, TraceError> {
    let line = fields.position().map_or(0, |position| position.line() as usize);
    let wrong = |column, found: &str, expected| TraceError::Field {
        file: file.into(),
        line,
        column,
        found: found.into(),
        expected,
    };
    let get = |index: usize| fields.get(index).unwrap_or("");
    let us = |column, index| {
        let text = get(index);
        let value = text.parse::<f64>().ok().filter(|v| (0.0..1e12).contains(v));
        let expected = "microseconds, 0 or more";
        value.map(|v| (v * 1e3).round() as u64).ok_or_else(|| wrong(column, text, expected))
    };
    // These may be absent, and lie before the first kernel.
    let maybe_us = |column, index: Option<usize>| match index.map(get) {
        None | Some("") => Ok(None),
        Some(text) => {
            let value = text.parse::<f64>().ok().filter(|v| v.abs() < 1e12);
            let ns = value.map(|v| (v * 1e3).round() as i64);
            ns.map(Some).ok_or_else(|| wrong(column, text, "microseconds, or nothing"))
        }
    };
    // Copies and fills have no shape: they are taken as one small block.
    let count = |column, index, default| match get(index) {
        "" => Ok(default),
        text => text.parse::<u32>().map_err(|_| wrong(column, text, "a whole number")),
    };
    let dims = |column, index| match get(index) {
        "" => Ok([1; 3]),
        text => {
            let mut all = text.split('x').map(|n| n.parse::<u32>().ok().filter(|&n| n > 0));
            match (all.next().flatten(), all.next().flatten(), all.next().flatten(), all.next()) {
                (Some(x), Some(y), Some(z), None) => Ok([x, y, z]),
                _ => Err(wrong(column, text, "three sizes of at least 1, as in 128x1x1")),
            }
        }
    };
    let start_ns = us("ts_us", columns.start)?;
    let iteration = match columns.iteration.map(get) {
        None | Some("") => None,
        Some(_) => Some(count("iteration", columns.iteration.unwrap_or(0), 0)?),
    };
    let call = maybe_us("launch_us", columns.launch)?.map(|start_ns| {
        let dur_ns = maybe_us("launch_dur_us", columns.launch_dur)?.unwrap_or(0).max(0) as u64;
        let waited_ns = maybe_us("waited_us", columns.waited)?;
        Ok(Call { start_ns, dur_ns, waited_ns })
    });
    Ok(Row {
        name: get(columns.name).to_owned(),
        grid: dims("grid", columns.grid)?,
        block: dims("block", columns.block)?,
        regs: count("regs", columns.regs, 16)?,
        smem: count("smem", columns.smem, 0)?,
        start_ns,
        end_ns: start_ns + us("dur_us", columns.duration)?.max(1),
        iteration,
        call: call.transpose()?,
    })
}
