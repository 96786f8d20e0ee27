//! What a client writes beyond bounds that every shim keeps, whatever its program does: counted, and in the end its
//! client is disconnected. Each is bounded where it is read, so until then it costs nobody else.
//!
//! No breach is what a program can cause (shapes of launches, times of marks, NVTX ranges), what a thread that is
//! stopped or killed at any point leaves behind, or a completion word that runs ahead: ungated launches have numbers,
//! too, and are never submitted.

use super::DispatchClient;
use tally_contract::limits::{BREACHES_MAX, TICKETS_AHEAD_MAX, TURNAROUNDS_AHEAD_MAX};
use tally_ipc::layout::TURNAROUND_SLOTS;
use tally_ipc::ring;

/// Counts of oddities, for `tallyctl status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Oddities {
    /// Tickets passed over because they were never published.
    pub skipped: u64,
    /// Tickets whose owner gave up.
    pub abandoned: u64,
    /// What it wrote beyond bounds that its shim keeps.
    pub breaches: u64,
}

impl DispatchClient {
    pub(super) fn note_breach(&mut self, what: &'static str) {
        self.oddities.breaches = self.oddities.breaches.saturating_add(1);
        self.breach = what;
    }

    /// Why it is served no longer, if so.
    pub(super) fn broke_too_much(&self) -> Option<&'static str> {
        (self.oddities.breaches >= BREACHES_MAX).then_some(self.breach)
    }

    /// Whether [`DispatchClient::poll_submissions`] has something to do, be it to find a breach: rings are empty nearly
    /// always.
    pub fn is_to_be_polled(&self, now_ns: u64) -> bool {
        let has_come = ring::has_come(&self.link.region, self.next_ticket);
        has_come || now_ns >= self.stuck_look_ns || self.broke_too_much().is_some()
    }

    /// `taken`: tickets that its threads took, by its own word. Each thread waits with one.
    pub(super) fn check_tickets(&mut self, taken: u64) {
        if taken - self.next_ticket > TICKETS_AHEAD_MAX {
            self.note_breach("more tickets are taken than a process can have threads");
        }
    }

    /// `count`: launches that yielded, by its own word; they yield when the core asks.
    pub(super) fn check_turnarounds(&mut self, count: u64) {
        let seen = self.turnarounds_seen;
        if count > seen.saturating_add(TURNAROUNDS_AHEAD_MAX) {
            self.note_breach("more launches have yielded than can have been asked to");
        } else if count.saturating_add(TURNAROUND_SLOTS as u64) < seen {
            self.note_breach("its count of launches that yielded falls");
        }
    }
}
