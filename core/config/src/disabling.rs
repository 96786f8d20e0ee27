//! `[policy.disabling]`: what becomes of a policy that fails.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tally_contract::limits::STALL_NS;

/// What takes the place of a policy that was disabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restore {
    /// The last policy before it that differs from it and was not disabled.
    LastGood,
    /// The built-in rule, until somebody loads a policy.
    BuiltIn,
}

/// `[policy.disabling]`. How many faults disable a policy, and when they are
/// forgotten, is `faults_max` and `faults_forgotten_after_s` of `[policy.limits]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Disabling {
    /// What takes the place of a policy that was disabled.
    pub restore: Restore,
    /// Wait before another policy is put in place if the replacement was disabled, too; doubled each
    /// time.
    #[schemars(range(min = 1, max = 3_600_000))]
    pub back_off_initial_ms: u64,
    /// Longest wait before another policy is put in place.
    #[schemars(range(min = 1, max = 86_400_000))]
    pub back_off_max_ms: u64,
    /// A policy that holds launches for this time while the GPU has nothing to do has a fault. 0: no
    /// fault.
    #[schemars(range(max = 3_600_000))]
    pub stall_ms: u64,
}

impl Default for Disabling {
    fn default() -> Self {
        Disabling {
            restore: Restore::LastGood,
            back_off_initial_ms: 1_000,
            back_off_max_ms: 60_000,
            stall_ms: STALL_NS / 1_000_000,
        }
    }
}

impl Disabling {
    /// `stall_ms` for the engine: `u64::MAX` if there is no limit.
    pub fn stall_ns(&self) -> u64 {
        if self.stall_ms == 0 { u64::MAX } else { self.stall_ms * 1_000_000 }
    }

    /// How long to wait after a policy was disabled for the `row`-th time in a row (1 is the first) before
    /// another policy is put active; `again`: before the same is.
    pub fn delay(&self, row: u32, again: bool) -> Duration {
        let doublings = row.saturating_sub(if again { 1 } else { 2 });
        if row <= 1 && !again {
            return Duration::ZERO;
        }
        let ms = self.back_off_initial_ms.saturating_mul(1_u64 << doublings.min(32));
        Duration::from_millis(ms.min(self.back_off_max_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_replaced_at_once_and_later_ones_ever_later() {
        let disabling = Disabling::default();
        let ms = |again| {
            [1, 2, 3, 4, 7, 8, 9, u32::MAX].map(|row| disabling.delay(row, again).as_millis())
        };
        assert_eq!(ms(false), [0, 1_000, 2_000, 4_000, 32_000, 60_000, 60_000, 60_000]);
        assert_eq!(ms(true), [1_000, 2_000, 4_000, 8_000, 60_000, 60_000, 60_000, 60_000]);
    }

    #[test]
    fn no_stall_is_no_bound() {
        assert_eq!(Disabling { stall_ms: 0, ..Disabling::default() }.stall_ns(), u64::MAX);
        assert_eq!(Disabling::default().stall_ns(), 1_000_000_000);
    }
}
