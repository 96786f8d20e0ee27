//! The contract between core and policies as the core's own types, and every limit that people meet.
//!
//! `wit/policy.wit` is the reference manual of the types. What is generated from it for one side or the other (by
//! wasmtime for components, by wit-bindgen for the SDK) is converted by `tally_engine::contract_conversions!`.
//!
//! A limit belongs into [`limits`] if an operator or the author of a policy meets it, or more than one crate needs it.
#![forbid(unsafe_code)]

pub mod capability;
pub mod kernel;
pub mod limits;
pub mod min_share;
pub mod objective;
pub mod policy;
pub mod service;
pub mod unit_profile;
pub mod widths;

/// The text of the contract.
pub const TEXT: &str = include_str!("../../../wit/policy.wit");
