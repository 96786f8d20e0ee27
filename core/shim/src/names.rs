//! Which kernel a function handle is: its name and the image that it was loaded from.
//!
//! Handles are noted when the program looks them up, and forgotten when their module, library or
//! context goes; a launch only reads. The table in the shared region is appended to and never changes, so
//! the same kernel loaded twice keeps its entry. A handle that was not seen to be looked up is a kernel of
//! an unknown image: nothing is known of its code, and nothing is kept of it.

use crate::handles::Handles;
use crate::images;
use crate::{quiesce, state};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char, c_uint};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use tally_ipc::ClientRegion;
use tally_ipc::layout::KERNEL_UNKNOWN;
use tally_preempt::cuda::{CuResult, Ptr, SUCCESS, driver};
use tally_preempt::graphs::home;
use tally_preempt::lock::{Lock, Locked};
use tally_preempt::{prepare, settings};
use tally_rewriter::names::may_be_constant;

/// Handles of functions and kernels that are remembered.
const FUNCTIONS_MAX: usize = 16 * 1024;
/// Modules and libraries remembered; kernels of others have no known image.
const MODULES_MAX: usize = 65_536;
/// Kernels that one call of [`enumerate`] notes.
const ENUMERATED_MAX: u32 = 65_536;

/// Function or kernel handle to `owner tag << 32 | index + 1`.
static FUNCTIONS: Handles<FUNCTIONS_MAX> = Handles::new();
static FORGOTTEN: AtomicU32 = AtomicU32::new(1);
/// Held by whoever writes to [`FUNCTIONS`].
static LOCK: Lock = Lock::new();

/// A module or library that is loaded.
#[derive(Clone, Copy, Debug)]
struct Loaded {
    /// Digest of the module's image; 0: unknown.
    digest: u128,
    /// The context that it goes with; 0: a library's, which outlives contexts.
    context: usize,
    /// The library that it is a module of, else itself.
    owner: usize,
}

struct Known {
    modules: BTreeMap<usize, Loaded>,
    /// Libraries and kernels that are loaded in a context, as far as calls that would load them tell.
    found: BTreeSet<(usize, usize)>,
    /// Identity, or digest of the name of a kernel of an unknown image, to its entry's index.
    entries: BTreeMap<u128, u32>,
    /// Digest of each entry's image.
    images: Vec<u128>,
}

impl Known {
    const fn new() -> Self {
        Self {
            modules: BTreeMap::new(),
            found: BTreeSet::new(),
            entries: BTreeMap::new(),
            images: Vec::new(),
        }
    }
}

static KNOWN: Locked<Known> = Locked::new(Known::new());

/// `KERNEL_UNKNOWN + 1` does not fit 32 bits: unknown is stored as 0 there, with
/// a tag that is never 0.
fn pack(owner: usize, index: u32) -> u64 {
    u64::from(tag(owner)) << 32 | u64::from(index.wrapping_add(1))
}

fn unpack(value: u64) -> u32 {
    (value as u32).wrapping_sub(1)
}

