//! Simulated beside measured: the same pair, load and policy, as ratios.
//!
//! A program takes alone what the row's own run measured of it alone; everything that
//! comes of sharing is simulated.

use super::arrivals::poisson;
use super::{Policies, trace};
use crate::error::CtlError;
use serde::Serialize;
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use tally_replay::trace::Alone;
use tally_replay::{Arrivals, Cut, Report, Residency, Setup, Trace, simulate};

/// A measured program and its trace.
const PROGRAMS: [(&str, &str); 10] = [
    ("bert-graph", "bert_base_infer_b1_s128"),
    ("bert-large-graph", "bert_large_infer_b1_s128"),
    ("llama-7b-decode-graph", "llama7b_decode_b1"),
    ("resnet50-eager", "resnet50_infer_b1"),
    ("resnet50-graph", "resnet50_infer_b1_graph"),
    ("bert-b32-train", "bert_base_train_b32_s128"),
    ("gpt2-train", "gpt2_12l_train_b8_s1024"),
    ("gpt2-large-train", "gpt2_large_train_b4_s512"),
    ("resnet50-b128-train", "resnet50_train_b128"),
    ("resnet50-train", "resnet50_train_b64"),
];
/// Of the arrivals in `tests/gpu/step_pairs.py`.
const SEED: u32 = 7;
/// What was aimed at: p99 and share off by at most so much.
const AIMS_PERCENT: [f64; 2] = [15.0, 10.0];

/// An inference alone may take so much longer in a row's mode than in its solo figures, and under MPS, where
/// every graph does, so much more; else its host changed in between (`tests/gpu/step_pairs.py`).
const DRIFT_MAX: f64 = 1.25;
const MPS_ALONE: f64 = 0.25;

/// A row of measurements that can be simulated.
struct Measured<'a> {
    row: &'a Value,
    traces: [&'static str; 2],
    setup: Setup,
    scheduled: bool,
    p99: f64,
    share: f64,
    load: f64,
}

/// Both side by side.
#[derive(Serialize)]
struct Compared {
    hp: String,
    be: String,
    mode: String,
    vendor_rewrite: bool,
    p99_over_solo: f64,
    measured_p99_over_solo: f64,
    p50_ms: f64,
    measured_p50_ms: f64,
    p99_ms: f64,
    measured_p99_ms: f64,
    share: f64,
    measured_share: f64,
    report: Report,
}

/// Print a table of all rows of the file that can be simulated.
pub fn run(
    out: &mut impl Write,
    file: &Path,
    setup: &Setup,
    policies: &Policies,
    since: &str,
    json: bool,
) -> Result<(), CtlError> {
    let wrong = |why: String| CtlError::Usage(format!("--calibrate {}: {why}", file.display()));
    let content = std::fs::read_to_string(file).map_err(|e| wrong(e.to_string()))?;
    let rows: Vec<Value> = serde_json::from_str(&content).map_err(|e| {
        wrong(format!("{e}; expected an array of rows as in docs/results/pairs.json"))
    })?;
    // As dates they compare as texts do.
    let rows = rows.iter().filter(|row| text(row, "date") >= since);
    let rows: Vec<_> = rows.filter_map(|row| Measured::of(row, setup)).collect();
    let (rows, left_out): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| !row.has_drifted());
    let compared = rows.iter().map(|row| row.compare(policies)).collect::<Result<Vec<_>, _>>()?;
    if json {
        let text =
            serde_json::to_string_pretty(&compared).map_err(|e| CtlError::Answer(e.to_string()))?;
        return Ok(writeln!(out, "{text}")?);
    }
    show(out, &compared)?;
    if !left_out.is_empty() {
        writeln!(
            out,
            "\nLeft out, for the inference's host was slower than for its solo figures: {}.",
            left_out.iter().map(Measured::name).collect::<Vec<_>>().join("; ")
        )?;
    }
    Ok(())
}

