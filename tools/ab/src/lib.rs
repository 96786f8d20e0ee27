//! A/B tests of scheduling policies on one GPU.
//!
//! One GPU is shared, so two policies cannot be active side by side without touching
//! each other. They take turns: time is cut into blocks, blocks into pairs, and a coin
//! says which policy has the first block of each pair (a switchback experiment; Bojinov,
//! Simchi-Levi and Zhao, Management Science 69(7), 2023). The start of each block is a
//! washout that does not count.
//!
//! Pure: time and measurements come in, what to do next comes out. No I/O, no clock, no
//! threads; the daemon and the simulation that validates the statistics run the same code.
//!
//! Read next: [`experiment`] for the state machine, [`betting`] for why looking at the
//! result at any time is allowed, [`interval`] for the effect's bounds, and `docs/ab.md`.
#![forbid(unsafe_code)]

pub mod accident;
mod beside;
pub mod betting;
pub mod combine;
mod cost;
pub mod design;
pub mod experiment;
pub mod fairness;
pub mod guard;
pub mod interval;
mod ledger;
mod lengths;
mod load;
pub mod metric;
pub mod overall;
mod pace;
pub mod report;
pub mod sample;
pub mod simulate;
pub mod tail;
mod text;
mod traffic;
pub mod units;
pub mod verdict;

pub use design::{Arm, Plan, PlanError};
pub use experiment::{Action, Experiment, Reason};
pub use metric::Metric;
pub use report::Report;
pub use sample::{Sample, Unit};
pub use verdict::Verdict;
