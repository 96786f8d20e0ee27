//! What is done for one client, and for one user, in a pass before the next one has its turn, however much they ask
//! for.
//!
//! A user's clients together get no more than one client alone may: whoever makes a hundred connections delays the
//! others no longer than with one. Where that does not suffice for all of them, the next pass begins with the first
//! that got nothing.

use std::iter::Chain;
use std::ops::Range;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use tally_contract::limits::{
    PASS_COMPLETIONS_CLIENT_MAX, PASS_COMPLETIONS_MAX, PASS_MARKS_CLIENT_MAX,
    PASS_SUBMISSIONS_CLIENT_MAX, PASS_SUBMISSIONS_MAX, PASS_WAKES_USER_MAX,
};
use tally_ipc::wait::{self, now_ns};

/// What is done for one client in a pass, at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Launches taken from its ring.
    pub submissions: usize,
    /// Streams looked at, and ends of launches told to the engine.
    pub completions: usize,
    /// Reports of how soon a launch yielded.
    pub turnarounds: usize,
    /// Marked units of work.
    pub marks: usize,
}

impl Share {
    /// The share of each of this many clients: a pass takes about as long with many clients as with few.
    pub fn of(clients: usize) -> Self {
        let part = |all: usize, most: usize| (all / clients.max(1)).clamp(2, most);
        Share {
            submissions: part(PASS_SUBMISSIONS_MAX, PASS_SUBMISSIONS_CLIENT_MAX),
            completions: part(PASS_COMPLETIONS_MAX, PASS_COMPLETIONS_CLIENT_MAX),
            turnarounds: part(PASS_SUBMISSIONS_MAX, PASS_SUBMISSIONS_CLIENT_MAX),
            marks: PASS_MARKS_CLIENT_MAX,
        }
    }
}

/// What a user's clients had in the present pass. Used by the dispatch thread alone, so that loads and stores suffice.
#[derive(Debug, Default)]
pub struct UserPass {
    iteration: AtomicU64,
    submissions: AtomicU32,
    completions: AtomicU32,
    turnarounds: AtomicU32,
    marks: AtomicU32,
    wakes: AtomicU32,
    debt: Debt,
    /// Until then the CPU time of wake-ups is read, because one took long.
    doubted_until_ns: AtomicU64,
}

/// CPU time of wake-ups beyond what they should take. The kernel looks for those who sleep on a word in a list that it
/// shares with other words: whoever has ten thousands sleep on one of those makes each look take long, even if nobody
/// is woken. Such time is lent, up to a bound, and paid back with a small part of the time that passes.
#[derive(Debug, Default)]
struct Debt {
    ns: AtomicU64,
    /// When it was so large.
    at_ns: AtomicU64,
}

/// A system call should take no longer, and so much longer for each thread that it wakes, ns.
const WAKE_NS: u64 = 5_000;
const WAKE_THREAD_NS: u64 = 15_000;
/// Lent before a user's threads are left to look around by themselves, ns. A host that is busy makes a wake-up of an
/// innocent user's take long now and then, too.
const DEBT_NS_MAX: u64 = 1_000_000;
/// Not more is paid back, so that one outlier leaves nobody alone for longer than 0.8 s, ns.
const DEBT_NS_CAP: u64 = 3 * DEBT_NS_MAX;
/// Time that must pass for each part of a debt. After a wake-up that took too long CPU time is read for as long: that
/// is a system call, too, for which all that were answered would wait. So of time that others took from the CPU none is
/// lent, and what is not charged is no more than what may be lent.
const DEBT_PART: u64 = 400;

fn allowed_ns(threads: u32) -> u64 {
    WAKE_NS + WAKE_THREAD_NS * u64::from(threads)
}

/// CPU time of this thread.
fn cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl Debt {
    fn left(&self, now_ns: u64) -> u64 {
        let paid = now_ns.saturating_sub(self.at_ns.load(Relaxed)) / DEBT_PART;
        self.ns.load(Relaxed).saturating_sub(paid)
    }

    fn is_too_large(&self, now_ns: impl FnOnce() -> u64) -> bool {
        let ns = self.ns.load(Relaxed);
        ns > DEBT_NS_MAX && self.left(now_ns()) > DEBT_NS_MAX
    }

    fn add(&self, now_ns: u64, took_ns: u64, threads: u32) {
        let more = took_ns.saturating_sub(allowed_ns(threads));
        if more > 0 {
            self.ns.store((self.left(now_ns) + more).min(DEBT_NS_CAP), Relaxed);
            self.at_ns.store(now_ns, Relaxed);
        }
    }
}

fn add(word: &AtomicU32, more: u32) {
    word.store(word.load(Relaxed) + more, Relaxed);
}

impl UserPass {
    fn begin(&self, iteration: u64) {
        if self.iteration.load(Relaxed) != iteration {
            self.iteration.store(iteration, Relaxed);
            let UserPass { submissions, completions, turnarounds, marks, wakes, .. } = self;
            for used in [submissions, completions, turnarounds, marks, wakes] {
                used.store(0, Relaxed);
            }
        }
    }

    /// What is left of a client's share in this iteration of the loop.
    pub fn left(&self, iteration: u64, share: Share) -> Share {
        self.begin(iteration);
        let left = |most: usize, used: &AtomicU32| most.saturating_sub(used.load(Relaxed) as usize);
        let Share { submissions, completions, turnarounds, marks } = share;
        Share {
            submissions: submissions.min(left(PASS_SUBMISSIONS_CLIENT_MAX, &self.submissions)),
            completions: completions.min(left(PASS_COMPLETIONS_CLIENT_MAX, &self.completions)),
            turnarounds: turnarounds.min(left(PASS_SUBMISSIONS_CLIENT_MAX, &self.turnarounds)),
            marks: marks.min(left(PASS_MARKS_CLIENT_MAX, &self.marks)),
        }
    }

