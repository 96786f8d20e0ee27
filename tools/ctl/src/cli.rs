//! The command line: every flag once.

use crate::admin::AdminSocket;
use crate::error::{CtlError, EXIT_USAGE};
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use tally_contract::limits::WEIGHT_MAX;
use tally_ipc::wire;

/// Exit codes, shown at the end of `--help`.
const AFTER_HELP: &str = "\
Exit codes:
  0    done
  1    failed (also: this user may not open the core's socket)
  2    wrong command line
  3-6  `ab start --wait` and `log replay`: see their --help
  69   no core answers (EX_UNAVAILABLE); `run` starts the program all the same
  126  run: the program cannot be executed
  127  run: the program was not found
`run` becomes the program, so any other exit code or signal is the program's own.";

/// Run programs under the Tally core, and talk to it.
#[derive(Debug, Parser)]
#[command(name = "tallyctl", version, after_help = AFTER_HELP)]
pub struct Cli {
    /// Path of the socket where programs register. Default: $TALLY_SOCKET, else
    /// $XDG_RUNTIME_DIR/tally/clients/core.sock, else /run/tally/clients/core.sock for root, else
    /// ~/.local/state/tally/clients/core.sock, or /run/user/UID/tally/clients/core.sock without $HOME.
    #[arg(long, global = true, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Where the core takes admin requests: every command that talks to the core uses it, except `run`. Default: that
    /// beside --socket, X/admin/NAME for X/clients/NAME; else $TALLY_ADMIN_SOCKET; else that beside $TALLY_SOCKET.
    #[arg(long, global = true, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a program whose GPU work the core schedules.
    Run(RunArgs),
    /// Show the core, its policy, its clients and its kernels.
    Status(StatusArgs),
    /// Print the core's figures in the Prometheus text format (0.0.4), for node_exporter's textfile collector and the
    /// like.
    Metrics(crate::metrics::MetricsArgs),
    /// Show or change the policy.
    Policy {
        #[command(subcommand)]
        command: PolicyCommand,
    },
    /// Show or clear kernel profiles: measured times, and which kernels must not be transformed.
    Profiles {
        #[command(subcommand)]
        command: ProfilesCommand,
    },
    /// Change what the core knows that a client needs.
    Client {
        #[command(subcommand)]
        command: ClientCommand,
    },
    /// Compare two policies on the core's GPU, under its real load.
    Ab {
        #[command(subcommand)]
        command: crate::ab::AbCommand,
    },
    /// Record what reaches the policy and what it decides; read, replay, compare.
    Log {
        #[command(subcommand)]
        command: crate::log::LogCommand,
    },
    /// Compare a policy with the active one on the same launches, without using its decisions.
    Shadow {
        #[command(subcommand)]
        command: crate::shadow::ShadowCommand,
    },
    /// Simulate recorded programs that share a GPU under a policy, without a GPU or a core: high-priority services
    /// and any number of best-effort trainings.
    Sim(crate::sim::SimArgs),
    /// Stop the core: it grants every held launch, then ends.
    Stop {
        /// Leave a private MPS daemon to the next core, so that running programs keep their GPU contexts
        #[arg(long)]
        keep_mps: bool,
    },
    /// Print shell completions.
    Completions {
        /// The shell to print them for
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Print a reference document, for `cargo xtask references`.
    #[command(hide = true)]
    Reference {
        /// Reference document to print
        document: Reference,
    },
}

/// Parts of `docs/reference` that this program is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Reference {
    /// Every command and every flag
    Cli,
    /// Every metric of `tallyctl metrics`
    Metrics,
}

impl Reference {
    fn text(self) -> String {
        match self {
            Reference::Cli => tally_reference::document(
                "Command line of `tallyctl`",
                "Flags of `tallyctl` itself may stand behind any subcommand.",
                &tally_reference::cli::commands(&Cli::command()),
            ),
            Reference::Metrics => crate::metrics::registry::reference(),
        }
    }
}

/// How urgent a program's work is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Priority {
    /// Latency-critical: launches do not wait, unless the policy gates it.
    High,
    /// Best effort: the policy decides about each launch.
    BestEffort,
}

impl Priority {
    /// The priority as the environment has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Priority::High => "high",
            Priority::BestEffort => "best-effort",
        }
    }
}

/// What a program does while there is no core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fail {
    /// Run launches unscheduled.
    Open,
    /// Hold launches until a core is there, unless the program was admitted as high priority.
    Hold,
}

