//! {{name}}: best-effort launches wait while high-priority work is there, and for a while
//! after it.
#![deny(unsafe_code)] // not `forbid`: `export!` defines symbols

use tally_sdk::config::Config;
use tally_sdk::{Decision, HOLD_NS_MAX, Launch, Policy};

/// What the policy keeps from one call to the next.
struct Mine {
    quiet_ns: u64,
}

impl Policy for Mine {
    /// Called once, with the text of the configuration file; empty if there is none.
    fn init(config: &str) -> Result<Self, String> {
        let mut config = Config::parse(config)?;
        let quiet_us = config.integer("quiet_us", 100, 0..=1_000_000)?;
        config.finish()?; // what nobody asked for is refused
        Ok(Mine { quiet_ns: quiet_us * 1_000 })
    }

    /// Called for every launch of a best-effort client.
    fn decide(&mut self, launch: &Launch) -> Decision {
        if launch.is_high() {
            Decision::Run(0)
        } else if launch.high_busy() {
            // Offered again when that changes.
            Decision::Hold(HOLD_NS_MAX)
        } else if launch.high_quiet_ns < self.quiet_ns {
            Decision::Hold(self.quiet_ns - launch.high_quiet_ns)
        } else {
            Decision::Run(0)
        }
    }
}

tally_sdk::export!(Mine);

#[cfg(test)]
mod tests {
    use super::*;
    use tally_sdk::LaunchFlags;
    use tally_sdk::testing::launch;

    #[test]
    fn best_effort_waits_for_high_priority_and_for_a_while_after() {
        let mut mine = Mine::init("quiet_us = 50").unwrap();
        let decide = |mine: &mut Mine, flags, high_quiet_ns| {
            mine.decide(&Launch { flags, high_quiet_ns, ..launch() })
        };
        assert_eq!(decide(&mut mine, LaunchFlags::HIGH_BUSY, 0), Decision::Hold(HOLD_NS_MAX));
        assert_eq!(decide(&mut mine, LaunchFlags::empty(), 20_000), Decision::Hold(30_000));
        assert_eq!(decide(&mut mine, LaunchFlags::empty(), 50_000), Decision::Run(0));
    }
}
