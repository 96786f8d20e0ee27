//! Which kernels can be cut, and what is known of their cut forms.
//!
//! A kernel is looked at when it is launched first: what speaks against cutting it is
//! found from its name and image. Its cut form is made when a policy asks for it, by a
//! thread of its own ([`making`]). Until then, and if that fails, launches run whole.
//!
//! Cut forms are made in one context, the first that needs one.

use super::guarded::Guarded;
use super::offset::SubGrid;
use super::{gate, images, making, quiet, takes_vendor, vendor};
use crate::cu::{
    FUNC_MAX_DYNAMIC_SHARED, FUNC_REQUIRED_CLUSTER, FUNC_SETTABLE, LAUNCH_ATTRIBUTE_CLUSTER,
    LAUNCH_ATTRIBUTE_PROGRAMMATIC, LAUNCH_ATTRIBUTES_PLAIN, LaunchAttribute, Ptr, SUCCESS, driver,
};
use crate::launch::{KernelArguments, Shape};
use crate::lock::{Held, Lock};
use crate::{log, names, state, threads};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicUsize};
use std::time::Duration;
use tally_ipc::layout::submission_flags::{CAN_PREEMPT, CAN_PREPARE, CAN_SLICE};
use tally_ipc::layout::{KERNEL_SLOTS, cut_state};
use tally_kernels::{Refusal, names as kernel_names};

/// A kernel in its cut form.
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
    /// Its blocks may wait for one another: never sliced, for a slice that waits for a later one can
    /// only be helped in time, and one by offset not at all.
    pub may_wait: bool,
    /// Those that the program requires by function attributes; 0: none.
    pub(super) required_cluster: [AtomicI32; 3],
    /// The function or kernel that it was made from, and its function; 0 once unloaded.
    pub(super) originals: [AtomicUsize; 2],
    /// Dynamic shared memory that its functions may have.
    pub(super) shared_max: AtomicI32,
    /// Blocks of the launch that it was asked for at.
    pub wanted_blocks: u32,
    /// How long that one was expected to take, us; 0: unknown.
    pub wanted_us: u32,
}

struct Kernel {
    /// As in the shared table: what the core reads is only a copy of this.
    state: AtomicU32,
    cut: AtomicPtr<Cut>,
    /// The driver refused it on fewer SMs.
    wide_only: AtomicBool,
}

static KERNELS: [Kernel; KERNEL_SLOTS] = [const {
    Kernel {
        state: AtomicU32::new(cut_state::UNKNOWN as u32),
        cut: AtomicPtr::new(std::ptr::null_mut()),
        wide_only: AtomicBool::new(false),
    }
}; KERNEL_SLOTS];

/// Changes whenever what can be cut may have.
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

/// What can be cut may be different now.
pub(super) fn changed() {
    CHANGES.fetch_add(1, SeqCst);
}

/// So often it may have changed: see [`ready`].
pub fn changes() -> u32 {
    CHANGES.load(SeqCst)
}

/// Kernels that can be cut, their index and form, by the function or kernel that a program launches.
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
pub fn refuse_narrow(index: usize) {
    if let Some(kernel) = KERNELS.get(index) {
        kernel.wide_only.store(true, Relaxed);
    }
}

/// Whether it may be.
pub fn may_narrow(index: usize) -> bool {
    KERNELS.get(index).is_some_and(|kernel| !kernel.wide_only.load(Relaxed))
}

/// A kernel's cut form, if it is ready.
pub fn cut(index: usize) -> Option<&'static Cut> {
    let kernel = KERNELS.get(index)?;
    let (state, _) = cut_state::unpack(kernel.state.load(Acquire));
    if state != cut_state::READY {
        return None;
    }
    // SAFETY: null, or leaked by `prepared`.
    unsafe { kernel.cut.load(Acquire).as_ref() }
}

/// Launch attributes.
pub fn attributes(arguments: &KernelArguments) -> &[LaunchAttribute] {
    if arguments.attributes.is_null() {
        return &[];
    }
    // SAFETY: the caller's array of this length, valid during its call.
    unsafe { std::slice::from_raw_parts(arguments.attributes, arguments.attribute_count as usize) }
}

/// The cluster dimensions of a launch, if it can be cut as it is launched.
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

