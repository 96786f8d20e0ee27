//! One client as the dispatch thread sees it: what was read from its region, and
//! what was answered. Everything in the region is untrusted: it is bounded here,
//! and a lie costs nobody but its teller.

mod breaches;
mod limit_costs;
mod turnarounds;
mod units;

pub use breaches::Oddities;
pub use limit_costs::{median_ns as limit_cost_ns, p99_ns as limit_cost_p99_ns};

use super::Engine;
use super::Settings;
use super::control::NewClient;
use super::kernels::{KernelCache, offered_by, state_of};
use super::marks::Marks;
use super::probe::{Launches, Probe};
use super::profile_cache::ProfileCache;
use super::service::Service;
pub use super::share::Share;
use super::share::UserPass;
use super::standstill::Standstill;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use tally_contract::objective::{Objective, tpot_of_labels};
use tally_engine::policy::Class;
use tally_engine::{Action, Measured, Submission};
use tally_ipc::layout::{Activity, RING_SLOTS, STREAM_SLOTS, notify, submission_flags};
use tally_ipc::ring::{self, Answer, Polled};
use tally_ipc::wait;

/// Unanswered launches of one client; its ring is left full beyond them.
const UNANSWERED_MAX: usize = RING_SLOTS;
/// A ticket taken and not published for so long is passed over.
const STUCK_NS: u64 = 1_000_000_000;
/// Looked for this often. Not whenever a ring is found empty: the client that takes the next
/// ticket would have to get the word's cache line back from the core first.
const STUCK_LOOK_NS: u64 = 10_000_000;
/// Tickets found abandoned one after the other; an honest client has at most a
/// ring of them.
const ABANDONED_MAX: u64 = 65_536;

/// A launch handed to the engine and not answered.
#[derive(Clone, Copy, Debug)]
struct Unanswered {
    ticket: u64,
    seen_ns: u64,
    stream: u32,
}

/// Completion tracking of one stream slot.
#[derive(Clone, Copy, Debug, Default)]
struct StreamProgress {
    last_submitted: u32,
    /// How far the stream is.
    done: u32,
}

/// What polling a client's ring found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    Launches(usize),
    /// It breaks the protocol; serve it no longer.
    Misbehaved(&'static str),
}

/// What looking at a client's completions found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Looked {
    /// A completion word has moved.
    pub moved: bool,
    /// Streams that were looked at.
    pub streams: u32,
}

pub struct DispatchClient {
    /// What the control plane handed over.
    pub link: NewClient,
    /// Answered since its threads were last woken.
    pub touched: bool,
    /// More of its threads may sleep than were woken.
    pub sleeps_on: bool,
    /// Its helper thread is to be woken: to look what still runs, or whether it is to yield.
    to_probe: bool,
    to_yield: bool,
    /// The last iteration in which it was woken.
    woken_in: u64,
    pub oddities: Oddities,
    /// Its requests, for the status; of high-priority clients.
    pub service: Option<Box<Service>>,
    /// Its units of work; of high-priority clients.
    pub marks: Option<Box<Marks>>,
    next_ticket: u64,
    stuck_since_ns: Option<u64>,
    stuck_look_ns: u64,
    abandoned_in_a_row: u64,
    /// The latest protocol breach; `oddities.breaches` counts them.
    breach: &'static str,
    kernels: KernelCache,
    unanswered: VecDeque<Unanswered>,
    streams: Box<[StreamProgress; STREAM_SLOTS]>,
    /// Streams with a launch not seen done.
    pending: u64,
    /// Streams of which a launch was granted since the engine last heard of them.
    dirty: u64,
    /// Stream that the next look begins with, so that all have their turn.
    first_stream: u32,
    /// By its own account, and as the engine was told: see [`Standstill`].
    says_busy: bool,
    busy: bool,
    stands: bool,
    busy_periods: u64,
    /// Time that it had been busy when it registered, ns: under other cores. With what of a period was over then.
    busy_before_ns: u64,
    /// What was told of that last: a period may be over and not counted yet.
    busy_told_ns: Cell<u64>,
    activity_looked_ns: u64,
    turnarounds_seen: u64,
    limit_costs_seen: u64,
    launches: Launches,
    probe: Probe,
    standstill: Standstill,
}

