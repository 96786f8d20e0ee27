//! The contract in Rust, as `wit-bindgen` generates it (`cargo xtask bindings` writes the files): what every policy
//! exports and all that it may import, of which a component has what it calls; and a module for each optional export,
//! so that a policy exports only what it asks for. Generated code: its own lints, its own `unsafe`.
#![allow(missing_docs, unsafe_code, unused_imports, clippy::all)]

#[rustfmt::skip]
pub mod activity;
#[rustfmt::skip]
pub mod completions;
#[rustfmt::skip]
pub mod membership;
#[rustfmt::skip]
pub mod scheduler;
#[rustfmt::skip]
pub mod state;
#[rustfmt::skip]
pub mod timer;
#[rustfmt::skip]
pub mod units;
