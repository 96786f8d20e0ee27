//! The constants, all of them configuration.

use std::fmt;
use tally_sdk::Sharing;
use tally_sdk::config::Config;

/// Defaults where clients' kernels run at once.
const CONCURRENT: Shared = Shared { quiet_us: 100, window_us: 1_000, cut: true, turn_us: 0 };
/// Where contexts take turns: the hardware interrupts a best-effort kernel whatever its form and
/// however much is queued behind it, and the core has the GPU linger with high-priority work in
/// place of the quiet time. Holding back and cutting would only cost best effort.
const TIME_SLICED: Shared = Shared { quiet_us: 0, window_us: 20_000, cut: false, turn_us: 20_000 };

/// What depends on how the GPU is shared, if the operator says nothing.
struct Shared {
    quiet_us: u64,
    window_us: u64,
    cut: bool,
    turn_us: u64,
}

/// The operator's words, for either way to share the GPU.
#[derive(Clone, Copy, Debug)]
pub struct Configured {
    quiet_us: Option<u64>,
    window_us: Option<u64>,
    cut: Option<bool>,
    turn_us: Option<u64>,
    rest: Settings,
}

/// What is in force. In the configuration times are in the unit that the
/// key ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `quiet_us`: how long high priority must have been quiet before best effort
    /// starts, or goes on. Tally uses 100 us; 0 where contexts take turns.
    pub quiet_ns: u64,
    /// `window_us`: GPU time of a best-effort client that may be under way at once
    /// while a high-priority client is connected: 1 ms, or 20 where contexts take turns.
    pub window_ns: u64,
    /// `lease_launches`: launches that start unasked while no high-priority client
    /// is connected.
    pub lease_launches: u32,
    /// `cut`: choose a form for each kernel. Without, every kernel runs whole, as where
    /// contexts take turns.
    pub cut: bool,
    /// `turn_us`: GPU time of a best-effort client's turn among several; 0: they launch side by
    /// side. 20 ms where contexts take turns, else 0.
    pub turn_ns: u64,
    /// `turnaround_ns_max`: how long high-priority work should have to wait for a
    /// best-effort kernel at most. Tally's evaluation uses 31.6 us.
    pub turnaround_ns_max: u64,
    /// `slowdown_percent_max`: a form that makes a kernel slower than this is not used.
    pub slowdown_percent_max: u32,
    /// `partition_slowdown_percent_max`: likewise for a partition, the last resort: a
    /// kernel that nothing else shortens is better slow than in the way.
    pub partition_slowdown_percent_max: u32,
    /// `samples`: undisturbed launches after which a form counts as measured. Tally
    /// uses 5.
    pub samples: u32,
    /// `explore_permille`: share of launches that may try a form other than the one
    /// thought best.
    pub explore_permille: u32,
    /// `review_launches`: a kernel's choice is looked at again after so many launches.
    pub review_launches: u32,
    /// `reserve_sms`: SMs that a partitioned kernel leaves to others; 0: no kernel is
    /// partitioned.
    pub reserve_sms: u32,
    /// `partition_turnaround_us`: the wait that running beside a partitioned kernel
    /// counts as.
    pub partition_turnaround_ns: u64,
    /// `graph_part_us`: a CUDA graph that takes longer is cut into parts of about this.
    pub graph_part_ns: u64,
}

impl Configured {
    /// Read them; what is absent has its default.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut config = Config::parse(text)?;
        let us = |config: &mut Config, key, default, from| {
            config.integer(key, default, from..=10_000_000).map(|us| us * 1_000)
        };
        let quiet_us = config.optional_integer("quiet_us", 0..=1_000_000)?;
        let window_us = config.optional_integer("window_us", 1..=10_000_000)?;
        let cut = config.optional_boolean("cut")?;
        let turn_us = config.optional_integer("turn_us", 0..=10_000_000)?;
        let rest = Settings {
            quiet_ns: 0,
            window_ns: 0,
            cut: false,
            turn_ns: 0,
            lease_launches: config.integer("lease_launches", 1_000_000, 0..=u32::MAX.into())?
                as u32,
            turnaround_ns_max: config.integer("turnaround_ns_max", 31_600, 0..=10_000_000_000)?,
            slowdown_percent_max: config.integer("slowdown_percent_max", 50, 0..=900)? as u32,
            partition_slowdown_percent_max: config.integer(
                "partition_slowdown_percent_max",
                200,
                0..=900,
            )? as u32,
            samples: config.integer("samples", 5, 1..=60)? as u32,
            explore_permille: config.integer("explore_permille", 50, 0..=1_000)? as u32,
            review_launches: config.integer("review_launches", 2_000, 16..=1_000_000_000)? as u32,
            reserve_sms: config.integer("reserve_sms", 64, 0..=1_024)? as u32,
            partition_turnaround_ns: us(&mut config, "partition_turnaround_us", 500, 0)?,
            graph_part_ns: us(&mut config, "graph_part_us", 250, 10)?,
        };
        config.finish()?;
        Ok(Configured { quiet_us, window_us, cut, turn_us, rest })
    }

    /// For one way to share the GPU.
    pub fn settings(&self, sharing: Sharing) -> Settings {
        let default = match sharing {
            Sharing::Concurrent => CONCURRENT,
            Sharing::TimeSliced => TIME_SLICED,
        };
        Settings {
            quiet_ns: self.quiet_us.unwrap_or(default.quiet_us) * 1_000,
            window_ns: self.window_us.unwrap_or(default.window_us) * 1_000,
            cut: self.cut.unwrap_or(default.cut),
            turn_ns: self.turn_us.unwrap_or(default.turn_us) * 1_000,
            ..self.rest
        }
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { quiet_ns, window_ns, lease_launches, cut, turnaround_ns_max, .. } = self;
        let Settings { slowdown_percent_max, samples, explore_permille, .. } = self;
        let Settings { review_launches, reserve_sms, .. } = self;
        let Settings { partition_slowdown_percent_max, .. } = self;
        let turn_us = self.turn_ns / 1_000;
        let (quiet_us, window_us) = (quiet_ns / 1_000, window_ns / 1_000);
        let partition_us = self.partition_turnaround_ns / 1_000;
        let graph_us = self.graph_part_ns / 1_000;
        write!(
            f,
            "quiet_us = {quiet_us}, window_us = {window_us}, lease_launches = {lease_launches}, \
             cut = {cut}, turn_us = {turn_us}, turnaround_ns_max = {turnaround_ns_max}, \
             slowdown_percent_max = {slowdown_percent_max}, \
             partition_slowdown_percent_max = {partition_slowdown_percent_max}, \
             samples = {samples}, \
             explore_permille = {explore_permille}, review_launches = {review_launches}, \
             reserve_sms = {reserve_sms}, partition_turnaround_us = {partition_us}, \
             graph_part_us = {graph_us}"
        )
    }
}

#[cfg(test)]
impl Settings {
    /// Where clients' kernels run at once.
    pub fn read(text: &str) -> Result<Self, String> {
        Configured::read(text).map(|configured| configured.settings(Sharing::Concurrent))
    }
}
