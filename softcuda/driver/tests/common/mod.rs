//! Runs tests in child processes that find the software device as their
//! `libcuda.so.1`.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod cuda;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// No test is about speed: this only turns a hang into a failure.
pub const HANG: Duration = Duration::from_secs(120);

/// A device of its own for a test: its library folder and device file.
pub struct Device {
    pub dir: tempfile::TempDir,
    pub sms: u32,
}

impl Device {
    /// Lays out a folder with `libcuda.so.1` and room for a device file.
    pub fn new(sms: u32) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a folder in /dev/shm");
        let library = built_library();
        for name in ["libcuda.so.1", "libcuda.so"] {
            std::os::unix::fs::symlink(&library, dir.path().join(name)).unwrap();
        }
        Self { dir, sms }
    }

    /// `command` on this device.
    pub fn on(&self, command: &Command) -> Command {
        let mut own = Command::new(command.get_program());
        own.args(command.get_args());
        own.env("LD_LIBRARY_PATH", self.dir.path())
            .env("TALLY_SOFTCUDA_DEVICE", self.dir.path().join("device"))
            .env("TALLY_SOFTCUDA_SMS", self.sms.to_string())
            .env("TALLY_SOFTCUDA_MEMORY_MIB", "64");
        own
    }
}

/// The cdylib of this build: beside the test's own executable.
fn built_library() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let profile = own.parent().and_then(Path::parent).unwrap();
    let places = [profile.join("deps"), profile.to_owned()];
    let found = places.iter().map(|p| p.join("libtally_softcuda.so")).find(|p| p.exists());
    found.unwrap_or_else(|| panic!("no libtally_softcuda.so in {}", profile.display()))
}

/// Folder of the test kernels.
pub fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels")
}

/// Waits for `child`, at most [`HANG`].
pub fn wait(child: &mut Child, what: &str) -> ExitStatus {
    let deadline = Instant::now() + HANG;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{what} hangs");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Runs `command` to its end and returns what it printed.
pub fn output(command: &mut Command, what: &str) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let status = wait(&mut child, what);
    let mut output = child.wait_with_output().unwrap();
    output.status = status;
    output
}

const INSIDE: &str = "SOFTCUDA_TEST_INSIDE";

/// Runs the test `name` in a child process on a device of `sms` SMs, or its
/// body if this is the child.
pub fn on_device(name: &str, sms: u32, body: impl FnOnce()) {
    on_device_with(name, sms, &[], body);
}

/// The same with more in the environment.
pub fn on_device_with(name: &str, sms: u32, env: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    let device = Device::new(sms);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]);
    let env = env.iter().copied().chain([(INSIDE, "1")]);
    let run = output(device.on(&command).envs(env), name);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        run.status.success() && text(&run.stdout).contains("1 passed"),
        "{name} failed in the child ({}):\n{}{}",
        run.status,
        text(&run.stdout),
        text(&run.stderr)
    );
}
