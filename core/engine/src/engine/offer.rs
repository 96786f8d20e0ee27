//! Offering launches to the policy, and carrying out what it answers and asks for: timers, windows, leases, yields,
//! widths.
//!
//! A policy stalls the GPU if it holds launches while no high-priority work is on it and nothing else is in flight:
//!
//! ```text
//!            waiting, nothing in flight, no high priority
//!   fine ----------------------------------------------------> idle since t
//!    ^                                                              |
//!    +-- a launch is granted, or ends, or high priority comes <------+
//!    |                                                              | `policy_stall_ns`
//!    +-- a fault; the built-in rule answers who waits <-------------+
//! ```
//! A policy may hold for as long as it likes in the sum: each launch that it grants
//! starts the time anew.

use super::{Action, Engine, ROUNDS_MAX, built_in_rule, high_periods, predicted_ns};
use crate::client::{Client, Granted, Submission, YIELDING_IN_FLIGHT_MAX, can_yield};
use crate::policy::{
    Answer, Class, ClientId, Command, Decision, Fault, FaultKind, Form, Launch, NEVER, NO_KERNEL,
    Policy, forms_offered, launch_state,
};
use crate::profile::{Profiles, Transformation};
use tally_contract::limits::{HOLD_NS_MIN, SMS_MAX, TIMERS_MAX};

/// Of a kernel so many launches are measured whole before a width limits it.
const WHOLE_FIRST: u64 = 3;

/// How long a launch that can yield is expected to take for it, until measured.
const TURNAROUND_NS: u64 = 50_000;

/// After so many times `policy_stall_ns` in which nothing of a client has ended that is to yield, its launches that
/// cannot yield are taken to wait for those that do.
const YIELD_STALLS: u64 = 10;

/// Launches granted in a row of one client, and of all; for the rest the engine asks for another tick at once. The
/// window alone does not bound them: predicted times come from times that the client's own shim reports, and launches
/// that are said to take no time never fill it. A client could have its whole ring granted in one call while others
/// wait.
pub(super) const OFFERS_MAX: usize = 64;
pub(super) const OFFERS_MAX_ALL: usize = 512;

/// Whether one more launch of a client may be offered in this pass.
fn has_offers(c: &mut Client, pass: u64) -> bool {
    if c.offers.0 != pass {
        c.offers = (pass, 0);
    }
    c.offers.1 < OFFERS_MAX
}

impl<P: Policy> Engine<P> {
    /// Only this client's launches or room changed: offer what it has waiting,
    /// and the others' only if that changed something for them.
    pub(super) fn settle_one(&mut self, now_ns: u64, id: ClientId, out: &mut Vec<Action>) {
        // What is left from a pass cut short goes first.
        let is_left = self.offers_left && self.settled_in != self.pass;
        if !self.offer_all && !is_left {
            self.offer_some(now_ns, id, OFFERS_MAX, out);
        }
        if self.offer_all || is_left {
            self.settle(now_ns, out);
        } else {
            self.note_stall(now_ns, out);
        }
    }

    /// Offer every head launch that may run now, least served client first. Whom a round cut short did not reach goes
    /// before others of its class in the next: else a slow policy would be asked about the first ones in every pass.
    pub(super) fn settle(&mut self, now_ns: u64, out: &mut Vec<Action>) {
        let mut left = OFFERS_MAX_ALL;
        self.settled_in = self.pass;
        for _ in 0..ROUNDS_MAX {
            let all = std::mem::take(&mut self.offer_all);
            self.offers_left = false;
            self.round += 1;
            let mut order = std::mem::take(&mut self.order);
            order.clear();
            order.extend(
                self.clients.iter().filter(|(_, c)| !c.waiting.is_empty()).map(|(&i, _)| i),
            );
            if all {
                self.owe_offers(&order, |_| true);
            }
            order.sort_by_key(|i| {
                let c = &self.clients[i];
                let is_high = c.info.class == Class::High;
                let owed_since = c.owed_since.unwrap_or(u64::MAX);
                (!is_high, owed_since, c.served_ns, c.waiting[0].submitted_ns)
            });
            for (at, &id) in order.iter().enumerate() {
                left -= self.offer_some(now_ns, id, left.min(OFFERS_MAX), out);
                if left == 0 {
                    self.offers_left = true;
                    self.owe_offers(&order[at + 1..], |c| c.hold_until_ns <= now_ns);
                    break;
                }
            }
            self.order = order;
            if left == 0 || !self.offer_all {
                break;
            }
        }
        self.note_stall(now_ns, out);
    }

