//! The core's configuration, and reading its file.

use crate::error::CoreError;
use std::path::Path;
use tally_contract::limits::CONFIG_BYTES_MAX;

pub use tally_config::*;

/// Read a configuration file.
///
/// # Errors
/// If it cannot be read or understood.
pub fn read(path: &Path) -> Result<Config, CoreError> {
    let bytes = crate::files::read_path(path, CONFIG_BYTES_MAX).map_err(CoreError::ConfigRead)?;
    Ok(Config::parse(path, &bytes)?)
}
