//! A device, a socket and a scratch folder, and what is started there.

use crate::process::{Process, wait_until};
use crate::status::Status;
use crate::{Artefacts, status};
use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// How long a core may take to listen: it compiles its policy first.
const CORE_START_MAX: Duration = Duration::from_secs(60);
/// How long a `tallyctl` call may take.
const CTL_MAX: Duration = Duration::from_secs(60);

/// Names a library that is to be preloaded into every program of a scene but the core and `tallyctl`.
pub const ENV_PRELOAD: &str = "TALLY_TEST_PRELOAD";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The software device of this repository with so many SMs.
    Software {
        /// CPU threads that execute blocks, over all processes.
        sms: u32,
    },
    /// This machine's NVIDIA GPU.
    Cuda,
}

impl Device {
    /// The software device, leaving one CPU to the programs and the core.
    pub fn software() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        Device::Software { sms: cpus.saturating_sub(1).clamp(1, 4) }
    }
}

/// What a client asks to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    High,
    BestEffort,
}

/// One device and one socket; everything started here is gone when it is.
pub struct Scene {
    artefacts: Artefacts,
    /// Folder of the socket and all outputs.
    dir: tempfile::TempDir,
    /// Where the software device's file is: in memory.
    device_dir: tempfile::TempDir,
    device: Device,
    serial: std::cell::Cell<u32>,
}

