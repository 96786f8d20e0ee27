//! Who left, and sums over all who came.

use super::{charged_ms, decisions, entry_points, transformed};
use crate::dispatch::snapshot::ClientNumbers;
use tally_admin::{Class, Departed, Identity, Totals};

/// More launches than a program makes in a second: what its memory says is believed up to that.
const LAUNCHES_PER_S_MAX: f64 = 1e7;

/// The sums over a client that was connected for so long.
pub fn totals(class: Class, connected_s: f64, n: &ClientNumbers) -> Totals {
    let launches_max = (LAUNCHES_PER_S_MAX * (connected_s + 1.0)) as u64;
    // Of high priority its program says how long it was busy.
    let charged_ms_max = if class == Class::High { 1e3 * (connected_s + 1.0) } else { f64::MAX };
    Totals {
        registered: 1,
        connected: 1,
        dropped: 0,
        launches: n.shim.launches.min(launches_max),
        charged_ms: charged_ms(class, n).min(charged_ms_max),
        measured_ms: n.stats.measured_ns as f64 / 1e6,
        launches_measured: n.stats.measured,
        waited_ms: n.stats.waited_ns as f64 / 1e6,
        unscheduled: n.shim.unscheduled.min(launches_max),
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
