//! What was measured in some stretch of time: filled by the dispatch thread, which
//! neither allocates nor locks for it, and emptied by the experiment.

use crate::fairness::{BestEffort, CLIENTS_MAX};
use crate::lengths::Lengths;

/// Units carried over a cut, or under way, that one sample holds: as many as clients.
const CARRIED_MAX: usize = 4_096;

/// How many of each [`Unit`] a client may yet add to those carried over a cut. Each client has an equal part of what a
/// sample holds, so one that states any number of them loses its own and no other's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room([u64; 2]);

impl Room {
    /// That of one of so many clients.
    pub fn of_one(clients: usize) -> Self {
        Room([(CARRIED_MAX / clients.max(1)).max(1) as u64; 2])
    }

    /// Takes as many of so many as there is room for.
    fn take(&mut self, of: Unit, count: u64) -> u64 {
        let left = &mut self.0[of.index()];
        let taken = count.min(*left);
        *left -= taken;
        taken
    }
}

/// What high-priority programs do, piece by piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Request,
    /// A token of a language model: one that the program marks, or else one CUDA graph of a client with an objective
    /// for tokens.
    Token,
}

impl Unit {
    pub const ALL: [Unit; 2] = [Unit::Request, Unit::Token];

    /// Where its part is in arrays of both.
    pub fn index(self) -> usize {
        usize::from(self == Unit::Token)
    }

    /// Several of them, in words.
    pub fn plural(self) -> &'static str {
        match self {
            Unit::Request => "requests",
            Unit::Token => "tokens",
        }
    }
}

/// Where a client's requests are counted.
pub trait Requests {
    /// A request took so long, ns.
    fn request(&mut self, ns: u64);
    /// A request took so long after it had waited in the program, as the program marked it, ns.
    fn request_queued(&mut self, queued_ns: u64, ns: u64) {
        self.request(queued_ns.saturating_add(ns));
    }
}

/// A unit that ended here and began before the last cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// When it began, ns.
    pub began_ns: u64,
    /// Time from the unit's begin to its end, ns.
    pub ns: u64,
    /// Whether that includes what it waited inside the program.
    pub queue_known: bool,
    /// Longest time that keeps its client's own objective, ns, when it ended; `None`: there was no objective.
    pub limit_ns: Option<u64>,
    /// It did not end: its client left, and the time is its age by then.
    pub is_age: bool,
}

/// A unit that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnderWay {
    /// When it began, ns.
    pub began_ns: u64,
    /// Whether what it waits inside the program is part of its time.
    pub queue_known: bool,
    /// As [`Carried::limit_ns`], but as of now.
    pub limit_ns: Option<u64>,
}

/// Units that their clients have an objective for, and those of them that kept it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    pub judged: u64,
    pub within: u64,
}

impl Kept {
    /// So many units took so long, ns, while the longest time that keeps the objective was this.
    pub fn judge(&mut self, limit_ns: Option<u64>, ns: u64, count: u64) {
        if let Some(limit_ns) = limit_ns {
            self.judged += count;
            self.within += if ns <= limit_ns { count } else { 0 };
        }
    }

    /// One of which only a part, or its age, is known, ns: as long as that part would keep the objective, nothing is
    /// said of the whole.
    pub fn judge_part(&mut self, limit_ns: Option<u64>, ns: u64) {
        self.judged += u64::from(limit_ns.is_some_and(|limit_ns| ns > limit_ns));
    }

    pub fn extend(&mut self, other: Kept) {
        self.judged += other.judged;
        self.within += other.within;
    }
}

/// The units of one kind.
#[derive(Clone, Debug)]
pub struct Units {
    /// Times of those that began and ended here, ns.
    lengths: Lengths,
    /// Those of them that are ages, of units that have not ended, ns.
    ages: Vec<u64>,
    /// Those that ended here and began before the last cut; not among the others.
    pub carried: Vec<Carried>,
    /// Those that are under way at the end.
    pub open: Vec<UnderWay>,
    /// Those that there was no room to carry.
    pub lost: u64,
    /// Those whose time includes what they waited inside the program.
    pub queue_known: u64,
    /// By their clients' own objectives.
    pub kept: Kept,
}

impl Units {
    fn new() -> Self {
        Units {
            lengths: Lengths::new(),
            ages: Vec::with_capacity(CARRIED_MAX),
            carried: Vec::with_capacity(CARRIED_MAX),
            open: Vec::with_capacity(CARRIED_MAX),
            lost: 0,
            queue_known: 0,
            kept: Kept::default(),
        }
    }

    fn clear(&mut self) {
        self.lengths.clear();
        self.ages.clear();
        self.carried.clear();
        self.open.clear();
        (self.lost, self.queue_known, self.kept) = (0, 0, Kept::default());
    }

