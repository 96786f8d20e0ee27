//! `tallyctl run`: set the shim up in the environment and become the program.

use crate::admin::Core;
use crate::cli::{Fail, RunArgs};
use crate::error::CtlError;
use serde_json::json;
use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tally_ipc::wire;

const SHIM: &str = "libtally_shim.so";
const PRELOAD: &str = "LD_PRELOAD";
/// Between labels in the environment.
const LABEL_SEPARATOR: &str = "\x1f";

/// Where the shim is, if it is not named.
fn find_shim(named: Option<&Path>) -> Result<PathBuf, CtlError> {
    let places: Vec<PathBuf> = match named {
        Some(path) => vec![path.into()],
        None => {
            let program = std::env::current_exe().unwrap_or_default();
            let folder = program.parent().unwrap_or(Path::new("."));
            vec![folder.join(SHIM), folder.join("../lib/tally").join(SHIM)]
        }
    };
    let found = places.iter().find_map(|p| std::fs::canonicalize(p).ok());
    found.ok_or(CtlError::NoShim(places))
}

/// The shim before what is preloaded already, once.
fn preload(shim: &Path, before: Option<&OsStr>) -> Result<OsString, CtlError> {
    // The dynamic loader splits at colons and blanks and knows no quoting.
    if shim.as_os_str().as_encoded_bytes().iter().any(|b| matches!(b, b':' | b' ' | b'\t')) {
        return Err(CtlError::Usage(format!(
            "the shim's path {} has a colon or a blank, which LD_PRELOAD cannot express: copy it \
             elsewhere and use --shim",
            shim.display()
        )));
    }
    let mut all = shim.as_os_str().to_owned();
    if let Some(before) = before.filter(|b| !b.is_empty() && *b != shim.as_os_str()) {
        all.push(":");
        all.push(before);
    }
    Ok(all)
}

fn check_label(label: &str) -> Result<(), CtlError> {
    let wrong = |why: String| CtlError::Usage(format!("--label {label:?}: {why}"));
    let (key, value) = label
        .split_once('=')
        .filter(|(key, _)| !key.is_empty())
        .ok_or_else(|| wrong("expected KEY=VALUE".into()))?;
    if label.chars().any(char::is_control) {
        return Err(wrong("control characters are not allowed".into()));
    }
    if key.len() > wire::TEXT_BYTES_MAX || value.len() > wire::TEXT_BYTES_MAX {
        return Err(wrong(format!("key and value have at most {} bytes", wire::TEXT_BYTES_MAX)));
    }
    Ok(())
}

/// What is set for the program.
fn environment(
    socket: &Path,
    args: &RunArgs,
    shim: &Path,
    preloaded: Option<&OsStr>,
) -> Result<Vec<(&'static str, OsString)>, CtlError> {
    if args.labels.len() > wire::LABELS_MAX {
        return Err(CtlError::Usage(format!(
            "{} labels: at most {} are kept",
            args.labels.len(),
            wire::LABELS_MAX
        )));
    }
    args.labels.iter().try_for_each(|l| check_label(l))?;
    let program = Path::new(&args.command[0]);
    let name = match &args.name {
        Some(name) => name.into(),
        None => program.file_name().unwrap_or(program.as_os_str()).to_owned(),
    };
    let socket = std::path::absolute(socket).unwrap_or_else(|_| socket.into());
    let mut all = vec![
        (wire::ENV_SOCKET, socket.into_os_string()),
        (wire::ENV_PRIORITY, args.priority.as_str().into()),
        (wire::ENV_NAME, name),
        (wire::ENV_LABELS, args.labels.join(LABEL_SEPARATOR).into()),
        (PRELOAD, preload(shim, preloaded)?),
    ];
    if let Some(fail) = args.fail {
        let value = match fail {
            Fail::Open => "open",
            Fail::Hold => "hold",
        };
        all.push((wire::ENV_FAIL, value.into()));
    }
    Ok(all)
}

/// Become the program. Returns only if that fails.
pub fn run(socket: &Path, args: &RunArgs) -> Result<Infallible, CtlError> {
    let shim = find_shim(args.shim.as_deref())?;
    let preloaded = std::env::var_os(PRELOAD);
    let environment = environment(socket, args, &shim, preloaded.as_deref())?;
    if !args.no_check {
        Core::connect(socket)?.ask(&json!({"cmd": "status", "kernels": 0}))?;
    }
    let source = Command::new(&args.command[0]).args(&args.command[1..]).envs(environment).exec();
    Err(CtlError::Exec { program: args.command[0].to_string_lossy().into_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Priority;

    fn args() -> RunArgs {
        RunArgs {
            priority: Priority::High,
            name: None,
            labels: vec!["team=a".into(), "slo=10".into()],
            fail: Some(Fail::Hold),
            shim: None,
            no_check: true,
            command: vec!["/usr/bin/python3".into(), "x.py".into()],
        }
    }

    #[test]
    fn the_environment_says_all_the_shim_needs() {
        let got =
            environment(Path::new("/s"), &args(), Path::new("/l/shim.so"), Some("/a.so".as_ref()))
                .unwrap();
        let expected = [
            ("TALLY_SOCKET", "/s"),
            ("TALLY_PRIORITY", "high"),
            ("TALLY_NAME", "python3"),
            ("TALLY_LABELS", "team=a\x1fslo=10"),
            ("LD_PRELOAD", "/l/shim.so:/a.so"),
            ("TALLY_FAIL", "hold"),
        ];
        assert_eq!(got, expected.map(|(k, v)| (k, v.into())));
    }

    #[test]
    fn wrong_labels_are_named() {
        for (label, word) in [("team", "KEY=VALUE"), ("=x", "KEY=VALUE"), ("a=\x1f", "control")] {
            let error = check_label(label).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        let mut many = args();
        many.labels = vec!["a=b".into(); 17];
        assert!(environment(Path::new("/s"), &many, Path::new("/l"), None).is_err());
        assert!(preload(Path::new("/a b/shim.so"), None).is_err());
    }
}
