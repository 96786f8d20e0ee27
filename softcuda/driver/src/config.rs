//! Every limit and every environment variable of the software device.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// What `cuDriverGetVersion` answers: CUDA 13.0.
pub const DRIVER_VERSION: i32 = 13_000;
/// Compute capability: the newest `.target` that is taken is `sm_90`.
pub const COMPUTE_CAPABILITY: (i32, i32) = (9, 0);
/// Name that `cuDeviceGetName` returns.
pub const DEVICE_NAME: &str = "Tally software device";
pub const WARP_THREADS: i32 = 32;
pub const BLOCK_THREADS_MAX: u32 = 1024;
/// Largest block, per dimension.
pub const BLOCK_DIM_MAX: [u32; 3] = [1024, 1024, 64];
/// Largest grid, per dimension.
pub const GRID_DIM_MAX: [u32; 3] = [0x7fff_ffff, 0xffff, 0xffff];
/// Shared memory of a block without opting in.
pub const SHARED_BYTES_DEFAULT: u32 = 48 << 10;
/// Shared memory of a block that opted in.
pub const SHARED_BYTES_OPTIN: u32 = 227 << 10;
/// Shared memory of an SM.
pub const SHARED_BYTES_SM: u32 = 228 << 10;
pub const PARAM_BYTES_MAX: u32 = 32_764;
/// Granularity of device allocations.
pub const ALLOC_ALIGN_BYTES: u64 = 512;
/// How much of the arena is made accessible at once.
pub const COMMIT_CHUNK_BYTES: u64 = 2 << 20;
/// Freed pages of allocations at least this large go back to the system.
pub const DISCARD_BYTES_MIN: u64 = 1 << 20;
/// Address space reserved for device memory, at least.
pub const ARENA_BYTES_MIN: u64 = 16 << 30;
/// Copies from pageable host memory up to this size are staged at the call;
/// larger ones make the call wait, as the driver does.
pub const STAGING_BYTES_MAX: usize = 1 << 20;
/// Largest PTX image or file that is read.
pub const IMAGE_BYTES_MAX: u64 = 1 << 30;
/// Stack of the device's own threads.
pub const THREAD_STACK_BYTES: usize = 1 << 20;
/// Stream priorities, least to greatest (lower is more urgent).
pub const PRIORITY_RANGE: (i32, i32) = (0, -5);
/// First and longest sleep of a stream that polls a value, in microseconds.
pub const VALUE_POLL_US: (u64, u64) = (5, 100);

/// Hardware queues of a context, unless the program says otherwise, and at most.
pub const CONNECTIONS: (u64, u64) = (8, 32);
/// Entries that a hardware queue holds.
pub const QUEUE_DEPTH: u64 = 1020;

/// Hardware queues: `CUDA_DEVICE_MAX_CONNECTIONS`, as it was when first asked.
pub fn connections() -> usize {
    static CONNECTIONS_ASKED: OnceLock<usize> = OnceLock::new();
    *CONNECTIONS_ASKED.get_or_init(|| {
        let asked = number("CUDA_DEVICE_MAX_CONNECTIONS").unwrap_or(CONNECTIONS.0);
        asked.clamp(1, CONNECTIONS.1) as usize
    })
}

/// Whether launches of kernels return when these have ended: `CUDA_LAUNCH_BLOCKING`, as it was when
/// first asked.
pub fn launches_block() -> bool {
    static BLOCK: OnceLock<bool> = OnceLock::new();
    *BLOCK.get_or_init(|| number("CUDA_LAUNCH_BLOCKING").is_some_and(|n| n != 0))
}

/// Entries of a hardware queue: `TALLY_SOFTCUDA_QUEUE_DEPTH`, as it was when first asked.
pub fn queue_depth() -> u64 {
    static DEPTH: OnceLock<u64> = OnceLock::new();
    *DEPTH.get_or_init(|| number("TALLY_SOFTCUDA_QUEUE_DEPTH").unwrap_or(QUEUE_DEPTH).max(1))
}

