//! Completions: what ended, what is recorded of it, and what it is charged for.

use super::{Action, Engine};
use crate::client::{InFlight, Measured};
use crate::policy::{Class, ClientId, Completion, Event, Form, NO_KERNEL, Policy, Subscriptions};

/// Launches looked at beyond those that one call may end. Those that are done share the time; a client may have
/// thousands.
const LOOKED_AHEAD: usize = 256;
/// Launches that end before it is looked at how long a policy took that is told of them.
const TOLD_AT_ONCE: usize = 4;

/// Result of one [`Engine::progress_some`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub ended: usize,
    /// No other launch of the stream has, as far as the word says, and none is about to be granted without an action:
    /// what was granted while too much waited for one pass may have ended before it is.
    pub is_all: bool,
}

impl<P: Policy> Engine<P> {
    /// What it costs a client's streams that a launch goes to some of the SMs; 0: unknown.
    pub fn limit_cost_measured(&mut self, client: ClientId, ns: u64) {
        if let Some(c) = self.clients.get_mut(client) {
            c.limit_cost_ns = ns;
        }
    }

    /// A stream's completion word reads `word`. `measured`: the last of its launches of which its client
    /// knows how long it took; recorded if it is among those that ended now.
    pub fn progress(
        &mut self,
        now_ns: u64,
        client: ClientId,
        stream: u32,
        word: u32,
        measured: Option<Measured>,
        out: &mut Vec<Action>,
    ) {
        self.progress_some(now_ns, client, stream, word, measured, usize::MAX, out);
    }

    /// The same for at most `most` launches, and fewer if the policy is over its time
    /// ([`Engine::is_over_time`]); call again with the same word for the others.
    #[expect(clippy::too_many_arguments, reason = "one event of a client's")]
    pub fn progress_some(
        &mut self,
        now_ns: u64,
        client: ClientId,
        stream: u32,
        word: u32,
        measured: Option<Measured>,
        most: usize,
        out: &mut Vec<Action>,
    ) -> Progress {
        let mut sum = Progress { ended: 0, is_all: false };
        let tells = self.pass > 0 && self.policy.subscriptions().has(Subscriptions::COMPLETIONS);
        let at_once = if tells { TOLD_AT_ONCE } else { usize::MAX };
        while sum.ended < most && !self.is_over_time() {
            let most = at_once.min(most - sum.ended);
            let one = self.end_some(now_ns, client, stream, word, measured, most, out);
            sum = Progress { ended: sum.ended + one.ended, ..one };
            if one.is_all || one.ended < most {
                break;
            }
        }
        sum
    }

