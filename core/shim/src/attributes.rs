//! Attributes of functions that the program sets: kernels' transformed forms get them, too.

use crate::names::loading_once;
use crate::quiesce;
use std::ffi::c_int;
use tally_preempt::cuda::{CuResult, Ptr, SUCCESS};
use tally_preempt::{occupancy, prepare, settings};

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

/// Calls that set how functions share an SM's memory, of at most six arguments.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
#[allow(clippy::too_many_arguments)]
pub unsafe fn set_configuration(
    real: unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> CuResult,
    _per_thread: bool,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> CuResult {
    // SAFETY: the caller's arguments.
    let result = unsafe { real(a, b, c, d, e, f) };
    occupancy::forget();
    result
}

fn set(result: CuResult, function: Ptr) -> CuResult {
    occupancy::forget();
    if result == SUCCESS && settings::is_enabled() {
        prepare::attribute_set(function);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::null_mut;

    unsafe extern "C" fn refuses(_: Ptr, _: c_int, _: c_int) -> CuResult {
        1
    }

    unsafe extern "C" fn accepts(_: c_int, _: c_int, _: Ptr, _: c_int) -> CuResult {
        SUCCESS
    }

    unsafe extern "C" fn adds(
        a: usize,
        b: usize,
        c: usize,
        d: usize,
        e: usize,
        f: usize,
    ) -> CuResult {
        (a + b + c + d + e + f) as CuResult
    }

    #[test]
    fn whatever_is_set_is_told_to_the_driver_and_occupancy_is_forgotten() {
        let calls: [(fn() -> CuResult, CuResult); 3] = [
            // SAFETY: a function that does nothing.
            (|| unsafe { func_set_attribute(refuses, false, null_mut(), 8, 1) }, 1),
            // SAFETY: as above.
            (|| unsafe { kernel_set_attribute(accepts, false, 8, 1, null_mut(), 0) }, SUCCESS),
            // SAFETY: as above.
            (|| unsafe { set_configuration(adds, false, 1, 2, 3, 4, 5, 6) }, 21),
        ];
        for (call, result) in calls {
            let before = occupancy::generation();
            assert_eq!(call(), result);
            assert!(occupancy::generation() > before);
        }
    }
}
