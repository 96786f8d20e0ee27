//! What a simulation found. Everything in it is of virtual time, so that it is the same
//! each time.

use crate::gpu::{SharingMode, Transformable};
use serde::Serialize;

/// What a simulation found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of this structure's JSON.
    pub schema: u32,
    /// Length of the window in which requests arrive, s.
    pub seconds: f64,
    /// Seed of the random arrivals.
    pub seed: u64,
    /// How the two programs shared the GPU.
    pub sharing: SharingMode,
    /// Which kernels could be transformed.
    pub transformable: Transformable,
    /// No engine: the GPU as its driver shares it.
    pub unscheduled: bool,
    pub high_priority: High,
    pub best_effort: Option<BestEffort>,
    /// The training's launches, as they were decided.
    pub decisions: Option<Decisions>,
    /// Launches simulated, of both.
    pub launches: u64,
    /// Kernels simulated, of both; a graph has many.
    pub kernels: u64,
    /// Changes of the GPU from one program's context to the other's.
    pub context_changes: u64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct High {
    pub trace: String,
    pub arrived: u64,
    pub served: u64,
    /// Not served by the end; in the queued times with their wait so far.
    pub unserved: u64,
    /// Time of one request alone, ms.
    pub solo_ms: f64,
    /// One in a hundred takes so long alone, as far as that was measured.
    pub solo_p99_ms: f64,
    /// What the inference needs of a request, ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slo_ms: Option<f64>,
    /// Share of the requests that arrived whose service kept it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub within: Option<f64>,
    /// From the start of a request's service to its end.
    pub service_p50_ms: f64,
    pub service_p99_ms: f64,
    pub service_p50_over_solo: f64,
    pub service_p99_over_solo: f64,
    /// From a request's arrival to its end.
    pub queued_p50_ms: f64,
    pub queued_p99_ms: f64,
    /// 99th percentile from arrival to end if the inference has the GPU alone.
    pub solo_queued_p99_ms: f64,
    pub queued_p99_over_solo: f64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct BestEffort {
    pub trace: String,
    /// Rate over its rate alone, in the window of arrivals.
    pub share: f64,
    pub iterations: u64,
    pub launched: u64,
    pub done: u64,
    /// Launches under way at the end.
    pub in_flight: u64,
}

/// The training's launches, as they were decided.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Decisions {
    /// Calls of the policy.
    pub asked: u64,
    pub whole: u64,
    /// Started under a lease, without asking the policy.
    pub leased: u64,
    pub sliced: u64,
    pub preemptible: u64,
    pub sm_limited: u64,
    /// In a form that was not on offer, so whole.
    pub degraded: u64,
    pub held: u64,
    /// Launches held at least once.
    pub launches_held: u64,
    /// Waits for room in the window.
    pub window_full: u64,
    /// Between asking and answer, of all launches.
    pub waited_ms: f64,
    /// Sum of the launches' measured GPU times.
    pub gpu_ms: f64,
    /// Decided by the built-in rule, because the policy failed.
    pub built_in_rule: u64,
    /// Times the training was asked to yield.
    pub yields: u64,
    /// Launches that yielded when asked.
    pub launches_yielded: u64,
}

/// Smallest value that this share of all is not above; 0 of none. Sorts.
pub fn percentile(all: &mut [u64], share: f64) -> u64 {
    all.sort_unstable();
    let rank = (all.len() as f64 * share).ceil() as usize;
    all.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

pub(crate) fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// A ratio; 0 over nothing.
pub(crate) fn over(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { a as f64 / b as f64 }
}
