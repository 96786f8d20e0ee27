//! How busy a service is, over as many units as tell: a few are often busier than the service is on average.

use super::Service;
use std::collections::VecDeque;

/// The latest stretches with as many units are judged together. With random arrivals and a load of 0.7 one in eight
/// runs of 16 units is busy for 95 % of the time, of 64 units one in 140.
const UNITS: u64 = 64;
/// Of fewer it is not said that the service is too busy.
const UNITS_MIN: u64 = 32;
/// Stretches that are remembered at most: one may have no unit.
const STRETCHES_MAX: usize = 64;

/// How busy best effort may make a service, in thousandths of the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    /// Busier than this it bears less: longer units make others queue.
    pub max: u64,
    /// Busier than this it bears far less.
    pub far: u64,
    /// Busier than this it bears no more than it does.
    pub raise_max: u64,
    /// Busier than this it bears nothing.
    pub strict: u64,
}

impl Busy {
    /// `percent`: [`Self::max`]. 100: whatever it is.
    pub fn at_most(percent: u32) -> Self {
        let max = u64::from(percent.min(100)) * 10;
        let rest = 1_000 - max;
        Busy { max, far: max + rest * 3 / 8, raise_max: max * 9 / 10, strict: max + rest * 3 / 4 }
    }

    fn is_limited(self) -> bool {
        self.max < 1_000
    }
}

/// How busy it is counts only if best effort lengthens its units by more than this, in thousandths, and by more than a
/// quarter of the idle time that is left: else holding best effort back would make it hardly less busy.
const INFLATION_PERMILLE: [u64; 2] = [10, 50];
/// Stretch over which that is measured, at least, ns, and units; it ends at the latest after [`BUSY_STRETCH_NS_MAX`].
const BUSY_STRETCH_NS: u64 = 1_000_000_000;
const BUSY_UNITS: u64 = 16;
const BUSY_STRETCH_NS_MAX: u64 = 10_000_000_000;
/// Most stretches for which a service that is busy alone is served strictly before it is tried again.
const RETRY_STRETCHES_MAX: u32 = 64;

#[derive(Clone, Copy, Debug)]
struct Stretch {
    units: u64,
    busy_ns: u64,
    ns: u64,
}

/// The latest stretches.
#[derive(Debug, Default)]
pub struct Load {
    stretches: VecDeque<Stretch>,
}

impl Load {
    /// A stretch of so many units is over, in which the service was busy for so long. How busy it was of late, in
    /// thousandths, but no more than `most` if the units are too few to tell.
    pub fn add(&mut self, units: u64, busy_ns: u64, ns: u64, most: u64) -> u64 {
        self.stretches.push_back(Stretch { units, busy_ns, ns });
        while let Some(oldest) = self.stretches.front()
            && (self.stretches.len() > STRETCHES_MAX
                || self.sum(|one| one.units) - oldest.units >= UNITS)
        {
            self.stretches.pop_front();
        }
        let permille =
            self.sum(|one| one.busy_ns).saturating_mul(1_000) / self.sum(|one| one.ns).max(1);
        if self.sum(|one| one.units) < UNITS_MIN { permille.min(most) } else { permille }
    }

    fn sum(&self, of: impl Fn(&Stretch) -> u64) -> u64 {
        self.stretches.iter().fold(0, |sum, one| sum.saturating_add(of(one)))
    }

    /// What comes is not like what was.
    pub fn begin_anew(&mut self) {
        self.stretches.clear();
    }
}

impl Service {
    /// How busy it is. True if that makes it strict, or ends that.
    pub(super) fn judge_load(&mut self, now_ns: u64) -> bool {
        let Some(from_ns) = self.busy_from_ns else { return false };
        let stretch_ns = now_ns.saturating_sub(from_ns);
        let is_enough = self.stretch_units >= BUSY_UNITS || stretch_ns >= BUSY_STRETCH_NS_MAX;
        if stretch_ns < BUSY_STRETCH_NS || !is_enough {
            return false;
        }
        // What was idle for long says nothing of the load that comes.
        let is_idle = self.stretch_units < BUSY_UNITS && self.busy_ns < stretch_ns / 2;
        let was_strict = self.is_strict();
        // Served strictly it is to be seen whether it is as busy alone, by as few units as that takes.
        let of_few = if was_strict { u64::MAX } else { self.busy.max };
        let busy_permille = self.load.add(self.stretch_units, self.busy_ns, stretch_ns, of_few);
        if is_idle {
            self.load.begin_anew();
        }
        let [least, most] = INFLATION_PERMILLE;
        let tolerated = (1_000u64.saturating_sub(busy_permille) / 4).clamp(least, most);
        if self.beside_units > 0 {
            let alone_ns = u128::from(self.alone_mean_ns) * u128::from(self.beside_units);
            let most_ns = alone_ns * u128::from(1_000 + tolerated) / 1_000;
            self.inflates = u128::from(self.beside_ns) > most_ns;
            if !self.inflates {
                self.retry_after = 1;
            } else if busy_permille > self.busy.strict {
                self.retry_after = (self.retry_after * 2).min(RETRY_STRETCHES_MAX);
            }
            self.retry_in = self.retry_after;
        } else if busy_permille > self.busy.raise_max {
            // Alone it is as busy. A later stretch tells again whether best effort adds to that.
            self.retry_in = self.retry_in.saturating_sub(1);
            self.inflates = self.retry_in > 0;
        } else {
            self.inflates = false;
        }
        // A server that batches what waits makes tokens all the time, and more at once if more waits.
        let counts = self.inflates && !self.of_tokens && self.busy.is_limited();
        self.busy_permille = if counts { busy_permille } else { 0 };
        (self.beside_units, self.beside_ns, self.stretch_units) = (0, 0, 0);
        (self.busy_from_ns, self.busy_ns, self.is_busy_new) = (Some(now_ns), 0, true);
        if self.is_strict() && !was_strict {
            self.share.halve(false);
            self.new_review();
            self.tolerated = self.tolerated.max(0.0);
        }
        if self.is_strict() != was_strict {
            self.load.begin_anew();
        }
        self.is_strict() != was_strict
    }
}
