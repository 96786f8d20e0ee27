//! `tallyctl log` with a log that somebody else made.
#![cfg(feature = "wasm")]

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tally_decision_log::{About, Base, Begin, Header, Record, Writer};
use tally_engine::policy::Subscriptions;
use tally_wasm_host::Limits;

const EVIL: &str = "\u{1b}]0;x\u{7}\u{9b}1m\nforged\u{202e}";

/// A log whose policy is this file.
fn log(folder: &Path, component: &Path, digest: &str) -> PathBuf {
    log_under(&Limits::default(), folder, component, digest)
}

fn log_under(limits: &Limits, folder: &Path, component: &Path, digest: &str) -> PathBuf {
    let header = Header {
        contract: EVIL.into(),
        core: EVIL.into(),
        started_unix_s: 1,
        limits: serde_json::to_value(limits).unwrap(),
        capabilities: Vec::new(),
    };
    let about = About {
        generation: 1,
        name: EVIL.into(),
        digest: digest.into(),
        path: component.to_str().unwrap().into(),
        reasons: vec![(1, EVIL.into())],
        ..About::default()
    };
    let file = folder.join("hostile.tlog");
    let mut writer = Writer::new(std::fs::File::create(&file).unwrap(), &header).unwrap();
    let subscribed = Subscriptions::of_bits(0);
    for record in [
        Record::Policy(about),
        Record::Base(Base::default()),
        Record::Begin { how: Begin::PolicyStart, lost: 0, subscribed, sm_count: 132 },
        Record::Start(Vec::new()),
        Record::End { reason: EVIL.into(), dropped: 0 },
    ] {
        writer.record(&record).unwrap();
    }
    file
}

fn tallyctl(args: &[&str], file: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallyctl"));
    command.arg("log").args(args).arg(file).output().unwrap()
}

#[test]
fn a_component_whose_bytes_are_not_the_logs_is_not_compiled() {
    let dir = tempfile::tempdir().unwrap();
    let component = dir.path().join("p.wasm");
    std::fs::write(&component, b"no component").unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(&component, Permissions::from_mode(0o644)).unwrap();
    let replayed = |digest: &str| {
        let output = tallyctl(&["replay"], &log(dir.path(), &component, digest));
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let changed = "is no longer the component of the log";
    let why = replayed("");
    assert!(why.contains(changed), "{why}");
    // Compiled, it is refused with other words.
    let why = replayed(&tally_trust::Digest::of(b"no component").hex());
    assert!(why.contains("p.wasm") && !why.contains(changed), "{why}");
}

/// Whoever forges a log knows the digest of the component that it names, and chooses the limits.
#[test]
fn a_component_that_others_can_write_is_not_compiled_and_limits_are_lowered() {
    let dir = tempfile::tempdir().unwrap();
    let component = dir.path().join("p.wasm");
    std::fs::write(&component, b"no component").unwrap();
    std::fs::set_permissions(&component, Permissions::from_mode(0o666)).unwrap();
    let digest = tally_trust::Digest::of(b"no component").hex();
    let forged = Limits { decide_fuel: u64::MAX, compile_cpu_s: u64::MAX, ..Limits::default() };
    let output = tallyctl(&["replay"], &log_under(&forged, dir.path(), &component, &digest));
    assert_eq!(output.status.code(), Some(1));
    let why = String::from_utf8(output.stderr).unwrap();
    let lowered = "its limits decide_fuel, compile_cpu_s exceed those of the preset `interpreted`";
    for part in ["p.wasm: can be written by others (mode 0666)", "--policy FILE", lowered] {
        assert!(why.contains(part), "{part:?} not in {why}");
    }
}

#[test]
fn what_a_log_says_is_printable() {
    let dir = tempfile::tempdir().unwrap();
    let file = log(dir.path(), Path::new("/none"), "");
    for args in [&["show"][..], &["show", "--json"], &["replay"]] {
        let output = tallyctl(args, &file);
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8(said).unwrap());
        assert!(args == ["replay"] || said[0].contains("?]0;x??1m?forged?"), "{said:?}");
        for c in ['\u{1b}', '\u{7}', '\u{9b}', '\u{202e}'] {
            assert!(!said.iter().any(|said| said.contains(c)), "{args:?}: {said:?}");
        }
    }
}
