//! What a prefill launches. Not recorded: made of the shapes of Llama 3.1's 8 billion parameters, for 512 tokens.

use crate::trace::{Kernel, Pace, Trace};

/// Layers of the model.
pub const LAYERS: usize = 32;
/// From one launch to the next: PyTorch's own part, less than the GPU's.
const LAUNCH_NS: u64 = 20_000;
const LEAD_NS: u64 = 50_000;

/// A kind of kernel: name, blocks, threads of a block, registers, shared memory in bytes, ns.
type Kind = (&'static str, u32, u32, u32, u32, u64);

/// Matrix products at 600 TFLOP/s, the others at the memory's bandwidth.
const NORM: Kind = ("rms_norm", 512, 512, 32, 0, 5_000);
const QKV: Kind = ("nvjet_qkv", 192, 384, 168, 200 << 10, 45_000);
const SMALL: Kind = ("elementwise_small", 1_024, 128, 32, 0, 4_000);
const GATHER: Kind = ("index_elementwise", 2_048, 128, 32, 0, 6_000);
const ATTENTION: Kind = ("fmha_cutlassF_bf16", 256, 128, 168, 80 << 10, 320_000);
const OUT: Kind = ("nvjet_out", 128, 384, 168, 200 << 10, 30_000);
const UP: Kind = ("nvjet_up", 896, 384, 168, 200 << 10, 200_000);
const GATE: Kind = ("elementwise_gate", 7_168, 128, 32, 0, 9_000);
const DOWN: Kind = ("nvjet_down", 128, 384, 168, 200 << 10, 100_000);
const LAYER: [(Kind, usize); 12] = [
    (NORM, 1),
    (QKV, 1),
    (SMALL, 8),
    (GATHER, 6),
    (ATTENTION, 1),
    (SMALL, 1),
    (OUT, 1),
    (SMALL, 1),
    (NORM, 1),
    (UP, 1),
    (GATE, 2),
    (DOWN, 1),
];
/// The last token's row only: it reads the weights.
const HEAD: Kind = ("gemv_head", 1_002, 128, 64, 0, 250_000);

/// One chunk through so many layers.
pub fn prefill(layers: usize) -> Trace {
    let layer = LAYER.iter().flat_map(|(kind, count)| std::iter::repeat_n(*kind, *count));
    let all: Vec<Kind> =
        (0..layers).flat_map(|_| layer.clone()).chain([NORM, HEAD, SMALL]).collect();
    let (mut kernels, mut end_ns) = (Vec::with_capacity(all.len()), 0);
    for (launch, (name, blocks, threads, regs, smem, dur_ns)) in all.into_iter().enumerate() {
        let start_ns = end_ns.max(launch as u64 * LAUNCH_NS);
        end_ns = start_ns + dur_ns;
        kernels.push(Kernel {
            name: name.into(),
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            regs,
            smem,
            start_ns,
            dur_ns,
            gap_ns: 0,
            pace: Pace::AfterLaunch(LAUNCH_NS),
            launch: launch as u32,
        });
    }
    let name = format!("llama8b_prefill_{layers}");
    Trace { name, kernels, period_ns: end_ns, recorded: 1, lead_ns: LEAD_NS, alone: [None; 2] }
}

#[cfg(test)]
mod tests {
    use super::super::{CHUNK_TOKENS, chunk_permille};
    use super::*;

    #[test]
    fn a_chunk_takes_what_it_took_alone() {
        // From the first chunk of a prompt to the last one of the longest: 22 to 36 ms, the median and p95 alone.
        let (launched_ns, seen_ns) = prefill(LAYERS).lone_ns();
        let took_ms =
            |context| seen_ns * chunk_permille(CHUNK_TOKENS, Some(context)) / 1_000_000_000;
        assert!(launched_ns < seen_ns * chunk_permille(CHUNK_TOKENS, Some(CHUNK_TOKENS)) / 1_000);
        assert_eq!((took_ms(CHUNK_TOKENS), took_ms(1_536)), (22, 35));
    }
}
