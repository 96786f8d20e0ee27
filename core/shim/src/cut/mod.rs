//! Launches in forms other than whole, for best-effort clients: slices, preemptible,
//! on some of the SMs.
//!
//! A cut launch is several launches of the kernel's cut form in the program's own
//! stream, all issued at once, with a wait of the stream on the [`gate`] between
//! them. So the calling thread is not held, whatever follows in the stream waits for
//! all of them, and giving way is closing the gate (slices) and raising a flag in
//! device memory (preemptible). The last part of a preemptible launch ignores the
//! flag: whatever happens to the core, every block runs.
//!
//! ```text
//! stream:  part 1 | wait gate | part 2 | wait gate | ... | last part | what follows
//! ```
//!
//! Each part runs the blocks that no earlier part ran; who runs which block is
//! settled in a table in device memory (`tally_kernels::control`).
//!
//! What must hold:
//! - a launch is made in a cut form only if the core was told that it could be, and
//!   nothing was issued when the whole launch is made after all;
//! - the gate opens without any help of the driver: another thread of the program may
//!   hold the driver's locks while it waits for the very stream that waits here;
//! - nothing here runs for high-priority clients, or before the core allows it.
//!
//! | read | for |
//! | --- | --- |
//! | [`kernels`], [`making`] | which kernels can be cut; making their cut forms off the launch path |
//! | [`proof`] | the proof that they compute the same on this machine |
//! | [`form`], [`offset`] | the launches |
//! | [`gate`], [`watch`], [`progress`], [`quiet`] | giving way; what takes too long; calls that would keep help away |
//! | [`width`] | green contexts |
//! | [`images`], [`vendor`], [`kept`] | the code, whose it is, and what is kept on disk of rewritten code |

pub mod form;
pub mod gate;
pub mod graph;
pub mod guarded;
pub mod images;
pub mod kept;
pub mod kernels;
pub mod making;
pub mod offset;
pub mod progress;
pub mod proof;
pub mod quiet;
pub mod vendor;
pub mod watch;
pub mod width;

use crate::graphs::{self, CutState};
use crate::launch::{Shape, Target};
use crate::slots::OVERFLOW;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use tally_ipc::layout::submission_flags::{CAN_PREPARE, CAN_SLICE, COOPERATIVE, GRAPH};
use tally_ipc::wire::{Cutting, Residency};

static ENABLED: AtomicBool = AtomicBool::new(false);
static VENDOR: AtomicBool = AtomicBool::new(false);
static RESCUE_MS: AtomicU32 = AtomicU32::new(50);

/// A core took this client on.
pub fn configure(cutting: &Cutting, residency: &Residency) {
    VENDOR.store(cutting.vendor_libraries, Relaxed);
    RESCUE_MS.store(cutting.rescue_ms.max(1), Relaxed);
    kept::configure(cutting.cache_mib);
    let widths = match residency {
        // A context of its own turn has the whole GPU: nothing to keep free.
        Residency::TimeSlice { .. } => &[][..],
        Residency::Mps { .. } | Residency::Unmanaged => &cutting.reserve_sms,
    };
    width::configure(widths);
    ENABLED.store(cutting.enabled || !widths.is_empty(), Release);
    kernels::allow(cutting.enabled);
}

/// Whether anything here is wanted. Stays so without a core.
#[inline]
pub fn is_enabled() -> bool {
    ENABLED.load(Acquire)
}

/// Kernels of closed libraries may be cut.
pub fn takes_vendor() -> bool {
    VENDOR.load(Relaxed)
}

/// How long a launch may take to give way.
pub fn rescue_ns() -> u64 {
    u64::from(RESCUE_MS.load(Relaxed)) * 1_000_000
}

/// What can be done to a launch: bits of `submission_flags`.
pub fn offers(shape: &Shape, target: &Target, slot: usize, context: usize) -> u32 {
    if !is_enabled() || slot == OVERFLOW {
        return 0;
    }
    match target {
        Target::Kernel(arguments) => {
            let cut = match shape.flags & (COOPERATIVE | GRAPH) {
                0 => kernels::offers(shape, arguments, context),
                _ => 0,
            };
            // All blocks of a cooperative launch must fit at once: never narrowed.
            let may = shape.flags & COOPERATIVE == 0 && kernels::may_narrow(shape.kernel as usize);
            let narrow = if may { width::offers(context) } else { 0 };
            cut | narrow
        }
        Target::Graph(exec) => match graphs::state(*exec) {
            CutState::Cuttable { kernel_nodes: 2.. }
                if kernels::is_allowed() && gate::may_serve(context) =>
            {
                // The gate is made by the worker, at the first wish for a slice.
                if gate::context() == 0 { CAN_PREPARE } else { CAN_SLICE }
            }
            _ => 0,
        },
        Target::Other => 0,
    }
}

/// `real` may destroy a context, and says whether it did: what was made in it is gone.
/// Nothing of ours uses it meanwhile. The caller holds the capture guard.
pub fn while_destroyed(context: usize, real: impl FnOnce() -> bool) {
    if !is_enabled() {
        real();
        return;
    }
    // All at once, in the order of the worker, which makes the gate as well: between two
    // of them it would make another in the context that goes.
    let _paused = (kernels::pause(), gate::pause(), width::pause());
    if real() {
        gate::forget_context(context);
        kernels::forget_context(context);
        width::forget_context(context);
    }
}

/// A context is about to be destroyed.
pub fn forget_context(context: usize) {
    while_destroyed(context, || true);
}

/// The program is exiting: nobody gives way any more.
pub fn program_exits() {
    gate::open_for_good();
    kernels::finish();
}

/// Only in a forked child.
pub fn reset() {
    ENABLED.store(false, SeqCst);
    gate::reset();
    images::reset();
    kernels::reset();
    proof::reset();
    quiet::reset();
    watch::reset();
    width::reset();
}
