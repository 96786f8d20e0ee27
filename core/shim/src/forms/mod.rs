//! Launches in forms other than whole, for best-effort clients: slices, preemptible,
//! on some of the SMs.
//!
//! A transformed launch is several launches of the kernel's transformed form in the program's own
//! stream, all issued at once, with a wait of the stream on the [`gate`] between
//! them. So the calling thread is not held, whatever follows in the stream waits for
//! all of them, and yielding is closing the gate (slices) and raising a flag in
//! device memory (preemptible). The last part of a preemptible launch ignores the
//! flag: whatever happens to the core, every block runs.
//!
//! ```text
//! stream:  part 1 | wait gate | part 2 | wait gate | ... | last part | what follows
//! ```
//!
//! Each part runs the blocks that no earlier part ran; who runs which block is
//! settled in a table in device memory (`tally_rewriter::control`).
//!
//! What must hold:
//! - a launch is made in a transformed form only if the core was told that it could be, and
//!   nothing was issued when the whole launch is made after all;
//! - the gate opens without any help of the driver: another thread of the program may
//!   hold the driver's locks while it waits for the very stream that waits here;
//! - a kernel whose blocks may wait for one another is never launched in parts, and nothing that is launched in
//!   parts waits for anything but the gate, which opens by itself;
//! - where there is no room, or it cannot be known whether a form is safe, a launch goes whole, at once;
//! - nothing here runs for high-priority clients, or before the core allows it.
//!
//! | read | for |
//! | --- | --- |
//! | [`kernels`] | which kernels can be transformed |
//! | [`worker`], [`making`] | making their forms off the launch path |
//! | [`proof`] | the proof that they compute the same on this machine |
//! | [`form`], [`offset`] | the launches |
//! | [`gate`], [`watch`], [`progress`] | yielding; what takes too long |
//! | [`sm_limit`] | green contexts |
//! | [`vendor`], [`kept`] | whose code it is; what is kept on disk of rewritten code |
//! | [`tools`], [`bypass`] | debuggers and profilers; calls that the shim does not see |

pub mod bypass;
pub mod form;
pub mod gate;
pub mod graph;
pub mod guarded;
pub mod kept;
pub mod kernels;
pub mod making;
pub mod offset;
pub mod progress;
pub mod proof;
pub mod tools;
pub mod vendor;
pub mod watch;
pub mod sm_limit;
pub mod worker;

use crate::graphs::{self, CutState};
use crate::launch::{Shape, Target};
use crate::slots::{self, OVERFLOW};
use crate::streams;
use guarded::Guarded;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use tally_ipc::layout::submission_flags::{CAN_PREPARE, CAN_SLICE, COOPERATIVE};
use tally_ipc::wire::{RewriteSettings, SharingMode};

static ENABLED: AtomicBool = AtomicBool::new(false);
static VENDOR: AtomicBool = AtomicBool::new(false);
static RESCUE_MS: AtomicU32 = AtomicU32::new(50);

/// A core took this client on.
pub fn configure(rewrite: &RewriteSettings, sharing: &SharingMode) {
    VENDOR.store(rewrite.vendor_libraries, Relaxed);
    RESCUE_MS.store(rewrite.rescue_ms.max(1), Relaxed);
    kept::configure(rewrite.cache_mib);
    let widths = match sharing {
        // A context of its own turn has the whole GPU: nothing to keep free.
        SharingMode::TimeSlice { .. } => &[][..],
        SharingMode::Mps { .. } | SharingMode::Unmanaged => &rewrite.reserve_sms,
    };
    sm_limit::configure(widths);
    ENABLED.store(rewrite.enabled || !widths.is_empty(), Release);
    kernels::allow(rewrite.enabled);
    tools::look();
}

/// The program has initialised CUDA. The thread that makes forms starts now, where the first launch that wants one
/// might be a thread's with a seccomp filter, which it would inherit.
pub fn initialised() {
    if kernels::is_allowed() && crate::state::is_best_effort() {
        worker::start();
    }
}

/// Where a launch goes.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub slot: usize,
    /// The context of its stream.
    pub context: usize,
    /// Launches of its stream that may be unfinished.
    pub backlog: u32,
}

