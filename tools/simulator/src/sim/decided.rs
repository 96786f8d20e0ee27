//! How the training's launches were decided.

use crate::device::LOW;
use crate::report::{Decisions, ms};
use tally_engine::Engine;

pub fn decisions(engine: &Engine) -> Decisions {
    let stats = engine.client_stats(LOW as u32).unwrap_or_default();
    Decisions {
        asked: engine.policy_stats().decides,
        whole: stats.run,
        leased: stats.leased,
        sliced: stats.sliced,
        preemptible: stats.preemptible,
        sm_limited: stats.sm_limited,
        degraded: stats.degraded,
        held: stats.held,
        launches_held: stats.launches_held,
        window_full: stats.window_full,
        waited_ms: ms(stats.waited_ns),
        gpu_ms: ms(stats.charged_ns),
        built_in_rule: stats.built_in_rule,
        yields: stats.yields,
        launches_yielded: stats.launches_yielded,
    }
}
