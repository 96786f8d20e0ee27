//! Figures that only the dispatch thread knows, as plain values for the control
//! plane. Taken between passes, kernels and clients some at a time, because
//! all of them at once would be a pause.

use super::client::{DispatchClient, Oddities, limit_cost_ns, limit_cost_p99_ns};
use super::handover::FaultCost;
use super::marks::MarkNumbers;
use super::min_share::{MinShare, MinShares};
use super::service::ServiceNumbers;
use super::{Dispatch, Engine};
use crate::profile_store::profiled::Device;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use tally_admin::{Quantiles, SwapPauseUs};
use tally_engine::engine::Had;
use tally_engine::policy::{Form, KernelId, UnitProfile};
use tally_engine::profile::{Demand, FormStats, Transformation};
use tally_engine::{ClientState, ClientStats, PolicyStats};
use tally_ipc::ClientRegion;
use tally_ipc::layout::{LaunchCounts, Report, TURNAROUND_SLOTS, Turnarounds};
use tally_ipc::wait::now_ns;
use tally_wasm_host::PolicyStatus;
use tokio::sync::oneshot;

/// Kernel profiles looked at in one pass of the loop.
const PIECE: u32 = 1_024;
/// Clients whose figures are read in one pass: some 10 us each, for the quantiles of a service.
const PIECE_CLIENTS: usize = 4;
/// Kernels whose figures are: names and forms are copied.
const PIECE_KERNELS: usize = 16;

/// What the shim counts; see `tally_ipc::layout::Counters`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShimCounts {
    pub launches: u64,
    pub by_entry_point: LaunchCounts,
    pub graph_kernels: u64,
    pub captured: u64,
    pub failed: u64,
    pub unscheduled: u64,
    pub stream_overflow: u64,
    pub degraded: u64,
    pub waited_ns: u64,
    pub host_func: u64,
    pub sliced: u64,
    pub preemptible: u64,
    pub sm_limited: u64,
    pub graph_chained: u64,
    pub launches_yielded: u64,
    pub rescued: u64,
    pub transformed_kernels: u64,
    pub refused_kernels: u64,
    pub lingered: u64,
    pub sliced_by_offset: u64,
    pub graph_nodes_transformed: u64,
    pub sm_limited_consecutive: u64,
    /// Median of the latest times from being asked to yield until it had, ns.
    pub turnaround_p50_ns: u64,
    pub turnaround_p99_ns: u64,
    /// Median of what an SM-limited launch costs its stream, ns; 0: unknown.
    pub limit_cost_ns: u64,
    pub limit_cost_p99_ns: u64,
    /// How many such costs were measured.
    pub limit_costs: u64,
    pub busy: bool,
    pub busy_total_ns: u64,
    pub busy_periods: u64,
}

/// What the shim reports; see [`Report`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportWords {
    pub governed: u32,
    pub time_slice: u32,
    pub time_slice_groups: u32,
    pub time_slice_error: u32,
    pub time_slice_us: u32,
    pub linger: u32,
    pub linger_error: u32,
    pub whole_because: u32,
    pub sm_count: u32,
    pub driver_version: u32,
    pub mps_client: u32,
    pub device_uuid: [u64; 2],
    pub sm_limit_bytes: u64,
}

impl ReportWords {
    fn read(r: &Report) -> Self {
        let word = |w: &AtomicU32| w.load(Relaxed);
        ReportWords {
            governed: word(&r.governed),
            time_slice: word(&r.time_slice),
            time_slice_groups: word(&r.time_slice_groups),
            time_slice_error: word(&r.time_slice_error),
            time_slice_us: word(&r.time_slice_us),
            linger: word(&r.linger),
            linger_error: word(&r.linger_error),
            whole_because: word(&r.whole_because),
            sm_count: word(&r.sm_count),
            driver_version: word(&r.driver_version),
            mps_client: word(&r.mps_client),
            device_uuid: [r.device_uuid[0].load(Relaxed), r.device_uuid[1].load(Relaxed)],
            sm_limit_bytes: r.sm_limit_bytes.load(Relaxed),
        }
    }
}

