//! Which block a request, or a token, belongs to. What is said of requests here holds for tokens; each kind has a
//! ledger of its own.
//!
//! A request belongs to the block in which it began, with its whole length, however late it
//! ends: so a policy that stalls requests is charged for them though they end under the
//! other arm. While it is under way it counts as its age so far. What the *other* arm let
//! such a request wait is kept beside it ([`Stretch::inherited`]), because a policy that only
//! delays what it takes over must not look good either.
//!
//! An objective judges a request once, in the block in which it began, by its whole length: a part of it that is short
//! enough has kept nothing. Only if B alone had a request of A's for longer than the objective, B missed it, too.

use crate::design::Arm;
use crate::sample::{Carried, UnderWay, Units};
use crate::tail::Tail;

#[derive(Clone, Debug)]
struct Stretch {
    arm: Arm,
    /// Number of the block; `None`: nothing counts in this stretch.
    number: Option<usize>,
    from_ns: u64,
    washout_ns: u64,
    /// Requests that began in it and ended, but for those that ended in its washout.
    own: Tail,
    /// How long requests of earlier blocks stayed in it; judged are those that A began and B made late.
    inherited: Tail,
}

/// How long one arm had a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Had {
    pub ns: u64,
    /// It began under that arm: this is its whole time.
    pub is_whole: bool,
    pub limit_ns: Option<u64>,
}

#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// Longest time that keeps the objective, ns, if one is given for all clients.
    slo_ns: Option<u64>,
    stretches: Vec<Stretch>,
    /// How many of `stretches` are blocks.
    blocks: usize,
    /// Requests under way, as of the last look.
    open: Vec<UnderWay>,
    looked_ns: u64,
}

impl Ledger {
    pub fn new(slo_ns: Option<u64>) -> Self {
        Ledger { slo_ns, ..Ledger::default() }
    }

    /// A block of this arm begins; requests shorter than `washout_ns` do not count.
    pub fn switch(&mut self, arm: Arm, now_ns: u64, washout_ns: u64) {
        self.push(arm, Some(self.blocks), now_ns, washout_ns);
        self.blocks += 1;
    }

    /// A stretch of A begins in which nothing counts.
    pub fn rest(&mut self, now_ns: u64) {
        self.push(Arm::A, None, now_ns, 0);
    }

    fn push(&mut self, arm: Arm, number: Option<usize>, from_ns: u64, washout_ns: u64) {
        let (own, inherited) = (Tail::default(), Tail::default());
        self.stretches.push(Stretch { arm, number, from_ns, washout_ns, own, inherited });
    }

    /// The stretch that this moment is in; `None` before the first.
    fn at(&self, ns: u64) -> Option<usize> {
        self.stretches.partition_point(|stretch| stretch.from_ns <= ns).checked_sub(1)
    }

    /// The number of the block that this moment is in; `None` if it is in none.
    fn block_at(&self, ns: u64) -> Option<usize> {
        self.stretches[self.at(ns)?].number
    }

    /// The stretch that counts a request that ended: the one in which it began, unless it ended in its washout. A token
    /// of a unit of CUDA graphs may have ended long before that is known.
    fn own(&self, request: &Carried) -> Option<usize> {
        let own = self.at(request.began_ns)?;
        let Stretch { from_ns, washout_ns, .. } = self.stretches[own];
        (request.began_ns.saturating_add(request.ns) > from_ns + washout_ns).then_some(own)
    }

    /// The number of the block that counts a request that ended; `None`: none does.
    pub fn block_of(&self, request: &Carried) -> Option<usize> {
        self.stretches[self.own(request)?].number
    }

    /// The arm that serves now.
    pub fn arm(&self) -> Option<Arm> {
        self.stretches.last().map(|stretch| stretch.arm)
    }

    /// Requests that a block's measured part counts.
    pub fn count(&mut self, block: usize, units: &Units) {
        let of_block = |stretch: &&mut Stretch| stretch.number == Some(block);
        let kept = units.kept(self.slo_ns);
        if let Some(block) = self.stretches.iter_mut().rev().find(of_block) {
            units.lengths().for_each(|(ns, count)| block.own.add(ns, count));
            block.own.kept.extend(kept);
        }
    }

