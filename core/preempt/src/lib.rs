//! Launches in forms other than whole, for best-effort programs: slices, preemptible,
//! on some of the SMs, and graphs in parts.
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
//! This is the mechanism. What it needs of the library in the program, the shim, is a [`host::Host`]; the driver's
//! functions are a table, [`cuda::Driver`].
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
//! | [`host`], [`cuda`], [`lock`] | the shim, the driver, locks |
//! | [`launch`], [`settings`], [`contexts`] | what launches are made of; what the core wants; contexts |
//! | [`prepare`], [`kernels`] | which kernels can be transformed |
//! | [`jobs`], [`worker`], [`making`] | making their forms off the launch path |
//! | [`proof`] | the proof that they compute the same on this machine |
//! | [`transformed`], [`offset`], [`form`], [`issue`] | the forms and their launches |
//! | [`gate`], [`flag`], [`watch`], [`progress`] | yielding; what takes too long |
//! | [`sm_limit`], [`joins`] | green contexts; when streams wait for launches in them |
//! | [`occupancy`], [`occupied_sms`] | what an SM holds; which launches may hold SMs for as long as they like |
//! | [`graphs`], [`chain`] | graphs of best-effort clients, and their launches in parts |
//! | [`vendor`], [`disk_cache`] | whose code it is; what is kept on disk of rewritten code |

mod chain;
mod compile;
mod contexts;
pub mod cuda;
mod disk_cache;
mod flag;
mod form;
mod gate;
pub mod graphs;
pub mod host;
mod issue;
mod jobs;
pub mod joins;
mod kernels;
pub mod launch;
mod limit_cost;
mod limited;
pub mod lock;
mod making;
pub mod occupancy;
pub mod occupied_sms;
mod offset;
mod places;
pub mod prepare;
mod progress;
mod proof;
pub mod settings;
pub mod sm_limit;
mod transformed;
pub mod vendor;
mod watch;

pub use contexts::{attach_turn, forget as forget_context, primary_turn};
pub use occupancy::resident;
pub use transformed::{plain_function, registers};
pub use watch::may_need_help;
mod worker;

use cuda::{CuResult, driver};
use graphs::reason::GraphState;
use launch::{PlannedLaunch, Shape, StreamState, Target, blocks_of};
use std::sync::atomic::Ordering::Relaxed;
use tally_ipc::layout::submission_flags::{CAN_LIMIT, CAN_PREPARE, CAN_SLICE, COOPERATIVE};
use tally_ipc::ring::Answer;
use tally_ipc::wire::{RewriteSettings, SharingMode};

/// A core took this client on.
pub fn configure(rewrite: &RewriteSettings, sharing: &SharingMode) {
    settings::configure(rewrite);
    disk_cache::configure(rewrite.cache_mib);
    let reserves = match sharing {
        // A context of its own turn has the whole GPU: nothing to keep free.
        SharingMode::TimeSlice { .. } => &[][..],
        SharingMode::Mps { .. } | SharingMode::Unmanaged => &rewrite.reserve_sms,
    };
    sm_limit::configure(reserves);
    settings::enable(rewrite.enabled || !reserves.is_empty(), rewrite.enabled);
}

/// A best-effort program has initialised CUDA. The thread that makes forms starts now, where the first launch that
/// wants one might be a thread's with a seccomp filter, which it would inherit.
pub fn initialised() {
    if settings::rewrites() {
        worker::start();
    }
}

/// What can be done to a launch: bits of `submission_flags`.
pub fn offers(shape: &Shape, target: &Target, stream: &StreamState) -> u32 {
    // The program's own green contexts: what the shim adds would leave their SMs. And what it makes for a launch it
    // makes in the current context, which the driver does not ask for.
    if contexts::is_closing(stream.context)
        || stream.is_in_green
        || driver().current_context() != stream.context
    {
        return 0;
    }
    match target {
        // All blocks of a cooperative launch run at once.
        Target::Kernel(_) if shape.flags & COOPERATIVE != 0 => 0,
        Target::Kernel(arguments) => {
            prepare::offers(shape, arguments, stream)
                | sm_limit::offers(shape.kernel as usize, arguments, stream)
        }
        Target::Graph(exec) => {
            let parts = match graphs::state(*exec) {
                GraphState::Transformable { kernel_nodes: 2.. }
                    if settings::rewrites()
                        && graphs::is_at_home(*exec, stream.context)
                        && gate::may_serve(stream.context)
                        && watch::makes_room()
                        && contexts::has_queues(stream.context) =>
                {
                    // The gate is made by the worker, at the first wish for a slice.
                    if gate::context() == 0 { CAN_PREPARE } else { CAN_SLICE }
                }
                _ => 0,
            };
            let can_limit =
                sm_limit::serves(stream.context) && graphs::limit::offers(*exec, stream);
            parts | if can_limit { CAN_LIMIT } else { 0 }
        }
        Target::Other => 0,
    }
}

