//! A program's side: CUDA as it finds it, launches of [`kernels`](crate::kernels), and a word with the test.

use crate::kernels;
use std::ffi::{CString, c_void};
use std::io::{BufRead, Write};
use std::ptr::null_mut;
use std::sync::LazyLock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::UNIX_EPOCH;

pub type Ptr = *mut c_void;

macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*);)*) => {
        /// The driver as the program sees it: with the shim's entry points in it.
        #[allow(non_snake_case)]
        #[derive(Clone, Copy)]
        pub struct Cuda { $(pub $name: unsafe extern "C" fn($($arg),*) -> i32,)* }

        impl Cuda {
            fn load(handle: Ptr) -> Self {
                // SAFETY: driver functions of these names have these types.
                unsafe { Cuda { $($name: std::mem::transmute::<Ptr, unsafe extern "C" fn($($arg),*) -> i32>(
                    find(handle, stringify!($name))),)* } }
            }
        }
    };
}

functions! {
    cuInit: fn(u32);
    cuDeviceGetAttribute: fn(*mut i32, i32, i32);
    cuCtxCreate_v2: fn(*mut Ptr, u32, i32);
    cuCtxDestroy_v2: fn(Ptr);
    cuCtxSetCurrent: fn(Ptr);
    cuCtxSynchronize: fn();
    cuDevicePrimaryCtxRetain: fn(*mut Ptr, i32);
    cuDevicePrimaryCtxRelease_v2: fn(i32);
    cuDevicePrimaryCtxGetState: fn(i32, *mut u32, *mut i32);
    cuCtxAttach: fn(*mut Ptr, u32);
    cuCtxDetach: fn(Ptr);
    cuCtxFromGreenCtx: fn(*mut Ptr, Ptr);
    cuDeviceGetDevResource: fn(i32, *mut Resource, u32);
    cuDevSmResourceSplitByCount: fn(*mut Resource, *mut u32, *const Resource, *mut Resource, u32, u32);
    cuDevResourceGenerateDesc: fn(*mut Ptr, *mut Resource, u32);
    cuGreenCtxCreate: fn(*mut Ptr, Ptr, i32, u32);
    cuGreenCtxDestroy: fn(Ptr);
    cuGreenCtxStreamCreate: fn(*mut Ptr, Ptr, u32, i32);
    cuModuleLoad: fn(*mut Ptr, *const i8);
    cuModuleLoadData: fn(*mut Ptr, *const u8);
    cuModuleLoadDataEx: fn(*mut Ptr, *const u8, u32, Ptr, Ptr);
    cuModuleUnload: fn(Ptr);
    cuModuleGetFunction: fn(*mut Ptr, Ptr, *const i8);
    cuLibraryLoadData: fn(*mut Ptr, *const u8, Ptr, Ptr, u32, Ptr, Ptr, u32);
    cuLibraryLoadFromFile: fn(*mut Ptr, *const i8, Ptr, Ptr, u32, Ptr, Ptr, u32);
    cuLibraryGetKernel: fn(*mut Ptr, Ptr, *const i8);
    cuModuleGetGlobal_v2: fn(*mut u64, *mut usize, Ptr, *const i8);
    cuLibraryGetGlobal: fn(*mut u64, *mut usize, Ptr, *const i8);
    cuFuncGetModule: fn(*mut Ptr, Ptr);
    cuLibraryEnumerateKernels: fn(*mut Ptr, u32, Ptr);
    cuModuleEnumerateFunctions: fn(*mut Ptr, u32, Ptr);
    cuFuncGetName: fn(*mut *const i8, Ptr);
    cuKernelGetName: fn(*mut *const i8, Ptr);
    cuKernelGetFunction: fn(*mut Ptr, Ptr);
    cuFuncSetAttribute: fn(Ptr, i32, i32);
    cuFuncGetAttribute: fn(*mut i32, i32, Ptr);
    cuOccupancyMaxActiveBlocksPerMultiprocessor: fn(*mut i32, Ptr, i32, usize);
    cuMemAlloc_v2: fn(*mut u64, usize);
    cuMemFree_v2: fn(u64);
    cuMemsetD32_v2: fn(u64, u32, usize);
    cuMemHostAlloc: fn(*mut Ptr, usize, u32);
    cuMemcpyDtoH_v2: fn(Ptr, u64, usize);
    cuMemcpyDtoHAsync_v2: fn(Ptr, u64, usize, Ptr);
    cuMemcpyDtoDAsync_v2: fn(u64, u64, usize, Ptr);
    cuStreamCreate: fn(*mut Ptr, u32);
    cuStreamCreateWithPriority: fn(*mut Ptr, u32, i32);
    cuStreamSynchronize: fn(Ptr);
    cuStreamQuery: fn(Ptr);
    cuStreamDestroy_v2: fn(Ptr);
    cuStreamSetAttribute: fn(Ptr, u32, *const [u32; 16]);
    cuStreamWaitEvent: fn(Ptr, Ptr, u32);
    cuStreamWaitValue32_v2: fn(Ptr, u64, u32, u32);
    cuStreamWriteValue32_v2: fn(Ptr, u64, u32, u32);
    cuStreamBeginCapture_v2: fn(Ptr, i32);
    cuStreamEndCapture: fn(Ptr, *mut Ptr);
    cuGraphCreate: fn(*mut Ptr, u32);
    cuGraphAddEventRecordNode: fn(*mut Ptr, Ptr, *const Ptr, usize, Ptr);
    cuGraphInstantiateWithFlags: fn(*mut Ptr, Ptr, u64);
    cuGraphLaunch: fn(Ptr, Ptr);
    cuGraphExecDestroy: fn(Ptr);
    cuEventCreate: fn(*mut Ptr, u32);
    cuEventRecord: fn(Ptr, Ptr);
    cuEventSynchronize: fn(Ptr);
    cuLaunchKernel: fn(Ptr, u32, u32, u32, u32, u32, u32, u32, Ptr, *mut Ptr, *mut Ptr);
    cuLaunchKernelEx: fn(*const Config, Ptr, *mut Ptr, *mut Ptr);
    cuLaunchCooperativeKernel: fn(Ptr, u32, u32, u32, u32, u32, u32, u32, Ptr, *mut Ptr);
}

