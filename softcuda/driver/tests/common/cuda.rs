//! What the tests that go through cudarc share.

use super::kernels;
use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaStream, DriverError, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::Ptx;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

pub fn ptx() -> String {
    std::fs::read_to_string(kernels().join("basic.ptx")).unwrap()
}

pub fn load(context: &Arc<CudaContext>) -> Arc<CudaModule> {
    context.load_module(Ptx::from_src(ptx())).unwrap()
}

pub fn kernel(module: &Arc<CudaModule>, name: &str) -> CudaFunction {
    module.load_function(name).unwrap()
}

pub fn shape(grid: u32, block: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (block, 1, 1), shared_mem_bytes: 0 }
}

pub fn code(result: Result<(), DriverError>) -> CUresult {
    result.map_or_else(|e| e.0, |()| CUresult::CUDA_SUCCESS)
}

/// A word of pinned host memory, zero at first.
pub fn pinned_word() -> &'static AtomicU32 {
    let mut at: *mut c_void = std::ptr::null_mut();
    // SAFETY: a valid out pointer; the memory is never freed.
    unsafe {
        sys::cuMemHostAlloc(&mut at, 64, 0).result().unwrap();
        &*at.cast::<AtomicU32>()
    }
}

pub fn address(word: &AtomicU32) -> sys::CUdeviceptr {
    word.as_ptr() as sys::CUdeviceptr
}

pub fn wait_value(stream: CUstream, word: &AtomicU32, value: u32) {
    // SAFETY: a stream of ours and pinned memory.
    unsafe { sys::cuStreamWaitValue32_v2(stream, address(word), value, 0) }.result().unwrap();
}

pub fn write_value(stream: CUstream, word: &AtomicU32, value: u32) {
    // SAFETY: as above.
    unsafe { sys::cuStreamWriteValue32_v2(stream, address(word), value, 0) }.result().unwrap();
}

pub fn query(stream: CUstream) -> CUresult {
    // SAFETY: a stream of ours.
    unsafe { sys::cuStreamQuery(stream) }
}

pub fn increment(stream: &Arc<CudaStream>, f: &CudaFunction, data: u64, n: u32, rounds: u32) {
    let mut launch = stream.launch_builder(f);
    launch.arg(&data).arg(&n).arg(&rounds);
    // SAFETY: `data` has at least `n` elements wherever this is called.
    unsafe { launch.launch(LaunchConfig::for_num_elems(n)) }.unwrap();
}

/// `n` zeros on the device, as an address.
pub fn zeros(n: usize) -> u64 {
    let mut at = 0;
    // SAFETY: a valid out pointer, then a range just allocated.
    unsafe {
        sys::cuMemAlloc_v2(&mut at, n * 4).result().unwrap();
        sys::cuMemsetD32_v2(at, 0, n).result().unwrap();
    }
    at
}

pub fn fetch(at: u64, n: usize) -> Vec<u32> {
    let mut host = vec![u32::MAX; n];
    // SAFETY: both sides have `n` elements.
    unsafe { sys::cuMemcpyDtoH_v2(host.as_mut_ptr().cast(), at, n * 4) }.result().unwrap();
    host
}

/// The module of kernels that are transformed, held and looked at while they run.
pub fn load_transforming(context: &Arc<CudaContext>) -> Arc<CudaModule> {
    let ptx = std::fs::read_to_string(kernels().join("transformed.ptx")).unwrap();
    context.load_module(Ptx::from_src(ptx)).unwrap()
}

/// A raw function of a module, for calls that cudarc does not wrap.
pub fn raw(module: &Arc<CudaModule>, name: &str) -> sys::CUfunction {
    kernel(module, name).cu_function()
}

/// Launches with parameters of any size, each given as bytes.
pub fn launch(
    stream: CUstream,
    f: sys::CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    params: &[&[u8]],
) {
    let mut list: Vec<*mut c_void> = params.iter().map(|p| p.as_ptr().cast_mut().cast()).collect();
    let [gx, gy, gz] = grid;
    let [bx, by, bz] = block;
    let (list, none) = (list.as_mut_ptr(), std::ptr::null_mut());
    // SAFETY: a function of ours with as many parameters, copied by the call.
    unsafe { sys::cuLaunchKernel(f, gx, gy, gz, bx, by, bz, 0, stream, list, none) }
        .result()
        .unwrap();
}

pub fn synchronize(stream: CUstream) {
    // SAFETY: a stream of ours.
    unsafe { sys::cuStreamSynchronize(stream) }.result().unwrap();
}

/// A stream of our own making.
pub fn stream(flags: u32) -> CUstream {
    let mut stream = std::ptr::null_mut();
    // SAFETY: a valid out pointer.
    unsafe { sys::cuStreamCreate(&mut stream, flags) }.result().unwrap();
    stream
}

/// Waits, without a limit of its own, until `word` is `value`: a hang is the
/// runner's to find.
pub fn await_word(word: &AtomicU32, value: u32) {
    while word.load(std::sync::atomic::Ordering::SeqCst) != value {
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
}

/// How long nothing must happen for it to count as waiting.
pub const STILL: Duration = Duration::from_millis(20);

pub fn event(flags: u32) -> CUevent {
    let mut event = null_mut();
    // SAFETY: a valid out pointer.
    unsafe { sys::cuEventCreate(&mut event, flags) }.result().unwrap();
    event
}

pub fn record(event: CUevent, stream: CUstream) {
    // SAFETY: an event and a stream of ours.
    unsafe { sys::cuEventRecord(event, stream) }.result().unwrap();
}

/// A kernel whose module stays loaded.
pub fn kept(context: &Arc<CudaContext>, name: &str) -> sys::CUfunction {
    let module = load_transforming(context);
    let f = raw(&module, name);
    std::mem::forget(module);
    f
}

/// A kernel that runs until its word is set.
pub struct Spinner {
    pub f: sys::CUfunction,
    pub seen: u64,
    pub until: &'static AtomicU32,
}

impl Spinner {
    pub fn new(context: &Arc<CudaContext>) -> Self {
        let f = kept(context, "until");
        Self { f, seen: zeros(1), until: pinned_word() }
    }

    pub fn launch(&self, stream: CUstream) {
        let at = [address(self.until), address(pinned_word()), self.seen].map(u64::to_ne_bytes);
        launch(stream, self.f, [1; 3], [1; 3], &[&at[0], &at[1], &at[2]]);
    }

    /// Starts it and waits until it runs.
    pub fn start(context: &Arc<CudaContext>, stream: CUstream) -> Self {
        let spinner = Self::new(context);
        let started = pinned_word();
        let at = [address(spinner.until), address(started), spinner.seen].map(u64::to_ne_bytes);
        launch(stream, spinner.f, [1; 3], [1; 3], &[&at[0], &at[1], &at[2]]);
        await_word(started, 1);
        spinner
    }

    pub fn end(&self) {
        self.until.store(1, SeqCst);
    }
}
