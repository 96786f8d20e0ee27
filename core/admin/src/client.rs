//! Clients in the status, and programs that should be clients.

use crate::status::Class;
use crate::words::{Word, required, words};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Who a client is; known at registration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its id; never used again in this run of the core.
    pub id: u32,
    pub pid: u32,
    pub uid: u32,
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub class: Class,
    /// Why it is not what it asked to be; empty otherwise.
    pub class_reason: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientStatus {
    #[serde(flatten)]
    pub identity: Identity,
    /// Time since it registered, s.
    pub connected_s: f64,
    /// Whether its launches are governed.
    pub governed: bool,
    /// Why its launches are not governed; empty if they are.
    pub not_governed_reason: String,
    /// Launches so far, all entry points.
    pub launches: u64,
    pub launches_by_entry_point: EntryPoints,
    /// Kernel nodes of the graphs launched.
    pub graph_kernels: u64,
    /// Launches recorded into a capture and not run.
    pub captured: u64,
    /// Launches the driver refused.
    pub failed: u64,
    /// Launches that went ahead without a core.
    pub unscheduled: u64,
    /// Host functions enqueued (`cuLaunchHostFunc`).
    pub host_func: u64,
    /// Waits behind which it lingered on the GPU.
    pub lingered: u64,
    /// Launches on streams beyond those tracked.
    pub stream_overflow: u64,
    pub decisions: Decisions,
    pub transformed: Transformed,
    /// Launches waiting for a decision now.
    pub waiting: u64,
    /// Why its work does not go on now; `null` if none of it waits.
    #[serde(deserialize_with = "required")]
    pub why: Option<Why>,
    /// Time launches waited, by the core's account, ms.
    pub waited_ms: f64,
    /// Time launches waited, by the account of the client's threads, ms.
    pub waited_client_ms: f64,
    /// Its share of best-effort GPU time relative to other clients: the label `weight`, else 1.
    pub weight: u32,
    /// Its floor; `null` if it asked for none.
    #[serde(deserialize_with = "required")]
    pub min_share: Option<MinShare>,
    /// GPU time that its launches were charged, ms: the measured time, at most 64 times the predicted one; an estimate
    /// for launches that were not timed, or that could yield and ran beside high-priority work. For a high-priority
    /// client, the time that it was busy.
    pub charged_ms: f64,
    /// `charged_ms` over the time since it registered, %. Where kernels of several clients run at once, all of them
    /// together may have more than 100.
    pub charged_percent: f64,
    /// Time of its launches seen on the device, ms; only those timed, `launches_measured`. Of
    /// launches that ran beside others it includes time in which the others ran.
    pub measured_ms: f64,
    /// Launches of which `measured_ms` is the sum.
    pub launches_measured: u64,
    /// High priority: it has work on the GPU now.
    pub busy: bool,
    /// High priority: what its requests took; `null` of best effort.
    #[serde(deserialize_with = "required")]
    pub service: Option<Service>,
    /// High priority: times that it was busy for `engine.high_stall_ms` while none of its launches began or
    /// ended, and counted as idle from then on.
    pub standstills: u64,
    /// Launches granted and not done.
    pub in_flight: u64,
    /// Predicted GPU time of these launches, us.
    pub in_flight_us: f64,
    /// Its in-flight window, us.
    pub window_us: f64,
    /// SMs that launches which are decided to run are limited to, if they can be; 0: no limit.
    pub width_sms: u32,
    /// Its launches are ungated: they start without a decision.
    pub ungated: bool,
    /// Why its last launch was decided as it was, in the policy's words; `null` if the policy gave no reason.
    #[serde(deserialize_with = "required")]
    pub reason: Option<String>,
    /// How far the mechanisms got in its process.
    pub report: Report,
    /// Tickets taken and never published, passed over after 1 s.
    pub tickets_skipped: u64,
    /// Tickets given up by their owner.
    pub tickets_abandoned: u64,
    /// Values in its shared memory that no shim writes; it is disconnected at the 16th.
    pub breaches: u64,
}

/// What a client needs of its requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Objective {
    /// Longest time of a request, ms.
    pub slo_ms: f64,
    /// Share of requests that must keep it, %.
    pub percentile: f64,
}

