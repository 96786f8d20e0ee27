//! The preloaded library that intercepts CUDA kernel launches.
//!
//! It must never print, never panic, never allocate, lock or log on the launch
//! path under a standing grant (a decided launch holds its stream's lock, and one
//! made in a cut form allocates room for its parameters), and never change what the
//! program computes: every launch happens exactly once, in the program's own
//! order, whatever becomes of the core.
//!
//! | read | for |
//! | --- | --- |
//! | [`doors`] | the functions replaced, and their bodies' names |
//! | [`resolve`] | how a program's look-ups lead here, and how the real functions are found |
//! | [`launch`] | the launch path under a standing grant |
//! | [`decided`] | the launch path with a decision a launch |
//! | [`activity`], [`slots`], [`events`], [`syncs`] | busy or idle, told from the program's own calls |
//! | [`cut`] | launches as slices, preemptible, or on some of the SMs |
//! | [`completion`] | how the core learns that a launch is done |
//! | [`attach`], [`attendant`], [`state`] | the core: meeting it, losing it, finding it again |
//! | [`graphs`] | graphs of best-effort clients, to be launched in parts |
//! | [`lifecycle`], [`capture`], [`names`] | streams, contexts, graphs; captures; kernel names |
//! | [`timeslice`] | the hardware time slice |

pub mod activity;
pub mod attach;
pub mod attendant;
pub mod capture;
pub mod completion;
pub mod cu;
pub mod cut;
pub mod decided;
pub mod doors;
pub mod events;
pub mod graphs;
pub mod handles;
pub mod launch;
pub mod lifecycle;
pub mod linger;
pub mod lock;
pub mod log;
pub mod names;
pub mod resolve;
pub mod slots;
pub mod state;
pub mod syncs;
pub mod threads;
pub mod timeslice;
