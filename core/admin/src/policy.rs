//! Answers about policies: the active one, and those that were active.

use crate::Source;
use crate::words::{Word, required, words};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

words! {
    /// Why a policy was loaded.
    pub enum LoadedBecause {
        /// It was loaded at start, from `policy.file`.
        Start = "start",
        /// Somebody asked for it.
        Asked = "asked",
        /// Its file, or its configuration's, changed.
        FileChanged = "file-changed",
        /// Somebody asked to go back to it.
        Rollback = "rollback",
        /// The active one was disabled; this one was the last good one.
        Fallback = "fallback",
        /// It was disabled and is tried again.
        Retry = "retry",
        /// An A/B test had it active, and left it so.
        Experiment = "experiment",
    }
}

words! {
    /// Why a policy was unloaded.
    pub enum UnloadedBecause {
        /// Another was asked for.
        Replaced = "replaced",
        FileChanged = "file-changed",
        /// Somebody asked to go back to an earlier one.
        RolledBack = "rolled-back",
        /// It was disabled for failing too often.
        Disabled = "disabled",
    }
}

/// A [`Source`] in an answer: what a newer core adds to it is ignored, where a request is refused.
#[derive(Deserialize)]
#[serde(remote = "Source")]
struct AnsweredSource {
    file: PathBuf,
    #[serde(deserialize_with = "required")]
    config_file: Option<PathBuf>,
}

fn answered_source<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Source>, D::Error> {
    #[derive(Deserialize)]
    struct Some(#[serde(with = "AnsweredSource")] Source);
    Ok(Option::deserialize(from)?.map(|Some(source)| source))
}

/// What became of the state that a policy was offered when it was started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", content = "why", rename_all = "kebab-case")]
pub enum Restored {
    /// There was no state to offer.
    #[default]
    NotOffered,
    /// The policy does not export `state`, and starts without it.
    NoInterface,
    /// The policy took the state over.
    Accepted,
    /// The policy said why it cannot use the state, and started without it.
    Refused(String),
    /// The policy's `restore` failed, and a new instance started without the state.
    Failed(String),
}

impl Restored {
    /// The word in JSON.
    pub fn outcome(&self) -> &'static str {
        match self {
            Restored::NotOffered => "not-offered",
            Restored::NoInterface => "no-interface",
            Restored::Accepted => "accepted",
            Restored::Refused(_) => "refused",
            Restored::Failed(_) => "failed",
        }
    }
}

impl std::fmt::Display for Restored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Restored::NotOffered => f.write_str("none was offered"),
            Restored::NoInterface => f.write_str("the policy keeps none"),
            Restored::Accepted => f.write_str("accepted"),
            Restored::Refused(why) => write!(f, "refused: {why}"),
            Restored::Failed(why) => write!(f, "failed: {why}"),
        }
    }
}

/// The active policy, as it was loaded.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Active {
    /// Its file and configuration; `null`: the built-in rule serves.
    #[serde(deserialize_with = "answered_source")]
    pub source: Option<Source>,
    pub name: String,
    /// SHA-256 of its file; empty for the built-in rule.
    pub digest: String,
    /// Id of the trusted key that signed its file; `null` if nothing vouches for it.
    #[serde(deserialize_with = "required")]
    pub signed_by: Option<String>,
    /// Rises by one with each policy put active; the first is 1.
    pub generation: u64,
    /// When, seconds since the epoch.
    pub loaded_at_unix_s: u64,
    /// How long compiling, starting and `init` took, ms.
    pub load_ms: f64,
    pub loaded_because: LoadedBecause,
    /// The generation that it is again, if it was put back; else its own.
    pub same_as_generation: u64,
    /// What became of the state that it was offered.
    pub restored: Restored,
}

/// The active policy with its figures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PolicyReport {
    #[serde(flatten)]
    pub active: Active,
    /// Capabilities that it has been granted.
    pub granted: Vec<Word>,
    /// Capabilities that it imports: all of them are granted, or it would not have been loaded.
    pub needs: Vec<Word>,
    /// Why it decided as it did, by its own table, and how often.
    pub reasons: Vec<ReasonStatus>,
    /// Decisions asked of all policies of this run of the core, also while one is disabled.
    pub decides: u64,
    /// Calls of event functions, all policies of this run of the core.
    pub events: u64,
    /// Decisions by the built-in rule because the policy failed, holds included.
    pub built_in_rule_decisions: u64,
    /// Faults of all policies of this run of the core.
    pub faults: Faults,
    /// The same number as `faults.trap`, at the top level for alerts.
    pub traps: u64,
    /// The same number as `faults.overrun`, at the top level for alerts.
    pub overruns: u64,
    /// The last fault's message.
    #[serde(deserialize_with = "required")]
    pub last_fault: Option<String>,
    /// Disabled after too many faults; the built-in rule serves.
    pub disabled: bool,
    /// Times it was started anew after a fault.
    pub respawns: u64,
    /// Counters that the policy defined itself.
    pub counters: BTreeMap<String, u64>,
    /// Gauges that the policy defined itself.
    pub gauges: BTreeMap<String, i64>,
    /// Log lines of it that were dropped for coming too fast.
    pub log_dropped: u64,
    /// Loads that failed since the core started.
    pub load_failures: u64,
    /// The last failed load since a policy was put active.
    #[serde(deserialize_with = "required")]
    pub last_load_error: Option<LoadFailure>,
    /// Faults of the policy that are not forgotten yet.
    pub recent_faults: u32,
    /// The last policy that was disabled; not necessarily the active one.
    #[serde(deserialize_with = "required")]
    pub last_disabled: Option<LastDisabled>,
    /// How long changes of policy kept decisions waiting.
    pub swap_pause_us: SwapPauseUs,
    /// How long failed calls, and those after them, took.
    pub fault_cost_us: FaultCostUs,
}