/// For how long a client has been busy, by its own account. Of a period, a shim counts the length when it ends.
fn busy_ns(activity: &Activity, now_ns: u64) -> u64 {
    let total_ns = activity.busy_total_ns.load(Relaxed);
    let is_busy = activity.busy_streams.load(SeqCst) != 0;
    let since_ns = activity.busy_since_ns.load(Relaxed);
    // Else it is the beginning of the period before.
    let is_open = is_busy && since_ns != 0 && since_ns >= activity.idle_since_ns.load(Relaxed);
    let open_ns = if is_open { now_ns.saturating_sub(since_ns) } else { 0 };
    total_ns.saturating_add(open_ns)
}

impl DispatchClient {
    pub fn new(link: NewClient, now_ns: u64, settings: &Settings) -> Self {
        let busy_periods = link.region.activity.busy_periods.load(Relaxed);
        let busy_before_ns = busy_ns(&link.region.activity, now_ns);
        let service = (link.info.class == Class::High).then(|| {
            let labels = link.info.labels.iter().map(|(key, value)| (&**key, &**value));
            // What is no objective was logged when it registered.
            Box::new(Service::new(Objective::of_labels(labels).unwrap_or_default(), now_ns))
        });
        let marks = service.is_some().then(|| {
            let mut marks = Box::new(Marks::new(&link.region.marks, &link.core.marks_read, now_ns));
            let labels = link.info.labels.iter().map(|(key, value)| (&**key, &**value));
            marks.set_tpot(now_ns, tpot_of_labels(labels).unwrap_or_default());
            marks
        });
        let link_turnarounds = link.region.turnarounds.count.load(Relaxed);
        DispatchClient {
            next_ticket: link.first_ticket,
            kernels: KernelCache::new(link.info.id, link.kernels.clone()),
            link,
            touched: false,
            sleeps_on: false,
            to_probe: false,
            to_yield: false,
            woken_in: 0,
            oddities: Oddities::default(),
            service,
            marks,
            stuck_since_ns: None,
            stuck_look_ns: 0,
            abandoned_in_a_row: 0,
            breach: "",
            unanswered: VecDeque::with_capacity(UNANSWERED_MAX),
            streams: Box::new([StreamProgress::default(); STREAM_SLOTS]),
            pending: 0,
            dirty: 0,
            first_stream: 0,
            says_busy: false,
            busy: false,
            stands: false,
            busy_periods,
            busy_before_ns,
            busy_told_ns: Cell::new(0),
            activity_looked_ns: now_ns,
            turnarounds_seen: link_turnarounds,
            limit_costs_seen: 0,
            launches: Launches::new(match settings.high_stall_ns {
                0 => settings.probe_after_ns,
                stall_ns => settings.probe_after_ns.min(stall_ns),
            }),
            probe: Probe::new(now_ns, settings.probe_after_ns),
            standstill: Standstill::default(),
        }
    }

    /// For how long it has been busy since it registered, by its own account, with the open period. Never less than
    /// what was told before: a period that ends is counted a moment later.
    pub fn busy_ns(&self, now_ns: u64) -> u64 {
        let all_ns = busy_ns(&self.link.region.activity, now_ns);
        let told_ns = self.busy_told_ns.get().max(all_ns.saturating_sub(self.busy_before_ns));
        self.busy_told_ns.set(told_ns);
        told_ns
    }

    pub fn id(&self) -> u32 {
        self.link.info.id
    }

    /// Whether it is high priority.
    pub fn is_high(&self) -> bool {
        self.link.info.class == Class::High
    }

    /// It is served no longer: give its part of the kernel table back.
    pub fn release_kernels(&mut self, engine: &mut Engine) {
        self.kernels.release(engine);
    }

    /// What its user's clients had in the present pass.
    fn user(&self) -> &UserPass {
        &self.link.kernels.pass
    }

    /// What it may have in this iteration of the loop.
    pub fn left(&self, iteration: u64, share: Share) -> Share {
        self.user().left(iteration, share)
    }

    /// Streams with a launch that is not seen done.
    pub fn pending(&self) -> u32 {
        self.pending.count_ones()
    }

    /// Whether a launch of it is not seen done.
    pub fn is_pending(&self) -> bool {
        self.pending != 0
    }

    /// How often it was busy for too long while no launch of it began or ended.
    pub fn standstills(&self) -> u64 {
        self.standstill.count()
    }

