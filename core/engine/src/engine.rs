//! The state machine of one GPU.
//!
//! Inputs are methods that take the time as their first argument; outputs are
//! [`Action`]s pushed to a buffer of the caller's. Inputs must come in order of
//! time. After every input the engine has offered whatever may now run; between
//! inputs it needs [`Engine::tick`] at [`Engine::next_deadline_ns`].
//!
//! A best-effort launch goes through these states:
//!
//! ```text
//! submitted -> (head of its client's queue) -> room in the window? -> policy
//!    policy: run/sliced/... -> in flight -> done (measured, profile updated)
//!    policy: hold -> offered again when the hold is over or something changed
//! ```

mod floors;
mod offer;
mod profiles;
mod progress;
mod rule;
mod state;
mod units;
mod yielding;

pub use floors::Had;

pub use progress::{ClientWork, Progress, WorkDone};
pub use rule::{BuiltInRule, built_in_rule};
pub use state::{ClientState, WaitsFor};
pub use units::{EndedUnits, OpenUnit};

use crate::client::{Client, ClientStats, Granted, Submission};
use crate::clients::Clients;
use crate::policy::{
    Class, ClientId, ClientInfo, Context, Decision, Event, Fault, FaultKind, Form, KernelId,
    Policy, SharingMode, Subscriptions, World, forms_offered,
};
use crate::profile::{KernelKey, Profiles};
use std::collections::{BTreeMap, BinaryHeap};
use tally_contract::limits::{HOLD_NS_MAX, RESERVES_MAX, STALL_NS, TIMERS_TICK_MAX};
use tally_contract::widths;

/// What the caller must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Let every ticket of the client below `until` run whole, now.
    Grant {
        client: ClientId,
        /// `u64::MAX`: the client is ungated. Lowered when the client becomes gated again, but never below a ticket
        /// that was already answered, or submitted while ungated.
        until: u64,
    },
    /// Run one ticket in a form other than whole.
    Decide {
        client: ClientId,
        ticket: u64,
        /// Only `Sliced`, `Preemptible` or `SmLimited`.
        decision: Decision,
        /// Expected to take so long, whole; 0 if unknown.
        predicted_ns: u64,
    },
    /// Have a client's sliced and preemptible launches stop at their next boundary, or go on.
    Yield { client: ClientId, yielded: bool },
    /// Have a client's leased launches run on at most so many SMs, if they can; 0: on all.
    SetWidth { client: ClientId, sms: u32 },
}

/// Settings, fixed at start but for `sm_count`.
#[derive(Clone, Copy, Debug)]
pub struct EngineConfig {
    /// In-flight window of a client until its policy sets another.
    pub window_ns: u64,
    /// Longest hold; longer ones are shortened to it.
    pub hold_ns_max: u64,
    /// Idle gap that the built-in rule waits for after high-priority work.
    pub built_in_rule_idle_ns: u64,
    /// A full window in which nothing ends for so long lets another launch in, then two, four and up to 256:
    /// what is in flight may be waiting for it (kernels that meet across streams
    /// or GPUs).
    pub window_stall_ns: u64,
    /// A policy that holds launches for so long while the GPU has nothing to do stalls
    /// it: a fault, and the built-in rule answers. `u64::MAX`: it may.
    pub policy_stall_ns: u64,
    /// SMs of the GPU; 0 if unknown.
    pub sm_count: u32,
    pub sharing: SharingMode,
    /// SMs that each partition leaves free; 0: no partition.
    pub reserve_sms: [u32; RESERVES_MAX],
}

impl EngineConfig {
    /// SMs of the partition on which a launch that is limited to so many runs; `None`: there is none.
    pub(crate) fn partition_of(&self, sms: u32) -> Option<u32> {
        widths::partition_of(self.sm_count, &self.reserve_sms, sms)
    }
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            window_ns: 1_000_000,
            hold_ns_max: HOLD_NS_MAX,
            built_in_rule_idle_ns: 100_000,
            window_stall_ns: 500_000_000,
            policy_stall_ns: STALL_NS,
            sm_count: 0,
            sharing: SharingMode::Concurrent,
            reserve_sms: [0; RESERVES_MAX],
        }
    }
}

