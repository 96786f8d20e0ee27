//! The table of kernels: which can be transformed, and their transformed forms.
//!
//! What the core reads of it is a copy, in the shared region.

use crate::host::host;
use crate::transformed::Transformed;
use std::collections::HashMap;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32};
use tally_ipc::layout::{KERNEL_SLOTS, transform_state};
use tally_rewriter::TransformRefusal;

pub(crate) struct Kernel {
    /// The state in the shared table; what the core reads is only a copy of this.
    pub(crate) state: AtomicU32,
    pub(crate) transformed: AtomicPtr<Transformed>,
    /// The driver refused it on fewer SMs, or it did not end there, or its code asks for its SM.
    pub(crate) never_sm_limited: AtomicBool,
    /// Its image is a closed library's: see [`may_be_limited_unread`](crate::vendor::may_be_limited_unread).
    pub(crate) may_be_limited_unread: AtomicBool,
}

pub(crate) static KERNELS: [Kernel; KERNEL_SLOTS] = [const {
    Kernel {
        state: AtomicU32::new(transform_state::UNKNOWN as u32),
        transformed: AtomicPtr::new(std::ptr::null_mut()),
        never_sm_limited: AtomicBool::new(false),
        may_be_limited_unread: AtomicBool::new(false),
    }
}; KERNEL_SLOTS];

/// Changes whenever what can be transformed may have.
static CHANGES: AtomicU32 = AtomicU32::new(0);

pub(crate) fn publish(index: usize, state: u8, detail: u8) {
    let word = transform_state::pack(state, detail);
    KERNELS[index].state.store(word, Release);
    if let Some(client) = host().client() {
        client.kernels[index].transform.store(word, Release);
    }
    if !matches!(state, transform_state::PREPARABLE | transform_state::PREPARING) {
        changed();
    }
}

/// What can be transformed may be different now.
pub(crate) fn changed() {
    CHANGES.fetch_add(1, SeqCst);
}

/// Number of changes to [`ready`] so far, at least.
pub fn changes() -> u32 {
    CHANGES.load(SeqCst)
}

/// Kernels that can be transformed, their index and form, by the function or kernel that a program launches.
pub type Ready = HashMap<usize, (usize, &'static Transformed)>;

/// The kernels of a context that can be transformed.
pub fn ready(context: usize) -> Ready {
    let mut all = Ready::new();
    for index in 0..KERNEL_SLOTS {
        if let Some(transformed) =
            transformed(index).filter(|transformed| transformed.context == context)
        {
            let handles = transformed.originals.each_ref().map(|o| o.load(Relaxed));
            // Once unloaded, a handle may be another kernel's.
            let is_its = |handle: &usize| {
                *handle != 0
                    && host().kernel_of(*handle).is_none_or(|known| known as usize == index)
            };
            all.extend(handles.into_iter().filter(is_its).map(|h| (h, (index, transformed))));
        }
    }
    all
}

/// This kernel is only run whole from now on.
pub fn refuse(index: usize, why: TransformRefusal) {
    publish(index, transform_state::WHOLE_ONLY, why.code());
    if let Some(client) = host().client() {
        client.counters.refused_kernels.fetch_add(1, Relaxed);
    }
}

/// This kernel is not run on some of the SMs any more.
pub fn refuse_sm_limit(index: usize) {
    if let Some(kernel) = KERNELS.get(index) {
        kernel.never_sm_limited.store(true, Relaxed);
        changed();
    }
}

/// Whether its launches may be limited, also if nobody has read its code.
pub(crate) fn may_be_limited_unread(index: usize) -> bool {
    KERNELS.get(index).is_some_and(|kernel| kernel.may_be_limited_unread.load(Relaxed))
}

/// A kernel's transformed form, if it is ready.
pub fn transformed(index: usize) -> Option<&'static Transformed> {
    let kernel = KERNELS.get(index)?;
    let (state, _) = transform_state::unpack(kernel.state.load(Acquire));
    if state != transform_state::READY {
        return None;
    }
    kernel.transformed()
}

/// A kernel's form could not be made for a reason that says nothing of it: it may be asked for again.
pub(crate) fn preparable(index: usize) {
    if KERNELS.get(index).is_some() {
        publish(index, transform_state::PREPARABLE, 0);
    }
}

/// The transformed forms there are.
pub(crate) fn all_transformed() -> impl Iterator<Item = &'static Transformed> {
    KERNELS.iter().filter_map(Kernel::transformed)
}

impl Kernel {
    /// Its transformed form, also one that is not ready any more.
    pub(crate) fn transformed(&self) -> Option<&'static Transformed> {
        // SAFETY: null, or leaked by `making::prepared`.
        unsafe { self.transformed.load(Acquire).as_ref() }
    }
}

/// Only in a forked child.
pub(crate) fn reset() {
    for kernel in &KERNELS {
        kernel.state.store(0, SeqCst);
        kernel.never_sm_limited.store(false, SeqCst);
        kernel.may_be_limited_unread.store(false, SeqCst);
        kernel.transformed.store(std::ptr::null_mut(), SeqCst);
    }
}
