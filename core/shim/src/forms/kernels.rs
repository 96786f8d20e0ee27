//! Which kernels can be transformed, and what is known of their transformed forms.
//!
//! A kernel is looked at when it is launched first: what speaks against transforming it is
//! found from its name and image. Its form is made when a policy asks for it, by a
//! thread of its own ([`worker`](super::worker)). Until then, and if that fails, launches run whole.
//!
//! Forms are made in one context, the first that needs one.

use super::offset::SubGrid;
use super::worker::{self, Job, Task};
use super::{Place, gate, making, takes_vendor, vendor, watch};
use crate::cu::{
    FUNC_MAX_DYNAMIC_SHARED, FUNC_REQUIRED_CLUSTER, FUNC_SETTABLE, LAUNCH_ATTRIBUTE_CLUSTER,
    LAUNCH_ATTRIBUTE_PROGRAMMATIC, LAUNCH_ATTRIBUTES_PLAIN, LaunchAttribute, Ptr, SUCCESS, driver,
};
use crate::launch::{KernelArguments, Shape};
use crate::{images, names, state};
use std::collections::HashMap;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicUsize};
use tally_ipc::layout::submission_flags::{CAN_PREEMPT, CAN_PREPARE, CAN_SLICE};
use tally_ipc::layout::{KERNEL_SLOTS, cut_state};
use tally_rewriter::{Refusal, names as kernel_names};

/// A kernel in its transformed form.
#[derive(Debug)]
pub struct Cut {
    /// The context that it is loaded in.
    pub context: usize,
    /// The function with the prelude.
    pub function: usize,
    /// Its code is PTX.
    pub is_ptx: bool,
    /// The form with offset block indices.
    pub(super) sub_grid: SubGrid,
    /// Of its context.
    pub(super) device: i32,
    /// Offset and size of each parameter of the original.
    pub parameters: Vec<(usize, usize)>,
    /// Where the control block goes.
    pub control_offset: usize,
    /// Cluster dimensions fixed at compile time.
    pub cluster: Option<[u32; 3]>,
    /// Digest of the image that it was made from.
    pub image: u128,
    /// It reads its SM's number, or how many there are: never limited to some of them.
    pub reads_sm: bool,
    /// Those that the program requires by function attributes; 0: none.
    pub(super) required_cluster: [AtomicI32; 3],
    /// The function or kernel that it was made from, and its function; 0 once unloaded.
    pub(super) originals: [AtomicUsize; 2],
    /// Dynamic shared memory that its functions may have.
    pub(super) shared_max: AtomicI32,
    /// Another handle of the same code, of an image that was loaded twice, say, whose attributes are the same; and one
    /// whose attributes are not. 0: none was compared since an attribute was set last.
    pub(super) compared: [AtomicUsize; 2],
    /// Blocks of the launch that it was asked for at.
    pub wanted_blocks: u32,
    /// How long that one was expected to take, us; 0: unknown.
    pub wanted_us: u32,
}

struct Kernel {
    /// As in the shared table: what the core reads is only a copy of this.
    state: AtomicU32,
    cut: AtomicPtr<Cut>,
    /// The driver refused it on fewer SMs, or it did not end there.
    wide_only: AtomicBool,
    /// It is a closed library's, by its name or image.
    is_vendor: AtomicBool,
}

static KERNELS: [Kernel; KERNEL_SLOTS] = [const {
    Kernel {
        state: AtomicU32::new(cut_state::UNKNOWN as u32),
        cut: AtomicPtr::new(std::ptr::null_mut()),
        wide_only: AtomicBool::new(false),
        is_vendor: AtomicBool::new(false),
    }
}; KERNEL_SLOTS];

/// Calls so far that set an attribute of a function.
static ATTRIBUTES_SET: AtomicU32 = AtomicU32::new(0);
/// Changes whenever what can be transformed may have.
static CHANGES: AtomicU32 = AtomicU32::new(0);
static ALLOWED: AtomicBool = AtomicBool::new(false);

/// Rewriting is on, or not.
pub fn allow(allowed: bool) {
    ALLOWED.store(allowed, Release);
}

