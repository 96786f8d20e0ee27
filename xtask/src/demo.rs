//! `cargo xtask demo`: what scheduling buys, on two real programs.
//!
//! An inference server (high priority) and a training job (best effort) run
//! alone, together as the device shares itself, under the `fifo` policy and under
//! `tally-priority`. The programs know nothing of Tally; only how they are
//! started differs. Every answer of the server is checked by itself, and the
//! training's checksums must be those of its run alone.

use crate::build;
use crate::demo_report::{Report, Run, YOURS};
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tally_demo::process::wait_until;
use tally_demo::{Artefacts, Class, Device, Process, Scene};

/// How long a program may take to get ready: it computes the right answers.
const READY_MAX: Duration = Duration::from_secs(120);
/// How much longer than asked a program may run: its last step or request.
const OVERTIME_MAX: Duration = Duration::from_secs(60);
/// How long a core may take to drain.
const DRAIN_MAX: Duration = Duration::from_secs(30);
/// Arrivals as a share of what the server could serve alone.
const LOAD: f64 = 0.4;

/// What the demo runs on.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum On {
    /// The software device of this repository: any machine.
    Software,
    /// This machine's NVIDIA GPU.
    Cuda,
}

impl On {
    fn preset(self) -> &'static str {
        match self {
            On::Software => "software",
            On::Cuda => "cuda",
        }
    }
}

/// Demonstrations besides the usual one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// Run an A/B test
    Ab,
}

/// What can be asked for.
#[derive(clap::Args)]
pub struct Args {
    /// Another demonstration: `ab` is an A/B test of two policies while the programs run.
    #[arg(value_enum)]
    what: Option<What>,
    /// Print one JSON object on standard output instead of the table.
    #[arg(long)]
    json: bool,
    /// Length of each of the five measurements (six with --policy).
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// What to run on.
    #[arg(long, value_enum, default_value = "software")]
    device: On,
    /// A policy of your own to compare: a component.
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Configuration file that is passed to the policy
    #[arg(long, value_name = "FILE", requires = "policy")]
    policy_config: Option<PathBuf>,
    /// Use what is built already, beside this program.
    #[arg(long)]
    no_build: bool,
    /// Fail unless the ratios that the verdict names are met. They are times of a
    /// machine that may be busy with other things; wrong results always fail.
    #[arg(long)]
    check: bool,
    /// SMs of the software device: CPU threads that execute blocks. Default: the
    /// CPUs but one, at most 4.
    #[arg(long)]
    sms: Option<u32>,
}

/// Builds the programs, measures, and prints the report.
pub fn run(args: &Args) -> Result<()> {
    ensure!(args.seconds > 0.0, "--seconds must be above 0");
    for file in args.policy.iter().chain(&args.policy_config) {
        ensure!(file.is_file(), "{} is no file", file.display());
    }
    let artefacts = if args.no_build {
        Artefacts::locate()?
    } else {
        build::demo()?;
        Artefacts::at(build::release_dir())
    };
    if args.what == Some(What::Ab) {
        return crate::demo_ab::run(&artefacts, args.check);
    }
    let report = Demo::new(args, artefacts).measure()?;
    if args.json {
        println!("{}", report.json());
    } else {
        print!("{}", report.table());
    }
    build::flush();
    report.results_are_right()?;
    if args.check { report.ratios_are_met() } else { Ok(()) }
}

struct Demo {
    artefacts: Artefacts,
    device: Device,
    preset: &'static str,
    seconds: f64,
    /// The user's policy, and its configuration.
    yours: Option<(PathBuf, Option<PathBuf>)>,
}

/// How the two programs share the device.
enum Sharing<'a> {
    /// Whatever the device does by itself.
    Unscheduled,
    /// Under a core with this policy, and its configuration.
    Policy(&'a Path, Option<&'a Path>),
}

impl Demo {
    fn new(args: &Args, artefacts: Artefacts) -> Self {
        let device = match (args.device, args.sms) {
            (On::Cuda, _) => Device::Cuda,
            (On::Software, None) => Device::software(),
            (On::Software, Some(sms)) => Device::Software { sms },
        };
        // The core runs in a folder of its own.
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let config = args.policy_config.as_ref().map(absolute);
        let yours = args.policy.as_ref().map(|policy| (absolute(policy), config));
        Self { artefacts, device, preset: args.device.preset(), seconds: args.seconds, yours }
    }

