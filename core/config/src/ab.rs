//! The table `[ab]`: what is kept of A/B tests.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Ab {
    /// Keep the report of the last A/B test for the next run of the core.
    pub keep: bool,
    /// Folder of the reports, one file for each socket. Default: `ab` in the folder of `[profiles]`.
    pub directory: Option<PathBuf>,
}

impl Default for Ab {
    fn default() -> Self {
        Ab { keep: true, directory: None }
    }
}