    fn owe_offers(&mut self, clients: &[ClientId], are_owed: impl Fn(&Client) -> bool) {
        for &id in clients {
            if let Some(c) = self.clients.get_mut(id)
                && are_owed(c)
            {
                c.owed_since.get_or_insert(self.round);
            }
        }
    }

    /// Offer one client's launches until one is held, or so many are granted: then the others' turn comes first.
    /// Returns how many were.
    fn offer_some(
        &mut self,
        now_ns: u64,
        id: ClientId,
        most: usize,
        out: &mut Vec<Action>,
    ) -> usize {
        let granted = (0..most).take_while(|_| self.offer(now_ns, id, out)).count();
        let is_any_left = self.clients.get(&id).is_some_and(|c| !c.waiting.is_empty());
        self.offers_left |= granted == most && is_any_left;
        granted
    }

    /// Offer the head of one client's queue to the policy, or to the built-in rule if that is to
    /// answer. True if it was granted, so that the next one may be offered.
    pub(super) fn offer(&mut self, now_ns: u64, id: ClientId, out: &mut Vec<Action>) -> bool {
        let (waiting_clients, high_clients) = (self.waiting_clients, self.high_clients);
        let Some(c) = self.clients.get_mut(id) else { return false };
        let Some(&head) = c.waiting.front() else { return false };
        let s = head.submission;
        let is_granted = s.ticket < c.granted_until;
        if !is_granted && c.owed_since.is_none() && c.hold_until_ns > now_ns {
            return false;
        }
        let predicted_ns = predicted_ns(&self.context.world.profiles, c, s.kernel);
        let has_room = is_granted || c.has_room(predicted_ns, s.stream);
        if !has_room {
            if !c.window_noted {
                c.window_noted = true;
                c.stats.window_full += 1;
            }
            c.hold_until_ns = 0;
            if !c.is_stalled(now_ns, self.config.window_stall_ns) {
                c.window_until_ns = c.moved_ns.saturating_add(self.config.window_stall_ns);
                c.left_to_rule = 0;
                c.owed_since = None;
                return false;
            }
        }
        if self.pass > 0 {
            if self.policy.is_over_time() || self.pass_offers == 0 {
                c.owed_since.get_or_insert(self.round);
                self.offers_left = true;
                return false;
            }
            if !has_offers(c, self.pass) {
                self.offers_left = true;
                return false;
            }
            c.offers.1 += 1;
            self.pass_offers -= 1;
        }
        if is_granted {
            self.answer(now_ns, id, Decision::Run(0), 0, predicted_ns, out);
            return true;
        }
        c.owed_since = None;
        c.window_stalled = !has_room;
        c.window_until_ns = 0;
        let high_idle_ns = match (self.high_active, self.high_idle_since_ns) {
            (true, _) => 0,
            (false, None) => NEVER,
            (false, Some(since)) => now_ns.saturating_sub(since),
        };
        let launch = Launch {
            now_ns,
            client: id,
            class: c.info.class,
            kernel: s.kernel.unwrap_or(NO_KERNEL),
            state: s.state
                | if c.min_share_permille > 0 { launch_state::MIN_SHARE } else { 0 }
                | if self.high_active { launch_state::HIGH_ACTIVE } else { 0 }
                | if head.offered { launch_state::OFFERED_AGAIN } else { 0 },
            offered: offered(&self.context.world.profiles, &s),
            grid_blocks: s.grid_blocks,
            block_threads: s.block_threads,
            shared_bytes: s.shared_bytes,
            predicted_ns,
            waited_ns: now_ns.saturating_sub(head.submitted_ns),
            in_flight_ns: c.in_flight_ns,
            high_idle_ns,
            high_clients,
            waiting_clients,
            stream: s.stream,
            sm_count: self.config.sm_count,
        };
        let Answer { decision, reason } = match c.left_to_rule {
            0 => self.ask_policy(&launch, out),
            _ => self.ask_rule(&launch),
        };
        self.carry_out(now_ns, out);
        let Some(c) = self.clients.get_mut(id) else { return false };
        c.reason = reason;
        c.holds_until_completion = matches!(decision, Decision::HoldUntilCompletion(_));
        self.completion_holds |= c.holds_until_completion;
        if let Some(for_ns) = decision.hold_ns() {
            let for_ns = for_ns.clamp(HOLD_NS_MIN, self.config.hold_ns_max);
            c.hold_until_ns = now_ns.saturating_add(for_ns);
            c.left_to_rule = 0;
            c.stats.held += 1;
            c.stats.launches_held += u64::from(!head.offered);
            if let Some(w) = c.waiting.front_mut() {
                w.offered = true;
            }
            return false;
        }
        // What it takes whole is to be known first, and one launch may include loading.
        let profile = s.kernel.and_then(|kernel| self.context.world.profiles.get(kernel));
        // Of times measured beside others' work only the shortest is kept: `count` is 1 then.
        let is_known = profile.is_some_and(|p| p.contended || p.count >= WHOLE_FIRST);
        let width_sms = if is_known { c.width_sms } else { 0 };
        self.answer(now_ns, id, decision, width_sms, predicted_ns, out);
        true
    }

