//! `[log]`: the decision log.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tally_contract::limits::{LOG_BYTES_MIN, LOG_RING_BYTES_MAX, LOG_RING_BYTES_MIN};

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// Record into this file from the start of the core. If the file exists, a number is added to the
    /// name. Default: record only on request.
    pub file: Option<PathBuf>,
    /// Folder of logs that are given no path, and of all logs that users in `admin.uids` ask for.
    /// Default: `logs` in the folder of `[profiles]`.
    pub directory: Option<PathBuf>,
    /// Size at which a log ends, unless the request for it names a smaller one.
    #[schemars(range(min = LOG_BYTES_MIN))]
    pub bytes_max: u64,
    /// Size of the buffer between the dispatch thread and each reader of its records (log writer,
    /// shadow). Raise it if records are dropped.
    #[schemars(range(min = LOG_RING_BYTES_MIN >> 10, max = LOG_RING_BYTES_MAX >> 10))]
    pub ring_kib: u64,
    /// With `file`: record also completions that the policy does not subscribe to. `tallyctl log trace`
    /// needs them.
    pub completions: bool,
}

impl Default for Log {
    fn default() -> Self {
        Log { file: None, directory: None, bytes_max: 1 << 30, ring_kib: 4_096, completions: false }
    }
}
