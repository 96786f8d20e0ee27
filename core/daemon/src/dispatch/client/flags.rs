//! A launch's flags, from the client's bits to the engine's.

use tally_engine::policy::{forms_offered, launch_state};
use tally_ipc::layout::submission_flags;

const STATES: [(u32, u32); 3] = [
    (submission_flags::GRAPH, launch_state::GRAPH),
    (submission_flags::COOPERATIVE, launch_state::COOPERATIVE),
    (submission_flags::CLUSTERED, launch_state::CLUSTERED),
];

/// What a client says it can do is believed: one that lies about it holds back
/// its own launches only, and delays others no longer than a whole launch.
const FORMS: [(u32, u32); 4] = [
    (submission_flags::CAN_SLICE, forms_offered::SLICED),
    (submission_flags::CAN_PREEMPT, forms_offered::PREEMPTIBLE),
    (submission_flags::CAN_LIMIT, forms_offered::SM_LIMITED),
    (submission_flags::CAN_PREPARE, forms_offered::PREPARABLE),
];

/// A client's bits as the engine's.
fn translated<const N: usize>(flags: u32, bits: [(u32, u32); N]) -> u32 {
    let set = bits.iter().filter(|(theirs, _)| flags & theirs != 0);
    set.fold(0, |all, (_, ours)| all | ours)
}

/// What a launch is.
pub(super) fn state(flags: u32) -> u32 {
    translated(flags, STATES)
}

/// How the client says that it can run a launch.
pub(super) fn offered(flags: u32) -> u32 {
    translated(flags, FORMS)
}
