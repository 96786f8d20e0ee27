//! What `tallyctl status --json` shows: the stable schema, version 1.
//!
//! Fields are only added within a version; readers must ignore those they do
//! not know. Units end the names: `_us`, `_ms`, `_s`, `_ns`. Counts rise
//! monotonically from the client's registration (or the core's start).

mod departed;
mod kernel;
mod policy_life;

pub use departed::{Departed, Totals};
pub use kernel::{FormStatus, KernelStatus};
pub use policy_life::PolicyLife;

use crate::dispatch::latency::Quantiles;
use crate::dispatch::snapshot::{ClientNumbers, ReportWords, ShimCounts, Snapshot};
use crate::policy_slot::{LoadFailure, Source};
use crate::profile_store::ProfilesStatus;
use crate::record::file::LogStatus;
use crate::record::shadow::ShadowBrief;
use crate::sharing::SharingStatus;
use crate::ungoverned::UngovernedStatus;
use serde::Serialize;
use std::collections::BTreeMap;
use tally_engine::WaitsFor;
use tally_engine::policy::FaultKind;
use tally_ipc::layout::{report_state, whole_because};

/// Version of this schema.
pub const SCHEMA: u32 = 1;

#[derive(Clone, Debug, Serialize)]
pub struct Status {
    pub schema: u32,
    pub core: CoreStatus,
    /// How clients share the GPU.
    pub sharing: SharingStatus,
    /// The active policy.
    pub policy: PolicyReport,
    /// From submission seen by the core to answered: launches answered at once.
    pub decision_latency: Quantiles,
    /// The same for launches that were held or found their window full.
    pub held_latency: Quantiles,
    /// High-priority work is on the GPU now.
    pub high_priority_busy: bool,
    pub clients: Vec<ClientStatus>,
    /// Sums over all clients by class (`high`, `best-effort`), those that left included: they do not
    /// fall while this core runs.
    pub totals: BTreeMap<&'static str, Totals>,
    /// The last clients that left, newest first; at most 64.
    pub departed: Vec<Departed>,
    /// Programs that were to be governed and are not, newest first.
    pub ungoverned: Vec<UngovernedStatus>,
    /// Kernels by measured GPU time, most first.
    pub kernels: Vec<KernelStatus>,
    /// Kernels (name, image, grid, block) known in all.
    pub kernels_known: u32,
    /// What is kept of kernels between runs of the core.
    pub profiles: ProfilesStatus,
    /// The A/B test that runs, or ran last; `null` if there was none.
    pub experiment: Option<tally_admin::ab::AbStatus>,
    /// The decision log.
    pub log: LogStatus,
    /// The policy that sees what the active one sees; `null` if there was none.
    pub shadow: Option<ShadowBrief>,
}

#[derive(Clone, Debug, Serialize)]
pub struct CoreStatus {
    pub version: &'static str,
    /// Version of the shared-memory protocol.
    pub protocol: u32,
    pub pid: u32,
    pub uid: u32,
    /// Since it started, s.
    pub uptime_s: f64,
    /// The dispatch thread spins so long before it sleeps, us.
    pub spin_us: u64,
    /// The CPU that the dispatch thread was to run on.
    pub pin_cpu_asked: Option<u32>,
    /// The CPU that it does run on; `null` if it is free.
    pub pinned_cpu: Option<u32>,
    /// Times the dispatch thread slept.
    pub parks: u64,
    /// UUID of the GPU that it serves; empty until a client has launched something.
    pub gpu: String,
    /// Where clients register.
    pub socket: String,
    /// Where admin requests are taken.
    pub admin_socket: String,
    /// Clients served at once: as configured, or as many as there are descriptors for.
    pub clients_max: usize,
    /// Clients for which there are descriptors.
    pub clients_fit: usize,
    /// Descriptors that the core may have (RLIMIT_NOFILE).
    pub descriptors: u64,
}

