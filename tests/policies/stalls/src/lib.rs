//! A policy that harms programs: what an A/B test must not promote.
//!
//! It needs the capability `high-priority`. Its configuration is one of
//!
//! - `nothing`: no high-priority launch ever starts.
//! - `block`: what is launched in a fifth of each second is held for as long as this instance is
//!   active, which an A/B test's block is.
//! - `slow MS`: every best-effort launch is held for so many milliseconds.

use tally_sdk::{
    Answer, Client, ClientId, Decision, HOLD_UNTIL_CHANGE, Launch, LaunchState, Membership, Policy,
    PriorityClass, host,
};

const SECOND_NS: u64 = 1_000_000_000;

enum How {
    Nothing,
    Block,
    Slow { ns: u64 },
}

struct Stalls {
    how: How,
}

impl Policy for Stalls {
    fn init(config: &str) -> Result<Self, String> {
        let config = config.trim();
        let how = match config.strip_prefix("slow ") {
            Some(ms) => {
                let ms: u64 = ms.parse().map_err(|_| format!("what is {ms:?}?"))?;
                How::Slow { ns: ms.saturating_mul(1_000_000) }
            }
            None if config == "nothing" => How::Nothing,
            None if config == "block" => How::Block,
            None => return Err(format!("{config:?}: expected nothing, block or slow MS")),
        };
        Ok(Stalls { how })
    }

    fn decide(&mut self, launch: &Launch) -> Answer {
        let launched_ns = launch.now_ns - launch.waited_ns.min(launch.now_ns);
        let high = launch.state.contains(LaunchState::HIGH_PRIORITY);
        let left_ns = match self.how {
            How::Nothing if high => HOLD_UNTIL_CHANGE,
            How::Block if high && launched_ns % SECOND_NS < SECOND_NS / 5 => HOLD_UNTIL_CHANGE,
            How::Slow { ns } if !high => ns.saturating_sub(launch.waited_ns),
            _ => 0,
        };
        match left_ns {
            0 => Decision::Run(0),
            ns => Decision::Hold(ns),
        }
        .into()
    }
}

impl Membership for Stalls {
    fn joined(&mut self, _now_ns: u64, client: &Client) {
        if client.class == PriorityClass::High {
            host::set_ungated(client.id, false);
        }
    }

    fn left(&mut self, _now_ns: u64, _client: ClientId) {}
}

tally_sdk::export!(Stalls: membership);

#[cfg(test)]
mod tests {
    use super::*;
    use tally_sdk::testing::launch;

    fn decided(config: &str, state: LaunchState, now_ns: u64, waited_ns: u64) -> Decision {
        let mut policy = Stalls::init(config).unwrap();
        policy.decide(&Launch { state, now_ns, waited_ns, ..launch() }).decision
    }

    #[test]
    fn high_priority_launches_are_held_as_configured() {
        let hold = Decision::Hold(HOLD_UNTIL_CHANGE);
        let high = |config, now_ns, waited_ns| {
            decided(config, LaunchState::HIGH_PRIORITY, now_ns, waited_ns)
        };
        assert_eq!(high("nothing", 700_000_000, 0), hold);
        assert_eq!(high("block", 3_100_000_000, 0), hold);
        assert_eq!(high("block", 3_900_000_000, 800_000_000), hold, "it was launched before");
        assert_eq!(high("block", 3_300_000_000, 0), Decision::Run(0));
        assert_eq!(high("slow 3", 9_000_000, 1_000_000), Decision::Run(0));
        assert!(Stalls::init("").is_err());
    }

    #[test]
    fn best_effort_launches_are_held_by_slow_only() {
        let other = |config, waited_ns| decided(config, LaunchState::empty(), 9_000_000, waited_ns);
        assert_eq!(other("slow 3", 1_000_000), Decision::Hold(2_000_000));
        assert_eq!(other("slow 3", 3_000_000), Decision::Run(0));
        assert_eq!(other("nothing", 0), Decision::Run(0));
    }
}
