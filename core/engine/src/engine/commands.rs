//! What a policy asks for: timers, windows, leases and yields, carried out after its call.

use super::{Action, Engine};
use crate::client::Client;
use crate::policy::{Class, ClientId, Command, Policy};
use tally_contract::limits::TIMERS_MAX;

impl<P: Policy> Engine<P> {
    /// Put back what a policy may change: timers, windows, grants.
    pub(super) fn undo_policy(&mut self, out: &mut Vec<Action>) {
        self.timers.clear();
        self.timer_heap.clear();
        self.context.commands.drain();
        let window_ns = self.config.window_ns;
        for (id, c) in self.clients.iter_mut() {
            c.window_ns = window_ns;
            c.yield_asked = false;
            c.auto_yield_ns = None;
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
                    if let Some(c) = self.clients.get_mut(client) {
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
                        c.auto_yield_ns = enabled.then_some(idle_ns);
                    }
                    settles_yield = true;
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

fn set_ungated(id: ClientId, c: &mut Client, ungated: bool, out: &mut Vec<Action>) {
    let until = if ungated { u64::MAX } else { c.taken_back_until() };
    if c.ungated == ungated && c.granted_until <= until {
        return;
    }
    c.ungated = ungated;
    c.granted_until = until;
    out.push(Action::Grant { client: id, until });
}
