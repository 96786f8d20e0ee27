//! The launches of the transformed forms.

use crate::cuda::{
    CuResult, LaunchAttribute, OUT_OF_MEMORY, Ptr, STREAM_CAPTURE_ERRORS, SUCCESS, driver,
};
use crate::host::{self, log};
use crate::issue::{Again, issue, parameters};
use crate::launch::{KernelArguments, PlannedLaunch};
use crate::prepare::by_offset;
use crate::progress::Progress;
use crate::transformed::{self, Transformed};
use crate::watch::{self, Open, PARTS_MAX, record};
use crate::{gate, kernels, sm_limit};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
// Larger grids are sliced by offset, where there is that form: a part of the prelude's issues the whole grid, and each
// of its blocks claims itself. Slices by offset cannot be rescued.
use tally_contract::limits::WHOLE_GRID_BLOCKS_MAX as WHOLE_GRID_MAX;
use tally_ipc::ring::Answer;
use tally_ipc::wait::now_ns;
use tally_rewriter::ControlBlock;

/// A preemptible launch gets one more part for so much expected time, us: it can yield once for each but the last.
const US_PER_PART: u32 = 800;
/// What a block takes that finds it must not run, ns: a part that yields issues every block that is left.
const EXIT_NS: u64 = 2;
/// A kernel that is sliced without a policy's number of blocks gets one slice for so much expected time, us: a fixed
/// length, whichever policy is active, as the contract says of `preemptible`.
const US_PER_SLICE: u32 = 32;
/// Parts of a preemptible launch, at least: one that yields, one that does not.
const PARTS_MIN: u32 = 2;
/// Parts of a preemptible launch of unknown length.
const PARTS_UNKNOWN: u32 = 4;

/// Make a kernel's launch as decided. `None`: nothing was issued, it must run whole.
pub fn launch(
    planned: &PlannedLaunch<'_>,
    arguments: &KernelArguments,
    answer: Answer,
) -> Option<CuResult> {
    let (result, counter) = host::alone(|| issue_as(planned, arguments, answer))?;
    counter.fetch_add(1, Relaxed);
    Some(result)
}

/// Issue a kernel's launch as decided. `None`: nothing was issued.
fn issue_as<'a>(
    planned: &PlannedLaunch<'a>,
    arguments: &KernelArguments,
    answer: Answer,
) -> Option<(CuResult, &'a AtomicU64)> {
    let counters = &planned.client.counters;
    Some(match answer {
        Answer::Whole => return None,
        Answer::Slice(blocks) => (sliced(planned, arguments, blocks)?, &counters.sliced),
        Answer::Preemptible(us) => {
            let slices = short_slices(planned, arguments, us);
            match slices.and_then(|blocks| sliced(planned, arguments, blocks)) {
                Some(result) => (result, &counters.sliced),
                None => (preemptible(planned, arguments, us)?, &counters.preemptible),
            }
        }
        Answer::SmLimited(sms) => {
            (sm_limit::launch(planned, arguments, sms)?, &counters.sm_limited)
        }
    })
}

/// How a kernel of a graph is launched by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// So that it can yield; it is expected to take this long, us (0: unknown).
    Preemptible(u32),
    /// In slices of this many blocks.
    Slices(u32),
}

/// The form that a launch like this would get; `None`: whole. No policy is asked: see
/// [`graphs::solo`](crate::graphs::solo).
pub fn way(
    index: usize,
    transformed: &Transformed,
    launch: &KernelArguments,
) -> Option<(Way, u32)> {
    let blocks =
        transformed::blocks(launch.grid).filter(|n| *n >= transformed.wanted_blocks.div_ceil(2))?;
    if !transformed.keeps_occupancy(launch, blocks) {
        return None;
    }
    let us = u64::from(transformed.wanted_us) * u64::from(blocks)
        / u64::from(transformed.wanted_blocks.max(1));
    let us = u32::try_from(us).unwrap_or(u32::MAX);
    if blocks <= WHOLE_GRID_MAX {
        return Some((Way::Preemptible(us), us));
    }
    // With so many blocks each part would cost too much.
    transformed.original()?;
    by_offset(transformed, index, launch)?;
    Some((Way::Slices(blocks.div_ceil(short_parts(us))), us))
}

