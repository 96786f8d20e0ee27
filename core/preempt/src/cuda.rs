//! The CUDA driver API as far as the shim calls it by itself: types, constants
//! and a table of real functions, which the shim [finds](find_by). Numbers are those of `cuda.h`: cudarc's bindings
//! are of one CUDA release, and the shim has to know calls and attributes of later ones.
//!
//! Nothing here may be reached before the program itself uses CUDA.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use tally_ipc::layout::submission_flags;

pub type CuResult = c_int;
/// Any opaque handle or pointer.
pub type Ptr = *mut c_void;

pub const SUCCESS: CuResult = 0;
pub const INVALID_VALUE: CuResult = 1;
pub const OUT_OF_MEMORY: CuResult = 2;
pub const NOT_INITIALIZED: CuResult = 3;
pub const SYMBOL_NOT_FOUND: CuResult = 302;
pub const NOT_READY: CuResult = 600;
/// What a capture of a stream forbids.
pub(crate) const STREAM_CAPTURE_ERRORS: std::ops::RangeInclusive<CuResult> = 900..=908;
const ALREADY_REGISTERED: CuResult = 712;
pub const NOT_SUPPORTED: CuResult = 801;
pub const STREAM_LEGACY: usize = 1;
pub const STREAM_PER_THREAD: usize = 2;
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_WRITE_VALUE_DEFAULT`. (Drivers refuse `NO_MEMORY_BARRIER` since version 2 of the
/// function.)
pub const WRITE_VALUE_DEFAULT: c_uint = 0;
const REGISTER_PORTABLE_MAPPED: c_uint = 3;
pub const CAPTURE_MODE_RELAXED: c_int = 2;
pub const CAPTURE_STATUS_NONE: c_int = 0;
pub const PROC_PER_THREAD: u64 = 2;
pub const ATTRIBUTE_SM_COUNT: c_int = 16;
/// `CU_DEVICE_ATTRIBUTE_MPS_ENABLED` (CUDA 12.4 and later).
pub const ATTRIBUTE_MPS_ENABLED: c_int = 133;
pub const LAUNCH_ATTRIBUTE_ACCESS_WINDOW: c_int = 1;
pub const LAUNCH_ATTRIBUTE_COOPERATIVE: c_int = 2;
pub const LAUNCH_ATTRIBUTE_CLUSTER: c_int = 4;
pub const LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING: c_int = 5;
pub const LAUNCH_ATTRIBUTE_PROGRAMMATIC: c_int = 6;
/// Launch attributes that a launch may be repeated with: none, access policy window,
/// synchronisation policy, cluster scheduling preference, priority, memory
/// synchronisation domain and its map, preferred carve-out.
pub const LAUNCH_ATTRIBUTES_PLAIN: [c_int; 8] = [0, 1, 3, 5, 8, 9, 10, 14];
pub const WAIT_VALUE_EQUAL: c_uint = 1;
pub const BATCH_WRITE_VALUE_32: c_uint = 2;
pub const EVENT_DISABLE_TIMING: c_uint = 2;
pub const FUNC_MAX_DYNAMIC_SHARED: c_int = 8;
/// `CU_FUNC_ATTRIBUTE_NUM_REGS`: of a thread.
pub const FUNC_REGISTERS: c_int = 4;
/// `CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_*`: width, height, depth.
pub const FUNC_REQUIRED_CLUSTER: [c_int; 3] = [11, 12, 13];
/// `CU_FUNC_ATTRIBUTE_*` that say how a kernel runs: threads, static shared and local
/// memory. Its registers may be more in a transformed form.
pub const FUNC_COMPARED: [c_int; 3] = [0, 1, 3];
/// `CU_FUNC_ATTRIBUTE_*` that a program may set: maximum dynamic shared memory,
/// carve-out, cluster dimensions that are required, non-portable clusters, scheduling.
pub const FUNC_SETTABLE: [c_int; 7] = [8, 9, 11, 12, 13, 14, 15];
pub const PARAM_BUFFER_POINTER: usize = 1;
pub const PARAM_BUFFER_SIZE: usize = 2;
pub const RESOURCE_SM: c_uint = 1;
pub const GREEN_DEFAULT_STREAM: c_uint = 1;
pub const LAUNCH_ATTRIBUTE_PRIORITY: c_int = 8;
pub const LAUNCH_ATTRIBUTE_MEMORY_DOMAIN_MAP: c_int = 9;
pub const LAUNCH_ATTRIBUTE_MEMORY_DOMAIN: c_int = 10;

/// Whether a [`LAUNCH_ATTRIBUTE_MEMORY_DOMAIN_MAP`] is the one that nobody set. A byte for either domain: 0, and 1
/// where the device has a second one.
pub fn is_default_domain_map(value: u64) -> bool {
    value as u8 == 0 && (value >> 8) as u8 <= 1
}

pub const LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER: c_int = 11;
pub const LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE: c_int = 13;
pub const LAUNCH_ATTRIBUTE_CARVEOUT: c_int = 14;
pub const LAUNCH_ATTRIBUTE_NVLINK_SCHEDULING: c_int = 16;
pub const NODE_KERNEL: c_int = 0;
pub const NODE_COPY: c_int = 1;
pub const NODE_FILL: c_int = 2;
pub const NODE_HOST: c_int = 3;
/// `CU_GRAPH_NODE_TYPE_GRAPH`, a child graph.
pub const NODE_GRAPH: c_int = 4;
pub const NODE_EMPTY: c_int = 5;
pub const NODE_WAIT_EVENT: c_int = 6;
pub const NODE_RECORD_EVENT: c_int = 7;
pub const NODE_SEMAPHORE_SIGNAL: c_int = 8;
pub const NODE_SEMAPHORE_WAIT: c_int = 9;
pub const NODE_ALLOC: c_int = 10;
pub const NODE_FREE: c_int = 11;
pub const NODE_MEMORY_OPERATION: c_int = 12;
pub const NODE_CONDITIONAL: c_int = 13;
pub const INSTANTIATE_UPLOAD: u64 = 2;
pub const INSTANTIATE_DEVICE_LAUNCH: u64 = 4;
pub const POINTER_MEMORY_TYPE: c_int = 2;
pub const LINK_INPUT_PTX: c_int = 1;
pub const MEMORY_HOST: c_uint = 1;

#[repr(C)]
#[derive(Debug)]
pub struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    /// Dynamic shared memory, bytes.
    pub shared_bytes: c_uint,
    pub stream: Ptr,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: c_uint,
}

impl LaunchConfig {
    /// Whether it is cooperative, and clustered, in bits of [`submission_flags`].
    ///
    /// # Safety
    /// `attributes` is null or of so many.
    pub unsafe fn flags(&self) -> u32 {
        if self.attributes.is_null() {
            return 0;
        }
        // SAFETY: as the caller promises.
        let attributes =
            unsafe { std::slice::from_raw_parts(self.attributes, self.attribute_count as usize) };
        attributes.iter().fold(0, |flags, a| match a.id {
            LAUNCH_ATTRIBUTE_COOPERATIVE if a.value[0] != 0 => {
                flags | submission_flags::COOPERATIVE
            }
            LAUNCH_ATTRIBUTE_CLUSTER if a.value[..3].iter().any(|d| *d > 1) => {
                flags | submission_flags::CLUSTERED
            }
            _ => flags,
        })
    }
}

/// `CUlaunchAttribute`: 8 bytes of id and padding, then a 64-byte union.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchAttribute {
    pub id: c_int,
    _pad: c_int,
    /// The union, its first words.
    pub value: [c_uint; 16],
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`; the first version has neither of the last two.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KernelNodeParams {
    /// A `CUfunction`, or null.
    pub function: Ptr,
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    /// Dynamic shared memory, bytes.
    pub shared_bytes: c_uint,
    /// Pointers to the parameters, or null.
    pub params: *mut Ptr,
    /// The other way to pass them, or null.
    pub extra: *mut Ptr,
    /// Kernel that belongs to no context, or null.
    pub kernel: Ptr,
    /// The context that it is for, or null.
    pub context: Ptr,
}

