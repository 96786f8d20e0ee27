//! Which forms of a kernel are worth considering, and what each is expected to
//! cost before it was ever measured (paper: section 4.2, the candidates of the
//! transparent profiler).
//!
//! Pure functions of the launch and the constants. [`super::profiler`] replaces the
//! estimates by what the core measured; [`super::choose`] picks.

use crate::settings::Settings;
use tally_sdk::{Decision, Launch, LaunchState};

/// The most forms considered of one kernel: whole, preemptible, three slice sizes,
/// one SM-limited. The core tells 16 apart.
pub const CANDIDATES_MAX: usize = 6;

/// Threads that an SM holds, on every architecture since sm_70 but sm_75 and the
/// small ones: there the largest slices are of two waves instead of one.
const SM_THREADS: u32 = 2_048;
/// Blocks that an SM holds.
const SM_BLOCKS: u32 = 32;
/// Shared memory of an SM (sm_90), and what each block takes of it besides its own.
const SM_SHARED_BYTES: u32 = 228 * 1_024;
const BLOCK_SHARED_BYTES: u32 = 1_024;
/// SMs of a GPU whose number is unknown.
const SMS_UNKNOWN: u32 = 128;
/// A cluster has at most so many blocks and is not divided.
const CLUSTER_BLOCKS: u32 = 16;
/// SMs of a limited launch come in steps of so many.
const SM_STEP: u32 = 8;

/// First estimates; the first launches in a form replace them. Between two slices:
/// a gate on the GPU and the start of the next grid.
const GATE_NS: u64 = 5_000;
/// A preemptible launch: its passes that do nothing.
const PREEMPTIBLE_NS: u64 = 8_000;
/// A preemptible launch, for each wave of blocks: looking at the flag.
const PREEMPTIBLE_WAVE_NS: u64 = 1_000;
/// An SM-limited launch: the way to its context and back.
const SM_LIMITED_NS: u64 = 5_000;

/// A form, and what it is expected to cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The decision for it.
    pub form: Decision,
    /// Slices that it makes of the grid; 1 for other forms.
    pub parts: u64,
    /// GPU time of a launch, undisturbed.
    pub time_ns: u64,
    /// How long high-priority work has to wait for it (paper: turnaround latency).
    pub turnaround_ns: u64,
}

/// A few candidates, whole first. Lives on the stack.
#[derive(Clone, Copy, Debug)]
pub struct Candidates {
    list: [Candidate; CANDIDATES_MAX],
    len: usize,
}

impl Candidates {
    fn push(&mut self, candidate: Candidate) {
        if let Some(slot) = self.list.get_mut(self.len) {
            *slot = candidate;
            self.len += 1;
        }
    }
}

impl std::ops::Deref for Candidates {
    type Target = [Candidate];
    fn deref(&self) -> &[Candidate] {
        &self.list[..self.len]
    }
}

impl std::ops::DerefMut for Candidates {
    fn deref_mut(&mut self) -> &mut [Candidate] {
        &mut self.list[..self.len]
    }
}

/// SMs of the GPU, or a guess.
pub fn sms(launch: &Launch) -> u32 {
    if launch.sm_count == 0 { SMS_UNKNOWN } else { launch.sm_count }
}

/// Whether a kernel has more blocks than can start at once even if an SM holds only
/// one: else there is no boundary to stop at (paper: the same condition).
pub fn has_boundaries(launch: &Launch) -> bool {
    launch.grid_blocks > u64::from(sms(launch))
        && !launch.state.contains(LaunchState::COOPERATIVE)
        && !launch.is_graph()
}

/// What can be done with a launch: whole, then preemptible, then slices from large
/// to small, then on some of the SMs.
pub fn candidates(launch: &Launch, settings: &Settings) -> Candidates {
    let whole_ns = launch.predicted_ns;
    let whole =
        Candidate { form: Decision::Run(0), parts: 1, time_ns: whole_ns, turnaround_ns: whole_ns };
    let mut all = Candidates { list: [whole; CANDIDATES_MAX], len: 1 };
    if has_boundaries(launch) {
        if launch.can_preempt() {
            all.push(preemptible(launch));
        }
        if launch.can_slice() {
            slices(launch, settings.turnaround_ns_max, &mut all);
        }
    }
    if let Some(sms) = limited_sms(launch, settings.reserve_sms) {
        all.push(Candidate {
            form: Decision::SmLimited(sms),
            parts: 1,
            time_ns: scaled(whole_ns, self::sms(launch).into(), sms.into())
                .saturating_add(SM_LIMITED_NS),
            turnaround_ns: settings.sm_limit_turnaround_ns,
        });
    }
    all
}

/// Blocks of the kernel that an SM holds at once, as far as a launch tells: registers
/// and static shared memory can make it fewer.
fn blocks_per_sm(launch: &Launch) -> u32 {
    let by_threads = SM_THREADS / launch.block_threads.clamp(1, SM_THREADS);
    let by_shared = SM_SHARED_BYTES / launch.shared_bytes.saturating_add(BLOCK_SHARED_BYTES).max(1);
    by_threads.min(by_shared).clamp(1, SM_BLOCKS)
}

