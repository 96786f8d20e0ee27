//! `tallyctl metrics`: the core's figures in the OpenMetrics text format.
//!
//! The core opens no port for it: a collector runs this command, or picks up the file
//! that `--out` replaces in one step (the "textfile" way of node exporters).

use crate::admin::{AdminSocket, Core};
use crate::error::CtlError;
use clap::Args;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

/// `metrics`.
#[derive(Debug, Args)]
pub struct MetricsArgs {
    /// Write them to this file, in one step, instead of printing them.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

type Labels = Vec<(String, String)>;
type Amounts = Family<Labels, Counter<f64, AtomicU64>>;
type Levels = Family<Labels, Gauge<f64, AtomicU64>>;

/// Show or write.
pub fn run(socket: &AdminSocket, args: &MetricsArgs) -> Result<(), CtlError> {
    let status = Core::connect(socket)?.ask(&json!({"cmd": "status", "kernels": 0}))?;
    let text = exposition(&status);
    let Some(file) = &args.out else {
        std::io::stdout().lock().write_all(text.as_bytes())?;
        return Ok(());
    };
    replace(file, text.as_bytes())
        .map_err(|e| CtlError::Usage(format!("--out {}: {e}", file.display())))
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
    registry: Registry,
    status: &'a Value,
    amounts: BTreeMap<&'static str, Amounts>,
    levels: BTreeMap<&'static str, Levels>,
}

/// The encoder takes values as they are, and names are their clients' to choose.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), escaped(v))).collect()
}

impl Collector<'_> {
    /// Something that only rises.
    fn amount(
        &mut self,
        name: &'static str,
        help: &str,
        of: &[(&str, &str)],
        value: &Value,
        scale: f64,
    ) {
        let Some(value) = value.as_f64() else { return };
        let registry = &mut self.registry;
        let family = self.amounts.entry(name).or_insert_with(|| {
            let family = Amounts::default();
            // It adds the full stop.
            registry.register(name, help.trim_end_matches('.'), family.clone());
            family
        });
        family.get_or_create(&labels(of)).inc_by(value.max(0.0) * scale);
    }

    /// Something that rises and falls.
    fn level(
        &mut self,
        name: &'static str,
        help: &str,
        of: &[(&str, &str)],
        value: &Value,
        scale: f64,
    ) {
        let value = value.as_f64().or(value.as_bool().map(|b| f64::from(u8::from(b))));
        let Some(value) = value else { return };
        let registry = &mut self.registry;
        let family = self.levels.entry(name).or_insert_with(|| {
            let family = Levels::default();
            // It adds the full stop.
            registry.register(name, help.trim_end_matches('.'), family.clone());
            family
        });
        family.get_or_create(&labels(of)).set(value * scale);
    }

    fn core(&mut self) {
        let s = self.status;
        let version = s["core"]["version"].as_str().unwrap_or_default();
        let sharing = s["sharing"]["in_force"].as_str().unwrap_or_default();
        let of = [("version", version), ("sharing", sharing)];
        self.level("tally_core", "The core that runs.", &of, &json!(1), 1.0);
        let uptime = &s["core"]["uptime_s"];
        self.level("tally_core_uptime_seconds", "Since it started.", &[], uptime, 1.0);
        let busy = &s["high_priority_busy"];
        self.level("tally_high_priority_busy", "High-priority work is on the GPU.", &[], busy, 1.0);
        for (which, name) in [("decision_latency", "at-once"), ("held_latency", "held")] {
            for (key, quantile) in [("p50_us", "0.5"), ("p99_us", "0.99"), ("max_us", "1")] {
                let of = [("launches", name), ("quantile", quantile)];
                let help = "From a launch seen to its answer, since the core started.";
                self.level("tally_decision_latency_seconds", help, &of, &s[which][key], 1e-6);
            }
        }
        let log = &s["log"];
        let recording = &log["recording"];
        self.level("tally_log_recording", "A decision log is written.", &[], recording, 1.0);
        let dropped = &log["dropped"];
        self.amount("tally_log_dropped_records", "Records lost.", &[], dropped, 1.0);
        let running = &s["experiment"]["running"];
        self.level("tally_experiment_running", "An A/B test is under way.", &[], running, 1.0);
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
        self.level("tally_policy", "The active policy.", &of, &json!(1), 1.0);
        let generation = &p["generation"];
        let help = "Rises with each policy put active.";
        self.level("tally_policy_generation", help, &[], generation, 1.0);
        self.level("tally_policy_disabled", "It is disabled.", &[], &p["disabled"], 1.0);
        for (key, name, help) in [
            ("decides", "tally_policy_decides", "Calls of decide, all policies."),
            ("events", "tally_policy_events", "Calls of on-event, all policies."),
            ("fallbacks", "tally_policy_fallbacks", "Decisions by the built-in rule."),
            ("load_failures", "tally_policy_load_failures", "Loads that failed."),
        ] {
            self.amount(name, help, &[], &p[key], 1.0);
        }
        for (kind, count) in p["faults"].as_object().into_iter().flatten() {
            let of = [("kind", kind.as_str())];
            self.amount("tally_policy_faults", "Turns lost, all policies.", &of, count, 1.0);
        }
        let reloads = &p["swap_pause_us"]["count"];
        self.amount("tally_policy_reloads", "Changes of policy.", &[], reloads, 1.0);
        for (key, quantile) in [("p50", "0.5"), ("p99", "0.99"), ("max", "1")] {
            let (of, help) = ([("quantile", quantile)], "How long they kept decisions waiting.");
            let pause = &p["swap_pause_us"][key];
            self.level("tally_policy_swap_pause_seconds", help, &of, pause, 1e-6);
        }
        for (name, value) in p["counters"].as_object().into_iter().flatten() {
            let (of, help) = ([("name", name.as_str())], "The policy's own counters.");
            self.amount("tally_policy_counter", help, &of, value, 1.0);
        }
        for (name, value) in p["gauges"].as_object().into_iter().flatten() {
            let (of, help) = ([("name", name.as_str())], "The policy's own gauges.");
            self.level("tally_policy_gauge", help, &of, value, 1.0);
        }
    }

    fn clients(&mut self) {
        for c in self.status["clients"].as_array().into_iter().flatten() {
            let id = c["id"].to_string();
            let text = |key: &str| c[key].as_str().unwrap_or_default();
            let of = [("client", &*id), ("name", text("name")), ("class", text("class"))];
            self.amount("tally_client_launches", "Launches made.", &of, &c["launches"], 1.0);
            self.amount("tally_client_gpu_seconds", "GPU time.", &of, &c["gpu_ms"], 1e-3);
            let waited = &c["waited_ms"];
            self.amount("tally_client_waited_seconds", "Launches waited.", &of, waited, 1e-3);
            self.level("tally_client_waiting", "Launches that wait.", &of, &c["waiting"], 1.0);
            let unscheduled = &c["unscheduled"];
            let help = "Launches that went ahead without a core.";
            self.amount("tally_client_unscheduled", help, &of, unscheduled, 1.0);
            self.level("tally_client_governed", "It is governed.", &of, &c["governed"], 1.0);
        }
    }
}

