//! How look-ups lead to the shim, and how the shim finds the real functions.
//!
//! Three ways in: direct linking (the exports of [`doors`]), `dlsym`, and
//! `cuGetProcAddress`. Rules that interposers before this one broke:
//! - only exact names that begin with `cu` and a capital are looked at (`cudnn*`
//!   and `cublas*` begin with `cu` too);
//! - any other look-up *jumps* to the real `dlsym` with the caller's return
//!   address in place, because `RTLD_NEXT` and `RTLD_DEFAULT` mean different
//!   things to different callers. So does `RTLD_NEXT` for our own names: only
//!   another interposer asks for it, and it must get its own successor;
//! - a name that the asked library does not have stays not found;
//! - every distinct real function gets a wrapper of its own, so that two drivers,
//!   or a driver and another interposer, are never mixed up.
//!
//! Must never call `dlsym` by name (it is ours) and never recurse.

use crate::doors::{self, Door};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

/// Versions that glibc has given `dlsym`, by platform and age.
const DLSYM_VERSIONS: [&CStr; 3] = [c"GLIBC_2.34", c"GLIBC_2.17", c"GLIBC_2.2.5"];
/// What every CUDA program loads.
const DRIVER_NAME: &CStr = c"libcuda.so.1";
/// `RTLD_NEXT`.
const RTLD_NEXT: usize = usize::MAX;
/// `RTLD_DEFAULT`.
const RTLD_DEFAULT: usize = 0;

/// The real `dlsym`; the trampoline jumps through it.
static REAL_DLSYM: AtomicUsize = AtomicUsize::new(0);
/// Handle of the driver in use.
static DRIVER_HANDLE: AtomicUsize = AtomicUsize::new(0);

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// What the trampoline does next, returned in two registers.
#[repr(C)]
pub struct Route {
    value: usize,
    /// 0: jump to the real `dlsym`; 1: return `value`.
    decided: usize,
}

#[cold]
fn find_real_dlsym() -> usize {
    for version in DLSYM_VERSIONS {
        // SAFETY: NUL-terminated names; dlvsym is not ours.
        let p = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        if !p.is_null() {
            REAL_DLSYM.store(p as usize, Release);
            return p as usize;
        }
    }
    0
}

fn real_dlsym() -> Option<Dlsym> {
    let mut at = REAL_DLSYM.load(Acquire);
    if at == 0 {
        at = find_real_dlsym();
    }
    if at == 0 {
        return None;
    }
    // SAFETY: the address of glibc's dlsym.
    Some(unsafe { std::mem::transmute::<usize, Dlsym>(at) })
}

#[inline(never)]
fn lookup(handle: *mut c_void, name: &CStr) -> Option<NonNull<c_void>> {
    let dlsym = real_dlsym()?;
    // SAFETY: a NUL-terminated name; the handle is the caller's or ours.
    let found = unsafe { dlsym(handle, name.as_ptr()) };
    // Keeps the call from becoming a tail jump: RTLD_NEXT must see this library.
    NonNull::new(std::hint::black_box(found))
}

/// Decide a `dlsym` call: called by the trampoline for every look-up of the process.
unsafe extern "C" fn route(handle: *mut c_void, name: *const c_char) -> Route {
    let jump = Route { value: 0, decided: 0 };
    if REAL_DLSYM.load(Acquire) == 0 && find_real_dlsym() == 0 {
        return Route { value: 0, decided: 1 };
    }
    if name.is_null() || handle as usize == RTLD_NEXT {
        return jump;
    }
    // SAFETY: NUL-terminated, so each byte is read only if the one before is not NUL.
    let ours = unsafe {
        *name.cast::<u8>() == b'c'
            && *name.add(1).cast::<u8>() == b'u'
            && (*name.add(2).cast::<u8>()).is_ascii_uppercase()
    };
    if !ours {
        return jump;
    }
    // SAFETY: the caller's NUL-terminated name.
    let name = unsafe { CStr::from_ptr(name) };
    let Some(door) = doors::exact(name.to_bytes()) else { return jump };
    let found = if handle as usize == RTLD_DEFAULT {
        // It would find our export even where no driver is loaded, and the
        // program would think that one is.
        in_loaded_driver(name).is_some().then_some(door.direct as usize)
    } else {
        // A handle of the program itself covers our export too: see above.
        lookup(handle, name)
            .map(|real| door.wrap(real.as_ptr() as usize))
            .filter(|found| *found != door.direct as usize || in_loaded_driver(name).is_some())
    };
    Route { value: found.unwrap_or(0), decided: 1 }
}

