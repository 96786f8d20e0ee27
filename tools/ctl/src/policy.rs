//! `tallyctl policy` and `tallyctl stop`.

pub mod bench;
pub mod check;
mod history;
pub mod info;
pub mod new;
mod rollback;
mod sign;
pub mod wrap;

pub use sign::{KeygenArgs, SignArgs, VerifyArgs};

use crate::admin::{AdminSocket, Core, policy_files, read};
use crate::cli::PolicyCommand;
use crate::error::CtlError;
use std::io::Write;
use std::path::{Path, PathBuf};
use tally_admin::{Active, Request};

/// The contract, as this program knows it.
pub const CONTRACT: &str = include_str!("../../../wit/policy.wit");

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LimitsArg {
    /// The core's defaults.
    Default,
    /// The preset `interpreted`, for components with an interpreter.
    Interpreted,
}

#[cfg(feature = "wasm")]
impl LimitsArg {
    pub fn limits(self) -> tally_wasm_host::Limits {
        match self {
            LimitsArg::Default => tally_wasm_host::Preset::Default.limits(),
            LimitsArg::Interpreted => tally_wasm_host::Preset::Interpreted.limits(),
        }
    }
}

/// A component or module in a regular file.
fn read_component(file: &Path) -> Result<Vec<u8>, String> {
    let about = std::fs::metadata(file).map_err(|e| e.to_string())?;
    if !about.is_file() {
        return Err("expected a regular file".into());
    }
    sign::read(file, sign::POLICY_BYTES_MAX).map_err(|e| e.to_string())
}

/// The text of a policy's configuration; empty if there is none.
#[cfg(feature = "wasm")]
fn config(path: Option<&Path>) -> Result<String, CtlError> {
    path.map_or(Ok(String::new()), |path| {
        std::fs::read_to_string(path)
            .map_err(|e| CtlError::Failed(format!("--config {}: {e}", path.display())))
    })
}

#[cfg(not(feature = "wasm"))]
fn without_wasm(file: &Path) -> CtlError {
    let file = file.display();
    CtlError::Failed(format!(
        "{file}: this tallyctl was built without WebAssembly (feature `wasm`)"
    ))
}

/// The absolute path of a file, which the core shows to people; the core may run in another folder.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.into())
}

/// What asks a core, and what needs none.
pub fn run(socket: &AdminSocket, command: PolicyCommand) -> Result<(), CtlError> {
    let core = || Core::connect(socket);
    let mut out = std::io::stdout().lock();
    match command {
        PolicyCommand::New(args) => return new::run(&args),
        PolicyCommand::Check(args) => return check::run(&args),
        PolicyCommand::Bench(args) => return bench::run(&args),
        PolicyCommand::Info(args) => return info::run(&args),
        PolicyCommand::Wrap(args) => return wrap::run(&args),
        PolicyCommand::Keygen(args) => return sign::keygen(&args),
        PolicyCommand::Sign(args) => return sign::sign(&args),
        PolicyCommand::Verify(args) => return sign::verify(&args),
        PolicyCommand::Show { json: true } => {
            let policy = core()?.ask(&Request::PolicyShow {})?;
            writeln!(out, "{policy:#}")?;
        }
        PolicyCommand::Show { json: false } => {
            let policy = core()?.get(&Request::PolicyShow {})?;
            crate::status::policy(&mut out, &policy)?;
        }
        PolicyCommand::Load { file, config } => {
            let files = policy_files("", &file, config.as_deref())?;
            let config = config.as_deref().map(absolute);
            let request = Request::PolicyLoad { path: absolute(&file), config };
            active(&mut out, &read(core()?.ask_about(&request, &files)?)?)?;
        }
        PolicyCommand::History { json } => history::run(&mut core()?, &mut out, json)?,
        PolicyCommand::Rollback { to } => rollback::run(&mut core()?, &mut out, to)?,
    }
    Ok(())
}

/// What was put active, on one line.
fn active(out: &mut impl Write, loaded: &Active) -> std::io::Result<()> {
    writeln!(
        out,
        "{} is active: generation {}, sha256 {}, loaded in {:.0} ms",
        loaded.name, loaded.generation, loaded.digest, loaded.load_ms
    )
}

/// Ask the core to stop.
pub fn stop(socket: &AdminSocket, keep_mps: bool) -> Result<(), CtlError> {
    Core::connect(socket)?.ask(&Request::Stop { keep_mps }).map(drop)
}