/// Counts for people about the active policy.
#[derive(Clone, Debug, Default)]
pub struct PolicyStats {
    /// Launches that the policy was asked about.
    pub decides: u64,
    /// Events that it was told.
    pub events: u64,
    /// Decisions by the built-in rule.
    pub built_in_rule_decisions: u64,
    /// Faults by kind, of all policies of this run; of a disabled one, the calls not made.
    pub faults: BTreeMap<FaultKind, u64>,
    pub last_fault: Option<Fault>,
}

/// Launches of one client waiting; the ring bounds it far below.
const WAITING_MAX: usize = 4_096;
/// Commands carried out after one input, so that a policy which answers every
/// event with a command that causes an event cannot keep the engine.
const ROUNDS_MAX: usize = 16;

/// The scheduler of one GPU, with a policy that it owns.
pub struct Engine<P = Box<dyn Policy + Send>> {
    config: EngineConfig,
    policy: P,
    context: Context,
    clients: Clients,
    /// The policy is disabled; what it had set up is undone.
    disabled: bool,
    /// A client was told to yield, and not yet to go on.
    has_yielded: bool,
    /// Min-heap by time of `(due, token)`, lazily deleted against `timers`.
    timer_heap: BinaryHeap<std::cmp::Reverse<(u64, u64)>>,
    timers: BTreeMap<u64, u64>,
    beside: progress::Beside,
    high_active: bool,
    /// How often it has begun to be.
    high_periods: u64,
    /// When high-priority activity last ended; `None` if there never was any.
    high_idle_since_ns: Option<u64>,
    /// Launches have waited since then although the GPU had nothing to do.
    idle_since_ns: Option<u64>,
    /// When to look whether clients yield in vain.
    look_at_yields_ns: Option<u64>,
    /// Something changed that could make a held launch runnable.
    offer_all: bool,
    /// Launches wait that could be offered: there were too many at once.
    offers_left: bool,
    /// Number of the latest round of offers: see [`Client::owed_since`].
    round: u64,
    /// Pass of that round.
    settled_in: u64,
    /// A client may hold until another's launch ends.
    completion_holds: bool,
    /// Clients with a launch waiting, and high-priority ones: kept, not counted
    /// anew for every decision.
    waiting_clients: u32,
    high_clients: u32,
    stats: PolicyStats,
    best_effort: progress::Totals,
    order: Vec<ClientId>,
    /// Number of the pass: see [`Engine::begin_pass`]; 0 before the first.
    pass: u64,
    /// Offers left in this pass.
    pass_offers: usize,
}

impl Engine {
    /// An engine with its first policy, of any kind.
    pub fn new(config: EngineConfig, policy: Box<dyn Policy + Send>) -> Self {
        Engine::with_policy(config, policy)
    }
}

impl<P: Policy> Engine<P> {
    /// An engine with its first policy, which can be reached by its own type.
    pub fn with_policy(config: EngineConfig, policy: P) -> Self {
        let mut engine = Engine {
            config,
            policy,
            context: Context {
                world: Box::new(World {
                    sharing: config.sharing,
                    reserve_sms: config.reserve_sms.into_iter().filter(|sms| *sms > 0).collect(),
                    ..World::default()
                }),
                ..Context::default()
            },
            clients: Clients::default(),
            disabled: false,
            has_yielded: false,
            timer_heap: BinaryHeap::new(),
            timers: BTreeMap::new(),
            beside: progress::Beside::default(),
            high_active: false,
            high_periods: 0,
            high_idle_since_ns: None,
            idle_since_ns: None,
            look_at_yields_ns: None,
            offer_all: false,
            offers_left: false,
            round: 0,
            settled_in: 0,
            completion_holds: false,
            waiting_clients: 0,
            high_clients: 0,
            stats: PolicyStats::default(),
            best_effort: progress::Totals::default(),
            order: Vec::new(),
            pass: 0,
            pass_offers: 0,
        };
        engine.context.world.profiles.set_sm_count(engine.config.sm_count);
        // What it asks for is carried out with the first call: there is no time yet.
        engine.policy.start(&mut engine.context);
        engine
    }

    /// Set the GPU's number of SMs once it is known.
    pub fn set_sm_count(&mut self, sm_count: u32) {
        self.config.sm_count = sm_count;
        self.context.world.profiles.set_sm_count(sm_count);
    }

    /// The id of a kernel; `None` when too many are known.
    pub fn intern(&mut self, key: &KernelKey) -> Option<u32> {
        self.context.world.profiles.intern(key)
    }

