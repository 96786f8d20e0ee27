//! What lies where in the two shared regions. All plain old data and atomics,
//! valid when zero-filled, the same for every process of one machine. Flags are plain constants, not `bitflags`: the
//! other side may write any bits, and they are stored in atomics.

use crate::marks::Marks;
use crate::text::printable;
use std::mem::offset_of;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

// Streams are also bits of [`Activity::busy_streams`]. The last slot's launches count as done in the order in which
// they were made. Kernels with longer names are told apart by a hash. The ring's slots are a power of two.
pub use tally_contract::limits::{KERNEL_NAME_BYTES, KERNEL_SLOTS, RING_SLOTS, STREAM_SLOTS};

/// In [`Submission::kernel`]: not in the table (it is full, or a graph).
pub const KERNEL_UNKNOWN: u32 = u32::MAX;

/// First word of [`ClientRegion`].
pub const CLIENT_MAGIC: u64 = u64::from_le_bytes(*b"TALLYCLI");
/// First word of [`CoreRegion`].
pub const CORE_MAGIC: u64 = u64::from_le_bytes(*b"TALLYCOR");

/// What a launch is and how the shim can run it: bits of [`Submission::flags`].
pub mod submission_flags {
    /// A CUDA graph launch; `grid[0]` is its number of kernel nodes (0 = unknown).
    pub const GRAPH: u32 = 1 << 0;
    /// Launched with `cuLaunchCooperativeKernel` or that attribute: all blocks must be resident at once.
    pub const COOPERATIVE: u32 = 1 << 1;
    /// Launched with thread-block clusters.
    pub const CLUSTERED: u32 = 1 << 2;
    /// The shim started it under a lease, without waiting for a decision.
    pub const LEASED: u32 = 1 << 3;
    /// The shim can run it as slices.
    pub const CAN_SLICE: u32 = 1 << 4;
    /// The shim can run it so that it yields at block boundaries.
    pub const CAN_PREEMPT: u32 = 1 << 5;
    /// The shim can run it on some of the SMs.
    pub const CAN_LIMIT: u32 = 1 << 6;
    /// A transformed form may come about if it is asked for.
    pub const CAN_PREPARE: u32 = 1 << 7;
    /// Every bit that this version defines.
    pub const ALL: u32 = (1 << 8) - 1;
}

/// Values of [`KernelEntry::transform`]: a state in the low byte, what it needs in the next.
pub mod transform_state {
    pub const UNKNOWN: u8 = 0;
    /// Its image is at hand: it can be transformed.
    pub const PREPARABLE: u8 = 1;
    /// Its transformed form is being made.
    pub const PREPARING: u8 = 2;
    /// It has transformed forms: [`SLICEABLE`], [`PREEMPTIBLE`].
    pub const READY: u8 = 3;
    /// It is only run whole: the code of the reason (`tally_rewriter::TransformRefusal`).
    pub const WHOLE_ONLY: u8 = 4;
    /// Detail of [`READY`]: as slices.
    pub const SLICEABLE: u8 = 1;
    /// Detail of [`READY`]: yielding.
    pub const PREEMPTIBLE: u8 = 2;

    /// The inverse of [`unpack`].
    pub fn pack(state: u8, detail: u8) -> u32 {
        u32::from(state) | u32::from(detail) << 8
    }

    /// State and detail of a word.
    pub fn unpack(word: u32) -> (u8, u8) {
        (word as u8, (word >> 8) as u8)
    }
}

/// One launch, written by the client, read by the core.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Submission {
    /// `ticket + 1` once the other fields are valid; see [`crate::ring`].
    pub sequence: AtomicU64,
    /// Index into [`ClientRegion::kernels`], or [`KERNEL_UNKNOWN`].
    pub kernel: AtomicU32,
    pub flags: AtomicU32,
    /// Grid dimensions in blocks.
    pub grid: [AtomicU32; 3],
    /// Block dimensions in threads.
    pub block: [AtomicU32; 3],
    /// Dynamic shared memory, bytes.
    pub shared_bytes: AtomicU32,
    /// Stream slot, below [`STREAM_SLOTS`].
    pub stream: AtomicU32,
    /// What its slot's [`Completion::done`] reaches (wrapping compare) when it is done.
    pub completion: AtomicU32,
    /// [`Demand`](tally_contract::kernel::Demand) of the kernel: blocks an SM in the low half, registers in the high
    /// one.
    pub demand: AtomicU32,
    /// Of a leased launch: on at most so many SMs; 0: on all.
    pub limited_sms: AtomicU32,
}