    /// So many took so long each, ns; `limit_ns`: the longest time that keeps their client's objective.
    pub fn add(&mut self, ns: u64, count: u64, limit_ns: Option<u64>) {
        self.lengths.add(ns.max(1), count);
        self.kept.judge(limit_ns, ns, count);
    }

    /// One that ended, wherever it began, or whose client left.
    pub fn add_carried(&mut self, unit: &Carried) {
        if unit.is_age {
            return self.add_open(unit);
        }
        self.add(unit.ns, 1, unit.limit_ns);
        self.queue_known += u64::from(unit.queue_known);
    }

    /// One that has not ended, with its age as its length. An objective judges it once it is too old.
    pub fn add_open(&mut self, unit: &Carried) {
        self.lengths.add(unit.ns.max(1), 1);
        self.ages.push(unit.ns);
        self.kept.judge_part(unit.limit_ns, unit.ns);
        self.queue_known += u64::from(unit.queue_known);
    }

    /// One ended that had begun before the last cut.
    pub fn carry(&mut self, unit: Carried) {
        match self.carried.len() < CARRIED_MAX {
            true => self.carried.push(unit),
            false => self.lost += 1,
        }
    }

    /// Adds a unit that is under way.
    pub fn under_way(&mut self, unit: UnderWay) {
        if self.open.len() < CARRIED_MAX {
            self.open.push(unit);
        }
    }

    pub fn count(&self) -> u64 {
        self.lengths.requests()
    }

    /// How long they took, ns: this share took at most so long. `None` without any.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        self.lengths.quantile_ns(share)
    }

    /// How many took about how long, ns, by rising length.
    pub fn lengths(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.lengths.iter()
    }

    /// Those that took longer than this.
    pub fn over(&self, ns: u64) -> u64 {
        self.lengths.over(ns)
    }

    /// By an objective of so many ns, or else by their clients' own.
    pub fn kept(&self, slo_ns: Option<u64>) -> Kept {
        let of_all = |slo_ns| {
            let undecided = self.ages.iter().filter(|ns| **ns <= slo_ns).count() as u64;
            let judged = self.count() - undecided;
            Kept { judged, within: judged - self.over(slo_ns).min(judged) }
        };
        slo_ns.map_or(self.kept, of_all)
    }

    fn extend(&mut self, next: &Units) {
        self.lengths.extend(&next.lengths);
        self.ages.extend_from_slice(&next.ages);
        next.carried.iter().for_each(|unit| self.carry(*unit));
        self.open.clone_from(&next.open);
        self.lost += next.lost;
        self.queue_known += next.queue_known;
        self.kept.extend(next.kept);
    }
}

#[derive(Clone, Debug)]
pub struct Sample {
    units: [Units; 2],
    pub from_ns: u64,
    pub to_ns: u64,
    /// Best-effort work that ended, in GPU time that it takes undisturbed, ns.
    pub work_ns: u64,
    /// Best-effort launches that ended.
    pub launches: u64,
    /// Time that best-effort launches waited for an answer, summed over launches, ns.
    pub be_waited_ns: u64,
    /// Times that best-effort clients were asked to yield.
    pub preemptions: u64,
    /// Turns that policies lost since the core started.
    pub faults: u64,
    /// At a cut: the best-effort clients by rising id, as they are at the end.
    pub best_effort: Vec<BestEffort>,
}

impl Sample {
    /// An empty one; allocates all that it will ever need.
    pub fn new() -> Self {
        Sample {
            units: [Units::new(), Units::new()],
            from_ns: 0,
            to_ns: 0,
            work_ns: 0,
            launches: 0,
            be_waited_ns: 0,
            preemptions: 0,
            faults: 0,
            best_effort: Vec::with_capacity(CLIENTS_MAX),
        }
    }

    /// Forget everything; keeps the memory.
    pub fn clear(&mut self) {
        self.units.iter_mut().for_each(Units::clear);
        (self.from_ns, self.to_ns) = (0, 0);
        (self.work_ns, self.launches, self.faults) = (0, 0, 0);
        (self.be_waited_ns, self.preemptions) = (0, 0);
        self.best_effort.clear();
    }

    /// The units of this kind.
    pub fn of(&self, unit: Unit) -> &Units {
        &self.units[unit.index()]
    }

    pub fn of_mut(&mut self, unit: Unit) -> &mut Units {
        &mut self.units[unit.index()]
    }

