//! What the core has said of transformed launches. It stays so without a core.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use tally_ipc::wire::RewriteSettings;

static ENABLED: AtomicBool = AtomicBool::new(false);
static REWRITES: AtomicBool = AtomicBool::new(false);
static VENDOR: AtomicBool = AtomicBool::new(false);
static PUTS_OFF_JOINS: AtomicBool = AtomicBool::new(false);
static RESCUE_MS: AtomicU32 = AtomicU32::new(50);

pub(crate) fn configure(rewrite: &RewriteSettings) {
    VENDOR.store(rewrite.vendor_libraries, Relaxed);
    PUTS_OFF_JOINS.store(rewrite.puts_off_joins, Relaxed);
    RESCUE_MS.store(rewrite.rescue_ms.max(1), Relaxed);
}

/// Whether anything is wanted, and whether kernels may be rewritten. Once everything else is configured.
pub(crate) fn enable(is_wanted: bool, rewrites: bool) {
    ENABLED.store(is_wanted, Release);
    REWRITES.store(rewrites, Release);
}

/// Whether launches are wanted in any other form than whole.
#[inline]
pub fn is_enabled() -> bool {
    ENABLED.load(Acquire)
}

/// Whether kernels may be rewritten.
pub fn rewrites() -> bool {
    REWRITES.load(Acquire)
}

/// Kernels of closed libraries may be transformed.
pub fn takes_vendor() -> bool {
    VENDOR.load(Relaxed)
}

/// Whether streams wait for their SM-limited launches only once something else could see those.
pub(crate) fn puts_off_joins() -> bool {
    PUTS_OFF_JOINS.load(Relaxed)
}

/// How long a launch may take to yield.
pub(crate) fn rescue_ns() -> u64 {
    u64::from(RESCUE_MS.load(Relaxed)) * 1_000_000
}

/// Only in a forked child.
pub(crate) fn reset() {
    ENABLED.store(false, SeqCst);
    REWRITES.store(false, SeqCst);
}
