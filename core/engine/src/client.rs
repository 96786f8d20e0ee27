//! What the engine keeps of one client.

use crate::policy::{Class, ClientInfo, Form, KernelId, NEVER, Usage, WINDOW_OPEN_MIN};
use crate::units::RecentUnits;
use std::collections::VecDeque;
use tally_contract::limits::STALL_BURST_MAX;

/// Launches of one client in flight that are tracked; the oldest are forgotten
/// beyond it (a client that never lets its completion words move).
pub const IN_FLIGHT_MAX: u64 = 4_096;
/// Launches in flight of one client in a form that can yield, at most; further ones run whole. A shim has at
/// most 64.
pub const YIELDING_IN_FLIGHT_MAX: usize = 128;

/// A launch as it arrives from a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submission {
    /// Dense and rising by one for each of the client's submissions.
    pub ticket: u64,
    /// Its kernel; `None` if the core knows no more kernels (see `KERNELS_MAX`).
    pub kernel: Option<KernelId>,
    /// Bits of `launch_state` that the client's side knows: graph, cooperative, clustered.
    pub state: u32,
    /// Which forms the client's side can run, in bits of `forms_offered`.
    pub offered: u32,
    pub grid_blocks: u64,
    pub block_threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    pub stream: u32,
    /// Value that the stream's completion word reaches when it is done.
    pub completion: u32,
    /// It started under a lease already; there is nothing to decide.
    pub started: bool,
    /// Of a launch that started under a lease: on at most so many SMs; 0: on all.
    pub limited_sms: u32,
}

/// How long a launch took, by its client's account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    pub completion: u32,
    /// From the end of what was before it in its stream, or from its launch if that was later, ns.
    pub ns: u64,
}

impl Measured {
    /// It took at least so long: a client has 32 bits for it.
    pub(crate) fn is_saturated(&self) -> bool {
        self.ns >= u32::MAX.into()
    }
}

/// A launch waiting for its decision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub submission: Submission,
    pub submitted_ns: u64,
    pub offered: bool,
}

/// A launch granted and not yet seen done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    pub ticket: u64,
    pub kernel: Option<KernelId>,
    pub completion: u32,
    pub predicted_ns: u64,
    /// What it counts in the window: for a launch that can yield, how long
    /// that takes.
    pub window_ns: u64,
    pub granted_ns: u64,
    pub form: Form,
    pub argument: u32,
    /// How often high-priority work had begun when it was granted, or [`DISTURBED`]. If it has begun since,
    /// the measurement is not the launch's own.
    pub high_periods: u64,
}

/// High-priority work ran when the launch was granted.
pub(crate) const DISTURBED: u64 = u64::MAX;

/// How a launch was granted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    pub form: Form,
    pub argument: u32,
    /// Expected to take so long, whole; 0 if unknown.
    pub predicted_ns: u64,
    pub window_ns: u64,
    pub high_periods: u64,
}

impl Granted {
    /// Granted to run whole; `predicted_ns` counts against the window.
    pub fn whole(predicted_ns: u64, high_periods: u64) -> Self {
        Granted {
            form: Form::Whole,
            argument: 0,
            predicted_ns,
            window_ns: predicted_ns,
            high_periods,
        }
    }
}

/// A form that stops at a boundary when asked.
pub(crate) fn can_yield(form: Form) -> bool {
    matches!(form, Form::Sliced | Form::Preemptible)
}

/// Launches granted on one stream, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub in_flight: VecDeque<InFlight>,
    pub last_done_ns: u64,
    /// Predicted time that can be counted as done, and until when it was reckoned.
    done_credit_ns: u64,
    credited_until_ns: u64,
    /// Those of its launches that do not count in the window.
    set_aside: SetAside,
}

/// Launches of streams in which nothing ends: other streams' launches do not wait for them.
#[derive(Clone, Copy, Debug, Default)]
struct SetAside {
    launches: u64,
    ns: u64,
    unmeasured: u64,
}

