//! High priority at once, best effort while there is none: Tally's rule (ASPLOS
//! 2025, section 4), at the granularity of whole kernels.
//!
//! - A high-priority launch runs at once. (It has a standing grant; the policy is
//!   not even asked.)
//! - A best-effort launch runs once high priority has been quiet for `quiet_us`.
//!   Until then it is held: while high priority is busy until that changes, after
//!   it for exactly the rest of the quiet time.
//! - At most `window_us` of a best-effort client's kernels are under way, for
//!   that is what a high-priority launch may have to wait behind.
//! - Without a high-priority client there is nothing to protect: long leases and
//!   no window, so that a lone program pays nothing. Both end when one joins.
//!
//! [`rule`] decides when a launch may start and [`Priority::decide`] in which
//! form; [`settings`] are the constants.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

mod rule;
mod settings;

use rule::Admission;
use settings::Settings;
use tally_sdk::host;
use tally_sdk::{ClientId, ClientInfo, Decision, Event, Launch, Level, Policy, PriorityClass};

/// A window that holds nothing back.
const WINDOW_NS_NONE: u64 = u64::MAX;

/// The policy's memory: its constants and who is connected.
struct Priority {
    settings: Settings,
    high: Vec<ClientId>,
    best_effort: Vec<ClientId>,
}

impl Policy for Priority {
    fn init(config: &str) -> Result<Self, String> {
        let settings = Settings::read(config)?;
        host::log(Level::Info, &settings.to_string());
        Ok(Priority { settings, high: Vec::new(), best_effort: Vec::new() })
    }

    fn decide(&mut self, launch: &Launch) -> Decision {
        match rule::admit(launch, &self.settings) {
            Admission::Wait(ns) => Decision::Hold(ns),
            Admission::Alone => Decision::Run(self.settings.lease_launches),
            Admission::Now => Decision::Run(0),
        }
    }

    fn on_event(&mut self, _now_ns: u64, event: &Event) {
        match event {
            Event::ClientJoined(client) => self.joined(client),
            Event::ClientLeft(client) => self.left(*client),
            // Not subscribed to: every launch says how quiet it is.
            Event::HighBusy | Event::HighIdle | Event::KernelDone(_) | Event::Timer(_) => {}
        }
    }
}

impl Priority {
    fn joined(&mut self, client: &ClientInfo) {
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
            }
        }
    }

    fn left(&mut self, client: ClientId) {
        self.best_effort.retain(|&id| id != client);
        let before = self.high.len();
        self.high.retain(|&id| id != client);
        if before > 0 && self.high.is_empty() {
            for &id in &self.best_effort {
                host::set_window(id, WINDOW_NS_NONE);
            }
        }
    }

    /// The first high-priority client is here: take back what was given freely.
    fn protect(&self) {
        for &id in &self.best_effort {
            host::set_window(id, self.settings.window_ns);
            host::revoke_lease(id);
        }
    }

    fn window_ns(&self) -> u64 {
        if self.high.is_empty() { WINDOW_NS_NONE } else { self.settings.window_ns }
    }
}

tally_sdk::export!(Priority);

#[cfg(test)]
mod tests;
