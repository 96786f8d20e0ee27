//! The dispatch thread: owns the engine and every client's shared memory.
//!
//! One pass of its loop: high-priority activity, completions, time, submissions; answers
//! go out after each. After `spin` without anything new it parks:
//!
//! ```text
//! passes --(idle for `spin`)--> set `parked` in every client's region
//!   ^                              look at every ring again (SeqCst)
//!   |                              sleep: doorbells, control, next deadline
//!   +------- clear `parked` <------+
//! ```
//!
//! A client publishes and then reads `parked`; the core stores `parked` and then
//! reads the ring: one of the two sees the other (`core/ipc/tests/loom.rs`).
//!
//! What a pass does for one client, and for all of one user, is bounded ([`share`]), whatever they have asked for or
//! made to wait: the rest is done in later passes, behind what others ask for.
//!
//! It must never wait: not for a lock that another thread may hold, and not for a log line to be
//! written. Log lines (a policy's, and those about its faults) go into a bounded queue of the log's
//! own thread, which drops lines rather than let anybody wait. Nor may it allocate without bound. Read next: [`client`]
//! for what is read from clients, [`control`] for what the control plane may ask.

pub mod background;
pub mod client;
pub mod control;
pub mod handover;
#[cfg(any(test, fuzzing))]
pub mod harness;
mod heartbeat;
pub mod kernels;
pub mod latency;
pub mod marks;
pub mod measure;
pub mod min_share;
pub mod park;
mod pass;
pub mod probe;
pub mod profile_cache;
pub mod service;
pub mod share;
pub mod snapshot;
pub mod standstill;
mod start;

pub use start::{Handle, Settings, start};

use crate::loader::{Loaded, saved_state};
use background::Background;
use client::DispatchClient;
use control::{AskedMinShare, Control, ControlReceiver, Left, NewClient, Notice, Retired};
use handover::{FaultCost, SwapPause};
use latency::Latency;
use measure::Measuring;
use min_share::MinShares;
use park::Parker;
use pass::Order;
use profile_cache::ProfileCache;
use share::Share;
use snapshot::{ClientNumbers, Job};
use std::sync::atomic::Ordering::{Release, SeqCst};
use tally_contract::objective::Objective;
use tally_decision_log::{Recorded, Recorder};
use tally_engine::Action;
use tally_engine::policy::{Decision, Policy, Subscriptions};
use tally_ipc::layout::notify;
use tally_ipc::ring::Answer;
use tally_ipc::wait::{self, now_ns};
use tokio::sync::{mpsc, oneshot};

/// Notices waiting for the control plane.
const NOTICES_MAX: usize = 256;
/// Requests of the control plane taken in one pass.
const REQUESTS_MAX: usize = 16;
/// Shortest time between two reports to clients of how many there are. Each report wakes every client, and
/// anybody who may connect can cause one.
const NEIGHBOURS_NS: u64 = 100_000_000;

/// The engine, with the policy that it owns.
pub type Engine = tally_engine::Engine<Recorded<Loaded>>;

/// The loop spins without a pause for so long after the last activity: a pause takes as long as half an iteration (some
/// 60 ns on AMD EPYC), and whoever launched just now is likely to launch again.
const EAGER_NS: u64 = 50_000;

/// Kernels of clients that left given back in one pass.
const SWEPT: usize = 64;

struct Draining {
    until_ns: u64,
    done: oneshot::Sender<bool>,
}

/// What comes after an iteration of the loop.
enum Next {
    /// Iterate again at once.
    Busy,
    /// Iterate again: nothing has come for a while.
    Waiting,
    /// Sleep, unless something has come.
    Idle,
    Ended,
}

