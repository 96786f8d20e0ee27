//! Why a component was not compiled.

/// More of something than a component may have; found before anything is built of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it has more than {most} {what}")]
pub struct TooMany {
    /// What there is too much of, as a plural noun.
    pub what: &'static str,
    pub most: u64,
}

/// Why a component was not compiled.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// Too many parts, or too deep.
    #[error(transparent)]
    TooMany(#[from] TooMany),
    /// It cannot be read or is not valid.
    #[error("{0}")]
    Invalid(String),
    /// It does not fit into the host that it was compiled for.
    #[error("{0}")]
    Unfit(wasmtime::Error),
    /// The compiler needed more memory than it may have.
    #[error("the compiler needs more than {} MiB of memory for it", .0 >> 20)]
    Memory(u64),
    /// The compiler ran for longer than it may.
    #[error("the compiler needs more than {0} s of CPU time for it")]
    CpuTime(u64),
    /// The compiler was given too little CPU time to end.
    #[error("the compiler did not end within {0} s, without having used its CPU time")]
    WallTime(u64),
    /// The native code is too long.
    #[error("its native code is longer than {0} bytes")]
    Output(u64),
    /// A later request stopped the compilation.
    #[error("stopped, for another request came")]
    Cancelled,
    /// The compiler died of something else: a bug in it.
    #[error("the compiler failed ({how}){}", if .said.is_empty() { String::new() } else { format!(": {}", .said) })]
    Crashed {
        /// Exit code or signal of the compiler process.
        how: String,
        /// The last line that it wrote.
        said: String,
    },
    /// No compiler process could be started.
    #[error("the compiler process cannot be {doing}: {source}")]
    Process { doing: &'static str, source: std::io::Error },
    /// `main` does not begin with [`serve_if_child`](crate::serve_if_child).
    #[error(
        "this program cannot compile components in a child: its `main` does not begin with \
         `tally_compiler::serve_if_child()`"
    )]
    NotServed,
}