impl Default for KernelNodeParams {
    fn default() -> Self {
        let none = std::ptr::null_mut();
        let (grid, block, shared_bytes) = ([0; 3], [0; 3], 0);
        let (params, extra) = (std::ptr::null_mut(), std::ptr::null_mut());
        KernelNodeParams {
            function: none,
            grid,
            block,
            shared_bytes,
            params,
            extra,
            kernel: none,
            context: none,
        }
    }
}

/// `CUstreamBatchMemOpParams`, as a 32-bit write.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct BatchOp {
    pub operation: c_uint,
    _pad: c_uint,
    pub address: u64,
    pub value: u64,
    pub flags: c_uint,
    _pad2: c_uint,
    _rest: [u64; 2],
}

impl BatchOp {
    /// Writes 32 bits when the stream comes to it.
    pub fn write(address: u64, value: u32) -> Self {
        BatchOp {
            operation: BATCH_WRITE_VALUE_32,
            address,
            value: value.into(),
            flags: WRITE_VALUE_DEFAULT,
            ..Default::default()
        }
    }
}

/// `CUdevResource`: opaque here but for the number of SMs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DevResource {
    kind: c_uint,
    _internal: [u8; 92],
    /// SMs that the resource has.
    pub sm_count: c_uint,
    _rest: [u8; 44],
}