/// The active policy.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyReport {
    /// Its file and configuration; `null`: the built-in rule serves.
    pub source: Option<Source>,
    pub name: String,
    /// SHA-256 of its file.
    pub digest: String,
    /// Id of the trusted key that signed its file; `null` if nothing vouches for it.
    pub signed_by: Option<String>,
    /// Capabilities that it has been granted.
    pub granted: Vec<&'static str>,
    /// Capabilities that it imports: all of them are granted, or it would not have been loaded.
    pub needs: Vec<&'static str>,
    /// Why it decided as it did, by its own table, and how often.
    pub reasons: Vec<tally_wasm_host::ReasonStatus>,
    /// Rises with each policy put active.
    pub generation: u64,
    /// Seconds since the epoch.
    pub loaded_at_unix_s: u64,
    /// How long loading took, ms.
    pub load_ms: f64,
    /// Calls of `decide`, all policies of this run of the core.
    pub decides: u64,
    /// Calls of event functions, likewise.
    pub events: u64,
    /// Launches decided by the built-in rule because the policy failed.
    pub fallbacks: u64,
    /// Lost turns by kind (`trap`, `overrun`, `memory`, `nonsense`, `stall`,
    /// `disabled`), likewise.
    pub faults: BTreeMap<&'static str, u64>,
    /// `faults.trap`, for alerts.
    pub traps: u64,
    /// `faults.overrun`, for alerts.
    pub overruns: u64,
    /// The last lost turn's message.
    pub last_fault: Option<String>,
    /// Switched off after too many faults; the built-in rule serves.
    pub disabled: bool,
    /// Times it was started anew after a fault.
    pub respawns: u64,
    /// Its own counters.
    pub counters: BTreeMap<String, u64>,
    /// Its own gauges.
    pub gauges: BTreeMap<String, i64>,
    /// Log lines of it that were dropped for coming too fast.
    pub log_dropped: u64,
    /// Loads that failed since the core started.
    pub load_failures: u64,
    /// The last failed load since a policy was put active.
    pub last_load_error: Option<LoadFailure>,
    /// How it came, and how others went.
    #[serde(flatten)]
    pub life: PolicyLife,
}

impl PolicyReport {
    pub fn new(
        active: crate::policy_slot::Active,
        last_load_error: Option<LoadFailure>,
        load_failures: u64,
        life: PolicyLife,
        s: &Snapshot,
    ) -> Self {
        let kinds = [
            ("trap", FaultKind::Trap),
            ("overrun", FaultKind::Overrun),
            ("memory", FaultKind::Memory),
            ("nonsense", FaultKind::Nonsense),
            ("stall", FaultKind::Stall),
            ("disabled", FaultKind::Disabled),
        ];
        let faults: BTreeMap<_, _> = kinds
            .iter()
            .map(|(name, kind)| (*name, s.policy.faults.get(kind).copied().unwrap_or(0)))
            .collect();
        let figures = s.figures.clone();
        PolicyReport {
            source: active.source,
            name: active.name,
            digest: active.digest,
            signed_by: active.signed_by,
            granted: figures.as_ref().map(|f| f.granted.clone()).unwrap_or_default(),
            needs: figures.as_ref().map(|f| f.needs.clone()).unwrap_or_default(),
            generation: active.generation,
            loaded_at_unix_s: active.loaded_at_unix_s,
            load_ms: active.load_ms,
            decides: s.policy.decides,
            events: s.policy.events,
            fallbacks: s.policy.fallbacks,
            traps: faults["trap"],
            overruns: faults["overrun"],
            faults,
            last_fault: s.policy.last_fault.as_ref().map(ToString::to_string),
            disabled: figures.as_ref().is_some_and(|f| f.disabled),
            respawns: figures.as_ref().map_or(0, |f| f.respawns),
            log_dropped: figures.as_ref().map_or(0, |f| f.log_dropped),
            counters: figures.as_ref().map(|f| f.counters.clone()).unwrap_or_default(),
            reasons: figures.as_ref().map(|f| f.reasons.clone()).unwrap_or_default(),
            gauges: figures.map(|f| f.gauges).unwrap_or_default(),
            load_failures,
            last_load_error,
            life,
        }
    }
}

/// Who a client is; known at registration.
#[derive(Clone, Debug, Serialize)]
pub struct Identity {
    /// Its id; never used again in this run of the core.
    pub id: u32,
    pub pid: u32,
    pub uid: u32,
    pub name: String,
    pub labels: BTreeMap<String, String>,
    /// `high` or `best-effort`.
    pub class: &'static str,
    /// Why it is not what it asked to be; empty otherwise.
    pub class_reason: String,
}

