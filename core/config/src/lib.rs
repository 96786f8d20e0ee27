//! The core's configuration: every setting, its default and its bounds.
//!
//! `core/daemon/tally-core.example.toml` shows them all; `cargo xtask references` makes it from this.

mod ab;
mod admission;
mod disabling;
mod error;
mod log;
mod mps;
mod source;

pub use ab::Ab;
pub use admission::{Admin, Admission, HighPriority, Socket, see_that_apart, socket_folder};
pub use disabling::{Disabling, Restore};
pub use error::ConfigError;
pub use log::Log;
pub use mps::Mps;
pub use source::DEFAULT_POLICY;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use tally_contract::limits::{
    HOLD_NS_MAX, HOLD_NS_MAX_LARGEST, KERNELS_MAX, LINGER_US_MAX, RESERVES_MAX, SMS_MAX,
};
use tally_wasm_host::{Capabilities, Limits, TrustSettings};

/// The highest number of a CPU.
const CPU_MAX: usize = rustix::thread::CpuSet::MAX_CPU - 1;

/// The core's configuration: one field for each table of the file.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The Unix socket where programs register.
    pub socket: Socket,
    /// How many clients there may be, and how much of the core each user may take.
    pub admission: Admission,
    /// Who may register as high priority.
    pub high_priority: HighPriority,
    /// Who may administer the core, and where.
    pub admin: Admin,
    /// The policy that decides about launches.
    pub policy: Policy,
    /// The scheduling engine: windows, holds and stalls.
    pub engine: Engine,
    /// The thread that takes launches and answers them.
    pub dispatch: Dispatch,
    /// How clients behave; the core tells them when they register.
    pub client: Client,
    /// How clients share the GPU.
    pub sharing: SharingMode,
    /// Transformed forms of best-effort clients' kernels.
    pub rewrite: Rewrite,
    /// Launches on some of the SMs.
    pub sm_limits: SmLimits,
    /// What is kept on disk about kernels between runs of the core.
    pub profiles: Profiles,
    /// The log of what reaches the policy and what it decides.
    pub log: Log,
    /// Reports of A/B tests.
    pub ab: Ab,
}