/// All figures of one client.
#[derive(Clone, Copy, Debug)]
pub struct ClientNumbers {
    pub id: u32,
    /// Its share relative to other clients, as policies see it.
    pub weight: u32,
    /// Its floor, if it asked for one, and what it had since.
    pub min_share: Option<(MinShare, Had)>,
    /// What the engine counted for this client.
    pub stats: ClientStats,
    /// The engine's view of it now.
    pub state: ClientState,
    /// When `state` was read, monotonic ns.
    pub read_ns: u64,
    /// What the client's shim counted.
    pub shim: ShimCounts,
    /// What the client's shim reports of its mechanisms.
    pub report: ReportWords,
    pub oddities: Oddities,
    /// High priority: how often it was busy for too long while no launch of it began or ended.
    pub standstills: u64,
    /// Its requests; of high-priority clients.
    pub service: Option<ServiceNumbers>,
    /// Time that its open unit of work can lose, ns.
    pub slack_ns: Option<i64>,
    /// Units of work that it marked, if any.
    pub marks: Option<MarkNumbers>,
    /// Its latest profiled unit of work.
    pub profile: Option<UnitProfile>,
}

impl ClientNumbers {
    pub fn of(client: &DispatchClient, engine: &Engine, min_shares: &MinShares) -> Self {
        let id = client.id();
        let (region, read_ns) = (&client.link.region, now_ns());
        let marks = client.marks.as_ref();
        let min_share = min_shares.get(id).map(|one| {
            let had = engine.had(read_ns, id).unwrap_or_default();
            let since = Had {
                charged_ns: had.charged_ns.saturating_sub(one.from.charged_ns),
                backlogged_ns: had.backlogged_ns.saturating_sub(one.from.backlogged_ns),
            };
            (one, since)
        });
        let view = engine.world().clients.get(&id);
        let served = view.and_then(|view| view.service.as_ref());
        ClientNumbers {
            id,
            min_share,
            weight: view.map_or(1, |view| view.info.weight()),
            slack_ns: served.and_then(|served| served.slack_ns(read_ns)),
            stats: engine.client_stats(id).unwrap_or_default(),
            state: engine.client_state(id).unwrap_or(ClientState {
                ungated: false,
                reason: 0,
                window_ns: 0,
                width_sms: 0,
                waiting: 0,
                in_flight: 0,
                in_flight_ns: 0,
                yielded: false,
                waits_for: None,
            }),
            read_ns,
            shim: shim_counts(region, client.busy_ns(read_ns)),
            report: ReportWords::read(&region.report),
            oddities: client.oddities,
            standstills: client.standstills(),
            service: client.service.as_ref().map(|service| service.numbers()),
            marks: marks.and_then(|marks| marks.numbers(read_ns)),
            profile: marks.and_then(|marks| marks.profile()),
        }
    }
}

/// Median and 99th percentile (nearest rank) of the latest turnarounds; 0 if none.
fn turnarounds(all: &Turnarounds) -> (u64, u64) {
    let n = all.count.load(Relaxed).min(TURNAROUND_SLOTS as u64) as usize;
    let mut ns: Vec<u64> = all.latest[..n].iter().map(|t| t.ns.load(Relaxed)).collect();
    ns.sort_unstable();
    let rank = |percent: usize| ns.get((n * percent).div_ceil(100).max(1) - 1).copied();
    (rank(50).unwrap_or(0), rank(99).unwrap_or(0))
}

fn shim_counts(region: &ClientRegion, busy_total_ns: u64) -> ShimCounts {
    let (c, a) = (&region.counters, &region.activity);
    let (turnaround_p50_ns, turnaround_p99_ns) = turnarounds(&region.turnarounds);
    let word = |w: &AtomicU64| w.load(Relaxed);
    ShimCounts {
        launches: c.launches(),
        by_entry_point: c.by_entry_point.read(),
        graph_kernels: word(&c.graph_kernels),
        captured: word(&c.captured),
        failed: word(&c.failed),
        unscheduled: word(&c.unscheduled),
        stream_overflow: word(&c.stream_overflow),
        degraded: word(&c.degraded),
        waited_ns: word(&c.waited_ns),
        host_func: word(&c.host_func),
        sliced: word(&c.sliced),
        preemptible: word(&c.preemptible),
        sm_limited: word(&c.sm_limited),
        graph_chained: word(&c.graph_chained),
        launches_yielded: word(&c.launches_yielded),
        rescued: word(&c.rescued),
        transformed_kernels: word(&c.transformed_kernels),
        refused_kernels: word(&c.refused_kernels),
        lingered: word(&c.lingered),
        sliced_by_offset: word(&c.sliced_by_offset),
        graph_nodes_transformed: word(&c.graph_nodes_transformed),
        sm_limited_consecutive: word(&c.sm_limited_consecutive),
        turnaround_p50_ns,
        turnaround_p99_ns,
        limit_cost_ns: limit_cost_ns(&region.limit_costs),
        limit_cost_p99_ns: limit_cost_p99_ns(&region.limit_costs),
        limit_costs: word(&region.limit_costs.count),
        busy: word(&a.busy_streams) != 0,
        busy_total_ns,
        busy_periods: word(&a.busy_periods),
    }
}

