//! What can go wrong and the exit code that says so.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub const EXIT_FAILURE: u8 = 1;
/// A wrong command line.
pub const EXIT_USAGE: u8 = 2;
/// `log replay`: neither equal nor shown to differ.
pub const EXIT_NO_PROOF: u8 = 3;
/// `EX_UNAVAILABLE`: no core answers.
pub const EXIT_NO_CORE: u8 = 69;
/// As `env(1)`: the program was found and cannot be run.
pub const EXIT_NOT_EXECUTABLE: u8 = 126;
/// As `env(1)`: the program was not found.
pub const EXIT_NOT_FOUND: u8 = 127;

fn uid() -> u32 {
    rustix::process::getuid().as_raw()
}

#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// Nobody serves the socket.
    #[error(
        "no core answers at {socket}: {why}\nStart one with `tally-core` or name another with \
         --socket, TALLY_SOCKET or --admin-socket"
    )]
    NoCore { socket: PathBuf, why: String },
    /// The core refused a request, in its own words.
    #[error("{message}")]
    Refused { message: String },
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
    Exec { program: String, source: std::io::Error },
    /// A file of the user's could not be read or written.
    #[error("{what} cannot be {done} {}: {source}", path.display())]
    File {
        /// What the file is to the user.
        what: &'static str,
        /// `read from` or `written to`.
        done: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// A comparison that neither succeeded nor failed, in its own words.
    #[error("{0}")]
    NoProof(String),
    /// This user may not open the core's socket.
    #[error("{} may not be opened by this user (user {}): {why}\nAsk as the core's user or as root; `mode` under [socket] or [admin] in the core's configuration, and the \
         permissions of the socket's folder, let in others", socket.display(), uid())]
    NoAccess { socket: PathBuf, why: String },
    /// Something that needs no core, in its own words.
    #[error("{0}")]
    Failed(String),
    /// Writing the output failed.
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
}

impl CtlError {
    /// For `map_err`: a file could not be read or written.
    pub fn file(
        what: &'static str,
        done: &'static str,
        path: &Path,
    ) -> impl FnOnce(std::io::Error) -> CtlError {
        move |source| CtlError::File { what, done, path: path.into(), source }
    }

    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            CtlError::NoCore { .. } => EXIT_NO_CORE,
            CtlError::Usage(_) => EXIT_USAGE,
            CtlError::NoProof(_) => EXIT_NO_PROOF,
            CtlError::Exec { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                EXIT_NOT_FOUND
            }
            CtlError::Exec { .. } => EXIT_NOT_EXECUTABLE,
            CtlError::Refused { .. }
            | CtlError::Answer(_)
            | CtlError::File { .. }
            | CtlError::Failed(_)
            | CtlError::NoAccess { .. }
            | CtlError::NoLibrary(_)
            | CtlError::Output(_) => EXIT_FAILURE,
        })
    }
}
