//! {{name}}: best-effort launches wait while high-priority work is there, and for an idle gap
//! after it.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

use tally_sdk::config::Config;
use tally_sdk::{Answer, Decision, HOLD_UNTIL_CHANGE, Launch, Policy};

/// What the policy keeps from one call to the next.
struct Mine {
    idle_gap_ns: u64,
}

impl Policy for Mine {
    /// Called once, with the text of the configuration file; empty if there is none.
    fn init(config: &str) -> Result<Self, String> {
        let mut config = Config::parse(config)?;
        let idle_gap_us = config.integer("idle_gap_us", 100, 0..=1_000_000)?;
        config.finish()?; // what nobody asked for is refused
        Ok(Mine { idle_gap_ns: idle_gap_us * 1_000 })
    }

    /// Called for each launch of a best-effort client that no lease covers.
    fn decide(&mut self, launch: &Launch) -> Answer {
        if launch.is_high() {
            Decision::Run(0)
        } else if launch.high_active() {
            // Offered again when that changes.
            Decision::Hold(HOLD_UNTIL_CHANGE)
        } else if launch.high_idle_ns < self.idle_gap_ns {
            Decision::Hold(self.idle_gap_ns - launch.high_idle_ns)
        } else {
            Decision::Run(0)
        }
        .into()
    }
}

tally_sdk::export!(Mine);

#[cfg(test)]
mod tests {
    use super::*;
    use tally_sdk::LaunchState;
    use tally_sdk::testing::launch;

    #[test]
    fn best_effort_waits_for_high_priority_and_for_a_while_after() {
        let mut mine = Mine::init("idle_gap_us = 50").unwrap();
        let decide = |mine: &mut Mine, state, high_idle_ns| {
            mine.decide(&Launch { state, high_idle_ns, ..launch() })
        };
        let active = LaunchState::HIGH_ACTIVE;
        assert_eq!(decide(&mut mine, active, 0), Decision::Hold(HOLD_UNTIL_CHANGE));
        assert_eq!(decide(&mut mine, LaunchState::empty(), 20_000), Decision::Hold(30_000));
        assert_eq!(decide(&mut mine, LaunchState::empty(), 50_000), Decision::Run(0));
    }
}
