//! When the core learns that a decided launch is done.
//!
//! The client's side has the GPU write a number behind a launch, and one write stands
//! for a few launches (`core/shim/src/completion.rs`, whose constants these are): it
//! follows after so many or so long, around launches whose time is to be learnt, and as
//! soon as a launch waits for something in flight.

use std::collections::VecDeque;

/// Launches that one write stands for, at most.
const LAUNCHES_MAX: u32 = 8;
/// A write follows the first launch that comes so long after an unmarked one.
const UNMARKED_NS_MAX: u64 = 100_000;
/// A kernel's first launches are measured one by one, later one in so many.
const FIRST_SAMPLES: u32 = 8;
const SAMPLE_EVERY: u32 = 32;
/// A launch that was not answered for so long waits for something in flight.
pub const PATIENCE_NS: u64 = 5_000;
/// GPU time of a write.
pub const WRITE_NS: u64 = 2_100;
/// From asking for a write until the GPU has done it, if nothing is before it.
const LATE_NS: u64 = 6_000;

#[derive(Debug)]
struct Flight {
    launch: u64,
    marked: bool,
    ended: bool,
}

/// A stream's launches in flight and its writes.
#[derive(Debug, Default)]
pub struct Marks {
    flights: VecDeque<Flight>,
    unmarked: u32,
    unmarked_since_ns: u64,
    /// Launches of each kernel.
    launched: Vec<u32>,
    /// GPU time of writes that the next kernel comes after.
    owed_ns: u64,
    /// A write behind work that had ended: when, and up to which launch.
    late: Option<(u64, u64)>,
}

impl Marks {
    /// Whether this launch of a kernel is to be measured. Counts it.
    pub fn is_sample(&mut self, kernel: usize) -> bool {
        if self.launched.len() <= kernel {
            self.launched.resize(kernel + 1, 0);
        }
        let n = self.launched[kernel];
        self.launched[kernel] = n.wrapping_add(1);
        n < FIRST_SAMPLES || n.is_multiple_of(SAMPLE_EVERY)
    }

    /// A launch is made. Returns GPU time that writes before it take.
    pub fn launched(&mut self, now_ns: u64, launch: u64, measured: bool) -> u64 {
        if measured && self.unmarked > 0 {
            self.mark(now_ns);
        }
        let before_ns = std::mem::take(&mut self.owed_ns);
        self.flights.push_back(Flight { launch, marked: false, ended: false });
        self.unmarked += 1;
        let long = now_ns.saturating_sub(self.unmarked_since_ns) >= UNMARKED_NS_MAX;
        if measured || self.unmarked >= LAUNCHES_MAX || (self.unmarked > 1 && long) {
            self.mark(now_ns);
        } else if self.unmarked == 1 {
            self.unmarked_since_ns = now_ns;
        }
        before_ns
    }

    /// A launch waits: what is unreported gets its write now.
    pub fn waits(&mut self, now_ns: u64) {
        if self.unmarked > 0 {
            self.mark(now_ns);
        }
    }

    fn mark(&mut self, now_ns: u64) {
        self.unmarked = 0;
        if let Some(last) = self.flights.back_mut() {
            last.marked = true;
            self.owed_ns += WRITE_NS;
            if last.ended {
                self.late = Some((now_ns + LATE_NS, last.launch));
            }
        }
    }

    /// A launch ended; the one up to which all is reported done by that, if any.
    pub fn ended(&mut self, launch: u64) -> Option<u64> {
        let flight = self.flights.iter_mut().find(|f| f.launch == launch)?;
        flight.ended = true;
        let reported = flight.marked.then_some(launch);
        if reported.is_some() {
            self.reported(launch);
        }
        reported
    }

    /// When a late write is done.
    pub fn next_ns(&self) -> Option<u64> {
        self.late.map(|late| late.0)
    }

    /// The launch up to which all is reported by a late write that is done by now.
    pub fn take_late(&mut self, now_ns: u64) -> Option<u64> {
        let (_, launch) = self.late.take_if(|late| late.0 <= now_ns)?;
        self.reported(launch);
        Some(launch)
    }

    fn reported(&mut self, launch: u64) {
        while self.flights.front().is_some_and(|f| f.launch <= launch) {
            self.flights.pop_front();
        }
        if self.flights.is_empty() {
            self.unmarked = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_write_stands_for_eight_launches_or_a_tenth_of_a_millisecond() {
        let mut marks = Marks::default();
        for launch in 0..8 {
            assert_eq!(marks.launched(launch, launch, false), 0);
        }
        assert!((0..7).all(|launch| marks.ended(launch).is_none()));
        assert_eq!(marks.ended(7), Some(7));
        // The write is in the way of what comes next.
        assert_eq!(marks.launched(1_000, 8, false), WRITE_NS);
        marks.launched(1_000 + UNMARKED_NS_MAX, 9, false);
        assert_eq!((marks.ended(8), marks.ended(9)), (None, Some(9)));
    }

    #[test]
    fn a_measured_launch_has_a_write_before_and_behind_it() {
        let mut marks = Marks::default();
        assert!((0..FIRST_SAMPLES).all(|_| marks.is_sample(3)));
        assert!(!marks.is_sample(3) && marks.is_sample(4));
        marks.launched(0, 0, false);
        assert_eq!(marks.launched(1, 1, true), WRITE_NS);
        assert_eq!((marks.ended(0), marks.ended(1)), (Some(0), Some(1)));
    }

    #[test]
    fn a_launch_that_waits_has_the_rest_reported() {
        let mut marks = Marks::default();
        marks.launched(0, 0, false);
        marks.waits(1);
        assert_eq!(marks.ended(0), Some(0));
        marks.launched(10, 1, false);
        assert_eq!(marks.ended(1), None);
        marks.waits(20);
        let late_ns = marks.next_ns().unwrap();
        assert!(late_ns > 20);
        assert_eq!((marks.take_late(late_ns - 1), marks.take_late(late_ns)), (None, Some(1)));
    }
}
