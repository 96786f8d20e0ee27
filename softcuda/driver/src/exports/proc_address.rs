//! `cuGetProcAddress`: from a base name and a version to the right symbol.
//!
//! The symbols are this library's own, looked up in itself; the tables say
//! which of them a program that was built for a given CUDA version means.

use crate::config::DRIVER_VERSION;
use crate::error::{CuError, CuResult};
use crate::ffi::{In, Out, exports};
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::OnceLock;

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`; 1 asks for the legacy one.
const PER_THREAD: u64 = 2;
const FOUND: u32 = 0;
const NOT_FOUND: u32 = 1;
const VERSION_TOO_LOW: u32 = 2;

/// Functions with several versions: base name, then the CUDA version from
/// which each suffix is meant, oldest first.
const VERSIONED: &[(&str, &[(i32, &str)])] = &[
    ("cuCtxCreate", &[(3020, "_v2"), (11040, "_v3"), (12050, "_v4")]),
    ("cuCtxDestroy", &[(4000, "_v2")]),
    ("cuCtxGetDevice", &[(2000, ""), (13000, "_v2")]),
    ("cuCtxPopCurrent", &[(4000, "_v2")]),
    ("cuCtxPushCurrent", &[(4000, "_v2")]),
    ("cuCtxSynchronize", &[(2000, ""), (13000, "_v2")]),
    ("cuDeviceGetUuid", &[(9020, ""), (11040, "_v2")]),
    ("cuDevicePrimaryCtxRelease", &[(11000, "_v2")]),
    ("cuDevicePrimaryCtxReset", &[(11000, "_v2")]),
    ("cuDevicePrimaryCtxSetFlags", &[(11000, "_v2")]),
    ("cuDeviceTotalMem", &[(3020, "_v2")]),
    ("cuEventDestroy", &[(4000, "_v2")]),
    ("cuEventElapsedTime", &[(2000, ""), (12080, "_v2")]),
    ("cuGetProcAddress", &[(11030, ""), (12000, "_v2")]),
    ("cuGraphAddDependencies", &[(10000, ""), (12030, "_v2")]),
    ("cuGraphAddKernelNode", &[(10000, ""), (12000, "_v2")]),
    ("cuGraphExecKernelNodeSetParams", &[(10010, ""), (12000, "_v2")]),
    ("cuGraphExecUpdate", &[(10020, ""), (12000, "_v2")]),
    ("cuGraphGetEdges", &[(10000, ""), (12030, "_v2")]),
    ("cuGraphInstantiate", &[(11000, "_v2"), (12000, "WithFlags")]),
    ("cuGraphKernelNodeGetParams", &[(10000, ""), (12000, "_v2")]),
    ("cuGraphKernelNodeSetParams", &[(10000, ""), (12000, "_v2")]),
    ("cuGraphNodeGetDependencies", &[(10000, ""), (12030, "_v2")]),
    ("cuGraphNodeGetDependentNodes", &[(10000, ""), (12030, "_v2")]),
    ("cuGraphRemoveDependencies", &[(10000, ""), (12030, "_v2")]),
    ("cuMemAdvise", &[(8000, ""), (12020, "_v2")]),
    ("cuMemAlloc", &[(3020, "_v2")]),
    ("cuMemAllocHost", &[(3020, "_v2")]),
    ("cuMemAllocPitch", &[(3020, "_v2")]),
    ("cuMemFree", &[(3020, "_v2")]),
    ("cuMemGetAddressRange", &[(3020, "_v2")]),
    ("cuMemGetInfo", &[(3020, "_v2")]),
    ("cuMemHostGetDevicePointer", &[(3020, "_v2")]),
    ("cuMemHostRegister", &[(6050, "_v2")]),
    ("cuMemPrefetchAsync", &[(8000, ""), (12020, "_v2")]),
    ("cuMemcpy2D", &[(3020, "_v2")]),
    ("cuMemcpy2DAsync", &[(3020, "_v2")]),
    ("cuMemcpy2DUnaligned", &[(3020, "_v2")]),
    ("cuMemcpy3D", &[(3020, "_v2")]),
    ("cuMemcpy3DAsync", &[(3020, "_v2")]),
    ("cuMemcpyDtoD", &[(3020, "_v2")]),
    ("cuMemcpyDtoDAsync", &[(3020, "_v2")]),
    ("cuMemcpyDtoH", &[(3020, "_v2")]),
    ("cuMemcpyDtoHAsync", &[(3020, "_v2")]),
    ("cuMemcpyHtoD", &[(3020, "_v2")]),
    ("cuMemcpyHtoDAsync", &[(3020, "_v2")]),
    ("cuMemsetD16", &[(3020, "_v2")]),
    ("cuMemsetD2D16", &[(3020, "_v2")]),
    ("cuMemsetD2D32", &[(3020, "_v2")]),
    ("cuMemsetD2D8", &[(3020, "_v2")]),
    ("cuMemsetD32", &[(3020, "_v2")]),
    ("cuMemsetD8", &[(3020, "_v2")]),
    ("cuModuleGetGlobal", &[(3020, "_v2")]),
    ("cuStreamBatchMemOp", &[(8000, ""), (11070, "_v2")]),
    ("cuStreamBeginCapture", &[(10010, "_v2")]),
    ("cuStreamDestroy", &[(4000, "_v2")]),
    ("cuStreamGetCaptureInfo", &[(10010, ""), (11030, "_v2"), (12030, "_v3")]),
    ("cuStreamGetCtx", &[(9020, ""), (12050, "_v2")]),
    ("cuStreamUpdateCaptureDependencies", &[(11030, ""), (12030, "_v2")]),
    ("cuStreamWaitValue32", &[(8000, ""), (11070, "_v2")]),
    ("cuStreamWaitValue64", &[(9000, ""), (11070, "_v2")]),
    ("cuStreamWriteValue32", &[(8000, ""), (11070, "_v2")]),
    ("cuStreamWriteValue64", &[(9000, ""), (11070, "_v2")]),
];

/// The version in which functions that start like this came, where that is
/// newer than programs may ask for. The first match counts.
const INTRODUCED: &[(&str, i32)] = &[
    ("cuKernelGetName", 12030),
    ("cuKernelGetParam", 12040),
    ("cuKernelGetLibrary", 12050),
    ("cuKernel", 12000),
    ("cuLibraryEnumerateKernels", 12040),
    ("cuLibraryGetKernelCount", 12040),
    ("cuLibrary", 12000),
    ("cuModuleEnumerateFunctions", 12040),
    ("cuModuleGetFunctionCount", 12040),
    ("cuModuleGetLoadingMode", 11070),
    ("cuFuncGetName", 12030),
    ("cuFuncGetParam", 12040),
    ("cuFuncIsLoaded", 12040),
    ("cuFuncLoad", 12040),
    ("cuLaunchKernelEx", 11060),
    ("cuOccupancyMaxActiveClusters", 11070),
    ("cuOccupancyMaxPotentialClusterSize", 11070),
    ("cuCtxGetId", 12000),
    ("cuCtxSetFlags", 12010),
    ("cuStreamGetId", 12000),
    ("cuStreamGetDevice", 12080),
    ("cuStreamBeginCaptureToGraph", 12030),
    ("cuGraphInstantiateWithParams", 12000),
    ("cuGraphInstantiateWithFlags", 11040),
    ("cuGreenCtxStreamCreate", 12050),
    ("cuGreenCtxGetId", 13000),
    ("cuGreenCtx", 12040),
    ("cuCtxFromGreenCtx", 12040),
    ("cuCtxGetDevResource", 12040),
    ("cuCtxRecordEvent", 12050),
    ("cuCtxWaitEvent", 12050),
    ("cuDevResourceGenerateDesc", 12040),
    ("cuDevSmResourceSplitByCount", 12040),
    ("cuDeviceGetDevResource", 12040),
    ("cuStreamGetGreenCtx", 12040),
    ("cuDeviceGetExecAffinitySupport", 11040),
    ("cuMemPool", 11020),
    ("cuMemAllocAsync", 11020),
    ("cuMemFreeAsync", 11020),
    ("cuMemAllocFromPoolAsync", 11020),
];

/// The symbol (without the suffix for per-thread streams) or a status.
fn symbol(base: &str, version: i32) -> Result<String, u32> {
    if let Ok(at) = VERSIONED.binary_search_by_key(&base, |v| v.0) {
        let best = VERSIONED[at].1.iter().rfind(|(since, _)| *since <= version);
        return best.map(|(_, suffix)| format!("{base}{suffix}")).ok_or(VERSION_TOO_LOW);
    }
    // Only base names are looked up: a suffix is not part of one.
    let suffixed = ["_v2", "_v3", "_v4", "_ptsz", "_ptds"].iter().any(|s| base.ends_with(s));
    if suffixed || !base.starts_with("cu") {
        return Err(NOT_FOUND);
    }
    let since = INTRODUCED.iter().find(|(prefix, _)| base.starts_with(prefix));
    if since.is_some_and(|&(_, since)| since > version) {
        return Err(VERSION_TOO_LOW);
    }
    Ok(base.to_owned())
}

/// Looks a symbol up in this library, whatever is preloaded in front of it.
fn own_symbol(name: &str) -> *mut c_void {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = *LIBRARY.get_or_init(|| {
        // Not an exported function: its address would be that of a library preloaded in front
        // of this one that exports the same name, as the shim does.
        let own = own_symbol as fn(&str) -> *mut c_void as *const c_void;
        // SAFETY: `info` is a valid out pointer and `own` an address of this
        // library; the name it yields is a C string owned by the loader.
        unsafe {
            let mut info: libc::Dl_info = std::mem::zeroed();
            if libc::dladdr(own, &mut info) == 0 || info.dli_fname.is_null() {
                return libc::RTLD_DEFAULT as usize;
            }
            let handle = libc::dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            if handle.is_null() { libc::RTLD_DEFAULT as usize } else { handle as usize }
        }
    });
    let Ok(name) = CString::new(name) else { return std::ptr::null_mut() };
    // SAFETY: a handle from dlopen that is never closed, and a C string.
    unsafe { libc::dlsym(library as *mut c_void, name.as_ptr()) }
}

fn look_up(base: &CStr, version: i32, per_thread: bool) -> Result<*mut c_void, u32> {
    let base = base.to_str().map_err(|_| NOT_FOUND)?;
    let name = symbol(base, version)?;
    let streams: &[&str] = if per_thread { &["_ptsz", "_ptds", ""] } else { &[""] };
    // Functions that are not in the table may only exist as a later version.
    let versions: &[&str] = if name == base { &["", "_v2", "_v3"] } else { &[""] };
    let mut symbols = versions.iter().flat_map(|v| streams.iter().map(move |s| format!("{v}{s}")));
    let found = symbols.find_map(|suffix| {
        let at = own_symbol(&format!("{name}{suffix}"));
        (!at.is_null()).then_some(at)
    });
    found.ok_or(NOT_FOUND)
}

fn get(base: &In<c_char>, version: i32, flags: u64) -> CuResult<Result<*mut c_void, u32>> {
    if version > DRIVER_VERSION || flags & !3 != 0 || flags == 3 {
        return Err(CuError::INVALID_VALUE);
    }
    let base = CString::new(base.text()?).map_err(|_| CuError::INVALID_VALUE)?;
    Ok(look_up(&base, version, flags == PER_THREAD))
}

exports! {
    fn cuGetProcAddress(base: In<c_char>, function: Out<*mut c_void>, version: i32, flags: u64) {
        function.check()?;
        function.set(std::ptr::null_mut())?;
        match get(&base, version, flags)? {
            Ok(found) => function.set(found),
            Err(_) => Err(CuError::NOT_FOUND),
        }
    }

    fn cuGetProcAddress_v2(
        base: In<c_char>,
        function: Out<*mut c_void>,
        version: i32,
        flags: u64,
        status: Out<u32>,
    ) {
        function.check()?;
        function.set(std::ptr::null_mut())?;
        match get(&base, version, flags)? {
            Ok(found) => {
                status.set_if(FOUND);
                function.set(found)
            }
            // Since CUDA 12 not finding a function is an answer, not an error.
            Err(why) => {
                status.set_if(why);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_version() {
        assert!(VERSIONED.is_sorted_by_key(|v| v.0));
        assert_eq!(symbol("cuMemAlloc", 12080).unwrap(), "cuMemAlloc_v2");
        assert_eq!(symbol("cuMemAlloc", 3000), Err(VERSION_TOO_LOW));
        assert_eq!(symbol("cuGetProcAddress", 11080).unwrap(), "cuGetProcAddress");
        assert_eq!(symbol("cuGetProcAddress", 12000).unwrap(), "cuGetProcAddress_v2");
        assert_eq!(symbol("cuStreamGetCaptureInfo", 12030).unwrap(), "cuStreamGetCaptureInfo_v3");
        assert_eq!(symbol("cuLaunchKernel", 4000).unwrap(), "cuLaunchKernel");
        assert_eq!(symbol("cuLibraryLoadData", 11080), Err(VERSION_TOO_LOW));
        assert_eq!(symbol("cuMemAlloc_v2", 12080), Err(NOT_FOUND));
        assert_eq!(symbol("malloc", 12080), Err(NOT_FOUND));
    }
}
