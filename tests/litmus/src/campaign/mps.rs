//! An MPS daemon of a campaign's own, for programs that run without Tally.

use anyhow::{Context, Result, ensure};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const CONTROL: &str = "nvidia-cuda-mps-control";

/// An MPS control daemon, stopped when dropped.
pub struct Daemon {
    folder: PathBuf,
}

impl Daemon {
    /// Starts one whose pipes and logs are in `folder`.
    ///
    /// # Errors
    /// If there is no MPS, or it does not start.
    pub fn start(folder: &Path) -> Result<Self> {
        let daemon = Self { folder: folder.to_owned() };
        let mut control = Command::new(CONTROL);
        daemon.reach(&mut control);
        let status = control.arg("-d").status().with_context(|| format!("starting {CONTROL}"))?;
        ensure!(status.success(), "{CONTROL} -d: {status}");
        Ok(daemon)
    }

    /// Makes a program one of its clients.
    pub fn reach(&self, command: &mut Command) {
        command.env("CUDA_MPS_PIPE_DIRECTORY", &self.folder);
        command.env("CUDA_MPS_LOG_DIRECTORY", &self.folder);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let mut control = Command::new(CONTROL);
        self.reach(&mut control);
        let mut quit = || -> std::io::Result<()> {
            let mut child = control.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
            if let Some(mut input) = child.stdin.take() {
                input.write_all(b"quit -t 10\n")?;
            }
            child.wait().map(drop)
        };
        if let Err(error) = quit() {
            eprintln!("{CONTROL} could not be told to quit: {error}");
        }
    }
}
