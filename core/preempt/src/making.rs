//! Making transformed forms: the image is rewritten, the machine is [proven](proof), the image
//! loaded as a second module, and the transformed kernel's attributes compared with the original's.
//! On the worker's thread only.
//!
//! A form is of the very bytes that the program loaded: the host gives no others.

use crate::compile::compiled_or_text;
use crate::cuda::{FUNC_COMPARED, LaunchConfig, OUT_OF_MEMORY, Ptr, SUCCESS, driver};
use crate::graphs::home;
use crate::host::{self, host, log};
use crate::issue::with_buffer;
use crate::jobs::{Failed, Job, Task, is_lost, with_function};
use crate::kernels::{KERNELS, publish};
use crate::lock::Locked;
use crate::offset::OffsetForm;
use crate::transformed::{
    Transformed, attribute, attributes_set, copy_attributes, plain_function, shared_max,
};
use crate::{disk_cache, flag, gate, occupancy, proof, watch};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicUsize};
use std::time::Duration;
use tally_ipc::layout::transform_state;
use tally_rewriter::control::CONTROL_BYTES;
use tally_rewriter::{
    ControlBlock, KernelForm, Rewritten, TransformRefusal, TransformedKernel, image,
};

/// How far an image has come in one form.
#[derive(Clone, Debug)]
enum Stage {
    /// Rewritten, but not loaded into the driver yet.
    Rewritten(Rewritten),
    /// Rewritten PTX that was compiled since, if the driver does so: to be loaded as it is.
    Compiled(Rewritten),
    /// Loaded into a context, with the kernels found in it.
    Loaded { module: usize, context: usize, is_ptx: bool, kernels: Vec<TransformedKernel> },
}

/// An image in one form: how far it has come, and why some of its kernels have none.
#[derive(Clone, Debug)]
struct Made {
    stage: Stage,
    refused: Vec<(String, TransformRefusal)>,
    /// Kernels refused because their blocks may wait that read their SM's number, too.
    read_sm: Vec<String>,
}

/// Compiling PTX takes so many times its bytes, besides what the driver takes for itself.
const COMPILE_COPIES: usize = 4;

/// Images that were rewritten, by digest and whether block indices are offset.
static IMAGES: Locked<BTreeMap<(u128, bool), Result<Made, TransformRefusal>>> =
    Locked::new(BTreeMap::new());

fn form_of(task: Task) -> KernelForm {
    if task == Task::Offset { KernelForm::ByOffset } else { KernelForm::ByClaims }
}

/// What takes the CPU only.
pub(crate) fn rewrite_ahead(job: &Job) {
    let form = form_of(job.task);
    let key = (job.image, form == KernelForm::ByOffset);
    if IMAGES.with(|all| all.contains_key(&key)) {
        return;
    }
    let made = rewrite(job.image, device_arch(job.device), form);
    IMAGES.with(|all| all.insert(key, made));
    if host().library(job.image).is_err() {
        // Unloaded meanwhile: the same code may be loaded again.
        forget_image(job.image);
    }
}

/// An image is not there any more: what was made of it, but for what the driver has loaded, goes.
pub(crate) fn forget_image(image: u128) {
    IMAGES.with(|all| {
        for key in [(image, false), (image, true)] {
            if !matches!(all.get(&key), Some(Ok(Made { stage: Stage::Loaded { .. }, .. }))) {
                all.remove(&key);
            }
        }
    });
}

fn rewrite(image: u128, arch: u32, form: KernelForm) -> Result<Made, TransformRefusal> {
    let library = host().library(image)?;
    let bytes = host().image_bytes(image)?;
    if !has_room_for(image::working_bytes(&bytes, arch)) {
        return Err(TransformRefusal::HostMemory);
    }
    let mut rewritten = disk_cache::rewrite(&bytes, arch, form, library.as_deref())?;
    // A kernel whose blocks may wait for each other is never transformed: a block that has run could wait for one that
    // was skipped. `may_wait` is found by `rewriter/src/cubin/patch.rs` and `rewriter/src/ptx/mod.rs`.
    let mut read_sm = Vec::new();
    for kernel in rewritten.kernels.extract_if(.., |kernel| kernel.may_wait) {
        if kernel.reads_sm {
            read_sm.push(kernel.name.clone());
        }
        rewritten.refused.push((kernel.name, TransformRefusal::BlocksMayWait));
    }
    let refused = std::mem::take(&mut rewritten.refused);
    Ok(Made { stage: Stage::Rewritten(rewritten), refused, read_sm })
}

