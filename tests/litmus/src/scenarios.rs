//! Programs that the vocabulary of the others has no words for. Each runs in a process of its own.

mod interrupts;

use crate::cu::{Cuda, Handle};
use anyhow::{Context, Result, ensure};
use std::ffi::c_void;
use std::ptr::null;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

pub const ALL: [&str; 10] =
    ["cap", "prim", "cancel", "torn", "looks", "signals", "reset", "exec", "quit", "forked"];

const PTX: &[u8] = b".version 7.0\n.target sm_70\n.address_size 64\n\
    .visible .entry inc(.param .u64 p) { .reg .b64 %d<2>; \
    ld.param.u64 %d1, [p]; red.global.add.u32 [%d1], 1; ret; }\n\
    .visible .entry each(.param .u64 p) { .reg .b64 %d<3>; .reg .b32 %r<2>; \
    ld.param.u64 %d1, [p]; mov.u32 %r1, %ctaid.x; mul.wide.u32 %d2, %r1, 4; \
    add.s64 %d1, %d1, %d2; red.global.add.u32 [%d1], 1; ret; }\n\0";
/// A module with a variable: what kernels of it do is not known, and they run whole.
const VARIABLE_PTX: &[u8] = b".version 7.0\n.target sm_70\n.address_size 64\n\
    .visible .global .u32 counter = 7;\n.visible .entry nothing() { ret; }\n\0";
/// Calls of `looks`. If each waited for a few seconds, the program would be taken for hung.
const LOOKS: u32 = 30;
/// Of `torn`: blocks of a launch, each with a word of its own, and copies of these words.
const BLOCKS: u32 = 2048;
const COPIES: usize = 48;
/// Streams of `cap`: more than the shim keeps slots for.
const STREAMS: usize = 70;
const GLOBAL: u32 = 0;
const NON_BLOCKING: u32 = 1;
const MAPPED: u32 = 2;

/// Runs one of them.
///
/// # Errors
/// What is wrong.
pub fn run(name: &str) -> Result<()> {
    match name {
        "cap" => cap(),
        "prim" => prim(),
        "cancel" => cancel(),
        "torn" => torn(),
        "looks" => looks(),
        "signals" => interrupts::signals(),
        "reset" => interrupts::reset(),
        "exec" => interrupts::exec(),
        "exec-again" => interrupts::exec_again(),
        "quit" => interrupts::quit(),
        "forked" => interrupts::forked(),
        _ => anyhow::bail!("no scenario {name}"),
    }
}

/// What all of them begin with.
struct Start {
    cuda: &'static Cuda,
    context: Handle,
    function: Handle,
    each: Handle,
    word: u64,
}

impl Start {
    fn new() -> Result<Self> {
        let cuda = Cuda::open()?;
        let mut start = Self { cuda, context: 0, function: 0, each: 0, word: 0 };
        let mut module = 0;
        // SAFETY: valid out pointers, and text that lives through the call.
        unsafe {
            cuda.cuDevicePrimaryCtxRetain(&mut start.context, 0)?;
            cuda.cuCtxSetCurrent(start.context)?;
            cuda.cuModuleLoadData(&mut module, PTX.as_ptr())?;
            cuda.cuModuleGetFunction(&mut start.function, module, c"inc".as_ptr().cast())?;
            cuda.cuModuleGetFunction(&mut start.each, module, c"each".as_ptr().cast())?;
            for function in [start.function, start.each] {
                cuda.cuFuncLoad(function)?;
            }
            cuda.cuMemAlloc_v2(&mut start.word, 64 << 20)?;
            cuda.cuMemsetD32_v2(start.word, 0, 1)?;
            cuda.cuCtxSynchronize()?;
        }
        Ok(start)
    }

    fn stream(&self) -> Result<Handle> {
        let mut stream = 0;
        // SAFETY: a valid out pointer.
        unsafe { self.cuda.cuStreamCreateWithPriority(&mut stream, NON_BLOCKING, 0) }?;
        Ok(stream)
    }

    /// 64 blocks that each add 1.
    fn launch(&self, stream: Handle) -> crate::cu::Done {
        self.launch_of(self.function, 64, stream)
    }

    fn launch_of(&self, function: Handle, blocks: u32, stream: Handle) -> crate::cu::Done {
        let params = [std::ptr::from_ref(&self.word).cast_mut().cast()];
        // SAFETY: a function and a stream of ours, and its argument.
        unsafe {
            self.cuda.cuLaunchKernel(
                false,
                function,
                blocks,
                1,
                1,
                1,
                1,
                1,
                0,
                stream,
                params.as_ptr(),
                null(),
            )
        }
    }