impl Scene {
    /// An empty scene on `device`.
    ///
    /// # Errors
    /// If something that it needs was not built, or a folder cannot be made.
    pub fn new(artefacts: &Artefacts, device: Device) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("tally-scene-").tempdir()?;
        let device_dir = tempfile::Builder::new()
            .prefix("tally-device-")
            .tempdir_in("/dev/shm")
            .or_else(|_| tempfile::tempdir())?;
        if device != Device::Cuda {
            let driver = artefacts.file("libtally_softcuda.so")?;
            let driver = std::fs::canonicalize(driver)?;
            std::fs::create_dir(dir.path().join("lib"))?;
            for name in ["libcuda.so.1", "libcuda.so"] {
                std::os::unix::fs::symlink(&driver, dir.path().join("lib").join(name))?;
            }
        }
        let artefacts = artefacts.clone();
        Ok(Self { artefacts, dir, device_dir, device, serial: 0.into() })
    }

    /// Scratch folder, deleted with the scene.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The programs and libraries that the scene runs.
    pub fn artefacts(&self) -> &Artefacts {
        &self.artefacts
    }

    /// Path of the socket where clients register.
    pub fn socket(&self) -> PathBuf {
        self.dir().join("clients/core.sock")
    }

    /// Path of the socket where the core takes admin requests.
    pub fn admin_socket(&self) -> PathBuf {
        self.dir().join("admin/core.sock")
    }

    /// Folder to link a C program's `-lcuda` from; software device only.
    pub fn driver_dir(&self) -> PathBuf {
        self.dir().join("lib")
    }

    /// A program on this scene's device, told where the core is, not preloaded.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command.env("TALLY_SOCKET", self.socket());
        for name in ["LD_PRELOAD", "TALLY_PRIORITY", "TALLY_NAME", "TALLY_LABELS", "TALLY_FAIL"] {
            command.env_remove(name);
        }
        let own = program.as_ref().file_name();
        if let Some(library) = std::env::var_os(ENV_PRELOAD)
            && !["tally-core", "tallyctl"].iter().any(|name| own == Some(name.as_ref()))
        {
            command.env("LD_PRELOAD", library);
        }
        if let Device::Software { sms } = self.device {
            let mut path = OsString::from(self.driver_dir());
            if let Some(old) = std::env::var_os("LD_LIBRARY_PATH").filter(|old| !old.is_empty()) {
                path.push(":");
                path.push(old);
            }
            command
                .env("LD_LIBRARY_PATH", path)
                .env("TALLY_SOFTCUDA_DEVICE", self.device_dir.path().join("device"))
                .env("TALLY_SOFTCUDA_SMS", sms.to_string());
        }
        command
    }

    /// One of the programs that were built, on this scene's device.
    ///
    /// # Errors
    /// If it was not built.
    pub fn program(&self, name: &str) -> Result<Command> {
        Ok(self.command(self.artefacts.file(name)?))
    }

    /// `program` with its arguments, as `tallyctl run` starts it.
    ///
    /// # Errors
    /// If `tallyctl` was not built.
    pub fn governed(&self, class: Class, name: &str, program: &Command) -> Result<Command> {
        self.governed_with(class, name, &[], program)
    }

    /// A governed command with further options of `tallyctl run`.
    ///
    /// # Errors
    /// If `tallyctl` was not built.
    pub fn governed_with(
        &self,
        class: Class,
        name: &str,
        options: &[&str],
        program: &Command,
    ) -> Result<Command> {
        let mut command = self.program("tallyctl")?;
        let class = match class {
            Class::High => "high",
            Class::BestEffort => "best-effort",
        };
        command.args(["run", "--priority", class, "--name", name]).args(options).arg("--");
        command.arg(program.get_program()).args(program.get_args());
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        Ok(command)
    }

    /// `command` started by another one: that and its arguments come first.
    pub fn wrapped<'a>(wrapper: impl IntoIterator<Item = &'a str>, command: &Command) -> Command {
        let mut words = wrapper.into_iter();
        let mut outer = Command::new(words.next().unwrap_or("env"));
        outer.args(words).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => outer.env(name, value),
                None => outer.env_remove(name),
            };
        }
        outer
    }

    /// Starts a command; its output is kept in the scratch folder.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(&self, name: &str, mut command: Command) -> Result<Process> {
        let serial = self.serial.get();
        self.serial.set(serial + 1);
        Process::start(&format!("{serial}-{name}"), self.dir(), &mut command)
    }

    /// Starts a core with `policy` and further arguments and waits until it answers.
    ///
    /// # Errors
    /// If it ends, or does not answer in time; the message quotes its log.
    pub fn core(&self, policy: &Path, arguments: &[&str]) -> Result<Process> {
        let mut core = self.core_unready(policy, arguments)?;
        wait_until("waiting for the core", CORE_START_MAX, || {
            if let Some(end) = core.poll()? {
                bail!("the core ended with {end}");
            }
            if !self.admin_socket().exists() {
                return Ok(None);
            }
            Ok(self.status().ok())
        })
        .with_context(|| core.quote())?;
        Ok(core)
    }

    /// Starts a core without waiting for it.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn core_unready(&self, policy: &Path, arguments: &[&str]) -> Result<Process> {
        self.start("core", self.core_command(policy, arguments)?)
    }

    /// What starts a core with `policy` and further arguments.
    ///
    /// # Errors
    /// If it was not built.
    pub fn core_command(&self, policy: &Path, arguments: &[&str]) -> Result<Command> {
        let mut command = self.program("tally-core")?;
        command.arg("--socket").arg(self.socket()).arg("--policy").arg(policy).args(arguments);
        // What other scenes' kernels took must not matter here.
        command.env("XDG_STATE_HOME", self.state_dir());
        Ok(command)
    }

    /// Folder where cores keep what outlives them.
    pub fn state_dir(&self) -> PathBuf {
        self.dir().join("state")
    }

    /// `tallyctl` with arguments, to its end.
    ///
    /// # Errors
    /// If it cannot be started or hangs. A bad exit code is not an error here.
    pub fn ctl(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = self.program("tallyctl")?;
        command.args(arguments).stdin(Stdio::null());
        let mut call = self.start("tallyctl", command)?;
        let status = call.wait(CTL_MAX)?;
        let (stdout, stderr) = (call.stdout()?.into_bytes(), call.stderr()?.into_bytes());
        Ok(Output { status, stdout, stderr })
    }

    /// What the core says of itself and its clients.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn status(&self) -> Result<Status> {
        let output = self.ctl(&["status", "--json"])?;
        if !output.status.success() {
            bail!("tallyctl status: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        status::Status::parse(&output.stdout)
    }

    /// Ends a core by SIGTERM and waits for it to have drained.
    ///
    /// # Errors
    /// If it does not end within `limit`, or not well.
    pub fn stop(&self, core: &mut Process, limit: Duration) -> Result<()> {
        core.signal(Signal::TERM)?;
        let status = core.wait(limit)?;
        anyhow::ensure!(status.success(), "the core ended with {status}\n{}", core.quote());
        Ok(())
    }
}