/// The floor of a best-effort client: its least share of GPU time, of the time in which it has work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MinShare {
    /// What the program, or an admin, asked for, %.
    pub asked_percent: f64,
    /// What it gets of that under a policy that keeps floors, %: not more than `admission.min_share_percent_max` if the
    /// program asked, and than what other floors leave of 90.
    pub granted_percent: f64,
    /// GPU time charged since it asked, over the time in which it had work, %; `null` if it had none.
    #[serde(deserialize_with = "required")]
    pub had_percent: Option<f64>,
}

/// What a high-priority client needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Needs {
    /// Of its requests; `null` for nothing.
    pub objective: Option<Objective>,
    /// Longest time of a token, ms; `null` for none.
    pub tpot_ms: Option<f64>,
}

/// A client's objective for tokens, and how it was kept.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tpot {
    /// Longest time of a token, ms.
    pub tpot_ms: f64,
    /// Tokens that kept the objective of their time, and tokens that took longer; without one they are neither.
    pub tokens_within: u64,
    pub tokens_late: u64,
    /// Share of the recent tokens that kept it, %; `null` without tokens.
    #[serde(deserialize_with = "required")]
    pub attainment_percent: Option<f64>,
}

/// Units of work of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Units {
    /// Units that ended since the client registered.
    pub count: u64,
    /// Units of the last five to ten minutes, or since their objective was set.
    pub recent: u64,
    /// Median of the recent units, ms.
    pub p50_ms: f64,
    pub p99_ms: f64,
}

/// Tokens and prefills of a high-priority client, and what was lost of its units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Marks {
    /// The client's requests are the marked ones; otherwise those told from its launches and waits.
    pub requests: bool,
    /// Requests under way.
    pub open: u64,
    /// Age of the oldest of them, its time in the program's queue included, ms; 0 without any.
    pub oldest_ms: f64,
    /// Marked ones; or else, with an objective for tokens, CUDA graph launches.
    pub tokens: Units,
    pub prefills: Units,
    /// Units not counted because too many were open, or more ended than the core could read.
    pub dropped: u64,
    /// Units ignored because they end before they begin, or in the future.
    pub wrong: u64,
    /// Units that began or were queued before the client registered, and count from then.
    pub shortened: u64,
}

/// Requests of a high-priority client: those that it marks; or else each from the first launch that no earlier wait
/// covers to the return of the call that waits for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Service {
    /// Its objective; `null` without one.
    #[serde(deserialize_with = "required")]
    pub objective: Option<Objective>,
    /// Requests that ended since it registered. Begins anew at the first marked request.
    pub requests: u64,
    /// Requests that kept the objective of their time, and requests that took longer; without one they are neither.
    pub requests_within: u64,
    pub requests_late: u64,
    /// Requests of the last five to ten minutes, or since the objective was set.
    pub recent: u64,
    /// Median of the recent requests, ms.
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// Share of the recent requests that kept the objective, %; `null` without requests or objective.
    #[serde(deserialize_with = "required")]
    pub attainment_percent: Option<f64>,
    /// Time that its unit of work under way can lose and still keep the objective, ms, as policies see it: below 0 if
    /// it will be late; `null` without an objective or a unit.
    #[serde(deserialize_with = "required")]
    pub slack_ms: Option<f64>,
    /// Its objective for tokens; `null` without one.
    #[serde(deserialize_with = "required")]
    pub tpot: Option<Tpot>,
    /// Its tokens and prefills; `null` if it has marked nothing and has no objective for tokens.
    #[serde(deserialize_with = "required")]
    pub marks: Option<Marks>,
    /// What its latest profiled unit of work did on the GPU; `null` until one was profiled.
    #[serde(deserialize_with = "required")]
    pub profile: Option<UnitProfile>,
}

/// What a unit of work did on the GPU, from the first launch that no earlier wait covers to the return of the call that
/// waits for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UnitProfile {
    /// Profiled units, this one included: the first two, and then one in 128.
    pub units: u64,
    /// A CUDA graph is one.
    pub launches: u32,
    /// GPU time in which its launches ran, ms.
    pub gpu_busy_ms: f64,
    /// Gaps between the end of a launch and the start of the next.
    pub gaps: u32,
    pub gaps_ms: f64,
    pub gap_median_us: f64,
    pub gap_longest_us: f64,
    /// SMs that its largest kernel fills; 0: unknown.
    pub sms_max: u32,
    /// Mean of the SMs that its kernels fill, weighted by their time; 0: unknown.
    pub sms_mean: u32,
}

