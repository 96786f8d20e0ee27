//! High-priority clients that are busy and get nowhere.
//!
//! Best-effort work is held, and yields, while high-priority work is on the GPU. That work may itself wait for
//! best-effort work: for an answer of another program or, under MPS, for something that the driver and the GPU
//! do not keep apart. Or its program may be stopped in the middle of a request. Then nothing would ever go on.
//! So a high-priority client that is busy, or has launches in flight, but of which for long no launch was made, granted
//! or seen done, counts as idle until one is.

/// Launches, periods of activity, and launches granted or seen done: it gets on if one of these rises.
pub type Steps = [u64; 3];

/// Since when one client has made no progress, and how often it was given up.
#[derive(Debug, Default)]
pub struct Standstill {
    /// As of when it was last seen to get on.
    seen: Steps,
    since_ns: Option<u64>,
    stands: bool,
    count: u64,
}

impl Standstill {
    /// Whether a client that is `busy`, or has launches in flight, counts as busy. `limit_ns`: the longest without a
    /// step; 0: any.
    pub fn counts_as_busy(&mut self, now_ns: u64, busy: bool, steps: Steps, limit_ns: u64) -> bool {
        if !busy || self.seen != steps || self.since_ns.is_none() {
            self.seen = steps;
            self.since_ns = busy.then_some(now_ns);
            self.stands = false;
            return busy;
        }
        let since_ns = self.since_ns.unwrap_or(now_ns);
        if !self.stands && limit_ns != 0 && now_ns.saturating_sub(since_ns) >= limit_ns {
            self.stands = true;
            self.count += 1;
        }
        !self.stands
    }

    /// How often it was not waited for any longer.
    pub fn count(&self) -> u64 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT_NS: u64 = 100;

    #[test]
    fn who_launches_nothing_for_long_counts_as_idle_until_it_does() {
        let mut client = Standstill::default();
        let mut at = |now, busy, launches, periods| {
            let counts = client.counts_as_busy(now, busy, [launches, periods, 0], LIMIT_NS);
            (counts, client.count())
        };
        assert_eq!(at(0, false, 0, 0), (false, 0));
        assert_eq!(at(1_000, true, 1, 1), (true, 0), "not from before it was busy");
        assert_eq!(at(1_099, true, 1, 1), (true, 0));
        assert_eq!(at(1_100, true, 2, 1), (true, 0), "it launches");
        assert_eq!(at(1_199, true, 2, 1), (true, 0));
        assert_eq!(at(1_200, true, 2, 1), (false, 1));
        assert_eq!(at(9_000, true, 2, 1), (false, 1), "said once");
        assert_eq!(at(9_001, true, 3, 1), (true, 1));
        assert_eq!(at(9_100, false, 3, 1), (false, 1));
        // Idle and busy again between two looks.
        assert_eq!(at(9_200, true, 4, 2), (true, 1));
        assert_eq!(at(9_290, true, 4, 3), (true, 1));
        assert_eq!(at(9_389, true, 4, 3), (true, 1));
        assert_eq!(at(9_390, true, 4, 3), (false, 2));
    }

    #[test]
    fn without_a_limit_it_is_waited_for_for_ever() {
        let mut client = Standstill::default();
        for now in [0, 1, u64::MAX] {
            assert!(client.counts_as_busy(now, true, [1; 3], 0));
        }
        assert_eq!(client.count(), 0);
    }
}
