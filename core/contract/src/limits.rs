//! Every limit that the author of a policy meets, and those of operators and of several crates but for times of the
//! protocol: each once, with its unit, and what happens at it. `docs/reference/limits.md` is made of [`GROUPS`].
//!
//! What a setting may be is said with the setting (`docs/reference/configuration.md`); here are the defaults that the
//! contract quotes, and the bounds that no setting changes.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Things, as the limit's text names them.
    Count,
    Bytes,
    /// About one for each WebAssembly instruction.
    Fuel,
    Ns,
    Us,
    Ms,
    S,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    pub name: &'static str,
    pub value: u64,
    pub unit: Unit,
    /// What it bounds, and what happens at it.
    pub text: &'static str,
}

#[derive(Clone, Copy, Debug)]
pub struct Group {
    pub title: &'static str,
    pub limits: &'static [Limit],
}

impl fmt::Display for Limit {
    /// The value with its unit: `256 KiB`, `200 000 units of fuel`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, unit) = match (self.unit, self.value) {
            (Unit::Count, n) => (n, ""),
            (Unit::Fuel, n) => (n, " units of fuel"),
            (Unit::Bytes, n) if n >= 1 << 30 && n.is_multiple_of(1 << 30) => (n >> 30, " GiB"),
            (Unit::Bytes, n) if n >= 1 << 20 && n.is_multiple_of(1 << 20) => (n >> 20, " MiB"),
            (Unit::Bytes, n) if n >= 1 << 10 && n.is_multiple_of(1 << 10) => (n >> 10, " KiB"),
            (Unit::Bytes, n) => (n, " bytes"),
            (Unit::Ns, n) if n.is_multiple_of(1_000_000_000) => (n / 1_000_000_000, " s"),
            (Unit::Ns, n) if n.is_multiple_of(1_000_000) => (n / 1_000_000, " ms"),
            (Unit::Ns, n) if n.is_multiple_of(1_000) => (n / 1_000, " us"),
            (Unit::Ns, n) => (n, " ns"),
            (Unit::Us, n) => (n, " us"),
            (Unit::Ms, n) if n.is_multiple_of(1_000) => (n / 1_000, " s"),
            (Unit::Ms, n) => (n, " ms"),
            (Unit::S, n) => (n, " s"),
        };
        write!(f, "{}{unit}", grouped(value))
    }
}

/// With a space between groups of three digits, from 1 000 on.
pub fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(digit);
    }
    out
}

