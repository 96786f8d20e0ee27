//! Floors of best-effort clients: what each asked for, and what it is granted.
//!
//! All floors together are at most [`MIN_SHARE_PERMILLE`]`[1]`, and those that programs asked for at most what the
//! operator allows, to all and to each user. Admins' wishes come first, then who asked earlier. Who gets less gets more
//! once others have left.

use super::Dispatch;
use super::control::Allowed;
use std::collections::BTreeMap;
use tally_contract::min_share::MIN_SHARE_PERMILLE;
use tally_engine::engine::Had;
use tally_engine::policy::{Class, ClientId};

/// A client that asked for a minimum share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MinShare {
    pub id: ClientId,
    /// The share that it asked for, permille.
    pub asked: u32,
    /// `None`: an admin asked for this one.
    allowed: Option<Allowed>,
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
    fn ask(&mut self, id: ClientId, asked: u32, allowed: Option<Allowed>, from: Had) {
        let wish = MinShare { id, asked, allowed, granted: 0, from };
        match self.0.iter().position(|one| one.id == id) {
            Some(at) if asked == 0 => drop(self.0.remove(at)),
            Some(at) => self.0[at] = wish,
            None if asked > 0 => self.0.push(wish),
            None => {}
        }
        self.divide();
    }

    fn divide(&mut self) {
        let mut left = MIN_SHARE_PERMILLE[1];
        for one in self.0.iter_mut().filter(|one| one.allowed.is_none()) {
            one.granted = one.asked.min(left);
            left -= one.granted;
        }
        let mut taken = 0;
        let mut of_users = BTreeMap::new();
        for one in &mut self.0 {
            let Some(Allowed { together, of_user }) = one.allowed else { continue };
            one.granted = one.asked.min(together.min(left).saturating_sub(taken));
            if let Some((user, most)) = of_user {
                let of_user: &mut u32 = of_users.entry(user).or_default();
                one.granted = one.granted.min(most.saturating_sub(*of_user));
                *of_user += one.granted;
            }
            taken += one.granted;
        }
    }
}

impl Dispatch {
    /// A best-effort client asks for a floor, permille; 0: for none. `allowed`: what programs may have by asking;
    /// `None`: an admin asks. What it is granted; `None` if there is no such client.
    pub(super) fn set_min_share(
        &mut self,
        now_ns: u64,
        id: ClientId,
        asked: u32,
        allowed: Option<Allowed>,
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
    use crate::quota::User;

    fn together(together: u32) -> Option<Allowed> {
        Some(Allowed { together, of_user: None })
    }

    fn granted<const N: usize>(shares: &MinShares, ids: [ClientId; N]) -> [Option<u32>; N] {
        ids.map(|id| shares.get(id).map(|one| one.granted))
    }

    #[test]
    fn who_asks_later_gets_what_is_left_and_more_once_others_leave() {
        let mut shares = MinShares::default();
        shares.ask(1, 600, None, Had::default());
        shares.ask(2, 300, together(100), Had::default());
        shares.ask(3, 400, None, Had::default());
        assert_eq!(granted(&shares, [1, 2, 3]), [Some(600), Some(0), Some(300)]);
        // Who asks again keeps its place.
        shares.ask(1, 450, None, Had::default());
        assert_eq!(granted(&shares, [1, 2, 3]), [Some(450), Some(50), Some(400)]);
        assert!(shares.forget(3) && !shares.forget(3));
        shares.divide();
        assert_eq!(granted(&shares, [1, 2, 3]), [Some(450), Some(100), None]);
        shares.ask(2, 0, None, Had::default());
        shares.ask(2, 0, None, Had::default());
        assert_eq!(granted(&shares, [1, 2]), [Some(450), None]);
    }

    #[test]
    fn the_programs_of_one_user_leave_some_to_others() {
        let mut shares = MinShares::default();
        let of = |uid| Some(Allowed { together: 500, of_user: Some((User::Uid(uid), 200)) });
        let asks = [(1, of(7)), (2, of(7)), (3, of(8)), (4, together(500))];
        asks.into_iter().for_each(|(id, allowed)| shares.ask(id, 150, allowed, Had::default()));
        assert_eq!(granted(&shares, [1, 2, 3, 4]), [Some(150), Some(50), Some(150), Some(150)]);
        shares.ask(1, 0, of(7), Had::default());
        assert_eq!(granted(&shares, [2, 3, 4]), [Some(150); 3]);
    }

    #[test]
    fn programs_together_get_what_the_operator_allows() {
        let mut shares = MinShares::default();
        (1..=20).for_each(|id| shares.ask(id, 50, together(120), Had::default()));
        assert_eq!(granted(&shares, [1, 2, 3, 4]), [Some(50), Some(50), Some(20), Some(0)]);
        // An admin's wish is not among them, and comes first.
        shares.ask(21, 850, None, Had::default());
        assert_eq!(granted(&shares, [1, 2, 21]), [Some(50), Some(0), Some(850)]);
        shares.ask(3, 30, None, Had::default());
        assert_eq!(granted(&shares, [1, 3, 21]), [Some(20), Some(30), Some(850)]);
    }
}
