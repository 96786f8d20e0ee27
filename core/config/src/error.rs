//! What is wrong with a configuration.

use std::path::PathBuf;

/// Why a configuration is not taken.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file says something that is not understood.
    #[error("configuration file {path}: {message}")]
    Parse {
        path: PathBuf,
        /// Where the error is, and what was expected.
        message: String,
    },
    /// A setting makes no sense.
    #[error("configuration: {0}")]
    Value(String),
}
