//! Everything that starts the pieces together: used by the tests in this crate
//! and by `cargo xtask demo`.
//!
//! - [`artefacts::Artefacts`]: where the built programs are, and what to do if not;
//! - [`scene::Scene`]: a scratch folder with one device and one socket, in which a
//!   core and clients are started; nothing of it outlives it;
//! - [`jobs`]: the programs of this crate in the sizes that tests use;
//! - [`process::Process`]: a child with captured output that cannot hang a test;
//! - [`status`]: what `tallyctl status --json` says, by the names used there;
//! - [`reload`]: thousands of changes of policy while programs run;
//! - [`containment`]: what a policy that fails costs, measured;
//! - [`chaos`]: random faults at random parties, and a checker of the results.
//!
//! The harness never talks to the driver, and to the core only by the programs that a
//! user would use ([`reload`] and [`containment`] use the admin socket itself, to be quick).
#![forbid(unsafe_code)]

pub mod admin;
pub mod artefacts;
pub mod chaos;
pub mod containment;
pub mod jobs;
pub mod process;
pub mod reload;
pub mod scene;
pub mod status;

pub use artefacts::Artefacts;
pub use process::Process;
pub use scene::{Class, Device, Scene};