impl Default for DevResource {
    fn default() -> Self {
        DevResource { kind: 0, _internal: [0; 92], sm_count: 0, _rest: [0; 44] }
    }
}

impl LaunchAttribute {
    /// An attribute with this id and value, as `cuda.h` lays it out.
    pub fn new(id: c_int, value: [c_uint; 16]) -> Self {
        LaunchAttribute { id, _pad: 0, value }
    }
}

const _: () = {
    assert!(size_of::<BatchOp>() == 48 && size_of::<DevResource>() == 144);
    assert!(std::mem::offset_of!(LaunchConfig, stream) == 32);
    assert!(std::mem::offset_of!(LaunchConfig, attribute_count) == 48);
    assert!(size_of::<LaunchAttribute>() == 72);
};

macro_rules! driver_table {
    ($( $field:ident : [$($name:literal),+] fn($($arg:ty),*) ; )*) => {
        /// Real driver functions that the shim calls by itself; each is `None`
        /// where the driver lacks it.
        #[derive(Debug)]
        pub struct Driver {
            $(
                #[doc = concat!($(stringify!($name), " ",)+ "(in order of preference).")]
                pub $field: Option<unsafe extern "C" fn($($arg),*) -> CuResult>,
            )*
        }

        impl Driver {
            /// The functions of a process without a driver: none.
            const NONE: Driver = Driver { $( $field: None, )* };

            fn load(find: Find) -> Self {
                Driver {
                    $( $field: {
                        let mut found = None;
                        for name in [$($name),+] {
                            if found.is_none() {
                                found = find(name);
                            }
                        }
                        // SAFETY: a driver function of this name has this
                        // signature, by `cuda.h`.
                        found.map(|p| unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> CuResult>(p.as_ptr())
                        })
                    }, )*
                }
            }
        }
    };
}