/// Its turnaround, until measured, is that of one block an SM at a time: no kernel
/// does better. Hopeful on purpose: a form that looks good is used, and so measured.
fn preemptible(launch: &Launch) -> Candidate {
    let (blocks, sms) = (launch.grid_blocks, u64::from(sms(launch)));
    let waves = blocks.div_ceil(sms * u64::from(blocks_per_sm(launch)));
    let looking_ns = waves.saturating_mul(PREEMPTIBLE_WAVE_NS).saturating_add(PREEMPTIBLE_NS);
    Candidate {
        form: Decision::Preemptible,
        parts: 1,
        time_ns: launch.predicted_ns.saturating_add(looking_ns),
        turnaround_ns: scaled(launch.predicted_ns, sms, blocks).max(1),
    }
}

/// The two largest sizes whose slices should stay within the bound; if none does, the
/// three smallest that still give every SM a block (smaller ones take as long).
fn slices(launch: &Launch, bound_ns: u64, all: &mut Candidates) {
    let resident = u64::from(blocks_per_sm(launch));
    let sms = u64::from(sms(launch));
    let net_ns = bound_ns.saturating_sub(GATE_NS);
    let fitting = scaled(net_ns, launch.grid_blocks, launch.predicted_ns.max(1)) / sms;
    let whole_waves = |waves: u64| waves.saturating_mul(resident);
    let (first, second, third) = if fitting >= resident {
        // Whole waves, as far as is known, leave no SM idle.
        let waves = step_down(fitting / resident);
        let second = if waves > 1 {
            whole_waves(step_down(waves - 1))
        } else {
            step_down(resident.saturating_sub(1))
        };
        (whole_waves(waves), second, 0)
    } else if fitting > 0 {
        let first = step_down(fitting);
        (first, step_down(first - 1), 0)
    } else {
        (4, 2, 1)
    };
    for per_sm in [first, second, third] {
        if per_sm == 0 || (fitting == 0 && per_sm > resident) {
            continue;
        }
        let mut blocks = per_sm.saturating_mul(sms);
        if launch.state.contains(LaunchState::CLUSTERED) {
            let cluster = u64::from(CLUSTER_BLOCKS);
            blocks = (blocks / cluster).max(1) * cluster;
        }
        let Ok(argument) = u32::try_from(blocks) else { continue };
        let parts = launch.grid_blocks.div_ceil(blocks);
        // Rounded to clusters two sizes can be one.
        let is_new = all.iter().all(|c| c.form != Decision::Sliced(argument));
        if parts > 1 && is_new {
            let time_ns = launch.predicted_ns.saturating_add(parts.saturating_mul(GATE_NS));
            all.push(Candidate {
                form: Decision::Sliced(argument),
                parts,
                time_ns,
                turnaround_ns: time_ns / parts,
            });
        }
    }
}

/// All SMs but the reserve, in steps of 8; none if that would limit nothing (the
/// kernel has fewer blocks) or breaks it (a cooperative one must be resident at once).
fn limited_sms(launch: &Launch, reserve_sms: u32) -> Option<u32> {
    let kept_from = LaunchState::COOPERATIVE | LaunchState::GRAPH;
    if reserve_sms == 0 || !launch.can_limit() || launch.state.intersects(kept_from) {
        return None;
    }
    let sms = sms(launch).saturating_sub(reserve_sms) / SM_STEP * SM_STEP;
    (sms > 0 && launch.grid_blocks > sms.into()).then_some(sms)
}

/// The form of a CUDA graph (not in the paper, where graphs run outside of the scheduler). One that is short enough
/// runs whole. A longer one runs in parts of so many kernel nodes that each takes about `graph_part_us`: yielding
/// between two parts costs a launch, so the bound of single kernels would be too small.
pub fn graph_form(launch: &Launch, settings: &Settings) -> Decision {
    let nodes = launch.grid_blocks;
    let part_ns = settings.graph_part_ns.max(settings.turnaround_ns_max);
    let can_divide = launch.can_slice() || launch.can_prepare();
    if !can_divide || nodes < 2 || launch.predicted_ns <= part_ns {
        return Decision::Run(0);
    }
    // Few sizes, so that a time that wavers does not make new parts each time.
    let nodes_of_part = step_down(scaled(nodes, part_ns, launch.predicted_ns)).max(1);
    match u32::try_from(nodes_of_part) {
        Ok(count) if nodes_of_part < nodes => Decision::Sliced(count),
        _ => Decision::Run(0),
    }
}

/// The largest of 1, 2, 3, 4, 6, 8, 12, 16, ... that is not above `n`; 0 of 0. Few
/// sizes, so that a mean that wavers does not make a new form each time.
pub fn step_down(n: u64) -> u64 {
    let Some(exponent) = n.checked_ilog2() else { return 0 };
    let power = 1 << exponent;
    let between = power + power / 2;
    if between <= n { between } else { power }
}

/// `value * by / of`, the largest u64 if it is more than that.
pub fn scaled(value: u64, by: u64, of: u64) -> u64 {
    let of = of.max(1);
    // Nearly always: a division of 128 bits is a loop in WebAssembly.
    if let Some(product) = value.checked_mul(by) {
        return product / of;
    }
    let scaled = u128::from(value) * u128::from(by) / u128::from(of);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}