fn show(out: &mut impl Write, rows: &[Compared]) -> Result<(), CtlError> {
    writeln!(
        out,
        "| pair | mode | p99 over solo, simulated | measured | off by | share, simulated | measured | off by |"
    )?;
    writeln!(out, "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")?;
    let off = |a: f64, b: f64| (a / b - 1.0) * 100.0;
    let mut within = [0; 2];
    for r in rows {
        let offs = [off(r.p99_over_solo, r.measured_p99_over_solo), off(r.share, r.measured_share)];
        for (count, (off, aim)) in within.iter_mut().zip(offs.iter().zip(AIMS_PERCENT)) {
            *count += u32::from(off.abs() <= aim);
        }
        writeln!(
            out,
            "| {} + {} | {}{} | {:.2} | {:.2} | {:+.0} % | {:.2} | {:.2} | {:+.0} % |",
            r.hp,
            r.be,
            r.mode,
            if r.vendor_rewrite { ", vendor kernels cut" } else { "" },
            r.p99_over_solo,
            r.measured_p99_over_solo,
            offs[0],
            r.share,
            r.measured_share,
            offs[1],
        )?;
    }
    writeln!(out)?;
    writeln!(
        out,
        "p99 within {} % in {} of {} rows, share within {} % in {}.",
        AIMS_PERCENT[0],
        within[0],
        rows.len(),
        AIMS_PERCENT[1],
        within[1]
    )?;
    Ok(())
}

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row.get(key).and_then(Value::as_str).unwrap_or("")
}

fn number(row: &Value, key: &str) -> Option<f64> {
    row.get(key).and_then(Value::as_f64).filter(|&n| n > 0.0)
}

fn known(name: &str) -> Option<&'static str> {
    PROGRAMS.iter().find(|p| p.0 == name).map(|p| p.1)
}

impl<'a> Measured<'a> {
    fn of(row: &'a Value, setup: &Setup) -> Option<Self> {
        let (residency, scheduled) = match (text(row, "mode"), text(row, "policy")) {
            ("time-slicing", _) => (Residency::Timeslice, false),
            ("mps", _) => (Residency::Mps, false),
            ("tally-timeslice", "tally-priority") => (Residency::Timeslice, true),
            ("tally-mps", "tally-priority") => (Residency::Mps, true),
            _ => return None,
        };
        let (high, low) = (known(text(row, "hp"))?, known(text(row, "be"))?);
        let cut = match (is_vendor(row), row.get("cut")) {
            (true, _) => Cut::All,
            (false, Some(_)) => Cut::Open,
            // Of a time when nothing was cut.
            (false, None) => Cut::None,
        };
        let graph = text(row, "hp").ends_with("graph");
        let seconds = number(row, "seconds").unwrap_or(setup.seconds);
        // A mode that could not keep up was given as long again.
        let setup = Setup { residency, cut, graph, seconds, overrun_seconds: seconds, ..*setup };
        let p99 = number(row, "p99_over_solo")?;
        // Of what the very process makes alone, where that was measured.
        let share = number(row, "be_share_of_own").or_else(|| number(row, "be_share"))?;
        let load = number(row, "load").unwrap_or(0.5);
        Some(Measured { row, traces: [high, low], setup, scheduled, p99, share, load })
    }

    /// Whether the inference alone was not as fast as for the solo figures any more: ratios to
    /// those say nothing then.
    fn has_drifted(&self) -> bool {
        let times = ["own_solo_p50_ms", "solo_p50_ms"].map(|key| number(self.row, key));
        let [Some(own_ms), Some(solo_ms)] = times else { return false };
        let more = if self.setup.residency == Residency::Mps { MPS_ALONE } else { 0.0 };
        own_ms > solo_ms * (DRIFT_MAX + more)
    }

    fn name(&self) -> String {
        let vendor = if is_vendor(self.row) { ", vendor kernels cut" } else { "" };
        let [hp, be, mode] = ["hp", "be", "mode"].map(|key| text(self.row, key));
        format!("{hp} + {be}, {mode}{vendor}")
    }

    fn compare(&self, policies: &Policies) -> Result<Compared, CtlError> {
        let row = self.row;
        let (mut high, mut low) = (trace("hp", self.traces[0])?, trace("be", self.traces[1])?);
        if self.setup.graph {
            high = high.as_graph();
        }
        self.as_alone(&mut high, &mut low);
        let policy = if self.scheduled { policies.load()? } else { None };
        let load = self.arrivals();
        let report = simulate(&self.setup, &high, Some(&low), &load, policy);
        let h = &report.high_priority;
        Ok(Compared {
            hp: text(row, "hp").into(),
            be: text(row, "be").into(),
            mode: text(row, "mode").into(),
            vendor_rewrite: is_vendor(row),
            p99_over_solo: h.service_p99_over_solo,
            measured_p99_over_solo: self.p99,
            p50_ms: h.service_p50_ms,
            measured_p50_ms: number(row, "p50_ms").unwrap_or(0.0),
            p99_ms: h.service_p99_ms,
            measured_p99_ms: number(row, "p99_ms").unwrap_or(0.0),
            share: report.best_effort.as_ref().map_or(0.0, |b| b.share),
            measured_share: self.share,
            report,
        })
    }

