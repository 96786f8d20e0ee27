//! When a launch may start. A pure function of the launch and the constants.

use crate::settings::Settings;
use tally_sdk::{HOLD_NS_MAX, Launch};

/// When a launch may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Now, and so may those after it: there is no high-priority client.
    Alone,
    /// Now.
    Now,
    /// After so many nanoseconds, unless something changes before.
    Wait(u64),
}

/// Apply the rule.
pub fn admit(launch: &Launch, settings: &Settings) -> Admission {
    if launch.is_high() {
        Admission::Now
    } else if launch.high_clients == 0 {
        Admission::Alone
    } else if launch.high_busy() {
        // Offered again when it ends; no need to ask in between.
        Admission::Wait(HOLD_NS_MAX)
    } else {
        // Between the kernels of one request high priority is idle for some tens
        // of microseconds. Started there, a kernel would be in the way of the next.
        match settings.quiet_ns.saturating_sub(launch.high_quiet_ns) {
            0 => Admission::Now,
            rest => Admission::Wait(rest),
        }
    }
}
