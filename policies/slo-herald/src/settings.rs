//! The constants, all of them configuration.

use crate::service::Busy;
use tally_sdk::config::Config;

/// What is in force. In the configuration times are in the unit that the key ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `idle_gap_us`: how long a service that is served strictly must have been idle before best effort goes on.
    pub idle_gap_ns: u64,
    /// `window_us`: GPU time of best effort that may be under way at once beside a service.
    pub window_ns: u64,
    /// `window_us_max`: the same where it is a small part of what services can spare.
    pub window_ns_max: u64,
    /// `window_us_min`: the same, at least, however little a service can spare.
    pub window_ns_min: u64,
    /// `unknown_us`: what a launch that was never measured is taken to cost.
    pub unknown_ns: u64,
    /// `light_us`: a launch predicted to be over so soon is light.
    pub light_ns: u64,
    /// `light_sms_percent`: a launch whose blocks are no more than this share of the SMs is light.
    pub light_sms_percent: u32,
    /// `busy_percent_max`: how busy best effort may make a service; 100: as busy as it likes.
    pub busy: Busy,
    /// How a form is chosen for what cannot be borne whole.
    pub forms: tally_forms::Settings,
    /// `turn_us`: GPU time that each of several best-effort clients of the same weight gets in a round.
    pub turn_ns: u64,
    /// `lease_launches`: launches that start unasked while no high-priority client is connected.
    pub lease_launches: u32,
}

impl Settings {
    /// Read them, and say what is in force.
    ///
    /// # Errors
    /// What is wrong with the configuration.
    pub fn read(text: &str) -> Result<(Self, String), String> {
        let mut config = Config::parse(text)?;
        let settings = Settings {
            idle_gap_ns: config.microseconds("idle_gap_us", 100, 0..=1_000_000)?,
            window_ns: config.microseconds("window_us", 1_000, 1..=10_000_000)?,
            window_ns_max: config.microseconds("window_us_max", 10_000, 1..=10_000_000)?,
            window_ns_min: config.microseconds("window_us_min", 100, 1..=10_000_000)?,
            unknown_ns: config.microseconds("unknown_us", 2_000, 1..=10_000_000)?,
            light_ns: config.microseconds("light_us", 5, 0..=1_000_000)?,
            light_sms_percent: config.small("light_sms_percent", 12, 0..=100)?,
            busy: Busy::at_most(config.small("busy_percent_max", 80, 1..=100)?),
            forms: tally_forms::Settings::take(&mut config, true)?,
            turn_ns: config.microseconds("turn_us", 20_000, 1..=10_000_000)?,
            lease_launches: config.small("lease_launches", 1_000_000, 0..=u32::MAX)?,
        };
        let in_force = config.in_force();
        config.finish()?;
        Ok((settings, in_force))
    }
}
