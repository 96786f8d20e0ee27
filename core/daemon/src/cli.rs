//! The command line: every flag once, and how the process ends.

use crate::config::{self, Config, ConfigError, SharingChoice};
use crate::error::{CoreError, EXIT_RUNTIME, EXIT_USAGE};
use crate::reference::Reference;
use clap::{Parser, Subcommand, ValueEnum};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Exit codes, shown at the end of `--help`.
const AFTER_HELP: &str = "\
Signals:
  SIGHUP            load the policy of the configuration again, whichever is active
  SIGTERM, SIGINT   grant every held launch, wait for the rings to empty, end; a second one ends at once

Exit codes:
  0  drained and stopped
  1  failed while running, or a required sharing mode cannot be had
  2  wrong command line or configuration
  3  the policy could not be loaded
  4  the socket is in use by a live core

Every setting has a default: docs/reference/configuration.md lists them.";

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Write log lines for people to read
    Text,
    /// Write each log line as a JSON object
    Json,
}

/// The Tally core: decides which GPU kernels run when, by a policy in WebAssembly.
///
/// Programs started with `tallyctl run` register here. High-priority launches do not wait, unless the
/// policy gates their client; the policy decides each best-effort launch.
#[derive(Debug, Parser)]
#[command(name = "tally-core", version, after_help = AFTER_HELP)]
pub struct Cli {
    /// The policy, a WebAssembly component. Default: policies/tally-priority.wasm
    /// next to this program, else ../lib/tally/policies/tally-priority.wasm.
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Configuration handed to the policy as text (TOML by convention).
    #[arg(long, value_name = "FILE")]
    pub policy_config: Option<PathBuf>,
    /// The core's own configuration (TOML). Flags win over it.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// How clients share the GPU: auto picks mps if a daemon already serves,
    /// else timeslice, else none (no NVIDIA device). mps starts a private MPS
    /// daemon if needed; under MPS a fatal fault of one client reaches the others.
    #[arg(long, value_name = "MODE")]
    pub sharing: Option<SharingChoice>,
    /// Where clients register. Default: $XDG_RUNTIME_DIR/tally/clients/core.sock, else
    /// /run/tally/clients/core.sock for root, else ~/.local/state/tally/clients/core.sock, or
    /// /run/user/UID/tally/clients/core.sock without $HOME. A container that is to use the core
    /// gets this socket's folder.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Where admin requests are taken, in a folder that no container gets. Default: of a
    /// socket X/clients/NAME, X/admin/NAME.
    #[arg(long, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,
    /// How log lines on standard error look. RUST_LOG chooses which are shown.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// Microseconds that the dispatch thread spins after the last activity before
    /// it sleeps; 0 never spins. Default: 2000 with at least 8 CPUs, 50 with 4, else 0.
    #[arg(long, value_name = "N")]
    pub spin_us: Option<u64>,
    /// Record what reaches the policy and what it decides, from the start on, into this
    /// file (docs/operate.md); if it is there, into one with a number behind it.
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Check the configuration and the flags, print what they come to, and end: with 0, or with 2
    /// if something is wrong. Neither the policy nor the GPU is looked at.
    #[arg(long)]
    pub check_config: bool,
    /// Run the dispatch thread on this CPU only.
    #[arg(long, value_name = "N")]
    pub pin_cpu: Option<u32>,
    #[command(subcommand)]
    pub task: Option<Task>,
}

/// What is done instead of serving.
#[derive(Debug, Subcommand)]
pub enum Task {
    /// Print a reference document, for `cargo xtask references`.
    #[command(hide = true)]
    Reference {
        /// Reference document to print
        document: Reference,
    },
}

impl Cli {
    /// The configuration file with the flags laid over it.
    ///
    /// # Errors
    /// What is wrong with the file, or with a value.
    pub fn resolve(&self) -> Result<Config, CoreError> {
        let mut config = match &self.config {
            Some(path) => config::read(path)?,
            None => Config::default(),
        };
        if let Some(path) = &self.policy {
            config.policy.file = Some(path.clone());
        }
        if let Some(path) = &self.policy_config {
            config.policy.config_file = Some(path.clone());
        }
        if let Some(mode) = self.sharing {
            config.sharing.mode = mode;
        }
        if let Some(path) = &self.socket {
            config.socket.path = Some(path.clone());
        }
        if let Some(path) = &self.admin_socket {
            config.admin.socket = Some(path.clone());
        }
        if self.spin_us.is_some() {
            config.dispatch.spin_us = self.spin_us;
        }
        if let Some(path) = &self.log {
            config.log.file = Some(path.clone());
        }
        if self.pin_cpu.is_some() {
            config.dispatch.pin_cpu = self.pin_cpu;
        }
        config.check()?;
        config.admin_socket()?;
        Ok(config)
    }
}

/// The log is written by a thread of its own and drops lines rather than wait:
/// a policy's log lines come from the dispatch thread, which must not hang on a
/// reader of our standard error that stopped reading. Flushed when dropped.
fn start_log(format: LogFormat) -> tracing_appender::non_blocking::WorkerGuard {
    let (writer, guard) = tracing_appender::non_blocking(std::io::stderr());
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    match format {
        LogFormat::Text => {
            log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init();
        }
        LogFormat::Json => log.json().init(),
    }
    guard
}

fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tally-core: standard output: {error}");
            ExitCode::from(EXIT_RUNTIME)
        }
    }
}

/// Runs `tally-core`, from its arguments to its exit code.
pub fn main() -> ExitCode {
    tally_wasm_host::serve_if_child();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    if let Some(Task::Reference { document }) = cli.task {
        return print(&document.text());
    }
    if cli.check_config {
        let checked = cli.resolve().and_then(|config| {
            crate::loader::trust(&config.policy).map_err(ConfigError::Value)?;
            Ok::<_, CoreError>(config.effective()?)
        });
        return match checked {
            Ok(text) => print(&text),
            Err(error) => {
                eprintln!("tally-core: {error}");
                error.exit_code()
            }
        };
    }
    let log = start_log(cli.log_format);
    let outcome = cli.resolve().and_then(crate::run::run);
    drop(log);
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One plain line besides the log, so that it is seen whatever
            // RUST_LOG hides.
            eprintln!("tally-core: {error}");
            match error {
                CoreError::Dispatch(_) => ExitCode::from(EXIT_RUNTIME),
                error => error.exit_code(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent_and_every_flag_is_documented() {
        let command = Cli::command();
        command.clone().debug_assert();
        for argument in command.get_arguments() {
            assert!(argument.get_help().is_some(), "{} has no help", argument.get_id());
        }
    }

    #[test]
    fn flags_win_over_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.toml");
        std::fs::write(&file, "[dispatch]\nspin_us = 7\n[socket]\npath = \"/a\"\n").unwrap();
        let cli = Cli::try_parse_from([
            "tally-core",
            "--config",
            file.to_str().unwrap(),
            "--socket",
            "/b/clients/s",
            "--sharing",
            "mps",
        ])
        .unwrap();
        let config = cli.resolve().unwrap();
        assert_eq!(config.dispatch.spin_us, Some(7));
        assert_eq!(config.socket.path.as_deref(), Some(std::path::Path::new("/b/clients/s")));
        assert_eq!(config.sharing.mode, SharingChoice::Mps);
    }
}
