//! The software device in this very process, reached through the shim as a program would, and
//! what it takes to make graphs on it. With `TALLY_TEST_DRIVER` a GPU takes its place.

#![allow(dead_code)]

use std::ffi::{CStr, CString, c_void};
use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, OnceLock};

pub type Ptr = *mut c_void;
type R = i32;
type Host = unsafe extern "C" fn(Ptr);

macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*);)*) => {
        /// The driver as the program sees it: with the shim's entry points in it.
        #[allow(non_snake_case)]
        pub struct Cuda { $(pub $name: unsafe extern "C" fn($($arg),*) -> R,)* }

        impl Cuda {
            fn load(handle: Ptr) -> Self {
                // SAFETY: driver functions of these names have these types.
                unsafe { Cuda { $($name: std::mem::transmute::<Ptr, unsafe extern "C" fn($($arg),*) -> R>(
                    find(handle, stringify!($name))),)* } }
            }
        }
    };
}

functions! {
    cuInit: fn(u32);
    cuCtxCreate_v2: fn(*mut Ptr, u32, i32);
    cuCtxDestroy_v2: fn(Ptr);
    cuCtxSetCurrent: fn(Ptr);
    cuCtxGetCurrent: fn(*mut Ptr);
    cuModuleLoadData: fn(*mut Ptr, *const u8);
    cuModuleGetFunction: fn(*mut Ptr, Ptr, *const i8);
    cuMemAlloc_v2: fn(*mut u64, usize);
    cuMemsetD32_v2: fn(u64, u32, usize);
    cuMemHostAlloc: fn(*mut Ptr, usize, u32);
    cuMemcpyDtoH_v2: fn(Ptr, u64, usize);
    cuStreamCreate: fn(*mut Ptr, u32);
    cuStreamSynchronize: fn(Ptr);
    cuStreamQuery: fn(Ptr);
    cuStreamDestroy_v2: fn(Ptr);
    cuStreamWaitValue32_v2: fn(Ptr, u64, u32, u32);
    cuStreamBeginCapture_v2: fn(Ptr, i32);
    cuStreamEndCapture: fn(Ptr, *mut Ptr);
    cuLaunchKernel: fn(Ptr, u32, u32, u32, u32, u32, u32, u32, Ptr, *mut Ptr, *mut Ptr);
    cuEventCreate: fn(*mut Ptr, u32);
    cuGraphCreate: fn(*mut Ptr, u32);
    cuGraphClone: fn(*mut Ptr, Ptr);
    cuGraphDestroy: fn(Ptr);
    cuGraphNodeFindInClone: fn(*mut Ptr, Ptr, Ptr);
    cuGraphAddKernelNode_v2: fn(*mut Ptr, Ptr, *const Ptr, usize, *const Kernel);
    cuGraphAddMemcpyNode: fn(*mut Ptr, Ptr, *const Ptr, usize, *const [u64; 25], Ptr);
    cuGraphAddMemsetNode: fn(*mut Ptr, Ptr, *const Ptr, usize, *const Fill, Ptr);
    cuGraphAddHostNode: fn(*mut Ptr, Ptr, *const Ptr, usize, *const (Host, Ptr));
    cuGraphAddEmptyNode: fn(*mut Ptr, Ptr, *const Ptr, usize);
    cuGraphAddEventRecordNode: fn(*mut Ptr, Ptr, *const Ptr, usize, Ptr);
    cuGraphAddChildGraphNode: fn(*mut Ptr, Ptr, *const Ptr, usize, Ptr);
    cuGraphInstantiateWithFlags: fn(*mut Ptr, Ptr, u64);
    cuGraphExecDestroy: fn(Ptr);
    cuGraphExecGetFlags: fn(Ptr, *mut u64);
    cuGraphExecUpdate_v2: fn(Ptr, Ptr, *mut [u64; 3]);
    cuGraphExecKernelNodeSetParams_v2: fn(Ptr, Ptr, *const Kernel);
    cuGraphLaunch: fn(Ptr, Ptr);
}

#[repr(C)]
pub struct Kernel {
    function: Ptr,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    params: *const Ptr,
    extra: *const Ptr,
    kernel: Ptr,
    context: Ptr,
}

#[repr(C)]
pub struct Fill {
    to: u64,
    pitch: usize,
    value: u32,
    element: u32,
    width: usize,
    height: usize,
}

fn find(handle: Ptr, name: &str) -> Ptr {
    let c = CString::new(name).unwrap();
    // SAFETY: the shim's own dlsym, linked in here.
    let found = unsafe { tally_shim::start::dlsym(handle, c.as_ptr()) };
    assert!(!found.is_null(), "the software device has no {name}");
    found
}