/// Whether it is.
pub fn is_allowed() -> bool {
    ALLOWED.load(Acquire)
}

fn publish(index: usize, state: u8, detail: u8) {
    let word = cut_state::pack(state, detail);
    KERNELS[index].state.store(word, Release);
    if let Some(client) = state::client() {
        client.kernels[index].cut.store(word, Release);
    }
    if !matches!(state, cut_state::PREPARABLE | cut_state::PREPARING) {
        changed();
    }
}

/// What can be transformed may be different now.
pub(super) fn changed() {
    CHANGES.fetch_add(1, SeqCst);
}

/// So often it may have changed: see [`ready`].
pub fn changes() -> u32 {
    CHANGES.load(SeqCst)
}

/// Kernels that can be transformed, their index and form, by the function or kernel that a program launches.
pub type Ready = HashMap<usize, (usize, &'static Cut)>;

/// Those of a context.
pub fn ready(context: usize) -> Ready {
    let mut all = Ready::new();
    for index in 0..KERNEL_SLOTS {
        if let Some(cut) = cut(index).filter(|cut| cut.context == context) {
            let handles = cut.originals.each_ref().map(|o| o.load(Relaxed));
            // Once unloaded, a handle may be another kernel's.
            let is_its = |handle: &usize| {
                *handle != 0 && names::known(*handle).is_none_or(|known| known as usize == index)
            };
            all.extend(handles.into_iter().filter(is_its).map(|h| (h, (index, cut))));
        }
    }
    all
}

/// This kernel is only run whole from now on.
pub fn refuse(index: usize, why: Refusal) {
    publish(index, cut_state::WHOLE_ONLY, why.code());
    if let Some(client) = state::client() {
        client.counters.refused_kernels.fetch_add(1, Relaxed);
    }
}

/// This kernel is not run on some of the SMs any more.
pub fn refuse_sm_limit(index: usize) {
    if let Some(kernel) = KERNELS.get(index) {
        kernel.wide_only.store(true, Relaxed);
    }
}

/// Whether a kernel may be limited to some of the SMs: its blocks do not wait for one another, and do not
/// ask where they run, as far as its code tells; of closed libraries' kernels, whose code is not
/// looked at, their names.
pub fn may_be_limited(index: usize, function: Ptr) -> bool {
    let Some(kernel) = KERNELS.get(index) else { return false };
    let (state, detail) = cut_state::unpack(kernel.state.load(Acquire));
    if kernel.wide_only.load(Relaxed) {
        return false;
    }
    match state {
        cut_state::UNKNOWN => {
            look_at(index, function);
            false
        }
        cut_state::READY => cut(index).is_some_and(|cut| !cut.reads_sm),
        // Those that are transformed are limited like those that are not.
        cut_state::WHOLE_ONLY => {
            let of_any = [Refusal::VendorLibrary, Refusal::ImageGone, Refusal::BlocksMayWait];
            kernel.is_vendor.load(Relaxed) && of_any.iter().any(|why| why.code() == detail)
        }
        // Its code is not looked at until it is to be transformed.
        _ => kernel.is_vendor.load(Relaxed),
    }
}

/// A kernel's transformed form, if it is ready.
pub fn cut(index: usize) -> Option<&'static Cut> {
    let kernel = KERNELS.get(index)?;
    let (state, _) = cut_state::unpack(kernel.state.load(Acquire));
    if state != cut_state::READY {
        return None;
    }
    // SAFETY: null, or leaked by `prepared`.
    unsafe { kernel.cut.load(Acquire).as_ref() }
}

pub fn attributes(arguments: &KernelArguments) -> &[LaunchAttribute] {
    if arguments.attributes.is_null() {
        return &[];
    }
    // SAFETY: the caller's array of this length, valid during its call.
    unsafe { std::slice::from_raw_parts(arguments.attributes, arguments.attribute_count as usize) }
}

