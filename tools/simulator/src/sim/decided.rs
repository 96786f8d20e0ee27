//! How the best-effort programs' launches were decided.

use crate::report::{Decisions, ms};
use std::ops::Range;
use tally_engine::Engine;

/// Of the programs in these lanes.
pub fn decisions(engine: &Engine, lanes: Range<usize>) -> Decisions {
    let mut all = Decisions { asked: engine.policy_stats().decides, ..Decisions::default() };
    for lane in lanes {
        let stats = engine.client_stats(lane as u32).unwrap_or_default();
        all.whole += stats.run;
        all.leased += stats.leased;
        all.sliced += stats.sliced;
        all.preemptible += stats.preemptible;
        all.sm_limited += stats.sm_limited;
        all.degraded += stats.degraded;
        all.held += stats.held;
        all.launches_held += stats.launches_held;
        all.window_full += stats.window_full;
        all.waited_ms += ms(stats.waited_ns);
        all.gpu_ms += ms(stats.charged_ns);
        all.built_in_rule += stats.built_in_rule;
        all.yields += stats.yields;
        all.launches_yielded += stats.launches_yielded;
    }
    all
}
