//! The preloaded library, `core/preload`, which loads the shim and leads the program's calls and look-ups
//! here. Tests link the shim into themselves instead; there is no host then.

#[path = "../../preload/src/abi.rs"]
pub mod abi;

use abi::{DeepBind, Host};
use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Acquire, Release};

pub type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
pub type Ioctl = unsafe extern "C" fn(c_int, c_ulong, ...) -> c_int;

static HOST: AtomicPtr<Host> = AtomicPtr::new(null_mut());

/// The preloaded library is this.
pub fn set(host: &'static Host) {
    HOST.store(std::ptr::from_ref(host).cast_mut(), Release);
}

fn host() -> Option<&'static Host> {
    // SAFETY: null, or valid for the process's life.
    unsafe { HOST.load(Acquire).as_ref() }
}

/// The C library's `dlsym`.
pub fn dlsym() -> Dlsym {
    match host() {
        // SAFETY: the preloaded library has found it.
        Some(host) => unsafe { std::mem::transmute::<*const (), Dlsym>(host.dlsym) },
        None => libc::dlsym,
    }
}

/// libc's `ioctl`, behind the preloaded library's own; `None` if it was not found.
pub fn ioctl() -> Option<Ioctl> {
    let real = host()?.ioctl;
    // SAFETY: null, or what the preloaded library has found.
    unsafe { std::mem::transmute::<*const (), Option<Ioctl>>(real) }
}

/// A function of this name behind the preloaded library: the driver's, or another interposer's.
pub fn next(name: &CStr) -> Option<NonNull<c_void>> {
    let found = match host() {
        // SAFETY: as `dlsym`, from the preloaded library.
        Some(host) => unsafe { (host.next)(name.as_ptr()) },
        // SAFETY: a NUL-terminated name.
        None => unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) },
    };
    NonNull::new(std::hint::black_box(found))
}

/// The preloaded library's exports, of which there are as many as entries of the table.
pub fn exports(count: usize) -> &'static [*const ()] {
    // SAFETY: the preloaded library has one for each entry of the table: the hash of their names was compared.
    host().map_or(&[], |host| unsafe { std::slice::from_raw_parts(host.exports, count) })
}

/// An address in the preloaded library. Those of its exports may be another library's of the same name, which stands
/// before it.
pub fn address() -> Option<usize> {
    Some(host()?.next as *const () as usize)
}

/// The first `dlopen` with `RTLD_DEEPBIND`.
pub fn deep_bind() -> Option<&'static DeepBind> {
    // SAFETY: null, or the preloaded library's.
    unsafe { host()?.deep_bind.as_ref() }
}