pub type Resource = [u32; 36];

#[repr(C)]
pub struct Config {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub stream: Ptr,
    pub attributes: *const Attribute,
    pub count: u32,
}

#[repr(C)]
pub struct Attribute {
    pub id: u32,
    pub pad: u32,
    pub value: [u32; 16],
}

impl Attribute {
    pub fn new(id: u32, first: &[u32]) -> Self {
        let mut value = [0; 16];
        value[..first.len()].copy_from_slice(first);
        Attribute { id, pad: 0, value }
    }
}

fn find(handle: Ptr, name: &str) -> Ptr {
    let c = CString::new(name).unwrap();
    // SAFETY: a handle of dlopen's; the shim stands before the C library's.
    let found = unsafe { libc::dlsym(handle, c.as_ptr()) };
    assert!(!found.is_null(), "the software device has no {name}");
    found
}

pub fn ok(result: i32) {
    assert_eq!(result, 0);
}

/// One of the first device's attributes.
fn attribute(cuda: &Cuda, number: i32) -> u32 {
    let mut value = 0;
    // SAFETY: a valid out-pointer.
    ok(unsafe { (cuda.cuDeviceGetAttribute)(&mut value, number, 0) });
    value as u32
}

/// What has as many SMs is a GPU.
const SOFTWARE_SMS_MAX: u32 = 17;

/// Threads of a block.
pub const THREADS: u32 = 4;

/// The device, a context, a module; every thread of the program may use it.
#[derive(Clone)]
pub struct Device {
    pub cuda: Cuda,
    pub context: Ptr,
    pub module: Ptr,
    handle: Ptr,
    /// A GPU is so many times faster with a block's work than the software device, and more.
    haste: u32,
    /// More blocks than a GPU runs at once; on the software device, where any number waits, 40.
    pub crowd: u32,
}

// SAFETY: handles that every thread may use.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Data and counters of one kernel's launches.
#[derive(Clone, Copy)]
pub struct Cells {
    pub data: u64,
    pub counts: u64,
    pub blocks: u32,
}