    /// So many units of a client ended one after the other, all as long as the first one. Those that began before the
    /// last cut are carried over it.
    pub fn ended(&mut self, of: Unit, first: Carried, count: u64, cut_ns: u64, room: &mut Room) {
        let before = cut_ns.saturating_sub(first.began_ns).div_ceil(first.ns.max(1)).min(count);
        let carried = room.take(of, before);
        let units = self.of_mut(of);
        for at in 0..carried {
            let began_ns = first.began_ns.saturating_add(at * first.ns);
            units.carry(Carried { began_ns, ..first });
        }
        units.lost += before - carried;
        let rest = count - before;
        if rest > 0 {
            units.add(first.ns, rest, first.limit_ns);
            units.queue_known += if first.queue_known { rest } else { 0 };
        }
    }

    /// A unit of a client that left before it ended, with its age as its length, wherever it began.
    pub fn left(&mut self, of: Unit, unit: Carried, cut_ns: u64, room: &mut Room) {
        let units = self.of_mut(of);
        if room.take(of, 1) == 0 || units.ages.len() >= CARRIED_MAX {
            units.lost += 1;
        } else if unit.began_ns >= cut_ns {
            units.add_open(&unit);
        } else {
            units.carry(unit);
        }
    }

    /// A unit of a client is under way.
    pub fn under_way(&mut self, of: Unit, unit: UnderWay, room: &mut Room) {
        if room.take(of, 1) > 0 {
            self.of_mut(of).under_way(unit);
        }
    }

    /// A request took so long, of a client without an objective.
    pub fn request(&mut self, ns: u64) {
        self.of_mut(Unit::Request).add(ns, 1, None);
    }

    pub fn requests(&self) -> u64 {
        self.of(Unit::Request).count()
    }

    /// Length of the time that was measured, ns.
    pub fn span_ns(&self) -> u64 {
        self.to_ns.saturating_sub(self.from_ns)
    }

    /// What a best-effort client had done and had to do until the end; one more than there may be is left out.
    pub fn best_effort(&mut self, client: BestEffort) {
        if self.best_effort.len() < CLIENTS_MAX {
            self.best_effort.push(client);
        }
    }

    /// Add what came right after.
    pub fn extend(&mut self, next: &Sample) {
        if self.span_ns() == 0 {
            self.from_ns = next.from_ns;
        }
        self.to_ns = self.to_ns.max(next.to_ns);
        for (own, next) in self.units.iter_mut().zip(&next.units) {
            own.extend(next);
        }
        self.work_ns = self.work_ns.saturating_add(next.work_ns);
        self.launches += next.launches;
        self.be_waited_ns = self.be_waited_ns.saturating_add(next.be_waited_ns);
        self.preemptions += next.preemptions;
        self.faults = next.faults;
        self.best_effort.clone_from(&next.best_effort);
    }
}

impl Default for Sample {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_counted_against_a_limit_and_added_up() {
        let mut first = Sample::new();
        (first.from_ns, first.to_ns) = (100, 200);
        for ms in 1..=100u64 {
            first.request(ms * 1_000_000);
        }
        let of = |sample: &Sample, ns| sample.of(Unit::Request).over(ns);
        assert_eq!(of(&first, 98_500_000), 2);
        assert_eq!((of(&first, u64::MAX), of(&first, 0)), (0, 100));
        let p99 = first.of(Unit::Request).quantile_ns(0.99).unwrap() as f64;
        assert!((p99 / 99e6 - 1.0).abs() < 0.002, "{p99}");
        let mut next = Sample::new();
        (next.from_ns, next.to_ns, next.work_ns) = (200, 300, 5);
        (first.be_waited_ns, next.be_waited_ns, next.preemptions) = (3, 4, 2);
        let carried =
            Carried { began_ns: 7, ns: 9, queue_known: true, limit_ns: None, is_age: false };
        next.of_mut(Unit::Request).carry(carried);
        let under_way = UnderWay { began_ns: 8, queue_known: true, limit_ns: Some(4) };
        next.of_mut(Unit::Token).under_way(under_way);
        next.of_mut(Unit::Token).add(6, 3, None);
        next.request(u64::MAX);
        first.extend(&next);
        assert_eq!((first.requests(), first.work_ns), (101, 5));
        assert_eq!((first.from_ns, first.span_ns()), (100, 200));
        assert_eq!((first.be_waited_ns, first.preemptions), (7, 2));
        assert_eq!(first.of(Unit::Request).carried, [carried]);
        assert_eq!(
            (first.of(Unit::Token).count(), &first.of(Unit::Token).open),
            (3, &vec![under_way])
        );
        first.of_mut(Unit::Request).add_carried(&carried);
        assert_eq!((first.of(Unit::Request).queue_known, first.requests()), (1, 102));
        first.clear();
        assert!(
            Unit::ALL
                .iter()
                .all(|unit| first.of(*unit).carried.is_empty() && first.of(*unit).open.is_empty())
        );
        assert_eq!((first.requests(), first.of(Unit::Request).quantile_ns(0.5)), (0, None));
        assert_eq!((first.be_waited_ns, first.preemptions), (0, 0));
        first.extend(&next);
        assert_eq!((first.from_ns, first.to_ns), (200, 300));
    }

