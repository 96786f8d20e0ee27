//! Loading the shim, once, when the process first asks for a driver function and its environment asks
//! for Tally. If the shim cannot be loaded, the program runs as it would without this library, and that is
//! reported.

use crate::abi::{self, Entries, Host, Start};
use crate::sys::{self, Text, variable};
use crate::{entry, objects, open, report, route};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize};

const SHIM: &str = "libtally_shim.so";
const PATH_BYTES_MAX: usize = 1024;
const REASON_BYTES_MAX: usize = 480;
const RTLD_NOW: c_int = 2;

const UNKNOWN: u32 = 0;
const ON: u32 = 1;
const OFF: u32 = 2;

static STATE: AtomicU32 = AtomicU32::new(UNKNOWN);
static ENTRIES: AtomicPtr<Entries> = AtomicPtr::new(null_mut());
/// A thread that is loading the shim now; 0: none.
static LOADING: AtomicUsize = AtomicUsize::new(0);

/// Runs when this library is loaded. Looks functions up while the process has one thread: the C library's
/// list of objects has a lock, and a forked child may find it held.
#[cfg(preload)]
#[used]
#[unsafe(link_section = ".init_array")]
static PREPARE: extern "C" fn() = prepare;

#[cfg(preload)]
extern "C" fn prepare() {
    objects::note_start();
    route::real();
    open::real();
    entry::fill_ioctl();
}

/// The shim, if launches are to be governed and it can be had.
///
/// Without a lock, which a thread could wait for inside the loader's: threads that come here at once all
/// load it, and the C library sees to it that it is loaded once.
pub fn shim() -> Option<&'static Entries> {
    match STATE.load(Acquire) {
        // SAFETY: null, or the shim's own constant; it is never unloaded.
        ON => unsafe { ENTRIES.load(Acquire).as_ref() },
        UNKNOWN => decide(),
        _ => None,
    }
}

/// The shim, if it is loaded already.
pub fn loaded() -> Option<&'static Entries> {
    // SAFETY: null, or the shim's own constant; it is never unloaded.
    unsafe { ENTRIES.load(Acquire).as_ref() }
}

#[cold]
fn decide() -> Option<&'static Entries> {
    if variable(c"TALLY_SOCKET").is_none() && variable(c"TALLY_PRIORITY").is_none() {
        STATE.store(OFF, Release);
        return None;
    }
    // SAFETY: takes nothing.
    let thread = unsafe { sys::call(sys::GETTID, [0; 6]) } as usize;
    if LOADING.load(Relaxed) == thread {
        // The loader itself has led here.
        return None;
    }
    LOADING.store(thread, Relaxed);
    let mut reason = Text::<REASON_BYTES_MAX>::new();
    let entries = load(&mut reason);
    LOADING.store(0, Relaxed);
    match entries {
        Some(entries) => {
            entry::lead_ioctl_to(entries.ioctl);
            ENTRIES.store(core::ptr::from_ref(entries).cast_mut(), Release);
            STATE.store(ON, Release);
        }
        None => {
            if STATE.compare_exchange(UNKNOWN, OFF, AcqRel, Acquire).is_ok() {
                report::not_governed(&reason);
            }
        }
    }
    entries
}

fn load(reason: &mut Text<REASON_BYTES_MAX>) -> Option<&'static Entries> {
    if objects::next(c"gnu_get_libc_version").is_none() {
        reason.str("the program's C library is not glibc");
        return None;
    }
    let mut path = Text::<PATH_BYTES_MAX>::new();
    let Some(path) = beside(&mut path) else {
        reason.str("LD_PRELOAD must name libtally_preload.so by an absolute path");
        return None;
    };
    let (Some(open), Some(error)) = (objects::next(c"dlopen"), objects::next(c"dlerror")) else {
        reason.str("the program has no dlopen: link it with libdl");
        return None;
    };
    // SAFETY: the C library's functions of these names.
    let (open, error) = unsafe {
        (
            core::mem::transmute::<usize, unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void>(
                open,
            ),
            core::mem::transmute::<usize, unsafe extern "C" fn() -> *const u8>(error),
        )
    };
    // SAFETY: a NUL-terminated path; the shim's constructors are the standard library's only.
    let handle = unsafe { open(path, RTLD_NOW) };
    if handle.is_null() {
        reason.str(SHIM).str(" cannot be loaded: ");
        // SAFETY: a NUL-terminated text, or null. Taking it clears it, so that the program finds no error
        // of ours.
        unsafe {
            let told = error();
            reason.c_str(if told.is_null() {
                c"no reason was given".as_ptr().cast()
            } else {
                told
            });
        }
        return None;
    }
    // SAFETY: the shim's function of this name has this type; the host is constant but for `dlsym`.
    let entries = unsafe {
        let start: *mut c_void = real_dlsym(handle, abi::START);
        if start.is_null() {
            core::ptr::null()
        } else {
            core::mem::transmute::<*mut c_void, Start>(start)(host())
        }
    };
    // SAFETY: null, or the shim's own constant.
    let entries = unsafe { entries.as_ref() };
    if entries.is_none() {
        reason.str(SHIM).str(" is of another build than libtally_preload.so");
    }
    entries
}

unsafe fn real_dlsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: called only where dlopen was found, which is never without dlsym.
    unsafe {
        let dlsym = core::mem::transmute::<
            usize,
            unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void,
        >(route::real());
        dlsym(handle, name.as_ptr())
    }
}

/// What the shim is given: the same for the process's life.
fn host() -> &'static Host {
    static HOST: HostCell = HostCell(core::cell::UnsafeCell::new(core::mem::MaybeUninit::uninit()));
    let host = Host {
        abi: entry::ABI,
        dlsym: route::real() as *const (),
        ioctl: objects::next(c"ioctl").unwrap_or(0) as *const (),
        exports: entry::EXPORTS.0.as_ptr(),
        next: route::next,
        deep_bind: &raw const open::DEEP_BIND,
    };
    // SAFETY: threads that come here at once write the same.
    unsafe {
        let place = (*HOST.0.get()).as_mut_ptr();
        (&raw mut (*place).abi).write_volatile(host.abi);
        (&raw mut (*place).dlsym).write_volatile(host.dlsym);
        (&raw mut (*place).ioctl).write_volatile(host.ioctl);
        (&raw mut (*place).exports).write_volatile(host.exports);
        (&raw mut (*place).next).write_volatile(host.next);
        (&raw mut (*place).deep_bind).write_volatile(host.deep_bind);
        &*place
    }
}

struct HostCell(core::cell::UnsafeCell<core::mem::MaybeUninit<Host>>);

// SAFETY: see `host`.
unsafe impl Sync for HostCell {}

/// The shim's path: in this library's folder. `None` if that is not known as an absolute path.
fn beside(path: &mut Text<PATH_BYTES_MAX>) -> Option<*const c_char> {
    let own = objects::own_file()?;
    // SAFETY: the loader's NUL-terminated text.
    unsafe {
        if *own != b'/' {
            return None;
        }
        let mut folder = sys::length(own);
        while folder > 0 && own.add(folder - 1).read_volatile() != b'/' {
            folder -= 1;
        }
        path.bytes(own, folder).str(SHIM);
    }
    path.terminated()
}
