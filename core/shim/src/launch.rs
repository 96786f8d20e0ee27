//! The launch path: bodies of the launch entry points.
//!
//! An ungated launch costs a dozen loads and comparisons and three uncontended atomic additions. It takes no lock,
//! allocates nothing, never waits, and makes no system call except to wake the core if that asked to hear of
//! activity. The first launch behind a wait does more, and so do those of a [profiled unit](crate::unit_profile).
//! Everything else goes to `slow`. Every path calls the real function exactly once, unless the launch is
//! made in another form.

use crate::activity::{self, Flag};
use crate::unit_profile::{self, Measured};
use crate::{attach, capture, completion, exec_nodes, gated, link, names, quiesce, records};
use crate::{slot_life, slots, state, units};
use std::ffi::{c_int, c_uint};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use tally_ipc::ClientRegion;
use tally_ipc::layout::{Counters, KERNEL_UNKNOWN, submission_flags};
use tally_preempt::cuda::{CuResult, LaunchConfig, Ptr, SUCCESS};
use tally_preempt::graphs::{self, order};
use tally_preempt::launch::{KernelArguments, Shape, Target};

/// One call of a launch function: its arguments.
///
/// Passed by value and put into memory on the slow path only, which is why this
/// is a trait of plain structures and not a pair of closures.
pub trait Launch: Copy {
    /// It launches a CUDA graph.
    const IS_GRAPH: bool = false;
    /// Counter of the launch's entry point.
    fn counter(counters: &Counters) -> &AtomicU64;
    /// What the core is told of the launch.
    fn shape(&self) -> Shape;
    /// What another form of the launch is made from.
    fn target(&self) -> Target {
        Target::Other
    }
    /// Does it: called exactly once, unless the launch is made in another form.
    fn real(&self) -> CuResult;
}

/// A call on the slow path.
pub struct Call<'a> {
    /// Counter of the launch's entry point.
    pub counter: fn(&Counters) -> &AtomicU64,
    /// The stream as passed.
    pub stream: Ptr,
    /// Whether default streams are the thread's own.
    pub per_thread: bool,
    /// It launches a CUDA graph.
    pub is_graph: bool,
    /// What the core is told of the launch.
    pub shape: &'a dyn Fn() -> Shape,
    /// What another form of the launch is made from.
    pub target: &'a dyn Fn() -> Target,
    pub real: &'a dyn Fn() -> CuResult,
}

#[inline(always)]
fn around<L: Launch>(stream: Ptr, per_thread: bool, launch: L) -> CuResult {
    if state::is_ungated()
        && capture::allows_fast_path()
        && let Some(slot) = slots::find_fast(stream, per_thread)
        && let Some(client) = state::client()
    {
        let word = &slots::SLOTS[slot & 63].word;
        let number = word.begin();
        // Once more, behind the count: whoever closed the fast path meanwhile looks at that.
        if capture::allows_fast_path() {
            let counter = L::counter(&client.counters);
            if L::IS_GRAPH || !word.is_noted() {
                return noted(client, slot, number, stream, per_thread, launch);
            }
            counter.fetch_add(1, Relaxed);
            let result = launch.real();
            word.end();
            if result != SUCCESS {
                failed(client);
            }
            return result;
        }
        word.end();
    }
    slow(stream, per_thread, launch)
}

/// A launch of the fast path that may be the first of a unit of work, make the stream busy, or be measured.
#[cold]
#[inline(never)]
fn noted<L: Launch>(
    client: &ClientRegion,
    slot: usize,
    number: u32,
    stream: Ptr,
    per_thread: bool,
    launch: L,
) -> CuResult {
    let measured = Measured {
        stream: slots::explicit(stream, per_thread),
        shape: &|| launch.shape(),
        target: &|| launch.target(),
    };
    let counter = L::counter(&client.counters);
    issue(client, slot, number, L::IS_GRAPH, counter, Some(&measured), || launch.real())
}

/// Note activity, count the launch and call the driver. The caller has counted the launch in its slot's word.
fn issue(
    client: &ClientRegion,
    slot: usize,
    number: u32,
    is_graph: bool,
    counter: &AtomicU64,
    measured: Option<&Measured<'_>>,
    real: impl FnOnce() -> CuResult,
) -> CuResult {
    let word = &slots::SLOTS[slot & 63].word;
    let is_noted = !is_graph && word.is_noted();
    let is_measured = !is_noted && note(client, slot, number, is_graph, measured.map(|m| m.stream));
    counter.fetch_add(1, Relaxed);
    let result = real();
    if is_measured && let Some(measured) = measured {
        unit_profile::launched(client, slot, number, result, measured);
    }
    word.end();
    if result != SUCCESS {
        failed(client);
    }
    result
}