/// The cluster dimensions of a launch, if it can be transformed as it is launched.
pub fn cluster(arguments: &KernelArguments, cut: &Cut) -> Option<[u32; 3]> {
    let required = || cut.required_cluster.each_ref().map(|d| d.load(Relaxed).max(1) as u32);
    let mut cluster = cut.cluster.unwrap_or_else(required);
    for a in attributes(arguments) {
        match a.id {
            LAUNCH_ATTRIBUTE_CLUSTER => {
                cluster = [a.value[0].max(1), a.value[1].max(1), a.value[2].max(1)];
            }
            LAUNCH_ATTRIBUTE_PROGRAMMATIC if a.value[0] == 0 => {}
            id if LAUNCH_ATTRIBUTES_PLAIN.contains(&id) => {}
            _ => return None,
        }
    }
    cluster.iter().all(|d| d.is_power_of_two()).then_some(cluster)
}

/// Blocks of a grid in y and in z, at most: CUDA refuses larger ones.
const GRID_YZ_MAX: u32 = 65_535;

/// Blocks of a grid, if there are not too many to number, and CUDA does not refuse such a grid: its slices would run.
pub fn blocks(grid: [u32; 3]) -> Option<u32> {
    let all = grid.iter().try_fold(1_u32, |all, n| all.checked_mul(*n));
    all.filter(|n| *n > 1 && *n < 1 << 31 && grid[1..].iter().all(|n| *n <= GRID_YZ_MAX))
}

/// Launches of a stream that may be unfinished, up to which it is transformed: a hardware queue takes 1 020
/// entries, a part takes two, and what is behind them in the stream is to have room as without us.
pub const BACKLOG_MAX: u32 = 64;

/// What can be done to a launch of a kernel.
pub fn offers(shape: &Shape, arguments: &KernelArguments, place: &Place) -> u32 {
    let index = shape.kernel as usize;
    let context = place.context;
    if !ALLOWED.load(Acquire) || index >= KERNEL_SLOTS || !gate::may_serve(context) {
        return 0;
    }
    let Some(blocks) = blocks(shape.grid) else { return 0 };
    let (state, detail) = cut_state::unpack(KERNELS[index].state.load(Acquire));
    match state {
        cut_state::UNKNOWN => {
            look_at(index, arguments.function);
            0
        }
        cut_state::PREPARABLE => CAN_PREPARE,
        cut_state::READY => {
            let is_its = |c: &&Cut| c.context == context && c.serves(arguments.function as usize);
            let Some(cut) = cut(index).filter(is_its) else { return 0 };
            // Parts wait for one another in a hardware queue.
            let has_room = place.backlog <= BACKLOG_MAX
                && watch::makes_room()
                && super::has_queues(context)
                && cut.keeps_occupancy(arguments, blocks);
            let Some(cluster) = cluster(arguments, cut).filter(|_| has_room) else { return 0 };
            let claimed = blocks <= gate::TABLE_WORDS;
            let by_offset = || cluster == [1; 3] && cut.by_offset(index, arguments).is_some();
            let sliceable = detail & cut_state::SLICEABLE != 0 && (claimed || by_offset());
            let preemptible = detail & cut_state::PREEMPTIBLE != 0 && claimed;
            (if sliceable { CAN_SLICE } else { 0 }) | (if preemptible { CAN_PREEMPT } else { 0 })
        }
        _ => 0,
    }
}

/// Find out what speaks against transforming a kernel.
#[cold]
fn look_at(index: usize, function: Ptr) {
    let Some(client) = state::client() else { return };
    if client.kernels.len() <= index {
        return;
    }
    let verdict = verdict(index, function);
    // Another thread may have looked as well, and things have gone on since.
    let (from, to) = (cut_state::UNKNOWN, cut_state::PREPARABLE);
    let (from, to) = (cut_state::pack(from, 0), cut_state::pack(to, 0));
    if KERNELS[index].state.compare_exchange(from, to, SeqCst, Relaxed).is_err() {
        return;
    }
    match verdict {
        Ok(()) => publish(index, cut_state::PREPARABLE, 0),
        Err(why) => refuse(index, why),
    }
}