#[derive(Debug, Args)]
pub struct RunArgs {
    /// How urgent the program's work is.
    #[arg(long, value_enum, default_value = "best-effort")]
    pub priority: Priority,
    /// Name of the client in `status` and for the policy. Default: the program's name.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Label that the policy sees; may be given up to 16 times.
    #[arg(long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<String>,
    /// Objective of a high-priority program: the longest time that a request may take, such as 20ms.
    #[arg(long, value_name = "TIME", value_parser = crate::client::slo_ms)]
    pub slo: Option<f64>,
    /// Share of requests, in percent, that must keep `--slo`. Default: 99.
    #[arg(long, value_name = "PERCENT", value_parser = crate::client::percentile, requires = "slo")]
    pub percentile: Option<f64>,
    /// Objective for tokens of a high-priority program: the longest time that a token may take, such as 8ms. Tokens are
    /// marked ones, else CUDA graph launches.
    #[arg(long, value_name = "TIME", value_parser = crate::client::slo_ms)]
    pub tpot: Option<f64>,
    /// Weight of a best-effort program: the share of the GPU's time that it gets relative to other best-effort
    /// programs, from 1 to 1000. Default: 1.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(WEIGHT_MAX)))]
    pub weight: Option<u32>,
    /// Floor of a best-effort program: of the time in which it has work it gets at least this share of GPU time, such
    /// as 20%, also while high-priority programs are busy, except where contexts take turns. The operator has to allow
    /// it (`admission.min_share_percent_max`), and the policy to keep it.
    #[arg(long, value_name = "PERCENT", value_parser = crate::client::min_share_percent)]
    pub min_share: Option<f64>,
    /// What to do with launches while there is no core. Default: open, unless
    /// the core's configuration says otherwise.
    #[arg(long, value_enum)]
    pub fail: Option<Fail>,
    /// The library to preload, with libtally_shim.so in its folder. Default:
    /// libtally_preload.so next to this program, else in ../lib/tally.
    #[arg(long, value_name = "PATH")]
    pub preload: Option<PathBuf>,
    /// Start the program without asking first whether a core answers, which takes at most 1 s.
    #[arg(long)]
    pub no_check: bool,
    /// The program and its arguments, after `--`.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Print JSON (schema 1).
    #[arg(long)]
    pub json: bool,
    /// Print again every second until interrupted.
    #[arg(long)]
    pub watch: bool,
    /// How many kernels to show.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub kernels: usize,
}

#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Make a project for a policy of your own.
    New(crate::policy::new::NewArgs),
    /// Check that a component behaves, without a core: the contract, its limits, random events.
    Check(crate::policy::check::CheckArgs),
    /// Measure what a component costs on this machine.
    Bench(crate::policy::bench::BenchArgs),
    /// Show what a component may do and is told, from its file.
    Info(crate::policy::info::InfoArgs),
    /// Make a component of a core module that implements the contract.
    Wrap(crate::policy::wrap::WrapArgs),
    /// Show the active policy.
    Show {
        /// Print JSON, for programs.
        #[arg(long)]
        json: bool,
    },
    /// Load another policy; if it cannot be loaded, the old one stays.
    Load {
        /// The policy component, a `.wasm` file
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Configuration file that is passed to the policy
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Make a key pair to sign policies with.
    Keygen(crate::policy::KeygenArgs),
    /// Sign a policy, so that a core that trusts the key loads it.
    Sign(crate::policy::SignArgs),
    /// Check a policy's signature.
    Verify(crate::policy::VerifyArgs),
    /// Show which policies were active, why each was loaded and replaced, and which can be rolled back to.
    History {
        /// Print JSON, for programs.
        #[arg(long)]
        json: bool,
    },
    /// Make an earlier policy active again, from memory: its file may be gone. Each further rollback goes one policy
    /// further back.
    Rollback {
        /// Generation to go back to. Default: the last policy that differs from the active one and was not disabled.
        #[arg(long, value_name = "GENERATION")]
        to: Option<u64>,
    },
}

