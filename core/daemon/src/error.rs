//! Why the core ends, and the exit code that says so to scripts and service
//! managers.

use std::path::PathBuf;
use std::process::ExitCode;

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

/// What stops the core.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// A configuration file could not be read.
    #[error("configuration file {path}: {source}")]
    ConfigRead {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A configuration file says something that is not understood.
    #[error("configuration file {path}: {message}")]
    ConfigParse {
        /// Which.
        path: PathBuf,
        /// Where and why.
        message: String,
    },
    /// A setting makes no sense.
    #[error("configuration: {0}")]
    ConfigValue(String),
    /// No policy.
    #[error("{0}")]
    Policy(String),
    /// Another core serves the socket.
    #[error(
        "socket {path} is in use by a live core{}: stop it with `tallyctl stop`, or choose another with --socket",
        pid.map(|p| format!(" (process {p})")).unwrap_or_default()
    )]
    InUse {
        /// Which.
        path: PathBuf,
        /// By whom, if it says.
        pid: Option<u32>,
    },
    /// The socket's place cannot be used.
    #[error("socket {path}: {message}")]
    Socket {
        /// Which.
        path: PathBuf,
        /// What is wrong and what to do.
        message: String,
    },
    /// The way of sharing the GPU that was required is not to be had.
    #[error("sharing: {0}")]
    SharingMode(String),
    /// A system call that should not fail did.
    #[error("{what}: {source}")]
    Os {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The dispatch thread is gone.
    #[error("the dispatch thread ended unexpectedly: {0}")]
    Dispatch(String),
}

impl CoreError {
    /// For `map_err`: a system call failed.
    pub fn os<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> CoreError {
        move |source| CoreError::Os { what, source: source.into() }
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            CoreError::ConfigRead { .. }
            | CoreError::ConfigParse { .. }
            | CoreError::ConfigValue(_) => EXIT_USAGE,
            CoreError::Policy(_) => EXIT_POLICY,
            CoreError::InUse { .. } => EXIT_IN_USE,
            CoreError::Socket { .. }
            | CoreError::SharingMode(_)
            | CoreError::Os { .. }
            | CoreError::Dispatch(_) => EXIT_RUNTIME,
        })
    }
}
