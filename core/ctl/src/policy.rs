//! `tallyctl policy` and `tallyctl stop`.

mod history;
mod rollback;
mod sign;

pub use sign::{KeygenArgs, SignArgs, VerifyArgs};

use crate::admin::Core;
use crate::cli::PolicyCommand;
use crate::error::CtlError;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The core may run in another folder.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.into())
}

/// Show or load, which takes a core, or sign, which does not.
pub fn run(socket: &Path, command: PolicyCommand) -> Result<(), CtlError> {
    let core = || Core::connect(socket);
    let mut out = std::io::stdout().lock();
    match command {
        PolicyCommand::Keygen(args) => return sign::keygen(&args),
        PolicyCommand::Sign(args) => return sign::sign(&args),
        PolicyCommand::Verify(args) => return sign::verify(&args),
        PolicyCommand::Show { json: true } => {
            let policy = core()?.ask(&json!({"cmd": "policy_show"}))?;
            writeln!(out, "{policy:#}")?;
        }
        PolicyCommand::Show { json: false } => {
            let policy = core()?.ask(&json!({"cmd": "policy_show"}))?;
            crate::status::policy(&mut out, &policy)?;
        }
        PolicyCommand::Load { file, config } => {
            let config = config.as_deref().map(absolute);
            let request = json!({"cmd": "policy_load", "path": absolute(&file), "config": config});
            in_charge(&mut out, &core()?.ask(&request)?)?;
        }
        PolicyCommand::History { json } => history::run(&mut core()?, &mut out, json)?,
        PolicyCommand::Rollback { to } => rollback::run(&mut core()?, &mut out, to)?,
    }
    Ok(())
}

/// What was put in charge, on one line.
fn in_charge(out: &mut impl Write, loaded: &Value) -> std::io::Result<()> {
    let text = |key: &str| loaded.get(key).and_then(Value::as_str).unwrap_or("?").to_owned();
    writeln!(
        out,
        "{} is in charge: generation {}, sha256 {}, loaded in {:.0} ms",
        text("name"),
        loaded.get("generation").unwrap_or(&Value::Null),
        text("digest"),
        loaded.get("load_ms").and_then(Value::as_f64).unwrap_or(0.0)
    )
}

/// Ask the core to stop.
pub fn stop(socket: &Path) -> Result<(), CtlError> {
    Core::connect(socket)?.ask(&json!({"cmd": "stop"})).map(drop)
}
