//! The scheduling state machine: clients, holds, windows, profiles.
//!
//! Pure: no I/O, no clock, no threads. Time and events come in, actions go out,
//! so that the daemon and the simulator run the same code. It must never block,
//! never read a clock and never call anything but the [`policy::Policy`] it was
//! given.
//!
//! Read next: [`engine`] for the states a launch goes through, [`policy`] for
//! what a policy sees.
#![forbid(unsafe_code)]

pub mod client;
mod clients;
mod conversions;
pub mod engine;
pub mod policy;
pub mod profile;
mod units;

pub use client::{ClientStats, Measured, Submission};
pub use engine::{
    Action, BuiltInRule, ClientState, ClientWork, EndedUnits, Engine, EngineConfig, OpenUnit,
    PolicyStats, WaitsFor, WorkDone,
};