    fn ask_policy(&mut self, launch: &Launch, out: &mut Vec<Action>) -> Answer {
        self.stats.decides += 1;
        self.refresh_usage();
        self.context.world.sm_count = launch.sm_count;
        match self.policy.decide(launch, &mut self.context).and_then(sane) {
            Ok(answer) => answer,
            Err(fault) => {
                self.count_fault(fault, out);
                self.ask_rule(launch)
            }
        }
    }

    fn ask_rule(&mut self, launch: &Launch) -> Answer {
        self.stats.built_in_rule_decisions += 1;
        if let Some(c) = self.clients.get_mut(launch.client) {
            c.stats.built_in_rule += 1;
        }
        built_in_rule(launch, self.config.built_in_rule_idle_ns).into()
    }

    /// Grant the head of a client's queue; if it is to run, on at most `width_sms` SMs, unless that is 0.
    fn answer(
        &mut self,
        now_ns: u64,
        id: ClientId,
        decision: Decision,
        width_sms: u32,
        predicted_ns: u64,
        out: &mut Vec<Action>,
    ) {
        let high_active = self.high_active;
        let Some(c) = self.clients.get_mut(id) else { return };
        let Some(w) = c.waiting.pop_front() else { return };
        self.waiting_clients -= u32::from(c.waiting.is_empty());
        if c.waiting.is_empty() {
            c.owed_since = None;
        }
        if c.info.class == Class::BestEffort {
            self.best_effort.waits.end(now_ns, 1);
        }
        let s = w.submission;
        c.hold_until_ns = 0;
        c.left_to_rule = c.left_to_rule.saturating_sub(1);
        if std::mem::take(&mut c.window_stalled) {
            c.stats.window_stalls += 1;
            c.stall_left = c.stall_left.saturating_sub(1);
        }
        c.window_until_ns = 0;
        c.window_noted = false;
        c.stats.waited_ns += now_ns.saturating_sub(w.submitted_ns);
        let profiles = &self.context.world.profiles;
        let forms = offered(profiles, &s);
        let lease = if let Decision::Run(n) = decision { u64::from(n) } else { 0 };
        let can_limit = forms & forms_offered::SM_LIMITED != 0;
        let decision = match decision {
            Decision::Run(_) if width_sms > 0 && can_limit => Decision::SmLimited(width_sms),
            other => other,
        };
        let (form, argument) = decision.form();
        let offered = match form {
            Form::Sliced => forms & forms_offered::SLICED != 0,
            Form::Preemptible => forms & forms_offered::PREEMPTIBLE != 0,
            Form::SmLimited => can_limit,
            Form::Whole => true,
        } && (!can_yield(form)
            || c.can_yield_in_flight.len() < YIELDING_IN_FLIGHT_MAX);
        // Asked for in vain, but it can be had for later launches.
        let prepare = !offered && form != Form::Whole && forms & forms_offered::PREPARABLE != 0;
        let (form, argument) = if offered { (form, argument) } else { (Form::Whole, 0) };
        let window_ns = match form {
            Form::Sliced | Form::Preemptible => {
                let profile = s.kernel.and_then(|k| profiles.get(k));
                let measured = profile.and_then(|p| p.turnaround_ns(form, argument));
                measured.unwrap_or(TURNAROUND_NS).min(predicted_ns.max(1))
            }
            _ => predicted_ns,
        };
        match form {
            _ if !offered => c.stats.degraded += 1,
            Form::Sliced => c.stats.sliced += 1,
            Form::Preemptible => c.stats.preemptible += 1,
            Form::SmLimited => c.stats.sm_limited += 1,
            Form::Whole => c.stats.run += 1,
        }
        let high_periods = high_periods(high_active, self.high_periods);
        let was_active = c.is_active();
        c.grant(&s, Granted { form, argument, predicted_ns, window_ns, high_periods }, now_ns);
        self.beside.note(now_ns, was_active, c.is_active());
        let is_whole = form == Form::Whole && !prepare;
        if !is_whole {
            out.push(Action::Decide { client: id, ticket: s.ticket, decision, predicted_ns });
        }
        // Behind the decision: who sees the grant sees the decision.
        if is_whole || lease > 0 {
            let until = (s.ticket + 1).saturating_add(lease).max(c.granted_until);
            if until > c.granted_until {
                c.granted_until = until;
                out.push(Action::Grant { client: id, until });
            }
        }
        if !is_whole {
            // A launch granted to a client that is to yield starts by yielding.
            self.settle_yield(now_ns, out);
        }
        let Some(c) = self.clients.get_mut(id) else { return };
        if c.info.class == Class::High {
            self.note_high(now_ns, None, out);
        }
    }
}

