//! Which launches can be made in another form, and having the forms made.
//!
//! A kernel is looked at when it is launched first: what speaks against transforming it is
//! found from its name and image. Its form is made when a policy asks for it, by a
//! thread of its own ([`worker`](crate::worker)). Until then, and if that fails, launches run whole.
//!
//! Forms are made in one context, the first that needs one.

use crate::contexts::has_queues;
use crate::cuda::{Ptr, driver};
use crate::host::host;
use crate::jobs::{self, Job, Task};
use crate::kernels::{KERNELS, publish};
use crate::launch::{KernelArguments, Shape, StreamState};
use crate::settings::{rewrites, takes_vendor};
use crate::transformed::{Transformed, blocks, cluster, plain_function};
use crate::{gate, kernels, making, occupancy, transformed, vendor, watch, worker};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use tally_contract::limits::BACKLOG_MAX;
use tally_ipc::layout::submission_flags::{CAN_PREEMPT, CAN_PREPARE, CAN_SLICE};
use tally_ipc::layout::{KERNEL_SLOTS, transform_state};
use tally_rewriter::{TransformRefusal, names as kernel_names};

/// What can be done to a launch of a kernel.
pub fn offers(shape: &Shape, arguments: &KernelArguments, stream: &StreamState) -> u32 {
    let index = shape.kernel as usize;
    let context = stream.context;
    if !rewrites() || index >= KERNEL_SLOTS || !gate::may_serve(context) {
        return 0;
    }
    let Some(blocks) = blocks(shape.grid) else { return 0 };
    let (state, detail) = transform_state::unpack(KERNELS[index].state.load(Acquire));
    match state {
        transform_state::UNKNOWN => {
            look_at(index, arguments.function);
            0
        }
        transform_state::PREPARABLE => CAN_PREPARE,
        transform_state::READY => {
            let is_its =
                |c: &&Transformed| c.context == context && c.serves(arguments.function as usize);
            let Some(transformed) = kernels::transformed(index).filter(is_its) else { return 0 };
            // Parts wait for one another in a hardware queue.
            let has_room = stream.backlog <= BACKLOG_MAX
                && watch::makes_room()
                && has_queues(context)
                && transformed.keeps_occupancy(arguments, blocks);
            let Some(cluster) = cluster(arguments, transformed).filter(|_| has_room) else {
                return 0;
            };
            let claimed = blocks <= gate::TABLE_WORDS;
            let by_offset =
                || cluster == [1; 3] && by_offset(transformed, index, arguments).is_some();
            let sliceable = detail & transform_state::SLICEABLE != 0 && (claimed || by_offset());
            let preemptible = detail & transform_state::PREEMPTIBLE != 0 && claimed;
            (if sliceable { CAN_SLICE } else { 0 }) | (if preemptible { CAN_PREEMPT } else { 0 })
        }
        _ => 0,
    }
}

/// Which launches of a kernel may be limited to some of the SMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limitable {
    Never,
    /// Those with more blocks than the whole GPU holds at once: no block can rely on all others.
    Larger,
    /// All: its code was read, and its blocks neither wait for one another nor ask where they run.
    Any,
}

/// Which launches of a kernel may be limited. One that nobody has looked at is looked at now.
pub fn limitable(index: usize, function: Ptr) -> Limitable {
    look_at_new(index, function);
    limitable_as_known(index)
}

/// Whether a kernel was looked at.
pub fn is_looked_at(index: usize) -> bool {
    let state = KERNELS.get(index).map(|kernel| kernel.state.load(Acquire));
    state.is_some_and(|word| transform_state::unpack(word).0 != transform_state::UNKNOWN)
}

/// A kernel is looked at, unless it was. The function lives.
pub(crate) fn look_at_new(index: usize, function: Ptr) {
    if index < KERNEL_SLOTS && !is_looked_at(index) {
        look_at(index, function);
    }
}