/// Blocks of each slice of a launch that is to be preemptible (expected to take so long, us) and whose blocks
/// are too short for that. `None`: they are not, or it cannot be sliced by offset (yet).
fn short_slices(planned: &PlannedLaunch<'_>, arguments: &KernelArguments, us: u32) -> Option<u32> {
    let blocks = transformed::blocks(arguments.grid).filter(|n| is_mostly_exits(*n, us))?;
    let transformed = kernels::transformed(planned.kernel as usize)?;
    let is_one = transformed::cluster(arguments, transformed)?.iter().all(|n| *n <= 1);
    is_one.then(|| by_offset(transformed, planned.kernel as usize, arguments))??;
    Some(blocks.div_ceil(short_parts(us)))
}

/// Whether the blocks of a launch that yields take longer to exit than half of the launch does to run: it would
/// yield sooner by running on. Of blocks that take longer each, a slice would leave SMs without one for most of its
/// time.
fn is_mostly_exits(blocks: u32, us: u32) -> bool {
    blocks > WHOLE_GRID_MAX && us > 0 && u64::from(blocks) * EXIT_NS > u64::from(us) * 1_000 / 2
}

/// Slices of at most [`US_PER_SLICE`], if there can be so many.
fn short_parts(us: u32) -> u32 {
    us.div_ceil(US_PER_SLICE).clamp(PARTS_MIN, PARTS_MAX as u32)
}

/// Launch a kernel by itself that came out of a graph. `None`: nothing was issued.
pub(crate) fn solo(
    planned: &PlannedLaunch<'_>,
    arguments: &KernelArguments,
    way: Way,
) -> Option<CuResult> {
    match way {
        Way::Preemptible(us) => preemptible(planned, arguments, us),
        Way::Slices(blocks) => sliced(planned, arguments, blocks),
    }
}

/// A transformed launch in the making.
struct Parts<'a> {
    planned: &'a PlannedLaunch<'a>,
    arguments: &'a KernelArguments,
    transformed: &'a Transformed,
    stream: Ptr,
    buffer: Vec<u8>,
    events: watch::Events,
    issued: usize,
}

impl<'a> Parts<'a> {
    fn new(
        planned: &'a PlannedLaunch<'a>,
        arguments: &'a KernelArguments,
        transformed: &'a Transformed,
        parts: usize,
    ) -> Option<Self> {
        if !transformed.allows_shared(arguments.shared_bytes, arguments.function) {
            return None;
        }
        let buffer = parameters(arguments, transformed)?;
        let events = watch::events(parts)?;
        let stream = planned.stream as Ptr;
        let parts = Parts { planned, arguments, transformed, stream, buffer, events, issued: 0 };
        record(&parts.events, 0, stream);
        Some(parts)
    }

    /// Have the next part wait until nobody is asked to yield.
    fn gate(&self) -> bool {
        let waits = gate::wait_in(self.planned.stream);
        record(&self.events, 2 * self.issued, self.stream);
        waits
    }

    fn part(&mut self, function: usize, grid: [u32; 3], control: &ControlBlock) -> CuResult {
        let at = self.transformed.control_offset;
        self.buffer[at..].copy_from_slice(&control.bytes());
        let result = issue(function, self.arguments, grid, self.stream, &self.buffer);
        if result == SUCCESS {
            record(&self.events, 2 * self.issued + 1, self.stream);
            self.issued += 1;
        }
        result
    }

    /// Under way: watch it. `again`: the control block of a launch of everything.
    fn opened(self, sliced: bool, us: u32, epoch2: u32, again: Option<ControlBlock>) {
        let PlannedLaunch { client: _, slot, ticket, number, kernel, .. } = *self.planned;
        let progress = Progress::new(self.issued, sliced, us, again.is_some(), now_ns());
        let again = again.map(|control| Again {
            function: self.transformed.function,
            grid: self.arguments.grid,
            block: self.arguments.block,
            shared_bytes: self.arguments.shared_bytes,
            attributes: self.arguments.attributes().iter().map(plain).collect(),
            parameters: self.buffer,
            control_offset: self.transformed.control_offset,
            control,
        });
        watch::opened(Open {
            ticket,
            kernel: kernel as usize,
            slot,
            number,
            events: self.events,
            progress,
            epoch2,
            again,
            launches_yielded: false,
            helping: None,
        });
    }
}

fn plain(attribute: &LaunchAttribute) -> LaunchAttribute {
    LaunchAttribute::new(attribute.id, attribute.value)
}

/// Blocks claimed before the first part's epoch are another launch's.
fn claims(planned: &PlannedLaunch<'_>, parts: u32) -> Option<(u64, u32)> {
    // One more epoch than parts: a rescue's.
    Some((
        gate::table(planned.slot, planned.stream)?,
        gate::epochs(planned.slot, parts + 1, planned.stream)?,
    ))
}

