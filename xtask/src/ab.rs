//! `cargo xtask test ab`: are the statistics of A/B tests what they claim to be?

use anyhow::{Result, ensure};
use tally_ab::simulate::{Noise, Settings, validate as simulate};

/// Effects whose power is asked for: B's p99 over A's.
const RATIOS: [f64; 3] = [1.05, 1.1, 1.2];

/// Simulate, print as JSON, and fail if the level or the coverage is not kept.
pub fn validate(experiments: Option<u32>) -> Result<()> {
    let usual = Settings::default();
    let experiments = experiments.unwrap_or(usual.experiments);
    ensure!(experiments >= 20, "--experiments {experiments}: expected at least 20");
    let with_effect = (experiments * 3 / 10).max(20);
    let settings = Settings { experiments, experiments_with_effect: with_effect, ..usual };
    eprintln!("simulating {} experiments of each of {} kinds", experiments, Noise::ALL.len());
    let validity = simulate(&settings, &Noise::ALL, &RATIOS);
    println!("{}", serde_json::to_string_pretty(&validity)?);
    crate::build::flush();
    let failures = validity.failures();
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}