    fn warm_up(&self, stream: Handle, times: u32) -> Result<()> {
        for _ in 0..times {
            self.launch(stream)?;
            // SAFETY: a stream of ours.
            unsafe { self.cuda.cuStreamSynchronize(false, stream) }?;
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// One thread captures in global mode; another launches on the 70th stream meanwhile.
fn cap() -> Result<()> {
    let start = Start::new()?;
    let captured = start.stream()?;
    let streams: Vec<Handle> = (0..STREAMS).map(|_| start.stream()).collect::<Result<_>>()?;
    for &stream in &streams {
        start.launch(stream)?;
        // SAFETY: a stream of ours.
        unsafe { start.cuda.cuStreamSynchronize(false, stream) }?;
    }
    // SAFETY: a stream of ours.
    unsafe { start.cuda.cuStreamBeginCapture_v2(captured, GLOBAL) }?;
    start.launch(captured).context("the first captured launch")?;
    let beside = std::thread::scope(|scope| {
        let launching = scope.spawn(|| {
            // SAFETY: the process's context.
            unsafe { start.cuda.cuCtxSetCurrent(start.context) }?;
            start.launch(streams[STREAMS - 1])
        });
        launching.join()
    });
    beside.map_err(|_| anyhow::anyhow!("it panicked"))?.context("the launch beside a capture")?;
    start.launch(captured).context("the second captured launch")?;
    let mut graph = 0;
    // SAFETY: a stream of ours and a valid out pointer.
    unsafe { start.cuda.cuStreamEndCapture(captured, &mut graph) }.context("the end of the capture")
}

/// After its last release the primary context is gone.
fn prim() -> Result<()> {
    let start = Start::new()?;
    let stream = start.stream()?;
    start.warm_up(stream, 20)?;
    let (mut flags, mut active) = (0, 1);
    // SAFETY: valid out pointers; nothing of the context is used any more.
    unsafe {
        start.cuda.cuCtxSetCurrent(0)?;
        start.cuda.cuDevicePrimaryCtxRelease_v2(0)?;
        start.cuda.cuDevicePrimaryCtxGetState(0, &mut flags, &mut active)?;
    }
    ensure!(active == 0, "the primary context is active after its last release");
    // SAFETY: no pointers. CU_CTX_SCHED_BLOCKING_SYNC.
    unsafe { start.cuda.cuDevicePrimaryCtxSetFlags_v2(0, 4) }.context("its flags")
}

/// What the thread of [`cancel`] frees, and how far it is.
static FREED: AtomicU64 = AtomicU64::new(0);
static AT: AtomicU32 = AtomicU32::new(0);
static CONTEXT: AtomicU64 = AtomicU64::new(0);

/// Frees memory; nothing here is lost if the thread is cancelled.
extern "C-unwind" fn free(cuda: *mut c_void) -> *mut c_void {
    // SAFETY: the driver, which lives for ever.
    let cuda = unsafe { &*cuda.cast::<Cuda>() };
    // SAFETY: the process's context, and memory of ours, not used again.
    unsafe {
        let _ = cuda.cuCtxSetCurrent(CONTEXT.load(SeqCst) as Handle);
        AT.store(1, SeqCst);
        let _ = cuda.cuMemFree_v2(FREED.load(SeqCst));
    }
    AT.store(2, SeqCst);
    std::ptr::null_mut()
}

/// A thread is cancelled while it frees memory and waits for the device: the memory is freed.
fn cancel() -> Result<()> {
    let start = Start::new()?;
    let cuda = start.cuda;
    let stream = start.stream()?;
    start.warm_up(stream, 40)?;
    let (mut memory, mut host, mut gate) = (0, std::ptr::null_mut(), 0);
    // SAFETY: valid out pointers.
    unsafe {
        cuda.cuMemAlloc_v2(&mut memory, 4096)?;
        cuda.cuMemHostAlloc(&mut host, 4096, MAPPED)?;
        cuda.cuMemHostGetDevicePointer_v2(&mut gate, host, 0)?;
    }
    // SAFETY: pinned memory of a page, which lives for ever.
    let word = unsafe { AtomicU32::from_ptr(host.cast()) };
    word.store(0, SeqCst);
    FREED.store(memory, SeqCst);
    CONTEXT.store(start.context as u64, SeqCst);
    // SAFETY: a stream of ours and a mapped word.
    unsafe { cuda.cuStreamWaitValue32_v2(false, stream, gate, 1, 0) }?;
    start.launch(stream)?;
    let mut thread = 0;
    let argument = std::ptr::from_ref(cuda).cast_mut().cast();
    // SAFETY: a function of that type, whose argument lives for ever.
    let body = unsafe {
        std::mem::transmute::<
            extern "C-unwind" fn(*mut c_void) -> *mut c_void,
            extern "C" fn(*mut c_void) -> *mut c_void,
        >(free)
    };
    // SAFETY: valid pointers.
    let made = unsafe { libc::pthread_create(&mut thread, null(), body, argument) };
    ensure!(made == 0, "no thread");
    while AT.load(SeqCst) == 0 {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(200));
    // SAFETY: a thread that was not joined yet.
    unsafe { libc::pthread_cancel(thread) };
    std::thread::sleep(Duration::from_millis(100));
    word.store(1, SeqCst);
    // SAFETY: as above; then it is gone.
    unsafe { libc::pthread_join(thread, std::ptr::null_mut()) };
    // SAFETY: a stream of ours.
    unsafe { cuda.cuStreamSynchronize(false, stream) }?;
    // SAFETY: the driver only looks the address up.
    let again = unsafe { cuda.cuMemFree_v2(memory) };
    ensure!(again.is_err(), "the memory was not freed");
    Ok(())
}

/// What another thread copies, in a launch's stream or in one that waits for it, is of whole launches.
fn torn() -> Result<()> {
    let start = Start::new()?;
    let (mut blocking, non_blocking) = (0, start.stream()?);
    // SAFETY: a valid out pointer.
    unsafe { start.cuda.cuStreamCreateWithPriority(&mut blocking, 0, 0) }?;
    for _ in 0..40 {
        start.launch_of(start.each, BLOCKS, non_blocking)?;
        // SAFETY: no arguments.
        unsafe { start.cuda.cuCtxSynchronize() }?;
        std::thread::sleep(Duration::from_millis(2));
    }
    // The stream of the launches, and that of the copies; 0 is the legacy one.
    for (launches, copies) in [(non_blocking, non_blocking), (blocking, 0), (0, blocking), (0, 0)] {
        for _ in 0..4 {
            copy_beside(&start, launches, copies)?;
        }
    }
    Ok(())
}

/// Looking variables up and loading functions that are loaded waits for no launch, though it waits itself.
fn looks() -> Result<()> {
    let start = Start::new()?;
    let cuda = start.cuda;
    let stream = start.stream()?;
    let (mut module, mut library, mut host, mut gate) = (0, 0, std::ptr::null_mut(), 0);
    // SAFETY: valid out pointers, and text that lives through the call.
    unsafe {
        cuda.cuModuleLoadData(&mut module, VARIABLE_PTX.as_ptr())?;
        let image = VARIABLE_PTX.as_ptr();
        cuda.cuLibraryLoadData(&mut library, image, null(), null(), 0, null(), null(), 0)?;
        cuda.cuMemHostAlloc(&mut host, 4096, MAPPED)?;
        cuda.cuMemHostGetDevicePointer_v2(&mut gate, host, 0)?;
    }
    let look = || {
        let (name, mut found) = (c"counter".as_ptr().cast(), [0; 2]);
        // SAFETY: valid out pointers, and a module, a library and functions of ours.
        unsafe {
            cuda.cuModuleGetGlobal_v2(&mut found[0], &mut 0, module, name)?;
            cuda.cuLibraryGetGlobal(&mut found[1], &mut 0, library, name)?;
            cuda.cuFuncLoad(start.each)?;
        }
        Ok::<_, anyhow::Error>(found)
    };
    let first = look()?;
    for _ in 0..40 {
        start.launch_of(start.each, BLOCKS, stream)?;
        // SAFETY: a stream of ours.
        unsafe { cuda.cuStreamSynchronize(false, stream) }?;
        std::thread::sleep(Duration::from_millis(2));
    }
    // SAFETY: pinned memory of a page, which lives for ever.
    let word = unsafe { AtomicU32::from_ptr(host.cast()) };
    word.store(0, SeqCst);
    // SAFETY: a stream of ours and a mapped word.
    unsafe { cuda.cuStreamWaitValue32_v2(false, stream, gate, 1, 0) }?;
    start.launch_of(start.each, BLOCKS, stream)?;
    for _ in 0..LOOKS {
        ensure!(look()? == first, "a variable has another address");
    }
    word.store(1, SeqCst);
    let mut values = [0_u32; BLOCKS as usize];
    // SAFETY: a stream and memory of ours, of this size.
    unsafe {
        cuda.cuStreamSynchronize(false, stream)?;
        cuda.cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), start.word, 4 * values.len())?;
    }
    ensure!(values.iter().all(|value| *value == 41), "a launch is lost or doubled");
    Ok(())
}

fn copy_beside(start: &Start, launches: Handle, copies: Handle) -> Result<()> {
    let (cuda, words) = (start.cuda, BLOCKS as usize);
    let to = start.word + 4 * words as u64;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let copying = scope.spawn(|| {
            // SAFETY: the process's context, and memory and a stream of ours.
            let copied = unsafe {
                cuda.cuCtxSetCurrent(start.context).and_then(|()| {
                    (0..COPIES as u64).try_for_each(|n| {
                        let to = to + n * 4 * words as u64;
                        cuda.cuMemcpyAsync(false, to, start.word, 4 * words, copies)
                    })
                })
            };
            done.store(true, SeqCst);
            copied
        });
        while !done.load(SeqCst) {
            start.launch_of(start.each, BLOCKS, launches)?;
        }
        copying.join().map_err(|_| anyhow::anyhow!("it panicked"))?.context("the copies")
    })?;
    let mut found = vec![0_u32; words * COPIES];
    // SAFETY: memory of ours of this size.
    unsafe {
        cuda.cuCtxSynchronize()?;
        cuda.cuMemcpyDtoH_v2(found.as_mut_ptr().cast(), to, 4 * found.len())?;
    }
    for (n, copy) in found.chunks(words).enumerate() {
        let torn = copy.iter().filter(|word| **word != copy[0]).count();
        ensure!(torn == 0, "copy {n} has {torn} of {words} words of another launch");
    }
    Ok(())
}
