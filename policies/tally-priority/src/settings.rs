//! The constants, all of them configuration. Some defaults depend on how clients share the GPU.
//!
//! Where contexts take turns the hardware interrupts a best-effort kernel whatever its form and however much is
//! queued behind it, and the core has the GPU linger with high-priority work in place of the idle gap. Holding
//! back, slicing and preemption would only cost best effort there.

use tally_sdk::SharingMode;
use tally_sdk::config::Config;

/// What is in force. In the configuration times are in the unit that the
/// key ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `idle_gap_us`: how long high priority must have been idle before best effort
    /// starts, or goes on. Tally uses 100 us; 0 where contexts take turns.
    pub idle_gap_ns: u64,
    /// `window_us`: GPU time of best effort that may be under way at once while a high-priority client is connected:
    /// 1 ms, or 20 of each client where contexts take turns.
    pub window_ns: u64,
    /// `turn_us`: GPU time that each of several best-effort clients of the same weight gets in a round; 0: they do not
    /// wait for each other.
    pub turn_ns: u64,
    /// `lease_launches`: launches that start unasked while no high-priority client
    /// is connected.
    pub lease_launches: u32,
    /// How a form is chosen. Without `forms` every kernel runs whole, as where contexts take turns.
    pub forms: tally_forms::Settings,
}

impl Settings {
    /// Read them, with the defaults of a sharing mode, and say what is in force.
    ///
    /// # Errors
    /// What is wrong with the configuration, whatever the mode.
    pub fn read(text: &str, mode: SharingMode) -> Result<(Self, String), String> {
        let concurrent = mode == SharingMode::Concurrent;
        let by_mode = |usual: u64, in_turns: u64| if concurrent { usual } else { in_turns };
        let mut config = Config::parse(text)?;
        let settings = Settings {
            idle_gap_ns: config.microseconds("idle_gap_us", by_mode(100, 0), 0..=1_000_000)?,
            window_ns: config.microseconds("window_us", by_mode(1_000, 20_000), 1..=10_000_000)?,
            turn_ns: config.microseconds("turn_us", 20_000, 0..=10_000_000)?,
            lease_launches: config.small("lease_launches", 1_000_000, 0..=u32::MAX)?,
            forms: tally_forms::Settings::take(&mut config, concurrent)?,
        };
        let in_force = config.in_force();
        config.finish()?;
        Ok((settings, in_force))
    }
}