/// Have rewritten PTX compiled before launches wait for its load, if it has the job's kernel. The context is current.
fn compile_ahead(job: &Job, key: (u128, bool)) {
    let of_job = |made: &Made| match &made.stage {
        Stage::Rewritten(it) if it.is_ptx && it.kernels.iter().any(|k| k.name == job.name) => {
            Some(it.clone())
        }
        _ => None,
    };
    let ptx = IMAGES.with(|all| all.get(&key)?.as_ref().ok().and_then(of_job));
    let Some(Rewritten { image, is_ptx, kernels, refused }) = ptx else { return };
    if !has_room_for(image.len().saturating_mul(COMPILE_COPIES)) {
        return;
    }
    let compiled = Rewritten { image: compiled_or_text(image), is_ptx, kernels, refused };
    IMAGES.with(|all| {
        // Unless the program has unloaded it meanwhile.
        if let Some(Ok(made)) = all.get_mut(&key)
            && matches!(made.stage, Stage::Rewritten(_))
        {
            made.stage = Stage::Compiled(compiled);
        }
    });
}

/// Whether the process may have so much memory: under a limit on its address space, or strict accounting, an
/// allocation in the midst of a rewrite would end it.
fn has_room_for(bytes: usize) -> bool {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    // SAFETY: a fresh mapping, which nothing uses.
    unsafe {
        let all = ProtFlags::READ | ProtFlags::WRITE;
        let Ok(at) = mmap_anonymous(std::ptr::null_mut(), bytes, all, MapFlags::PRIVATE) else {
            return false;
        };
        let _ = munmap(at, bytes);
    }
    true
}

/// Whether a kernel that was refused because its blocks may wait reads its SM's number, too.
pub(crate) fn reads_sm(job: &Job) -> bool {
    IMAGES.with(|all| match all.get(&(job.image, false)) {
        Some(Ok(made)) => made.read_sm.contains(&job.name),
        _ => false,
    })
}

/// A kernel's function in a module of ours.
struct Function {
    handle: usize,
    is_ptx: bool,
    kernel: TransformedKernel,
}

/// The kernel in its form, loaded if need be. The context is current and idle.
fn function_of(job: &Job, form: KernelForm) -> Result<Function, TransformRefusal> {
    let key = (job.image, form == KernelForm::ByOffset);
    let made = IMAGES.with(|all| all.get(&key).cloned()).ok_or(TransformRefusal::ImageGone)??;
    let refused = |refused: &[(String, TransformRefusal)]| {
        let why = refused.iter().find(|(name, _)| *name == job.name).map(|(_, why)| *why);
        why.unwrap_or(TransformRefusal::NoSuchKernel)
    };
    let (module, is_ptx, kernels) = match made.stage {
        Stage::Loaded { module, is_ptx, kernels, .. } => (module, is_ptx, kernels),
        Stage::Rewritten(rewritten) | Stage::Compiled(rewritten) => {
            if rewritten.kernels.iter().all(|kernel| kernel.name != job.name) {
                return Err(refused(&made.refused));
            }
            let Rewritten { image, is_ptx, kernels, .. } = rewritten;
            let module = load(image).inspect_err(|why| {
                IMAGES.with(|all| all.insert(key, Err(*why)));
            })?;
            let stage =
                Stage::Loaded { module, context: job.context, is_ptx, kernels: kernels.clone() };
            let (refused, read_sm) = (made.refused.clone(), made.read_sm.clone());
            let made = Made { stage, refused, read_sm };
            IMAGES.with(|all| all.insert(key, Ok(made)));
            (module, is_ptx, kernels)
        }
    };
    let Some(kernel) = kernels.into_iter().find(|k| k.name == job.name) else {
        return Err(refused(&made.refused));
    };
    let (Some(get), Ok(name)) = (driver().module_function, CString::new(&*job.name)) else {
        return Err(TransformRefusal::DriverRefused);
    };
    let mut function: Ptr = std::ptr::null_mut();
    // SAFETY: a module of ours; a NUL-terminated name.
    match unsafe { get(&mut function, module as Ptr, name.as_ptr()) } {
        SUCCESS => Ok(Function { handle: function as usize, is_ptx, kernel }),
        _ => Err(TransformRefusal::DriverRefused),
    }
}

