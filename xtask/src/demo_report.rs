//! What the demo measured: the figures, the table and the verdict.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;

/// High-priority p99 under `tally-priority` over that of the unscheduled run.
const P99_OVER_UNSCHEDULED_MAX: f64 = 0.5;
/// Most that p99 may be over that of the run alone.
const P99_OVER_ALONE_MAX: f64 = 1.5;
/// Best-effort throughput under `tally-priority` over that of its run alone.
const THROUGHPUT_OF_ALONE_MIN: f64 = 0.3;

/// The run under the user's own policy.
pub const YOURS: &str = "yours";

/// Figures of one way to share the device.
pub struct Run {
    hp_p50_ms: f64,
    hp_p99_ms: f64,
    /// With the time a request waited for the server.
    hp_queued_p99_ms: f64,
    hp_requests: u64,
    hp_unserved: u64,
    hp_errors: u64,
    hp_checksum: String,
    be_steps_per_s: f64,
    be_steps: u64,
    /// Checksum of the weights after so many steps.
    be_checksums: BTreeMap<u64, String>,
    decisions: u64,
}

impl Run {
    /// The figures that the two programs printed.
    pub fn new(hp: &Value, be: &Value, decisions: u64) -> Result<Self> {
        let time = |kind: &str, at: &str| {
            hp[kind][at].as_f64().with_context(|| {
                format!("no request was served in time to tell {kind}.{at}: use more --seconds")
            })
        };
        let count = |from: &Value, name: &str| {
            from[name].as_u64().with_context(|| format!("{name} is missing in {from}"))
        };
        let listed = be["checksums"].as_array().context("training lists no checksums")?;
        let mut be_checksums: BTreeMap<u64, String> = listed
            .iter()
            .filter_map(|pair| Some((pair[0].as_u64()?, pair[1].as_str()?.to_owned())))
            .collect();
        let be_steps = count(be, "steps")?;
        be_checksums.insert(be_steps, be["checksum"].as_str().unwrap_or_default().to_owned());
        Ok(Self {
            hp_p50_ms: time("service_ms", "p50")?,
            hp_p99_ms: time("service_ms", "p99")?,
            hp_queued_p99_ms: time("queued_ms", "p99")?,
            hp_requests: count(hp, "requests")?,
            hp_unserved: count(hp, "unserved")?,
            hp_errors: count(hp, "errors")?,
            hp_checksum: hp["checksum"].as_str().unwrap_or_default().to_owned(),
            be_steps_per_s: be["steps_per_s"].as_f64().context("training tells no throughput")?,
            be_steps,
            be_checksums,
            decisions,
        })
    }

    fn json(&self) -> Value {
        json!({
            "hp_p50_ms": self.hp_p50_ms,
            "hp_p99_ms": self.hp_p99_ms,
            "hp_queued_p99_ms": self.hp_queued_p99_ms,
            "hp_requests": self.hp_requests,
            "hp_unserved": self.hp_unserved,
            "hp_errors": self.hp_errors,
            "be_throughput": self.be_steps_per_s,
            "be_steps": self.be_steps,
            "decisions": self.decisions,
        })
    }
}

/// All measurements of a demonstration.
pub struct Report {
    /// Name of the GPU or of the software device.
    pub device: String,
    /// Length of each measurement.
    pub seconds: f64,
    /// Arrivals, the same in every run.
    pub rate_per_s: f64,
    pub runs: BTreeMap<&'static str, Run>,
}

/// A claim and whether the figures bear it out.
struct Verdict {
    text: String,
    met: bool,
}

impl Report {
    /// The report as one JSON object on one line.
    pub fn json(&self) -> Value {
        let runs: serde_json::Map<_, _> =
            self.runs.iter().map(|(name, run)| ((*name).to_owned(), run.json())).collect();
        let verdict: Vec<_> =
            self.verdicts().iter().map(|v| json!({ "claim": v.text, "met": v.met })).collect();
        json!({
            "device": self.device,
            "seconds": self.seconds,
            "hp_rate_per_s": self.rate_per_s,
            "runs": runs,
            "results_right": self.results_are_right().is_ok(),
            "verdict": verdict,
        })
    }

    pub fn table(&self) -> String {
        let mut out = String::new();
        let alone = &self.runs["alone"];
        let _ = writeln!(
            out,
            "\n{}: inference (high priority, {:.1} requests/s) and training (best effort)\n",
            self.device, self.rate_per_s
        );
        let _ = writeln!(
            out,
            "{:<16}{:>12}{:>12}{:>10}{:>16}{:>10}{:>12}",
            "", "HP p50 ms", "HP p99 ms", "of alone", "BE steps/s", "of alone", "decisions"
        );
        for name in ["alone", "unscheduled", "fifo", "tally-priority", YOURS] {
            let Some(run) = self.runs.get(name) else { continue };
            let _ = writeln!(
                out,
                "{name:<16}{:>12.2}{:>12.2}{:>9.2}x{:>16.2}{:>9.2}x{:>12}",
                run.hp_p50_ms,
                run.hp_p99_ms,
                run.hp_p99_ms / alone.hp_p99_ms,
                run.be_steps_per_s,
                run.be_steps_per_s / alone.be_steps_per_s,
                run.decisions
            );
        }
        let _ = writeln!(out);
        match self.results_are_right() {
            Ok(()) => {
                let requests: u64 = self.runs.values().map(|run| run.hp_requests).sum();
                let _ = writeln!(
                    out,
                    "ok    all {requests} answers and every training checksum are those of the runs alone"
                );
            }
            Err(error) => {
                let _ = writeln!(out, "WRONG {error}");
            }
        }
        for verdict in self.verdicts() {
            let _ =
                writeln!(out, "{}  {}", if verdict.met { "ok  " } else { "MISS" }, verdict.text);
        }
        out
    }

