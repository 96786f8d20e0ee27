//! `cargo xtask chaos`: random faults at random parties; nothing may be lost, doubled, wrong or hang.

use crate::{build, target_dir};
use anyhow::Result;
use std::time::{Duration, Instant};
use tally_harness::{Artefacts, chaos};

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Number of faults to make
    #[arg(long, default_value_t = 1_000)]
    faults: usize,
    /// Seed of the faults: the same one makes the same faults, as far as scheduling allows.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Cores with their programs at the same time, each with a part of the faults.
    #[arg(long, default_value_t = 2)]
    worlds: usize,
    /// A party that does not get on for so long after a fault hangs, s.
    #[arg(long, default_value_t = 60)]
    patience: u64,
    /// Use what is built already.
    #[arg(long)]
    no_build: bool,
}

/// Make them; fails at the first that breaks a promise.
pub fn run(args: &Args) -> Result<()> {
    if !args.no_build {
        build::everything()?;
    }
    let options = chaos::Options {
        faults: args.faults,
        seed: args.seed,
        worlds: args.worlds,
        patience: Duration::from_secs(args.patience),
    };
    let artefacts = Artefacts::at(target_dir().join("release"));
    let began = Instant::now();
    let outcome = chaos::run(&artefacts, &options)?;
    print!("{}", outcome.text());
    for what in chaos::Means::of_this_machine().left_out() {
        println!("not run: {what}");
    }
    println!("seed {}, {} worlds, {:.0} s", args.seed, args.worlds, began.elapsed().as_secs_f64());
    Ok(())
}