driver_table! {
    driver_version: [c"cuDriverGetVersion"] fn(*mut c_int);
    ctx_current: [c"cuCtxGetCurrent"] fn(*mut Ptr);
    ctx_set: [c"cuCtxSetCurrent"] fn(Ptr);
    ctx_device: [c"cuCtxGetDevice"] fn(*mut c_int);
    ctx_synchronize: [c"cuCtxSynchronize"] fn();
    device_attribute: [c"cuDeviceGetAttribute"] fn(*mut c_int, c_int, c_int);
    device_uuid: [c"cuDeviceGetUuid_v2", c"cuDeviceGetUuid"] fn(*mut [u8; 16], c_int);
    primary_retain: [c"cuDevicePrimaryCtxRetain"] fn(*mut Ptr, c_int);
    primary_release: [c"cuDevicePrimaryCtxRelease_v2", c"cuDevicePrimaryCtxRelease"] fn(c_int);
    primary_state: [c"cuDevicePrimaryCtxGetState"] fn(c_int, *mut c_uint, *mut c_int);
    stream_query: [c"cuStreamQuery"] fn(Ptr);
    stream_attribute: [c"cuStreamGetAttribute"] fn(Ptr, c_int, *mut [u64; 8]);
    stream_green: [c"cuStreamGetGreenCtx"] fn(Ptr, *mut Ptr);
    stream_priority: [c"cuStreamGetPriority"] fn(Ptr, *mut c_int);
    stream_flags: [c"cuStreamGetFlags"] fn(Ptr, *mut c_uint);
    stream_ctx: [c"cuStreamGetCtx"] fn(Ptr, *mut Ptr);
    stream_synchronize: [c"cuStreamSynchronize"] fn(Ptr);
    stream_is_capturing: [c"cuStreamIsCapturing"] fn(Ptr, *mut c_int);
    stream_write: [c"cuStreamWriteValue32_v2", c"cuStreamWriteValue32"] fn(Ptr, u64, u32, c_uint);
    capture_mode: [c"cuThreadExchangeStreamCaptureMode"] fn(*mut c_int);
    host_alloc: [c"cuMemHostAlloc"] fn(*mut Ptr, usize, c_uint);
    host_register: [c"cuMemHostRegister_v2", c"cuMemHostRegister"] fn(Ptr, usize, c_uint);
    host_pointer: [c"cuMemHostGetDevicePointer_v2"] fn(*mut u64, Ptr, c_uint);
    pointer_attribute: [c"cuPointerGetAttribute"] fn(Ptr, c_int, u64);
    func_module: [c"cuFuncGetModule"] fn(*mut Ptr, Ptr);
    kernel_library: [c"cuKernelGetLibrary"] fn(*mut Ptr, Ptr);
    func_name: [c"cuFuncGetName"] fn(*mut *const c_char, Ptr);
    kernel_name: [c"cuKernelGetName"] fn(*mut *const c_char, Ptr);
    stream_wait: [c"cuStreamWaitValue32_v2", c"cuStreamWaitValue32"] fn(Ptr, u64, u32, c_uint);
    stream_batch: [c"cuStreamBatchMemOp_v2", c"cuStreamBatchMemOp"] fn(Ptr, c_uint, *mut BatchOp, c_uint);
    stream_create: [c"cuStreamCreateWithPriority"] fn(*mut Ptr, c_uint, c_int);
    stream_priorities: [c"cuCtxGetStreamPriorityRange"] fn(*mut c_int, *mut c_int);
    stream_wait_event: [c"cuStreamWaitEvent"] fn(Ptr, Ptr, c_uint);
    event_create: [c"cuEventCreate"] fn(*mut Ptr, c_uint);
    event_record: [c"cuEventRecord"] fn(Ptr, Ptr);
    event_query: [c"cuEventQuery"] fn(Ptr);
    event_elapsed: [c"cuEventElapsedTime_v2", c"cuEventElapsedTime"] fn(*mut f32, Ptr, Ptr);
    mem_info: [c"cuMemGetInfo_v2"] fn(*mut usize, *mut usize);
    mem_free: [c"cuMemFree_v2"] fn(u64);
    mem_alloc: [c"cuMemAlloc_v2"] fn(*mut u64, usize);
    mem_set: [c"cuMemsetD32Async"] fn(u64, c_uint, usize, Ptr);
    copy_out: [c"cuMemcpyDtoHAsync_v2"] fn(Ptr, u64, usize, Ptr);
    link_create: [c"cuLinkCreate_v2"] fn(c_uint, *mut c_int, *mut Ptr, *mut Ptr);
    link_add: [c"cuLinkAddData_v2"] fn(Ptr, c_int, Ptr, usize, *const c_char, c_uint, *mut c_int, *mut Ptr);
    link_complete: [c"cuLinkComplete"] fn(Ptr, *mut Ptr, *mut usize);
    link_destroy: [c"cuLinkDestroy"] fn(Ptr);
    launch_ex: [c"cuLaunchKernelEx"] fn(*const LaunchConfig, Ptr, *mut Ptr, *mut Ptr);
    module_load: [c"cuModuleLoadData"] fn(*mut Ptr, *const u8);
    module_unload: [c"cuModuleUnload"] fn(Ptr);
    library_load: [c"cuLibraryLoadData"] fn(*mut Ptr, *const u8, *mut c_int, *mut Ptr, c_uint, Ptr, Ptr, c_uint);
    module_function_count: [c"cuModuleGetFunctionCount"] fn(*mut c_uint, Ptr);
    library_kernel_count: [c"cuLibraryGetKernelCount"] fn(*mut c_uint, Ptr);
    module_function: [c"cuModuleGetFunction"] fn(*mut Ptr, Ptr, *const c_char);
    module_loading: [c"cuModuleGetLoadingMode"] fn(*mut c_uint);
    kernel_function: [c"cuKernelGetFunction"] fn(*mut Ptr, Ptr);
    func_attribute: [c"cuFuncGetAttribute"] fn(*mut c_int, c_int, Ptr);
    func_set_attribute: [c"cuFuncSetAttribute"] fn(Ptr, c_int, c_int);
    func_load: [c"cuFuncLoad"] fn(Ptr);
    func_is_loaded: [c"cuFuncIsLoaded"] fn(*mut c_int, Ptr);
    occupancy: [c"cuOccupancyMaxActiveBlocksPerMultiprocessor"] fn(*mut c_int, Ptr, c_int, usize);
    func_parameter: [c"cuFuncGetParamInfo"] fn(Ptr, usize, *mut usize, *mut usize);
    device_resource: [c"cuDeviceGetDevResource"] fn(c_int, *mut DevResource, c_uint);
    split_sms: [c"cuDevSmResourceSplitByCount"] fn(*mut DevResource, *mut c_uint, *const DevResource, *mut DevResource, c_uint, c_uint);
    resource_desc: [c"cuDevResourceGenerateDesc"] fn(*mut Ptr, *mut DevResource, c_uint);
    green_create: [c"cuGreenCtxCreate"] fn(*mut Ptr, Ptr, c_int, c_uint);
    green_destroy: [c"cuGreenCtxDestroy"] fn(Ptr);
    stream_destroy: [c"cuStreamDestroy_v2"] fn(Ptr);
    green_stream: [c"cuGreenCtxStreamCreate"] fn(*mut Ptr, Ptr, c_uint, c_int);
    graph_nodes: [c"cuGraphGetNodes"] fn(Ptr, *mut Ptr, *mut usize);
    node_type: [c"cuGraphNodeGetType"] fn(Ptr, *mut c_int);
    child_graph: [c"cuGraphChildGraphNodeGetGraph"] fn(Ptr, *mut Ptr);
    graph_clone: [c"cuGraphClone"] fn(*mut Ptr, Ptr);
    graph_destroy: [c"cuGraphDestroy"] fn(Ptr);
    graph_edges: [c"cuGraphGetEdges"] fn(Ptr, *mut Ptr, *mut Ptr, *mut usize);
    graph_edges_data: [c"cuGraphGetEdges_v2"] fn(Ptr, *mut Ptr, *mut Ptr, *mut u64, *mut usize);
    graph_instantiate: [c"cuGraphInstantiateWithFlags"] fn(*mut Ptr, Ptr, u64);
    exec_destroy: [c"cuGraphExecDestroy"] fn(Ptr);
    exec_flags: [c"cuGraphExecGetFlags"] fn(Ptr, *mut u64);
    node_destroy: [c"cuGraphDestroyNode"] fn(Ptr);
    node_in_clone: [c"cuGraphNodeFindInClone"] fn(*mut Ptr, Ptr, Ptr);
    graph_launch: [c"cuGraphLaunch"] fn(Ptr, Ptr);
    graph_depend: [c"cuGraphAddDependencies_v2"] fn(Ptr, *const Ptr, *const Ptr, *const u64, usize);
    capture_into: [c"cuStreamBeginCaptureToGraph"] fn(Ptr, Ptr, *const Ptr, *const u64, usize, c_int);
    capture_info: [c"cuStreamGetCaptureInfo_v3"] fn(Ptr, *mut c_int, *mut u64, *mut Ptr, *mut *const Ptr, *mut *const u64, *mut usize);
    capture_end: [c"cuStreamEndCapture"] fn(Ptr, *mut Ptr);
    kernel_attribute: [c"cuGraphKernelNodeGetAttribute"] fn(Ptr, c_int, *mut [u64; 8]);
    kernel_params: [c"cuGraphKernelNodeGetParams_v2", c"cuGraphKernelNodeGetParams"] fn(Ptr, *mut KernelNodeParams);
    event_destroy: [c"cuEventDestroy_v2", c"cuEventDestroy"] fn(Ptr);
}

