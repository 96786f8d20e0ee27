//! `dlsym`. A look-up of one of the entry points leads to the shim if the driver has that function;
//! any other *jumps* to the real `dlsym` with the caller's return address in place, because `RTLD_NEXT`
//! and `RTLD_DEFAULT` mean different things to different callers. So does `RTLD_NEXT` of an entry point,
//! where there is a driver: only another interposer asks for it, and it must get its own successor.
//!
//! A name that the asked library does not have stays not found, with the error that `dlerror` then tells. So does a
//! driver function where the caller's scope has no driver: one that was opened with `RTLD_LOCAL`.

use crate::entry::{EXPORTS, NAMES};
use crate::sys::equal;
use crate::{load, objects};
use core::ffi::{c_char, c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Release};

const RTLD_DEFAULT: usize = 0;
const RTLD_NEXT: usize = usize::MAX;
const RTLD_LAZY: c_int = 1;
const RTLD_NOLOAD: c_int = 4;

/// The real `dlsym`; 0: not found yet.
static REAL: AtomicUsize = AtomicUsize::new(0);

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
type Dlclose = unsafe extern "C" fn(*mut c_void) -> c_int;

/// What `dlsym` does next, in two registers.
#[repr(C)]
pub struct Route {
    /// The result, or what to jump to.
    value: usize,
    /// 1: `value` is the result.
    is_result: usize,
}

/// Replaces `dlsym` for the whole process.
///
/// # Safety
/// As the real one.
#[cfg_attr(preload, unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "endbr64",
        "mov rdx, qword ptr [rsp]",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {route}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rdx, rdx",
        "jne 2f",
        "jmp rax",
        "2:",
        "ret",
        route = sym route,
    )
}

/// The real `dlsym`'s address; 0 if the process has none.
pub fn real() -> usize {
    match REAL.load(Acquire) {
        0 => {
            let at = objects::next(c"dlsym").unwrap_or(0);
            REAL.store(at, Release);
            at
        }
        at => at,
    }
}

/// A look-up by the real `dlsym`, from this library; 0 if there is nothing.
#[inline(never)]
fn lookup(handle: usize, name: *const c_char) -> usize {
    let real = real();
    if real == 0 {
        return 0;
    }
    // SAFETY: the address of the C library's dlsym; a NUL-terminated name and the caller's handle, or ours.
    let found = unsafe {
        let real = core::mem::transmute::<usize, Dlsym>(real);
        real(handle as *mut c_void, name)
    };
    // Keeps the call from becoming a jump: RTLD_NEXT must see this library as the caller.
    core::hint::black_box(found) as usize
}

unsafe extern "C" fn route(handle: *mut c_void, name: *const c_char, caller: usize) -> Route {
    let result = |value| Route { value, is_result: 1 };
    let real = real();
    let jump = Route { value: real, is_result: usize::from(real == 0) };
    if real == 0 || name.is_null() {
        return jump;
    }
    // SAFETY: the caller's NUL-terminated name.
    let Some(index) = (unsafe { index_of(name) }) else { return jump };
    let Some(own) = EXPORTS.0.get(index).map(|export| *export as usize) else { return jump };
    if handle as usize == RTLD_NEXT {
        // The next one may be this library's, which without a driver must not be found.
        return match is_in_scope_of(caller, name) {
            true => jump,
            false => result(lookup(RTLD_NEXT, name)),
        };
    }
    let found = if handle as usize == RTLD_DEFAULT { own } else { lookup(handle as usize, name) };
    if found == 0 {
        return jump;
    }
    if found == own {
        // This library comes before the driver there. Without a driver nothing must be found.
        let is_there = match handle as usize {
            RTLD_DEFAULT => is_in_scope_of(caller, name),
            // Of the program as a whole.
            _ => lookup(RTLD_NEXT, name) != 0,
        };
        if is_there {
            return result(own);
        }
        return result(lookup(RTLD_NEXT, name));
    }
    match load::shim() {
        // SAFETY: an index of the names; a function that the C library found.
        Some(shim) => result(unsafe { (shim.wrap)(index, found) }),
        None => result(found),
    }
}

/// Whether a caller would find a driver function by itself: what was there when the program began finds what is in
/// the global scope; of a library that was opened later the scope is not known, and any driver will do.
fn is_in_scope_of(caller: usize, name: *const c_char) -> bool {
    lookup(RTLD_NEXT, name) != 0
        || (!objects::was_there_at_start(caller) && loaded_driver(name).is_some())
}

/// Which entry point a name is: the exact name only (`cudnn*` and `cublas*` begin with `cu`, too).
unsafe fn index_of(name: *const c_char) -> Option<usize> {
    let name: *const u8 = name.cast();
    // SAFETY: NUL-terminated, so each byte is read only if the one before is not NUL.
    unsafe {
        if *name != b'c' || *name.add(1) != b'u' || !(*name.add(2)).is_ascii_uppercase() {
            return None;
        }
        NAMES.iter().position(|known| equal(known.as_ptr().cast(), name))
    }
}

/// A driver function behind this library, or in a driver that some library was opened with.
fn loaded_driver(name: *const c_char) -> Option<usize> {
    let next = lookup(RTLD_NEXT, name);
    if next != 0 {
        return Some(next);
    }
    let (handle, close) = open_driver(RTLD_LAZY | RTLD_NOLOAD)?;
    let found = lookup(handle as usize, name);
    // SAFETY: opened above; the program's own reference keeps it.
    unsafe { close(handle) };
    (found != 0).then_some(found)
}

/// A driver function, loading the driver if need be.
pub fn in_driver(name: *const c_char) -> Option<usize> {
    loaded_driver(name).or_else(|| {
        let (handle, _) = open_driver(RTLD_LAZY)?;
        let found = lookup(handle as usize, name);
        (found != 0).then_some(found)
    })
}

fn open_driver(flags: c_int) -> Option<(*mut c_void, Dlclose)> {
    let (open, close) = (objects::next(c"dlopen")?, objects::next(c"dlclose")?);
    // SAFETY: the C library's functions of these names.
    let (open, close) = unsafe {
        (core::mem::transmute::<usize, Dlopen>(open), core::mem::transmute::<usize, Dlclose>(close))
    };
    // SAFETY: a NUL-terminated name.
    let handle = unsafe { open(c"libcuda.so.1".as_ptr(), flags) };
    (!handle.is_null()).then_some((handle, close))
}

/// `RTLD_NEXT` from this library, for the shim.
///
/// # Safety
/// `name` is NUL-terminated.
pub unsafe extern "C" fn next(name: *const c_char) -> *mut c_void {
    match lookup(RTLD_NEXT, name) {
        0 => null_mut(),
        found => found as *mut c_void,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_names_are_entry_points() {
        // SAFETY: NUL-terminated.
        let is = |name: &core::ffi::CStr| unsafe { index_of(name.as_ptr()) };
        assert_eq!(is(c"cuInit"), Some(0));
        assert!(is(c"cuGraphLaunch_ptsz").is_some());
        for other in
            [c"cudaLaunchKernel", c"cublasCreate", c"cuLaunchKernelX", c"cuLaunchKerne", c"cu", c""]
        {
            assert!(is(other).is_none(), "{other:?}");
        }
    }
}
