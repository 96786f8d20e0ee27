//! High priority at once, best effort while there is none, in the form that gives way
//! soonest at least cost: Tally's scheduler (ASPLOS 2025, section 4).
//!
//! - A high-priority launch runs at once. (It has a standing grant; the policy is
//!   not even asked.)
//! - A best-effort launch runs once high priority has been quiet for `quiet_us`.
//!   Until then it is held: while high priority is busy until that changes, after
//!   it for exactly the rest of the quiet time.
//! - What is under way when high priority returns gives way if it can: the core sees
//!   to that (`set-auto-yield`). So each kernel longer than `turnaround_ns_max` runs
//!   cut, in the form that was measured to be best for it.
//! - At most `window_us` of a best-effort client's kernels are under way, for
//!   that is what a high-priority launch may have to wait behind.
//! - Where contexts take turns (`host.residency`) the hardware interrupts best-effort kernels:
//!   nothing is cut, and best effort goes on as soon as high priority is idle ([`settings`]).
//! - Without a high-priority client there is nothing to protect: long leases, no
//!   window and no cutting, so that a lone program pays nothing. All end when one
//!   joins. While one is connected kernels are cut however long it has been idle:
//!   its next request comes unannounced, and a kernel that started whole stays whole.
//!
//! | module | what |
//! | --- | --- |
//! | [`rule`] | when a launch may start |
//! | [`turns`] | whose turn it is, among best-effort clients where contexts take turns |
//! | [`forms`] | in which form: the way of a launch through the modules below |
//! | [`candidates`] | the forms of a kernel, and what each should cost |
//! | [`choose`] | the best of them |
//! | [`learn`] | what was measured, and what to try next |
//! | [`share`], [`table`] | how much is tried and remembered |
//! | [`graph`] | CUDA graphs |
//! | [`saved`] | what outlives a reload |
//! | [`settings`], [`metrics`] | what goes in, what is shown |
//!
//! `docs/policies.md` says where this differs from the paper, and why.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

mod candidates;
mod choice;
mod choose;
mod forms;
mod graph;
mod learn;
mod metrics;
mod rule;
mod saved;
mod settings;
mod share;
mod table;
mod turns;

use forms::Forms;
use rule::Admission;
use settings::{Configured, Settings};
use tally_sdk::host;
use tally_sdk::{
    ClientId, ClientInfo, Decision, Event, Launch, Level, Policy, PriorityClass, Saved, Sharing,
    Stateful,
};
use turns::Turns;

/// A window that holds nothing back.
const WINDOW_NS_NONE: u64 = u64::MAX;

/// The policy's memory: its constants, what it knows of kernels, who is connected.
pub struct Priority {
    configured: Configured,
    /// Of how the GPU is shared, once that is known: see [`Priority::adapt`].
    settings: Settings,
    turns: Turns,
    forms: Forms,
    high: Vec<ClientId>,
    best_effort: Vec<ClientId>,
}

impl Policy for Priority {
    fn init(config: &str) -> Result<Self, String> {
        let configured = Configured::read(config)?;
        let settings = configured.settings(Sharing::Concurrent);
        host::log(Level::Info, &settings.to_string());
        let forms = Forms::new(settings);
        let turns = Turns::new(settings.turn_ns);
        let (high, best_effort) = (Vec::new(), Vec::new());
        Ok(Priority { configured, settings, turns, forms, high, best_effort })
    }

    fn decide(&mut self, launch: &Launch) -> Decision {
        let admission = rule::admit(launch, &self.settings);
        match admission {
            Admission::Wait(ns) => return Decision::Hold(ns),
            Admission::Now if launch.is_high() => return Decision::Run(0),
            Admission::Alone | Admission::Now => {}
        }
        let takes_turns = self.take_turns();
        if takes_turns && let wait_ns @ 1.. = self.turns.wait_ns(launch) {
            return Decision::Hold(wait_ns);
        }
        match admission {
            Admission::Alone if takes_turns => Decision::Run(0),
            Admission::Alone => Decision::Run(self.settings.lease_launches),
            _ => self.forms.decide(launch),
        }
    }

    fn on_event(&mut self, _now_ns: u64, event: &Event) {
        match event {
            Event::ClientJoined(client) => self.joined(client),
            Event::ClientLeft(client) => self.left(*client),
            // Not subscribed to: every launch says how quiet it is.
            Event::HighBusy | Event::HighIdle | Event::KernelDone(_) | Event::Timer(_) => {}
        }
        self.forms.hand_over();
    }
}

impl Priority {
    /// The core says how the GPU is shared once it has clients.
    fn adapt(&mut self) {
        if self.high.is_empty() && self.best_effort.is_empty() {
            let settings = self.configured.settings(host::residency());
            if settings != self.settings {
                host::log(Level::Info, &settings.to_string());
            }
            self.settings = settings;
            self.turns = Turns::new(self.settings.turn_ns);
            self.forms.configure(self.settings);
        }
    }

    fn joined(&mut self, client: &ClientInfo) {
        self.adapt();
        match client.class {
            PriorityClass::High => {
                self.high.push(client.id);
                if self.high.len() == 1 {
                    self.protect();
                }
            }
            PriorityClass::BestEffort => {
                self.best_effort.push(client.id);
                host::set_window(client.id, self.window_ns());
                if self.take_turns() {
                    // The others, too: what was given freely is taken back.
                    for &id in self.best_effort.iter().filter(|&&id| id != client.id) {
                        host::set_window(id, self.window_ns());
                        host::revoke_lease(id);
                    }
                }
                if !self.high.is_empty() {
                    self.set_giving_way(client.id, true);
                }
            }
        }
    }

    fn left(&mut self, client: ClientId) {
        let took_turns = self.take_turns();
        self.best_effort.retain(|&id| id != client);
        self.turns.left(client);
        if took_turns && !self.take_turns() {
            for &id in &self.best_effort {
                host::set_window(id, self.window_ns());
            }
        }
        let before = self.high.len();
        self.high.retain(|&id| id != client);
        if before > 0 && self.high.is_empty() {
            for &id in &self.best_effort {
                host::set_window(id, self.window_ns());
                self.set_giving_way(id, false);
            }
        }
    }

    /// The first high-priority client is here: take back what was given freely.
    fn protect(&self) {
        for &id in &self.best_effort {
            host::set_window(id, self.window_ns());
            host::revoke_lease(id);
            self.set_giving_way(id, true);
        }
    }

    /// Have the core stop a client's cut launches while high-priority work runs, by
    /// itself: a call to say so would come too late.
    fn set_giving_way(&self, client: ClientId, on: bool) {
        if self.settings.cut {
            host::set_auto_yield(client, on, if on { self.settings.quiet_ns } else { 0 });
        }
    }

    /// Several best-effort clients, of which one launches at a time.
    fn take_turns(&self) -> bool {
        self.settings.turn_ns > 0 && self.best_effort.len() > 1
    }

    fn window_ns(&self) -> u64 {
        let window_ns = if self.high.is_empty() { WINDOW_NS_NONE } else { self.settings.window_ns };
        if self.take_turns() { window_ns.min(self.turns.window_ns()) } else { window_ns }
    }
}

/// The constants come from the configuration and the clients from the core: what
/// outlives a reload is what was learnt of kernels.
impl Stateful for Priority {
    fn snapshot(&self) -> Saved {
        self.forms.snapshot()
    }

    fn restore(&mut self, from: &Saved) -> Result<(), String> {
        self.forms.restore(from)
    }
}

tally_sdk::export!(Priority, stateful);

#[cfg(test)]
mod tests;
