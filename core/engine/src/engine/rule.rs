//! The built-in rule: what decides when no policy can.

use crate::policy::{Class, Context, Decision, Event, Fault, Launch, Policy, launch_flags};

/// The built-in rule: high priority first, best-effort after a little silence.
pub fn fallback(launch: &Launch, quiet_ns: u64) -> Decision {
    match launch.class {
        Class::High => Decision::Run(0),
        Class::BestEffort if launch.flags & launch_flags::HIGH_BUSY != 0 => {
            Decision::Hold(u64::MAX)
        }
        Class::BestEffort if launch.high_quiet_ns < quiet_ns => {
            Decision::Hold(quiet_ns - launch.high_quiet_ns)
        }
        Class::BestEffort => Decision::Run(0),
    }
}

/// The built-in rule as a policy: what serves when none could be loaded.
#[derive(Clone, Copy, Debug)]
pub struct BuiltIn {
    /// Silence to wait for.
    pub quiet_ns: u64,
}

impl Policy for BuiltIn {
    fn decide(&mut self, launch: &Launch, _: &mut Context) -> Result<Decision, Fault> {
        Ok(fallback(launch, self.quiet_ns))
    }

    fn on_event(&mut self, _: u64, _: &Event, _: &mut Context) -> Result<(), Fault> {
        Ok(())
    }
}
