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
    PASS_COMPLETIONS_CLIENT_MAX, PASS_COMPLETIONS_MAX, PASS_MARKS_CLIENT_MAX,
    PASS_SUBMISSIONS_CLIENT_MAX, PASS_SUBMISSIONS_MAX, PASS_WAKES_USER_MAX,
};
use tally_ipc::wait::now_ns;

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
    turn: AtomicU64,
    submissions: AtomicU32,
    completions: AtomicU32,
    turnarounds: AtomicU32,
    marks: AtomicU32,
    wakes: AtomicU32,
    debt: Debt,
    /// Wake-ups whose CPU time is still to be read, because one took long.
    doubted: AtomicU32,
}

/// When a system call that wakes threads began.
pub struct WakeStart {
    wall_ns: u64,
    cpu_ns: Option<u64>,
}

/// CPU time of wake-ups beyond what they should take. The kernel looks for those who sleep on a word in a list that it
/// shares with other words: whoever has ten thousands sleep on one of those makes each look take long, even if nobody is
/// woken. Such time is lent, up to a bound, and paid back with a small part of the time that passes.
#[derive(Debug, Default)]
struct Debt {
    ns: AtomicU64,
    /// When it was so large.
    at_ns: AtomicU64,
}

/// A system call should take no longer, and so much longer for each thread that it wakes, ns.
const WAKE_NS: u64 = 5_000;
const WAKE_THREAD_NS: u64 = 15_000;
/// CPU time of so many wake-ups is read after one that took longer: reading it is a system call, too, which all that were
/// answered would wait for.
const DOUBTED: u32 = 1_000;
/// Lent at most before a user's threads are left to look around by themselves, ns.
const DEBT_NS_MAX: u64 = 100_000;
/// Time that must pass for each part of a debt.
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
            self.ns.store(self.left(now_ns) + more, Relaxed);
            self.at_ns.store(now_ns, Relaxed);
        }
    }
}

fn add(word: &AtomicU32, more: u32) {
    word.store(word.load(Relaxed) + more, Relaxed);
}

impl UserPass {
    fn begin(&self, turn: u64) {
        if self.turn.load(Relaxed) != turn {
            self.turn.store(turn, Relaxed);
            let UserPass { submissions, completions, turnarounds, marks, wakes, .. } = self;
            for used in [submissions, completions, turnarounds, marks, wakes] {
                used.store(0, Relaxed);
            }
        }
    }

    /// What is left of a client's share in this turn of the loop.
    pub fn left(&self, turn: u64, share: Share) -> Share {
        self.begin(turn);
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

    /// Whether another thread of it may be woken in this turn of the loop.
    pub fn may_wake(&self, turn: u64) -> bool {
        self.begin(turn);
        self.wakes.load(Relaxed) < PASS_WAKES_USER_MAX
    }

    /// Whether waking its threads took too long of late.
    pub fn owes(&self) -> bool {
        self.debt.is_too_large(now_ns)
    }

    /// Before a system call that wakes threads.
    pub fn begin_wake(&self) -> WakeStart {
        let cpu_ns = (self.doubted.load(Relaxed) > 0).then(cpu_ns);
        WakeStart { wall_ns: now_ns(), cpu_ns }
    }

    /// After it: how many it woke. Others may have taken the CPU from it, so that time alone proves nothing.
    pub fn woke(&self, threads: u32, start: Option<WakeStart>) {
        add(&self.wakes, 1 + threads);
        let Some(start) = start else { return };
        let now_ns = now_ns();
        if let Some(start_ns) = start.cpu_ns {
            self.debt.add(now_ns, cpu_ns() - start_ns, threads);
        }
        self.doubt(now_ns.saturating_sub(start.wall_ns) > allowed_ns(threads));
    }

    fn doubt(&self, took_long: bool) {
        let left = self.doubted.load(Relaxed).saturating_sub(1);
        self.doubted.store(if took_long { DOUBTED } else { left }, Relaxed);
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
            user.woke(3, Some(user.begin_wake()));
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
        assert!(stalled_ns > 150_000 && stalled_ns < now_ns / 300, "{stalled_ns} ns");
        assert!(!debt.is_too_large(|| now_ns + 1_000_000_000), "all is paid");
    }

    #[test]
    fn cpu_time_is_read_after_a_wake_up_that_took_long() {
        let user = UserPass::default();
        let reads = || user.begin_wake().cpu_ns.is_some();
        assert!(!reads());
        user.doubt(true);
        for _ in 0..DOUBTED {
            assert!(reads());
            user.doubt(false);
        }
        assert!(!reads());
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