struct Dispatch {
    settings: Settings,
    engine: Engine,
    /// In rising order of their ids.
    #[expect(clippy::vec_box, reason = "moved out whole when one leaves, and 3 KiB each")]
    clients: Vec<Box<DispatchClient>>,
    /// What is done for each client in a pass, at most.
    share: Share,
    control: ControlReceiver,
    notices: mpsc::Sender<Notice>,
    parker: Parker,
    actions: Vec<Action>,
    /// Generation of the active policy.
    generation: u64,
    /// The control plane has been told that the active policy is disabled.
    noticed: bool,
    swap_pause: SwapPause,
    /// Fault costs of the policies before the active one.
    fault_cost: FaultCost,
    recorder: Recorder,
    decision: Latency,
    held: Latency,
    measuring: Measuring,
    min_shares: MinShares,
    profile_cache: ProfileCache,
    status: Option<Job>,
    background: Option<Background>,
    draining: Option<Draining>,
    /// Notices about dropped clients that the control plane has not heard of yet; it closes their connections.
    dropped: Vec<Notice>,
    /// Clients that the next pass begins with.
    order: Order,
    /// Passes until all streams were looked at.
    looks_left: u32,
    /// The number of clients has changed, or was told last.
    neighbours_changed: bool,
    neighbours_told_ns: u64,
    last_active_ns: u64,
    last_progress_ns: u64,
    next_heartbeat_ns: u64,
    /// When the next heartbeat within a pass is due, by the clock and not by the time of the pass, ns.
    next_beat_ns: u64,
    iterations: u64,
    parks: u64,
}

impl Dispatch {
    fn new(
        settings: Settings,
        policy: Loaded,
        recorder: Recorder,
        profile_cache: ProfileCache,
        control: ControlReceiver,
        parker: Parker,
        notices: mpsc::Sender<Notice>,
    ) -> Self {
        let active = Recorded::new(policy, 1, recorder.clone());
        Dispatch {
            settings,
            engine: Engine::with_policy(settings.engine, active),
            clients: Vec::new(),
            share: Share::of(0),
            control,
            notices,
            parker,
            actions: Vec::new(),
            generation: 1,
            noticed: false,
            swap_pause: SwapPause::new(),
            fault_cost: FaultCost::default(),
            recorder,
            decision: Latency::new(),
            held: Latency::new(),
            measuring: Measuring::default(),
            min_shares: MinShares::default(),
            profile_cache,
            status: None,
            background: None,
            draining: None,
            dropped: Vec::new(),
            order: Order::default(),
            looks_left: 0,
            neighbours_changed: false,
            neighbours_told_ns: 0,
            last_active_ns: now_ns(),
            last_progress_ns: 0,
            next_heartbeat_ns: 0,
            next_beat_ns: 0,
            iterations: 0,
            parks: 0,
        }
    }

    fn run(mut self) {
        loop {
            match self.iterate(now_ns()) {
                Next::Busy => {}
                Next::Waiting => std::hint::spin_loop(),
                Next::Idle => self.park(),
                Next::Ended => return,
            }
        }
    }

    /// Does once all that is due now.
    fn iterate(&mut self, now: u64) -> Next {
        self.iterations += 1;
        self.engine.begin_pass();
        let mut active = self.take_control(now);
        active |= self.pass(now);
        if self.recorder.is_on() {
            let (world, policy) = self.engine.world_and_policy();
            let mut state = || policy.inner_mut().observe().map(saved_state);
            active |= self.recorder.pump(world, &mut state);
        }
        if now >= self.next_heartbeat_ns {
            self.heartbeat(now);
        }
        if self.neighbours_changed && now >= self.neighbours_due_ns() {
            self.tell_of_neighbours(now);
        }
        self.report();
        if let Some(background) = self.background.take() {
            self.background = background.step(&mut self.engine, &self.profile_cache);
        }
        self.wake();
        let sweeps = self.engine.sweep_kernels(SWEPT);
        if self.has_drained(now) {
            return Next::Ended;
        }
        if active {
            self.last_active_ns = now;
        }
        let spins = now.saturating_sub(self.last_active_ns) < self.settings.spin_ns
            || self.status.is_some()
            || self.background.is_some()
            || sweeps
            || self.clients.iter().any(|c| c.is_to_be_woken());
        match spins {
            true if now.saturating_sub(self.last_active_ns) < EAGER_NS => Next::Busy,
            true => Next::Waiting,
            false => Next::Idle,
        }
    }

    /// The active policy, or the built-in rule.
    fn policy(&self) -> &Loaded {
        self.engine.policy().inner()
    }

    /// Whether anything depends on how long high-priority clients are busy.
    fn wants_high_activity(&self) -> bool {
        self.policy().subscriptions().has(Subscriptions::ACTIVITY)
            || self.engine.has_waiting()
            || self.measuring.is_on()
    }

    /// What a core that sleeps wants to be woken for. The end of a unit matters only to launches that the policy holds.
    fn wants_news(&self) -> u32 {
        let units = self.policy().subscriptions().has(Subscriptions::UNITS);
        let activity = if self.wants_high_activity() { notify::ACTIVITY } else { 0 };
        activity | if units && self.engine.has_waiting() { notify::UNITS } else { 0 }
    }

