//! Who left, and sums over all who came.

use super::{charged_ms, decisions, entry_points, transformed};
use crate::dispatch::snapshot::ClientNumbers;
use tally_admin::{Class, Departed, Identity, Totals};

/// The sums over one connected client.
pub fn totals(class: Class, n: &ClientNumbers) -> Totals {
    Totals {
        registered: 1,
        connected: 1,
        dropped: 0,
        launches: n.shim.launches,
        charged_ms: charged_ms(class, n),
        measured_ms: n.stats.measured_ns as f64 / 1e6,
        launches_measured: n.stats.measured,
        waited_ms: n.stats.waited_ns as f64 / 1e6,
        unscheduled: n.shim.unscheduled,
    }
}

/// A client that left; `n` is missing if the dispatch thread dropped it itself.
pub fn departed(
    identity: Identity,
    connected_s: f64,
    reason: String,
    n: Option<&ClientNumbers>,
) -> Departed {
    let who = Departed { identity, connected_s, reason, ..Departed::default() };
    let Some(n) = n else { return who };
    Departed {
        launches: n.shim.launches,
        launches_by_entry_point: entry_points(&n.shim),
        decisions: decisions(n),
        transformed: transformed(n),
        unscheduled: n.shim.unscheduled,
        waited_ms: n.stats.waited_ns as f64 / 1e6,
        charged_ms: charged_ms(who.identity.class, n),
        measured_ms: n.stats.measured_ns as f64 / 1e6,
        launches_measured: n.stats.measured,
        ..who
    }
}
