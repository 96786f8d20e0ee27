//! What is known of contexts: which are being destroyed, and whether a context has room for streams of the shim's.

use crate::host::host;
use crate::lock::Locked;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Acquire;

/// Streams that the shim adds in any case: of the flag, and of rescues.
const OWN_STREAMS: u32 = 2;

/// The primary context that has SM-limited streams, or may soon have; 0: none.
pub(crate) static SM_LIMITED: AtomicUsize = AtomicUsize::new(0);

/// Contexts that are being destroyed.
static CLOSING: Locked<Vec<usize>> = Locked::new(Vec::new());

/// Whether a context is being destroyed: nothing of the shim's uses it any more.
pub(crate) fn is_closing(context: usize) -> bool {
    CLOSING.with(|all| all.contains(&context))
}

/// A context is about to be destroyed.
pub(crate) fn begin_closing(context: usize) {
    CLOSING.with(|all| all.push(context));
}

/// The attempt to destroy the context is over, whether it was destroyed or not.
pub(crate) fn end_closing(context: usize) {
    // One of them: by now another thread may be destroying a later context with this handle.
    CLOSING.with(|all| {
        if let Some(at) = all.iter().position(|of| *of == context) {
            all.swap_remove(at);
        }
    });
}

/// Whether what the shim adds to a launch finds hardware queues of its own: its own streams, and a narrow one for each
/// of the program's, where there are any.
pub(crate) fn has_queues(context: usize) -> bool {
    let is_limited = SM_LIMITED.load(Acquire) != 0;
    let narrow = if is_limited { host().streams_used() } else { 0 };
    host().has_queues_for(context, OWN_STREAMS + narrow)
}

/// Only in a forked child.
pub(crate) fn reset() {
    CLOSING.reset(Vec::new());
    SM_LIMITED.store(0, std::sync::atomic::Ordering::SeqCst);
}
