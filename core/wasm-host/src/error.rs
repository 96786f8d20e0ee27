//! Why a policy was refused. Every message says which file, what was wrong and
//! what to do.

use std::path::Path;
use tally_compiler::{CompileError, TooMany};
use tally_engine::policy::Fault;

/// Why the host itself could not start.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A limit under which no policy could run.
    #[error("policy limit {0}")]
    Limit(tally_settings::OutOfRange),
    /// `main` of this program does not begin as it must.
    #[error(transparent)]
    Compiler(#[from] CompileError),
    /// wasmtime refused to start.
    #[error("the WebAssembly engine does not start under these limits: {0}")]
    Engine(String),
}

/// Why a policy was not loaded. The active policy stays active.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file could not be read.
    #[error("{file}: cannot be read: {source}")]
    Read { file: String, source: std::io::Error },
    /// The file is larger than `component_bytes_max`.
    #[error(
        "{file}: is larger than the {bytes_max} bytes that a policy may have: build it in release \
         mode, or raise `component_bytes_max`"
    )]
    TooLarge { file: String, bytes_max: usize },
    /// Nobody who is trusted vouches for it; nothing has looked into it.
    #[error(transparent)]
    Untrusted(#[from] tally_trust::TrustError),
    /// Something else than WebAssembly.
    #[error(
        "{file}: is {found}, not a WebAssembly component: give the `.wasm` file that \
         `cargo xtask policies` (or the SDK of another language) makes"
    )]
    NotWasm {
        file: String,
        /// What it seems to be.
        found: String,
    },
    #[error(
        "{file}: is a core WebAssembly module, not a component: link with `wasm-component-ld` \
         (`cargo xtask policies` does), or wrap it: `tallyctl policy wrap {file} -o policy.wasm`"
    )]
    CoreModule { file: String },
    /// A component that is damaged or uses a feature that policies do not get.
    #[error(
        "{file}: is not a valid component (damaged, or built with a feature such as SIMD or \
         threads that policies do not get): {why}. Build it again"
    )]
    Invalid {
        file: String,
        /// What the validator says.
        why: String,
    },
    /// A component that needs more than the limits allow before it even starts.
    #[error(
        "{file}: needs more than a policy may have: {why}. Raise `memory_bytes` if it is about \
         memory, or build a smaller one"
    )]
    TooDemanding {
        file: String,
        /// The limit that it exceeds, in wasmtime's words.
        why: String,
    },
    /// It has more of something than any policy needs; nothing was built of it.
    #[error(
        "{file}: is not built like a policy: {many}. Build it of fewer or smaller parts (a tool that composes \
         components may have nested them)"
    )]
    TooMany {
        file: String,
        /// What it has too many of.
        many: TooMany,
    },
    /// The compiler process reached one of its limits.
    #[error(
        "{file}: {error}, and was stopped. If you trust the file, raise `{key}` (now {now}) under \
         `[policy.limits]`; else build it smaller, with optimisation"
    )]
    OverBudget {
        file: String,
        error: CompileError,
        /// Key of that limit in the configuration.
        key: &'static str,
        now: u64,
    },
    /// Its compilation was stopped, for another request came.
    #[error("{file}: not loaded: its compilation was stopped by a later request")]
    Cancelled { file: String },
    /// The compiler did not work.
    #[error(
        "{file}: {error}. Load another build of it; if others fail as well, the core is not installed \
         or allowed to start processes as it should be"
    )]
    NotCompiled { file: String, error: CompileError },
    #[error(
        "{file}: imports `{import}`, and policies get no WASI (no files, clock, network or \
         environment): build for `wasm32-unknown-unknown`, or have the tool stub WASI out \
         (`--stub-wasi`)"
    )]
    Wasi {
        file: String,
        /// The first such import.
        import: String,
    },
    /// It imports what the core does not provide.
    #[error(
        "{file}: imports `{import}`, which this core does not provide; it provides {provided}. \
         Build it against this core's `wit/policy.wit`, or use a newer core"
    )]
    UnknownImport {
        file: String,
        /// Interface and function, as `INTERFACE#FUNCTION`.
        import: String,
        /// The contract's package and version, and the interfaces that can be imported.
        provided: String,
    },
    /// It imports a function of the contract with another type.
    #[error(
        "{file}: imports `{import}` with another type than this core provides: {why}. Expected \
         `{expected}`. Build it against this core's `wit/policy.wit`"
    )]
    WrongImport {
        file: String,
        /// Interface and function, as `INTERFACE#FUNCTION`.
        import: String,
        /// The function's signature in the contract.
        expected: String,
        why: String,
    },
    /// It imports capabilities that it was not granted.
    #[error(
        "{file}: needs {needed}, which it was not granted: grant it (`capabilities = [{listed}]` \
         under `[policy]` in the core's configuration), or use a policy that does without"
    )]
    NotGranted {
        file: String,
        /// The capabilities, for people.
        needed: String,
        /// The capabilities as a TOML list.
        listed: String,
    },
    #[error(
        "{file}: does not export `{export}` (it exports {found}). Expected `{expected}`: \
         implement the world `policy` of this core's `wit/policy.wit`"
    )]
    MissingExport {
        file: String,
        /// Interface and function, as `INTERFACE#FUNCTION`.
        export: String,
        /// The contract's words for it.
        expected: String,
        found: String,
    },
    /// It exports a function of the contract with another type.
    #[error(
        "{file}: exports `{export}` with another type than the contract's: {why}. Expected \
         `{expected}`. Build it against this core's `wit/policy.wit`"
    )]
    WrongExport {
        file: String,
        /// Interface and function, as `INTERFACE#FUNCTION`.
        export: String,
        /// The function's signature in the contract.
        expected: String,
        why: String,
    },
    /// Its `init` returned an error.
    #[error("{file}: refuses its configuration: {message}")]
    InitRefused {
        file: String,
        /// The policy's own words.
        message: String,
    },
    /// It could not be started, or its `init` failed.
    #[error("{file}: failed while it was started: {fault}")]
    InitFailed { file: String, fault: Fault },
}

impl LoadError {
    /// As text, for who named this file of the policy's configuration.
    pub fn with_config_file(&self, config_file: Option<&Path>) -> String {
        match (self, config_file) {
            (LoadError::InitRefused { file, message }, Some(config)) => {
                format!("{}: {file} refuses this configuration: {message}", config.display())
            }
            _ => self.to_string(),
        }
    }
}