    /// Ask the client, if it is time: a high-priority one whether it is still busy, a best-effort one to report
    /// launches that have ended (the last ones before a pause may be unreported).
    pub fn poll_probe(&mut self, now_ns: u64) {
        if !self.says_busy && !self.is_pending() {
            return;
        }
        let launches = self.launches.look(now_ns, &self.link.region.counters);
        if self.probe.is_due(now_ns, launches) {
            self.write_probe();
        }
    }

    /// Have the thread of its shim look what still runs; [`DispatchClient::wake`] wakes it.
    pub fn write_probe(&mut self) {
        let word = &self.link.core.probes;
        word.store(word.load(Relaxed).wrapping_add(1), SeqCst);
        self.to_probe = true;
    }

    /// Whether [`DispatchClient::wake`] has something to do.
    pub fn is_to_be_woken(&self) -> bool {
        self.touched || self.sleeps_on || self.to_probe || self.to_yield
    }

    /// Wake its threads after answers, or those that are left from then: once an iteration, however often it is
    /// answered in it. The rest is for later iterations. False if its user has had its share of this one.
    pub fn wake(&mut self, iteration: u64) -> bool {
        let NewClient { region, core, kernels, .. } = &self.link;
        let user = &kernels.pass;
        if self.is_to_be_woken() && user.owes() {
            // They look around by themselves soon.
            (self.touched, self.sleeps_on) = (false, false);
            (self.to_probe, self.to_yield) = (false, false);
            return true;
        }
        let wake = |is_due: &mut bool, word| {
            if *is_due && user.may_wake(iteration) {
                *is_due = false;
                user.wake_some(word);
            }
        };
        // Others wait for it to yield.
        wake(&mut self.to_yield, &core.yielding.word);
        let is_due = (self.touched || self.sleeps_on) && self.woken_in != iteration;
        if is_due && user.may_wake(iteration) {
            self.woken_in = iteration;
            let woken = match std::mem::take(&mut self.touched) {
                // Without a system call if nobody sleeps.
                true => wait::wake_by(region, core, |word| user.wake_some(word)),
                false => Some(user.wake_some(&core.wake)),
            };
            self.sleeps_on = woken >= Some(wait::WAKES_MAX);
        }
        wake(&mut self.to_probe, &core.probes);
        user.may_wake(iteration)
    }

    /// When [`DispatchClient::poll_probe`] has something to do.
    pub fn next_probe_ns(&self) -> Option<u64> {
        (self.says_busy || self.is_pending()).then(|| self.probe.next_ns())
    }

    /// Tell the engine of completions.
    pub fn poll_completions(
        &mut self,
        now_ns: u64,
        share: Share,
        engine: &mut Engine,
        out: &mut Vec<Action>,
    ) -> Looked {
        let mut moved = false;
        // First: the engine finds the launch only while it is in flight.
        if self.link.region.turnarounds.count.load(Relaxed) != self.turnarounds_seen {
            self.poll_turnarounds(now_ns, share, engine);
        }
        if self.link.region.limit_costs.count.load(Relaxed) != self.limit_costs_seen {
            self.poll_limit_costs(engine);
        }
        let (mut left, mut streams) = (share.completions, 0);
        let mut still_dirty = self.dirty;
        // Those come first that there was too much for in the last pass.
        let first = self.first_stream;
        let mut mask = self.pending.rotate_right(first);
        while mask != 0 && left > 0 {
            let index = (mask.trailing_zeros() + first) % STREAM_SLOTS as u32;
            mask &= mask - 1;
            self.first_stream = (index + 1) % STREAM_SLOTS as u32;
            (left, streams) = (left - 1, streams + 1);
            still_dirty &= !(1 << index);
            let s = &mut self.streams[index as usize];
            let completion = &self.link.region.completions[index as usize];
            let done = completion.done.load(Acquire);
            let advanced = done != s.done && ring::is_done(done, s.done);
            if advanced {
                s.done = done;
            }
            moved |= advanced;
            let mut is_all = true;
            if advanced || self.dirty & (1 << index) != 0 {
                let measured = completion.measured();
                let measured = measured.map(|(completion, ns)| Measured { completion, ns });
                let id = self.link.info.id;
                // Each pass gets on.
                let most = left.max(1);
                let progress = engine.progress_some(now_ns, id, index, s.done, measured, most, out);
                left = left.saturating_sub(progress.ended);
                is_all = progress.is_all;
            }
            if !is_all {
                still_dirty |= 1 << index;
                moved = true;
            } else if ring::is_done(s.done, s.last_submitted) {
                self.pending &= !(1 << index);
            }
        }
        self.dirty = still_dirty;
        let completions = share.completions - left;
        self.user().used(Share { completions, ..Share::default() });
        Looked { moved, streams }
    }