/// A decision, written by the core, read by the client. Used for forms other
/// than "whole", which [`CoreRegion::granted`] carries alone.
#[repr(C, align(16))]
#[derive(Debug)]
pub struct DecisionSlot {
    /// `(ticket + 1) << 8 | kind`; kinds in [`decision_kind`].
    pub sequence_and_kind: AtomicU64,
    /// Blocks of a slice, or SMs of a limited launch; of a preemptible launch how long it is
    /// expected to take, us (0: unknown).
    pub argument: AtomicU64,
}

/// How a launch runs: the kind in [`DecisionSlot::sequence_and_kind`].
pub mod decision_kind {
    /// Whole, as the program asked for it.
    pub const WHOLE: u8 = 1;
    /// Slices of `argument` blocks.
    pub const SLICE: u8 = 2;
    /// Yields at block boundaries; `argument` is its expected time, us.
    pub const PREEMPTIBLE: u8 = 3;
    /// Limited to `argument` of the SMs.
    pub const SM_LIMITED: u8 = 4;
}

/// How far a stream slot is; alone on its cache line, written by the client.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Completion {
    /// Launches of the slot up to this number (wrapping) are done.
    pub done: AtomicU32,
    _pad: u32,
    /// The last launch of which the client knows how long it took: its number in the high half, the
    /// time in ns, at least 1 and saturating, in the low half; 0: none. Written before `done`.
    pub measured: AtomicU64,
}

impl Completion {
    /// The value of `measured` for a launch.
    pub fn pack_measured(number: u32, ns: u64) -> u64 {
        u64::from(number) << 32 | ns.clamp(1, u32::MAX.into())
    }

    /// Number and time of the last measured launch.
    pub fn measured(&self) -> Option<(u32, u64)> {
        let word = self.measured.load(Relaxed);
        (word != 0).then_some(((word >> 32) as u32, word & u64::from(u32::MAX)))
    }
}

/// Two words on a cache line of their own, one for each side of the bus.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct SharedWord {
    /// Written by the GPU.
    pub gpu: AtomicU32,
    /// Written by the client's CPU.
    pub host: AtomicU32,
}

/// What a client is doing: one cache line, which a spinning core reads all the time, and which is
/// written only when a stream of the client becomes busy or idle: a launch that wrote to it would wait for it to
/// come back from the core's CPU. Tickets and waiters have lines of their own for the same reason:
/// with every gated launch the client writes the former and the core reads the latter.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Activity {
    /// Bit `i`: stream slot `i` has work that no synchronising call has
    /// returned from yet. The client is busy while any bit is set.
    pub busy_streams: AtomicU64,
    /// When `busy_streams` last became 0, monotonic ns (0: never).
    pub idle_since_ns: AtomicU64,
    /// When `busy_streams` last became non-zero, monotonic ns.
    pub busy_since_ns: AtomicU64,
    /// Number of times `busy_streams` became non-zero.
    pub busy_periods: AtomicU64,
    /// Sum of the finished busy periods, ns.
    pub busy_total_ns: AtomicU64,
    _pad0: [u64; 3],
    /// Submissions so far: the next ticket. The core reads it now and then only.
    pub next_ticket: AtomicU64,
    _pad1: [u64; 7],
    /// Threads in a futex wait for a decision. The core reads it with every answer.
    pub waiters: AtomicU32,
    _pad2: [u32; 15],
}