/// `dst[i] = 3 * dst[i] + src[i] + k`: the order of two of them shows.
const PTX: &CStr = cr"
.version 7.0
.target sm_70
.address_size 64
.visible .entry mix(.param .u64 p_dst, .param .u64 p_src, .param .u32 p_k) {
    .reg .b32 %r<6>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [p_dst];
    ld.param.u64 %rd2, [p_src];
    ld.param.u32 %r1, [p_k];
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.u32 %r3, [%rd4];
    ld.global.u32 %r4, [%rd5];
    mul.lo.u32 %r3, %r3, 3;
    add.u32 %r3, %r3, %r4;
    add.u32 %r3, %r3, %r1;
    st.global.u32 [%rd4], %r3;
    ret;
}
";

/// Elements of a buffer.
pub const N: usize = 8;
pub const BUFFERS: usize = 6;

pub fn ok(result: R) {
    assert_eq!(result, 0);
}

/// The device, one test at a time: captures and contexts are the process's.
pub struct Device {
    pub cuda: &'static Cuda,
    pub mix: Ptr,
    pub context: Ptr,
    buffers: [u64; BUFFERS],
    _alone: MutexGuard<'static, ()>,
}

/// Names another driver to test with, by its path: a GPU's own, or another build of this one.
const ENV_DRIVER: &str = "TALLY_TEST_DRIVER";

fn library() -> PathBuf {
    if let Some(path) = std::env::var_os(ENV_DRIVER) {
        return path.into();
    }
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let places = [deps.join("libtally_softcuda.so"), deps.join("../libtally_softcuda.so")];
    let newest = places.iter().filter_map(|p| Some((p.metadata().ok()?.modified().ok()?, p))).max();
    newest.expect("no libtally_softcuda.so: build tally-softcuda as well").1.clone()
}

fn start() -> (&'static Cuda, Ptr) {
    let dir = Box::leak(Box::new(tempfile::tempdir_in("/dev/shm").unwrap()));
    let set = |name: &str, value: &std::ffi::OsStr| {
        // SAFETY: before anything else of this process reads or changes these.
        unsafe { std::env::set_var(name, value) };
    };
    set("TALLY_SOFTCUDA_DEVICE", dir.path().join("device").as_os_str());
    set("TALLY_SOFTCUDA_SMS", "2".as_ref());
    set("TALLY_SOFTCUDA_MEMORY_MIB", "64".as_ref());
    // Nobody there: launches go unscheduled, and the class is what is asked for.
    set("TALLY_SOCKET", dir.path().join("none").as_os_str());
    set("TALLY_PRIORITY", "best-effort".as_ref());
    let path = CString::new(library().canonicalize().unwrap().to_str().unwrap()).unwrap();
    // SAFETY: a library without constructors; its name is libcuda.so.1.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null());
    let cuda = Box::leak(Box::new(Cuda::load(handle)));
    let mut context = null_mut();
    // SAFETY: valid out-pointers.
    unsafe {
        ok((cuda.cuInit)(0));
        ok((cuda.cuCtxCreate_v2)(&mut context, 0, 0));
    }
    assert!(tally_shim::state::is_best_effort());
    (cuda, context)
}

/// The kernel, in the current context.
fn load(cuda: &Cuda) -> Ptr {
    let (mut module, mut mix) = (null_mut(), null_mut());
    // SAFETY: valid out-pointers and text.
    unsafe {
        ok((cuda.cuModuleLoadData)(&mut module, PTX.as_ptr().cast()));
        ok((cuda.cuModuleGetFunction)(&mut mix, module, c"mix".as_ptr()));
    }
    mix
}

impl Device {
    /// The kernel, loaded once more, in the current context.
    pub fn load(&self) -> Ptr {
        load(self.cuda)
    }

    pub fn get() -> Device {
        static ALONE: Mutex<()> = Mutex::new(());
        static STARTED: OnceLock<(usize, usize, usize, [u64; BUFFERS])> = OnceLock::new();
        let alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (cuda, context, mix, buffers) = *STARTED.get_or_init(|| {
            let (cuda, context) = start();
            let mix = load(cuda);
            let mut buffers = [0; BUFFERS];
            for b in &mut buffers {
                // SAFETY: a valid out-pointer.
                ok(unsafe { (cuda.cuMemAlloc_v2)(b, N * 4) });
            }
            (std::ptr::from_ref(cuda) as usize, context as usize, mix as usize, buffers)
        });
        // SAFETY: leaked above.
        let cuda = unsafe { &*(cuda as *const Cuda) };
        let (context, mix) = (context as Ptr, mix as Ptr);
        // SAFETY: a context that lives as long as the process.
        ok(unsafe { (cuda.cuCtxSetCurrent)(context) });
        Device { cuda, mix, context, buffers, _alone: alone }
    }

