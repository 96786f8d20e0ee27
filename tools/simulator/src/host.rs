//! A program: when it makes its next launch, and what it waits for.

use crate::trace::{Pace, Trace};
use std::ops::Range;

/// Launches that the driver takes before the program has to wait.
pub const AHEAD_MAX: u64 = 1_024;

/// One launch of a program: a kernel, or a graph of them.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Range of its kernels in the trace.
    pub kernels: Range<usize>,
    /// When the program makes it.
    pub pace: Pace,
}

/// A program at some point of its trace.
#[derive(Clone, Debug)]
pub struct Host {
    pub program: Vec<Launch>,
    /// Index in `program` of the next launch.
    pub next: usize,
    /// Where the iteration at hand ends in `program`.
    end: usize,
    /// When the next launch is made, ns; `None`: something else has to happen first.
    pub launch_ns: Option<u64>,
    /// It waits for the GPU, and will launch so long after.
    after_end_ns: Option<u64>,
    /// It is too far ahead of the GPU; would have launched then.
    ahead_ns: Option<u64>,
    /// A launch that is held.
    pub held: bool,
    pub made: u64,
    pub done: u64,
    /// Starts again by itself.
    repeats: bool,
    /// From the begin of an iteration to its first launch.
    lead_ns: u64,
    /// Its own times take so many times as long.
    pub stretch: f64,
}

impl Host {
    /// A program at the begin of its trace; one that repeats starts at once.
    pub fn new(trace: &Trace, repeats: bool) -> Self {
        let mut program: Vec<Launch> = Vec::new();
        for (i, k) in trace.kernels.iter().enumerate() {
            match program.last_mut() {
                Some(launch) if k.launch == trace.kernels[i - 1].launch => {
                    launch.kernels.end = i + 1;
                }
                _ => program.push(Launch { kernels: i..i + 1, pace: k.pace }),
            }
        }
        Host {
            next: 0,
            end: program.len(),
            program,
            launch_ns: repeats.then_some(0),
            after_end_ns: None,
            ahead_ns: None,
            held: false,
            made: 0,
            done: 0,
            repeats,
            lead_ns: trace.lead_ns,
            stretch: 1.0,
        }
    }

    /// Begin an iteration, which is these launches: the first one follows after the time that the program takes for it.
    pub fn begin(&mut self, now_ns: u64, launches: Range<usize>) {
        (self.next, self.end) = (launches.start, launches.end);
        self.launch_ns = Some(now_ns + self.stretched(self.lead_ns));
    }

    /// The iteration's launches are all made and done.
    pub fn idle(&self) -> bool {
        self.next == self.end && self.made == self.done
    }

    /// The next launch was made; plan the one after it.
    pub fn launched(&mut self, now_ns: u64) {
        self.made += 1;
        self.next += 1;
        self.launch_ns = None;
        if self.next == self.end {
            if !self.repeats {
                return;
            }
            self.next = 0;
        }
        match self.program[self.next].pace {
            Pace::AfterEnd(ns) => self.after_end_ns = Some(self.stretched(ns)),
            // Time passes even for a program of free launches.
            Pace::AfterLaunch(ns) if self.made - self.done < AHEAD_MAX => {
                self.launch_ns = Some(now_ns + self.stretched(ns).max(1));
            }
            Pace::AfterLaunch(ns) => self.ahead_ns = Some(now_ns + self.stretched(ns)),
        }
    }

    pub fn ended(&mut self, now_ns: u64) {
        self.done += 1;
        if let Some(ns) = self.ahead_ns.take() {
            self.launch_ns = Some(ns.max(now_ns));
        } else if self.made == self.done
            && let Some(ns) = self.after_end_ns.take()
        {
            self.launch_ns = Some(now_ns + ns);
        }
    }

    fn stretched(&self, ns: u64) -> u64 {
        if self.stretch == 1.0 { ns } else { (ns as f64 * self.stretch) as u64 }
    }

    /// How far it has come, in the time that it needs alone.
    pub fn progress_ns(&self, trace: &Trace) -> u64 {
        let each = self.program.len() as u64;
        match self.done.checked_sub(1) {
            None => 0,
            Some(last) => {
                let kernel = self.program[(last % each) as usize].kernels.end - 1;
                let k = &trace.kernels[kernel];
                (last / each) * trace.period_ns + k.start_ns + k.dur_ns
            }
        }
    }
}
