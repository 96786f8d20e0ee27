//! The ABI between the shim (in every client's process) and the core.
//!
//! Two shared regions a client, each a sealed memfd, plus an eventfd and the
//! registration socket:
//!
//! | region | made by | client may | core may | holds |
//! | --- | --- | --- | --- | --- |
//! | [`ClientRegion`] | client | read, write | read | submissions, completion words, activity, kernel names, counters |
//! | [`CoreRegion`] | core | **read only** (sealed) | read, write | grants, decisions, what was admitted |
//!
//! So a client cannot forge its class or a grant, and no client maps another's
//! memory. Everything in a [`ClientRegion`] is untrusted input to the core: it
//! is read through atomics and bounded; `SECURITY.md` says what a lie can do.
//!
//! Read next: [`layout`] for the regions, [`ring`] for the submission protocol,
//! [`marks`] for units of work that programs mark, [`wire`] for registration.

pub mod admin;
pub mod frame;
pub mod layout;
pub mod linger;
pub mod map;
pub mod marks;
pub mod namespace;
pub mod peer;
pub mod pidfd;
pub mod rights;
pub mod ring;
pub mod text;
pub mod wait;
pub mod wire;

pub use layout::{ClientRegion, CoreRegion};

/// Version of everything in this crate. Shim and core must agree exactly: they
/// ship together, and a mismatch is refused at registration by name.
pub const PROTOCOL_VERSION: u32 = 1;
