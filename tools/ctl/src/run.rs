//! `tallyctl run`: set the preloaded library up in the environment and become the program.
//!
//! Whatever is wrong with Tally, the program starts; what keeps it from being governed is said on standard
//! error.

use crate::admin::connect;
use crate::cli::{Fail, Priority, RunArgs};
use crate::error::CtlError;
use crate::inspect;
use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tally_contract::limits::{CLIENT_TEXT_BYTES_MAX, LABELS_MAX, WEIGHT_MAX};
use tally_contract::min_share::{MIN_SHARE, min_share_of_labels};
use tally_contract::objective::{Objective, SLO, SLO_PERCENTILE, TPOT, tpot_of_labels};
use tally_ipc::text::printable;
use tally_ipc::wire::{self, Notice};

const LIBRARY: &str = "libtally_preload.so";
/// What it loads, from its own folder.
const SHIM: &str = "libtally_shim.so";
const PRELOAD: &str = "LD_PRELOAD";
/// Library that NVTX loads into the program: the shim, which counts what the program marks.
const NVTX: &str = "NVTX_INJECTION64_PATH";
const ASAN: &str = "ASAN_OPTIONS";
/// AddressSanitizer's runtime refuses to start behind a preloaded library unless told so.
const ASAN_ORDER: &str = "verify_asan_link_order";
/// Label of the weight.
const WEIGHT: &str = "weight";
/// Separator of labels in the environment variable.
const LABEL_SEPARATOR: &str = "\x1f";
/// Longest wait for the core's answer, before the program starts.
const ANSWER_MAX: Duration = Duration::from_millis(900);

/// Where the preloaded library is, if it is not named.
fn find_library(named: Option<&Path>) -> Result<PathBuf, CtlError> {
    let places: Vec<PathBuf> = match named {
        Some(path) => vec![path.into()],
        None => {
            let program = std::env::current_exe().unwrap_or_default();
            let folder = program.parent().unwrap_or(Path::new("."));
            vec![folder.join(LIBRARY), folder.join("../lib/tally").join(LIBRARY)]
        }
    };
    let found = places.iter().find_map(|p| std::fs::canonicalize(p).ok());
    found.ok_or(CtlError::NoLibrary(places))
}

/// The library before what is preloaded already, once.
fn preload(library: &Path, before: Option<&OsStr>) -> Result<OsString, CtlError> {
    // The dynamic loader splits at colons and blanks and knows no quoting.
    if library.as_os_str().as_encoded_bytes().iter().any(|b| matches!(b, b':' | b' ' | b'\t')) {
        return Err(CtlError::Usage(format!(
            "the path {} has a colon or a blank, which LD_PRELOAD cannot express: copy the library and \
             {SHIM} elsewhere and use --preload",
            library.display()
        )));
    }
    let mut all = library.as_os_str().to_owned();
    if let Some(before) = before.filter(|b| !b.is_empty() && *b != library.as_os_str()) {
        all.push(":");
        all.push(before);
    }
    Ok(all)
}

/// What AddressSanitizer is to be told; `None` if it has been.
fn asan_options(before: Option<&OsStr>) -> Option<OsString> {
    let before = before.unwrap_or_default();
    if before.to_string_lossy().contains(ASAN_ORDER) {
        return None;
    }
    let mut all = before.to_owned();
    if !all.is_empty() {
        all.push(":");
    }
    all.push(ASAN_ORDER);
    all.push("=0");
    Some(all)
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
    if key.len() > CLIENT_TEXT_BYTES_MAX || value.len() > CLIENT_TEXT_BYTES_MAX {
        return Err(wrong(format!("key and value have at most {} bytes", CLIENT_TEXT_BYTES_MAX)));
    }
    Ok(())
}

/// A label `weight` that is none would count as 1.
fn check_weight((key, value): (&str, &str)) -> Result<(), CtlError> {
    match value.parse() {
        _ if key != WEIGHT => Ok(()),
        Ok(1..=WEIGHT_MAX) => Ok(()),
        _ => Err(CtlError::Usage(format!(
            "label {WEIGHT}={value:?}: expected a whole number from 1 to {WEIGHT_MAX}"
        ))),
    }
}

