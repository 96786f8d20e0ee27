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
use std::fmt::Write as _;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tally_admin::{Marks, Quantiles, Request, Service, Status, Totals};

/// Who collects figures asks again soon.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub struct MetricsArgs {
    /// Write the metrics to this file, in one step, instead of printing them.
    /// If no core answers the file says only `tally_up 0`.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Leave out series of single clients: each client's are new ones.
    #[arg(long)]
    pub no_clients: bool,
}

/// Prints the metrics, or writes them to the file of `--out`.
pub fn run(socket: &AdminSocket, args: &MetricsArgs) -> Result<(), CtlError> {
    let asked = Core::connect_within(socket, PATIENCE)
        .and_then(|mut core| core.get(&Request::Status { kernels: Some(0) }));
    let write = |file: &Path, text: &str| {
        replace(file, text.as_bytes()).map_err(CtlError::file("--out", "written to", file))
    };
    let mut status: Status = match (asked, &args.out) {
        (Ok(status), _) => status,
        // Or its last figures would go on being collected.
        (Err(error @ (CtlError::NoCore { .. } | CtlError::Answer(_))), Some(file)) => {
            write(file, &down(&clients_of(socket.path()?)))?;
            return Err(error);
        }
        (Err(error), _) => return Err(error),
    };
    if args.no_clients {
        status.clients.clear();
    }
    let text = exposition(&status);
    match &args.out {
        Some(file) => write(file, &text),
        None => Ok(std::io::stdout().lock().write_all(text.as_bytes())?),
    }
}

/// The clients' socket of a core, whose name its series have, if it is where the admin socket's place says.
fn clients_of(admin: &Path) -> PathBuf {
    let folder = admin.parent().filter(|folder| folder.ends_with("admin"));
    match (folder.and_then(Path::parent), admin.file_name()) {
        (Some(above), Some(name)) => above.join("clients").join(name),
        _ => admin.into(),
    }
}

