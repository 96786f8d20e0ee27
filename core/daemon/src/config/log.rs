//! `[log]`: the decision log.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tally_contract::limits::{LOG_BYTES_MIN, LOG_RING_BYTES_MAX, LOG_RING_BYTES_MIN};

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// File to record into from the start of the core; if it exists, a number is added to its name. Default:
    /// nothing is recorded until somebody asks for it.
    pub file: Option<PathBuf>,
    /// Folder of logs that are given no path, and of all that users of `admin.uids` ask for. Default: `logs`
    /// in the folder of `[profiles]`.
    pub directory: Option<PathBuf>,
    /// Size at which a log ends, unless it was asked for with another.
    #[schemars(range(min = LOG_BYTES_MIN))]
    pub bytes_max: u64,
    /// Size of the ring between the dispatch thread and each thread that records or compares; raise it if
    /// records are dropped.
    #[schemars(range(min = LOG_RING_BYTES_MIN >> 10, max = LOG_RING_BYTES_MAX >> 10))]
    pub ring_kib: u64,
    /// With `file`: also record completions that the policy does not ask for, which `tallyctl log trace`
    /// needs.
    pub completions: bool,
}

impl Default for Log {
    fn default() -> Self {
        Log { file: None, directory: None, bytes_max: 1 << 30, ring_kib: 4_096, completions: false }
    }
}
