//! The driver API as programs find it: whatever `libcuda.so.1` is, by `dlopen` and `dlsym`.

#![allow(non_snake_case, reason = "the driver's names")]

use anyhow::{Context, Result, bail};
use std::ffi::{CStr, CString, c_void};

/// A handle: stream, event, module, ...
pub type Handle = usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed {
    pub call: &'static str,
    pub code: u32,
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} -> {}", self.call, self.code)
    }
}

impl std::error::Error for Failed {}

pub type Done = Result<(), Failed>;

fn done(call: &'static str, code: u32) -> Done {
    if code == 0 { Ok(()) } else { Err(Failed { call, code }) }
}

macro_rules! functions {
    (
        $($name:ident($($arg:ident: $ty:ty),*);)*
        -- per thread --
        $($both:ident / $pt:ident($($barg:ident: $bty:ty),*);)*
        -- optional --
        $($opt:ident($($oarg:ident: $oty:ty),*);)*
    ) => {
        /// The functions. Methods of functions that exist for per-thread default streams, too,
        /// take first whether that one is meant.
        pub struct Cuda {
            $($name: unsafe extern "C" fn($($ty),*) -> u32,)*
            $($both: [unsafe extern "C" fn($($bty),*) -> u32; 2],)*
            $($opt: Option<unsafe extern "C" fn($($oty),*) -> u32>,)*
        }

        impl Cuda {
            fn find_all(library: &Library) -> Result<Self> {
                // SAFETY: driver functions of these names have these types.
                unsafe {
                    Ok(Self {
                        $($name: library.function(stringify!($name))?,)*
                        $($both: [
                            library.function(stringify!($both))?,
                            library.function(stringify!($pt))?,
                        ],)*
                        $($opt: library.function(stringify!($opt)).ok(),)*
                    })
                }
            }

            $(
                /// # Safety
                /// Pointers must be valid for what the driver does with them.
                #[allow(clippy::too_many_arguments, reason = "the driver's")]
                pub unsafe fn $name(&self, $($arg: $ty),*) -> Done {
                    // SAFETY: by this function's contract.
                    done(stringify!($name), unsafe { (self.$name)($($arg),*) })
                }
            )*
            $(
                /// # Safety
                /// Pointers must be valid for what the driver does with them.
                #[allow(clippy::too_many_arguments, reason = "the driver's")]
                pub unsafe fn $both(&self, per_thread: bool, $($barg: $bty),*) -> Done {
                    let function = self.$both[usize::from(per_thread)];
                    // SAFETY: by this function's contract.
                    done(stringify!($both), unsafe { function($($barg),*) })
                }
            )*
            $(
                /// Does nothing where the driver has no such function.
                ///
                /// # Safety
                /// Pointers must be valid for what the driver does with them.
                pub unsafe fn $opt(&self, $($oarg: $oty),*) -> Done {
                    let Some(function) = self.$opt else { return Ok(()) };
                    // SAFETY: by this function's contract.
                    done(stringify!($opt), unsafe { function($($oarg),*) })
                }
            )*
        }
    };
}

#[repr(C)]
pub struct KernelNode {
    pub function: Handle,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub params: *const *mut c_void,
    pub extra: *const *mut c_void,
    pub kernel: Handle,
    pub context: Handle,
}

#[repr(C)]
pub struct FillNode {
    pub to: u64,
    pub pitch: usize,
    pub value: u32,
    pub element: u32,
    pub width: usize,
    pub height: usize,
}

#[repr(C)]
pub struct HostNode {
    pub function: extern "C" fn(*mut c_void),
    pub data: *mut c_void,
}

/// The driver's `CUlaunchConfig`, whose attributes stay unset.
#[repr(C)]
pub struct LaunchConfig {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub stream: Handle,
    pub attributes: *const c_void,
    pub count: u32,
}

pub type HostFunction = extern "C" fn(*mut c_void);
type Params = *const *mut c_void;

