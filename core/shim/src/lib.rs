//! The library that intercepts CUDA kernel launches: `core/preload` loads it into programs that use CUDA.
//!
//! It must never print or panic. On the launch path of an ungated client it must never allocate, lock or log; a
//! gated launch holds its stream's turn, and one made in parts allocates room for its parameters. It must never
//! change what the program computes: every launch happens exactly once, in the program's own order, whatever
//! becomes of the core. Nor may the program's progress depend on anything new: the shim waits for the GPU in no
//! call of the program, enters no stream from another thread, and loads code only where the driver waits for
//! nothing.
//!
//! Modules import downwards: what a lower one needs of a higher one it is given, as a value or, when the shim
//! [starts](start), as a function.
//!
//! | read | for |
//! | --- | --- |
//! | [`entry_points`] | the functions replaced, and their bodies' names |
//! | [`start`], [`host`] | the preloaded library, which leads calls and look-ups here |
//! | [`resolve`], [`table`] | how the real functions are found, and what look-ups lead to |
//! | [`launch`] | the launch path of ungated launches |
//! | [`gated`] | the launch path of gated launches |
//! | [`activity`], [`slots`], [`slot_life`], [`events`], [`syncs`] | busy or idle, told from the program's own calls |
//! | [`preempt`] | what `core/preempt` needs, which makes launches in other forms than whole |
//! | [`tools`], [`bypass`] | debuggers and profilers; calls that the shim does not see |
//! | [`completion`], [`poller`], [`asking`], [`samples`] | how the core learns that a launch is done, and what it took |
//! | [`records`] | events of the shim's own behind launches |
//! | [`demand`] | what kernels demand of an SM |
//! | [`turn`] | the lock over a gated launch |
//! | [`quiesce`] | when the shim may load code |
//! | [`attach`], [`connection`], [`enter`] | meeting the core |
//! | [`helper`], [`news`], [`state`] | losing it, finding it again |
//! | [`exit`] | the program's exit |
//! | [`lifecycle`], [`exec_nodes`], [`streams`], [`capture`] | graphs; streams; captures |
//! | [`contexts`], [`greens`] | contexts; green contexts |
//! | [`names`], [`attributes`], [`aliases`], [`loads`] | which kernel a handle is; the loads that it comes from |
//! | [`images`], [`span`] | the code that is loaded |
//! | [`apart`], [`link`] | descriptors that are not the program's; the connection |
//! | [`sandbox`] | seccomp filters that the program installs |
//! | [`nvtx`], [`marks`] | units of work that the program marks |
//! | [`units`], [`unit_profile`] | units of work told from launches and waits; what some do on the GPU |
//! | [`timeslice`], [`linger`] | the hardware time slice; lingering on the GPU |
//! | [`device`] | what the core is told of the device |

pub mod activity;
pub mod aliases;
mod apart;
pub mod asking;
pub mod attach;
pub mod attributes;
pub mod bypass;
pub mod capture;
pub mod completion;
pub mod connection;
pub mod contexts;
pub mod demand;
pub mod device;
pub mod enter;
pub mod entry_points;
pub mod events;
pub mod exec_nodes;
pub mod exit;
pub mod gated;
pub mod greens;
pub mod handles;
pub mod helper;
pub mod host;
pub mod images;
pub mod known;
pub mod launch;
pub mod lifecycle;
pub mod linger;
pub mod link;
pub mod loads;
pub mod log;
pub mod marks;
pub mod names;
pub mod news;
pub mod nvtx;
pub mod objects;
pub mod opens;
pub mod poller;
pub mod preempt;
pub mod quiesce;
pub mod records;
pub mod resolve;
pub mod samples;
pub mod sandbox;
pub mod slot_life;
pub mod slots;
pub mod span;
pub mod start;
pub mod state;
pub mod streams;
pub mod syncs;
pub mod table;
pub mod threads;
pub mod timeslice;
pub mod tools;
pub mod turn;
pub mod unit_profile;
pub mod units;
