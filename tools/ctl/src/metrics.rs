//! `tallyctl metrics`: the core's figures in the Prometheus text format, version 0.0.4.
//!
//! The core opens no port for it: a collector runs this command, or picks up the file
//! that `--out` replaces in one step (node_exporter's textfile collector, which reads 0.0.4 and
//! not OpenMetrics). Every series is labelled with the core's GPU and socket, so that the files of
//! several cores lie side by side.

pub mod registry;

use crate::admin::{AdminSocket, Core};
use crate::error::CtlError;
use clap::Args;
use registry::Metric;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tally_admin::Request;

#[derive(Debug, Args)]
pub struct MetricsArgs {
    /// Write them to this file, in one step, instead of printing them.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Show or write.
pub fn run(socket: &AdminSocket, args: &MetricsArgs) -> Result<(), CtlError> {
    let status = Core::connect(socket)?.ask(&Request::Status { kernels: Some(0) })?;
    let text = exposition(&status);
    let Some(file) = &args.out else {
        std::io::stdout().lock().write_all(text.as_bytes())?;
        return Ok(());
    };
    replace(file, text.as_bytes()).map_err(CtlError::file("--out", "written to", file))
}

/// Put a file that everybody may read (as the umask says) in the place of another, in one step. What others put
/// into the folder is neither followed nor written to: the new file has a name of its own, which is not there.
fn replace(file: &Path, text: &[u8]) -> std::io::Result<()> {
    let folder = match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut new = tempfile::Builder::new()
        .prefix(".tally-metrics.")
        .permissions(std::fs::Permissions::from_mode(0o666))
        .tempfile_in(folder)?;
    new.write_all(text)?;
    new.persist(file).map(drop).map_err(|e| e.error)
}

/// Collects figures out of a status: what is not there is left out.
struct Collector<'a> {
    status: &'a Value,
    /// Of every sample.
    common: String,
    /// Metrics and their samples with their labels.
    families: Vec<(&'static Metric, Vec<(String, f64)>)>,
}

/// Values of labels are for clients and policies to choose.
fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

impl Collector<'_> {
    /// A figure with the values of its metric's labels, times a scale.
    fn sample(&mut self, of: &'static Metric, labels: &[&str], value: &Value, scale: f64) {
        let value = value.as_f64().or(value.as_bool().map(|b| f64::from(u8::from(b))));
        let Some(value) = value else { return };
        debug_assert_eq!(of.labels.len(), labels.len(), "{}", of.name);
        // A counter never falls below where it begins.
        let value = if of.kind == "counter" { value.max(0.0) } else { value } * scale;
        let mut all = self.common.clone();
        for (name, value) in of.labels.iter().zip(labels) {
            all.push(',');
            all.push_str(&label(name, value));
        }
        match self.families.iter_mut().find(|(known, _)| known.name == of.name) {
            Some((_, samples)) => samples.push((all, value)),
            None => self.families.push((of, vec![(all, value)])),
        }
    }

    fn core(&mut self) {
        let s = self.status;
        let version = s["core"]["version"].as_str().unwrap_or_default();
        let sharing = s["sharing"]["in_force"].as_str().unwrap_or_default();
        self.sample(&registry::CORE, &[version, sharing], &json!(1), 1.0);
        self.sample(&registry::UPTIME, &[], &s["core"]["uptime_s"], 1.0);
        self.sample(&registry::HIGH_BUSY, &[], &s["high_priority_busy"], 1.0);
        for (which, name) in [("decision_latency", "at-once"), ("held_latency", "held")] {
            for (key, quantile) in [("p50_us", "0.5"), ("p99_us", "0.99"), ("max_us", "1")] {
                self.sample(&registry::LATENCY, &[name, quantile], &s[which][key], 1e-6);
            }
        }
        self.sample(&registry::LOG_RECORDING, &[], &s["log"]["recording"], 1.0);
        self.sample(&registry::LOG_DROPPED, &[], &s["log"]["dropped"], 1.0);
        self.sample(&registry::EXPERIMENT, &[], &s["experiment"]["running"], 1.0);
    }