    /// Requests that ended after a cut, and those under way.
    pub fn look(&mut self, now_ns: u64, units: &Units) {
        self.looked_ns = now_ns;
        self.open.clone_from(&units.open);
        for request in &units.carried {
            if let Some(own) = self.own(request) {
                let limit_ns = self.slo_ns.or(request.limit_ns);
                let own = &mut self.stretches[own].own;
                if request.is_age {
                    own.add(request.ns, 1);
                    own.kept.judge_part(limit_ns, request.ns);
                } else {
                    own.add_one(request.ns, limit_ns);
                }
            }
            self.inherit(*request);
        }
    }

    /// For each later block that a request reached into beyond its washout: how long.
    fn inherit(&mut self, request: Carried) {
        let ended_ns = request.began_ns.saturating_add(request.ns);
        let limit_ns = self.slo_ns.or(request.limit_ns);
        let own = self.at(request.began_ns);
        let mut is_judged = own.is_some_and(|own| self.stretches[own].arm == Arm::B);
        let (first, mut had_by_b_ns) = (own.map_or(0, |own| own + 1), 0);
        for at in first..self.stretches.len() {
            let until_ns = self.stretches.get(at + 1).map_or(u64::MAX, |next| next.from_ns);
            let stretch = &mut self.stretches[at];
            if ended_ns <= stretch.from_ns {
                break;
            }
            let ns = ended_ns.min(until_ns).saturating_sub(stretch.from_ns);
            if ns > stretch.washout_ns {
                stretch.inherited.add(ns, 1);
                if stretch.arm == Arm::B && !is_judged {
                    had_by_b_ns += ns;
                    is_judged = limit_ns.is_some_and(|limit_ns| had_by_b_ns > limit_ns);
                    stretch.inherited.kept.judged += u64::from(is_judged);
                }
            }
        }
    }

