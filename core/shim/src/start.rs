//! What the preloaded library calls first, and what leads from there to the rest.

use crate::entry_points::{DIRECT, ENTRY_POINTS};
use crate::host::abi::{self, Entries, Host};
use crate::{host, opens, preempt, resolve, table, timeslice};
use std::ffi::{c_char, c_void};
use std::ptr::null;

/// What the preloaded library is given.
static ENTRIES: Entries = Entries {
    direct: DIRECT.0.as_ptr(),
    wrap,
    ioctl: timeslice::ioctl as *const (),
    opens: opens::opens,
};

/// Makes the table of functions, the driver's functions and what transforms launches known to who needs them. More than
/// once does no harm.
fn start() {
    table::set(ENTRY_POINTS);
    tally_preempt::cuda::find_by(resolve::in_driver);
    tally_preempt::host::install(&preempt::Shim);
}

/// The preloaded library calls it first.
///
/// # Safety
/// `host` is valid as far as its first word at least.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tally_shim_start(host: &'static Host) -> *const Entries {
    let abi = ENTRY_POINTS
        .iter()
        .fold(abi::VERSION, |hash, entry_point| abi::hash(hash, entry_point.name.as_bytes()));
    if host.abi != abi {
        return null();
    }
    host::set(host);
    start();
    &raw const ENTRIES
}

unsafe extern "C" fn wrap(index: usize, real: usize) -> usize {
    ENTRY_POINTS.get(index).map_or(real, |entry_point| entry_point.wrap(real))
}

/// What a look-up in a library leads to: the wrapper of a driver function that is replaced, or what is
/// there. For tests and benches, which are not preloaded.
///
/// # Safety
/// As `dlsym`, with a handle that dlopen gave.
pub unsafe fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    start();
    // SAFETY: by the caller.
    unsafe { resolve::dlsym(handle, name) }
}