/// The launch may be the first of a unit of work, or make the stream busy. Whether it is measured; without a `stream`
/// it cannot be.
fn note(
    client: &ClientRegion,
    slot: usize,
    number: u32,
    is_graph: bool,
    stream: Option<usize>,
) -> bool {
    let word = &slots::SLOTS[slot & 63].word;
    let flag = word.flag();
    let mut is_measured = false;
    if !state::is_best_effort() {
        if is_graph || flag == Flag::Lowered {
            units::note(client, slot, number, is_graph);
        }
        match stream {
            Some(stream) => {
                let is_first = flag == Flag::Lowered;
                is_measured = unit_profile::measures(client, slot, number, is_first, stream);
            }
            None => unit_profile::lost(slot),
        }
    }
    match flag {
        Flag::Lowered => {
            let to = if is_measured { Flag::Measured } else { Flag::Noted };
            link::report_change(activity::mark(&client.activity, word, slots::bit(slot), to));
        }
        Flag::Measured if !is_measured => word.end_measuring(),
        Flag::Measured | Flag::Noted => {}
    }
    is_measured
}

#[cold]
fn failed(client: &ClientRegion) {
    client.counters.failed.fetch_add(1, Relaxed);
}

/// Count a launch in its slot's word, and call the driver: from [`gated`].
pub fn issue_counted(client: &ClientRegion, slot: usize, call: &Call<'_>) -> CuResult {
    counted(client, slot, call, None, |_| ())
}

/// The same for a launch that nobody decides.
pub fn issue_ungated(
    client: &ClientRegion,
    slot: usize,
    call: &Call<'_>,
    may_be_measured: bool,
) -> CuResult {
    let stream = slots::explicit(call.stream, call.per_thread);
    let measured = Measured { stream, shape: call.shape, target: call.target };
    let measured = may_be_measured.then_some(&measured);
    let since = records::enqueued();
    counted(client, slot, call, measured, |n| completion::track_ungated(slot, stream, n, since))
}

/// `behind` comes while the launch still counts as being issued.
fn counted(
    client: &ClientRegion,
    slot: usize,
    call: &Call<'_>,
    measured: Option<&Measured<'_>>,
    behind: impl FnOnce(u32),
) -> CuResult {
    let counter = (call.counter)(&client.counters);
    let number = slots::SLOTS[slot & 63].word.begin();
    let real = || {
        let result = (call.real)();
        behind(number);
        result
    };
    state::inside(|| issue(client, slot, number, call.is_graph, counter, measured, real))
}

#[cold]
#[inline(never)]
fn slow<L: Launch>(stream: Ptr, per_thread: bool, launch: L) -> CuResult {
    if state::mode() == state::MODE_OFF {
        return launch.real();
    }
    let call = Call {
        counter: L::counter,
        stream,
        per_thread,
        is_graph: L::IS_GRAPH,
        shape: &|| launch.shape(),
        target: &|| launch.target(),
        real: &|| launch.real(),
    };
    govern(&call)
}

fn govern(call: &Call<'_>) -> CuResult {
    if state::mode() == state::MODE_UNKNOWN {
        attach::late();
    }
    let client = match state::client() {
        Some(client) if !state::is_inside() => client,
        Some(_) => {
            // A signal handler's, perhaps within a launch on some of the SMs.
            quiesce::join_now();
            return (call.real)();
        }
        None => return (call.real)(),
    };
    if capture::is_active() && capture::is_capturing(slots::explicit(call.stream, call.per_thread))
    {
        // Recorded, not run: the launch of its graph is the launch.
        client.counters.captured.fetch_add(1, Relaxed);
        return state::inside(call.real);
    }
    let key = slots::key(call.stream, call.per_thread);
    let slot = slots::find(key).unwrap_or_else(|| slot_life::give(key));
    slots::set_hint(key, slot);
    if slot == slots::OVERFLOW {
        client.counters.stream_overflow.fetch_add(1, Relaxed);
    }
    if state::is_ungated() {
        let issue = || issue_ungated(client, slot, call, true);
        quiesce::while_open(|| slot_life::mark_behind(slot, issue))
    } else {
        gated::launch(client, slot, call)
    }
}

/// A [`Launch`] of so many arguments.
macro_rules! launch {
    ($name:ident { $($field:ident: $ty:ty),* $(,)? } $counter:ident, |$me:ident| $shape:expr
     $(, target $target:expr)?) => {
        #[derive(Clone, Copy)]
        struct $name {
            real: unsafe extern "C" fn($($ty),*) -> CuResult,
            $($field: $ty,)*
        }

        impl Launch for $name {
            const IS_GRAPH: bool = matches!(stringify!($counter).as_bytes(), b"graph");
            #[inline(always)]
            fn counter(counters: &Counters) -> &AtomicU64 {
                &counters.by_entry_point.$counter
            }
            fn shape(&self) -> Shape {
                let $me = self;
                $shape
            }
            $(
                fn target(&self) -> Target {
                    let target: fn(&Self) -> Target = $target;
                    target(self)
                }
            )?
            #[inline(always)]
            fn real(&self) -> CuResult {
                // SAFETY: the arguments of the program's own call, made as it made it.
                unsafe { (self.real)($(self.$field),*) }
            }
        }
    };
}

