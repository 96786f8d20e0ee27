//! The constants, all of them configuration of the policy that uses this crate.

use tally_sdk::config::Config;

/// What is in force. In the configuration times are in the unit that the key ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `forms`: choose a form for each kernel. Without, every kernel runs whole.
    pub forms: bool,
    /// `turnaround_ns_max`: how long high-priority work should have to wait for a best-effort kernel at most. Tally's
    /// evaluation uses 31.6 us.
    pub turnaround_ns_max: u64,
    /// `slowdown_percent_max`: a form that makes a kernel slower than this is not used.
    pub slowdown_percent_max: u32,
    /// `sm_limit_slowdown_percent_max`: likewise for an SM-limited launch, the last resort: a kernel that nothing else
    /// shortens is better slow than in the way.
    pub sm_limit_slowdown_percent_max: u32,
    /// `samples`: undisturbed launches after which a form counts as measured. Tally uses 5.
    pub samples: u32,
    /// `explore_permille`: share of launches that may try a form other than the one thought best.
    pub explore_permille: u32,
    /// `review_launches`: a kernel's choice is looked at again after so many launches.
    pub review_launches: u32,
    /// `reserve_sms`: SMs that an SM-limited kernel leaves to others; 0: no kernel is limited.
    pub reserve_sms: u32,
    /// `sm_limit_turnaround_us`: the wait that running beside an SM-limited kernel counts as.
    pub sm_limit_turnaround_ns: u64,
    /// `graph_part_us`: a CUDA graph that takes longer runs in parts of about this.
    pub graph_part_ns: u64,
}

impl Settings {
    /// Take them out of a configuration; `forms`: what that setting is by default.
    ///
    /// # Errors
    /// What is wrong with one of them.
    pub fn take(config: &mut Config, forms: bool) -> Result<Self, String> {
        Ok(Settings {
            forms: config.boolean("forms", forms)?,
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
        })
    }
}