/// A connected client.
#[derive(Clone, Debug, Serialize)]
pub struct ClientStatus {
    #[serde(flatten)]
    pub identity: Identity,
    /// Since it registered, s.
    pub connected_s: f64,
    /// Whether its launches are governed.
    pub governed: bool,
    /// Why not; empty if they are.
    pub not_governed_reason: String,
    /// Launches so far, all entry points.
    pub launches: u64,
    /// By entry point: `kernel`, `kernel_ex`, `cooperative`, `graph`.
    pub launches_by_entry_point: BTreeMap<&'static str, u64>,
    /// Kernel nodes of the graphs launched.
    pub graph_kernels: u64,
    /// Launches recorded into a capture and not run.
    pub captured: u64,
    /// Launches the driver refused.
    pub failed: u64,
    /// Launches that went ahead without a core.
    pub unscheduled: u64,
    pub host_func: u64,
    /// Waits behind which it lingered on the GPU.
    pub lingered: u64,
    /// Launches on streams beyond those tracked.
    pub stream_overflow: u64,
    /// What was decided.
    pub decisions: Decisions,
    /// How launches were transformed.
    pub transformed: Transformed,
    /// Launches waiting for a decision now.
    pub waiting: u64,
    /// Why its work does not go on now; `null` if none of it waits.
    pub why: Option<Why>,
    /// Time launches waited, by the core's account, ms.
    pub waited_ms: f64,
    /// The same by the client's threads' account, ms.
    pub waited_client_ms: f64,
    /// GPU time that the accounts count, ms: what its launches were charged; of a high-priority
    /// client the time that it was busy.
    pub charged_ms: f64,
    /// Time of its launches seen on the device, ms; only those timed, `launches_measured`. Of
    /// launches that ran beside others it includes time in which the others ran.
    pub measured_ms: f64,
    /// Launches of which `measured_ms` is the sum.
    pub launches_measured: u64,
    /// High priority: it has work on the GPU now.
    pub busy: bool,
    /// High priority: times that it was busy for `engine.high_stall_ms` without a launch, and not waited for any longer.
    pub standstills: u64,
    /// Launches granted and not done.
    pub in_flight: u64,
    /// Their predicted GPU time, us.
    pub in_flight_us: f64,
    /// Its in-flight window, us.
    pub window_us: f64,
    /// Its launches are not decided.
    pub standing_grant: bool,
    /// Why its last launch was decided as it was, in the policy's words; null if the policy gave no reason.
    pub reason: Option<String>,
    /// How far the mechanisms got in its process.
    pub report: Report,
    /// Tickets taken and never published, passed over after 1 s.
    pub tickets_skipped: u64,
    /// Tickets given up by their owner.
    pub tickets_abandoned: u64,
}

/// Why a client's next launch waits, or its launch under way stands aside.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Why {
    /// `high_priority` (held while high-priority work is on the GPU), `policy` (held otherwise),
    /// `window` (its in-flight window is full), `yielding` (a launch under way stands aside), or
    /// `decision` (none has been made yet).
    pub reason: &'static str,
    /// Held: it is decided again after so long at the latest, ms.
    pub for_ms: Option<f64>,
}

impl Why {
    fn new(waits_for: WaitsFor, now_ns: u64) -> Self {
        let until = |until_ns: u64| Some(until_ns.saturating_sub(now_ns) as f64 / 1e6);
        let (reason, for_ms) = match waits_for {
            WaitsFor::HighPriority { until_ns } => ("high_priority", until(until_ns)),
            WaitsFor::Policy { until_ns } => ("policy", until(until_ns)),
            WaitsFor::Window => ("window", None),
            WaitsFor::Yielding => ("yielding", None),
            WaitsFor::Decision => ("decision", None),
        };
        Why { reason, for_ms }
    }
}

/// What was decided for a client's launches.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Decisions {
    /// Submitted for a decision, leased ones included.
    pub submitted: u64,
    /// Run as they are.
    pub run: u64,
    /// Started under a lease.
    pub leased: u64,
    pub held: u64,
    /// Launches held at least once.
    pub launches_held: u64,
    /// Waits for room in the window.
    pub window_full: u64,
    /// Granted although the window was full, because nothing in it ended.
    pub window_stalls: u64,
    /// Run as slices.
    pub sliced: u64,
    pub preemptible: u64,
    /// Run on a subset of the SMs.
    pub sm_limited: u64,
    /// Run whole because the form decided was not on offer, or could not be done.
    pub degraded: u64,
    /// Decided by the built-in rule because the policy failed.
    pub fallback: u64,
    pub completed: u64,
}

