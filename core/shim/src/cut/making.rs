//! Making cut forms: the image is rewritten, the machine is [proven](proof), the image
//! loaded as a second module, and the cut kernel's attributes compared with the original's.
//! On the worker's thread only.

use super::guarded::Guarded;
use super::images;
use super::kept;
use super::kernels::{Cut, Job, attribute, copy_attributes, is_lost, plain_function};
use super::offset::SubGrid;
use super::proof;
use crate::cu::{FUNC_COMPARED, OUT_OF_MEMORY, Ptr, SUCCESS, driver};
use crate::{log, state};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicUsize};
use tally_kernels::{CutForm, CutKernel, Refusal};

/// A rewritten image in the driver, or why there is none.
type Loaded = Result<(Module, Vec<CutKernel>, Vec<(String, Refusal)>), Refusal>;

/// A module of ours.
#[derive(Clone, Copy, Debug, Default)]
struct Module {
    handle: usize,
    is_ptx: bool,
}

/// By image and form.
static MODULES: Guarded<BTreeMap<(u64, bool), Loaded>> = Guarded::new(BTreeMap::new());

/// Whether the driver may load a kernel with a launch of the program's. That launch and those behind it
/// wait on the GPU for all that runs: for blocks that wait for help, too, and so would the help.
fn loads_lazily() -> bool {
    /// `CU_MODULE_EAGER_LOADING`.
    const EAGER: u32 = 1;
    // A driver that cannot be asked is from before there was anything else.
    let Some(ask) = driver().module_loading else { return false };
    let mut mode = 0;
    // SAFETY: a valid out-pointer.
    unsafe { ask(&mut mode) != SUCCESS || mode != EAGER }
}

fn load(hash: u64, (device, arch): (i32, u32), form: CutForm) -> Loaded {
    let library = images::library(hash)?;
    let mut rewritten =
        images::with(hash, |bytes| kept::rewrite(bytes, arch, form, library.as_deref()))??;
    if loads_lazily() {
        let may_wait = rewritten.kernels.extract_if(.., |kernel| kernel.may_wait);
        rewritten.refused.extend(may_wait.map(|kernel| (kernel.name, Refusal::BlocksMayWait)));
    }
    if rewritten.kernels.is_empty() {
        return Ok((Module::default(), Vec::new(), rewritten.refused));
    }
    let proven = proof::passed(device, arch, rewritten.is_ptx)?;
    if form == CutForm::SubGrid && !proven.offsets {
        return Err(Refusal::IndexRead);
    }
    let mut bytes = rewritten.image;
    bytes.push(0);
    let mut module: Ptr = std::ptr::null_mut();
    let d = driver();
    let Some(module_load) = d.module_load else { return Err(Refusal::DriverRefused) };
    // SAFETY: an image with a NUL behind it; the context is current.
    let result = d.relaxed(|| unsafe { module_load(&mut module, bytes.as_ptr()) });
    if result != SUCCESS {
        log!("the driver refuses a cut image: CUDA error {result}");
        // The image is none the worse for it: nothing to be kept for later runs.
        return Err(match result {
            OUT_OF_MEMORY => Refusal::OutOfMemory,
            _ => Refusal::DriverRefused,
        });
    }
    let module = Module { handle: module as usize, is_ptx: rewritten.is_ptx };
    Ok((module, rewritten.kernels, rewritten.refused))
}

/// The function, whether its code is PTX, and how it is launched.
fn function_of(
    image: u64,
    target: (i32, u32),
    form: CutForm,
    name: &str,
) -> Result<(usize, bool, CutKernel), Refusal> {
    let key = (image, form == CutForm::SubGrid);
    let known = MODULES.with(|modules| modules.get(&key).cloned());
    let loaded = known.unwrap_or_else(|| {
        // Outside the lock: this calls the driver. Only the worker comes here.
        let loaded = load(image, target, form);
        MODULES.with(|modules| modules.insert(key, loaded.clone()));
        loaded
    });
    let (module, kernels, refused) = loaded?;
    let Some(kernel) = kernels.into_iter().find(|k| k.name == name) else {
        let why = refused.iter().find(|(n, _)| n == name).map(|(_, why)| *why);
        return Err(why.unwrap_or(Refusal::NoSuchKernel));
    };
    let (Some(get), Ok(c_name)) = (driver().module_function, CString::new(name)) else {
        return Err(Refusal::DriverRefused);
    };
    let mut function: Ptr = std::ptr::null_mut();
    // SAFETY: a module of ours; a NUL-terminated name.
    match unsafe { get(&mut function, module.handle as Ptr, c_name.as_ptr()) } {
        SUCCESS => Ok((function as usize, module.is_ptx, kernel)),
        _ => Err(Refusal::DriverRefused),
    }
}