    /// The requests that the row's run served, if it says how fast the inference was alone.
    fn arrivals(&self) -> Arrivals {
        let Some(solo_ms) = number(self.row, "solo_p50_ms") else {
            return Arrivals::Poisson { load: self.load };
        };
        let rate_per_s = self.load * 1e3 / solo_ms;
        Arrivals::At(poisson(rate_per_s, self.setup.seconds, SEED))
    }

    /// Both as fast alone as they were in the row's run.
    fn as_alone(&self, high: &mut Trace, low: &mut Trace) {
        let ns = |key: &str| number(self.row, key).map(|ms| (ms * 1e6) as u64);
        let like = |was: Option<Alone>, ns: u64| was.unwrap_or_default().scaled_to(ns);
        if let Some(solo_ns) = ns("solo_p50_ms") {
            let plain = like(high.alone[0], solo_ns);
            high.alone[0] = Some(Alone { p99_ns: ns("solo_p99_ms").unwrap_or(0), ..plain });
            if let Some(own_ns) =
                ns("own_solo_p50_ms").filter(|_| self.setup.residency == Residency::Mps)
            {
                high.alone[1] = Some(like(high.alone[1].or(Some(plain)), own_ns));
            }
        }
        if let Some(rate) = number(self.row, "own_be_solo_steps_per_s") {
            // Measured in the row's mode, and its share is of this: nothing is left to be told by a ratio.
            let own_ns = (1e9 / rate) as u64;
            low.alone = low.alone.map(|alone| alone.map(|alone| alone.scaled_to(own_ns)));
            low.alone[0] = Some(like(low.alone[0], own_ns));
        } else if let Some(rate) = number(self.row, "be_solo_steps_per_s") {
            let solo_ns = (1e9 / rate) as u64;
            let before_ns = low.alone[0].map_or(solo_ns, |alone| alone.ns);
            low.alone[1] = low.alone[1].map(|mps| {
                mps.scaled_to((mps.ns as f64 * solo_ns as f64 / before_ns as f64) as u64)
            });
            low.alone[0] = Some(like(low.alone[0], solo_ns));
        }
    }
}

fn is_vendor(row: &Value) -> bool {
    row.get("vendor_rewrite") == Some(&Value::Bool(true))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_trainings_share_is_of_what_its_own_process_makes_alone() {
        let setup = Setup::default();
        let mut row = json!({
            "hp": "bert-graph", "be": "gpt2-train", "mode": "tally-mps", "policy": "tally-priority",
            "p99_over_solo": 1.1, "be_share": 0.4, "be_solo_steps_per_s": 10.0,
        });
        let alone_ns = |row: &Value| {
            let measured = Measured::of(row, &setup).unwrap();
            let (mut high, mut low) = (
                trace("hp", measured.traces[0]).unwrap(),
                trace("be", measured.traces[1]).unwrap(),
            );
            measured.as_alone(&mut high, &mut low);
            (measured.share, low.alone.map(|alone| alone.unwrap().ns))
        };
        let (share, [plain_ns, mps_ns]) = alone_ns(&row);
        assert_eq!((share, plain_ns), (0.4, 100_000_000));
        assert_ne!(mps_ns, plain_ns, "as in its trace");
        row["own_be_solo_steps_per_s"] = json!(8.0);
        row["be_share_of_own"] = json!(0.5);
        assert_eq!(alone_ns(&row), (0.5, [125_000_000; 2]));
    }

    #[test]
    fn a_row_whose_host_changed_is_left_out() {
        let setup = Setup::default();
        for (mode, own_ms, drifted) in [
            ("tally-timeslice", 1.2, false),
            ("tally-timeslice", 1.3, true),
            ("tally-mps", 1.3, false),
            ("tally-mps", 1.6, true),
        ] {
            let row = json!({
                "hp": "bert-graph", "be": "gpt2-train", "mode": mode, "policy": "tally-priority",
                "p99_over_solo": 1.1, "be_share": 0.4, "solo_p50_ms": 1.0, "own_solo_p50_ms": own_ms,
            });
            let measured = Measured::of(&row, &setup).unwrap();
            assert_eq!(measured.has_drifted(), drifted, "{}, {own_ms}", measured.name());
        }
    }
}