impl Device {
    /// Start CUDA, and load the kernels.
    pub fn start() -> Device {
        // SAFETY: a library without constructors, found by the loader's path.
        let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null());
        let cuda = Cuda::load(handle);
        // SAFETY: no arguments.
        ok(unsafe { (cuda.cuInit)(0) });
        let (sms, blocks_of_sm) = (attribute(&cuda, 16), attribute(&cuda, 106));
        let (haste, crowd) = match sms {
            SOFTWARE_SMS_MAX.. => (40, sms * blocks_of_sm + 40),
            _ => (1, 40),
        };
        let (context, module) = (null_mut(), null_mut());
        let mut device = Device { cuda, context, module, handle, haste, crowd };
        device.new_context();
        device
    }

    /// Whether the device is a GPU, not the software device.
    pub fn is_gpu(&self) -> bool {
        self.haste > 1
    }

    /// A context and the kernels in it; it becomes current.
    pub fn new_context(&mut self) {
        // SAFETY: a valid out-pointer.
        ok(unsafe { (self.cuda.cuCtxCreate_v2)(&mut self.context, 0, 0) });
        self.module = self.load(&kernels::all());
    }

    /// Loads the kernels again.
    pub fn reload(&mut self) {
        self.module = self.load(&kernels::all());
    }

    pub fn primary_context(&mut self) {
        // SAFETY: a valid out-pointer.
        unsafe {
            ok((self.cuda.cuDevicePrimaryCtxRetain)(&mut self.context, 0));
            ok((self.cuda.cuCtxSetCurrent)(self.context));
        }
        self.module = self.load(&kernels::all());
    }

    pub fn destroy_context(&self) {
        // SAFETY: a context of ours.
        ok(unsafe { (self.cuda.cuCtxDestroy_v2)(self.context) });
    }

    /// For a thread that has no context yet.
    pub fn enter(&self) {
        // SAFETY: a live context.
        ok(unsafe { (self.cuda.cuCtxSetCurrent)(self.context) });
    }

    /// Load an image that is in the read-only data of a library of this file name, which is made for it.
    pub fn load_in_library(&self, ptx: &str, file_name: &str) -> Ptr {
        let folder = tempfile::tempdir().unwrap();
        let (source, library) = (folder.path().join("image.c"), folder.path().join(file_name));
        let bytes: Vec<String> = ptx.bytes().chain([0]).map(|b| b.to_string()).collect();
        let text = format!("const unsigned char image[] = {{{}}};", bytes.join(","));
        std::fs::write(&source, text).unwrap();
        let mut compile = std::process::Command::new("cc");
        compile.args(["-shared", "-fPIC", "-nostdlib", "-o"]).arg(&library).arg(&source);
        assert!(compile.env_remove("LD_PRELOAD").status().unwrap().success());
        let path = CString::new(library.into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: a library without constructors, which stays loaded.
        let image = unsafe {
            let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
            assert!(!handle.is_null());
            libc::dlsym(handle, c"image".as_ptr())
        };
        assert!(!image.is_null());
        let mut module = null_mut();
        // SAFETY: a valid out-pointer; text with a NUL.
        ok(unsafe { (self.cuda.cuModuleLoadData)(&mut module, image.cast()) });
        module
    }

    pub fn load(&self, ptx: &str) -> Ptr {
        // On the heap: an image that is in no library is copied.
        let text = CString::new(ptx).unwrap();
        let mut module = null_mut();
        // SAFETY: a valid out-pointer; text with a NUL.
        ok(unsafe { (self.cuda.cuModuleLoadData)(&mut module, text.as_ptr().cast()) });
        module
    }

    /// The kernels as a library, which is loaded into a context when something of it is first wanted there.
    pub fn library(&self) -> Ptr {
        self.library_of(&kernels::all())
    }

    pub fn library_of(&self, ptx: &str) -> Ptr {
        let (text, mut library, none) = (CString::new(ptx).unwrap(), null_mut(), null_mut());
        // SAFETY: a valid out-pointer; text with a NUL; no options.
        ok(unsafe {
            let image = text.as_ptr().cast();
            (self.cuda.cuLibraryLoadData)(&mut library, image, none, none, 0, none, none, 0)
        });
        library
    }

    pub fn kernel_of(&self, library: Ptr, name: &str) -> Ptr {
        let (mut kernel, name) = (null_mut(), CString::new(name).unwrap());
        // SAFETY: a valid out-pointer; a library of ours.
        ok(unsafe { (self.cuda.cuLibraryGetKernel)(&mut kernel, library, name.as_ptr()) });
        kernel
    }

    pub fn function_of(&self, module: Ptr, name: &str) -> Ptr {
        at(&format!("function {name}"));
        let (mut function, name) = (null_mut(), CString::new(name).unwrap());
        // SAFETY: a valid out-pointer; a module of ours.
        ok(unsafe { (self.cuda.cuModuleGetFunction)(&mut function, module, name.as_ptr()) });
        function
    }

    pub fn function(&self, name: &str) -> Ptr {
        self.function_of(self.module, name)
    }

    /// A variable of the driver's.
    pub fn variable(&self, name: &str) -> Ptr {
        find(self.handle, name)
    }

    /// A launch function as per-thread programs call it.
    pub fn per_thread_launch(&self) -> Device {
        // SAFETY: the same type under another name.
        let cu_launch_kernel = unsafe {
            std::mem::transmute::<
                Ptr,
                unsafe extern "C" fn(
                    Ptr,
                    u32,
                    u32,
                    u32,
                    u32,
                    u32,
                    u32,
                    u32,
                    Ptr,
                    *mut Ptr,
                    *mut Ptr,
                ) -> i32,
            >(find(self.handle, "cuLaunchKernel_ptsz"))
        };
        let mut device = self.clone();
        device.cuda.cuLaunchKernel = cu_launch_kernel;
        device
    }

    /// A stream: 0 blocking, 1 non-blocking.
    pub fn stream(&self, flags: u32) -> Ptr {
        let mut stream = null_mut();
        // SAFETY: a valid out-pointer.
        ok(unsafe { (self.cuda.cuStreamCreate)(&mut stream, flags) });
        stream
    }

    /// A non-blocking stream.
    pub fn stream_of_priority(&self, priority: i32) -> Ptr {
        let mut stream = null_mut();
        // SAFETY: a valid out-pointer.
        ok(unsafe { (self.cuda.cuStreamCreateWithPriority)(&mut stream, 1, priority) });
        stream
    }

    pub fn event(&self) -> Ptr {
        let mut event = null_mut();
        // SAFETY: a valid out-pointer.
        ok(unsafe { (self.cuda.cuEventCreate)(&mut event, 0) });
        event
    }

    pub fn sync(&self, stream: Ptr) {
        at("synchronise");
        // SAFETY: a stream of ours.
        ok(unsafe { (self.cuda.cuStreamSynchronize)(stream) });
    }

    pub fn memory(&self, words: usize) -> u64 {
        let mut address = 0;
        // SAFETY: a valid out-pointer, then memory of ours.
        unsafe {
            ok((self.cuda.cuMemAlloc_v2)(&mut address, words * 4));
        }
        self.set(address, 0, words);
        address
    }

    /// Set words; done when it returns, for streams that do not wait for the default one, too.
    pub fn set(&self, address: u64, value: u32, words: usize) {
        // SAFETY: memory of ours of this length.
        unsafe {
            ok((self.cuda.cuMemsetD32_v2)(address, value, words));
            ok((self.cuda.cuStreamSynchronize)(null_mut()));
        }
    }

    /// Words of host memory that kernels see at the same address; never freed.
    pub fn words(&self) -> &'static [AtomicU32; 16] {
        let mut p = null_mut();
        // SAFETY: a valid out-pointer; the memory is a page of zeros.
        unsafe {
            ok((self.cuda.cuMemHostAlloc)(&mut p, 64, 0));
            p.write_bytes(0, 64);
            &*p.cast()
        }
    }

    pub fn read(&self, address: u64, words: usize) -> Vec<u32> {
        let mut all = vec![0; words];
        // SAFETY: memory of ours of this length.
        ok(unsafe { (self.cuda.cuMemcpyDtoH_v2)(all.as_mut_ptr().cast(), address, words * 4) });
        all
    }

    /// Memory for `step` and `later`: one word more of each, for `later`.
    pub fn cells(&self, blocks: u32) -> Cells {
        let words = (blocks * THREADS) as usize + 1;
        Cells { data: self.memory(words), counts: self.memory(blocks as usize + 1), blocks }
    }

    /// Launch with these parameters, each 8 bytes wide at most.
    pub fn launch(&self, f: Ptr, grid: [u32; 3], threads: u32, stream: Ptr, params: &[u64]) -> i32 {
        self.launch_with(f, (grid, threads, 0), stream, params)
    }

    /// The same with so many bytes of dynamic shared memory.
    pub fn launch_with(
        &self,
        f: Ptr,
        (grid, threads, bytes): ([u32; 3], u32, u32),
        stream: Ptr,
        params: &[u64],
    ) -> i32 {
        let mut params: Vec<Ptr> =
            params.iter().map(|p| std::ptr::from_ref(p).cast_mut().cast()).collect();
        let [x, y, z] = grid;
        at("launch");
        let launch = self.cuda.cuLaunchKernel;
        // SAFETY: a function, a stream and parameters of ours; little-endian, so that the first
        // bytes of each are a narrower parameter's value.
        unsafe { launch(f, x, y, z, threads, 1, 1, bytes, stream, params.as_mut_ptr(), null_mut()) }
    }

    /// So much dynamic shared memory may launches of a function have.
    pub fn allow(&self, f: Ptr, bytes: u32) {
        const MAX_DYNAMIC: i32 = 8;
        // SAFETY: a function of ours.
        ok(unsafe { (self.cuda.cuFuncSetAttribute)(f, MAX_DYNAMIC, bytes as i32) });
    }

    pub fn step(&self, cells: &Cells, grid: [u32; 3], stream: Ptr, k: u32, work: u32) {
        assert_eq!(grid.iter().product::<u32>(), cells.blocks);
        let params = [cells.data, cells.counts, k.into(), (work * self.haste).into()];
        ok(self.launch(self.function("step"), grid, THREADS, stream, &params));
    }

    /// `step` with launch attributes.
    pub fn step_with(&self, attributes: &[Attribute], cells: &Cells, stream: Ptr, k: u32) -> i32 {
        let config = Config {
            grid: [cells.blocks, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            stream,
            attributes: attributes.as_ptr(),
            count: attributes.len() as u32,
        };
        let params = [cells.data, cells.counts, k.into(), 0];
        let mut params = params.each_ref().map(|p| std::ptr::from_ref(p).cast_mut().cast());
        let launch = self.cuda.cuLaunchKernelEx;
        // SAFETY: a function, a stream and parameters of ours, as above.
        unsafe { launch(&config, self.function("step"), params.as_mut_ptr(), null_mut()) }
    }

    /// Fails unless the words from `address` on are these.
    pub fn check_words(&self, address: u64, want: &[u32]) {
        let got = self.read(address, want.len());
        let wrong = (0..want.len()).filter(|i| got[*i] != want[*i]);
        let wrong: Vec<_> = wrong.map(|i| (i, got[i], want[i])).collect();
        let some = &wrong[..wrong.len().min(20)];
        assert!(
            wrong.is_empty(),
            "{} of {} words (index, is, should be): {some:?}",
            wrong.len(),
            want.len()
        );
    }

    pub fn sum(&self, to: u64, from: u64, words: u32, stream: Ptr) {
        ok(self.launch(self.function("sum"), [1; 3], 1, stream, &[to, from, words.into()]));
    }

    /// Every block ran so often, and the memory is that of these whole runs (their `k`).
    pub fn check_steps(&self, cells: &Cells, ks: &[u32]) {
        let counts = self.read(cells.counts, cells.blocks as usize);
        let wrong: Vec<_> =
            counts.iter().enumerate().filter(|(_, n)| **n != ks.len() as u32).collect();
        assert!(wrong.is_empty(), "blocks not run {} times: {wrong:?}", ks.len());
        let data = self.read(cells.data, (cells.blocks * THREADS) as usize);
        for (i, word) in data.into_iter().enumerate() {
            assert_eq!(
                word,
                ks.iter().fold(0, |v, k| kernels::step(v, i as u32, *k)),
                "element {i}"
            );
        }
    }

    /// Have the transformed form of `step` made: launch it until the core says that it can be transformed.
    pub fn warm_up(&self) {
        self.warm_up_with(|| self.step(&self.cells(2), [2, 1, 1], null_mut(), 1, 0));
    }

    pub fn warm_up_with(&self, launch: impl Fn()) {
        while ask("ready?") == "no" {
            launch();
            // SAFETY: no arguments.
            ok(unsafe { (self.cuda.cuCtxSynchronize)() });
        }
    }
}

/// What the program is at, for whoever looks why it hangs.
fn at(what: &str) {
    static TRACES: LazyLock<bool> =
        LazyLock::new(|| std::env::var_os("TALLY_TEST_TRACE").is_some());
    if *TRACES {
        eprintln!("{:?} {what}", std::time::SystemTime::now().duration_since(UNIX_EPOCH).unwrap());
    }
}

/// Say something to the test.
pub fn say(line: &str) {
    at(line);
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{line}").unwrap();
    out.flush().unwrap();
}

/// Reads what the test says, one line.
pub fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
    at(&format!("heard {}", line.trim_end()));
    line.trim_end().to_owned()
}

pub fn ask(line: &str) -> String {
    say(line);
    hear()
}

/// Wait for a word of pinned memory.
pub fn wait_for(word: &AtomicU32, value: u32) {
    while word.load(SeqCst) != value {
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
}
