//! Fuzz target: the core's configuration file.

use std::path::Path;
use tally_core::config::Config;

/// No panic; an error is one message.
pub fn config(data: &[u8]) {
    if let Err(error) = Config::parse(Path::new("core.toml"), data) {
        assert!(error.to_string().len() > "core.toml".len());
    }
}