    /// What is known of kernels and clients.
    pub fn world(&self) -> &World {
        &self.context.world
    }

    /// The world that policies read, for a caller that watches it change (see
    /// [`Profiles::watch`](crate::profile::Profiles::watch)). What policies were told of clients and kernels
    /// must not be changed.
    pub fn world_mut(&mut self) -> &mut World {
        &mut self.context.world
    }

    pub fn policy_stats(&self) -> &PolicyStats {
        &self.stats
    }

    pub fn policy(&self) -> &P {
        &self.policy
    }

    /// The active policy. Calls of it belong to the engine.
    pub fn policy_mut(&mut self) -> &mut P {
        &mut self.policy
    }

    /// What the policy may read, and the policy.
    pub fn world_and_policy(&mut self) -> (&mut World, &mut P) {
        (&mut self.context.world, &mut self.policy)
    }

    /// Figures since it was added; `None` if the client is not known.
    pub fn client_stats(&self, client: ClientId) -> Option<ClientStats> {
        self.clients.get(&client).map(|c| c.stats)
    }

    /// Whether high-priority work is on the GPU.
    pub fn high_active(&self) -> bool {
        self.high_active
    }

    /// Whether any client waits for a decision.
    pub fn has_waiting(&self) -> bool {
        self.waiting_clients > 0
    }

    /// Whether any launch's completion is awaited.
    pub fn has_in_flight(&self) -> bool {
        self.clients.values().any(|c| c.in_flight > 0)
    }

    /// Make another policy the active one: it takes over between two decisions. It is
    /// told of every connected client. Grants and windows that the old policy
    /// had changed go back to their defaults. Returns the old policy, to be
    /// dropped elsewhere.
    pub fn set_policy(&mut self, now_ns: u64, policy: P, out: &mut Vec<Action>) -> P {
        let old = std::mem::replace(&mut self.policy, policy);
        self.undo_policy(out);
        self.disabled = false;
        self.idle_since_ns = None;
        self.policy.start(&mut self.context);
        self.carry_out(now_ns, out);
        let infos: Vec<_> = self.clients.values().map(|c| c.info.clone()).collect();
        for info in infos {
            self.tell(now_ns, &Event::Joined(info), out);
        }
        if self.high_active {
            self.tell(now_ns, &Event::HighStarted, out);
        }
        self.tell_open_units(now_ns, out);
        self.offer_all = true;
        self.settle(now_ns, out);
        old
    }

    /// A client registered; its submissions start at `first_ticket`.
    pub fn client_joined(
        &mut self,
        now_ns: u64,
        info: ClientInfo,
        first_ticket: u64,
        out: &mut Vec<Action>,
    ) {
        let id = info.id;
        // A newcomer starts level with the least served, not with a claim on
        // all the time it was not there.
        let served = self
            .clients
            .values()
            .filter(|c| c.info.class == Class::BestEffort)
            .map(|c| c.served_ns)
            .min()
            .unwrap_or(0);
        let client = Client::new(info.clone(), self.config.window_ns, first_ticket, served);
        out.push(Action::Grant { client: id, until: client.granted_until });
        self.high_clients += u32::from(info.class == Class::High);
        if let Some(old) = self.clients.insert(id, client) {
            self.forget(now_ns, &old);
        }
        self.context.world.clients.insert(id, info.clone().into());
        self.tell(now_ns, &Event::Joined(info), out);
        self.offer_all = true;
        self.settle(now_ns, out);
    }

    /// A client is gone; all of it is forgotten but its kernels' profiles.
    pub fn client_left(&mut self, now_ns: u64, client: ClientId, out: &mut Vec<Action>) {
        self.end_open_unit(now_ns, client, out);
        let Some(old) = self.clients.remove(client) else { return };
        self.forget(now_ns, &old);
        self.context.world.clients.remove(&client);
        self.note_high(now_ns, None, out);
        self.tell(now_ns, &Event::Left(client), out);
        self.offer_all = true;
        self.settle(now_ns, out);
    }

