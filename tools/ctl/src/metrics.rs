//! `tallyctl metrics`: the core's figures in the Prometheus text format, version 0.0.4.
//!
//! The core opens no port for it: a collector runs this command, or picks up the file
//! that `--out` replaces in one step (node_exporter's textfile collector, which reads 0.0.4 and
//! not OpenMetrics). Every series is labelled with the core's GPU and socket, so that the files of
//! several cores lie side by side.

use crate::admin::{AdminSocket, Core};
use crate::error::CtlError;
use clap::Args;
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

/// A metric: its name, type and help, and its samples with their labels.
struct Family {
    name: String,
    kind: &'static str,
    help: &'static str,
    samples: Vec<(String, f64)>,
}

/// Collects figures out of a status: what is not there is left out.
struct Collector<'a> {
    status: &'a Value,
    /// Of every sample.
    common: String,
    families: Vec<Family>,
}

/// Values of labels are for clients and policies to choose.
fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

impl Collector<'_> {
    /// Something that only rises; its name gets the suffix that counters have.
    fn amount(
        &mut self,
        name: &str,
        help: &'static str,
        of: &[(&str, &str)],
        value: &Value,
        scale: f64,
    ) {
        let Some(value) = value.as_f64() else { return };
        self.sample(format!("{name}_total"), "counter", help, of, value.max(0.0) * scale);
    }

    /// Something that rises and falls.
    fn level(
        &mut self,
        name: &str,
        help: &'static str,
        of: &[(&str, &str)],
        value: &Value,
        scale: f64,
    ) {
        let value = value.as_f64().or(value.as_bool().map(|b| f64::from(u8::from(b))));
        let Some(value) = value else { return };
        self.sample(name.into(), "gauge", help, of, value * scale);
    }

    fn sample(
        &mut self,
        name: String,
        kind: &'static str,
        help: &'static str,
        of: &[(&str, &str)],
        value: f64,
    ) {
        let mut labels = self.common.clone();
        for (name, value) in of {
            labels.push(',');
            labels.push_str(&label(name, value));
        }
        let known = self.families.iter_mut().find(|family| family.name == name);
        match known {
            Some(family) => family.samples.push((labels, value)),
            None => {
                let samples = vec![(labels, value)];
                self.families.push(Family { name, kind, help, samples });
            }
        }
    }

    fn core(&mut self) {
        let s = self.status;
        let version = s["core"]["version"].as_str().unwrap_or_default();
        let sharing = s["sharing"]["in_force"].as_str().unwrap_or_default();
        let of = [("version", version), ("sharing", sharing)];
        self.level("tally_core", "1; its labels say which core runs.", &of, &json!(1), 1.0);
        let uptime = &s["core"]["uptime_s"];
        self.level("tally_core_uptime_seconds", "Time since the core started.", &[], uptime, 1.0);
        let busy = &s["high_priority_busy"];
        self.level(
            "tally_high_priority_busy",
            "1 if high-priority work is on the GPU now.",
            &[],
            busy,
            1.0,
        );
        for (which, name) in [("decision_latency", "at-once"), ("held_latency", "held")] {
            for (key, quantile) in [("p50_us", "0.5"), ("p99_us", "0.99"), ("max_us", "1")] {
                let of = [("launches", name), ("quantile", quantile)];
                let help = "Time from a launch seen to its answer, since the core started.";
                self.level("tally_decision_latency_seconds", help, &of, &s[which][key], 1e-6);
            }
        }
        let log = &s["log"];
        let recording = &log["recording"];
        self.level(
            "tally_log_recording",
            "1 if a decision log is being written.",
            &[],
            recording,
            1.0,
        );
        let dropped = &log["dropped"];
        self.amount(
            "tally_log_dropped_records",
            "Records of the decision log that were lost.",
            &[],
            dropped,
            1.0,
        );
        let running = &s["experiment"]["running"];
        self.level("tally_experiment_running", "1 if an A/B test is running.", &[], running, 1.0);
    }

    fn policy(&mut self) {
        let p = &self.status["policy"];
        let text = |key: &str| p[key].as_str().unwrap_or_default();
        let of = [
            ("name", text("name")),
            ("digest", text("digest")),
            ("signed_by", text("signed_by")),
            ("loaded_because", text("loaded_because")),
        ];
        self.level(
            "tally_policy",
            "1; its labels say which policy is active.",
            &of,
            &json!(1),
            1.0,
        );
        let generation = &p["generation"];
        let help = "Number of the active policy; rises with each policy loaded.";
        self.level("tally_policy_generation", help, &[], generation, 1.0);
        self.level(
            "tally_policy_disabled",
            "1 if the active policy is disabled and the built-in rule serves.",
            &[],
            &p["disabled"],
            1.0,
        );
        for (key, name, help) in [
            (
                "decides",
                "tally_policy_decides",
                "Calls of decide, of all policies since the core started.",
            ),
            (
                "events",
                "tally_policy_events",
                "Calls of event functions, of all policies since the core started.",
            ),
            (
                "fallbacks",
                "tally_policy_fallbacks",
                "Launches decided by the built-in rule because the policy failed.",
            ),
            ("load_failures", "tally_policy_load_failures", "Policies that could not be loaded."),
        ] {
            self.amount(name, help, &[], &p[key], 1.0);
        }
        for (kind, count) in p["faults"].as_object().into_iter().flatten() {
            let of = [("kind", kind.as_str())];
            self.amount(
                "tally_policy_faults",
                "Calls that failed, by kind, of all policies since the core started.",
                &of,
                count,
                1.0,
            );
        }
        let reloads = &p["swap_pause_us"]["count"];
        self.amount("tally_policy_reloads", "Changes of the active policy.", &[], reloads, 1.0);
        for (key, quantile) in [("p50", "0.5"), ("p99", "0.99"), ("max", "1")] {
            let (of, help) = (
                [("quantile", quantile)],
                "How long changes of the active policy kept decisions waiting.",
            );
            let pause = &p["swap_pause_us"][key];
            self.level("tally_policy_swap_pause_seconds", help, &of, pause, 1e-6);
        }
        for (name, value) in p["counters"].as_object().into_iter().flatten() {
            let (of, help) = ([("name", name.as_str())], "Counters that the policy exports.");
            self.amount("tally_policy_counter", help, &of, value, 1.0);
        }
        for (name, value) in p["gauges"].as_object().into_iter().flatten() {
            let (of, help) = ([("name", name.as_str())], "Gauges that the policy exports.");
            self.level("tally_policy_gauge", help, &of, value, 1.0);
        }
    }

    fn clients(&mut self) {
        for c in self.status["clients"].as_array().into_iter().flatten() {
            let id = c["id"].to_string();
            let text = |key: &str| c[key].as_str().unwrap_or_default();
            let of = [("client", &*id), ("name", text("name")), ("class", text("class"))];
            for (key, name, help, scale) in COUNTED {
                let name = name.replace("tally_", "tally_client_");
                self.amount(&name, help, &of, &c[key], scale);
            }
            let help = "Launches of this client that wait for a decision.";
            self.level("tally_client_waiting", help, &of, &c["waiting"], 1.0);
            let help = "1 if the core schedules this client's launches, 0 if they bypass it.";
            self.level("tally_client_governed", help, &of, &c["governed"], 1.0);
        }
    }

    /// Of all clients by class, those that left included: sums of these do not fall when one leaves.
    fn classes(&mut self) {
        for (class, totals) in self.status["totals"].as_object().into_iter().flatten() {
            let of = [("class", class.as_str())];
            for (key, name, help, scale) in COUNTED {
                self.amount(name, help, &of, &totals[key], scale);
            }
            let help = "Clients that registered since the core started.";
            self.amount("tally_clients_registered", help, &of, &totals["registered"], 1.0);
            let help = "Clients connected now.";
            self.level("tally_clients", help, &of, &totals["connected"], 1.0);
        }
    }
}