/// Which launches of a kernel may be limited, without asking the driver. Closed libraries, by the library that holds
/// the image, need not have been read: by default they are not, and where they are, loops that may wait do not count,
/// which most matrix products have.
pub(crate) fn limitable_as_known(index: usize) -> Limitable {
    let Some(kernel) = KERNELS.get(index) else { return Limitable::Never };
    let (state, detail) = transform_state::unpack(kernel.state.load(Acquire));
    if kernel.never_sm_limited.load(Relaxed) {
        return Limitable::Never;
    }
    match state {
        transform_state::READY => match kernels::transformed(index) {
            Some(transformed) if transformed.reads_sm => Limitable::Never,
            Some(_) if detail & transform_state::SLICEABLE != 0 => Limitable::Any,
            Some(_) => Limitable::Larger,
            None => Limitable::Never,
        },
        transform_state::WHOLE_ONLY => {
            let of_any = [
                TransformRefusal::VendorLibrary,
                TransformRefusal::ImageGone,
                TransformRefusal::BlocksMayWait,
            ];
            let is_any = of_any.iter().any(|why| why.code() == detail);
            match is_any && kernel.may_be_limited_unread.load(Relaxed) {
                true => Limitable::Larger,
                false => Limitable::Never,
            }
        }
        // Its code is going to be read.
        _ => Limitable::Never,
    }
}

/// Find out what speaks against transforming a kernel.
#[cold]
fn look_at(index: usize, function: Ptr) {
    let Some(client) = host().client() else { return };
    if client.kernels.len() <= index {
        return;
    }
    let verdict = verdict(index, function);
    // Another thread may have looked as well, and things have gone on since.
    let (from, to) = (transform_state::UNKNOWN, transform_state::PREPARABLE);
    let (from, to) = (transform_state::pack(from, 0), transform_state::pack(to, 0));
    if KERNELS[index].state.compare_exchange(from, to, SeqCst, Relaxed).is_err() {
        return;
    }
    match verdict {
        Ok(()) => publish(index, transform_state::PREPARABLE, 0),
        Err(why) => kernels::refuse(index, why),
    }
}

fn verdict(index: usize, function: Ptr) -> Result<(), TransformRefusal> {
    let image = host().image_of(index);
    let (is_there, library) = (host().library(image).map(drop), host().library_name(image));
    let library = library.as_deref();
    let name = driver().name_of(function as usize).ok_or(TransformRefusal::NoSuchKernel)?;
    let name = name.to_str().map_err(|_| TransformRefusal::NoSuchKernel)?;
    if let Some(why) = kernel_names::waits_by_name(name) {
        return Err(why);
    }
    let may_be_limited_unread = library.is_some_and(vendor::may_be_limited_unread);
    KERNELS[index].may_be_limited_unread.store(may_be_limited_unread, Relaxed);
    if vendor::is_vendor(name, library) && !takes_vendor() {
        return Err(TransformRefusal::VendorLibrary);
    }
    is_there
}

static GATE_ASKED: AtomicBool = AtomicBool::new(false);

/// Have a kernel's transformed form made.
#[cold]
pub fn prepare(index: usize, launch: &KernelArguments, context: usize, device: i32, us: u32) {
    let Some(kernel) = KERNELS.get(index) else { return };
    let from = transform_state::pack(transform_state::PREPARABLE, 0);
    let to = transform_state::pack(transform_state::PREPARING, 0);
    if kernel.state.compare_exchange(from, to, SeqCst, Relaxed).is_err() {
        return;
    }
    publish(index, transform_state::PREPARING, 0);
    let job = Job::of_launch(Task::Form, index, launch, (context, device), us);
    if !job.is_some_and(worker::hire) {
        kernels::preparable(index);
    }
}

/// Have the gate made, for launches that need no transformed form.
#[cold]
pub fn prepare_gate(context: usize) {
    if !GATE_ASKED.swap(true, SeqCst) {
        worker::hire(Job::of_context(Task::Gate, context));
    }
}

