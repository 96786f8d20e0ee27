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
    /// `window_us`: GPU time of a best-effort client that may be under way at once
    /// while a high-priority client is connected: 1 ms, or 20 where contexts take turns.
    pub window_ns: u64,
    /// `forms`: choose a form for each kernel. Without, every kernel runs whole, as where
    /// contexts take turns.
    pub forms: bool,
    /// `turn_us`: GPU time of a best-effort client's turn among several; 0: they launch side by
    /// side. 20 ms where contexts take turns, else 0.
    pub turn_ns: u64,
    /// `lease_launches`: launches that start unasked while no high-priority client
    /// is connected.
    pub lease_launches: u32,
    /// `turnaround_ns_max`: how long high-priority work should have to wait for a
    /// best-effort kernel at most. Tally's evaluation uses 31.6 us.
    pub turnaround_ns_max: u64,
    /// `slowdown_percent_max`: a form that makes a kernel slower than this is not used.
    pub slowdown_percent_max: u32,
    /// `sm_limit_slowdown_percent_max`: likewise for an SM-limited launch, the last resort: a
    /// kernel that nothing else shortens is better slow than in the way.
    pub sm_limit_slowdown_percent_max: u32,
    /// `samples`: undisturbed launches after which a form counts as measured. Tally
    /// uses 5.
    pub samples: u32,
    /// `explore_permille`: share of launches that may try a form other than the one
    /// thought best.
    pub explore_permille: u32,
    /// `review_launches`: a kernel's choice is looked at again after so many launches.
    pub review_launches: u32,
    /// `reserve_sms`: SMs that an SM-limited kernel leaves to others; 0: no kernel is
    /// limited.
    pub reserve_sms: u32,
    /// `sm_limit_turnaround_us`: the wait that running beside an SM-limited kernel
    /// counts as.
    pub sm_limit_turnaround_ns: u64,
    /// `graph_part_us`: a CUDA graph that takes longer runs in parts of about this.
    pub graph_part_ns: u64,
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
            forms: config.boolean("forms", concurrent)?,
            turn_ns: config.microseconds("turn_us", by_mode(0, 20_000), 0..=10_000_000)?,
            lease_launches: config.small("lease_launches", 1_000_000, 0..=u32::MAX)?,
            turnaround_ns_max: config.integer("turnaround_ns_max", 31_600, 0..=10_000_000_000)?,
            slowdown_percent_max: config.small("slowdown_percent_max", 50, 0..=900)?,
            sm_limit_slowdown_percent_max: config.small(
                "sm_limit_slowdown_percent_max",
                200,
                0..=900,
            )?,
            samples: config.small("samples", 5, 1..=60)?,
            explore_permille: config.small("explore_permille", 50, 0..=1_000)?,
            review_launches: config.small("review_launches", 2_000, 16..=1_000_000_000)?,
            reserve_sms: config.small("reserve_sms", 64, 0..=1_024)?,
            sm_limit_turnaround_ns: config.microseconds(
                "sm_limit_turnaround_us",
                500,
                0..=10_000_000,
            )?,
            graph_part_ns: config.microseconds("graph_part_us", 250, 10..=10_000_000)?,
        };
        let in_force = config.in_force();
        config.finish()?;
        Ok((settings, in_force))
    }

    /// Where clients' kernels run at once.
    #[cfg(test)]
    pub fn concurrent(text: &str) -> Result<Self, String> {
        Self::read(text, SharingMode::Concurrent).map(|(settings, _)| settings)
    }
}
