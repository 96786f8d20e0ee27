//! The constants, all of them configuration.

use std::fmt;
use tally_sdk::SharingMode;
use tally_sdk::config::Config;

/// Defaults where clients' kernels run at once.
const CONCURRENT: Defaults =
    Defaults { idle_gap_us: 100, window_us: 1_000, forms: true, turn_us: 0 };
/// Where contexts take turns: the hardware interrupts a best-effort kernel whatever its form and
/// however much is queued behind it, and the core has the GPU linger with high-priority work in
/// place of the idle gap. Holding back, slicing and preemption would only cost best effort.
const TIME_SLICED: Defaults =
    Defaults { idle_gap_us: 0, window_us: 20_000, forms: false, turn_us: 20_000 };

/// What depends on the sharing mode, if the operator says nothing.
struct Defaults {
    idle_gap_us: u64,
    window_us: u64,
    forms: bool,
    turn_us: u64,
}

/// What the operator set, for either sharing mode.
#[derive(Clone, Copy, Debug)]
pub struct Configured {
    idle_gap_us: Option<u64>,
    window_us: Option<u64>,
    forms: Option<bool>,
    turn_us: Option<u64>,
    rest: Settings,
}

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
    /// `lease_launches`: launches that start unasked while no high-priority client
    /// is connected.
    pub lease_launches: u32,
    /// `forms`: choose a form for each kernel. Without, every kernel runs whole, as where
    /// contexts take turns.
    pub forms: bool,
    /// `turn_us`: GPU time of a best-effort client's turn among several; 0: they launch side by
    /// side. 20 ms where contexts take turns, else 0.
    pub turn_ns: u64,
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

impl Configured {
    /// Read them; what is absent has its default.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut config = Config::parse(text)?;
        let us = |config: &mut Config, key, default, from| {
            config.integer(key, default, from..=10_000_000).map(|us| us * 1_000)
        };
        let idle_gap_us = config.optional_integer("idle_gap_us", 0..=1_000_000)?;
        let window_us = config.optional_integer("window_us", 1..=10_000_000)?;
        let forms = config.optional_boolean("forms")?;
        let turn_us = config.optional_integer("turn_us", 0..=10_000_000)?;
        let rest = Settings {
            idle_gap_ns: 0,
            window_ns: 0,
            forms: false,
            turn_ns: 0,
            lease_launches: config.integer("lease_launches", 1_000_000, 0..=u32::MAX.into())?
                as u32,
            turnaround_ns_max: config.integer("turnaround_ns_max", 31_600, 0..=10_000_000_000)?,
            slowdown_percent_max: config.integer("slowdown_percent_max", 50, 0..=900)? as u32,
            sm_limit_slowdown_percent_max: config.integer(
                "sm_limit_slowdown_percent_max",
                200,
                0..=900,
            )? as u32,
            samples: config.integer("samples", 5, 1..=60)? as u32,
            explore_permille: config.integer("explore_permille", 50, 0..=1_000)? as u32,
            review_launches: config.integer("review_launches", 2_000, 16..=1_000_000_000)? as u32,
            reserve_sms: config.integer("reserve_sms", 64, 0..=1_024)? as u32,
            sm_limit_turnaround_ns: us(&mut config, "sm_limit_turnaround_us", 500, 0)?,
            graph_part_ns: us(&mut config, "graph_part_us", 250, 10)?,
        };
        config.finish()?;
        Ok(Configured { idle_gap_us, window_us, forms, turn_us, rest })
    }

    /// For one sharing mode.
    pub fn settings(&self, mode: SharingMode) -> Settings {
        let default = match mode {
            SharingMode::Concurrent => CONCURRENT,
            SharingMode::TimeSliced => TIME_SLICED,
        };
        Settings {
            idle_gap_ns: self.idle_gap_us.unwrap_or(default.idle_gap_us) * 1_000,
            window_ns: self.window_us.unwrap_or(default.window_us) * 1_000,
            forms: self.forms.unwrap_or(default.forms),
            turn_ns: self.turn_us.unwrap_or(default.turn_us) * 1_000,
            ..self.rest
        }
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { idle_gap_ns, window_ns, lease_launches, forms, turnaround_ns_max, .. } =
            self;
        let Settings { slowdown_percent_max, samples, explore_permille, .. } = self;
        let Settings { review_launches, reserve_sms, .. } = self;
        let Settings { sm_limit_slowdown_percent_max, .. } = self;
        let turn_us = self.turn_ns / 1_000;
        let (idle_gap_us, window_us) = (idle_gap_ns / 1_000, window_ns / 1_000);
        let sm_limit_us = self.sm_limit_turnaround_ns / 1_000;
        let graph_us = self.graph_part_ns / 1_000;
        write!(
            f,
            "idle_gap_us = {idle_gap_us}, window_us = {window_us}, lease_launches = {lease_launches}, \
             forms = {forms}, turn_us = {turn_us}, turnaround_ns_max = {turnaround_ns_max}, \
             slowdown_percent_max = {slowdown_percent_max}, \
             sm_limit_slowdown_percent_max = {sm_limit_slowdown_percent_max}, \
             samples = {samples}, \
             explore_permille = {explore_permille}, review_launches = {review_launches}, \
             reserve_sms = {reserve_sms}, sm_limit_turnaround_us = {sm_limit_us}, \
             graph_part_us = {graph_us}"
        )
    }
}

#[cfg(test)]
impl Settings {
    /// Where clients' kernels run at once.
    pub fn read(text: &str) -> Result<Self, String> {
        Configured::read(text).map(|configured| configured.settings(SharingMode::Concurrent))
    }
}