/// What is set for the program.
fn environment(
    socket: &Path,
    args: &RunArgs,
    preload: Option<OsString>,
    asan: Option<&OsStr>,
    nvtx: Option<OsString>,
) -> Result<Vec<(&'static str, OsString)>, CtlError> {
    let pairs = args.labels.iter().filter_map(|label| label.split_once('='));
    Objective::of_labels(pairs.clone())
        .and(tpot_of_labels(pairs.clone()))
        .and(min_share_of_labels(pairs))
        .map_err(|why| CtlError::Usage(format!("label {why}")))?;
    // Objectives are labels.
    let slo = args.slo.map(|ms| format!("{SLO}={ms}ms"));
    let percentile = args.percentile.map(|share| format!("{SLO_PERCENTILE}={share}"));
    let tpot = args.tpot.map(|ms| format!("{TPOT}={ms}ms"));
    let weight = args.weight.map(|weight| format!("{WEIGHT}={weight}"));
    let min_share = args.min_share.map(|percent| format!("{MIN_SHARE}={percent}%"));
    let sugar = slo.iter().chain(&percentile).chain(&tpot).chain(&weight).chain(&min_share);
    let labels: Vec<&str> = sugar.chain(&args.labels).map(String::as_str).collect();
    if labels.len() > LABELS_MAX {
        let count = labels.len();
        return Err(CtlError::Usage(format!("{count} labels: at most {LABELS_MAX} are kept")));
    }
    args.labels.iter().try_for_each(|l| check_label(l))?;
    args.labels.iter().filter_map(|label| label.split_once('=')).try_for_each(check_weight)?;
    if args.weight.is_some() && args.priority == Priority::High {
        let why = "--weight is for best-effort programs: those of high priority do not wait for each other";
        return Err(CtlError::Usage(why.into()));
    }
    if args.min_share.is_some() && args.priority == Priority::High {
        let why = "--min-share is for best-effort programs: those of high priority never wait";
        return Err(CtlError::Usage(why.into()));
    }
    if (args.slo.or(args.tpot)).is_some() && args.priority != Priority::High {
        let why = "--slo and --tpot need --priority high: only high-priority programs are measured";
        return Err(CtlError::Usage(why.into()));
    }
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
        (wire::ENV_LABELS, labels.join(LABEL_SEPARATOR).into()),
    ];
    all.extend(preload.map(|value| (PRELOAD, value)));
    all.extend(asan_options(asan).map(|value| (ASAN, value)));
    all.extend(nvtx.map(|value| (NVTX, value)));
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
    let library = find_library(args.preload.as_deref())?;
    let program = &args.command[0];
    let name = program.to_string_lossy().into_owned();
    let mut reason = inspect::obstacle(program);
    if reason.is_none() {
        let shim = library.with_file_name(SHIM);
        reason = if !shim.is_file() {
            let why = format!("{SHIM} is not in the folder of {}", library.display());
            Some(inspect::Obstacle { reason: why, leave_out_preload: false })
        } else {
            [&library, &shim].into_iter().find_map(|file| inspect::not_a_library(file))
        };
    }
    let preload = match &reason {
        Some(obstacle) if obstacle.leave_out_preload => None,
        _ => Some(preload(&library, std::env::var_os(PRELOAD).as_deref())?),
    };
    // Nobody reads the marks of best-effort programs. A profiler that has it keeps it.
    let nvtx = (args.priority == Priority::High && preload.is_some())
        .then(|| library.with_file_name(SHIM).into_os_string())
        .filter(|_| std::env::var_os(NVTX).is_none_or(|named| named.is_empty()));
    let asan = std::env::var_os(ASAN);
    let environment = environment(socket, args, preload, asan.as_deref(), nvtx)?;
    if let Some(obstacle) = &reason {
        eprintln!("tallyctl: {name} will not be governed: {}", obstacle.reason);
    }
    if !args.no_check {
        let answered = ping(socket, args.priority).map(|not_high| {
            if let Some(why) = not_high {
                eprintln!("tallyctl: {name} runs as best-effort, not with high priority: {why}");
            }
            if let Some(obstacle) = &reason {
                let name = args.name.clone().unwrap_or_else(|| base_name(program));
                tell(socket, name, obstacle.reason.clone());
            }
        });
        if let Err(error) = answered
            && reason.is_none()
        {
            let why = match error {
                CtlError::NoCore { socket, why } => {
                    format!("no core answers at {} ({why})", socket.display())
                }
                CtlError::NoAccess { socket, why } => {
                    format!("this user may not open {} ({why})", socket.display())
                }
                other => other.to_string(),
            };
            eprintln!("tallyctl: {why}: {name} starts now, and is governed once a core answers");
        }
    }
    let source = Command::new(program).args(&args.command[1..]).envs(environment).exec();
    Err(CtlError::Exec { program: name, source })
}

fn base_name(program: &OsStr) -> String {
    let file = Path::new(program).file_name().unwrap_or(program);
    file.to_string_lossy().into_owned()
}

/// Tell the core of a program that is not governed: this process, which becomes it. If the core does not
/// take it, standard error has said it.
fn tell(socket: &Path, name: String, reason: String) {
    if let Ok(core) = connect(socket, ANSWER_MAX) {
        let _ = wire::send(core.as_fd(), &Notice { name, reason }.encode(), &[]);
    }
}

