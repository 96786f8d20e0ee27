//! Leases beside services: a program that its CPU limits is slowed down by being asked about each launch.
//!
//! A lease is short; its launches are charged in advance, at the mean time of those that were asked about, in whichever
//! form those ran. It is given only if every unit, open or to come, could bear that many of the longest recent launches
//! that ran as those do that start unasked: whole, or on the client's width. Every few launches one is checked as all
//! others are.
//!
//! A client has a width of its own (`widths.set`) while one launch after another runs on some SMs. Leased launches have
//! it, too, but for kernels of which no launch was limited yet: so there is no lease before many were.

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

/// How launches run that start unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runs {
    /// On all SMs.
    Whole,
    /// On those of their client's width.
    OnWidth,
}

/// Launches that may follow one unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// So many; 0: each is to be asked about.
    pub launches: u32,
    /// What they are taken to take of a unit.
    pub takes_ns: u64,
    /// GPU time that they are taken to need if they run whole.
    pub work_ns: u64,
}

/// What launches of the one best-effort client took of late, as predicted.
#[derive(Debug, Default)]
pub struct Leases {
    client: Option<ClientId>,
    /// Means: GPU time of whole launches, and what launches take of a unit.
    work_ns: u64,
    takes_ns: u64,
    /// The most that a launch takes of a unit which runs whole, or on the width.
    longest_ns: [u64; 2],
    /// What the launches that may start unasked could take; 0: there are none.
    out_ns: u64,
}

fn follow(mean_ns: &mut u64, ns: u64) {
    let (more_ns, less_ns) = (ns.saturating_sub(*mean_ns), mean_ns.saturating_sub(ns));
    *mean_ns = *mean_ns + more_ns / FOLLOW - less_ns / FOLLOW;
}

impl Leases {
    /// A launch starts that was asked about. `work_ns` may be [`UNKNOWN`].
    pub fn starts(&mut self, client: ClientId, work_ns: u64, takes_ns: u64) {
        if work_ns == UNKNOWN {
            return;
        }
        if self.client.replace(client) != Some(client) {
            (self.work_ns, self.takes_ns) = (work_ns, takes_ns);
            self.longest_ns = [work_ns; 2];
        }
        follow(&mut self.work_ns, work_ns);
        follow(&mut self.takes_ns, takes_ns);
    }

    /// A launch runs in this way and takes so much of a unit: launches that may follow where units bear so much.
    pub fn give(&mut self, runs: Runs, takes_ns: u64, bears_ns: u64) -> Lease {
        let longest_ns = &mut self.longest_ns[runs as usize];
        *longest_ns = takes_ns.max(*longest_ns - longest_ns.div_ceil(FOLLOW));
        let longest_ns = *longest_ns;
        let launches = (bears_ns / PART / longest_ns.max(1)).min(LAUNCHES_MAX);
        let launches = if launches < LAUNCHES_MIN { 0 } else { launches };
        // Who asks has none left.
        self.out_ns = launches * longest_ns;
        // None of them takes longer than that one.
        let takes_ns = launches * self.takes_ns.min(longest_ns);
        let work_ns = launches.saturating_mul(self.work_ns);
        let work_ns = if runs == Runs::Whole { takes_ns } else { work_ns };
        Lease { launches: launches as u32, takes_ns, work_ns }
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