/// A short stand-in for an owner's handle: two may share one, and then go together.
fn tag(owner: usize) -> u32 {
    ((owner as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32 | 1
}

/// The index of a function that is being launched.
#[inline]
pub fn index(function: Ptr) -> u32 {
    match FUNCTIONS.get(function as usize) {
        Some(value) => unpack(value),
        None => unseen(function),
    }
}

/// The index of a function, if it was noted.
pub fn known(function: usize) -> Option<u32> {
    FUNCTIONS.get(function).map(unpack)
}

/// Another handle of a kernel whose handle was noted: it goes with that.
pub fn alias(other: usize, handle: usize) {
    if let Some(value) = FUNCTIONS.get(handle) {
        let _held = LOCK.lock();
        FUNCTIONS.insert(other, value);
    }
}

/// How often functions were forgotten, and one.
pub fn times_forgotten() -> u32 {
    FORGOTTEN.load(Relaxed)
}

/// Digest of a kernel's image; 0 if it is unknown.
pub fn image(index: usize) -> u128 {
    KNOWN.with(|known| known.images.get(index).copied().unwrap_or(0))
}

/// It was found in a way that we do not watch: ask the driver, once.
#[cold]
fn unseen(function: Ptr) -> u32 {
    let Some(client) = state::client() else { return KERNEL_UNKNOWN };
    let d = driver();
    let name = d.name_of(function as usize).map_or(&b"unknown"[..], CStr::to_bytes);
    let mut owner: Ptr = std::ptr::null_mut();
    let mut owner_of = |f: Option<unsafe extern "C" fn(*mut Ptr, Ptr) -> CuResult>| {
        // SAFETY: what the program launches now; a valid out-pointer.
        f.is_some_and(|f| unsafe { f(&mut owner, function) == SUCCESS }) && !owner.is_null()
    };
    match [d.func_module, d.kernel_library].into_iter().any(&mut owner_of) {
        true => note_of(client, function, owner, name),
        false => note(client, function as usize, 0, name, 0),
    }
}

/// Remember that `function`, of `owner`, is kernel `name` of an image.
fn note(client: &ClientRegion, function: usize, owner: usize, name: &[u8], digest: u128) -> u32 {
    let index = entry(client, name, digest);
    let _held = LOCK.lock();
    FUNCTIONS.insert(function, pack(owner, index));
    index
}

/// The table's entry for a kernel, new if need be.
fn entry(client: &ClientRegion, name: &[u8], digest: u128) -> u32 {
    let key = images::identity_of(digest, name);
    KNOWN.with(|known| {
        if let Some(index) = known.entries.get(&key) {
            return *index;
        }
        let next = known.images.len();
        let Some(entry) = client.kernels.get(next) else { return KERNEL_UNKNOWN };
        entry.publish(name, if digest == 0 { 0 } else { key });
        client.kernel_count.store(next as u32 + 1, Release);
        known.entries.insert(key, next as u32);
        known.images.push(digest);
        next as u32
    })
}

fn remember(handle: usize, loaded: Loaded) {
    KNOWN.with(|known| {
        if known.modules.len() < MODULES_MAX || known.modules.contains_key(&handle) {
            known.modules.insert(handle, loaded);
        }
    });
}

/// A module, or with `is_library` a library, was loaded from an image with this digest.
pub(crate) fn loaded(handle: *mut Ptr, is_library: bool, digest: u128) {
    if handle.is_null() {
        return;
    }
    // SAFETY: the driver has just written it.
    let handle = unsafe { *handle } as usize;
    let context = if is_library { 0 } else { driver().current_context() };
    remember(handle, Loaded { digest, context, owner: handle });
}

/// `cuModuleUnload`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn unload(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    _per_thread: bool,
    module: Ptr,
) -> CuResult {
    unloading(
        module,
        || home::sweep(driver().current_context()),
        || {
            // SAFETY: the caller's arguments.
            unsafe { real(module) }
        },
    )
}

/// `cuLibraryUnload`: its functions are in every context.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn library_unload(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    _per_thread: bool,
    library: Ptr,
) -> CuResult {
    unloading(library, home::sweep_all, || {
        // SAFETY: the caller's arguments.
        unsafe { real(library) }
    })
}

/// `sweep` destroys copies of graphs that the program destroyed, which may name the module's functions.
fn unloading(module: Ptr, sweep: fn(), real: impl FnOnce() -> CuResult) -> CuResult {
    let is_tracked = state::client().is_some();
    let mut unloaded = Vec::new();
    if is_tracked {
        // First: afterwards another thread may get the same handles.
        let is_gone =
            |handle, loaded: &Loaded| handle == module as usize || loaded.owner == module as usize;
        // Kernels of a library have handles of their own.
        KNOWN.with(|known| known.found.clear());
        unloaded = unused(&take(is_gone, Some(module as usize)));
    }
    let result = quiesce::waiting(|| {
        if is_tracked {
            // It may wait, as unloading may.
            sweep();
        }
        real()
    });
    unloaded.into_iter().for_each(prepare::image_unloaded);
    result
}