    /// Counts this as used in the present pass.
    pub fn used(&self, share: Share) {
        add(&self.submissions, share.submissions as u32);
        add(&self.completions, share.completions as u32);
        add(&self.turnarounds, share.turnarounds as u32);
        add(&self.marks, share.marks as u32);
    }

    /// Whether another thread of it may be woken in this iteration of the loop.
    pub fn may_wake(&self, iteration: u64) -> bool {
        self.begin(iteration);
        self.wakes.load(Relaxed) < PASS_WAKES_USER_MAX
    }

    /// Whether waking its threads took too long of late.
    pub fn owes(&self) -> bool {
        self.debt.is_too_large(now_ns)
    }

    /// Wakes up to [`wait::WAKES_MAX`] threads that sleep on a word: how many it were.
    pub fn wake_some(&self, word: &AtomicU32) -> u32 {
        let start_ns = now_ns();
        let cpu_start_ns = self.is_doubted(start_ns).then(cpu_ns);
        let threads = wait::wake_some(word);
        let cpu_ns = cpu_start_ns.map(|start_ns| cpu_ns() - start_ns);
        self.woke(start_ns, now_ns(), cpu_ns, threads);
        threads
    }

    fn is_doubted(&self, now_ns: u64) -> bool {
        now_ns < self.doubted_until_ns.load(Relaxed)
    }

    /// A system call woke so many threads. It took so much CPU time, if that was read.
    fn woke(&self, start_ns: u64, now_ns: u64, cpu_ns: Option<u64>, threads: u32) {
        add(&self.wakes, 1 + threads);
        if let Some(took_ns) = cpu_ns {
            self.debt.add(now_ns, took_ns, threads);
        }
        let too_long_ns = now_ns.saturating_sub(start_ns).saturating_sub(allowed_ns(threads));
        if too_long_ns > 0 {
            let until_ns = now_ns.saturating_add(too_long_ns.saturating_mul(DEBT_PART));
            self.doubted_until_ns.fetch_max(until_ns, Relaxed);
        }
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
            let submissions = user.left(1, share).submissions;
            user.used(Share { submissions, ..Share::default() });
            clients += 1;
        }
        assert_eq!(clients, PASS_SUBMISSIONS_CLIENT_MAX.div_ceil(share.submissions));
        assert_eq!(user.left(1, share), Share { submissions: 0, ..share });
        assert_eq!(other.left(1, share), share, "another user");
        assert_eq!(user.left(2, share), share, "the next pass");
        let mut wakes = 0;
        while user.may_wake(2) {
            user.woke(0, 0, None, 3);
            wakes += 1;
        }
        assert_eq!(wakes, PASS_WAKES_USER_MAX / 4);
        assert!(other.may_wake(2) && user.may_wake(3));
    }

    #[test]
    fn wake_ups_that_take_long_are_lent_and_paid_back() {
        let debt = Debt::default();
        // As they should be, however many.
        (0..1_000).for_each(|_| debt.add(0, WAKE_NS + 2 * WAKE_THREAD_NS, 2));
        assert!(!debt.is_too_large(|| unreachable!("without asking for the time")));
        // Nobody is woken, in 0.15 ms.
        let (mut now_ns, mut stalled_ns) = (0, 0);
        while now_ns < 10_000_000_000 {
            if !debt.is_too_large(|| now_ns) {
                now_ns += 150_000;
                stalled_ns += 150_000;
                debt.add(now_ns, 150_000, 0);
            }
            now_ns += 20_000;
        }
        assert!(stalled_ns > DEBT_NS_MAX && stalled_ns < now_ns / 250, "{stalled_ns} ns");
        assert!(!debt.is_too_large(|| now_ns + 1_000_000_000), "all is paid");
    }

    /// Between slow wake-ups there may be any number of fast ones.
    #[test]
    fn slow_wake_ups_among_fast_ones_are_lent_and_paid_back() {
        let user = UserPass::default();
        let (mut now_ns, mut stalled_ns) = (1, 0);
        while now_ns < 10_000_000_000 {
            for fast in 0..1_000 {
                let started_ns = now_ns + 1_000 * fast;
                let cpu_ns = user.is_doubted(started_ns).then_some(1_000);
                user.woke(started_ns, started_ns + 1_000, cpu_ns, 1);
            }
            now_ns += 1_000_000;
            if !user.debt.is_too_large(|| now_ns) {
                let cpu_ns = user.is_doubted(now_ns).then_some(150_000);
                user.woke(now_ns, now_ns + 150_000, cpu_ns, 0);
                now_ns += 150_000;
                stalled_ns += 150_000;
            }
        }
        assert!(stalled_ns > 150_000 && stalled_ns < now_ns / 150, "{stalled_ns} ns");
    }

    #[test]
    fn time_that_others_took_from_the_cpu_is_not_lent() {
        let user = UserPass::default();
        for at_ns in (1..=100).map(|n| n * 10_000_000) {
            let cpu_ns = user.is_doubted(at_ns).then_some(2_000);
            user.woke(at_ns, at_ns + 5_000_000, cpu_ns, 1);
        }
        assert!(user.is_doubted(1_010_000_000) && !user.is_doubted(10_000_000_000));
        assert!(!user.debt.is_too_large(|| 1_010_000_000));
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
