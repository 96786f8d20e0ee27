//! How the shim finds the real functions, and which wrapper stands for one. Look-ups by `dlsym` reach it
//! through `core/preload`, those by `cuGetProcAddress` through its own wrapper.
//!
//! - Only exact names that begin with `cu` and a capital are looked at (`cudnn*` and `cublas*` begin with
//!   `cu` too);
//! - every distinct real function gets a wrapper of its own, so that two drivers,
//!   or a driver and another interposer, are never mixed up.
//!
//! Must never call `dlsym` by name: the preloaded library has one, which leads here.

use crate::table::{self, EntryPoint};
use crate::{bypass, capture, host, known, objects};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

/// What every CUDA program loads.
const DRIVER_NAME: &CStr = c"libcuda.so.1";

/// Handle of the driver in use.
static DRIVER_HANDLE: AtomicUsize = AtomicUsize::new(0);

static DRIVER_ADDRESS: AtomicUsize = AtomicUsize::new(0);
/// The driver's functions of these names; 0: not known.
static CONTEXT_SYNCHRONIZE: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
const CONTEXT_SYNCHRONIZE_NAMES: [&CStr; 2] = [c"cuCtxSynchronize_v2", c"cuCtxSynchronize"];

fn lookup(handle: usize, name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: a NUL-terminated name; a handle that dlopen gave.
    NonNull::new(unsafe { host::dlsym()(handle as *mut c_void, name.as_ptr()) })
}

/// What a look-up in a library leads to: the wrapper of a driver function that is replaced, or what is
/// there.
///
/// # Safety
/// As `dlsym`, with a handle that dlopen gave.
pub unsafe fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's NUL-terminated name.
    let name = unsafe { CStr::from_ptr(name) };
    let Some(real) = lookup(handle as usize, name) else { return std::ptr::null_mut() };
    match table::exact(name.to_bytes()) {
        Some(entry_point) => entry_point.wrap(real.as_ptr() as usize) as *mut c_void,
        None => real.as_ptr(),
    }
}

fn open_driver(flags: c_int) -> usize {
    // SAFETY: a NUL-terminated name. RTLD_NOLOAD only finds what is there.
    unsafe { libc::dlopen(DRIVER_NAME.as_ptr(), flags) as usize }
}

/// The handle of a driver that the program has loaded already, 0 if none.
fn loaded_driver() -> usize {
    let known = DRIVER_HANDLE.load(Acquire);
    if known != 0 {
        return known;
    }
    let handle = open_driver(libc::RTLD_LAZY | libc::RTLD_NOLOAD);
    if handle != 0 {
        DRIVER_HANDLE.store(handle, Release);
    }
    handle
}

fn in_loaded_driver(name: &CStr) -> Option<NonNull<c_void>> {
    host::next(name).or_else(|| match loaded_driver() {
        0 => None,
        handle => lookup(handle, name),
    })
}

/// A real driver function: for the shim's own calls.
pub fn in_driver(name: &CStr) -> Option<NonNull<c_void>> {
    let handle = match loaded_driver() {
        0 => {
            // A driver under another name (a program's own path): whoever the
            // first wrapped function belongs to.
            let base = table::first_real().map_or(0, object_handle);
            if base != 0 { base } else { open_driver(libc::RTLD_LAZY) }
        }
        handle => handle,
    };
    if handle == 0 {
        return None;
    }
    let found = lookup(handle, name)?;
    // The preloaded library stands before the driver where a handle covers both.
    if table::is_ours(found.as_ptr() as usize) {
        return host::next(name);
    }
    Some(found)
}

/// The dl handle of the object that contains `address` (glibc: its link map).
fn object_handle(address: usize) -> usize {
    const RTLD_DL_LINKMAP: c_int = 2;
    unsafe extern "C" {
        fn dladdr1(a: *const c_void, i: *mut libc::Dl_info, e: *mut *mut c_void, f: c_int)
        -> c_int;
    }
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    let mut map: *mut c_void = std::ptr::null_mut();
    // SAFETY: valid out-pointers; glibc fills both or returns 0.
    let found =
        unsafe { dladdr1(address as *const c_void, info.as_mut_ptr(), &mut map, RTLD_DL_LINKMAP) };
    if found == 0 { 0 } else { map as usize }
}

/// The real function behind a directly linked export; 0 if there is no driver.
#[cold]
pub fn direct(cache: &AtomicUsize, name: &CStr) -> usize {
    let found = in_loaded_driver(name)
        .or_else(|| match open_driver(libc::RTLD_LAZY) {
            0 => None,
            handle => {
                DRIVER_HANDLE.store(handle, Release);
                lookup(handle, name)
            }
        })
        .map_or(0, |p| p.as_ptr() as usize);
    if found != 0 && !table::is_ours(found) {
        inspect(found);
        cache.store(found, Release);
        return found;
    }
    0
}

