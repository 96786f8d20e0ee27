//! `cargo xtask test reload`: policies take over one after another, thousands of times,
//! while programs launch. Prints one line of JSON.

use crate::target_dir;
use anyhow::{Result, ensure};
use tally_harness::{Artefacts, reload};

/// Reloads unless another number is given.
pub const COUNT: u64 = 10_000;

/// Run it; fails if a launch was lost or ran twice.
pub fn run(count: Option<u64>) -> Result<()> {
    let artefacts = Artefacts::at(target_dir().join("release"));
    let outcome = reload::run(&artefacts, count.unwrap_or(COUNT))?;
    println!("{}", outcome.json());
    ensure!(outcome.lost + outcome.doubled == 0, "launches were lost or ran twice");
    Ok(())
}