fn preemptible(
    planned: &PlannedLaunch<'_>,
    arguments: &KernelArguments,
    us: u32,
) -> Option<CuResult> {
    let transformed = kernels::transformed(planned.kernel as usize)?;
    let cluster = transformed::cluster(arguments, transformed)?;
    transformed::blocks(arguments.grid).filter(|n| *n <= gate::TABLE_WORDS)?;
    if planned.slot >= gate::NOTICES {
        return None;
    }
    let parts = preemptible_parts(us);
    let (table, epoch2) = claims(planned, parts)?;
    let (flag, never) = gate::flags();
    let notice = gate::notice_address(planned.slot);
    let mut all = Parts::new(planned, arguments, transformed, parts as usize)?;
    let block = |part: u32, flag: u64, mask: u32| {
        let epoch = epoch2 + 2 * part;
        ControlBlock::preemptible(table, flag, mask, notice, epoch, epoch2, cluster)
    };
    for part in 0..parts {
        // What cannot be waited for cannot be stopped.
        let waits = (part == 0 && !planned.follows) || all.gate();
        let last = part + 1 == parts || !waits;
        let control = if last { block(part, never, 0) } else { block(part, flag, gate::FLAG_MASK) };
        let result = all.part(transformed.function, arguments.grid, &control);
        if result != SUCCESS {
            return failed(
                all,
                epoch2,
                result,
                transformed.function,
                arguments.grid,
                &block(parts, never, 0),
            );
        }
        if last {
            break;
        }
    }
    all.opened(false, us, epoch2, Some(block(parts, never, 0)));
    Some(SUCCESS)
}

/// The driver has refused a part. If it was the first, the launch is made whole. After that some blocks may
/// have run, and the program must not be told that none has: `rest`, one launch of `grid` with all that is
/// left, is made at once. If the driver refuses that too, for the same reason as the part, the context is lost.
/// The program then gets the error from its next call, as after a whole launch, or from this one if no other
/// call reports it.
fn failed(
    mut all: Parts<'_>,
    epoch2: u32,
    result: CuResult,
    function: usize,
    grid: [u32; 3],
    rest: &ControlBlock,
) -> Option<CuResult> {
    if all.issued == 0 {
        watch::give_back(all.events);
        return None;
    }
    // There is room for one event more only if this was not the last part.
    let result = if all.issued < PARTS_MAX {
        log!("a part of a launch was refused (CUDA error {result}): the rest goes in one piece");
        all.part(function, grid, rest)
    } else {
        result
    };
    let result = if is_in_error(&all, result) { SUCCESS } else { result };
    // Nothing can be done about it: only watched for its end.
    all.opened(true, 0, epoch2, None);
    Some(result)
}

/// Whether the driver refuses a launch because the context is in error: then it refuses everything else, too.
fn is_in_error(all: &Parts<'_>, result: CuResult) -> bool {
    let record = |f: unsafe extern "C" fn(Ptr, Ptr) -> CuResult| {
        // The last that there is: if it stands behind a part already, it stands behind it still.
        let last = *all.events.iter().rfind(|event| **event != 0)?;
        // SAFETY: an event of ours; the program's stream.
        Some(unsafe { f(last as Ptr, all.stream) })
    };
    is_lasting(result) && driver().event_record.and_then(record) == Some(result)
}

/// Whether a refusal may be a context's that is in error, and not a shortage, or a capture's.
fn is_lasting(result: CuResult) -> bool {
    result != SUCCESS && result != OUT_OF_MEMORY && !STREAM_CAPTURE_ERRORS.contains(&result)
}

/// How a grid is sliced.
#[derive(Clone, Copy, Debug)]
struct Slices {
    /// Blocks of each but the last.
    size: u32,
    parts: u32,
}

impl Slices {
    /// Divides `blocks` (fewer than 2^31) into slices of about `size`. Clusters of `unit` blocks stay whole.
    fn of(blocks: u32, size: u32, unit: u32) -> Self {
        let size = size.clamp(blocks.div_ceil(PARTS_MAX as u32), blocks);
        let size = size.next_multiple_of(unit);
        Slices { size, parts: blocks.div_ceil(size) }
    }

    /// The first block of a slice, and the one behind its last.
    fn bounds(self, part: u32, blocks: u32) -> (u32, u32) {
        (part * self.size, (part + 1).saturating_mul(self.size).min(blocks))
    }
}

/// Parts of a preemptible launch that is expected to take so long (0: unknown).
fn preemptible_parts(us: u32) -> u32 {
    match us {
        0 => PARTS_UNKNOWN,
        us => (us / US_PER_PART + 1).clamp(PARTS_MIN, PARTS_MAX as u32),
    }
}

