//! Fuzz target: the core's configuration file.

use tally_core::config::Config;

/// No panic; an error is one message.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match toml::from_str::<Config>(text) {
        Ok(config) => drop(config.check()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
