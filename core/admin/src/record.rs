//! Answers about the decision log and the shadow.

use crate::words::{Word, required};
use serde::{Deserialize, Serialize};
use tally_decision_log::compare::{Comparison, Share};
use tally_decision_log::player::Parts;

/// How a decision log does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogStatus {
    /// A log is being written.
    pub recording: bool,
    /// Its file, or the last one's; `null` if there was none.
    #[serde(deserialize_with = "required")]
    pub file: Option<String>,
    /// When it began, seconds since the epoch.
    pub started_unix_s: u64,
    /// What policies see is described; from here on every call is in it.
    pub live: bool,
    pub records: u64,
    pub bytes: u64,
    /// Records that found no room between the threads.
    pub dropped: u64,
    /// Why it ended; `null` until then.
    #[serde(deserialize_with = "required")]
    pub ended: Option<String>,
    /// Why the file is not complete; `null` if it is, or is still being written.
    #[serde(deserialize_with = "required")]
    pub failed: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ShadowStatus {
    /// The shadow sees launches and answers them.
    pub running: bool,
    pub name: String,
    /// SHA-256 of its file.
    pub digest: String,
    pub path: String,
    /// The active policy that it is compared with now.
    pub active: String,
    /// Most that it may use of one CPU, percent.
    pub cpu_percent: f64,
    /// CPU time that its thread used, ms.
    pub cpu_ms: f64,
    /// Equal decisions of those compared, percent.
    pub agreement_percent: f64,
    /// Names of `comparison.matrix`'s rows (active) and columns (shadow).
    pub kinds: Vec<Word>,
    pub comparison: Comparison,
    /// What was not compared, and why.
    pub parts: Parts,
    /// Records that found no room between the threads.
    pub dropped: u64,
    /// Kinds of events that it subscribed to and the active policy did not: it gets
    /// none.
    pub events_missing: Vec<Word>,
    /// Kernels with the most differences.
    pub kernels: Vec<ShadowShare>,
    /// Clients with the most differences.
    pub clients: Vec<ShadowShare>,
    /// Why it ended; `null` until then.
    #[serde(deserialize_with = "required")]
    pub ended: Option<String>,
}

/// A kernel or a client on which the two differ.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShadowShare {
    pub name: String,
    pub id: u32,
    #[serde(flatten)]
    pub share: Share,
}

/// A shadow in [`Status`](crate::Status).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ShadowBrief {
    /// The shadow sees launches and answers them.
    pub running: bool,
    pub name: String,
    pub decisions: u64,
    /// Share of equal decisions, percent.
    pub agreement_percent: f64,
    /// Decisions left out for want of CPU time.
    pub skipped: u64,
    /// Records that found no room between the threads.
    pub dropped: u64,
    /// Why it ended; `null` until then.
    #[serde(deserialize_with = "required")]
    pub ended: Option<String>,
}

impl From<ShadowStatus> for ShadowBrief {
    fn from(s: ShadowStatus) -> Self {
        ShadowBrief {
            running: s.running,
            name: s.name,
            decisions: s.comparison.decisions,
            agreement_percent: s.agreement_percent,
            skipped: s.parts.skipped,
            dropped: s.dropped,
            ended: s.ended,
        }
    }
}
