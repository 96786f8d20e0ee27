//! The scheduling daemon.
//!
//! Two threads that share nothing but a bounded channel:
//!
//! | thread | module | does | never |
//! | --- | --- | --- | --- |
//! | dispatch | [`dispatch`] | polls every client's shared memory, drives the engine, answers | waits for a log line or a lock, touches the socket |
//! | control | [`control`] | registration and admin requests, policy loads, sharing mode, profiles, drain | decides a launch |
//!
//! Read next: [`run`] for how they are put together and taken apart,
//! [`dispatch`] for the loop, [`status`] for what operators see.
#![forbid(unsafe_code)]

// What the fuzz targets do names this crate as they see it.
#[cfg(test)]
extern crate self as tally_core;

pub mod ab;
pub mod admit;
pub mod cli;
pub mod config;
pub mod control;
pub mod dispatch;
pub mod error;
pub mod files;
#[cfg(test)]
mod fuzz_corpus;
pub mod gpus;
pub mod helpers;
mod links;
pub mod loader;
pub mod mps;
pub mod owned_file;
pub mod peer;
pub mod policy_slot;
pub mod policy_watch;
pub mod profile_store;
pub mod quota;
pub mod record;
pub mod reference;
pub mod refresh;
pub mod run;
pub mod sharing;
pub mod signals;
pub mod socket;
pub mod status;
pub mod subordinate;
pub mod ungoverned;
