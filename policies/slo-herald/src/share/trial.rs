//! A way of sharing that is tried: when it has lost, and when the next is tried.

use super::Share;
use crate::space::Space;
use crate::worth::{Tally, Worth};

/// Reviews after which the other way is tried again; twice as many after each trial that it lost, up to the second.
pub const TRIAL_REVIEWS: [u32; 2] = [96, 1_536];
/// Reviews after which a way that is tried is left, settled or not, if it lets in less than so much of the best,
/// percent.
const GLIMPSE_REVIEWS: u32 = 6;
const GLIMPSE_PERCENT: u64 = 70;

impl Share {
    /// Whether a way that is tried lets in far less than the best, settled or not.
    pub(super) fn has_lost(&mut self, now_ns: u64) -> bool {
        self.trial_reviews += 1;
        if self.trial_reviews == 1 {
            (self.trial, self.trial_from_ns) = (Tally::default(), now_ns);
        }
        if self.trial_reviews <= GLIMPSE_REVIEWS {
            return false;
        }
        let worth = Worth::measured(self.trial, now_ns.saturating_sub(self.trial_from_ns));
        let best = self.permille(self.best_other());
        let is_lost = worth.permille(self.pace) * 100 < best * GLIMPSE_PERCENT;
        if is_lost {
            self.worth[self.way as usize] = worth;
        }
        is_lost
    }

    /// More SMs may do better where units were early.
    pub(super) fn lose_trial(&mut self, is_early: bool) {
        if is_early && self.spot().is_some_and(Space::widen) {
            (self.measured, self.reviews, self.trial_reviews) = (0, 0, 0);
            return;
        }
        let was_used = self.limited > 0;
        if let Some(space) = self.spot() {
            space.give_up(was_used);
        }
        self.end_trial(false);
        self.take(self.best_other());
    }

    pub(super) fn end_trial(&mut self, is_won: bool) {
        let [first, last] = TRIAL_REVIEWS;
        let after = (self.trial_after * 2).clamp(first, last);
        self.trial_after = if is_won { first } else { after };
        (self.is_trial, self.compared) = (false, 0);
    }
}