    fn policy(&mut self) {
        let p = &self.status["policy"];
        let text = |key: &str| p[key].as_str().unwrap_or_default();
        let of = [text("name"), text("digest"), text("signed_by"), text("loaded_because")];
        self.sample(&registry::POLICY, &of, &json!(1), 1.0);
        self.sample(&registry::GENERATION, &[], &p["generation"], 1.0);
        self.sample(&registry::DISABLED, &[], &p["disabled"], 1.0);
        self.sample(&registry::DECIDES, &[], &p["decides"], 1.0);
        self.sample(&registry::EVENTS, &[], &p["events"], 1.0);
        self.sample(&registry::FALLBACKS, &[], &p["fallbacks"], 1.0);
        self.sample(&registry::LOAD_FAILURES, &[], &p["load_failures"], 1.0);
        for (kind, count) in p["faults"].as_object().into_iter().flatten() {
            self.sample(&registry::FAULTS, &[kind], count, 1.0);
        }
        self.sample(&registry::RELOADS, &[], &p["swap_pause_us"]["count"], 1.0);
        for (key, quantile) in [("p50", "0.5"), ("p99", "0.99"), ("max", "1")] {
            self.sample(&registry::SWAP_PAUSE, &[quantile], &p["swap_pause_us"][key], 1e-6);
        }
        for (name, value) in p["counters"].as_object().into_iter().flatten() {
            self.sample(&registry::POLICY_COUNTER, &[name], value, 1.0);
        }
        for (name, value) in p["gauges"].as_object().into_iter().flatten() {
            self.sample(&registry::POLICY_GAUGE, &[name], value, 1.0);
        }
    }

    fn clients(&mut self) {
        for c in self.status["clients"].as_array().into_iter().flatten() {
            let id = c["id"].to_string();
            let text = |key: &str| c[key].as_str().unwrap_or_default();
            let of = [&*id, text("name"), text("class")];
            for (key, _, metric, scale) in COUNTED {
                self.sample(metric, &of, &c[key], scale);
            }
            self.sample(&registry::WAITING, &of, &c["waiting"], 1.0);
            self.sample(&registry::GOVERNED, &of, &c["governed"], 1.0);
        }
    }

    /// Of all clients by class, those that left included: sums of these do not fall when one leaves.
    fn classes(&mut self) {
        for (class, totals) in self.status["totals"].as_object().into_iter().flatten() {
            for (key, metric, _, scale) in COUNTED {
                self.sample(metric, &[class], &totals[key], scale);
            }
            self.sample(&registry::REGISTERED, &[class], &totals["registered"], 1.0);
            self.sample(&registry::CLIENTS, &[class], &totals["connected"], 1.0);
        }
    }
}

/// What is counted of each class and of each client: key in the status, both metrics, scale.
const COUNTED: [(&str, &Metric, &Metric, f64); 6] = [
    ("launches", &registry::LAUNCHES, &registry::CLIENT_LAUNCHES, 1.0),
    ("charged_ms", &registry::CHARGED, &registry::CLIENT_CHARGED, 1e-3),
    ("measured_ms", &registry::MEASURED, &registry::CLIENT_MEASURED, 1e-3),
    ("launches_measured", &registry::TIMED, &registry::CLIENT_TIMED, 1.0),
    ("waited_ms", &registry::WAITED, &registry::CLIENT_WAITED, 1e-3),
    ("unscheduled", &registry::UNSCHEDULED, &registry::CLIENT_UNSCHEDULED, 1.0),
];

