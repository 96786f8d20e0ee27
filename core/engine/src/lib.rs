//! The scheduling state machine: clients, holds, windows, profiles.
//!
//! Pure: no I/O, no clock, no threads. Time and events come in, actions go out,
//! so that the daemon and the simulator run the same code. It must never block,
//! never read a clock and never call anything but the [`policy::Policy`] it was
//! given.
#![forbid(unsafe_code)]

pub mod policy;
pub mod profile;
