//! Random streams of what happens to a core, as `proptest` strategies: a stream that a
//! policy fails on is shrunk to the shortest like it.

use proptest::prelude::*;
use tally_engine::policy::{forms_offered, launch_state};

/// Kernels that the core knows; a stream also launches some that it does not.
pub const KERNELS: u32 = 48;
/// All of `launch-state` but what follows from what happens.
const STATES: u32 = launch_state::GRAPH | launch_state::COOPERATIVE | launch_state::CLUSTERED;

/// One thing that happens. Clients, kernels and launches are picked by a number, modulo
/// how many there are then, so that a stream stays one when steps are taken out of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Join {
        high: bool,
        /// How many labels it has.
        labels: u8,
        /// Length of its name, bytes.
        name: u8,
    },
    Leave(u8),
    /// High-priority work appears or ends.
    High {
        busy: bool,
    },
    /// Time passes; timers fire.
    Advance(u64),
    /// The next timer fires, if there is one.
    NextTimer,
    /// The picked client submits a launch.
    Launch(Shape),
    /// A launch that was granted ends.
    Done {
        pick: u8,
        /// GPU time of the launch, as measured.
        measured_ns: u64,
    },
    /// A launch ends that this policy never saw: it took over from another.
    StrangeDone {
        /// The kernel that ran, by number.
        kernel: u32,
        /// GPU time of the launch, as measured.
        measured_ns: u64,
    },
}

/// A launch, as far as it does not follow from what happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    pub pick: u8,
    /// Number of the kernel; at or beyond [`KERNELS`]: one that the core has no id for.
    pub kernel: u32,
    /// Bits of the contract's `launch-state`.
    pub state: u32,
    /// Bits of the contract's `forms-offered`.
    pub offered: u32,
    pub grid_blocks: u64,
    pub block_threads: u32,
    pub shared_bytes: u32,
    /// How long it has waited.
    pub waited_ns: u64,
    /// Predicted GPU time of the client's unfinished launches.
    pub in_flight_ns: u64,
    /// Predicted, if the kernel was never measured.
    pub predicted_ns: u64,
    pub stream: u32,
    pub sm_count: u32,
}

/// Times as they occur, and the ends of their range.
fn time_ns() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => Just(0u64),
        8 => 1..100_000u64,
        4 => 100_000..50_000_000u64,
        1 => 50_000_000..10_000_000_000u64,
        1 => Just(u64::MAX),
        1 => any::<u64>(),
    ]
}

/// Passing time: the clock of a core does not run for centuries.
fn advance_ns() -> impl Strategy<Value = u64> {
    prop_oneof![6 => 1..200_000u64, 3 => 200_000..20_000_000u64, 1 => 20_000_000..5_000_000_000u64]
}

fn kernel() -> impl Strategy<Value = u32> {
    prop_oneof![12 => 0..KERNELS, 1 => Just(u32::MAX)]
}

fn shape() -> impl Strategy<Value = Shape> {
    let grid =
        prop_oneof![4 => 1..100_000u64, 1 => Just(1u64), 1 => Just(u64::MAX), 1 => any::<u64>()];
    let threads = prop_oneof![6 => 1..=1024u32, 1 => any::<u32>()];
    let shared = prop_oneof![6 => Just(0u32), 2 => 0..200_000u32, 1 => any::<u32>()];
    let sms = prop_oneof![8 => Just(132u32), 1 => Just(0u32), 1 => Just(1u32), 1 => any::<u32>()];
    let flags = prop_oneof![
        3 => Just((0u32, 0u32)),
        2 => Just((0, forms_offered::SLICED | forms_offered::PREEMPTIBLE)),
        2 => Just((0, forms_offered::PREPARABLE)),
        1 => Just((launch_state::GRAPH, forms_offered::SLICED)),
        1 => Just((STATES, forms_offered::ALL)),
        3 => any::<(u32, u32)>().prop_map(|(state, forms)| (state & STATES, forms & forms_offered::ALL)),
    ];
    (
        (any::<u8>(), kernel(), flags, grid, threads, shared),
        (time_ns(), time_ns(), time_ns(), 0..64u32, sms),
    )
        .prop_map(|((pick, kernel, flags, grid_blocks, block_threads, shared_bytes), rest)| {
            let (waited_ns, in_flight_ns, predicted_ns, stream, sm_count) = rest;
            Shape {
                pick,
                kernel,
                state: flags.0,
                offered: flags.1,
                grid_blocks,
                block_threads,
                shared_bytes,
                waited_ns,
                in_flight_ns,
                predicted_ns,
                stream,
                sm_count,
            }
        })
}

pub fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (any::<bool>(), 0..16u8, any::<u8>())
            .prop_map(|(high, labels, name)| Step::Join { high, labels, name }),
        1 => any::<u8>().prop_map(Step::Leave),
        3 => any::<bool>().prop_map(|busy| Step::High { busy }),
        4 => advance_ns().prop_map(Step::Advance),
        2 => Just(Step::NextTimer),
        20 => shape().prop_map(Step::Launch),
        5 => (any::<u8>(), time_ns())
            .prop_map(|(pick, measured_ns)| Step::Done { pick, measured_ns }),
        1 => (kernel(), time_ns())
            .prop_map(|(kernel, measured_ns)| Step::StrangeDone { kernel, measured_ns }),
    ]
}

/// A stream of up to 200 steps.
pub fn stream() -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(step(), 1..200)
}