    /// A launch arrived. Unknown clients are ignored. True if it was granted before, or started: then no action answers
    /// it.
    pub fn submitted(
        &mut self,
        now_ns: u64,
        client: ClientId,
        submission: Submission,
        out: &mut Vec<Action>,
    ) -> bool {
        let high_active = self.high_active;
        let Some(c) = self.clients.get_mut(client) else { return false };
        c.stats.submitted += 1;
        let is_leased = submission.started || submission.ticket < c.granted_until;
        if is_leased {
            let predicted = predicted_ns(&self.context.world.profiles, c, submission.kernel);
            c.stats.leased += 1;
            let periods = high_periods(high_active, self.high_periods);
            let was_active = c.is_active();
            let mut how = Granted::whole(predicted, periods);
            let can_limit = submission.offered & forms_offered::SM_LIMITED != 0;
            // A client's word: believed where it can be true.
            if submission.started
                && submission.limited_sms > 0
                && can_limit
                && c.info.class == Class::BestEffort
                && let Some(sms) = self.config.partition_of(submission.limited_sms)
            {
                (how.form, how.argument) = (Form::SmLimited, sms);
            }
            c.grant(&submission, how, now_ns);
            self.beside.note(now_ns, was_active, c.is_active());
            if c.info.class == Class::High {
                self.note_high(now_ns, None, out);
            }
        } else if c.waiting.len() < WAITING_MAX {
            self.waiting_clients += u32::from(c.waiting.is_empty());
            c.waiting.push_back(crate::client::Waiting {
                submission,
                submitted_ns: now_ns,
                offered: false,
            });
            if c.info.class == Class::BestEffort {
                self.best_effort.waits.begin(now_ns);
            }
        }
        if let Some(c) = self.clients.get_mut(client) {
            c.note_backlog(now_ns);
        }
        self.settle_one(now_ns, client, out);
        is_leased
    }

    /// A high-priority client's activity, as it reports it. `since_ns` is when
    /// it changed by the client's own account (bounded to the past).
    pub fn high_activity(
        &mut self,
        now_ns: u64,
        client: ClientId,
        busy: bool,
        since_ns: u64,
        out: &mut Vec<Action>,
    ) {
        let Some(c) = self.clients.get_mut(client) else { return };
        if c.info.class != Class::High {
            return;
        }
        let was_active = c.is_active();
        c.busy = busy;
        self.beside.note(now_ns, was_active, c.is_active());
        let since = since_ns.min(now_ns);
        self.note_high(now_ns, Some(since), out);
        // A period of activity that began and ended between two looks.
        if !busy && !self.high_active && since > self.high_idle_since_ns.unwrap_or(0) {
            self.high_idle_since_ns = Some(since);
            self.high_periods += 1;
            self.idle_since_ns = None;
        }
        self.settle(now_ns, out);
    }

    /// All inputs until the next call are one pass of the caller's: together they offer no more launches than one of
    /// them may. What is left is offered in the next pass, at its [`Engine::tick`].
    pub fn begin_pass(&mut self) {
        self.pass += 1;
        self.pass_offers = offer::OFFERS_MAX_ALL;
        self.policy.begin_pass();
    }

    /// The policy took so long in this pass that inputs should wait for the next one.
    #[inline]
    pub fn is_over_time(&self) -> bool {
        self.pass > 0 && self.policy.is_over_time()
    }

    /// Time has passed: fire timers, offer what was held until now.
    pub fn tick(&mut self, now_ns: u64, out: &mut Vec<Action>) {
        self.carry_out(now_ns, out);
        let mut fired = 0;
        while let Some(&std::cmp::Reverse((due, token))) = self.timer_heap.peek() {
            if due > now_ns || fired == TIMERS_TICK_MAX || self.is_over_time() {
                break;
            }
            self.timer_heap.pop();
            if self.timers.get(&token) == Some(&due) {
                self.timers.remove(&token);
                fired += 1;
                self.tell(now_ns, &Event::Timer(token), out);
                self.offer_all = true;
            }
        }
        self.settle_yield(now_ns, out);
        self.settle(now_ns, out);
    }

