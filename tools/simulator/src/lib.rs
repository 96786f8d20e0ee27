//! Judges a scheduling policy without a GPU.
//!
//! The engine that serves in `tally-core` runs here in virtual time: high-priority
//! services and best-effort trainings, all recorded kernel by kernel, share a model
//! of a GPU. The same inputs and seed give the same report, to the byte. There is no
//! clock and no thread, and this crate knows nothing of WebAssembly: whoever calls it
//! hands it a policy.
//!
//! ```
//! use tally_engine::BuiltInRule;
//! use tally_simulator::{Arrivals, Service, Setup, Trace, simulate};
//!
//! let hp = Trace::open("resnet50_infer_b1")?;
//! let be = Trace::open("resnet50_train_b128")?;
//! let setup = Setup { seconds: 0.2, ..Setup::default() };
//! let policy = Box::new(BuiltInRule { idle_ns: 100_000 });
//! let arrivals = Arrivals::Poisson { load: 0.5 };
//! let report = simulate(&setup, &Service::new(&hp, &arrivals), Some(&be), Some(policy));
//! assert!(report.best_effort.unwrap().share < 1.0);
//! # Ok::<(), tally_simulator::TraceError>(())
//! ```
//!
//! | module | what |
//! | --- | --- |
//! | [`trace`] | recorded kernels, and what they say of the program that launched them |
//! | [`gpu`] | costs, blocks and waves of a kernel, forms |
//! | [`model`] | figures that may be other elsewhere |
//! | [`device`] | who runs when: time slices, or blocks side by side |
//! | [`host`] | a program: when it launches, what it waits for |
//! | [`decode`] | a decode service: requests, continuous batching, what a prefill launches |
//! | [`completions`] | when the core learns that a launch is done |
//! | [`sim`] | the loop: time, programs, engine, device |
//! | [`report`] | what comes out |
//! | `fairness` | what each of several best-effort programs got, and should have got |
//!
//! The model:
//!
//! - Blocks run in waves of as many as fit 132 SMs. All waves of a kernel take equally long.
//! - `timeslice`: one process at a time. The GPU changes at the end of a slice, and leaves a process without work at
//!   once or after lingering. Services take turns like any other processes, and linger after each other, too.
//! - `mps`: the older kernel has the room that its blocks take, the younger one the rest. Under the core blocks of high
//!   priority start before those of best effort that have not started.
//! - A preemptible kernel stops at the end of a wave after the flag arrives. Slices stop between parts.
//! - Completions are reported and measured as the shim does it.
//!
//! `docs/results-simulator.md` says how far to believe it, and against which measurements.
#![forbid(unsafe_code)]

pub mod arrivals;
mod builtin;
pub mod completions;
pub mod decode;
pub mod device;
mod fairness;
pub mod gpu;
pub mod host;
pub mod model;
pub mod report;
pub mod sim;
pub mod trace;

pub use arrivals::{Arrivals, ArrivalsError};
pub use builtin::names as builtin_traces;
pub use gpu::{SharingMode, Transformable};
pub use model::Model;
pub use report::Report;
pub use sim::{Service, Setup, Tenant, simulate, simulate_several};
pub use trace::{Trace, TraceError};
