//! What the suite found.

use serde::Serialize;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The policy behaves as it should.
    Pass,
    /// Allowed, but probably a mistake.
    Warn,
    /// Nothing that a policy must do.
    Info,
    /// The policy does not behave as it should.
    Fail,
    /// Could not be looked at; says why.
    NotRun,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Name in the table of the crate's documentation.
    pub name: &'static str,
    pub outcome: Outcome,
    /// What was seen, figures included.
    pub detail: String,
    /// What to do about it; empty if it passed.
    pub advice: &'static str,
}

/// Fuel of one kind of call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Fuel {
    pub calls: u64,
    /// Half of them used at most so much.
    pub p50: u64,
    /// 99 % of the calls used at most so much.
    pub p99: u64,
    pub max: u64,
}

impl Fuel {
    /// Figures of calls that used so much fuel each.
    pub fn of(mut spent: Vec<u64>) -> Self {
        spent.sort_unstable();
        let rank = |percent: usize| {
            let at = (spent.len() * percent).div_ceil(100).max(1) - 1;
            spent.get(at).copied().unwrap_or(0)
        };
        Fuel { calls: spent.len() as u64, p50: rank(50), p99: rank(99), max: rank(100) }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Version of this structure's JSON.
    pub schema: u32,
    /// What everything random was made from.
    pub seed: u64,
    /// Every check, in order.
    pub checks: Vec<Check>,
    /// Fuel that a call may use.
    pub call_fuel_max: u64,
    pub decide_fuel: Fuel,
    pub event_fuel: Fuel,
    /// Linear memory after the longest phase, bytes.
    pub memory_bytes: usize,
}

impl Report {
    /// No check failed, and all that apply ran. Warnings do not count.
    pub fn passed(&self) -> bool {
        self.checks.iter().all(|c| !matches!(c.outcome, Outcome::Fail | Outcome::NotRun))
    }

    /// The names of the checks with this outcome.
    pub fn names(&self, outcome: Outcome) -> Vec<&'static str> {
        self.checks.iter().filter(|c| c.outcome == outcome).map(|c| c.name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
        assert_eq!(
            Fuel::of((1..=200).collect()),
            Fuel { calls: 200, p50: 100, p99: 198, max: 200 }
        );
        assert_eq!(Fuel::of(vec![7]), Fuel { calls: 1, p50: 7, p99: 7, max: 7 });
        assert_eq!(Fuel::of(Vec::new()), Fuel::default());
    }
}