/// Launches by the entry point of the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryPoints {
    pub kernel: u64,
    pub kernel_ex: u64,
    pub cooperative: u64,
    pub graph: u64,
}

/// Why a client's next launch waits, or its launch under way yields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Why {
    pub reason: WaitReason,
    /// Held: it is decided again after so long at the latest, ms; `null` if it is not held.
    #[serde(deserialize_with = "required")]
    pub for_ms: Option<f64>,
}

words! {
    /// What a client's work waits for.
    pub enum WaitReason {
        /// No decision has been made yet.
        Decision = "decision",
        /// Held while high-priority work is on the GPU.
        HighPriority = "high_priority",
        /// Held by the policy for another reason.
        Policy = "policy",
        /// The client's in-flight window is full.
        Window = "window",
        /// A launch under way has yielded.
        Yielding = "yielding",
    }
}

/// What was decided for a client's launches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decisions {
    /// Submitted for a decision, leased ones included.
    pub submitted: u64,
    /// Answers, of the policy or the built-in rule, that run a launch.
    pub run: u64,
    /// Started under a lease.
    pub leased: u64,
    /// Answers that held a launch.
    pub held: u64,
    /// Launches held at least once.
    pub launches_held: u64,
    /// Waits for room in the window.
    pub window_full: u64,
    /// Granted although the window was full, because nothing in it ended.
    pub window_stalls: u64,
    pub sliced: u64,
    pub preemptible: u64,
    /// Run on a subset of the SMs.
    pub sm_limited: u64,
    /// Times that its width changed, by its policy or at the end of one.
    pub width_changes: u64,
    /// Run whole because the form decided was not on offer, or could not be done.
    pub degraded: u64,
    /// Decided by the built-in rule because the policy failed.
    pub built_in_rule: u64,
    pub completed: u64,
}

/// How a client's launches were transformed, as its shim counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Transformed {
    /// Kernels that have a transformed form.
    pub kernels: u64,
    /// Kernels looked at that have none; `kernels` of the status says why.
    pub kernels_refused: u64,
    /// Launches run as slices.
    pub sliced: u64,
    /// Sliced launches whose slices are launches of their own blocks only, by offset block indices.
    pub sliced_by_offset: u64,
    /// Launches run so that they yield.
    pub preemptible: u64,
    /// Launches run on some of the SMs.
    pub sm_limited: u64,
    /// Those of them right behind another one of their stream on the same SMs, with no event between them.
    pub sm_limited_consecutive: u64,
    /// Graph launches run as chains of parts.
    pub graph_chained: u64,
    /// Kernels of these that were launched by themselves, in a transformed form.
    pub graph_nodes_transformed: u64,
    /// Times it was asked to yield while a transformed launch was under way.
    pub yields: u64,
    /// The client is asked to yield now.
    pub yielded: bool,
    /// Launches that yielded at least once.
    pub launches_yielded: u64,
    /// Transformed launches whose blocks waited for one another, and that were rescued.
    pub rescued: u64,
    /// Median time from being asked to yield until a launch had, over the latest, us.
    pub turnaround_us_p50: f64,
    /// 99th percentile of these times, us.
    pub turnaround_us_p99: f64,
    /// Median time for which the GPU has nothing of a stream's to do before a launch that goes to some of the SMs, over
    /// the latest 15 measured, us; 0 if none was. Launches made after the GPU had ended all before them do not count.
    pub sm_limit_us_p50: f64,
    /// 99th percentile of these times, over the latest 255, us.
    pub sm_limit_us_p99: f64,
    /// Such times measured so far.
    pub sm_limits_timed: u64,
    /// GPU memory that went as the green contexts for launches on some of the SMs were made, MB. What others took or
    /// freed meanwhile counts too; what is made in them later does not.
    pub sm_limit_mb: f64,
}

words! {
    /// How far a mechanism got in a client's process.
    pub enum MechanismState {
        Pending = "pending",
        Active = "active",
        Failed = "failed",
        Unused = "unused",
        /// The shim wrote no such state.
        Invalid = "invalid",
    }
}