/// What is counted of each client and of each class: key in the status, metric, help, scale.
const COUNTED: [(&str, &str, &str, f64); 6] = [
    ("launches", "tally_launches", "Launches made.", 1.0),
    (
        "charged_ms",
        "tally_gpu_charged_seconds",
        "GPU time that the accounts count; of high priority the time that it was busy.",
        1e-3,
    ),
    (
        "measured_ms",
        "tally_gpu_measured_seconds",
        "GPU time seen on the device, of the launches that were timed.",
        1e-3,
    ),
    ("launches_measured", "tally_launches_measured", "Launches that were timed.", 1.0),
    ("waited_ms", "tally_waited_seconds", "Time that launches waited for a decision.", 1e-3),
    ("unscheduled", "tally_unscheduled", "Launches that went ahead without a core.", 1.0),
];

/// The text for a status.
fn exposition(status: &Value) -> String {
    let text = |at: &str| status.pointer(at).and_then(Value::as_str).unwrap_or_default();
    let common =
        format!("{},{}", label("gpu", text("/core/gpu")), label("socket", text("/core/socket")));
    let mut all = Collector { status, common, families: Vec::new() };
    all.core();
    all.policy();
    all.classes();
    all.clients();
    let mut text = String::new();
    for Family { name, kind, help, samples } in &all.families {
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
