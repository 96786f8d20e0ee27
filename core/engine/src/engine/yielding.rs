//! Preemption: sliced and preemptible launches stop at a boundary while high-priority
//! work runs, and go on after it.

use super::{Action, Engine};
use crate::client::Client;
use crate::policy::{Class, ClientId, Policy};

impl<P: Policy> Engine<P> {
    /// Tell clients to yield, or to go on, where that changed. A client without a
    /// launch in flight that can yield is not told: there is nothing to stop.
    pub(super) fn settle_yield(&mut self, now_ns: u64, out: &mut Vec<Action>) {
        let (high_active, idle_since) = (self.high_active, self.high_idle_since_ns);
        self.has_yielded = false;
        for (client, c) in self.clients.iter_mut() {
            let wanted = wants_yield(c, now_ns, high_active, idle_since);
            if wanted != c.yielded && (!wanted || !c.can_yield_in_flight.is_empty()) {
                c.yielded = wanted;
                if wanted {
                    c.told_to_yield_ns = Some(now_ns);
                }
                c.stats.yields += u64::from(wanted);
                self.best_effort.yields += u64::from(wanted && c.info.class == Class::BestEffort);
                out.push(Action::Yield { client, yielded: wanted });
            }
            self.has_yielded |= c.yielded;
        }
    }

    /// When the next client may go on.
    pub(super) fn next_yield_end_ns(&self) -> Option<u64> {
        if self.high_active {
            return None;
        }
        let since = self.high_idle_since_ns?;
        let yielded = self.clients.values().filter(|c| c.yielded && !c.yield_asked);
        yielded.filter_map(Client::auto_yield_ns).map(|idle_ns| since.saturating_add(idle_ns)).min()
    }

    /// A launch that was asked to yield had done so `turnaround_ns` later, as its client says: believed up to the time
    /// for which it has been asked.
    pub fn launch_yielded(
        &mut self,
        now_ns: u64,
        client: ClientId,
        ticket: u64,
        turnaround_ns: u64,
    ) {
        let Some(c) = self.clients.get_mut(client) else { return };
        let Some(&f) = c.can_yield_in_flight.iter().find(|f| f.ticket == ticket) else { return };
        let Some(told_ns) = c.told_to_yield_ns else { return };
        let turnaround_ns = turnaround_ns.min(now_ns.saturating_sub(told_ns.max(f.granted_ns)));
        c.stats.launches_yielded += 1;
        if let Some(kernel) = f.kernel {
            let profiles = &mut self.context.world.profiles;
            profiles.record_turnaround(kernel, f.form, f.argument, turnaround_ns.max(1));
        }
    }
}

fn wants_yield(c: &Client, now_ns: u64, high_active: bool, idle_since: Option<u64>) -> bool {
    let is_idle = |ns: u64| idle_since.is_none_or(|since| now_ns >= since.saturating_add(ns));
    c.yield_asked || c.auto_yield_ns().is_some_and(|ns| high_active || !is_idle(ns))
}
