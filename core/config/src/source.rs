//! Which policy the core starts with.

use super::Policy;
use std::path::PathBuf;
use tally_admin::Source;

/// The policy that is used when none is named.
pub const DEFAULT_POLICY: &str = "tally-priority.wasm";

/// Where the default policy may be: next to the program, or installed.
fn default_places() -> Vec<PathBuf> {
    let Ok(program) = std::env::current_exe() else { return Vec::new() };
    let Some(folder) = program.parent() else { return Vec::new() };
    vec![
        folder.join("policies").join(DEFAULT_POLICY),
        folder.join("../lib/tally/policies").join(DEFAULT_POLICY),
    ]
}

impl Policy {
    /// The files of the policy that the configuration names, or of the default one.
    ///
    /// # Errors
    /// If none is named and the default is not there; says how to get it.
    pub fn source(&self) -> Result<Source, String> {
        let config_file = self.config_file.clone();
        if let Some(file) = &self.file {
            return Ok(Source { file: file.clone(), config_file });
        }
        let places = default_places();
        match places.iter().find(|p| p.exists()) {
            Some(file) => Ok(Source { file: file.clone(), config_file }),
            None => Err(format!(
                "no policy is named and none is at {}: build it with `cargo xtask policies`, or name \
                 one with --policy FILE",
                places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(" or ")
            )),
        }
    }
}
