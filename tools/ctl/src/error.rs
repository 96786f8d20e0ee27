//! What can go wrong and the exit code that says so.

use std::path::PathBuf;
use std::process::ExitCode;

/// A failure.
pub const EXIT_FAILURE: u8 = 1;
/// A wrong command line.
pub const EXIT_USAGE: u8 = 2;
/// `EX_UNAVAILABLE`: no core answers.
pub const EXIT_NO_CORE: u8 = 69;
/// As `env(1)`: the program was found and cannot be run.
pub const EXIT_NOT_EXECUTABLE: u8 = 126;
/// As `env(1)`: the program was not found.
pub const EXIT_NOT_FOUND: u8 = 127;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// Nobody serves the socket.
    #[error(
        "no core answers at {socket}: {why}\nStart one with `tally-core` or name another with \
         --socket, TALLY_SOCKET or --admin-socket"
    )]
    NoCore {
        /// Where.
        socket: PathBuf,
        /// Why.
        why: String,
    },
    /// The core refused a request, in its own words.
    #[error("{message}")]
    Refused {
        /// Its words.
        message: String,
    },
    /// The core answered something that is not understood.
    #[error(
        "the core's answer is not understood ({0}): install tallyctl and tally-core of one release"
    )]
    Answer(String),
    /// A value on the command line.
    #[error("{0}")]
    Usage(String),
    /// The preloaded library was not found.
    #[error(
        "the library to preload was not found at {}: build it with `cargo build --release -p tally-preload -p tally-shim`, or name it with --preload PATH",
        .0.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NoLibrary(Vec<PathBuf>),
    /// The program cannot be run.
    #[error("{program}: {source}")]
    Exec {
        /// Which.
        program: String,
        /// Why.
        source: std::io::Error,
    },
    /// Something that needs no core, in its own words.
    #[error("{0}")]
    Failed(String),
    /// Writing the output failed.
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
}

impl CtlError {
    /// The process's exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            CtlError::NoCore { .. } => EXIT_NO_CORE,
            CtlError::Usage(_) => EXIT_USAGE,
            CtlError::Exec { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                EXIT_NOT_FOUND
            }
            CtlError::Exec { .. } => EXIT_NOT_EXECUTABLE,
            CtlError::Refused { .. }
            | CtlError::Answer(_)
            | CtlError::Failed(_)
            | CtlError::NoLibrary(_)
            | CtlError::Output(_) => EXIT_FAILURE,
        })
    }
}
