//! Files that are no configuration, named as one on the core's command line: refused by name, at once, and nothing of
//! their content is shown.

mod common;

use common::{BUILT_IN, Core, PATIENCE, policy};
use rustix::fs::{FileType, Mode};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

/// How the core ends that is started so, and what it says.
fn refused(dir: &Path, config: &str, args: &[&str]) -> (Option<i32>, String) {
    let mut command = Core::command(dir, config, args);
    let mut child = command.stdin(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("the core took {args:?} for a configuration, or waits for it");
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    (status.code(), std::fs::read_to_string(dir.join("log")).unwrap())
}

/// Lines and fields of a file of passwords.
fn secrets(text: &str) -> impl Iterator<Item = &str> {
    text.lines().flat_map(|line| {
        line.split(':').nth(1).into_iter().chain([line]).filter(|part| part.len() > 3)
    })
}

#[test]
fn what_is_no_configuration_is_refused_by_name_and_not_shown() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    let mode = Mode::RUSR | Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, mode, 0).unwrap();
    let planted = dir.path().join("passwords");
    let content = "root:$y$j9T$PLANTED:19000:0:99999:7:::\ndaemon:*:19000:0:99999:7:::\n";
    std::fs::write(&planted, content).unwrap();
    let large = dir.path().join("large");
    std::fs::File::create(&large).unwrap().set_len(3 << 20).unwrap();
    let shadow = PathBuf::from("/etc/shadow");
    // Root can read it; others cannot.
    let shadows = std::fs::read_to_string(&shadow).unwrap_or_default();
    let files: [(PathBuf, &str); 5] = [
        (fifo, "is a FIFO: expected a regular file"),
        ("/dev/zero".into(), "is a device: expected a regular file"),
        (shadow, if shadows.is_empty() { "cannot be read" } else { "line 1: " }),
        (planted, "line 1: "),
        (large, "more than 1048576 bytes"),
    ];
    let default = policy("tally-priority").to_string_lossy().into_owned();
    let required = format!("[policy]\nfile = '{default}'\n");
    for (path, why) in files {
        let path = path.to_string_lossy().into_owned();
        for (option, config, exit_code) in
            [("--config", BUILT_IN, 2), ("--policy-config", &*required, 3)]
        {
            // Each of the two is given once.
            let (code, said) = match option {
                "--config" => refused_as_config(dir.path(), &path),
                _ => refused(dir.path(), config, &[option, &path]),
            };
            assert_eq!(code, Some(exit_code), "{option} {path}: {said}");
            // A policy says itself what is wrong with its configuration.
            let is_named =
                said.contains(&path) || (option == "--policy-config" && why == "line 1: ");
            assert!(is_named && said.contains(why), "{option} {path}: {said}");
            for secret in secrets(content).chain(secrets(&shadows)) {
                assert!(!said.contains(secret), "{option} {path}: {said}");
            }
        }
    }
}

/// With this file alone as configuration.
fn refused_as_config(dir: &Path, path: &str) -> (Option<i32>, String) {
    let output = std::process::Command::new("timeout")
        .args(["60", env!("CARGO_BIN_EXE_tally-core"), "--config", path, "--socket"])
        .arg(dir.join("run/clients/core.sock"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&said).into_owned())
}
