//! What a simulation found. Everything in it is of virtual time, so that it is the same
//! each time.

use crate::gpu::{SharingMode, Transformable};
use serde::Serialize;

#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of this structure's JSON.
    pub schema: u32,
    /// Length of the window in which requests arrive, s.
    pub seconds: f64,
    /// Seed of the random arrivals.
    pub seed: u64,
    /// How the programs shared the GPU.
    pub sharing: SharingMode,
    /// Which kernels could be transformed.
    pub transformable: Transformable,
    /// No engine: the GPU as its driver shares it.
    pub unscheduled: bool,
    /// The service; left out if there is none, or several.
    #[serde(skip_serializing_if = "High::is_nobody")]
    pub high_priority: High,
    /// The services, if there are several. [`Report::each_service`] has also one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<High>,
    /// The best-effort programs, all together.
    pub best_effort: Option<BestEffort>,
    /// Each of them, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fairness: Option<Fairness>,
    /// Best-effort programs that have a floor.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub floors: Vec<Floor>,
    /// The best-effort launches, as they were decided.
    pub decisions: Option<Decisions>,
    /// Launches simulated, of all programs.
    pub launches: u64,
    /// Kernels simulated, of all programs; a graph has many.
    pub kernels: u64,
    /// Changes of the GPU from one program's context to another's.
    pub context_changes: u64,
}

impl Report {
    /// The services in their order, however many there are.
    pub fn each_service(&self) -> &[High] {
        match self.high_priority.is_nobody() {
            true => &self.services,
            false => std::slice::from_ref(&self.high_priority),
        }
    }
}

/// What became of a service's requests.
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
    /// Its objective for requests, ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slo_ms: Option<f64>,
    /// Its objective for tokens, each of which is a request, ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<f64>,
    /// Share of the requests that arrived whose service kept it; of a service that decodes, of its steps.
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
    /// 99th percentile from arrival to end if the service has the GPU alone.
    pub solo_queued_p99_ms: f64,
    pub queued_p99_over_solo: f64,
    /// Of a service that decodes. What is said of a request's service is then of a decode step as its program times it,
    /// and what is said from arrival to end, of a request from its arrival to its last token; nothing of a backlog.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode: Option<Decoded>,
}

/// What a decode service did in the window.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Decoded {
    pub steps: u64,
    /// Tokens of a step.
    pub batch_mean: f64,
    /// Of steps: the first token of a request comes from its prefill.
    pub tokens_per_s: f64,
    /// The same with the GPU alone.
    pub solo_tokens_per_s: f64,
    pub step_p95_ms: f64,
    /// Between two tokens of a request, with prefills in between.
    pub gap_p50_ms: f64,
    pub gap_p99_ms: f64,
    /// Chunks of prompts.
    pub prefills: u64,
    pub prefill_p50_ms: f64,
}

impl High {
    /// There was no service, or there were several.
    pub fn is_nobody(&self) -> bool {
        self.trace.is_empty()
    }
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct BestEffort {
    /// Its name; of several, with `+` between them.
    pub trace: String,
    /// Rate over its rate alone, in the window of arrivals. Of several, the sum.
    pub share: f64,
    pub iterations: u64,
    pub launched: u64,
    pub done: u64,
    /// Launches under way at the end.
    pub in_flight: u64,
}

impl BestEffort {
    pub(crate) fn with(self, other: Self) -> Self {
        BestEffort {
            trace: format!("{} + {}", self.trace, other.trace),
            share: self.share + other.share,
            iterations: self.iterations + other.iterations,
            launched: self.launched + other.launched,
            done: self.done + other.done,
            in_flight: self.in_flight + other.in_flight,
        }
    }
}

/// How the best-effort programs shared the GPU, in the window of arrivals.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Fairness {
    /// Jain's index of GPU time over fair GPU time: 1 if all got what is fair.
    pub jain: f64,
    pub clients: Vec<Shared>,
}

/// What one of several best-effort programs got.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Shared {
    pub trace: String,
    pub weight: u32,
    /// Rate over its rate alone.
    pub share: f64,
    /// GPU time: what its kernels take alone, as far as they came, and its pauses between two of them.
    pub gpu_ms: f64,
    /// GPU time that the core charged it for. Under MPS kernels that run side by side are each charged all the time.
    pub charged_ms: f64,
    /// `gpu_ms` over that of all best-effort programs.
    pub gpu_share: f64,
    /// Its weight over the sum of the weights.
    pub weight_share: f64,
    /// What `gpu_share` should be: by weight, but nobody gets more than it uses alone.
    pub fair_share: f64,
}

/// A best-effort program that has a floor, in the window of arrivals.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Floor {
    pub trace: String,
    /// Least share of GPU time that it is to get of the time in which it has work.
    pub min_share: f64,
    /// The share that it was charged for. Under MPS it is charged all the time in which its kernels run.
    pub had: f64,
}

/// The best-effort launches, as they were decided.
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
    /// Times a best-effort program was asked to yield.
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
