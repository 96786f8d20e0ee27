//! When the core learns that a gated launch is done, and how long it took.
//!
//! The client records an event behind each launch and polls it (`core/shim/src/completion.rs`): that
//! takes no GPU time, and the core hears of each launch by itself, a little late. Times of a kernel's
//! first launches are reported, later of one in so many.

use std::collections::VecDeque;
use tally_contract::limits::{FIRST_SAMPLES, SAMPLE_EVERY};
use tally_engine::Measured;

/// From the end of a launch until the core has heard of it, while a launch of the client waits, and
/// while none does.
const SEEN_NS: [u64; 2] = [1_500, 12_000];

/// Reports of one stream's launches.
#[derive(Debug, Default)]
pub struct Completions {
    /// Launches of each kernel.
    launched: Vec<u32>,
    /// When each launch in flight can start at the earliest, and whether it is measured.
    flights: VecDeque<(u64, u64, bool)>,
    last_end_ns: u64,
    /// Reports on their way: when they arrive, of which launch, and what it took.
    reports: VecDeque<(u64, u64, Option<u64>)>,
}

/// What the core hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Value of the stream's completion word.
    pub word: u32,
    /// What the launch took, if it was measured.
    pub measured: Option<Measured>,
}

fn word(launch: u64) -> u32 {
    (launch as u32).wrapping_add(1)
}

impl Completions {
    /// Whether this launch of a kernel is to be measured. Counts it.
    pub fn is_sample(&mut self, kernel: usize) -> bool {
        if self.launched.len() <= kernel {
            self.launched.resize(kernel + 1, 0);
        }
        let n = self.launched[kernel];
        self.launched[kernel] = n.wrapping_add(1);
        n < u32::from(FIRST_SAMPLES) || n.is_multiple_of(u32::from(SAMPLE_EVERY))
    }

    /// A launch is made; it starts at `ready_ns` at the earliest.
    pub fn launched(&mut self, launch: u64, ready_ns: u64, is_measured: bool) {
        self.flights.push_back((launch, ready_ns, is_measured));
    }

    /// A launch ended. `is_waited_for`: another launch of the client waits for its turn.
    pub fn ended(&mut self, now_ns: u64, launch: u64, is_waited_for: bool) {
        let mut took_ns = None;
        while self.flights.front().is_some_and(|flight| flight.0 <= launch) {
            let Some((_, ready_ns, is_measured)) = self.flights.pop_front() else { break };
            let start_ns = ready_ns.max(self.last_end_ns);
            took_ns = is_measured.then(|| now_ns.saturating_sub(start_ns).max(1));
        }
        self.last_end_ns = now_ns;
        let seen_ns = now_ns + SEEN_NS[usize::from(!is_waited_for)];
        let seen_ns = self.reports.back().map_or(seen_ns, |last| seen_ns.max(last.0));
        self.reports.push_back((seen_ns, launch, took_ns));
    }

    /// When the next report arrives.
    pub fn next_ns(&self) -> Option<u64> {
        self.reports.front().map(|report| report.0)
    }

    /// A report that has arrived by now.
    pub fn take(&mut self, now_ns: u64) -> Option<Report> {
        self.reports.front().filter(|report| report.0 <= now_ns)?;
        let (_, launch, took_ns) = self.reports.pop_front()?;
        let word = word(launch);
        let measured = took_ns.map(|ns| Measured { completion: word, ns });
        Some(Report { word, measured })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_launch_is_reported_by_itself_and_in_order() {
        let mut all = Completions::default();
        for launch in 0..3 {
            all.launched(launch, 100, launch == 1);
        }
        all.ended(1_000, 0, false);
        all.ended(1_600, 1, true);
        assert_eq!(all.take(1_000), None);
        let at_ns = all.next_ns().unwrap();
        assert_eq!(all.take(at_ns), Some(Report { word: 1, measured: None }));
        // Asked for more urgently, but behind the one before.
        assert_eq!(all.next_ns(), Some(at_ns));
        let measured = Some(Measured { completion: 2, ns: 600 });
        assert_eq!(all.take(at_ns), Some(Report { word: 2, measured }));
        assert_eq!(all.next_ns(), None);
    }

    #[test]
    fn a_kernels_first_launches_and_one_in_some_later_are_measured() {
        let mut all = Completions::default();
        assert!((0..FIRST_SAMPLES).all(|_| all.is_sample(3)));
        assert!(!all.is_sample(3) && all.is_sample(4));
        assert_eq!((0..SAMPLE_EVERY).filter(|_| all.is_sample(3)).count(), 1);
    }

    #[test]
    fn an_idle_streams_launch_is_measured_from_its_own_start() {
        let mut all = Completions::default();
        all.launched(0, 500, true);
        all.ended(700, 0, true);
        let report = all.take(all.next_ns().unwrap()).unwrap();
        assert_eq!(report.measured.unwrap().ns, 200);
    }
}