/// A kernel's measured times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelNumbers {
    pub name: String,
    /// Digest of its code image and its whole name; 0 if the image is unknown.
    pub image: u128,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub count: u64,
    pub mean_ns: u64,
    /// 99th percentile of the recent ones, ns.
    pub p99_ns: u64,
    /// The kernel never ran alone: see [`Profile`](tally_engine::profile::Profile).
    pub contended: bool,
    pub demand: Demand,
    pub waves_permille: u64,
    /// Whether it can be transformed.
    pub transformation: Transformation,
    /// Measured in other forms: form, argument, what was measured.
    pub forms: Vec<(Form, u32, FormStats)>,
}

#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The engine's counts of the policy.
    pub policy: PolicyStats,
    /// The policy's own figures.
    pub figures: Option<PolicyStatus>,
    /// How long changes of policy kept decisions waiting.
    pub swap_pause: SwapPauseUs,
    /// How long calls that failed took.
    pub fault_cost: FaultCost,
    /// From submission seen to answered, launches answered at once.
    pub decision: Quantiles,
    /// Time from submission seen to answered, of launches that were held or found the window full.
    pub held: Quantiles,
    /// High-priority work on the GPU now.
    pub high_busy: bool,
    /// Times the dispatch thread slept.
    pub parks: u64,
    pub clients: Vec<ClientNumbers>,
    /// Kernels by measured time in all, most first.
    pub kernels: Vec<KernelNumbers>,
    pub kernels_known: u32,
    /// The GPU, once it is known.
    pub device: Option<Device>,
}

/// The `most` largest of what is pushed. A push takes O(log `most`) comparisons, in whatever order values come: the
/// dispatch thread pushes up to [`PIECE`] of them in one pass.
struct Largest<T> {
    most: usize,
    /// A min-heap: the smallest value is on top.
    heap: BinaryHeap<Reverse<T>>,
}

impl<T: Ord> Largest<T> {
    fn new(most: usize) -> Self {
        Largest { most, heap: BinaryHeap::new() }
    }

    fn push(&mut self, value: T) {
        if self.heap.len() < self.most {
            self.heap.push(Reverse(value));
        } else if let Some(mut least) = self.heap.peek_mut()
            && least.0 < value
        {
            *least = Reverse(value);
        }
    }

    /// All of them, the largest first.
    fn into_sorted(self) -> impl Iterator<Item = T> {
        self.heap.into_sorted_vec().into_iter().map(|Reverse(value)| value)
    }
}

/// A snapshot in the making: first the kernel table, then the clients, in pieces.
pub struct Job {
    reply: oneshot::Sender<Snapshot>,
    cursor: u32,
    /// (measured ns in all, kernel)
    top: Largest<(u64, KernelId)>,
    /// Those of them that are not read yet; once the table was looked through.
    left: Option<std::vec::IntoIter<KernelId>>,
    kernels: Vec<KernelNumbers>,
    /// In rising order of their ids.
    clients: Vec<ClientNumbers>,
    /// Those below this id have been read.
    next_client: u32,
    /// Who joins meanwhile is not read, or there might be no end.
    last_client: u32,
}

impl Job {
    /// Of clients up to this id, and of the `most` kernels with the most time.
    pub fn new(reply: oneshot::Sender<Snapshot>, most: usize, last_client: u32) -> Self {
        Job {
            reply,
            cursor: 0,
            top: Largest::new(most),
            left: None,
            kernels: Vec::new(),
            clients: Vec::new(),
            next_client: 0,
            last_client,
        }
    }

    /// A client leaves, with its figures.
    pub fn forget(&mut self, id: u32) {
        self.clients.retain(|client| client.id != id);
    }

    /// Read some clients' figures. True when that was all of them.
    fn step_clients(
        &mut self,
        clients: &[Box<DispatchClient>],
        of: impl Fn(&DispatchClient) -> ClientNumbers,
    ) -> bool {
        let first = clients.partition_point(|client| client.id() < self.next_client);
        let end = clients.partition_point(|client| client.id() <= self.last_client);
        let left = &clients[first.min(end)..end];
        let piece = &left[..left.len().min(PIECE_CLIENTS)];
        self.clients.extend(piece.iter().map(|client| of(client)));
        self.next_client = piece.last().map_or(self.next_client, |client| client.id() + 1);
        piece.len() == left.len()
    }

