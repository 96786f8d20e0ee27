//! The program on the software device.

use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Where the software device is.
fn library() -> PathBuf {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let places = [deps.join("libtally_simcuda.so"), deps.join("../libtally_simcuda.so")];
    let newest = places.iter().filter_map(|p| Some((p.metadata().ok()?.modified().ok()?, p))).max();
    newest.expect("no libtally_simcuda.so: build tally-simcuda as well").1.canonicalize().unwrap()
}

fn start(folder: &tempfile::TempDir) -> Child {
    Command::new(env!("CARGO_BIN_EXE_tally-refresh"))
        .env("LD_LIBRARY_PATH", folder.path())
        .env("TALLY_SIMCUDA_DEVICE", folder.path().join("device"))
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn each_byte_is_answered_once_the_device_has_run_something() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    std::os::unix::fs::symlink(library(), folder.path().join("libcuda.so.1")).unwrap();
    let mut child = start(&folder);
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    for byte in *b"abc" {
        input.write_all(&[byte]).unwrap();
        let mut answer = [0];
        output.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [byte]);
    }
    drop(input);
    let mut rest = Vec::new();
    output.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "one answer a byte");
    assert!(child.wait().unwrap().success());
}

#[test]
fn without_a_driver_it_says_so() {
    let folder = tempfile::tempdir().unwrap();
    // No library of that name: an empty file stands before any that the machine may have.
    std::fs::write(folder.path().join("libcuda.so.1"), "").unwrap();
    std::fs::write(folder.path().join("libcuda.so"), "").unwrap();
    let output = start(&folder).wait_with_output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("libcuda.so.1 cannot be loaded"), "{errors}");
}