#[derive(Clone, Debug, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// The policy's component. Default: `policies/tally-priority.wasm` next to the program, else
    /// `../lib/tally/policies/tally-priority.wasm`.
    pub file: Option<PathBuf>,
    /// Configuration file that is passed to the policy. Default: none.
    pub config_file: Option<PathBuf>,
    /// End with exit code 3 if the policy cannot be loaded at start. `false`: start with the built-in
    /// rule, which `tallyctl status` shows.
    pub required: bool,
    /// Load the policy again when its file, its signature or its configuration changes. SIGHUP and
    /// `tallyctl policy load` do so in any case.
    pub watch: bool,
    /// How long a changed file must stay unchanged before it is loaded.
    #[schemars(range(min = 1, max = 60_000))]
    pub debounce_ms: u64,
    /// What policies may do and see beyond scheduling best effort: `identity` (names and labels of clients),
    /// `kernel-identity` (names and images of kernels), `high-priority` (which clients are gated, and any say
    /// over high-priority launches).
    #[schemars(with = "Vec<String>")]
    pub capabilities: Capabilities,
    /// Which policies may be loaded. By default any that an admin asks for.
    pub trust: TrustSettings,
    /// What a policy may use. `preset = "interpreted"`, for components with an interpreter (JavaScript, Python),
    /// gives the keys of this table other defaults.
    pub limits: Limits,
    /// What becomes of a policy that fails `faults_max` times (`[policy.limits]`): the built-in rule serves
    /// at once, and another policy may take its place.
    pub disabling: Disabling,
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
            disabling: Disabling::default(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Engine {
    /// Predicted GPU time that a client may have unfinished, unless the policy sets another window.
    #[schemars(range(min = 1, max = 60_000_000))]
    pub window_us: u64,
    /// Longest time that one answer of the policy may hold a launch; longer holds are shortened to it.
    #[schemars(range(min = 1, max = HOLD_NS_MAX_LARGEST / 1_000_000))]
    pub hold_ms_max: u64,
    /// Idle gap after high-priority work for which the built-in rule holds best-effort launches.
    #[schemars(range(max = 1_000_000))]
    pub built_in_rule_idle_gap_us: u64,
    /// If nothing ends in a full window for this time, one more launch is granted, then two, four and up
    /// to 256, because the launches in flight may wait for them (kernels that wait for each other across
    /// streams or GPUs).
    #[schemars(range(min = 1, max = 3_600_000))]
    pub window_stall_ms: u64,
    /// A high-priority client that is busy for this time while no launch of it begins or ends counts as idle until
    /// one does: it may itself wait for best-effort work. 0: never.
    #[schemars(range(max = 3_600_000))]
    pub high_stall_ms: u64,
}

impl Default for Engine {
    fn default() -> Self {
        Engine {
            window_us: 1_000,
            hold_ms_max: HOLD_NS_MAX / 1_000_000,
            built_in_rule_idle_gap_us: 100,
            window_stall_ms: 500,
            high_stall_ms: 5_000,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Dispatch {
    /// How long the dispatch thread spins after the last activity before it sleeps. Default: 2000 with
    /// at least 8 CPUs, 50 with 4, else 0.
    #[schemars(range(max = 1_000_000))]
    pub spin_us: Option<u64>,
    /// The CPU that the dispatch thread runs on. Default: any.
    #[schemars(range(max = CPU_MAX))]
    pub pin_cpu: Option<u32>,
    /// How often the dispatch thread looks for ended launches while it sleeps and a launch waits for one
    /// in flight; rarer, the longer nothing ends.
    #[schemars(range(min = 5, max = 10_000))]
    pub completion_poll_us: u64,
    /// A high-priority client that is busy for this time without launching is asked whether it still is.
    #[schemars(range(min = 50, max = 1_000_000))]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fail {
    /// Run its launches unscheduled.
    Open,
    /// Hold launches until a core is there, but for programs that were admitted as high priority.
    Hold,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Client {
    /// Time that a client's thread which waits for a decision spins before it sleeps. Default: 1000 with at
    /// least 8 CPUs, 20 with 4, else 0.
    #[schemars(range(max = 1_000_000))]
    pub spin_us: Option<u64>,
    /// What clients do while there is no core.
    pub fail: Fail,
    /// Profile one unit of work in 128 of each high-priority client: an event behind each of its launches tells how
    /// long the GPU worked and had gaps (`services` in the contract, `tallyctl status`). On an H200 it told GPU time
    /// within 1 % of CUPTI's.
    pub profile_units: bool,
}

impl Default for Client {
    fn default() -> Self {
        Client { spin_us: None, fail: Fail::Open, profile_units: false }
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

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rewrite {
    /// Give best-effort kernels transformed forms where the policy asks for them, so that they yield at
    /// block boundaries. Results do not change.
    pub enabled: bool,
    /// Transform also the kernels of NVIDIA's closed libraries (cuBLAS, cuDNN, ...). Their licence
    /// forbids modifying them: read the operator's guide before you switch it on.
    pub vendor_libraries: bool,
    /// A launch that was asked to yield and has not done so after this time is rescued: its remaining
    /// blocks are launched once more beside it. A slice has four times as long, and a launch that is not asked any more
    /// twenty times. Its kernel is not transformed again until `tallyctl profiles clear`.
    #[schemars(range(min = 1, max = 10_000))]
    pub rescue_ms: u32,
    /// Disk space for transformed kernels that the programs of each user keep for their next start. 0:
    /// keep none.
    #[schemars(range(max = 65_536))]
    pub cache_mib: u32,
}

impl Default for Rewrite {
    fn default() -> Self {
        Rewrite { enabled: true, vendor_libraries: false, rescue_ms: 50, cache_mib: 256 }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SmLimits {
    /// In the sharing modes `mps` and `none`, each best-effort client gets a green context for each number, which
    /// leaves that many SMs free, rounded up to what the GPU can split off. `[]`: no green contexts, so no SM-limited
    /// launches.
    #[schemars(length(max = RESERVES_MAX), inner(range(min = 1, max = SMS_MAX)))]
    pub reserve_sms: Vec<u32>,
    /// Whether a stream waits for its SM-limited launches only once something else could see them. Then launches that
    /// follow one another need no event between them: a training of ResNet-50 gains 4 to 12 % of its speed on an H200,
    /// one of GPT-2 nothing. Libraries that put work into a program's stream by calls that the core's shim does not see
    /// could see such launches too early; those known are excepted.
    pub put_off_joins: bool,
}

impl Default for SmLimits {
    fn default() -> Self {
        SmLimits { reserve_sms: vec![16, 32, 64, 96], put_off_joins: false }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Profiles {
    /// Keep for the next run of the core how long kernels take and which must not be transformed.
    pub enabled: bool,
    /// Folder of the profiles, one file for each GPU; made with mode 0700 if it is missing. Default:
    /// `$XDG_STATE_HOME/tally`, else `/var/lib/tally` for root, else `~/.local/state/tally`.
    pub directory: Option<PathBuf>,
    /// How often changed profiles are written; they are also written when the core stops.
    #[schemars(range(min = 1, max = 86_400))]
    pub save_every_s: u64,
    /// Kernels (name, image, grid, block) in the profiles. Those with the least measured GPU time are
    /// dropped first.
    #[schemars(range(min = 1, max = KERNELS_MAX))]
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
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum SharingChoice {
    /// `mps` if an MPS daemon serves already, else `timeslice`, else `none`
    Auto,
    /// All at once, through NVIDIA MPS
    Mps,
    /// In turns, with hardware time slices set per client
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

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SharingMode {
    /// Which mechanism divides the GPU among clients.
    pub mode: SharingChoice,
    /// End with exit code 1 if `mode` is `mps` and MPS is not available. `false`: use `timeslice`
    /// (`none` without an NVIDIA device), and say why in `tallyctl status`.
    pub required: bool,
    /// Hardware time slices in the sharing mode `timeslice`. 0 leaves the driver's slice, about 2 ms.
    pub timeslice: Timeslice,
    /// NVIDIA MPS, for the sharing mode `mps`.
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

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeslice {
    /// Time slice of a best-effort client while it is the only one. It keeps the GPU while high-priority
    /// clients are idle.
    #[schemars(range(max = 1_000_000))]
    pub best_effort_us: u64,
    /// Time slice of each best-effort client while several are connected; never shorter than
    /// `best_effort_us`. With slices shorter than a change between two contexts, about 0.2 ms, none of
    /// them makes progress.
    #[schemars(range(max = 1_000_000))]
    pub best_effort_shared_us: u64,
    /// Time slice of high-priority clients.
    #[schemars(range(max = 1_000_000))]
    pub high_us: u64,
    /// How long the GPU stays with a high-priority client after its work is done, so that a request
    /// which follows at once finds it there. 0: leave at once.
    #[schemars(range(max = LINGER_US_MAX))]
    pub linger_us: u32,
}

impl Timeslice {
    /// Time slice of each of several best-effort clients, us; never shorter than that of a single one.
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

/// Where a text is wrong, and why, without its lines: it may be a file of secrets that was named by mistake.
fn parse_error(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start));
    let line = before.map(|before| before.matches('\n').count() + 1);
    let place = line.map_or_else(String::new, |line| format!("line {line}: "));
    let (key, message) = (key_before(before), in_words(error.message()));
    // Of a value only: another text could be a secret.
    let key = key.filter(|_| message.starts_with("invalid "));
    format!("{place}{}{message}", key.map_or_else(String::new, |key| format!("{key}: ")))
}

/// The key whose value begins behind this.
fn key_before(before: Option<&str>) -> Option<&str> {
    let key = before?.lines().next_back()?.split_once('=')?.0.trim();
    let is_key = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    (!key.is_empty() && key.bytes().all(is_key)).then_some(key)
}

/// An error's message without the names of Rust's types.
fn in_words(message: &str) -> String {
    let Some((what, wanted)) = message.rsplit_once(", expected ") else { return message.into() };
    let wanted = match wanted {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, not below 0, without a unit",
        "i8" | "i16" | "i32" | "i64" => "a whole number",
        "f32" | "f64" => "a number",
        "a sequence" => "a list",
        wanted if wanted.starts_with("struct ") => "a table",
        wanted => wanted,
    };
    format!("{what}, expected {wanted}")
}

impl Config {
    /// What the file at `path` says.
    ///
    /// # Errors
    /// If it cannot be understood.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, ConfigError> {
        let wrong = |message| ConfigError::Parse { path: path.into(), message };
        let text = str::from_utf8(bytes).map_err(|_| wrong("is not UTF-8".into()))?;
        let config: Config =
            toml::from_str(text).map_err(|error| wrong(parse_error(text, &error)))?;
        config.check()?;
        Ok(config)
    }

    /// The configuration in force as TOML: defaults, and what they depend on this machine for, filled in.
    ///
    /// # Errors
    /// If a socket's place is not known.
    pub fn effective(&self) -> Result<String, ConfigError> {
        let mut all = self.clone();
        all.socket.path = Some(self.socket.path());
        all.admin.socket = Some(self.admin_socket()?);
        all.dispatch.spin_us = Some(self.dispatch.spin_us());
        all.client.spin_us = Some(self.client.spin_us());
        all.profiles.directory = self.profiles.directory();
        all.policy.file = self.policy.source().ok().map(|source| source.file);
        toml::to_string(&all).map_err(|error| ConfigError::Value(error.to_string()))
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
            reserve_sms: self.sm_limits.reserve_sms.clone(),
            puts_off_joins: self.sm_limits.put_off_joins,
        }
    }

    /// Check what the types cannot.
    ///
    /// # Errors
    /// The setting that makes no sense.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.socket.mode_bits()?;
        self.admin.mode_bits()?;
        tally_settings::check(self).map_err(|error| ConfigError::Value(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../daemon/tally-core.example.toml");

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
    fn values_of_another_type_are_refused_by_key_and_in_words() {
        let of = |text: &str| parse_error(text, &toml::from_str::<Config>(text).unwrap_err());
        assert_eq!(
            of("[engine]\nwindow_us = \"1ms\"\n"),
            "line 2: window_us: invalid type: string \"1ms\", expected a whole number, not below 0, without a unit"
        );
        assert!(of("[engine]\nwindow_us = -5\n").starts_with("line 2: window_us: invalid value"));
        assert!(of("engine = 3\n").ends_with("expected a table"));
        // It may be a file of secrets.
        assert!(!of("key 93f1 = 7\n").contains("93f1"));
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
