//! The program on the software device.

use cudarc::driver::CudaContext;
use std::io::{BufReader, Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Path of the software device's library.
fn library() -> PathBuf {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let places = [deps.join("libtally_softcuda.so"), deps.join("../libtally_softcuda.so")];
    let newest = places.iter().filter_map(|p| Some((p.metadata().ok()?.modified().ok()?, p))).max();
    newest.expect("no libtally_softcuda.so: build tally-softcuda as well").1.canonicalize().unwrap()
}

fn start(folder: &tempfile::TempDir) -> Child {
    on_device(folder, Command::new(env!("CARGO_BIN_EXE_tally-refresh")))
}

fn on_device(folder: &tempfile::TempDir, mut program: Command) -> Child {
    program
        .env("LD_LIBRARY_PATH", folder.path())
        .env("TALLY_SOFTCUDA_DEVICE", folder.path().join("device"))
        .env("TALLY_SOFTCUDA_MEMORY_MIB", "64")
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn with_device() -> tempfile::TempDir {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    std::os::unix::fs::symlink(library(), folder.path().join("libcuda.so.1")).unwrap();
    folder
}

#[test]
fn each_byte_is_answered_once_the_device_has_run_something() {
    let folder = with_device();
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

/// Another program, in a process of its own: all but a few MiB of the device's memory.
const ENV_FILLS: &str = "TALLY_TEST_FILLS";

#[test]
fn it_ends_where_memory_is_short() {
    if std::env::var_os(ENV_FILLS).is_some() {
        let context = CudaContext::new(0).unwrap();
        let bytes = context.mem_get_info().unwrap().0 - (2 << 20);
        let _all = context.default_stream().alloc_zeros::<u8>(bytes).unwrap();
        println!("@");
        // Until the test is through.
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        return;
    }
    let folder = with_device();
    let mut child = start(&folder);
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    input.write_all(b"a").unwrap();
    output.read_exact(&mut [0]).unwrap();
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["it_ends_where_memory_is_short", "--exact", "--nocapture"]).env(ENV_FILLS, "1");
    let mut other = on_device(&folder, other);
    let mut said = BufReader::new(other.stdout.take().unwrap()).bytes();
    assert!(said.any(|byte| byte.unwrap() == b'@'), "the other program has the memory");
    input.write_all(b"b").unwrap();
    let ended = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && errors.contains("of 64 MiB of a GPU's memory"), "{errors}");
    drop(other.stdin.take());
    assert!(other.wait().unwrap().success());
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
