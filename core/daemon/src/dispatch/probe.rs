//! When to ask a high-priority client whether it is still busy.
//!
//! A client says it is idle when a synchronising call returns; one that polls, or just goes away to read a file, leaves
//! its busy bits set. A step of `CoreRegion::probes` wakes its helper thread, which has the poller look at the streams
//! and clear them.

use tally_ipc::layout::Counters;

/// Longest time between two probes.
const PAUSE_NS_MAX: u64 = 100_000_000;

/// How often a client has launched, as of the last look: each takes the line from the client, whose next launch waits
/// for it.
#[derive(Debug)]
pub struct Launches {
    every_ns: u64,
    next_ns: u64,
    seen: u64,
}

impl Launches {
    /// For a caller that acts after `after_ns` without a launch; exact to a quarter of it.
    pub fn new(after_ns: u64) -> Self {
        Launches { every_ns: after_ns / 4, next_ns: 0, seen: 0 }
    }

    /// Look, if it is time.
    pub fn look(&mut self, now_ns: u64, counters: &Counters) -> u64 {
        if now_ns >= self.next_ns {
            self.seen = counters.launches();
            self.next_ns = now_ns + self.every_ns;
        }
        self.seen
    }
}

/// When to probe one client next: sooner while it launches, later while it does not.
#[derive(Debug)]
pub struct Probe {
    after_ns: u64,
    launches: u64,
    pause_ns: u64,
    next_ns: u64,
}

impl Probe {
    /// Probe after `after_ns` without a launch.
    pub fn new(now_ns: u64, after_ns: u64) -> Self {
        Probe { after_ns, launches: 0, pause_ns: after_ns, next_ns: now_ns + after_ns }
    }

    /// The client is busy and has launched so often. True: probe it now.
    pub fn is_due(&mut self, now_ns: u64, launches: u64) -> bool {
        if launches != self.launches {
            self.restart(now_ns, launches);
            return false;
        }
        if now_ns < self.next_ns {
            return false;
        }
        self.pause_ns = (self.pause_ns * 2).min(PAUSE_NS_MAX);
        self.next_ns = now_ns + self.pause_ns;
        true
    }

    /// The client became busy, or has launched: the pause begins again.
    pub fn restart(&mut self, now_ns: u64, launches: u64) {
        self.launches = launches;
        self.pause_ns = self.after_ns;
        self.next_ns = now_ns + self.after_ns;
    }

    /// When [`Probe::is_due`] is worth asking again.
    pub fn next_ns(&self) -> u64 {
        self.next_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn it_waits_backs_off_and_starts_again_when_the_client_launches() {
        let mut probe = Probe::new(0, 1_000);
        assert!(!probe.is_due(999, 0));
        assert!(probe.is_due(1_000, 0));
        assert!(!probe.is_due(2_999, 0));
        assert!(probe.is_due(3_000, 0));
        assert!(!probe.is_due(6_999, 0));
        assert!(!probe.is_due(7_500, 1), "it launched");
        assert!(probe.is_due(8_500, 1));
    }

    #[test]
    fn launches_are_looked_at_every_quarter() {
        let (_memory, region) = tally_ipc::map::create_client().unwrap();
        let counters = &region.counters;
        let mut launches = Launches::new(1_000);
        assert_eq!(launches.look(5_000, counters), 0);
        counters.by_entry_point.kernel.fetch_add(2, Relaxed);
        counters.by_entry_point.graph.fetch_add(1, Relaxed);
        assert_eq!(launches.look(5_249, counters), 0, "the line stays where it is");
        assert_eq!(launches.look(5_250, counters), 3);
    }

    #[test]
    fn the_pause_is_bounded() {
        let mut probe = Probe::new(0, 1_000_000);
        let (mut now, mut last) = (0, 0);
        for _ in 0..20 {
            now = probe.next_ns();
            assert!(now - last <= PAUSE_NS_MAX);
            assert!(probe.is_due(now, 0));
            last = now;
        }
        assert!(now > 0);
    }
}