static DRIVER: AtomicPtr<Driver> = AtomicPtr::new(std::ptr::null_mut());

/// Finds a real driver function.
pub type Find = fn(&CStr) -> Option<NonNull<c_void>>;

static FIND: OnceLock<Find> = OnceLock::new();

/// From now on functions are found by this. Only the first counts.
pub fn find_by(find: Find) {
    let _ = FIND.set(find);
}

/// The table; filled at the first call, from the driver that the program uses.
#[inline]
pub fn driver() -> &'static Driver {
    let p = DRIVER.load(Acquire);
    if !p.is_null() {
        // SAFETY: published once and never freed.
        return unsafe { &*p };
    }
    load()
}

#[cold]
fn load() -> &'static Driver {
    static NONE: Driver = Driver::NONE;
    let Some(find) = FIND.get() else { return &NONE };
    let fresh = Box::into_raw(Box::new(Driver::load(*find)));
    match DRIVER.compare_exchange(std::ptr::null_mut(), fresh, AcqRel, Acquire) {
        // SAFETY: published once and never freed.
        Ok(_) => unsafe { &*fresh },
        Err(theirs) => {
            // SAFETY: another thread was first; nobody has seen this one, and a leak checker would.
            drop(unsafe { Box::from_raw(fresh) });
            // SAFETY: as above.
            unsafe { &*theirs }
        }
    }
}