impl Stream {
    /// Predicted time by which a stream may be ahead of the clock, or behind what it could have done.
    const CREDIT_NS_MAX: u64 = 1_000_000_000;

    /// Of a launch that was predicted to take so long, the time to be counted as done. A stream's launches run one
    /// after another, so whatever their program says of their times, no more than the time that passes.
    pub fn done_ns(&mut self, now_ns: u64, ns: u64) -> u64 {
        let passed_ns = now_ns.saturating_sub(self.credited_until_ns);
        self.credited_until_ns = self.credited_until_ns.max(now_ns);
        let credit_ns = self.done_credit_ns.saturating_add(passed_ns).min(Self::CREDIT_NS_MAX);
        let ns = ns.min(credit_ns);
        self.done_credit_ns = credit_ns - ns;
        ns
    }
}

/// Counts for people; all rise monotonically.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientStats {
    /// Launches submitted for decision, leased ones included.
    pub submitted: u64,
    /// Answered `run` by the policy.
    pub run: u64,
    /// Started under a lease.
    pub leased: u64,
    /// `hold` answers; one launch can be held several times.
    pub held: u64,
    /// Launches held at least once.
    pub launches_held: u64,
    /// Waits because the in-flight window was full.
    pub window_full: u64,
    /// Launches granted although it was full, because nothing in it ended.
    pub window_stalls: u64,
    pub sliced: u64,
    pub preemptible: u64,
    pub sm_limited: u64,
    /// Times that its width was changed.
    pub width_changes: u64,
    /// Forms that were not on offer and ran whole.
    pub degraded: u64,
    /// Times it was asked to yield.
    pub yields: u64,
    /// Launches seen to have yielded.
    pub launches_yielded: u64,
    /// Decided by the built-in rule because the policy failed.
    pub built_in_rule: u64,
    /// Time launches waited between submission and answer.
    pub waited_ns: u64,
    pub completed: u64,
    /// Sum of what launches were charged: see [`Completion::charged_ns`](crate::policy::Completion).
    pub charged_ns: u64,
    /// Launches of which it is known how long they took on the device.
    pub measured: u64,
    /// Sum of the measured times.
    pub measured_ns: u64,
}

/// Time in which a client has a launch waiting or on the GPU.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Backlog {
    before_ns: u64,
    since_ns: Option<u64>,
}

impl Backlog {
    fn note(&mut self, now_ns: u64, is_backlogged: bool) {
        if is_backlogged {
            self.since_ns.get_or_insert(now_ns);
        } else if self.since_ns.is_some() {
            *self = Backlog { before_ns: self.ns(now_ns), since_ns: None };
        }
    }

    /// All of it until now.
    pub fn ns(&self, now_ns: u64) -> u64 {
        let since_ns = self.since_ns.map_or(0, |since_ns| now_ns.saturating_sub(since_ns));
        self.before_ns.saturating_add(since_ns)
    }
}

