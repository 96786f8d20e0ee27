//! The library that intercepts CUDA kernel launches: `core/preload` loads it into programs that use CUDA.
//!
//! It must never print, never panic, never allocate, lock or log on the launch
//! path under a standing grant (a gated launch holds its stream's turn, and one
//! made in parts allocates room for its parameters), and never change what the
//! program computes: every launch happens exactly once, in the program's own
//! order, whatever becomes of the core. Nor may it make the program's progress depend on anything that it did
//! not depend on: it waits for the GPU in no call of the program's, enters no stream from another thread, and
//! loads code only where the driver waits for nobody.
//!
//! | read | for |
//! | --- | --- |
//! | [`entry_points`] | the functions replaced, and their bodies' names |
//! | [`host`] | the preloaded library, which leads calls and look-ups here |
//! | [`resolve`] | how the real functions are found, and what look-ups lead to |
//! | [`launch`] | the launch path under a standing grant |
//! | [`gated`] | the launch path with a decision a launch |
//! | [`activity`], [`slots`], [`events`], [`syncs`] | busy or idle, told from the program's own calls |
//! | [`forms`] | launches as slices, preemptible, or on some of the SMs |
//! | [`completion`], [`poller`] | how the core learns that a launch is done |
//! | [`turn`] | the lock over a gated launch |
//! | [`quiesce`] | when the shim may load code |
//! | [`attach`], [`helper`], [`state`] | the core: meeting it, losing it, finding it again |
//! | [`graphs`] | graphs of best-effort clients, to be launched in parts |
//! | [`lifecycle`], [`contexts`], [`streams`], [`capture`] | graphs; contexts; streams; captures |
//! | [`names`], [`loads`] | which kernel a handle is; the loads that it comes from |
//! | [`images`], [`span`] | the code that is loaded |
//! | [`apart`], [`link`] | descriptors that are not the program's; the connection |
//! | [`sandbox`] | seccomp filters that the program installs |
//! | [`timeslice`] | the hardware time slice |

pub mod activity;
pub mod apart;
pub mod attach;
pub mod helper;
pub mod capture;
pub mod completion;
pub mod contexts;
pub mod cu;
pub mod forms;
pub mod gated;
pub mod entry_points;
pub mod events;
pub mod graphs;
pub mod handles;
pub mod host;
pub mod images;
pub mod launch;
pub mod lifecycle;
pub mod linger;
pub mod link;
pub mod loads;
pub mod lock;
pub mod log;
pub mod names;
pub mod objects;
pub mod poller;
pub mod quiesce;
pub mod resolve;
pub mod sandbox;
pub mod slots;
pub mod span;
pub mod state;
pub mod streams;
pub mod syncs;
pub mod threads;
pub mod timeslice;
pub mod turn;