fn load(mut image: Vec<u8>) -> Result<usize, TransformRefusal> {
    image.push(0);
    let mut module: Ptr = std::ptr::null_mut();
    let module_load = driver().module_load.ok_or(TransformRefusal::DriverRefused)?;
    // SAFETY: an image with a NUL behind it; the context is current.
    match unsafe { module_load(&mut module, image.as_ptr()) } {
        SUCCESS => Ok(module as usize),
        // The image is none the worse for it: nothing to be kept for later runs.
        OUT_OF_MEMORY => Err(TransformRefusal::OutOfMemory),
        error => {
            log!("the driver refuses a rewritten image: CUDA error {error}");
            Err(TransformRefusal::DriverRefused)
        }
    }
}

/// Have the driver load a function's code now: with its first launch, it would wait for all that runs, and keep
/// other launches waiting. The context is idle.
fn bring_in(function: usize) {
    if let Some(load) = driver().func_load {
        // SAFETY: a function of ours.
        unsafe { load(function as Ptr) };
    }
    let _ = attribute(function, FUNC_COMPARED[0]);
}

/// Launch a form once, so that none of its blocks runs its own code: whatever else the driver puts off until
/// the first launch is done then.
fn launch_empty(job: &Job, function: &Function) {
    let d = driver();
    let (Some(launch), Some(settle)) = (d.launch_ex, d.stream_synchronize) else { return };
    let stream = gate::rescue_stream() as Ptr;
    let at = function.kernel.control_offset as usize;
    let mut buffer = vec![0_u8; at + CONTROL_BYTES as usize];
    let cluster = function.kernel.cluster.unwrap_or([1; 3]);
    buffer[at..].copy_from_slice(&ControlBlock::slice(0, 0, cluster).bytes());
    let config = LaunchConfig {
        grid: cluster,
        block: job.block,
        shared_bytes: job.shared_bytes,
        stream,
        attributes: std::ptr::null(),
        attribute_count: 0,
    };
    // SAFETY: a function of ours, parameters of its size that no block reads, a stream of ours in which
    // nothing else runs. Refused: the first real launch will tell.
    with_buffer(&buffer, |extra| unsafe {
        if launch(&config, function.handle as Ptr, std::ptr::null_mut(), extra) == SUCCESS {
            settle(stream);
        }
    });
}

/// Makes the context current to this thread.
fn enter(context: usize) -> Result<(), Failed> {
    // SAFETY: the context lives (see `worker`).
    let is_set = driver().ctx_set.is_some_and(|f| unsafe { f(context as Ptr) } == SUCCESS);
    if is_set { Ok(()) } else { Err(Failed::For(TransformRefusal::DriverRefused)) }
}

/// No context is the calling thread's any more.
pub(crate) fn leave() {
    // SAFETY: no context.
    let _ = driver().ctx_set.map(|f| unsafe { f(std::ptr::null_mut()) });
}

/// Make what preemption needs, in this context.
pub(crate) fn gate(context: usize) -> Result<(), Failed> {
    enter(context)?;
    let client = host().client().ok_or(Failed::Unloaded)?;
    if gate::context() == context {
        return Ok(());
    }
    match host::load(context, host::LOAD_PATIENCE, || flag::set_up(client, context)) {
        None => Err(Failed::Busy),
        Some(made) => made.map_err(Failed::For),
    }
}

/// Nothing was made of an image, for its bytes were not at hand.
fn gone(image: u128) -> Failed {
    match host().library(image) {
        // It was loaded again since.
        Ok(_) => Failed::Busy,
        Err(why) => Failed::For(why),
    }
}