/// Blocks of a grid, if there are not too many to number.
pub fn blocks(grid: [u32; 3]) -> Option<u32> {
    grid.iter().try_fold(1_u32, |all, n| all.checked_mul(*n)).filter(|n| *n > 1 && *n < 1 << 31)
}

/// What can be done to a launch of a kernel.
pub fn offers(shape: &Shape, arguments: &KernelArguments, context: usize) -> u32 {
    let index = shape.kernel as usize;
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
            let Some(cut) = cut(index).filter(|c| c.context == context) else { return 0 };
            let Some(cluster) = cluster(arguments, cut) else { return 0 };
            let claimed = blocks <= gate::TABLE_WORDS;
            let by_offset = || {
                cluster == [1; 3] && cut.by_offset(index, arguments.function, shape.grid).is_some()
            };
            let sliceable = detail & cut_state::SLICEABLE != 0 && (claimed || by_offset());
            let preemptible = detail & cut_state::PREEMPTIBLE != 0 && claimed;
            (if sliceable { CAN_SLICE } else { 0 }) | (if preemptible { CAN_PREEMPT } else { 0 })
        }
        _ => 0,
    }
}

/// Find out what speaks against cutting a kernel.
#[cold]
fn look_at(index: usize, function: Ptr) {
    let Some(client) = state::client() else { return };
    let image = client.kernels[index].image.load(Relaxed);
    let verdict = verdict(image, function);
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

fn verdict(image: u64, function: Ptr) -> Result<(), Refusal> {
    let library = images::library(image)?;
    let name = driver().name_of(function as usize).ok_or(Refusal::NoSuchKernel)?;
    let name = name.to_str().map_err(|_| Refusal::NoSuchKernel)?;
    if let Some(why) = kernel_names::waits_by_name(name) {
        return Err(why);
    }
    if !takes_vendor() && vendor::is_vendor(name, library.as_deref()) {
        return Err(Refusal::VendorLibrary);
    }
    Ok(())
}

/// A cut form, or only the gate, to be made.
#[derive(Debug)]
pub(super) struct Job {
    /// Its kernel, or [`GATE_ONLY`].
    pub(super) index: usize,
    pub(super) function: usize,
    pub(super) context: usize,
    pub(super) device: i32,
    /// The form with offset block indices of one that is cut.
    offset: bool,
    /// Blocks of the launch that wants it.
    pub(super) blocks: u32,
    /// How long the kernel is expected to take; 0: unknown. Of several jobs the one of the longest
    /// comes first: that is the one that others wait for, and each job takes a while.
    pub(super) us: u32,
}

/// Where a job goes among the others: behind those of kernels that are as long.
fn place(jobs: &VecDeque<Job>, us: u32) -> usize {
    jobs.iter().position(|other| other.us < us).unwrap_or(jobs.len())
}

/// Between two attempts to find nothing under way.
const NAP: Duration = Duration::from_millis(10);
/// Only the gate is wanted.
const GATE_ONLY: usize = usize::MAX;

static JOBS: Guarded<VecDeque<Job>> = Guarded::new(VecDeque::new());
static JOBS_WORD: AtomicU32 = AtomicU32::new(0);
static WORKING: AtomicBool = AtomicBool::new(false);
static GATE_ASKED: AtomicBool = AtomicBool::new(false);

/// Have a kernel's cut form made.
#[cold]
pub fn prepare(index: usize, launch: &KernelArguments, context: usize, device: i32, us: u32) {
    let Some(kernel) = KERNELS.get(index) else { return };
    let from = cut_state::pack(cut_state::PREPARABLE, 0);
    let to = cut_state::pack(cut_state::PREPARING, 0);
    if kernel.state.compare_exchange(from, to, SeqCst, Relaxed).is_err() {
        return;
    }
    publish(index, cut_state::PREPARING, 0);
    let (function, blocks) = (launch.function as usize, blocks(launch.grid).unwrap_or(0));
    hire(Job { index, function, context, device, offset: false, blocks, us });
}

/// Have the gate made, for launches that need no cut form.
#[cold]
pub fn prepare_gate(context: usize) {
    if !GATE_ASKED.swap(true, SeqCst) {
        hire(Job {
            index: GATE_ONLY,
            function: 0,
            context,
            device: -1,
            offset: false,
            blocks: 0,
            us: u32::MAX,
        });
    }
}

/// Have the form with offset block indices made.
#[cold]
pub(super) fn prepare_offset(index: usize, function: Ptr, cut: &Cut) {
    let (context, device) = (cut.context, cut.device);
    // It can be cut already.
    let function = function as usize;
    hire(Job { index, function, context, device, offset: true, blocks: 0, us: 0 });
}

fn hire(job: Job) {
    JOBS.with(|jobs| jobs.insert(place(jobs, job.us), job));
    JOBS_WORD.fetch_add(1, SeqCst);
    let _ = rustix::thread::futex::wake(&JOBS_WORD, rustix::thread::futex::Flags::PRIVATE, 1);
    let spawn = || gate::spawn_with("tally-rewrite", threads::STACK_BYTES_COMPILING, work);
    if !WORKING.swap(true, SeqCst) && !spawn() {
        WORKING.store(false, SeqCst);
    }
}

fn work() {
    driver().relax_thread();
    loop {
        let seen = JOBS_WORD.load(SeqCst);
        if JOBS.with(|jobs| jobs.is_empty()) {
            let flags = rustix::thread::futex::Flags::PRIVATE;
            let _ = rustix::thread::futex::wait(&JOBS_WORD, flags, seen, None);
            continue;
        }
        if crate::attendant::is_exiting() {
            return;
        }
        let Some(quiet) = quiet::of_worker() else {
            std::thread::sleep(NAP);
            continue;
        };
        // The context and the function live while the lock is held, if the job is still
        // there: see `forget_context` and `forget_functions`.
        let _alive = ALIVE.lock();
        if crate::attendant::is_exiting() || is_lost() {
            return;
        }
        let Some(job) = JOBS.with(VecDeque::pop_front) else { continue };
        if job.index == GATE_ONLY {
            making::gate(job.context);
            continue;
        }
        if job.offset {
            if let Some(cut) = cut(job.index).filter(|cut| cut.context == job.context) {
                let made = making::offset(&job, cut);
                if is_lost() {
                    return;
                }
                cut.settle_offset(made);
            }
            continue;
        }
        if !gate::may_serve(job.context) {
            // Another context was first. That says nothing about the kernel.
            publish(job.index, cut_state::PREPARABLE, 0);
            continue;
        }
        let made = making::make(&job);
        if is_lost() {
            return;
        }
        // Before it is said that it can be cut: a launch that hears of it is.
        drop(quiet);
        match made {
            Ok(cut) => prepared(job.index, cut),
            Err(why) => {
                log!("kernel {} is run whole: {why}", job.index);
                refuse(job.index, why);
            }
        }
    }
}

/// Held while the worker uses the context.
static ALIVE: Lock = Lock::new();
/// The worker did not come back from the driver in [`LOST_AFTER`]: nobody waits for it any
/// more, and it stops as soon as it does.
static LOST: AtomicBool = AtomicBool::new(false);
/// Longer than the driver takes to compile anything. Only a program that exits while the
/// driver's compiler is in use for the first time gets there: see
/// [`crate::attach::exit_before_others`].
const LOST_AFTER: Duration = Duration::from_secs(10);

/// Wait for the worker's driver calls, if it can be waited for.
fn alive() -> Option<Held<'static>> {
    if LOST.load(SeqCst) {
        return None;
    }
    let held = ALIVE.lock_within(LOST_AFTER);
    if held.is_none() {
        log!("the driver does not return from making a cut form: not waited for any more");
        LOST.store(true, SeqCst);
    }
    held
}

