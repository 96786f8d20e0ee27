//! `tallyctl metrics`: the core's figures in the Prometheus text format, version 0.0.4.
//!
//! The core opens no port for it: a collector runs this command, or picks up the file
//! that `--out` replaces in one step (node_exporter's textfile collector, which reads 0.0.4 and
//! not OpenMetrics). Every series is labelled with the core's GPU and socket, so that the files of
//! several cores lie side by side.

use crate::admin::{AdminSocket, Core};
use crate::error::CtlError;
use clap::Args;
use std::fmt::Write as _;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tally_admin::{Quantiles, Request, Status, Totals};

#[derive(Debug, Args)]
pub struct MetricsArgs {
    /// Write them to this file, in one step, instead of printing them.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Show or write.
pub fn run(socket: &AdminSocket, args: &MetricsArgs) -> Result<(), CtlError> {
    let status = Core::connect(socket)?.get(&Request::Status { kernels: Some(0) })?;
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

/// Collects figures out of a status.
struct Collector<'a> {
    status: &'a Status,
    /// Of every sample.
    common: String,
    families: Vec<Family>,
}

/// Values of labels are for clients and policies to choose.
fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

/// A truth as a value.
fn flag(is: bool) -> f64 {
    f64::from(u8::from(is))
}

impl Collector<'_> {
    /// Something that only rises; its name gets the suffix that counters have.
    fn amount(&mut self, name: &str, help: &'static str, of: &[(&str, &str)], value: f64) {
        self.sample(format!("{name}_total"), "counter", help, of, value.max(0.0));
    }

    /// Something that rises and falls.
    fn level(&mut self, name: &str, help: &'static str, of: &[(&str, &str)], value: f64) {
        self.sample(name.into(), "gauge", help, of, value);
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
        let of = [("version", &*s.core.version), ("sharing", &*s.sharing.in_force)];
        self.level("tally_core", "1; its labels say which core runs.", &of, 1.0);
        let help = "Time since the core started.";
        self.level("tally_core_uptime_seconds", help, &[], s.core.uptime_s);
        let help = "1 if high-priority work is on the GPU now.";
        self.level("tally_high_priority_busy", help, &[], flag(s.high_priority_busy));
        for (quantiles, name) in [(&s.decision_latency, "at-once"), (&s.held_latency, "held")] {
            let Quantiles { p50_us, p99_us, max_us, .. } = quantiles;
            for (us, quantile) in [(p50_us, "0.5"), (p99_us, "0.99"), (max_us, "1")] {
                let of = [("launches", name), ("quantile", quantile)];
                let help = "Time from a launch seen to its answer, since the core started.";
                self.level("tally_decision_latency_seconds", help, &of, us * 1e-6);
            }
        }
        let help = "1 if a decision log is being written.";
        self.level("tally_log_recording", help, &[], flag(s.log.recording));
        let help = "Records of the decision log that were lost.";
        self.amount("tally_log_dropped_records", help, &[], s.log.dropped as f64);
        if let Some(running) = s.experiment.as_ref().and_then(|e| e["running"].as_bool()) {
            let help = "1 if an A/B test is running.";
            self.level("tally_experiment_running", help, &[], flag(running));
        }
    }

    fn policy(&mut self) {
        let p = &self.status.policy;
        let of = [
            ("name", &*p.active.name),
            ("digest", &*p.active.digest),
            ("signed_by", p.active.signed_by.as_deref().unwrap_or_default()),
            ("loaded_because", p.active.loaded_because.as_str()),
        ];
        self.level("tally_policy", "1; its labels say which policy is active.", &of, 1.0);
        let help = "Number of the active policy; rises with each policy loaded.";
        self.level("tally_policy_generation", help, &[], p.active.generation as f64);
        let help = "1 if the active policy is disabled and the built-in rule serves.";
        self.level("tally_policy_disabled", help, &[], flag(p.disabled));
        for (value, name, help) in [
            (
                p.decides,
                "tally_policy_decides",
                "Calls of decide, of all policies since the core started.",
            ),
            (
                p.events,
                "tally_policy_events",
                "Calls of event functions, of all policies since the core started.",
            ),
            (
                p.fallbacks,
                "tally_policy_fallbacks",
                "Launches decided by the built-in rule because the policy failed.",
            ),
            (p.load_failures, "tally_policy_load_failures", "Policies that could not be loaded."),
        ] {
            self.amount(name, help, &[], value as f64);
        }
        for (kind, count) in p.faults.by_kind() {
            let help = "Calls that failed, by kind, of all policies since the core started.";
            self.amount("tally_policy_faults", help, &[("kind", kind)], count as f64);
        }
        let pauses = &p.swap_pause_us;
        let help = "Changes of the active policy.";
        self.amount("tally_policy_reloads", help, &[], pauses.count as f64);
        for (us, quantile) in [(pauses.p50, "0.5"), (pauses.p99, "0.99"), (pauses.max, "1")] {
            let help = "How long changes of the active policy kept decisions waiting.";
            let of = [("quantile", quantile)];
            self.level("tally_policy_swap_pause_seconds", help, &of, us * 1e-6);
        }
        for (name, value) in &p.counters {
            let (of, help) = ([("name", name.as_str())], "Counters that the policy exports.");
            self.amount("tally_policy_counter", help, &of, *value as f64);
        }
        for (name, value) in &p.gauges {
            let (of, help) = ([("name", name.as_str())], "Gauges that the policy exports.");
            self.level("tally_policy_gauge", help, &of, *value as f64);
        }
    }