/// How long `cuInit` takes beyond what it must: `TALLY_SOFTCUDA_INIT_MS`. A GPU's takes 100 ms and more.
pub fn init_time() -> std::time::Duration {
    std::time::Duration::from_millis(number("TALLY_SOFTCUDA_INIT_MS").unwrap_or(0).min(60_000))
}

/// How long loading code takes beyond what it must: `TALLY_SOFTCUDA_LOAD_MS`.
pub fn load_time() -> std::time::Duration {
    std::time::Duration::from_millis(number("TALLY_SOFTCUDA_LOAD_MS").unwrap_or(0).min(60_000))
}

/// Launches that must begin while PTX with this kernel is compiled: `TALLY_SOFTCUDA_COMPILE_LAUNCHES=KERNEL:COUNT`, as
/// it was when first asked.
pub fn launches_to_compile(kernels: &[String]) -> u64 {
    static LAUNCHES: OnceLock<Option<(String, usize)>> = OnceLock::new();
    let wanted = LAUNCHES.get_or_init(|| kernel_and_bytes("TALLY_SOFTCUDA_COMPILE_LAUNCHES"));
    wanted.as_ref().filter(|(name, _)| kernels.contains(name)).map_or(0, |(_, count)| *count as u64)
}

/// SMs: `TALLY_SOFTCUDA_SMS`, `None` if unset or unusable.
pub fn sms() -> Option<u32> {
    number("TALLY_SOFTCUDA_SMS").map(|n| n.clamp(1, crate::sm::SMS_MAX as u64) as u32)
}

/// Device memory in bytes: `TALLY_SOFTCUDA_MEMORY_MIB`, `None` if unset.
pub fn memory_bytes() -> Option<u64> {
    number("TALLY_SOFTCUDA_MEMORY_MIB").map(|mib| mib.clamp(16, 1 << 20) << 20)
}

/// Device memory if nobody says otherwise.
pub const MEMORY_BYTES_DEFAULT: u64 = 1 << 30;

/// Address space to reserve: `TALLY_SOFTCUDA_ARENA_MIB`, never less than four
/// times the device memory, so that fragments do not fill it.
pub fn arena_bytes(memory_bytes: u64) -> u64 {
    let asked = number("TALLY_SOFTCUDA_ARENA_MIB").map_or(ARENA_BYTES_MIN, |mib| mib << 20);
    asked.clamp(64 << 20, 1 << 46).max(memory_bytes.saturating_mul(4))
}

/// The file that the processes on one device share: `TALLY_SOFTCUDA_DEVICE`,
/// by default one per user and version of its layout.
pub fn device_path() -> PathBuf {
    if let Some(path) = std::env::var_os("TALLY_SOFTCUDA_DEVICE").filter(|p| !p.is_empty()) {
        return PathBuf::from(path);
    }
    // SAFETY: getuid has no preconditions and cannot fail.
    let uid = unsafe { libc::getuid() };
    let version = crate::sm::LAYOUT_VERSION;
    PathBuf::from(format!("/dev/shm/tally-softcuda-{uid}-v{version}"))
}

/// A faulty device, for tests of who must notice: launches of this kernel with more than
/// so many bytes of parameters lose their last block. `TALLY_SOFTCUDA_FAULT=KERNEL:BYTES`.
pub(crate) fn fault() -> Option<(&'static str, usize)> {
    static FAULT: OnceLock<Option<(String, usize)>> = OnceLock::new();
    let read = || kernel_and_bytes("TALLY_SOFTCUDA_FAULT");
    FAULT.get_or_init(read).as_ref().map(|(kernel, bytes)| (kernel.as_str(), *bytes))
}

/// A kernel that needs more of an SM when it is given another form: whether it is of this name and has more than so
/// many bytes of parameters, so that, asked, the device says that no block fits.
/// `TALLY_SOFTCUDA_FAULT_OCCUPANCY=KERNEL:BYTES`.
pub(crate) fn is_crowded(kernel: &str, parameter_bytes: usize) -> bool {
    static FAULT: OnceLock<Option<(String, usize)>> = OnceLock::new();
    let fault = FAULT.get_or_init(|| kernel_and_bytes("TALLY_SOFTCUDA_FAULT_OCCUPANCY"));
    fault.as_ref().is_some_and(|(name, bytes)| name == kernel && parameter_bytes > *bytes)
}