fn sliced(planned: &PlannedLaunch<'_>, arguments: &KernelArguments, size: u32) -> Option<CuResult> {
    let transformed = kernels::transformed(planned.kernel as usize)?;
    let cluster = transformed::cluster(arguments, transformed)?;
    let blocks = transformed::blocks(arguments.grid)?;
    if planned.slot >= gate::NOTICES {
        return None;
    }
    let unit = cluster.iter().product::<u32>().max(1);
    let Slices { size, parts } = Slices::of(blocks, size, unit);
    let is_large = unit == 1 && blocks > WHOLE_GRID_MAX;
    let by_offset =
        is_large.then(|| by_offset(transformed, planned.kernel as usize, arguments)).flatten();
    if by_offset.is_none() && blocks > gate::TABLE_WORDS {
        return None;
    }
    let (table, epoch2) = claims(planned, parts)?;
    let (_, never) = gate::flags();
    let mut all = Parts::new(planned, arguments, transformed, parts as usize)?;
    let claimed = |part: u32, lo: u32, hi: u32| {
        let epoch = epoch2 + 2 * part;
        let whole = ControlBlock::preemptible(table, never, 0, 0, epoch, epoch2, cluster);
        ControlBlock { lo, hi, ..whole }
    };
    // What cannot be held at a gate cannot be helped: the next slice would overtake the help.
    let mut helpable = by_offset.is_none();
    for part in 0..parts {
        let (lo, hi) = Slices { size, parts }.bounds(part, blocks);
        if part > 0 || planned.follows {
            helpable &= all.gate();
        }
        let result = match by_offset {
            Some(function) => {
                let control = ControlBlock::by_offset(lo, arguments.grid);
                all.part(function, [hi - lo, 1, 1], &control)
            }
            None => all.part(transformed.function, arguments.grid, &claimed(part, lo, hi)),
        };
        if result != SUCCESS {
            let left = [blocks - lo, 1, 1];
            return match by_offset {
                Some(function) => {
                    let rest = ControlBlock::by_offset(lo, arguments.grid);
                    failed(all, epoch2, result, function, left, &rest)
                }
                None => {
                    let rest = claimed(parts, 0, u32::MAX);
                    failed(all, epoch2, result, transformed.function, arguments.grid, &rest)
                }
            };
        }
    }
    if by_offset.is_some() {
        planned.client.counters.sliced_by_offset.fetch_add(1, Relaxed);
    }
    let again = helpable.then(|| claimed(parts, 0, u32::MAX));
    all.opened(true, 0, epoch2, again);
    Some(SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_cover_every_block_once(
            blocks in prop_oneof![2_u32..5_000, 2_u32..1 << 31, Just((1_u32 << 31) - 1)],
            size in prop_oneof![0_u32..200, any::<u32>(), Just(u32::MAX)],
            unit in (0_u32..5).prop_map(|n| 1 << n),
        ) {
            let slices = Slices::of(blocks, size, unit);
            prop_assert!((1..=PARTS_MAX as u32).contains(&slices.parts));
            let mut next = 0;
            for part in 0..slices.parts {
                let (lo, hi) = slices.bounds(part, blocks);
                prop_assert_eq!(lo, next, "no gap, no overlap");
                prop_assert!(hi > lo && lo % unit == 0, "a cluster is in one slice");
                next = hi;
            }
            prop_assert_eq!(next, blocks);
        }

        #[test]
        fn a_preemptible_launch_has_a_part_that_yields_and_one_that_does_not(us: u32) {
            let parts = preemptible_parts(us);
            prop_assert!((PARTS_MIN..=PARTS_MAX as u32).contains(&parts));
        }
    }

    #[test]
    fn longer_launches_can_yield_more_often() {
        let parts = [1, 400, 4_000, 40_000, u32::MAX].map(preemptible_parts);
        assert_eq!(parts, [2, 2, 6, 32, 32]);
        assert_eq!(preemptible_parts(0), PARTS_UNKNOWN);
    }

    #[test]
    fn only_launches_of_many_short_blocks_go_in_short_slices() {
        // A vector addition, a kernel of blocks of 50 us, one of long blocks, one that was not measured.
        let kernels = [(65_536, 66), (12_672, 310), (262_144, 40_000), (65_536, 0)];
        assert_eq!(kernels.map(|(n, us)| is_mostly_exits(n, us)), [true, false, false, false]);
        assert!(!is_mostly_exits(WHOLE_GRID_MAX, 1), "a GPU may run all of these at once");
        assert_eq!([0, 20, 64, 66, 400, 2_000].map(short_parts), [2, 2, 2, 3, 13, 32]);
    }
}