    /// That this driver finds nodes in copies of graphs; without, nothing is transformed.
    pub fn divides_graphs(&self) -> bool {
        let graph = Graph::new(self);
        let node = graph.empty(&[]);
        let (mut copy, mut twin) = (null_mut(), null_mut());
        // SAFETY: objects of ours; valid out-pointers.
        let found = unsafe {
            ok((self.cuda.cuGraphClone)(&mut copy, graph.graph));
            let found = (self.cuda.cuGraphNodeFindInClone)(&mut twin, node, copy);
            ok((self.cuda.cuGraphDestroy)(copy));
            found
        };
        assert_eq!(found, 0, "without cuGraphNodeFindInClone nothing is tested");
        true
    }

    pub fn stream(&self) -> Ptr {
        let mut stream = null_mut();
        // SAFETY: a valid out-pointer. Non-blocking: captures elsewhere do not concern it.
        ok(unsafe { (self.cuda.cuStreamCreate)(&mut stream, 1) });
        stream
    }

    pub fn sync(&self, stream: Ptr) {
        // SAFETY: a stream of ours.
        ok(unsafe { (self.cuda.cuStreamSynchronize)(stream) });
    }

    pub fn launch(&self, exec: usize, stream: Ptr) {
        // SAFETY: an exec and a stream of ours.
        ok(unsafe { (self.cuda.cuGraphLaunch)(exec as Ptr, stream) });
    }

    /// Different numbers in every buffer.
    pub fn fill(&self) {
        for (i, b) in self.buffers.iter().enumerate() {
            // SAFETY: a buffer of `N`.
            ok(unsafe { (self.cuda.cuMemsetD32_v2)(*b, 7 * i as u32 + 1, N) });
        }
        // The streams of the tests do not wait for the default one.
        self.sync(null_mut());
    }

    pub fn read(&self) -> Vec<u32> {
        let mut all = vec![0; BUFFERS * N];
        for (b, part) in self.buffers.iter().zip(all.chunks_mut(N)) {
            // SAFETY: both sides have `N` elements.
            ok(unsafe { (self.cuda.cuMemcpyDtoH_v2)(part.as_mut_ptr().cast(), *b, N * 4) });
        }
        all
    }

    pub fn instantiate(&self, graph: &Graph<'_>) -> Ptr {
        let mut exec = null_mut();
        // SAFETY: a graph of ours; a valid out-pointer.
        ok(unsafe { (self.cuda.cuGraphInstantiateWithFlags)(&mut exec, graph.graph, 0) });
        exec
    }

    pub fn destroy(&self, exec: Ptr) {
        // SAFETY: an exec of ours, not used again.
        ok(unsafe { (self.cuda.cuGraphExecDestroy)(exec) });
    }

    /// Wait until the driver has none of these execs any more. Believed of a GPU's driver.
    pub fn await_end(&self, execs: &[usize]) {
        let is_software = library().to_string_lossy().contains("softcuda");
        let start = std::time::Instant::now();
        for exec in execs.iter().filter(|_| is_software) {
            let mut flags = 0;
            // SAFETY: as below.
            while unsafe { (self.cuda.cuGraphExecGetFlags)(*exec as Ptr, &mut flags) } == 0 {
                assert!(start.elapsed() < std::time::Duration::from_secs(20), "parts are kept");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }

    /// The driver still has these execs, or none of them. Believed of a GPU's driver, which may
    /// not be asked about a handle that is gone.
    pub fn assert_exist(&self, execs: &[usize], expected: bool) {
        if !library().to_string_lossy().contains("softcuda") {
            return;
        }
        for exec in execs {
            let mut flags = 0;
            // SAFETY: the software device only looks handles up; a valid out-pointer.
            let result = unsafe { (self.cuda.cuGraphExecGetFlags)(*exec as Ptr, &mut flags) };
            assert_eq!(result == 0, expected);
        }
    }

    /// Parameters of `mix`, for the length of a call.
    pub fn with_mix<T>(
        &self,
        to: usize,
        from: usize,
        k: u32,
        call: impl FnOnce(&Kernel) -> T,
    ) -> T {
        let (to, from) = (self.buffers[to], self.buffers[from]);
        let params: [Ptr; 3] = [
            (&raw const to).cast_mut().cast(),
            (&raw const from).cast_mut().cast(),
            (&raw const k).cast_mut().cast(),
        ];
        call(&Kernel {
            function: self.mix,
            grid: [1; 3],
            block: [N as u32, 1, 1],
            shared_bytes: 0,
            params: params.as_ptr(),
            extra: null(),
            kernel: null_mut(),
            context: null_mut(),
        })
    }
}

/// A program's graph; destroyed with this.
pub struct Graph<'a> {
    device: &'a Device,
    pub graph: Ptr,
}

impl<'a> Graph<'a> {
    pub fn new(device: &'a Device) -> Self {
        let mut graph = null_mut();
        // SAFETY: a valid out-pointer.
        ok(unsafe { (device.cuda.cuGraphCreate)(&mut graph, 0) });
        Graph { device, graph }
    }

