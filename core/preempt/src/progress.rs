//! How far a transformed launch has come, and whether it is stuck: what [`watch`](crate::watch) knows of
//! one, without the driver.
//!
//! Two events stand around each part: one where it begins, behind its gate, and one
//! where it ends. So a part that waits at the gate is told from one that runs.
//!
//! A part is stuck if it does not end although what it runs is over: its blocks wait
//! for others, which it skipped, or which a later part would run. That cannot be seen,
//! only how long it takes:
//!
//! - a preemptible part that has skipped blocks, and is still asked to stop: it has
//!   no more to do than the blocks that run;
//! - one that has skipped blocks, and is not asked any more: it goes on with those that
//!   it has not skipped, which may take as long as the whole kernel;
//! - a slice: it is short, or would not be a slice.
//!
//! The last part has nothing behind it that it could wait for, and no gate behind it to
//! hold what follows in the stream back: never helped.

/// How many times the patience with a part that is asked to stop a slice gets.
const SLICE_PATIENCE: u64 = 4;
/// Patience with a part that has skipped blocks and may run on, as a multiple of the usual one; and as a
/// multiple of what the launch was expected to take.
const RUN_ON_PATIENCE: u64 = 20;
const RUN_ON_EXPECTED: u64 = 4;

/// A transformed launch's progress.
#[derive(Debug)]
pub struct Progress {
    parts: usize,
    /// The launch runs as slices; otherwise it yields.
    sliced: bool,
    /// How long the core expects it to take, ns; 0: unknown.
    expected_ns: u64,
    /// Events seen to be done: odd while a part runs.
    seen: usize,
    /// When `seen` changed last, monotonic ns.
    since_ns: u64,
    /// The part that is being asked to yield, and since when, ns.
    asked: Option<(usize, u64)>,
    /// When the latest request to yield that was dealt with was made, ns.
    answered_ns: u64,
    /// When it was seen first that the running part has skipped blocks.
    skipped_ns: Option<u64>,
    /// The launch was helped, or cannot be.
    settled: bool,
}

/// What one look at a launch's progress found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// This part was asked to yield and has ended, so long after.
    pub ended: Option<(usize, u64)>,
    /// The launch is stuck; reported once.
    pub stuck: bool,
}

impl Progress {
    /// The progress of a launch of `parts` parts that was just issued. `helpable`: there is a way to help it.
    pub fn new(parts: usize, sliced: bool, expected_us: u32, helpable: bool, now_ns: u64) -> Self {
        Progress {
            parts,
            sliced,
            expected_ns: u64::from(expected_us) * 1_000,
            seen: 0,
            since_ns: now_ns,
            asked: None,
            answered_ns: 0,
            skipped_ns: None,
            settled: !helpable,
        }
    }

    pub fn parts(&self) -> usize {
        self.parts
    }

    /// All parts have ended.
    pub fn is_over(&self) -> bool {
        self.seen >= 2 * self.parts
    }

    /// Whether the launch runs as slices; otherwise it yields.
    pub fn is_sliced(&self) -> bool {
        self.sliced
    }

    /// A part, not the last.
    pub fn is_before_last(&self, part: usize) -> bool {
        part + 1 < self.parts
    }

    /// It may turn out to be stuck.
    pub fn may_be_stuck(&self) -> bool {
        !self.settled && self.is_before_last(self.seen / 2)
    }

    /// It is stuck, and cannot be helped now: to be said again.
    pub fn put_off(&mut self) {
        self.settled = false;
    }

    /// The part that runs now.
    fn running(&self) -> Option<usize> {
        (self.seen % 2 == 1).then_some(self.seen / 2)
    }