/// Before a slot's launch of this number, on all SMs. Its context is current.
pub fn before_launch_on_all(slot: usize, number: u32, shape: &Shape, target: &Target) {
    let blocks = match target {
        Target::Graph(exec) => graphs::limit::unread_blocks(*exec),
        Target::Kernel(launch) => {
            let resident = || occupancy::resident_on_all(launch);
            occupied_sms::counted(shape.kernel as usize, blocks_of(launch.grid), resident)
        }
        Target::Other => {
            occupied_sms::counted(shape.kernel as usize, blocks_of(shape.grid), || None)
        }
    };
    occupied_sms::note(slot, number, blocks);
}

/// Makes a launch as decided. `None`: nothing was issued, it must run whole.
pub fn launch(planned: &PlannedLaunch<'_>, answer: Answer) -> Option<CuResult> {
    match &planned.target {
        Target::Kernel(arguments) => form::launch(planned, arguments, answer),
        Target::Graph(exec) => {
            let counters = &planned.client.counters;
            let (result, counter) = match answer {
                Answer::Slice(nodes) => {
                    (chain::launch(planned, *exec, nodes)?, &counters.graph_chained)
                }
                Answer::SmLimited(sms) => {
                    (graphs::limit::launch(planned, *exec, sms)?, &counters.sm_limited)
                }
                Answer::Whole | Answer::Preemptible(_) => return None,
            };
            counter.fetch_add(1, Relaxed);
            Some(result)
        }
        Target::Other => None,
    }
}

/// A slot's launches up to `number` have not ended for
/// [`SM_LIMITED_STUCK_NS`](tally_contract::limits::SM_LIMITED_STUCK_NS): those that were SM-limited are launched whole
/// from now on.
pub fn stuck(slot: usize, number: u32) {
    limited::stuck(slot, number).into_iter().for_each(graphs::limit::refuse);
}

/// The program may give up its last reference to a primary context: green contexts of the shim's go. `wait_out` returns
/// once nobody asks for their streams. By a thread that no other one launches beside.
pub fn give_up_green(context: usize, wait_out: impl FnOnce()) {
    sm_limit::give_up(context, || {
        wait_out();
        graphs::limit::give_up(context)
    });
}

/// A context is about to be destroyed: wait until no thread of the shim's uses it. Returns whether there is
/// anything to forget.
pub fn close_context(context: usize) -> bool {
    occupancy::forget();
    if !settings::is_enabled() {
        return false;
    }
    contexts::begin_closing(context);
    drop(jobs::leave_context());
    gate::leave_context();
    sm_limit::leave_context();
    true
}

/// The attempt to destroy the context is over; `is_gone`: it was destroyed.
pub fn closed(context: usize, was_closed: bool, is_gone: bool) {
    occupancy::forget();
    if !was_closed {
        return;
    }
    if is_gone {
        if gate::forget_context(context) {
            watch::forget();
        }
        prepare::forget_context(context);
        sm_limit::forget_context(context);
        contexts::forget(context);
    }
    contexts::end_closing(context);
}

/// The program is exiting: nobody yields any more, and the worker, which begins nothing more, leaves the driver.
pub fn program_exits() {
    gate::open_for_good();
    drop(jobs::leave_context());
}

/// Only in a forked child.
pub fn reset() {
    settings::reset();
    contexts::reset();
    gate::reset();
    flag::reset();
    jobs::reset();
    worker::reset();
    kernels::reset();
    making::reset();
    prepare::reset();
    proof::reset();
    watch::reset();
    sm_limit::reset();
    graphs::reset();
}