#[derive(Debug)]
pub(crate) struct Client {
    pub info: ClientInfo,
    pub waiting: VecDeque<Waiting>,
    pub streams: Vec<Stream>,
    /// Sum of `window_ns` over all streams' in-flight launches.
    pub in_flight_ns: u64,
    pub in_flight: u64,
    /// Launches in flight in a form that can yield; at most [`YIELDING_IN_FLIGHT_MAX`].
    pub can_yield_in_flight: Vec<InFlight>,
    /// The policy asked it to yield.
    pub yield_asked: bool,
    /// It yields to high-priority work by itself, until an idle gap of so long.
    pub auto_yield_ns: Option<u64>,
    /// Not until high-priority work comes again: the policy let the GPU idle for it.
    pub auto_yield_suspended: bool,
    /// It has been told to yield.
    pub yielded: bool,
    /// When it was told last.
    pub told_to_yield_ns: Option<u64>,
    /// Launches in flight of unknown length.
    pub unmeasured: u64,
    set_aside: SetAside,
    pub window_ns: u64,
    /// What is decided `run` runs on at most so many SMs; 0: on all.
    pub width_sms: u32,
    pub ungated: bool,
    /// Tickets below this need no decision.
    pub granted_until: u64,
    /// Tickets below this have been answered or started.
    pub answered_until: u64,
    /// The head of `waiting` is not offered before this.
    pub hold_until_ns: u64,
    /// The round of offers since which the policy is to be asked about the head of `waiting`, held or not.
    pub owed_since: Option<u64>,
    /// It is offered again when another best-effort client's launch ends.
    pub holds_until_completion: bool,
    /// Why the last decision was made, by the policy's own table; 0: no reason.
    pub reason: u8,
    pub window_noted: bool,
    /// When a launch was granted or seen done last.
    pub moved_ns: u64,
    /// When one was seen done last.
    pub ended_ns: u64,
    /// The head of `waiting` waits for room, at most until then; 0: it does not.
    pub window_until_ns: u64,
    /// It is offered although there is no room: nothing in flight ends.
    pub window_stalled: bool,
    /// Launches that the last stall let in although there was no room, and how many of them are left.
    /// Doubles with each stall in which nothing ends: what is in flight may wait for the last of many.
    pub stall_burst: u32,
    pub stall_left: u32,
    /// In this pass of the engine's it was offered so often.
    pub offers: (u64, usize),
    /// The first so many that wait are answered by the built-in rule: the policy let the GPU idle.
    pub left_to_rule: usize,
    /// High priority only: the client says it has work in flight.
    pub busy: bool,
    /// High priority only: it gets nowhere, so that what it has in flight does not count.
    pub stands: bool,
    /// High priority only: its latest units of work.
    pub units: RecentUnits,
    /// While it has an objective for tokens.
    pub tokens: RecentUnits,
    /// Its floor, permille; 0: none.
    pub min_share_permille: u32,
    /// What it costs a stream of it that a launch goes to some of the SMs; 0: unknown.
    pub limit_cost_ns: u64,
    pub backlog: Backlog,
    /// [`Clients`](crate::clients::Clients) knows that it may have changed.
    pub is_noted: bool,
    /// Best effort only: its part of [`WorkDone`](crate::engine::WorkDone).
    pub work_ns: u64,
    /// Orders best-effort clients among themselves: the least served goes first.
    pub served_ns: u64,
    pub stats: ClientStats,
}

impl Client {
    pub fn new(info: ClientInfo, window_ns: u64, first_ticket: u64, served_ns: u64) -> Self {
        let ungated = info.class == Class::High;
        Client {
            info,
            waiting: VecDeque::new(),
            streams: Vec::new(),
            in_flight_ns: 0,
            in_flight: 0,
            can_yield_in_flight: Vec::new(),
            yield_asked: false,
            auto_yield_ns: None,
            auto_yield_suspended: false,
            yielded: false,
            told_to_yield_ns: None,
            unmeasured: 0,
            set_aside: SetAside::default(),
            window_ns,
            width_sms: 0,
            ungated,
            granted_until: if ungated { u64::MAX } else { first_ticket },
            answered_until: first_ticket,
            hold_until_ns: 0,
            owed_since: None,
            holds_until_completion: false,
            reason: 0,
            window_noted: false,
            moved_ns: 0,
            ended_ns: 0,
            window_until_ns: 0,
            window_stalled: false,
            stall_burst: 0,
            stall_left: 0,
            offers: (0, 0),
            left_to_rule: 0,
            busy: false,
            stands: false,
            units: if ungated { RecentUnits::new() } else { RecentUnits::default() },
            tokens: RecentUnits::default(),
            min_share_permille: 0,
            limit_cost_ns: 0,
            backlog: Backlog::default(),
            is_noted: false,
            work_ns: 0,
            served_ns,
            stats: ClientStats::default(),
        }
    }

    /// Whether this high-priority client has work on the GPU.
    pub fn is_active_high(&self) -> bool {
        self.info.class == Class::High && !self.stands && (self.busy || self.in_flight > 0)
    }