/// Forget modules, and the functions of their owners and of `owner`, of which nothing else may be known. Returns
/// the modules.
fn take(are_gone: impl Fn(usize, &Loaded) -> bool, owner: Option<usize>) -> Vec<(usize, Loaded)> {
    let gone: Vec<(usize, Loaded)> = KNOWN.with(|known| {
        let is_gone = |handle: &usize, loaded: &mut Loaded| are_gone(*handle, loaded);
        known.modules.extract_if(.., is_gone).collect()
    });
    let owners = gone.iter().map(|(_, loaded)| loaded.owner).chain(owner);
    let mut tags: Vec<u32> = owners.map(tag).collect();
    tags.sort_unstable();
    let is_gone = |value: u64| tags.binary_search(&((value >> 32) as u32)).is_ok();
    if settings::is_enabled() {
        prepare::forget_functions(|f| FUNCTIONS.get(f).is_some_and(is_gone));
    }
    let held = LOCK.lock();
    FUNCTIONS.retain(|value| !is_gone(value));
    drop(held);
    forgotten();
    gone
}

fn forgotten() {
    FORGOTTEN.fetch_add(1, SeqCst);
    prepare::functions_changed();
}

/// These modules were unloaded: digests of images of which no module is left.
fn unused(gone: &[(usize, Loaded)]) -> Vec<u128> {
    // A library's modules have no image of their own.
    let own = gone.iter().filter(|(handle, loaded)| loaded.owner == *handle);
    let digests = own.map(|(_, loaded)| loaded.digest);
    digests.filter(|digest| *digest != 0 && images::unloaded(*digest)).collect()
}

/// Modules that [`take_context`] took, and their handles.
pub struct Taken(Vec<(usize, Loaded)>);

/// A context is about to be destroyed, its modules with it, and every function handle of it. Before it is: another
/// thread may get a context of the same handle, and load modules there, as soon as it is gone.
pub fn take_context(context: usize) -> Taken {
    let taken = take(|_, loaded| loaded.context == context, None);
    KNOWN.with(|known| known.found.retain(|(_, there)| *there != context));
    // Functions of libraries' kernels in this context cannot be told from those in others.
    let held = LOCK.lock();
    FUNCTIONS.retain(|_| false);
    drop(held);
    forgotten();
    Taken(taken)
}

/// The context was not destroyed after all: its modules are remembered again. Its functions are noted anew when they
/// are launched, and transformed forms are made anew, because those that exist have lost their originals.
pub fn put_back(Taken(modules): Taken) {
    for (handle, loaded) in modules {
        remember(handle, loaded);
        if loaded.digest != 0 {
            prepare::image_unloaded(loaded.digest);
        }
    }
}

pub fn forget_context(Taken(modules): Taken) {
    unused(&modules).into_iter().for_each(prepare::image_unloaded);
}

/// `cuModuleGetFunction`, `cuLibraryGetKernel`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn get_function(
    real: unsafe extern "C" fn(*mut Ptr, Ptr, *const c_char) -> CuResult,
    _per_thread: bool,
    function: *mut Ptr,
    module: Ptr,
    name: *const c_char,
) -> CuResult {
    // SAFETY: the caller's arguments.
    let result = quiesce::while_open(|| unsafe { real(function, module, name) });
    if result == SUCCESS
        && !function.is_null()
        && !name.is_null()
        && let Some(client) = state::client()
    {
        // SAFETY: the driver has read the one and written the other.
        let (name, handle) = unsafe { (CStr::from_ptr(name), *function) };
        note_of(client, handle, module, name.to_bytes());
    }
    result
}

fn note_of(client: &ClientRegion, function: Ptr, module: Ptr, name: &[u8]) -> u32 {
    let loaded = KNOWN.with(|known| known.modules.get(&(module as usize)).copied());
    let (owner, digest) =
        loaded.map_or((module as usize, 0), |loaded| (loaded.owner, loaded.digest));
    note(client, function as usize, owner, name, digest)
}

