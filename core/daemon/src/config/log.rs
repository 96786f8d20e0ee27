//! `[log]`: the decision log.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// Record into this file from the start of the core on; if it is there, into one
    /// with a number behind its name. None: nothing is recorded until asked.
    pub file: Option<PathBuf>,
    /// Where logs go that are given no path, and all that users of `admin.uids` ask
    /// for; none: `logs` in the folder of `[profiles]`.
    pub directory: Option<PathBuf>,
    /// A log is ended at this size unless it was asked for with another.
    pub bytes_max: u64,
    /// Room between the dispatch thread and each thread that reads along, KiB.
    pub ring_kib: u64,
    /// With `file`: also record completions that the policy does not ask for.
    pub completions: bool,
}

impl Default for Log {
    fn default() -> Self {
        Log { file: None, directory: None, bytes_max: 1 << 30, ring_kib: 4_096, completions: false }
    }
}