    /// Read some kernels. True when that was all of them.
    fn step_kernels(&mut self, engine: &Engine) -> bool {
        let profiles = &engine.world().profiles;
        for _ in 0..PIECE {
            if self.cursor >= profiles.places() {
                return self.copy_kernels(engine);
            }
            let at = self.cursor;
            self.cursor += 1;
            let Some((id, profile)) = profiles.at(at) else { continue };
            let total = profile.mean_ns.saturating_mul(profile.count);
            if total > 0 {
                self.top.push((total, id));
            }
        }
        false
    }

    fn copy_kernels(&mut self, engine: &Engine) -> bool {
        let top = &mut self.top;
        let left = self.left.get_or_insert_with(|| {
            let top = std::mem::replace(top, Largest::new(0));
            top.into_sorted().map(|(_, id)| id).collect::<Vec<_>>().into_iter()
        });
        let profiles = &engine.world().profiles;
        let piece = left.by_ref().take(PIECE_KERNELS).filter_map(|id| profiles.get(id));
        self.kernels.extend(piece.map(|p| KernelNumbers {
            name: p.key.name.clone(),
            image: p.key.image,
            grid: p.key.grid,
            block: p.key.block,
            count: p.count,
            mean_ns: p.mean_ns,
            p99_ns: p.p99_ns(),
            contended: p.contended,
            demand: p.demand,
            waves_permille: p.waves_permille(),
            transformation: p.transformation,
            forms: p.forms.iter().map(|(&(f, n), s)| (f, n, s.clone())).collect(),
        }));
        left.len() == 0
    }

    /// Fill in the rest and send it.
    fn finish(self, engine: &Engine, fill: impl FnOnce(&mut Snapshot)) {
        let mut snapshot = Snapshot {
            policy: engine.policy_stats().clone(),
            figures: None,
            swap_pause: SwapPauseUs::default(),
            fault_cost: FaultCost::default(),
            decision: Quantiles::default(),
            held: Quantiles::default(),
            high_busy: engine.high_active(),
            parks: 0,
            clients: self.clients,
            kernels: self.kernels,
            kernels_known: engine.world().profiles.known(),
            device: None,
        };
        fill(&mut snapshot);
        let _ = self.reply.send(snapshot);
    }
}

impl Dispatch {
    /// Go on with a snapshot, if one is asked for.
    pub(super) fn report(&mut self) {
        let Some(mut job) = self.status.take() else { return };
        let of = |c: &DispatchClient| ClientNumbers::of(c, &self.engine, &self.min_shares);
        if !job.step_kernels(&self.engine) || !job.step_clients(&self.clients, of) {
            self.status = Some(job);
            return;
        }
        job.finish(&self.engine, |snapshot| {
            snapshot.device = self.profile_cache.device();
            snapshot.figures = self.policy().figures();
            snapshot.swap_pause = self.swap_pause.us();
            snapshot.fault_cost = self.fault_cost.and(self.policy().fault_cost());
            snapshot.decision = self.decision.quantiles();
            snapshot.held = self.held.quantiles();
            snapshot.parks = self.parks;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::cmp::Ordering;

    thread_local! {
        static COMPARISONS: Cell<u64> = const { Cell::new(0) };
    }

    /// Counts how often values are compared.
    #[derive(Clone, Debug, PartialEq, Eq)]
    struct Counted(u64);

    impl PartialOrd for Counted {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }

    impl Ord for Counted {
        fn cmp(&self, other: &Self) -> Ordering {
            COMPARISONS.set(COMPARISONS.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    #[test]
    fn the_largest_are_those_that_sorting_finds_and_cost_few_comparisons() {
        let count = 4 * u64::from(PIECE);
        // A multiplier without a common factor with 2^12: each value once, in no order.
        let random = (0..count).map(|n| n * 2_654_435_761 % count).collect();
        let few: Vec<u64> = (0..count).map(|n| n % 7).collect();
        for times in [(0..count).collect(), (0..count).rev().collect(), random, few] {
            for most in [0, 1, 10, 1_000, 5_000] {
                let mut top = Largest::new(most);
                COMPARISONS.set(0);
                times.iter().for_each(|ns| top.push(Counted(*ns)));
                let each = COMPARISONS.get().div_ceil(count);
                assert!(each <= 2 * u64::from(count.ilog2() + 1), "{each} comparisons a value");
                let mut sorted: Vec<u64> = Vec::clone(&times);
                sorted.sort_unstable_by(|a, b| b.cmp(a));
                sorted.truncate(most);
                assert_eq!(top.into_sorted().map(|ns| ns.0).collect::<Vec<_>>(), sorted);
            }
        }
    }
}