/// Make a transformed form, in the job's context, which lives.
pub(crate) fn make(job: &Job) -> Result<Transformed, Failed> {
    gate(job.context)?;
    let (arch, key) = (device_arch(job.device), (job.image, false));
    let is_ptx = IMAGES.with(|all| match all.get(&key) {
        Some(Ok(Made { stage: Stage::Rewritten(it) | Stage::Compiled(it), .. })) => Ok(it.is_ptx),
        Some(Ok(Made { stage: Stage::Loaded { is_ptx, .. }, .. })) => Ok(*is_ptx),
        Some(Err(why)) => Err(Failed::For(*why)),
        None => Err(with_function(job, || gone(job.image)).unwrap_or(Failed::Unloaded)),
    })?;
    proof::passed(job.device, arch, is_ptx, job.context)?;
    compile_ahead(job, key);
    let made = host::load(job.context, host::LOAD_PATIENCE, || {
        let function = function_of(job, KernelForm::ByClaims).map_err(|why| match why {
            TransformRefusal::ImageGone => {
                with_function(job, || gone(job.image)).unwrap_or(Failed::Unloaded)
            }
            why => Failed::For(why),
        })?;
        bring_in(function.handle);
        let attributes_at = attributes_set();
        let original = with_function(job, || {
            let original = plain_function(job.function);
            for which in FUNC_COMPARED {
                if attribute(original, which) != attribute(function.handle, which) {
                    log!("{}: attribute {which} of its transformed form differs", job.name);
                    return Err(Failed::For(TransformRefusal::AttributesDiffer));
                }
            }
            copy_attributes(original, function.handle);
            Ok((original, shared_max(original), attributes_at))
        });
        let original = original.ok_or(Failed::Unloaded)??;
        launch_empty(job, &function);
        Ok::<_, Failed>((function, original))
    });
    let (function, (original, shared_max, attributes_at)) = made.ok_or(Failed::Busy)??;
    if is_lost() {
        return Err(Failed::Unloaded);
    }
    let Function { handle, is_ptx, kernel } = function;
    let parameters = layout(handle, &kernel)?;
    let transformed = Transformed {
        context: job.context,
        function: handle,
        image: job.image,
        reads_sm: kernel.reads_sm,
        is_ptx,
        by_offset: OffsetForm::default(),
        device: job.device,
        parameters,
        control_offset: kernel.control_offset as usize,
        cluster: kernel.cluster,
        originals: [job.function, original].map(AtomicUsize::new),
        shared_max: AtomicI32::new(0),
        attributes_at,
        compared: Default::default(),
        required_cluster: Default::default(),
        wanted_blocks: job.blocks,
        wanted_us: job.us,
    };
    transformed.copied(shared_max);
    Ok(transformed)
}

/// Makes a kernel's transformed form available to launches.
pub(crate) fn prepared(index: usize, transformed: Transformed) {
    let detail = transform_state::SLICEABLE | transform_state::PREEMPTIBLE;
    let (kernel, image) = (&KERNELS[index], transformed.image);
    // Kept on purpose: a launch may be reading it.
    kernel.transformed.store(Box::leak(Box::new(transformed)), SeqCst);
    // Behind that: if the program has unloaded the image since the form was made, or may have written its constants,
    // either it has found the form here (`prepare::image_unloaded`, `image_written`) or that shows now. Else a later
    // kernel of the same code would have the form's handle, which by then may be another's. Before launches take the
    // form: one behind the write must not.
    let is_as_loaded = || host().library(image).is_ok();
    if !is_as_loaded() {
        kernel.transformed.store(std::ptr::null_mut(), SeqCst);
        return publish(index, transform_state::UNKNOWN, 0);
    }
    // Set meanwhile: whoever did has not found the form.
    if let Some(transformed) = kernel.transformed()
        && transformed.attributes_at != attributes_set()
    {
        transformed.make_stale();
    }
    publish(index, transform_state::READY, detail);
    if !is_as_loaded() || kernel.transformed().is_none() {
        return forget_kernel(index);
    }
    if let Some(client) = host().client() {
        client.counters.transformed_kernels.fetch_add(1, Relaxed);
    }
}

/// A kernel has no transformed form any more.
pub(crate) fn forget_kernel(index: usize) {
    KERNELS[index].transformed.store(std::ptr::null_mut(), SeqCst);
    watch::forget_kernel(index);
    withdraw(index);
}

/// No launch takes a kernel's transformed form any more; those under way keep it.
pub(crate) fn withdraw(index: usize) {
    let kernel = &KERNELS[index];
    kernel.transformed.store(std::ptr::null_mut(), SeqCst);
    let (state, _) = transform_state::unpack(kernel.state.load(Acquire));
    // What was profiled of a kernel stays.
    if state == transform_state::READY {
        publish(index, transform_state::UNKNOWN, 0);
    }
}

