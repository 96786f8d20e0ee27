//! What `tallyctl status` and the metrics show of a policy.

use crate::Restored;
use crate::reasons::ReasonStatus;
use std::collections::BTreeMap;
use std::path::PathBuf;
use tally_engine::policy::FaultKind;

/// A policy's figures since it was loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyStatus {
    /// The name of its file, without the ending.
    pub name: String,
    /// Its file; none if it was loaded from memory.
    pub path: Option<PathBuf>,
    /// SHA-256 of the file, in hexadecimal.
    pub digest: String,
    /// Id of the trusted key that signed the file; none if nothing vouches for it.
    pub signed_by: Option<String>,
    /// Capabilities that it has been granted.
    pub granted: Vec<&'static str>,
    /// Capabilities that it imports.
    pub needs: Vec<&'static str>,
    /// What it is told, by the interfaces that it exports.
    pub subscriptions: Vec<&'static str>,
    /// How long loading took: reading, compiling, `init`.
    pub load_ms: f64,
    /// Launches decided; calls of `decide` that failed do not count.
    pub decides: u64,
    /// Events handled; calls that failed do not count.
    pub events: u64,
    pub faults: FaultCounts,
    pub last_fault: Option<LastFault>,
    /// What became of the state that it was offered when it was started.
    pub restored: Restored,
    /// Faults that count: those since it last went long without one.
    pub recent_faults: u32,
    /// Times it was started anew after a fault.
    pub respawns: u64,
    /// Disabled after too many faults.
    pub disabled: bool,
    /// The reasons that it named or gave.
    pub reasons: Vec<ReasonStatus>,
    /// Counters that the policy defined itself.
    pub counters: BTreeMap<String, u64>,
    /// Gauges that the policy defined itself.
    pub gauges: BTreeMap<String, i64>,
    /// Log lines dropped for coming too fast.
    pub log_dropped: u64,
}

/// Calls that failed, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

    pub(crate) fn count(&mut self, kind: FaultKind) {
        match kind {
            FaultKind::Trap => self.trap += 1,
            FaultKind::Overrun => self.overrun += 1,
            FaultKind::Memory => self.memory += 1,
            FaultKind::Nonsense => self.nonsense += 1,
            FaultKind::Stall => self.stall += 1,
            // The outcome of faults, not one.
            FaultKind::Disabled => {}
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastFault {
    /// `trap`, `overrun`, `memory`, `nonsense` or `stall`.
    pub kind: &'static str,
    /// For people; for a trap, with its backtrace.
    pub message: String,
    /// When, on the core's clock.
    pub at_ns: u64,
}

/// The word for a kind of fault in status and logs.
pub fn kind_name(kind: FaultKind) -> &'static str {
    match kind {
        FaultKind::Trap => "trap",
        FaultKind::Overrun => "overrun",
        FaultKind::Memory => "memory",
        FaultKind::Nonsense => "nonsense",
        FaultKind::Stall => "stall",
        FaultKind::Disabled => "disabled",
    }
}
