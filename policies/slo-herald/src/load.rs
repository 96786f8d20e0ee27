//! How busy a service is, over as many units as tell: a few are often busier than the service is on average.

use std::collections::VecDeque;

/// The latest stretches with as many units are judged together. With random arrivals and a load of 0.7 one in eight
/// runs of 16 units is busy for 95 % of the time, of 64 units one in 140.
const UNITS: u64 = 64;
/// Of fewer it is not said that the service is too busy.
const UNITS_MIN: u64 = 32;
/// Stretches that are remembered at most: one may have no unit.
const STRETCHES_MAX: usize = 64;

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