impl<P: Policy> Engine<P> {
    /// Take note of whether the GPU idles on the policy's word. After every input.
    pub(super) fn note_stall(&mut self, now_ns: u64, out: &mut Vec<Action>) {
        let stall_ns = self.config.policy_stall_ns;
        let (stopped, in_vain) = match self.disabled {
            true => (0, false),
            false => self.stopped_clients(now_ns),
        };
        self.look_at_yields_ns = None;
        if stopped == 0 {
            self.idle_since_ns = None;
            if self.has_yielded && !self.high_active && !self.disabled {
                let since_ns = self.clients.values().filter_map(Client::yields_beside_since_ns);
                let due_ns = |ns: u64| ns.saturating_add(stall_ns.saturating_mul(YIELD_STALLS));
                let next_ns = since_ns.map(due_ns).min();
                self.look_at_yields_ns = next_ns.map(|ns| ns.max(now_ns.saturating_add(stall_ns)));
            }
            return;
        }
        let since_ns = *self.idle_since_ns.get_or_insert(now_ns);
        if now_ns.saturating_sub(since_ns) < stall_ns {
            return;
        }
        self.idle_since_ns = None;
        let ms = stall_ns / 1_000_000;
        let message = if in_vain {
            let ms = ms.saturating_mul(YIELD_STALLS + 1);
            format!(
                "held or stopped the launches of {stopped} clients for {ms} ms while nothing ended"
            )
        } else {
            format!(
                "held or stopped the launches of {stopped} clients for {ms} ms while the GPU had nothing to do"
            )
        };
        let fault = Fault { kind: FaultKind::Stall, message };
        self.policy.count_fault(now_ns, &fault);
        self.count_fault(fault, out);
        let mut waiting: Vec<ClientId> = Vec::new();
        for (id, c) in self.clients.iter_mut() {
            if c.yielded {
                (c.yield_asked, c.auto_yield_suspended) = (false, true);
            }
            if !c.waiting.is_empty() {
                c.left_to_rule = c.waiting.len();
                c.owed_since.get_or_insert(self.round);
                waiting.push(id);
            }
        }
        self.settle_yield(now_ns, out);
        for id in waiting {
            while self.offer(now_ns, id, out) {}
        }
    }

    /// How many clients have launches, if the policy keeps all of these from going on: they wait for a decision, or
    /// have yielded. And whether one has yielded in vain.
    fn stopped_clients(&self, now_ns: u64) -> (u32, bool) {
        if self.high_active || self.waiting_clients == 0 && !self.has_yielded {
            return (0, false);
        }
        let (mut stopped, mut any_in_vain) = (0, false);
        let most_ns = self.config.policy_stall_ns.saturating_mul(YIELD_STALLS);
        for c in self.clients.values().filter(|c| c.in_flight > 0 && !c.stands) {
            let since_ns = c.yields_beside_since_ns();
            let in_vain = since_ns.is_some_and(|ns| now_ns.saturating_sub(ns) >= most_ns);
            if !c.has_yielded() && !in_vain {
                return (0, false);
            }
            any_in_vain |= in_vain;
            stopped += u32::from(c.waiting.is_empty());
        }
        (self.waiting_clients + stopped, any_in_vain)
    }

    /// When a hold becomes a stall, or may have, ns; `None` while the GPU is busy.
    pub(super) fn next_stall_ns(&self) -> Option<u64> {
        let stall_ns = self.config.policy_stall_ns;
        self.idle_since_ns.map(|ns| ns.saturating_add(stall_ns)).or(self.look_at_yields_ns)
    }
}

impl<P: Policy> Engine<P> {
    /// Put back what a policy may change: timers, windows, leases, yields, widths, who is gated.
    pub(super) fn undo_policy(&mut self, out: &mut Vec<Action>) {
        self.timers.clear();
        self.timer_heap.clear();
        self.context.commands.drain();
        let window_ns = self.config.window_ns;
        for (id, c) in self.clients.iter_mut() {
            c.window_ns = window_ns;
            c.yield_asked = false;
            (c.auto_yield_ns, c.auto_yield_suspended) = (None, false);
            // A number in the old policy's table.
            c.reason = 0;
            set_width(id, c, 0, out);
            if std::mem::take(&mut c.yielded) {
                out.push(Action::Yield { client: id, yielded: false });
            }
            set_ungated(id, c, c.info.class == Class::High, out);
        }
    }

