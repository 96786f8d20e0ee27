//! The answer to [`Request::Status`](crate::Request::Status): what `tallyctl status --json` shows.
//!
//! The schema is stable: fields are only added within a version. Units end the names: `_s`, `_ms`, `_us`, `_ns`.
//! Counts rise monotonically from the client's registration, or from the core's start.

use crate::client::{ClientStatus, Departed, Totals, UngovernedStatus};
use crate::policy::PolicyReport;
use crate::profiles::{KernelStatus, ProfilesStatus};
use crate::record::{LogStatus, ShadowBrief};
use crate::words::{Word, required, words};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Version of this schema.
pub const SCHEMA: u32 = 1;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// [`SCHEMA`] of the core.
    pub schema: u32,
    pub core: CoreStatus,
    /// How clients share the GPU.
    pub sharing: SharingStatus,
    pub policy: PolicyReport,
    /// From submission seen by the core to answered: launches answered at once.
    pub decision_latency: Quantiles,
    /// Time from submission seen by the core to answered, of launches that were not answered at once.
    pub held_latency: Quantiles,
    /// High-priority work is on the GPU now.
    pub high_priority_busy: bool,
    pub clients: Vec<ClientStatus>,
    /// Sums over all clients by class, those that left included: they do not fall while this core runs.
    pub totals: BTreeMap<Class, Totals>,
    /// The last clients that left, newest first; at most 64.
    pub departed: Vec<Departed>,
    /// Programs that were to be governed and are not, newest first.
    pub ungoverned: Vec<UngovernedStatus>,
    /// Kernels by measured GPU time, most first.
    pub kernels: Vec<KernelStatus>,
    /// Kernels (name, image, grid, block) in the profile.
    pub kernels_known: u32,
    /// What is kept of kernels between runs of the core.
    pub profiles: ProfilesStatus,
    /// The answer to [`Request::AbStatus`](crate::Request::AbStatus): the A/B test that runs, or ran last; `null` if
    /// there was none.
    #[serde(deserialize_with = "required")]
    pub experiment: Option<crate::ab::AbStatus>,
    pub log: LogStatus,
    /// The policy that sees what the active one sees; `null` if there was none.
    #[serde(deserialize_with = "required")]
    pub shadow: Option<ShadowBrief>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CoreStatus {
    pub version: Word,
    /// Version of the shared-memory protocol.
    pub protocol: u32,
    pub pid: u32,
    pub uid: u32,
    /// Time since the core started, s.
    pub uptime_s: f64,
    /// Time that the dispatch thread spins before it sleeps, us.
    pub spin_us: u64,
    /// The CPU that the dispatch thread was to run on.
    #[serde(deserialize_with = "required")]
    pub pin_cpu_asked: Option<u32>,
    /// The CPU that it does run on; `null` if it is free.
    #[serde(deserialize_with = "required")]
    pub pinned_cpu: Option<u32>,
    /// Times the dispatch thread slept.
    pub parks: u64,
    /// UUID of the GPU that it serves; empty until a client has launched something.
    pub gpu: String,
    /// Path of the Unix socket where clients register.
    pub socket: String,
    /// Path of the Unix socket that takes admin requests.
    pub admin_socket: String,
    /// Clients served at once: as configured, or as many as there are descriptors for.
    pub clients_max: usize,
    /// Clients for which there are descriptors.
    pub clients_fit: usize,
    /// Descriptors that the core may have (RLIMIT_NOFILE).
    pub descriptors: u64,
}

/// A distribution of times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Quantiles {
    pub count: u64,
    /// Median of them, us.
    pub p50_us: f64,
    pub p99_us: f64,
    pub p999_us: f64,
    pub max_us: f64,
}

words! {
    pub enum Class {
        High = "high",
        BestEffort = "best-effort",
    }
}

/// How clients share the GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharingStatus {
    /// `auto`, `mps`, `timeslice` or `none`, as configured.
    pub asked: Word,
    /// What clients are told: `mps`, `timeslice` or `none`.
    pub in_force: Word,
    /// Why this sharing mode is in force.
    pub reason: String,
    /// The MPS daemon; `null` if none is used.
    #[serde(deserialize_with = "required")]
    pub mps: Option<MpsStatus>,
    /// Forced changes of context; `null` if there are to be none.
    #[serde(deserialize_with = "required")]
    pub refresh: Option<RefreshStatus>,
}

/// The MPS control daemon, whether the core started it or found it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MpsStatus {
    pub pipe_directory: PathBuf,
    /// Whether the core keeps it.
    pub managed: bool,
    /// `running`, or what happened to it.
    pub state: String,
    /// Times it had to be started again.
    pub restarts: u64,
    /// Its process; `null` if it is no child of the core.
    #[serde(deserialize_with = "required")]
    pub pid: Option<u32>,
}

/// Changes of context that the core forces under MPS.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefreshStatus {
    /// Time between two of them, ms.
    pub every_ms: u64,
    /// `waiting for clients of both classes`, `running`, or why there are no more.
    pub state: String,
    /// Changes of context made so far.
    pub count: u64,
}
