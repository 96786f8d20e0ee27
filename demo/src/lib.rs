//! The demonstration: two CUDA programs, and what starts them with a core on a device. `cargo xtask demo` and the
//! tests across processes use it.
//!
//! - `tally-demo-inference` and `tally-demo-training` know nothing of Tally; [`job`] is what they share;
//! - [`artefacts::Artefacts`]: where the built programs are, and what to do if not;
//! - [`scene::Scene`]: a scratch folder with one device and one socket, in which a
//!   core and clients are started; nothing of it outlives it;
//! - [`process::Process`]: a child with captured output that cannot hang its caller;
//! - [`status`]: what `tallyctl status --json` says.
//!
//! A scene never talks to the driver, and to the core only by the programs that a user would use.
#![forbid(unsafe_code)]

pub mod artefacts;
pub mod job;
pub mod process;
pub mod scene;
pub mod status;

pub use artefacts::Artefacts;
pub use process::Process;
pub use scene::{Class, Device, Scene};
