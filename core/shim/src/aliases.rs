//! Functions that nodes of graphs tell, of kernels that programs launch by another handle.
//!
//! cudart launches handles of libraries' kernels; a node tells the function that such a handle stands for in its
//! context.

use crate::names;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use tally_ipc::layout::KERNEL_SLOTS;
use tally_preempt::cuda::driver;
use tally_preempt::launch::Target;
use tally_preempt::plain_function;

/// By kernel: [`names::times_forgotten`] when its function was noted.
static NOTED: [AtomicU32; KERNEL_SLOTS] = [const { AtomicU32::new(0) }; KERNEL_SLOTS];

/// The calling thread has launched this kernel, so that its code is loaded: note its function, unless it is.
#[inline]
pub fn note(kernel: u32, target: impl FnOnce() -> Target) {
    let Some(noted) = NOTED.get(kernel as usize) else { return };
    let now = names::times_forgotten();
    if noted.load(Relaxed) != now {
        noted.store(now, Relaxed);
        if let Target::Kernel(arguments) = target() {
            note_function(arguments.function as usize);
        }
    }
}

#[cold]
fn note_function(handle: usize) {
    // A capture of another thread could forbid this one to ask.
    let function = driver().relaxed(|| plain_function(handle));
    if function != handle {
        names::alias(function, handle);
    }
}