/// One list of the launch counters makes the shared words, the numbers read from them, and their sum.
macro_rules! launch_counters {
    ($($(#[$about:meta])* $name:ident),* $(,)?) => {
        /// Launches by entry point, as the client counts them. A per-thread variant counts with its function.
        #[repr(C)]
        #[derive(Debug)]
        pub struct LaunchCounters {
            $($(#[$about])* pub $name: AtomicU64,)*
        }

        /// Launches by entry point, as read from [`LaunchCounters`].
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct LaunchCounts {
            $($(#[$about])* pub $name: u64,)*
        }

        impl LaunchCounters {
            /// Every counter, in the order of the shared memory.
            pub fn all(&self) -> [&AtomicU64; [$(stringify!($name)),*].len()] {
                [$(&self.$name),*]
            }

            pub fn read(&self) -> LaunchCounts {
                LaunchCounts { $($name: self.$name.load(Relaxed)),* }
            }
        }
    };
}

launch_counters! {
    /// `cuLaunchKernel`, and the older `cuLaunch`, `cuLaunchGrid` and `cuLaunchGridAsync`.
    kernel,
    /// `cuLaunchKernelEx`, and its per-thread variant.
    kernel_ex,
    /// `cuLaunchCooperativeKernel`, and the one over several devices, which is not governed.
    cooperative,
    /// `cuGraphLaunch`, one for a graph.
    graph,
}

/// Counts that `tallyctl status` shows; written by the client, some with every launch: the core
/// reads them now and then only.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Counters {
    pub by_entry_point: LaunchCounters,
    /// Kernel nodes of the graphs launched, as counted when they were instantiated.
    pub graph_kernels: AtomicU64,
    /// Launches into a capturing stream: recorded, not run.
    pub captured: AtomicU64,
    /// Launches that the driver refused.
    pub failed: AtomicU64,
    /// Launches that went ahead without a core (fail open).
    pub unscheduled: AtomicU64,
    /// Launches on streams without a slot of their own: all beyond the first 63.
    pub stream_overflow: AtomicU64,
    /// Launches that ran whole because the shim could not do what was decided.
    pub degraded: AtomicU64,
    /// Time launches waited for their decision, ns.
    pub waited_ns: AtomicU64,
    /// `cuLaunchHostFunc` calls passed through.
    pub host_func: AtomicU64,
    /// Launches run as slices.
    pub sliced: AtomicU64,
    /// Launches run so that they yield.
    pub preemptible: AtomicU64,
    /// Launches run on some of the SMs.
    pub sm_limited: AtomicU64,
    /// Graph launches run as chains of parts.
    pub graph_chained: AtomicU64,
    /// Launches that yielded at least once.
    pub launches_yielded: AtomicU64,
    /// Launches whose blocks waited for one another when transformed, and that were rescued.
    pub rescued: AtomicU64,
    /// Kernels that have a transformed form.
    pub transformed_kernels: AtomicU64,
    /// Kernels that were looked at and have none.
    pub refused_kernels: AtomicU64,
    /// Waits behind which the program lingered on the GPU.
    pub lingered: AtomicU64,
    /// Sliced launches that ran the form with offset block indices.
    pub sliced_by_offset: AtomicU64,
    /// Kernels of `graph_chained` launches that were launched by themselves, in a transformed form.
    pub graph_nodes_transformed: AtomicU64,
    /// Launches of `sm_limited` right behind another one of their stream on the same SMs, with no event between them.
    pub sm_limited_consecutive: AtomicU64,
}

impl Counters {
    /// Launches so far through all entry points. A graph counts as one; captured launches do not count.
    pub fn launches(&self) -> u64 {
        let all = self.by_entry_point.all();
        all.iter().fold(0, |sum, counter| sum.wrapping_add(counter.load(Relaxed)))
    }
}

/// Slots of the ring of times that launches took to yield.
pub const TURNAROUND_SLOTS: usize = 256;

/// One launch that yielded.
#[repr(C)]
#[derive(Debug)]
pub struct Turnaround {
    pub ticket: AtomicU64,
    /// Time from being asked to yield until it had, ns.
    pub ns: AtomicU64,
}

/// What transformed launches report; written by the client.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Turnarounds {
    /// Written so far: the next goes to slot `count % TURNAROUND_SLOTS`.
    pub count: AtomicU64,
    pub latest: [Turnaround; TURNAROUND_SLOTS],
}

/// Costs of limited launches that are kept.
pub const LIMIT_COST_SLOTS: usize = 255;

/// What it cost streams that a launch went to some of the SMs; written by the client.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct LimitCosts {
    /// Measured so far: the next goes to slot `count % LIMIT_COST_SLOTS`.
    pub count: AtomicU64,
    /// Time in which the GPU had nothing of the stream's to do, ns.
    pub latest_ns: [AtomicU64; LIMIT_COST_SLOTS],
}

/// The page of words that transformed launches share with the GPU (exactly 4096 bytes,
/// registered with CUDA): a word a line.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Gates {
    /// 0: streams pass; else transformed launches wait here between their parts.
    pub gate: SharedWord,
    /// The state of the yield flag that the GPU has taken in last.
    pub flag_seen: SharedWord,
    /// One a stream slot, but the last two: which launch last skipped blocks.
    pub notices: [SharedWord; STREAM_SLOTS - 2],
}

/// Asks a client to yield; on a line of its own, written by the core.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct YieldLine {
    /// Counts changes: odd means yield. Threads sleep on it.
    pub word: AtomicU32,
    _pad: u32,
    /// When `word` last changed, monotonic ns.
    pub at_ns: AtomicU64,
}

/// How far the shim got; codes in [`report_state`].
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Report {
    /// Whether launches are governed: [`report_state`].
    pub governed: AtomicU32,
    /// Hardware time slice: [`report_state`].
    pub time_slice: AtomicU32,
    /// Channel groups whose time slice was set.
    pub time_slice_groups: AtomicU32,
    /// NVIDIA status or errno of the last failure to set one.
    pub time_slice_error: AtomicU32,
    /// The hardware time slice that is wanted now, us; 0: the driver's.
    pub time_slice_us: AtomicU32,
    /// Lingering on the GPU: [`report_state`].
    pub linger: AtomicU32,
    /// CUDA result of a failure to linger.
    pub linger_error: AtomicU32,
    /// Why all launches go whole: [`whole_because`].
    pub whole_because: AtomicU32,
    /// SMs of the device of the first launch; 0 before.
    pub sm_count: AtomicU32,
    /// `cuDriverGetVersion`; 0 before `cuInit`.
    pub driver_version: AtomicU32,
    /// Whether this process is an MPS client (device attribute `MPS_ENABLED`): 1 yes, 2 no, 0 unknown.
    pub mps_client: AtomicU32,
    /// UUID of the device of the first launch, two little-endian words.
    pub device_uuid: [AtomicU64; 2],
    /// GPU memory that went as the green contexts were made, in bytes.
    pub sm_limit_bytes: AtomicU64,
}

/// Values of the words of [`Report`].
pub mod report_state {
    /// Wanted, but not tried yet.
    pub const PENDING: u32 = 0;
    pub const ACTIVE: u32 = 1;
    /// Tried and failed; the error word says why.
    pub const FAILED: u32 = 2;
    /// Not wanted in this mode or class.
    pub const UNUSED: u32 = 3;
}

/// Values of [`Report::whole_because`]: what in the program's surroundings rules out launches in other forms.
pub mod whole_because {
    pub const NOTHING: u32 = 0;
    /// The environment sets `CUDA_LAUNCH_BLOCKING`.
    pub const LAUNCH_BLOCKING: u32 = 1;
    /// A tool is injected into the driver or the program: `CUDA_INJECTION64_PATH` or `CUDA_INJECTION32_PATH` is set, or
    /// a library of compute-sanitizer's or Nsight's is loaded.
    pub const INJECTION: u32 = 2;
    /// A debugger is attached to the process or to the driver.
    pub const DEBUGGER: u32 = 3;
    /// Some of the program's calls may reach the driver without the shim.
    pub const BYPASS: u32 = 4;
    /// `CUDA_DEVICE_MAX_CONNECTIONS` is so low that streams share hardware queues by turns.
    pub const FEW_QUEUES: u32 = 5;
    /// The program has looked up a function of a newer CUDA than the shim knows: it may put work into a stream, or wait
    /// for it, unseen.
    pub const NEW_CALL: u32 = 6;
}

/// One kernel of the client: appended once. After `ready` only `transform` changes.
#[repr(C)]
#[derive(Debug)]
pub struct KernelEntry {
    /// 0 until the rest is valid, then the name's length in bytes + 1.
    pub ready: AtomicU32,
    /// Whether it can be transformed: [`transform_state`]. May change at any time.
    pub transform: AtomicU32,
    /// Digest of the code image and the whole name, two little-endian words; 0 if the image is unknown.
    pub identity: [AtomicU64; 2],
    /// Hash of the whole name, to tell names apart that are longer than what is kept.
    pub name_hash: AtomicU64,
    /// The name, cut to fit, as bytes packed little-endian into words (so that
    /// the core can read it while a hostile client scribbles on it).
    pub name: [AtomicU64; KERNEL_NAME_BYTES / 8],
}

/// Made, mapped and written by the client; see the crate's documentation.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct ClientRegion {
    pub magic: AtomicU64,
    pub version: AtomicU32,
    _pad0: u32,
    pub activity: Activity,
    pub counters: Counters,
    /// State of the mechanisms.
    pub report: Report,
    pub kernel_count: AtomicU32,
    /// How far each stream slot is.
    pub completions: [Completion; STREAM_SLOTS],
    /// Words of transformed launches on a page of their own.
    pub gates: Gates,
    /// Times that launches took to yield.
    pub turnarounds: Turnarounds,
    /// What limited launches cost their streams.
    pub limit_costs: LimitCosts,
    /// Units of work, marked or recognised.
    pub marks: Marks,
    /// Ring of launches that await a decision; a slot is its ticket modulo [`RING_SLOTS`].
    pub submissions: [Submission; RING_SLOTS],
    /// Kernels that submissions name by index.
    pub kernels: [KernelEntry; KERNEL_SLOTS],
}

