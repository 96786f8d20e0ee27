//! Debuggers, profilers, modes and functions of the driver under which launches go whole.
//!
//! With `CUDA_LAUNCH_BLOCKING`, and while a profiler or a checker makes the driver run one kernel at a time,
//! each part of a launch would be waited for before the next is made. Besides, a user of such a tool wants to
//! see the program's own launches.
//!
//! Tools are found by the variables by which the driver loads them, and NVIDIA's checkers and profilers
//! (compute-sanitizer, Nsight Compute, Nsight Systems) by the libraries that they preload. A program that has CUPTI
//! serialise kernels by itself is not noticed: CUPTI is initialised in the driver, and says nobody what it is asked
//! for. Its results are right all the same (step `exact` of the GPU suite, *kernels one at a time*).

use crate::{bypass, known, objects, opens, resolve, state, streams};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use tally_ipc::layout::whole_because::{
    BYPASS, DEBUGGER, FEW_QUEUES, INJECTION, LAUNCH_BLOCKING, NEW_CALL, NOTHING,
};

/// How the names of libraries begin that NVIDIA's tools have a program load.
const TOOLS: [&str; 5] = [
    "libTreeLauncher",
    "libInterceptorInjectionTarget",
    "libsanitizer-",
    "libcuda-injection",
    "libToolsInjection",
];

/// What was found when the program began to use CUDA.
static FOUND: AtomicU32 = AtomicU32::new(NOTHING);
/// Whether the process was under `cuda-gdb` when it began to use CUDA. Not asked again: a seccomp filter may since
/// forbid to open files.
static WAS_TRACED: OnceLock<bool> = OnceLock::new();
/// Where the driver says that a debugger is attached to it; 0: not looked for, 1: it does not.
static DEBUGGER_FLAG: AtomicUsize = AtomicUsize::new(0);

/// A core took this client on: look around.
pub fn look() {
    bypass::look();
    opens::look();
    // Finds the flag, for which a launch must not wait.
    is_debugger_attached();
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|v| !v.is_empty());
    // As the driver reads it.
    let blocking =
        std::env::var("CUDA_LAUNCH_BLOCKING").is_ok_and(|v| v.trim() != "0" && !v.is_empty());
    let found = if bypass::is_found() {
        BYPASS
    } else if known::is_new_found() {
        NEW_CALL
    } else if blocking {
        LAUNCH_BLOCKING
    } else if is_set("CUDA_INJECTION64_PATH")
        || is_set("CUDA_INJECTION32_PATH")
        || objects::is_any_named(&TOOLS)
    {
        INJECTION
    } else if *WAS_TRACED.get_or_init(is_traced_by_cuda_gdb) {
        DEBUGGER
    } else if !streams::are_queues_chosen() {
        // What the shim does to make forms, too, would wait behind the program's work.
        FEW_QUEUES
    } else {
        NOTHING
    };
    FOUND.store(found, Release);
    publish(found);
}

fn publish(found: u32) {
    if let Some(client) = state::client() {
        client.report.whole_because.store(found, Relaxed);
    }
}

/// Why all launches go whole; [`NOTHING`] if they need not.
pub fn whole_because() -> u32 {
    let found = FOUND.load(Acquire);
    if found != NOTHING {
        return found;
    }
    let found = if bypass::is_found() {
        BYPASS
    } else if known::is_new_found() {
        NEW_CALL
    } else if is_debugger_attached() {
        DEBUGGER
    } else {
        return NOTHING;
    };
    FOUND.store(found, Release);
    publish(found);
    found
}

/// NVIDIA's debugger sets a flag in the driver when it attaches: what `CUDBG_IPC_FLAG_NAME` of `cudadebugger.h` names.
fn is_debugger_attached() -> bool {
    let mut flag = DEBUGGER_FLAG.load(Acquire);
    if flag == 0 {
        flag = resolve::in_driver(c"cudbgIpcFlag").map_or(1, |p| p.as_ptr() as usize);
        DEBUGGER_FLAG.store(flag, Release);
    }
    // SAFETY: a variable of the driver's, which stays loaded; another process writes its first byte.
    flag > 1 && unsafe { (flag as *const u8).read_volatile() } != 0
}

/// Whether the process was started under `cuda-gdb`, which sets that flag only later.
fn is_traced_by_cuda_gdb() -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return false };
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    let Some(tracer) = tracer.map(str::trim).filter(|pid| *pid != "0") else { return false };
    std::fs::read_to_string(format!("/proc/{tracer}/comm"))
        .is_ok_and(|name| name.contains("cuda-gdb"))
}

/// Only in a forked child.
pub fn reset() {
    FOUND.store(NOTHING, Relaxed);
}