    fn node(&self, add: impl FnOnce(*mut Ptr) -> R) -> Ptr {
        let mut node = null_mut();
        ok(add(&mut node));
        node
    }

    pub fn mix(&self, after: &[Ptr], to: usize, from: usize, k: u32) -> Ptr {
        let add = self.device.cuda.cuGraphAddKernelNode_v2;
        self.device.with_mix(to, from, k, |params| {
            // SAFETY: objects of ours; everything lives through the call.
            self.node(|n| unsafe { add(n, self.graph, after.as_ptr(), after.len(), params) })
        })
    }

    pub fn copy(&self, after: &[Ptr], to: usize, from: usize) -> Ptr {
        let mut p = [0_u64; 25];
        // Memory types and addresses of both ends, on the device; one row.
        (p[4], p[6], p[9]) = (2, self.device.buffers[from], 4 * N as u64);
        (p[15], p[17], p[20]) = (2, self.device.buffers[to], 4 * N as u64);
        (p[22], p[23], p[24]) = (4 * N as u64, 1, 1);
        let (add, ctx) = (self.device.cuda.cuGraphAddMemcpyNode, self.device.context);
        // SAFETY: as above.
        self.node(|n| unsafe { add(n, self.graph, after.as_ptr(), after.len(), &p, ctx) })
    }

    pub fn fill(&self, after: &[Ptr], to: usize, value: u32) -> Ptr {
        let to = self.device.buffers[to];
        let p = Fill { to, pitch: 0, value, element: 4, width: N, height: 1 };
        let (add, ctx) = (self.device.cuda.cuGraphAddMemsetNode, self.device.context);
        // SAFETY: as above.
        self.node(|n| unsafe { add(n, self.graph, after.as_ptr(), after.len(), &p, ctx) })
    }

    pub fn host(&self, after: &[Ptr], function: Host, data: usize) -> Ptr {
        let add = self.device.cuda.cuGraphAddHostNode;
        let p = (function, data as Ptr);
        // SAFETY: as above; the function takes any number for its data.
        self.node(|n| unsafe { add(n, self.graph, after.as_ptr(), after.len(), &p) })
    }

    pub fn empty(&self, after: &[Ptr]) -> Ptr {
        let add = self.device.cuda.cuGraphAddEmptyNode;
        // SAFETY: as above.
        self.node(|n| unsafe { add(n, self.graph, after.as_ptr(), after.len()) })
    }

    pub fn child(&self, after: &[Ptr], child: &Graph<'_>) -> Ptr {
        let add = self.device.cuda.cuGraphAddChildGraphNode;
        // SAFETY: as above.
        self.node(|n| unsafe { add(n, self.graph, after.as_ptr(), after.len(), child.graph) })
    }

    pub fn record(&self, after: &[Ptr]) -> Ptr {
        let mut event = null_mut();
        // SAFETY: a valid out-pointer.
        ok(unsafe { (self.device.cuda.cuEventCreate)(&mut event, 0) });
        let add = self.device.cuda.cuGraphAddEventRecordNode;
        // SAFETY: as above.
        self.node(|n| unsafe { add(n, self.graph, after.as_ptr(), after.len(), event) })
    }

    /// `n` kernels in a row.
    pub fn line(device: &'a Device, n: u32) -> Self {
        let graph = Self::new(device);
        let mut last = Vec::new();
        for k in 0..n {
            last = vec![graph.mix(&last, k as usize % BUFFERS, (k as usize + 1) % BUFFERS, k)];
        }
        graph
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        // SAFETY: ours, not used again.
        ok(unsafe { (self.device.cuda.cuGraphDestroy)(self.graph) });
    }
}