/// Whether anything here is wanted. Stays so without a core.
#[inline]
pub fn is_enabled() -> bool {
    ENABLED.load(Acquire)
}

/// Kernels of closed libraries may be transformed.
pub fn takes_vendor() -> bool {
    VENDOR.load(Relaxed)
}

/// How long a launch may take to yield.
pub fn rescue_ns() -> u64 {
    u64::from(RESCUE_MS.load(Relaxed)) * 1_000_000
}

/// What can be done to a launch: bits of `submission_flags`.
pub fn offers(shape: &Shape, target: &Target, place: &Place) -> u32 {
    if !is_enabled() || place.slot == OVERFLOW || tools::whole_because() != 0 {
        return 0;
    }
    // The program's own green contexts: what the shim adds would leave their SMs.
    let is_in_green = || slots::SLOTS[place.slot & 63].green.load(Relaxed) != 0;
    if is_closing(place.context) || is_in_green() {
        return 0;
    }
    match target {
        // All blocks of a cooperative launch run at once.
        Target::Kernel(_) if shape.flags & COOPERATIVE != 0 => 0,
        Target::Kernel(arguments) => {
            kernels::offers(shape, arguments, place)
                | sm_limit::offers(shape.kernel as usize, arguments, place)
        }
        Target::Graph(exec) => match graphs::state(*exec) {
            CutState::Transformable { kernel_nodes: 2.. }
                if kernels::is_allowed()
                    && gate::may_serve(place.context)
                    && watch::makes_room()
                    && has_queues(place.context) =>
            {
                // The gate is made by the worker, at the first wish for a slice.
                if gate::context() == 0 { CAN_PREPARE } else { CAN_SLICE }
            }
            _ => 0,
        },
        Target::Other => 0,
    }
}

/// Whether what the shim adds to a launch finds hardware queues of its own: the streams of the flag and of rescues,
/// and a narrow one for each of the program's, where there are any.
fn has_queues(context: usize) -> bool {
    let narrow = if sm_limit::is_in_use() { slots::used() } else { 0 };
    streams::has_queues_for(2 + narrow)
        && streams::has_queues_for(2 + narrow + streams::used_without_slot(context))
}

/// Contexts that are being destroyed.
static CLOSING: Guarded<Vec<usize>> = Guarded::new(Vec::new());

/// Whether a context is being destroyed: nothing of the shim's uses it any more.
pub fn is_closing(context: usize) -> bool {
    is_enabled() && CLOSING.with(|all| all.contains(&context))
}

/// A context is about to be destroyed: wait until no thread of the shim's uses it. Returns whether there is
/// anything to forget.
pub fn close_context(context: usize) -> bool {
    if !is_enabled() {
        return false;
    }
    CLOSING.with(|all| all.push(context));
    drop(worker::leave_context());
    gate::leave_context();
    sm_limit::leave_context();
    true
}

/// Parts of graphs in a context are to be destroyed once nothing runs there.
pub fn sweep(context: usize) {
    // Behind all other jobs.
    let job = worker::Job { us: 0, ..worker::Job::of_context(worker::Task::Sweep, context) };
    worker::hire_once(job);
}

/// It was destroyed, or not.
pub fn closed(context: usize, was_closed: bool, is_gone: bool) {
    if !was_closed {
        return;
    }
    if is_gone {
        gate::forget_context(context);
        kernels::forget_context(context);
        sm_limit::forget_context(context);
    }
    // One of them: by now another thread may be destroying a later context with this handle.
    CLOSING.with(|all| {
        if let Some(at) = all.iter().position(|of| *of == context) {
            all.swap_remove(at);
        }
    });
}

/// The program is exiting: nobody yields any more.
pub fn program_exits() {
    gate::open_for_good();
    kernels::finish();
}

/// Only in a forked child.
pub fn reset() {
    ENABLED.store(false, SeqCst);
    CLOSING.reset(Vec::new());
    bypass::reset();
    tools::reset();
    gate::reset();
    kernels::reset();
    proof::reset();
    watch::reset();
    sm_limit::reset();
}
