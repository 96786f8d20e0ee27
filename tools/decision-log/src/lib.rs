//! The decision log: everything that reaches a policy, in order, and what it answers.
//!
//! ```text
//! dispatch thread                     another thread
//!   Recorded (around the policy)
//!     Recorder -> Tap -> ring (bytes) ->  TapReader -> file          (log::Writer)
//!                                               -> second policy  (Player: a shadow)
//! file -> log::Reader -> Player (replay) -> Comparison
//!                     -> trace
//! ```
//!
//! A policy has no input but its calls and what it asks of the core during them: the
//! clients and the kernels' profiles. The log holds every change of those between two
//! calls, so [`Player`] can make the same calls on the same world, and a policy without
//! clock and randomness must answer the same.
//!
//! The recording side must never wait, allocate (once a tap is in) or write to a file: it
//! copies into a ring, and what finds no room is counted. Reading must never trust a byte.
//!
//! Read next: [`record`] for what is logged, [`recorder`] for how it gets there,
//! [`log`] for the file, [`player`] for replay and shadows.
#![forbid(unsafe_code)]

pub mod compare;
pub mod decode;
pub mod log;
pub mod player;
pub mod record;
pub mod recorder;
pub mod text;
pub mod trace;
pub mod world;

pub use compare::{Comparison, Parting};
pub use log::{Header, LogError, Reader, Writer};
pub use player::{Fed, Player};
pub use record::{About, Answer, Base, Begin, Outcome, Record};
pub use recorder::{Recorded, Recorder, Tap, TapOptions, TapReader};