words! {
    /// Whether a client is an MPS client, and was to be one.
    pub enum MpsUse {
        AsAsked = "as asked",
        /// It set its GPU up before it registered, or the daemon is gone.
        NotAClient = "not an MPS client",
        NotAsked = "an MPS client though not asked",
    }
}

/// What a client's shim reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Whether the wanted time slice has been set in the driver's channel groups.
    pub time_slice: MechanismState,
    /// The time slice that is wanted, us; 0: the driver's.
    pub time_slice_us: u32,
    /// Channel groups whose time slice was set.
    pub time_slice_groups: u32,
    /// NVIDIA status or errno of the last failure to set one; 0 if none.
    pub time_slice_error: u32,
    /// Lingering on the GPU between requests.
    pub linger: MechanismState,
    /// CUDA result of a failure to linger; 0 if none.
    pub linger_error: u32,
    /// Why all its launches go whole; empty if nothing rules other forms out.
    pub whole_because: Word,
    pub mps: MpsUse,
    /// SMs of its device; 0 before its first launch.
    pub sm_count: u32,
    /// CUDA driver version; 0 before `cuInit`.
    pub driver_version: u32,
    /// UUID of its device; empty before its first launch.
    pub device_uuid: String,
}

/// Sums over all clients of one class that registered since the core started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Clients, whether they are connected or left.
    pub registered: u64,
    /// Clients that are connected now.
    pub connected: u64,
    /// Clients dropped because they broke the protocol.
    pub dropped: u64,
    /// Launches, all entry points.
    pub launches: u64,
    /// As [`ClientStatus::charged_ms`] defines it.
    pub charged_ms: f64,
    /// As [`ClientStatus::measured_ms`] defines it.
    pub measured_ms: f64,
    /// Launches of which `measured_ms` is the sum.
    pub launches_measured: u64,
    /// Time launches waited, ms.
    pub waited_ms: f64,
    /// Launches that went ahead without a core.
    pub unscheduled: u64,
}

impl Totals {
    /// Adds to each field. Times add up as floating-point numbers, launches saturate.
    pub fn add(&mut self, other: Totals) {
        self.registered += other.registered;
        self.connected += other.connected;
        self.dropped += other.dropped;
        self.launches = self.launches.saturating_add(other.launches);
        self.charged_ms += other.charged_ms;
        self.measured_ms += other.measured_ms;
        self.launches_measured = self.launches_measured.saturating_add(other.launches_measured);
        self.waited_ms += other.waited_ms;
        self.unscheduled = self.unscheduled.saturating_add(other.unscheduled);
    }

    /// Raises sums to those of `other`: what a client's memory says may fall, and what was told may not.
    pub fn raise(&mut self, other: Totals) {
        self.launches = self.launches.max(other.launches);
        self.charged_ms = self.charged_ms.max(other.charged_ms);
        self.measured_ms = self.measured_ms.max(other.measured_ms);
        self.launches_measured = self.launches_measured.max(other.launches_measured);
        self.waited_ms = self.waited_ms.max(other.waited_ms);
        self.unscheduled = self.unscheduled.max(other.unscheduled);
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Departed {
    #[serde(flatten)]
    pub identity: Identity,
    /// How long it was connected, s.
    pub connected_s: f64,
    /// How it left; `dropped: ` and the reason if it broke the protocol.
    pub reason: String,
    /// Launches, all entry points.
    pub launches: u64,
    pub launches_by_entry_point: EntryPoints,
    pub decisions: Decisions,
    pub transformed: Transformed,
    /// Launches that went ahead without a core.
    pub unscheduled: u64,
    /// Time launches waited, ms.
    pub waited_ms: f64,
    /// As [`ClientStatus::charged_ms`] defines it.
    pub charged_ms: f64,
    /// As [`ClientStatus::measured_ms`] defines it.
    pub measured_ms: f64,
    /// Launches of which `measured_ms` is the sum.
    pub launches_measured: u64,
}

/// A program that was to be governed and is not.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UngovernedStatus {
    pub pid: u32,
    pub uid: u32,
    pub name: String,
    /// Why it is not governed.
    pub reason: String,
    /// The process is still there.
    pub running: bool,
    /// Since it was reported, s; 0 if it was found just now.
    pub reported_s: f64,
}