/// The text for a status.
fn exposition(status: &Value) -> String {
    let (amounts, levels) = (BTreeMap::new(), BTreeMap::new());
    let mut all = Collector { registry: Registry::default(), status, amounts, levels };
    all.core();
    all.policy();
    all.clients();
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = encode(&mut text, &all.registry);
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
            "core": {"version": "0.1.0", "uptime_s": 2.5},
            "policy": {
                "name": "a \"b\"\n\\", "digest": "ff", "generation": 7, "disabled": false,
                "faults": {"trap": 2, "stall": 0}, "counters": {"turns": 3},
                "swap_pause_us": {"count": 6, "p99": 500_000.0}
            },
            "clients": [{"id": 1, "name": "train", "class": "best-effort", "gpu_ms": 1500.0}]
        });
        let text = exposition(&status);
        for line in [
            "tally_core_uptime_seconds{} 2.5",
            "tally_policy_generation{} 7.0",
            "tally_policy_disabled{} 0.0",
            r#"tally_policy_faults_total{kind="trap"} 2.0"#,
            r#"tally_policy_counter_total{name="turns"} 3.0"#,
            "tally_policy_reloads_total{} 6.0",
            r#"tally_policy_swap_pause_seconds{quantile="0.99"} 0.5"#,
            r#"tally_client_gpu_seconds_total{client="1",name="train",class="best-effort"} 1.5"#,
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        assert!(text.contains(r#"name="a \"b\"\n\\",digest="ff""#), "{text}");
        assert!(!text.contains("tally_log_recording"), "nothing is made up: {text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}