/// Make the form with offset block indices of a kernel that has the other; its context lives.
pub(crate) fn offset(job: &Job, transformed: &Transformed) -> Result<usize, Failed> {
    enter(job.context)?;
    let proven =
        proof::passed(job.device, device_arch(job.device), transformed.is_ptx, job.context)?;
    if !proven.offsets {
        return Err(Failed::For(TransformRefusal::IndexRead));
    }
    compile_ahead(job, (job.image, true));
    let made = host::load(job.context, host::LOAD_PATIENCE, || {
        let function = function_of(job, KernelForm::ByOffset)?;
        bring_in(function.handle);
        let same = |which: &i32| {
            attribute(transformed.function, *which) == attribute(function.handle, *which)
        };
        let is_alike = function.is_ptx == transformed.is_ptx
            && function.kernel.control_offset as usize == transformed.control_offset
            && FUNC_COMPARED.iter().all(same);
        if is_alike { Ok(function.handle) } else { Err(TransformRefusal::AttributesDiffer) }
    });
    let made = made.ok_or(Failed::Busy)?;
    if let Err(why) = made {
        log!("{}: not sliced by offset: {why}", job.name);
    }
    Ok(made?)
}

/// The context that an image's forms are loaded in, if any is.
pub(crate) fn context_of(image: u128) -> Option<usize> {
    IMAGES.with(|all| {
        [false, true].iter().find_map(|offset| match all.get(&(image, *offset)) {
            Some(Ok(Made { stage: Stage::Loaded { context, .. }, .. })) => Some(*context),
            _ => None,
        })
    })
}

/// Unload the forms of an image that the program has unloaded, unless it has loaded it again. False: the
/// context was not idle.
pub(crate) fn unload(context: usize, image: u128) -> bool {
    if host().library(image).is_ok() {
        return true;
    }
    if enter(context).is_err() {
        return true;
    }
    let done = host::load(context, host::LOAD_PATIENCE, || {
        for offset in [false, true] {
            let made = IMAGES.with(|all| all.remove(&(image, offset)));
            if let Some(Ok(Made { stage: Stage::Loaded { module, .. }, .. })) = made
                && let Some(unload) = driver().module_unload
            {
                // SAFETY: a module of ours, of which nothing is launched any more.
                unsafe { unload(module as Ptr) };
            }
        }
        occupancy::forget();
    });
    done.is_some()
}

/// Destroy parts of graphs that are not launched any more. False: something runs.
pub(crate) fn sweep(context: usize) -> bool {
    if !home::is_any_retired(context) || enter(context).is_err() {
        return true;
    }
    host::load(context, Duration::ZERO, || home::sweep(context)).is_some()
}

fn device_arch(device: i32) -> u32 {
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: a valid out-pointer.
        let got = driver().device_attribute.map(|f| unsafe { f(&mut value, which, device) });
        if got == Some(SUCCESS) { value.max(0) as u32 } else { 0 }
    };
    // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
    attribute(75) * 10 + attribute(76)
}

/// Where the parameters lie. Asked of the driver, for the transformed form, whose last one
/// must be the control block.
fn layout(
    function: usize,
    kernel: &TransformedKernel,
) -> Result<Vec<(usize, usize)>, TransformRefusal> {
    let Some(info) = driver().func_parameter else { return Err(TransformRefusal::LaunchForm) };
    let mut list = Vec::new();
    for index in 0..=kernel.parameter_count as usize {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: valid out-pointers.
        if unsafe { info(function as Ptr, index, &mut offset, &mut size) } != SUCCESS {
            return Err(TransformRefusal::Metadata);
        }
        list.push((offset, size));
    }
    let control = list.pop();
    let expected =
        (kernel.control_offset as usize, tally_rewriter::control::CONTROL_BYTES as usize);
    if control != Some(expected) || list.iter().any(|(o, s)| o + s > expected.0) {
        return Err(TransformRefusal::Metadata);
    }
    Ok(list)
}

/// A context is gone, and the modules in it.
pub(crate) fn forget_context(gone: usize) {
    IMAGES.with(|all| {
        all.retain(|_, made| {
            !matches!(made, Ok(Made { stage: Stage::Loaded { context, .. }, .. }) if *context == gone)
        });
    });
}

/// Only in a forked child.
pub(crate) fn reset() {
    IMAGES.reset(BTreeMap::new());
}