impl Decisions {
    fn new(n: &ClientNumbers) -> Self {
        let s = &n.stats;
        Decisions {
            submitted: s.submitted,
            run: s.run,
            leased: s.leased,
            held: s.held,
            launches_held: s.launches_held,
            window_full: s.window_full,
            window_stalls: s.window_stalls,
            sliced: s.sliced,
            preemptible: s.preemptible,
            sm_limited: s.sm_limited,
            degraded: s.degraded.saturating_add(n.shim.degraded),
            fallback: s.fallback,
            completed: s.completed,
        }
    }
}

/// How a client's launches were transformed, by its own side's account.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Transformed {
    /// Kernels that have a transformed form.
    pub kernels: u64,
    /// Kernels looked at that have none; `kernels` of the status says why.
    pub kernels_refused: u64,
    /// Launches run as slices.
    pub sliced: u64,
    /// Of these, by offset: each slice a launch of its own blocks only.
    pub sliced_by_offset: u64,
    /// Launches run so that they yield.
    pub preemptible: u64,
    /// Launches run on some of the SMs.
    pub sm_limited: u64,
    /// Graph launches run as chains of parts.
    pub graph_chained: u64,
    /// Kernels of these that were launched by themselves, in a transformed form.
    pub graph_nodes_transformed: u64,
    /// Times it was asked to yield while a transformed launch was under way.
    pub yields: u64,
    /// It is asked to yield now.
    pub yielded: bool,
    /// Launches that yielded at least once.
    pub launches_yielded: u64,
    /// Launches whose blocks waited for one another when cut, and that were rescued.
    pub rescued: u64,
    /// From being asked to yield until a launch had, of the latest, median, us.
    pub turnaround_us_p50: f64,
    /// 99th percentile of the same.
    pub turnaround_us_p99: f64,
}

impl Transformed {
    fn new(n: &ClientNumbers) -> Self {
        let s = &n.shim;
        Transformed {
            kernels: s.transformed_kernels,
            kernels_refused: s.refused_kernels,
            sliced: s.sliced,
            sliced_by_offset: s.sliced_by_offset,
            preemptible: s.preemptible,
            sm_limited: s.sm_limited,
            graph_chained: s.graph_chained,
            graph_nodes_transformed: s.graph_nodes_transformed,
            yields: n.stats.yields,
            yielded: n.state.yielded,
            launches_yielded: s.launches_yielded,
            rescued: s.rescued,
            turnaround_us_p50: s.turnaround_p50_ns as f64 / 1e3,
            turnaround_us_p99: s.turnaround_p99_ns as f64 / 1e3,
        }
    }
}

/// The words of the shim's report.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Hardware time slice: `pending`, `active`, `failed`, `unused`.
    pub time_slice: &'static str,
    /// The time slice that is wanted, us; 0: the driver's.
    pub time_slice_us: u32,
    /// Channel groups whose time slice was set.
    pub time_slice_groups: u32,
    /// NVIDIA status or errno of the last failure to set one; 0 if none.
    pub time_slice_error: u32,
    /// Lingering on the GPU between requests: `pending`, `active`, `failed`, `unused`.
    pub linger: &'static str,
    /// CUDA result of a failure to; 0 if none.
    pub linger_error: u32,
    /// Why all its launches go whole; empty if nothing rules other forms out.
    pub whole_because: &'static str,
    /// `as asked`, `not an MPS client` (it set its GPU up before it registered,
    /// or the daemon is gone), `an MPS client though not asked`, `unknown`.
    pub mps: &'static str,
    /// SMs of its device; 0 before its first launch.
    pub sm_count: u32,
    /// CUDA driver version; 0 before `cuInit`.
    pub driver_version: u32,
    /// UUID of its device; empty before its first launch.
    pub device_uuid: String,
}

fn whole_because(word: u32) -> &'static str {
    match word {
        whole_because::NOTHING => "",
        whole_because::LAUNCH_BLOCKING => "CUDA_LAUNCH_BLOCKING is set",
        whole_because::INJECTION => "a tool is injected into the driver (CUDA_INJECTION64_PATH)",
        whole_because::DEBUGGER => "a debugger is attached",
        whole_because::BYPASS => {
            "another library stands between the program and the driver, or may call it without the shim: it is in LD_PRELOAD as well, or was opened with RTLD_DEEPBIND"
        }
        whole_because::FEW_QUEUES => "CUDA_DEVICE_MAX_CONNECTIONS is below 8",
        _ => "its shim reports an unknown reason",
    }
}

