//! `tally-litmus`: see `tally-litmus --help`.

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tally_harness::{Artefacts, Device};
use tally_litmus::campaign::setups::{self, Setup};
use tally_litmus::campaign::{self, Plan};
use tally_litmus::program::Program;
use tally_litmus::run::{Machine, Settings, serve};

#[derive(Parser)]
#[command(about = "Small CUDA programs made from seeds, run bare and under Tally")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run the programs of a file on whatever libcuda.so.1 there is, and print their values.
    Run(RunArgs),
    /// Run programs bare and under Tally, and compare.
    Campaign(CampaignArgs),
    /// Be another client: launch kernels until killed.
    Load(LoadArgs),
    /// Load and launch pairs of images that differ in one byte.
    Pairs(PairsArgs),
    /// Run a built-in scenario, which no file can describe.
    Scenario {
        /// Name of the program to run
        name: String,
    },
    /// Print programs, for `run` or for people.
    Show(ShowArgs),
}

#[derive(clap::Args)]
struct LoadArgs {
    /// Launch short kernels, as a service does
    #[arg(long, conflicts_with = "best_effort")]
    high: bool,
    /// Programs with more threads and calls
    #[arg(long)]
    best_effort: bool,
    /// Percent of the loops that kernels are to spin.
    #[arg(long, default_value_t = 100)]
    work_percent: u32,
}

#[derive(clap::Args)]
struct PairsArgs {
    /// Number of programs to run
    #[arg(long, default_value_t = 1_000)]
    pairs: u64,
    /// Seed of the first program or pair
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Minutes after which no more pairs are begun
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
}

/// The device, for one process without a second one.
fn machine(work_percent: u32, folder: &std::path::Path) -> Result<Machine> {
    let folder = folder.to_owned();
    Machine::new(&Settings { process: 0, shared: None, work_percent, folder })
}

#[derive(clap::Args)]
struct CampaignArgs {
    /// Number of programs made from seeds. On a GPU, programs that end threads with work in their per-thread
    /// streams are left out: they may hang without Tally.
    #[arg(long, default_value_t = 200)]
    programs: u64,
    /// Seed of the first program or pair
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run the named programs, too
    #[arg(long)]
    named: bool,
    /// Run only this one of the named programs
    #[arg(long, requires = "named")]
    only: Option<String>,
    /// Number of pairs of images, spread over the setups that transform what they can
    #[arg(long, default_value_t = 0)]
    pairs: u64,
    /// Run only setups with this text in their names; may be given several times, and any of the texts will
    /// do
    #[arg(long)]
    setup: Vec<String>,
    /// Run only setups of this policy (tally-priority, fifo, random-forms)
    #[arg(long)]
    policy: Option<String>,
    /// Run only setups with this sharing mode: `timeslice`, or `mps` on a GPU and `none` on the software
    /// device, which has no MPS and needs none
    #[arg(long)]
    mode: Option<String>,
    /// Run only setups in which the programs are of this class (high, best-effort)
    #[arg(long)]
    class: Option<String>,
    /// Run without Tally only
    #[arg(long)]
    bare: bool,
    /// Number of runs without Tally; a program must end well each time to be run under Tally
    #[arg(long, default_value_t = 1)]
    bare_runs: u32,
    /// Run without Tally beside another process's kernels
    #[arg(long)]
    beside: bool,
    /// Number of times that each program made from a seed is run wherever it runs
    #[arg(long, default_value_t = 1)]
    repeat: usize,
    /// Number of runs without Tally for a program that misbehaves under it, half of them beside another
    /// process's kernels
    #[arg(long, default_value_t = 0)]
    confirm_runs: u32,
    /// Run every program under all setups, not under one each; named ones always run under all
    #[arg(long)]
    all_setups: bool,
    /// Run on this machine's GPU in place of the software device
    #[arg(long)]
    cuda: bool,
    /// Seconds after which a program counts as hung.
    #[arg(long, default_value_t = 20.0)]
    limit: f64,
    /// Seconds that a program may take bare, where that is less.
    #[arg(long)]
    bare_limit: Option<f64>,
    /// Minutes after which no more programs are begun.
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// Number of hangs after which a setup is given up
    #[arg(long, default_value_t = 5)]
    hangs: usize,
    /// Number of setups that run at one time
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Percent of the loops that kernels are to spin.
    #[arg(long, default_value_t = 100)]
    work_percent: u32,
    /// Transform kernels of closed libraries, too
    #[arg(long)]
    vendor: bool,
    /// Write the figures, and all that was found, to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Programs that are printed in full when they misbehave.
    #[arg(long, default_value_t = 5)]
    show: usize,
}

