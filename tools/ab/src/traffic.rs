//! How likely independent requests breach a guard by accident.

use crate::guard::SLOW_REQUESTS_MIN;

/// Chance that a Poisson variable of this mean is at least `k`.
fn poisson_at_least(mean: f64, k: u64) -> f64 {
    let (mut term, mut below) = ((-mean).exp(), 0.0);
    for i in 0..k {
        below += term;
        term *= mean / (i + 1) as f64;
    }
    (1.0 - below).clamp(0.0, 1.0)
}

/// What is known of the traffic that a guard looks at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traffic {
    /// High-priority requests a second.
    pub rate: f64,
    /// Share of them over the limit.
    pub over: f64,
    /// The guard's window, s.
    pub window_s: f64,
    /// How long B is looked at, s.
    pub watched_s: f64,
}

impl Traffic {
    /// Chance that `least` or more requests over the limit ever meet in a window, if requests
    /// come independently: each one over the limit may complete such a group.
    fn accident(&self, least: u64) -> f64 {
        let chances = self.rate * self.over * self.watched_s;
        let each = poisson_at_least(self.rate * self.over * self.window_s, least.saturating_sub(1));
        -(-chances * each).exp_m1()
    }

    /// Chance that a policy whose requests are like these breaches a guard on this share.
    pub fn accident_of(&self, share: f64) -> f64 {
        let allowed = ((1.0 - share) * self.rate * self.window_s).floor() as u64;
        self.accident((allowed + 1).max(SLOW_REQUESTS_MIN))
    }
}
