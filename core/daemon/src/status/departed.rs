//! Who left, and sums over all who came.

use super::{Decisions, Identity, Transformed, charged_ms, entry_points};
use crate::dispatch::snapshot::ClientNumbers;
use serde::Serialize;
use std::collections::BTreeMap;

/// Sums over clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    /// Clients that registered.
    pub registered: u64,
    /// Of them, connected now.
    pub connected: u64,
    /// Launches, all entry points.
    pub launches: u64,
    pub charged_ms: f64,
    pub measured_ms: f64,
    /// Launches of which `measured_ms` is the sum.
    pub launches_measured: u64,
    /// Time launches waited, ms.
    pub waited_ms: f64,
    /// Launches that went ahead without a core.
    pub unscheduled: u64,
}

impl Totals {
    /// Of one client.
    pub fn of(class: &str, n: &ClientNumbers) -> Self {
        Totals {
            registered: 1,
            connected: 1,
            launches: n.shim.launches,
            charged_ms: charged_ms(class, n),
            measured_ms: n.stats.measured_ns as f64 / 1e6,
            launches_measured: n.stats.measured,
            waited_ms: n.stats.waited_ns as f64 / 1e6,
            unscheduled: n.shim.unscheduled,
        }
    }

    /// Count another one in.
    pub fn add(&mut self, other: Totals) {
        self.registered += other.registered;
        self.connected += other.connected;
        self.launches = self.launches.saturating_add(other.launches);
        self.charged_ms += other.charged_ms;
        self.measured_ms += other.measured_ms;
        self.launches_measured = self.launches_measured.saturating_add(other.launches_measured);
        self.waited_ms += other.waited_ms;
        self.unscheduled = self.unscheduled.saturating_add(other.unscheduled);
    }
}

/// A client that left.
#[derive(Clone, Debug, Serialize)]
pub struct Departed {
    /// Who it was.
    #[serde(flatten)]
    pub identity: Identity,
    /// How long it was connected, s.
    pub connected_s: f64,
    /// How it left.
    pub reason: String,
    /// Launches, all entry points.
    pub launches: u64,
    /// By entry point.
    pub launches_by_entry_point: BTreeMap<&'static str, u64>,
    /// What was decided.
    pub decisions: Decisions,
    /// How launches were transformed.
    pub transformed: Transformed,
    /// Launches that went ahead without a core.
    pub unscheduled: u64,
    /// Time launches waited, ms.
    pub waited_ms: f64,
    pub charged_ms: f64,
    pub measured_ms: f64,
    /// Launches of which `measured_ms` is the sum.
    pub launches_measured: u64,
}

impl Departed {
    /// Put together; `n` is missing if the dispatch thread dropped it itself.
    pub fn new(
        identity: Identity,
        connected_s: f64,
        reason: String,
        n: Option<&ClientNumbers>,
    ) -> Self {
        Departed {
            connected_s,
            reason,
            launches: n.map_or(0, |n| n.shim.launches),
            launches_by_entry_point: n.map(|n| entry_points(&n.shim)).unwrap_or_default(),
            decisions: n.map(Decisions::new).unwrap_or_default(),
            transformed: n.map(Transformed::new).unwrap_or_default(),
            unscheduled: n.map_or(0, |n| n.shim.unscheduled),
            waited_ms: n.map_or(0.0, |n| n.stats.waited_ns as f64 / 1e6),
            charged_ms: n.map_or(0.0, |n| charged_ms(identity.class, n)),
            measured_ms: n.map_or(0.0, |n| n.stats.measured_ns as f64 / 1e6),
            launches_measured: n.map_or(0, |n| n.stats.measured),
            identity,
        }
    }
}
