//! A decode service of a language model: requests, continuous batching, and what its work takes.
//!
//! The service runs as `bench/gpu/decode_batch.py` does: at most one chunk of a prefill between two decode steps. A
//! step makes a token for every sequence of the batch, and is one CUDA graph; there is one for each of some sizes.
//! A prefill launches kernel by kernel.

mod batcher;
mod prefill;
mod requests;

pub(crate) use batcher::{Batcher, Work};
pub use prefill::{LAYERS, prefill};
pub use requests::{Request, Requests, RequestsError};

use crate::trace::{Kernel, Trace};

/// Sequences of a batch at most.
pub const BATCH_MAX: usize = 16;
/// Tokens of one chunk of a prefill.
pub const CHUNK_TOKENS: u32 = 512;
/// Tokens of a sequence with its answer, and of an answer. Longer ones are cut.
pub const SEQUENCE_TOKENS_MAX: u32 = 2_048;
pub const ANSWER_TOKENS_MAX: u32 = 1_024;
/// Batch sizes that have a graph, and the time of a step over that of the largest batch, thousandths: fitted to the
/// medians of an 8-billion-parameter model alone under three loads.
const STEPS_PERMILLE: [(usize, u64); 6] =
    [(1, 820), (2, 870), (4, 940), (8, 960), (12, 980), (BATCH_MAX, 1_000)];
/// GPU time of a chunk over that of [`prefill`], thousandths: for as many tokens as a chunk has at most, and for a
/// context of 1 024 tokens, to which they attend. Prefills alone took 22 to 33 ms in the median, and 36 ms in the tail.
const CHUNK_PERMILLE: u64 = 600;
const CONTEXT_PERMILLE: u64 = 500;
/// However few tokens: the weights are read. Assumed.
const CHUNK_PERMILLE_MIN: u64 = 300;
/// From the begin of a step or a chunk to its first launch, which the core does not see, and from its end to the next.
const LEAD_NS: u64 = 150_000;
pub(crate) const BETWEEN_NS: u64 = 80_000;

/// What makes a service one that decodes.
#[derive(Clone, Debug)]
pub struct Decode {
    pub requests: Requests,
    /// What a chunk of [`CHUNK_TOKENS`] launches; `None`: [`prefill`].
    pub prefill: Option<Trace>,
}

impl Decode {
    /// What a chunk of a prefill launches.
    pub(crate) fn prefill(&self) -> Trace {
        self.prefill.clone().unwrap_or_else(|| prefill(LAYERS))
    }
}

/// GPU time of a step of this batch over that of the largest one, thousandths.
pub(crate) fn step_permille(batch: usize) -> u64 {
    STEPS_PERMILLE.iter().find(|(size, _)| *size >= batch).map_or(1_000, |(_, permille)| *permille)
}

/// GPU time of a chunk of so many tokens over that of a whole one's trace, thousandths. `context`: of [`prefill`], how
/// long the context is with it.
pub(crate) fn chunk_permille(tokens: u32, context: Option<u32>) -> u64 {
    let of = |permille: u64| permille * u64::from(tokens) / u64::from(CHUNK_TOKENS);
    match context {
        Some(context) => {
            of(CHUNK_PERMILLE).max(CHUNK_PERMILLE_MIN)
                + CONTEXT_PERMILLE * u64::from(context) / 1_024
        }
        None => of(1_000).max(CHUNK_PERMILLE_MIN),
    }
}

/// Both as one trace: the step's launch is the first, those of the prefill follow.
pub(crate) fn joined(step: &Trace, prefill: &Trace) -> Trace {
    let later = |k: &Kernel| Kernel { launch: k.launch + 1, ..k.clone() };
    let kernels = step.kernels.iter().cloned().chain(prefill.kernels.iter().map(later)).collect();
    Trace { kernels, alone: [None; 2], lead_ns: LEAD_NS, ..step.clone() }
}
