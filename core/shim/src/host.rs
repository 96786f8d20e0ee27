//! The preloaded library, `core/preload`, which loads the shim and leads the program's calls and look-ups
//! here. Tests link the shim into themselves instead; there is no host then.

#[path = "../../preload/src/abi.rs"]
pub mod abi;

use crate::entry_points::{DIRECT, ENTRY_POINTS};
use crate::{resolve, timeslice};
use abi::{DeepBind, Entries, Host};
use std::ffi::{CStr, c_void};
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Acquire, Release};

static HOST: AtomicPtr<Host> = AtomicPtr::new(null_mut());

/// What the preloaded library is given.
static ENTRIES: Entries =
    Entries { direct: DIRECT.0.as_ptr(), wrap, ioctl: timeslice::ioctl as *const () };

/// The preloaded library calls it first.
///
/// # Safety
/// `host` is valid as far as its first word at least.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tally_shim_start(host: &'static Host) -> *const Entries {
    let abi = ENTRY_POINTS.iter().fold(abi::VERSION, |hash, entry_point| abi::hash(hash, entry_point.name.as_bytes()));
    if host.abi != abi {
        return null();
    }
    HOST.store(std::ptr::from_ref(host).cast_mut(), Release);
    &raw const ENTRIES
}

unsafe extern "C" fn wrap(index: usize, real: usize) -> usize {
    ENTRY_POINTS.get(index).map_or(real, |entry_point| entry_point.wrap(real))
}

fn host() -> Option<&'static Host> {
    // SAFETY: null, or valid for the process's life.
    unsafe { HOST.load(Acquire).as_ref() }
}

/// The C library's `dlsym`.
pub fn dlsym() -> resolve::Dlsym {
    match host() {
        // SAFETY: the preloaded library has found it.
        Some(host) => unsafe { std::mem::transmute::<*const (), resolve::Dlsym>(host.dlsym) },
        None => libc::dlsym,
    }
}

/// The real `ioctl`.
pub fn ioctl() -> Option<timeslice::Ioctl> {
    let real = host()?.ioctl;
    // SAFETY: null, or what the preloaded library has found.
    unsafe { std::mem::transmute::<*const (), Option<timeslice::Ioctl>>(real) }
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

/// The preloaded library's exports.
pub fn exports() -> &'static [*const ()] {
    // SAFETY: the preloaded library has one for each entry of the table: the hash of their names was compared.
    host().map_or(&[], |host| unsafe { std::slice::from_raw_parts(host.exports, ENTRY_POINTS.len()) })
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
