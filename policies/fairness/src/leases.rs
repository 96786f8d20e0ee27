//! Leases beside services: a program that its CPU limits is slowed down by being asked about each launch.
//!
//! A lease is short; its launches are charged in advance, at the mean time of those that were asked about, in whichever
//! form those ran. It is given only behind a launch that runs whole, and only if every unit, open or to come, could
//! bear that many of the longest recent whole launches. So nothing is under way that a unit could not bear, and every
//! few launches one is checked as all others are.
//!
//! A client has a width of its own (`widths.set`) while one launch after another runs on spared SMs. It gets no leases
//! then: a kernel of which no launch was limited yet would run whole.

use crate::Shares;
use tally_sdk::{ClientId, UNKNOWN, host};

/// After so many launches in a row on spared SMs, each of which was asked about, a client has a width of its own.
const IN_ROW: u32 = 64;

/// After so many launches on a width to keep, its client's kernels were limited before.
const SETTLED: u32 = 1_024;

/// Launches of a lease at most, and at least: where units bear little, what is charged ahead keeps others waiting.
const LAUNCHES_MAX: u64 = 32;
const LAUNCHES_MIN: u64 = 8;
/// It takes at most one part in so many of what units bear.
const PART: u64 = 2;
/// The mean follows by one part in so many with each launch, and the longest is forgotten as slowly.
const FOLLOW: u64 = 32;

/// What launches of the one best-effort client took of late, as predicted.
#[derive(Debug, Default)]
pub struct Leases {
    client: Option<ClientId>,
    mean_ns: u64,
    longest_ns: u64,
    /// What the launches that may start unasked could take; 0: there are none.
    out_ns: u64,
}

impl Leases {
    /// A launch starts that was asked about. `ns` may be [`UNKNOWN`].
    pub fn starts(&mut self, client: ClientId, ns: u64) {
        if ns == UNKNOWN {
            return;
        }
        if self.client.replace(client) != Some(client) {
            (self.mean_ns, self.longest_ns) = (ns, ns);
        }
        let (more_ns, less_ns) = (ns.saturating_sub(self.mean_ns), self.mean_ns.saturating_sub(ns));
        self.mean_ns = self.mean_ns + more_ns / FOLLOW - less_ns / FOLLOW;
    }

    /// It runs as those do that start unasked, and takes so much of a unit.
    pub fn runs(&mut self, ns: u64) {
        self.longest_ns = ns.max(self.longest_ns - self.longest_ns.div_ceil(FOLLOW));
    }

    /// Launches that may follow unasked where units bear so much.
    pub fn give(&mut self, bears_ns: u64) -> u32 {
        let launches = (bears_ns / PART / self.longest_ns.max(1)).min(LAUNCHES_MAX);
        let launches = if launches < LAUNCHES_MIN { 0 } else { launches };
        // Who asks has none left.
        self.out_ns = launches * self.longest_ns;
        launches as u32
    }

    /// What a launch that starts unasked takes of a unit at most.
    pub fn longest_ns(&self) -> u64 {
        self.longest_ns
    }

    /// Time that so many launches are taken to need, of which each takes so long at most.
    pub fn mean_ns(&self, launches: u32, longest_ns: u64) -> u64 {
        u64::from(launches).saturating_mul(self.mean_ns.min(longest_ns))
    }

    /// A unit bears so much: no launch starts unasked any longer, if they could take more.
    pub fn fit(&mut self, bears_ns: u64, shares: &Shares) {
        if bears_ns < self.out_ns {
            self.out_ns = 0;
            shares.clients.best_effort_ids().for_each(host::revoke_lease);
        }
    }
}

/// The width of the one best-effort client.
#[derive(Debug, Default)]
pub struct ClientWidth {
    client: Option<ClientId>,
    sms: u32,
    in_row: u32,
    /// Launches since the client has the width to keep.
    kept: u32,
}

impl ClientWidth {
    /// A launch runs on so many spared SMs, as the one before it did. True if its client has them as its width.
    pub fn beside(&mut self, client: ClientId, sms: u32) -> bool {
        if (self.client, self.sms) != (Some(client), sms) {
            self.end();
            (self.client, self.sms) = (Some(client), sms);
        }
        self.in_row = self.in_row.saturating_add(1);
        if self.in_row == IN_ROW {
            host::set_width(client, sms);
        }
        self.sms().is_some()
    }

    /// The client has so many SMs as its width from now on.
    pub fn keep(&mut self, client: ClientId, sms: u32) {
        if (self.client, self.sms()) != (Some(client), Some(sms)) {
            self.end();
            (self.client, self.sms, self.in_row) = (Some(client), sms, IN_ROW);
            host::set_width(client, sms);
        }
        self.kept = self.kept.saturating_add(1);
    }

    /// Most kernels that launch unasked were limited before, so they have the width, too.
    pub fn has_settled(&self) -> bool {
        self.kept >= SETTLED
    }

    /// The client's width, if it has one.
    pub fn sms(&self) -> Option<u32> {
        (self.in_row >= IN_ROW).then_some(self.sms)
    }

    /// A launch runs elsewhere, or may.
    pub fn end(&mut self) {
        if let Some(client) = self.client.filter(|_| self.sms().is_some()) {
            host::set_width(client, 0);
        }
        (self.in_row, self.kept) = (0, 0);
    }
}
