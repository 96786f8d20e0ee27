//! Leases beside services: a program that its CPU limits is slowed down by being asked about each launch.
//!
//! A lease is short; its launches are charged in advance, at the recent mean time. It is given only behind a launch
//! that runs whole, and only if every unit, open or to come, could bear that many of the longest recent launches. So
//! nothing is under way that a unit could not bear, and every few launches one is checked as all others are.

use tally_fairness::Shares;
use tally_sdk::{ClientId, host};

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
    /// A launch starts.
    pub fn starts(&mut self, client: ClientId, ns: u64) {
        if self.client.replace(client) != Some(client) {
            (self.mean_ns, self.longest_ns) = (ns, ns);
        }
        let (more_ns, less_ns) = (ns.saturating_sub(self.mean_ns), self.mean_ns.saturating_sub(ns));
        self.mean_ns = self.mean_ns + more_ns / FOLLOW - less_ns / FOLLOW;
        self.longest_ns = ns.max(self.longest_ns - self.longest_ns.div_ceil(FOLLOW));
    }

    /// Launches that may follow unasked where units bear so much, and the time that they are taken to need.
    pub fn give(&mut self, bears_ns: u64) -> (u32, u64) {
        let launches = (bears_ns / PART / self.longest_ns.max(1)).min(LAUNCHES_MAX);
        let launches = if launches < LAUNCHES_MIN { 0 } else { launches };
        // Who asks has none left.
        self.out_ns = launches * self.longest_ns;
        (launches as u32, launches.saturating_mul(self.mean_ns))
    }

    /// A unit bears so much: no launch starts unasked any longer, if they could take more.
    pub fn fit(&mut self, bears_ns: u64, shares: &Shares) {
        if bears_ns < self.out_ns {
            self.out_ns = 0;
            shares.clients.best_effort_ids().for_each(host::revoke_lease);
        }
    }
}
