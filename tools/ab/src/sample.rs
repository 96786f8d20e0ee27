//! What was measured in some stretch of time: filled by the dispatch thread, which
//! neither allocates nor locks for it, and emptied by the experiment.

use crate::lengths::Lengths;

/// Requests carried over a cut, or under way, that one sample holds: as many as clients.
const CARRIED_MAX: usize = 4_096;

/// Where a client's requests are counted.
pub trait Requests {
    /// A request took so long, ns.
    fn request(&mut self, ns: u64);
    /// A request took so long after it had waited in the program, as the program marked it, ns.
    fn request_queued(&mut self, queued_ns: u64, ns: u64) {
        self.request(queued_ns.saturating_add(ns));
    }
    /// A request ended that was under way at a cut.
    fn carry(&mut self, request: Carried);
}

/// A request that ended here and began before the last cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// When it began, ns.
    pub began_ns: u64,
    /// Time from the request's begin to its end, ns.
    pub ns: u64,
    /// Whether that includes what it waited inside the program.
    pub queue_known: bool,
}

/// A request that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnderWay {
    /// When it began, ns.
    pub began_ns: u64,
    /// Whether what it waits inside the program is part of its time.
    pub queue_known: bool,
}

#[derive(Clone, Debug)]
pub struct Sample {
    /// Times of high-priority requests, ns.
    latencies: Lengths,
    pub from_ns: u64,
    pub to_ns: u64,
    /// Requests that ended here and began before the last cut; not among the others.
    pub carried: Vec<Carried>,
    /// Requests that are under way at the end.
    pub open: Vec<UnderWay>,
    /// Requests whose time includes what they waited inside the program.
    pub queue_known: u64,
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
}

impl Sample {
    /// An empty one; allocates all that it will ever need.
    pub fn new() -> Self {
        Sample {
            latencies: Lengths::new(),
            from_ns: 0,
            to_ns: 0,
            carried: Vec::with_capacity(CARRIED_MAX),
            open: Vec::with_capacity(CARRIED_MAX),
            queue_known: 0,
            work_ns: 0,
            launches: 0,
            be_waited_ns: 0,
            preemptions: 0,
            faults: 0,
        }
    }

    /// Forget everything; keeps the memory.
    pub fn clear(&mut self) {
        self.latencies.clear();
        (self.from_ns, self.to_ns) = (0, 0);
        self.carried.clear();
        self.open.clear();
        self.queue_known = 0;
        (self.work_ns, self.launches, self.faults) = (0, 0, 0);
        (self.be_waited_ns, self.preemptions) = (0, 0);
    }

    /// A request took so long.
    pub fn request(&mut self, ns: u64) {
        self.latencies.add(ns.max(1), 1);
    }

    /// The same, with whether that includes what it waited inside the program.
    pub fn request_of(&mut self, ns: u64, queue_known: bool) {
        self.request(ns);
        self.queue_known += u64::from(queue_known);
    }

    /// A request took so long, and had waited inside the program before, as the program marked it.
    pub fn request_queued(&mut self, queued_ns: u64, ns: u64) {
        self.request_of(queued_ns.saturating_add(ns), true);
    }

    /// A request ended that had begun before the last cut.
    pub fn carry(&mut self, request: Carried) {
        if self.carried.len() < CARRIED_MAX {
            self.carried.push(request);
        }
    }

    /// A request is under way.
    pub fn under_way(&mut self, request: UnderWay) {
        if self.open.len() < CARRIED_MAX {
            self.open.push(request);
        }
    }

    pub fn requests(&self) -> u64 {
        self.latencies.requests()
    }

    /// How long requests took, ns: this share took at most so long. `None` without any.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        self.latencies.quantile_ns(share)
    }

    /// How many requests took about how long, ns, by rising length.
    pub fn lengths(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.latencies.iter()
    }

    /// Requests that took longer than this.
    pub fn over(&self, ns: u64) -> u64 {
        self.latencies.over(ns)
    }

    /// Length of the time that was measured, ns.
    pub fn span_ns(&self) -> u64 {
        self.to_ns.saturating_sub(self.from_ns)
    }

    /// Add what came right after.
    pub fn extend(&mut self, next: &Sample) {
        if self.span_ns() == 0 {
            self.from_ns = next.from_ns;
        }
        self.to_ns = self.to_ns.max(next.to_ns);
        self.latencies.extend(&next.latencies);
        next.carried.iter().for_each(|request| self.carry(*request));
        self.open.clone_from(&next.open);
        self.queue_known += next.queue_known;
        self.work_ns = self.work_ns.saturating_add(next.work_ns);
        self.launches += next.launches;
        self.be_waited_ns = self.be_waited_ns.saturating_add(next.be_waited_ns);
        self.preemptions += next.preemptions;
        self.faults = next.faults;
    }
}

impl Default for Sample {
    fn default() -> Self {
        Self::new()
    }
}

impl Requests for Sample {
    fn request(&mut self, ns: u64) {
        self.request(ns);
    }

    fn request_queued(&mut self, queued_ns: u64, ns: u64) {
        self.request_queued(queued_ns, ns);
    }

    fn carry(&mut self, request: Carried) {
        self.carry(request);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_against_a_limit_and_added_up() {
        let mut first = Sample::new();
        (first.from_ns, first.to_ns) = (100, 200);
        for ms in 1..=100u64 {
            first.request(ms * 1_000_000);
        }
        assert_eq!(first.over(98_500_000), 2);
        assert_eq!((first.over(u64::MAX), first.over(0)), (0, 100));
        let p99 = first.quantile_ns(0.99).unwrap() as f64;
        assert!((p99 / 99e6 - 1.0).abs() < 0.002, "{p99}");
        let mut next = Sample::new();
        (next.from_ns, next.to_ns, next.work_ns) = (200, 300, 5);
        (first.be_waited_ns, next.be_waited_ns, next.preemptions) = (3, 4, 2);
        next.carry(Carried { began_ns: 7, ns: 9, queue_known: false });
        let under_way = UnderWay { began_ns: 8, queue_known: true };
        next.under_way(under_way);
        next.request(u64::MAX);
        first.extend(&next);
        assert_eq!((first.requests(), first.work_ns), (101, 5));
        assert_eq!((first.from_ns, first.span_ns()), (100, 200));
        assert_eq!((first.be_waited_ns, first.preemptions), (7, 2));
        assert_eq!((first.carried.len(), &first.open), (1, &vec![under_way]));
        first.request_queued(2_000_000, 1_000_000);
        assert_eq!((first.queue_known, first.requests()), (1, 102));
        first.clear();
        assert!(first.carried.is_empty() && first.open.is_empty());
        assert_eq!((first.requests(), first.quantile_ns(0.5)), (0, None));
        assert_eq!((first.be_waited_ns, first.preemptions), (0, 0));
        first.extend(&next);
        assert_eq!((first.from_ns, first.to_ns), (200, 300));
    }
}
