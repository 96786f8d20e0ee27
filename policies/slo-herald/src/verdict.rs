//! What the units of a review say, and how much more they may bear.

/// What the units of a review say of the level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All units were early: the longest took so much of the objective, percent, and alone they take so much.
    Raise {
        longest: u64,
        alone: u64,
    },
    Keep,
    /// A little: the service is too busy.
    Ease,
    /// Far less: it is far too busy.
    FarTooBusy,
    /// Too many units were late.
    Late,
}

/// How much more time units may bear that all were early, percent: the longest took so much of the objective, and alone
/// they take so much. What best effort adds to a unit may grow by so much and still fit.
pub fn growth_percent(longest: u64, alone: u64, found_limit: bool) -> u64 {
    let used = longest.saturating_sub(alone) * 100 / 100u64.saturating_sub(alone).max(1);
    match (found_limit, used) {
        (false, ..30) => 200,
        (false, 30..50) => 150,
        (true, 50..) => 105,
        (true, 25..50) => 110,
        _ => 125,
    }
}