/// Defines each limit as a constant and as a row of its group. The doc comment is the row's text.
macro_rules! limits {
    ($($title:literal { $($(#[doc = $text:literal])+ $name:ident: $kind:ty = $value:expr, $unit:ident;)+ })+) => {
        $($($(#[doc = $text])+ pub const $name: $kind = $value;)+)+

        /// All limits, by what they are about.
        pub const GROUPS: &[Group] = &[$(Group {
            title: $title,
            limits: &[$(Limit {
                name: stringify!($name),
                value: $name as u64,
                unit: Unit::$unit,
                text: concat!($($text),+),
            },)+],
        },)+];
    };
}

limits! {
    "Budgets of a policy" {
        /// Fuel of one `decide` or event. Beyond it the call is a fault, *overrun*.
        /// Default of `policy.limits.decide_fuel`.
        DECIDE_FUEL: u64 = 200_000, Fuel;
        /// CPU time of one `decide` or event, for what fuel does not count. Beyond it: fault *overrun*.
        /// Default of `policy.limits.call_cpu_ms_max`.
        CALL_CPU_MS: u64 = 2, Ms;
        /// Fuel of starting an instance and of its `init`, and again of its `restore`. Beyond it the policy is not
        /// loaded, or starts without state. Default of `policy.limits.init_fuel`.
        INIT_FUEL: u64 = 50_000_000, Fuel;
        /// CPU time of starting an instance and of its `init`, and again of its `restore`. Default of
        /// `policy.limits.init_cpu_ms_max`.
        INIT_CPU_MS: u64 = 2_000, Ms;
        /// Fuel of one `snapshot`. Beyond it: fault *overrun*, and the next policy starts without state.
        /// Default of `policy.limits.snapshot_fuel`.
        SNAPSHOT_FUEL: u64 = 5_000_000, Fuel;
        /// CPU time of one `snapshot` and of a new instance in place of a failed one, unless
        /// `policy.limits.call_cpu_ms_max` is more. Beyond it: fault *overrun*.
        SNAPSHOT_CPU_MS: u64 = 20, Ms;
        /// Linear memory, all memories of a component together. Growing beyond it fails, and the call with it: fault
        /// *memory*. Default of `policy.limits.memory_bytes`.
        MEMORY_BYTES: usize = 16 << 20, Bytes;
        /// Data passed between policy and core by one call of a host function. Beyond it: fault *overrun*.
        /// Default of `policy.limits.host_call_bytes_max`.
        HOST_CALL_BYTES: usize = 64 << 10, Bytes;
        /// Data that one call of a policy passes by host functions, as a multiple of `HOST_CALL_BYTES`. Beyond it:
        /// fault *overrun*.
        HOST_CALLS_FULL_MAX: usize = 4, Count;
        /// Time that best-effort work may be held while the GPU has nothing to do. Beyond it: fault *stall*.
        /// Default of `policy.disabling.stall_ms`.
        STALL_NS: u64 = 1_000_000_000, Ns;
        /// Faults that disable a policy. Default of `policy.limits.faults_max`.
        FAULTS_MAX: u32 = 3, Count;
        /// Time without a fault after which earlier faults are forgotten. Default of
        /// `policy.limits.faults_forgotten_after_s`.
        FAULTS_FORGOTTEN_AFTER_S: u64 = 600, S;
        /// Lines that a policy may log in one second; more are dropped and counted.
        /// Default of `policy.limits.log_lines_per_s_max`.
        LOG_LINES_PER_S: u32 = 64, Count;
        /// Counters and gauges of a policy together; further ones count nothing.
        /// Default of `policy.limits.metrics_max`.
        METRICS_MAX: usize = 64, Count;
    }
    "What a policy asks for" {
        /// Requests of one call (timers, windows, leases, yields). Further ones are dropped, unless they replace one of
        /// the same kind and client.
        COMMANDS_MAX: usize = 1_024, Count;
        /// Pending timers. A further one is dropped.
        TIMERS_MAX: usize = 64, Count;
        /// Timers that fire in one pass of the dispatch thread; those that are due, too, fire in the next ones.
        TIMERS_TICK_MAX: usize = 4, Count;
        /// Shortest hold; shorter ones are extended to it.
        HOLD_NS_MIN: u64 = 1_000, Ns;
        /// Longest hold; longer ones are shortened to it. Default of `engine.hold_ms_max`.
        HOLD_NS_MAX: u64 = 1_000_000_000, Ns;
        /// The most that `engine.hold_ms_max` may be.
        HOLD_NS_MAX_LARGEST: u64 = 60_000_000_000, Ns;
        /// A log line; longer ones are shortened.
        LOG_LINE_BYTES_MAX: usize = 1024, Bytes;
        /// The name of a counter or gauge; longer ones are shortened.
        METRIC_NAME_BYTES_MAX: usize = 64, Bytes;
        /// The text of a reason; longer ones are shortened.
        REASON_BYTES_MAX: usize = 64, Bytes;
        /// The data that `snapshot` gives. Beyond it: fault *overrun*, and the next policy starts without state.
        SAVED_BYTES_MAX: usize = 256 << 10, Bytes;
        /// The name of the format of the data that `snapshot` gives. Beyond it: fault *overrun*, and the next policy
        /// starts without state.
        SAVED_FORMAT_BYTES_MAX: usize = 256, Bytes;
        /// Why `restore` refuses; longer texts are shortened.
        REFUSAL_BYTES_MAX: usize = 1024, Bytes;
        /// Offers of one launch in `tallyctl policy check` after which it counts as starved.
        CHECK_OFFERS_MAX: u32 = 200, Count;
    }
    "What a policy sees" {
        /// Largest weight of a client. A label `weight` beyond it counts as none.
        WEIGHT_MAX: u32 = 1_000, Count;
        /// Labels of a client. `tallyctl run` refuses more, and the shim leaves further ones out.
        LABELS_MAX: usize = 16, Count;
        /// The name of a client, or a key or a value of a label. `tallyctl run` refuses longer labels; names are
        /// shortened.
        CLIENT_TEXT_BYTES_MAX: usize = 256, Bytes;
        /// The name of a kernel; longer ones are shortened.
        KERNEL_NAME_BYTES: usize = 224, Bytes;
        /// Kernels (name, image, grid, block) that the core tells apart. Launches of further ones have no profile.
        KERNELS_MAX: usize = 65_536, Count;
        /// Combinations of kernel, grid and block that one client may add. Further ones are NO-KERNEL.
        CLIENT_KERNELS_MAX: usize = 16_384, Count;
        /// Forms of one kernel besides whole. Further ones are not measured.
        FORMS_MAX: usize = 16, Count;
        /// First launches of a kernel in a client that are all measured.
        FIRST_SAMPLES: u16 = 8, Count;
        /// One in so many of a kernel's further launches is measured, later one in 64.
        SAMPLE_EVERY: u16 = 32, Count;
        /// Launches behind `predicted-ns`: their median.
        PREDICTION_SAMPLES: usize = 9, Count;
        /// Launches behind `p50-ns` and `p99-ns`.
        RECENT_SAMPLES: usize = 32, Count;
        /// Latest units of work of a high-priority client behind `services.get`.
        RECENT_UNITS: usize = 256, Count;
        /// Yields behind `turnaround-ns`: their median.
        TURNAROUND_SAMPLES: usize = 32, Count;
        /// A launch weighs at least 1 divided by this in `mean-ns`, so that the mean follows a kernel whose inputs
        /// change.
        MEAN_WINDOW: u64 = 64, Count;
        /// Streams of a client that are told apart. The last number is shared by all that find no other free.
        STREAM_SLOTS: usize = 64, Count;
        /// Launches that a sliced or preemptible launch is made of. Slices are larger than asked for beyond it.
        LAUNCH_PARTS_MAX: usize = 32, Count;
        /// Blocks of a launch whose blocks are claimed one by one. Larger grids of that kind run whole.
        CLAIMED_BLOCKS_MAX: u32 = 262_144, Count;
        /// Blocks of a grid beyond which a preemptible launch may run in slices by block offset. No GPU runs so many
        /// at once, so that none of these kernels waits for all of its blocks.
        WHOLE_GRID_BLOCKS_MAX: u32 = 8_192, Count;
    }
    "A client" {
        /// Launches of a client that wait for a decision. A further one waits for room.
        RING_SLOTS: usize = 256, Count;
        /// Names of kernels of a client that are told apart. Launches of further ones have no profile.
        KERNEL_SLOTS: usize = 4_096, Count;
        /// A client's launches in parts that are under way. Further ones run whole.
        LAUNCHES_OPEN_MAX: usize = 64, Count;
        /// Parts under way of a client's launches in parts, beyond which launches run whole: a part takes two entries
        /// of a hardware queue of 1 020, of which at least 900 are left to the program's launches.
        PARTS_OPEN_MAX: usize = 24, Count;
        /// Unfinished launches of a stream, beyond which its launches run whole: what is behind them in its hardware
        /// queue needs room.
        BACKLOG_MAX: u32 = 64, Count;
        /// Time that a program's launches wait for its context to become idle, so that code can be loaded into it.
        /// Beyond it they go on, and the attempt is made again later.
        LOAD_WAIT_MS_MAX: u64 = 20, Ms;
        /// Time after which an SM-limited launch that has not ended counts as stuck. Its kernel runs whole from then
        /// on.
        SM_LIMITED_STUCK_NS: u64 = 10_000_000_000, Ns;
        /// Copies of code images of a client. Kernels of further images run whole.
        COPIED_BYTES_MAX: usize = 64 << 20, Bytes;
        /// CUDA graphs of a client that are remembered; later ones run whole.
        GRAPHS_KEPT_MAX: usize = 4_096, Count;
        /// Nodes of all CUDA graphs of a client that are remembered; graphs beyond it run whole.
        GRAPH_NODES_KEPT_MAX: usize = 524_288, Count;
        /// Nodes of one CUDA graph. A larger graph runs whole, as does one with more than eight times as many edges.
        GRAPH_NODES_MAX: usize = 16_384, Count;
        /// Kernels of one CUDA graph that would be captured anew to run on some of the SMs. A graph with more runs on
        /// all.
        GRAPH_LIMITED_KERNELS_MAX: usize = 2_048, Count;
        /// Kernels of one CUDA graph that are launched by themselves between its parts: the longest. Others stay in
        /// their parts.
        GRAPH_SOLO_MAX: usize = 16, Count;
        /// Parts of one graph; one that would have more runs whole. A guard: launches ask for at most 32 parts of about
        /// the same size, and for 16 kernels by themselves.
        GRAPH_PARTS_MAX: usize = 256, Count;
        /// Parts of all graphs of a client.
        GRAPH_EXECS_MAX: usize = 4_096, Count;
        /// Marked units of work of a client that are open at once. Further ones are dropped and counted.
        OPEN_MARKS_MAX: usize = 64, Count;
        /// Marked units of work of a client that ended and wait for the core. Further ones are dropped and counted.
        MARK_SLOTS: usize = 1_024, Count;
        /// Launches of a unit of work that is profiled. A unit with more gives no profile.
        PROFILED_LAUNCHES_MAX: usize = 1_024, Count;
    }
    "The component" {
        /// A component's file; larger ones are refused. Default of `policy.limits.component_bytes_max`.
        COMPONENT_BYTES: usize = 32 << 20, Bytes;
        /// Native code of a component, as a multiple of `policy.limits.component_bytes_max`. Beyond it: refused.
        NATIVE_CODE_FACTOR: u64 = 16, Count;
        /// Memory of the process that compiles it. Beyond it: refused.
        /// Default of `policy.limits.compile_memory_bytes`.
        COMPILE_MEMORY_BYTES: usize = 512 << 20, Bytes;
        /// CPU time of the process that compiles it. Beyond it: refused. Default of
        /// `policy.limits.compile_cpu_s`.
        COMPILE_CPU_S: u64 = 60, S;
        /// Nesting of components; deeper ones are refused. Composition tools make three.
        COMPONENT_DEPTH_MAX: u32 = 8, Count;
        /// Modules and components, at all levels. An interpreter's is made of two dozen.
        COMPONENT_PARTS_MAX: u64 = 256, Count;
        /// Types, with what is declared in them.
        COMPONENT_TYPES_MAX: u64 = 50_000, Count;
        /// Imports, exports and aliases.
        COMPONENT_NAMES_MAX: u64 = 200_000, Count;
        /// Instances, of components and of modules.
        COMPONENT_INSTANCES_MAX: u64 = 1_000, Count;
        /// Functions of modules, and those that a component lifts or lowers. Python has 30 000.
        COMPONENT_FUNCTIONS_MAX: u64 = 100_000, Count;
        /// Tables, memories, globals and tags.
        COMPONENT_GLOBALS_MAX: u64 = 50_000, Count;
        /// Segments of data and of elements.
        COMPONENT_SEGMENTS_MAX: u64 = 200_000, Count;
        /// One function. The compiler takes more than twice as long for a function of twice the length.
        COMPONENT_BODY_BYTES_MAX: u64 = 1 << 20, Bytes;
        /// Local variables of all functions.
        COMPONENT_LOCALS_MAX: u64 = 4_000_000, Count;
        /// Sections, at all levels.
        COMPONENT_SECTIONS_MAX: u64 = 100_000, Count;
        /// Instances of modules that run.
        COMPONENT_CORE_INSTANCES_MAX: u32 = 64, Count;
        /// Linear memories: an interpreter's, and those of the stubs that stand in for WASI.
        COMPONENT_MEMORIES_MAX: u32 = 4, Count;
        /// A policy's configuration; longer ones are refused.
        POLICY_CONFIG_BYTES_MAX: usize = 1 << 20, Bytes;
    }
    "The core" {
        /// The core's configuration file.
        CONFIG_BYTES_MAX: usize = 1 << 20, Bytes;
        /// Values in a client's shared memory that no shim writes; it is disconnected at so many.
        BREACHES_MAX: u64 = 16, Count;
        /// Tickets of launches that a client's threads may have taken before the core reads the first; more is a
        /// breach.
        TICKETS_AHEAD_MAX: u64 = 1 << 23, Count;
        /// Launches that a client may report as yielded between two reads by the core; more is a breach.
        TURNAROUNDS_AHEAD_MAX: u64 = 1 << 20, Count;
        /// Launches that are let into a full window in which nothing ends, each `engine.window_stall_ms`: one, then
        /// two, four and at most so many.
        STALL_BURST_MAX: u32 = 256, Count;
        /// The most that `admission.clients_max` may be.
        CLIENTS_MAX: usize = 4_096, Count;
        /// SMs of a GPU; more make no sense in a setting, and profiles of such a GPU are not kept.
        SMS_MAX: u32 = 1_024, Count;
        /// Entries of `sm_limits.reserve_sms`.
        RESERVES_MAX: usize = 16, Count;
        /// The most that `sharing.timeslice.linger_us` may be.
        LINGER_US_MAX: u32 = 1_000, Us;
        /// Time that the core takes to grant held launches and empty the rings before it stops.
        DRAIN_MS_MAX: u64 = 2_000, Ms;
        /// Different policies kept in memory for a rollback.
        POLICIES_KEPT_MAX: usize = 8, Count;
        /// Entries of `tallyctl policy history`, the latest.
        POLICY_RECORDS_MAX: usize = 64, Count;
        /// Programs in the status that are not governed, the latest.
        UNGOVERNED_MAX: usize = 64, Count;
        /// Clients in the status that have left, the latest.
        DEPARTED_MAX: usize = 64, Count;
        /// Kernels that one answer lists.
        STATUS_KERNELS_MAX: usize = 1_000, Count;
        /// Connections that have not registered: an eighth for one user (a quarter if trusted), three eighths for
        /// trusted users only.
        UNREGISTERED_MAX: usize = 256, Count;
        /// Connections that have not registered, if the core may open fewer than 4 096 files.
        UNREGISTERED_FEW_MAX: usize = 32, Count;
        /// Launches that one pass of the dispatch thread takes from all clients; each has an equal share, 2 at least.
        PASS_SUBMISSIONS_MAX: usize = 512, Count;
        /// Launches that one pass of the dispatch thread takes from one client, and from all clients of one user
        /// together.
        PASS_SUBMISSIONS_CLIENT_MAX: usize = 12, Count;
        /// Streams that one pass looks at, and ends of launches that it takes, of all clients; each has an equal
        /// share, 2 at least.
        PASS_COMPLETIONS_MAX: usize = 2_048, Count;
        /// Streams, and ends of launches, that one pass of the dispatch thread takes from one client, and from all
        /// clients of one user together.
        PASS_COMPLETIONS_CLIENT_MAX: usize = 256, Count;
        /// Marked units of work that one pass of the dispatch thread takes from one high-priority client, and from all
        /// clients of one user together.
        PASS_MARKS_CLIENT_MAX: usize = 32, Count;
        /// Threads that one pass wakes of all clients of one user, and system calls that it needs for that.
        PASS_WAKES_USER_MAX: u32 = 12, Count;
        /// CPU time of a policy in one pass of the dispatch thread, about. The rest is done in later passes.
        PASS_POLICY_MS: u64 = 20, Ms;
        /// Time that a registration beyond `admission.user_joins_per_s` waits before it is refused.
        JOIN_WAIT_MS_MAX: u64 = 500, Ms;
        /// Registrations of one user at once, before `admission.user_joins_per_s` counts.
        JOINS_BURST: u32 = 64, Count;
        /// Ungoverned programs of one user, a second, that the status takes note of, after as many as it shows.
        UNGOVERNED_USER_PER_S: u32 = 10, Count;
        /// Admin connections. Half are for admins, of whom one user has at most half.
        ADMIN_CONNECTIONS_MAX: usize = 32, Count;
        /// Admin connections of one user that is no admin.
        ADMIN_CONNECTIONS_USER_MAX: usize = 4, Count;
        /// Time between two requests of users who are not admins, all of them together. Requests that come sooner wait.
        NON_ADMIN_PAUSE_MS: u64 = 50, Ms;
        /// A request at the admin socket; longer ones are refused.
        REQUEST_BYTES_MAX: usize = 16 << 10, Bytes;
        /// A file of profiles; larger ones are set aside.
        PROFILE_FILE_BYTES_MAX: usize = 64 << 20, Bytes;
        /// The least that a decision log may be limited to.
        LOG_BYTES_MIN: u64 = 64 << 10, Bytes;
        /// Decision logs in a folder of logs; no more are begun there.
        LOGS_MAX: usize = 32, Count;
        /// The least room between the dispatch thread and a reader of its records.
        LOG_RING_BYTES_MIN: usize = 4 << 10, Bytes;
        /// The most room between the dispatch thread and a reader of its records.
        LOG_RING_BYTES_MAX: usize = 1 << 30, Bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = &'static Limit> {
        GROUPS.iter().flat_map(|group| group.limits)
    }

    #[test]
    fn values_are_shown_with_their_units() {
        let shown = |value, unit| Limit { name: "", value, unit, text: "" }.to_string();
        for (value, unit, text) in [
            (999, Unit::Count, "999"),
            (65_536, Unit::Count, "65 536"),
            (4_000_000, Unit::Count, "4 000 000"),
            (224, Unit::Bytes, "224 bytes"),
            (256 << 10, Unit::Bytes, "256 KiB"),
            (16 << 20, Unit::Bytes, "16 MiB"),
            (1 << 30, Unit::Bytes, "1 GiB"),
            (200_000, Unit::Fuel, "200 000 units of fuel"),
            (1_000, Unit::Ns, "1 us"),
            (1_001, Unit::Ns, "1 001 ns"),
            (60_000_000_000, Unit::Ns, "60 s"),
            (2, Unit::Ms, "2 ms"),
            (2_000, Unit::Ms, "2 s"),
            (600, Unit::S, "600 s"),
        ] {
            assert_eq!(shown(value, unit), text);
        }
    }

    #[test]
    fn each_limit_is_listed_once_with_its_value_and_a_whole_sentence() {
        let mut names: Vec<_> = all().map(|limit| limit.name).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        let saved = all().find(|limit| limit.name == "SAVED_BYTES_MAX").unwrap();
        assert_eq!((saved.value, saved.to_string()), (SAVED_BYTES_MAX as u64, "256 KiB".into()));
        for limit in all() {
            assert!(limit.text.ends_with('.') && limit.value > 0, "{limit:?}");
        }
    }
}