    /// Requests that began in a block and are under way, with their ages as lengths.
    pub fn open_of(&self, block: usize) -> impl Iterator<Item = Carried> + '_ {
        let own = move |open: &&UnderWay| self.block_at(open.began_ns) == Some(block);
        self.open.iter().filter(own).map(|open| self.so_far(*open))
    }

    fn so_far(&self, UnderWay { began_ns, queue_known, limit_ns }: UnderWay) -> Carried {
        Carried {
            began_ns,
            ns: self.looked_ns.saturating_sub(began_ns),
            queue_known,
            limit_ns,
            is_age: false,
        }
    }

    /// How much of a request's time, that began then and lasted so long, is B's: all of it if
    /// it began under B; what passed since B first took it over, if B serves now.
    fn part_of_b(&self, began_ns: u64, ns: u64) -> Option<u64> {
        let own = self.at(began_ns);
        if own.is_some_and(|own| self.stretches[own].arm == Arm::B) {
            return Some(ns);
        }
        let ended_ns = began_ns.saturating_add(ns);
        let later = &self.stretches[own.map_or(0, |own| own + 1)..];
        let taken = later.iter().find(|next| next.arm == Arm::B && next.from_ns < ended_ns)?;
        (self.arm() == Some(Arm::B)).then(|| ended_ns - taken.from_ns)
    }

    fn had_by_b(&self, request: &Carried) -> Option<Had> {
        let ns = self.part_of_b(request.began_ns, request.ns)?;
        let own = self.at(request.began_ns);
        let is_whole = own.is_some_and(|own| self.stretches[own].arm == Arm::B);
        Some(Had { ns, is_whole, limit_ns: request.limit_ns })
    }

    /// B's parts of requests that ended.
    pub fn ended_of_b(&self, ended: &[Carried]) -> Vec<Had> {
        ended.iter().filter_map(|request| self.had_by_b(request)).collect()
    }

    /// B's parts of the requests under way.
    pub fn open_of_b(&self) -> Vec<Had> {
        self.open.iter().filter_map(|open| self.had_by_b(&self.so_far(*open))).collect()
    }

    /// Each block's arm, its own requests and what it inherited, those under way with their
    /// ages so far.
    pub fn tails(&self) -> Vec<(Arm, Tail, Tail)> {
        let mut all = self.clone();
        for open in &self.open {
            let request = self.so_far(*open);
            if let Some(own) = self.at(request.began_ns) {
                let own = &mut all.stretches[own].own;
                own.add(request.ns, 1);
                own.kept.judge_part(self.slo_ns.or(request.limit_ns), request.ns);
            }
            all.inherit(request);
        }
        let blocks = all.stretches.into_iter().filter(|stretch| stretch.number.is_some());
        blocks.map(|block| (block.arm, block.own, block.inherited)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Room, Sample, Unit};

    /// Blocks of 2 s with 100 ms of washout: B, A, B.
    fn ledger() -> Ledger {
        let mut ledger = Ledger::default();
        for (at, arm) in [Arm::B, Arm::A, Arm::B].into_iter().enumerate() {
            ledger.switch(arm, 1_000 + 2_000 * at as u64, 100);
        }
        ledger
    }

    fn with(ledger: &mut Ledger, now_ns: u64, carried: &[(u64, u64)], open: &[u64]) {
        let mut sample = Sample::new();
        let units = sample.of_mut(Unit::Token);
        let (queue_known, limit_ns) = (false, Some(1_600));
        for &(began_ns, ns) in carried {
            units.carry(Carried { began_ns, ns, queue_known, limit_ns, is_age: false });
        }
        for &began_ns in open {
            units.under_way(UnderWay { began_ns, queue_known, limit_ns });
        }
        ledger.look(now_ns, sample.of(Unit::Token));
    }

    #[test]
    fn a_stall_counts_where_it_began_with_its_whole_length() {
        let mut ledger = ledger();
        // Began in B's first block, ended 1.5 s into A's.
        with(&mut ledger, 4_600, &[(2_500, 2_000)], &[]);
        let tails = ledger.tails();
        assert_eq!((tails[0].1.requests(), tails[0].1.over(1_900)), (1, 1));
        assert_eq!((tails[1].1.requests(), tails[1].2.requests()), (0, 1));
        assert_eq!((tails[1].2.over(1_480), tails[1].2.over(1_520)), (1, 0));
        // A's part of it alone would have kept the objective.
        assert_eq!(kept_of(&ledger), [(1, 0), (0, 0), (0, 0)]);
        assert_eq!(tails[2].2.requests(), 0);
    }

    /// Of each block: judged and within, what it took over included.
    fn kept_of(ledger: &Ledger) -> Vec<(u64, u64)> {
        let sum = |(_, own, inherited): (Arm, Tail, Tail)| {
            (own.kept.judged + inherited.kept.judged, own.kept.within + inherited.kept.within)
        };
        ledger.tails().into_iter().map(sum).collect()
    }

    /// The objective is 1.6 s.
    #[test]
    fn an_objective_judges_a_request_once_by_its_whole_length() {
        // A's at 3.5 s, into B's block from 5 s on: in time, and late though B's part is short.
        for (ns, within) in [(1_600, 1), (2_500, 0)] {
            let mut ledger = ledger();
            with(&mut ledger, 6_500, &[(3_500, ns)], &[]);
            assert_eq!(kept_of(&ledger), [(0, 0), (1, within), (0, 0)], "{ns}");
        }
        // B had it for 1.7 s.
        let mut ledger = ledger();
        with(&mut ledger, 6_900, &[(4_800, 1_900)], &[]);
        assert_eq!(kept_of(&ledger), [(0, 0), (1, 0), (1, 0)]);
        // B's own, on through A and B again.
        let mut ledger = self::ledger();
        with(&mut ledger, 6_900, &[(2_900, 4_000)], &[]);
        assert_eq!(kept_of(&ledger), [(1, 0), (0, 0), (0, 0)]);
        // A's, under way when the test began, in two blocks of B.
        ledger = self::ledger();
        with(&mut ledger, 6_900, &[(500, 6_200)], &[]);
        assert_eq!(kept_of(&ledger), [(1, 0), (0, 0), (0, 0)], "missed by B once");
        // Under way: not judged until it is too old.
        ledger = self::ledger();
        with(&mut ledger, 6_500, &[], &[5_100]);
        assert_eq!(kept_of(&ledger), [(0, 0); 3]);
        with(&mut ledger, 6_900, &[], &[5_100]);
        assert_eq!(kept_of(&ledger), [(0, 0), (0, 0), (1, 0)]);
        // An objective for all replaces the clients' own.
        ledger.slo_ns = Some(5_000);
        with(&mut ledger, 6_900, &[(2_900, 4_000)], &[5_100]);
        assert_eq!(kept_of(&ledger), [(1, 1), (0, 0), (0, 0)]);
    }

    #[test]
    fn a_request_under_way_is_as_old_as_it_is_in_every_block_it_reaches() {
        let mut ledger = ledger();
        with(&mut ledger, 6_000, &[], &[2_900, 5_500]);
        let ages = |ledger: &Ledger, block| -> Vec<u64> {
            ledger.open_of(block).map(|request| request.ns).collect()
        };
        assert_eq!(ages(&ledger, 0), [3_100]);
        assert_eq!(ages(&ledger, 2), [500]);
        let tails = ledger.tails();
        assert_eq!(tails.iter().map(|t| t.1.requests()).collect::<Vec<_>>(), [1, 0, 1]);
        assert_eq!(tails.iter().map(|t| t.2.requests()).collect::<Vec<_>>(), [0, 1, 1]);
        // One that was short when the next block began is not the next block's fault.
        with(&mut ledger, 6_000, &[(4_990, 60)], &[]);
        assert_eq!(ledger.tails()[2].2.requests(), 0);
    }

    #[test]
    fn bs_part_is_all_that_began_under_it_and_what_it_took_over() {
        let mut ledger = ledger();
        let part = |began_ns, ns| ledger.part_of_b(began_ns, ns);
        assert_eq!(part(2_000, 9_000), Some(9_000), "began under B");
        assert_eq!(part(3_500, 2_500), Some(1_000), "A's until 5 s");
        assert_eq!(part(3_500, 1_000), None, "never B's");
        assert_eq!(part(400, 1_000), Some(400), "before the first block");
        ledger.switch(Arm::A, 7_000, 100);
        assert_eq!(ledger.part_of_b(3_500, 4_000), None, "A serves again");
        assert_eq!(ledger.part_of_b(6_500, 4_000), Some(4_000), "began under B");
    }

    /// A unit of CUDA graphs that reaches through three blocks: its tokens are known when it ends, in the last one.
    #[test]
    fn tokens_of_a_long_unit_belong_where_each_began() {
        let (mut ledger, mut sample) = (ledger(), Sample::new());
        let first = Carried {
            began_ns: 2_000,
            ns: 100,
            queue_known: false,
            limit_ns: Some(100),
            is_age: false,
        };
        sample.ended(Unit::Token, first, 40, 5_100, &mut Room::of_one(1));
        assert_eq!(sample.of(Unit::Token).count(), 9, "of the block that is measured");
        ledger.look(6_000, sample.of(Unit::Token));
        let tails = ledger.tails();
        // Without the one that ended in each washout.
        assert_eq!(tails.iter().map(|t| t.1.requests()).collect::<Vec<_>>(), [10, 19, 0]);
        assert_eq!(tails.iter().map(|t| t.2.requests()).sum::<u64>(), 0, "none was taken over");
        assert_eq!(kept_of(&ledger), [(10, 10), (19, 19), (0, 0)]);
        let block_of = |began_ns| ledger.block_of(&Carried { began_ns, ..first });
        assert_eq!([2_900, 3_000, 3_100, 5_100].map(block_of), [Some(0), None, Some(1), Some(2)]);
    }

    #[test]
    fn what_begins_while_a_rests_counts_nowhere() {
        let mut ledger = ledger();
        ledger.rest(7_000);
        ledger.switch(Arm::A, 9_000, 100);
        assert_eq!([6_999, 7_000, 9_000].map(|ns| ledger.block_at(ns)), [Some(2), None, Some(3)]);
        with(&mut ledger, 9_800, &[(8_000, 1_700), (6_000, 1_500)], &[7_500]);
        let tails = ledger.tails();
        assert_eq!(tails.iter().map(|t| t.1.requests()).collect::<Vec<_>>(), [0, 0, 1, 0]);
        assert_eq!(tails.iter().map(|t| t.2.requests()).collect::<Vec<_>>(), [0, 0, 0, 2]);
        assert_eq!(ledger.part_of_b(6_000, 1_500), Some(1_500), "a stall that B began");
    }
}