fn campaign(args: &CampaignArgs) -> Result<()> {
    let artefacts = Artefacts::locate()?;
    let device = if args.cuda { Device::Cuda } else { Device::Software { sms: 8 } };
    let is = |wanted: &Option<String>, has: &str| wanted.as_ref().is_none_or(|w| w == has);
    let wanted = |setup: &Setup| {
        (args.setup.is_empty() || args.setup.iter().any(|s| setup.name.contains(s.as_str())))
            && is(&args.policy, setup.policy)
            && is(&args.mode, setup.mode(device))
            && is(&args.class, setup.class_name())
    };
    let mut setups: Vec<Setup> = setups::ALL.into_iter().filter(wanted).collect();
    anyhow::ensure!(!setups.is_empty(), "no setup is as wanted");
    if args.bare {
        setups.clear();
    }
    let until = Instant::now() + Duration::from_secs_f64(60.0 * args.minutes);
    let plan = |programs: Vec<Program>, all_setups: bool, pairs: u64, scenarios: bool| Plan {
        programs,
        scenarios,
        pairs,
        setups: setups.clone(),
        all_setups,
        bare_runs: args.bare_runs,
        is_bare_beside: args.beside,
        confirm_runs: args.confirm_runs,
        device,
        limit_s: args.limit,
        bare_limit_s: args.bare_limit.unwrap_or(args.limit).min(args.limit),
        until,
        hangs_max: args.hangs,
        workers: args.workers,
        seed: args.seed,
        work_percent: args.work_percent,
        vendor: args.vendor,
    };
    let made = (args.seed..).map(tally_litmus::generate::program);
    let is_sure = |program: &Program| !args.cuda || !program.ends_threads_with_work();
    let made = made.filter(is_sure).take(args.programs as usize);
    let mut programs: Vec<Program> =
        made.flat_map(|program| std::iter::repeat_n(program, args.repeat)).collect();
    let mut reports = Vec::new();
    if args.named {
        let mut named = tally_litmus::named::all();
        named.retain(|p| args.only.as_ref().is_none_or(|only| p.name == *only));
        if args.all_setups {
            programs.splice(0..0, named);
        } else {
            reports.push((
                "named",
                campaign::run(&artefacts, &plan(named, true, 0, args.only.is_none()))?,
            ));
        }
    }
    if !programs.is_empty() || args.pairs > 0 {
        let plan = plan(programs, args.all_setups, args.pairs, false);
        reports.push(("made", campaign::run(&artefacts, &plan)?));
    }
    let mut json = serde_json::Map::new();
    let mut is_good = true;
    for (name, report) in &reports {
        println!("{}", report.text(args.show));
        is_good &= report.is_good();
        json.insert((*name).into(), report.json());
    }
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&json)? + "\n")?;
    }
    if !is_good {
        std::process::exit(1);
    }
    Ok(())
}

#[derive(clap::Args)]
struct ShowArgs {
    /// Print only the named program of this name
    #[arg(long)]
    only: Option<String>,
    /// Print programs made from seeds, from this seed on, in place of the named ones
    #[arg(long)]
    seed: Option<u64>,
    /// Number of programs made from seeds
    #[arg(long, default_value_t = 1)]
    programs: u64,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

fn show(args: &ShowArgs) -> Result<()> {
    let programs = match args.seed {
        Some(seed) => (seed..seed + args.programs).map(tally_litmus::generate::program).collect(),
        None => tally_litmus::named::all(),
    };
    let wanted = programs.iter().filter(|p| args.only.as_ref().is_none_or(|name| p.name == *name));
    for program in wanted {
        if args.json {
            println!("{}", serde_json::to_string(program)?);
        } else {
            println!("{program}");
        }
    }
    Ok(())
}

#[derive(clap::Args)]
struct RunArgs {
    /// Programs, one JSON object a line.
    file: PathBuf,
    /// Begin with the program of this number.
    #[arg(long, default_value_t = 0)]
    first: usize,
    /// Seconds after which a program counts as hung.
    #[arg(long, default_value_t = 20.0)]
    limit: f64,
    /// Percent of the loops that kernels are to spin.
    #[arg(long, default_value_t = 100)]
    work_percent: u32,
    /// Which process of a pair this is.
    #[arg(long, default_value_t = 0)]
    process: u8,
    /// The file that the host's memory of a pair is in.
    #[arg(long)]
    shared: Option<PathBuf>,
}

fn main() -> Result<()> {
    match Cli::parse().task {
        Task::Campaign(args) => campaign(&args),
        Task::Load(args) => {
            let folder = tempfile::tempdir()?;
            tally_litmus::load::serve(&machine(args.work_percent, folder.path())?, args.high)
        }
        Task::Pairs(args) => {
            let folder = tempfile::tempdir()?;
            let machine = machine(100, folder.path())?;
            let until = Instant::now() + Duration::from_secs_f64(60.0 * args.minutes);
            if !tally_litmus::pairs::serve(&machine, args.seed, args.pairs, until)? {
                std::process::exit(1);
            }
            Ok(())
        }
        Task::Scenario { name } => {
            tally_litmus::scenarios::run(&name)?;
            println!("{{\"ok\": true}}");
            Ok(())
        }
        Task::Show(args) => show(&args),
        Task::Run(args) => {
            let folder = tempfile::tempdir()?;
            let settings = Settings {
                process: args.process,
                shared: args.shared,
                work_percent: args.work_percent,
                folder: folder.path().to_owned(),
            };
            let machine = Box::leak(Box::new(Machine::new(&settings)?));
            serve::serve(machine, &args.file, args.first, Duration::from_secs_f64(args.limit))
        }
    }
}
