//! Attributes of functions that the program sets: kernels' transformed forms get them, too.

use crate::names::loading_once;
use crate::quiesce;
use std::ffi::c_int;
use tally_preempt::cuda::{CuResult, Ptr, SUCCESS};
use tally_preempt::{prepare, settings};

/// `cuFuncSetAttribute`: the kernel's transformed forms get it, too.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn func_set_attribute(
    real: unsafe extern "C" fn(Ptr, c_int, c_int) -> CuResult,
    _per_thread: bool,
    function: Ptr,
    attribute: c_int,
    value: c_int,
) -> CuResult {
    // Not while another thread launches in parts, which had all of what it had at first.
    quiesce::while_open_unjoined(|| {
        // SAFETY: the caller's arguments.
        set(unsafe { real(function, attribute, value) }, function)
    })
}

/// `cuKernelSetAttribute`: likewise.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn kernel_set_attribute(
    real: unsafe extern "C" fn(c_int, c_int, Ptr, c_int) -> CuResult,
    _per_thread: bool,
    attribute: c_int,
    value: c_int,
    kernel: Ptr,
    device: c_int,
) -> CuResult {
    // As above.
    loading_once(kernel, || {
        // SAFETY: the caller's arguments.
        set(unsafe { real(attribute, value, kernel, device) }, kernel)
    })
}

fn set(result: CuResult, function: Ptr) -> CuResult {
    if result == SUCCESS && settings::is_enabled() {
        prepare::attribute_set(function);
    }
    result
}