    /// Write the engine's answers into the regions and wake who waits for them.
    fn apply(&mut self, now: u64) {
        let mut answered_ns = None;
        for action in self.actions.drain(..) {
            let (id, ticket, answer) = match action {
                Action::Grant { client, until } => (client, until, None),
                Action::Decide { client, ticket, decision, predicted_ns } => {
                    (client, ticket, Some(answer_of(decision, predicted_ns)))
                }
                Action::Yield { client, yielded } => {
                    if let Ok(at) = self.clients.binary_search_by_key(&client, |c| c.id()) {
                        self.clients[at].set_yielded(now, yielded);
                    }
                    continue;
                }
                Action::SetWidth { client, sms } => {
                    if let Ok(at) = self.clients.binary_search_by_key(&client, |c| c.id()) {
                        self.clients[at].set_width(sms);
                    }
                    continue;
                }
            };
            let Ok(at) = self.clients.binary_search_by_key(&id, |c| c.id()) else { continue };
            let note = |seen_ns: u64| {
                let latency = if seen_ns == now { &mut self.decision } else { &mut self.held };
                let at = *answered_ns.get_or_insert_with(now_ns);
                latency.record(at.saturating_sub(seen_ns));
            };
            match answer {
                None => self.clients[at].grant(ticket, note),
                Some(answer) => self.clients[at].answer(ticket, answer, note),
            }
        }
        self.wake();
    }

    fn park(&mut self) {
        if self.may_sleep() {
            self.parks += 1;
            let now = now_ns();
            self.parker.sleep(self.sleep_ns(now));
        }
        for c in &self.clients {
            c.set_parked(false, 0);
        }
    }

    /// Say that the core sleeps. True if nothing has come that nobody will ring for.
    fn may_sleep(&self) -> bool {
        let notify = self.wants_news();
        for c in &self.clients {
            c.set_parked(true, notify);
        }
        !self.control.is_pending() && !self.clients.iter().any(|c| c.has_news(notify))
    }

    /// How long there is nothing to do unless somebody rings.
    fn sleep_ns(&self, now: u64) -> u64 {
        let mut until = self.next_heartbeat_ns;
        if self.neighbours_changed {
            until = until.min(self.neighbours_due_ns());
        }
        if let Some(due) = self.engine.next_deadline_ns() {
            until = until.min(due);
        }
        if self.engine.has_in_flight() {
            // Rarer the longer nothing ends, so that a kernel that never does
            // costs no CPU; finer while a launch waits for it. The engine learns
            // from measurements that are off by less than a quarter.
            let part = if self.engine.has_waiting() { 64 } else { 4 };
            let stalled = now.saturating_sub(self.last_progress_ns);
            until = until.min(now + (stalled / part).max(self.settings.completion_poll_ns));
        }
        let high = self.wants_high_activity();
        let asked = self.clients.iter().filter(|c| high || !c.is_high());
        if let Some(due) = asked.filter_map(|c| c.next_probe_ns()).min() {
            until = until.min(due);
        }
        if let Some(draining) = &self.draining {
            until = until.min(draining.until_ns).min(now + 1_000_000);
        }
        until.saturating_sub(now)
    }

