//! What a client's launches meet, for people.

use super::Engine;
use crate::client::Client;
use crate::policy::{ClientId, Policy};

/// What a client's launches meet now; for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientState {
    /// The client is ungated: its launches start without a decision.
    pub ungated: bool,
    /// Why the policy last decided as it did, by its own table; 0: no reason.
    pub reason: u8,
    pub window_ns: u64,
    /// SMs that launches which are decided `run` are limited to; 0: none are.
    pub width_sms: u32,
    /// Launches waiting for a decision.
    pub waiting: u64,
    /// Launches granted and not done.
    pub in_flight: u64,
    /// GPU time that they count in the window.
    pub in_flight_ns: u64,
    /// The client has been asked to yield.
    pub yielded: bool,
    /// What its next launch waits for, or that a launch under way yields; `None`: nothing waits.
    pub waits_for: Option<WaitsFor>,
}

/// Why a client's work does not go on; for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitsFor {
    /// Held, by the policy or the built-in rule, while high-priority work is on the GPU.
    HighPriority {
        /// When it is offered again at the latest.
        until_ns: u64,
    },
    /// Held while there is no high-priority work.
    Policy { until_ns: u64 },
    /// The client's in-flight window is full.
    Window,
    /// A launch under way has been asked to yield.
    Yielding,
    /// Its launch has not been decided yet.
    Decision,
}

impl<P: Policy> Engine<P> {
    /// Whether a client is gated, its window, waiting and in-flight launches, and
    /// predicted GPU time in flight.
    pub fn client_state(&self, client: ClientId) -> Option<ClientState> {
        self.clients.get(&client).map(|c| ClientState {
            ungated: c.ungated,
            reason: c.reason,
            window_ns: c.window_ns,
            width_sms: c.width_sms,
            waiting: c.waiting.len() as u64,
            in_flight: c.in_flight,
            in_flight_ns: c.in_flight_ns,
            yielded: c.yielded,
            waits_for: self.waits_for(c),
        })
    }

    /// How many launches a client has in flight, and how often one was granted or seen done.
    pub fn moves(&self, client: ClientId) -> (u64, u64) {
        self.clients.get(&client).map_or((0, 0), |c| {
            let granted = c.stats.submitted - c.waiting.len() as u64;
            (c.in_flight, granted.wrapping_add(c.stats.completed))
        })
    }

    fn waits_for(&self, c: &Client) -> Option<WaitsFor> {
        let until_ns = c.hold_until_ns;
        match c.waiting.is_empty() {
            true if c.yielded && !c.can_yield_in_flight.is_empty() => Some(WaitsFor::Yielding),
            true => None,
            false if c.window_until_ns > 0 => Some(WaitsFor::Window),
            false if until_ns == 0 => Some(WaitsFor::Decision),
            false if self.high_active => Some(WaitsFor::HighPriority { until_ns }),
            false => Some(WaitsFor::Policy { until_ns }),
        }
    }
}
