//! Why the core ends, and the exit code that says so to scripts and service
//! managers.

use crate::files::FileError;
use std::path::PathBuf;
use std::process::ExitCode;
use tally_config::ConfigError;

/// Exit code after a drain.
pub const EXIT_DRAINED: u8 = 0;
/// Exit code of a failure at run time.
pub const EXIT_RUNTIME: u8 = 1;
/// Exit code of a wrong command line or configuration. Restarting does not help.
pub const EXIT_USAGE: u8 = 2;
/// Exit code when no policy could be loaded. Restarting does not help.
pub const EXIT_POLICY: u8 = 3;
/// Exit code when a live core has the socket already.
pub const EXIT_IN_USE: u8 = 4;

fn holder(pid: Option<u32>) -> String {
    match pid {
        Some(pid) => format!("process {pid}"),
        None => "which process that is is not known".into(),
    }
}

fn to_do(pid: Option<u32>, is_gone: bool) -> String {
    if !is_gone {
        return "stop it with `tallyctl stop`, or choose another with --socket".into();
    }
    let kill = pid.map_or_else(|| "kill it".into(), |pid| format!("`kill {pid}`"));
    format!(
        "its socket file is gone, or not there yet; it makes it anew within seconds. Then stop it with `tallyctl stop`, \
         before with {kill}, or choose another with --socket"
    )
}

/// What stops the core.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// A configuration file could not be read.
    #[error("configuration file {0}")]
    ConfigRead(FileError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Policy(String),
    /// Another core serves the socket.
    #[error("socket {path} is in use by a live core ({}): {}", holder(*pid), to_do(*pid, *is_gone))]
    InUse {
        path: PathBuf,
        /// Process of the other core, if it is known.
        pid: Option<u32>,
        /// The other core's socket file is not there.
        is_gone: bool,
    },
    /// The socket's place cannot be used.
    #[error("socket {path}: {message}")]
    Socket {
        path: PathBuf,
        /// What is wrong and what to do.
        message: String,
    },
    /// The way of sharing the GPU that was required is not to be had.
    #[error("sharing: {0}")]
    SharingMode(String),
    /// A system call that should not fail did.
    #[error("{what}: {source}")]
    Os { what: &'static str, source: std::io::Error },
    /// The dispatch thread is gone.
    #[error("the dispatch thread ended unexpectedly: {0}")]
    Dispatch(String),
}

impl CoreError {
    /// For `map_err`: a system call failed.
    pub fn os<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> CoreError {
        move |source| CoreError::Os { what, source: source.into() }
    }

    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            CoreError::ConfigRead(_) | CoreError::Config(_) => EXIT_USAGE,
            CoreError::Policy(_) => EXIT_POLICY,
            CoreError::InUse { .. } => EXIT_IN_USE,
            CoreError::Socket { .. }
            | CoreError::SharingMode(_)
            | CoreError::Os { .. }
            | CoreError::Dispatch(_) => EXIT_RUNTIME,
        })
    }
}