    /// Look at it. `asked_ns`: yielding is asked for since then. `is_done`: of an event;
    /// `has_skipped`: of a part.
    pub fn look(
        &mut self,
        now_ns: u64,
        asked_ns: Option<u64>,
        rescue_ns: u64,
        is_done: impl Fn(usize) -> bool,
        has_skipped: impl Fn(usize) -> bool,
    ) -> Found {
        let mut found = Found::default();
        while !self.is_over() && is_done(self.seen) {
            self.seen += 1;
            self.since_ns = now_ns;
            self.skipped_ns = None;
        }
        if let Some((part, since_ns)) = self.asked
            && self.seen > 2 * part + 1
        {
            self.asked = None;
            found.ended = Some((part, now_ns.saturating_sub(since_ns)));
        }
        let running = self.running();
        match (asked_ns, running) {
            (Some(since_ns), Some(part)) if self.asked.is_none() && since_ns > self.answered_ns => {
                self.answered_ns = since_ns;
                self.asked = Some((part, since_ns));
            }
            // Only its measurement is given up.
            (None, _) => self.asked = None,
            _ => {}
        }
        if let Some(part) = running.filter(|p| self.is_before_last(*p) && !self.settled) {
            if !self.sliced && has_skipped(part) {
                self.skipped_ns.get_or_insert(now_ns);
            }
            if self.is_stuck(now_ns, asked_ns, rescue_ns) {
                self.settled = true;
                found.stuck = true;
            }
        }
        found
    }

