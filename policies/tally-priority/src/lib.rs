//! High priority at once, best effort while there is none, in the form that yields soonest at least cost: Tally's
//! scheduler (ASPLOS 2025, section 4).
//!
//! ```text
//! decide(launch):
//!     if launch is high priority:                            run
//!     if a high-priority client is connected:
//!         if high-priority work is active:                   hold until that changes
//!         if it has been idle for less than idle_gap:        hold for the rest of the gap
//!     if it is another best-effort client's turn:            hold                        (time-sliced)
//!     if no high-priority client is connected:               run, with a long lease
//!     run as form(kernel)                                                                (concurrent)
//!
//! form(kernel):
//!     if its predicted time is within the turnaround bound:  whole
//!     candidates := whole, preemptible, sliced in 2 or 3 sizes, SM-limited
//!     for each: its time and its turnaround, measured, or estimated until then
//!     of those that keep the bound, within the slowdown limit: the fastest
//!     else of those near the least turnaround:               the fastest
//!     but for a small share of launches: a form that would win if it were as fast as the whole kernel
//! ```
//!
//! The core does two things by itself, because a call would come too late. Sliced and preemptible launches yield when
//! high-priority work appears, and go on after the idle gap (`set-auto-yield`). At most `window` of a best-effort
//! client's kernels are under way at once: that is what a high-priority launch may have to wait behind.
//!
//! How clients share the GPU decides which half is in use. Where kernels run at once (`concurrent`), forms keep
//! kernels short. Where contexts take turns (`time-sliced`), the hardware interrupts kernels anyway: they run whole,
//! and best-effort clients take turns of some milliseconds.
//!
//! | module | what |
//! | --- | --- |
//! | [`settings`] | the constants, with defaults for each sharing mode |
//! | [`time_sliced`] | whose turn it is |
//! | [`concurrent`] | the form of each launch |
//! | [`candidates`](concurrent::candidates), [`choose`](concurrent::choose) | which forms there are, and the best of them |
//! | [`profiler`](concurrent::profiler) | what was measured, and what to try next |
//!
//! `docs/policies.md` says where this differs from the paper, and why.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

mod concurrent;
mod settings;
mod time_sliced;

use concurrent::Forms;
use settings::{Configured, Settings};
use tally_sdk::{
    Answer, Client, ClientId, Decision, HOLD_UNTIL_CHANGE, Launch, Level, Membership, Policy,
    PriorityClass, Saved, SharingMode, Stateful, WINDOW_OPEN, host,
};
use time_sliced::Turns;

/// Why a launch is decided as it is.
mod reason {
    pub const HIGH_ACTIVE: u8 = 1;
    pub const IDLE_GAP: u8 = 2;
    pub const NOT_ITS_TURN: u8 = 3;
    pub const ALONE: u8 = 4;
    pub const SHORT: u8 = 5;
    pub const CHOSEN: u8 = 6;
    pub const TRIED: u8 = 7;
    pub const PREPARED: u8 = 8;

    pub const TEXTS: [(u8, &str); 8] = [
        (HIGH_ACTIVE, "high-priority work is active"),
        (IDLE_GAP, "the idle gap after high-priority work"),
        (NOT_ITS_TURN, "another best-effort client's turn"),
        (ALONE, "no high-priority client is connected"),
        (SHORT, "no form other than whole is needed"),
        (CHOSEN, "the best form of this kernel"),
        (TRIED, "to measure this form"),
        (PREPARED, "to have this kernel transformed"),
    ];
}

/// The policy's memory: its constants, what it knows of kernels, who is connected.
pub struct Priority {
    configured: Configured,
    /// Of the sharing mode, once that is known: see [`Priority::adapt`].
    settings: Settings,
    turns: Turns,
    forms: Forms,
    high: Vec<ClientId>,
    best_effort: Vec<ClientId>,
}

impl Policy for Priority {
    fn init(config: &str) -> Result<Self, String> {
        let configured = Configured::read(config)?;
        let settings = configured.settings(SharingMode::Concurrent);
        host::log(Level::Info, &settings.to_string());
        for (number, text) in reason::TEXTS {
            host::define_reason(number, text);
        }
        let (turns, forms) = (Turns::new(settings.turn_ns), Forms::new(settings));
        let (high, best_effort) = (Vec::new(), Vec::new());
        Ok(Priority { configured, settings, turns, forms, high, best_effort })
    }

