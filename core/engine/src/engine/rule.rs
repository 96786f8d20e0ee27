//! The built-in rule: what decides when no policy can.

use crate::policy::{
    Answer, Class, Context, Decision, Fault, HOLD_UNTIL_CHANGE, Launch, Policy, launch_state,
};

/// The built-in rule: high priority first, best-effort after an idle gap.
pub fn built_in_rule(launch: &Launch, idle_ns: u64) -> Decision {
    match launch.class {
        Class::High => Decision::Run(0),
        Class::BestEffort if launch.state & launch_state::HIGH_ACTIVE != 0 => {
            Decision::Hold(HOLD_UNTIL_CHANGE)
        }
        Class::BestEffort if launch.high_idle_ns < idle_ns => {
            Decision::Hold(idle_ns - launch.high_idle_ns)
        }
        Class::BestEffort => Decision::Run(0),
    }
}

/// The built-in rule as a policy: what serves when none could be loaded.
#[derive(Clone, Copy, Debug)]
pub struct BuiltInRule {
    /// Idle gap to wait for.
    pub idle_ns: u64,
}

impl Policy for BuiltInRule {
    fn decide(&mut self, launch: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        Ok(built_in_rule(launch, self.idle_ns).into())
    }
}
