//! A program alone: how long it takes, and its pauses made so that it takes as long as it
//! does without a profiler.

use super::{LAUNCH_LATENCY_NS, Pace, Trace};
use crate::gpu::{SEEN_NS, SharingMode};
use crate::host::AHEAD_MAX;

/// What an iteration takes alone, timed without a profiler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Alone {
    /// From its begin until the program has seen its end; median.
    pub ns: u64,
    /// The same, of one in a hundred; 0: not known.
    pub p99_ns: u64,
    /// From its begin until all is launched; 0: not known.
    pub launched_ns: u64,
}

impl Alone {
    /// The same program on a machine where it takes so long.
    pub fn scaled_to(self, ns: u64) -> Self {
        if self.ns == 0 {
            return Alone { ns, ..self };
        }
        let scale = |value: u64| (value as f64 * ns as f64 / self.ns.max(1) as f64) as u64;
        Alone { ns, p99_ns: scale(self.p99_ns), launched_ns: scale(self.launched_ns) }
    }

    /// Whether the program's own part, and not the GPU, is what it takes, as far as is known.
    pub fn is_launch_bound(&self) -> bool {
        self.launched_ns as f64 > self.ns as f64 * LAUNCH_BOUND
    }
}

/// How a recording is changed.
#[derive(Clone, Copy, Debug)]
struct Change {
    /// Times of the program itself.
    host: f64,
    /// Pauses of the GPU's own.
    gap: f64,
    /// The same for each kernel but the first, nanoseconds.
    more_ns: f64,
    dur: f64,
}

const NONE: Change = Change { host: 1.0, gap: 1.0, more_ns: 0.0, dur: 1.0 };
/// Most of an iteration is launching: the program's own time is what it takes.
const LAUNCH_BOUND: f64 = 0.9;
/// So near to what it takes nothing is looked for any more.
const NEAR: f64 = 1e-3;
/// Steps of halving; the bounds below are a few orders of magnitude apart.
const HALVINGS: u32 = 48;

impl Trace {
    /// One iteration alone: `(until all is launched, until its end is seen)`.
    pub fn lone_ns(&self) -> (u64, u64) {
        let (launched, seen) = self.lone(NONE);
        (launched as u64, seen as u64)
    }

    /// As timed there without a profiler, if it was.
    #[must_use]
    pub fn timed_in(&self, sharing: SharingMode) -> Trace {
        let alone = match sharing {
            SharingMode::Timeslice => self.alone[0],
            SharingMode::Mps => self.alone[1].or(self.alone[0]),
        };
        alone.filter(|a| a.ns > 0).map_or_else(|| self.clone(), |alone| self.timed(alone))
    }

    fn lone(&self, change: Change) -> (f64, f64) {
        let (mut host, mut gpu) = (self.lead_ns as f64 * change.host, 0.0f64);
        // When each launch was done.
        let mut ends: Vec<f64> = Vec::with_capacity(self.kernels.len());
        for (i, k) in self.kernels.iter().enumerate() {
            let begins = i == 0 || k.launch != self.kernels[i - 1].launch;
            if begins && i > 0 {
                host = match k.pace {
                    Pace::AfterLaunch(ns) => host + ns as f64 * change.host,
                    Pace::AfterEnd(ns) => host.max(gpu) + ns as f64 * change.host,
                };
                if let Some(at) = ends.len().checked_sub(AHEAD_MAX as usize) {
                    host = host.max(ends[at]);
                }
            }
            let gap = if i == 0 { 0.0 } else { k.gap_ns as f64 * change.gap + change.more_ns };
            let ready = host + LAUNCH_LATENCY_NS as f64;
            gpu = ready.max(gpu + gap) + k.dur_ns as f64 * change.dur;
            if begins {
                ends.push(gpu);
            } else if let Some(end) = ends.last_mut() {
                *end = gpu;
            }
        }
        (host, gpu + SEEN_NS as f64)
    }

    /// The same iteration at the speed that it has alone. The program's own times are scaled until it has made
    /// all launches when it should; then the GPU's pauses (and, if there are none left, its kernels) are scaled
    /// until it ends when it should.
    #[must_use]
    pub fn timed(&self, alone: Alone) -> Trace {
        let (target, launched) = (alone.ns as f64, alone.launched_ns as f64);
        let mut change = NONE;
        // Not known, and the program's own times are what makes it too slow.
        let waited_for = || {
            launched == 0.0 && self.lone(NONE).1 > target && {
                self.lone(Change { host: 1e-3, ..NONE }).1 <= target
            }
        };
        if alone.is_launch_bound() || waited_for() {
            change.host = solve(target, (1e-3, 1e3), |host| self.lone(Change { host, ..NONE }).1);
        } else if launched > 0.0 && self.kernels.iter().any(|k| k.launch > 0) {
            change.host = solve(launched, (1e-3, 1e3), |host| self.lone(Change { host, ..NONE }).0);
        }
        let seen = |change: Change| self.lone(change).1;
        // Where the program's own times are what it takes, pauses of the GPU hide behind them: one that
        // is as good as there needs no more, and would get as many as can be hidden.
        if (seen(change) / target - 1.0).abs() < NEAR {
            return self.changed(change, alone.ns);
        }
        if seen(change) < target {
            let at = change;
            let most = 1e9;
            change.more_ns = solve(target, (1e-3, most), |more_ns| seen(Change { more_ns, ..at }));
        } else {
            let at = change;
            change.gap = solve(target, (1e-6, 1.0), |gap| seen(Change { gap, ..at }));
            let at = change;
            change.dur = solve(target, (0.1, 1.0), |dur| seen(Change { dur, ..at }));
        }
        self.changed(change, alone.ns)
    }

    fn changed(&self, change: Change, period_ns: u64) -> Trace {
        let scaled = |ns: u64, by: f64| (ns as f64 * by).round() as u64;
        let mut trace = self.clone();
        (trace.period_ns, trace.lead_ns) = (period_ns, scaled(self.lead_ns, change.host));
        let mut end_ns = 0;
        for (i, k) in trace.kernels.iter_mut().enumerate() {
            k.pace = match k.pace {
                Pace::AfterLaunch(ns) => Pace::AfterLaunch(scaled(ns, change.host)),
                Pace::AfterEnd(ns) => Pace::AfterEnd(scaled(ns, change.host)),
            };
            if i > 0 {
                k.gap_ns = scaled(k.gap_ns, change.gap) + change.more_ns.round() as u64;
            }
            k.dur_ns = scaled(k.dur_ns, change.dur).max(1);
            // Of use only for how far an iteration has come.
            k.start_ns = end_ns + k.gap_ns;
            end_ns = k.start_ns + k.dur_ns;
        }
        // Pauses for launches are spread over the iteration.
        let busy_ns = end_ns.max(1);
        for k in &mut trace.kernels {
            let at =
                |ns: u64| (u128::from(ns) * u128::from(period_ns) / u128::from(busy_ns)) as u64;
            k.start_ns = at(k.start_ns + k.dur_ns).saturating_sub(k.dur_ns);
        }
        trace
    }
}

/// Where a function that does not fall comes to `target`, by halving; the nearer end if
/// it does not between the bounds.
fn solve(target: f64, (mut low, mut high): (f64, f64), value: impl Fn(f64) -> f64) -> f64 {
    for _ in 0..HALVINGS {
        let middle = (low * high).sqrt();
        if value(middle) < target {
            low = middle;
        } else {
            high = middle;
        }
    }
    (low * high).sqrt()
}