fn verdict(index: usize, function: Ptr) -> Result<(), Refusal> {
    let library = images::library(names::image(index));
    let name = driver().name_of(function as usize).ok_or(Refusal::NoSuchKernel)?;
    let name = name.to_str().map_err(|_| Refusal::NoSuchKernel)?;
    if let Some(why) = kernel_names::waits_by_name(name) {
        return Err(why);
    }
    if vendor::is_vendor(name, library.as_ref().ok().and_then(Option::as_deref)) {
        KERNELS[index].is_vendor.store(true, Relaxed);
        if !takes_vendor() {
            return Err(Refusal::VendorLibrary);
        }
    }
    library.map(drop)
}

static GATE_ASKED: AtomicBool = AtomicBool::new(false);

/// Have a kernel's transformed form made.
#[cold]
pub fn prepare(index: usize, launch: &KernelArguments, context: usize, device: i32, us: u32) {
    let Some(kernel) = KERNELS.get(index) else { return };
    let from = cut_state::pack(cut_state::PREPARABLE, 0);
    let to = cut_state::pack(cut_state::PREPARING, 0);
    if kernel.state.compare_exchange(from, to, SeqCst, Relaxed).is_err() {
        return;
    }
    publish(index, cut_state::PREPARING, 0);
    let job = Job::of_launch(Task::Form, index, launch, (context, device), us);
    if !job.is_some_and(worker::hire) {
        preparable(index);
    }
}

/// Have the gate made, for launches that need no transformed form.
#[cold]
pub fn prepare_gate(context: usize) {
    if !GATE_ASKED.swap(true, SeqCst) {
        worker::hire(Job::of_context(Task::Gate, context));
    }
}

/// Have the form with offset block indices made.
#[cold]
pub(super) fn prepare_offset(index: usize, launch: &KernelArguments, cut: &Cut) {
    // It can be transformed already: the others come first.
    let job = Job::of_launch(Task::Offset, index, launch, (cut.context, cut.device), 0);
    if !job.is_some_and(worker::hire) {
        cut.sub_grid.forgo();
    }
}

/// A kernel's form could not be made for a reason that says nothing of it: it may be asked for again.
pub(super) fn preparable(index: usize) {
    if KERNELS.get(index).is_some() {
        publish(index, cut_state::PREPARABLE, 0);
    }
}

/// The program exits: the worker, which begins nothing more, leaves the driver.
pub fn finish() {
    drop(worker::leave_context());
}

/// Its form is there.
pub(super) fn prepared(index: usize, cut: Cut) {
    let detail = cut_state::SLICEABLE | cut_state::PREEMPTIBLE;
    let (kernel, image) = (&KERNELS[index], cut.image);
    // Kept on purpose: a launch may be reading it.
    kernel.cut.store(Box::leak(Box::new(cut)), Release);
    publish(index, cut_state::READY, detail);
    // Behind that: if the program has unloaded the image since the form was made, either it has found the form here
    // ([`image_unloaded`]) or that shows now. Else a later kernel of the same code would have the form's handle, which
    // by then may be another's.
    if images::library(image).is_err() {
        return forget(index, kernel);
    }
    if let Some(client) = state::client() {
        client.counters.transformed_kernels.fetch_add(1, Relaxed);
    }
}

pub(super) fn attribute(function: usize, which: i32) -> Option<i32> {
    let mut value = 0;
    let get = driver().func_attribute?;
    // SAFETY: a live function; a valid out-pointer.
    (unsafe { get(&mut value, which, function as Ptr) } == SUCCESS).then_some(value)
}

/// Give a transformed form what the program set for the original.
pub(super) fn copy_attributes(original: usize, to: usize) {
    let Some(set) = driver().func_set_attribute else { return };
    for which in FUNC_SETTABLE {
        if let Some(value) = attribute(original, which)
            && attribute(to, which) != Some(value)
        {
            // SAFETY: a function of ours. Refused: the launch that needs it fails,
            // and is made whole.
            unsafe { set(to as Ptr, which, value) };
        }
    }
}