fn kernel_and_bytes(variable: &str) -> Option<(String, usize)> {
    let text = std::env::var(variable).ok()?;
    let (kernel, bytes) = text.rsplit_once(':')?;
    Some((kernel.to_owned(), bytes.parse().ok()?))
}

/// Another faulty device: whether this launch of a graph is the one that fails, of the process's. The number of
/// that one, from 1: `TALLY_SOFTCUDA_FAULT_GRAPH=N`.
pub(crate) fn is_faulty_graph_launch() -> bool {
    static LEFT: OnceLock<Option<AtomicU64>> = OnceLock::new();
    let left = LEFT.get_or_init(|| number("TALLY_SOFTCUDA_FAULT_GRAPH").map(AtomicU64::new));
    left.as_ref().is_some_and(|left| left.fetch_sub(1, Ordering::Relaxed) == 1)
}

/// What a faulty device does with one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaunchFault {
    Refused,
    /// The context is in error from now on.
    Fatal,
}

/// A faulty device that refuses one launch: the N-th, from 1, of this kernel with more than so many bytes of
/// parameters. `TALLY_SOFTCUDA_FAULT_LAUNCH=KERNEL:BYTES:N`, or with `:fatal` behind it.
pub(crate) fn launch_fault(kernel: &str, parameter_bytes: usize) -> Option<LaunchFault> {
    static FAULT: OnceLock<Option<(String, usize, AtomicU64, LaunchFault)>> = OnceLock::new();
    let read = || {
        let text = std::env::var("TALLY_SOFTCUDA_FAULT_LAUNCH").ok()?;
        let (text, fault) = match text.strip_suffix(":fatal") {
            Some(text) => (text, LaunchFault::Fatal),
            None => (text.as_str(), LaunchFault::Refused),
        };
        let (rest, number) = text.rsplit_once(':')?;
        let (kernel, bytes) = rest.rsplit_once(':')?;
        let left = AtomicU64::new(number.parse().ok()?);
        Some((kernel.to_owned(), bytes.parse().ok()?, left, fault))
    };
    let (name, bytes, left, fault) = FAULT.get_or_init(read).as_ref()?;
    let is_its = name == kernel && parameter_bytes > *bytes;
    (is_its && left.fetch_sub(1, Ordering::Relaxed) == 1).then_some(*fault)
}

/// One more, for tests of who keeps a launch's attributes: whether a launch of a kernel may have these hints. All
/// of the kernel `TALLY_SOFTCUDA_FAULT_HINTS` must have the first one's.
pub(crate) fn are_faultless(kernel: &str, hints: &BTreeMap<u32, [u32; 16]>) -> bool {
    static KERNEL: OnceLock<Option<String>> = OnceLock::new();
    static FIRST: OnceLock<BTreeMap<u32, [u32; 16]>> = OnceLock::new();
    let named = KERNEL.get_or_init(|| std::env::var("TALLY_SOFTCUDA_FAULT_HINTS").ok());
    named.as_deref() != Some(kernel) || FIRST.get_or_init(|| hints.clone()) == hints
}

/// Whether a handle that is gone ends the process, as it may on a GPU: `TALLY_SOFTCUDA_STRICT=1`.
pub(crate) fn is_strict() -> bool {
    static ON: OnceLock<bool> = OnceLock::new();
    *ON.get_or_init(|| std::env::var_os("TALLY_SOFTCUDA_STRICT").is_some_and(|v| v == "1"))
}

/// Writes to stderr if `TALLY_SOFTCUDA_LOG=1`; otherwise the device is silent.
pub(crate) fn log(message: std::fmt::Arguments<'_>) {
    static ON: OnceLock<bool> = OnceLock::new();
    if *ON.get_or_init(|| std::env::var_os("TALLY_SOFTCUDA_LOG").is_some_and(|v| v == "1")) {
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "softcuda[{}]: {message}", std::process::id());
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.trim().parse().ok()
}