    /// Whether a part that runs, and is not the last, is stuck.
    fn is_stuck(&self, now_ns: u64, asked_ns: Option<u64>, rescue_ns: u64) -> bool {
        let (since_ns, patience_ns) = match (self.sliced, self.skipped_ns, asked_ns) {
            (true, ..) => (self.since_ns, rescue_ns.saturating_mul(SLICE_PATIENCE)),
            (false, Some(skipped_ns), Some(asked_ns)) => (skipped_ns.max(asked_ns), rescue_ns),
            (false, Some(skipped_ns), None) => {
                let expected_ns = self.expected_ns.saturating_mul(RUN_ON_EXPECTED);
                (skipped_ns, rescue_ns.saturating_mul(RUN_ON_PATIENCE).max(expected_ns))
            }
            (false, None, _) => return false,
        };
        now_ns.saturating_sub(since_ns) > patience_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RESCUE_NS: u64 = 50;

    struct Sim {
        progress: Progress,
        done: usize,
        skipped: bool,
        asked_ns: Option<u64>,
    }

    impl Sim {
        fn new(parts: usize, sliced: bool, expected_us: u32) -> Self {
            let progress = Progress::new(parts, sliced, expected_us, true, 1);
            Sim { progress, done: 0, skipped: false, asked_ns: None }
        }

        fn look(&mut self, now_ns: u64) -> Found {
            let (done, skipped) = (self.done, self.skipped);
            self.progress.look(now_ns, self.asked_ns, RESCUE_NS, |e| e < done, |_| skipped)
        }
    }

    #[test]
    fn waiting_at_the_gate_is_not_being_stuck() {
        for sliced in [true, false] {
            let mut sim = Sim::new(3, sliced, 0);
            sim.done = 1;
            sim.asked_ns = Some(10);
            assert_eq!(sim.look(11), Found::default());
            // The first part ends, the second does not begin: the gate is closed.
            (sim.done, sim.skipped) = (2, true);
            assert_eq!(sim.look(20), Found { ended: Some((0, 10)), stuck: false });
            assert_eq!(sim.look(1_000_000), Found::default());
            // Asked anew meanwhile: still nothing runs.
            sim.asked_ns = Some(1_500_000);
            assert_eq!(sim.look(3_000_000), Found::default());
            sim.asked_ns = None;
            assert_eq!(sim.look(4_000_000), Found::default());
            (sim.done, sim.skipped) = (6, false);
            assert_eq!(sim.look(4_000_001), Found::default());
            assert!(sim.progress.is_over());
        }
    }

    #[test]
    fn what_has_skipped_and_does_not_end_is_stuck_once() {
        let mut sim = Sim::new(2, false, 0);
        (sim.done, sim.asked_ns) = (1, Some(100));
        assert!(!sim.look(100_000).stuck, "nothing was skipped: it has not begun, or has no more");
        sim.skipped = true;
        assert!(!sim.look(100_001).stuck);
        assert!(!sim.look(100_001 + RESCUE_NS).stuck);
        assert!(sim.look(100_002 + RESCUE_NS).stuck);
        assert!(!sim.look(200_000).stuck, "said once");
        sim.done = 4;
        assert_eq!(sim.look(200_001).ended, Some((0, 200_001 - 100)));
    }

    #[test]
    fn asked_for_a_moment_only_it_may_run_on_but_not_for_ever() {
        for (expected_us, patience_ns) in [(0, RUN_ON_PATIENCE * RESCUE_NS), (1, 4_000)] {
            let mut sim = Sim::new(2, false, expected_us);
            (sim.done, sim.skipped, sim.asked_ns) = (1, true, Some(100));
            assert!(!sim.look(101).stuck);
            sim.asked_ns = None;
            assert!(!sim.look(101 + patience_ns).stuck);
            // Asked again: it gets the time to stop once more.
            sim.asked_ns = Some(90 + patience_ns);
            assert!(!sim.look(102 + patience_ns).stuck);
            sim.asked_ns = None;
            assert!(sim.look(102 + patience_ns).stuck);
        }
        // Even if no look saw that it was asked.
        let mut sim = Sim::new(2, false, 0);
        (sim.done, sim.skipped) = (1, true);
        assert!(!sim.look(5).stuck);
        assert!(sim.look(6 + RUN_ON_PATIENCE * RESCUE_NS).stuck);
    }

    #[test]
    fn the_last_part_is_left_alone_and_so_is_what_cannot_be_helped() {
        for sliced in [true, false] {
            let mut sim = Sim::new(2, sliced, 0);
            (sim.done, sim.skipped, sim.asked_ns) = (3, true, Some(2));
            assert!(!sim.look(3).stuck);
            assert!(!sim.look(1_000_000).stuck);
            let mut progress = Progress::new(2, sliced, 0, false, 1);
            for now in [2, 1_000_000] {
                assert!(!progress.look(now, Some(2), RESCUE_NS, |e| e < 1, |_| true).stuck);
            }
        }
    }

    #[test]
    fn a_slice_is_stuck_by_its_own_time_alone() {
        let mut sim = Sim::new(3, true, 0);
        sim.done = 1;
        assert!(!sim.look(1_000).stuck);
        assert!(!sim.look(1_000 + SLICE_PATIENCE * RESCUE_NS).stuck);
        sim.done = 3;
        assert!(!sim.look(2_000).stuck, "the next one has its own");
        assert!(sim.look(2_001 + SLICE_PATIENCE * RESCUE_NS).stuck);
    }

    proptest! {
        /// Whatever happens in whatever order: parts end once each and in order, times are
        /// those since the asking, and help comes once at most, to a part that runs.
        #[test]
        fn looks_are_consistent(
            parts in 1_usize..6,
            sliced: bool,
            steps in prop::collection::vec((0_usize..3, any::<bool>(), any::<bool>(), 1_u64..400), 1..60),
        ) {
            let mut sim = Sim::new(parts, sliced, 0);
            let (mut now, mut last, mut helped) = (10, None, 0);
            for (more, asked, skipped, passed) in steps {
                now += passed;
                sim.done = (sim.done + more).min(2 * parts);
                sim.skipped = skipped;
                sim.asked_ns = asked.then(|| sim.asked_ns.unwrap_or(now));
                let found = sim.look(now);
                if let Some((part, took)) = found.ended {
                    prop_assert!(part < parts && last.is_none_or(|l| part > l));
                    prop_assert!(took <= now && 2 * part + 1 < sim.done);
                    last = Some(part);
                }
                if found.stuck {
                    helped += 1;
                    prop_assert!(sim.done % 2 == 1 && sim.done / 2 + 1 < parts);
                }
                prop_assert_eq!(sim.progress.is_over(), sim.done == 2 * parts);
            }
            prop_assert!(helped <= 1);
        }
    }
}
