//! The constants, all of them configuration.

use std::fmt;
use tally_sdk::config::Config;

/// What the operator may set; times in the configuration are microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `quiet_us`: how long high priority must have been quiet before best effort
    /// starts. Tally uses 100 us.
    pub quiet_ns: u64,
    /// `window_us`: GPU time of a best-effort client that may be under way at once
    /// while a high-priority client is connected.
    pub window_ns: u64,
    /// `lease_launches`: launches that start unasked while no high-priority client
    /// is connected.
    pub lease_launches: u32,
}

impl Settings {
    /// Read them; what is absent has its default.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut config = Config::parse(text)?;
        let quiet_us = config.integer("quiet_us", 100, 0..=1_000_000)?;
        let window_us = config.integer("window_us", 1_000, 1..=10_000_000)?;
        let lease = config.integer("lease_launches", 1_000_000, 0..=u32::MAX.into())?;
        config.finish()?;
        Ok(Settings {
            quiet_ns: quiet_us * 1_000,
            window_ns: window_us * 1_000,
            lease_launches: lease as u32,
        })
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { quiet_ns, window_ns, lease_launches } = self;
        let (quiet_us, window_us) = (quiet_ns / 1_000, window_ns / 1_000);
        write!(
            f,
            "quiet_us = {quiet_us}, window_us = {window_us}, lease_launches = {lease_launches}"
        )
    }
}
