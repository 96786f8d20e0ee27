//! Random faults of every kind at the core, programs and a hostile client, for a minute. `cargo xtask chaos` makes
//! more of them; `tests/e2e/chaos.rs` kills only, but kills programs that come to an end by themselves.

use anyhow::{Result, ensure};
use std::time::Duration;
use tally_harness::Artefacts;
use tally_harness::chaos::{self, Means, Options};

const FAULTS: usize = 60;

#[test]
fn no_launch_is_lost_doubled_or_wrong_whatever_fails() -> Result<()> {
    let options =
        Options { faults: FAULTS, seed: 19, worlds: 1, patience: Duration::from_secs(120) };
    let outcome = chaos::run(&Artefacts::locate()?, &options)?;
    println!("{}", outcome.text());
    Means::of_this_machine().left_out().iter().for_each(|what| println!("not run: {what}"));
    ensure!(outcome.total() == FAULTS as u64, "{} of {FAULTS} faults", outcome.total());
    ensure!(outcome.checks > 0 && outcome.launches > 0 && outcome.decided > 0, "{outcome:?}");
    ensure!(outcome.width_changes > 0 && outcome.sm_limited > 0, "{outcome:?}");
    Ok(())
}