/// The function behind a handle that may be a context-free kernel's.
pub(super) fn plain_function(handle: usize) -> usize {
    let mut function: Ptr = std::ptr::null_mut();
    match driver().kernel_function {
        // SAFETY: a handle that was just launched; refused if it is a function already.
        Some(f) if unsafe { f(&mut function, handle as Ptr) } == SUCCESS => function as usize,
        _ => handle,
    }
}

/// Blocks of a function that an SM holds at once. `None`: the driver does not tell.
fn resident(function: Ptr, block: [u32; 3], shared_bytes: u32) -> Option<u64> {
    let threads = block.iter().try_fold(1_u32, |all, n| all.checked_mul(*n))?;
    let mut count = 0;
    // SAFETY: a function of the program's that is being launched, or one of ours; a valid out-pointer.
    let result = unsafe {
        driver().occupancy?(
            &mut count,
            function,
            i32::try_from(threads).ok()?,
            shared_bytes as usize,
        )
    };
    (result == SUCCESS).then_some(count.max(0) as u64)
}

/// Blocks of a launch that the whole GPU holds at once. `None`: the driver does not tell.
pub fn resident_on_all(launch: &KernelArguments) -> Option<u64> {
    let sms = state::client()?.report.sm_count.load(Acquire);
    Some(resident(launch.function, launch.block, launch.shared_bytes)? * u64::from(sms))
}

impl Cut {
    /// Whether blocks that the original runs at once run at once in this form, too, or there are too many
    /// for a program to rely on it.
    pub(super) fn keeps_occupancy(&self, launch: &KernelArguments, blocks: u32) -> bool {
        let of = |function| resident(function, launch.block, launch.shared_bytes);
        let sms = state::client().map_or(0, |client| client.report.sm_count.load(Acquire));
        if sms == 0 {
            return false;
        }
        match (of(launch.function), of(self.function as Ptr)) {
            (Some(before), Some(now)) => {
                now >= before || u64::from(blocks) > before * u64::from(sms)
            }
            _ => false,
        }
    }

    /// The function or kernel that it was made from, unless that was unloaded.
    pub fn original(&self) -> Option<Ptr> {
        Some(self.originals[0].load(Relaxed) as Ptr).filter(|original| !original.is_null())
    }

    /// Whether this form stands for launches of a handle: of what it was made from, or of the same code with the same
    /// attributes.
    pub(super) fn serves(&self, handle: usize) -> bool {
        if self.is_of(handle) {
            return true;
        }
        let [alike, unlike] = self.compared.each_ref().map(|h| h.load(Acquire));
        handle != 0 && handle != unlike && (handle == alike || self.compare(handle))
    }

    fn is_of(&self, handle: usize) -> bool {
        handle != 0 && self.originals.iter().any(|o| o.load(Relaxed) == handle)
    }

    #[cold]
    fn compare(&self, handle: usize) -> bool {
        let before = ATTRIBUTES_SET.load(SeqCst);
        let plain = plain_function(handle);
        let is_same = |which: &i32| attribute(plain, *which) == attribute(self.function, *which);
        let is_alike = self.is_of(plain) || FUNC_SETTABLE.iter().all(is_same);
        self.compared[usize::from(!is_alike)].store(handle, SeqCst);
        // Set meanwhile: `attribute_set` has forgotten it, or will, or we do.
        if ATTRIBUTES_SET.load(SeqCst) != before {
            self.forget_compared(|_| true);
        }
        is_alike
    }

    fn forget_compared(&self, is_gone: impl Fn(usize) -> bool) {
        for handle in &self.compared {
            let there = handle.load(SeqCst);
            if there != 0 && is_gone(there) {
                handle.store(0, SeqCst);
            }
        }
    }

    /// See that a launch of `original` may have so much dynamic shared memory, if its
    /// own form may.
    pub fn allow_shared(&self, bytes: u32, original: Ptr) {
        let has = bytes.min(i32::MAX as u32) as i32 <= self.shared_max.load(Relaxed);
        if has || !self.is_of(original as usize) {
            return;
        }
        // Set while the transformed form was made.
        self.copy_from(plain_function(original as usize));
    }