    fn take_control(&mut self, now: u64) -> bool {
        let mut any = false;
        for _ in 0..REQUESTS_MAX {
            if !self.control.is_pending() {
                break;
            }
            let Some(request) = self.control.next() else { break };
            any = true;
            match request {
                Control::Join { client, min_share, done } => {
                    let id = client.info.id;
                    self.join(now, *client);
                    if let Some(AskedMinShare { asked, allowed }) = min_share {
                        self.set_min_share(now, id, asked, Some(allowed));
                    }
                    let _ = done.send(());
                }
                Control::Leave { id, done } => {
                    let at = self.clients.binary_search_by_key(&id, |c| c.id());
                    let _ = done.send(at.ok().map(|at| self.remove(now, at)));
                }
                Control::Status { kernels, done } => {
                    let last = self.clients.last().map_or(0, |client| client.id());
                    self.status = Some(Job::new(done, kernels, last));
                }
                Control::LastFault { done } => {
                    let figures = self.policy().figures();
                    let _ = done.send(figures.and_then(|figures| figures.last_fault));
                }
                // One of these at a time, too.
                Control::Profiled { from, done } => {
                    self.background = Some(Background::collect(from, done))
                }
                Control::Forget { done } => {
                    self.background = Some(Background::forget(&mut self.profile_cache, done));
                }
                Control::SavePolicy { done } => {
                    let start = now_ns();
                    let saved = self.engine.policy_mut().inner_mut().snapshot();
                    self.swap_pause.snapshot(now_ns().saturating_sub(start));
                    match &saved {
                        Some(Err(fault)) => {
                            self.engine.note_fault(now, fault.clone(), &mut self.actions);
                        }
                        _ => self.engine.note_disabled(now, &mut self.actions),
                    }
                    self.apply(now);
                    let _ = done.send(saved);
                }
                Control::SetObjectives { id, objective, tpot_ns, done } => {
                    let _ = done.send(self.set_objectives(now, id, objective, tpot_ns));
                }
                Control::SetMinShare { id, asked, allowed, done } => {
                    let _ = done.send(self.set_min_share(now, id, asked, allowed));
                }
                Control::Recent { limits_ns, done } => {
                    let services = self.clients.iter().filter_map(|c| c.service.as_deref());
                    let _ = done.send(service::recent(services, now, &limits_ns));
                }
                Control::Measure { next, cut, done } => {
                    let (clients, engine) = (&mut self.clients, &self.engine);
                    let _ = done.send(self.measuring.exchange(now, next, cut, clients, engine));
                }
                Control::SetPolicy { policy, generation, done } => {
                    let _ = done.send(self.set_policy(now, policy, generation));
                }
                Control::Tap { tap, done } => {
                    let about = self.engine.policy().about();
                    let subscribed = self.policy().subscriptions();
                    self.recorder.insert(*tap, self.engine.world(), about, subscribed);
                    let _ = done.send(());
                }
                Control::Untap { id, done } => {
                    let _ = done.send(self.recorder.remove(id, self.engine.world_mut()));
                }
                Control::Drain { within, done } => self.drain(now, within, done),
            }
        }
        any
    }

    /// False if there is no such high-priority client.
    fn set_objectives(
        &mut self,
        now: u64,
        id: u32,
        objective: Option<Objective>,
        tpot_ns: Option<u64>,
    ) -> bool {
        let client = self.clients.iter_mut().find(|c| c.id() == id);
        let Some((service, marks)) = client.and_then(|c| c.service.as_mut().zip(c.marks.as_mut()))
        else {
            return false;
        };
        if marks.tpot_ns() != tpot_ns {
            marks.set_tpot(now, tpot_ns);
        }
        if service.objective() != objective {
            service.set_objective(objective);
        }
        self.engine.set_objectives(now, id, objective, tpot_ns, &mut self.actions);
        self.apply(now);
        true
    }

    fn join(&mut self, now: u64, new: NewClient) {
        let (info, first_ticket) = (new.info.clone(), new.first_ticket);
        new.core.consumed.store(first_ticket, Release);
        self.clients.push(Box::new(DispatchClient::new(new, now, &self.settings)));
        // Ids rise, but registrations overtake each other between the threads.
        self.clients.sort_by_key(|c| c.id());
        self.share = Share::of(self.clients.len());
        let id = info.id;
        self.engine.client_joined(now, info, first_ticket, &mut self.actions);
        self.apply(now);
        let best_effort = self.best_effort();
        if let Ok(at) = self.clients.binary_search_by_key(&id, |c| c.id()) {
            let core = &self.clients[at].link.core;
            core.neighbours.store(best_effort, SeqCst);
            core.serving.store(u32::from(self.draining.is_none()), SeqCst);
        }
        self.neighbours_changed = true;
        // The first heartbeat at once: a client that waits looks for it.
        self.next_heartbeat_ns = now;
    }

    /// High-priority clients linger on the GPU only if there is somebody to keep it from;
    /// best-effort ones have longer time slices where they share it with one another.
    fn tell_of_neighbours(&mut self, now: u64) {
        (self.neighbours_changed, self.neighbours_told_ns) = (false, now);
        let best_effort = self.best_effort();
        for client in &mut self.clients {
            let before = client.link.core.neighbours.swap(best_effort, SeqCst);
            if before != best_effort && !client.is_high() {
                client.write_probe();
            }
        }
    }

