//! The constants, all of them configuration.

use tally_sdk::config::Config;

/// What is in force. In the configuration times are in the unit that the key ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `target_percent`: 95 % of a service's steps are to take at most this share of its objective.
    pub target_permille: u32,
    /// `good_steps`: steps within that share before the other clients get the next wider width.
    pub good_steps: u32,
    /// `start_sms`: width of the other clients beside a service that was not measured beside them yet.
    pub start_sms: u32,
    /// `limit_us_min`: a shorter launch is limited to the width only once the step has no slack left: a launch on some
    /// of the SMs costs about 5 us more.
    pub limit_ns_min: u64,
    /// `late_percent_max`: if more of a service's latest 200 steps were late, it is served strictly.
    pub late_percent_max: u32,
    /// `whole_late_percent_max`: while a smaller share of a service's latest 200 steps was delayed by it, or late, a
    /// launch between two of its steps runs whole, though a step that begins meanwhile could not bear it, if all that
    /// is under way takes at most twice the objective; 0: never.
    pub whole_late_percent_max: u32,
    /// `wait_ms_max`: a launch that waited for so long runs, on the least width if it can.
    pub wait_ns_max: u64,
    /// `turnaround_us`: what it takes to have launches yield, until that is measured.
    pub turnaround_ns: u64,
    /// `switch_us`: what a launch costs a step besides its own time where contexts take turns.
    pub switch_ns: u64,
    /// `unknown_us`: what a launch that was never measured is taken to cost.
    pub unknown_ns: u64,
    /// `idle_gap_us`: how long a service that is served strictly must have been idle before best effort goes on.
    pub idle_gap_ns: u64,
    /// `window_us`: GPU time of a best-effort client that may be under way at once beside a service.
    pub window_ns: u64,
    /// `turn_us`: GPU time that each of several best-effort clients of the same weight gets in a round.
    pub turn_ns: u64,
    /// `lease_launches`: launches that start unasked while there is nothing to decide.
    pub lease_launches: u32,
    /// How a form is chosen for long launches that may have to yield.
    pub forms: tally_forms::Settings,
}

impl Settings {
    /// Read them, and say what is in force.
    ///
    /// # Errors
    /// What is wrong with the configuration.
    pub fn read(text: &str) -> Result<(Self, String), String> {
        let mut config = Config::parse(text)?;
        let settings = Settings {
            target_permille: config.small("target_percent", 90, 1..=100)? * 10,
            good_steps: config.small("good_steps", 200, 1..=1_000_000)?,
            start_sms: config.small("start_sms", 32, 0..=1_024)?,
            limit_ns_min: config.microseconds("limit_us_min", 60, 0..=1_000_000)?,
            late_percent_max: config.small("late_percent_max", 5, 0..=100)?,
            whole_late_percent_max: config.small("whole_late_percent_max", 2, 0..=100)?,
            wait_ns_max: config.integer("wait_ms_max", 1_000, 1..=3_600_000)? * 1_000_000,
            turnaround_ns: config.microseconds("turnaround_us", 200, 0..=1_000_000)?,
            switch_ns: config.microseconds("switch_us", 400, 0..=1_000_000)?,
            unknown_ns: config.microseconds("unknown_us", 2_000, 1..=10_000_000)?,
            idle_gap_ns: config.microseconds("idle_gap_us", 100, 0..=1_000_000)?,
            window_ns: config.microseconds("window_us", 1_000, 1..=10_000_000)?,
            turn_ns: config.microseconds("turn_us", 20_000, 1..=10_000_000)?,
            lease_launches: config.small("lease_launches", 1_000_000, 0..=u32::MAX)?,
            forms: tally_forms::Settings::take(&mut config, true)?,
        };
        let in_force = config.in_force();
        config.finish()?;
        Ok((settings, in_force))
    }
}
