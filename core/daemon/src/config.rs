//! The core's configuration: every setting, its default and its bounds.
//!
//! `tally-core.example.toml` beside this crate shows them all; a test keeps it
//! equal to the defaults.

mod ab;
mod admission;
mod log;
mod mps;
mod strikes;

pub use ab::Ab;
pub use admission::{Admin, Admission, HighPriority, Socket, see_that_apart};
pub use log::Log;
pub use mps::Mps;
pub use strikes::{Restore, Strikes};

use crate::error::CoreError;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use tally_wasm_host::{Capabilities, Limits, TrustSettings};

/// Everything that can be set.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where the core listens.
    pub socket: Socket,
    /// Who may register as what.
    pub admission: Admission,
    /// Settings of the high-priority class
    pub high_priority: HighPriority,
    /// Who may administer the core
    pub admin: Admin,
    /// The policy and its limits.
    pub policy: Policy,
    /// The scheduler's defaults.
    pub engine: Engine,
    /// The dispatch thread.
    pub dispatch: Dispatch,
    /// What clients are told.
    pub client: Client,
    /// How clients share the GPU.
    pub sharing: SharingMode,
    /// Transformed forms of kernels.
    pub rewrite: Rewrite,
    /// Launches on some of the SMs.
    pub width: Width,
    /// What is kept of kernels between runs.
    pub profiles: Profiles,
    /// The decision log.
    pub log: Log,
    /// Settings of A/B tests
    pub ab: Ab,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// The component; none: `tally-priority.wasm` of the installation.
    pub file: Option<PathBuf>,
    /// Configuration file that is passed to the policy
    pub config_file: Option<PathBuf>,
    /// End with exit code 3 if it cannot be loaded at start. `false` starts with
    /// the built-in rule, which `tallyctl status` shows.
    pub required: bool,
    /// Load it again when its file changes.
    pub watch: bool,
    /// How long a changed file must stay as it is before it is loaded, ms.
    pub debounce_ms: u64,
    /// What it may do and see beyond scheduling best effort.
    pub capabilities: Capabilities,
    /// Which policies may be loaded.
    pub trust: TrustSettings,
    /// What it may use.
    pub limits: Limits,
    /// What becomes of it if it fails.
    pub strikes: Strikes,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            file: None,
            config_file: None,
            required: true,
            watch: true,
            debounce_ms: 200,
            capabilities: Capabilities::NONE,
            trust: TrustSettings::default(),
            limits: Limits::default(),
            strikes: Strikes::default(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Engine {
    /// Predicted GPU time that a client may have unfinished until its policy
    /// says otherwise, us.
    pub window_us: u64,
    /// Longest hold; longer ones are cut to it, ms.
    pub hold_ms_max: u64,
    /// Silence after high-priority work that the built-in rule waits for, us.
    pub fallback_idle_gap_us: u64,
    /// A full window in which nothing ends for so long lets another launch in, then two, four and up to 256, ms.
    pub window_stall_ms: u64,
    /// A high-priority client that is busy for so long without launching anything counts as idle until
    /// it launches again, ms; 0: never.
    pub high_stall_ms: u64,
}

impl Default for Engine {
    fn default() -> Self {
        Engine {
            window_us: 1_000,
            hold_ms_max: 1_000,
            fallback_idle_gap_us: 100,
            window_stall_ms: 500,
            high_stall_ms: 5_000,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Dispatch {
    /// Spin so long after the last activity before sleeping, us. None: 2000 with
    /// at least 8 CPUs, 50 with 4, else 0.
    pub spin_us: Option<u64>,
    /// Run on this CPU only.
    pub pin_cpu: Option<u32>,
    /// While it sleeps and a launch waits for one in flight: look at completions
    /// this often at first, us (rarer the longer nothing ends).
    pub completion_poll_us: u64,
    /// A high-priority client that has been busy for so long without launching
    /// is asked through its probe whether it still is, us.
    pub probe_after_us: u64,
}

impl Default for Dispatch {
    fn default() -> Self {
        Dispatch { spin_us: None, pin_cpu: None, completion_poll_us: 50, probe_after_us: 1_000 }
    }
}

impl Dispatch {
    /// The spin in force, us.
    pub fn spin_us(&self) -> u64 {
        self.spin_us.unwrap_or(by_cpus(2_000, 50))
    }
}

/// What a client does while there is no core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fail {
    /// Run launches unscheduled.
    Open,
    /// Hold them until there is one.
    Hold,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Client {
    /// How long a thread that waits for a decision spins before it sleeps, us.
    /// None: 1000 with at least 8 CPUs, 20 with 4, else 0.
    pub spin_us: Option<u64>,
    /// What clients do when the core goes away.
    pub fail: Fail,
}

impl Default for Client {
    fn default() -> Self {
        Client { spin_us: None, fail: Fail::Open }
    }
}

impl Client {
    /// The spin in force, us.
    pub fn spin_us(&self) -> u64 {
        self.spin_us.unwrap_or(by_cpus(1_000, 20))
    }
}

/// Spinning bridges the gaps between requests, which a sleep and a wake-up would
/// eat from best-effort work; on a small machine it takes the CPU from who is
/// waited for.
fn by_cpus(from_8: u64, from_4: u64) -> u64 {
    match std::thread::available_parallelism().map_or(1, std::num::NonZero::get) {
        8.. => from_8,
        4.. => from_4,
        _ => 0,
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rewrite {
    /// Give best-effort clients' kernels transformed forms where a policy asks for them.
    pub enabled: bool,
    /// Also those of NVIDIA's closed libraries (cuBLAS, cuDNN, ...). Their licence
    /// forbids modifying them: read docs/operate.md before switching it on.
    pub vendor_libraries: bool,
    /// A launch that was asked to yield and has not after so long is helped to its
    /// end and never transformed again, ms.
    pub rescue_ms: u32,
    /// Each user's programs keep transformed forms on disk for their next start, up to so many MiB. 0: none.
    pub cache_mib: u32,
}

impl Default for Rewrite {
    fn default() -> Self {
        Rewrite { enabled: true, vendor_libraries: false, rescue_ms: 50, cache_mib: 256 }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Width {
    /// Make a green context in each best-effort client that keeps so many SMs free,
    /// with sharing mode `mps`. Rounded up to what the GPU can split off.
    pub reserve_sms: Vec<u32>,
}

impl Default for Width {
    fn default() -> Self {
        Width { reserve_sms: vec![16, 32, 64] }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Profiles {
    /// Keep measured times of kernels, and which must not be transformed, for the next run.
    pub enabled: bool,
    /// Where; none: see [`Profiles::directory`].
    pub directory: Option<PathBuf>,
    /// Write them this often if something changed, s. Also at an orderly end.
    pub save_every_s: u64,
    /// Kernels (name, image, grid, block) kept; those with the least measured GPU time
    /// go first.
    pub kernels_max: usize,
}

impl Default for Profiles {
    fn default() -> Self {
        Profiles { enabled: true, directory: None, save_every_s: 60, kernels_max: 50_000 }
    }
}

impl Profiles {
    /// The folder in force: `$XDG_STATE_HOME/tally`, else `/var/lib/tally` for root, else
    /// `~/.local/state/tally`. `None` if there is no home.
    pub fn directory(&self) -> Option<PathBuf> {
        let folder = |name| std::env::var_os(name).filter(|d| !d.is_empty()).map(PathBuf::from);
        if self.directory.is_some() {
            return self.directory.clone();
        }
        if let Some(state) = folder("XDG_STATE_HOME") {
            return Some(state.join("tally"));
        }
        if rustix::process::geteuid().is_root() {
            return Some("/var/lib/tally".into());
        }
        folder("HOME").map(|home| home.join(".local/state/tally"))
    }
}

/// How clients share the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum SharingChoice {
    /// By what is there.
    Auto,
    /// All at once, through NVIDIA MPS.
    Mps,
    /// In turns, with hardware time slices set per client.
    Timeslice,
    /// Programs share the GPU as the system is set up
    None,
}

impl SharingChoice {
    /// As written on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            SharingChoice::Auto => "auto",
            SharingChoice::Mps => "mps",
            SharingChoice::Timeslice => "timeslice",
            SharingChoice::None => "none",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SharingMode {
    pub mode: SharingChoice,
    /// End with exit code 1 instead of falling back when `mps` cannot be had.
    pub required: bool,
    pub timeslice: Timeslice,
    pub mps: Mps,
}

impl Default for SharingMode {
    fn default() -> Self {
        SharingMode {
            mode: SharingChoice::Auto,
            required: false,
            timeslice: Timeslice::default(),
            mps: Mps::default(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeslice {
    /// Hardware time slice of a best-effort client that is the only one, us; 0 leaves the
    /// driver's.
    pub best_effort_us: u64,
    /// Of each while several are connected, us, at least `best_effort_us`; 0 leaves the driver's.
    /// Those that are shorter than it takes to change between two contexts would let none of them
    /// make any progress.
    pub best_effort_shared_us: u64,
    /// Of high-priority clients, us.
    pub high_us: u64,
    /// How long the GPU stays with a high-priority client whose work is done, us, so that a
    /// request which follows at once finds it there; 0: not at all.
    pub linger_us: u32,
}

impl Timeslice {
    /// Of each of several best-effort clients: never shorter than that of one.
    pub fn shared_us(&self) -> u64 {
        match self.best_effort_shared_us {
            0 => 0,
            us => us.max(self.best_effort_us),
        }
    }
}

impl Default for Timeslice {
    fn default() -> Self {
        Timeslice {
            best_effort_us: 10,
            best_effort_shared_us: 350,
            high_us: 100_000,
            linger_us: 100,
        }
    }
}

impl Config {
    /// Read a file.
    ///
    /// # Errors
    /// If it cannot be read or understood.
    pub fn read(path: &Path) -> Result<Self, CoreError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| CoreError::ConfigRead { path: path.into(), source })?;
        let config: Config = toml::from_str(&text).map_err(|error| CoreError::ConfigParse {
            path: path.into(),
            message: error.to_string(),
        })?;
        config.check()?;
        Ok(config)
    }

    /// The configuration in force as TOML: defaults, and what they depend on this machine for, filled in.
    ///
    /// # Errors
    /// If a socket's place is not known.
    pub fn effective(&self) -> Result<String, CoreError> {
        let mut all = self.clone();
        all.socket.path = Some(self.socket.path());
        all.admin.socket = Some(self.admin_socket()?);
        all.dispatch.spin_us = Some(self.dispatch.spin_us());
        all.client.spin_us = Some(self.client.spin_us());
        all.profiles.directory = self.profiles.directory();
        let source = crate::policy_slot::configured_source(&self.policy);
        all.policy.file = source.ok().map(|source| source.file);
        toml::to_string(&all).map_err(|error| CoreError::ConfigValue(error.to_string()))
    }

    /// What a client of a class may do to its kernels.
    pub fn rewrite_settings(
        &self,
        class: tally_engine::policy::Class,
    ) -> tally_ipc::wire::RewriteSettings {
        if class == tally_engine::policy::Class::High {
            return Default::default();
        }
        tally_ipc::wire::RewriteSettings {
            enabled: self.rewrite.enabled,
            vendor_libraries: self.rewrite.vendor_libraries,
            rescue_ms: self.rewrite.rescue_ms,
            cache_mib: self.rewrite.cache_mib,
            reserve_sms: self.width.reserve_sms.clone(),
        }
    }

    /// Check what the types cannot.
    ///
    /// # Errors
    /// The setting that makes no sense.
    pub fn check(&self) -> Result<(), CoreError> {
        self.socket.mode_bits()?;
        self.admin.mode_bits()?;
        let within = |name: &str, value: u64, low: u64, high: u64| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(CoreError::ConfigValue(format!("{name} is {value}: expected {low} to {high}")))
        };
        within("admission.clients_max", self.admission.clients_max as u64, 1, 4_096)?;
        let places = &self.admission;
        within("admission.user_clients_max", places.user_clients_max as u64, 1, 4_096)?;
        within("admission.reserved_clients", places.reserved_clients as u64, 0, 4_096)?;
        within("admission.user_joins_per_s", places.user_joins_per_s.into(), 1, 10_000)?;
        let most = tally_engine::profile::KERNELS_MAX as u64;
        within("admission.user_kernels_max", places.user_kernels_max.into(), 1, most)?;
        within("admission.hello_timeout_ms", self.admission.hello_timeout_ms, 10, 60_000)?;
        within("policy.debounce_ms", self.policy.debounce_ms, 1, 60_000)?;
        let strikes = &self.policy.strikes;
        within("policy.strikes.back_off_initial_ms", strikes.back_off_initial_ms, 1, 3_600_000)?;
        within("policy.strikes.back_off_max_ms", strikes.back_off_max_ms, 1, 86_400_000)?;
        within("policy.strikes.stall_ms", strikes.stall_ms, 0, 3_600_000)?;
        within("engine.window_us", self.engine.window_us, 1, 60_000_000)?;
        within("engine.hold_ms_max", self.engine.hold_ms_max, 1, 60_000)?;
        within("engine.fallback_idle_gap_us", self.engine.fallback_idle_gap_us, 0, 1_000_000)?;
        within("engine.window_stall_ms", self.engine.window_stall_ms, 1, 3_600_000)?;
        within("engine.high_stall_ms", self.engine.high_stall_ms, 0, 3_600_000)?;
        within("dispatch.spin_us", self.dispatch.spin_us(), 0, 1_000_000)?;
        within("dispatch.completion_poll_us", self.dispatch.completion_poll_us, 5, 10_000)?;
        within("dispatch.probe_after_us", self.dispatch.probe_after_us, 50, 1_000_000)?;
        within("client.spin_us", self.client.spin_us(), 0, 1_000_000)?;
        let slices = &self.sharing.timeslice;
        within("sharing.timeslice.best_effort_us", slices.best_effort_us, 0, 1_000_000)?;
        within(
            "sharing.timeslice.best_effort_shared_us",
            slices.best_effort_shared_us,
            0,
            1_000_000,
        )?;
        within("sharing.timeslice.high_us", slices.high_us, 0, 1_000_000)?;
        let most = tally_ipc::wire::LINGER_US_MAX.into();
        within("sharing.timeslice.linger_us", slices.linger_us.into(), 0, most)?;
        let most = mps::REFRESH_MS_MAX;
        within("sharing.mps.refresh_ms", self.sharing.mps.refresh_ms, 0, most)?;
        within("rewrite.rescue_ms", self.rewrite.rescue_ms.into(), 1, 10_000)?;
        within("rewrite.cache_mib", self.rewrite.cache_mib.into(), 0, 65_536)?;
        within("profiles.save_every_s", self.profiles.save_every_s, 1, 86_400)?;
        let most = tally_engine::profile::KERNELS_MAX as u64;
        within("profiles.kernels_max", self.profiles.kernels_max as u64, 1, most)?;
        within("log.ring_kib", self.log.ring_kib, 4, 1 << 20)?;
        within("log.bytes_max", self.log.bytes_max, crate::record::file::BYTES_MIN, u64::MAX)?;
        let most = tally_ipc::wire::WIDTHS_MAX as u64;
        within("the length of width.reserve_sms", self.width.reserve_sms.len() as u64, 0, most)?;
        for sms in &self.width.reserve_sms {
            within("width.reserve_sms", (*sms).into(), 1, 1_024)?;
        }
        if let Some(cpu) = self.dispatch.pin_cpu {
            within("dispatch.pin_cpu", cpu.into(), 0, rustix::thread::CpuSet::MAX_CPU as u64 - 1)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../tally-core.example.toml");

    #[test]
    fn the_example_equals_the_defaults() {
        let example: Config = toml::from_str(EXAMPLE).unwrap();
        assert_eq!(format!("{example:?}"), format!("{:?}", Config::default()));
        example.check().unwrap();
    }

    #[test]
    fn the_configuration_in_force_is_printed_as_one_that_comes_to_the_same() {
        let config = "[socket]\npath = \"/x/clients/s\"\n[policy]\ncapabilities = [\"identity\"]\n\
                      [engine]\nhold_ms_max = 5000\n[policy.limits]\npreset = \"interpreted\"\n";
        let config: Config = toml::from_str(config).unwrap();
        let text = config.effective().unwrap();
        for line in ["hold_ms_max = 5000", "socket = \"/x/admin/s\"", "window_us = 1000", "spin_us"]
        {
            assert!(text.contains(line), "{line}\n{text}");
        }
        let again: Config = toml::from_str(&text).unwrap();
        again.check().unwrap();
        assert_eq!(again.effective().unwrap(), text);
        assert_eq!(format!("{:?}", again.policy.limits), format!("{:?}", config.policy.limits));
    }

    /// Settings without a default are shown as comments; they must be right too.
    #[test]
    fn the_examples_commented_settings_are_understood() {
        let all: String = EXAMPLE
            .lines()
            .map(|line| match line.strip_prefix("#") {
                Some(rest) if !rest.starts_with(' ') => format!("{rest}\n"),
                _ => format!("{line}\n"),
            })
            .collect();
        let config: Config = toml::from_str(&all).unwrap();
        assert!(config.socket.path.is_some() && config.admin.socket.is_some());
        assert!(config.dispatch.spin_us.is_some());
        config.check().unwrap();
    }

    #[test]
    fn unknown_settings_and_wild_values_are_refused_by_name() {
        let error = toml::from_str::<Config>("[engine]\nwindow = 3\n").unwrap_err();
        assert!(error.to_string().contains("window"), "{error}");
        let config: Config = toml::from_str("[engine]\nwindow_us = 0\n").unwrap();
        let error = config.check().unwrap_err().to_string();
        assert!(error.contains("engine.window_us is 0"), "{error}");
        let config: Config = toml::from_str("[socket]\nmode = \"rw\"\n").unwrap();
        assert!(config.check().unwrap_err().to_string().contains("octal"));
    }
}
