//! Simulated beside measured: the same pair, load and policy, as ratios.

use super::{Policies, trace};
use crate::error::CtlError;
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use tally_replay::{Arrivals, Cut, Residency, Setup, simulate};

/// A measured program and the trace nearest to it.
const PROGRAMS: [(&str, &str); 8] = [
    ("bert-large-graph", "bert_large_infer_b1_s128"),
    ("llama-7b-decode-graph", "llama7b_decode_b1"),
    ("resnet50-graph", "resnet50_infer_b1"),
    ("resnet50-eager", "resnet50_infer_b1"),
    ("bert-b32-train", "bert_base_train_b32_s384"),
    ("gpt2-train", "gpt2_12l_train_b8_s1024"),
    ("gpt2-large-train", "gpt2_large_train_b4_s512"),
    ("resnet50-b128-train", "resnet50_train_b128"),
];

/// Print a table of all rows of the file that can be simulated.
pub fn run(
    out: &mut impl Write,
    file: &Path,
    setup: &Setup,
    policies: &Policies,
) -> Result<(), CtlError> {
    let wrong = |why: String| CtlError::Usage(format!("--calibrate {}: {why}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|e| wrong(e.to_string()))?;
    let rows: Vec<Value> = serde_json::from_str(&text).map_err(|e| {
        wrong(format!("{e}; expected an array of rows as in docs/results/pairs.json"))
    })?;
    writeln!(
        out,
        "| pair | mode | p99 over solo, simulated | measured | off by | share, simulated | measured | off by |"
    )?;
    writeln!(out, "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")?;
    let (mut all, mut p99_within, mut share_within) = (0, 0, 0);
    for row in &rows {
        let text = |key: &str| row.get(key).and_then(Value::as_str).unwrap_or("");
        let number = |key: &str| row.get(key).and_then(Value::as_f64);
        let known = |name: &str| PROGRAMS.iter().find(|p| p.0 == name).map(|p| p.1);
        let (hp, be, mode) = (text("hp"), text("be"), text("mode"));
        let (Some(high), Some(low)) = (known(hp), known(be)) else { continue };
        let vendor = row.get("vendor_rewrite") == Some(&Value::Bool(true));
        let (residency, scheduled) = match (mode, text("policy")) {
            ("time-slicing", _) => (Residency::Timeslice, false),
            ("mps", _) => (Residency::Mps, false),
            ("tally-timeslice", "tally-priority") => (Residency::Timeslice, true),
            ("tally-mps", "tally-priority") => (Residency::Mps, true),
            _ => continue,
        };
        let (Some(p99), Some(share)) = (number("p99_over_solo"), number("be_share")) else {
            continue;
        };
        let load = number("load").filter(|&l| l > 0.0).unwrap_or(0.5);
        let cut = if vendor { Cut::All } else { Cut::Open };
        let graph = hp.ends_with("graph");
        let setup = Setup { residency, cut, graph, ..*setup };
        let policy = if scheduled { policies.load()? } else { None };
        let (high, low) = (trace("hp", high)?, trace("be", low)?);
        let report = simulate(&setup, &high, Some(&low), &Arrivals::Poisson { load }, policy);
        let found = report.high_priority.service_p99_over_solo;
        let kept = report.best_effort.map_or(0.0, |b| b.share);
        let off = |a: f64, b: f64| (a / b - 1.0) * 100.0;
        all += 1;
        p99_within += u32::from(off(found, p99).abs() <= 15.0);
        share_within += u32::from(off(kept, share).abs() <= 10.0);
        writeln!(
            out,
            "| {hp} + {be} | {mode}{} | {found:.2} | {p99:.2} | {:+.0} % | {kept:.2} | {share:.2} | {:+.0} % |",
            if vendor { ", vendor kernels cut" } else { "" },
            off(found, p99),
            off(kept, share),
        )?;
    }
    writeln!(out)?;
    writeln!(
        out,
        "p99 within 15 % in {p99_within} of {all} rows, share within 10 % in {share_within}."
    )?;
    Ok(())
}
