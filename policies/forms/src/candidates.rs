//! Which forms of a kernel are worth considering, and what each is expected to
//! cost before it was ever measured (paper: section 4.2, the candidates of the
//! transparent profiler).
//!
//! Pure functions of the launch and the constants. [`super::profiler`] replaces the
//! estimates by what the core measured; [`super::choose`] picks.

use crate::Settings;
use std::ops::{Deref, DerefMut};
use tally_sdk::grid::{scaled, step_down};
use tally_sdk::{Decision, Launch};

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
    /// Time and turnaround are measured, or enough was tried to measure them.
    pub is_settled: bool,
}

impl Candidate {
    fn estimated(form: Decision, time_ns: u64, turnaround_ns: u64) -> Self {
        Candidate { form, parts: 1, time_ns, turnaround_ns, is_settled: false }
    }
}

/// Whole, preemptible, three sizes of slices, and on some of the SMs. The core tells 16 forms of a kernel apart.
const CANDIDATES_MAX: usize = 6;

/// The candidates of one launch, whole first. On the stack: decisions wait for whatever allocates.
#[derive(Clone, Copy, Debug)]
pub struct Candidates {
    all: [Candidate; CANDIDATES_MAX],
    count: usize,
}

impl Candidates {
    fn of(whole: Candidate) -> Self {
        Candidates { all: [whole; CANDIDATES_MAX], count: 1 }
    }

    /// One more than there may be is left out.
    fn push(&mut self, candidate: Candidate) {
        if let Some(place) = self.all.get_mut(self.count) {
            *place = candidate;
            self.count += 1;
        }
    }
}

impl Deref for Candidates {
    type Target = [Candidate];

    fn deref(&self) -> &[Candidate] {
        &self.all[..self.count]
    }
}

impl DerefMut for Candidates {
    fn deref_mut(&mut self) -> &mut [Candidate] {
        &mut self.all[..self.count]
    }
}

/// What can be done with a launch: whole, then preemptible, then at most three sizes of slices from large
/// to small, then on some of the SMs.
pub fn candidates(launch: &Launch, settings: &Settings) -> Candidates {
    let whole_ns = launch.predicted_ns;
    let mut all = Candidates::of(Candidate::estimated(Decision::Run(0), whole_ns, whole_ns));
    if launch.has_boundaries() {
        if launch.can_preempt() {
            all.push(preemptible(launch));
        }
        if launch.can_slice() {
            slices(launch, settings.turnaround_ns_max, &mut all);
        }
    }
    if let Some(sms) = launch.sms_without(settings.reserve_sms) {
        let time_ns = scaled(whole_ns, launch.sms().into(), sms.into());
        all.push(Candidate::estimated(
            Decision::SmLimited(sms),
            time_ns.saturating_add(SM_LIMITED_NS),
            settings.sm_limit_turnaround_ns,
        ));
    }
    all
}

/// Its turnaround, until measured, is that of one block an SM at a time: no kernel
/// does better. Hopeful on purpose: a form that looks good is used, and so measured.
fn preemptible(launch: &Launch) -> Candidate {
    let (blocks, sms) = (launch.grid_blocks, u64::from(launch.sms()));
    let waves = blocks.div_ceil(sms * u64::from(launch.blocks_per_sm()));
    let looking_ns = waves.saturating_mul(PREEMPTIBLE_WAVE_NS).saturating_add(PREEMPTIBLE_NS);
    let time_ns = launch.predicted_ns.saturating_add(looking_ns);
    let turnaround_ns = scaled(launch.predicted_ns, sms, blocks).max(1);
    Candidate::estimated(Decision::Preemptible, time_ns, turnaround_ns)
}

/// The two largest sizes whose slices should stay within the bound; if none does, the
/// three smallest that still give every SM a block (smaller ones take as long).
fn slices(launch: &Launch, bound_ns: u64, all: &mut Candidates) {
    let sms = u64::from(launch.sms());
    for per_sm in slice_sizes(launch, bound_ns) {
        let blocks = launch.slice_blocks(per_sm.saturating_mul(sms));
        let Ok(argument) = u32::try_from(blocks) else { continue };
        let form = Decision::Sliced(argument);
        let parts = launch.grid_blocks.div_ceil(blocks);
        // Rounded to clusters two sizes can be one.
        if parts > 1 && all.iter().all(|c| c.form != form) {
            let time_ns = launch.predicted_ns.saturating_add(parts.saturating_mul(GATE_NS));
            all.push(Candidate { parts, ..Candidate::estimated(form, time_ns, time_ns / parts) });
        }
    }
}

/// Sizes of slices worth considering, in blocks of an SM.
fn slice_sizes(launch: &Launch, bound_ns: u64) -> impl Iterator<Item = u64> {
    let resident = u64::from(launch.blocks_per_sm());
    let net_ns = bound_ns.saturating_sub(GATE_NS);
    let sms = u64::from(launch.sms());
    let fitting = scaled(net_ns, launch.grid_blocks, launch.predicted_ns.max(1)) / sms;
    let sizes = match fitting {
        0 => [4, 2, 1].map(|size| if size > resident { 0 } else { size }),
        _ if fitting < resident => {
            let first = step_down(fitting);
            [first, step_down(first - 1), 0]
        }
        // Whole waves, as far as is known, leave no SM idle.
        _ => {
            let waves = step_down(fitting / resident);
            let second = match step_down(waves - 1) {
                0 => step_down(resident - 1),
                fewer => fewer.saturating_mul(resident),
            };
            [waves.saturating_mul(resident), second, 0]
        }
    };
    sizes.into_iter().filter(|size| *size > 0)
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