/// `cuModuleGetGlobal`, which waits for nothing and keeps no launch waiting (measured: `bench/gpu`, `waits`).
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn get_global(
    real: unsafe extern "C" fn(*mut u64, *mut usize, Ptr, *const c_char) -> CuResult,
    _per_thread: bool,
    address: *mut u64,
    bytes: *mut usize,
    module: Ptr,
    name: *const c_char,
) -> CuResult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(address, bytes, module, name) };
    note_global(result, module, name);
    result
}

/// `cuLibraryGetGlobal`, `cuLibraryGetManaged`: the first in a context may load the library there.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn library_get_global(
    real: unsafe extern "C" fn(*mut u64, *mut usize, Ptr, *const c_char) -> CuResult,
    _per_thread: bool,
    address: *mut u64,
    bytes: *mut usize,
    library: Ptr,
    name: *const c_char,
) -> CuResult {
    // SAFETY: the caller's arguments.
    let result = loading_once(library, || unsafe { real(address, bytes, library, name) });
    note_global(result, library, name);
    result
}

/// A call that may load this library or kernel in the current context: the driver then waits for what runs, and keeps
/// launches waiting, those by which the shim would help what runs among them. Once it is loaded the call does not.
pub(crate) fn loading_once(handle: Ptr, call: impl FnOnce() -> CuResult) -> CuResult {
    if state::client().is_none() {
        return call();
    }
    let there = (handle as usize, driver().current_context());
    if KNOWN.with(|known| known.found.contains(&there)) {
        return quiesce::while_open_unjoined(call);
    }
    let result = quiesce::waiting(call);
    if result == SUCCESS {
        KNOWN.with(|known| {
            if known.found.len() < MODULES_MAX {
                known.found.insert(there);
            }
        });
    }
    result
}

/// A program that has the address of a constant may write it, and transformed forms have a copy of their own: they go
/// before it has the address.
fn note_global(result: CuResult, module: Ptr, name: *const c_char) {
    if result == SUCCESS && !name.is_null() && state::client().is_some() {
        // SAFETY: the driver has read it.
        let name = unsafe { CStr::from_ptr(name) };
        if may_be_constant(name.to_bytes()) {
            constants_found(module as usize);
        }
    }
}

/// `cuFuncLoad`: of one that is loaded it does nothing.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn func_load(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    _per_thread: bool,
    function: Ptr,
) -> CuResult {
    let mut loaded = 0;
    let ask = driver().func_is_loaded.filter(|_| state::client().is_some());
    // SAFETY: the caller's argument; a valid out-pointer.
    let asked = ask.map(|ask| unsafe { ask(&mut loaded, function) });
    // SAFETY: the caller's argument.
    let call = || unsafe { real(function) };
    if asked == Some(SUCCESS) && loaded != 0 { call() } else { quiesce::waiting(call) }
}

/// The program has the address of a constant of a module: no kernel of its image is transformed any more. Of a module
/// that was not seen to be loaded, as one that a function tells, every image may be it.
#[cold]
fn constants_found(module: usize) {
    let mut digests: Vec<u128> = KNOWN.with(|known| match known.modules.get(&module) {
        Some(loaded) => vec![loaded.digest],
        None => known.modules.values().map(|loaded| loaded.digest).collect(),
    });
    digests.sort_unstable();
    digests.dedup();
    for digest in digests {
        images::written(digest);
        prepare::image_written(digest);
    }
}

/// `cuModuleEnumerateFunctions`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn enumerate_functions(
    real: Enumerate,
    _per_thread: bool,
    functions: *mut Ptr,
    room: c_uint,
    module: Ptr,
) -> CuResult {
    // SAFETY: the caller's arguments.
    unsafe { enumerate(real, driver().module_function_count, functions, room, module) }
}

/// `cuLibraryEnumerateKernels`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn enumerate_kernels(
    real: Enumerate,
    _per_thread: bool,
    kernels: *mut Ptr,
    room: c_uint,
    library: Ptr,
) -> CuResult {
    // SAFETY: the caller's arguments.
    unsafe { enumerate(real, driver().library_kernel_count, kernels, room, library) }
}

