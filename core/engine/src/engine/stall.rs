//! Work that waits for nothing: the policy holds launches while no high-priority work
//! is on the GPU and nothing else is in flight.
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

use super::{Action, Engine};
use crate::policy::{ClientId, Fault, FaultKind, Policy};

impl<P: Policy> Engine<P> {
    /// Take note of whether the GPU idles on the policy's word. After every input.
    pub(super) fn note_stall(&mut self, now_ns: u64, out: &mut Vec<Action>) {
        let idles = self.waiting_clients > 0 && !self.high_active && !self.has_in_flight();
        if !idles || self.disabled {
            self.idle_since_ns = None;
            return;
        }
        let since_ns = *self.idle_since_ns.get_or_insert(now_ns);
        let stall_ns = self.config.policy_stall_ns;
        if now_ns.saturating_sub(since_ns) < stall_ns {
            return;
        }
        self.idle_since_ns = None;
        let (clients, ms) = (self.waiting_clients, stall_ns / 1_000_000);
        let fault = Fault {
            kind: FaultKind::Stall,
            message: format!(
                "held the launches of {clients} clients for {ms} ms while the GPU had nothing to do"
            ),
        };
        self.policy.count_fault(now_ns, &fault);
        self.count_fault(fault, out);
        let mut waiting: Vec<ClientId> = Vec::new();
        for (&id, c) in self.clients.iter_mut().filter(|(_, c)| !c.waiting.is_empty()) {
            c.left_to_rule = c.waiting.len();
            waiting.push(id);
        }
        for id in waiting {
            while self.offer(now_ns, id, true, out) {}
        }
    }

    /// When a hold becomes a stall, ns; `None` while the GPU is busy.
    pub(super) fn next_stall_ns(&self) -> Option<u64> {
        Some(self.idle_since_ns?.saturating_add(self.config.policy_stall_ns))
    }
}