/// Bits of [`CoreRegion::notify`].
pub mod notify {
    /// Activity starts or ends.
    pub const ACTIVITY: u32 = 1 << 0;
    /// A unit of work ends.
    pub const UNITS: u32 = 1 << 1;
}

/// Made and written by the core, read-only for the client. `parked`, which a client reads
/// with every launch, is not on the line that the core writes with every launch: reading it
/// there takes the line from the core, which then waits for it when it wakes.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct CoreRegion {
    pub magic: AtomicU64,
    pub version: AtomicU32,
    pub client_id: AtomicU32,
    /// Tickets below this may run whole, now. `u64::MAX`: all, because the client is ungated.
    pub granted: GrantLine,
    /// Submissions the core has taken out of the ring.
    pub consumed: AtomicU64,
    /// Bumped before every wake-up; what waiting threads sleep on.
    pub wake: AtomicU32,
    _pad0: u32,
    /// Units of work that the core has read: see [`crate::marks`].
    pub marks_read: AtomicU64,
    _pad1: [u64; 5],
    /// 1 while the core sleeps: ring the doorbell after a submission.
    pub parked: AtomicU32,
    /// What a core that sleeps wants to be woken for: [`notify`].
    pub notify: AtomicU32,
    /// 1 once the core serves this client; 0 again when it drops it on purpose.
    pub serving: AtomicU32,
    /// Best-effort clients that are connected: for a high-priority client, whether there is
    /// anybody to keep the GPU from; for a best-effort one, itself included, whether it shares the
    /// GPU with others of its class. The client is probed when it changes.
    pub neighbours: AtomicU32,
    /// Bumped by the core's dispatch thread about every 200 ms while it lives:
    /// a waiting client tells a stuck core from a slow decision.
    pub heartbeat: AtomicU64,
    /// Bumped, and who sleeps on it woken, to ask the client what it still runs. A word and not a descriptor: what it
    /// costs to wake is the core's to bound, however many of a client's threads wait.
    pub probes: AtomicU32,
    /// Asks the client to yield, or to go on.
    pub yielding: YieldLine,
    /// Answers; the slot is the ticket modulo [`RING_SLOTS`].
    pub decisions: [DecisionSlot; RING_SLOTS],
}