/// Whether the worker may go on with what it was doing.
pub(super) fn is_lost() -> bool {
    LOST.load(SeqCst)
}

/// The program exits: the worker, which begins nothing more, leaves the driver.
pub fn finish() {
    drop(alive());
}

fn prepared(index: usize, cut: Cut) {
    let detail = if cut.may_wait { 0 } else { cut_state::SLICEABLE } | cut_state::PREEMPTIBLE;
    // Kept on purpose: a launch may be reading it.
    KERNELS[index].cut.store(Box::leak(Box::new(cut)), Release);
    publish(index, cut_state::READY, detail);
    if let Some(client) = state::client() {
        client.counters.cut_kernels.fetch_add(1, Relaxed);
    }
}

pub(super) fn attribute(function: usize, which: i32) -> Option<i32> {
    let mut value = 0;
    let get = driver().func_attribute?;
    // SAFETY: a live function; a valid out-pointer.
    (unsafe { get(&mut value, which, function as Ptr) } == SUCCESS).then_some(value)
}

/// Give a cut form what the program set for the original.
pub(super) fn copy_attributes(original: usize, to: usize) {
    let Some(set) = driver().func_set_attribute else { return };
    for which in FUNC_SETTABLE {
        if let Some(value) = attribute(original, which).filter(|v| *v > 0)
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

impl Cut {
    /// The function or kernel that it was made from, unless that was unloaded.
    pub fn original(&self) -> Option<Ptr> {
        Some(self.originals[0].load(Relaxed) as Ptr).filter(|original| !original.is_null())
    }

    /// See that a launch of `original` may have so much dynamic shared memory, if its
    /// own form may.
    pub fn allow_shared(&self, bytes: u32, original: Ptr) {
        if bytes.min(i32::MAX as u32) as i32 <= self.shared_max.load(Relaxed) {
            return;
        }
        // Set while the cut form was made, or through another handle.
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

/// The cut forms there are.
fn all_cut() -> impl Iterator<Item = &'static Cut> {
    // SAFETY: null, or leaked by `prepared`.
    KERNELS.iter().filter_map(|k| unsafe { k.cut.load(Acquire).as_ref() })
}

/// The program set an attribute of a function: its cut form gets it, too.
pub fn attribute_set(function: Ptr) {
    // Only this handle is known to live.
    let plain = plain_function(function as usize);
    for cut in all_cut() {
        let of = cut.originals.each_ref().map(|o| o.load(Relaxed));
        if of.contains(&(function as usize)) || of.contains(&plain) {
            cut.copy_from(plain);
        }
    }
}

/// Functions are about to be unloaded: nothing asks the driver about them any more.
pub fn forget_functions(are_gone: impl Fn(usize) -> bool) {
    let _alive = alive();
    drop_jobs(|job| are_gone(job.function));
    for cut in all_cut() {
        if are_gone(cut.originals[0].load(Relaxed)) {
            cut.originals.iter().for_each(|o| o.store(0, Relaxed));
            changed();
        }
    }
}

/// Give up jobs; their kernels may be asked for again.
fn drop_jobs(drops: impl Fn(&Job) -> bool) {
    JOBS.with(|jobs| {
        for job in jobs.iter().filter(|job| drops(job) && job.index != GATE_ONLY) {
            if job.offset {
                cut(job.index).into_iter().for_each(|cut| cut.sub_grid.forgo());
            } else {
                publish(job.index, cut_state::PREPARABLE, 0);
            }
        }
        jobs.retain(|job| !drops(job));
    });
}

/// While it is held no cut form is made.
pub fn pause() -> Option<Held<'static>> {
    alive()
}

/// A context is destroyed, and the cut forms in it. Everything is paused.
pub fn forget_context(context: usize) {
    drop_jobs(|job| job.context == context);
    GATE_ASKED.store(false, SeqCst);
    let mut any = false;
    for (index, kernel) in KERNELS.iter().enumerate() {
        // SAFETY: null, or leaked by `prepared`.
        let there = unsafe { kernel.cut.load(Acquire).as_ref() };
        if there.is_some_and(|c| c.context == context) {
            kernel.cut.store(std::ptr::null_mut(), Release);
            let (state, _) = cut_state::unpack(kernel.state.load(Acquire));
            // What was learnt of a kernel stays.
            if state == cut_state::READY {
                publish(index, cut_state::UNKNOWN, 0);
            }
            any = true;
        }
    }
    if any {
        making::forget();
    }
}

/// Only in a forked child.
pub fn reset() {
    ALLOWED.store(false, SeqCst);
    WORKING.store(false, SeqCst);
    GATE_ASKED.store(false, SeqCst);
    LOST.store(false, SeqCst);
    JOBS.reset(VecDeque::new());
    making::reset();
    ALIVE.reset();
    for kernel in &KERNELS {
        kernel.state.store(0, SeqCst);
        kernel.wide_only.store(false, SeqCst);
        kernel.cut.store(std::ptr::null_mut(), SeqCst);
    }
}

#[cfg(test)]
mod tests;