    /// Whether it has work on the GPU, as far as is known.
    pub fn is_active(&self) -> bool {
        self.in_flight > 0 || self.is_active_high()
    }

    /// For how long the GPU must have been idle before it goes on, if it yields by itself now.
    pub fn auto_yield_ns(&self) -> Option<u64> {
        self.auto_yield_ns.filter(|_| !self.auto_yield_suspended)
    }

    /// Told to yield, as the first launch of each of its streams can: what is behind it waits.
    pub fn has_yielded(&self) -> bool {
        let mut first = self.streams.iter().filter_map(|stream| stream.in_flight.front());
        self.yielded && first.all(|launch| can_yield(launch.form))
    }

    /// Since when nothing of it has ended although it was told to yield, ns, if it has launches that yield and ones
    /// that cannot: these may wait for those.
    pub fn yields_beside_since_ns(&self) -> Option<u64> {
        if !self.yielded {
            return None;
        }
        let (mut yields, mut granted_ns) = (false, None);
        for launch in self.streams.iter().filter_map(|stream| stream.in_flight.front()) {
            match can_yield(launch.form) {
                true => yields = true,
                false => granted_ns = granted_ns.max(Some(launch.granted_ns)),
            }
        }
        let since_ns = self.told_to_yield_ns?.max(self.ended_ns).max(granted_ns?);
        yields.then_some(since_ns)
    }

    /// Whether a launch of `predicted_ns` in a stream fits in the window. One always does; of
    /// launches of unknown length (0) one at a time, since a queue of them could
    /// be of any length.
    pub fn has_room(&self, predicted_ns: u64, stream: u32) -> bool {
        let is_aside = |stream: &Stream| stream.set_aside.launches > 0;
        let aside = match self.streams.get(stream as usize) {
            Some(stream) if is_aside(stream) => SetAside::default(),
            _ => self.set_aside,
        };
        let in_flight_ns = self.in_flight_ns.saturating_sub(aside.ns);
        let unmeasured = self.unmeasured.saturating_sub(aside.unmeasured);
        let fits = in_flight_ns.saturating_add(predicted_ns) <= self.window_ns;
        self.in_flight <= aside.launches
            || (fits && (predicted_ns > 0 || unmeasured == 0 || self.window_ns >= WINDOW_OPEN_MIN))
    }

    /// Set aside what is in flight in streams in which nothing has ended since then.
    fn set_aside_stuck(&mut self, since_ns: u64) {
        for stream in &mut self.streams {
            let is_stuck = stream.in_flight.front().is_some_and(|f| f.granted_ns <= since_ns)
                && stream.last_done_ns <= since_ns;
            if !is_stuck {
                continue;
            }
            // More may stand behind it since it was looked at last.
            let before = stream.set_aside;
            self.set_aside.launches -= before.launches;
            self.set_aside.ns = self.set_aside.ns.saturating_sub(before.ns);
            self.set_aside.unmeasured -= before.unmeasured;
            let ns = stream.in_flight.iter().map(|f| f.window_ns).fold(0, u64::saturating_add);
            let unmeasured = stream.in_flight.iter().filter(|f| f.window_ns == 0).count() as u64;
            let launches = stream.in_flight.len() as u64;
            stream.set_aside = SetAside { launches, ns, unmeasured };
            self.set_aside.launches += launches;
            self.set_aside.ns = self.set_aside.ns.saturating_add(ns);
            self.set_aside.unmeasured += unmeasured;
        }
    }

    /// A stream moves: its launches count again.
    pub fn stream_moved(&mut self, stream: u32) {
        let Some(stream) = self.streams.get_mut(stream as usize) else { return };
        let SetAside { launches, ns, unmeasured } = std::mem::take(&mut stream.set_aside);
        self.set_aside.launches -= launches;
        self.set_aside.ns = self.set_aside.ns.saturating_sub(ns);
        self.set_aside.unmeasured -= unmeasured;
    }