    fn clients(&mut self) {
        for c in &self.status.clients {
            let (who, id) = (&c.identity, c.identity.id.to_string());
            let of = [("client", &*id), ("name", &*who.name), ("class", who.class.as_str())];
            let totals = Totals {
                launches: c.launches,
                charged_ms: c.charged_ms,
                measured_ms: c.measured_ms,
                launches_measured: c.launches_measured,
                waited_ms: c.waited_ms,
                unscheduled: c.unscheduled,
                ..Totals::default()
            };
            for (value, name, help) in COUNTED {
                let name = name.replace("tally_", "tally_client_");
                self.amount(&name, help, &of, value(&totals));
            }
            let help = "Launches of this client that wait for a decision.";
            self.level("tally_client_waiting", help, &of, c.waiting as f64);
            let help = "1 if the core schedules this client's launches, 0 if they bypass it.";
            self.level("tally_client_governed", help, &of, flag(c.governed));
        }
    }

    /// Of all clients by class, those that left included: sums of these do not fall when one leaves.
    fn classes(&mut self) {
        for (class, totals) in &self.status.totals {
            let of = [("class", class.as_str())];
            for (value, name, help) in COUNTED {
                self.amount(name, help, &of, value(totals));
            }
            let help = "Clients that registered since the core started.";
            self.amount("tally_clients_registered", help, &of, totals.registered as f64);
            let help = "Clients connected now.";
            self.level("tally_clients", help, &of, totals.connected as f64);
        }
    }
}

/// What is counted of each client and of each class: value, metric, help.
type Counted = (fn(&Totals) -> f64, &'static str, &'static str);
const COUNTED: [Counted; 6] = [
    (|t| t.launches as f64, "tally_launches", "Launches made."),
    (
        |t| t.charged_ms * 1e-3,
        "tally_gpu_charged_seconds",
        "GPU time that the accounts count; of high priority the time that it was busy.",
    ),
    (
        |t| t.measured_ms * 1e-3,
        "tally_gpu_measured_seconds",
        "GPU time seen on the device, of the launches that were timed.",
    ),
    (|t| t.launches_measured as f64, "tally_launches_measured", "Launches that were timed."),
    (|t| t.waited_ms * 1e-3, "tally_waited_seconds", "Time that launches waited for a decision."),
    (|t| t.unscheduled as f64, "tally_unscheduled", "Launches that went ahead without a core."),
];

/// The text for a status.
fn exposition(status: &Status) -> String {
    let core = &status.core;
    let common = format!("{},{}", label("gpu", &core.gpu), label("socket", &core.socket));
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
    use tally_admin::{Class, ClientStatus, Identity};

    fn client(name: &str) -> ClientStatus {
        let class = Class::BestEffort;
        let identity = Identity { id: 1, name: name.into(), class, ..Identity::default() };
        ClientStatus { identity, ..ClientStatus::default() }
    }

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
        let mut status = Status::default();
        status.core.uptime_s = 2.5;
        status.core.gpu = "GPU-1".into();
        status.core.socket = "/s/clients/core.sock".into();
        status.policy.active.name = "a \"b\"\n\\".into();
        status.policy.active.digest = "ff".into();
        status.policy.active.generation = 7;
        status.policy.faults.failed.trap = 2;
        status.policy.counters = [("turns".into(), 3)].into();
        status.policy.swap_pause_us.count = 6;
        status.policy.swap_pause_us.p99 = 500_000.0;
        let sums = Totals { launches: 9, charged_ms: 2500.0, registered: 3, ..Totals::default() };
        status.totals = [(Class::BestEffort, sums)].into();
        status.clients = vec![ClientStatus { charged_ms: 1500.0, ..client("train") }];
        let text = exposition(&status);
        let common = r#"gpu="GPU-1",socket="/s/clients/core.sock""#;
        for (name, labels, value) in [
            ("tally_core_uptime_seconds", "", "2.5"),
            ("tally_policy_generation", "", "7"),
            ("tally_policy_disabled", "", "0"),
            ("tally_policy_faults_total", r#",kind="trap""#, "2"),
            ("tally_policy_faults_total", r#",kind="stall""#, "0"),
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
        assert!(!text.contains("tally_experiment_running"), "there was none: {text}");
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
            let mut status = Status::default();
            status.core.socket = socket.into();
            status.totals = [(Class::High, Totals::default())].into();
            status.clients = vec![client("a")];
            status.experiment = Some(serde_json::json!({"running": true}));
            parsed(&exposition(&status))
        };
        let (first, second) = (of("/a/clients/core.sock"), of("/b/clients/core.sock"));
        assert!(first.len() > 5 && first.iter().all(|series| !second.contains(series)));
    }
}