/// Make what giving way needs, in this context.
pub fn gate(context: usize) -> bool {
    // SAFETY: the context lives (see `kernels::pause`).
    driver().ctx_set.is_some_and(|f| unsafe { f(context as Ptr) } == SUCCESS)
        && state::client().is_some_and(|client| super::gate::set_up(client, context))
}

/// Make a cut form, in the job's context, which lives.
///
/// # Errors
/// Why there is none.
pub(super) fn make(job: &Job) -> Result<Cut, Refusal> {
    let d = driver();
    let client = state::client().ok_or(Refusal::ImageGone)?;
    if !gate(job.context) {
        return Err(Refusal::DriverRefused);
    }
    let image = client.kernels[job.index].image.load(Relaxed);
    let target = (job.device, device_arch(job.device));
    let name = d.name_of(job.function).and_then(|n| n.to_str().ok()).map(str::to_owned);
    let name = name.ok_or(Refusal::NoSuchKernel)?;
    let (function, is_ptx, kernel) = function_of(image, target, CutForm::Prelude, &name)?;
    if is_lost() {
        return Err(Refusal::ImageGone);
    }
    let original = plain_function(job.function);
    for which in FUNC_COMPARED {
        if attribute(original, which) != attribute(function, which) {
            log!("{name}: attribute {which} of its cut form differs");
            return Err(Refusal::AttributesDiffer);
        }
    }
    copy_attributes(original, function);
    let parameters = layout(function, &kernel)?;
    let cut = Cut {
        context: job.context,
        function,
        is_ptx,
        sub_grid: SubGrid::default(),
        device: job.device,
        parameters,
        control_offset: kernel.control_offset as usize,
        cluster: kernel.cluster,
        may_wait: kernel.may_wait,
        originals: [job.function, original].map(AtomicUsize::new),
        shared_max: AtomicI32::new(0),
        required_cluster: Default::default(),
        wanted_blocks: job.blocks,
        wanted_us: job.us,
    };
    cut.copied();
    Ok(cut)
}

/// Make the form with offset block indices of a kernel that is cut; its context lives.
pub(super) fn offset(job: &Job, cut: &Cut) -> Option<usize> {
    let image = state::client()?.kernels[job.index].image.load(Relaxed);
    let target = (job.device, device_arch(job.device));
    // SAFETY: the context lives (see `kernels::pause`).
    if driver().ctx_set.is_none_or(|f| unsafe { f(job.context as Ptr) } != SUCCESS) {
        return None;
    }
    let name = driver().name_of(job.function)?.to_str().ok()?.to_owned();
    match function_of(image, target, CutForm::SubGrid, &name) {
        Ok((function, is_ptx, kernel)) => {
            let same = |which: &i32| attribute(cut.function, *which) == attribute(function, *which);
            let is_alike = is_ptx == cut.is_ptx
                && kernel.control_offset as usize == cut.control_offset
                && FUNC_COMPARED.iter().all(same);
            (is_alike && !is_lost()).then_some(function)
        }
        Err(why) => {
            log!("{name}: not sliced by offset: {why}");
            None
        }
    }
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

/// Where the parameters lie. Asked of the driver, for the cut form, whose last one
/// must be the control block.
fn layout(function: usize, kernel: &CutKernel) -> Result<Vec<(usize, usize)>, Refusal> {
    let Some(info) = driver().func_parameter else { return Err(Refusal::LaunchForm) };
    let mut list = Vec::new();
    for index in 0..=kernel.parameter_count as usize {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: valid out-pointers.
        if unsafe { info(function as Ptr, index, &mut offset, &mut size) } != SUCCESS {
            return Err(Refusal::Metadata);
        }
        list.push((offset, size));
    }
    let control = list.pop();
    let expected = (kernel.control_offset as usize, tally_kernels::control::CONTROL_BYTES as usize);
    if control != Some(expected) || list.iter().any(|(o, s)| o + s > expected.0) {
        return Err(Refusal::Metadata);
    }
    Ok(list)
}

/// The modules' context is gone.
pub fn forget() {
    MODULES.with(BTreeMap::clear);
}

/// Only in a forked child.
pub fn reset() {
    MODULES.reset(BTreeMap::new());
}
