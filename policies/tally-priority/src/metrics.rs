//! What `tallyctl status` shows of the choice. Counted here and handed over in
//! batches: a call into the core for each launch would cost more than deciding it.

use crate::choice::Choice;
use tally_sdk::host::{Counter, Gauge};

/// Handed over after so many launches, or so long after the last time. That launch is decided some 0.1 to
/// 0.5 us later: far less often than one in a hundred.
const LAUNCHES_HELD: u32 = 256;
const HELD_NS: u64 = 100_000_000;

/// Counts of launches beside a high-priority client, and the table's gauges.
#[derive(Debug)]
pub struct Metrics {
    counters: [Counter; 6],
    held: [u64; 6],
    launches: u32,
    handed_over_ns: u64,
    known: Gauge,
    long_whole: Gauge,
    shown: (usize, usize),
}

const EXPLORED: usize = 4;
const REQUESTED: usize = 5;

impl Metrics {
    /// All at 0.
    pub fn new() -> Self {
        let names = [
            "launches_whole",
            "launches_preemptible",
            "launches_sliced",
            "launches_partitioned",
            "launches_explored",
            "cuts_requested",
        ];
        Metrics {
            counters: names.map(Counter::new),
            held: [0; 6],
            launches: 0,
            handed_over_ns: 0,
            known: Gauge::new("kernels_known"),
            long_whole: Gauge::new("long_whole_kernels"),
            shown: (0, 0),
        }
    }

    /// A launch goes in this form.
    pub fn launched(&mut self, now_ns: u64, choice: Choice) {
        let index = match choice {
            Choice::Whole => 0,
            Choice::Preemptible => 1,
            Choice::Slice(_) => 2,
            Choice::Partition(_) => 3,
        };
        self.held[index] += 1;
        self.launches += 1;
        if self.launches >= LAUNCHES_HELD || now_ns.saturating_sub(self.handed_over_ns) >= HELD_NS {
            self.handed_over_ns = now_ns;
            self.hand_over();
        }
    }

    /// One of those is a try.
    pub fn explored(&mut self) {
        self.held[EXPLORED] += 1;
    }

    /// A cut form was asked for; the launch runs whole.
    pub fn requested(&mut self) {
        self.held[REQUESTED] += 1;
    }

    /// Kernels in the table, and the long ones of them that run whole.
    pub fn show(&mut self, known: usize, long_whole: usize) {
        if self.shown.0 != known {
            self.known.set(known as i64);
        }
        if self.shown.1 != long_whole {
            self.long_whole.set(long_whole as i64);
        }
        self.shown = (known, long_whole);
    }

    /// Hand over what is held.
    pub fn hand_over(&mut self) {
        self.launches = 0;
        for (counter, held) in self.counters.iter().zip(&mut self.held) {
            if *held > 0 {
                counter.add(std::mem::take(held));
            }
        }
    }
}