/// All that is known of a core that does not answer.
fn down(socket: &Path) -> String {
    let Metric { name, kind, help, .. } = registry::UP;
    let [gpu, of] = registry::COMMON;
    let labels = format!("{},{}", label(gpu, ""), label(of, &socket.to_string_lossy()));
    format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{{{labels}}} 0\n")
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

/// Collects figures out of a status: what is not known is left out.
struct Collector<'a> {
    status: &'a Status,
    /// Labels that every sample has.
    common: String,
    /// Metrics and their samples with their labels.
    families: Vec<(&'static Metric, Vec<(String, f64)>)>,
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
    /// A figure with the values of its metric's labels.
    fn sample(&mut self, of: &'static Metric, labels: &[&str], value: f64) {
        debug_assert_eq!(of.labels.len(), labels.len(), "{}", of.name);
        // A counter never falls below where it begins.
        let value = if of.kind == "counter" { value.max(0.0) } else { value };
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
        self.sample(&registry::UP, &[], 1.0);
        self.sample(&registry::CORE, &[&s.core.version, &s.sharing.in_force], 1.0);
        self.sample(&registry::UPTIME, &[], s.core.uptime_s);
        self.sample(&registry::HIGH_BUSY, &[], flag(s.high_priority_busy));
        for (quantiles, name) in [(&s.decision_latency, "at-once"), (&s.held_latency, "held")] {
            let Quantiles { p50_us, p99_us, max_us, .. } = quantiles;
            for (us, quantile) in [(p50_us, "0.5"), (p99_us, "0.99"), (max_us, "1")] {
                self.sample(&registry::LATENCY, &[name, quantile], us * 1e-6);
            }
        }
        self.sample(&registry::LOG_RECORDING, &[], flag(s.log.recording));
        self.sample(&registry::LOG_DROPPED, &[], s.log.dropped as f64);
        if let Some(test) = &s.experiment {
            self.sample(&registry::EXPERIMENT, &[], flag(test.running));
        }
    }

    fn policy(&mut self) {
        let p = &self.status.policy;
        let signed_by = p.active.signed_by.as_deref().unwrap_or_default();
        let of = [&*p.active.name, &*p.active.digest, signed_by, p.active.loaded_because.as_str()];
        self.sample(&registry::POLICY, &of, 1.0);
        self.sample(&registry::GENERATION, &[], p.active.generation as f64);
        self.sample(&registry::DISABLED, &[], flag(p.disabled));
        self.sample(&registry::DECIDES, &[], p.decides as f64);
        self.sample(&registry::EVENTS, &[], p.events as f64);
        self.sample(&registry::BUILT_IN_RULE, &[], p.built_in_rule_decisions as f64);
        self.sample(&registry::LOAD_FAILURES, &[], p.load_failures as f64);
        for (kind, count) in p.faults.by_kind() {
            self.sample(&registry::FAULTS, &[kind], count as f64);
        }
        let pauses = &p.swap_pause_us;
        self.sample(&registry::RELOADS, &[], pauses.count as f64);
        for (us, quantile) in [(pauses.p50, "0.5"), (pauses.p99, "0.99"), (pauses.max, "1")] {
            self.sample(&registry::SWAP_PAUSE, &[quantile], us * 1e-6);
        }
        for (name, value) in &p.counters {
            self.sample(&registry::POLICY_COUNTER, &[name], *value as f64);
        }
        for (name, value) in &p.gauges {
            self.sample(&registry::POLICY_GAUGE, &[name], *value as f64);
        }
    }

    fn clients(&mut self) {
        for c in &self.status.clients {
            let (who, id) = (&c.identity, c.identity.id.to_string());
            let of = [&*id, &*who.name, who.class.as_str()];
            let totals = Totals {
                launches: c.launches,
                charged_ms: c.charged_ms,
                measured_ms: c.measured_ms,
                launches_measured: c.launches_measured,
                waited_ms: c.waited_ms,
                unscheduled: c.unscheduled,
                ..Totals::default()
            };
            for (value, _, metric) in COUNTED {
                self.sample(metric, &of, value(&totals));
            }
            if let Some(s) = &c.service {
                self.service(of, s);
            }
            self.sample(&registry::WAITING, &of, c.waiting as f64);
            self.sample(&registry::WEIGHT, &of, f64::from(c.weight));
            if let Some(floor) = c.min_share {
                self.sample(&registry::MIN_SHARE_ASKED, &of, floor.asked_percent / 100.0);
                self.sample(&registry::MIN_SHARE, &of, floor.granted_percent / 100.0);
                if let Some(had) = floor.had_percent {
                    self.sample(&registry::MIN_SHARE_HAD, &of, had / 100.0);
                }
            }
            self.sample(&registry::CHARGED_SHARE, &of, c.charged_percent / 100.0);
            self.sample(&registry::GOVERNED, &of, flag(c.governed));
        }
    }

    fn service(&mut self, of: [&str; 3], s: &Service) {
        self.sample(&registry::REQUESTS, &of, s.requests as f64);
        if s.recent > 0 {
            for (ms, quantile) in [(s.p50_ms, "0.5"), (s.p99_ms, "0.99")] {
                let [client, name, class] = of;
                self.sample(&registry::REQUEST_TIME, &[client, name, class, quantile], ms * 1e-3);
            }
        }
        if let Some(marks) = &s.marks {
            self.marks(of, marks);
        }
        if let Some(tpot) = &s.tpot {
            self.sample(&registry::TOKENS_WITHIN, &of, tpot.tokens_within as f64);
            self.sample(&registry::TOKENS_LATE, &of, tpot.tokens_late as f64);
            self.sample(&registry::TOKEN_OBJECTIVE, &of, tpot.tpot_ms * 1e-3);
        }
        if let Some(objective) = &s.objective {
            self.sample(&registry::REQUESTS_WITHIN, &of, s.requests_within as f64);
            self.sample(&registry::REQUESTS_LATE, &of, s.requests_late as f64);
            self.sample(&registry::OBJECTIVE, &of, objective.slo_ms * 1e-3);
        }
    }

    fn marks(&mut self, of: [&str; 3], marks: &Marks) {
        let ([client, name, class], tokens) = (of, &marks.tokens);
        for (count, why) in [(marks.dropped, "dropped"), (marks.wrong, "wrong")] {
            self.sample(&registry::MARKS_LOST, &[client, name, class, why], count as f64);
        }
        self.sample(&registry::TOKENS, &of, tokens.count as f64);
        if tokens.recent > 0 {
            for (ms, quantile) in [(tokens.p50_ms, "0.5"), (tokens.p99_ms, "0.99")] {
                self.sample(&registry::TOKEN_TIME, &[client, name, class, quantile], ms * 1e-3);
            }
        }
    }

    /// Sums over all clients of each class, including those that left, so that they do not fall when one
    /// leaves.
    fn classes(&mut self) {
        for (class, totals) in &self.status.totals {
            let of = [class.as_str()];
            for (value, metric, _) in COUNTED {
                self.sample(metric, &of, value(totals));
            }
            self.sample(&registry::REGISTERED, &of, totals.registered as f64);
            self.sample(&registry::DROPPED, &of, totals.dropped as f64);
            self.sample(&registry::CLIENTS, &of, totals.connected as f64);
        }
    }
}

/// What is counted of each class and of each client: value, and both metrics.
type Counted = (fn(&Totals) -> f64, &'static Metric, &'static Metric);
const COUNTED: [Counted; 6] = [
    (|t| t.launches as f64, &registry::LAUNCHES, &registry::CLIENT_LAUNCHES),
    (|t| t.charged_ms * 1e-3, &registry::CHARGED, &registry::CLIENT_CHARGED),
    (|t| t.measured_ms * 1e-3, &registry::MEASURED, &registry::CLIENT_MEASURED),
    (|t| t.launches_measured as f64, &registry::TIMED, &registry::CLIENT_TIMED),
    (|t| t.waited_ms * 1e-3, &registry::WAITED, &registry::CLIENT_WAITED),
    (|t| t.unscheduled as f64, &registry::UNSCHEDULED, &registry::CLIENT_UNSCHEDULED),
];

/// The text for a status.
fn exposition(status: &Status) -> String {
    let (core, [gpu, socket]) = (&status.core, registry::COMMON);
    let common = format!("{},{}", label(gpu, &core.gpu), label(socket, &core.socket));
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
    use tally_admin::{Class, ClientStatus, Identity, MinShare};

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
    fn a_core_that_does_not_answer_leaves_no_figures_but_that() {
        let dir = tempfile::tempdir().unwrap();
        let (file, admin) = (dir.path().join("tally.prom"), dir.path().join("admin/core.sock"));
        std::fs::write(&file, "tally_up 1").unwrap();
        let socket = AdminSocket::find(Some(admin.clone()), None);
        let args = MetricsArgs { out: Some(file.clone()), no_clients: false };
        let leaves_only_that = || {
            assert!(matches!(run(&socket, &args), Err(CtlError::NoCore { .. })));
            let text = std::fs::read_to_string(&file).unwrap();
            let clients = dir.path().join("clients/core.sock");
            let sample = format!("tally_up{{gpu=\"\",socket=\"{}\"}} 0", clients.display());
            assert_eq!(
                text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>(),
                [sample]
            );
        };
        leaves_only_that();
        // One that is stopped: it takes a connection, and no more.
        std::fs::create_dir(admin.parent().unwrap()).unwrap();
        let _stopped = std::os::unix::net::UnixListener::bind(&admin).unwrap();
        std::fs::write(&file, "tally_up 1").unwrap();
        leaves_only_that();
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
        let sums = Totals {
            launches: 9,
            charged_ms: 2500.0,
            registered: 3,
            dropped: 2,
            ..Totals::default()
        };
        status.totals = [(Class::BestEffort, sums)].into();
        let min_share =
            MinShare { asked_percent: 40.0, granted_percent: 20.0, had_percent: Some(25.0) };
        let train = ClientStatus {
            weight: 3,
            min_share: Some(min_share),
            charged_percent: 50.0,
            ..client("train")
        };
        status.clients = vec![ClientStatus { charged_ms: 1500.0, ..train }];
        let text = exposition(&status);
        let common = r#"gpu="GPU-1",socket="/s/clients/core.sock""#;
        for (name, labels, value) in [
            ("tally_up", "", "1"),
            ("tally_core_uptime_seconds", "", "2.5"),
            ("tally_policy_generation", "", "7"),
            ("tally_policy_disabled", "", "0"),
            ("tally_policy_faults_total", r#",kind="trap""#, "2"),
            ("tally_policy_faults_total", r#",kind="stall""#, "0"),
            ("tally_policy_counter_total", r#",name="turns""#, "3"),
            ("tally_policy_changes_total", "", "6"),
            ("tally_policy_swap_pause_seconds", r#",quantile="0.99""#, "0.5"),
            ("tally_gpu_charged_seconds_total", r#",class="best-effort""#, "2.5"),
            ("tally_clients_registered_total", r#",class="best-effort""#, "3"),
            ("tally_clients_dropped_total", r#",class="best-effort""#, "2"),
            (
                "tally_client_gpu_charged_seconds_total",
                r#",client="1",name="train",class="best-effort""#,
                "1.5",
            ),
            ("tally_client_weight", r#",client="1",name="train",class="best-effort""#, "3"),
            (
                "tally_client_min_share_ratio",
                r#",client="1",name="train",class="best-effort""#,
                "0.2",
            ),
            (
                "tally_client_gpu_charged_ratio",
                r#",client="1",name="train",class="best-effort""#,
                "0.5",
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
            status.experiment = Some(crate::ab::tests::running());
            parsed(&exposition(&status))
        };
        let (first, second) = (of("/a/clients/core.sock"), of("/b/clients/core.sock"));
        assert!(first.len() > 5 && first.iter().all(|series| !second.contains(series)));
    }
}