    fn measure(&self) -> Result<Report> {
        eprintln!("alone: inference");
        let scene = Scene::new(&self.artefacts, self.device)?;
        let server = self.server(&scene, Load::Share(LOAD))?;
        let hp = self.finish(&scene, vec![scene.start("inference", server)?])?.remove(0);
        let rate = hp["rate_per_s"].as_f64().context("inference tells no rate")?;
        eprintln!("alone: training");
        let scene = Scene::new(&self.artefacts, self.device)?;
        let trainer = scene.start("training", self.trainer(&scene)?)?;
        let be = self.finish(&scene, vec![trainer])?.remove(0);
        let mut runs = BTreeMap::new();
        runs.insert("alone", Run::new(&hp, &be, 0)?);

        let fifo = self.artefacts.policy("fifo")?;
        let priority = self.artefacts.policy("tally-priority")?;
        let mut ways = vec![
            ("unscheduled", Sharing::Unscheduled),
            ("fifo", Sharing::Policy(&fifo, None)),
            ("tally-priority", Sharing::Policy(&priority, None)),
        ];
        if let Some((policy, config)) = &self.yours {
            ways.push((YOURS, Sharing::Policy(policy, config.as_deref())));
        }
        for (name, sharing) in ways {
            eprintln!("together: {name}");
            runs.insert(name, self.together(rate, &sharing).context(name)?);
        }
        let device = hp["device"].as_str().unwrap_or_default().to_owned();
        Ok(Report { device, seconds: self.seconds, rate_per_s: rate, runs })
    }

    /// Runs both programs at once.
    fn together(&self, rate: f64, sharing: &Sharing) -> Result<Run> {
        let scene = Scene::new(&self.artefacts, self.device)?;
        let (server, trainer) = (self.server(&scene, Load::Rate(rate))?, self.trainer(&scene)?);
        let (policy, given) = match sharing {
            Sharing::Unscheduled => {
                let both =
                    vec![scene.start("inference", server)?, scene.start("training", trainer)?];
                let outcomes = self.finish(&scene, both)?;
                return Run::new(&outcomes[0], &outcomes[1], 0);
            }
            Sharing::Policy(policy, config) => (*policy, *config),
        };
        let config = scene.dir().join("policy.toml");
        let config_arguments;
        let mut arguments: &[&str] = &[];
        if self.whole_kernels(policy) {
            std::fs::write(&config, "forms = false\n")?;
        } else if let Some(given) = given {
            std::fs::copy(given, &config).with_context(|| given.display().to_string())?;
        }
        if config.exists() {
            config_arguments = ["--policy-config", config.to_str().context("a path of no text")?];
            arguments = &config_arguments;
        }
        let mut core = scene.core(policy, arguments)?;
        let server = scene.governed(Class::High, "inference", &server)?;
        let trainer = scene.governed(Class::BestEffort, "training", &trainer)?;
        let both = vec![scene.start("inference", server)?, scene.start("training", trainer)?];
        let outcomes = self.finish(&scene, both)?;
        let status = scene.status()?;
        ensure!(
            status.policy_faults() == 0,
            "the policy lost turns; `tallyctl status` says:\n{:#}",
            status.0
        );
        scene.stop(&mut core, DRAIN_MAX)?;
        Run::new(&outcomes[0], &outcomes[1], status.decisions())
    }

    /// Transforming costs a block some tens of instructions. A GPU does not notice; the software
    /// device executes them one by one, for every block of every part, and the training
    /// would lose half its speed to them. `tests/e2e/transforming.rs` transforms there.
    fn whole_kernels(&self, policy: &Path) -> bool {
        self.device != Device::Cuda && policy.ends_with("tally-priority.wasm")
    }

    /// The inference server's command line.
    fn server(&self, scene: &Scene, load: Load) -> Result<Command> {
        let mut command = self.program(scene, "tally-demo-inference", "hp")?;
        match load {
            Load::Share(share) => command.arg(format!("--load={share}")),
            Load::Rate(rate) => command.arg(format!("--rate={rate}")),
        };
        Ok(command)
    }

    /// The training job's command line.
    fn trainer(&self, scene: &Scene) -> Result<Command> {
        self.program(scene, "tally-demo-training", "be")
    }

    fn program(&self, scene: &Scene, name: &str, side: &str) -> Result<Command> {
        let mut command = scene.program(name)?;
        command
            .arg(format!("--preset={}", self.preset))
            .arg(format!("--seconds={}", self.seconds))
            .arg("--ready-file")
            .arg(scene.dir().join(format!("{side}.ready")))
            .arg("--go-file")
            .arg(scene.dir().join("go"));
        Ok(command)
    }

    /// Starts all that are ready at one moment and waits for their outcomes.
    fn finish(&self, scene: &Scene, mut programs: Vec<Process>) -> Result<Vec<serde_json::Value>> {
        wait_until("waiting for the programs to be ready", READY_MAX, || {
            for program in &mut programs {
                if let Some(end) = program.poll()? {
                    anyhow::bail!("{} ended with {end}\n{}", program.name(), program.quote());
                }
            }
            let ready = ["hp.ready", "be.ready"].iter().filter(|f| scene.dir().join(f).exists());
            Ok((ready.count() == programs.len()).then_some(()))
        })?;
        std::fs::write(scene.dir().join("go"), "go\n")?;
        let limit = Duration::from_secs_f64(self.seconds) + OVERTIME_MAX;
        programs.iter_mut().map(|program| program.finish(limit)).collect()
    }
}

/// How often requests arrive.
enum Load {
    /// As a share of what the server finds it can serve.
    Share(f64),
    /// Requests in one second.
    Rate(f64),
}
