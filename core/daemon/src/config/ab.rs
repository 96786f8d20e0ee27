//! `[ab]`: A/B tests.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Ab {
    /// Keep the last report for the next run of the core.
    pub keep: bool,
    /// Where; none: `ab` in the folder of `[profiles]`.
    pub directory: Option<PathBuf>,
}

impl Default for Ab {
    fn default() -> Self {
        Ab { keep: true, directory: None }
    }
}