    /// Up to where a grant holds that is taken back. What waits below it was answered by it, and may have been started:
    /// there can be too much for the pass in which it was granted.
    pub fn taken_back_until(&self) -> u64 {
        let mut tickets = self.waiting.iter().rev().map(|w| w.submission.ticket);
        let covered = tickets.find(|ticket| *ticket < self.granted_until);
        self.answered_until.max(covered.map_or(0, |ticket| ticket + 1))
    }

    /// Whether a launch may go although there is no room: nothing has ended for `stall_ns`.
    pub fn is_stalled(&mut self, now_ns: u64, stall_ns: u64) -> bool {
        if self.stall_left == 0 && now_ns >= self.moved_ns.saturating_add(stall_ns) {
            self.stall_burst = (2 * self.stall_burst).clamp(1, STALL_BURST_MAX);
            self.stall_left = self.stall_burst;
            self.set_aside_stuck(now_ns.saturating_sub(stall_ns));
        }
        self.stall_left > 0
    }

    /// Something in flight has ended.
    pub fn moved(&mut self, now_ns: u64) {
        self.window_noted = false;
        self.window_until_ns = 0;
        self.window_stalled = false;
        (self.stall_burst, self.stall_left) = (0, 0);
        (self.moved_ns, self.ended_ns) = (now_ns, now_ns);
    }

    /// What a policy may read of it.
    pub fn usage(&self) -> Usage {
        Usage {
            waiting_since_ns: self.waiting.front().map_or(NEVER, |w| w.submitted_ns),
            in_flight: u32::try_from(self.in_flight).unwrap_or(u32::MAX),
            in_flight_ns: self.in_flight_ns,
            measured_ns: self.stats.measured_ns,
            charged_ns: self.stats.charged_ns,
            min_share_permille: self.min_share_permille,
            backlogged_ns: self.backlog.before_ns,
            backlogged_since_ns: self.backlog.since_ns.unwrap_or(NEVER),
            limit_cost_ns: self.limit_cost_ns,
        }
    }

    /// A launch came, or ended.
    pub fn note_backlog(&mut self, now_ns: u64) {
        self.backlog.note(now_ns, !self.waiting.is_empty() || self.in_flight > 0);
    }

    /// What its launches were charged on average; 0 if none was.
    pub fn mean_ns(&self) -> u64 {
        self.stats.charged_ns.checked_div(self.stats.completed).unwrap_or(0)
    }

    /// A launch is not in flight any more.
    pub fn ended(&mut self, f: &InFlight) {
        self.in_flight -= 1;
        self.unmeasured -= u64::from(f.window_ns == 0);
        if can_yield(f.form) {
            self.can_yield_in_flight.retain(|other| other.ticket != f.ticket);
        }
        self.in_flight_ns = self.in_flight_ns.saturating_sub(f.window_ns);
    }

    pub fn grant(&mut self, s: &Submission, how: Granted, now: u64) {
        let Granted { form, argument, predicted_ns, window_ns, high_periods } = how;
        let index = s.stream as usize;
        if self.streams.len() <= index {
            self.streams.resize_with(index + 1, Stream::default);
        }
        let launch = InFlight {
            ticket: s.ticket,
            kernel: s.kernel,
            completion: s.completion,
            predicted_ns,
            window_ns,
            granted_ns: now,
            form,
            argument,
            high_periods,
        };
        self.streams[index].in_flight.push_back(launch);
        self.moved_ns = now;
        self.in_flight += 1;
        self.unmeasured += u64::from(window_ns == 0);
        if can_yield(form) {
            self.can_yield_in_flight.push(launch);
        }
        self.in_flight_ns = self.in_flight_ns.saturating_add(window_ns);
        self.answered_until = self.answered_until.max(s.ticket + 1);
        if self.in_flight > IN_FLIGHT_MAX {
            let longest =
                (0..self.streams.len()).max_by_key(|at| self.streams[*at].in_flight.len());
            let longest = longest.unwrap_or(index);
            self.stream_moved(longest as u32);
            if let Some(oldest) = self.streams[longest].in_flight.pop_front() {
                self.ended(&oldest);
            }
        }
    }
}
