//! Start, version, error texts and the profiler switch.

use crate::config::DRIVER_VERSION;
use crate::error::{CuError, describe};
use crate::ffi::{Out, exports};
use std::ffi::{c_char, c_void};
use std::sync::atomic::AtomicU32;

/// Where a debugger says that it is attached (`CUDBG_IPC_FLAG_NAME` of `cudadebugger.h`). Nothing here reads it.
#[allow(non_upper_case_globals, reason = "the driver's name")]
#[unsafe(no_mangle)]
pub static cudbgIpcFlag: AtomicU32 = AtomicU32::new(0);

exports! {
    fn cuInit(flags: u32) {
        crate::driver::init(flags)
    }

    fn cuDriverGetVersion(version: Out<i32>) {
        version.set(DRIVER_VERSION)
    }

    fn cuGetErrorName(error: u32, text: Out<*const c_char>) {
        let name = describe(error).map(|d| d.0);
        text.set(name.map_or(std::ptr::null(), |n| n.as_ptr()))?;
        name.map(drop).ok_or(CuError::INVALID_VALUE)
    }

    fn cuGetErrorString(error: u32, text: Out<*const c_char>) {
        let string = describe(error).map(|d| d.1);
        text.set(string.map_or(std::ptr::null(), |s| s.as_ptr()))?;
        string.map(drop).ok_or(CuError::INVALID_VALUE)
    }

    fn cuGetExportTable(table: Out<*const c_void>, _id: *const c_void) {
        // Private tables of NVIDIA's own libraries.
        table.set_if(std::ptr::null());
        Err(CuError::NOT_FOUND)
    }

    fn cuProfilerStart() {
        Ok(())
    }

    fn cuProfilerStop() {
        Ok(())
    }

    fn cuProfilerInitialize(_config: *const c_char, _output: *const c_char, _mode: u32) {
        Ok(())
    }
}