/// Whether a core serves clients. Only their socket is asked: what becomes of admin requests keeps no program from
/// starting.
/// The answer: why the program would not be high priority, if it is to be and would not.
fn ping(socket: &Path, priority: Priority) -> Result<Option<String>, CtlError> {
    let core = connect(socket, ANSWER_MAX)?;
    let question: &[u8] = match priority {
        Priority::High => &[wire::PING, wire::PING_HIGH],
        Priority::BestEffort => &[wire::PING],
    };
    let answered =
        wire::send(core.as_fd(), question, &[]).and_then(|()| wire::receive(core.as_fd()));
    match answered {
        Ok((answer, _)) if answer.first() == Some(&wire::PING) => {
            let why = printable(String::from_utf8_lossy(&answer[1..]).into_owned());
            Ok(Some(why).filter(|why| !why.is_empty()))
        }
        Ok(_) => {
            Err(CtlError::NoCore { socket: socket.into(), why: "it answers something else".into() })
        }
        Err(e) => Err(CtlError::NoCore { socket: socket.into(), why: e.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> RunArgs {
        RunArgs {
            priority: Priority::High,
            name: None,
            labels: vec!["team=a".into()],
            slo: Some(1.5),
            percentile: Some(99.9),
            tpot: Some(8.0),
            weight: None,
            min_share: None,
            fail: Some(Fail::Hold),
            preload: None,
            no_check: true,
            command: vec!["/usr/bin/python3".into(), "x.py".into()],
        }
    }

    #[test]
    fn the_environment_says_all_the_shim_needs() {
        let got = environment(
            Path::new("/s"),
            &args(),
            Some("/l/p.so".into()),
            Some("abort_on_error=1".as_ref()),
            Some("/l/s.so".into()),
        )
        .unwrap();
        let expected = [
            ("TALLY_SOCKET", "/s"),
            ("TALLY_PRIORITY", "high"),
            ("TALLY_NAME", "python3"),
            ("TALLY_LABELS", "slo=1.5ms\x1fslo-percentile=99.9\x1ftpot=8ms\x1fteam=a"),
            ("LD_PRELOAD", "/l/p.so"),
            ("ASAN_OPTIONS", "abort_on_error=1:verify_asan_link_order=0"),
            ("NVTX_INJECTION64_PATH", "/l/s.so"),
            ("TALLY_FAIL", "hold"),
        ];
        assert_eq!(got, expected.map(|(k, v)| (k, v.into())));
    }

    #[test]
    fn objectives_are_checked_before_the_program_starts() {
        let why = |args: &RunArgs| {
            environment(Path::new("/s"), args, None, None, None).unwrap_err().to_string()
        };
        let best_effort = RunArgs { priority: Priority::BestEffort, ..args() };
        assert!(why(&best_effort).starts_with("--slo and --tpot need --priority high"));
        let label = RunArgs { labels: vec!["slo=20".into()], ..args() };
        assert_eq!(
            why(&label),
            "label slo=\"20\": expected a time from 10us to 600s with its unit, such as 20ms"
        );
    }

    #[test]
    fn a_weight_is_a_label_and_checked_before_the_program_starts() {
        let best_effort = || RunArgs {
            priority: Priority::BestEffort,
            slo: None,
            percentile: None,
            tpot: None,
            ..args()
        };
        let labels = |args: &RunArgs| {
            let all = environment(Path::new("/s"), args, None, None, None)?;
            let labels = all.into_iter().find(|(name, _)| *name == "TALLY_LABELS");
            Ok::<_, CtlError>(labels.map(|(_, value)| value.to_string_lossy().into_owned()))
        };
        let heavy = RunArgs { weight: Some(3), min_share: Some(12.5), ..best_effort() };
        let expected = "weight=3\x1fmin-share=12.5%\x1fteam=a";
        assert_eq!(labels(&heavy).unwrap().as_deref(), Some(expected));
        let wrong = RunArgs { labels: vec!["min-share=95%".into()], ..best_effort() };
        let why = labels(&wrong).unwrap_err().to_string();
        assert!(why.contains("label min-share=\"95%\": expected a share of GPU time"), "{why}");
        let high = RunArgs { min_share: Some(5.0), ..args() };
        assert!(labels(&high).unwrap_err().to_string().starts_with("--min-share is for"));
        for wrong in ["0", "1001", "many", "-1", ""] {
            let label = RunArgs { labels: vec![format!("weight={wrong}")], ..best_effort() };
            let why = labels(&label).unwrap_err().to_string();
            assert!(why.contains("expected a whole number from 1 to 1000"), "{why}");
        }
        let high = RunArgs { weight: Some(3), ..args() };
        assert!(labels(&high).unwrap_err().to_string().contains("for best-effort programs"));
    }

    #[test]
    fn wrong_labels_are_named() {
        for (label, word) in [("team", "KEY=VALUE"), ("=x", "KEY=VALUE"), ("a=\x1f", "control")] {
            let error = check_label(label).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        let mut many = args();
        many.labels = vec!["a=b".into(); 17];
        assert!(environment(Path::new("/s"), &many, None, None, None).is_err());
    }

    #[test]
    fn what_is_set_already_is_kept() {
        let library = Path::new("/l/p.so");
        assert_eq!(preload(library, Some("/a.so".as_ref())).unwrap(), "/l/p.so:/a.so");
        assert_eq!(preload(library, Some("/l/p.so".as_ref())).unwrap(), "/l/p.so");
        assert!(preload(Path::new("/a b/p.so"), None).is_err());
        assert_eq!(asan_options(None).unwrap(), "verify_asan_link_order=0");
        assert_eq!(asan_options(Some("verify_asan_link_order=1".as_ref())), None);
    }
}