    /// Do what the policy asked for in its calls so far.
    pub(super) fn carry_out(&mut self, now_ns: u64, out: &mut Vec<Action>) {
        if self.context.commands.is_empty() {
            return;
        }
        let mut commands = std::mem::take(&mut self.context.commands);
        let mut settles_yield = false;
        for command in commands.drain() {
            match command {
                Command::SetTimer { delay_ns, token } => {
                    if self.timers.len() < TIMERS_MAX || self.timers.contains_key(&token) {
                        let due = now_ns.saturating_add(delay_ns.max(1));
                        self.timers.insert(token, due);
                        self.timer_heap.push(std::cmp::Reverse((due, token)));
                        self.trim_timers();
                    }
                }
                Command::SetWindow { client, window_ns } => {
                    // A policy may set it in each decision: the same again changes nothing.
                    if let Some(c) = self.clients.get_mut(client)
                        && c.window_ns != window_ns
                    {
                        c.window_ns = window_ns;
                        self.offer_all = true;
                    }
                }
                Command::RevokeLease(client) => {
                    if let Some(c) = self.clients.get_mut(client)
                        && !c.ungated
                    {
                        set_ungated(client, c, false, out);
                    }
                }
                Command::SetYield { client, yielded } => {
                    if let Some(c) = self.clients.get_mut(client) {
                        c.yield_asked = yielded;
                    }
                    settles_yield = true;
                }
                Command::SetAutoYield { client, enabled, idle_ns } => {
                    if let Some(c) = self.clients.get_mut(client) {
                        (c.auto_yield_ns, c.auto_yield_suspended) =
                            (enabled.then_some(idle_ns), false);
                    }
                    settles_yield = true;
                }
                Command::SetWidth { client, sms } => {
                    if let Some(c) = self.clients.get_mut(client)
                        && c.info.class == Class::BestEffort
                    {
                        // Rounded to what there is here, so that leased launches get as many SMs as decided ones.
                        let sms = match sms {
                            0 => 0,
                            sms => self.config.partition_of(sms).unwrap_or(sms).min(SMS_MAX),
                        };
                        set_width(client, c, sms, out);
                    }
                }
                Command::SetUngated { client, ungated } => {
                    if let Some(c) = self.clients.get_mut(client) {
                        set_ungated(client, c, ungated, out);
                        self.offer_all = true;
                    }
                }
                Command::Reset => {
                    self.undo_policy(out);
                    self.offer_all = true;
                }
            }
        }
        self.context.commands = commands;
        if settles_yield {
            self.settle_yield(now_ns, out);
        }
    }

    /// A policy that moves one timer over and over leaves dead heap entries.
    fn trim_timers(&mut self) {
        if self.timer_heap.len() > 4 * TIMERS_MAX {
            self.timer_heap =
                self.timers.iter().map(|(&token, &due)| std::cmp::Reverse((due, token))).collect();
        }
    }
}

/// What the client's side offers for a launch, less what an earlier run found out.
fn offered(profiles: &Profiles, s: &Submission) -> u32 {
    let profile = s.kernel.and_then(|k| profiles.get(k));
    match profile.map(|p| p.transformation) {
        Some(Transformation::WholeOnly(_)) => 0,
        _ => s.offered,
    }
}

/// Answers that no launch can have.
fn sane(answer: Answer) -> Result<Answer, Fault> {
    match answer.decision {
        decision @ (Decision::Sliced(0) | Decision::SmLimited(0)) => Err(Fault {
            kind: FaultKind::Nonsense,
            message: format!("decide answered {decision:?}: 0 is not a size"),
        }),
        _ => Ok(answer),
    }
}

fn set_width(id: ClientId, c: &mut Client, sms: u32, out: &mut Vec<Action>) {
    if c.width_sms != sms {
        c.width_sms = sms;
        c.stats.width_changes += 1;
        out.push(Action::SetWidth { client: id, sms });
    }
}

fn set_ungated(id: ClientId, c: &mut Client, ungated: bool, out: &mut Vec<Action>) {
    let until = if ungated { u64::MAX } else { c.taken_back_until() };
    if c.ungated == ungated && c.granted_until <= until {
        return;
    }
    c.ungated = ungated;
    c.granted_until = until;
    out.push(Action::Grant { client: id, until });
}