    fn copy_from(&self, original: usize) {
        for to in std::iter::once(self.function).chain(self.sub_grid.function()) {
            copy_attributes(original, to);
        }
        self.copied();
    }

    /// Take over what launches need to know of its attributes.
    pub(super) fn copied(&self) {
        let of = |which| attribute(self.function, which).unwrap_or(0);
        self.shared_max.store(of(FUNC_MAX_DYNAMIC_SHARED), Relaxed);
        for (dimension, which) in self.required_cluster.iter().zip(FUNC_REQUIRED_CLUSTER) {
            dimension.store(of(which), Relaxed);
        }
    }
}

/// The transformed forms there are.
fn all_transformed() -> impl Iterator<Item = &'static Cut> {
    // SAFETY: null, or leaked by `prepared`.
    KERNELS.iter().filter_map(|k| unsafe { k.cut.load(Acquire).as_ref() })
}

/// The program set an attribute of a function: its transformed form gets it, too.
pub fn attribute_set(function: Ptr) {
    // Only this handle is known to live.
    let plain = plain_function(function as usize);
    for cut in all_transformed() {
        let of = cut.originals.each_ref().map(|o| o.load(Relaxed));
        if of.contains(&(function as usize)) || of.contains(&plain) {
            cut.copy_from(plain);
        }
    }
    ATTRIBUTES_SET.fetch_add(1, SeqCst);
    all_transformed().for_each(|cut| cut.forget_compared(|_| true));
}

/// Functions are about to be unloaded: nothing asks the driver about them any more.
pub fn forget_functions(are_gone: impl Fn(usize) -> bool) {
    for cut in all_transformed() {
        cut.forget_compared(&are_gone);
        if are_gone(cut.originals[0].load(Relaxed)) {
            cut.originals.iter().for_each(|o| o.store(0, Relaxed));
            changed();
        }
    }
    worker::forget_functions(are_gone);
}

/// The program has unloaded an image: its forms go, too.
pub fn image_unloaded(image: u128) {
    let mut context = None;
    for (index, kernel) in KERNELS.iter().enumerate() {
        // SAFETY: null, or leaked by `prepared`.
        let there = unsafe { kernel.cut.load(Acquire).as_ref() };
        if let Some(cut) = there.filter(|cut| cut.image == image) {
            context = Some(cut.context);
            forget(index, kernel);
        }
    }
    making::forget_image(image);
    if let Some(context) = context.or_else(|| making::context_of(image)) {
        worker::hire(Job { image, us: 0, ..Job::of_context(Task::Unload(image), context) });
    }
}

/// A kernel has no transformed form any more.
fn forget(index: usize, kernel: &Kernel) {
    kernel.cut.store(std::ptr::null_mut(), Release);
    watch::forget_kernel(index);
    let (state, _) = cut_state::unpack(kernel.state.load(Acquire));
    // What was profiled of a kernel stays.
    if state == cut_state::READY {
        publish(index, cut_state::UNKNOWN, 0);
    }
}

/// A context is destroyed, and the forms in it. Nothing uses it any more.
pub fn forget_context(context: usize) {
    worker::forget_context(context);
    GATE_ASKED.store(false, SeqCst);
    for (index, kernel) in KERNELS.iter().enumerate() {
        // SAFETY: null, or leaked by `prepared`.
        let there = unsafe { kernel.cut.load(Acquire).as_ref() };
        if there.is_some_and(|c| c.context == context) {
            forget(index, kernel);
        }
    }
    making::forget_context(context);
}

/// Only in a forked child.
pub fn reset() {
    ALLOWED.store(false, SeqCst);
    GATE_ASKED.store(false, SeqCst);
    worker::reset();
    making::reset();
    for kernel in &KERNELS {
        kernel.state.store(0, SeqCst);
        kernel.wide_only.store(false, SeqCst);
        kernel.is_vendor.store(false, SeqCst);
        kernel.cut.store(std::ptr::null_mut(), SeqCst);
    }
}

#[cfg(test)]
mod tests;