fn state_name(word: u32) -> &'static str {
    match word {
        report_state::PENDING => "pending",
        report_state::ACTIVE => "active",
        report_state::FAILED => "failed",
        report_state::UNUSED => "unused",
        _ => "invalid",
    }
}

impl Report {
    fn new(r: &ReportWords, mps_asked: bool) -> Self {
        Report {
            time_slice: state_name(r.time_slice),
            time_slice_us: r.time_slice_us,
            time_slice_groups: r.time_slice_groups,
            time_slice_error: r.time_slice_error,
            linger: state_name(r.linger),
            linger_error: r.linger_error,
            whole_because: whole_because(r.whole_because),
            mps: match (r.mps_client, mps_asked) {
                (1, true) | (2, false) => "as asked",
                (2, true) => "not an MPS client",
                (1, false) => "an MPS client though not asked",
                _ => "unknown",
            },
            sm_count: r.sm_count,
            driver_version: r.driver_version,
            device_uuid: uuid(r.device_uuid),
        }
    }
}

/// A device's UUID as `nvidia-smi` writes it; empty if it is 0.
pub(crate) fn uuid(words: [u64; 2]) -> String {
    if words == [0, 0] {
        return String::new();
    }
    let mut text = String::from("GPU-");
    for (i, byte) in words.iter().flat_map(|w| w.to_le_bytes()).enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

fn governed(r: &ReportWords) -> (bool, String) {
    let why = match r.governed {
        report_state::ACTIVE => return (true, String::new()),
        report_state::PENDING => "it has not launched anything yet",
        report_state::FAILED => "its shim could not take over the driver's launch functions",
        report_state::UNUSED => "its shim was told not to",
        _ => "its shim reports an unknown state",
    };
    (false, why.into())
}

fn charged_ms(class: &str, n: &ClientNumbers) -> f64 {
    let ns = if class == "high" { n.shim.busy_total_ns } else { n.stats.charged_ns };
    ns as f64 / 1e6
}

fn entry_points(s: &ShimCounts) -> BTreeMap<&'static str, u64> {
    [
        ("kernel", s.launch_kernel),
        ("kernel_ex", s.launch_kernel_ex),
        ("cooperative", s.launch_cooperative),
        ("graph", s.graph_launch),
    ]
    .into()
}

impl ClientStatus {
    pub fn new(identity: Identity, connected_s: f64, n: &ClientNumbers, mps_asked: bool) -> Self {
        let (governed, not_governed_reason) = governed(&n.report);
        ClientStatus {
            connected_s,
            governed,
            not_governed_reason,
            launches: n.shim.launches,
            launches_by_entry_point: entry_points(&n.shim),
            graph_kernels: n.shim.graph_kernels,
            captured: n.shim.captured,
            failed: n.shim.failed,
            unscheduled: n.shim.unscheduled,
            host_func: n.shim.host_func,
            lingered: n.shim.lingered,
            stream_overflow: n.shim.stream_overflow,
            decisions: Decisions::new(n),
            transformed: Transformed::new(n),
            waiting: n.state.waiting,
            why: n.state.waits_for.map(|waits_for| Why::new(waits_for, n.read_ns)),
            waited_ms: n.stats.waited_ns as f64 / 1e6,
            waited_client_ms: n.shim.waited_ns as f64 / 1e6,
            charged_ms: charged_ms(identity.class, n),
            measured_ms: n.stats.measured_ns as f64 / 1e6,
            launches_measured: n.stats.measured,
            busy: n.shim.busy && identity.class == "high",
            standstills: n.standstills,
            in_flight: n.state.in_flight,
            in_flight_us: n.state.in_flight_ns as f64 / 1e3,
            window_us: n.state.window_ns as f64 / 1e3,
            standing_grant: n.state.ungated,
            reason: None,
            report: Report::new(&n.report, mps_asked),
            tickets_skipped: n.oddities.skipped,
            tickets_abandoned: n.oddities.abandoned,
            identity,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_does() {
        let words = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        assert_eq!(uuid(words), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
        assert_eq!(uuid([0, 0]), "");
    }

    #[test]
    fn not_being_governed_has_a_reason() {
        for word in 0..=9 {
            let (yes, why) = governed(&ReportWords { governed: word, ..ReportWords::default() });
            assert_eq!(why.is_empty(), word == report_state::ACTIVE);
            assert_eq!(yes, word == report_state::ACTIVE);
        }
    }
}