/// A reason that a policy gives for decisions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReasonStatus {
    pub reason: u8,
    /// What the policy calls it; empty if it never said.
    pub text: String,
    /// Decisions that named this reason.
    pub decisions: u64,
}

/// Calls of one policy that failed, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultCounts {
    /// Traps: panics, wild accesses, stack overflow.
    pub trap: u64,
    /// Too much fuel, time or data in one call.
    pub overrun: u64,
    /// It grew beyond `memory_bytes`.
    pub memory: u64,
    /// Answers that make no sense.
    pub nonsense: u64,
    /// Best-effort work held while there was nothing to hold it for.
    pub stall: u64,
}

impl FaultCounts {
    pub fn total(&self) -> u64 {
        self.trap + self.overrun + self.memory + self.nonsense + self.stall
    }
}

/// Calls that failed, and calls that were not made because the policy was disabled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Faults {
    #[serde(flatten)]
    pub failed: FaultCounts,
    pub disabled: u64,
}

impl Faults {
    /// Each kind's name and count.
    pub fn by_kind(&self) -> [(&'static str, u64); 6] {
        let FaultCounts { trap, overrun, memory, nonsense, stall } = self.failed;
        [
            ("trap", trap),
            ("overrun", overrun),
            ("memory", memory),
            ("nonsense", nonsense),
            ("stall", stall),
            ("disabled", self.disabled),
        ]
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadFailure {
    /// What was to be loaded.
    #[serde(deserialize_with = "AnsweredSource::deserialize")]
    pub source: Source,
    /// Why it was not; complete.
    pub message: String,
    /// When, seconds since the epoch.
    pub at_unix_s: u64,
}

/// How a policy was disabled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disabled {
    /// Its last fault: `trap`, `overrun`, `memory`, `nonsense` or `stall`; `start` if it could not be put back;
    /// `unknown`.
    pub kind: Word,
    /// That in full; of a trap with its backtrace.
    pub message: String,
    /// When, seconds since the epoch.
    pub at_unix_s: u64,
}

/// The last policy that was disabled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastDisabled {
    pub generation: u64,
    #[serde(flatten)]
    pub how: Disabled,
}

/// How long changes of policy kept decisions waiting. A change has two steps: the old policy saves its state; the
/// new one takes over. Its pause is the longer of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SwapPauseUs {
    pub count: u64,
    /// Pause of the latest change, us.
    pub last: f64,
    /// Median of all, us.
    pub p50: f64,
    /// 99th percentile of all, us.
    pub p99: f64,
    /// Longest of them, us.
    pub max: f64,
    /// 99th percentile of the first steps alone, us.
    pub save_p99: f64,
    /// 99th percentile of the second steps alone, us.
    pub take_over_p99: f64,
}

/// How long failed calls of policies, and those after them, took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FaultCostUs {
    /// Such calls, all policies of this run of the core.
    pub calls: u64,
    /// The longest time from when the core looked at a launch until such a call about it was over, us.
    pub max: f64,
}

/// One policy's time active: an element of the answer to
/// [`Request::PolicyHistory`](crate::Request::PolicyHistory).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyRecord {
    pub generation: u64,
    pub name: String,
    /// SHA-256 of its file; empty for the built-in rule.
    pub digest: String,
    /// Id of the trusted key that signed its file; `null` if nothing vouches for it.
    #[serde(deserialize_with = "required")]
    pub signed_by: Option<String>,
    /// Its file and configuration; `null`: the built-in rule.
    #[serde(deserialize_with = "answered_source")]
    pub source: Option<Source>,
    pub loaded_because: LoadedBecause,
    /// The generation that had this component and configuration first in a row of
    /// rollbacks; itself if it is no rollback.
    pub same_as_generation: u64,
    /// When, seconds since the epoch.
    pub loaded_at_unix_s: u64,
    /// What became of the state that it was offered.
    pub restored: Restored,
    /// Why it was unloaded; `null` while it is active.
    #[serde(deserialize_with = "required")]
    pub unloaded_because: Option<UnloadedBecause>,
    /// When, seconds since the epoch.
    #[serde(deserialize_with = "required")]
    pub unloaded_at_unix_s: Option<u64>,
    /// How it was disabled, if it was.
    #[serde(deserialize_with = "required")]
    pub disabled: Option<Disabled>,
    /// Launches it decided; of the active one, see the status.
    pub decides: u64,
    /// Events it took; of the active one, see the status.
    pub events: u64,
    /// Its faults; of the active one, see the status.
    pub faults: FaultCounts,
    /// Its most recent fault.
    #[serde(deserialize_with = "required")]
    pub last_fault: Option<LastFault>,
    /// It can be put back: `tallyctl policy rollback --to`.
    pub kept: bool,
}

/// The most recent fault of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastFault {
    /// `trap`, `overrun`, `memory`, `nonsense` or `stall`.
    pub kind: Word,
    /// For people; for a trap, with its backtrace.
    pub message: String,
    /// When, on the core's clock.
    pub at_ns: u64,
}