launch! { KernelLaunch {
    f: Ptr, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
    shared_bytes: c_uint, stream: Ptr, params: *mut Ptr, extra: *mut Ptr,
} kernel, |k| Shape {
    kernel: names::index(k.f),
    flags: 0,
    grid: [k.gx, k.gy, k.gz],
    block: [k.bx, k.by, k.bz],
    shared_bytes: k.shared_bytes,
}, target |k| Target::Kernel(KernelArguments {
    function: k.f,
    grid: [k.gx, k.gy, k.gz],
    block: [k.bx, k.by, k.bz],
    shared_bytes: k.shared_bytes,
    attributes: std::ptr::null(),
    attribute_count: 0,
    params: k.params,
    extra: k.extra,
}) }

launch! { KernelExLaunch {
    config: *const LaunchConfig, f: Ptr, params: *mut Ptr, extra: *mut Ptr,
} kernel_ex, |k| {
    // SAFETY: not null (see `kernel_ex`) and valid during the program's call.
    let config = unsafe { &*k.config };
    Shape {
        kernel: names::index(k.f),
        // SAFETY: the caller's array, valid during its call.
        flags: unsafe { config.flags() },
        grid: config.grid,
        block: config.block,
        shared_bytes: config.shared_bytes,
    }
}, target |k| {
    // SAFETY: as above.
    let config = unsafe { &*k.config };
    if config.attributes.is_null() && config.attribute_count != 0 {
        // An error, for the driver to tell.
        return Target::Other;
    }
    Target::Kernel(KernelArguments {
        function: k.f,
        grid: config.grid,
        block: config.block,
        shared_bytes: config.shared_bytes,
        attributes: config.attributes,
        attribute_count: config.attribute_count,
        params: k.params,
        extra: k.extra,
    })
} }

launch! { CooperativeLaunch {
    f: Ptr, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
    shared_bytes: c_uint, stream: Ptr, params: *mut Ptr,
} cooperative, |k| Shape {
    kernel: names::index(k.f),
    flags: submission_flags::COOPERATIVE,
    grid: [k.gx, k.gy, k.gz],
    block: [k.bx, k.by, k.bz],
    shared_bytes: k.shared_bytes,
} }

launch! { LegacyLaunch { f: Ptr } kernel, |k| legacy_shape(k.f, 1, 1) }

launch! { LegacyGridLaunch { f: Ptr, width: c_int, height: c_int }
kernel, |k| legacy_shape(k.f, k.width, k.height) }

launch! { LegacyGridAsyncLaunch { f: Ptr, width: c_int, height: c_int, stream: Ptr }
kernel, |k| legacy_shape(k.f, k.width, k.height) }

launch! { GraphLaunch { exec: Ptr, stream: Ptr } graph, |k| Shape {
    kernel: KERNEL_UNKNOWN,
    flags: submission_flags::GRAPH,
    grid: [exec_nodes::kernel_nodes(k.exec), 0, 0],
    block: [0; 3],
    shared_bytes: 0,
}, target |k| Target::Graph(k.exec) }

type Kernel = unsafe extern "C" fn(
    Ptr,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    Ptr,
    *mut Ptr,
    *mut Ptr,
) -> CuResult;

/// `cuLaunchKernel`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
pub unsafe fn kernel(
    real: Kernel,
    per_thread: bool,
    f: Ptr,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    shared_bytes: c_uint,
    stream: Ptr,
    params: *mut Ptr,
    extra: *mut Ptr,
) -> CuResult {
    let launch =
        KernelLaunch { real, f, gx, gy, gz, bx, by, bz, shared_bytes, stream, params, extra };
    around(stream, per_thread, launch)
}

/// `cuLaunchKernelEx`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
#[inline(always)]
pub unsafe fn kernel_ex(
    real: unsafe extern "C" fn(*const LaunchConfig, Ptr, *mut Ptr, *mut Ptr) -> CuResult,
    per_thread: bool,
    config: *const LaunchConfig,
    f: Ptr,
    params: *mut Ptr,
    extra: *mut Ptr,
) -> CuResult {
    // SAFETY: null, or the caller's configuration.
    let Some(c) = (unsafe { config.as_ref() }) else {
        // SAFETY: the caller's arguments: an error is the driver's to return.
        return unsafe { real(config, f, params, extra) };
    };
    around(c.stream, per_thread, KernelExLaunch { real, config, f, params, extra })
}