    #[test]
    fn a_given_objective_judges_all_and_else_each_unit_is_judged_by_its_clients_own() {
        let mut sample = Sample::new();
        let units = sample.of_mut(Unit::Request);
        units.add(5, 1, None);
        units.add(5, 2, Some(5));
        // The objective changed: what ended before keeps its judgement.
        units.add(5, 3, Some(4));
        units.add_carried(&Carried {
            began_ns: 0,
            ns: 9,
            queue_known: false,
            limit_ns: Some(9),
            is_age: false,
        });
        assert_eq!(units.kept(None), Kept { judged: 6, within: 3 });
        assert_eq!(units.kept(Some(5)), Kept { judged: 7, within: 6 });
        let mut sum = Sample::new();
        sum.extend(&sample);
        sum.extend(&sample);
        assert_eq!(sum.of(Unit::Request).kept(None), Kept { judged: 12, within: 6 });
        assert_eq!(sum.of(Unit::Token).kept(None), Kept::default());
    }

    /// One of three clients states any number of units that began before the cut, and is asked first.
    #[test]
    fn a_client_that_carries_too_many_loses_its_own_only() {
        let (mut sample, cut_ns, room) = (Sample::new(), 1_000, Room::of_one(3));
        let unit = |began_ns, ns| Carried {
            began_ns,
            ns,
            queue_known: false,
            limit_ns: Some(9),
            is_age: false,
        };
        let mut hostile = room;
        for _ in 0..10_000 {
            sample.ended(Unit::Request, unit(1, 2_000), 1, cut_ns, &mut hostile);
        }
        sample.ended(Unit::Token, unit(2, 3), 65_535, cut_ns, &mut hostile);
        for began_ns in [10, 20] {
            let (mut room, mut open) = (room, room);
            for _ in 0..500 {
                sample.ended(Unit::Request, unit(began_ns, 2_000), 1, cut_ns, &mut room);
                sample.ended(Unit::Request, unit(1_500, 5), 1, cut_ns, &mut room);
                let way = UnderWay { began_ns, queue_known: false, limit_ns: None };
                sample.under_way(Unit::Request, way, &mut open);
            }
        }
        let requests = sample.of(Unit::Request);
        let carried =
            |began_ns| requests.carried.iter().filter(|unit| unit.began_ns == began_ns).count();
        assert_eq!([1, 10, 20].map(carried), [1_365, 500, 500]);
        assert_eq!((requests.lost, requests.open.len()), (10_000 - 1_365, 1_000));
        assert_eq!((requests.count(), requests.kept.within), (1_000, 1_000));
        // 333 began before the cut.
        let tokens = sample.of(Unit::Token);
        assert_eq!((tokens.carried.len(), tokens.lost, tokens.count()), (333, 0, 65_202));
        // Each of as many clients as there may be has room for one.
        assert_eq!(Room::of_one(CLIENTS_MAX), Room([1; 2]));
        sample.clear();
        assert_eq!(sample.of(Unit::Request).lost, 0);
    }

    /// A request that was a second old as its client was killed, of an objective of 2 s that the plan replaces.
    #[test]
    fn what_a_killed_client_had_under_way_is_judged_by_its_age_wherever_it_began() {
        for cut_ns in [0, 500] {
            let mut sample = Sample::new();
            let limit_ns = Some(2_000);
            let unit =
                Carried { began_ns: 100, ns: 1_000, queue_known: false, limit_ns, is_age: true };
            sample.left(Unit::Request, unit, cut_ns, &mut Room::of_one(1));
            let units = sample.of_mut(Unit::Request);
            units.carried.clone().iter().for_each(|unit| units.add_carried(unit));
            assert_eq!(units.kept(None), Kept::default(), "nobody knows");
            assert_eq!(units.kept(Some(1_500)), Kept::default());
            assert_eq!(units.kept(Some(900)), Kept { judged: 1, within: 0 });
        }
    }

    #[test]
    fn an_objective_judges_a_unit_under_way_only_once_it_is_too_old() {
        let mut sample = Sample::new();
        let units = sample.of_mut(Unit::Token);
        units.add(5, 4, Some(20));
        for ns in [10, 30] {
            let (began_ns, queue_known, limit_ns) = (0, false, Some(20));
            units.add_open(&Carried { began_ns, ns, queue_known, limit_ns, is_age: false });
        }
        assert_eq!(units.count(), 6);
        assert_eq!(units.kept(None), Kept { judged: 5, within: 4 });
        assert_eq!(units.kept(Some(20)), Kept { judged: 5, within: 4 });
        assert_eq!(units.kept(Some(7)), Kept { judged: 6, within: 4 });
    }
}
