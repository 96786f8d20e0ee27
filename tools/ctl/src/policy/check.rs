//! `tallyctl policy check`: the conformance suite on one component.

use crate::error::CtlError;
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The policy component, a `.wasm` file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Configuration file that is passed to the policy
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A capability that the policy has been granted; may be given several times.
    #[arg(long = "grant", value_name = "NAME")]
    pub grants: Vec<String>,
    /// Print JSON (schema 1), the same bytes each time.
    #[arg(long)]
    pub json: bool,
    /// Seed of the random event streams.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Require that best-effort clients get GPU time by their weights and floors
    #[arg(long)]
    pub fair: bool,
    /// Require that two services keep their objectives beside a training, in the simulator
    #[arg(long)]
    pub objectives: bool,
    /// The limits of the policy: the core's defaults, or those for components with an interpreter.
    #[arg(long, value_enum, default_value = "default")]
    pub limits: super::LimitsArg,
}

#[cfg(feature = "wasm")]
pub fn run(args: &CheckArgs) -> Result<(), CtlError> {
    use std::io::{IsTerminal, Write};
    use tally_conformance::{Capabilities, Capability, Options, Outcome, Wasm, check_loaded};

    let config = super::config(args.config.as_deref())?;
    let granted = args.grants.iter().map(|name| name.parse::<Capability>());
    let granted = granted
        .collect::<Result<Capabilities, _>>()
        .map_err(|why| CtlError::Usage(format!("--grant: {why}")))?;
    let compiler =
        tally_wasm_host::Compiler::this_program().map_err(|e| CtlError::Failed(e.to_string()))?;
    let subject = Wasm::open(compiler, &args.file, &config, &args.limits.limits(), granted)
        .map_err(|e| CtlError::Failed(e.to_string()))?;
    let options = Options {
        seed: args.seed,
        fair: args.fair,
        objectives: args.objectives,
        ..Options::default()
    };
    let report = check_loaded(&subject, &options);
    let mut out = std::io::stdout().lock();
    if args.json {
        let text =
            serde_json::to_string_pretty(&report).map_err(|e| CtlError::Answer(e.to_string()))?;
        writeln!(out, "{text}")?;
    } else {
        let paint = out.is_terminal();
        for check in &report.checks {
            let (word, colour) = match check.outcome {
                Outcome::Pass => ("ok", "\x1b[32m"),
                Outcome::Warn => ("warn", "\x1b[33m"),
                Outcome::Info => ("info", "\x1b[36m"),
                Outcome::Fail => ("FAIL", "\x1b[31m"),
                Outcome::NotRun => ("not run", "\x1b[31m"),
            };
            let (on, off) = if paint { (colour, "\x1b[0m") } else { ("", "") };
            writeln!(out, "{on}{word:<8}{off}{:<14} {}", check.name, check.detail)?;
            if !check.advice.is_empty() {
                writeln!(out, "{:23}-> {}", "", check.advice)?;
            }
        }
    }
    let bad: Vec<&str> = [Outcome::Fail, Outcome::NotRun].map(|o| report.names(o)).concat();
    if report.passed() {
        return Ok(());
    }
    Err(CtlError::Failed(format!("{} does not pass: {}", args.file.display(), bad.join(", "))))
}

#[cfg(not(feature = "wasm"))]
pub fn run(args: &CheckArgs) -> Result<(), CtlError> {
    Err(super::without_wasm(&args.file))
}