    fn verdicts(&self) -> Vec<Verdict> {
        let (alone, unscheduled) = (&self.runs["alone"], &self.runs["unscheduled"]);
        let ours = &self.runs["tally-priority"];
        let at_most = |what: &str, value: f64, limit: f64| Verdict {
            text: format!("{what}: {value:.2}x, at most {limit}x wanted"),
            met: value <= limit,
        };
        let share = ours.be_steps_per_s / alone.be_steps_per_s;
        vec![
            at_most(
                "high-priority p99 under tally-priority, of unscheduled",
                ours.hp_p99_ms / unscheduled.hp_p99_ms,
                P99_OVER_UNSCHEDULED_MAX,
            ),
            at_most(
                "high-priority p99 under tally-priority, of alone",
                ours.hp_p99_ms / alone.hp_p99_ms,
                P99_OVER_ALONE_MAX,
            ),
            Verdict {
                text: format!(
                    "best-effort throughput under tally-priority, of alone: {share:.2}x, at least {THROUGHPUT_OF_ALONE_MIN}x wanted"
                ),
                met: share >= THROUGHPUT_OF_ALONE_MIN,
            },
        ]
    }

    /// Every answer right, and the training's state the same wherever two runs
    /// tell it for the same step.
    pub fn results_are_right(&self) -> Result<()> {
        let alone = &self.runs["alone"];
        for (name, run) in &self.runs {
            ensure!(run.hp_errors == 0, "{name}: {} answers were wrong", run.hp_errors);
            ensure!(run.hp_checksum == alone.hp_checksum, "{name}: another network was served");
            for (step, sum) in &run.be_checksums {
                if let Some(right) = alone.be_checksums.get(step) {
                    ensure!(
                        sum == right,
                        "{name}: the weights after step {step} differ from the run alone"
                    );
                }
            }
        }
        Ok(())
    }

    /// Fails unless the ratios that the verdict names are met.
    pub fn ratios_are_met(&self) -> Result<()> {
        let missed: Vec<_> =
            self.verdicts().into_iter().filter(|v| !v.met).map(|v| v.text).collect();
        ensure!(missed.is_empty(), "missed: {}", missed.join("; "));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(p99: f64, steps_per_s: f64, sum: &str) -> Run {
        let hp = json!({
            "requests": 10, "unserved": 0, "errors": 0, "checksum": "c",
            "service_ms": { "p50": p99 / 2.0, "p99": p99 }, "queued_ms": { "p99": p99 },
        });
        let be = json!({
            "steps": 20, "steps_per_s": steps_per_s, "checksum": "end", "checksums": [[8, sum]],
        });
        Run::new(&hp, &be, 3).unwrap()
    }

    fn report(ours: Run) -> Report {
        let runs = BTreeMap::from([
            ("alone", run(10.0, 10.0, "a")),
            ("unscheduled", run(30.0, 8.0, "a")),
            ("fifo", run(30.0, 8.0, "a")),
            ("tally-priority", ours),
        ]);
        Report { device: "d".into(), seconds: 1.0, rate_per_s: 1.0, runs }
    }

    #[test]
    fn good_figures_pass() {
        let report = report(run(12.0, 4.0, "a"));
        report.results_are_right().unwrap();
        report.ratios_are_met().unwrap();
        let json = report.json();
        assert_eq!(json["runs"]["tally-priority"]["hp_p99_ms"], 12.0);
        assert_eq!(json["runs"]["alone"]["be_throughput"], 10.0);
        assert_eq!(json["runs"]["fifo"]["decisions"], 3);
        assert!(!report.table().contains("MISS"), "{}", report.table());
    }

    #[test]
    fn a_missed_ratio_and_a_wrong_result_are_told_apart() {
        let slow = report(run(20.0, 2.0, "a"));
        slow.results_are_right().unwrap();
        let missed = slow.ratios_are_met().unwrap_err().to_string();
        assert!(missed.contains("2.00x") && missed.contains("0.20x"), "{missed}");
        let wrong = report(run(12.0, 4.0, "b"));
        let error = wrong.results_are_right().unwrap_err().to_string();
        assert!(error.contains("tally-priority") && error.contains("step 8"), "{error}");
        assert!(wrong.table().contains("WRONG"));
    }
}