    #[expect(clippy::too_many_arguments, reason = "one event of a client's")]
    fn end_some(
        &mut self,
        now_ns: u64,
        client: ClientId,
        stream: u32,
        word: u32,
        measured: Option<Measured>,
        most: usize,
        out: &mut Vec<Action>,
    ) -> Progress {
        let Some(c) = self.clients.get_mut(client) else {
            return Progress { ended: 0, is_all: true };
        };
        let is_next_granted =
            c.waiting.front().is_some_and(|w| w.submission.ticket < c.granted_until);
        let Some(s) = c.streams.get_mut(stream as usize) else {
            return Progress { ended: 0, is_all: !is_next_granted };
        };
        // Not a binary search: one that started under a grant overtakes those that were covered by the same grant but
        // too many for a pass. They are seen done with it, not before it.
        let is_done = |f: &&InFlight| word.wrapping_sub(f.completion) as i32 >= 0;
        let looked_at = most.saturating_add(LOOKED_AHEAD);
        let all = s.in_flight.iter().take(looked_at).take_while(is_done).count();
        let done = all.min(most);
        if done == 0 {
            return Progress { ended: 0, is_all: all == 0 && !is_next_granted };
        }
        let started = s.in_flight[0].granted_ns.max(s.last_done_ns);
        let is_beside_others = self.beside.others_since(started);
        // Several seen done at once cannot be told apart: they share the time.
        let share_ns = now_ns.saturating_sub(started) / all as u64;
        s.last_done_ns =
            if done == all { now_ns } else { started.saturating_add(share_ns * done as u64) };
        c.stream_moved(stream);
        let was_active = c.is_active();
        let best_effort = c.info.class == Class::BestEffort;
        let begun = self.high_periods;
        let tells = self.policy.subscriptions().has(Subscriptions::COMPLETIONS);
        let mut told = Vec::new();
        for _ in 0..done {
            let Some(f) = c.streams[stream as usize].in_flight.pop_front() else { break };
            c.ended(&f);
            // Best effort that high-priority work ran beside shared its time.
            let is_disturbed = best_effort && f.high_periods != begun;
            // A client's word, bounded by what can be true.
            let took_ns = measured
                .filter(|m| m.completion == f.completion)
                .map(|m| if m.is_saturated() { share_ns.max(m.ns) } else { m.ns })
                .map(|ns| ns.min(now_ns.saturating_sub(f.granted_ns)).max(1));
            // A late report includes time in which it was done already.
            let charged_ns = match (took_ns, f.predicted_ns) {
                (took_ns, 0) => took_ns.unwrap_or(share_ns),
                // Time in which it had yielded to others is not its own.
                (_, predicted) if crate::client::can_yield(f.form) && is_disturbed => {
                    share_ns.min(predicted.saturating_mul(2))
                }
                (Some(took_ns), predicted) => took_ns.min(predicted.saturating_mul(64)),
                (None, predicted) if f.form == Form::SmLimited && f.argument > 0 => {
                    // It takes longer on fewer SMs.
                    let sms = u64::from(self.config.sm_count.max(f.argument));
                    share_ns.min(predicted.saturating_mul(sms) / u64::from(f.argument))
                }
                (None, predicted) => share_ns.min(predicted),
            };
            c.stats.completed += 1;
            c.stats.charged_ns += charged_ns;
            c.stats.measured += u64::from(took_ns.is_some());
            c.stats.measured_ns = c.stats.measured_ns.saturating_add(took_ns.unwrap_or(0));
            c.served_ns += charged_ns;
            if c.info.class == Class::BestEffort {
                // However much others slowed it down.
                let profile = f.kernel.and_then(|kernel| self.context.world.profiles.get(kernel));
                let ns = match profile.filter(|profile| profile.contended) {
                    Some(profile) => profile.least_ever_ns,
                    None if f.predicted_ns > 0 => f.predicted_ns,
                    None => charged_ns,
                };
                let ns = c.streams[stream as usize].done_ns(now_ns, ns);
                self.best_effort.work_done.launches += 1;
                self.best_effort.work_done.ns = self.best_effort.work_done.ns.saturating_add(ns);
                c.work_ns = c.work_ns.saturating_add(ns);
            }
            if let Some(kernel) = f.kernel {
                let profiles = &mut self.context.world.profiles;
                match (took_ns, f.form, is_disturbed || is_beside_others) {
                    (None, ..) => {}
                    (Some(ns), Form::Whole, false) => profiles.record(kernel, ns),
                    (Some(ns), Form::Whole, true) => profiles.record_contended(kernel, ns),
                    (Some(ns), form, false) => profiles.record_form(kernel, form, f.argument, ns),
                    // Time in which it had yielded may be a part of it.
                    (Some(_), _, true) if is_disturbed => {}
                    (Some(ns), form, true) => {
                        profiles.record_form_contended(kernel, form, f.argument, ns);
                    }
                }
            }
            if tells {
                told.push(Event::Completed(Completion {
                    client,
                    kernel: f.kernel.unwrap_or(NO_KERNEL),
                    form: f.form,
                    argument: f.argument,
                    predicted_ns: f.predicted_ns,
                    measured_ns: took_ns,
                    charged_ns,
                }));
            }
        }
        c.moved(now_ns);
        c.note_backlog(now_ns);
        self.beside.note(now_ns, was_active, c.is_active());
        let high = c.info.class == Class::High;
        for event in told {
            self.tell(now_ns, &event, out);
        }
        if high {
            self.note_high(now_ns, None, out);
        }
        self.settle_yield(now_ns, out);
        if best_effort && self.completion_holds {
            self.end_completion_holds(now_ns, client);
            self.settle(now_ns, out);
        } else {
            self.settle_one(now_ns, client, out);
        }
        Progress { ended: done, is_all: done == all && !is_next_granted }
    }