/// Note where a real function lies. A function outside the driver belongs to another interposer, whose calls
/// may come back here as launches within a launch, and which may pass on other launches than it was given.
fn inspect(real: usize) {
    let start = |address| objects::of(address).map(|object| object.start);
    let driver = start(driver_address());
    if driver.is_some() && start(real) != driver {
        crate::log!("another interposer stands before the driver");
        capture::set_nesting();
        bypass::interposed();
    }
}

/// An address in the driver; 0 if it is not known.
pub fn driver_address() -> usize {
    let known = DRIVER_ADDRESS.load(Acquire);
    if known != 0 {
        return known;
    }
    let found = match loaded_driver() {
        0 => None,
        handle => lookup(handle, c"cuInit"),
    };
    let found = found.map_or(0, |found| found.as_ptr() as usize);
    if table::is_ours(found) {
        return 0;
    }
    DRIVER_ADDRESS.store(found, Release);
    found
}

/// Look up at once what would else be looked up by the program's first call of each entry point: that waits for the
/// loader, which a thread may keep that waits for the calling one. `cuInit` itself loads libraries.
pub fn settle() {
    for entry_point in table::all() {
        if entry_point.linked.load(Acquire) == 0
            && let Some(found) =
                in_loaded_driver(entry_point.symbol).map(|found| found.as_ptr() as usize)
            && !table::is_ours(found)
        {
            inspect(found);
            entry_point.linked.store(found, Release);
        }
    }
    for (known, name) in CONTEXT_SYNCHRONIZE.iter().zip(CONTEXT_SYNCHRONIZE_NAMES) {
        known.store(in_driver(name).map_or(0, |p| p.as_ptr() as usize), Release);
    }
}

/// Body of `cuGetProcAddress` and `cuGetProcAddress_v2`: replace what was found. True if it is the first function that
/// the shim does not know.
///
/// # Safety
/// `symbol` and `pfn` as the program passed them to a call that succeeded.
pub unsafe fn replace_found(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> bool {
    if symbol.is_null() || pfn.is_null() {
        return false;
    }
    // SAFETY: the driver has just read the one and written the other.
    let (name, real) = unsafe { (CStr::from_ptr(symbol), *pfn) };
    if real.is_null() || table::is_ours(real as usize) {
        return false;
    }
    let per_thread = flags & tally_preempt::cuda::PROC_PER_THREAD != 0;
    let Some(entry_point) = by_request(name.to_bytes(), version, per_thread, real as usize) else {
        return known::looked_up(name.to_bytes(), version);
    };
    // SAFETY: as above; the wrapper has the signature that was asked for.
    unsafe { *pfn = entry_point.wrap(real as usize) as *mut c_void };
    false
}

/// The entry point for a `cuGetProcAddress` request. Base names stand for the version
/// that `version` selects; all versions of a wrapped function take the same
/// leading arguments, except for the two handled here.
fn by_request(
    name: &[u8],
    version: c_int,
    per_thread: bool,
    real: usize,
) -> Option<&'static EntryPoint> {
    if name == b"cuGetProcAddress" {
        return table::exact(if version >= 12000 { b"cuGetProcAddress_v2" } else { name });
    }
    if name == b"cuCtxSynchronize" {
        if version < 13000 {
            return table::exact(name);
        }
        // `_v2` takes the context. Which one this is, only the driver can say.
        let known = CONTEXT_SYNCHRONIZE.each_ref().map(|known| known.load(Acquire));
        let is = |(name, known): (&CStr, usize)| match known {
            0 => in_driver(name).is_some_and(|p| p.as_ptr() as usize == real),
            known => known == real,
        };
        let found = CONTEXT_SYNCHRONIZE_NAMES.into_iter().zip(known).find(|one| is(*one));
        return found.and_then(|(name, _)| table::exact(name.to_bytes()));
    }
    table::requested(name, per_thread)
}

impl EntryPoint {
    /// The wrapper for a real function: the same one every time for the same
    /// function. Returns the function itself where it is ours already, or where
    /// more distinct ones than we have wrappers exist (logged; those launches
    /// are not governed).
    pub fn wrap(&self, real: usize) -> usize {
        if table::is_ours(real) {
            return real;
        }
        for (cell, wrapper) in self.reals.iter().zip(&self.wrappers) {
            match cell.compare_exchange(0, real, AcqRel, Acquire) {
                Ok(_) => {
                    inspect(real);
                    return *wrapper as usize;
                }
                Err(there) if there == real => return *wrapper as usize,
                Err(_) => {}
            }
        }
        crate::log!("{}: too many real functions, one is not governed", self.name);
        real
    }
}
