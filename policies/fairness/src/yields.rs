//! Launches under way that can yield, and whether their clients have been asked to.

use crate::Shares;
use tally_sdk::host;

/// What policies do with `set-yield` alike, whatever they ask it for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Yields {
    /// Until when a launch that can yield may be under way, if it is not asked to any longer.
    pub until_ns: u64,
    /// All have been asked to since then.
    since_ns: Option<u64>,
}

impl Yields {
    /// Best-effort clients have been asked to yield.
    pub fn is_on(&self) -> bool {
        self.since_ns.is_some()
    }

    /// Something is under way at this time that could yield and does not.
    pub fn is_under_way(&self, now_ns: u64) -> bool {
        !self.is_on() && self.until_ns > now_ns
    }

    /// How long what is under way takes from now on, or from when it goes on.
    pub fn left_ns(&self, now_ns: u64) -> u64 {
        self.until_ns.saturating_sub(self.since_ns.unwrap_or(now_ns))
    }

    /// Ask best-effort clients to yield, or to go on, if they have not been asked yet; but not who is due by its floor:
    /// it would not get on.
    pub fn set(&mut self, now_ns: u64, yields: bool, shares: &Shares) {
        if self.is_on() == yields {
            return;
        }
        let since_ns = std::mem::replace(&mut self.since_ns, yields.then_some(now_ns));
        // What was under way stood still.
        let stood_ns = since_ns.map_or(0, |since_ns| now_ns.saturating_sub(since_ns));
        self.until_ns = self.until_ns.saturating_add(stood_ns);
        let ids = shares.clients.best_effort_ids().filter(|id| !shares.floors.is_due(*id));
        ids.for_each(|id| host::set_yield(id, yields));
    }

    /// Somebody became due by its floor and goes on, or is no longer and yields like the others.
    pub fn floors_changed(&self, shares: &Shares) {
        if self.is_on() {
            let ids = shares.clients.best_effort_ids();
            ids.for_each(|id| host::set_yield(id, !shares.floors.is_due(id)));
        }
    }
}