impl Driver {
    /// The calling thread's context, 0 if none.
    #[inline]
    pub fn current_context(&self) -> usize {
        let mut ctx: Ptr = std::ptr::null_mut();
        match self.ctx_current {
            // SAFETY: a valid out-pointer.
            Some(f) if unsafe { f(&mut ctx) } == SUCCESS => ctx as usize,
            _ => 0,
        }
    }

    /// Register a page of ours, so that the GPU reads and writes it too; its address there. Fine if
    /// it is registered already.
    ///
    /// # Errors
    /// The driver's.
    pub fn share_page<T: Sync>(&self, page: &'static T) -> Result<u64, i32> {
        const { assert!(size_of::<T>() == 4096 && align_of::<T>() == 4096) };
        let register = self.host_register.ok_or(NOT_SUPPORTED)?;
        let address_of = self.host_pointer.ok_or(NOT_SUPPORTED)?;
        let page: Ptr = std::ptr::from_ref(page).cast_mut().cast();
        let mut address = 0;
        // SAFETY: exactly one page, which stays where it is for the rest of the process; a valid
        // out-pointer.
        let result = unsafe {
            match register(page, size_of::<T>(), REGISTER_PORTABLE_MAPPED) {
                SUCCESS | ALREADY_REGISTERED => address_of(&mut address, page, 0),
                error => error,
            }
        };
        if result == SUCCESS { Ok(address) } else { Err(result) }
    }

    /// Run driver calls that a capture elsewhere in the process would forbid
    /// ("potentially unsafe" ones), by this thread, without disturbing it.
    pub fn relaxed<T>(&self, calls: impl FnOnce() -> T) -> T {
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges this thread's mode with `mode`.
        let swapped = self.capture_mode.is_some_and(|f| unsafe { f(&mut mode) } == SUCCESS);
        let result = calls();
        if let (true, Some(f)) = (swapped, self.capture_mode) {
            // SAFETY: puts back what was there.
            unsafe { f(&mut mode) };
        }
        result
    }

    /// Have no call of this thread, one of the shim's own, disturb a capture, from now on. Whether it worked: before
    /// `cuInit` has returned, it does not. A driver too old for it knows no captures.
    pub fn relax_thread(&self) -> bool {
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges this thread's mode with `mode`.
        self.capture_mode.is_none_or(|f| unsafe { f(&mut mode) } == SUCCESS)
    }

    /// Run driver calls with `context` current and in relaxed capture mode, and put back what was
    /// current. `None`, and nothing is called, if the driver refuses that context.
    pub fn within<T>(&self, context: usize, calls: impl FnOnce() -> T) -> Option<T> {
        let before = self.current_context();
        // SAFETY: by the callers, a context that was not destroyed.
        let set = |ctx: usize| self.ctx_set.is_some_and(|f| unsafe { f(ctx as Ptr) } == SUCCESS);
        if before != context && !set(context) {
            return None;
        }
        let result = self.relaxed(calls);
        if before != context {
            set(before);
        }
        Some(result)
    }

    /// The name of a function or kernel that no look-up was seen for.
    pub fn name_of(&self, function: usize) -> Option<&'static CStr> {
        for f in [self.func_name, self.kernel_name].into_iter().flatten() {
            let mut name: *const c_char = std::ptr::null();
            // SAFETY: `function` is what the program passes to a launch now.
            if unsafe { f(&mut name, function as Ptr) } == SUCCESS && !name.is_null() {
                // SAFETY: NUL-terminated, and it lives as long as the module;
                // callers copy it at once.
                return Some(unsafe { CStr::from_ptr(name) });
            }
        }
        None
    }
}
