//! The unit file, as systemd understands it.

use std::path::Path;
use std::process::Command;

const UNIT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/systemd/tally-core@.service");

/// What hardens it is there, and what would turn administrators away is not.
#[test]
fn the_unit_is_hardened() {
    let unit = std::fs::read_to_string(UNIT).unwrap();
    for line in [
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=CAP_SYS_PTRACE",
        "ProtectSystem=strict",
        "PrivateTmp=yes",
        "RestrictAddressFamilies=AF_UNIX",
        "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service",
        // Neither for long, nor for good, as long as the next start may be another one.
        "StartLimitIntervalSec=0",
        "RestartPreventExitStatus=2 4",
    ] {
        assert!(unit.lines().any(|l| l == line), "{line}");
    }
    for not in ["PrivateUsers=yes", "PrivatePIDs=yes", "MemoryDenyWriteExecute=yes"] {
        assert!(!unit.lines().any(|l| l == not), "{not}");
    }
    assert!(unit.contains("/clients/core.sock"), "the admin socket follows from it");
}

/// `cargo xtask test unit` runs it where there is `systemd-analyze`, and says so where there is none.
#[test]
#[ignore = "needs systemd-analyze"]
fn systemd_understands_the_unit() {
    let dir = tempfile::tempdir().unwrap();
    // It looks for the program, which is not installed here.
    let program = dir.path().join("tally-core");
    std::fs::copy("/bin/true", &program).unwrap();
    let text = std::fs::read_to_string(UNIT).unwrap();
    let text = text.replace("/usr/bin/tally-core", program.to_str().unwrap());
    let unit = dir.path().join(Path::new(UNIT).file_name().unwrap());
    let verify = |text: &str| {
        std::fs::write(&unit, text).unwrap();
        let instance = dir.path().join("tally-core@gpu0.service");
        let _ = std::os::unix::fs::symlink(&unit, &instance);
        let output = Command::new("systemd-analyze").arg("verify").arg(&instance).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (good, said) = verify(&text);
    let about = |said: &str| said.lines().any(|line| line.contains("tally-core@"));
    assert!(good && !about(&said), "{said}");
    // It would say so.
    let (_, said) = verify(&text.replace("NoNewPrivileges=yes", "NoNewPrivilegesX=yes"));
    assert!(about(&said), "{said}");
}
