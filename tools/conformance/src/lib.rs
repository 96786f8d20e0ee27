//! Does a policy behave? A suite for any component, whatever it is written in.
//!
//! [`check`] loads the component through `tally-wasm-host`, as the core would, and
//! puts it through made-up events and launches ([`stream`]) on a core in miniature
//! ([`harness`]). It judges manners, not merit: a policy that schedules badly passes
//! (`tallyctl sim` judges that), one that traps, starves, leaks or answers nonsense
//! does not. `tallyctl policy check` shows the outcome.
//!
//! | check | fails if the policy |
//! | --- | --- |
//! | `loads` | is no component of the contract, needs what it was not granted, or refuses its configuration |
//! | `no-trap` | panics or traps |
//! | `fuel` | uses more than a call may; warns above half of it |
//! | `memory` | wants more than it may have, or keeps growing over many like calls |
//! | `sane-answers` | answers what makes no sense, or asks for more at once than a call may; warns of forms that are not on offer and clients that are not there |
//! | `high-priority` | (warns only) holds a high-priority launch |
//! | `no-starvation` | keeps holding a best-effort launch though high priority is idle |
//! | `determinism` | answers the same events otherwise the second time |
//! | `fair-by-weight` | (only if that is asked for; else for information) gives best-effort clients GPU time not by their weights |
//! | `floor` | (likewise) gives a client with a floor less than that beside busy high-priority work |
//! | `objectives` | (only if that is asked for; else for information) has two services miss their objectives beside a training, in the simulator |
//! | `state` | (if it has that interface) saves like histories differently, does not take back its own, takes another's, or fails on a damaged one |
//!
//! All of it is virtual time and made from a seed: the same component, configuration and
//! seed give the same report on any machine.
#![forbid(unsafe_code)]

mod checks;
mod fairness;
mod floor;
pub mod harness;
mod objectives;
mod report;
mod state;
mod steady;
pub mod stream;
mod subject;

pub use checks::{check, check_loaded};
pub use report::{Check, Fuel, Outcome, Report};
pub use subject::{Instance, Subject, Wasm};
pub use tally_wasm_host::{Capabilities, Capability};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Seed of the random streams and of the other random inputs.
    pub seed: u64,
    /// Random streams that a policy is put through.
    pub streams: u32,
    /// Calls in each of the five phases of the check for growing memory.
    pub steady_calls: u32,
    /// Best-effort clients must get GPU time by their weights and floors; otherwise how they do is only told.
    pub fair: bool,
    /// Services must keep their objectives beside a training; otherwise how many requests do is only told.
    pub objectives: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { seed: 1, streams: 64, steady_calls: 20_000, fair: false, objectives: false }
    }
}