    /// Hand its submissions to the engine.
    pub fn poll_submissions(
        &mut self,
        now_ns: u64,
        share: Share,
        engine: &mut Engine,
        profile_cache: &mut ProfileCache,
        out: &mut Vec<Action>,
    ) -> Taken {
        if let Some(why) = self.broke_too_much() {
            return Taken::Misbehaved(why);
        }
        let (mut launches, mut taken, first) = (0, 0, self.next_ticket);
        while taken < share.submissions && self.unanswered.len() < UNANSWERED_MAX {
            let ticket = self.next_ticket;
            match ring::poll(&self.link.region, ticket) {
                Polled::Empty => {
                    self.pass_over_stuck(now_ns);
                    break;
                }
                Polled::Abandoned => {
                    self.oddities.abandoned += 1;
                    self.abandoned_in_a_row += 1;
                    if self.abandoned_in_a_row > ABANDONED_MAX {
                        return Taken::Misbehaved("its ring holds tickets far in the future");
                    }
                }
                Polled::Request(request) => {
                    self.abandoned_in_a_row = 0;
                    launches += 1;
                    if let Some(what) = ring::breach(&self.link.region, ticket) {
                        self.note_breach(what);
                    }
                    self.submit(now_ns, ticket, &request, engine, profile_cache, out);
                }
            }
            taken += 1;
            self.stuck_since_ns = None;
            self.next_ticket = ticket + 1;
            ring::consume(&self.link.core, ticket);
        }
        self.user().used(Share { submissions: taken, ..Share::default() });
        // Leased launches wait for nothing else.
        self.touched |= taken > 0 && ring::made_room(&self.link.region, first);
        Taken::Launches(launches)
    }

    fn submit(
        &mut self,
        now_ns: u64,
        ticket: u64,
        request: &ring::Request,
        engine: &mut Engine,
        profile_cache: &mut ProfileCache,
        out: &mut Vec<Action>,
    ) {
        let index = request.stream as usize % STREAM_SLOTS;
        let s = &mut self.streams[index];
        if self.pending & (1 << index) == 0 {
            s.done = self.link.region.completions[index].done.load(Acquire);
        }
        s.last_submitted = request.completion;
        self.pending |= 1 << index;
        let started = request.flags & submission_flags::LEASED != 0;
        let NewClient { region, witness, .. } = &self.link;
        let kernel = self.kernels.id(region, request, witness, engine, profile_cache);
        let is_graph = request.flags & submission_flags::GRAPH != 0;
        let product =
            |a: [u32; 3]| a.iter().fold(1u64, |all, &n| all.saturating_mul(u64::from(n.max(1))));
        let submission = Submission {
            ticket,
            kernel,
            state: state_of(request.flags),
            offered: offered_by(request.flags),
            grid_blocks: if is_graph { request.grid[0].into() } else { product(request.grid) },
            block_threads: product(request.block).min(u32::MAX.into()) as u32,
            shared_bytes: request.shared_bytes,
            stream: index as u32,
            completion: request.completion,
            started,
            limited_sms: request.limited_sms,
        };
        let is_leased = engine.submitted(now_ns, self.link.info.id, submission, out);
        // Granted while it was on its way, and shown: there is nothing to answer. What is shown may have been taken
        // back in this pass already.
        let is_shown = ticket < self.link.core.granted.ticket.load(Relaxed);
        if started || (is_leased && is_shown) {
            self.dirty |= 1 << index;
        } else {
            self.unanswered.push_back(Unanswered {
                ticket,
                seen_ns: now_ns,
                stream: request.stream,
            });
        }
    }

    /// A thread took a ticket and was stopped, or died, before it published: do
    /// not let it hold the client's other threads for ever. If it comes after
    /// all, it finds its answer.
    fn pass_over_stuck(&mut self, now_ns: u64) {
        if now_ns < self.stuck_look_ns {
            return;
        }
        self.stuck_look_ns = now_ns.saturating_add(STUCK_LOOK_NS);
        let taken = self.link.region.activity.next_ticket.load(Relaxed);
        if taken <= self.next_ticket {
            self.stuck_since_ns = None;
            return;
        }
        self.check_tickets(taken);
        let since = *self.stuck_since_ns.get_or_insert(now_ns);
        if now_ns.saturating_sub(since) >= STUCK_NS {
            self.decide(self.next_ticket, Answer::Whole);
            self.oddities.skipped += 1;
            self.stuck_since_ns = None;
            self.next_ticket += 1;
            ring::consume(&self.link.core, self.next_ticket - 1);
        }
    }

