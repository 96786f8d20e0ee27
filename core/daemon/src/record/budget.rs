//! How much of one CPU a shadow may use: by the time that its thread ran, not by the
//! clock, so that a busy machine does not count against it.

/// CPU time that may be used at once after a pause, ns.
const BURST_NS: u64 = 20_000_000;
/// Beyond its share for so long although decisions are left out: events do not fit.
const OVER_NS_MAX: u64 = 5_000_000_000;

/// Two clocks go in, so that it can be tested without either.
#[derive(Debug)]
pub struct Budget {
    percent: f64,
    from_wall_ns: u64,
    from_cpu_ns: u64,
    over_since_ns: Option<u64>,
}

impl Budget {
    /// A share from now on.
    pub fn new(percent: f64, wall_ns: u64, cpu_ns: u64) -> Self {
        Budget { percent, from_wall_ns: wall_ns, from_cpu_ns: cpu_ns, over_since_ns: None }
    }

    /// CPU time that may have been used, and that was.
    fn allowed_and_spent(&self, wall_ns: u64, cpu_ns: u64) -> (u64, u64) {
        let passed_ns = wall_ns.saturating_sub(self.from_wall_ns);
        let spent_ns = cpu_ns.saturating_sub(self.from_cpu_ns);
        ((passed_ns as f64 * self.percent / 100.0) as u64, spent_ns)
    }

    /// Whether there is time for a decision.
    pub fn may_decide(&mut self, wall_ns: u64, cpu_ns: u64) -> bool {
        let (allowed_ns, spent_ns) = self.allowed_and_spent(wall_ns, cpu_ns);
        if allowed_ns > spent_ns.saturating_add(BURST_NS) {
            // What was not used long ago is not saved up.
            self.from_wall_ns = wall_ns;
            self.from_cpu_ns = cpu_ns;
            self.over_since_ns = None;
            return true;
        }
        let may = spent_ns <= allowed_ns.saturating_add(BURST_NS);
        match (may, self.over_since_ns) {
            (true, _) => self.over_since_ns = None,
            (false, None) => self.over_since_ns = Some(wall_ns),
            (false, Some(_)) => {}
        }
        may
    }

    /// It has been beyond its share for so long, and still is, that events alone must be the reason.
    pub fn is_hopeless(&self, wall_ns: u64, cpu_ns: impl FnOnce() -> u64) -> bool {
        let is_long = |since| wall_ns.saturating_sub(since) > OVER_NS_MAX;
        self.over_since_ns.is_some_and(is_long) && {
            let (allowed_ns, spent_ns) = self.allowed_and_spent(wall_ns, cpu_ns());
            spent_ns > allowed_ns.saturating_add(BURST_NS)
        }
    }

    /// This much was spent on something that does not count (compiling).
    pub fn forgive(&mut self, cpu_ns: u64) {
        self.from_cpu_ns = self.from_cpu_ns.saturating_add(cpu_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Decisions of 1 ms each, asked for without a pause: how many in 10 s.
    fn decisions(percent: f64) -> u64 {
        let (mut wall, mut cpu, mut made) = (0, 0, 0);
        let mut budget = Budget::new(percent, wall, cpu);
        while wall < 10_000 * MS {
            wall += MS / 10;
            if budget.may_decide(wall, cpu) {
                (wall, cpu, made) = (wall + MS, cpu + MS, made + 1);
            }
            assert!(!budget.is_hopeless(wall, || cpu), "decisions are what is left out");
        }
        made
    }

    #[test]
    fn the_share_is_kept() {
        for (percent, expected) in [(5.0, 500), (50.0, 5_000)] {
            let made = decisions(percent);
            assert!((expected..=expected + 30).contains(&made), "{percent} %: {made}");
        }
        assert!(decisions(100.0) > 9_000);
    }

    #[test]
    fn an_idle_hour_is_not_saved_up() {
        let mut budget = Budget::new(5.0, 0, 0);
        let mut wall = 3_600_000 * MS;
        let (mut cpu, mut made) = (0, 0);
        while budget.may_decide(wall, cpu) {
            (wall, cpu, made) = (wall + MS, cpu + MS, made + 1);
        }
        assert!(made < 50, "{made} ms at once");
    }

    #[test]
    fn events_beyond_the_share_end_it_and_what_is_forgiven_does_not() {
        let mut budget = Budget::new(5.0, 0, 0);
        let mut cpu = 0;
        for second in 0..20 {
            cpu += 300 * MS;
            let wall = second * 1_000 * MS;
            let _ = budget.may_decide(wall, cpu);
            assert_eq!(budget.is_hopeless(wall, || cpu), second > 5, "second {second}");
        }
        // A pause in which nothing is to be decided is no reason.
        let mut budget = Budget::new(5.0, 0, 0);
        assert!(!budget.may_decide(0, 40 * MS));
        assert!(!budget.is_hopeless(6_000 * MS, || 40 * MS));
        let mut budget = Budget::new(5.0, 0, 0);
        budget.forgive(900 * MS);
        assert!(budget.may_decide(1_000 * MS, 940 * MS));
    }
}