functions! {
    cuInit(flags: u32);
    cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32);
    cuDeviceGetName(name: *mut u8, bytes: i32, device: i32);
    cuDevicePrimaryCtxRetain(context: *mut Handle, device: i32);
    cuDevicePrimaryCtxRelease_v2(device: i32);
    cuDevicePrimaryCtxReset_v2(device: i32);
    cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32);
    cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32);
    cuCtxCreate_v2(context: *mut Handle, flags: u32, device: i32);
    cuCtxDestroy_v2(context: Handle);
    cuCtxSetCurrent(context: Handle);
    cuCtxSynchronize();
    cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32);
    cuModuleLoad(module: *mut Handle, path: *const u8);
    cuModuleLoadData(module: *mut Handle, image: *const u8);
    cuModuleUnload(module: Handle);
    cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const u8);
    cuModuleGetGlobal_v2(address: *mut u64, bytes: *mut usize, module: Handle, name: *const u8);
    cuLibraryLoadData(library: *mut Handle, image: *const u8, options: *const u32, values: *const Handle,
        count: u32, library_options: *const u32, library_values: *const Handle, library_count: u32);
    cuLibraryUnload(library: Handle);
    cuLibraryGetKernel(kernel: *mut Handle, library: Handle, name: *const u8);
    cuLibraryGetGlobal(address: *mut u64, bytes: *mut usize, library: Handle, name: *const u8);
    cuKernelGetFunction(function: *mut Handle, kernel: Handle);
    cuFuncSetAttribute(function: Handle, attribute: u32, value: i32);
    cuFuncGetAttribute(value: *mut i32, attribute: u32, function: Handle);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut i32, function: Handle, threads: i32, shared: usize);
    cuMemAlloc_v2(address: *mut u64, bytes: usize);
    cuMemFree_v2(address: u64);
    cuMemsetD32_v2(address: u64, value: u32, count: usize);
    cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
    cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
    cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: u32);
    cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: u32);
    cuMemHostGetDevicePointer_v2(device: *mut u64, address: *mut c_void, flags: u32);
    cuStreamCreateWithPriority(stream: *mut Handle, flags: u32, priority: i32);
    cuStreamDestroy_v2(stream: Handle);
    cuStreamBeginCapture_v2(stream: Handle, mode: u32);
    cuStreamEndCapture(stream: Handle, graph: *mut Handle);
    cuEventCreate(event: *mut Handle, flags: u32);
    cuEventDestroy_v2(event: Handle);
    cuEventQuery(event: Handle);
    cuEventSynchronize(event: Handle);
    cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle);
    cuGraphCreate(graph: *mut Handle, flags: u32);
    cuGraphDestroy(graph: Handle);
    cuGraphClone(clone: *mut Handle, graph: Handle);
    cuGraphAddKernelNode_v2(node: *mut Handle, graph: Handle, after: *const Handle, count: usize, params: *const KernelNode);
    cuGraphAddMemcpyNode(node: *mut Handle, graph: Handle, after: *const Handle, count: usize, params: *const [u64; 25], context: Handle);
    cuGraphAddMemsetNode(node: *mut Handle, graph: Handle, after: *const Handle, count: usize, params: *const FillNode, context: Handle);
    cuGraphAddHostNode(node: *mut Handle, graph: Handle, after: *const Handle, count: usize, params: *const HostNode);
    cuGraphAddEventRecordNode(node: *mut Handle, graph: Handle, after: *const Handle, count: usize, event: Handle);
    cuGraphAddEmptyNode(node: *mut Handle, graph: Handle, after: *const Handle, count: usize);
    cuGraphInstantiateWithFlags(exec: *mut Handle, graph: Handle, flags: u64);
    cuGraphExecDestroy(exec: Handle);
    cuGraphExecUpdate_v2(exec: Handle, graph: Handle, info: *mut [u64; 3]);
    -- per thread --
    cuLaunchKernel / cuLaunchKernel_ptsz(function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32,
        shared: u32, stream: Handle, params: Params, extra: Params);
    cuLaunchKernelEx / cuLaunchKernelEx_ptsz(config: *const LaunchConfig, function: Handle, params: Params, extra: Params);
    cuLaunchHostFunc / cuLaunchHostFunc_ptsz(stream: Handle, function: HostFunction, data: *mut c_void);
    cuGraphLaunch / cuGraphLaunch_ptsz(exec: Handle, stream: Handle);
    cuMemsetD32Async / cuMemsetD32Async_ptsz(address: u64, value: u32, count: usize, stream: Handle);
    cuMemcpyAsync / cuMemcpyAsync_ptsz(to: u64, from: u64, bytes: usize, stream: Handle);
    cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz(to: u64, from: *const c_void, bytes: usize, stream: Handle);
    cuMemAllocAsync / cuMemAllocAsync_ptsz(address: *mut u64, bytes: usize, stream: Handle);
    cuMemFreeAsync / cuMemFreeAsync_ptsz(address: u64, stream: Handle);
    cuStreamSynchronize / cuStreamSynchronize_ptsz(stream: Handle);
    cuStreamQuery / cuStreamQuery_ptsz(stream: Handle);
    cuStreamWaitEvent / cuStreamWaitEvent_ptsz(stream: Handle, event: Handle, flags: u32);
    cuStreamWaitValue32_v2 / cuStreamWaitValue32_v2_ptsz(stream: Handle, address: u64, value: u32, flags: u32);
    cuStreamWriteValue32_v2 / cuStreamWriteValue32_v2_ptsz(stream: Handle, address: u64, value: u32, flags: u32);
    cuEventRecord / cuEventRecord_ptsz(event: Handle, stream: Handle);
    cuEventRecordWithFlags / cuEventRecordWithFlags_ptsz(event: Handle, stream: Handle, flags: u32);
    -- optional --
    cuFuncLoad(function: Handle);
}

/// A library opened with `dlopen`.
struct Library(*mut c_void);

impl Library {
    fn open(name: &CStr) -> Result<Self> {
        // SAFETY: the driver's library, meant to be loaded; never unloaded.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: set by the call that failed; valid until the next one.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) };
            bail!("{}", why.to_string_lossy());
        }
        Ok(Self(handle))
    }

    /// # Safety
    /// The symbol must be a function of type `F`.
    unsafe fn function<F: Copy>(&self, name: &str) -> Result<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let text = CString::new(name)?;
        // SAFETY: a library that stays loaded, and a C string.
        let found = unsafe { libc::dlsym(self.0, text.as_ptr()) };
        anyhow::ensure!(!found.is_null(), "libcuda.so.1 has no {name}");
        // SAFETY: an address of a function of that type, by this function's contract.
        Ok(unsafe { std::mem::transmute_copy(&found) })
    }
}

impl Cuda {
    /// Opens the driver.
    ///
    /// # Errors
    /// If there is none, or it lacks a function.
    pub fn open() -> Result<&'static Self> {
        let library = Library::open(c"libcuda.so.1")?;
        let cuda = Box::leak(Box::new(Self::find_all(&library).context("the driver is too old")?));
        // SAFETY: no pointers.
        unsafe { cuda.cuInit(0) }?;
        Ok(cuda)
    }

    /// An attribute of the device, or 0.
    pub fn attribute(&self, number: i32) -> u32 {
        let mut value = 0;
        // SAFETY: a valid out pointer.
        let asked = unsafe { self.cuDeviceGetAttribute(&mut value, number, 0) };
        asked.map_or(0, |()| u32::try_from(value).unwrap_or(0))
    }
}