/// The text for a status.
fn exposition(status: &Value) -> String {
    let text = |at: &str| status.pointer(at).and_then(Value::as_str).unwrap_or_default();
    let [gpu, socket] = registry::COMMON;
    let common =
        format!("{},{}", label(gpu, text("/core/gpu")), label(socket, text("/core/socket")));
    let mut all = Collector { status, common, families: Vec::new() };
    all.core();
    all.policy();
    all.classes();
    all.clients();
    let mut text = String::new();
    for (Metric { name, kind, help, .. }, samples) in &all.families {
        // Writing to a string does not fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in samples {
            let _ = writeln!(text, "{name}{{{labels}}} {value}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_planted_beside_or_in_place_of_the_file_is_not_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let (file, precious) = (dir.path().join("tally.prom"), dir.path().join("precious"));
        std::fs::write(&precious, "precious").unwrap();
        for planted in [&file, &dir.path().join("tally.prom.part")] {
            std::os::unix::fs::symlink(&precious, planted).unwrap();
        }
        replace(&file, b"first").unwrap();
        replace(&file, b"second").unwrap();
        assert_eq!(std::fs::read_to_string(&precious).unwrap(), "precious");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "second");
        assert!(!file.symlink_metadata().unwrap().is_symlink());
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o700, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3, "nothing is left behind");
        assert!(replace(&dir.path().join("none/x"), b"").is_err());
    }

    #[test]
    fn figures_have_their_units_and_labels_are_escaped() {
        let status = json!({
            "core": {"version": "0.1.0", "uptime_s": 2.5, "gpu": "GPU-1", "socket": "/s/clients/core.sock"},
            "policy": {
                "name": "a \"b\"\n\\", "digest": "ff", "generation": 7, "disabled": false,
                "faults": {"trap": 2, "stall": 0}, "counters": {"turns": 3},
                "swap_pause_us": {"count": 6, "p99": 500_000.0}
            },
            "totals": {"best-effort": {"launches": 9, "charged_ms": 2500.0, "registered": 3}},
            "clients": [{"id": 1, "name": "train", "class": "best-effort", "charged_ms": 1500.0}]
        });
        let text = exposition(&status);
        let common = r#"gpu="GPU-1",socket="/s/clients/core.sock""#;
        for (name, labels, value) in [
            ("tally_core_uptime_seconds", "", "2.5"),
            ("tally_policy_generation", "", "7"),
            ("tally_policy_disabled", "", "0"),
            ("tally_policy_faults_total", r#",kind="trap""#, "2"),
            ("tally_policy_counter_total", r#",name="turns""#, "3"),
            ("tally_policy_reloads_total", "", "6"),
            ("tally_policy_swap_pause_seconds", r#",quantile="0.99""#, "0.5"),
            ("tally_gpu_charged_seconds_total", r#",class="best-effort""#, "2.5"),
            ("tally_clients_registered_total", r#",class="best-effort""#, "3"),
            (
                "tally_client_gpu_charged_seconds_total",
                r#",client="1",name="train",class="best-effort""#,
                "1.5",
            ),
        ] {
            let line = format!("{name}{{{common}{labels}}} {value}");
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        assert!(text.contains(r#"name="a \"b\"\n\\",digest="ff""#), "{text}");
        assert!(!text.contains("tally_log_recording"), "nothing is made up: {text}");
        assert!(!text.contains("# EOF"), "0.0.4 has no such line");
        parsed(&text);
    }

    /// Series of a text, read as node_exporter's textfile collector does (format 0.0.4): each family once,
    /// HELP and TYPE before its samples and under their very name, each series once.
    fn parsed(text: &str) -> Vec<String> {
        let (mut family, mut families, mut series) = ("", Vec::new(), Vec::new());
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                family = help.split(' ').next().unwrap();
                assert!(!families.contains(&family), "{family} twice");
                families.push(family);
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').unwrap();
                assert_eq!(name, family);
                assert_eq!(kind, if name.ends_with("_total") { "counter" } else { "gauge" });
            } else {
                let (name, value) = line.rsplit_once(' ').unwrap();
                assert_eq!(name.split('{').next().unwrap(), family);
                value.parse::<f64>().unwrap();
                assert!(!series.contains(&name.to_owned()), "{name} twice");
                series.push(name.to_owned());
            }
        }
        series
    }

    #[test]
    fn files_of_two_cores_have_no_series_in_common() {
        let of = |socket: &str| {
            let mut status = json!({
                "core": {"version": "0.1.0", "uptime_s": 2.5, "gpu": "", "socket": socket},
                "policy": {"name": "p", "generation": 1},
                "totals": {"high": {"launches": 1}},
            });
            status["clients"] = json!([{"id": 1, "name": "a", "class": "high", "launches": 1}]);
            parsed(&exposition(&status))
        };
        let (first, second) = (of("/a/clients/core.sock"), of("/b/clients/core.sock"));
        assert!(first.len() > 5 && first.iter().all(|series| !second.contains(series)));
    }
}
