//! Floors of best-effort clients: what each asked for, and what it is granted.
//!
//! All floors together are at most [`MIN_SHARE_PERMILLE`]`[1]`: who asked later gets what is left, and more once others
//! have left.

use super::Dispatch;
use tally_contract::min_share::MIN_SHARE_PERMILLE;
use tally_engine::engine::Had;
use tally_engine::policy::{Class, ClientId};

/// A client that asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MinShare {
    pub id: ClientId,
    /// Permille, like the others.
    pub asked: u32,
    /// What it may have at most.
    allowed: u32,
    pub granted: u32,
    /// What it had had when this was set.
    pub from: Had,
}

/// Those that asked, in that order.
#[derive(Debug, Default)]
pub struct MinShares(Vec<MinShare>);

impl MinShares {
    pub fn get(&self, id: ClientId) -> Option<MinShare> {
        self.0.iter().copied().find(|one| one.id == id)
    }

    /// True if there was one.
    fn forget(&mut self, id: ClientId) -> bool {
        let before = self.0.len();
        self.0.retain(|one| one.id != id);
        self.0.len() < before
    }

    /// 0: it asks for nothing any more.
    fn ask(&mut self, id: ClientId, asked: u32, allowed: u32, from: Had) {
        self.forget(id);
        if asked > 0 {
            self.0.push(MinShare { id, asked, allowed, granted: 0, from });
        }
        self.divide();
    }

    fn divide(&mut self) {
        let mut left = MIN_SHARE_PERMILLE[1];
        for one in &mut self.0 {
            one.granted = one.asked.min(one.allowed).min(left);
            left -= one.granted;
        }
    }
}

impl Dispatch {
    /// A best-effort client asks for a floor, permille, of which it may have so much; 0: for none. What it is granted;
    /// `None` if there is no such client.
    pub(super) fn set_min_share(
        &mut self,
        now_ns: u64,
        id: ClientId,
        asked: u32,
        allowed: u32,
    ) -> Option<u32> {
        let view = self.engine.world().clients.get(&id)?;
        if view.info.class != Class::BestEffort {
            return None;
        }
        let from = self.engine.had(now_ns, id).unwrap_or_default();
        self.min_shares.ask(id, asked, allowed, from);
        if asked == 0 {
            self.engine.set_min_share(now_ns, id, 0, &mut self.actions);
        }
        self.grant_min_shares(now_ns);
        Some(self.min_shares.get(id).map_or(0, |one| one.granted))
    }

    /// A client left: others may have what it leaves.
    pub(super) fn forget_min_share(&mut self, now_ns: u64, id: ClientId) {
        if self.min_shares.forget(id) {
            self.min_shares.divide();
            self.grant_min_shares(now_ns);
        }
    }

    fn grant_min_shares(&mut self, now_ns: u64) {
        for one in &self.min_shares.0 {
            self.engine.set_min_share(now_ns, one.id, one.granted, &mut self.actions);
        }
        self.apply(now_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_later_gets_what_is_left_and_more_once_others_leave() {
        let mut shares = MinShares::default();
        let granted = |shares: &MinShares, id| shares.get(id).map(|one| one.granted);
        shares.ask(1, 600, 1_000, Had::default());
        shares.ask(2, 300, 100, Had::default());
        shares.ask(3, 400, 1_000, Had::default());
        assert_eq!([1, 2, 3].map(|id| granted(&shares, id)), [Some(600), Some(100), Some(200)]);
        // Who asks again is the last one.
        shares.ask(1, 800, 1_000, Had::default());
        assert_eq!([1, 2, 3].map(|id| granted(&shares, id)), [Some(400), Some(100), Some(400)]);
        assert!(shares.forget(3) && !shares.forget(3));
        shares.divide();
        assert_eq!([1, 2, 3].map(|id| granted(&shares, id)), [Some(800), Some(100), None]);
        shares.ask(2, 0, 1_000, Had::default());
        assert_eq!(granted(&shares, 2), None);
    }
}
