//! What is done for one client, and for one user, in a pass before the next one has its turn, however much they ask for.
//!
//! A user's clients together get no more than one client alone may: whoever makes a hundred connections delays the
//! others no longer than with one. Where that does not suffice for all of them, the next pass begins with the first that
//! got nothing.

use std::iter::Chain;
use std::ops::Range;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use tally_contract::limits::{
    PASS_COMPLETIONS_CLIENT_MAX, PASS_COMPLETIONS_MAX, PASS_SUBMISSIONS_CLIENT_MAX,
    PASS_SUBMISSIONS_MAX, PASS_WAKES_USER_MAX,
};

/// What is done for one client in a pass, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Launches taken from its ring.
    pub submissions: usize,
    /// Streams looked at, and ends of launches told to the engine.
    pub completions: usize,
    /// Reports of how soon a launch yielded.
    pub turnarounds: usize,
}

impl Share {
    /// The share of each of this many clients: a pass takes about as long with many clients as with few.
    pub fn of(clients: usize) -> Self {
        let part = |all: usize, most: usize| (all / clients.max(1)).clamp(2, most);
        Share {
            submissions: part(PASS_SUBMISSIONS_MAX, PASS_SUBMISSIONS_CLIENT_MAX),
            completions: part(PASS_COMPLETIONS_MAX, PASS_COMPLETIONS_CLIENT_MAX),
            turnarounds: part(PASS_SUBMISSIONS_MAX, PASS_SUBMISSIONS_CLIENT_MAX),
        }
    }
}

/// What a user's clients had in the present pass. Used by the dispatch thread alone, so that loads and stores suffice.
#[derive(Debug, Default)]
pub struct UserPass {
    turn: AtomicU64,
    submissions: AtomicU32,
    completions: AtomicU32,
    turnarounds: AtomicU32,
    wakes: AtomicU32,
}

fn add(word: &AtomicU32, more: u32) {
    word.store(word.load(Relaxed) + more, Relaxed);
}

impl UserPass {
    fn begin(&self, turn: u64) {
        if self.turn.load(Relaxed) != turn {
            self.turn.store(turn, Relaxed);
            for used in [&self.submissions, &self.completions, &self.turnarounds, &self.wakes] {
                used.store(0, Relaxed);
            }
        }
    }

    /// What is left of a client's share in this turn of the loop.
    pub fn left(&self, turn: u64, share: Share) -> Share {
        self.begin(turn);
        let left = |most: usize, used: &AtomicU32| most.saturating_sub(used.load(Relaxed) as usize);
        let Share { submissions, completions, turnarounds } = share;
        Share {
            submissions: submissions.min(left(PASS_SUBMISSIONS_CLIENT_MAX, &self.submissions)),
            completions: completions.min(left(PASS_COMPLETIONS_CLIENT_MAX, &self.completions)),
            turnarounds: turnarounds.min(left(PASS_SUBMISSIONS_CLIENT_MAX, &self.turnarounds)),
        }
    }

    /// Counts this as used in the present pass.
    pub fn used(&self, share: Share) {
        add(&self.submissions, share.submissions as u32);
        add(&self.completions, share.completions as u32);
        add(&self.turnarounds, share.turnarounds as u32);
    }

    /// Whether another thread of it may be woken in this turn of the loop.
    pub fn may_wake(&self, turn: u64) -> bool {
        self.begin(turn);
        self.wakes.load(Relaxed) < PASS_WAKES_USER_MAX
    }

    /// A system call that woke so many threads.
    pub fn woke(&self, threads: u32) {
        add(&self.wakes, 1 + threads);
    }
}

/// Where a loop over all clients begins: by id, with the first one that the last pass had nothing left for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rotation {
    first: u32,
    skipped: Option<u32>,
}

impl Rotation {
    /// The indices of all clients, whose ids rise, in the order of this pass.
    pub fn begin(
        &mut self,
        ids: impl ExactSizeIterator<Item = u32>,
    ) -> Chain<Range<usize>, Range<usize>> {
        self.first = self.skipped.take().unwrap_or(self.first);
        let (count, first) = (ids.len(), self.first);
        let before = { ids }.take_while(|id| *id < first).count();
        (before..count).chain(0..before)
    }

    /// Nothing was left for this one.
    pub fn skip(&mut self, id: u32) {
        self.skipped.get_or_insert(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_of_one_user_have_together_what_one_has_alone() {
        let (user, other) = (UserPass::default(), UserPass::default());
        let share = Share::of(100);
        let mut clients = 0;
        while user.left(1, share).submissions > 0 {
            user.used(Share { completions: 0, turnarounds: 0, ..user.left(1, share) });
            clients += 1;
        }
        assert_eq!(clients, PASS_SUBMISSIONS_CLIENT_MAX.div_ceil(share.submissions));
        assert_eq!(user.left(1, share), Share { submissions: 0, ..share });
        assert_eq!(other.left(1, share), share, "another user");
        assert_eq!(user.left(2, share), share, "the next pass");
        let mut wakes = 0;
        while user.may_wake(2) {
            user.woke(3);
            wakes += 1;
        }
        assert_eq!(wakes, PASS_WAKES_USER_MAX / 4);
        assert!(other.may_wake(2) && user.may_wake(3));
    }

    #[test]
    fn the_next_pass_begins_with_the_first_that_was_skipped() {
        let ids = || [3, 5, 8, 9].into_iter();
        let mut rotation = Rotation::default();
        let order = |rotation: &mut Rotation| rotation.begin(ids()).collect::<Vec<_>>();
        assert_eq!(order(&mut rotation), [0, 1, 2, 3]);
        rotation.skip(8);
        rotation.skip(9);
        assert_eq!(order(&mut rotation), [2, 3, 0, 1]);
        assert_eq!(order(&mut rotation), [2, 3, 0, 1], "nobody was skipped");
        // It left.
        rotation.skip(10);
        assert_eq!(order(&mut rotation), [0, 1, 2, 3]);
    }
}
