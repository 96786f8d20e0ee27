//! How much best-effort work a way of sharing lets in: what was let in while it was measured, at the rate of units that
//! a service has at other times.
//!
//! Units come at random, and in a second with more of them less is let in, whatever the way. So what is kept is work
//! for each unit and for the time between units, and ways are compared at the same rate of units.

/// More work than this is not let in, whatever a saved state says.
const PERMILLE_MAX: u64 = 1_000_000;
/// With less time than this between units, a part of the whole, the rate of units is no longer theirs alone.
const BETWEEN_PART: u64 = 20;
/// Units over which their rate is remembered.
const UNITS_MAX: u64 = 8_192;

/// Best-effort work that was let in over some time, and the units of that time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub within_ns: u64,
    pub between_ns: u64,
    pub units: u64,
    /// A unit was open.
    pub busy_ns: u64,
}

impl Tally {
    /// Best-effort work of so much GPU time, whole, is let in, while a unit is open or not.
    pub fn let_in(&mut self, work_ns: u64, within: bool) {
        let sum_ns = if within { &mut self.within_ns } else { &mut self.between_ns };
        *sum_ns = sum_ns.saturating_add(work_ns);
    }

    /// Units ended, with one of which the service was busy for so long.
    pub fn busy(&mut self, units: u64, busy_ns: u64) {
        self.units = self.units.saturating_add(units);
        self.busy_ns = self.busy_ns.saturating_add(busy_ns);
    }
}

/// Rate of a service's units.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    units: u64,
    ns: u64,
}

impl Pace {
    /// So many came in a time that is over.
    pub fn add(&mut self, units: u64, ns: u64) {
        self.units = self.units.saturating_add(units);
        self.ns = self.ns.saturating_add(ns);
        while self.units > UNITS_MAX {
            (self.units, self.ns) = (self.units / 2, self.ns / 2);
        }
    }

    /// Mean time from one unit to the next; 0 if it is not known.
    pub fn apart_ns(&self) -> u64 {
        self.ns.checked_div(self.units).unwrap_or(0)
    }
}

/// What was let in while a way was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worth {
    /// In thousandths of the time, at whatever rate of units. 0: it was not measured.
    Flat(u64),
    /// Beside a unit, how long that was open, and between units in thousandths of the time.
    OfUnits { within_ns: u64, busy_ns: u64, between_permille: u64 },
}

impl Worth {
    pub const UNKNOWN: Worth = Worth::Flat(0);
    /// No unit bears it.
    pub const NONE: Worth = Worth::Flat(1);

    /// In thousandths of the time, as [`Self::permille`] told.
    pub fn of_permille(permille: u64) -> Self {
        Worth::Flat(permille.min(PERMILLE_MAX))
    }

    /// What was let in over a time.
    pub fn measured(tally: Tally, passed_ns: u64) -> Self {
        let passed_ns = passed_ns.max(1);
        let free_ns = passed_ns.saturating_sub(tally.busy_ns);
        let permille =
            |work_ns: u64, ns: u64| (work_ns.saturating_mul(1_000) / ns).clamp(1, PERMILLE_MAX);
        if tally.units == 0 || free_ns < passed_ns / BETWEEN_PART {
            return Worth::Flat(permille(
                tally.within_ns.saturating_add(tally.between_ns),
                passed_ns,
            ));
        }
        Worth::OfUnits {
            within_ns: tally.within_ns / tally.units,
            busy_ns: tally.busy_ns / tally.units,
            between_permille: permille(tally.between_ns, free_ns),
        }
    }

    /// In thousandths of the time, if units come at this rate; 0 if it was not measured.
    pub fn permille(&self, pace: Pace) -> u64 {
        match *self {
            Worth::Flat(permille) => permille,
            Worth::OfUnits { within_ns, busy_ns, between_permille } => {
                let ns = pace.ns.max(1);
                let each =
                    |of_unit_ns: u64| of_unit_ns.saturating_mul(pace.units) / (ns / 1_000).max(1);
                let (within, busy) = (each(within_ns), each(busy_ns));
                let free = 1_000u64.saturating_sub(busy);
                // Busier than all of the time it cannot be.
                let within =
                    if busy > 1_000 { within.saturating_mul(1_000) / busy } else { within };
                within.saturating_add(free * between_permille / 1_000).clamp(1, PERMILLE_MAX)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// A second with so many units, each open for 1 ms beside half as much work.
    fn second(units: u64) -> Worth {
        let free_ns = 1_000 * MS - units * MS;
        let tally = Tally {
            within_ns: units * MS / 2,
            between_ns: free_ns * 9 / 10,
            units,
            busy_ns: units * MS,
        };
        Worth::measured(tally, 1_000 * MS)
    }

    fn pace(units: u64) -> Pace {
        let mut pace = Pace::default();
        pace.add(units, 1_000 * MS);
        pace
    }

    #[test]
    fn a_busy_second_and_an_idle_one_tell_the_same() {
        for units in [100, 500, 900] {
            assert_eq!(second(units).permille(pace(500)), 250 + 450);
        }
        assert_eq!(second(500).permille(pace(100)), 50 + 810);
        assert_eq!(second(500).permille(pace(4_000)), 500, "busy all of the time");
        assert_eq!(second(990).permille(pace(100)), 504, "hardly any time between units");
        assert_eq!(second(0).permille(pace(100)), 900);
    }

    #[test]
    fn nothing_overflows() {
        let most = u64::MAX;
        let tally = Tally { within_ns: most, between_ns: most, units: 1, busy_ns: 0 };
        for ns in [0, 1, most] {
            let worth = Worth::measured(tally, ns);
            for units in [0, 1, most] {
                let mut pace = Pace::default();
                pace.add(units, ns);
                pace.add(units, ns);
                assert!((1..=PERMILLE_MAX).contains(&worth.permille(pace)));
            }
        }
        assert_eq!(Worth::of_permille(most).permille(Pace::default()), PERMILLE_MAX);
        assert_eq!(Worth::UNKNOWN.permille(pace(1)), 0);
    }

    #[test]
    fn the_rate_of_units_follows_the_latest() {
        let mut pace = pace(500);
        (0..200).for_each(|_| pace.add(100, 1_000 * MS));
        let worth = second(500).permille(pace);
        assert!((855..=860).contains(&worth), "{worth}");
    }
}