/// The grant on a line of its own: of it a high-priority launch reads one word. `width_sms` is stored before the
/// `ticket` that lets launches use it, and loaded after it.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct GrantLine {
    pub ticket: AtomicU64,
    /// SMs that leased launches are limited to if they can be; 0: they are not. Changes rarely.
    pub width_sms: AtomicU32,
}

macro_rules! offsets {
    ($region:ty: $($field:ident)*) => { [$(offset_of!($region, $field)),*] };
}

/// What both regions are stamped with: it differs if something was moved or resized, even if nobody raised
/// [`crate::PROTOCOL_VERSION`].
pub const REGION_VERSION: u32 = {
    let client = offsets!(ClientRegion: magic version activity counters report kernel_count completions gates
        turnarounds limit_costs marks submissions kernels);
    let core = offsets!(CoreRegion: magic version client_id granted consumed wake marks_read parked notify serving
        neighbours heartbeat probes yielding decisions);
    let regions = [size_of::<ClientRegion>(), size_of::<CoreRegion>()];
    let slots = [size_of::<Submission>(), size_of::<KernelEntry>(), size_of::<DecisionSlot>()];
    let all: [&[usize]; 4] = [&client, &core, &regions, &slots];
    let (mut hash, mut of) = (crate::PROTOCOL_VERSION, 0);
    while of < all.len() {
        let mut at = 0;
        while at < all[of].len() {
            // As FNV-1a.
            hash = (hash ^ all[of][at] as u32).wrapping_mul(0x0100_0193);
            at += 1;
        }
        of += 1;
    }
    hash
};