/// `cuLaunchCooperativeKernel`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
pub unsafe fn cooperative(
    real: unsafe extern "C" fn(
        Ptr,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        Ptr,
        *mut Ptr,
    ) -> CuResult,
    per_thread: bool,
    f: Ptr,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    shared_bytes: c_uint,
    stream: Ptr,
    params: *mut Ptr,
) -> CuResult {
    let launch =
        CooperativeLaunch { real, f, gx, gy, gz, bx, by, bz, shared_bytes, stream, params };
    around(stream, per_thread, launch)
}

/// `cuLaunchCooperativeKernelMultiDevice`: several streams at once, gone from
/// CUDA 13. Counted, passed through, not governed.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn cooperative_multi(
    real: unsafe extern "C" fn(Ptr, c_uint, c_uint) -> CuResult,
    _per_thread: bool,
    list: Ptr,
    count: c_uint,
    flags: c_uint,
) -> CuResult {
    state::count(|c| &c.by_entry_point.cooperative);
    // SAFETY: the caller's arguments.
    quiesce::while_open(|| unsafe { real(list, count, flags) })
}

fn legacy_shape(f: Ptr, width: c_int, height: c_int) -> Shape {
    Shape {
        kernel: names::index(f),
        flags: 0,
        grid: [width.max(0) as u32, height.max(0) as u32, 1],
        // Set by calls of their own that nobody makes any more.
        block: [0; 3],
        shared_bytes: 0,
    }
}

/// `cuLaunch`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn legacy(
    real: unsafe extern "C" fn(Ptr) -> CuResult,
    per_thread: bool,
    f: Ptr,
) -> CuResult {
    around(std::ptr::null_mut(), per_thread, LegacyLaunch { real, f })
}

/// `cuLaunchGrid`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn legacy_grid(
    real: unsafe extern "C" fn(Ptr, c_int, c_int) -> CuResult,
    per_thread: bool,
    f: Ptr,
    width: c_int,
    height: c_int,
) -> CuResult {
    around(std::ptr::null_mut(), per_thread, LegacyGridLaunch { real, f, width, height })
}

/// `cuLaunchGridAsync`.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
pub unsafe fn legacy_grid_async(
    real: unsafe extern "C" fn(Ptr, c_int, c_int, Ptr) -> CuResult,
    per_thread: bool,
    f: Ptr,
    width: c_int,
    height: c_int,
    stream: Ptr,
) -> CuResult {
    around(stream, per_thread, LegacyGridAsyncLaunch { real, f, width, height, stream })
}

/// `cuGraphLaunch`: one launch, whatever is inside.
///
/// # Safety
/// The caller keeps to the contract of the CUDA driver's function.
#[inline(always)]
pub unsafe fn graph(
    real: unsafe extern "C" fn(Ptr, Ptr) -> CuResult,
    per_thread: bool,
    exec: Ptr,
    stream: Ptr,
) -> CuResult {
    if let Some(client) = state::client()
        && !(capture::is_active() && capture::is_capturing(slots::explicit(stream, per_thread)))
    {
        client.counters.graph_kernels.fetch_add(exec_nodes::kernel_nodes(exec).into(), Relaxed);
    }
    if graphs::has_copies() {
        return around(stream, per_thread, CopiedGraphLaunch { real, exec, stream, per_thread });
    }
    around(stream, per_thread, GraphLaunch { real, exec, stream })
}

/// A graph launch of a process that keeps copies of graphs, to launch them in parts: whole
/// launches and launches in parts of one graph are kept in order.
#[derive(Clone, Copy)]
struct CopiedGraphLaunch {
    real: unsafe extern "C" fn(Ptr, Ptr) -> CuResult,
    exec: Ptr,
    stream: Ptr,
    per_thread: bool,
}

impl Launch for CopiedGraphLaunch {
    const IS_GRAPH: bool = true;

    fn counter(counters: &Counters) -> &AtomicU64 {
        &counters.by_entry_point.graph
    }

    fn shape(&self) -> Shape {
        GraphLaunch { real: self.real, exec: self.exec, stream: self.stream }.shape()
    }

    fn target(&self) -> Target {
        Target::Graph(self.exec)
    }

    fn real(&self) -> CuResult {
        let stream = slots::explicit(self.stream, self.per_thread);
        let capturing = capture::is_active() && capture::is_capturing(stream);
        let launching = (!capturing).then(|| order::begin(self.exec, stream, false));
        // SAFETY: the arguments of the program's own call, made as it made it.
        let result = unsafe { (self.real)(self.exec, self.stream) };
        if let Some(launching) = launching.filter(|_| result == SUCCESS) {
            launching.end(false);
        }
        result
    }
}
