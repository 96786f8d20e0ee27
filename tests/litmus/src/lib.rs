//! Litmus tests of Tally: small CUDA programs whose values no legal schedule changes, run
//! bare and under the shim and a core. See `README.md`.

#![allow(missing_docs, reason = "nobody outside uses this crate")]

pub mod build;
pub mod campaign;
pub mod cu;
pub mod generate;
pub mod kernels;
pub mod load;
pub mod model;
pub mod named;
pub mod pairs;
mod print;
pub mod program;
mod region;
pub mod run;
pub mod scenarios;