    fn neighbours_due_ns(&self) -> u64 {
        self.neighbours_told_ns.saturating_add(NEIGHBOURS_NS)
    }

    fn best_effort(&self) -> u32 {
        self.clients.iter().filter(|c| !c.is_high()).count() as u32
    }

    fn remove(&mut self, now: u64, at: usize) -> Left {
        if self.measuring.is_on() && self.clients[at].is_high() {
            self.measure_last(now, at);
        }
        let mut client = self.clients.remove(at);
        self.share = Share::of(self.clients.len());
        self.parker.forget(&client.link.doorbell);
        let numbers = ClientNumbers::of(&client, &self.engine, &self.min_shares);
        client.link.core.serving.store(0, SeqCst);
        // Those that are not woken look around by themselves soon.
        let NewClient { region, core, kernels, .. } = &client.link;
        if !kernels.pass.owes() {
            let _ = wait::wake_by(region, core, |word| kernels.pass.wake_some(word));
        }
        self.engine.client_left(now, client.id(), &mut self.actions);
        client.release_kernels(&mut self.engine);
        self.forget_min_share(now, client.id());
        if let Some(status) = &mut self.status {
            status.forget(client.id());
        }
        self.apply(now);
        self.neighbours_changed = true;
        Left { numbers, _client: client }
    }

    /// Stop serving a client that breaks the protocol. Its record goes when the
    /// control plane has closed its connection.
    fn cut_off(&mut self, now: u64, at: usize, why: &'static str) {
        let id = self.clients[at].id();
        let left = Box::new(self.remove(now, at));
        self.dropped.push(Notice::Misbehaved { id, why, left });
        self.next_heartbeat_ns = now;
    }

    fn set_policy(&mut self, now: u64, policy: Loaded, generation: u64) -> Retired {
        (self.generation, self.noticed) = (generation, false);
        let start = now_ns();
        let active = Recorded::new(policy, generation, self.recorder.clone());
        let faults = self.engine.policy_stats().faults.values().sum();
        let old = self.engine.set_policy(now, active, &mut self.actions);
        // Who waited has been decided by the new one; answering them is as ever.
        self.swap_pause.swap(now_ns().saturating_sub(start));
        self.apply(now);
        let policy = old.into_inner();
        self.fault_cost = self.fault_cost.and(policy.fault_cost());
        Retired { faults, policy }
    }

    fn drain(&mut self, now: u64, within: std::time::Duration, done: oneshot::Sender<bool>) {
        let old = {
            let all = Recorded::new(Loaded::grant_all(), self.generation + 1, Recorder::default());
            self.engine.set_policy(now, all, &mut self.actions)
        };
        self.apply(now);
        for c in &self.clients {
            tally_ipc::ring::grant(&c.link.core, u64::MAX);
            c.link.core.serving.store(0, SeqCst);
            let _ = wait::wake(&c.link.region, &c.link.core);
        }
        // The process is ending: what else it takes does not matter.
        drop(old);
        self.draining =
            Some(Draining { until_ns: now.saturating_add(within.as_nanos() as u64), done });
    }

    /// Whether the thread is done: rings empty, or out of time.
    fn has_drained(&mut self, now: u64) -> bool {
        let Some(draining) = &self.draining else { return false };
        let empty = self.clients.iter().all(|c| c.is_drained()) && !self.engine.has_waiting();
        if !empty && now < draining.until_ns {
            return false;
        }
        if let Some(draining) = self.draining.take() {
            let _ = draining.done.send(empty);
        }
        true
    }
}

fn answer_of(decision: Decision, predicted_ns: u64) -> Answer {
    match decision {
        Decision::Sliced(blocks) => Answer::Slice(blocks),
        // Up: 0 is a kernel that was not measured.
        Decision::Preemptible => {
            Answer::Preemptible(predicted_ns.div_ceil(1_000).min(u32::MAX.into()) as u32)
        }
        Decision::SmLimited(sms) => Answer::SmLimited(sms),
        Decision::Run(_) | Decision::Hold(_) | Decision::HoldUntilCompletion(_) => Answer::Whole,
    }
}

/// The built-in rule without an idle gap, for tests of this module's parts.
#[cfg(test)]
fn built_in() -> Recorded<Loaded> {
    unrecorded(Loaded::built_in(0))
}

#[cfg(test)]
fn unrecorded(policy: Loaded) -> Recorded<Loaded> {
    Recorded::new(policy, 1, Recorder::default())
}