const _: () = {
    assert!(size_of::<Gates>() == 4096);
    assert!(size_of::<Submission>() == 64);
    assert!(size_of::<Completion>() == 64 && size_of::<SharedWord>() == 64);
    assert!(size_of::<ClientRegion>().is_multiple_of(4096));
    assert!(size_of::<CoreRegion>().is_multiple_of(4096));
    assert!(RING_SLOTS.is_power_of_two());
    // See `Activity`.
    assert!(offset_of!(Activity, next_ticket) == 64);
    assert!(offset_of!(Activity, waiters) == 128);
    assert!(size_of::<Activity>() == 192);
    assert!(offset_of!(CoreRegion, wake) / 64 < offset_of!(CoreRegion, parked) / 64);
};

/// FNV-1a, for names and images: stable across processes and builds.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

impl KernelEntry {
    /// Fill an entry that nobody else fills and publish it. Called by the client.
    pub fn publish(&self, name: &[u8], identity: u128) {
        use std::sync::atomic::Ordering::Release;
        let kept = &name[..name.len().min(KERNEL_NAME_BYTES)];
        self.identity[0].store(identity as u64, Relaxed);
        self.identity[1].store((identity >> 64) as u64, Relaxed);
        self.name_hash.store(fnv1a(name), Relaxed);
        for (word, chunk) in self.name.iter().zip(kept.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(bytes), Relaxed);
        }
        self.ready.store(kept.len() as u32 + 1, Release);
    }

    /// Read an entry: `(name, identity)`, the name [printable], or `None` if it is not published or its
    /// length makes no sense. A cut name carries its hash so that two long
    /// names stay apart. Called by the core.
    pub fn read(&self) -> Option<(String, u128)> {
        use std::sync::atomic::Ordering::Acquire;
        let length = (self.ready.load(Acquire) as usize).checked_sub(1)?;
        if length > KERNEL_NAME_BYTES {
            return None;
        }
        let mut bytes = [0; KERNEL_NAME_BYTES];
        for (word, chunk) in self.name.iter().zip(bytes.chunks_exact_mut(8)) {
            chunk.copy_from_slice(&word.load(Relaxed).to_le_bytes());
        }
        let mut name = printable(String::from_utf8_lossy(&bytes[..length]).into_owned());
        if length == KERNEL_NAME_BYTES {
            name.push_str(&format!("#{:016x}", self.name_hash.load(Relaxed)));
        }
        Some((name, self.identity()))
    }

    /// Its digest; 0 if unknown.
    pub fn identity(&self) -> u128 {
        let [low, high] = self.identity.each_ref().map(|word| u128::from(word.load(Relaxed)));
        high << 64 | low
    }
}