type Enumerate = unsafe extern "C" fn(*mut Ptr, c_uint, Ptr) -> CuResult;

/// The array has `room` entries, of which the driver writes as many as there are functions. Behind those is whatever
/// the program left there.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
unsafe fn enumerate(
    real: Enumerate,
    count: Option<unsafe extern "C" fn(*mut c_uint, Ptr) -> CuResult>,
    functions: *mut Ptr,
    room: c_uint,
    module: Ptr,
) -> CuResult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(functions, room, module) };
    if result == SUCCESS
        && !functions.is_null()
        && let Some(client) = state::client()
        && let Some(count) = count
    {
        let mut there = 0;
        // SAFETY: a module or library of the program's; a valid out-pointer.
        if unsafe { count(&mut there, module) } != SUCCESS {
            return result;
        }
        let told = room.min(there).min(ENUMERATED_MAX) as usize;
        // SAFETY: the driver has written so many.
        for function in unsafe { std::slice::from_raw_parts(functions, told) } {
            if !is_anothers(*function as usize, module as usize)
                && let Some(name) = driver().name_of(*function as usize)
            {
                note_of(client, *function, module, name.to_bytes());
            }
        }
    }
    result
}

/// Whether a handle is known to be of a loaded module or library that is neither this one nor the one that has it.
fn is_anothers(function: usize, module: usize) -> bool {
    let Some(of) = FUNCTIONS.get(function).map(|value| (value >> 32) as u32) else { return false };
    KNOWN.with(|known| {
        let mine = known.modules.get(&module).map_or(module, |loaded| loaded.owner);
        of != tag(mine) && known.modules.values().any(|loaded| of == tag(loaded.owner))
    })
}

/// `cuLibraryGetModule`: the module has its library's image.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn library_get_module(
    real: unsafe extern "C" fn(*mut Ptr, Ptr) -> CuResult,
    _per_thread: bool,
    module: *mut Ptr,
    library: Ptr,
) -> CuResult {
    // SAFETY: the caller's arguments.
    let result = loading_once(library, || unsafe { real(module, library) });
    if result == SUCCESS && !module.is_null() && state::client().is_some() {
        let of = KNOWN.with(|known| known.modules.get(&(library as usize)).copied());
        if let Some(Loaded { digest, owner, .. }) = of {
            let context = driver().current_context();
            // SAFETY: the driver has just written it.
            remember(unsafe { *module } as usize, Loaded { digest, context, owner });
        }
    }
    result
}

/// `cuKernelGetFunction`: another handle of the same kernel.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn kernel_get_function(
    real: unsafe extern "C" fn(*mut Ptr, Ptr) -> CuResult,
    _per_thread: bool,
    function: *mut Ptr,
    kernel: Ptr,
) -> CuResult {
    // SAFETY: the caller's arguments.
    let result = loading_once(kernel, || unsafe { real(function, kernel) });
    if result == SUCCESS
        && !function.is_null()
        && let Some(value) = FUNCTIONS.get(kernel as usize)
    {
        let _held = LOCK.lock();
        // SAFETY: the driver has just written it.
        FUNCTIONS.insert(unsafe { *function } as usize, value);
    }
    result
}

/// As if the program had loaded a module of an unknown image.
#[cfg(test)]
pub fn load_for_a_test(handle: usize, context: usize) {
    remember(handle, Loaded { digest: 0, context, owner: handle });
}

/// Whether a module is known.
#[cfg(test)]
pub fn is_loaded(handle: usize) -> bool {
    KNOWN.with(|known| known.modules.contains_key(&handle))
}

/// Only in a forked child, whose region has a table of its own.
pub fn reset() {
    LOCK.reset();
    FUNCTIONS.retain(|_| false);
    KNOWN.reset(Known::new());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_survives_packing() {
        assert_eq!(unpack(pack(0, KERNEL_UNKNOWN)), KERNEL_UNKNOWN);
        assert_ne!(pack(0, KERNEL_UNKNOWN), 0);
        assert_eq!(unpack(pack(5, 17)), 17);
    }
}