#[derive(Debug, Subcommand)]
pub enum ClientCommand {
    /// Give a high-priority client other objectives, or a best-effort one another floor, while it runs.
    Set {
        /// Id of the client, or its name if no other client has that
        #[arg(value_name = "CLIENT")]
        client: String,
        /// Longest time that a request may take, such as 20ms
        #[arg(long, value_name = "TIME", value_parser = crate::client::slo_ms)]
        #[arg(required_unless_present_any = ["no_slo", "tpot", "no_tpot", "min_share", "no_min_share"])]
        #[arg(conflicts_with = "no_slo")]
        slo: Option<f64>,
        /// Share of requests, in percent, that must keep it. Default: as before, else 99.
        #[arg(long, value_name = "PERCENT", value_parser = crate::client::percentile, requires = "slo")]
        percentile: Option<f64>,
        /// Take the objective for requests away
        #[arg(long)]
        no_slo: bool,
        /// Longest time that a token may take, such as 8ms
        #[arg(long, value_name = "TIME", value_parser = crate::client::slo_ms)]
        #[arg(conflicts_with = "no_tpot")]
        tpot: Option<f64>,
        /// Take the objective for tokens away
        #[arg(long)]
        no_tpot: bool,
        /// Least share of GPU time of a best-effort client, such as 20%, whatever programs may ask for
        #[arg(long, value_name = "PERCENT", value_parser = crate::client::min_share_percent)]
        #[arg(conflicts_with_all = ["no_min_share", "slo", "no_slo", "tpot", "no_tpot"])]
        min_share: Option<f64>,
        /// Take the floor of a best-effort client away
        #[arg(long, conflicts_with_all = ["slo", "no_slo", "tpot", "no_tpot"])]
        no_min_share: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum ProfilesCommand {
    /// Show the kernels that took the most GPU time, in every form, and where profiles
    /// are kept.
    Show {
        /// Print JSON, for programs.
        #[arg(long)]
        json: bool,
        /// How many kernels to show.
        #[arg(long, value_name = "N", default_value_t = 20)]
        kernels: usize,
    },
    /// Forget all kernel profiles, and delete their file. Kernels are measured anew, and in programs started from now
    /// on they may be transformed again.
    Clear,
}

/// Runs `tallyctl`, from its arguments to its exit code.
pub fn main() -> ExitCode {
    #[cfg(feature = "wasm")]
    tally_wasm_host::serve_if_child();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            let code = if error.use_stderr() { EXIT_USAGE } else { 0 };
            return ExitCode::from(code);
        }
    };
    let named = std::env::var_os(wire::ENV_SOCKET).filter(|s| !s.is_empty()).map(PathBuf::from);
    let admin = AdminSocket::find(cli.admin_socket, cli.socket.as_deref());
    let socket = cli.socket.or(named).unwrap_or_else(wire::default_socket);
    let outcome = match cli.command {
        Command::Run(args) => crate::run::run(&socket, &args).map(|never| match never {}),
        Command::Status(args) => crate::status::run(&admin, &args),
        Command::Metrics(args) => crate::metrics::run(&admin, &args),
        Command::Policy { command } => crate::policy::run(&admin, command),
        Command::Profiles { command } => crate::profiles::run(&admin, command),
        Command::Client { command } => crate::client::run(&admin, command),
        Command::Ab { command } => match crate::ab::run(&admin, command) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Log { command } => crate::log::run(&admin, command),
        Command::Shadow { command } => crate::shadow::run(&admin, command),
        Command::Sim(args) => crate::sim::run(&args),
        Command::Stop { keep_mps } => crate::policy::stop(&admin, keep_mps),
        Command::Completions { shell } => completions(shell),
        Command::Reference { document } => {
            std::io::stdout().lock().write_all(document.text().as_bytes()).map_err(CtlError::from)
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // `tallyctl status | head` is no failure.
        Err(CtlError::Output(e)) if e.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tallyctl: {error}");
            error.exit_code()
        }
    }
}

fn completions(shell: clap_complete::Shell) -> Result<(), CtlError> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "tallyctl", &mut script);
    Ok(std::io::stdout().lock().write_all(&script)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documented(command: &clap::Command) {
        for argument in command.get_arguments() {
            assert!(argument.get_help().is_some(), "{} has no help", argument.get_id());
        }
        for sub in command.get_subcommands() {
            assert!(sub.get_about().is_some(), "{} has no help", sub.get_name());
            documented(sub);
        }
    }

    #[test]
    fn the_command_line_is_consistent_and_every_flag_is_documented() {
        Cli::command().debug_assert();
        documented(&Cli::command());
    }

    #[test]
    fn the_programs_own_flags_are_left_to_it() {
        let cli = Cli::try_parse_from([
            "tallyctl",
            "run",
            "--priority",
            "high",
            "--",
            "python",
            "--json",
            "-x",
        ])
        .unwrap();
        let Command::Run(args) = cli.command else { panic!("not run") };
        assert_eq!(args.priority, Priority::High);
        assert_eq!(args.command, ["python", "--json", "-x"]);
        let cli = Cli::try_parse_from(["tallyctl", "run", "sleep", "--help"]).unwrap();
        let Command::Run(args) = cli.command else { panic!("not run") };
        assert_eq!(args.command, ["sleep", "--help"]);
    }
}
