//! Loads, bounds and calls WebAssembly scheduling policies.
//!
//! A policy is a component of the world `tally:policy/policy` (`wit/policy.wit`).
//! [`PolicyHost::load_file`] compiles and initialises one, which takes tens of
//! milliseconds and so happens off the dispatch thread; the [`WasmPolicy`] it
//! returns is what the engine calls for each decision, in 0.2 us. The two halves of
//! that are apart as well: [`PolicyHost::compile_file`] once, [`Compiled::start`] for
//! each instance, which can go on from what another one knew ([`Saved`]).
//!
//! ```no_run
//! use tally_engine::policy::{Context, Policy};
//! use tally_wasm_host::{Limits, PolicyHost};
//!
//! // First thing in `main`: components are compiled in a child, which is this program again.
//! tally_wasm_host::serve_if_child();
//! let host = PolicyHost::new(Limits::default())?;
//! let mut policy = host.load_file("policies/fifo.wasm".as_ref(), "")?;
//! let mut context = Context::default();
//! policy.start(&mut context);
//! println!("{} {}", policy.name(), policy.digest());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A policy gets no files, no network, no clock and no randomness: its only
//! imports are those of the contract. Whatever it does ([`Limits`] says how much
//! of it), a call ends with a decision or a
//! [`Fault`](tally_engine::policy::Fault), and the engine then answers by its own
//! rule. This crate must never let a policy stop, slow or crash the core, and the
//! decision path must not allocate.
//!
//! Where to read on: [`PolicyHost`] for how a policy is loaded, [`WasmPolicy`]
//! for how it is called and what happens when it fails, [`LoadError`] for what is
//! refused.
#![forbid(unsafe_code)]

mod bindings;
mod compiled;
mod cpu;
mod error;
mod file;
mod imports;
mod inspect;
mod limits;
mod metrics;
mod policy;
mod preset;
mod reasons;
mod runtime;
mod shown;
mod spawn;
mod state;
mod status;

pub use compiled::Compiled;
pub use error::{HostError, LoadError};
pub use file::ComponentFile;
pub use limits::Limits;
pub use policy::WasmPolicy;
pub use preset::Preset;
pub use reasons::ReasonStatus;
pub use runtime::PolicyHost;
pub use state::{Restored, Saved};
pub use status::{FaultCounts, LastFault, PolicyStatus, kind_name};
pub use tally_compiler::{Cancel, CompileError, Compiler, serve_if_child};
pub use tally_contract::capability::{Capabilities, Capability};
pub use tally_trust::{Trust, TrustError, TrustSettings, TrustSettingsError};