    fn decide(&mut self, launch: &Launch) -> Answer {
        if launch.is_high() {
            return Decision::Run(0).into();
        }
        let is_alone = launch.high_clients == 0;
        if !is_alone && launch.high_active() {
            // Offered again when it ends; no need to ask in between.
            return Decision::Hold(HOLD_UNTIL_CHANGE).because(reason::HIGH_ACTIVE);
        }
        // Between the kernels of one request high priority is idle for some tens of
        // microseconds. Started there, a kernel would be in the way of the next.
        let rest_ns = self.settings.idle_gap_ns.saturating_sub(launch.high_idle_ns);
        if !is_alone && rest_ns > 0 {
            return Decision::Hold(rest_ns).because(reason::IDLE_GAP);
        }
        let takes_turns = self.takes_turns();
        if takes_turns && let wait_ns @ 1.. = self.turns.wait_ns(launch) {
            return Decision::Hold(wait_ns).because(reason::NOT_ITS_TURN);
        }
        if is_alone {
            let lease = if takes_turns { 0 } else { self.settings.lease_launches };
            return Decision::Run(lease).because(reason::ALONE);
        }
        self.forms.decide(launch)
    }
}

impl Membership for Priority {
    fn joined(&mut self, _now_ns: u64, client: &Client) {
        self.adapt();
        match client.class {
            PriorityClass::High => {
                self.high.push(client.id);
                // The first one: take back what was given freely.
                if self.high.len() == 1 {
                    for &id in &self.best_effort {
                        host::set_window(id, self.window_ns());
                        host::revoke_lease(id);
                        self.set_yielding(id, true);
                    }
                }
            }
            PriorityClass::BestEffort => {
                self.best_effort.push(client.id);
                host::set_window(client.id, self.window_ns());
                if self.takes_turns() {
                    // The others, too: what was given freely is taken back.
                    for &id in self.best_effort.iter().filter(|&&id| id != client.id) {
                        host::set_window(id, self.window_ns());
                        host::revoke_lease(id);
                    }
                }
                if !self.high.is_empty() {
                    self.set_yielding(client.id, true);
                }
            }
        }
        self.forms.hand_over();
    }

    fn left(&mut self, _now_ns: u64, client: ClientId) {
        let took_turns = self.takes_turns();
        self.best_effort.retain(|&id| id != client);
        self.turns.left(client);
        if took_turns && !self.takes_turns() {
            for &id in &self.best_effort {
                host::set_window(id, self.window_ns());
            }
        }
        let before = self.high.len();
        self.high.retain(|&id| id != client);
        if before > 0 && self.high.is_empty() {
            for &id in &self.best_effort {
                host::set_window(id, self.window_ns());
                self.set_yielding(id, false);
            }
        }
        self.forms.hand_over();
    }
}

impl Priority {
    /// The core says how the GPU is shared once it has clients.
    fn adapt(&mut self) {
        if self.high.is_empty() && self.best_effort.is_empty() {
            let settings = self.configured.settings(host::sharing_mode());
            if settings != self.settings {
                host::log(Level::Info, &settings.to_string());
            }
            self.settings = settings;
            self.turns = Turns::new(settings.turn_ns);
            self.forms.configure(settings);
        }
    }

    fn set_yielding(&self, client: ClientId, on: bool) {
        if self.settings.forms {
            host::set_auto_yield(client, on, if on { self.settings.idle_gap_ns } else { 0 });
        }
    }

    /// Several best-effort clients, of which one launches at a time.
    fn takes_turns(&self) -> bool {
        self.settings.turn_ns > 0 && self.best_effort.len() > 1
    }

    fn window_ns(&self) -> u64 {
        let window_ns = if self.high.is_empty() { WINDOW_OPEN } else { self.settings.window_ns };
        if self.takes_turns() { window_ns.min(self.turns.window_ns()) } else { window_ns }
    }
}

/// The constants come from the configuration and the clients from the core: what
/// outlives a reload is what was measured of kernels.
impl Stateful for Priority {
    fn snapshot(&self) -> Saved {
        self.forms.snapshot()
    }

    fn restore(&mut self, from: &Saved) -> Result<(), String> {
        self.forms.restore(from)
    }
}

tally_sdk::export!(Priority: membership, state);

#[cfg(test)]
mod tests;