/// Replaces `dlsym` for the whole process.
///
/// # Safety
/// As the real one.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "endbr64",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {route}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rdx, rdx",
        "jne 2f",
        "mov rax, qword ptr [rip + {real}]",
        "jmp rax",
        "2:",
        "ret",
        route = sym route,
        real = sym REAL_DLSYM,
    )
}

/// Replaces `dlsym` for the whole process. On this machine type it calls the
/// real one instead of jumping to it, so `RTLD_NEXT` and `RTLD_DEFAULT` look-ups
/// of other libraries see the shim as their caller: not for production.
///
/// # Safety
/// As the real one.
#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's arguments.
    let r = unsafe { route(handle, name) };
    match real_dlsym() {
        // SAFETY: as above.
        Some(real) if r.decided == 0 => unsafe { real(handle, name) },
        _ => r.value as *mut c_void,
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
    lookup(RTLD_NEXT as *mut c_void, name).or_else(|| match loaded_driver() {
        0 => None,
        handle => lookup(handle as *mut c_void, name),
    })
}

/// A real driver function: for the shim's own calls.
pub fn in_driver(name: &CStr) -> Option<NonNull<c_void>> {
    let handle = match loaded_driver() {
        0 => {
            // A driver under another name (a program's own path): whoever the
            // first wrapped function belongs to.
            let base = doors::first_real().map_or(0, object_handle);
            if base != 0 { base } else { open_driver(libc::RTLD_LAZY) }
        }
        handle => handle,
    };
    if handle == 0 {
        return None;
    }
    let found = lookup(handle as *mut c_void, name)?;
    // The shim stands before the driver where a handle covers both.
    if doors::is_ours(found.as_ptr() as usize) {
        return lookup(RTLD_NEXT as *mut c_void, name);
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
                lookup(handle as *mut c_void, name)
            }
        })
        .map_or(0, |p| p.as_ptr() as usize);
    if found != 0 && !doors::is_ours(found) {
        inspect(found);
        cache.store(found, Release);
        return found;
    }
    0
}

/// Note where a real function lies: one outside the driver is another
/// interposer's, whose own calls may come back to us as launches within a launch.
fn inspect(real: usize) {
    let driver = loaded_driver();
    if driver != 0 && object_handle(real) != driver {
        crate::log!("another interposer stands before the driver");
        crate::capture::set_nesting();
    }
}

/// Body of `cuGetProcAddress` and `cuGetProcAddress_v2`: replace what was found.
///
/// # Safety
/// `symbol` and `pfn` as the program passed them to a call that succeeded.
pub unsafe fn replace_found(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    version: c_int,
    flags: u64,
) {
    if symbol.is_null() || pfn.is_null() {
        return;
    }
    // SAFETY: the driver has just read the one and written the other.
    let (name, real) = unsafe { (CStr::from_ptr(symbol), *pfn) };
    if real.is_null() || doors::is_ours(real as usize) {
        return;
    }
    let per_thread = flags & crate::cu::PROC_PER_THREAD != 0;
    let Some(door) = by_request(name.to_bytes(), version, per_thread, real as usize) else {
        return;
    };
    // SAFETY: as above; the wrapper has the signature that was asked for.
    unsafe { *pfn = door.wrap(real as usize) as *mut c_void };
}

/// The door for a `cuGetProcAddress` request. Base names stand for the version
/// that `version` selects; all versions of a wrapped function take the same
/// leading arguments, except for the two handled here.
fn by_request(name: &[u8], version: c_int, per_thread: bool, real: usize) -> Option<&'static Door> {
    if name == b"cuGetProcAddress" {
        return doors::exact(if version >= 12000 { b"cuGetProcAddress_v2" } else { name });
    }
    if name == b"cuCtxSynchronize" {
        if version < 13000 {
            return doors::exact(name);
        }
        // `_v2` takes the context. Which one this is, only the driver can say.
        let is = |n| in_driver(n).is_some_and(|p| p.as_ptr() as usize == real);
        return if is(c"cuCtxSynchronize_v2") {
            doors::exact(b"cuCtxSynchronize_v2")
        } else if is(c"cuCtxSynchronize") {
            doors::exact(b"cuCtxSynchronize")
        } else {
            None
        };
    }
    doors::requested(name, per_thread)
}

impl Door {
    /// The wrapper for a real function: the same one every time for the same
    /// function. Returns the function itself where it is ours already, or where
    /// more distinct ones than we have wrappers exist (logged; those launches
    /// are not governed).
    pub fn wrap(&self, real: usize) -> usize {
        if doors::is_ours(real) {
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