    /// Grant every ticket below `until`; `answered` gets when each launch that
    /// this answers was seen.
    pub fn grant(&mut self, until: u64, mut answered: impl FnMut(u64)) {
        ring::grant(&self.link.core, until.max(self.granted_floor(self.next_ticket)));
        self.touched = true;
        while let Some(first) = self.unanswered.front().copied().filter(|u| u.ticket < until) {
            self.unanswered.pop_front();
            self.note_granted(first.stream);
            answered(first.seen_ns);
        }
    }

    /// Answer one ticket with a form.
    pub fn answer(&mut self, ticket: u64, answer: Answer, mut answered: impl FnMut(u64)) {
        self.decide(ticket, answer);
        if let Some(at) = self.unanswered.iter().position(|u| u.ticket == ticket)
            && let Some(u) = self.unanswered.remove(at)
        {
            self.note_granted(u.stream);
            answered(u.seen_ns);
        }
    }

    fn decide(&mut self, ticket: u64, answer: Answer) {
        // The slot's previous answer, a ring earlier, may not have been read
        // yet; let that launch run whole rather than wait for ever.
        let floor = self.granted_floor(ticket);
        if self.link.core.granted.ticket.load(Relaxed) < floor {
            ring::grant(&self.link.core, floor);
        }
        ring::decide(&self.link.core, ticket, answer);
        self.touched = true;
    }

    /// Tickets below this have been answered, and lose their decision slot to
    /// `ticket` or have lost it already.
    fn granted_floor(&self, ticket: u64) -> u64 {
        let oldest = self.unanswered.front().map_or(self.next_ticket, |u| u.ticket);
        ticket.saturating_sub(RING_SLOTS as u64 - 1).min(oldest)
    }

    /// Have its transformed launches yield, or go on.
    pub fn set_yielded(&mut self, now_ns: u64, yielded: bool) {
        let line = &self.link.core.yielding;
        line.at_ns.store(now_ns, Relaxed);
        let word = line.word.load(Relaxed);
        if (word & 1 != 0) != yielded {
            line.word.store(word.wrapping_add(1), SeqCst);
            self.to_yield = true;
        }
    }

    /// Have its leased launches run on at most so many SMs; 0: on all.
    pub fn set_width(&mut self, sms: u32) {
        self.link.core.granted.width_sms.store(sms, Release);
    }

    fn note_granted(&mut self, stream: u32) {
        self.dirty |= 1 << stream;
        self.pending |= 1 << stream;
    }

    /// Say that the core sleeps, or no longer does; `notify`: what it wants to be woken for ([`notify`]).
    pub fn set_parked(&self, parked: bool, notify: u32) {
        if self.is_high() {
            self.link.core.notify.store(if parked { notify } else { 0 }, SeqCst);
        }
        self.link.core.parked.store(parked.into(), SeqCst);
    }

    /// After [`DispatchClient::set_parked`]: whether something came that nobody
    /// will ring for.
    pub fn has_news(&self, notify: u32) -> bool {
        let a = &self.link.region.activity;
        if self.is_high()
            && notify & notify::ACTIVITY != 0
            && (a.busy_streams.load(SeqCst) != 0) != self.says_busy
        {
            return true;
        }
        let wants_units = notify & notify::UNITS != 0;
        let has_units = |marks: &Marks| {
            marks.has_more() || wants_units && marks.has_ended(&self.link.region.marks)
        };
        self.has_launches() || self.marks.as_deref().is_some_and(has_units)
    }

    /// Whether its ring has something that would be taken.
    pub fn has_launches(&self) -> bool {
        self.unanswered.len() < UNANSWERED_MAX
            && ring::has_come(&self.link.region, self.next_ticket)
    }

    /// Whether a launch of it was read and is not answered: the policy holds it.
    pub fn waits(&self) -> bool {
        !self.unanswered.is_empty()
    }

    /// Nothing more to read from its ring.
    pub fn is_drained(&self) -> bool {
        self.unanswered.is_empty() && !ring::has_come(&self.link.region, self.next_ticket)
    }
}

#[cfg(test)]
mod tests;