    /// A launch of this client ended: whom the policy holds until then is offered again.
    fn end_completion_holds(&mut self, now_ns: u64, ended: ClientId) {
        self.completion_holds = false;
        for (id, c) in self.clients.iter_mut().filter(|(_, c)| c.holds_until_completion) {
            if id == ended {
                self.completion_holds = true;
            } else {
                c.holds_until_completion = false;
                c.hold_until_ns = c.hold_until_ns.min(now_ns);
            }
        }
    }
}

/// Counts clients with work on the GPU. A launch that ran beside other clients' work took time that is not its own.
#[derive(Debug, Default)]
pub(super) struct Beside {
    active: u32,
    /// When two or more clients last had work at once, ns.
    last_ns: Option<u64>,
}

impl Beside {
    /// A client became active, or ceased to be.
    pub fn note(&mut self, now_ns: u64, was: bool, is: bool) {
        match (was, is) {
            (false, true) => self.active += 1,
            (true, false) => {
                if self.active > 1 {
                    self.last_ns = Some(now_ns);
                }
                self.active = self.active.saturating_sub(1);
            }
            _ => {}
        }
    }

    /// Whether, while one client was active from `since_ns` until now, another was at any time.
    pub fn others_since(&self, since_ns: u64) -> bool {
        self.active > 1 || self.last_ns.is_some_and(|last_ns| last_ns > since_ns)
    }
}

/// Best-effort work that ended, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkDone {
    pub launches: u64,
    /// The GPU time that they take undisturbed, as predicted when they were granted (as
    /// measured, where nothing was known): a launch counts the same however it was run
    /// and whoever was beside it.
    pub ns: u64,
}

/// What a best-effort client did, and had to do, since it registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientWork {
    pub client: ClientId,
    pub weight: u32,
    /// Its part of [`WorkDone::ns`].
    pub work_ns: u64,
    /// Time in which it had a launch waiting or on the GPU, ns.
    pub backlog_ns: u64,
}

#[derive(Debug, Default)]
pub(super) struct Totals {
    pub work_done: WorkDone,
    pub waits: Waits,
    /// Times that a client was asked to yield.
    pub yields: u64,
}

impl<P: Policy> Engine<P> {
    /// Best-effort work that ended, since the start.
    pub fn work_done(&self) -> WorkDone {
        self.best_effort.work_done
    }

    /// The best-effort clients by rising id.
    pub fn best_effort_work(&self, now_ns: u64) -> impl Iterator<Item = ClientWork> + '_ {
        let best_effort = self.clients.iter().filter(|(_, c)| c.info.class == Class::BestEffort);
        best_effort.map(move |(&client, c)| ClientWork {
            client,
            weight: c.info.weight(),
            work_ns: c.work_ns,
            backlog_ns: c.backlog.ns(now_ns),
        })
    }

    /// Time that best-effort launches have waited for an answer since the start, summed over launches, ns; of
    /// those that still wait, until now.
    pub fn waited_ns(&self, now_ns: u64) -> u64 {
        self.best_effort.waits.total_ns(now_ns)
    }

    /// How often best-effort clients were asked to yield, since the start.
    pub fn yields(&self) -> u64 {
        self.best_effort.yields
    }
}

/// Launches that wait, and the time that they have waited: adding and ending one takes no look at the others.
#[derive(Debug, Default)]
pub(super) struct Waits {
    waiting: u64,
    /// Total waiting time as of `noted_ns`.
    total_ns: u64,
    noted_ns: u64,
}

impl Waits {
    /// One more waits from now on.
    pub fn begin(&mut self, now_ns: u64) {
        self.note(now_ns);
        self.waiting += 1;
    }

    /// So many wait no longer.
    pub fn end(&mut self, now_ns: u64, launches: u64) {
        self.note(now_ns);
        self.waiting = self.waiting.saturating_sub(launches);
    }

    /// What all have waited until now, ns.
    pub fn total_ns(&self, now_ns: u64) -> u64 {
        let since_ns = now_ns.saturating_sub(self.noted_ns);
        self.total_ns.saturating_add(self.waiting.saturating_mul(since_ns))
    }

    fn note(&mut self, now_ns: u64) {
        (self.total_ns, self.noted_ns) = (self.total_ns(now_ns), now_ns.max(self.noted_ns));
    }
}