/// The function that can stand for a launch of this grid in slices by offset. The first time
/// that one could, it is asked for.
pub(crate) fn by_offset(
    transformed: &Transformed,
    index: usize,
    launch: &KernelArguments,
) -> Option<usize> {
    // In machine code only the index in x has an offset.
    if !transformed.is_ptx && launch.grid[1..] != [1; 2] {
        return None;
    }
    if transformed.by_offset.is_untried() {
        prepare_offset(index, launch, transformed);
        // Whoever asks first does without, however soon it is made.
        return None;
    }
    transformed.by_offset.function()
}

/// Have the form with offset block indices made, unless it was asked for.
#[cold]
fn prepare_offset(index: usize, launch: &KernelArguments, transformed: &Transformed) {
    if !transformed.by_offset.ask() {
        return;
    }
    // It can be transformed already: the others come first.
    let job =
        Job::of_launch(Task::Offset, index, launch, (transformed.context, transformed.device), 0);
    if !job.is_some_and(worker::hire) {
        transformed.by_offset.forgo();
    }
}

/// The program set an attribute of a function: its transformed form gets it, too.
pub fn attribute_set(function: Ptr) {
    // A form that is being made may have been given what was set before.
    transformed::attribute_was_set(kernels::all_transformed());
    if kernels::all_transformed().next().is_none() {
        return;
    }
    // Only this handle is known to live.
    let (plain, context) = (plain_function(function as usize), driver().current_context());
    for transformed in kernels::all_transformed() {
        let of = transformed.originals.each_ref().map(|o| o.load(Relaxed));
        if of.contains(&(function as usize)) || of.contains(&plain) {
            // A kernel has another function in each context.
            match transformed.context == context {
                true => transformed.copy_from(plain),
                false => transformed.make_stale(),
            }
        }
    }
    transformed::attribute_was_set(kernels::all_transformed());
}

/// Functions are about to be unloaded: nothing asks the driver about them any more.
pub fn forget_functions(are_gone: impl Fn(usize) -> bool) {
    occupancy::forget();
    for transformed in kernels::all_transformed() {
        transformed.forget_compared(&are_gone);
        if are_gone(transformed.originals[0].load(Relaxed)) {
            transformed.originals.iter().for_each(|o| o.store(0, Relaxed));
            kernels::changed();
        }
    }
    jobs::forget_functions(are_gone);
    kernels::changed();
}

/// What is noted of functions has changed.
pub fn functions_changed() {
    occupancy::forget();
    kernels::changed();
}

/// The program has unloaded an image: its forms go, too.
pub fn image_unloaded(image: u128) {
    let mut context = None;
    for (index, kernel) in KERNELS.iter().enumerate() {
        if let Some(transformed) =
            kernel.transformed().filter(|transformed| transformed.image == image)
        {
            context = Some(transformed.context);
            making::forget_kernel(index);
        }
    }
    making::forget_image(image);
    if let Some(context) = context.or_else(|| making::context_of(image)) {
        worker::hire(Job { image, us: 0, ..Job::of_context(Task::Unload(image), context) });
    }
}

/// The program may write constants of an image from now on, of which its forms have copies: launches that follow do
/// not take them. The host has no bytes of the image any more, so none are made. They stay loaded until the program
/// unloads the image, because launches may be under way.
pub fn image_written(image: u128) {
    for (index, kernel) in KERNELS.iter().enumerate() {
        if kernel.transformed().is_some_and(|transformed| transformed.image == image) {
            making::withdraw(index);
        }
    }
    making::forget_image(image);
}

/// A context is destroyed, and the forms in it. Nothing uses it any more.
pub fn forget_context(context: usize) {
    jobs::forget_context(context);
    GATE_ASKED.store(false, SeqCst);
    for (index, kernel) in KERNELS.iter().enumerate() {
        if kernel.transformed().is_some_and(|c| c.context == context) {
            making::forget_kernel(index);
        }
    }
    making::forget_context(context);
}

/// Only in a forked child.
pub fn reset() {
    GATE_ASKED.store(false, SeqCst);
}

#[cfg(test)]
mod tests;
