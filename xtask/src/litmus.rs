//! `cargo xtask litmus`: campaigns of the programs in `tests/litmus`.

use crate::build;
use anyhow::{Context, Result};
use std::process::Command;

/// What `cargo xtask test litmus` runs: every program under one setup, the named ones under all.
/// Programs take milliseconds; the limits are for when something is wrong.
pub const TEST: &[&str] = &[
    "--named",
    "--programs=1000",
    "--pairs=2000",
    "--minutes=8",
    "--limit=20",
    "--hangs=2",
    "--show=3",
];

/// What `cargo xtask test` runs: the setups that use most forms.
pub const SHORT: &[&str] = &[
    "--named",
    "--programs=240",
    "--pairs=480",
    "--setup=random",
    "--minutes=4",
    "--limit=20",
    "--hangs=2",
    "--show=3",
];

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Use what is built already.
    #[arg(long)]
    no_build: bool,
    /// Options of `tally-litmus campaign`, which `--help` behind `--` lists: --programs N, --seed S, --named,
    /// --pairs N, --minutes M, --policy NAME, --mode timeslice|none, --class high|best-effort, --setup NAME, ...
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTION")]
    options: Vec<String>,
}

/// Builds, and runs a campaign.
pub fn run(args: &Args) -> Result<()> {
    if !args.no_build {
        build::everything()?;
    }
    let mut command = campaign();
    command.args(&args.options);
    let done = command.status().with_context(|| format!("starting {}", build::line(&command)))?;
    std::process::exit(done.code().unwrap_or(1));
}

/// The program, without options.
pub fn campaign() -> Command {
    let mut command = Command::new(build::release_dir().join("tally-litmus"));
    command.arg("campaign");
    command
}
