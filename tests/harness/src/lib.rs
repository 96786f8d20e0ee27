//! What drives the pieces together, for tests across processes and `cargo xtask`. Scenes, in which a core and
//! clients are started, are those of [`tally_demo`].
//!
//! - [`jobs`]: the programs of the demonstration, and the probe, in the sizes that tests use;
//! - [`admin`]: admin requests with the files that they name;
//! - [`reload`]: thousands of changes of policy while programs run;
//! - [`containment`]: what a policy that fails costs, measured;
//! - [`traps`]: A/B tests of policies that harm programs;
//! - [`components`]: components that hurt whoever compiles them;
//! - [`chaos`]: random faults at random parties, and a checker of the results.
//!
//! The harness never talks to the driver, and to the core only by the programs that a
//! user would use ([`reload`] and [`containment`] use the admin socket itself, to be quick).
#![forbid(unsafe_code)]

pub mod admin;
pub mod chaos;
pub mod components;
pub mod containment;
pub mod jobs;
pub mod reload;
pub mod traps;

pub use tally_demo::{Artefacts, Class, Device, Process, Scene};
pub use tally_demo::{artefacts, process, scene, status};