    /// When [`Engine::tick`] is needed next.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        if self.offers_left {
            return Some(0);
        }
        let timer = self.timer_heap.peek().map(|r| r.0.0);
        let hold = self
            .clients
            .values()
            .filter(|c| !c.waiting.is_empty())
            .flat_map(|c| [c.hold_until_ns, c.window_until_ns])
            .filter(|&until| until > 0)
            .min();
        [timer, hold, self.next_yield_end_ns(), self.next_stall_ns()].into_iter().flatten().min()
    }

    /// Whether a high-priority client gets nowhere, as the caller sees it: then nothing is held for it, whatever it has
    /// in flight. Takes effect with the next call of [`Engine::high_activity`].
    pub fn high_stands(&mut self, now_ns: u64, client: ClientId, stands: bool) {
        let Some(c) = self.clients.get_mut(client) else { return };
        let was_active = c.is_active();
        c.stands = stands;
        self.beside.note(now_ns, was_active, c.is_active());
    }

    /// Work out whether high-priority work is on the GPU and tell of a change.
    fn note_high(&mut self, now_ns: u64, since_ns: Option<u64>, out: &mut Vec<Action>) {
        let busy = self.clients.values().any(Client::is_active_high);
        if busy == self.high_active {
            return;
        }
        self.high_active = busy;
        if busy {
            self.high_periods += 1;
            self.clients.iter_mut().for_each(|(_, c)| c.auto_yield_suspended = false);
        } else {
            self.high_idle_since_ns = Some(since_ns.unwrap_or(now_ns));
        }
        self.settle_yield(now_ns, out);
        self.offer_all = true;
        let event = if busy { Event::HighStarted } else { Event::HighEnded };
        self.tell(now_ns, &event, out);
    }

    /// Tell the policy of something, if it wants to know.
    fn tell(&mut self, now_ns: u64, event: &Event, out: &mut Vec<Action>) {
        if !self.policy.subscriptions().has(event.kind()) {
            return;
        }
        self.stats.events += 1;
        self.refresh_usage();
        if let Err(fault) = self.policy.on_event(now_ns, event, &mut self.context) {
            self.count_fault(fault, out);
        }
        self.carry_out(now_ns, out);
    }

    /// Before a call: what the policy may read of its clients.
    #[inline]
    fn refresh_usage(&mut self) {
        if self.policy.subscriptions().has(Subscriptions::USAGE) {
            for (client, usage) in self.clients.drain_changed() {
                if let Some(view) = self.context.world.clients.get_mut(&client) {
                    view.usage = usage;
                }
            }
        }
    }

    /// The caller called the policy by itself: should it be disabled since, what it gave is taken back.
    pub fn note_disabled(&mut self, now_ns: u64, out: &mut Vec<Action>) {
        if self.policy.is_disabled() && !self.disabled {
            self.disable(out);
            self.settle(now_ns, out);
        }
    }

    /// The caller called the policy by itself, and it failed.
    pub fn note_fault(&mut self, now_ns: u64, fault: Fault, out: &mut Vec<Action>) {
        self.count_fault(fault, out);
        self.settle(now_ns, out);
    }

    fn disable(&mut self, out: &mut Vec<Action>) {
        // Nobody is left to take back what it gave.
        self.disabled = true;
        self.undo_policy(out);
        self.offer_all = true;
    }

    fn count_fault(&mut self, fault: Fault, out: &mut Vec<Action>) {
        let is_disabled = fault.kind == FaultKind::Disabled || self.policy.is_disabled();
        if is_disabled && !self.disabled {
            self.disable(out);
        }
        *self.stats.faults.entry(fault.kind).or_default() += 1;
        if fault.kind != FaultKind::Disabled || self.stats.last_fault.is_none() {
            self.stats.last_fault = Some(fault);
        }
    }

    fn forget(&mut self, now_ns: u64, old: &Client) {
        self.beside.note(now_ns, old.is_active(), false);
        self.waiting_clients -= u32::from(!old.waiting.is_empty());
        if old.info.class == Class::BestEffort {
            self.best_effort.waits.end(now_ns, old.waiting.len() as u64);
        }
        self.high_clients -= u32::from(old.info.class == Class::High);
    }
}

/// What a launch of a client is expected to take; of a kernel that has no profile
/// because too many have one, as long as its launches on average.
fn predicted_ns(profiles: &Profiles, c: &Client, kernel: Option<KernelId>) -> u64 {
    kernel.map_or_else(|| c.mean_ns(), |k| profiles.predicted_ns(k))
}

/// What a launch that is granted now remembers: see [`InFlight::high_periods`](crate::client::InFlight).
fn high_periods(high_active: bool, begun: u64) -> u64 {
    if high_active { crate::client::DISTURBED } else { begun }
}
